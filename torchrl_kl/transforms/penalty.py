"""Subtracts the KL from the reward, and feeds the controller that adapts the coefficient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.data import Composite
from torchrl.envs import EnvBase
from torchrl.envs.transforms import Transform
from typing_extensions import Self

from torchrl_kl import _tensordict as td
from torchrl_kl._feeding import ControllerFeed, EnvReturns, Fed, kept_steps
from torchrl_kl._tensordict import ResolvedKeys
from torchrl_kl.controllers import KLController, as_controller
from torchrl_kl.controllers.plan import RewardPlan
from torchrl_kl.controllers.trajectories import OpenTrajectories
from torchrl_kl.functional.invalid import Guard, OnInvalid
from torchrl_kl.functional.numbers import working_dtype
from torchrl_kl.transforms.base import KLTransform, require_spec
from torchrl_kl.transforms.checks import without_invalid
from torchrl_kl.transforms.doubts import refuse_sums
from torchrl_kl.transforms.estimates import KLStep
from torchrl_kl.transforms.placement import refuse_rewards_to_go
from torchrl_kl.transforms.rows import EnvRows
from torchrl_kl.transforms.steps import check_reward, check_reward_shape, penalize


@dataclass
class Freezing:
    """Whether a transform is frozen, by itself or by the one whose place it has taken in an env."""

    own: bool = False
    original: Freezing | None = None

    @property
    def frozen(self) -> bool:
        """Whether it, or what it has replaced, is frozen."""
        return self.own or (self.original is not None and self.original.frozen)

    def set(self, frozen: bool) -> None:
        """Freezes the transform alone; unfreezes both, or it would go on being frozen."""
        self.own = frozen
        if not frozen and self.original is not None:
            self.original.set(False)


class PenaltyTransform(Fed, KLTransform):
    """Base of the transforms that subtract the penalty; see RewardAdjustmentTransform."""

    observed: Sequence[NestedKey] | None = None  # they show whether steps follow one another

    def __init__(
        self,
        controller: KLController | float,
        keys: ResolvedKeys,
        *,
        in_keys: Sequence[NestedKey],
        out_keys: Sequence[NestedKey] = (),
        update_every: int | None = None,
        out_key: NestedKey | None = None,
        record: bool = True,
        time_dim: int | None = None,
        on_invalid: OnInvalid = "raise",
    ):
        # `out_key` is the entry of the penalized reward; `in_keys` and `out_keys` are the further
        # entries of a subclass; without `record`, task reward and running sum are not written.
        self.keys, self.time_dim, self.record = keys, time_dim, record
        self.out_key = out_key or keys.reward
        recorded = [keys.task_reward, keys.episode_kl] if record else []
        written = [self.out_key, keys.kl_coeff, *recorded, *out_keys]
        if twice := sorted({str(key) for key in written if written.count(key) > 1}):
            raise ValueError(
                f"`keys` must name different entries, got {', '.join(twice)} for several of them: "
                "each would overwrite another."
            )
        super().__init__(in_keys=[keys.reward, *in_keys], out_keys=written)
        self.feed = ControllerFeed(as_controller(controller), update_every)
        self._freezing = Freezing()
        self.guard, self._rows = Guard(on_invalid), EnvRows()
        self._returns = self.feed.rewards.returns

    @property
    def needs_ends(self) -> bool:  # type: ignore[override]
        """Whether its controller is fed finished trajectories."""
        return self.controller.per == "trajectory" and self.feed.adaptive

    def clone(self) -> Self:
        """A transform for another env, with the same controller, pool and reference.

        It is frozen by itself, unless TorchRL puts it into the env of this one in its place.
        """
        other = super().clone()
        other._rows, other._returns = EnvRows(), EnvReturns()
        other._freezing = Freezing(self.frozen)
        return other

    @property
    def frozen(self) -> bool:
        """Whether the controller is stopped."""
        return self._freezing.frozen

    @frozen.setter
    def frozen(self, value: bool) -> None:
        self._freezing.set(value)

    def freeze(self) -> Self:
        """Stops the controller; rewards are penalized with its present coefficient."""
        self.frozen = True
        return self

    def unfreeze(self) -> Self:
        """Lets the controller be updated again."""
        self.frozen = False
        return self

    def _keep(
        self, tensordict: TensorDictBase, next_tensordict: TensorDictBase, step: KLStep
    ) -> tuple[KLStep, Tensor]:
        """The step (*B) and its task reward without invalid numbers, which are also replaced."""
        reward = td.get_required(next_tensordict, self.keys.reward, _NO_REWARD)
        # A coefficient of 0 allows an infinite KL, unless a plan is about to change it.
        coeff = None if self.controller.planning else self.controller.coeff
        step, kept = without_invalid(
            self, tensordict, step, reward, coeff=coeff, causes=self.observed
        )
        if step.valid is not None:
            left = {self.keys.reward: kept, self.keys.kl: step.kl}
            left |= {self.keys.kl_estimate: step.estimate}
            for key, value in left.items():  # of which the parts of the stack have written the KL
                if next_tensordict.get(key, None) is not None:
                    next_tensordict.set(key, value)
        return step, cast(Tensor, kept)

    def _penalize(self, next_tensordict: TensorDictBase, step: KLStep, reward: Tensor) -> None:
        # The penalized reward and the coefficient have the reward's shape, (*B, *A, 1).
        kl, coeff = cast(Tensor, step.kl), self.controller.coeff
        penalized, applied = penalize(kl, reward, coeff, self.keys.reward)
        next_tensordict.set(self.out_key, penalized)
        next_tensordict.set(self.keys.kl_coeff, applied)
        if self.record:
            next_tensordict.set(self.keys.task_reward, reward)

    def adjust_env_step(
        self, tensordict: TensorDictBase, next_tensordict: TensorDictBase, step: KLStep
    ) -> KLStep:
        """Penalizes the reward of an env step, adds up the trajectory, and feeds the controller.

        Returns the step without invalid numbers.
        """
        # First, so that an update of the controller does not change the coefficient of this step.
        step, reward = self._keep(tensordict, next_tensordict, step)
        self._penalize(next_tensordict, step, reward)
        if not self.record:
            return step
        # The sum is an entry of the data, so that TorchRL sets it to zero in partial resets.
        measured = step.measured.detach().to(working_dtype(step.measured.dtype))
        before = td.get_required(tensordict, self.keys.episode_kl, _NO_SUM)
        episode_kl = before + measured
        next_tensordict.set(self.keys.episode_kl, episode_kl)
        self._rows.add(before, episode_kl, step.counted, step.valid)
        if self.frozen and not self.controller.planning:
            return step
        if self.controller.per == "step":
            values, counts = measured, step.counting
            told = step.counted is True or bool(torch.as_tensor(step.counted).all())
        else:
            values, counts = episode_kl, self._find_finished(tensordict, next_tensordict, step)
            told = counts is not None
        told = told and not self.frozen
        if self.controller.planning:
            # Entries that show whether a row goes on from the last step.
            known = ((before, tensordict.get(self.keys.task_reward, None)), (episode_kl, reward))
            self._plan_env_step(reward, step, counts, told, known)
        if not self.frozen:
            self.feed.pool(values if told else None, counts, in_env=True)
        return step

    def _plan_env_step(
        self,
        reward: Tensor,
        step: KLStep,
        counts: Tensor | None,
        told: bool,
        known: tuple[Sequence[Tensor | None], Sequence[Tensor]],
    ) -> None:
        if step.counting is not None:
            reward = torch.where(td.expand_right(step.counting, reward.shape), reward, 0.0)
        kl, blocks = cast(Tensor, step.kl), None
        if self.controller.per == "trajectory":
            reward, kl = self._returns.add(reward, kl, *known)
        else:
            blocks = self._returns.number_block(cast(RewardPlan, self.controller.plan), reward)
        needed = self.feed.needed(in_env=True)
        self.feed.rewards.add_env_step(
            self.controller, reward, kl, counts, blocks=blocks, told=told, needed=needed
        )

    def _find_finished(
        self, tensordict: TensorDictBase, next_tensordict: TensorDictBase, step: KLStep
    ) -> Tensor | None:
        """Which trajectories end with this step, (*B, *A, 1); None if none does."""
        episode_kl = next_tensordict.get(self.keys.episode_kl)  # (*B, *A, 1), as is `ended`
        done_key = td.find_done(next_tensordict, self.keys.done, named=self.keys.done_named)
        ended = cast(Tensor, td.find_ends(next_tensordict, done_key, episode_kl.shape))
        if not ended.any():
            return None
        before = tensordict.get(done_key, None)
        if before is not None:  # an agent that left while others go on was counted when it left
            ended = ended & ~td.expand_right(before, episode_kl.shape)
        if step.mask is not None:
            ended = ended & td.expand_right(step.mask, episode_kl.shape)
        return ended & ~self._rows.left_out(ended)

    def adjust_batch(
        self, tensordict: TensorDictBase, step: KLStep, stream: OpenTrajectories | None, trace: bool
    ) -> KLStep:
        """Penalizes a batch (a copy), adds up its trajectories, and feeds the controller.

        Returns the steps without invalid numbers.
        """
        next_tensordict = tensordict.get("next")
        if self.controller.coeff.item() != 0 or self.controller.planning:
            refuse_sums(tensordict)
            refuse_rewards_to_go(self)
        step, reward = self._keep(tensordict, next_tensordict, step)
        if trace:
            # First, so that the batch is penalized with what is planned from it.
            self._plan_batch(tensordict, reward, step, stream)
        self._penalize(next_tensordict, step, reward)
        if self.record:
            # (*B, *A, 1), or None for a batch without a time dimension.
            running = self._feed_batch(tensordict, step, stream, trace)
            if running is not None:
                next_tensordict.set(self.keys.episode_kl, running)
        return step

    def observe(self, tensordict: TensorDictBase, stream: OpenTrajectories | None = None) -> None:
        """Feeds the controller with a batch (*B) that the workers of a collector penalized."""
        if self.needs_ends or self.controller.planning:  # steps must follow one another
            refuse_sums(tensordict, advantages=False)
        next_tensordict = tensordict.get("next")
        measured = next_tensordict.get(self.keys.kl_estimate, None)
        if measured is None:
            measured = td.get_required(next_tensordict, self.keys.kl, NO_KL)
        kl = next_tensordict.get(self.keys.kl, measured)
        mask = tensordict.get(td.MASK_KEY, None)
        valid = kept_steps(tensordict, kl, self.keys) if self.guard.masks else None
        step = KLStep(None, kl, mask, kl=kl, estimate=measured, valid=valid)
        reward = next_tensordict.get(self.keys.task_reward, None)
        self._plan_batch(tensordict, reward, step, stream)
        self._feed_batch(tensordict, step, stream, trace=True)

    def _plan_batch(
        self,
        tensordict: TensorDictBase,
        reward: Tensor | None,
        step: KLStep,
        stream: OpenTrajectories | None,
    ) -> None:
        """Gives the task reward of a batch, (*B, *A, 1), to a controller that plans from it."""
        if not self.controller.planning or not self.training or reward is None:
            return
        kl = cast(Tensor, step.kl)
        check_reward(kl, reward, self.keys.reward)  # before anything changes
        self.feed.rewards.add_batch(
            self.controller,
            tensordict,
            reward,
            kl,
            step.counting,
            stream=self.feed.stream if stream is None else stream,
            done_key=self.keys.done,
            done_named=self.keys.done_named,
            time_dim=self.time_dim,
            observed=self.observed,
            move=not self.frozen,
        )

    @staticmethod
    def new_stream() -> OpenTrajectories:
        """The open trajectories of one more collector, since trajectory ids restart with each."""
        return OpenTrajectories()

    def _feed_batch(
        self, tensordict: TensorDictBase, step: KLStep, stream: OpenTrajectories | None, trace: bool
    ) -> Tensor | None:
        return self.feed.add_batch(
            tensordict,
            step.measured.detach(),
            step.counting,
            done_key=self.keys.done,
            done_named=self.keys.done_named,
            time_dim=self.time_dim,
            observed=self.observed,
            stream=stream,
            move=not self.frozen,
            # TorchRL puts the transforms of a replay buffer, but not a `postproc`, into eval mode.
            trace=trace and self.training,
        )

    def _reset(self, tensordict, tensordict_reset):
        self._begin(tensordict)
        return super()._reset(tensordict, tensordict_reset)

    def _reset_on_native_autoreset(self, tensordict, tensordict_reset):
        self._begin(tensordict)
        return super()._reset_on_native_autoreset(tensordict, tensordict_reset)

    def _begin(self, tensordict: TensorDictBase) -> None:
        if self.record:
            # Rows that are reset begin a trajectory; without a mask all are.
            at_root = tensordict.get("_reset", None)
            reset = tensordict.get(td.sibling(self.keys.episode_kl, "_reset"), at_root)
            self._rows.reset(reset)
            self._returns.begin(reset)

    def set_container(self, container: Transform | EnvBase) -> None:
        """Refuses an env whose reward is penalized already."""
        super().set_container(container)
        original = self.taken_over
        if original is not None:
            # The user has the original, and freezes that.
            own = self.frozen and not original.frozen
            self._freezing = Freezing(own, original._freezing)
        # There is no parent yet in a Compose that no env has.
        if self.parent is not None:
            self.refuse_penalized(self.parent_env.full_observation_spec, "the env")

    def refuse_penalized(self, entries: Composite | TensorDictBase, where: str) -> None:
        """RuntimeError if the coefficient is among the entries: the reward was penalized before."""
        signs = {self.keys.kl_coeff}
        if self.out_key != self.keys.reward:  # which must not be penalized either
            signs.add(td.sibling(self.keys.reward, "kl_coeff"))
        found = signs & set(entries.keys(True, True))
        if found:
            raise RuntimeError(
                f"{where} has {min(map(str, found))!r}: {self.keys.reward!r} was penalized for its "
                "KL before, and a second penalty would count it twice. Use one stack; for another "
                'reward use other keys: `KLKeys.named("second", reward=...)`.'
            )

    def declare_penalty(self, spec: Composite, kl_shape: torch.Size, dtype: torch.dtype) -> None:
        """Adds what the penalty records; ValueError if KL and reward differ in shape."""
        rewards = self.parent_env.full_reward_spec
        reward = require_spec(rewards, self.keys.reward, _NO_REWARD, "reward")
        check_reward_shape(kl_shape, reward.shape, self.keys.reward)
        # Entries like the reward. They are in the observation spec, not in the reward spec, where
        # a RewardSum without arguments would sum them too.
        new = {self.keys.kl_coeff, self.out_key} - {self.keys.reward}
        new |= {self.keys.task_reward} if self.record else set()
        self.claim(spec, [*new, *([self.keys.episode_kl] if self.record else [])])
        for key in sorted(new, key=str):
            td.add_spec(spec, key, reward.shape, reward.dtype, reward.shape[:-1])
        if self.record:
            td.add_spec(spec, self.keys.episode_kl, kl_shape, working_dtype(dtype), kl_shape[:-1])

    def declare_episode_kl(self, input_spec: Composite, dtype: torch.dtype) -> None:
        """Adds the running sum to the state spec, so that batched envs carry it."""
        if self.record:
            rewards = self.parent_env.full_reward_spec
            shape = require_spec(rewards, self.keys.reward, _NO_REWARD, "reward").shape
            spec = td.state_spec(input_spec)
            td.add_spec(spec, self.keys.episode_kl, shape, working_dtype(dtype), shape[:-1])

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        """The penalized reward has no bounds."""
        if self.out_key == self.keys.reward:
            leaf = reward_spec[self.out_key]
            td.add_spec(reward_spec, self.out_key, leaf.shape, leaf.dtype, reward_spec.shape)
        return reward_spec


NO_KL = "put KLDivergenceTransform before this transform, or name its entry with `KLKeys(kl=...)`."
_NO_REWARD = "name the reward to penalize: `KLKeys(reward=...)`."
_NO_SUM = (
    "the running sum is carried from step to step. Reset the env first, and let no later transform "
    "drop or rename that entry."
)
