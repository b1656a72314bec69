"""Batches of steps: their time, who acts in them, and where trajectories begin and end.

*B is the batch of steps, *A the agents of nested actions. Where the last dimension of *B is time,
it is R rows of T steps.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple, cast

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from torch import Tensor

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

    It is False in padding (`mask_key`), in rows that a batched env does not step, after the agent
    is done, and where the mask of agents in turn-based envs, ("agents", "mask"), is False.
    """
    path, shape = keys.path, holder_batch_size(tensordict, (*keys.path, "mask"))
    found = _find(tensordict, ["_step", *([] if mask_key is None else [mask_key])], shape)
    acting = tensordict.get((*path, "mask"), None) if path else None
    if acting is not None and acting.dtype == torch.bool and acting.shape[: len(shape)] == shape:
        found += [acting.reshape(shape)] if acting.numel() == shape.numel() else []  # or of actions
    before = _was_done(tensordict, keys)
    found += [] if before is None else [~before]
    return reduce(torch.logical_and, found) if found else None


def of_values(mask: Tensor | None, shape: Sequence[int]) -> Any:
    """A mask (*B, *A) for values of `shape`: of all agents together, (*B, 1), where any counts."""
    n_dims = len(shape) - 1
    if mask is None or mask.ndim <= n_dims or mask.shape == torch.Size(shape):
        return mask
    return mask.flatten(n_dims).any(-1)


def counted_values(tensordict: TensorDictBase, keys: ResolvedKeys, values: Tensor) -> Tensor:
    """Where values (*B, *A), (*B, *A, 1) or, of all agents, (*B, 1) count: of their shape."""
    mask = of_values(counted(tensordict, keys), values.shape)
    return torch.ones_like(values).bool() if mask is None else expand_right(mask, values.shape)


def _was_done(tensordict: TensorDictBase, keys: ResolvedKeys) -> Tensor | None:
    """True where an agent, or the env, is done before a step, (*B, *A); None if none is."""
    # A step that only resets a vectorized env counts as done: its row ended in the step before.
    path, shape = keys.path, holder_batch_size(tensordict, (*keys.path, "done"))
    names = map(as_tuple, (keys.done, (*path, "done"), "done", AUTORESET_KEY))
    found = _find(tensordict, [n for n in names if path[: len(n) - 1] == n[:-1]], shape)
    before = reduce(torch.logical_or, found) if found else None
    if before is None or torch.compiler.is_compiling() or before.any():
        return before
    return None


def _find(
    tensordict: TensorDictBase, keys: Iterable[NestedKey], shape: Sequence[int]
) -> list[Tensor]:
    """The flags that are there, expanded to `shape`."""
    found = [tensordict.get(key, None) for key in dict.fromkeys(keys)]
    return [expand_right(flag, shape).bool() for flag in found if flag is not None]


def leaf_keys(tensordict: TensorDictBase, keys: Iterable[NestedKey]) -> list[NestedKey]:
    """The keys of tensors: that of a nested tensordict becomes those of all its entries."""
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


_SUMS = (
    "The KL is added up along trajectories: shuffle after the stack, and for a loss shuffle whole "
    "rows, not steps."
)


class Flags(NamedTuple):
    """What the steps of a batch (*B) in time are to the trajectory of each agent, (*B, *A) each.

    The rule of ends, for all who read batches. The trajectory of an agent

    - ends with the step after which the agent, or its env, is done: at `KLKeys(done=...)`, at
      "done" next to it, or at the root's "done", with which an env resets all agents. One that was
      done before does not end again.
    - breaks off before a step that has another id, ("collector", "traj_ids"), or `is_init`. What
      follows is like another row; what broke off may go on in a later batch. But where something
      is done, a collector gives all agents of the env a new id: the trajectories of those that are
      not done go on, under an id that is not known yet.
    - has the steps that count: see `counted`. Others may hold anything.
    """

    ends: Tensor
    counts: Tensor
    breaks: Tensor  # True where the next step is of another trajectory, also after an end
    renamed: Tensor  # True where the trajectory goes on under another id
    begins: Tensor | None  # at the first step of a trajectory; None: there are ids, but no is_init
    ids: Tensor | None
    may_differ: Tensor  # (*B), True where the next state need not be what a step leaves

    @property
    def last(self) -> Tensor:
        """True where a trajectory, or its part in a row, has its last step."""
        return self.ends | self.breaks


