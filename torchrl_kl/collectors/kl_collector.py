"""One call that connects a KL stack to any of TorchRL's collectors, in one process or in many."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torchrl.collectors import BaseCollector, Collector, MultiAsyncCollector, MultiSyncCollector
from torchrl.collectors.distributed import DistributedCollector, RayCollector
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType

from torchrl_kl.collectors.links import LearnerLink, WorkerLink
from torchrl_kl.collectors.watched import (
    WatchedCollector,
    WatchedDistributed,
    WatchedMultiAsync,
    WatchedMultiSync,
    WatchedRay,
    WatchedSingle,
)
from torchrl_kl.collectors.workers import UniqueTrajectories
from torchrl_kl.controllers import ConstantKLController
from torchrl_kl.transforms import KLConstrainedTransform

_WATCHED: dict[type, type[WatchedCollector]] = {
    Collector: WatchedSingle,
    MultiSyncCollector: WatchedMultiSync,
    MultiAsyncCollector: WatchedMultiAsync,
    DistributedCollector: WatchedDistributed,
    RayCollector: WatchedRay,
}


def kl_collector(
    collector_class: type[BaseCollector],
    /,
    create_env_fn: Callable[..., EnvBase] | EnvBase | Sequence[Callable[..., EnvBase]],
    policy: nn.Module,
    stack: KLConstrainedTransform,
    *,
    where: Literal["learner", "workers"] = "learner",
    num_workers: int = 1,
    frames_per_batch: int,
    total_frames: int,
    **kwargs: Any,
) -> Any:
    """A collector of TorchRL whose batches are penalized for the KL to the stack's reference.

    The docstring of `torchrl_kl.collectors` compares the two values of `where`, and says what you
    may rely on.

    Args:
        collector_class: Collector, MultiSyncCollector, MultiAsyncCollector, DistributedCollector or
            RayCollector.
        create_env_fn: makes an env; or a list, one for each worker; or, for a Collector, the env.
        policy: the actor, which records its log-prob.
        stack: the stack, which is in no env. Freeze it to stop its controller.
        where: where the reference is evaluated.
        num_workers: how many workers; a Collector has one, in this process.
        frames_per_batch: of all workers together if they are synchronous, else of one.
        total_frames: when to stop.
        kwargs: other arguments of `collector_class`. A `postproc` runs before the stack.

    Raises:
        TypeError, ValueError: if an argument is of another type, or would make the KL wrong.
        RuntimeError: while collecting, if a worker died or rows were joined along time.

    Example:
        >>> from torchrl.collectors import Collector
        >>> from torchrl_kl import GPT, AdaptiveKLController, GPTActor, KLConstrainedTransform
        >>> from torchrl_kl import kl_collector
        >>> from torchrl_kl.envs import DigitLanguageEnv
        >>> policy = GPTActor(GPT(vocab_size=11, block_size=8))
        >>> controller = AdaptiveKLController(init_coeff=0.1, target=0.5, horizon=1000)
        >>> stack = KLConstrainedTransform(policy, controller, update_every=8)
        >>> make_env = lambda: DigitLanguageEnv(batch_size=(8,))
        >>> arguments = {"where": "workers", "frames_per_batch": 32, "total_frames": 64}
        >>> for batch in kl_collector(Collector, make_env, policy, stack, **arguments):
        ...     print(f"{batch['next', 'kl_coeff'].mean():.4f}")
        0.1000
        0.0998
    """
    envs = create_env_fn if isinstance(create_env_fn, Sequence) else [create_env_fn] * num_workers
    given = {**kwargs, "where": where, "num_workers": num_workers, "envs": envs}
    _check_arguments(collector_class, stack, given)
    kwargs |= {"frames_per_batch": frames_per_batch, "total_frames": total_frames}
    over_ray, in_process = collector_class is RayCollector, collector_class is Collector
    link = LearnerLink(stack) if where == "learner" else WorkerLink(stack, over_ray=over_ray)
    factories: Any = [link.env_factory(env, in_process=in_process) for env in envs]
    env = factories[0] if in_process else factories
    return _WATCHED[collector_class](
        env, policy, link=link, **_arguments(collector_class, num_workers, kwargs)
    )


def _check_arguments(collector_class: Any, stack: Any, given: dict[str, Any]) -> None:
    if collector_class not in _WATCHED:
        names = ", ".join(known.__name__ for known in _WATCHED)
        raise TypeError(f"`collector_class` must be one of {names}, got {collector_class!r}.")
    if not (isinstance(stack, KLConstrainedTransform) and stack.record):
        raise TypeError(f"`stack` must be a KLConstrainedTransform, got {type(stack).__name__}.")
    refusal = next(_refusals(collector_class, stack, given), None)
    if refusal is not None:
        raise ValueError(refusal)


def _refusals(kind: type, stack: KLConstrainedTransform, given: dict[str, Any]) -> Iterator[str]:
    """Why arguments are refused: they would fail late, or make the KL wrong without an error."""
    where, num_workers = given["where"], given["num_workers"]
    if stack.in_env:
        yield "`stack` must not be in an env: `where` says where its copies go."
    if where not in ("learner", "workers"):
        yield f'`where` must be "learner" or "workers", got {where!r}.'
    if num_workers < 1 or (kind is Collector and num_workers != 1):
        yield (
            f"`num_workers` must be at least 1, and 1 for a Collector, got {num_workers}: for "
            "several workers use MultiSyncCollector or MultiAsyncCollector."
        )
    if len(given["envs"]) != num_workers:
        yield (
            "`create_env_fn` must be one callable or one per worker, got "
            f"{len(given['envs'])} for {num_workers}."
        )
    if _given("replay_buffer", given) is not None:
        yield (
            "`replay_buffer` must be left out: batches that workers write into a buffer do not "
            "reach the controller. Extend the buffer with the batches of the collector."
        )
    if (given.get("init_random_frames") or 0) > 0:
        yield (
            "`init_random_frames` must be left out: frames of a random policy have no log-prob, "
            "and would be penalized and counted as if it were 0."
        )
    if _given("track_traj_ids", given) is False:
        yield (
            "`track_traj_ids` must be left True: without ids the KL of a trajectory that "
            "continues in the next batch would be lost."
        )
    moves = not (stack.frozen or isinstance(stack.controller, ConstantKLController))
    if moves and given.get("exploration_type", ExplorationType.RANDOM) != ExplorationType.RANDOM:
        yield (
            "`exploration_type` must be RANDOM while the controller adapts: the KL of actions "
            "that are not drawn from the policy is biased. Freeze the stack for an evaluation."
        )
    if given.get("cat_results") == -1:
        yield (
            "`cat_results` must not be -1: it joins the rows of several workers along time, and "
            "their open trajectories would look finished."
        )
    is_sync = kind in (Collector, MultiSyncCollector) or given.get("sync")
    if _given("set_truncated", given) and not is_sync:
        yield (
            "`set_truncated` must be left out with asynchronous workers: the batch that shows "
            "whether a truncation ended its trajectory may come from another worker."
        )
    if where == "workers":
        yield from _refusals_with_workers(kind, given)


def _refusals_with_workers(kind: type, given: dict[str, Any]) -> Iterator[str]:
    if _given("compact_obs", given):
        yield (
            '`compact_obs` must be left out with where="workers": it would drop the KL that the '
            'workers write next to the observations in "next". Use where="learner".'
        )
    if kind is DistributedCollector and given.get("launcher", "mp") != "mp":
        yield (
            f'`launcher` must be "mp" with where="workers", got {given["launcher"]!r}: the workers '
            "read the coefficient from a file of this machine. Across machines use "
            'where="learner" or a RayCollector.'
        )
    if kind is RayCollector and given.get("collector_class", Collector) is not Collector:
        yield (
            '`collector_class` must be left out with where="workers": messages with the '
            "coefficient reach an actor, but not the processes that it starts. Give each env its "
            "own actor."
        )


def _given(name: str, kwargs: dict[str, Any]) -> Any:
    """An argument of the collector, or of the collectors in its workers; None if there is none."""
    inner = kwargs.get("collector_kwargs") or {}
    inner = inner if isinstance(inner, Sequence) else [inner]
    return next((one[name] for one in (kwargs, *inner) if one.get(name) is not None), None)


def _arguments(kind: type, num_workers: int, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments with which the collectors of TorchRL behave alike."""
    wrapping = {"auto_register_policy_transforms": False}
    if kind is Collector:
        return wrapping | kwargs
    if kind in (MultiSyncCollector, MultiAsyncCollector):
        # TorchRL would take threads away from the learner, one for each worker.
        return wrapping | {"num_threads": torch.get_num_threads()} | kwargs
    inner = kwargs.get("collector_kwargs") or {}
    inner = inner if isinstance(inner, Sequence) else [inner] * num_workers
    ids = [UniqueTrajectories(n, num_workers, one.get("postproc")) for n, one in enumerate(inner)]
    inner = [wrapping | one | {"postproc": unique} for one, unique in zip(inner, ids, strict=True)]
    if kind is RayCollector:
        # TorchRL asks for 2 GiB per actor, which a small machine does not have.
        defaults = {"num_collectors": num_workers, "remote_configs": {"num_cpus": 1}}
    else:
        defaults = {"launcher": "mp", "tcp_port": _free_port()}
    return defaults | kwargs | {"collector_kwargs": inner}


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return server.getsockname()[1]
