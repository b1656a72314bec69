"""Sums over trajectories that come in pieces: within a batch, across batches, on padded rows.

Axes: R rows of T steps, F values per step (1, or one for each agent).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice, pairwise
from operator import lt
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchrl_kl.functional.sums import running_sum

_MIN_OPEN = 256  # trajectories that may be open at once, at least
_OPEN_PER_ROW = 64  # and for each row of a batch: that of so many asynchronous workers
_RENUMBERED = (
    "a padded row neither begins with its trajectory nor goes on with one under the id of an "
    "earlier batch: MultiSyncCollector(split_trajs=True) numbers the trajectories of each batch "
    "anew, so their KL cannot be added up. Use kl_collector(..., split_trajs=True), or torchrl's "
    "`split_trajectories` on batches collected without that option. (If the rows do begin with "
    "their trajectories, an InitTracker in the env says so.)"
)

_Key = tuple[int | None, bytes]  # id, or None where it is about to change; digest of the state
_Digests = Callable[[Tensor], list[bytes]]


class Segments(NamedTuple):
    """How the steps of a batch form trajectories; None where nothing tells."""

    done: Tensor  # True at the last step of a trajectory, (R, T, F)
    terminated: Tensor  # the part of `done` that no collector writes by itself, (R, T, F)
    left: Tensor | None  # True where an agent was done before the step, (R, T, F)
    any_done: Tensor  # True where any agent is done, also one of other values, (R, T)
    mask: Tensor | None  # True where a step counts, (R, T); None where all do
    ids: Tensor | None  # numbers of the trajectories, (R, T)
    is_init: Tensor | None  # True at the first step of a trajectory, (R, T)
    # Digests of the states around steps, numbered row by row; empty where nothing shows a state.
    states_before: _Digests
    states_after: _Digests

    def of(self, rows: slice) -> Segments:
        """The segments of some rows."""
        skipped = rows.start * self.done.shape[1]  # steps
        before, after = self.states_before, self.states_after
        parts: Any = {k: v[rows] for k, v in self._asdict().items() if isinstance(v, Tensor)}
        parts |= {"states_before": lambda at: before(at + skipped)}
        parts |= {"states_after": lambda at: after(at + skipped)}
        return self._replace(**parts)


class TrajectorySums(NamedTuple):
    """Sums of each trajectory up to each step (R, T, F), and totals of the finished ones (N,)."""

    running: Tensor
    finished: Tensor


class _Open(NamedTuple):
    """A trajectory that a batch left unfinished; a list has an entry for each agent."""

    call: int  # which call of `add` left it
    totals: list[float]
    counted: list[float]  # how many steps counted, -inf where its beginning was not seen
    ended: list[bool]  # whether it is over unless a later batch goes on with it


class OpenTrajectories:
    """Running sums of the trajectories that earlier batches left unfinished.

    A trajectory goes on where its id comes back *and* the row begins in the state in which the
    trajectory was left: ids restart with every collector. It ends where the ids change, or at done
    if there are none; an agent that is not done goes on when the id changes for another.

    A truncation in the last step of a batch is judged by a later call: a collector may have written
    it (`set_truncated=True`) while the trajectory goes on. A termination is an end at once.
    """

    def __init__(self):
        self._open: dict[_Key, _Open] = {}
        self._calls = 0
        self._rewards: OpenTrajectories | None = None
        # By call, for those that no call has followed yet: the last id of each row.
        self._unfollowed: dict[int, list[int]] = {}

    @property
    def rewards(self) -> OpenTrajectories:
        """Sums of the same trajectories that a controller plans from; not part of copy or state."""
        if self._rewards is None:
            self._rewards = OpenTrajectories()
        return self._rewards

    def add(self, values: Tensor, segments: Segments, *, judge: bool = True) -> TrajectorySums:
        """Adds a batch (R, T, F); its sums are in float64. A step outside the mask counts as 0.

        `judge`: whether trajectories that an earlier call left truncated, and that do not go on in
        this one, count as finished; if not, those that this call truncates never do. RuntimeError
        if a row of a padded batch goes on with a trajectory under another id.
        """
        blocks, calls = _blocks(segments), set()
        # One after the other; nothing has changed if one of them is refused.
        sums = self if len(blocks) == 1 else self.copy()
        added = [
            sums._add(values[rows], segments.of(rows), judge, calls, last=rows is blocks[-1])
            for rows in blocks
        ]
        if sums is not self:
            self.restore(sums)
        if segments.ids is not None and values.numel():
            if not (judge or calls):
                del self._unfollowed[self._calls]
            for call in list(self._unfollowed)[:-_MIN_OPEN]:
                del self._unfollowed[call]
            self._calls += 1
        if len(added) == 1:
            return added[0]
        return TrajectorySums(*map(torch.cat, zip(*added, strict=True)))

    def _add(
        self, values: Tensor, segments: Segments, judge: bool, calls: set[int], *, last: bool
    ) -> TrajectorySums:
        """Adds a block of rows; fills in the earlier `calls` with which the batch goes on."""
        values = values.detach().double()
        counts = torch.ones(values.shape[:2], dtype=torch.bool, device=values.device)
        if segments.mask is not None:
            counts = segments.mask
            values = torch.where(counts.unsqueeze(-1), values, 0.0)
        if not values.numel():
            return TrajectorySums(values, values.new_zeros(0))
        # What rows go on from, (R, F): the sums so far, and how many steps counted.
        totals, counted = torch.zeros_like(values[:, 0]), torch.zeros_like(values[:, 0])
        finished = []
        if segments.ids is not None:
            ended = self._resume(segments, counts, totals, counted, calls)
            # In the last block: a trajectory may go on in any of them.
            ended += self._judge(calls, segments.ids[:, 0].tolist(), judge) if last else []
            finished.append(values.new_tensor(ended))
        ends, final = _ends(segments, counts)
        # A trajectory without a step that counts, or whose beginning is not known, never finishes.
        # Both sums at once, (R, T, 2 F): for few numbers a running sum is mostly overhead.
        both = torch.cat([values, counts.unsqueeze(-1).expand_as(values)], -1)
        cuts = ends
        if segments.is_init is not None:
            # A reset before the end of a trajectory, which is not told.
            cuts = ends.clone()
            reset = segments.is_init[:, 1:] & ~segments.any_done[:, :-1]
            cuts[:, :-1] |= reset.unsqueeze(-1)
        both = _running(both, cuts.repeat(1, 1, 2), torch.cat([totals, counted], -1))
        running, n_counted = both.chunk(2, -1)
        told = ends & (n_counted > 0)
        if segments.left is not None:  # an agent that left while others go on has finished before
            told = told & ~segments.left
        finished.append(running[told])
        if segments.ids is not None:
            at = final + counts.shape[1] * torch.arange(len(final), device=final.device)
            finished.append(self._suspend(segments, at, running, n_counted, judge))
            ids = _at(segments.ids, at).tolist()
            self._unfollowed[self._calls] = self._unfollowed.get(self._calls, []) + ids
        return TrajectorySums(running, torch.cat(finished))

    def _resume(
        self, segments: Segments, counts: Tensor, totals: Tensor, counted: Tensor, calls: set[int]
    ) -> list[float]:
        """Fills in what rows go on from, (R, F), and the earlier `calls`; gives ended totals."""
        found, unknown = self._find(segments, counts)
        if segments.is_init is not None:
            counted[unknown] = -torch.inf
        rows, entries, ended = list(found.values()), [self._open.pop(key) for key in found], []
        if rows:
            totals[rows] = totals.new_tensor([entry.totals for entry in entries])
            counted[rows] = totals.new_tensor([entry.counted for entry in entries])
        if rows and segments.left is not None:  # a truncation of an agent that has left since
            left = segments.left[rows, 0]
            over = left & torch.tensor([entry.ended for entry in entries]).to(left)
            ended = totals[rows][over & (counted[rows] > 0)].tolist()
        calls |= {entry.call for entry in entries} - {self._calls}
        return ended

    def _find(self, segments: Segments, counts: Tensor) -> tuple[dict[_Key, int], list[int]]:
        """The row that goes on with each open trajectory; the rows that neither do so nor begin."""
        ids, begins = segments.ids, segments.is_init  # (R, T)
        first_ids = ids[:, 0].tolist()  # type: ignore[index]
        known = {key[0] for key in self._open}
        inside = list(range(len(first_ids)))
        if begins is not None:
            inside = (~begins[:, 0]).nonzero().squeeze(-1).tolist()
        if segments.left is not None:  # where all have left nobody goes on
            present = (~segments.left[:, 0].all(-1)).tolist()
            inside = [row for row in inside if present[row]]
        if not known:
            return {}, inside
        # In a padded batch each row holds one trajectory.
        padded = segments.mask is not None and bool(((ids == ids[:, :1]) | ~counts).all())  # type: ignore[index]
        rows = [row for row in inside if padded or first_ids[row] in known or None in known]
        digests = segments.states_before(ids.shape[1] * torch.tensor(rows)) if rows else []  # type: ignore[union-attr]
        states, found = dict(zip(rows, digests, strict=True)), {}
        for row, state in states.items():
            keys = ((first_ids[row], state), (None, state))
            key = next((key for key in keys if key in self._open and key not in found), None)
            if key is not None:
                found[key] = row
        unknown = sorted(set(inside) - set(found.values()))
        if padded:
            waiting = {key[1] for key in self._open if key not in found} - {b""}
            for row in unknown:
                if counts[row].any() and (begins is not None or states[row] in waiting):
                    raise RuntimeError(_RENUMBERED)
        return found, unknown

    def _judge(self, calls: set[int], first_ids: list[int], judge: bool) -> list[float]:
        """The totals of truncated trajectories that are over, since this batch follows `calls`."""
        # If it goes on with none at all, it follows the earliest call that waits to be followed and
        # that has earlier ids in all rows: those of a collector that begins are not later ones.
        if judge and not calls:
            most = max(map(len, self._unfollowed.values()), default=0)
            bounds = first_ids + first_ids[-1:] * most
            earlier = (
                call
                for call, ids in self._unfollowed.items()
                if call != self._calls and all(map(lt, ids, bounds))
            )
            calls = set(islice(earlier, 1))
        if not calls:
            return []
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
        self, segments: Segments, at: Tensor, running: Tensor, n_counted: Tensor, judge: bool
    ) -> Tensor:
        """Keeps what rows leave open `at` their last steps, (R,); returns totals of what ends."""
        done, terminated = _at(segments.done, at), _at(segments.terminated, at)  # (R, F)
        left = torch.zeros_like(done) if segments.left is None else _at(segments.left, at)
        totals, counted = _at(running, at), _at(n_counted, at)
        over = terminated | left
        rows = (~over.all(-1)).nonzero().squeeze(-1)
        ids = _ids_left(segments, at)
        kept = [torch.where(over, 0.0, each).tolist() for each in (totals, counted)]
        ended = (done & ~over & judge).tolist()
        if len(rows):
            for row, state in zip(rows.tolist(), segments.states_after(at[rows]), strict=True):
                key = (ids[row], state)
                self._open.pop(key, None)  # a new entry is the youngest
                self._open[key] = _Open(self._calls, kept[0][row], kept[1][row], ended[row])
            # Trajectories that never go on, as of a closed collector, are dropped, oldest first.
            limit = max(_MIN_OPEN, _OPEN_PER_ROW * len(done))
            for key in list(islice(self._open, max(len(self._open) - limit, 0))):
                del self._open[key]
        return totals[terminated & ~left & (counted > 0)]

    def copy(self) -> OpenTrajectories:
        """An independent copy."""
        other = OpenTrajectories()
        other.restore(self)
        return other

    def restore(self, other: OpenTrajectories) -> None:
        """Takes over what another object, such as an earlier copy, has open."""
        self._open, self._unfollowed = dict(other._open), dict(other._unfollowed)
        self._calls = other._calls

    def state_dict(self) -> dict[str, Any]:
        """What is open, as plain values."""
        entries = [[key[0], key[1].hex(), *one] for key, one in self._open.items()]
        n_rows = [[call, len(ids)] for call, ids in self._unfollowed.items()]
        return {"open": entries, "unfollowed": n_rows, "calls": self._calls}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Adds what was open, of calls that came before those of this object.

        Whatever ids the next call has, it may follow them: ids restart with a collector.
        """
        before = int(state["calls"])
        saved = {(key, bytes.fromhex(at)): _Open(*rest) for key, at, *rest in state["open"]}
        mine = {key: one._replace(call=one.call + before) for key, one in self._open.items()}
        self._open = saved | mine
        followed = {call + before: ids for call, ids in self._unfollowed.items()}
        self._unfollowed = {call: [-1] * n_rows for call, n_rows in state["unfollowed"]} | followed
        self._calls += before

    def truncated(self) -> list[float]:
        """Totals of the trajectories that are finished unless a later call goes on with them."""
        return [
            total
            for one in self._open.values()
            for total, counted, ended in zip(one.totals, one.counted, one.ended, strict=True)
            if ended and counted > 0
        ]


