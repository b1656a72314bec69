"""The part of the stack that subtracts the penalty from the reward."""

from __future__ import annotations

from tensordict import TensorDictBase
from torch import nn
from torchrl.data import Composite

from torchrl_kl.actors.protocol import as_kl_actor
from torchrl_kl.actors.reading import read_keys
from torchrl_kl.batches import counted
from torchrl_kl.controllers import KLController
from torchrl_kl.keys import KLKeys, as_keys
from torchrl_kl.transforms.base import require_spec
from torchrl_kl.transforms.penalty import NO_KL, PenaltyTransform
from torchrl_kl.transforms.steps import counted_steps, without_random


class RewardAdjustmentTransform(PenaltyTransform):
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
        actor: the policy, of which a plan learns what states are: without it, all entries. A plan
            for batches of `sample_responses` or `as_steps` needs it.

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
        actor: nn.Module | None = None,
    ):
        named = as_keys(keys).resolve()
        super().__init__(
            controller, named, in_keys=[named.kl], update_every=update_every, time_dim=time_dim
        )
        if actor is not None:
            self.observed = read_keys(actor)
            self.state_lengths = as_kl_actor(actor).state_lengths

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        step = self.read_step(next_tensordict, counted(tensordict, self.keys))
        self.adjust_env_step(tensordict, next_tensordict, step)
        return next_tensordict

    def _process_copy(self, batch: TensorDictBase, *, fake: bool, moves: bool) -> None:
        following = batch.get("next")
        self.refuse_penalized(following, "the batch")
        mask = without_random(following, self.keys, counted_steps(batch, self.keys, fake))
        self.adjust_batch(batch, self.read_step(following, mask), moves=moves)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Adds the task reward, the coefficient and the running sum."""
        self.refuse_penalized(observation_spec, "the env")
        kl = require_spec(observation_spec, self.keys.kl, NO_KL)
        self.declare_penalty(observation_spec, kl.shape, kl.dtype)
        return observation_spec
