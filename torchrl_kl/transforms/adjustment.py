"""The transform that charges: the reward minus the coefficient times the KL, and who moves the coefficient."""

from __future__ import annotations

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from torch import Tensor
from torchrl.data import Composite, TensorSpec
from torchrl.envs import EnvBase
from torchrl.envs.transforms import Transform

from torchrl_kl.transforms.penalty import Charge, add_reward_like
from torchrl_kl._tensordict import (
    MASK_KEY,
    add_spec,
    beside,
    expand_right,
    find_time_dim,
    is_fake,
    state_spec,
)
from torchrl_kl.transforms.placement import refuse_later_ends
from torchrl_kl.transforms.base import (
    KLTransform,
    copy_batch,
    counted_key,
    get_required,
    sampled_from_replay,
)
from torchrl_kl.controllers.rules import (
    ConstantKLController,
    KLController,
    TargetKLController,
    as_controller,
)
from torchrl_kl.controllers.statistics import KLStatistics
from torchrl_kl.controllers.trajectories import OpenTrajectories, find_done

__all__ = ["RewardAdjustmentTransform"]


class RewardAdjustmentTransform(KLTransform):
    """Charges the KL to the reward, `reward = task_reward - coeff * kl`, and lets a controller move the coefficient.

    A step is charged with the coefficient of that moment, then the controller is updated. Finished trajectories are
    pooled; when `update_every` of them are in, the controller is updated once, with the pooled mean and their count.
    (One trajectory at a time, its clip would make it steer the median.) With `per="step"` steps are pooled instead.

    The controller moves in the steps of an env and in calls on a batch. It does not move while frozen, in a replay
    buffer, in env steps with random or deterministic actions (an argmax is no sample: its k1 is biased), or on fake
    data. A batch does not say how its actions were chosen: freeze the transform for batches of an evaluation.

    You may rely on: every step's coefficient is recorded; charging twice is an error; a call on a batch leaves its
    input alone. With gamma < 1 the reward penalises the discounted KL while the controller holds the undiscounted one.

    Keys:
        reads ("next", "reward"), ("next", "kl"), and what the controller is fed, `measured_key`, all of one shape.
        writes ("next", "reward"), ("next", "task_reward"), ("next", "kl_coeff") and ("next", "episode_kl"), the sum of
        what the controller is fed over the trajectory up to this step: the reward's shape. A batch without a time
        dimension gets no "episode_kl".

    State: the controller's, and `statistics`, the pool since its last update. The sums of trajectories that are
    still open are not saved: a restarted collector begins new ones.

    Args:
        controller: a KLController, or a float for a constant coefficient.
        update_every: how many finished trajectories (steps, if the controller's unit is the step) an update waits for.
        reward_key: the reward to charge.
        kl_key: what is charged, k1 in nats per step.
        measured_key: what the controller is fed; by default what is charged.
        task_reward_key: the reward before the charge; by default "task_reward" beside the reward.
        kl_coeff_key: the coefficient of each step; by default "kl_coeff" beside the reward.
        episode_kl_key: the running sum; by default "episode_kl" beside the KL.
        done_key: what ends a trajectory; by default "done" beside the reward, or at the root.
        time_dim: the batch dimension that is time, for batches that do not name it "time"; it must be the last.

    Raises:
        TypeError: if `controller` is neither a KLController nor a number.
        ValueError: if `update_every` is less than 1, or 1 for a controller with a deadband, or KL and reward differ in
            shape.
        RuntimeError: if the reward was charged before, or the controller would have to be fed from a batch whose
            trajectories cannot be told apart.

    Example:
        >>> from tensordict import TensorDict
        >>> step = TensorDict(reward=torch.ones(1, 1), kl=torch.full((1, 1), 0.5), done=torch.ones(1, 1).bool())
        >>> batch = TensorDict(next=step, batch_size=1)
        >>> charged = RewardAdjustmentTransform(0.1, time_dim=-1)(batch)
        >>> charged["next", "reward"], batch["next", "reward"]
        (tensor([[0.9500]]), tensor([[1.]]))
    """

    def __init__(
        self,
        controller: KLController | float,
        *,
        update_every: int = 64,
        reward_key: NestedKey = "reward",
        kl_key: NestedKey = "kl",
        measured_key: NestedKey | None = None,
        task_reward_key: NestedKey | None = None,
        kl_coeff_key: NestedKey | None = None,
        episode_kl_key: NestedKey | None = None,
        done_key: NestedKey | None = None,
        time_dim: int | None = None,
    ):
        if isinstance(update_every, bool) or not isinstance(update_every, int) or update_every < 1:
            raise ValueError(f"`update_every` must be an int of at least 1, got {update_every!r}.")
        self.reward_key = unravel_key(reward_key)
        self.kl_key = unravel_key(kl_key)
        self.measured_key = measured_key or self.kl_key
        self.task_reward_key = task_reward_key or beside(reward_key, "task_reward")
        self.kl_coeff_key = kl_coeff_key or beside(reward_key, "kl_coeff")
        self.episode_kl_key = episode_kl_key or beside(kl_key, "episode_kl")
        self.done_key = done_key
        self.update_every = update_every
        self.time_dim = time_dim
        super().__init__(
            in_keys=[self.reward_key, self.kl_key],
            out_keys=[
                self.reward_key,
                self.task_reward_key,
                self.kl_coeff_key,
                self.episode_kl_key,
            ],
        )
        self.controller = as_controller(controller)
        if (
            update_every == 1
            and isinstance(controller, TargetKLController)
            and controller.deadband > 0
        ):
            raise ValueError(
                f"`update_every` must be at least 2 for a controller with a deadband of {controller.deadband:g} "
                "standard errors, got 1: a single value has no standard error."
            )
        self.statistics = KLStatistics()
        self.frozen = False
        self._charge = Charge(self.reward_key, self.reward_key, self.kl_coeff_key)
        self._counted_key = counted_key(self.kl_key)
        self._open_trajectories = OpenTrajectories()

    def freeze(self) -> RewardAdjustmentTransform:
        """Stops the controller; rewards are still charged, with the coefficient as it stands."""
        self.frozen = True
        return self

    def unfreeze(self) -> RewardAdjustmentTransform:
        """Lets the controller move again."""
        self.frozen = False
        return self

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        measured = self._adjust(next_tensordict)
        episode_kl = tensordict.get(self.episode_kl_key, 0.0) + measured
        next_tensordict.set(self.episode_kl_key, episode_kl)
        if not self.frozen:
            self._feed_step(tensordict, next_tensordict, measured, episode_kl)
        return next_tensordict

    def _feed_step(
        self,
        tensordict: TensorDictBase,
        next_tensordict: TensorDictBase,
        measured: Tensor,
        episode_kl: Tensor,
    ) -> None:
        """Pools what a step of the env, or the trajectories that it ended, measured."""
        values, pooled = measured, None
        if self.controller.per == "trajectory":
            done_key = find_done(next_tensordict, self.reward_key, self.done_key)
            done = next_tensordict.get(done_key)
            if not done.any():
                return
            values, pooled = episode_kl, expand_right(done, measured.shape)
            before = tensordict.get(done_key, None)
            if (
                before is not None
            ):  # an agent that has left while others go on was counted when it left
                pooled = pooled & ~expand_right(before, measured.shape)
        counted = tensordict.get(self._counted_key, None)
        if counted is not None:
            pooled = counted if pooled is None else counted & pooled
        self._pool(values if pooled is None else values[pooled])

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Charges a batch (*B) that has "next"; returns a shallow copy with the results.

        Raises:
            KeyError: if the reward, the KL or "next" is not there.
            RuntimeError: if the reward was charged before, or the controller cannot be fed.
        """
        self.refuse_wrong_order()
        tensordict = copy_batch(tensordict)
        next_tensordict = tensordict.get("next")
        self._charge.refuse_charged(next_tensordict.keys(True, True), "the batch")
        measured = self._adjust(next_tensordict, tensordict.get(MASK_KEY, None))
        running = self._feed(tensordict, measured)
        if running is not None:
            next_tensordict.set(self.episode_kl_key, running)
        return tensordict

    def observe(self, tensordict: TensorDictBase) -> None:
        """Moves the controller by a batch (*B) that was charged elsewhere, by a collector's workers; writes nothing.

        Raises:
            KeyError: if what the controller is fed is not there.
            RuntimeError: if the controller cannot be fed.
        """
        measured = get_required(tensordict.get("next"), self.measured_key, _NO_KL).detach()
        mask = tensordict.get(MASK_KEY, None)
        if mask is not None:
            measured = torch.where(expand_right(mask, measured.shape), measured, 0.0)
        self._feed(tensordict, measured)

    def _feed(self, tensordict: TensorDictBase, measured: Tensor) -> Tensor | None:
        """Pools what a batch measured; returns its running sums, or None where time is not a dimension."""
        follows = not (
            is_fake(tensordict) or sampled_from_replay()
        )  # what comes next in the same trajectories
        running, finished = None, measured.new_zeros(0)
        if find_time_dim(tensordict, self.time_dim) is not None:
            done_key = find_done(tensordict.get("next"), self.reward_key, self.done_key)
            trajectories = self._open_trajectories if follows else OpenTrajectories()
            running, finished = trajectories.add(tensordict, measured, done_key)
        if self.frozen or not follows:
            return running
        if self.controller.per == "step":
            mask = tensordict.get(MASK_KEY, None)
            self._pool(measured if mask is None else measured[expand_right(mask, measured.shape)])
        elif running is not None:
            self._pool(finished)
        elif not isinstance(self.controller, ConstantKLController):
            raise RuntimeError(
                f"the controller is fed nats per trajectory, and in a batch of shape {tuple(tensordict.batch_size)} "
                'without a time dimension trajectories cannot be told apart: name the last dimension "time" or pass '
                "`time_dim`, call freeze() first, or use a controller with per='step'."
            )
        return running

    def _adjust(self, next_tensordict: TensorDictBase, mask: Tensor | None = None) -> Tensor:
        """Charges the reward where the mask is True, keeps the one before; returns what the controller is fed."""
        kl = get_required(next_tensordict, self.kl_key, _NO_KL)
        measured = get_required(next_tensordict, self.measured_key, _NO_KL)
        if mask is not None:
            kl, measured = (
                torch.where(expand_right(mask, kl.shape), value, 0.0) for value in (kl, measured)
            )
        task_reward = next_tensordict.get(self.reward_key, None)
        self._charge(next_tensordict, kl, self.controller.coeff)
        next_tensordict.set(self.task_reward_key, task_reward)
        return measured.detach()

    def _pool(self, values: Tensor) -> None:
        if (
            self.controller.coeff.item() == 0
        ):  # only measures: what cannot be pooled must not stop the training either
            values = values[values.isfinite()]
        if values.numel():
            self.statistics.add(values)
            n_steps = int(self.statistics.count)
            if n_steps >= self.update_every:
                mean, standard_error = self.statistics.mean, self.statistics.standard_error
                self.statistics.reset()  # first: a measurement that the controller refuses must not be refused for ever
                self.controller.update(mean, n_steps, standard_error=standard_error)

    def set_container(self, container: Transform) -> None:
        """Refuses an env whose reward is charged already, as soon as one is known."""
        super().set_container(container)
        if self.parent is not None:
            self.refuse_charged_env(self.parent_env)

    def refuse_charged_env(self, env: EnvBase) -> None:
        """RuntimeError if the reward that this transform is to charge was charged by a transform of the env."""
        self._charge.refuse_charged(env.full_observation_spec.keys(True, True), "the env")

    def refuse_wrong_order(self) -> None:
        """RuntimeError if a transform after this one undoes its work, or ends trajectories that it waits for."""
        super().refuse_wrong_order()
        if self.controller.per == "trajectory" and not isinstance(
            self.controller, ConstantKLController
        ):
            refuse_later_ends(self)

    def transform_input_spec(self, input_spec: Composite) -> Composite:
        """Adds the running sum to the state spec, so that batched envs carry it."""
        self._add_episode_kl(state_spec(input_spec), self.parent_env.full_observation_spec)
        return input_spec

    def _add_episode_kl(self, spec: Composite, measured_in: Composite) -> None:
        shape = self._reward_spec.shape
        add_spec(spec, self.episode_kl_key, shape, measured_in[self.measured_key].dtype, shape[:-1])

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Adds the task reward, the coefficient and the running sum.

        Raises:
            RuntimeError: if the reward was charged by a transform before this one.
            KeyError: if no transform before this one declares the KL.
            ValueError: if the KL does not have the reward's shape.
        """
        self._charge.refuse_charged(observation_spec.keys(True, True), "the env")
        if self.kl_key not in observation_spec.keys(True, True):
            raise KeyError(
                f"{self.kl_key!r} is not in the observation spec, got "
                f"{sorted(map(str, observation_spec.keys(True, True)))}: {_NO_KL}"
            )
        self._charge.check_shape(observation_spec[self.kl_key].shape, self._reward_spec.shape)
        self.claim(observation_spec, self.out_keys[1:])
        for key in (self.task_reward_key, self.kl_coeff_key):
            add_reward_like(observation_spec, key, self._reward_spec)
        self._add_episode_kl(observation_spec, observation_spec)
        return observation_spec

    @property
    def _reward_spec(self) -> TensorSpec:
        return self.parent_env.full_reward_spec[self.reward_key]

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        """The charged reward has no bounds."""
        return self._charge.unbounded_reward_spec(reward_spec)


_NO_KL = "put KLDivergenceTransform before this transform, or name its key with `kl_key`."
