"""What runs in a collector's workers: envs charged at the learner's coefficient, and trajectory ids that are unique."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

from tensordict import TensorDictBase
from torch import Tensor
from torchrl.envs import Compose, EnvBase, TransformedEnv

from torchrl_kl._keys import TRAJECTORY_KEY
from torchrl_kl.controllers import ConstantKLController, KLController, Per
from torchrl_kl.stacks import KLConstrainedTransform

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


class FollowingEnv(TransformedEnv):
    """An env with the stack as its last transform, charged at the learner's coefficient."""

    def follow_coeff(self, coeff: float) -> None:
        """Sets the coefficient of the next step on."""
        stack = next(t for t in cast(Compose, self.transform) if isinstance(t, KLConstrainedTransform))
        stack.controller.coeff.fill_(coeff)


class MakeChargedEnv:
    """Makes the env of a worker: the user's, with a frozen copy of the learner's stack last.

    Args:
        create_env_fn: makes the user's env; or the env.
        stack: the learner's stack. Its reference travels to the workers, its controller does not.
        source: where the coefficient stands, see `FollowingKLController`.
    """

    def __init__(self, create_env_fn: Callable[..., EnvBase] | EnvBase, stack: KLConstrainedTransform, source: Tensor):
        self.create_env_fn, self.source = create_env_fn, source
        self.per: Per = stack.controller.per
        self.stack = copy.deepcopy(stack).freeze()
        self.stack.adjustment.controller = ConstantKLController(0.0)

    def __call__(self, **kwargs: Any) -> EnvBase:
        env = self.create_env_fn
        env = env if isinstance(env, EnvBase) else env(**kwargs)
        stack = copy.deepcopy(self.stack)
        stack.adjustment.controller = FollowingKLController(self.source, per=self.per)
        return FollowingEnv(env, Compose(stack))  # type: ignore[arg-type]


class UniqueTrajectories:
    """A worker's `postproc`: ids that no other worker gives, under a key that the collector leaves alone.

    The workers of Ray and of torch.distributed number their trajectories by themselves, each from 0.
    """

    def __init__(self, worker: int, num_workers: int, postproc: Callable[[TensorDictBase], TensorDictBase] | None):
        self.worker, self.num_workers, self.postproc = worker, num_workers, postproc

    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        batch = batch if self.postproc is None else self.postproc(batch)
        return batch.copy().set(UNIQUE_TRAJECTORY_KEY, batch.get(TRAJECTORY_KEY) * self.num_workers + self.worker)


def restore_trajectories(batch: TensorDictBase) -> TensorDictBase:
    """The batch with the unique ids as its ids, where workers wrote them; a shallow copy then."""
    ids = batch.get(UNIQUE_TRAJECTORY_KEY, None)
    return batch if ids is None else batch.exclude(UNIQUE_TRAJECTORY_KEY).set(TRAJECTORY_KEY, ids)
