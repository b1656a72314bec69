"""Categorical distributions whose logits are made a few rows at a time, and dropped.

Axes: *B the batch, R its rows (*B flattened), K those of a tile, H width of a state, V actions.
"""

import ctypes
import sys
from collections.abc import Callable, Sequence
from contextlib import ContextDecorator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution, OneHotCategorical, register_kl
from torch.utils.checkpoint import checkpoint

from torchrl_kl.functional.distributions import columns_of, kl_of_log_probs, log_probs_of
from torchrl_kl.functional.numbers import is_same, widened

# Returns the gaps between tensors, in which no tile fits, to the system; elsewhere does nothing.
_TRIM = getattr(ctypes.CDLL(None) if sys.platform == "linux" else None, "malloc_trim", int)


class Tiles(NamedTuple):
    """What makes a categorical distribution, some rows at a time."""

    hidden: Tensor  # states (R, H)
    make: Callable[[Tensor], Any]  # the distribution of rows (K, H), with log-probs as `logits`
    size: int  # rows of a tile


class TiledCategorical(Distribution):
    """A categorical distribution (*B) of which only hidden states are held, not the logits.

    Log-probs, entropy and KL are computed in tiles of `size` rows, again in the backward pass; see
    `Tiles`, where `tile` is `make`. With log-probs under gradients the same tiles give the entropy
    if the list `reads`, which an actor's distributions share, says that it was read last time.
    """

    arg_constraints = {}  # type: ignore[assignment]  # noqa: RUF012

    def __init__(
        self, hidden: Tensor, tile: Callable, batch_shape: torch.Size, size: int, reads: list[bool]
    ):
        grad = torch.is_grad_enabled()

        def now(rows: Tensor) -> Any:
            with torch.set_grad_enabled(grad and torch.is_grad_enabled()):
                return tile(rows)

        self.tiles = Tiles(hidden, now, size)
        self.known: list[Any] = []  # actions, their log-probs, perhaps the entropy: the last ones
        self.reads = reads
        super().__init__(batch_shape, validate_args=False)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-probs of actions (*B), nats."""
        if torch.is_grad_enabled() and self.known and is_same(self.known[0], value):
            return self.known[1]
        return figures(self, value)[0]

    def entropy(self) -> Tensor:
        """Nats, (*B)."""
        self.reads[0] = True
        return (self.known[2:] or figures(self))[0]

    @property
    def logits(self) -> Tensor:
        """All log-probs, (*B, V)."""
        return over_tiles(lambda dist: dist.logits, dist=self)[0]

    @torch.no_grad()
    def sample(self, sample_shape: torch.Size = torch.Size()) -> Tensor:  # noqa: B008
        """Actions, (*sample_shape, *B)."""
        shape = torch.Size([torch.Size(sample_shape).numel()])
        (drawn,) = over_tiles(lambda dist: dist.sample(shape).mT, dist=self)
        return drawn.movedim(-1, 0).reshape(*sample_shape, *self.batch_shape)

    @property
    @torch.no_grad()
    def mode(self) -> Tensor:
        """The most likely actions, (*B)."""
        return over_tiles(lambda dist: dist.logits.argmax(-1), dist=self)[0]

    deterministic_sample = mode


def as_tiled(dist: Any) -> TiledCategorical:
    """A categorical distribution, or logits (*B, V), as one tile."""
    if isinstance(dist, TiledCategorical):
        return dist
    if not isinstance(dist, Categorical | OneHotCategorical | Tensor):
        raise TypeError(f"`policy` and `reference` must be alike, got {type(dist).__name__}.")
    logits = widened(dist if isinstance(dist, Tensor) else log_probs_of(dist))
    rows = logits.reshape(-1, logits.shape[-1])
    kind = partial(Categorical, None, validate_args=False)
    return TiledCategorical(rows, kind, logits.shape[:-1], max(1, len(rows)), [False])


def within(dist: Any, context: ContextDecorator) -> Any:
    """The distribution, whose lazily computed tiles, if any, run in the context."""
    if isinstance(dist, TiledCategorical):
        dist.tiles = dist.tiles._replace(make=context(dist.tiles.make))
    return dist


def over_log_probs(fn: Callable[..., Any], dist: Any, actions: Tensor) -> Sequence[Tensor]:
    """What `fn` computes of log-probs of all actions, (*B, n_actions), and of some, (*B, ...).

    Of rows (K, ...) where the distribution is tiled; TypeError if it has no such log-probs.
    """
    if isinstance(dist, TiledCategorical):
        return over_tiles(lambda dist, some: fn(dist.logits, some), dist=dist, some=actions)
    # With `indices` a MaskedCategorical has no column for each action.
    if not isinstance(dist, Categorical | OneHotCategorical) or columns_of(dist) is not None:
        raise TypeError(
            "the top k need a Categorical, OneHotCategorical or MaskedCategorical distribution "
            f'(with a mask, not with indices), got {type(dist).__name__}: use `estimator="exact"`.'
        )
    return fn(dist.logits, actions)


def over_tiles(fn: Callable[..., Any], **parts: Any) -> list[Tensor]:
    """What `fn` computes of tiles, one tensor (K, ...) or several, joined to (*B, ...).

    Under the names of the parts it gets a distribution (K) of each that is tiled, and the rows
    (K, ...) of each tensor (*B, ...). Under gradients it computes them again in the backward pass.
    """
    tiled = {name: part for name, part in parts.items() if isinstance(part, TiledCategorical)}
    shape = next(iter(tiled.values())).batch_shape
    tiles = {name: dist.tiles for name, dist in tiled.items()}  # not `dist`, which holds results
    size = min(each.size for each in tiles.values())
    rows = {
        name: tiles[name].hidden if name in tiles else part.reshape(-1, *part.shape[len(shape) :])
        for name, part in parts.items()
    }

    def tile(*values: Tensor) -> Any:
        if values[0].device.type == "cpu":
            _TRIM(0)
        given: dict[str, Any] = dict(zip(rows, values, strict=True))
        given |= {name: each.make(given[name]) for name, each in tiles.items()}
        found = fn(**given)
        return [found] if isinstance(found, Tensor) else found

    found = [
        checkpoint(tile, *values, use_reentrant=False) if torch.is_grad_enabled() else tile(*values)
        for values in zip(*(each.split(size) for each in rows.values()), strict=True)
    ]
    joined = map(torch.cat, zip(*found, strict=True))
    return [each.view(*shape, *each.shape[1:]) for each in joined]


def figures(policy: Any, action: Tensor | None = None, reference: Any = None) -> list[Tensor]:
    """The log-prob of actions (*B), the entropy, KL(policy || reference), (*B) each.

    The log-prob if there is an action, the KL if there is a reference, and last the log-prob under
    the reference if there are both. The entropy without them, or with an action where an entropy
    was read last time; see `TiledCategorical`.
    """
    tiled = as_tiled(policy)
    entropy = action is None and reference is None
    if action is not None and torch.is_grad_enabled():
        entropy, tiled.reads[0] = tiled.reads[0], False

    def compute(policy: Any, action: Tensor | None = None, reference: Any = None) -> list[Tensor]:
        log_probs, found = policy.logits, []
        if action is not None:
            found.append(policy.log_prob(action))
        if entropy:
            entropies = -(log_probs.exp() * log_probs).sum(-1)
            if not entropies.isfinite().all():  # 0 times -inf
                entropies = -kl_of_log_probs(log_probs, torch.zeros_like(log_probs))
            found.append(entropies)
        if reference is not None:
            kl = (log_probs.exp() * (log_probs - reference.logits)).sum(-1)
            if not kl.isfinite().all():
                kl = kl_of_log_probs(log_probs, reference.logits)
            found.append(kl)
            if action is not None:
                found.append(reference.log_prob(action))
        return found

    parts: dict[str, Any] = {"policy": tiled}
    parts |= {} if action is None else {"action": action}
    parts |= {} if reference is None else {"reference": as_tiled(reference)}
    found = over_tiles(compute, **parts)
    if action is not None and torch.is_grad_enabled():
        tiled.known = [action, *found[: 1 + entropy]]
    return found


@register_kl(TiledCategorical, TiledCategorical)
@register_kl(TiledCategorical, Distribution)
@register_kl(Distribution, TiledCategorical)
def _kl_of_tiles(policy: Any, reference: Any) -> Tensor:
    return figures(policy, reference=reference)[0]