def _at(values: Tensor, places: Tensor) -> Tensor:
    """The entries of (R, T, ...) at steps, numbered row by row, (N,): (N, ...)."""
    return values.flatten(0, 1).index_select(0, places)


def _running(values: Tensor, ends: Tensor, initial: Tensor) -> Tensor:
    # `running_sum` takes time as the last dimension: (R, F, T).
    sums = running_sum(values.transpose(1, 2), ends.transpose(1, 2), initial=initial)
    return sums.transpose(1, 2)


def _blocks(segments: Segments) -> list[slice]:
    """Blocks of rows: cut where a row goes on with an earlier one, as in batches that were joined.

    For example, `torch.cat` and `torch.stack` join the batches of a collector along dimension 0.
    """
    ids, mask = segments.ids, segments.mask
    if ids is None or not ids.numel():
        return [slice(0, len(segments.done))]
    n_rows, n_steps = ids.shape
    at = n_steps * torch.arange(n_rows, device=ids.device)  # the first step of each row
    last = at + (n_steps - 1 if mask is None else _ends(segments, mask)[1])
    begins, leaves = ids[:, 0].tolist(), _ids_left(segments, last)
    nowhere = [b""] * n_rows
    cuts = _cuts(begins, nowhere, leaves, nowhere)
    if len(cuts) > 1:
        # The same id may also be that of another collector, whose state is another.
        cuts = _cuts(begins, segments.states_before(at), leaves, segments.states_after(last))
    return [slice(*cut) for cut in pairwise([*cuts, n_rows])]


