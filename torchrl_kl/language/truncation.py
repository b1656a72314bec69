"""Truncated sampling as a part of the policy: which tokens a sampler keeps.

Axes: *B states, V tokens of the vocabulary, K tokens kept at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchrl_kl.functional.numbers import check_count, check_number
from torchrl_kl.functional.tiles import TiledCategorical, over_tiles
from torchrl_kl.language.distribution import NextToken

_DEFAULT_TOP_K = 256


@dataclass(frozen=True)
class Truncation:
    """Keeps the `top_k` most likely tokens, of these top-p's, and of those min-p's."""

    top_k: int
    top_p: float
    min_p: float

    @classmethod
    def of(cls, top_k: int | None, top_p: float | None, min_p: float | None) -> Truncation | None:
        """That of an actor's arguments; None where all tokens are kept."""
        if top_k is None and top_p in (None, 1) and not min_p:
            return None
        top_k = _DEFAULT_TOP_K if top_k is None else check_count("top_k", top_k)
        top_p = 1.0 if top_p is None else check_number("top_p", top_p, above=0, at_most=1)
        min_p = 0.0 if min_p is None else check_number("min_p", min_p, at_least=0, at_most=1)
        return cls(top_k, top_p, min_p)

    @torch.no_grad()
    def keep(self, logits: Any, *, bounded: bool) -> Tensor:
        """The ids kept of logits (*B, V): int32 (*B, K), most likely first, then the first again.

        If `bounded`, K is `top_k`; else V, as all that are tied with the last of these are kept.
        """
        if isinstance(logits, TiledCategorical):
            return over_tiles(lambda dist: self.keep(dist.logits, bounded=True), dist=logits)[0]
        values, ids = logits.topk(min(self.top_k, logits.shape[-1]))
        if bounded:
            values, ids = values.flip(-1), ids.flip(-1)
        else:  # by the same sort, which decides between ties
            values, ids = logits.masked_fill(logits < values[..., -1:], -torch.inf).sort()
        dropped = values == -torch.inf
        if self.top_p < 1:
            dropped = dropped | (values.softmax(-1).cumsum(-1) <= 1 - self.top_p)
        if self.min_p > 0:
            probs = values.masked_fill(dropped, -torch.inf).softmax(-1)
            dropped = dropped | (probs < self.min_p * probs[..., -1:])
        return torch.where(dropped, ids[..., -1:], ids).flip(-1).int()

    def replay(self, logits: Any, record: Tensor | None, action: Tensor) -> tuple[Tensor, Tensor]:
        """The ids kept when tokens (*B) were drawn; where these would not have been kept, (*B).

        Without a record it is computed. At an edge, a sampler that computes other last digits may
        keep another token: the drawn one takes a free place, or that of the least likely one.
        """
        ids = self.keep(logits, bounded=True) if record is None else record
        missing = (ids != action.unsqueeze(-1)).all(-1)
        last = (ids != ids[..., :1]).sum(-1, keepdim=True) + 1
        place = torch.arange(ids.shape[-1], device=ids.device)
        replaced = missing.unsqueeze(-1) & (place == last.clamp(max=ids.shape[-1] - 1))
        return torch.where(replaced, action.unsqueeze(-1).to(ids.dtype), ids), missing


def restrict(logits: Any, ids: Tensor) -> Any:
    """Logits (*B, V) or their tiles, -inf for all tokens but `ids` (*B, K)."""
    if isinstance(logits, TiledCategorical):
        (hidden, make, size), of_rows = logits.tiles, ids.flatten(0, -2)

        def tile(rows: Tensor) -> NextToken:
            return NextToken(restrict(make(hidden[rows]).logits, of_rows[rows]))

        rows = torch.arange(len(hidden), device=ids.device)
        return TiledCategorical(rows, tile, logits.batch_shape, size, logits.reads)
    kept = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, ids.long(), True)
    return logits.masked_fill(~kept, -torch.inf)
