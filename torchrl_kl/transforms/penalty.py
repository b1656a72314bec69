"""Subtracts the KL from the reward, and feeds the controller that adapts the coefficient."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.data import Composite
from torchrl.envs import EnvBase
from torchrl.envs.transforms import Transform
from typing_extensions import Self

from torchrl_kl.batches import counted, expand_right, find_ends, of_values
from torchrl_kl.controllers import KLController, KLStatistics, as_controller, is_constant
from torchrl_kl.feeding import ControllerFeed, Reading
from torchrl_kl.functional.numbers import check_finite, widened, working_dtype
from torchrl_kl.keys import ResolvedKeys, get_required, sibling
from torchrl_kl.transforms.base import KLTransform, add_spec, require_spec
from torchrl_kl.transforms.estimates import KLStep
from torchrl_kl.transforms.placement import refuse_sums
from torchrl_kl.transforms.steps import check_reward, penalize, without_random


class PenaltyTransform(KLTransform):
    """Base of the transforms that subtract the penalty; see RewardAdjustmentTransform."""

    observed: Sequence[NestedKey] | None = None  # they show whether steps follow one another
    state_lengths: Mapping[NestedKey, NestedKey] = {"tokens": "position"}

    def __init__(
        self,
        controller: KLController | float,
        keys: ResolvedKeys,
        *,
        in_keys: Sequence[NestedKey],
        out_keys: Sequence[NestedKey] = (),
        update_every: int | None = None,
        time_dim: int | None = None,
    ):
        self.keys, self.time_dim = keys, time_dim
        controller = as_controller(controller)
        recorded = [keys.task_reward, keys.episode_kl] if self.record else []
        # In an env, the sums of a trajectory from which a coefficient is planned are an entry, too.
        self._plans = self.record and controller.reads_rewards and controller.per == "trajectory"
        recorded += [keys.episode_sums] if self._plans else []
        written = [self.keys.penalized, keys.kl_coeff, *recorded, *out_keys]
        if twice := sorted({str(key) for key in written if written.count(key) > 1}):
            raise ValueError(
                f"`keys` must name different entries, got {', '.join(twice)} for several of them: "
                "each would overwrite another."
            )
        super().__init__(in_keys=[keys.reward, *in_keys], out_keys=written)
        self.controller, self.feed = controller, ControllerFeed(update_every)

    @property
    def needs_ends(self) -> bool:  # type: ignore[override]
        """Whether its controller is fed finished trajectories."""
        return self.controller.per == "trajectory" and not is_constant(self.controller)

    @property
    def statistics(self) -> KLStatistics:
        """The KL values pooled since the controller's last update."""
        return self.feed.statistics

    @property
    def frozen(self) -> bool:
        """Whether the controller is stopped, also in all clones."""
        return self.feed.frozen

    def freeze(self) -> Self:
        """Stops the controller; rewards are penalized with its present coefficient."""
        self.feed.frozen = True
        return self

    def unfreeze(self) -> Self:
        """Lets the controller be updated again."""
        self.feed.frozen = False
        return self

    def _check(self, step: KLStep, reward: Tensor) -> None:
        """Refuses wrong shapes and invalid numbers, before anything changes."""
        kl = cast(Tensor, step.kl)
        check_reward(kl.shape, reward, self.keys.reward)
        # At first all at once, in a few microseconds.
        total = kl.detach().sum() + reward.detach().sum()
        total = total if step.estimate is None else total + step.estimate.detach().sum()
        if torch.compiler.is_compiling() or math.isfinite(total.item()):
            return
        entries: dict[NestedKey, Tensor | None] = {
            self.keys.recorded.name: step.log_prob,
            self.keys.ref_log_prob: step.ref_log_prob,
            self.keys.kl: kl,
            self.keys.kl_estimate: step.estimate,
        }
        if self.controller.coeff.item() == 0 and not self.controller.planning:
            # It only measures: an infinite KL is subtracted from nothing.
            for key, value in entries.items():
                entries[key] = None if value is None else value.masked_fill(value.isinf(), 0.0)
        check_finite(type(self).__name__, entries | {self.keys.reward: reward}, step.mask)

    def _penalize(self, next_tensordict: TensorDictBase, step: KLStep, reward: Tensor) -> None:
        # The penalized reward and the coefficient have the reward's shape, (*B, *A, 1). In half
        # precision the reward would swallow a penalty of less than its last digit.
        reward = widened(reward)
        penalized, applied = penalize(cast(Tensor, step.kl), reward, self.controller.coeff)
        next_tensordict.set(self.keys.penalized, penalized)
        next_tensordict.set(self.keys.kl_coeff, applied)
        if self.record:
            next_tensordict.set(self.keys.task_reward, reward)

    def adjust_env_step(
        self, tensordict: TensorDictBase, next_tensordict: TensorDictBase, step: KLStep
    ) -> None:
        """Penalizes the reward of an env step, adds up the trajectory, and feeds the controller."""
        reward = get_required(next_tensordict, self.keys.reward, _NO_REWARD)
        self._check(step, reward)
        # First, so that an update of the controller does not change the coefficient of this step.
        self._penalize(next_tensordict, step, reward)
        if not self.record:
            return
        # The sum is an entry of the data, so that TorchRL sets it to zero in partial resets.
        measured = widened(step.measured.detach())
        episode_kl = get_required(tensordict, self.keys.episode_kl, _NO_SUM) + measured
        next_tensordict.set(self.keys.episode_kl, episode_kl)
        columns = (reward.detach().to(measured), cast(Tensor, step.kl).detach().to(measured))
        if self._plans:
            before = get_required(tensordict, self.keys.episode_sums, _NO_SUM)  # (*B, *A, 2)
            next_tensordict.set(self.keys.episode_sums, before + torch.cat(columns, -1))
        if self.frozen:
            return
        taken = self._taken(tensordict, next_tensordict, step.mask, measured)
        if not taken.any():
            self.feed.pool(self.controller, measured.new_zeros(0), in_env=True)
            return
        values = (measured if self.controller.per == "step" else episode_kl)[taken]
        planning = self.controller.planning
        if self.controller.reads_rewards:
            sums = next_tensordict.get(self.keys.episode_sums, torch.cat(columns, -1))
            rewards, log_ratios = sums[taken.squeeze(-1)].double().unbind(-1)
            self.feed.plan_from(self.controller, rewards, log_ratios=log_ratios)
        if planning:
            values = values[:0]  # says nothing about what is planned
        self.feed.pool(self.controller, values, in_env=True)

    def _taken(
        self,
        tensordict: TensorDictBase,
        next_tensordict: TensorDictBase,
        mask: Tensor | None,
        measured: Tensor,
    ) -> Tensor:
        """True where an env step tells the controller something, shape of `measured`."""
        shape, taken = measured.shape, torch.ones_like(measured, dtype=torch.bool)
        if self.controller.per == "trajectory":
            # An agent whose trajectory ends need not act in that step.
            ends, _ = find_ends(tensordict, next_tensordict, self.keys, shape)
            taken, mask = ends.unsqueeze(-1), None
        if not taken.any():  # as in most steps
            return taken
        mask = of_values(without_random(next_tensordict, self.keys, mask), shape)
        return taken if mask is None else taken & expand_right(mask, shape)

    def adjust_batch(self, tensordict: TensorDictBase, step: KLStep, *, moves: bool) -> None:
        """Penalizes a batch (a copy), adds up its trajectories, and feeds the controller."""
        next_tensordict = tensordict.get("next")
        if self.controller.coeff.item() != 0 or self.controller.planning:
            refuse_sums(tensordict)
        reward = get_required(next_tensordict, self.keys.reward, _NO_REWARD)
        self._check(step, reward)
        if not self.record:
            self._penalize(next_tensordict, step, reward)
            return
        # First, so that the batch is penalized with what is planned from it.
        reading = self._read(tensordict, step, reward, moves)
        self._penalize(next_tensordict, step, reward)
        if reading.running is not None:
            next_tensordict.set(self.keys.episode_kl, reading.running)
        self.feed.learn(self.controller, reading)

    def observe(self, tensordict: TensorDictBase) -> None:
        """Feeds the controller with a batch (*B) that the workers of a collector penalized."""
        next_tensordict = tensordict.get("next")
        step = self.read_step(next_tensordict, counted(tensordict, self.keys))
        reward = get_required(next_tensordict, self.keys.task_reward, _NO_REWARD)
        self.feed.learn(self.controller, self._read(tensordict, step, reward, True))

    def read_step(self, next_tensordict: TensorDictBase, mask: Tensor | None) -> KLStep:
        """The KL and the estimate that were measured, 0 outside the mask (*B)."""
        kl = get_required(next_tensordict, self.keys.kl, NO_KL)  # (*B, *A, 1)
        estimate = next_tensordict.get(self.keys.kl_estimate, None)
        mask = of_values(mask, kl.shape)
        if mask is not None:
            covered = expand_right(mask, kl.shape)
            kl = torch.where(covered, kl, 0.0)
            estimate = None if estimate is None else torch.where(covered, estimate, 0.0)
        return KLStep(None, None, mask, kl=kl, estimate=estimate)

    def _read(
        self, tensordict: TensorDictBase, step: KLStep, reward: Tensor, moves: bool
    ) -> Reading:
        return self.feed.read(
            self.controller,
            tensordict,
            step.measured.detach(),
            step.mask,
            keys=self.keys,
            time_dim=self.time_dim,
            observed=self.observed,
            state_lengths=self.state_lengths,
            reward=reward.detach(),
            log_ratio=cast(Tensor, step.kl).detach(),
            trace=moves,
        )

    def set_container(self, container: Transform | EnvBase) -> None:
        """Refuses an env whose reward is penalized already."""
        super().set_container(container)
        # There is no parent yet in a Compose that no env has.
        if self.parent is not None:
            self.refuse_penalized(self.parent_env.full_observation_spec, "the env")

    def refuse_penalized(self, entries: Composite | TensorDictBase, where: str) -> None:
        """RuntimeError if the coefficient is among the entries: the reward was penalized before."""
        signs = {self.keys.kl_coeff}
        if self.keys.penalized != self.keys.reward:  # which must not be penalized either
            signs.add(sibling(self.keys.reward, "kl_coeff"))
        if found := signs & set(entries.keys(True, True)):
            raise RuntimeError(
                f"{where} has {min(map(str, found))!r}: {self.keys.reward!r} was penalized for its "
                "KL before, and a second penalty would count it twice. Use one stack; for a second "
                'reference or another reward use other keys: `keys=KLKeys.named("second")`.'
            )

    def declare_penalty(self, spec: Composite, kl_shape: torch.Size, dtype: torch.dtype) -> None:
        """Adds what the penalty records; ValueError if KL and reward differ in shape."""
        rewards = self.parent_env.full_reward_spec
        reward = require_spec(rewards, self.keys.reward, _NO_REWARD, "reward")
        check_reward(kl_shape, reward, self.keys.reward, in_env=True)
        # Entries like the reward. They are in the observation spec, not in the reward spec, where
        # a RewardSum without arguments would sum them too.
        new = {self.keys.kl_coeff, self.keys.penalized} - {self.keys.reward}
        new |= {self.keys.task_reward} if self.record else set()
        sums = [self.keys.episode_kl, self.keys.episode_sums] if self.record else []
        self.claim(spec, [*new, *sums])
        for key in sorted(new, key=str):
            add_spec(spec, key, reward.shape, reward.dtype, reward.shape[:-1])
        if self.record:
            holder, dtype = kl_shape[:-1], working_dtype(dtype)
            add_spec(spec, self.keys.episode_kl, kl_shape, dtype, holder)
            if self._plans:
                add_spec(spec, self.keys.episode_sums, (*holder, 2), dtype, holder)

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        """The penalized reward has no bounds."""
        if self.keys.penalized == self.keys.reward:
            leaf = reward_spec[self.keys.penalized]
            add_spec(reward_spec, self.keys.penalized, leaf.shape, leaf.dtype, reward_spec.shape)
        return reward_spec


NO_KL = "put KLDivergenceTransform before this transform, or name its entry with `KLKeys(kl=...)`."
_NO_REWARD = "name the reward to penalize: `KLKeys(reward=...)`, or KLRewardTransform's `in_keys`."
_NO_SUM = (
    "the running sum is carried from step to step. Reset the env first, and let no later transform "
    "drop or rename that entry."
)
