"""The part of the stack that subtracts the penalty from the reward."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import Composite

from torchrl_kl import _tensordict as td
from torchrl_kl._tensordict import KLKeys, as_keys
from torchrl_kl.controllers import KLController
from torchrl_kl.functional.invalid import OnInvalid
from torchrl_kl.transforms.base import require_spec
from torchrl_kl.transforms.checks import passed_on
from torchrl_kl.transforms.estimates import KLStep
from torchrl_kl.transforms.penalty import NO_KL, PenaltyTransform


class RewardAdjustmentTransform(PenaltyTransform):
    """Subtracts the KL, `reward = task_reward - coeff * kl`, and feeds the controller.

    Each step is penalized with the coefficient of that moment. The KL of finished trajectories (of
    steps, with `per="step"`) is pooled, and the controller is updated with its mean and count.

    A controller with `init_coeff="plan"` is given the task rewards first, from which it computes
    its coefficient; on batches before the batch is penalized. Rewards are summed over trajectories,
    of which those that begin in the same state are compared with each other; see `RewardPlan` and,
    for `per="step"`, `RewardFeed`.

    The controller is updated in env steps and in calls on a batch, except while frozen, by samples
    of a buffer, after `eval()` (on batches), and in env steps with random or deterministic actions
    (an argmax is not a sample: its k1 is biased). A batch does not say how its actions were chosen:
    freeze the transform for evaluation batches. While frozen it goes on adding up trajectories;
    after `eval()` it does not, so that the rest of one that goes on later looks like a whole one.

    You may rely on: the coefficient of every step is recorded; penalizing twice raises an error.
    You may not rely on `episode_kl` of a shuffled batch that kept the name "time": the order of its
    steps is checked only for a controller that is fed trajectories. With gamma < 1 the penalty
    is the discounted KL, but the controller steers the undiscounted one. A trajectory that is
    truncated in the last step of a batch, where a collector may have cut it, is told with the next
    batch that moves the controller: those of the last batch of a run are not told, nor are a few
    where ids are out of order, as in batches of `trajs_per_batch` (a `postproc` runs before that).
    What was pooled for an update that the controller refuses is dropped.

    Keys:
        reads ("next", "reward"), ("next", "kl") and, if present, ("next", "kl_estimate"), which is
        then what the controller is fed; all of one shape; done flags and, on batches, ("collector",
        "traj_ids"), without which trajectories do not go on from one batch to the next.
        writes ("next", "reward"), ("next", "task_reward"), ("next", "kl_coeff") and, unless a batch
        has no time dimension, ("next", "episode_kl"): the sum over the trajectory so far of what
        the controller is fed, at least float32.

    State: the controller's; the pool since its last update; the sums of trajectories that batches
    left open, but not those in an env, which are entries of its data. While a controller plans, the
    task rewards of both, which in an env a reset sets to 0. Those of clones are not saved: a plan
    leaves out the trajectories that they had begun. `freeze` is not saved, nor which trajectories
    that an env left open have an action that was not drawn: when they end, they are counted.

    Args:
        controller, update_every, keys, time_dim, on_invalid: as for KLConstrainedTransform.

    Raises:
        TypeError: if `controller` is neither a KLController nor a number.
        KeyError: if the reward, the KL or, on a batch, "next" is missing.
        ValueError: if `update_every` is less than 1, or 1 for a controller with a deadband; if KL
            and reward differ in shape, or the steps of trajectories are not in order; or for an
            invalid KL or reward.
        RuntimeError: if the reward was penalized before, or trajectories cannot be told apart.

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
        on_invalid: OnInvalid = "raise",
    ):
        named = as_keys(keys).resolve()
        super().__init__(
            controller,
            named,
            in_keys=[named.kl],
            update_every=update_every,
            time_dim=time_dim,
            on_invalid=on_invalid,
        )

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        # Whether the policy drew the action, (*B, *A, 1), as KLDivergenceTransform has noted.
        counted = tensordict.get(td.hidden_key(self.keys.kl, "counted"), None)
        step = self._read(tensordict, next_tensordict, tensordict.get("_step", None), counted)
        self.adjust_env_step(tensordict, next_tensordict, step)
        return next_tensordict

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Penalizes a batch (*B) that has "next"; returns a shallow copy."""
        self.refuse_wrong_order()
        tensordict = td.copy_batch(tensordict)
        self.refuse_penalized(tensordict.get("next"), "the batch")
        step = self._read(tensordict, tensordict.get("next"), tensordict.get(td.MASK_KEY, None))
        self.adjust_batch(tensordict, step, None, trace=not td.is_fake(tensordict))
        return tensordict

    def _read(
        self,
        tensordict: TensorDictBase,
        next_tensordict: TensorDictBase,
        mask: Tensor | None,
        counted: Tensor | None = None,
    ) -> KLStep:
        kl = td.get_required(next_tensordict, self.keys.kl, NO_KL)
        estimate = next_tensordict.get(self.keys.kl_estimate, None)
        if mask is not None:
            # From (*B) to the shape of the KL, (*B, *A, 1).
            covered = td.expand_right(mask, kl.shape)
            kl = torch.where(covered, kl, 0.0)
            estimate = None if estimate is None else torch.where(covered, estimate, 0.0)
        # Nothing reads the log-probs of a step whose KL is known.
        counts = True if counted is None else counted
        valid = passed_on(tensordict, self.keys.kl)
        return KLStep(None, kl, mask, counts, kl=kl, estimate=estimate, valid=valid)

    def transform_input_spec(self, input_spec: Composite) -> Composite:
        """Adds the running sum to the state spec."""
        kl = require_spec(self.parent_env.full_observation_spec, self.keys.kl, NO_KL)
        self.declare_episode_kl(input_spec, kl.dtype)
        return input_spec

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Adds the task reward, the coefficient and the running sum."""
        self.refuse_penalized(observation_spec, "the env")
        kl = require_spec(observation_spec, self.keys.kl, NO_KL)
        self.declare_penalty(observation_spec, kl.shape, kl.dtype)
        return observation_spec
