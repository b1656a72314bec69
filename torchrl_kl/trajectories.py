"""Sums over trajectories that may come in pieces, from batch to batch.

*B is a batch of R rows of T steps, *A its agents, and L = R * T * A: the steps of the first agent,
row by row, then those of the next one. K numbers are added up along each trajectory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from torchrl_kl.batches import Flags, same
from torchrl_kl.functional.numbers import Float64State
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


class _Parts(NamedTuple):
    """The parts of trajectories in a batch, (S,) each: of a row, up to an end or a break."""

    first: Tensor  # numbers of the first and the last step, below L
    last: Tensor
    agents: Tensor
    ids: Tensor | None  # of the first step
    begins: Tensor | None  # `is_init` of the first step
    ends: Tensor  # True if the trajectory ends with the part
    follows_end: Tensor  # True if it begins behind an end in the same row
    apart: Tensor  # True if it begins a row, or behind a break
    may_go_on: Tensor  # True if another batch may have more of the trajectory

    @classmethod
    def find(cls, flags: Flags, ends: Tensor, breaks: Tensor, counts: Tensor) -> _Parts:
        """The parts between ends and breaks; `ends`, `breaks` and `counts` are (L,)."""
        n_places, n_steps = flags.batch_size.numel(), flags.batch_size[-1]
        row_ends = (torch.arange(len(ends), device=ends.device) + 1) % n_steps == 0
        stops = breaks | row_ends
        last = (ends | stops).nonzero().squeeze(-1)
        first = (last + 1).roll(1)
        first[:1] = 0
        ids, begins = (
            None if flag is None else flag.flatten()[first % n_places]
            for flag in (flags.ids, flags.begins)
        )
        # A collector may write an end into the last step of a batch, with padding behind it, and
        # go on; but not where steps that count follow.
        followed = ~row_ends & counts.roll(-1)
        return cls(
            first,
            last,
            first // n_places,
            ids,
            begins,
            ends[last],
            (ends & ~row_ends).roll(1)[first],
            stops.roll(1)[first],
            (stops & ~(ends & followed))[last],
        )


class Trajectories(Float64State):
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

    State: of each entry the id and the agent; `named`, whether it goes on under this id, or under
    one that is not known yet; `n_steps` and `whole`, as above, (M,) each; `sums`, (M, K); the
    states in which they were left, (M, ...) each.
    """

    ids: Tensor
    agents: Tensor
    named: Tensor
    n_steps: Tensor
    whole: Tensor
    sums: Tensor

    def __init__(self):
        super().__init__()
        for name in ("ids", "agents", "n_steps"):
            self.register_buffer(name, torch.zeros(0, dtype=torch.long))
        for name in ("named", "whole"):
            self.register_buffer(name, torch.zeros(0, dtype=torch.bool))
        self.register_buffer("sums", torch.zeros(0, 0, dtype=torch.float64))

    def add(
        self, flags: Flags, states: Iterable[tuple[Tensor, Tensor]], columns: Tensor
    ) -> TrajectorySums:
        """Adds up a batch (*B) in time; `keep` makes what is open the state.

        `states`: what shows whether steps follow one another, before and after each step of *B,
        (R * T, ...) each; `columns`: what is added up, (*B, *A, K).
        """
        shape, n_columns, n_places = columns.shape, columns.shape[-1], flags.batch_size.numel()
        n_agents = shape[len(flags.batch_size) : -1].numel()
        before, after = zip(*states, strict=True) if (states := list(states)) else ((), ())

        def flat(entry: Tensor | None, *size: int) -> Tensor:  # (*B, *A, ...) as (L, ...)
            entry = cast(Tensor, entry).reshape(n_places, n_agents, *size)
            return entry.transpose(0, 1).flatten(0, 1)

        ends, breaks, counts = flat(flags.ends), flat(flags.breaks), flat(flags.counts)
        self.to(ends.device)
        parts = _Parts.find(flags, ends, breaks, counts)
        matches = self._match(parts, before, n_places)
        resumed, entries = [*matches], [*matches.values()]
        whole, n_before = self._begin(parts), torch.zeros_like(parts.first)
        addends = torch.where(counts.unsqueeze(-1), flat(columns.detach().double(), n_columns), 0.0)
        if matches:
            whole[resumed], n_before[resumed] = self.whole[entries], self.n_steps[entries]
            addends[parts.first[resumed]] += self.sums[entries]
        running, n_steps, began = _add_up(parts, addends, counts)
        n_steps = n_steps + n_before
        finished = parts.ends & (n_steps > 0) & whole
        opened = dict(self.named_buffers())
        if flags.ids is not None:
            place, over = parts.last % n_places, parts.ends
            left = {
                "ids": flags.ids.flatten()[place],
                "agents": parts.agents,
                "named": ~flat(flags.renamed)[parts.last],
                "n_steps": n_steps.masked_fill(over, 0),
                "whole": whole | over,
                "sums": running[parts.last].masked_fill(over.unsqueeze(-1), 0.0),
                **{f"left{i}": _rows(state, place) for i, state in enumerate(after)},
            }
            left = {name: value[parts.may_go_on] for name, value in left.items()}
            opened = self._table(entries, left)
        return TrajectorySums(
            running.reshape(n_agents, n_places, n_columns).transpose(0, 1).reshape(shape),
            running[parts.last][finished],
            torch.where(n_before > 0, -1, began)[finished],
            opened,
        )

    def keep(self, opened: dict[str, Tensor]) -> None:
        """Makes what `add` has left open the state."""
        self._buffers.clear()
        self._buffers.update(opened)

    def _begin(self, parts: _Parts) -> Tensor:
        """True where a part begins a trajectory, if it does not go on with an entry, (S,)."""
        if parts.ids is None:
            return torch.ones_like(parts.ends)
        if parts.begins is not None:
            return parts.begins | ~parts.apart
        unfinished = (self.n_steps > 0) | ~self.whole
        known = torch.stack([self.agents, self.ids])[:, unfinished]
        names = torch.cat([known, torch.stack([parts.agents, parts.ids])], 1)
        number = names.unique(dim=1, return_inverse=True)[1]
        place = torch.arange(len(number), device=number.device)
        firsts = torch.full_like(place, len(place)).scatter_reduce(0, number, place, "amin")
        return (firsts[number] == place)[known.shape[1] :] | parts.follows_end

    def _match(self, parts: _Parts, states: Sequence[Tensor], n_places: int) -> dict[int, int]:
        """The entry with which a part goes on, by the numbers of both."""
        found, taken = dict[int, int](), set[int]()
        old = [value for name, value in self._buffers.items() if name.startswith("left")]
        if parts.ids is None or [e.shape[1:] for e in old] != [e.shape[1:] for e in states]:  # type: ignore[union-attr]
            return found
        may = parts.apart & (torch.isin(parts.ids, self.ids) | ~self.named.all())
        may = may if parts.begins is None else may & ~parts.begins
        rows = may.nonzero().squeeze(-1)
        pairs = ~self.named | (parts.ids[rows].unsqueeze(-1) == self.ids)
        ones, twos = (
            (pairs & (parts.agents[rows].unsqueeze(-1) == self.agents)).nonzero().unbind(-1)
        )
        ones = rows[ones]
        equal = torch.ones_like(ones, dtype=torch.bool)
        for state, other in zip(states, old, strict=True):
            equal &= same(_rows(state, parts.first[ones] % n_places), cast(Tensor, other)[twos], 1)
        matches = zip(ones[equal].tolist(), twos[equal].tolist(), strict=True)
        for part, entry in sorted(matches, key=lambda pair: (pair[0], -pair[1])):
            if part not in found and entry not in taken:
                found[part] = entry
                taken.add(entry)
        return found

    def _table(self, resumed: list[int], new: dict[str, Tensor]) -> dict[str, Tensor]:
        """The entries that were not `resumed`, and the new ones; the oldest are dropped."""
        old = dict(self.named_buffers())
        if {n: v.shape[1:] for n, v in old.items()} != {n: v.shape[1:] for n, v in new.items()}:
            return new
        stay = torch.ones_like(self.whole)
        stay[resumed] = False
        limit = max(_FEWEST_OPEN, 4 * len(new["ids"]))
        return {name: torch.cat([old[name][stay], value])[-limit:] for name, value in new.items()}

    def _load_from_state_dict(self, state_dict, prefix, *args):
        entries = {k.removeprefix(prefix): v for k, v in state_dict.items() if k.startswith(prefix)}
        if {"ids", "sums"} <= entries.keys():  # of other sizes than the present ones
            self.keep({name: torch.empty_like(value) for name, value in entries.items()})
        super()._load_from_state_dict(state_dict, prefix, *args)


def _add_up(parts: _Parts, addends: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sums (L, K) up to each step; how many steps of a part count, and which is the first, (S,)."""
    stops = torch.zeros_like(counts)
    stops[parts.last] = True
    running = running_sum(addends.T, stops.expand(addends.shape[-1], -1)).T
    counted = counts.nonzero().squeeze(-1)
    start = torch.searchsorted(counted, parts.first)
    n_steps = torch.searchsorted(counted, parts.last, right=True) - start
    return running, n_steps, torch.cat([counted, counted.new_tensor([-1])])[start]


def _rows(entry: Tensor, places: Tensor) -> Tensor:
    """The rows at `places` of an entry that may be on another device."""
    return entry[places.to(entry.device)].to(places.device)
