"""What runs in a collector's workers: envs that follow the learner's stack, and unique ids."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import cloudpickle
import torch
from tensordict import MemoryMappedTensor, TensorDictBase
from torch import Tensor
from torchrl.envs import Compose, EnvBase, TransformedEnv

from torchrl_kl._tensordict import TRAJECTORY_KEY
from torchrl_kl.actors.moving import entries_of
from torchrl_kl.actors.references import SwitchedActor
from torchrl_kl.controllers import ConstantKLController
from torchrl_kl.transforms import KLConstrainedTransform

UNIQUE_TRAJECTORY_KEY = ("collector", "unique_traj_ids")


class SharedFiles:
    """The learner's coefficient and moved reference in a folder, for all processes of a machine.

    Each version of the reference replaces the file as a whole: no worker reads half of an update.
    """

    def __init__(self, folder: Path, coeff: Tensor):
        self.coeff = MemoryMappedTensor.from_tensor(coeff.cpu(), filename=folder / "coeff")
        count = torch.zeros((), dtype=torch.int64)
        self.count = MemoryMappedTensor.from_tensor(count, filename=folder / "reference_count")
        self.path = folder / "reference"

    def write(self, weights: dict[str, Tensor]) -> None:
        """Publishes a version of the reference."""
        new = self.path.with_suffix(".new")
        torch.save(weights, new)
        new.replace(self.path)
        self.count.add_(1)

    def read(self) -> dict[str, Tensor]:
        """The latest version of the reference."""
        return torch.load(self.path, map_location="cpu", weights_only=True)


class PenalizedEnv(TransformedEnv):
    """An env with the stack as its last transform, which follows the learner's.

    It reads `files` at each step where they are given; over Ray, messages call the other methods.
    """

    files: SharedFiles | None = None
    _reference_count = 0

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        if self.files is not None:
            self.follow_coeff(self.files.coeff.item())
            count = self.files.count.item()  # before the file: a newer one is read again
            if count != self._reference_count:
                self._reference_count = count
                self.follow_reference(self.files.read())
        return super()._step(tensordict)

    def follow_coeff(self, coeff: float) -> None:
        """Sets the coefficient from the next step on."""
        self._stack.controller.coeff.fill_(coeff)

    @torch.no_grad()
    def follow_reference(self, weights: dict[str, Tensor]) -> None:
        """Sets the weights of the reference from the next step on."""
        own = entries_of(self._stack.reference.actor)
        for name, value in weights.items():
            own[name].copy_(value)

    @property
    def _stack(self) -> KLConstrainedTransform:
        transforms = cast(Compose, self.transform)
        return next(t for t in transforms if isinstance(t, KLConstrainedTransform))


class PenalizedEnvFactory:
    """Makes a worker's env: the user's, with a frozen copy of the stack as its last transform.

    The env follows `files`, or messages where they are None. In another process than the learner's,
    a reference that is the policy itself becomes a copy of the policy as it is now, since TorchRL
    sends policies without their weights.
    """

    def __init__(
        self,
        create_env_fn: Callable[..., EnvBase] | EnvBase,
        stack: KLConstrainedTransform,
        files: SharedFiles | None = None,
        *,
        in_process: bool = True,
    ):
        self.create_env_fn, self.files = create_env_fn, files
        self.stack = copy.deepcopy(stack).freeze()
        self.stack.feed.controller = ConstantKLController(stack.controller.coeff.item())
        if not in_process and isinstance(stack.reference, SwitchedActor):
            # By pickle and not by deepcopy: a switch that is a closure must act on the copy.
            self.stack = cloudpickle.loads(cloudpickle.dumps(self.stack))

    def __call__(self, **kwargs: Any) -> EnvBase:
        """The env."""
        env = self.create_env_fn
        env = env if isinstance(env, EnvBase) else env(**kwargs)
        env = PenalizedEnv(env, Compose(copy.deepcopy(self.stack)))  # type: ignore[arg-type]
        env.files = self.files
        return env


class UniqueTrajectories:
    """A worker's `postproc` that writes trajectory ids which no other worker uses.

    The workers of Ray and of torch.distributed number their trajectories separately, each from 0.
    The ids go to another key, because the collector renumbers those under its own.
    """

    def __init__(
        self,
        worker: int,
        num_workers: int,
        postproc: Callable[[TensorDictBase], TensorDictBase] | None,
    ):
        self.worker, self.num_workers, self.postproc = worker, num_workers, postproc

    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        """A shallow copy of the batch with the ids."""
        batch = batch if self.postproc is None else self.postproc(batch)
        ids = batch.get(TRAJECTORY_KEY) * self.num_workers + self.worker
        return batch.copy().set(UNIQUE_TRAJECTORY_KEY, ids)


def restore_trajectories(batch: TensorDictBase) -> TensorDictBase:
    """A shallow copy of the batch, with the unique ids under TorchRL's key if there are any."""
    ids = batch.get(UNIQUE_TRAJECTORY_KEY, None)
    if ids is None:
        return batch.copy()
    return batch.exclude(UNIQUE_TRAJECTORY_KEY).set(TRAJECTORY_KEY, ids)
