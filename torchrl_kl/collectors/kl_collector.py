"""One call that wires a KL stack to any of TorchRL's collectors, in one process or in many."""

from __future__ import annotations

import shutil
import socket
import tempfile
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from tensordict import LazyStackedTensorDict, MemoryMappedTensor, TensorDictBase
from torch import Tensor, nn
from torchrl.collectors import BaseCollector, Collector, MultiAsyncCollector, MultiSyncCollector
from torchrl.collectors.distributed import DistributedCollector, RayCollector
from torchrl.collectors.utils import split_trajectories
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType

from torchrl_kl.actors.moving import entries_of
from torchrl_kl.actors.switched import SwitchedActor
from torchrl_kl.collectors.watched import (
    WatchedCollector,
    WatchedDistributed,
    WatchedMultiAsync,
    WatchedMultiSync,
    WatchedRay,
    WatchedSingle,
)
from torchrl_kl.collectors.workers import (
    MakeChargedEnv,
    ReferenceFile,
    UniqueTrajectories,
    restore_trajectories,
)
from torchrl_kl.transforms.stack import KLConstrainedTransform

__all__ = ["kl_collector"]

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
    """A collector of TorchRL whose batches are charged for the KL to the stack's reference.

    Where the reference is evaluated:

    - "learner": each batch goes through the stack when it arrives. The reference scores a whole batch at once, the
      coefficient is one for the batch, and the learner waits meanwhile.
    - "workers": each worker has a copy of the reference in its env, last of the transforms. The work is shared, and the
      coefficient is the learner's at that very step. A recurrent reference under asynchronous workers needs this: from
      batches that alternate it cannot carry its state on.

    Either way `stack` stays in the learner's process and its controller is updated there, by each batch as it arrives.
    A worker's copy follows: it reads the coefficient from a file that all processes of the machine have mapped, or is
    told of it over Ray. So changes of `stack.controller.coeff` by hand reach the workers too, and no worker moves it.
    `stack.update_reference` reaches them too, before they are asked for the next batch; no worker ever scores with half
    of an update. If the policy itself is the reference (`reference=` a context), "learner" needs no second model; in
    "workers" each has a copy of the policy as it was, with the switch thrown: what that leaves, the base, must not be
    trained.

    You may rely on: ("next", "kl_coeff") is what each step was charged with, also where an asynchronous collector mixes
    steps from before and after an update; trajectories that go on in a later batch are summed over both, whichever
    worker they come from; `update_policy_weights_()` moves the policy of the workers and not the reference; if a worker
    dies, the next use of the collector is a RuntimeError that names it, and no process is left.

    Keys: those of KLConstrainedTransform. The last dimension of a batch is time, and named so. Trajectory ids are
    unique over the workers of Ray and torch.distributed too, which TorchRL numbers apart.

    Args:
        collector_class: Collector, MultiSyncCollector, MultiAsyncCollector, DistributedCollector or RayCollector.
        create_env_fn: makes an env, in each worker; or a list with one for each worker; or, for a Collector, the env.
        policy: the actor, which records its log-prob.
        stack: the stack, attached to nothing. Freeze it to stop its controller.
        where: where the reference is evaluated.
        num_workers: how many workers; a Collector has one, in this process.
        frames_per_batch: frames of a batch: of all workers together if they are synchronous, else of one.
        total_frames: when to stop.
        kwargs: the other arguments of `collector_class`. A `postproc` runs before the stack. TorchRL's defaults hold
            but for these: `auto_register_policy_transforms=False`, a `num_threads` that leaves this process its
            own, `launcher="mp"`, a free `tcp_port` and one thread per worker (DistributedCollector),
            `remote_configs={"num_cpus": 1}` and weights that are sent once before the start (RayCollector).

    Raises:
        TypeError: if `collector_class` or `stack` is another class.
        ValueError: if an argument is out of range, or is one with which the KL would silently be wrong.
        RuntimeError: while collecting, if a worker died, or rows of several workers were joined along time.

    Example:
        >>> from torchrl_kl import GPT, AdaptiveKLController, GPTActor
        >>> from torchrl_kl.envs import DigitLanguageEnv
        >>> policy = GPTActor(GPT(vocab_size=11, block_size=8))
        >>> controller = AdaptiveKLController(init_coeff=0.1, target=0.5, horizon=1000)
        >>> stack = KLConstrainedTransform(policy, controller, update_every=8)
        >>> make_env = lambda: DigitLanguageEnv(batch_size=(8,))
        >>> arguments = {"where": "workers", "frames_per_batch": 32, "total_frames": 96}
        >>> for batch in kl_collector(Collector, make_env, policy, stack, **arguments):
        ...     print(f"{batch['next', 'kl_coeff'].mean():.4f}")
        0.1000
        0.0998
        0.0997
    """
    watched = _find_class(collector_class)
    _check_arguments(watched, stack, where, num_workers, kwargs)
    envs = (
        list(create_env_fn)
        if isinstance(create_env_fn, Sequence)
        else [create_env_fn] * num_workers
    )
    if len(envs) != num_workers:
        raise ValueError(
            f"`create_env_fn` must be one callable or one per worker, got {len(envs)} for {num_workers}."
        )
    link_class = (
        _LearnerLink if where == "learner" else _RayLink if watched is WatchedRay else _FileLink
    )
    in_process = watched is WatchedSingle
    with link_class(
        stack, kwargs.pop("cat_results", None), kwargs.pop("split_trajs", False), in_process
    ) as link:
        envs = [link.make_env_fn(env) for env in envs]
        collector: Any = watched(
            envs[0] if in_process else envs,
            policy,
            link=link,
            frames_per_batch=frames_per_batch,
            total_frames=total_frames,
            **_arguments(watched, num_workers, link.cat_results, kwargs),
        )
    return collector


