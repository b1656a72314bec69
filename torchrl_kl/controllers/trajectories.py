"""Sums over trajectories that come in pieces: within a batch, across batches, on padded rows.

Axes: R rows of T steps, F values per step (1, or one for each agent).

`OpenTrajectories.add` adds a batch in six steps:

1. `_last_steps` finds where the padding of rows begins, `_ends` where trajectories end inside rows.
2. `_leave` finds what rows leave open, and `_enter` which rows do not begin with a trajectory. What
   is open has a key: the id of the trajectory, and a digest of the state in which it is left.
3. `_link` goes through the rows in order: a row goes on with what was left under the id and the
   state with which it begins, by an earlier batch or, if batches were joined, by an earlier row.
4. `_judge` tells which trajectories that earlier batches left truncated are over.
5. `sum_rows` adds up all rows at once; rows that go on with one another are one long row.
6. `_keep` keeps the sums of what is open for later batches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import chain, islice, repeat
from operator import lt
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchrl_kl.functional.sums import sum_rows

_MIN_OPEN = 256  # trajectories that may be open at once, at least
_OPEN_PER_ROW = 64  # and for each row of a batch: that of so many asynchronous workers
_RENUMBERED = (
    "a padded row neither begins with its trajectory nor goes on with one under the id of an "
    "earlier batch, so its KL cannot be added up. MultiSyncCollector(split_trajs=True) numbers "
    "the trajectories of each batch anew: use kl_collector(..., split_trajs=True), or torchrl's "
    "`split_trajectories` on batches collected without that option. If batches were left out, pass "
    "them all; if rows do begin with their trajectories, an InitTracker in the env says so."
)

_Key = tuple[int, bytes]  # id, or -1 - row where it is about to change; digest of the state
_Digests = Callable[[Tensor], list[bytes]]


class Segments(NamedTuple):
    """How the steps of a batch form trajectories; None where nothing tells."""

    done: Tensor  # True at the last step of a trajectory, (R, T, F)
    terminated: Tensor  # the part of `done` that no collector writes by itself, (R, T, F)
    left: Tensor  # True where an agent was done before the step, (R, T, F)
    any_done: Tensor  # True where any agent is done, also one of other values, (R, T)
    any_left: Tensor  # True where any such agent was done before the step, (R, T)
    mask: Tensor | None  # True where a step counts, (R, T); None where all do
    ids: Tensor | None  # numbers of the trajectories, (R, T)
    is_init: Tensor | None  # True at the first step of a trajectory, (R, T)
    # Digests of the states around steps, numbered row by row; empty where nothing shows a state.
    states_before: _Digests
    states_after: _Digests


class TrajectorySums(NamedTuple):
    """Sums of each trajectory up to each step (R, T, F), and totals of the finished ones (N,)."""

    running: Tensor
    finished: Tensor


class _Open(NamedTuple):
    """A trajectory that a batch left unfinished; a list has an entry for each agent."""

    call: int  # which call of `add` left it
    totals: list[float]
    counted: list[float]  # how many steps counted, -inf where its beginning was not seen
    ended: list[bool]  # whether it is over unless a later row goes on with it

    def totals_of_ended(self, among: Iterable[bool] = repeat(True)) -> list[float]:
        """Totals of the agents, or of those `among` them, that ended with a step that counts."""
        agents = zip(self.totals, self.counted, self.ended, among, strict=False)
        return [total for total, counted, ended, one in agents if ended and one and counted > 0]


class _First(NamedTuple):
    """The first steps of rows."""

    ids: list[int]
    inside: list[int]  # rows that do not begin with a trajectory, as far as one can tell
    states: dict[int, bytes]  # of those rows that may go on with something
    parted: list[bool]  # whether an agent has left before the row: the id has changed since
    tracked: bool  # whether the env tells where trajectories begin
    padded: bool  # whether each row holds one trajectory, and padding


class _Last(NamedTuple):
    """The last steps of rows, before their padding."""

    ids: list[int]
    ends: Tensor  # True where an agent ends for certain, (R, F)
    over: Tensor  # True where an agent ends for certain or has left before, (R, F)
    truncated: Tensor  # True where an agent ends unless a later row goes on with it, (R, F)
    keys: dict[int, _Key]  # of what is left open, by row


class _Links(NamedTuple):
    """What rows go on with, and what stays open, the oldest first."""

    resumed: dict[int, _Open]  # by row: what an earlier batch left
    joined: dict[int, int]  # by row: an earlier row
    unknown: list[int]  # rows that neither begin nor go on with any of these
    waiting: dict[_Key, _Open]  # what an earlier batch left and no row goes on with
    open_rows: dict[_Key, int]  # rows with which no later row goes on


class OpenTrajectories:
    """Running sums of the trajectories that earlier batches left unfinished.

    A trajectory goes on where its id comes back *and* the row begins in the state in which the
    trajectory was left: ids restart with every collector. It ends where the ids change, or at done
    if there are none; an agent that is not done goes on when the id changes for another. Then only
    states tell which row it is: of rows that are left in one state, sums may be mixed up.

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
        this one, count as finished. If not, those that this call truncates never count.
        RuntimeError if a row of a padded batch goes on with a trajectory under another id.
        """
        values = values.detach().double()
        counts = torch.ones(values.shape[:2], dtype=torch.bool, device=values.device)
        if segments.mask is not None:
            counts = segments.mask
            values = torch.where(counts.unsqueeze(-1), values, 0.0)
        if not values.numel():
            return TrajectorySums(values, values.new_zeros(0))
        # Both sums at once, (2, R, T, F): for few numbers a running sum is mostly overhead.
        both = torch.stack([values, counts.unsqueeze(-1).expand_as(values)])
        steps = _last_steps(segments, counts)
        ends, cuts = _ends(segments, steps)
        if segments.ids is None:  # each row begins at 0, and nothing stays open
            running, counted = sum_rows(both, cuts, {})
            return TrajectorySums(running, running[ends & ~segments.left & (counted > 0)])
        last = _leave(segments, segments.ids, steps, judge)
        first = _enter(segments, segments.ids, counts, chain(self._open, last.keys.values()))
        links = _link(first, last, self._open)
        if self._open and _is_renumbered(first, links, counts):
            raise RuntimeError(_RENUMBERED)  # nothing has changed yet
        judged = self._judge(links, first.ids, last.ids, judge)
        both[:, :, 0] += _sums_before(both[:, :, 0], links, first.tracked)
        cuts[:, -1] = last.over  # which is where the next row begins, if one goes on
        running, counted = sum_rows(both, cuts, links.joined)
        totals, n_counted = running[:, -1], counted[:, -1]
        rows = self._keep(links, last, torch.stack([totals, n_counted]))
        left = _totals_of_left(links, rows, segments.left[:, 0])
        # A trajectory without a step that counts, or whose beginning is not known, never finishes;
        # that of an agent that left while others go on has finished before.
        finished = [
            running.new_tensor(left + judged),
            running[ends & ~segments.left & (counted > 0)],
            totals[last.ends & (n_counted > 0)],
        ]
        return TrajectorySums(running, torch.cat(finished))

    def _judge(
        self, links: _Links, first_ids: list[int], last_ids: list[int], judge: bool
    ) -> list[float]:
        """The totals of truncated trajectories that are over, since this batch follows theirs."""
        calls = {one.call for one in links.resumed.values()}
        # If it goes on with none at all, it follows one that waits to be followed and that has
        # earlier ids in all rows: those of a collector that begins are not later ones. Of several,
        # as of other collectors, it is the one whose ids end nearest to where its own begin.
        if judge and not calls:
            earlier = [
                call
                for call, ids in self._unfollowed.items()
                if all(map(lt, ids, chain(first_ids, repeat(first_ids[-1]))))
            ]
            expected = min(first_ids) - 1
            earlier.sort(key=lambda call: abs(max(self._unfollowed[call]) - expected))
            calls = set(earlier[:1])
        for call in calls:
            self._unfollowed.pop(call, None)
        if judge or calls:
            self._unfollowed[self._calls] = last_ids
        for call in list(self._unfollowed)[:-_MIN_OPEN]:
            del self._unfollowed[call]
        totals = []
        for key, one in list(links.waiting.items()):
            if one.call in calls and any(one.ended):
                if judge:
                    del links.waiting[key]
                    totals += one.totals_of_ended()
                else:  # but the next call that judges
                    links.waiting[key] = one._replace(call=self._calls)
        return totals

    def _keep(self, links: _Links, last: _Last, sums: Tensor) -> list[_Open]:
        """Keeps what is open after the batch; what each row leaves, given its sums, (2, R, F)."""
        kept = torch.where(last.over, 0.0, sums).tolist()
        entries = zip(repeat(self._calls), *kept, last.truncated.tolist(), strict=False)
        rows = [_Open(*entry) for entry in entries]
        waiting = {key: one for key, one in links.waiting.items() if key not in links.open_rows}
        self._open = waiting | {key: rows[row] for key, row in links.open_rows.items()}
        if last.keys:  # of those that never go on, as of a closed collector, the oldest are dropped
            limit = max(_MIN_OPEN, _OPEN_PER_ROW * len(rows))
            for key in list(islice(self._open, max(len(self._open) - limit, 0))):
                del self._open[key]
        self._calls += 1
        return rows

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
        saved_ids = {call: [call - before] * n_rows for call, n_rows in state["unfollowed"]}
        self._unfollowed = saved_ids | followed
        self._calls += before

    def truncated(self) -> list[float]:
        """Totals of the trajectories that are finished unless a later call goes on with them."""
        return [total for one in self._open.values() for total in one.totals_of_ended()]


def _last_steps(segments: Segments, counts: Tensor) -> Tensor:
    """The last step of each row that is not padding, (R,)."""
    ids, n_steps = segments.ids, counts.shape[1]
    if segments.mask is None or ids is None:
        return torch.full((len(counts),), n_steps - 1, device=counts.device)
    steps = torch.arange(n_steps, device=counts.device)
    last_counted = torch.where(counts, steps, -1).amax(1, keepdim=True).clamp_min(0)
    # Behind the last step that counts there may be masked steps, and padding behind those. A step
    # is real if it goes on with a trajectory that has not ended (the same id) or begins another:
    # padding has the id 0, as has the first trajectory, whose row is full if open.
    real = torch.ones_like(counts)
    changed = ids[:, 1:] != ids[:, :-1]
    real[:, 1:] = torch.where(changed, ids[:, 1:] > 0, ~segments.any_done[:, :-1])
    return (real | (steps <= last_counted)).long().cumprod(1).sum(1) - 1


def _ends(segments: Segments, last: Tensor) -> tuple[Tensor, Tensor]:
    """Where trajectories end inside rows, (R, T, F), and where their sums do; `last`: steps, (R,).

    Sums also end where a reset cuts off a trajectory, which is not told.
    """
    ids, any_done = segments.ids, segments.any_done
    resets = torch.zeros_like(any_done)
    if segments.is_init is not None:
        resets[:, :-1] = segments.is_init[:, 1:] & ~any_done[:, :-1]
    if ids is None:
        return segments.done, segments.done | resets.unsqueeze(-1)
    changes = torch.zeros_like(any_done)
    changes[:, :-1] = ids[:, 1:] != ids[:, :-1]
    if segments.mask is not None:
        inside = torch.arange(ids.shape[1], device=ids.device) < last.unsqueeze(-1)
        changes, resets = changes & inside, resets & inside
    # The id changes as soon as any agent is done; the others go on.
    ends = changes.unsqueeze(-1) & (segments.done | ~any_done.unsqueeze(-1))
    return ends, ends | resets.unsqueeze(-1)


def _leave(segments: Segments, ids: Tensor, steps: Tensor, judge: bool) -> _Last:
    """What rows leave at their last steps, (R,)."""
    places = steps + ids.shape[1] * torch.arange(len(ids), device=ids.device)

    def at_last(values: Tensor) -> Tensor:
        return values.flatten(0, 1).index_select(0, places)

    done, terminated, left = map(at_last, (segments.done, segments.terminated, segments.left))
    over = terminated | left
    # The id is about to change where an agent is done and another goes on.
    parted = (over.any(-1) | at_last(segments.any_done) & ~done.all(-1)).tolist()
    last_ids = at_last(ids).tolist()
    rows = (~over.all(-1)).nonzero().squeeze(-1)
    states = zip(rows.tolist(), segments.states_after(places[rows]), strict=True)
    keys = {row: (-1 - row if parted[row] else last_ids[row], state) for row, state in states}
    return _Last(last_ids, terminated & ~left, over, done & ~over & judge, keys)


def _enter(segments: Segments, ids: Tensor, counts: Tensor, keys: Iterable[_Key]) -> _First:
    """What rows begin with; `keys`: of all that rows may go on with."""
    begins = segments.is_init
    inside = ~segments.left[:, 0].all(-1)  # where all agents have left nobody goes on
    if begins is not None:
        inside = inside & ~begins[:, 0]
    inside, first_ids = inside.nonzero().squeeze(-1).tolist(), ids[:, 0].tolist()
    padded = segments.mask is not None and bool(((ids == ids[:, :1]) | ~counts).all())
    known = {key[0] for key in keys}
    parted = segments.any_left[:, 0].tolist()
    some = padded or min(known, default=0) < 0
    rows = [row for row in inside if some or parted[row] or first_ids[row] in known]
    places = ids.shape[1] * torch.tensor(rows, dtype=torch.long)
    states = dict(zip(rows, segments.states_before(places), strict=True))
    return _First(first_ids, inside, states, parted, begins is not None, padded)


def _link(first: _First, last: _Last, opened: Mapping[_Key, _Open]) -> _Links:
    """What rows go on with, of what earlier batches have `opened` and what rows leave open."""
    resumed, joined = dict[int, _Open](), dict[int, int]()
    waiting, open_rows = dict(opened), dict[_Key, int]()
    # By state: what is left under ids that change (True), and the rest, where a collector may have
    # truncated all agents, so that it does not show whether the id changes.
    left_in = defaultdict[tuple[bytes, bool], dict[_Key, None]](dict)
    for key in waiting:
        left_in[key[1], key[0] < 0][key] = None
    for row, first_id in enumerate(first.ids):
        if row in first.states:
            key, own = (first_id, first.states[row]), (-1 - row, first.states[row])
            if key not in waiting and key not in open_rows:
                twins = left_in[key[1], True] or (first.parted[row] and left_in[key[1], False])
                # Several rows may be left in the same state, such as one of few.
                if twins:
                    key = own if own in twins else next(iter(twins))
            left_in[key[1], key[0] < 0].pop(key, None)
            if key in open_rows:
                joined[row] = open_rows.pop(key)
            elif key in waiting:
                resumed[row] = waiting.pop(key)
        if row in last.keys:
            key = last.keys[row]
            open_rows.pop(key, None)  # so that the youngest is the last one
            open_rows[key] = row
            left_in[key[1], key[0] < 0][key] = None
    unknown = [row for row in first.inside if row not in resumed and row not in joined]
    return _Links(resumed, joined, unknown, waiting, open_rows)


def _is_renumbered(first: _First, links: _Links, counts: Tensor) -> bool:
    """Whether a row of a padded batch goes on with a trajectory under another id."""
    missed = {state for _, state in links.waiting} - {b""}
    rows = links.unknown if first.padded else []
    return bool(counts[[row for row in rows if first.tracked or first.states[row] in missed]].any())


def _sums_before(like: Tensor, links: _Links, tracked: bool) -> Tensor:
    """What earlier batches have left of the sums, `like` first steps (2, R, F)."""
    sums = torch.zeros_like(like)
    if tracked:
        sums[1, links.unknown] = -torch.inf
    if links.resumed:
        # (N, 2, F)
        left = sums.new_tensor([[one.totals, one.counted] for one in links.resumed.values()])
        sums[:, list(links.resumed)] = left.transpose(0, 1)
    return sums


def _totals_of_left(links: _Links, rows: list[_Open], left: Tensor) -> list[float]:
    """Totals of agents that were truncated, and have `left` when the next row begins, (R, F).

    `rows`: what each row leaves.
    """
    before = links.resumed | {row: rows[earlier] for row, earlier in links.joined.items()}
    some = [row for row in left.any(-1).nonzero().squeeze(-1).tolist() if row in before]
    return [total for row in some for total in before[row].totals_of_ended(left[row].tolist())]