def flags(
    tensordict: TensorDictBase,
    keys: ResolvedKeys,
    shape: Sequence[int],
    counts: Any = None,
) -> Flags:
    """The flags of a batch, for values of `shape` and where they count; None: everywhere.

    `shape`: (*B, *A, 1), or (*B, 1) of all agents together.
    """
    step, n_dims = tensordict.get("next"), tensordict.batch_dims

    def of_any(flag: Tensor) -> Tensor:  # of the agents: (*B)
        return flag.bool().unsqueeze(-1).flatten(n_dims).any(-1)

    ends, done = find_ends(tensordict, step, keys, shape)
    counts = done.new_ones(()) if counts is None else of_values(counts, shape)
    counts = expand_right(counts, done.shape)
    others = [step.get(key) for key in step.keys(True, True) if as_tuple(key)[-1] == "done"]
    any_done = reduce(torch.logical_or, map(of_any, [done, *others]))
    renamed, acts = expand_right(any_done, done.shape) & ~done, of_any(counts)
    ids, begins = tensordict.get(TRAJECTORY_KEY, None), tensordict.get("is_init", None)
    changes = torch.zeros_like(any_done)
    if ids is not None:
        ids = expand_right(ids.to(done.device), changes.shape)
        changes[..., :-1] |= ids[..., 1:] != ids[..., :-1]
        ids = expand_right(ids, done.shape)
    if begins is not None:
        changes[..., :-1] |= of_any(begins)[..., 1:]
        begins = expand_right(begins.bool(), done.shape)
    may_differ = any_done | changes | ~acts | ~acts.roll(-1, -1)
    may_differ[..., -1:] = True
    return Flags(
        ends,
        counts,
        expand_right(changes, done.shape) & ~renamed,
        renamed,
        torch.ones_like(done) if ids is None else begins,
        ids,
        may_differ,
    )


def find_ends(
    tensordict: TensorDictBase, step: TensorDictBase, keys: ResolvedKeys, shape: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """The ends of `Flags` for steps from `tensordict` (*B) to `step`, and all that is done after.

    An env step, which has no "next", uses it directly.
    """
    found = _find(step, [keys.done, sibling(keys.done, "done"), "done"], shape[:-1])
    # "done" does not replace a missing flag of another name.
    if not found or (as_tuple(keys.done)[-1] != "done" and step.get(keys.done, None) is None):
        raise MissingKeyError(
            f"there is no {keys.done!r} in the step, where trajectories end: `KLKeys(done=...)`, "
            f"or `set_keys(done=...)` of a loss, names it. The step has {existing_keys(step)}."
        )
    done = reduce(torch.logical_or, found)
    # Most env steps end nothing.
    some = torch.compiler.is_compiling() or done.any()
    if not some or (before := _was_done(tensordict, keys)) is None:
        return done, done
    if before.ndim > done.ndim:  # all agents together go on until none is left
        before = before.flatten(tensordict.batch_dims).all(-1)
    return done & ~expand_right(before, done.shape), done


def read_states(
    tensordict: TensorDictBase, observed: Iterable[NestedKey] | None = None
) -> dict[NestedKey, tuple[Tensor, Tensor]]:
    """What shows whether steps follow one another: before and after each step of *B, (N, ...).

    `observed`: its keys; None: all entries that a step and its "next" have.
    """
    step, last = cast(TensorDictBase, tensordict.get("next")), tensordict.batch_dims - 1
    keys = sorted(step.keys(True, True), key=str) if observed is None else observed
    states = {}
    for key in leaf_keys(tensordict, keys):
        pair = [each.get(key, None) for each in (tensordict, step)]
        if as_tuple(key)[-1] not in _NO_STATE and all(isinstance(each, Tensor) for each in pair):
            before, after = (each.detach().flatten(0, last) for each in pair)
            states[key] = before, after
    return states


def require_order(
    states: Mapping[NestedKey, tuple[Tensor, Tensor]], may_differ: Tensor, consequence: str = _SUMS
) -> None:
    """RuntimeError if steps (*B) do not follow one another but after those that `may_differ`."""
    for key, (before, after) in states.items():
        if before.shape != after.shape:
            continue
        if not (same(after[:-1], before[1:]) | may_differ.flatten()[:-1]).all():
            raise RuntimeError(
                f"the steps of the batch do not follow one another: {key!r} is not what the step "
                'before has in "next", and no trajectory begins there. Is it a shuffled sample '
                f'that kept the name "time"? {consequence}'
            )


def same(one: Tensor, other: Tensor) -> Tensor:
    """Where the rows of two entries (N, ...) are equal, (N,); NaN equals NaN."""
    equal = (one == other) | ((one != one) & (other != other))
    return equal.unsqueeze(-1).flatten(1).all(-1)
