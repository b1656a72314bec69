"""Rejects transform orders that would make the KL, or the record of it, wrong."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from tensordict import NestedKey, TensorDictBase, unravel_key
from torchrl.envs import transforms as tr
from torchrl.envs.transforms import Compose, Transform

from torchrl_kl._torchrl import container_of, declared_keys
from torchrl_kl.keys import as_tuple


def refuse_wrong_order(transform: Any, own_class: type[Transform]) -> None:
    """RuntimeError if a transform after it, in its Compose or those around it, undoes its work."""
    for later in later_siblings(transform):
        reason = None
        # This package's own transforms keep the entries of the others, casts keep their values.
        if not isinstance(later, (own_class, tr.DTypeCastTransform, tr.DeviceCastTransform)):
            reason = _interference(later, set(transform.out_keys), set(transform.action_keys))
        if reason is None and transform.needs_ends and _ends_trajectories(later):
            reason = "ends trajectories that the controller would never be told of"
        if reason is not None:
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
            "transforms: on the batches that a collector returns, or in a replay buffer to which "
            "the stack is appended last, with `invert=True`."
        )


def later_siblings(transform: Transform) -> Iterator[Transform]:
    """The transforms after this one in its Compose and those around it, all opened."""
    # "after" is nearer to the policy: they change the env's outputs later, and actions earlier.
    container = container_of(transform)
    while isinstance(container, Compose):
        siblings = list(container.transforms)
        here = next((i for i, one in enumerate(siblings) if one is transform), len(siblings))
        parts = (part for one in siblings[here + 1 :] for part in one.modules())
        yield from (p for p in parts if isinstance(p, Transform) and not isinstance(p, Compose))
        transform, container = container, container_of(container)


def _interference(later: Transform, written: set[NestedKey], actions: set[NestedKey]) -> str | None:
    """How a later transform undoes the work of one of this package; None if it does not."""
    # Not by the public properties, some of which need an env.
    out_keys, _, out_keys_inv = declared_keys(later)
    # On batches it names entries under "next", where an env's transforms leave that out.
    if spoiled := {_without_next(key) for key in out_keys} & written:
        return (
            f"rewrites {_listed(spoiled)}: the record would no longer say what was subtracted (or "
            "let it write to other keys)"
        )
    if changed := out_keys_inv & actions:
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
