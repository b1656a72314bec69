"""Batches of steps: their time, masks and ends, and sums over trajectories.

*B is the batch of steps, *A the agents of nested actions. Where the last dimension of *B is time,
it is R rows of T steps; K numbers are added up along each trajectory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import NamedTuple, cast

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from torch import Tensor

from torchrl_kl.functional.numbers import Float64State
from torchrl_kl.functional.sums import running_sum
from torchrl_kl.keys import (
    MissingKeyError,
    ResolvedKeys,
    as_tuple,
    existing_keys,
    holder_batch_size,
    sibling,
)

MASK_KEY = ("collector", "mask")
TRAJECTORY_KEY = ("collector", "traj_ids")
AUTORESET_KEY = "autoreset"  # of an env: True where a step resets a row, and ignores the action
# No state: a collector may set "truncated" in the last step of a batch, and a critic that has
# learned since values the same state differently.
_NO_STATE = {"done", "terminated", "truncated", "is_init", "state_value", "state_action_value"}
_FEWEST_OPEN = 256  # so many trajectories may stay open at least, as of asynchronous workers


def expand_right(value: Tensor, shape: Sequence[int]) -> Tensor:
    """Expands a value of the first dimensions of `shape`, perhaps with trailing 1s, to `shape`."""
    if value.shape == torch.Size(shape):
        return value
    # A flag (*B, 1) fits values (*B, *A, 1) once its last 1 is removed.
    while value.ndim and value.shape[-1] == 1 and value.shape != torch.Size(shape[: value.ndim]):
        value = value.squeeze(-1)
    if value.shape != torch.Size(shape[: value.ndim]):
        raise ValueError(
            f"a flag must have the first dimensions of {tuple(shape)}, and perhaps trailing 1s, "
            f"got shape {tuple(value.shape)}."
        )
    return value.reshape(value.shape + (1,) * (len(shape) - value.ndim)).expand(shape)


def counted(
    tensordict: TensorDictBase, keys: ResolvedKeys, *, mask_key: NestedKey | None = MASK_KEY
) -> Tensor | None:
    """True where an agent acts in a step that counts, (*B, *A); None where all do.

    Not so in padding (`mask_key`), in rows that a batched env does not step, after the agent is
    done, and where the mask of agents in turn-based envs, ("agents", "mask"), is False.
    """
    path, shape = keys.path, holder_batch_size(tensordict, (*keys.path, "mask"))
    masks = [tensordict.get(key, None) for key in ("_step", mask_key) if key is not None]
    acting = tensordict.get((*path, "mask"), None) if path else None
    if acting is not None and acting.dtype == torch.bool and acting.shape[: len(shape)] == shape:
        masks += [acting] if acting.numel() == shape.numel() else []  # else it is of actions
    found = [expand_right(mask, shape) for mask in masks if mask is not None]
    before = was_done(tensordict, keys)
    found += [] if before is None else [~before]
    return reduce(torch.logical_and, found) if found else None


def was_done(tensordict: TensorDictBase, keys: ResolvedKeys) -> Tensor | None:
    """True where an agent, or the env, is done before a step, (*B, *A); None if none is.

    So it is in a step that only resets a vectorized env, which has then ended in the step before.
    """
    path, shape = keys.path, holder_batch_size(tensordict, (*keys.path, "done"))
    done_keys = {as_tuple(key) for key in (keys.done, (*path, "done"), "done", AUTORESET_KEY)}
    flags = [tensordict.get(key, None) for key in done_keys if path[: len(key) - 1] == key[:-1]]
    found = [expand_right(flag, shape).bool() for flag in flags if flag is not None]
    before = reduce(torch.logical_or, found) if found else None
    if before is None or torch.compiler.is_compiling() or before.any():
        return before
    return None


def of_values(mask: Tensor | None, shape: Sequence[int]) -> Tensor | None:
    """A mask (*B, *A) for values of `shape`: of all agents together, (*B, 1), where any counts."""
    n_dims = len(shape) - 1
    return mask if mask is None or mask.ndim <= n_dims else mask.flatten(n_dims).any(-1)


def counted_values(tensordict: TensorDictBase, keys: ResolvedKeys, values: Tensor) -> Tensor:
    """Where values (*B, *A), (*B, *A, 1) or, of all agents, (*B, 1) count: of their shape."""
    mask = counted(tensordict, keys)
    if mask is None:
        return torch.ones_like(values, dtype=torch.bool)
    if values.shape != mask.shape:
        mask = cast(Tensor, of_values(mask, values.shape))
    return expand_right(mask, values.shape)


def leaf_keys(tensordict: TensorDictBase, keys: Iterable[NestedKey]) -> list[NestedKey]:
    """The keys; instead of one of a nested tensordict, those of all that it holds."""
    leaves: list[NestedKey] = []
    for key in keys:
        value = tensordict.get(key, None)
        if isinstance(value, TensorDictBase):
            inner = sorted(map(as_tuple, value.keys(True, True)))
            leaves += [unravel_key((*as_tuple(key), *path)) for path in inner]
        else:
            leaves.append(key)
    return leaves


def find_time_dim(tensordict: TensorDictBase, time_dim: int | None) -> int | None:
    """The last batch dimension if it is time, named "time" or given; else None."""
    if time_dim is None:
        names = tensordict.names if tensordict.batch_dims else []
        if "time" not in names:
            return None
        time_dim = names.index("time")
    last = tensordict.batch_dims - 1
    if time_dim not in (last, -1) or last < 0:
        raise ValueError(
            f"`time_dim` must be the last batch dimension, got {time_dim} for a batch of shape "
            f"{tuple(tensordict.batch_size)}: transpose the batch, as TorchRL's recurrent modules "
            "require too."
        )
    return last


def find_ends(step: TensorDictBase, done_key: NestedKey, shape: Sequence[int]) -> Tensor:
    """Where trajectories end in `step`, of `shape`: at `done_key`, or where an env resets."""
    # The "done" at the root is that of envs that reset all agents as soon as one is done.
    # (*B, 1) or (*B, *A, 1) each. Of a flag of another name, "done" is not the default.
    keys = dict.fromkeys([done_key, sibling(done_key, "done"), "done"])
    found = {key: flag for key in keys if (flag := step.get(key, None)) is not None}
    if not found or (as_tuple(done_key)[-1] != "done" and done_key not in found):
        raise MissingKeyError(
            f"there is no {done_key!r} in the step, where trajectories end: `KLKeys(done=...)`, or "
            f"`set_keys(done=...)` of a loss, names it. The step has {existing_keys(step)}."
        )
    return reduce(torch.logical_or, [expand_right(flag, shape) for flag in found.values()])


def state_keys(
    tensordict: TensorDictBase, observed: Iterable[NestedKey] | None = None
) -> list[NestedKey]:
    """Keys of what a step leaves and the next one begins with: of `observed`, or of all entries."""
    step = cast(TensorDictBase, tensordict.get("next"))
    keys = sorted(step.keys(True, True), key=str) if observed is None else observed
    return [
        key
        for key in leaf_keys(tensordict, keys)
        if as_tuple(key)[-1] not in _NO_STATE
        and all(isinstance(each.get(key, None), Tensor) for each in (tensordict, step))
    ]


def read_states(
    tensordict: TensorDictBase,
    keys: list[NestedKey],
    places: Tensor,
    lengths: Mapping[NestedKey, NestedKey] | None = None,
) -> list[Tensor]:
    """The entries of a batch (*B) at places of its steps, (S, ...) each.

    `lengths`: for the key of an entry (*B, L) that of its length, (*B). What is behind that, as a
    text's tokens after its position, is of later states: it is -1.
    """

    def read(key: NestedKey) -> Tensor:
        entry = tensordict.get(key).detach().flatten(0, tensordict.batch_dims - 1)
        return entry[places.to(entry.device)].to(places.device)

    states = []
    for key in keys:
        state, length_key = read(key), (lengths or {}).get(key)
        if length_key is not None and tensordict.get(length_key, None) is not None:
            column = torch.arange(state.shape[-1], device=places.device)
            state = torch.where(column < read(length_key).unsqueeze(-1), state, -1)
        states.append(state)
    return states


def require_order(
    tensordict: TensorDictBase, keys: Iterable[NestedKey], may_differ: Tensor, consequence: str
) -> None:
    """RuntimeError if steps (*R, T) do not follow one another but where they `may_differ`."""
    dim, n_pairs = may_differ.ndim - 1, may_differ.shape[-1]
    for key in keys if may_differ.numel() else ():
        # (*R, T, ...): what a step leaves in "next", and what a step begins with.
        before = cast(TensorDictBase, tensordict.get("next")).get(key, None)
        after = tensordict.get(key, None)
        if before is None or after is None or before.shape != after.shape:
            continue
        before, after = before.narrow(dim, 0, n_pairs), after.narrow(dim, 1, n_pairs)
        if not (_same(before, after, may_differ.ndim) | may_differ).all():
            raise RuntimeError(
                f"the steps of the batch do not follow one another: {key!r} is not what the step "
                'before has in "next", and no trajectory begins there. Is it a shuffled sample '
                f'that kept the name "time"? {consequence}'
            )


def _same(one: Tensor, other: Tensor, n_dims: int) -> Tensor:
    """Where two entries (*N, ...) are equal, (*N) of `n_dims` dimensions; NaN equals NaN."""
    equal = (one == other) | ((one != one) & (other != other))
    # Not by a reshape, since a dimension may be empty.
    while equal.ndim > n_dims:
        equal = equal.all(-1)
    return equal


class TrajectorySums(NamedTuple):
    """The sums of a batch, in float64, and the table of what is open after it."""

    running: Tensor  # up to each step of its trajectory, (*B, *A, K)
    finished: Tensor  # of the trajectories that end, and their steps that count, (N, K + 1)
    # Where the first step that counts of each of them is, (N,): agent * R * T + row * T + step; -1:
    # in an earlier batch.
    began: Tensor
    opened: dict[str, Tensor]  # for `Trajectories.keep`


class _Steps(NamedTuple):
    """The flags of all steps, row by row and agent by agent, (A * R * T,) each."""

    done: Tensor  # True at the last step of a trajectory
    any_done: Tensor  # also of another agent: collectors then change the id
    counts: Tensor
    ids: Tensor  # of the trajectory of each agent
    agents: Tensor
    init: Tensor | None  # True at the first step of a trajectory; None: nothing tells

    @classmethod
    def read(
        cls, tensordict: TensorDictBase, shape: torch.Size, mask: Tensor | None, done_key: NestedKey
    ) -> _Steps:
        """Those of a batch (*B); `shape`: (*B, *A, 1)."""
        step, n_dims = cast(TensorDictBase, tensordict.get("next")), tensordict.batch_dims
        n_places, n_agents = shape[:n_dims].numel(), shape[n_dims:].numel()

        def flat(entry: Tensor) -> Tensor:
            return expand_right(entry, shape).reshape(n_places, n_agents).T.flatten()

        ends = find_ends(step, done_key, shape).bool()
        keys = [key for key in step.keys(True, True) if as_tuple(key)[-1] == "done"]
        flags = [ends, *(step.get(key).bool() for key in keys)]
        flags = [flag.unsqueeze(-1).flatten(n_dims).any(-1) for flag in flags]
        gone, init = tensordict.get(done_key, None), tensordict.get("is_init", None)
        done, ids = flat(ends), tensordict.get(TRAJECTORY_KEY, None)
        counts = torch.ones_like(done) if mask is None else flat(mask)
        agents = torch.arange(len(done), device=done.device) // n_places
        return cls(
            done,
            flat(reduce(torch.logical_or, flags)),
            counts if gone is None else counts & ~flat(gone.bool()),
            agents if ids is None else agents + n_agents * flat(ids.to(done.device)),
            agents,
            None if init is None else flat(init.bool()),
        )


class Trajectories(Float64State):
    """The sums of trajectories that batches left open: one table, of M entries.

    A row goes on with the entry that has its id and was left in the state in which it begins. Any
    other one begins a trajectory if `is_init` says so or, without that, if no unfinished one has
    its id; if not, it counts from its next end on. What follows a change of id, or `is_init`, where
    nothing is done, is like another row. Without ids nothing stays open.

    State: `ids` (M,), `sums` (M, K + 2), and the states in which they were left, (M, ...) each.
    """

    ids: Tensor
    sums: Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("ids", torch.zeros(0, dtype=torch.long))
        self.register_buffer("sums", torch.zeros(0, 0, dtype=torch.float64))

    def add(
        self,
        tensordict: TensorDictBase,
        values: Tensor,
        mask: Tensor | None,
        done_key: NestedKey,
        *,
        observed: Iterable[NestedKey] | None = None,
        check_order: bool = True,
    ) -> TrajectorySums:
        """Adds up a batch (*B) whose last dimension is time; `keep` makes what is open the state.

        `values`: (*B, *A, K); `observed`: keys that show whether steps follow one another.
        """
        batch_size = tensordict.batch_size
        shape, keys = values.shape, state_keys(tensordict, observed)
        if not values.numel():
            empty = values.new_zeros(0, shape[-1] + 1).double()
            return TrajectorySums(values.double(), empty, self.ids[:0], dict(self.named_buffers()))
        n_places, n_steps = batch_size.numel(), batch_size[-1]
        steps = _Steps.read(tensordict, torch.Size((*shape[:-1], 1)), mask, done_key)
        numbered, init = tensordict.get(TRAJECTORY_KEY, None) is not None, steps.init
        self.to(steps.done.device)
        place = torch.arange(len(steps.done), device=steps.done.device)
        # Between a step and the next one, (A * R * T - 1,).
        row_ends = place[1:] % n_steps == 0
        changed = steps.ids[1:] != steps.ids[:-1]
        changed = changed if init is None else changed | init[1:]
        if check_order:
            may_differ = steps.any_done[:-1] | changed | ~steps.counts[1:] | row_ends
            may_differ = torch.cat([may_differ, row_ends.new_ones(1)])[:n_places]
            require_order(tensordict, keys, may_differ.reshape(batch_size)[..., :-1], _SHUFFLED)
        # Segments: a row, or its part between changes. Their first and last steps, (S,) each.
        # The id changes where an agent is done, also for those that go on.
        goes_on, one = steps.any_done & ~steps.done, row_ends.new_ones(1)
        cut = (changed & ~goes_on[:-1]) | row_ends
        first = torch.cat([one, cut]).nonzero().squeeze(-1)
        last = torch.cat([cut, one]).nonzero().squeeze(-1)
        at_row, ids = first % n_steps == 0, steps.ids[first]
        left_ids = torch.where(goes_on, -1 - steps.agents, steps.ids)[last]
        left = read_states(cast(TensorDictBase, tensordict.get("next")), keys, last % n_places)
        entries = dict[int, int]()
        if init is not None:
            begins = init[first] if numbered else init[first] | at_row
        else:
            unfinished = self.ids[(self.sums[:, -2:] != 0).any(-1)]
            is_new = ~torch.isin(ids, unfinished) & _is_first(ids) if numbered else at_row
            begins = is_new | (steps.done.roll(1)[first] & ~at_row)
        if numbered:
            some = torch.isin(ids, self.ids) | (at_row & (self.ids < 0).any())
            some = some if init is None else some & ~init[first]
            rows = some.nonzero().squeeze(-1)  # that may go on with an entry, (C,)
            entered = read_states(tensordict, keys, first[rows] % n_places)
            if [each.shape[1:] for each in self._left] == [each.shape[1:] for each in entered]:
                wanted, agents = ids[rows].unsqueeze(-1), steps.agents[first][rows].unsqueeze(-1)
                pairs = (wanted == self.ids) | (self.ids == -1 - agents)
                entries = _match(pairs, rows, entered, self._left)
        # Two columns more: the steps that count, and whether the beginning was not seen.
        values = values.detach().double().reshape(n_places, -1, values.shape[-1]).transpose(0, 1)
        addends = torch.where(steps.counts.unsqueeze(-1), values.flatten(0, 1), 0.0)
        counted = steps.counts.double().unsqueeze(-1)
        addends = torch.cat([addends, counted, torch.zeros_like(counted)], -1)
        known = torch.zeros_like(at_row)
        known[[*entries]] = True
        addends[first[~known & ~begins], -1] = 1.0
        if entries:
            addends[first[[*entries]]] += self.sums[[*entries.values()]]
        cuts = steps.done | torch.cat([cut, one])
        sums = running_sum(addends.T, cuts.expand(addends.shape[-1], -1)).T
        ended = steps.done & (sums[:, -2] > 0) & (sums[:, -1] == 0)
        # The step where the trajectory of a step begins in this batch, the first one of it that
        # counts, and whether it began before.
        origin = torch.where(torch.cat([one, cuts[:-1]]), place, 0).cummax(0).values
        counted_next = torch.where(steps.counts, place, len(place)).flip(0).cummin(0).values.flip(0)
        earlier = torch.zeros_like(steps.done)
        earlier[first[~begins | known]] = True
        began = torch.where(earlier[origin], -1, counted_next[origin])
        # Nothing goes on behind an end that others follow; a collector may have written the rest.
        followed = ((place + 1) % n_steps > 0) & steps.counts.roll(-1)
        stays = ~(steps.done & followed)[last] & numbered
        opened = self._table(
            [*entries.values()],
            left_ids[stays],
            torch.where(steps.done[last].unsqueeze(-1), 0.0, sums[last])[stays],
            [each[stays] for each in left],
        )
        running = sums[:, :-2].reshape(-1, n_places, sums.shape[-1] - 2).transpose(0, 1)
        return TrajectorySums(running.reshape(shape), sums[ended][:, :-1], began[ended], opened)

    def keep(self, opened: dict[str, Tensor]) -> None:
        """Makes what `add` has left open the state."""
        self._buffers.clear()
        self._buffers.update(opened)

    @property
    def _left(self) -> list[Tensor]:
        return [value for name, value in self._buffers.items() if name.startswith("left")]  # type: ignore[misc]

    def _table(
        self, resumed: list[int], ids: Tensor, sums: Tensor, states: list[Tensor]
    ) -> dict[str, Tensor]:
        """The entries that were not `resumed`, and the new ones; the oldest are dropped."""
        new = {"ids": ids, "sums": sums, **{f"left{i}": each for i, each in enumerate(states)}}
        old = dict(self.named_buffers())
        if {n: v.shape[1:] for n, v in old.items()} != {n: v.shape[1:] for n, v in new.items()}:
            return new
        stay = torch.ones_like(self.ids, dtype=torch.bool)
        stay[resumed] = False
        limit = max(_FEWEST_OPEN, 4 * len(ids))
        return {name: torch.cat([old[name][stay], value])[-limit:] for name, value in new.items()}

    def _load_from_state_dict(self, state_dict, prefix, *args):
        entries = {k.removeprefix(prefix): v for k, v in state_dict.items() if k.startswith(prefix)}
        if {"ids", "sums"} <= entries.keys():  # of other sizes than the present ones
            self.keep({name: torch.empty_like(value) for name, value in entries.items()})
        super()._load_from_state_dict(state_dict, prefix, *args)


def _is_first(values: Tensor) -> Tensor:
    """Where a value comes for the first time, (S,)."""
    _, number = values.unique(return_inverse=True)
    place = torch.arange(len(values), device=values.device)
    firsts = torch.full_like(place, len(place)).scatter_reduce(0, number, place, "amin")
    return firsts[number] == place


def _match(
    pairs: Tensor, rows: Tensor, states: list[Tensor], others: list[Tensor]
) -> dict[int, int]:
    """Of pairs (C, M), for each of the `rows` (C,) the last entry that is in the same state."""
    ones, twos = pairs.nonzero().unbind(-1)
    equal = torch.ones_like(ones, dtype=torch.bool)
    for state, other in zip(states, others, strict=True):
        equal &= _same(state[ones], other[twos], 1)
    found, taken = dict[int, int](), set[int]()
    matches = zip(rows[ones[equal]].tolist(), twos[equal].tolist(), strict=True)
    for row, other in sorted(matches, key=lambda pair: (pair[0], -pair[1])):
        if row not in found and other not in taken:
            found[row] = other
            taken.add(other)
    return found


_SHUFFLED = (
    "The controller adds up the KL along trajectories: shuffle after the stack, or whole rows."
)
