"""One call, `kl_collector`, that connects a KL stack to any of TorchRL's collectors."""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import cloudpickle
import torch
from tensordict import MemoryMappedTensor, TensorDictBase
from torch import nn
from torchrl.collectors import BaseCollector, Collector, MultiAsyncCollector, MultiSyncCollector
from torchrl.collectors.distributed import DistributedCollector, RayCollector
from torchrl.collectors.utils import split_trajectories
from torchrl.envs import Compose, EnvBase, TransformedEnv
from torchrl.envs.utils import ExplorationType

from torchrl_kl.batches import TRAJECTORY_KEY
from torchrl_kl.controllers import ConstantKLController
from torchrl_kl.transforms import KLConstrainedTransform

_REMOTE = (DistributedCollector, RayCollector)
_KINDS = (Collector, MultiSyncCollector, MultiAsyncCollector, *_REMOTE)
_UNIQUE_KEY = ("collector", "unique_traj_ids")


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

    With `where="learner"` the stack is the collector's `postproc`, and scores a whole batch at
    once. With "workers", processes of this machine, each has a copy of the stack as the last
    transform of its env, and penalizes each step with the coefficient of that moment; a recurrent
    reference needs this where batches begin inside of trajectories.

    A batch updates the controller when it arrives at the learner. Workers then get the coefficient
    and a moved reference; what the training loop changes by hand reaches them one batch later. Load
    a saved state before this call. Where the policy itself is the reference (a context such as
    `disable_adapter`), workers have a copy of it, whose base must not be trained.

    You may rely on: ("next", "kl_coeff") is the coefficient of each step; the KL of a trajectory is
    summed over batches; trajectory ids are unique across workers. All else is TorchRL's, except for
    three defaults: `auto_register_policy_transforms=False`, `launcher="mp"`, one CPU for each actor
    of Ray.

    Args:
        collector_class: Collector, MultiSyncCollector, MultiAsyncCollector; for "learner" also
            DistributedCollector and RayCollector.
        create_env_fn: makes an env; or a list, one for each worker; or, for a Collector, the env.
        policy: the actor, which records its log-prob; None with a `policy_factory`.
        stack: the stack, which is in no env. Freeze it to stop its controller.
        where: "learner" or "workers".
        num_workers: how many workers; a Collector has one, in this process.
        frames_per_batch: of all workers together if they are synchronous, else of one.
        total_frames: when to stop.
        kwargs: others of `collector_class`; `postproc` runs before the stack, `split_trajs` after.

    Raises:
        TypeError: if `collector_class` or `stack` is of another class.
        ValueError: if an argument is out of its range, or would make the KL wrong.

    Example:
        >>> from torchrl.collectors import Collector
        >>> from torchrl_kl import KLConstrainedTransform, kl_collector
        >>> from torchrl_kl.language import GPT, CausalLMActor
        >>> from torchrl_kl.envs import DigitLanguageEnv
        >>> policy = CausalLMActor(GPT(vocab_size=11, block_size=8))
        >>> stack = KLConstrainedTransform(policy, 0.1)
        >>> arguments = {"where": "workers", "frames_per_batch": 32, "total_frames": 64}
        >>> for batch in kl_collector(Collector, DigitLanguageEnv, policy, stack, **arguments):
        ...     print(f"{batch['next', 'kl_coeff'].mean():.4f}")
        0.1000
        0.1000
    """
    several = isinstance(create_env_fn, Sequence)
    envs: Any = [*create_env_fn] if several else [create_env_fn] * num_workers
    _check_arguments(collector_class, stack, where, num_workers, len(envs), kwargs)
    kwargs |= {"frames_per_batch": frames_per_batch, "total_frames": total_frames}
    receive = _Receiver(stack, kwargs.pop("postproc", None), kwargs.pop("split_trajs", False))
    if where == "workers":
        receive.shared = _SharedStack(stack)
        envs = [partial(_PenalizedEnv, env, receive.shared) for env in envs]
    over_ray = issubclass(collector_class, RayCollector)
    defaults = {"auto_register_policy_transforms": False}
    if issubclass(collector_class, _REMOTE):
        # For actors of Ray, TorchRL asks for 2 GiB, which a small machine does not have.
        ray = {"num_collectors": num_workers, "remote_configs": {"num_cpus": 1}}
        kwargs = (ray if over_ray else {"launcher": "mp"}) | kwargs
        inner = kwargs.get("collector_kwargs") or {}
        inner = inner if isinstance(inner, Sequence) else [inner] * num_workers
        kwargs["collector_kwargs"] = [
            defaults | one | {"postproc": partial(_number, one.get("postproc"), n, num_workers)}
            for n, one in enumerate(inner)
        ]
    else:
        kwargs = defaults | kwargs
    env: Any = envs[0] if issubclass(collector_class, Collector) else envs
    collector = cast(Any, collector_class)(env, policy, postproc=receive, **kwargs)
    if over_ray:
        collector.update_policy_weights_()  # TorchRL warns if the first batch comes before this
    return collector


def _check_arguments(
    kind: Any, stack: Any, where: str, count: int, n_envs: int, given: dict[str, Any]
) -> None:
    """Refuses arguments that would make the KL wrong without an error."""
    if not (isinstance(kind, type) and issubclass(kind, _KINDS)):
        names = ", ".join(known.__name__ for known in _KINDS)
        raise TypeError(f"`collector_class` must be one of {names}, got {kind!r}.")
    if not isinstance(stack, KLConstrainedTransform):
        raise TypeError(f"`stack` must be a KLConstrainedTransform, got {type(stack).__name__}.")
    # Workers of Ray and of a DistributedCollector may be on other machines.
    places = ("learner",) if issubclass(kind, _REMOTE) else ("learner", "workers")
    most = 1 if issubclass(kind, Collector) else n_envs
    # Only a controller that moves is misled by actions that are not drawn from the policy.
    moves = stack.controller.moves and not stack.frozen
    drawn = given.get("exploration_type", ExplorationType.RANDOM) == ExplorationType.RANDOM
    random = (given.get("init_random_frames") or 0) > 0
    untracked = given.get("track_traj_ids") is False
    buffered = given.get("replay_buffer") is not None
    number = f"the number of envs, at least 1 and for a Collector 1, got {count} for {n_envs}"
    refused = [
        (stack.env is not None, "`stack` must not be in an env: `where` says where its copies go."),
        (where not in places, f"`where` must be in {places} for this collector, got {where!r}."),
        (not 1 <= count == n_envs <= most, f"`num_workers` must be {number}."),
        (buffered, "`replay_buffer` must be left out: extend it with the batches."),
        (random, "`init_random_frames` must be left out: their log-prob would count as 0."),
        (untracked, "`track_traj_ids` must be left True: open trajectories would be lost."),
        (moves and not drawn, "`exploration_type` must be RANDOM unless the stack is frozen."),
    ]
    for wrong, message in refused:
        if wrong:
            raise ValueError(message)


def _number(postproc: Any, worker: int, n_workers: int, batch: TensorDictBase) -> TensorDictBase:
    """A `postproc` of workers, which count from 0: writes trajectory ids that no other one uses."""
    batch = batch if postproc is None else postproc(batch)
    # To another key, because a DistributedCollector renumbers the ids under TorchRL's key.
    return batch.copy().set(_UNIQUE_KEY, batch.get(TRAJECTORY_KEY) * n_workers + worker)


@dataclass
class _Receiver:
    """The collector's `postproc`. It has no method `to`, with which TorchRL would copy it."""

    stack: KLConstrainedTransform
    postproc: Any  # the user's
    split_trajs: bool
    shared: _SharedStack | None = None  # with workers that penalize

    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        batch = (batch if self.postproc is None else self.postproc(batch)).copy()
        if _UNIQUE_KEY in batch.keys(True):
            batch.rename_key_(_UNIQUE_KEY, TRAJECTORY_KEY)
        batch.names = [*[None] * (batch.ndim - 1), "time"]
        if self.shared is None:
            batch = self.stack(batch)
        else:
            self.stack.observe(batch)
            self.stack.drop_record(batch)
            self.shared.publish(self.stack)
        # Split last: TorchRL's own option gives the trajectories of each batch new ids first.
        return split_trajectories(batch, prefix="collector") if self.split_trajs else batch


