"""Numbers that must stay exact: float64 state that a cast of the module leaves alone, and checks of arguments."""

from __future__ import annotations

import math
import operator

import torch
from torch import Tensor, nn


class Float64State(nn.Module):
    """A module whose buffers move between devices and keep their dtype: `module.half()` must not round a price."""

    def _apply(self, fn, recurse=True):
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            after = self._buffers[name]
            if buffer is not None and after is not None and after.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(after.device)
        return self


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype to compute in: at least float32, so that half precision is rounded once."""
    return torch.promote_types(dtype, torch.float32)


def check_number(
    name: str,
    value: float,
    *,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
) -> float:
    """`value` as a float; TypeError unless it is a number, ValueError unless finite and within the bounds given."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"`{name}` must be a number, got {type(value).__name__}.")
    bounds = {
        "above": (above, operator.gt),
        "at least": (at_least, operator.ge),
        "below": (below, operator.lt),
        "at most": (at_most, operator.le),
    }
    given = {words: (bound, holds) for words, (bound, holds) in bounds.items() if bound is not None}
    if not (math.isfinite(value) and all(holds(value, bound) for bound, holds in given.values())):
        wanted = " and ".join(
            ["finite", *(f"{words} {bound:g}" for words, (bound, _) in given.items())]
        )
        raise ValueError(f"`{name}` must be {wanted}, got {value}.")
    return float(value)


def check_mask(
    mask: Tensor | None,
    shape: torch.Size,
    of: str,
    *,
    name: str = "mask",
    means: str = "the steps that count",
) -> None:
    if mask is not None and (mask.dtype != torch.bool or mask.shape != shape):
        raise ValueError(
            f"`{name}` must be boolean of the shape of {of}, {tuple(shape)}, got {mask.dtype} of shape "
            f"{tuple(mask.shape)}: True marks {means}."
        )
