"""Sums and means over the steps that count, and over trajectories that follow one another in a row.

*B: any leading shape; T: time, the last dimension. Sums of half precision are float32.
"""

import torch
from torch import Tensor

from torchrl_kl.functional.numbers import check_mask, check_tensor, widened


def masked_sum(
    values: Tensor, mask: Tensor | None, *, dim: int | tuple[int, ...] | None = None
) -> Tensor:
    """Sum of the values (*B) where the boolean mask (*B) is True, along `dim` or of all.

    You may rely on: where the mask is False, no value reaches the sum or its gradient, even NaN.
    The sum of nothing is 0. TypeError if the values are not floating point, ValueError if the mask
    does not fit them.

    Example:
        >>> import torch
        >>> from torchrl_kl.functional import masked_sum
        >>> values = torch.tensor([[1.0, 2.0], [3.0, torch.nan]])
        >>> masked_sum(values, ~values.isnan(), dim=-1)
        tensor([3., 3.])
    """
    _check_values(values)
    check_mask(mask, values.shape, "`values`")
    # Not `values * mask`: NaN * 0 is NaN, in the sum and in its gradient.
    values = widened(values) if mask is None else torch.where(mask, widened(values), 0.0)
    return values.sum(dim)


def masked_mean(
    values: Tensor, mask: Tensor | None, *, dim: int | tuple[int, ...] | None = None
) -> Tensor:
    """Mean of the values that count, each with the same weight; the rest is as for `masked_sum`.

    A mean of nothing is a ValueError.

    Example:
        >>> import torch
        >>> from torchrl_kl.functional import masked_mean
        >>> values = torch.tensor([[1.0, 2.0], [6.0, torch.nan]])
        >>> masked_mean(values, ~values.isnan())
        tensor(3.)
    """
    total = masked_sum(values, mask, dim=dim)
    number = (torch.ones_like(values) if mask is None else mask).sum(dim, dtype=torch.long)
    if empty := int((number == 0).sum()):
        raise ValueError(
            f"`mask` must be True somewhere in each mean, got {empty} of {number.numel()} means "
            f"over `values` of shape {tuple(values.shape)} with nothing that counts: leave such "
            "rows out, or use `masked_sum`."
        )
    return total / number


def running_sum(values: Tensor, ends: Tensor) -> Tensor:
    """The sum over its trajectory up to each step, (*B, T); `ends` (*B, T): at its last steps."""
    _check_rows(values, ends)
    values = widened(values)
    if not ends[..., :-1].any():  # one trajectory in each row, as in batches of responses
        return values.cumsum(-1)
    # A cumulative sum over the whole row would carry infinities, and rounding, into the next one.
    starts = _begins(ends).flatten().nonzero().squeeze(-1)  # of M trajectories in N steps
    n = values.numel()
    lengths = starts.diff(append=starts.new_tensor([n]))
    longest = int(lengths.max())
    if len(starts) * longest > 16 * n:  # a table with a row for each would waste memory
        running = torch.cat([each.cumsum(0) for each in values.flatten().split(lengths.tolist())])
    else:
        # (M, longest), True where a trajectory has a step.
        has_step = torch.arange(longest, device=values.device) < lengths.unsqueeze(-1)
        table = values.new_zeros(has_step.shape).masked_scatter(has_step, values)
        running = table.cumsum(-1)[has_step]
    return running.reshape(values.shape)


def sum_before(values: Tensor, ends: Tensor) -> Tensor:
    """At each step, the sum over the earlier steps of its trajectory; else as `running_sum`."""
    # By a shift, not as `running - values`, which is NaN at an infinity.
    running = running_sum(values, ends)
    shifted = torch.cat([torch.zeros_like(running[..., :1]), running[..., :-1]], -1)
    return torch.where(_begins(ends), 0.0, shifted)


def sum_after(values: Tensor, ends: Tensor) -> Tensor:
    """At each step, the sum over the later steps of its trajectory; else as `running_sum`."""
    _check_rows(values, ends)
    # Backwards in time, a trajectory ends at its first step.
    return sum_before(values.flip(-1), _begins(ends).flip(-1)).flip(-1)


def _begins(ends: Tensor) -> Tensor:
    """True at the first step of each trajectory, (*B, T): after an end or at a row's start."""
    return torch.cat([torch.ones_like(ends[..., :1]), ends[..., :-1]], -1)


def _check_rows(values: Tensor, ends: Tensor) -> None:
    _check_values(values)
    if values.ndim == 0:
        raise ValueError("`values` must have time as its last dimension, got a 0-dim tensor.")
    check_mask(ends, values.shape, "`values`", name="ends", means="the last step of a trajectory")


def _check_values(values: Tensor) -> None:
    check_tensor("values", values)
    if not values.is_floating_point():
        raise TypeError(f"`values` must be floating point, got {values.dtype}: use `.float()`.")
