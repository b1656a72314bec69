"""Categorical distributions whose logits are made a few rows at a time, and dropped.

Axes: *B the batch, R its rows (*B flattened), K those of a tile, H width of a state, V actions.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributions import Categorical, Distribution, OneHotCategorical
from torch.utils.checkpoint import get_device_states, set_device_states

from torchrl_kl.functional.distributions import kl_of_logits, log_probs_of

_LOWEST = -1e30  # for a log-probability of -inf, times a probability of 0


class Head(NamedTuple):
    """What makes logits (K, V), at least float32, of hidden states (K, H)."""

    logits: Callable[[Tensor], Tensor]
    weights: Sequence[tuple[dict[str, Any], str]]  # that learn: where it reads them

    def learned(self) -> list[Tensor]:
        """The weights that learn, each once."""
        return list({id(held[name]): held[name] for held, name in self.weights}.values())

    @contextmanager
    def detached(self) -> Iterator[list[Tensor]]:
        """Reads others in their place, of which nobody else gets the gradients."""
        before = [held[name] for held, name in self.weights]
        leaves = {id(weight): weight.detach().requires_grad_() for weight in before}
        for (held, name), weight in zip(self.weights, before, strict=True):
            held[name] = leaves[id(weight)]
        try:
            yield list(leaves.values())
        finally:
            for (held, name), weight in zip(self.weights, before, strict=True):
                held[name] = weight


class TiledCategorical(Distribution):
    """A categorical distribution (*B) of which only hidden states are held, not the logits.

    Log-probs, entropy, samples and the KL are made in tiles of `size` rows, each of which is made
    again in the backward pass. They can be differentiated once.

    Args:
        hidden: (R, H).
        head: makes the logits.
        kind: a distribution of whole logits (K, V), by which tiles are sampled.
    """

    arg_constraints = {}  # noqa: RUF012

    def __init__(
        self,
        hidden: Tensor,
        head: Head,
        batch_shape: torch.Size,
        size: int,
        kind: Callable[[Tensor], Any],
    ):
        self.hidden, self.head, self.size, self._kind = hidden, head, size, kind
        self._grad = torch.is_grad_enabled()
        self.context: Callable[[], AbstractContextManager] = nullcontext  # of each tile
        self.beside: TiledCategorical | None = None  # to which the KL is wanted with the log-probs
        self._entropy: Tensor | None = None
        self._kl: Tensor | None = None
        super().__init__(batch_shape, validate_args=False)

    @property
    def learns(self) -> bool:
        """Whether what it makes now has gradients."""
        return self._grad and torch.is_grad_enabled()

    def tile(self, hidden: Tensor) -> Tensor:
        """The logits (K, V) of rows (K, H)."""
        with self.context(), torch.set_grad_enabled(self.learns):
            return self.head.logits(hidden)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-probs of actions (*B), nats."""
        if not self.learns:
            return figures(self, value)[0]
        # With what a loss may want next, from the same tiles.
        log_prob, other, *_ = figures(self, value, self.beside, entropy=self.beside is None)
        if self.beside is None:
            self._entropy = other
        else:
            self._kl = other
        return log_prob

    def entropy(self) -> Tensor:
        """Nats, (*B)."""
        return figures(self, entropy=True)[0] if self._entropy is None else self._entropy

    def kl_to(self, reference: Distribution) -> Tensor:
        """KL(self || reference), nats, (*B)."""
        known = self._kl if reference is self.beside else None
        return figures(self, reference=reference)[0] if known is None else known

    @property
    def logits(self) -> Tensor:
        """All log-probs, (*B, V)."""
        return over_tiles(lambda logits: (logits.log_softmax(-1),), self)[0]

    @property
    def probs(self) -> Tensor:
        """All probabilities, (*B, V)."""
        return self.logits.exp()

    @torch.no_grad()
    def sample(self, sample_shape: torch.Size = torch.Size()) -> Tensor:  # noqa: B008
        """Actions, (*sample_shape, *B)."""
        shape = torch.Size([torch.Size(sample_shape).numel()])
        (drawn,) = over_tiles(lambda logits: (self._kind(logits).sample(shape).mT,), self)
        return drawn.movedim(-1, 0).reshape(*sample_shape, *self.batch_shape)

    @property
    @torch.no_grad()
    def mode(self) -> Tensor:
        """The most likely actions, (*B)."""
        return over_tiles(lambda logits: (logits.argmax(-1),), self)[0]

    deterministic_sample = mode


def over_tiles(
    fn: Callable[..., tuple[Tensor, ...]], dist: TiledCategorical, *values: Tensor
) -> list[Tensor]:
    """What `fn` makes of the logits (K, V) of tiles and of rows of values (*B, ...): (*B, ...)."""
    rows = [dist.hidden, *(value.flatten(0, len(dist.batch_shape) - 1) for value in values)]
    tiles = zip(*(each.split(dist.size) for each in rows), strict=True)
    found = [fn(dist.tile(hidden), *others) for hidden, *others in tiles]
    joined = (torch.cat(each) for each in zip(*found, strict=True))
    return [each.view(*dist.batch_shape, *each.shape[1:]) for each in joined]


