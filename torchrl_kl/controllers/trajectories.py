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
        follows: True where a step begins in the state that the step before it left, (R, T); only
            needed with ids and a mask.
        first_states: for each of the given rows, a digest of the state in which the row begins;
            empty where nothing shows a state.
        last_states: for each of the given rows, a digest of the state after the given step of it.
    """

    done: Tensor
    terminated: Tensor
    left: Tensor | None
    mask: Tensor | None
    ids: Tensor | None
    is_init: Tensor | None
    follows: Tensor | None
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
    """A trajectory that a batch left unfinished; a list has an entry for each agent.

    `call`: which call of `add` left it. `counted`: how many of its steps counted, -inf
    where its beginning was not seen. `ended`: whether it is over unless a later batch goes on with it.
    """

    call: int
    totals: list[float]
    counted: list[float]
    ended: list[bool]


class OpenTrajectories:
    """Running sums of the trajectories that earlier batches left unfinished.

    A trajectory goes on where its id comes back *and* the row begins in the state in which the
    trajectory was left: ids restart with every collector. It ends where the ids change, or at done
    where there are none; an agent that is not done goes on when the id changes because another is.

    A collector may write an artificial truncation into a batch's last step (`set_truncated=True`)
    while the trajectory goes on, so a truncation there is judged later: by the next call, if that
    goes on with a trajectory that was left together with it, or with none. A termination is an end
    at once. Trajectories that never go on are dropped, oldest first.
    """

    def __init__(self):
        self._open: dict[tuple[int | None, bytes], _Open] = {}
        self._calls = 0
        # The last id of each row, of the calls that no call has followed yet.
        self._unfollowed: dict[int, list[int]] = {}

    def add(self, values: Tensor, segments: Segments, *, judge: bool = True) -> TrajectorySums:
        """Adds a batch.

        Args:
            values: what is summed, (R, T, F); a step outside the mask counts as 0.
            segments: how its steps form trajectories.
            judge: whether trajectories that were truncated at the end of an earlier call, and do not
                go on in this one, count as finished; those that this call truncates never do if not.

        Returns:
            The running sums, and the totals of the trajectories that have finished.

        Raises:
            RuntimeError: if a row of a padded batch goes on with a trajectory under another id.
        """
        values = values.detach().double()
        counts = torch.ones(values.shape[:2], dtype=torch.bool, device=values.device)
        if segments.mask is not None:
            counts = segments.mask
            values = torch.where(counts.unsqueeze(-1), values, 0.0)
        if not values.numel():
            return TrajectorySums(values, values.new_zeros(0))
        ends, last = _ends(segments, counts)
        carried, finished, joined = self._resume(segments, values, counts, judge)
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
            finished.append(
                self._suspend(segments, last, running, n_counted, judge, judge or joined)
            )
        return TrajectorySums(running, torch.cat(finished))

    def _resume(
        self, segments: Segments, values: Tensor, counts: Tensor, judge: bool
    ) -> tuple[_Carried, list[Tensor], bool]:
        """What each row goes on from; the totals that are now known to have ended; whether any row goes on."""
        n_rows, _, n_values = values.shape
        carried = _Carried(values.new_zeros(n_rows, n_values), values.new_zeros(n_rows, n_values))
        if segments.ids is None:
            return carried, [], False
        found, unknown = self._find(segments, counts)
        if segments.is_init is not None:  # neither begun nor gone on with: its start is unknown
            carried.counted[unknown] = -torch.inf
        finished = []
        for row, key in found.items():
            carried.totals[row] = values.new_tensor(self._open[key].totals)
            carried.counted[row] = values.new_tensor(self._open[key].counted)
        calls = {self._open[key].call for key in found.values()}
        if found and segments.left is not None:  # agents that have left do not go on
            rows = list(found)
            left = segments.left[rows, 0]
            ended = torch.tensor([self._open[key].ended for key in found.values()]).to(left)
            finished.append(carried.totals[rows][left & ended & (carried.counted[rows] > 0)])
            for each in carried:
                each[rows] = torch.where(left, 0.0, each[rows])
        for key in found.values():
            del self._open[key]
        totals = self._judge(calls, segments.ids[:, 0].tolist(), judge)
        return carried, [*finished, values.new_tensor(totals)], bool(calls)

    def _find(
        self, segments: Segments, counts: Tensor
    ) -> tuple[dict[int, tuple[int | None, bytes]], list[int]]:
        """The open trajectory of each row that goes on with one; and the rows that neither do that nor begin."""
        ids, begins = segments.ids, segments.is_init  # type: ignore[assignment]
        first_ids = ids[:, 0].tolist()  # type: ignore[index]
        n_rows, known = len(first_ids), {key[0] for key in self._open}
        inside = range(n_rows) if begins is None else (~begins).nonzero().squeeze(-1).tolist()
        padded = segments.mask is not None and bool(((ids == ids[:, :1]) | ~counts).all())  # type: ignore[index]
        rows = [
            row for row in inside if known and (padded or first_ids[row] in known or None in known)
        ]
        states = dict(zip(rows, segments.first_states(rows) if rows else [], strict=True))
        found: dict[int, tuple[int | None, bytes]] = {}
        for row, state in states.items():
            for key in ((first_ids[row], state), (None, state)):
                if row not in found and key in self._open and key not in found.values():
                    found[row] = key
        unknown = [row for row in inside if row not in found]
        if padded and known:
            waiting = {key[1] for key in self._open if key not in found.values()} - {b""}
            for row in unknown:
                if counts[row].any() and (begins is not None or states[row] in waiting):
                    raise RuntimeError(_RENUMBERED)
        return found, unknown

    def _judge(self, calls: set[int], first_ids: list[int], judge: bool) -> list[float]:
        """The totals of truncated trajectories that this batch shows to be over.

        It does if it follows the call that left them: if it goes on with another trajectory of that
        call; or with none at all, its ids are later ones (not those of a collector that begins), and
        no call before that one waits to be followed.
        """
        if judge and not calls:
            n_rows = len(first_ids)
            for call, ids in self._unfollowed.items():
                if all(first_ids[min(row, n_rows - 1)] > id_ for row, id_ in enumerate(ids)):
                    calls = {call}
                    break
        for call in calls:
            self._unfollowed.pop(call, None)
        totals = []
        for key, one in list(self._open.items()):
            if one.call not in calls or not any(one.ended):
                continue
            if not judge:  # but the next call that judges
                self._open[key] = one._replace(call=self._calls)
                continue
            del self._open[key]
            told = zip(one.totals, one.counted, one.ended, strict=True)
            totals += [total for total, counted, ended in told if ended and counted > 0]
        return totals

    def _suspend(
        self,
        segments: Segments,
        last: Tensor,
        running: Tensor,
        n_counted: Tensor,
        judge: bool,
        followed: bool,
    ) -> Tensor:
        """Keeps what the rows leave open; returns the totals that have ended, (N,)."""
        rows = torch.arange(len(last), device=last.device)
        done, terminated = segments.done[rows, last], segments.terminated[rows, last]
        totals, counted = running[rows, last], n_counted[rows, last]
        left = torch.zeros_like(done) if segments.left is None else segments.left[rows, last]
        over = terminated | left
        open_rows = (~over.all(-1)).nonzero().squeeze(-1).tolist()
        if open_rows:
            steps = last.tolist()
            states = segments.last_states(open_rows, [steps[row] for row in open_rows])
            ids = segments.ids[rows, last].tolist()  # type: ignore[index]
            # The id of those that go on changes where another agent is done.
            parted = (over.any(-1) | done.any(-1) & ~done.all(-1)).tolist()
            kept = [torch.where(over, 0.0, each).tolist() for each in (totals, counted)]
            ended = (done & ~over & judge).tolist()
            for row, state in zip(open_rows, states, strict=True):
                key = (None if parted[row] else ids[row], state)
                self._open.pop(key, None)  # a new entry is the youngest
                self._open[key] = _Open(self._calls, kept[0][row], kept[1][row], ended[row])
            limit = max(_MIN_OPEN, _OPEN_PER_ROW * len(rows))
            for key in list(self._open)[: max(len(self._open) - limit, 0)]:
                del self._open[key]
        if followed:
            self._unfollowed[self._calls] = segments.ids[rows, last].tolist()  # type: ignore[index]
            for call in list(self._unfollowed)[:-_MIN_OPEN]:
                del self._unfollowed[call]
        self._calls += 1
        return totals[terminated & ~left & (counted > 0)]

    def copy(self) -> OpenTrajectories:
        """An independent copy."""
        other = OpenTrajectories()
        other.restore(self)
        return other

    def restore(self, other: OpenTrajectories) -> None:
        """Takes over what another one, such as an earlier copy, has open."""
        self._open, self._unfollowed = dict(other._open), dict(other._unfollowed)
        self._calls = other._calls


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
    # The id changes as soon as any agent is done; the others go on.
    goes_on = ~segments.done & segments.done.any(-1, keepdim=True)
    return changes.unsqueeze(-1) & ~goes_on, last


def _last_steps(segments: Segments, counts: Tensor) -> Tensor:
    """The last step of each row that is not padding, (R,).

    Behind the last step that counts there may be masked steps, and padding behind those. A step is
    not padding if it goes on with the trajectory of the step before it (the same id, which has not
    ended, in the state that was left), or begins another one (padding has the id 0).
    """
    ids, done = segments.ids, segments.done.any(-1)
    steps = torch.arange(counts.shape[1], device=counts.device)
    last_counted = torch.where(counts, steps, -1).amax(1, keepdim=True).clamp_min(0)
    same = ids[:, 1:] == ids[:, :-1]  # type: ignore[index]
    real = torch.ones_like(counts)
    real[:, 1:] = torch.where(same, ~done[:, :-1] & segments.follows[:, 1:], ids[:, 1:] > 0)  # type: ignore[index]
    return (real | (steps <= last_counted)).long().cumprod(1).sum(1) - 1


_RENUMBERED = (
    "a padded row neither begins with its trajectory nor goes on with one under the id of an earlier "
    "batch: MultiSyncCollector(split_trajs=True) numbers the trajectories of each batch anew, so their "
    "KL cannot be added up. Use kl_collector(..., split_trajs=True), or collect without `split_trajs` "
    "and call torchrl's `split_trajectories` on the result. (If the rows do begin with their "
    "trajectories, an InitTracker in the env says so.)"
)
