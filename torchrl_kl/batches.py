"""Batches of steps: their time, who acts in them, and where trajectories begin and end.

*B is the batch of steps, *A the agents of nested actions. Where the last dimension of *B is time,
it is R rows of T steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from typing import NamedTuple, cast

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


class Flags(NamedTuple):
    """What the steps of a batch (*B) are to the trajectory of each agent, (*B, *A) each.

    The rule of ends, for all who read batches. The trajectory of an agent

    - ends with the step after which the agent, or its env, is done: at `KLKeys(done=...)`, at
      "done" next to it, or at the root's "done", with which an env resets all agents. One that was
      done before does not end again.
    - breaks off before a step that has another id, ("collector", "traj_ids"), or `is_init`. What
      follows is like another row; what broke off may go on in a later batch. But where something
      is done, the collector gives all agents of the env a new id: the trajectories of those that
      are not done go on, under an id that is not known yet.
    - has the steps that count: see `counted`. Others may hold anything.
    """

    ends: Tensor
    counts: Tensor
    # The others are of batches in time. True where the next step belongs to another trajectory,
    # also after an end; where the trajectory goes on under another id; and at its first step.
    breaks: Tensor | None = None
    renamed: Tensor | None = None
    begins: Tensor | None = None  # (*B); None if there is no `is_init`
    ids: Tensor | None = None  # (*B)
    batch_size: torch.Size = torch.Size()

    @property
    def last(self) -> Tensor:
        """True where a trajectory, or its part in a row, has its last step."""
        return self.ends | cast(Tensor, self.breaks)


def flags(
    tensordict: TensorDictBase,
    keys: ResolvedKeys,
    shape: Sequence[int],
    *,
    counts: Tensor | None = None,
    following: TensorDictBase | None = None,
) -> Flags:
    """The flags of values of `shape`: (*B, *A, 1), or (*B, 1) of all agents together.

    `counts`: True where they count, None where all do; `following`: what an env step leads to. In a
    batch, that is "next", and the last dimension of the batch is time.
    """
    step = cast(TensorDictBase, tensordict.get("next")) if following is None else following
    n_dims, agents = tensordict.batch_dims, shape[:-1]
    done, before = _find_done(step, keys.done, agents), was_done(tensordict, keys)
    ends = done
    if before is not None:  # all agents together go on until none is left
        before = before if before.ndim == len(agents) else before.flatten(n_dims).all(-1)
        ends = done & ~expand_right(before, agents)
    fitting = of_values(counts, shape)
    counts = torch.ones_like(ends) if fitting is None else expand_right(fitting, agents)
    if following is not None:
        return Flags(ends, counts)
    others = [step.get(key) for key in step.keys(True, True) if as_tuple(key)[-1] == "done"]
    any_done = [flag.bool().unsqueeze(-1).flatten(n_dims).any(-1) for flag in (done, *others)]
    renamed = expand_right(reduce(torch.logical_or, any_done), agents) & ~done
    ids, begins = tensordict.get(TRAJECTORY_KEY, None), tensordict.get("is_init", None)
    changes = torch.zeros(tensordict.batch_size, dtype=torch.bool, device=done.device)
    if ids is not None:
        ids = ids.reshape(changes.shape).to(done.device)
        changes[..., :-1] |= ids[..., 1:] != ids[..., :-1]
    if begins is not None:
        begins = begins.bool().reshape(changes.shape)
        changes[..., :-1] |= begins[..., 1:]
    breaks = expand_right(changes, agents) & ~renamed
    return Flags(ends, counts, breaks, renamed, begins, ids, tensordict.batch_size)


def _find_done(step: TensorDictBase, done_key: NestedKey, shape: Sequence[int]) -> Tensor:
    """True where `step` leaves an agent, or its env, done, of `shape`."""
    # The "done" at the root is that of envs that reset all agents as soon as one is done.
    # (*B, 1) or (*B, *A, 1) each. Of a flag of another name, "done" is not the default.
    keys = dict.fromkeys([done_key, sibling(done_key, "done"), "done"])
    found = {key: flag for key in keys if (flag := step.get(key, None)) is not None}
    if not found or (as_tuple(done_key)[-1] != "done" and done_key not in found):
        raise MissingKeyError(
            f"there is no {done_key!r} in the step, where trajectories end: `KLKeys(done=...)`, or "
            f"`set_keys(done=...)` of a loss, names it. The step has {existing_keys(step)}."
        )
    return reduce(torch.logical_or, [expand_right(flag, shape).bool() for flag in found.values()])


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


def require_trajectories(
    tensordict: TensorDictBase, flags: Flags, observed: Iterable[NestedKey]
) -> None:
    """RuntimeError unless the steps of trajectories follow one another, by what is `observed`."""
    done, apart, counts = (
        cast(Tensor, flag).unsqueeze(-1).flatten(tensordict.batch_dims).any(-1)
        for flag in (flags.ends, flags.breaks | flags.renamed, flags.counts)
    )
    may_differ = (done | apart | ~counts)[..., :-1] | ~counts[..., 1:]
    require_order(tensordict, observed, may_differ, _SHUFFLED)


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
        if not (same(before, after, may_differ.ndim) | may_differ).all():
            raise RuntimeError(
                f"the steps of the batch do not follow one another: {key!r} is not what the step "
                'before has in "next", and no trajectory begins there. Is it a shuffled sample '
                f'that kept the name "time"? {consequence}'
            )


def same(one: Tensor, other: Tensor, n_dims: int) -> Tensor:
    """Where two entries (*N, ...) are equal, (*N) of `n_dims` dimensions; NaN equals NaN."""
    equal = (one == other) | ((one != one) & (other != other))
    # Not by a reshape, since a dimension may be empty.
    while equal.ndim > n_dims:
        equal = equal.all(-1)
    return equal


_SHUFFLED = (
    "The KL is added up along trajectories: shuffle after the stack, and for a loss shuffle whole "
    "rows, not steps."
)