class _SharedStack:
    """A copy of the stack, and files with the learner's coefficient and reference, by name."""

    def __init__(self, stack: KLConstrainedTransform):
        folder = tempfile.mkdtemp(prefix="torchrl_kl-")
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.path = f"{folder}/reference.pt"
        coeff, self.version = stack.controller.coeff.item(), stack.reference.version
        numbers = torch.tensor([coeff, self.version], dtype=torch.float64)
        self.numbers = MemoryMappedTensor.from_tensor(numbers, filename=f"{folder}/numbers")
        # The controller stays with the learner.
        memo = {id(stack.controller): ConstantKLController(coeff)}
        # Pickled at once: a switch of adapters that is a closure must act on the copy.
        self.pickled = cloudpickle.dumps(copy.deepcopy(stack, memo).freeze())

    def publish(self, stack: KLConstrainedTransform) -> None:
        """Writes the coefficient, and the reference if it has moved."""
        version = stack.reference.version
        if version != self.version:
            # The file is replaced as a whole: no worker reads half of an update.
            torch.save(stack.reference.state_dict(), f"{self.path}.new")
            os.replace(f"{self.path}.new", self.path)
            self.version = version
        self.numbers[0] = stack.controller.coeff.item()
        self.numbers[1] = version


class _PenalizedEnv(TransformedEnv):
    """A worker's env: the user's, with a copy of the stack that follows the learner's."""

    def __init__(self, create_env_fn: Any, shared: _SharedStack, **kwargs: Any):
        env = create_env_fn if isinstance(create_env_fn, EnvBase) else create_env_fn(**kwargs)
        super().__init__(env, Compose(cloudpickle.loads(shared.pickled)))
        self._shared, self._version = shared, shared.version

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        transforms: Any = self.transform  # a Compose
        stack = next(t for t in [*transforms][::-1] if isinstance(t, KLConstrainedTransform))
        # The version is read before the file: one that comes meanwhile is read again.
        coeff, version = self._shared.numbers.tolist()
        stack.controller.coeff.fill_(coeff)
        if version != self._version:
            weights = torch.load(self._shared.path, map_location="cpu", weights_only=True)
            stack.reference.load_state_dict(weights)
            self._version = version
        return super()._step(tensordict)
