"""Sums over trajectories that may come in pieces, from batch to batch.

*B is a batch of R rows of T steps, *A its agents, and L = R * T * A: the steps of the first agent,
row by row, then those of the next one. K numbers are added up along each trajectory.
"""

from __future__ import annotations

import io
from collections.abc import Collection
from typing import NamedTuple, cast

import torch
from torch import Tensor

from torchrl_kl.batches import Flags, same
from torchrl_kl.functional.sums import running_sum

_FEWEST_OPEN = 256  # so many trajectories may stay open at least, as of asynchronous workers


class TrajectorySums(NamedTuple):
    """The sums of a batch, in float64, and the table of what is open after it."""

    running: Tensor  # up to each step of its trajectory, (*B, *A, K)
    finished: Tensor  # of the trajectories that end, (N, K)
    # The first step that counts of each of them, (N,): its number below L, or -1 if it is in an
    # earlier batch.
    began: Tensor
    opened: dict[str, Tensor]  # for `Trajectories.keep`


class Trajectories:
    """The sums of trajectories that batches left open: one table, of M entries.

    `add` equals this loop over the numbers of the steps, in each row of each agent:

        for row in rows:
            for t in row:
                if t == row[0] or breaks[t - 1]:
                    total, n, whole = resume(t) or (0.0, 0, begins(t))
                if counts[t]:
                    total, n = total + values[t], n + 1
                running[t] = total
                if ends[t] and n > 0 and whole:
                    finished.append(total)
                if ends[t]:
                    total, n, whole = 0.0, 0, True
                if t == row[-1] or (breaks[t] and not (ends[t] and counts[t + 1])):
                    leave(t, total, n, whole)

    `leave` makes an entry for the next batches. `resume` takes the newest one out of the table that
    has the id and the agent of the step and was left in the state in which the step begins; None if
    there is none, or the step has `is_init`. `begins` is `is_init`. Without that, a trajectory
    begins behind an end in its row, and where its id comes for the first time and no entry has it
    but of an end. Without ids, nothing is left, and whatever is not resumed begins.

    State: `table`, of each entry its id and agent; `named`, whether it goes on under this id, or
    under one that is not known yet, (M,) each; its total, n and 0 if it is whole, (M, K + 2); the
    states in which they were left, (M, ...) each. Not buffers: DistributedDataParallel would give
    all ranks those of the first, and a distributed checkpoint refuses other sizes.
    """

    def __init__(self):
        none = torch.zeros(0, dtype=torch.long)
        self.table = {"ids": none, "agents": none, "named": none.bool()}
        self.table["sums"] = torch.zeros(0, 0, dtype=torch.float64)

    def add(
        self, flags: Flags, states: Collection[tuple[Tensor, Tensor]], columns: Tensor
    ) -> TrajectorySums:
        """Adds up a batch (*B) in time; `keep` makes what is open the state.

        `states`: what shows whether steps follow one another, before and after each step of *B,
        (R * T, ...) each; `columns`: what is added up, (*B, *A, K).
        """
        shape, n_dims = columns.shape, flags.may_differ.ndim
        n_places, n_agents = shape[:n_dims].numel(), shape[n_dims:-1].numel()

        def flat(entry: Tensor) -> Tensor:  # (*B, *A, ...) as (L, ...)
            entry = entry.reshape(n_places, n_agents, *entry.shape[len(shape) - 1 :])
            return entry.transpose(0, 1).flatten(0, 1)

        ends, counts, breaks = flat(flags.ends), flat(flags.counts), flat(flags.breaks)
        self.table = {name: entry.to(ends.device) for name, entry in self.table.items()}
        # S parts of trajectories, of a row or up to an end or a break: their first and last steps.
        row_ends = (torch.arange(len(ends), device=ends.device) + 1) % shape[n_dims - 1] == 0
        apart = breaks | row_ends
        last = (ends | apart).nonzero().squeeze(-1)
        first = (last + 1).roll(1)
        first[:1] = 0
        agents, follows = first // n_places, ~apart.roll(1)[first]
        ids = None if flags.ids is None else flat(flags.ids)
        if flags.begins is not None:
            begins = flat(flags.begins)[first] | follows
            candidates = ~begins
        else:
            candidates, new = ~follows, self._is_new(agents, cast(Tensor, ids)[first])
            begins = new | (ends & ~row_ends).roll(1)[first]
        matches = dict[int, int]()
        if ids is not None:
            before = [state for state, _ in states]
            matches = self._match(candidates, agents, ids[first], first % n_places, before)
        resumed, entries = [*matches], [*matches.values()]
        begins[resumed] = True
        # Two columns more: the steps that count, and whether the beginning was not seen.
        more = torch.stack([counts, torch.zeros_like(counts)], -1).double()
        more[first[~begins], 1] = 1.0
        values = torch.where(counts.unsqueeze(-1), flat(columns.detach().double()), 0.0)
        addends = torch.cat([values, more], -1)
        if matches:
            addends[first[resumed]] += self.table["sums"][entries]
        sums = running_sum(addends.T, (ends | apart).expand(addends.shape[-1], -1)).T
        opened = self.table
        if ids is not None:
            # A collector may write an end into the last step of a batch, with padding behind it,
            # and go on; but not where steps that count follow.
            place = last[(row_ends | (breaks & ~(ends & counts.roll(-1))))[last]]
            left = {
                "ids": ids[place],
                "agents": place // n_places,
                "named": ~flat(flags.renamed)[place],
                "sums": sums[place].masked_fill(ends[place].unsqueeze(-1), 0.0),
                **{f"left{i}": rows_at(x, place % n_places) for i, (_, x) in enumerate(states)},
            }
            opened = self._table(entries, left)
        finished = ends[last] & (sums[last, -2] > 0) & (sums[last, -1] == 0)
        running = sums[:, :-2].reshape(n_agents, n_places, shape[-1]).transpose(0, 1)
        began = _first_counted(counts, first, sums[first, -2])[finished]
        return TrajectorySums(running.reshape(shape), sums[last[finished], :-2], began, opened)

    def keep(self, opened: dict[str, Tensor]) -> None:
        """Makes what `add` has left open the state."""
        self.table = opened

    def pack(self) -> bytes:
        """The state, for `unpack`."""
        file = io.BytesIO()
        torch.save({name: entry.cpu().clone() for name, entry in self.table.items()}, file)
        return file.getvalue()

    def unpack(self, state: bytes) -> None:
        """Goes on where another table was packed."""
        self.table = torch.load(io.BytesIO(state), weights_only=True)

    def _is_new(self, agents: Tensor, ids: Tensor) -> Tensor:
        """True where an id comes for the first time, and no unfinished entry has it, (S,)."""
        table = self.table
        known = torch.stack([table["agents"], table["ids"]])
        known = known[:, (table["sums"][:, -2:] != 0).any(-1)]
        names = torch.cat([known, torch.stack([agents, ids])], 1)
        number = names.unique(dim=1, return_inverse=True)[1]
        place = torch.arange(len(number), device=number.device)
        firsts = torch.full_like(place, len(place)).scatter_reduce(0, number, place, "amin")
        return (firsts[number] == place)[known.shape[1] :]

    def _match(
        self, candidates: Tensor, agents: Tensor, ids: Tensor, place: Tensor, states: list[Tensor]
    ) -> dict[int, int]:
        """The entry with which a part goes on, by the numbers of both; the newest one first."""
        found, taken = dict[int, int](), set[int]()
        table = self.table
        left = [value for name, value in table.items() if name.startswith("left")]
        if [value.shape[1:] for value in left] != [value.shape[1:] for value in states]:
            return found
        some = candidates & (torch.isin(ids, table["ids"]) | ~table["named"].all())
        some = some.nonzero()  # (C, 1)
        pairs = (ids[some] == table["ids"]) | ~table["named"]
        pairs &= agents[some] == table["agents"]
        ones, twos = pairs.nonzero().unbind(-1)
        ones, equal = some[ones, 0], torch.ones_like(ones, dtype=torch.bool)
        for state, other in zip(states, left, strict=True):
            equal &= same(rows_at(state, place[ones]), other[twos])
        matches = zip(ones[equal].tolist(), twos[equal].tolist(), strict=True)
        for part, entry in sorted(matches, key=lambda pair: (pair[0], -pair[1])):
            if part not in found and entry not in taken:
                found[part] = entry
                taken.add(entry)
        return found

    def _table(self, resumed: list[int], new: dict[str, Tensor]) -> dict[str, Tensor]:
        """The entries that were not `resumed`, and the new ones; the oldest are dropped."""
        old = self.table
        if {n: v.shape[1:] for n, v in old.items()} != {n: v.shape[1:] for n, v in new.items()}:
            return new
        stay = torch.ones_like(old["named"])
        stay[resumed] = False
        limit = max(_FEWEST_OPEN, 4 * len(new["ids"]))
        return {name: torch.cat([old[name][stay], value])[-limit:] for name, value in new.items()}


def rows_at(entry: Tensor, places: Tensor) -> Tensor:
    """The rows at `places` of an entry that may be on another device."""
    return entry[places.to(entry.device)].to(places.device)


def _first_counted(counts: Tensor, first: Tensor, n_steps: Tensor) -> Tensor:
    """The first step from each of `first` on that counts; -1: one of `n_steps` did before."""
    place = torch.cat([counts.nonzero().squeeze(-1), first.new_tensor([-1])])
    found = place[torch.searchsorted(place[:-1], first)]
    return torch.where(n_steps > counts[first], -1, found)