class _LearnerLink:
    """What stands between a collector and the learner: batches are named, charged by the stack, and split."""

    def __init__(
        self,
        stack: KLConstrainedTransform,
        cat_results: str | int | None,
        split_trajs: bool,
        in_process: bool,
    ):
        self.stack, self.cat_results, self.split_trajs = stack, cat_results, split_trajs
        self.in_process = in_process

    def __enter__(self) -> _LearnerLink:
        return self

    def __exit__(self, *_: object) -> None:
        """Called when the workers are there."""

    def make_env_fn(self, create_env_fn: Any) -> Any:
        """What makes the env of a worker."""
        return create_env_fn

    def send(self, collector: WatchedCollector) -> None:
        """Tells the workers of the coefficient, before they are asked for work."""

    def receive(self, batch: TensorDictBase, collector: WatchedCollector) -> TensorDictBase:
        """A batch as the user gets it."""
        if isinstance(batch, LazyStackedTensorDict):
            batch = LazyStackedTensorDict.maybe_dense_stack(batch.unbind(0), 0)
        batch = restore_trajectories(batch.copy())
        if self.cat_results == batch.ndim - 1:
            raise RuntimeError(
                f"`cat_results` = {self.cat_results} joined the rows of several workers along time: their open "
                "trajectories would look finished. Leave it out, or make envs with a batch size."
            )
        batch.names = [*[None] * (batch.ndim - 1), "time"]
        batch = self.charge(batch)
        self.send(collector)
        # TorchRL would number the trajectories of each batch anew before it splits them: the stack comes first.
        return split_trajectories(batch, prefix="collector") if self.split_trajs else batch

    def charge(self, batch: TensorDictBase) -> TensorDictBase:
        """The batch charged, the controller moved."""
        return self.stack(batch)


class _FileLink(_LearnerLink):
    """The workers charge; what they follow stands in files that all processes of the machine read."""

    def __enter__(self) -> _FileLink:
        folder = Path(tempfile.mkdtemp())
        # A moved reference is read from there at any time: the folder lasts as long as the collector.
        self._remove_folder = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        coeff = self.stack.controller.coeff.cpu()
        self.source = MemoryMappedTensor.from_tensor(coeff, filename=folder / "coeff")
        self.reference_file = ReferenceFile(folder)
        self._versions = self._read_versions()
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is not None:
            self._remove_folder()

    def make_env_fn(self, create_env_fn: Any) -> Any:
        return MakeChargedEnv(
            create_env_fn, self.stack, self.source, self.reference_file, in_process=self.in_process
        )

    def send(self, collector: WatchedCollector) -> None:
        self.source.fill_(self.stack.controller.coeff.item())
        weights = self.moved_weights()
        if weights:
            self.reference_file.write(weights)

    def moved_weights(self) -> dict[str, Tensor]:
        """The weights of the reference if they have moved since they were asked for; else none."""
        before, self._versions = self._versions, self._read_versions()
        if before == self._versions:
            return {}
        return {name: value.detach().cpu() for name, value in self._weights().items()}

    def _weights(self) -> dict[str, Tensor]:
        reference = self.stack.reference
        # What is the policy itself, with a switch thrown, is no weights of the reference's own.
        return {} if isinstance(reference, SwitchedActor) else entries_of(reference.actor)

    def _read_versions(self) -> dict[str, int]:
        """How often each weight was written to, as PyTorch counts it: by an update, or a state that was loaded."""
        return {name: value._version for name, value in self._weights().items()}

    def charge(self, batch: TensorDictBase) -> TensorDictBase:
        self.stack.adjustment.observe(batch)
        self.stack.divergence.drop_record(batch)  # the workers' envs keep it, as all envs do
        return batch


class _RayLink(_FileLink):
    """The workers charge; they are told of the coefficient over Ray, between two batches of theirs."""

    def __enter__(self) -> _RayLink:
        self.source = self.stack.controller.coeff.cpu().clone()
        self.reference_file = None
        self._versions = self._read_versions()
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def send(self, collector: Any) -> None:
        coeff = self.stack.controller.coeff.item()
        weights = self.moved_weights()
        for (
            actor
        ) in collector.remote_collectors:  # not waited for: an actor does one thing after the other
            if coeff != self.source.item():
                actor.cascade_execute.remote("env.follow_coeff", coeff)
            if weights:
                actor.cascade_execute.remote("env.follow_reference", weights)
        self.source.fill_(coeff)


