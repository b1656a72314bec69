"""Sums over trajectories that come in pieces: within a batch, across batches, on padded rows.

Axes: R rows of T steps, F values per step (1, or one for each agent).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torchrl_kl.functional.sums import running_sum

_MIN_OPEN = 256  # trajectories that may be open at once, at least
_OPEN_PER_ROW = 64  # and for each row of a batch: that of so many asynchronous workers


class Segments(NamedTuple):
    """How the steps of a batch form trajectories.

    Args:
        done: True at the last step of a trajectory, (R, T, F).
        terminated: the part of `done` that no collector writes by itself, (R, T, F).
        left: True where an agent was done before the step, (R, T, F), or None.
        mask: True where a step counts, (R, T), or None where all do.
        ids: numbers of the trajectories, (R, T), or None.
        is_init: True where a row begins with its trajectory, (R,), or None where that is not known.
        first_states: for each of the given rows, a digest of the state in which the row begins.
        last_states: for each of the given rows, a digest of the state after the given step of it.
    """

    done: Tensor
    terminated: Tensor
    left: Tensor | None
    mask: Tensor | None
    ids: Tensor | None
    is_init: Tensor | None
    first_states: Callable[[list[int]], list[bytes]]
    last_states: Callable[[list[int], list[int]], list[bytes]]


class TrajectorySums(NamedTuple):
    """What `OpenTrajectories.add` gives, in float64.

    `running`: sum of each trajectory up to and including each step, (R, T, F). `finished`: the
    totals of the trajectories that are now known to have ended, (N,).
    """

    running: Tensor
    finished: Tensor


class _Open(NamedTuple):
    """A trajectory that a batch left unfinished.

    `counted`: how many of its steps counted. `whole`: whether its beginning was seen. `ended`:
    whether it is over unless the next batch goes on with it.
    """

    totals: list[float]
    counted: float
    whole: bool
    ended: bool


class OpenTrajectories:
    """Running sums of the trajectories that earlier batches left unfinished.

    A trajectory goes on where its id comes back *and* the row begins in the state in which the
    trajectory was left: ids restart with every collector. It ends where the ids change, or at done
    where there are none. A collector may write an artificial truncation into a batch's last step
    (`set_truncated=True`) while the trajectory goes on, so a truncation there is judged at the next
    call. A termination is an end at once. Trajectories that never go on are dropped, oldest first.
    """

    def __init__(self):
        self._open: dict[tuple[int, bytes], _Open] = {}

    def add(self, values: Tensor, segments: Segments, *, judge: bool = True) -> TrajectorySums:
        """Adds a batch.

        Args:
            values: what is summed, (R, T, F); a step outside the mask counts as 0.
            segments: how its steps form trajectories.
            judge: whether trajectories that were truncated at the end of the last call, and do not
                go on in this one, count as finished.

        Returns:
            The running sums, and the totals of the trajectories that have finished.
        """
        values = values.detach().double()
        counts = torch.ones(values.shape[:2], dtype=torch.bool, device=values.device)
        if segments.mask is not None:
            counts = segments.mask
            values = torch.where(counts.unsqueeze(-1), values, 0.0)
        if not values.numel():
            return TrajectorySums(values, values.new_zeros(0))
        ends, last = _ends(segments, counts)
        carried, finished = self._resume(segments, values, judge)
        running = _running(values, ends, carried.totals)
        # Trajectories without a step that counts, or whose beginning is not known, are not told.
        if segments.mask is None and not carried.counted.any():
            n_counted = torch.ones_like(running)
        else:
            n_counted = _running(
                counts.double()[..., None].expand_as(values), ends, carried.counted
            )
        told = ends & (n_counted > 0)
        if segments.left is not None:  # an agent that left while others go on was told when it left
            told = told & ~segments.left
        finished.append(running[told])
        if segments.ids is not None:
            finished.append(self._suspend(segments, last, running, n_counted))
        return TrajectorySums(running, torch.cat(finished))

    def _resume(
        self, segments: Segments, values: Tensor, judge: bool
    ) -> tuple[_Carried, list[Tensor]]:
        """What each row goes on from; and the totals that are now known to have ended."""
        n_rows, _, n_values = values.shape
        carried = _Carried(values.new_zeros(n_rows, n_values), values.new_zeros(n_rows, n_values))
        if segments.ids is None:
            return carried, []
        known = {key[0] for key in self._open}
        first_ids = segments.ids[:, 0].tolist()
        begins = [False] * n_rows if segments.is_init is None else segments.is_init.tolist()
        rows = [row for row in range(n_rows) if first_ids[row] in known and not begins[row]]
        found = {}
        for row, state in zip(rows, segments.first_states(rows) if rows else [], strict=True):
            left_open = self._open.pop((first_ids[row], state), None)
            if left_open is not None:
                found[row] = left_open
                carried.totals[row] = values.new_tensor(left_open.totals)
                carried.counted[row] = left_open.counted if left_open.whole else -torch.inf
        if (
            segments.is_init is not None
        ):  # a row that neither begins nor goes on: its start is unknown
            unknown = [row for row in range(n_rows) if not begins[row] and row not in found]
            carried.counted[unknown] = -torch.inf
        ended = [key for key, left_open in self._open.items() if left_open.ended] if judge else []
        over = [self._open.pop(key) for key in ended]
        totals = [t for one in over if one.whole and one.counted > 0 for t in one.totals]
        return carried, [values.new_tensor(totals)]

    def _suspend(
        self, segments: Segments, last: Tensor, running: Tensor, n_counted: Tensor
    ) -> Tensor:
        """Keeps what the rows leave open; returns the totals that have ended, (N,).

        A collector begins a new id as soon as any agent is done: they all end with their id.
        """
        rows = torch.arange(len(last), device=last.device)
        terminated = segments.terminated[rows, last].any(-1)
        done = segments.done[rows, last].any(-1).tolist()
        totals, counted = running[rows, last], n_counted[rows, last]
        open_rows = (~terminated).nonzero().squeeze(-1).tolist()
        if open_rows:
            steps = last.tolist()
            states = segments.last_states(open_rows, [steps[row] for row in open_rows])
            ids = segments.ids[rows, last].tolist()  # type: ignore[index]
            table, counts = totals.tolist(), counted[:, 0].tolist()
            for row, state in zip(open_rows, states, strict=True):
                key, whole = (ids[row], state), counts[row] >= 0
                self._open.pop(key, None)  # a new entry is the youngest
                self._open[key] = _Open(table[row], max(counts[row], 0.0), whole, done[row])
            limit = max(_MIN_OPEN, _OPEN_PER_ROW * len(rows))
            for key in list(self._open)[: max(len(self._open) - limit, 0)]:
                del self._open[key]
        return totals[terminated.unsqueeze(-1) & (counted > 0)]

    def copy(self) -> OpenTrajectories:
        """An independent copy."""
        other = OpenTrajectories()
        other.restore(self)
        return other

    def restore(self, other: OpenTrajectories) -> None:
        """Goes back to the trajectories of a copy."""
        self._open = dict(other._open)


class _Carried(NamedTuple):
    """What the rows go on from: totals, and how many steps counted (-inf: not known), (R, F) each."""

    totals: Tensor
    counted: Tensor


def _running(values: Tensor, ends: Tensor, initial: Tensor) -> Tensor:
    """`running_sum` over time of (R, T, F)."""
    sums = running_sum(values.transpose(1, 2), ends.transpose(1, 2), initial=initial)
    return sums.transpose(1, 2)


def _ends(segments: Segments, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Where trajectories end inside the rows, (R, T, F); and the last step of each row that is not padding, (R,)."""
    n_steps = counts.shape[1]
    last = torch.full((len(counts),), n_steps - 1, device=counts.device)
    if segments.ids is None:
        return segments.done, last
    if segments.mask is not None:
        last = _last_steps(segments, counts)
    changes = torch.zeros_like(counts)
    changes[:, :-1] = segments.ids[:, 1:] != segments.ids[:, :-1]
    changes = changes & (torch.arange(n_steps, device=counts.device) < last.unsqueeze(-1))
    return changes.unsqueeze(-1).expand_as(segments.done), last


def _last_steps(segments: Segments, counts: Tensor) -> Tensor:
    """The last step of each row that is not padding, (R,).

    Behind the last step that counts there may be masked steps of the same trajectory (its id goes on,
    and it has not ended), and padding behind those. A row without a step that counts is not padding.
    """
    steps = torch.arange(counts.shape[1], device=counts.device)
    last_counted = torch.where(counts, steps, -1).amax(1)
    at = last_counted.clamp_min(0).unsqueeze(-1)
    same = segments.ids == segments.ids.gather(1, at)  # type: ignore[union-attr]
    behind = steps >= at
    done = segments.done.any(-1) & behind
    done_before = done.long().cumsum(1) - done.long() > 0
    goes_on = (same & ~done_before) | ~behind
    n_going_on = goes_on.long().cumprod(1).sum(1)
    return torch.where(last_counted < 0, counts.shape[1] - 1, n_going_on - 1)