def kl_of_tiles(policy: Distribution, reference: Distribution, mask: Tensor | None) -> Tensor:
    """KL(policy || reference) of shape `batch_shape`, where one of them is tiled."""
    if policy.batch_shape != reference.batch_shape:
        raise ValueError(
            "`policy` and `reference` must have the same batch_shape, got "
            f"{tuple(policy.batch_shape)} and {tuple(reference.batch_shape)}."
        )
    ends = _logits_or_tiles(policy), _logits_or_tiles(reference)
    if isinstance(policy, TiledCategorical) and not _learns(ends[1]):
        kl = policy.kl_to(reference)
    elif any(map(_learns, ends)):  # rare, and needs all logits
        kl = kl_of_logits(*(end if isinstance(end, Tensor) else end.logits for end in ends), None)
    else:
        (kl,) = figures(ends[0], reference=reference)
    return kl if mask is None else torch.where(mask, kl, 0.0)


def figures(
    policy: TiledCategorical | Tensor,
    action: Tensor | None = None,
    reference: Distribution | None = None,
    *,
    entropy: bool = False,
) -> list[Tensor]:
    """The log-prob of actions (*B), the entropy, KL(policy || reference): those asked for, (*B).

    With both an action and a reference its log-prob under the reference follows. Only a tiled
    policy gets gradients; it may be whole logits (*B, V) next to a tiled reference.
    """
    other = None if reference is None else _logits_or_tiles(reference)
    tiled = [part for part in (policy, other) if isinstance(part, TiledCategorical)]
    shape, size = tiled[0].batch_shape, min(part.size for part in tiled)
    rows, ref_rows = (_rows(part) for part in (policy, other))
    weights = policy.head.learned() if isinstance(policy, TiledCategorical) else []
    action = None if action is None else action.reshape(-1, 1)
    found = _Figures.apply(policy, other, entropy, size, action, ref_rows, rows, *weights)
    return [each.view(shape) for each in found if each is not None]


def _rows(part: TiledCategorical | Tensor | None) -> Tensor | None:
    if isinstance(part, TiledCategorical):
        return part.hidden
    return None if part is None else part.flatten(0, -2)


def _learns(part: TiledCategorical | Tensor) -> bool:
    if isinstance(part, TiledCategorical):
        return part.learns
    return part.requires_grad and torch.is_grad_enabled()


def _logits_or_tiles(dist: Distribution) -> TiledCategorical | Tensor:
    if isinstance(dist, TiledCategorical):
        return dist
    if not isinstance(dist, Categorical | OneHotCategorical):
        raise TypeError(
            "`policy` and `reference` must both be categorical where one of them is, got "
            f"{type(dist).__name__}."
        )
    return log_probs_of(dist)


class _Space:
    """Memory for what is computed of a tile, used again for the next.

    Asked for it anew, the allocator of a CPU leaves gaps of the size of a tile.
    """

    def __init__(self):
        self._held: dict[str, Tensor] = {}

    def get(self, name: str, like: Tensor) -> Tensor:
        if name not in self._held:  # the first tile is the largest
            self._held[name] = torch.empty_like(like, requires_grad=False)
        return self._held[name][: len(like)]

    def log_probs(self, name: str, logits: Tensor) -> Tensor:
        return torch.log_softmax(logits.detach(), -1, out=self.get(name, logits))

    def probs(self, log_probs: Tensor) -> Tensor:
        return torch.exp(log_probs, out=self.get("probs", log_probs))