def _find_class(collector_class: type) -> type[WatchedCollector]:
    if collector_class not in _WATCHED:
        names = ", ".join(known.__name__ for known in _WATCHED)
        raise TypeError(f"`collector_class` must be one of {names}, got {collector_class!r}.")
    return _WATCHED[collector_class]


def _check_arguments(
    watched: type, stack: Any, where: str, num_workers: int, kwargs: dict[str, Any]
) -> None:
    """Refuses what would fail late, or be silently wrong."""
    if not isinstance(stack, KLConstrainedTransform):
        raise TypeError(f"`stack` must be a KLConstrainedTransform, got {type(stack).__name__}.")
    if stack.adjustment.in_env:
        raise ValueError("`stack` must not be in an env: `where` says where its copies go.")
    if where not in ("learner", "workers"):
        raise ValueError(f'`where` must be "learner" or "workers", got {where!r}.')
    if num_workers < 1 or (watched is WatchedSingle and num_workers != 1):
        raise ValueError(
            f"`num_workers` must be at least 1, and 1 for a Collector, got {num_workers}: for several workers use "
            "MultiSyncCollector or MultiAsyncCollector."
        )
    if _given("replay_buffer", kwargs) is not None:
        raise ValueError(
            "`replay_buffer` must be left out: batches that workers write into a buffer never come to the controller. "
            "Extend the buffer by the batches of the collector."
        )
    if (kwargs.get("init_random_frames") or 0) > 0:
        raise ValueError(
            "`init_random_frames` must be left out: frames of a random policy have no log-prob, and would be charged "
            "and counted as if they had one of 0."
        )
    if (
        kwargs.get("exploration_type", ExplorationType.RANDOM) != ExplorationType.RANDOM
        and not stack.adjustment.frozen
    ):
        raise ValueError(
            "`exploration_type` must be RANDOM while the controller moves: the KL of actions that are not drawn from "
            "the policy is biased. Freeze the stack to evaluate."
        )
    if (
        _given("set_truncated", kwargs)
        and watched not in (WatchedSingle, WatchedMultiSync)
        and not kwargs.get("sync")
    ):
        raise ValueError(
            "`set_truncated` must be left out with asynchronous workers: whether a truncation is the end of its "
            "trajectory would be judged by another worker's batch."
        )
    if kwargs.get("cat_results") == -1:
        raise ValueError(
            "`cat_results` must not be -1: it joins the rows of several workers along time, and their open "
            "trajectories would look finished."
        )
    if (
        where == "workers"
        and watched is WatchedDistributed
        and kwargs.get("launcher", "mp") != "mp"
    ):
        raise ValueError(
            f'`launcher` must be "mp" with where="workers", got {kwargs["launcher"]!r}: the coefficient stands in '
            'memory of this machine. Across machines use where="learner", or a RayCollector.'
        )
    if (
        where == "workers"
        and watched is WatchedRay
        and kwargs.get("collector_class", Collector) is not Collector
    ):
        raise ValueError(
            '`collector_class` must be left out with where="workers": an actor is told of the coefficient, processes '
            "of its own are not. Give each env its own actor."
        )


def _given(name: str, kwargs: dict[str, Any]) -> Any:
    """An argument of the collector, or of the collectors that it has in its workers."""
    inner = kwargs.get("collector_kwargs") or {}
    inner = inner if isinstance(inner, Sequence) else [inner]
    return next((one[name] for one in (kwargs, *inner) if one.get(name) is not None), None)


def _arguments(
    watched: type, num_workers: int, cat_results: Any, kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The arguments that a collector of TorchRL needs to do what all of them should."""
    wrapping = {"auto_register_policy_transforms": False}
    if watched is WatchedSingle:
        return wrapping | kwargs
    if issubclass(watched, (WatchedMultiSync, WatchedMultiAsync)):
        # TorchRL would take threads away from the learner, one for each worker.
        arguments = wrapping | {"num_threads": torch.get_num_threads()} | kwargs
        return arguments if cat_results is None else arguments | {"cat_results": cat_results}
    inner = kwargs.pop("collector_kwargs", None) or {}
    inner = (
        [dict(one) for one in inner]
        if isinstance(inner, Sequence)
        else [dict(inner) for _ in range(num_workers)]
    )
    for worker, one in enumerate(inner):
        one["postproc"] = UniqueTrajectories(worker, num_workers, one.get("postproc"))
    kwargs["collector_kwargs"] = [wrapping | one for one in inner]
    if watched is WatchedRay:
        # TorchRL asks for 2 GiB per actor, which a small machine never has to give.
        return {"num_collectors": num_workers, "remote_configs": {"num_cpus": 1}} | kwargs
    return {"launcher": "mp", "tcp_port": _free_port()} | kwargs


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return server.getsockname()[1]
