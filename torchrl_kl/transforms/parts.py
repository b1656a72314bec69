"""The parts of the stack that measure: the log-prob under the reference, and the KL."""

from __future__ import annotations

from tensordict import NestedKey, TensorDictBase
from torch import Tensor, nn
from torchrl.data import Composite

from torchrl_kl.actors.references import Switch, as_reference
from torchrl_kl.batches import counted
from torchrl_kl.functional.numbers import working_dtype
from torchrl_kl.keys import KLKeys, ResolvedKeys, as_keys, as_tuple, get_required, sibling
from torchrl_kl.transforms.base import KLTransform, Leaf, require_spec
from torchrl_kl.transforms.estimates import Estimator, check_estimator
from torchrl_kl.transforms.scorer import Scored, measure
from torchrl_kl.transforms.scoring import ScoringTransform, make_scorer


class ReferenceModelLogProbTransform(ScoringTransform):
    """Writes log pi_ref(a|s), the log-prob of the policy's action under a frozen reference.

    The action is scored as the policy wrote it, before action transforms turn it into the env's.

    Keys:
        reads the actor's in_keys, its action, and its log-prob, to know whether the policy ran; for
        "exact" the recorded parameters of the policy's distribution, for "top_k" what TopKActor
        records: these are dropped from a batch.
        writes ("next", "ref_log_prob"): nats per step, batch shape of the tensordict that holds the
        action, 0 where a random policy acted. A recurrent reference adds ("next", "ref_<state>").
        In an env, ("next", "not_drawn"): whether an action of the trajectory so far was not drawn
        from the policy, as in deterministic or random steps.

    Args:
        actor, reference, keys, time_dim: as for KLConstrainedTransform.
        estimator: that of the KLDivergenceTransform that follows.

    Raises:
        TypeError: if `actor` has no distribution, or `reference` has another type than allowed.
        ValueError: if `actor` has uninitialised weights or records no log-prob, or the estimator is
            unknown; if policy or reference has no density, or the bounds of a TanhNormal of the
            reference are narrower; for "exact", if their parameters differ in shape.
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
        own = reference is None
        scorer, self.keys = make_scorer(actor, frozen, keys, estimator, own, time_dim=time_dim)
        self._passed_key = passed_key(self.keys, estimator)
        # TorchRL wants each of the out_keys in the env's specs.
        super().__init__(
            [*frozen.in_keys, *frozen.action_keys],
            [self.keys.ref_log_prob, self.keys.not_drawn, *frozen.own_state_keys],
        )
        self.scorer = scorer

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        self._write(next_tensordict, self.take_score(tensordict, next_tensordict))
        return next_tensordict

    def adjust(self, batch: TensorDictBase, mask: Tensor | None, *, moves: bool) -> None:
        """Scores a batch."""
        self._write(batch.get("next"), self.scorer.batch(batch, mask))
        self.drop_record(batch)

    def _write(self, next_tensordict: TensorDictBase, scored: Scored) -> None:
        # Both (*B, *A); KLDivergenceTransform takes the estimate out.
        next_tensordict.set(self.keys.ref_log_prob, scored.ref_log_prob)
        for estimate in scored.estimates:
            next_tensordict.set(self._passed_key, estimate)

    def leaves(self, spec: Composite) -> dict[NestedKey, Leaf]:
        """The log-prob under the reference and its recurrent state."""
        shape = self.log_prob_shape()
        own = {self.keys.ref_log_prob: Leaf(shape, self.reference.dtype, shape)}
        return own | super().leaves(spec)


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
        reads "action_log_prob" and ("next", "ref_log_prob"), shape (*B).
        writes ("next", "kl"): nats per step, (*B, 1); with another estimator ("next",
        "kl_estimate") too. Zero on padding (("collector", "mask") False), and in an env step where
        the action was not drawn by a policy or a batched env skips the row.

    Args:
        estimator: as for KLConstrainedTransform. ReferenceModelLogProbTransform, with the same one,
            passes "exact" and "top_k" on, from the pass in which it scores.
        sum_agents, keys: as for KLConstrainedTransform.

    Raises:
        TypeError: if `sum_agents` is not a bool.
        ValueError: if the estimator is unknown, or shapes differ.
        KeyError: if a log-prob, or the estimate, is missing where a policy ran.

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
        sum_agents: bool = False,
        keys: KLKeys | None = None,
    ):
        check_estimator(estimator)
        self.keys = as_keys(keys).resolve(sum_agents=sum_agents)
        self.estimator, self.sum_agents = estimator, sum_agents
        super().__init__(
            [*self.keys.recorded.keys, self.keys.ref_log_prob],
            [self.keys.kl, *([] if estimator == "k1" else [self.keys.kl_estimate])],
        )

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        # (*B, *A); of a random policy there is none, and the KL is 0.
        log_prob = self.keys.recorded.read(tensordict)
        self._measure(tensordict, next_tensordict, log_prob, counted(tensordict, self.keys))
        return next_tensordict

    def adjust(self, batch: TensorDictBase, mask: Tensor | None, *, moves: bool) -> None:
        """Measures the KL of a batch."""
        self._measure(batch, batch.get("next"), self.keys.recorded.require(batch), mask)

    def _measure(
        self,
        tensordict: TensorDictBase,
        next_tensordict: TensorDictBase,
        log_prob: Tensor | None,
        mask: Tensor | None,
    ) -> None:
        ref_log_prob = get_required(next_tensordict, self.keys.ref_log_prob, _NO_REFERENCE)
        if log_prob is None and ref_log_prob.any():  # not of a random policy
            log_prob = self.keys.recorded.require(tensordict)
        log_prob = ref_log_prob if log_prob is None else log_prob.detach()
        estimates = []
        if self.estimator in PASSED:
            key = passed_key(self.keys, self.estimator)
            get_required(next_tensordict, key, _NO_ESTIMATE)
            estimates = [next_tensordict.pop(key)]
        n_dims = tensordict.batch_dims if self.sum_agents else None
        scored = Scored(log_prob, ref_log_prob, estimates)
        measured = measure(scored, mask, self.keys, self.estimator, sum_to=n_dims)
        for key, value in zip(self.out_keys, (measured.kl, measured.fed), strict=False):
            next_tensordict.set(key, value)

    def leaves(self, spec: Composite) -> dict[NestedKey, Leaf]:
        """The KL and, with another estimator, the estimate."""
        ref = require_spec(spec, self.keys.ref_log_prob, _NO_REFERENCE)
        shape = self.parent_env.batch_size if self.sum_agents else ref.shape
        leaf = Leaf((*shape, 1), working_dtype(ref.dtype), shape)
        return dict.fromkeys(self.out_keys, leaf)


PASSED = ("exact", "top_k")  # estimates that one part makes, in its pass, and the other takes


def passed_key(keys: ResolvedKeys, estimator: str) -> NestedKey:
    """The hidden entry in which the estimate is passed on."""
    return sibling(keys.estimate, f"{as_tuple(keys.estimate)[-1]}_{estimator}")


_NO_REFERENCE = (
    "put ReferenceModelLogProbTransform before this transform, or name its entry with "
    "`KLKeys(ref_log_prob=...)`."
)
_NO_ESTIMATE = (
    "put ReferenceModelLogProbTransform with the same `estimator` before this transform, both into "
    "the env or both on the batch."
)
