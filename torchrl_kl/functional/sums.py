"""Sums and means over the steps that count, and over trajectories that follow one another in a row.

*B: any leading shape; T: time, the last dimension. Half precision is added up in float32 at least.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from torchrl_kl.functional.numbers import check_mask, working_dtype


def masked_sum(
    values: Tensor, mask: Tensor | None, *, dim: int | tuple[int, ...] | None = None
) -> Tensor:
    """Sum of the values that count: of a tensor, or along `dim`.

    You may rely on: where the mask is False, no value reaches the sum or its gradient, even NaN.
    The result has the dtype of `values`, and is 0 where nothing counts.

    Args:
        values: one number per step, floating point, shape (*B).
        mask: True where a step counts, boolean, shape (*B). None: everywhere.
        dim: the dimension or dimensions to sum over. None: all of them.

    Raises:
        TypeError: if the values are not floating point.
        ValueError: if the mask is not boolean of the shape of the values.

    Example:
        >>> import torch
        >>> from torchrl_kl import masked_sum
        >>> values = torch.tensor([[1.0, 2.0], [3.0, torch.nan]])
        >>> masked_sum(values, ~values.isnan(), dim=-1)
        tensor([3., 3.])
    """
    return _sum_counted(values, mask, dim).to(values.dtype)


def masked_mean(
    values: Tensor, mask: Tensor | None, *, dim: int | tuple[int, ...] | None = None
) -> Tensor:
    """Mean of the values that count: of a tensor, or along `dim`.

    You may rely on: every value that counts has the same weight, whatever its row. Arguments, dtype
    and errors are as in `masked_sum`; a mean of nothing is a ValueError too.

    Example:
        >>> import torch
        >>> from torchrl_kl import masked_mean
        >>> values = torch.tensor([[1.0, 2.0], [6.0, torch.nan]])
        >>> masked_mean(values, ~values.isnan())
        tensor(3.)
    """
    total = _sum_counted(values, mask, dim)
    counts = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
    # Like `total`, the shape of `values` without `dim`.
    number = counts.sum(dim)
    empty = int((number == 0).sum())
    if empty > 0:
        raise ValueError(
            f"`mask` must be True somewhere in each mean, got {empty} of {number.numel()} means "
            f"over `values` of shape {tuple(values.shape)} with nothing that counts: leave such "
            "rows out, or use `masked_sum`."
        )
    return (total / number).to(values.dtype)


def sum_over_trajectories(
    values: Tensor, done: Tensor, *, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Total of the values of each trajectory, which ends at `done`, where the next one begins.

    You may rely on: the totals add up to the sum of all values that count, and each carries the
    gradient of its steps. The first trajectory of a row may have begun before the row.

    Args:
        values: one number per step, floating point, shape (*B, T), time last.
        done: True at the last step of a trajectory, masked or not, boolean, shape (*B, T).
        mask: True where a step counts, boolean, shape (*B, T). Elsewhere a value is 0, even NaN.

    Returns:
        The totals (N,), row by row and in the order of time, and `complete` (N,), False where the
        row ended before the trajectory did. A trajectory without a step that counts is left out.

    Raises:
        TypeError, ValueError: as `masked_sum` does; also if the values have no dimension.

    Example:
        >>> import torch
        >>> from torchrl_kl import sum_over_trajectories
        >>> done = torch.tensor([[False, True, False], [True, False, True]])
        >>> sum_over_trajectories(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), done)
        (tensor([ 3.,  3.,  4., 11.]), tensor([ True, False,  True,  True]))
    """
    _check_rows(values, "done", done)
    check_mask(mask, values.shape, "`values`")
    ends = done.clone()
    ends[..., -1:] = True
    ends = ends.flatten()
    # (*B * T,): the number of the trajectory of each step, i.e. how many have ended before it.
    index = ends.cumsum(0) - ends.long()
    counts = torch.ones_like(ends) if mask is None else mask.flatten()
    number = index.new_zeros(int(ends.sum())).index_add(0, index, counts.long())
    addends = torch.where(counts, values.flatten(), 0.0).double()
    totals = addends.new_zeros(len(number)).index_add(0, index, addends).to(values.dtype)
    complete = done.flatten()[ends]
    return totals[number > 0], complete[number > 0]


def running_sum(values: Tensor, ends: Tensor, *, initial: Tensor | None = None) -> Tensor:
    """At each step, the sum over its trajectory up to and including that step, (*B, T).

    `ends`, (*B, T), is True at the last step of a trajectory; the first one of each row begins with
    `initial`, (*B). No trajectory changes another, even if it is infinite. On the CPU the result is
    bit for bit that of a loop that adds up in float64 and rounds each sum, as `torch.cumsum` does.
    """
    _check_rows(values, "ends", ends)
    addends = values.to(working_dtype(values.dtype))
    # Added to the first step, so that the order of additions is that of one long row.
    if initial is not None:
        first = addends[..., :1] + initial.to(addends).unsqueeze(-1)
        addends = torch.cat([first, addends[..., 1:]], -1)
    if not ends[..., :-1].any():  # one trajectory in each row, as in batches of responses
        return addends.cumsum(-1).to(values.dtype)
    running = _sum_trajectories(addends.flatten(), _begins(ends).flatten())
    return running.reshape(values.shape).to(values.dtype)