class _Figures(torch.autograd.Function):
    """See `figures`. One node for all tiles, whose gradients are in closed form."""

    @staticmethod
    def forward(ctx, policy, reference, entropy, size, action, ref_rows, rows, *weights):
        ctx.set_materialize_grads(False)
        ctx.policy, ctx.reference, ctx.size = policy, reference, size
        ctx.replay, space, found = _Replay(rows), _Space(), []
        for part in _parts(rows, size):
            ref_log_probs = None
            if reference is not None:  # first, so that its logits are no longer there
                ref_log_probs = space.log_probs("reference", _tile(reference, ref_rows[part]))
            log_probs = space.log_probs("policy", _tile(policy, rows[part]))
            actions = None if action is None else action[part]
            values = _values(log_probs, ref_log_probs, actions, entropy, space)
            if not found:
                found = [None if each is None else each.new_empty(len(rows)) for each in values]
            for whole, value in zip(found, values, strict=True):
                if value is not None:
                    whole[part] = value
        *found, ref_log_prob = found
        ctx.mark_non_differentiable(*([] if ref_log_prob is None else [ref_log_prob]))
        ctx.save_for_backward(action, ref_rows, *found, rows, *weights)
        log_prob, entropies, kl, _ = found
        return log_prob, entropies, kl, ref_log_prob

    @staticmethod
    @once_differentiable
    def backward(ctx, of_log_prob, of_entropy, of_kl, _):
        action, ref_rows, _, entropies, kl, kl_sum, rows, *weights = ctx.saved_tensors
        of_rows, of_weights = torch.zeros_like(rows), [torch.zeros_like(w) for w in weights]
        if of_kl is not None:
            of_kl = torch.where(kl == torch.inf, 0.0, of_kl)
        space = _Space()
        with ctx.replay.again(), ctx.policy.head.detached() as leaves:
            for part in _parts(rows, ctx.size):
                factor = None
                if of_kl is not None:
                    factor = space.log_probs("reference", _tile(ctx.reference, ref_rows[part]))
                hidden = rows[part].detach().requires_grad_()
                with torch.enable_grad():
                    logits = ctx.policy.tile(hidden)
                log_probs = space.log_probs("policy", logits)
                # With p the probabilities, l their logarithms, r the log-ratio and a the action,
                # it is 1[a] - p of the log-prob, -p (l + H) of the entropy, p (r - KL) of the KL.
                if of_kl is not None:
                    factor.neg_().add_(log_probs)
                    if not kl[part].isfinite().all():
                        _make_finite(log_probs, factor)
                    factor.sub_(kl_sum[part, None]).mul_(of_kl[part, None])
                if of_entropy is not None:
                    term = space.get("entropy", log_probs)
                    torch.clamp(log_probs, min=_LOWEST, out=term).add_(entropies[part, None])
                    term.mul_(of_entropy[part, None].neg())
                    factor = term if factor is None else factor.add_(term)
                of_logits = log_probs.exp_()
                if of_log_prob is None:
                    of_logits.mul_(factor)
                else:
                    of_action = of_log_prob[part, None]
                    of_logits.mul_(-of_action if factor is None else factor.sub_(of_action))
                    of_logits.scatter_add_(-1, action[part], of_action)
                found = torch.autograd.grad(logits, [hidden, *leaves], of_logits, allow_unused=True)
                of_rows[part] = found[0]
                for total, grad in zip(of_weights, found[1:], strict=True):
                    if grad is not None:
                        total.add_(grad)
                del logits, log_probs, of_logits, found, grad  # before the next tile
                if rows.device.type == "cpu":
                    _return_gaps()
        return *[None] * 6, of_rows, *of_weights


def _tile(part: TiledCategorical | Tensor, rows: Tensor) -> Tensor:
    return part.tile(rows) if isinstance(part, TiledCategorical) else rows


def _parts(rows: Tensor, size: int) -> list[slice]:
    return [slice(first, first + size) for first in range(0, len(rows), size)]


def _values(
    log_probs: Tensor,
    ref_log_probs: Tensor | None,
    action: Tensor | None,
    entropy: bool,
    space: _Space,
) -> list[Tensor | None]:
    """Log-prob, entropy, KL, KL without infinite terms, and log-prob under the reference, (K,)."""
    log_prob = ref_log_prob = entropies = kl = kl_sum = None
    if action is not None:
        log_prob = log_probs.gather(-1, action).squeeze(-1)
    if entropy:
        terms = torch.clamp(log_probs, min=_LOWEST, out=space.get("entropy", log_probs))
        entropies = terms.mul_(space.probs(log_probs)).sum(-1).neg_()
    if ref_log_probs is not None:
        if action is not None:
            ref_log_prob = ref_log_probs.gather(-1, action).squeeze(-1)
        ratio = ref_log_probs.neg_().add_(log_probs)
        kl = kl_sum = space.probs(log_probs).mul_(ratio).sum(-1)
        if not kl.isfinite().all():
            infinite = _make_finite(log_probs, ratio)
            kl_sum = space.probs(log_probs).mul_(ratio).sum(-1)
            kl = torch.where(infinite, torch.inf, kl_sum)
    return [log_prob, entropies, kl, kl_sum, ref_log_prob]


def _make_finite(log_probs: Tensor, ratio: Tensor) -> Tensor:
    """Sets log-ratios that do not count to 0; where one of a row is infinite, (K,).

    As `split_log_ratio` does: an action that the policy cannot draw does not count.
    """
    drawn = log_probs != -torch.inf
    infinite = drawn & (ratio == torch.inf)
    ratio.masked_fill_(infinite | ~drawn, 0.0)
    return infinite.any(-1)


@cache
def _trim() -> Callable[[int], int] | None:
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    return getattr(libc, "malloc_trim", None)


def _return_gaps() -> None:
    """Returns memory that glibc holds between two tensors to the system, in about a millisecond.

    What the model itself allocates for a tile leaves gaps, in which the next does not fit.
    """
    if (trim := _trim()) is not None:
        trim(0)


class _Replay:
    """The random numbers and the autocast of a pass, for the pass that repeats it."""

    def __init__(self, rows: Tensor):
        self._kind = rows.device.type
        self._cpu, (self._devices, self._states) = torch.get_rng_state(), get_device_states(rows)
        self._autocast = torch.is_autocast_enabled(self._kind)
        self._dtype = torch.get_autocast_dtype(self._kind)

    @contextmanager
    def again(self) -> Iterator[None]:
        kind = self._kind
        with (
            torch.random.fork_rng(self._devices, device_type="cuda" if kind == "cpu" else kind),
            torch.autocast(kind, self._dtype, self._autocast),
        ):
            torch.set_rng_state(self._cpu)
            set_device_states(self._devices, self._states)
            yield
