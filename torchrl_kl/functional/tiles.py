"""Categorical distributions whose logits are made a few rows at a time, and dropped.

Axes: *B the batch, R its rows (*B flattened), K those of a tile, H width of a state, V actions.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution, OneHotCategorical
from torch.utils.checkpoint import checkpoint

from torchrl_kl.functional.distributions import check_equal, kl_of_log_probs, log_probs_of

_LOWEST = -1e30  # for a log-probability of -inf, times a probability of 0


class TiledCategorical(Distribution):
    """A categorical distribution (*B) of which only hidden states are held, not the logits.

    Log-probs, entropy and KL are computed in tiles of `size` rows, again in the backward pass.
    `hidden` is (R, H); `tile` makes logits (K, V), at least float32, of K rows of it; `kind` is a
    distribution of whole logits, by which tiles are sampled.
    """

    arg_constraints = {}  # type: ignore[assignment]  # noqa: RUF012

    def __init__(
        self, hidden: Tensor, tile: Callable, batch_shape: torch.Size, size: int, kind: Callable
    ):
        grad = torch.is_grad_enabled()

        def now(hidden: Tensor) -> Tensor:
            with torch.set_grad_enabled(grad and torch.is_grad_enabled()):
                return tile(hidden)

        self.hidden = hidden
        self.tile = now
        self.size = size
        self._kind = kind
        self._grad = grad
        # What a loss may want next is computed with the log-probs, from the same tiles: the
        # entropy, the KL to a reference, or nothing.
        self.also: Distribution | Literal["entropy"] | None = "entropy"
        self._found: list[Tensor] = []
        super().__init__(batch_shape, validate_args=False)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-probs of actions (*B), nats."""
        also = self.also if self._grad and torch.is_grad_enabled() else None
        reference = None if also == "entropy" else also
        log_prob, *self._found = figures(self, value, reference, entropy=also == "entropy")
        return log_prob

    def entropy(self) -> Tensor:
        """Nats, (*B)."""
        known = self._found if self.also == "entropy" else []
        return (known or figures(self, entropy=True))[0]

    def kl_to(self, reference: Distribution) -> Tensor:
        """KL(self || reference), nats, (*B)."""
        known = self._found if self.also is reference else []
        return (known or figures(self, reference=reference))[0]

    @property
    def logits(self) -> Tensor:
        """All log-probs, (*B, V)."""
        return over_tiles(lambda logits: logits().log_softmax(-1), self)[0]

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

    It gets a function that makes logits (K, V) of each distribution, and rows of others (*B, ...).
    """
    tiled = [part for part in parts if isinstance(part, TiledCategorical)]
    shape, size = tiled[0].batch_shape, min(part.size for part in tiled)
    makers, rows = zip(*(_split(part, len(shape)) for part in parts), strict=True)

    def tile(*rows: Tensor) -> tuple[Tensor, ...]:
        if rows[0].device.type == "cpu":
            _trim()(0)
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
    if isinstance(part, Categorical | OneHotCategorical):
        return (lambda rows: rows), log_probs_of(part).flatten(0, n_batch - 1)
    if not isinstance(part, Tensor):
        raise TypeError(f"`policy` and `reference` must be alike, got {type(part).__name__}.")
    return None if part.ndim == n_batch else (lambda rows: rows), part.flatten(0, n_batch - 1)


@cache
def _trim() -> Callable[[int], Any]:
    """What returns the gaps between tensors, in which no tile fits, to the system; else nothing."""
    return getattr(ctypes.CDLL(None) if sys.platform == "linux" else None, "malloc_trim", int)


def kl_of_tiles(policy: Distribution, reference: Distribution, mask: Tensor | None) -> Tensor:
    """KL(policy || reference) of shape `batch_shape`, where one of them is tiled."""
    check_equal("batch_shape", policy, reference, lambda dist: tuple(dist.batch_shape))
    tiled = isinstance(policy, TiledCategorical)
    kl = policy.kl_to(reference) if tiled else figures(policy, reference=reference)[0]
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
    names = [name for name, part in entries.items() if part is not None]

    def compute(*rows: Any) -> list[Tensor]:
        given = dict(zip(names, rows, strict=True))
        log_probs = given["policy"]().log_softmax(-1)
        found, actions = [], None
        if "action" in given:
            actions = given["action"].unsqueeze(-1)
            found.append(log_probs.gather(-1, actions).squeeze(-1))
        if entropy:
            entropies = -(log_probs.exp() * log_probs).sum(-1)
            if not entropies.isfinite().all():  # 0 times -inf
                entropies = -(log_probs.exp() * log_probs.clamp(min=_LOWEST)).sum(-1)
            found.append(entropies)
        if "reference" in given:
            ref_log_probs = given["reference"]().log_softmax(-1)
            kl = (log_probs.exp() * (log_probs - ref_log_probs)).sum(-1)
            if not kl.isfinite().all():
                kl = kl_of_log_probs(log_probs, ref_log_probs)
            found.append(kl)
            if actions is not None:
                found.append(ref_log_probs.gather(-1, actions).squeeze(-1))
        return found

    return over_tiles(compute, *(entries[name] for name in names))