def _sum_trajectories(values: Tensor, begins: Tensor) -> Tensor:
    """Running sums of (N,) values; trajectories begin at the first one and wherever `begins`."""
    if not len(values):
        return values
    starts = begins.nonzero().squeeze(-1)  # (M,)
    trajectory = begins.cumsum(0) - 1  # the number of each step's trajectory, (N,)
    step = torch.arange(len(values), device=values.device) - starts[trajectory]
    longest = int(step.max()) + 1
    # One table (M, longest) would waste memory: treat the long ones and the short ones apart.
    if len(starts) * longest > 4 * len(values):
        lengths = starts.diff(append=starts.new_tensor([len(values)]))
        long, running = (lengths > longest // 2)[trajectory], torch.empty_like(values)
        for part in (long, ~long):
            running[part] = _sum_trajectories(values[part], begins[part])
        return running
    # A cumulative sum over the whole row would carry infinities, and rounding, into the next one.
    place = trajectory * longest + step  # in a table with a row for each trajectory
    table = values.new_zeros(len(starts) * longest).scatter(0, place, values)
    return table.reshape(-1, longest).cumsum(-1).flatten()[place]


def sum_rows(values: Tensor, cuts: Tensor, joined: Mapping[int, int]) -> Tensor:
    """Running sums of values (2, R, T, F) up to each cut, (R, T, F).

    `joined`: by row, the earlier row that it continues, unless the last step of that row is a cut.
    """
    # `running_sum` takes time as the last dimension.
    values, cuts = values.permute(0, 3, 1, 2), cuts.permute(2, 0, 1)  # (2, F, R, T), (F, R, T)
    if not joined:
        return running_sum(values, cuts.expand_as(values)).permute(0, 2, 3, 1)
    # All rows in one, in which those that go on with one another are neighbours.
    head = list(range(cuts.shape[1]))
    for row, earlier in joined.items():
        head[row] = head[earlier]
    order = sorted(range(len(head)), key=head.__getitem__)
    cuts = cuts.clone()
    cuts[:, sorted({*order} - {*joined.values()}), -1] = True
    sums = torch.empty_like(values)
    values, cuts = (each[..., order, :].flatten(-2) for each in (values, cuts))
    sums[..., order, :] = running_sum(values, cuts.expand_as(values)).view_as(sums)
    return sums.permute(0, 2, 3, 1)


def sum_before(values: Tensor, ends: Tensor) -> Tensor:
    """At each step, the sum over the earlier steps of its trajectory; else as `running_sum`."""
    # By a shift, not as `running - values`, which is NaN at an infinity.
    running = running_sum(values, ends)
    shifted = torch.cat([torch.zeros_like(running[..., :1]), running[..., :-1]], -1)
    return torch.where(_begins(ends), 0.0, shifted)


def sum_after(values: Tensor, ends: Tensor) -> Tensor:
    """At each step, the sum over the later steps of its trajectory; else as `running_sum`."""
    _check_rows(values, "ends", ends)
    # Backwards in time a trajectory ends where it began.
    return sum_before(values.flip(-1), _begins(ends).flip(-1)).flip(-1)


def _begins(ends: Tensor) -> Tensor:
    """True at the first step of each trajectory, (*B, T): after an end or at a row's start."""
    return torch.cat([torch.ones_like(ends[..., :1]), ends[..., :-1]], -1)


def _sum_counted(values: Tensor, mask: Tensor | None, dim: int | tuple[int, ...] | None) -> Tensor:
    _check_values(values)
    check_mask(mask, values.shape, "`values`")
    # Not `values * mask`: NaN * 0 is NaN, in the sum and in its gradient.
    if mask is not None:
        values = torch.where(mask, values, 0.0)
    return values.sum(dim, dtype=working_dtype(values.dtype))


def _check_rows(values: Tensor, name: str, ends: Tensor) -> None:
    _check_values(values)
    if values.ndim == 0:
        raise ValueError("`values` must have time as its last dimension, got a 0-dim tensor.")
    check_mask(ends, values.shape, "`values`", name=name, means="the last step of a trajectory")


def _check_values(values: Tensor) -> None:
    if not isinstance(values, Tensor):
        raise TypeError(f"`values` must be a tensor, got {type(values).__name__}.")
    if not values.is_floating_point():
        raise TypeError(f"`values` must be floating point, got {values.dtype}: use `.float()`.")
