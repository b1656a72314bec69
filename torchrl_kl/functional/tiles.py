"""Categorical distributions whose logits are made a few rows at a time, and dropped.

Axes: *B the batch, R its rows (*B flattened), K those of a tile, H width of a state, V actions.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributions import Categorical, Distribution, OneHotCategorical
from torch.utils.checkpoint import checkpoint

from torchrl_kl.functional.distributions import log_probs_of

_LOWEST = -1e30  # for a log-probability of -inf, times a probability of 0


class TiledCategorical(Distribution):
    """A categorical distribution (*B) of which only hidden states are held, not the logits.

    Log-probs, entropy and KL are computed in tiles of `size` rows, again in the backward pass, and
    have one derivative. `hidden` is (R, H); `tile` makes logits (K, V), at least float32, of K rows
    of it; `kind` is a distribution of whole logits, by which tiles are sampled.
    """

    arg_constraints = {}  # noqa: RUF012

    def __init__(
        self,
        hidden: Tensor,
        tile: Callable[[Tensor], Tensor],
        batch_shape: torch.Size,
        size: int,
        kind: Callable[[Tensor], Any],
    ):
        grad = torch.is_grad_enabled()

        def now(hidden: Tensor) -> Tensor:
            with torch.set_grad_enabled(grad and torch.is_grad_enabled()):
                return tile(hidden)

        self.hidden, self.tile, self.size, self._kind, self._grad = hidden, now, size, kind, grad
        self.beside: Distribution | None = None  # to which the KL is wanted with the log-probs
        self._found: list[Tensor] = []  # the entropy, or else that KL
        super().__init__(batch_shape, validate_args=False)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-probs of actions (*B), nats."""
        if not (self._grad and torch.is_grad_enabled()):
            return figures(self, value)[0]
        # With what a loss may want next, from the same tiles.
        log_prob, *self._found = figures(self, value, self.beside, entropy=self.beside is None)
        return log_prob

    def entropy(self) -> Tensor:
        """Nats, (*B)."""
        known = self._found if self.beside is None else []
        return (known or figures(self, entropy=True))[0]

    def kl_to(self, reference: Distribution) -> Tensor:
        """KL(self || reference), nats, (*B)."""
        known = self._found if reference is self.beside else []
        return (known or figures(self, reference=reference))[0]

    @property
    def logits(self) -> Tensor:
        """All log-probs, (*B, V)."""
        return over_tiles(lambda logits: logits().log_softmax(-1), self)[0]

    @property
    def probs(self) -> Tensor:
        """All probabilities, (*B, V)."""
        return self.logits.exp()

    @torch.no_grad()
    def sample(self, sample_shape: torch.Size = torch.Size()) -> Tensor:  # noqa: B008
        """Actions, (*sample_shape, *B)."""
        shape = torch.Size([torch.Size(sample_shape).numel()])
        (drawn,) = over_tiles(lambda logits: self._kind(logits()).sample(shape).mT, self)
        return drawn.movedim(-1, 0).reshape(*sample_shape, *self.batch_shape)

    @property
    @torch.no_grad()
    def mode(self) -> Tensor:
        """The most likely actions, (*B)."""
        return over_tiles(lambda logits: logits().argmax(-1), self)[0]

    deterministic_sample = mode


def over_tiles(fn: Callable[..., Any], *parts: Distribution | Tensor) -> list[Tensor]:
    """What `fn` computes of tiles, one tensor or several, joined to (*B, ...).

    For each distribution it gets a function that makes logits (K, V), for each tensor (*B, ...) its
    rows.
    """
    tiled = [part for part in parts if isinstance(part, TiledCategorical)]
    shape, size = tiled[0].batch_shape, min(part.size for part in tiled)
    makers, rows = zip(*(_split(part, len(shape)) for part in parts), strict=True)

    def tile(*rows: Tensor) -> tuple[Tensor, ...]:
        if rows[0].device.type == "cpu":
            _return_gaps()
        pairs = zip(makers, rows, strict=True)
        found = fn(*(row if make is None else lambda m=make, r=row: m(r) for make, row in pairs))
        return (found,) if isinstance(found, Tensor) else found

    found = [
        checkpoint(tile, *each, use_reentrant=False) if torch.is_grad_enabled() else tile(*each)
        for each in zip(*(each.split(size) for each in rows), strict=True)
    ]
    joined = map(torch.cat, zip(*found, strict=True))
    return [each.view(*shape, *each.shape[1:]) for each in joined]


def _split(part: Distribution | Tensor, n_batch: int) -> tuple[Callable | None, Tensor]:
    """What makes the logits of rows, if anything, and the rows."""
    if isinstance(part, TiledCategorical):
        return part.tile, part.hidden
    if isinstance(part, Tensor):
        return None, part.flatten(0, n_batch - 1)
    if isinstance(part, Categorical | OneHotCategorical):
        return (lambda rows: rows), log_probs_of(part).flatten(0, n_batch - 1)
    raise TypeError(f"`policy` and `reference` must be alike, got {type(part).__name__}.")


