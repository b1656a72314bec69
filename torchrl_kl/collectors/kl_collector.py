"""One call that connects a KL stack to any of TorchRL's collectors, in one process or in many."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.util import get_temp_dir
from typing import Any, Literal

import torch
from torch import nn
from torchrl.collectors import BaseCollector, Collector, MultiAsyncCollector, MultiSyncCollector
from torchrl.collectors.distributed import DistributedCollector, RayCollector
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType

from torchrl_kl.collectors import watched
from torchrl_kl.collectors.links import LearnerLink, WorkerLink, number_trajectories
from torchrl_kl.collectors.processes import worker_env
from torchrl_kl.transforms import KLConstrainedTransform

_WATCHED: dict[type, type[watched.WatchedCollector]] = {
    Collector: watched.WatchedSingle,
    MultiSyncCollector: watched.WatchedMultiSync,
    MultiAsyncCollector: watched.WatchedMultiAsync,
    DistributedCollector: watched.WatchedDistributed,
    RayCollector: watched.WatchedRay,
}


def kl_collector(
    collector_class: type[BaseCollector],
    /,
    create_env_fn: Callable[..., EnvBase] | EnvBase | Sequence[Callable[..., EnvBase]],
    policy: nn.Module | None,
    stack: KLConstrainedTransform,
    *,
    where: Literal["learner", "workers"] = "learner",
    num_workers: int = 1,
    frames_per_batch: int,
    total_frames: int,
    **kwargs: Any,
) -> Any:
    """A collector of TorchRL whose batches are penalized for the KL to the stack's reference.

    `torchrl_kl.collectors` compares the two values of `where`, and says what you may rely on.

    Args:
        collector_class: Collector, MultiSyncCollector, MultiAsyncCollector, DistributedCollector or
            RayCollector.
        create_env_fn: makes an env; or a list, one for each worker; or, for a Collector, the env.
        policy: the actor, which records its log-prob; None with a `policy_factory`.
        stack: the stack, which is in no env. Freeze it to stop its controller.
        where: where the reference is evaluated.
        num_workers: how many workers; a Collector has one, in this process.
        frames_per_batch: of all workers together if they are synchronous, else of one.
        total_frames: when to stop; -1 for never.
        kwargs: other arguments of `collector_class`. A `postproc` runs before the stack.

    Raises:
        TypeError, ValueError: if an argument is of another type, or would make the KL wrong.
        RuntimeError: while collecting, if a worker died or rows were joined along time.

    Example:
        >>> from torchrl.collectors import Collector
        >>> from torchrl_kl import GPT, AdaptiveKLController, CausalLMActor, KLConstrainedTransform
        >>> from torchrl_kl import kl_collector
        >>> from torchrl_kl.envs import DigitLanguageEnv
        >>> policy = CausalLMActor(GPT(vocab_size=11, block_size=8))
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
    named = {"where": where, "num_workers": num_workers, "n_envs": len(envs), "policy": policy}
    _check_arguments(collector_class, stack, kwargs | named)
    kwargs |= {"frames_per_batch": frames_per_batch, "total_frames": total_frames}
    kwargs = _arguments(collector_class, num_workers, kwargs)
    link, envs = _link(collector_class, stack, envs, where)
    env: Any = envs[0] if collector_class is Collector else envs
    return _WATCHED[collector_class](env, policy, link=link, **kwargs)


def _link(
    kind: type[BaseCollector], stack: KLConstrainedTransform, envs: Sequence[Any], where: str
) -> tuple[LearnerLink | WorkerLink, Sequence[Any]]:
    """What connects the stack to a collector, and the envs with what runs in them."""
    in_process, over_ray = kind is Collector, kind is RayCollector
    if not (in_process or over_ray):
        get_temp_dir()  # which the workers share, and remove, if it is there before they are
        envs = [partial(worker_env, env, learner=os.getpid()) for env in envs]
    if where == "learner":
        return LearnerLink(stack), envs
    link = WorkerLink(stack, over_ray=over_ray, in_process=in_process)
    return link, [link.env_factory(env) for env in envs]


def _worker_arguments(num_workers: int, kwargs: dict[str, Any]) -> Sequence[dict[str, Any]]:
    """Those of the collectors in the workers of Ray or torch.distributed, one dict for each."""
    inner = kwargs.get("collector_kwargs") or {}
    return inner if isinstance(inner, Sequence) else [inner] * num_workers


def _worker_class(kwargs: dict[str, Any]) -> Any:
    """That of the collectors in the workers of Ray or torch.distributed, which may have a name."""
    known = {"single": Collector, "sync": MultiSyncCollector, "async": MultiAsyncCollector}
    kind = kwargs.get("collector_class", Collector)
    return known[kind] if isinstance(kind, str) and kind in known else kind


