"""The parts of the stack that measure: the log-prob under the reference, and the KL."""

from __future__ import annotations

from typing import Any, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.data import Composite

from torchrl_kl import _tensordict as td
from torchrl_kl._tensordict import KLKeys
from torchrl_kl.actors.policy import Acting
from torchrl_kl.actors.references import Switch, as_reference
from torchrl_kl.functional.invalid import Guard, OnInvalid, is_valid
from torchrl_kl.transforms.base import KLTransform, require_spec
from torchrl_kl.transforms.checks import pass_on, passed_on, without_invalid
from torchrl_kl.transforms.estimates import Estimator, KLStep, make_estimate, require_one_kind
from torchrl_kl.transforms.steps import ScoringTransform, measure, score_batch


class ReferenceModelLogProbTransform(ScoringTransform):
    """Writes log pi_ref(a|s), the log-prob of the policy's action under a frozen reference.

    The action is scored as the policy wrote it, before action transforms turn it into the env's.

    Keys:
        reads the actor's in_keys, its action, and its log-prob, to know whether the policy ran.
        writes ("next", "ref_log_prob"): nats per step, batch shape of the tensordict that holds the
        action, 0 where a random policy acted. A recurrent reference adds ("next", "ref_<state>").

    Args:
        actor, reference, keys, time_dim: as for KLConstrainedTransform.
        estimator: that of the KLDivergenceTransform that follows.
        zero_states, recompute_log_prob, chunk_size: as for FrozenActor.
        on_invalid: as for KLConstrainedTransform, and the same for all three parts, of which "mask"
            needs all in the env or all on the batch. Masked steps have the policy's log-prob
            instead (0 if that is invalid), so that their KL is 0.

    Raises:
        TypeError: if `actor` has no distribution, or `reference` has another type than allowed.
        ValueError: if `actor` has uninitialised weights, or the estimator is unknown, or "exact"
            and `reference` has another kind of distribution; or for an invalid log-prob.
        KeyError: if the policy ran but did not record its log-prob, or its top k.
        RuntimeError: on a batch, if the reference is recurrent and its state is unknown.

    Example:
        >>> from torchrl_kl import GPT, CausalLMActor, ReferenceModelLogProbTransform
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
        zero_states: bool = False,
        recompute_log_prob: bool = False,
        chunk_size: int | None = None,
        on_invalid: OnInvalid = "raise",
    ):
        self.guard, keys = Guard(on_invalid), td.as_keys(keys)
        options: dict[str, Any] = {"zero_states": zero_states, "chunk_size": chunk_size}
        options["recompute_log_prob"] = recompute_log_prob
        frozen = as_reference(actor, reference, log_prob_key=keys.log_prob, **options)
        self.keys = keys.resolve(frozen.log_prob_key)
        frozen.name_states(self.keys.ref_log_prob)
        # TorchRL wants each of the out_keys in the env's specs.
        super().__init__(
            in_keys=[*frozen.in_keys, *frozen.action_keys],
            out_keys=[self.keys.ref_log_prob, *frozen.own_state_keys],
        )
        self.reference, self.time_dim = frozen, time_dim
        self.acting = Acting.of(actor, frozen.recorded)
        self.action_keys = frozen.action_keys
        self.estimate = make_estimate(estimator, frozen.actor, self.keys)
        if estimator == "exact":  # of KLDivergenceTransform, which knows only one actor
            require_one_kind(actor, frozen.actor)
        self.watch_first(actor, copied=reference is None)

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        step = self._take_score(tensordict, next_tensordict)
        step = self._write(tensordict, next_tensordict, step)
        self.look_at_first(step)
        # (*B, *A): whether the policy drew the action, in an entry that no rollout keeps.
        counted = torch.full_like(step.ref_log_prob, bool(step.counted), dtype=torch.bool)
        tensordict.set(td.hidden_key(self.keys.ref_log_prob, "counted"), counted)
        return next_tensordict

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Scores a batch (*B) that has "next"; returns a shallow copy."""
        self.refuse_wrong_order()
        tensordict = td.copy_batch(tensordict)
        step = score_batch(
            self.reference,
            tensordict,
            self.estimate,
            self.time_dim,
            fake=td.is_fake(tensordict),
            acting=self.acting,
        )
        self.warn_of_random_steps(step)
        step = self._write(tensordict, tensordict.get("next"), step)
        self.look_at_first(step, tensordict)
        return tensordict

    def _write(self, tensordict: TensorDictBase, out: TensorDictBase, step: KLStep) -> KLStep:
        log_prob = step.log_prob
        if log_prob is not None:
            step, _ = without_invalid(self, tensordict, step, causes=self.reference.in_keys)
            if step.valid is not None:
                valid = td.expand_right(step.valid, log_prob.shape)
                ref_log_prob = torch.where(valid | ~is_valid(log_prob), step.ref_log_prob, log_prob)
                step = step._replace(ref_log_prob=ref_log_prob)
        pass_on(tensordict, self.keys.ref_log_prob, step)
        # `ref_log_prob` (*B, *A), and for KLDivergenceTransform the reference's parameters and a
        # log-prob that was recomputed. TorchRL's collectors drop entries that begin with "_".
        out.set(self.keys.ref_log_prob, step.ref_log_prob)
        if step.of_reference is not None:
            out.set(td.hidden_key(self.keys.ref_log_prob, "dist"), step.of_reference)
        if step.log_prob is not None and self.keys.recorded.missing(tensordict):
            tensordict.set(td.hidden_key(self.keys.ref_log_prob, "policy"), step.log_prob)
        return step

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Adds the log-prob under the reference and its recurrent state."""
        self.claim(observation_spec, [self.keys.ref_log_prob])
        shape = self.log_prob_shape()
        td.add_spec(observation_spec, self.keys.ref_log_prob, shape, self.reference.dtype, shape)
        self.declare_reference(observation_spec, self.reference)
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
        no policy ran or a batched env skips the row.
        drops, on a batch, what the estimate has used, unless `keep_dist_params`.

    Args:
        estimator, sum_agents, keys: as for KLConstrainedTransform.
        actor: for "exact": an actor with the distribution class and the keys of policy and
            reference.
        keep_dist_params: whether a batch keeps the policy's recorded parameters (or top k), for a
            loss that reads them, such as KLPENPPOLoss.
        on_invalid: as for KLConstrainedTransform.

    Raises:
        TypeError: if `sum_agents` is not a bool.
        ValueError: if the estimator is unknown, "exact" has no actor, or shapes differ; or for an
            invalid log-prob or KL.
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
        keep_dist_params: bool = False,
        keys: KLKeys | None = None,
        on_invalid: OnInvalid = "raise",
    ):
        self.guard = Guard(on_invalid)
        if not isinstance(sum_agents, bool):
            raise TypeError(f"`sum_agents` must be True or False, got {sum_agents!r}.")
        self.keys = td.as_keys(keys).resolve(sum_agents=sum_agents)
        self.sum_agents, self.keep_dist_params = sum_agents, keep_dist_params
        estimate = make_estimate(estimator, actor, self.keys)
        super().__init__(
            in_keys=[*self.keys.recorded.keys, self.keys.ref_log_prob],
            out_keys=[self.keys.kl, *([] if estimate is None else [self.keys.kl_estimate])],
        )
        self.estimate = estimate

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        # (*B, *A); missing if another transform or the env wrote `ref_log_prob`.
        counted = tensordict.get(td.hidden_key(self.keys.ref_log_prob, "counted"), None)
        log_prob = self._log_prob(tensordict)
        if counted is not None and log_prob is None and counted.any():
            log_prob = self.keys.recorded.require(tensordict)
        counts = log_prob is not None if counted is None else bool(counted.all())
        mask = tensordict.get("_step", None)  # (*B), False in rows that a batched env skips
        step = self._measure(tensordict, next_tensordict, log_prob, mask)
        # (*B, *A, 1) for RewardAdjustmentTransform, which sees no log-probs.
        counted = torch.full_like(cast(Tensor, step.kl), counts, dtype=torch.bool)
        tensordict.set(td.hidden_key(self.keys.kl, "counted"), counted)
        return next_tensordict

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Measures a batch (*B) that has "next"; returns a shallow copy."""
        self.refuse_wrong_order()
        tensordict = td.copy_batch(tensordict)
        log_prob = self._log_prob(tensordict)
        if log_prob is None:
            log_prob = self.keys.recorded.require(tensordict)
        mask = td.counted_steps(tensordict, td.is_fake(tensordict))
        self._measure(tensordict, tensordict.get("next"), log_prob, mask)
        # Parameters such as logits (*B, T, V) would fill a replay buffer.
        if self.estimate is not None and not self.keep_dist_params:
            for key in self.estimate.policy_keys:
                tensordict.pop(key, None)
        return tensordict

    def _log_prob(self, tensordict: TensorDictBase) -> Tensor | None:
        # Recorded by the policy, or recomputed by ReferenceModelLogProbTransform, (*B, *A).
        log_prob = self.keys.recorded.read(tensordict)
        if log_prob is None:
            log_prob = tensordict.pop(td.hidden_key(self.keys.ref_log_prob, "policy"), None)
        return log_prob

    def _measure(
        self,
        tensordict: TensorDictBase,
        next_tensordict: TensorDictBase,
        log_prob: Tensor | None,
        mask: Tensor | None,
    ) -> KLStep:
        ref_log_prob = td.get_required(next_tensordict, self.keys.ref_log_prob, _NO_REFERENCE)
        of_reference = None
        if self.estimate is not None:
            hidden = td.hidden_key(self.keys.ref_log_prob, "dist")
            of_reference = cast(TensorDictBase | None, next_tensordict.pop(hidden, None))
            if self.estimate.policy_keys and of_reference is None and log_prob is not None:
                td.get_required(next_tensordict, hidden, _NO_REFERENCE_DIST)
        valid = passed_on(tensordict, self.keys.ref_log_prob)
        step = KLStep(log_prob, ref_log_prob, mask, of_reference=of_reference, valid=valid)
        step = measure(step, tensordict, self.estimate, sum_agents=self.sum_agents)
        step, _ = without_invalid(self, tensordict, step)
        pass_on(tensordict, self.keys.kl, step)
        for key, value in zip(self.out_keys, (step.kl, step.estimate), strict=False):
            next_tensordict.set(key, value)
        return step

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Adds the KL and, with another estimator, the estimate."""
        ref = require_spec(observation_spec, self.keys.ref_log_prob, _NO_REFERENCE)
        self.claim(observation_spec, self.out_keys)
        shape = self.parent_env.batch_size if self.sum_agents else ref.shape
        for key in self.out_keys:
            td.add_spec(observation_spec, key, (*shape, 1), ref.dtype, shape)
        return observation_spec


_NO_REFERENCE = (
    "put ReferenceModelLogProbTransform before this transform, or name its entry with "
    "`KLKeys(ref_log_prob=...)`."
)
_NO_REFERENCE_DIST = (
    "put ReferenceModelLogProbTransform with the same `estimator` before this transform, both into "
    "the env or both on the batch."
)
