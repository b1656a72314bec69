"""The parts of the stack that measure: the log-prob under the reference, and the KL."""

from __future__ import annotations

from typing import cast

from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.data import Composite

from torchrl_kl.actors.policy import Acting
from torchrl_kl.actors.reading import require_recording
from torchrl_kl.actors.references import Switch, as_reference
from torchrl_kl.batches import counted, expand_right
from torchrl_kl.functional.numbers import working_dtype
from torchrl_kl.keys import KLKeys, as_keys, get_required
from torchrl_kl.transforms.base import KLTransform, add_spec, require_spec
from torchrl_kl.transforms.estimates import Estimator, KLStep, make_estimate, require_one_kind
from torchrl_kl.transforms.steps import (
    ScoringTransform,
    counted_steps,
    measure,
    without_random,
)


class ReferenceModelLogProbTransform(ScoringTransform):
    """Writes log pi_ref(a|s), the log-prob of the policy's action under a frozen reference.

    The action is scored as the policy wrote it, before action transforms turn it into the env's.

    Keys:
        reads the actor's in_keys, its action, and its log-prob, to know whether the policy ran.
        writes ("next", "ref_log_prob"): nats per step, batch shape of the tensordict that holds the
        action, 0 where a random policy acted. A recurrent reference adds ("next", "ref_<state>").
        In an env, ("next", "not_drawn"): whether an action of the trajectory so far was not drawn
        from the policy, as in deterministic or random steps; on a batch, whether the step's was
        not, if any was not.

    Args:
        actor, reference, keys, time_dim: as for KLConstrainedTransform.
        estimator: that of the KLDivergenceTransform that follows.

    Raises:
        TypeError: if `actor` has no distribution, or `reference` has another type than allowed.
        ValueError: if `actor` has uninitialised weights or records no log-prob, or the estimator is
            unknown, or "exact" and `reference` has another kind of distribution; if policy or
            reference has no density, or the bounds of a TanhNormal of the reference are narrower.
        KeyError: if the policy ran but did not record its log-prob, or its top k.
        RuntimeError: on a batch, if the reference is recurrent and its state is unknown.

    Example:
        >>> from torchrl_kl import ReferenceModelLogProbTransform
        >>> from torchrl_kl.language import GPT, CausalLMActor
        >>> from torchrl_kl.envs import DigitLanguageEnv
        >>> actor = CausalLMActor(GPT(vocab_size=11, block_size=8))
        >>> rollout = DigitLanguageEnv(batch_size=(2,)).rollout(4, actor)
        >>> batch = ReferenceModelLogProbTransform(actor)(rollout)
        >>> (batch["next", "ref_log_prob"] - batch["action_log_prob"]).abs().max() < 1e-5
        tensor(True)
    """

    def __init__(
        self,
        actor: nn.Module,
        *,
        estimator: Estimator = "k1",
        reference: nn.Module | Switch | None = None,
        keys: KLKeys | None = None,
        time_dim: int | None = None,
    ):
        keys = as_keys(keys)
        frozen = as_reference(actor, reference, log_prob_key=keys.log_prob)
        if keys.log_prob is None:
            require_recording(actor)
        self.keys = keys.resolve(frozen.log_prob_key)
        frozen.name_states(self.keys.ref_log_prob)
        # TorchRL wants each of the out_keys in the env's specs.
        super().__init__(
            in_keys=[*frozen.in_keys, *frozen.action_keys],
            out_keys=[self.keys.ref_log_prob, self.keys.not_drawn, *frozen.own_state_keys],
        )
        self.reference, self.time_dim = frozen, time_dim
        self.acting = Acting.of(actor, frozen.recorded)
        self.estimate = make_estimate(estimator, frozen.actor, self.keys)
        if estimator == "exact":  # of KLDivergenceTransform, which knows only one actor
            require_one_kind(actor, frozen.actor)
        if reference is None:
            self.watch_first_use(actor)

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        self._write(next_tensordict, self._take_score(tensordict, next_tensordict))
        return next_tensordict

    def _process_copy(self, batch: TensorDictBase, *, fake: bool, moves: bool) -> None:
        step = self.score_batch(batch, fake)
        following, counts = batch.get("next"), counted_steps(batch, self.keys, fake)
        self._write(following, step)
        if step.mask is not None and (counts is None or not step.mask.equal(counts)):
            # Steps of a random policy.
            not_drawn = ~step.mask if counts is None else counts & ~step.mask
            shape = (*cast(Tensor, step.log_prob).shape, 1)
            following.set(self.keys.not_drawn, expand_right(not_drawn, shape).contiguous())

    def _write(self, next_tensordict: TensorDictBase, step: KLStep) -> None:
        # `ref_log_prob` (*B, *A), and for KLDivergenceTransform the reference's parameters.
        next_tensordict.set(self.keys.ref_log_prob, step.ref_log_prob)
        if step.of_reference is not None:
            next_tensordict.set(self.keys.ref_params, step.of_reference)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Adds the log-prob under the reference and its recurrent state."""
        self.claim(observation_spec, [self.keys.ref_log_prob])
        shape = self.log_prob_shape()
        add_spec(observation_spec, self.keys.ref_log_prob, shape, self.reference.dtype, shape)
        self.declare_reference(observation_spec)
        return observation_spec


class KLDivergenceTransform(KLTransform):
    """Writes k1, the estimate `log_prob - ref_log_prob` of KL(policy || reference) of each step.

    Only k1 may be subtracted from a reward. A reward is not differentiated: a penalty c moves the
    policy along E[c grad log pi], which is the gradient of the KL for k1 only. (k2 and k3 nearly
    vanish at the reference, an exact KL does not depend on its step's action.) So `estimator`
    chooses what is *measured* in addition, for logs and controllers: "exact" has no sampling noise
    within a step, "top_k" only that of its tail.

    You may rely on: the mean of `kl`, "exact" and "top_k" over the policy's actions is the KL. You
    may not rely on the sign of `kl` and "top_k", nor on the mean of k2, nor on that of k3 where the
    policy lacks support.

    Keys:
        reads "action_log_prob" and ("next", "ref_log_prob"), shape (*B); for "exact" the recorded
        parameters of the policy's distribution, for "top_k" what TopKActor records.
        writes ("next", "kl"): nats per step, (*B, 1); with another estimator ("next",
        "kl_estimate") too. Zero on padding (("collector", "mask") False), and in an env step where
        the action was not drawn by a policy or a batched env skips the row.
        drops, on a batch, what the estimate has used.

    Args:
        estimator, sum_agents, keys: as for KLConstrainedTransform.
        actor: for "exact": an actor with the distribution class and the keys of policy and
            reference.

    Raises:
        TypeError: if `sum_agents` is not a bool.
        ValueError: if the estimator is unknown, "exact" has no actor, or shapes differ.
        KeyError: if a log-prob, or what the estimator reads, is missing where a policy ran.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_kl import KLDivergenceTransform
        >>> step = TensorDict(action_log_prob=torch.tensor([-1.0]), batch_size=1)
        >>> step["next"] = TensorDict(ref_log_prob=torch.tensor([-1.5]), batch_size=1)
        >>> KLDivergenceTransform()(step)["next", "kl"]
        tensor([[0.5000]])
    """

    def __init__(
        self,
        *,
        estimator: Estimator = "k1",
        actor: nn.Module | None = None,
        sum_agents: bool = False,
        keys: KLKeys | None = None,
    ):
        self.keys, self.sum_agents = as_keys(keys).resolve(sum_agents=sum_agents), sum_agents
        estimate = make_estimate(estimator, actor, self.keys)
        super().__init__(
            in_keys=[*self.keys.recorded.keys, self.keys.ref_log_prob],
            out_keys=[self.keys.kl, *([] if estimate is None else [self.keys.kl_estimate])],
        )
        self.estimate = estimate

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        log_prob = self.keys.recorded.read(tensordict)  # (*B, *A); None if no policy ran
        self._measure(tensordict, next_tensordict, log_prob, counted(tensordict, self.keys))
        return next_tensordict

    def _process_copy(self, batch: TensorDictBase, *, fake: bool, moves: bool) -> None:
        following, log_prob = batch.get("next"), self.keys.recorded.require(batch)
        mask = without_random(following, self.keys, counted_steps(batch, self.keys, fake))
        self._measure(batch, following, log_prob, mask)
        self.drop_record(batch)

    def _measure(
        self,
        tensordict: TensorDictBase,
        next_tensordict: TensorDictBase,
        log_prob: Tensor | None,
        mask: Tensor | None,
    ) -> None:
        ref_log_prob = get_required(next_tensordict, self.keys.ref_log_prob, _NO_REFERENCE)
        of_reference = None
        if self.estimate is not None:
            of_reference = cast(TensorDictBase, next_tensordict.pop(self.keys.ref_params, None))
            if self.estimate.policy_keys and of_reference is None and log_prob is not None:
                get_required(next_tensordict, self.keys.ref_params, _NO_REFERENCE_PARAMS)
        step = KLStep(log_prob, ref_log_prob, mask, of_reference=of_reference)
        step = measure(step, tensordict, self.estimate, sum_agents=self.sum_agents)
        for key, value in zip(self.out_keys, (step.kl, step.estimate), strict=False):
            next_tensordict.set(key, value)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Adds the KL and, with another estimator, the estimate."""
        ref = require_spec(observation_spec, self.keys.ref_log_prob, _NO_REFERENCE)
        self.claim(observation_spec, self.out_keys)
        shape = self.parent_env.batch_size if self.sum_agents else ref.shape
        for key in self.out_keys:
            add_spec(observation_spec, key, (*shape, 1), working_dtype(ref.dtype), shape)
        return observation_spec


_NO_REFERENCE = (
    "put ReferenceModelLogProbTransform before this transform, or name its entry with "
    "`KLKeys(ref_log_prob=...)`."
)
_NO_REFERENCE_PARAMS = (
    "put ReferenceModelLogProbTransform with the same `estimator` before this transform, both into "
    "the env or both on the batch."
)