def _check_arguments(kind: Any, stack: Any, given: dict[str, Any]) -> None:
    """Refuses arguments that would fail late, or make the KL wrong without an error."""
    if kind not in _WATCHED:
        names = ", ".join(known.__name__ for known in _WATCHED)
        raise TypeError(f"`collector_class` must be one of {names}, got {kind!r}.")
    if not (isinstance(stack, KLConstrainedTransform) and stack.record):
        raise TypeError(f"`stack` must be a KLConstrainedTransform, got {type(stack).__name__}.")

    num_workers, in_workers = given["num_workers"], given["where"] == "workers"
    places = [given, *_worker_arguments(num_workers, given)]

    def anywhere(name: str) -> Any:
        """An argument of the collector, or of those in its workers; None if there is none."""
        return next((one[name] for one in places if one.get(name) is not None), None)

    # Only a controller that moves is misled by actions that are not drawn from the policy.
    moves = stack.feed.adaptive and not stack.frozen
    drawn = given.get("exploration_type", ExplorationType.RANDOM) == ExplorationType.RANDOM
    inner, per_worker = _worker_class(given), given.get("num_workers_per_collector", 1)
    # The batches of synchronous workers have the rows of all of them.
    is_sync = kind in (Collector, MultiSyncCollector) or given.get("sync")
    is_sync = is_sync and inner is not MultiAsyncCollector
    distributed = kind is DistributedCollector
    remote = distributed and given.get("launcher", "mp") != "mp"
    nested = kind is RayCollector and inner is not Collector
    refused = {
        "stack": stack.in_env,
        "where": given["where"] not in ("learner", "workers"),
        "policy": given["policy"] is None and anywhere("policy_factory") is None,
        "num_workers": num_workers < 1 or (kind is Collector and num_workers != 1),
        "create_env_fn": given["n_envs"] != num_workers,
        "replay_buffer": anywhere("replay_buffer") is not None,
        "init_random_frames": (given.get("init_random_frames") or 0) > 0,
        "track_traj_ids": anywhere("track_traj_ids") is False,
        "exploration_type": moves and not drawn,
        "cat_results": anywhere("cat_results") == -1,
        "set_truncated": anywhere("set_truncated") and not is_sync,
        "use_buffers": MultiSyncCollector in (kind, inner)
        and anywhere("set_truncated")
        and anywhere("use_buffers"),
        "compact_obs": in_workers and anywhere("compact_obs"),
        "launcher": in_workers and remote,
        "collector_class": in_workers and nested,
        "num_workers_per_collector": distributed and inner is MultiSyncCollector and per_worker > 1,
    }
    for name, wrong in refused.items():
        if wrong:
            raise ValueError(f"`{name}` must {_MUST[name].format(**given)}")


# What each argument must be, and why.
_MUST = {
    "stack": "not be in an env: `where` says where its copies go.",
    "where": 'be "learner" or "workers", got {where!r}.',
    "policy": "be the actor, got None: frames of a random policy have no log-prob, and would be "
    "penalized and counted as if it were 0.",
    "num_workers": "be at least 1, and 1 for a Collector, got {num_workers}: for several workers "
    "use MultiSyncCollector or MultiAsyncCollector.",
    "create_env_fn": "be one callable or one per worker, got {n_envs} for {num_workers}.",
    "replay_buffer": "be left out: batches that workers write into a buffer do not reach the "
    "controller. Extend the buffer with the batches of the collector.",
    "init_random_frames": "be left out: frames of a random policy have no log-prob, and would be "
    "penalized and counted as if it were 0.",
    "track_traj_ids": "be left True: without ids the KL of a trajectory that continues in the next "
    "batch would be lost.",
    "exploration_type": "be RANDOM while the controller adapts: the KL of actions that are not "
    "drawn from the policy is biased. Freeze the stack for an evaluation.",
    "cat_results": "not be -1: it joins the rows of several workers along time, and their open "
    "trajectories would look finished.",
    "set_truncated": "be left out with asynchronous workers: the batch that shows whether a "
    "truncation ended its trajectory may come from another worker.",
    "use_buffers": "not be True with `set_truncated=True`: torchrl 0.14.1 leaves done flags of the "
    "batch before in the buffers.",
    "compact_obs": 'be left out with where="workers": it would drop the KL that the workers write '
    'next to the observations in "next". Use where="learner".',
    "launcher": 'be "mp" with where="workers", got {launcher!r}: the workers read the coefficient '
    'from a file of this machine. Across machines use where="learner" or a RayCollector.',
    "collector_class": 'be left out with where="workers": messages with the coefficient reach an '
    "actor, but not the processes that it starts. Give each env its own actor.",
    "num_workers_per_collector": "be 1 for a DistributedCollector of MultiSyncCollectors, got "
    "{num_workers_per_collector}: torchrl 0.14.1 receives the rows of several envs as if they were "
    "one row. Use `num_workers`, or a RayCollector.",
}


def _truncating(kind: type, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a collector whose truncations reach the batch."""
    if kind is MultiSyncCollector and kwargs.get("set_truncated"):  # they miss its buffers
        return kwargs | {"use_buffers": False}
    return kwargs


def _arguments(kind: type, num_workers: int, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments with which the collectors of TorchRL behave alike."""
    defaults: dict[str, Any] = {"auto_register_policy_transforms": False}
    if kind in (MultiSyncCollector, MultiAsyncCollector):
        # TorchRL would take threads away from the learner, one for each worker.
        defaults["num_threads"] = torch.get_num_threads()
    if kind not in (RayCollector, DistributedCollector):
        return defaults | _truncating(kind, kwargs)
    if kwargs["total_frames"] < 0:  # endless for the others; these two would return no batch
        kwargs = kwargs | {"total_frames": sys.maxsize}
    inner = _worker_class(kwargs)
    # Each worker has a collector with the same defaults, whose trajectory ids are made unique.
    number = partial(number_trajectories, num_workers=num_workers)
    collector_kwargs = [
        defaults
        | _truncating(inner, one)
        | {"postproc": partial(number, worker=n, postproc=one.get("postproc"))}
        for n, one in enumerate(_worker_arguments(num_workers, kwargs))
    ]
    if kind is RayCollector:
        # TorchRL asks for 2 GiB per actor, which a small machine does not have.
        defaults = {"num_collectors": num_workers, "remote_configs": {"num_cpus": 1}}
    else:
        # TorchRL's port is the same for every collector; this one is free.
        with socket.create_server(("localhost", 0)) as server:
            defaults = {"launcher": "mp", "tcp_port": server.getsockname()[1]}
    return defaults | kwargs | {"collector_kwargs": collector_kwargs}
