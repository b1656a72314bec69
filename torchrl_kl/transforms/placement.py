"""Rejects transform orders that would make the KL, or the record of it, wrong."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from torchrl.envs import transforms as tr
from torchrl.envs.transforms import Compose, Transform

from torchrl_kl._torchrl import HOOKS, container_of, declared_keys
from torchrl_kl.keys import as_tuple

# The keys of TorchRL's other transforms say what they change.
_FREE = (
    tr.BatchSizeTransform,
    tr.ConditionalPolicySwitch,
    tr.FrameSkipTransform,
    tr.MacroPrimitiveTransform,
    tr.MultiAction,
    tr.RayTransform,
    tr.VIPRewardTransform,
    tr.VecGymEnvTransform,
)


def refuse_wrong_order(transform: Any, own_class: type[Transform]) -> None:
    """RuntimeError if a transform after it, in its Compose or those around it, undoes its work."""
    for later in later_siblings(transform):
        # This package's own transforms keep the entries of the others.
        if not isinstance(later, own_class) and (reason := _interference(later, transform)):
            names = f"{type(later).__name__} comes after {type(transform).__name__}"
            raise RuntimeError(f"{names} and {reason}. Put it before the KL transforms.")


def refuse_sums(tensordict: TensorDictBase) -> None:
    """RuntimeError if rewards of a batch were added up before they are penalized."""
    found = {as_tuple(key)[-1]: key for key in tensordict.keys(True, True)}
    if added := found.keys() & {"advantage", "value_target"}:
        raise RuntimeError(
            f"the batch has {found[min(added)]!r} already, computed from rewards without the "
            'penalty: compute advantages after the KL transforms, or drop them (`exclude("advantage'
            '", "value_target")`) if they will be computed again.'
        )
    n_summed = tensordict.get(found.get("steps_to_next_obs", "steps_to_next_obs"), None)
    if n_summed is not None and bool((n_summed > 1).any()):
        raise RuntimeError(
            "the batch has 'steps_to_next_obs' above 1: its rewards are sums of several steps, of "
            "which the KL of the first one alone would be subtracted. Use MultiStep after the KL "
            "transforms, with their entries among its `done_keys`, which it leaves alone: on the "
            "batches of a collector, or in a replay buffer to which the stack is appended last, "
            "with `invert=True`."
        )


def later_siblings(transform: Transform) -> Iterator[Transform]:
    """The transforms after this one in its Compose and those around it, all opened."""
    # "after" is nearer to the policy: they change the env's outputs later, and actions earlier.
    container = container_of(transform)
    while isinstance(container, Compose):
        siblings = list(container.transforms)
        here = next((i for i, one in enumerate(siblings) if one is transform), len(siblings))
        parts = (part for one in siblings[here + 1 :] for part in one.modules())
        yield from (p for p in parts if isinstance(p, Transform) and type(p) is not Compose)
        transform, container = container, container_of(container)


def _interference(later: Any, transform: Any) -> str | None:
    """How a later transform undoes, or could undo, the work of this one; None if it does not."""
    own, (written, changed) = {*transform.out_keys}, declared_keys(later)
    read = own.union(transform.in_keys, transform.keys.recorded.keys, transform.recorded_keys)
    if type(later) in (tr.DTypeCastTransform, tr.DoubleToFloat):  # they keep what they do not round
        wide = (torch.float32, torch.float64)
        outer = later.dtype_out
        written = set() if outer in wide else written
        changed = set() if later.dtype_in in wide or not outer.is_floating_point else changed
    if isinstance(later, (tr.RenameTransform, tr.MeanActionSelector)):  # which take entries away
        changed.update(later.out_keys_inv)
    # On batches it names entries under "next", where an env's transforms leave that out.
    if spoiled := {_without_next(key) for key in written} & own:
        return (
            f"rewrites {_listed(spoiled)}: the record would no longer say what was subtracted (or "
            "let it write to other keys)"
        )
    if replaced := changed & read:
        return (
            f"changes {_listed(replaced)} on the way into the env, before the reference sees it, "
            "which would score another action or another state"
        )
    # Without `in_keys` it takes every entry of the observation spec, and they are among these.
    if isinstance(later, tr.CatTensors) and not later.in_keys:
        return f"would make {_listed(own)} part of the observation (or name its `in_keys`)"
    ends = {as_tuple(key)[-1] for key in written} & {"done", "terminated", "truncated"}
    if transform.needs_ends and (ends or _ends_trajectories(later)):
        return "ends trajectories that the controller would never be told of"
    if transform.env is not None and _may_do_anything(later):
        return (
            "may change more than its keys say: rewards, actions, what the policy reads, or how "
            "often the env steps (one that overrides `_apply_transform` alone may come later)"
        )
    return None


def _may_do_anything(later: Transform) -> bool:
    owners = (next(c for c in type(later).__mro__ if hook in vars(c)) for hook in HOOKS)
    known = all(
        getattr(tr, owner.__name__, None) is owner or owner.__module__.startswith("torchrl.record")
        for owner in owners
    )
    return not known or isinstance(later, _FREE)


def _ends_trajectories(later: Transform) -> bool:
    counts = isinstance(later, tr.StepCounter) and later.max_steps is not None
    return counts or isinstance(later, (tr.TerminateTransform, tr.RandomTruncationTransform))


def _without_next(key: NestedKey) -> NestedKey:
    first, *rest = as_tuple(key)
    return unravel_key(tuple(rest)) if first == "next" and rest else key


def _listed(keys: Iterable[NestedKey]) -> str:
    return ", ".join(sorted(map(repr, keys)))
