"""Rejects transform orders that would make the KL, or the record of it, wrong."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from tensordict import NestedKey, unravel_key
from torchrl.envs import transforms as tr
from torchrl.envs.transforms import Compose, Transform

from torchrl_kl._tensordict import as_tuple
from torchrl_kl._torchrl import container_of, declared_keys


def refuse_wrong_order(transform: Any, own_class: type[Transform]) -> None:
    """RuntimeError if a transform after it, in its Compose or those around it, undoes its work."""
    for later in _siblings(transform):
        reason = None
        # This package's own transforms keep the entries of the others, casts keep their values.
        if not isinstance(later, (own_class, tr.DTypeCastTransform, tr.DeviceCastTransform)):
            reason = _interference(later, set(transform.out_keys), set(transform.action_keys))
        if reason is None and transform.needs_ends and _ends_trajectories(later):
            reason = "ends trajectories that the controller would never be told of"
        if reason is not None:
            names = f"{type(later).__name__} comes after {type(transform).__name__}"
            raise RuntimeError(f"{names} and {reason}. Put it before the KL transforms.")


def refuse_rewards_to_go(transform: Any) -> None:
    """RuntimeError if a buffer, whose samples are penalized, adds up rewards that it is given."""
    reward = ("next", *as_tuple(transform.keys.reward))
    siblings = [*_siblings(transform), *_siblings(transform, later=False)]
    sums = [one for one in siblings if isinstance(one, tr.Reward2GoTransform)]
    if any(reward in map(as_tuple, declared_keys(one)[2]) for one in sums):
        raise RuntimeError(
            f"Reward2GoTransform makes {reward} a sum over steps, of which "
            f"{type(transform).__name__} in the same buffer would subtract the KL of the first one "
            "alone. Penalize before: in the env, as `postproc`, or append the stack after it with "
            "`invert=True`."
        )


def warn_of_chunks(transform: Transform) -> None:
    """Warns of a transform before it, in an env, that steps through a chunk of actions."""
    if any(isinstance(one, tr.MultiAction) for one in _siblings(transform, later=False)):
        warnings.warn(
            f"MultiAction comes before {type(transform).__name__}: where an episode ends inside a "
            "chunk of actions, TorchRL runs no later transform. Such a step is not penalized, its "
            "KL is that of the step before, and the controller is not told of the trajectory. If "
            "episodes may end there, use the KL transforms as a `postproc`.",
            stacklevel=2,
        )


def warn_of_late_resets(transform: Any) -> None:
    """Warns of a vector env of Gymnasium that resets an env in the step after its end."""
    vector = any(
        isinstance(one, tr.VecGymEnvTransform) for one in _siblings(transform, later=False)
    )
    # TorchRL's wrapper passes on the attributes of the vector env.
    mode = getattr(transform.env.base_env, "autoreset_mode", None) if vector else None
    if getattr(mode, "value", None) == "NextStep":
        warnings.warn(
            f"{type(transform).__name__} is in a vector env of Gymnasium that resets an env in the "
            "step after its end. TorchRL records that step with a reward of 0 and an action that "
            "nobody took, whose KL is subtracted and counted in that of the next trajectory. Wrap "
            "a vector env with `autoreset_mode=AutoresetMode.SAME_STEP` in GymWrapper, or use "
            "SerialEnv or ParallelEnv.",
            stacklevel=2,
        )


def _siblings(transform: Transform, *, later: bool = True) -> Iterator[Transform]:
    """The transforms after this one, or before, in its Compose and those around it, all opened."""
    # "after" is nearer to the policy: they change the env's outputs later, and actions earlier.
    container = container_of(transform)
    while isinstance(container, Compose):
        siblings = list(container.transforms)
        here = next((i for i, one in enumerate(siblings) if one is transform), len(siblings))
        yield from _flat(siblings[here + 1 :] if later else siblings[:here])
        transform, container = container, container_of(container)


def _flat(transforms: Iterable[object]) -> Iterator[Transform]:
    for transform in transforms:
        if isinstance(transform, Compose):
            yield from _flat(transform.transforms)
        elif isinstance(transform, Transform):
            yield transform


def _interference(later: Transform, written: set[NestedKey], actions: set[NestedKey]) -> str | None:
    """How a later transform undoes the work of one of this package; None if it does not."""
    # Not by the public properties, some of which need an env.
    out_keys, in_keys_inv, out_keys_inv = declared_keys(later)
    # On batches it names entries under "next", where an env's transforms leave that out.
    if spoiled := {_without_next(key) for key in out_keys} & written:
        return (
            f"rewrites {_listed(spoiled)}: the record would no longer say what was subtracted (or "
            "let it write to other keys)"
        )
    if changed := in_keys_inv & out_keys_inv & actions:
        return (
            f"turns {_listed(changed)} into the env's action before the reference sees it, which "
            "would score another action"
        )
    # Without `in_keys` it takes every entry of the observation spec, and they are among these.
    if isinstance(later, tr.CatTensors) and not later.in_keys:
        return f"would make {_listed(written)} part of the observation (or name its `in_keys`)"
    if isinstance(later, (tr.FrameSkipTransform, tr.MultiAction)):
        return "steps the env several times for one action: the penalty would be repeated"
    if isinstance(later, tr.ConditionalPolicySwitch):
        return "lets another policy step the env, whose actions would be scored and penalized, too"
    return None


def _ends_trajectories(later: Transform) -> bool:
    counts = isinstance(later, tr.StepCounter) and later.max_steps is not None
    return counts or isinstance(later, (tr.TerminateTransform, tr.RandomTruncationTransform))


def _without_next(key: NestedKey) -> NestedKey:
    first, *rest = as_tuple(key)
    return unravel_key(tuple(rest)) if first == "next" and rest else key


def _listed(keys: Iterable[NestedKey]) -> str:
    return ", ".join(sorted(map(repr, keys)))
