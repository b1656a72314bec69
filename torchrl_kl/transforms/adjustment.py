"""The part of the stack that subtracts the penalty from the reward."""

from __future__ import annotations

from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.data import Composite

from torchrl_kl.batches import counted
from torchrl_kl.controllers import KLController
from torchrl_kl.keys import KLKeys, as_keys
from torchrl_kl.transforms.base import KLTransform, Leaf, require_spec
from torchrl_kl.transforms.penalty import NO_KL, Penalizing, Penalty, without_random


class RewardAdjustmentTransform(Penalizing, KLTransform):
    """Subtracts the KL, `reward = task_reward - coeff * kl`, and feeds the controller.

    Each step is penalized with the coefficient of that moment. The KL of finished trajectories (of
    steps, with `per="step"`) is pooled, and the controller is updated with its mean and count.

    A controller that plans its coefficient is given the task rewards of finished trajectories, of a
    batch before it is penalized. Those that begin in the same state are compared with each other.

    The controller is updated in env steps and in calls on a batch, except while frozen, by samples
    of a buffer, after `eval()` (on batches), and by trajectories with random or deterministic
    actions in an env (an argmax is not a sample: its k1 is biased). A batch does not say how its
    actions were chosen: freeze the transform for evaluation batches. While frozen it goes on adding
    up trajectories; after `eval()` it does not.

    You may rely on: the coefficient of every step is recorded; penalizing twice raises an error; a
    call that raises has changed nothing. You may not rely on `episode_kl` of a shuffled batch that
    kept the name "time": the order of its steps is checked only for a controller that is fed
    trajectories. With gamma < 1 the penalty is the discounted KL, but the controller steers the
    undiscounted one.

    Keys:
        reads ("next", "reward"), ("next", "kl") and, if present, ("next", "kl_estimate"), which is
        then what the controller is fed; all of one shape; done flags and, on batches, ("collector",
        "traj_ids"), without which trajectories do not go on from one batch to the next; and, if
        present, ("next", "not_drawn") and what says who acts: ("collector", "mask"), the flags
        before the step, ("agents", "mask") of turn-based envs, and "autoreset", which the stack
        writes in a vectorized Gymnasium env that ignores the action of the step after an end.
        writes ("next", "reward"), ("next", "task_reward"), ("next", "kl_coeff") and, unless a batch
        has no time dimension, ("next", "episode_kl"): the sum over the trajectory so far of what
        the controller is fed, at least float32.

    State: the controller's; the pool since its last update; the sums of trajectories that batches
    left open, but not those in an env, which are entries of its data.

    Args:
        controller, update_every, keys, time_dim: as for KLConstrainedTransform.

    Raises:
        TypeError: if `controller` is neither a KLController nor a number, or the reward is not
            floating point, or in an env half precision; on a batch that becomes float32.
        KeyError: if the reward, the KL or, on a batch, "next" is missing.
        ValueError: if `update_every` is less than 1, KL and reward differ in shape, or one of them
            is not finite. With a coefficient of 0, an infinite KL is only measured.
        RuntimeError: if the reward was penalized before, trajectories cannot be told apart, or
            their steps are not in order.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_kl import RewardAdjustmentTransform
        >>> step = TensorDict(reward=torch.ones(1, 1), kl=torch.full((1, 1), 0.5), batch_size=1)
        >>> penalized = RewardAdjustmentTransform(0.1)(TensorDict(next=step, batch_size=1))
        >>> penalized["next", "reward"], step["reward"]
        (tensor([[0.9500]]), tensor([[1.]]))
    """

    def __init__(
        self,
        controller: KLController | float,
        *,
        update_every: int | None = None,
        keys: KLKeys | None = None,
        time_dim: int | None = None,
    ):
        self.keys = as_keys(keys).resolve()
        penalty = Penalty(controller, self.keys, update_every=update_every, time_dim=time_dim)
        super().__init__([self.keys.reward, self.keys.kl], penalty.writes)
        self.penalty = penalty

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        measured = self.penalty.read(next_tensordict, counted(tensordict, self.keys))
        self.penalty.env_step(tensordict, next_tensordict, measured)
        return next_tensordict

    def adjust(self, batch: TensorDictBase, mask: Tensor | None, *, moves: bool) -> None:
        """Penalizes a batch whose KL was measured."""
        following = batch.get("next")
        self.penalty.refuse_penalized(following, "the batch")
        measured = self.penalty.read(following, without_random(following, self.keys, mask))
        self.penalty.batch(batch, measured, moves=moves)

    def leaves(self, spec: Composite) -> dict[NestedKey, Leaf]:
        """The task reward, the coefficient and the running sum."""
        self.penalty.refuse_penalized(spec, "the env")
        kl = require_spec(spec, self.keys.kl, NO_KL)
        return self.penalty.leaves(self.parent_env.full_reward_spec, kl.shape, kl.dtype)