@cache
def _trim() -> Any:
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    return getattr(libc, "malloc_trim", None)


def _return_gaps() -> None:
    """Returns memory that glibc holds between tensors to the system, in less than a millisecond."""
    # The tensors of a tile do not fit into the gaps that those of the last one left.
    if (trim := _trim()) is not None:
        trim(0)


def kl_of_tiles(policy: Distribution, reference: Distribution, mask: Tensor | None) -> Tensor:
    """KL(policy || reference) of shape `batch_shape`, where one of them is tiled."""
    if policy.batch_shape != reference.batch_shape:
        raise ValueError(
            "`policy` and `reference` must have the same batch_shape, got "
            f"{tuple(policy.batch_shape)} and {tuple(reference.batch_shape)}."
        )
    if isinstance(policy, TiledCategorical):
        kl = policy.kl_to(reference)
    else:
        (kl,) = figures(policy, reference=reference)
    return kl if mask is None else torch.where(mask, kl, 0.0)


def figures(
    policy: Distribution | Tensor,
    action: Tensor | None = None,
    reference: Distribution | None = None,
    *,
    entropy: bool = False,
) -> list[Tensor]:
    """The log-prob of actions (*B), the entropy, KL(policy || reference): those asked for, (*B).

    With both an action and a reference, its log-prob under the reference follows.
    """
    entries = {"policy": policy, "action": action, "reference": reference}
    parts = {name: part for name, part in entries.items() if part is not None}

    def compute(*rows: Any) -> tuple[Tensor, ...]:
        given = dict(zip(parts, rows, strict=True))
        ref_log_probs = None
        if "reference" in given:  # first, so that its logits are no longer there
            ref_log_probs = given["reference"]().log_softmax(-1)
        logits = given["policy"] if isinstance(policy, Tensor) else given["policy"]()
        found = _Figures.apply(logits, given.get("action"), ref_log_probs, entropy)
        return tuple(each for each in found if each is not None)

    return over_tiles(compute, *parts.values())


class _Figures(torch.autograd.Function):
    """The figures of a tile in few passes over it, and their gradient in closed form."""

    @staticmethod
    def forward(ctx, logits, action, ref_log_probs, entropy):
        ctx.set_materialize_grads(False)
        log_probs = logits.log_softmax(-1)
        log_prob = ref_log_prob = entropies = kl = kl_sum = ratio = None
        if action is not None:
            action = action.unsqueeze(-1)
            log_prob = log_probs.gather(-1, action).squeeze(-1)
        if entropy:
            entropies = log_probs.exp().mul_(log_probs.clamp(min=_LOWEST)).sum(-1).neg_()
        if ref_log_probs is not None:
            if action is not None:
                ref_log_prob = ref_log_probs.gather(-1, action).squeeze(-1)
                ctx.mark_non_differentiable(ref_log_prob)
            if ctx.needs_input_grad[2] or ref_log_probs.dtype != log_probs.dtype:
                ratio = log_probs - ref_log_probs
            else:  # in its memory
                ratio = ref_log_probs.neg_().add_(log_probs)
            kl = kl_sum = log_probs.exp().mul(ratio).sum(-1)
            if not kl.isfinite().all():  # as in `split_log_ratio`
                drawn = log_probs != -torch.inf
                infinite = drawn & (ratio == torch.inf)
                ratio = ratio.masked_fill(infinite | ~drawn, 0.0)
                kl_sum = log_probs.exp().mul(ratio).sum(-1)
                kl = torch.where(infinite.any(-1), torch.inf, kl_sum)
        ctx.save_for_backward(log_probs, action, ratio, entropies, kl, kl_sum)
        return log_prob, entropies, kl, ref_log_prob

    @staticmethod
    @once_differentiable
    def backward(ctx, of_log_prob, of_entropy, of_kl, _):
        # With p the probabilities, l their logarithms, r the log-ratio and a the action, the
        # gradients are 1[a] - p of the log-prob, -p (l + H) of the entropy, p (r - KL) of the KL.
        log_probs, action, ratio, entropies, kl, kl_sum = ctx.saved_tensors
        of_logits, factor, of_reference = log_probs.exp(), 0.0, None
        if of_kl is not None:
            of_kl = torch.where(kl == torch.inf, 0.0, of_kl).unsqueeze(-1)
            factor = (ratio - kl_sum.unsqueeze(-1)).mul_(of_kl)
            if ctx.needs_input_grad[2]:
                of_reference = -of_logits * of_kl
        if of_entropy is not None:
            term = log_probs.clamp(min=_LOWEST).add_(entropies.unsqueeze(-1))
            factor = term.mul_(-of_entropy.unsqueeze(-1)).add_(factor)
        if of_log_prob is None:
            return of_logits.mul_(factor), None, of_reference, None
        of_log_prob = of_log_prob.unsqueeze(-1)
        of_logits.mul_(factor - of_log_prob if of_kl is None else factor.sub_(of_log_prob))
        return of_logits.scatter_add_(-1, action, of_log_prob), None, of_reference, None
