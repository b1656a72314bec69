"""Where a transform of this package must not stand: inside ParallelEnv's workers, before what undoes its work."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

from tensordict import NestedKey
from torchrl.envs import ParallelEnv
from torchrl.envs.transforms import (
    CatTensors,
    Compose,
    DTypeCastTransform,
    RandomTruncationTransform,
    StepCounter,
    TerminateTransform,
    Transform,
)


def refuse_parallel_worker(name: str) -> None:
    """RuntimeError while ParallelEnv looks at the env of a worker, or runs it, that will see no log-probs.

    With buffers (the default) ParallelEnv hands its workers only actions and states. TorchRL asks a transform whether
    it may stand in a batched env, not in which: only the callers tell ParallelEnv from SerialEnv.
    """
    frame = sys._getframe(1)
    while frame is not None:
        function = frame.f_code.co_name
        if function == "_run_worker_pipe_shared_mem" or (
            function == "_get_metadata" and _has_buffers(frame.f_locals)
        ):
            raise RuntimeError(
                f"{name} stands inside the workers of a ParallelEnv, where the policy's log-prob does not arrive: its "
                "KL would be 0. Put it around the workers, TransformedEnv(ParallelEnv(...), stack), or pass "
                "`use_buffers=False` to ParallelEnv."
            )
        frame = frame.f_back


def _has_buffers(variables: dict[str, object]) -> bool:
    env = variables.get("self")
    return isinstance(env, ParallelEnv) and env._use_buffers is not False


def later_transforms(transform: Transform) -> Iterator[Transform]:
    """What stands after a transform in its Compose and in those around it, with Composes opened."""
    container = _container(transform)
    while isinstance(container, Compose):
        siblings = list(container.transforms)
        here = next(
            (index for index, sibling in enumerate(siblings) if sibling is transform), len(siblings)
        )
        yield from _flat(siblings[here + 1 :])
        transform, container = container, _container(container)


def _container(transform: Transform) -> object:
    reference = vars(transform).get("_container")
    return None if reference is None else reference()


def _flat(transforms: Iterable[object]) -> Iterator[Transform]:
    for transform in transforms:
        if isinstance(transform, Compose):
            yield from _flat(transform.transforms)
        elif isinstance(transform, Transform):
            yield transform


def refuse_spoiler(
    transform: Transform,
    later: Transform,
    written: Iterable[NestedKey],
    actions: Iterable[NestedKey],
) -> None:
    """RuntimeError if `later`, which stands after `transform`, undoes its work.

    Args:
        transform: for the error text.
        later: the transform to look at.
        written: the keys that `transform` writes, which must stay as they are.
        actions: the keys that must reach `transform` as the policy wrote them.
    """
    if isinstance(later, DTypeCastTransform):  # the same values
        return
    # As declared: the properties of some transforms ask for specs, which are only being made.
    out_keys, in_keys_inv, out_keys_inv = (
        set(vars(later).get(name) or ()) for name in ("_out_keys", "_in_keys_inv", "_out_keys_inv")
    )
    who = f"{type(later).__name__} stands after {type(transform).__name__}"
    spoiled, changed = (
        out_keys.intersection(written),
        (in_keys_inv & out_keys_inv).intersection(actions),
    )
    if spoiled:
        raise RuntimeError(
            f"{who} and rewrites {_listed(spoiled)}: the record would no longer say what was charged, and a rescaled "
            "penalty is another coefficient. Put it before the stack, or let it write to other keys."
        )
    if changed:
        raise RuntimeError(
            f"{who} and turns {_listed(changed)} into the env's action before the reference sees it: its log-prob "
            "would be that of another action. Put it before the stack."
        )
    if isinstance(later, CatTensors) and not later.in_keys:
        raise RuntimeError(
            f"{who} without `in_keys`, and would make {_listed(written)} part of the observation. Put it before the "
            "stack, or name its `in_keys`."
        )


def refuse_later_ends(transform: Transform) -> None:
    """RuntimeError if trajectories are cut after `transform`, which TorchRL shows only the ends before it."""
    for later in later_transforms(transform):
        counts = isinstance(later, StepCounter) and later.max_steps is not None
        if counts or isinstance(later, (TerminateTransform, RandomTruncationTransform)):
            raise RuntimeError(
                f"{type(later).__name__} stands after {type(transform).__name__} and ends trajectories that the "
                "controller would never be told of. Put it before the stack."
            )


def _listed(keys: Iterable[NestedKey]) -> str:
    return ", ".join(sorted(map(repr, keys)))
