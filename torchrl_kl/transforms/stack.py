"""The whole stack as one transform, and the preset with the interface of TorchRL's former class."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from torch import Tensor, nn
from torchrl.data import Composite

from torchrl_kl._tensordict import (
    KLKeys,
    ResolvedKeys,
    add_spec,
    as_keys,
    as_tuple,
    copy_batch,
    is_fake,
)
from torchrl_kl.actors.frozen import FrozenActor
from torchrl_kl.actors.policy import Acting
from torchrl_kl.actors.references import Switch, as_reference
from torchrl_kl.controllers import ConstantKLController, KLController
from torchrl_kl.controllers.trajectories import OpenTrajectories
from torchrl_kl.functional.invalid import OnInvalid
from torchrl_kl.functional.numbers import check_number
from torchrl_kl.transforms.estimates import Estimator, KLStep, make_estimate
from torchrl_kl.transforms.penalty import PenaltyTransform
from torchrl_kl.transforms.steps import ScoringTransform, measure, score_batch


class KLConstrainedTransform(ScoringTransform, PenaltyTransform):
    """Measures KL(policy || reference) and subtracts it from the reward, with a coefficient.

    It scores each action under a frozen reference, measures the KL, and writes `reward =
    task_reward - coeff * kl`. Put it last in an env's transforms: a transform before it sees the
    task reward, one after it would take penalties for rewards. Outside an env, pass it as a
    collector's `postproc` or call it on a batch.

    The penalty is always k1; with another `estimator` the controller is fed that measurement (see
    KLDivergenceTransform). RewardAdjustmentTransform says when the controller is updated. Keys and
    State are those of these two and of ReferenceModelLogProbTransform.

    Args:
        actor: the policy; a frozen copy of it becomes the reference.
        controller: a KLController, or a float for a constant coefficient, reward per nat.
        estimator: what is measured: "k1", "k2", "k3"; "exact", from the recorded parameters of the
            policy's distribution; or "top_k", from what TopKActor records.
        reference: another actor to copy and freeze; or a FrozenActor, which is used itself; or,
            for no copy at all, a callable that returns a context manager in which `actor` itself is
            the reference, such as PEFT's `model.disable_adapter`.
        update_every: how many finished trajectories (steps, with `per="step"`) an update of the
            controller waits for. None: a batch updates once with what it finished, however few; in
            an env an update waits for 16 trajectories or 256 steps.
        sum_agents: whether agents that share a reward have one KL, the sum of theirs, at the root.
        keys: names of all entries.
        time_dim: the last batch dimension, if it is time and not named "time".
        chunk_size: how many rows of a batch the reference scores at a time.
        on_invalid: what to do where a log-prob, KL or reward is NaN, infinite, or at least 2 ** 64:
            "raise" an error that names it, or "mask" the step. With "raise" and a coefficient of 0,
            an infinite KL is only measured. A masked step has a KL of 0 and is neither penalized
            nor counted; its reward becomes 0 if it is invalid. What the policy recorded is not
            changed. The first time, a warning gives the counts.

    Raises:
        TypeError, ValueError, KeyError, RuntimeError: as the three parts do.

    Example:
        >>> from torchrl.envs import TransformedEnv
        >>> from torchrl_kl import GPT, CausalLMActor, KLConstrainedTransform
        >>> from torchrl_kl.envs import DigitLanguageEnv
        >>> actor = CausalLMActor(GPT(vocab_size=11, block_size=8))
        >>> env = TransformedEnv(DigitLanguageEnv(), KLConstrainedTransform(actor, 0.1))
        >>> env.rollout(4, actor)["next", "kl"].abs().max() < 1e-5  # the policy is its reference
        tensor(True)
    """

    def __init__(
        self,
        actor: nn.Module,
        controller: KLController | float,
        *,
        estimator: Estimator = "k1",
        reference: nn.Module | Switch | None = None,
        update_every: int | None = None,
        sum_agents: bool = False,
        keys: KLKeys | None = None,
        time_dim: int | None = None,
        chunk_size: int | None = None,
        on_invalid: OnInvalid = "raise",
    ):
        keys = as_keys(keys)
        frozen = as_reference(actor, reference, log_prob_key=keys.log_prob, chunk_size=chunk_size)
        resolved = keys.resolve(frozen.log_prob_key, sum_agents=sum_agents)
        options: dict[str, Any] = {"update_every": update_every, "time_dim": time_dim}
        options["on_invalid"] = on_invalid
        self._init(actor, frozen, controller, resolved, sum_agents, estimator, **options)
        self.watch_first(actor, copied=reference is None)

    def _init(
        self,
        actor: nn.Module,
        reference: FrozenActor,
        controller: KLController | float,
        keys: ResolvedKeys,
        sum_agents: bool,
        estimator: Estimator = "k1",
        *,
        record: bool = True,
        **options: Any,
    ) -> None:
        if not isinstance(sum_agents, bool):
            raise TypeError(f"`sum_agents` must be True or False, got {sum_agents!r}.")
        reference.name_states(keys.ref_log_prob)
        # In the order of the values in `_write`.
        self._written = [keys.ref_log_prob, keys.kl] if record else []
        if estimator != "k1":
            self._written.append(keys.kl_estimate)
        in_keys = [*reference.in_keys, *reference.action_keys]
        out_keys = [*self._written, *reference.own_state_keys]
        options |= {"in_keys": in_keys, "out_keys": out_keys, "record": record}
        super().__init__(controller, keys, **options)
        self.reference, self.sum_agents = reference, sum_agents
        self.acting = Acting.of(actor, reference.recorded)
        self.estimate = make_estimate(estimator, actor, keys, reference.actor)
        self.action_keys, self.observed = reference.action_keys, reference.in_keys

    @property
    def measured_key(self) -> NestedKey:
        """The entry that the controller is fed."""
        return self.keys.kl if self.estimate is None else self.keys.kl_estimate

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        # `_inv_call` has scored the action before the env stepped.
        step = self._take_score(tensordict, next_tensordict)
        step = measure(step, tensordict, self.estimate, sum_agents=self.sum_agents)
        step = self.adjust_env_step(tensordict, next_tensordict, step)
        self._write(next_tensordict, step)
        if self._first is not None:
            self.look_at_first(step)
        return next_tensordict

    def forward(
        self, tensordict: TensorDictBase, stream: OpenTrajectories | None = None
    ) -> TensorDictBase:
        """Scores, measures and penalizes a batch (*B) that has "next"; returns a shallow copy.

        If its last dimension is time (named "time", or `time_dim`) the reference is evaluated once,
        in recurrent mode. `stream`: from `new_stream`, if several collectors alternate.
        """
        self.refuse_wrong_order()
        tensordict, fake = copy_batch(tensordict), is_fake(tensordict)
        self.refuse_penalized(tensordict.get("next"), "the batch")
        step = score_batch(
            self.reference,
            tensordict,
            self.estimate,
            self.time_dim,
            fake=fake,
            acting=self.acting,
        )
        self.warn_of_random_steps(step)
        step = measure(step, tensordict, self.estimate, sum_agents=self.sum_agents)
        step = self.adjust_batch(tensordict, step, stream, trace=not fake)
        self._write(tensordict.get("next"), step)
        self.look_at_first(step, tensordict)
        # After the measurement, which reads them: logits (*B, V) would fill a replay buffer.
        self.drop_record(tensordict)
        return tensordict

    def drop_record(self, tensordict: TensorDictBase) -> None:
        """Drops from a measured batch what the policy recorded only for the measurement."""
        for key in [] if self.estimate is None else self.estimate.policy_keys:
            tensordict.pop(key, None)

    def _write(self, next_tensordict: TensorDictBase, step: KLStep) -> None:
        # (*B, *A), then twice (*B, *A, 1), or (*B, 1) where agents are summed.
        values = (step.ref_log_prob, step.kl, step.estimate)
        for key, value in zip(self._written, values, strict=False):
            next_tensordict.set(key, value)

    def transform_input_spec(self, input_spec: Composite) -> Composite:
        """Adds the reference's recurrent state and the running sum to the state spec."""
        self.declare_episode_kl(input_spec, self.reference.dtype)
        return super().transform_input_spec(input_spec)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Adds all entries but the reward."""
        self.refuse_penalized(observation_spec, "the env")
        self.claim(observation_spec, self._written)
        # `acting` is (*B, *A), the log-prob's shape; those of the KL are (*shape, 1).
        acting, dtype = self.log_prob_shape(), self.reference.dtype
        shape = self.parent_env.batch_size if self.sum_agents else acting
        for key in self._written[:1]:
            add_spec(observation_spec, key, acting, dtype, acting)
        for key in self._written[1:]:
            add_spec(observation_spec, key, (*shape, 1), dtype, shape)
        self.declare_penalty(observation_spec, torch.Size((*shape, 1)), dtype)
        self.declare_reference(observation_spec, self.reference)
        return observation_spec


class KLRewardTransform(KLConstrainedTransform):
    """Reward minus a constant times the KL: `out = reward - coef * (log_prob - ref_log_prob)`.

    A KLConstrainedTransform that writes only the result, with the interface of TorchRL's former
    class of this name and the right sign: up to TorchRL 0.7.2 that class added the penalty.

    Keys:
        reads ("next", "reward"), the actor's in_keys, the action and its log-prob.
        writes ("next", out_keys[0]) and ("next", "kl_coeff"): the reward's shape.

    Args:
        actor, reference, sum_agents: as for KLConstrainedTransform.
        coef: the coefficient, reward per nat, at least 0.
        in_keys, out_keys: the key of the reward, "reward" by default, and that of the result, by
            default the same.
        requires_grad: whether the reference's weights receive gradients.
        keys: names of the other entries; the coefficient is next to the result by default.
        on_invalid: as for KLConstrainedTransform.

    Raises:
        ValueError: if `in_keys` or `out_keys` is not one key, or `coef` is negative or not finite;
            other errors are those of KLConstrainedTransform.

    Example:
        >>> from torchrl.envs import TransformedEnv
        >>> from torchrl_kl import GPT, CausalLMActor, KLRewardTransform
        >>> from torchrl_kl.envs import DigitLanguageEnv
        >>> actor = CausalLMActor(GPT(vocab_size=11, block_size=8))
        >>> transform = KLRewardTransform(actor, out_keys="reward_kl")
        >>> rollout = TransformedEnv(DigitLanguageEnv(), transform).rollout(4, actor)
        >>> penalty = rollout["next", "reward"] - rollout["next", "reward_kl"]
        >>> penalty.abs().max() < 1e-5  # the policy is its reference
        tensor(True)
    """

    def __init__(
        self,
        actor: nn.Module,
        coef: float | Tensor = 1.0,
        in_keys: NestedKey | list[NestedKey] | None = None,
        out_keys: NestedKey | list[NestedKey] | None = None,
        requires_grad: bool = False,
        *,
        reference: nn.Module | Switch | None = None,
        sum_agents: bool = False,
        keys: KLKeys | None = None,
        on_invalid: OnInvalid = "raise",
    ):
        keys = as_keys(keys)
        frozen = as_reference(
            actor, reference, log_prob_key=keys.log_prob, requires_grad=requires_grad
        )
        reward_key = _one_key("in_keys", [keys.reward] if in_keys is None else in_keys)
        out_key = _one_key("out_keys", [reward_key] if out_keys is None else out_keys)
        # The coefficient goes next to the result, which may be in another nested tensordict.
        keys = keys.with_reward(reward_key, out_key)
        resolved = keys.resolve(frozen.log_prob_key, sum_agents=sum_agents)
        controller = ConstantKLController(_one_number(coef))
        options: dict[str, Any] = {"out_key": out_key, "record": False, "on_invalid": on_invalid}
        self._init(actor, frozen, controller, resolved, sum_agents, **options)
        self.watch_first(actor, copied=reference is None)

    @property
    def coef(self) -> Tensor:
        """The coefficient, 0-dim float64, under the name of the former class."""
        return self.controller.coeff


def _one_key(name: str, keys: NestedKey | list[NestedKey]) -> NestedKey:
    keys = keys if isinstance(keys, list) else [keys]
    if len(keys) != 1:
        raise ValueError(f"`{name}` must be one key, got {keys}: use one transform per reward.")
    return unravel_key(as_tuple(keys[0]))


def _one_number(coef: float | Tensor) -> float:
    if isinstance(coef, Tensor):
        if coef.numel() != 1:
            raise ValueError(f"`coef` must be one number, got shape {tuple(coef.shape)}.")
        coef = coef.item()
    return check_number("coef", coef, at_least=0.0)