def _ids_left(segments: Segments, at: Tensor) -> list[int | None]:
    """The ids of rows left `at` steps, (R,); None where that of those who go on will be another."""
    done, over = _at(segments.done, at), _at(segments.terminated, at)  # (R, F)
    if segments.left is not None:
        over = over | _at(segments.left, at)
    # It changes where another agent is done.
    parted = over.any(-1) | _at(segments.any_done, at) & ~done.all(-1)
    parted = (parted & ~over.all(-1)).tolist()
    ids = _at(segments.ids, at).tolist()  # type: ignore[arg-type]
    return [None if new else one for one, new in zip(ids, parted, strict=True)]


def _cuts(
    begins: list[int], before: list[bytes], leaves: list[int | None], after: list[bytes]
) -> list[int]:
    """The rows with which a block begins: those that begin where an earlier row of it is left."""
    cuts, left = [0], set[_Key]()
    for row, (begin, state) in enumerate(zip(begins, before, strict=True)):
        if (begin, state) in left or (None, state) in left:
            cuts.append(row)
            left.clear()
        left.add((leaves[row], after[row]))
    return cuts


def _ends(segments: Segments, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Where trajectories end inside rows, (R, T, F); the last step that is not padding, (R,)."""
    ids, n_steps = segments.ids, counts.shape[1]
    last = torch.full((len(counts),), n_steps - 1, device=counts.device)
    if ids is None:
        return segments.done, last
    changed = ids[:, 1:] != ids[:, :-1]
    ends = torch.zeros_like(counts)
    ends[:, :-1] = changed
    if segments.mask is not None:
        steps = torch.arange(n_steps, device=counts.device)
        last_counted = torch.where(counts, steps, -1).amax(1, keepdim=True).clamp_min(0)
        # Behind the last step that counts there may be masked steps, and padding behind those. A
        # step is real if it goes on with a trajectory that has not ended (the same id) or begins
        # another: padding has the id 0, as has the first trajectory, whose row is full if open.
        real = torch.ones_like(counts)
        real[:, 1:] = torch.where(changed, ids[:, 1:] > 0, ~segments.any_done[:, :-1])
        last = (real | (steps <= last_counted)).long().cumprod(1).sum(1) - 1
        ends &= steps < last.unsqueeze(-1)
    # The id changes as soon as any agent is done; the others go on.
    goes_on = ~segments.done & segments.any_done.unsqueeze(-1)
    return ends.unsqueeze(-1) & ~goes_on, last
