"""What runs in a collector's workers: envs charged as the learner says, and trajectory ids that are unique."""

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
from torchrl_kl.actors.switched import SwitchedActor
from torchrl_kl.controllers.rules import ConstantKLController, KLController, Per
from torchrl_kl.transforms.stack import KLConstrainedTransform

UNIQUE_TRAJECTORY_KEY = ("collector", "unique_traj_ids")


class FollowingKLController(KLController):
    """Charges at a coefficient that another process moves, and never moves it.

    Args:
        source: where the coefficient stands, 0-dim float64: memory that the learner writes to, or a tensor of this
            process that is told of every change.
        per: the unit of the learner's controller.
    """

    def __init__(self, source: Tensor, *, per: Per):
        super().__init__(source.item(), per=per)
        self._buffers["coeff"] = source

    def _apply(self, fn, recurse=True):
        return self  # a copy on another device or of another dtype would no longer follow

    def _next_coeff(self, kl: float, n_steps: int) -> float:
        raise RuntimeError(
            "this controller follows the learner's: only the learner may update the coefficient, "
            "with the controller of the stack that `kl_collector` was given."
        )


class ReferenceFile:
    """The weights of the learner's reference, once they have moved, and the count of their versions.

    A version replaces the one before in one piece: no worker ever reads half of each.

    Args:
        folder: where the file goes; it must last as long as the workers.
    """

    def __init__(self, folder: Path):
        self.path = folder / "reference"
        count = torch.zeros((), dtype=torch.int64)
        self.count = MemoryMappedTensor.from_tensor(count, filename=folder / "reference_count")

    def write(self, weights: dict[str, Tensor]) -> None:
        """Publishes a version."""
        new = self.path.with_suffix(".new")
        torch.save(weights, new)
        new.replace(self.path)
        self.count.add_(1)

    def read(self) -> dict[str, Tensor]:
        """The latest version."""
        return torch.load(self.path, map_location="cpu", weights_only=True)


class FollowingEnv(TransformedEnv):
    """An env with the stack as its last transform, charged at the learner's coefficient, by the learner's reference."""

    reference_file: ReferenceFile | None = None
    _reference_count = 0

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        if self.reference_file is not None:
            count = (
                self.reference_file.count.item()
            )  # read first: what is published meanwhile is read once more
            if count != self._reference_count:
                self._reference_count = count
                self.follow_reference(self.reference_file.read())
        return super()._step(tensordict)

    def follow_coeff(self, coeff: float) -> None:
        """Sets the coefficient of the next step on."""
        self._stack.controller.coeff.fill_(coeff)

    @torch.no_grad()
    def follow_reference(self, weights: dict[str, Tensor]) -> None:
        """Sets the weights of the reference of the next step on."""
        own = entries_of(self._stack.reference.actor)
        for name, value in weights.items():
            own[name].copy_(value)

    @property
    def _stack(self) -> KLConstrainedTransform:
        return next(
            t for t in cast(Compose, self.transform) if isinstance(t, KLConstrainedTransform)
        )


class MakeChargedEnv:
    """Makes the env of a worker: the user's, with a frozen copy of the learner's stack last.

    Args:
        create_env_fn: makes the user's env; or the env.
        stack: the learner's stack. Its reference travels to the workers, its controller does not.
        source: where the coefficient stands, see `FollowingKLController`.
        reference_file: where the reference stands once it has moved; None if the env is told of it.
        in_process: whether the env is made in the learner's process. Elsewhere a reference that is the policy itself
            becomes a copy of it, taken now: TorchRL takes the weights out of a policy while it travels.
    """

    def __init__(
        self,
        create_env_fn: Callable[..., EnvBase] | EnvBase,
        stack: KLConstrainedTransform,
        source: Tensor,
        reference_file: ReferenceFile | None = None,
        *,
        in_process: bool = True,
    ):
        self.create_env_fn, self.source, self.reference_file = create_env_fn, source, reference_file
        self.per: Per = stack.controller.per
        self.stack = copy.deepcopy(stack).freeze()
        self.stack.adjustment.controller = ConstantKLController(0.0)
        if not in_process and isinstance(stack.reference, SwitchedActor):
            # By pickle and not by deepcopy: a switch that is a closure must come to act on the copy.
            self.stack = cloudpickle.loads(cloudpickle.dumps(self.stack))

    def __call__(self, **kwargs: Any) -> EnvBase:
        env = self.create_env_fn
        env = env if isinstance(env, EnvBase) else env(**kwargs)
        stack = copy.deepcopy(self.stack)
        stack.adjustment.controller = FollowingKLController(self.source, per=self.per)
        env = FollowingEnv(env, Compose(stack))  # type: ignore[arg-type]
        env.reference_file = self.reference_file
        return env


class UniqueTrajectories:
    """A worker's `postproc`: ids that no other worker gives, under a key that the collector leaves alone.

    The workers of Ray and of torch.distributed number their trajectories by themselves, each from 0.
    """

    def __init__(
        self,
        worker: int,
        num_workers: int,
        postproc: Callable[[TensorDictBase], TensorDictBase] | None,
    ):
        self.worker, self.num_workers, self.postproc = worker, num_workers, postproc

    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        batch = batch if self.postproc is None else self.postproc(batch)
        return batch.copy().set(
            UNIQUE_TRAJECTORY_KEY, batch.get(TRAJECTORY_KEY) * self.num_workers + self.worker
        )


def restore_trajectories(batch: TensorDictBase) -> TensorDictBase:
    """The batch with the unique ids as its ids, where workers wrote them; a shallow copy then."""
    ids = batch.get(UNIQUE_TRAJECTORY_KEY, None)
    return batch if ids is None else batch.exclude(UNIQUE_TRAJECTORY_KEY).set(TRAJECTORY_KEY, ids)
