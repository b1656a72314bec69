"""The transforms that measure: log-prob under the reference, and the KL divergence from it.

In an env they work in `_step`, on the policy's side of any action transform; on a batch they work in `forward`, on a
shallow copy, and never write into their input. The numbers are the same.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Literal, cast

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor, nn
from torchrl.data import Composite
from torchrl.envs import EnvBase

from torchrl_kl.transforms.estimates import Estimator, make_estimate, reference_dist_key
from torchrl_kl._tensordict import (
    MASK_KEY,
    LogProbKeys,
    add_spec,
    as_tuple,
    beside,
    existing_keys,
    expand_right,
    find_time_dim,
    is_fake,
    state_spec,
    sum_action_dims,
)
from torchrl_kl.transforms.placement import refuse_parallel_worker
from torchrl_kl.actors.live import LivePolicy
from torchrl_kl.actors.switched import Switch, as_reference
from torchrl_kl.transforms.base import (
    RECORD_LOG_PROB,
    KLTransform,
    copy_batch,
    counted_key,
    get_required,
)
from torchrl_kl.functional.estimators import kl_k1
from torchrl_kl.actors.frozen import FrozenActor

__all__ = ["KLDivergenceTransform", "ReferenceModelLogProbTransform"]


class ReferenceTransform(KLTransform):
    """Base of the transforms that evaluate a reference: when it is evaluated, on what, and which specs that needs.

    Args:
        reference: the frozen actor.
        in_keys: what the transform reads, for TorchRL's bookkeeping.
        out_keys: what it writes, for TorchRL's bookkeeping.
        time_dim: the batch dimension that is time, for batches that do not name it; it must be the last one.
        zero_states: whether a recurrent reference may begin in the middle of a trajectory from a zero state.
        policy: the acting policy, to be asked for its log-prob where it recorded none.
    """

    def __init__(
        self,
        reference: FrozenActor,
        *,
        in_keys: list[NestedKey],
        out_keys: list[NestedKey],
        time_dim: int | None,
        zero_states: bool,
        policy: nn.Module | None = None,
    ):
        super().__init__(in_keys=in_keys, out_keys=[*out_keys, *reference.own_state_keys])
        self.reference = reference
        self._policy = None if policy is None else LivePolicy(policy, reference.recorded)
        self.action_keys = reference.action_keys
        self.time_dim = time_dim
        self.zero_states = zero_states
        self._inputs_key = _scratch_key(out_keys[0], "inputs")
        self._current_key = _scratch_key(out_keys[0], "policy")

    @abstractmethod
    def _write(
        self,
        tensordict: TensorDictBase,
        next_tensordict: TensorDictBase,
        log_prob: Tensor | None,
        ref_log_prob: Tensor | None,
        mask: Tensor | None,
    ) -> None:
        """Writes the results of one step or batch; both log-probs are None where no policy ran."""

    def _keep(
        self, tensordict: TensorDictBase, next_tensordict: TensorDictBase, outputs: TensorDictBase
    ) -> None:
        """Keeps what a later transform needs of the reference's pass."""

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Keeps what the policy saw and did, before the inverse transforms before this one turn it into the env's."""
        if self.in_env:
            tensordict.set(self._inputs_key, self.reference.inputs(tensordict))
            self._ask_policy(tensordict)
        return tensordict

    def _ask_policy(self, tensordict: TensorDictBase) -> None:
        """Keeps the acting policy's log-prob of its action where it recorded none and may be asked."""
        if self._policy is None or not self.reference.recorded.missing(tensordict):
            return
        if self._policy.ran(tensordict, self._env_action_keys):
            tensordict.set(self._current_key, self._policy.log_prob(tensordict, timed=False))

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        inputs = tensordict.get(self._inputs_key)
        log_prob = self.reference.recorded.read(tensordict)
        if log_prob is None:
            log_prob = tensordict.get(self._current_key, None)
        if log_prob is None:
            self._refuse_unrecorded(tensordict)
            refuse_parallel_worker(type(self).__name__)
            self._write(tensordict, next_tensordict, None, None, None)
            self._write_states(next_tensordict, [inputs.get(k) for k in self._own_states])
            return next_tensordict
        score = self.reference.step(inputs)
        self._write(
            tensordict, next_tensordict, log_prob, score.log_prob, tensordict.get("_step", None)
        )
        self._write_states(next_tensordict, score.states)
        self._keep(tensordict, next_tensordict, score.outputs)
        return next_tensordict

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Evaluates a batch that has "next"; returns a shallow copy with the results.

        Args:
            tensordict: batch of shape (*B, T) whose last dimension is time (named "time", or given as `time_dim`):
                the reference is evaluated once, in recurrent mode; or any other batch (*B): step by step.

        Raises:
            KeyError: if the policy's log-prob or "next" is not there.
            RuntimeError: if the reference is recurrent and its state is not known.
        """
        self.refuse_wrong_order()
        tensordict = copy_batch(tensordict)
        timed = find_time_dim(tensordict, self.time_dim) is not None
        log_prob = self.reference.recorded.read(tensordict)
        if log_prob is None and self._policy is not None:
            log_prob = self._policy.log_prob(tensordict, timed=timed)
        if log_prob is None:
            log_prob = _recorded_log_prob(tensordict, self.reference.recorded)
        if not timed:
            score = self.reference.step(self.reference.inputs(tensordict))
        else:
            score = self.reference.trajectories(tensordict, zero_states=self.zero_states)
        self._write(
            tensordict,
            tensordict.get("next"),
            log_prob,
            score.log_prob,
            tensordict.get(MASK_KEY, None),
        )
        self._keep(tensordict, tensordict.get("next"), score.outputs)
        return tensordict

    def transform_input_spec(self, input_spec: Composite) -> Composite:
        """Adds the reference's recurrent state to the state spec, so that batched envs carry it."""
        self._add_state_specs(state_spec(input_spec))
        return input_spec

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Adds the reference's recurrent state to the observation spec."""
        taken = [key for key in self._own_states if key in observation_spec.keys(True, True)]
        if taken:
            raise RuntimeError(
                f"the env has {taken}, the state of another recurrent reference: two references in one env would "
                "overwrite each other's memory. Score one of them on the collector's batches."
            )
        self._add_state_specs(observation_spec)
        return observation_spec

    def update_reference(self, source: nn.Module, tau: float = 1.0) -> None:
        """Moves the reference towards `source`, a share `tau` of the way, as `FrozenActor.update_reference` does."""
        self.reference.update_reference(source, tau)

    def log_prob_shape(self) -> torch.Size:
        """The shape of a log-prob in the parent env: the batch shape of the tensordict that holds the action."""
        path = self.reference.recorded.branch
        spec = self.parent_env.full_action_spec
        return spec[path].shape if path and path in spec.keys(True) else self.parent_env.batch_size

    @property
    def _env_action_keys(self) -> list[NestedKey]:
        """What a random policy writes."""
        return cast(EnvBase, self.container).action_keys

    @property
    def _own_states(self) -> list[NestedKey]:
        return self.reference.own_state_keys

    def _write_states(self, next_tensordict: TensorDictBase, states: list[Tensor]) -> None:
        for key, state in zip(self._own_states, states, strict=True):
            next_tensordict.set(key, state)

    def _add_state_specs(self, spec: Composite) -> None:
        for key, leaf in self.reference.state_specs().items():
            shape = (*self.parent_env.batch_size, *leaf.shape)
            add_spec(spec, key, shape, leaf.dtype, self.parent_env.batch_size)

    def _refuse_unrecorded(self, tensordict: TensorDictBase) -> None:
        """A policy that ran without recording its log-prob must not pass for a random one."""
        keys = tensordict.keys(True, True)
        recorded, actions = self.reference.recorded, self._env_action_keys
        traces = [
            key
            for key in (*self.reference.trace_keys, *recorded.keys)
            if key in keys and key not in actions
        ]
        if traces:
            raise KeyError(
                f"the policy ran (its {traces} are there) but left no {recorded.missing(tensordict)[0]!r}, got "
                f"{existing_keys(tensordict)}: {RECORD_LOG_PROB}"
            )


class ReferenceModelLogProbTransform(ReferenceTransform):
    """Writes log pi_ref(a|s), the log-prob of the policy's action under a frozen copy of an actor.

    You may rely on: the copy moves by `update_reference` only and never has gradients; identical weights give the
    policy's own log-prob; the action scored is the policy's, not the env's, if action transforms stand before this one.

    Keys:
        reads the actor's in_keys and its action; in the env also its log-prob, to know whether the policy ran.
        writes ("next", "ref_log_prob"): nats per step, batch shape of the tensordict that holds the action; zero
        where a random policy acted. A recurrent reference adds its own state, ("next", "ref_<state>").
        For "exact" and "top_k" also ("next", "_ref_log_prob_dist"): what the reference has where the policy recorded
        its distribution ("exact": the parameters, under the policy's names; "top_k": the log-probs of the policy's top
        k, (*B, k)). It comes out of the same pass, and the KLDivergenceTransform after this one takes it away.

    Args:
        actor: the policy; a frozen copy of it becomes the reference.
        estimator: that of the KLDivergenceTransform that follows.
        ref_log_prob_key: where to write; by default "ref_log_prob" beside the policy's log-prob.
        log_prob_key: where the policy records its log-prob, or a list of where it records those of the parts of a
            composite action, which are added up; by default `actor.log_prob_keys`.
        time_dim: the batch dimension that is time, for batches that do not name it "time"; it must be the last.
        zero_states: whether a recurrent reference may begin in the middle of a trajectory from a zero state instead of
            raising; a state that is not known then costs accuracy.
        top_k_key: where the policy records its top k; by default "top_k" beside its log-prob.
        reference: another actor to copy and freeze; or a FrozenActor, which is used as it is; or, for no copy at all, a
            callable that returns a context manager in which `actor` itself is the reference, such as PEFT's
            `model.disable_adapter`.
        recompute_log_prob: whether `actor` itself, not a copy, is asked for its log-prob of an action where it recorded
            none: its log-prob of today, not that of when it drew the action. The KLDivergenceTransform after this one
            uses it. No other process can have such a transform. In an env, random actions are told from the policy's by
            the other entries that it leaves.

    Raises:
        TypeError: if `actor` has no distribution, or not a categorical one for "top_k", or `reference` is none of
            these.
        ValueError: if `actor` has uninitialised weights, or the estimator is unknown.
        KeyError: in a step, if the policy ran but did not record its log-prob, or its top k for "top_k".

    Example:
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import TensorDictModule
        >>> from torchrl.modules import ProbabilisticActor
        >>> actor = ProbabilisticActor(
        ...     TensorDictModule(nn.Linear(3, 2), ["observation"], ["logits"]),
        ...     in_keys=["logits"],
        ...     distribution_class=torch.distributions.Categorical,
        ...     return_log_prob=True,
        ... )
        >>> batch = actor(TensorDict(observation=torch.randn(5, 3), next=TensorDict(batch_size=5), batch_size=5))
        >>> batch = ReferenceModelLogProbTransform(actor)(batch)
        >>> torch.equal(batch["next", "ref_log_prob"], batch["action_log_prob"])
        True
    """

    def __init__(
        self,
        actor: nn.Module,
        *,
        estimator: Estimator = "k1",
        ref_log_prob_key: NestedKey | None = None,
        log_prob_key: NestedKey | list[NestedKey] | None = None,
        time_dim: int | None = None,
        zero_states: bool = False,
        top_k_key: NestedKey | None = None,
        reference: nn.Module | Switch | None = None,
        recompute_log_prob: bool = False,
    ):
        frozen = as_reference(actor, reference, log_prob_key=log_prob_key)
        self.ref_log_prob_key = ref_log_prob_key or frozen.recorded.beside("ref_log_prob")
        super().__init__(
            frozen,
            in_keys=[*frozen.in_keys, *frozen.action_keys],
            out_keys=[self.ref_log_prob_key],
            time_dim=time_dim,
            zero_states=zero_states,
            policy=actor if recompute_log_prob else None,
        )
        self._estimate = make_estimate(estimator, frozen.actor, frozen.recorded, top_k_key)
        self._counted_key = counted_key(self.ref_log_prob_key)

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        next_tensordict = super()._step(tensordict, next_tensordict)
        ran = any(
            tensordict.get(key, None) is not None
            for key in (self.reference.recorded.keys[0], self._current_key)
        )
        counts = ran and self.reference.samples()
        counted = torch.full_like(
            next_tensordict.get(self.ref_log_prob_key), counts, dtype=torch.bool
        )
        tensordict.set(self._counted_key, counted)
        return next_tensordict

    def _write(self, tensordict, next_tensordict, log_prob, ref_log_prob, mask):
        if ref_log_prob is None:
            batch_size = self.reference.recorded.batch_size(tensordict)
            ref_log_prob = torch.zeros(
                batch_size, dtype=self.reference.dtype, device=tensordict.device
            )
        elif self._policy is not None and self.reference.recorded.missing(tensordict):
            tensordict.set(
                self._current_key, log_prob
            )  # for the KLDivergenceTransform after this one
        next_tensordict.set(self.ref_log_prob_key, ref_log_prob)

    def _keep(self, tensordict, next_tensordict, outputs):
        if self._estimate is not None:
            kept = self._estimate.of_reference(tensordict, outputs, self.reference.actor)
            if kept is not None:
                next_tensordict.set(reference_dist_key(self.ref_log_prob_key), kept)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Adds the log-prob under the reference."""
        self.claim(observation_spec, [self.ref_log_prob_key])
        shape = self.log_prob_shape()
        add_spec(observation_spec, self.ref_log_prob_key, shape, self.reference.dtype, shape)
        return super().transform_observation_spec(observation_spec)


class KLDivergenceTransform(KLTransform):
    """Writes the k1 estimate of KL(policy || reference) for each step, and another estimate of it on request.

    `kl = log_prob - ref_log_prob` is what may be charged to a reward, and the only one of these. A reward is not
    differentiated: charging c moves the policy along E[c grad log pi], which is the gradient of the KL for k1 alone.
    Charged k2 or k3 nearly vanish at the reference. A charged exact KL is the same whatever action its step takes, so
    it does not hold that action back at all. So `estimator` chooses what is *measured* beside k1, for logs and
    controllers: "exact" has no sampling noise within a step, "top_k" only that of its tail; both have the mean of k1.

    You may rely on: the mean of `kl` over the policy's actions is the KL; so is that of "exact" and "top_k". You may
    not rely on the sign of `kl` and "top_k", nor on the means of k2 (and of k3 where the policy lacks support).

    Keys:
        reads "action_log_prob" and ("next", "ref_log_prob"), batch shape of the tensordict that holds them; for "exact"
        also the parameters of its distribution that the policy records ("logits", or "loc" and "scale", ...), for
        "top_k" what TopKActor records; and what ReferenceModelLogProbTransform with the same estimator kept.
        writes ("next", "kl"): nats per step, that shape plus a trailing 1; ("next", "kl_estimate") alike, with another
        estimator than k1. Zero in an env step where no policy ran or a batched env skips the row (a rollout
        then repeats the row's last step instead), and on padding (("collector", "mask") False).
        drops, on a batch, what the estimate has used up: the reference's part, and unless `keep_dist_params` the
        policy's, its recorded parameters or top k. (In an env the policy's record stays in the rollout: TorchRL keeps
        what a policy writes.)

    Args:
        estimator: what is measured: "k1", "k2", "k3", "exact" or "top_k".
        actor: for "exact": an actor with the policy's distribution class and keys. Its weights are not kept.
        log_prob_key: the policy's log-prob, or a list of those of the parts of a composite action, which are added up.
        ref_log_prob_key: the reference's; by default "ref_log_prob" beside the policy's.
        kl_key: where k1 goes; by default "kl" beside the policy's log-prob.
        kl_estimate_key: where the other estimate goes; by default "kl_estimate" beside the KL.
        top_k_key: for "top_k": where the policy records them; by default "top_k" beside its log-prob.
        keep_dist_params: whether a batch keeps the policy's recorded parameters (or top k), for a loss that reads them.
            ClipPPOLoss does not, KLPENPPOLoss does.
        reduce: "sum" adds up the agents that share a reward; the KL then has the root's batch shape plus 1, and stands
            at the root by default. None keeps one KL per agent.

    Raises:
        ValueError: if the estimator is unknown, "exact" has no actor, or what policy and reference recorded differs in
            shape.
        KeyError: if a log-prob, or what the estimator reads, is missing where a policy ran.

    Example:
        >>> from tensordict import TensorDict
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
        log_prob_key: NestedKey | list[NestedKey] = "action_log_prob",
        ref_log_prob_key: NestedKey | None = None,
        kl_key: NestedKey | None = None,
        kl_estimate_key: NestedKey | None = None,
        top_k_key: NestedKey | None = None,
        keep_dist_params: bool = False,
        reduce: Literal["sum"] | None = None,
    ):
        check_reduce(reduce)
        self.estimator, self.reduce, self.keep_dist_params = estimator, reduce, keep_dist_params
        self._recorded = LogProbKeys(log_prob_key)
        self.ref_log_prob_key = ref_log_prob_key or self._recorded.beside("ref_log_prob")
        self.kl_key = kl_key or ("kl" if reduce == "sum" else self._recorded.beside("kl"))
        estimate = make_estimate(estimator, actor, self._recorded, top_k_key)
        out_keys = [self.kl_key]
        if estimate is not None:
            out_keys.append(kl_estimate_key or beside(self.kl_key, "kl_estimate"))
        super().__init__(in_keys=[*self._recorded.keys, self.ref_log_prob_key], out_keys=out_keys)
        self._estimate = estimate
        self._policy_keys = [] if estimate is None else estimate.policy_keys
        self._ref_dist_key = reference_dist_key(self.ref_log_prob_key)
        self._current_key = _scratch_key(self.ref_log_prob_key, "policy")
        self._ref_counted_key, self._counted_key = (
            counted_key(self.ref_log_prob_key),
            counted_key(self.kl_key),
        )

    @property
    def log_prob_key(self) -> NestedKey | list[NestedKey]:
        """Where the policy records its log-prob: one key, or a list of those of the parts of its action."""
        return self._recorded.key

    @property
    def measured_key(self) -> NestedKey:
        """The key of the best measurement: what a controller should be fed."""
        return self.out_keys[-1]

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        ref_log_prob = get_required(next_tensordict, self.ref_log_prob_key, _NO_REFERENCE)
        log_prob = self._log_prob(tensordict)
        counted = tensordict.get(self._ref_counted_key, None)
        if counted is None:  # the log-prob under the reference is another transform's
            counted = torch.full_like(ref_log_prob, log_prob is not None, dtype=torch.bool)
        elif log_prob is None and counted.any():
            _recorded_log_prob(tensordict, self._recorded)
        mask = tensordict.get("_step", None)
        if mask is not None:
            counted = counted & expand_right(mask, counted.shape)
        if self.reduce == "sum" and counted.ndim > tensordict.batch_dims:
            counted = counted.flatten(tensordict.batch_dims).all(-1)
        tensordict.set(self._counted_key, counted.unsqueeze(-1))
        self._write(tensordict, next_tensordict, log_prob, ref_log_prob, mask)
        return next_tensordict

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Measures a batch (*B) that has "next"; returns a shallow copy with the results.

        Raises:
            KeyError: if a log-prob or "next" is not there.
        """
        self.refuse_wrong_order()
        tensordict = copy_batch(tensordict)
        log_prob = self._log_prob(tensordict)
        if log_prob is None:
            log_prob = _recorded_log_prob(tensordict, self._recorded)
        next_tensordict = tensordict.get("next")
        ref_log_prob = get_required(next_tensordict, self.ref_log_prob_key, _NO_REFERENCE)
        mask = tensordict.get(MASK_KEY, None)
        if mask is None and self._policy_keys and is_fake(tensordict):  # zeros are no parameters
            mask = torch.zeros(tensordict.batch_size, dtype=torch.bool, device=log_prob.device)
        self._write(tensordict, next_tensordict, log_prob, ref_log_prob, mask)
        self.drop_record(tensordict)
        return tensordict

    def drop_record(self, tensordict: TensorDictBase) -> None:
        """Takes from a measured batch what the policy recorded for the measurement, unless `keep_dist_params`."""
        if not self.keep_dist_params:
            for key in self._policy_keys:
                tensordict.pop(key, None)

    def _log_prob(self, tensordict: TensorDictBase) -> Tensor | None:
        """What the policy recorded, or what it was asked for in its stead."""
        log_prob = self._recorded.read(tensordict)
        return tensordict.pop(self._current_key, None) if log_prob is None else log_prob

    def _write(self, tensordict, next_tensordict, log_prob, ref_log_prob, mask) -> None:
        """Writes the estimates of one step or batch; zeros where no policy ran (`log_prob` is None)."""
        of_reference = (
            None if self._estimate is None else next_tensordict.pop(self._ref_dist_key, None)
        )
        if log_prob is None:
            estimates = [torch.zeros_like(ref_log_prob) for _ in self.out_keys]
        else:
            log_prob = log_prob.detach()
            if mask is not None:
                mask = expand_right(mask, log_prob.shape)
            estimates = [kl_k1(log_prob, ref_log_prob, mask=mask)]
            if self._estimate is not None:
                if self._policy_keys and of_reference is None:
                    get_required(next_tensordict, self._ref_dist_key, _NO_REFERENCE_DIST)
                estimates.append(
                    self._estimate(tensordict, of_reference, log_prob, ref_log_prob, mask)
                )
        for key, kl in zip(self.out_keys, estimates, strict=True):
            if self.reduce == "sum":
                kl = sum_action_dims(kl, tensordict.batch_size)
            next_tensordict.set(key, kl.unsqueeze(-1))

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Adds the KL of the step.

        Raises:
            KeyError: if no transform before this one declares the log-prob under the reference.
        """
        if self.ref_log_prob_key not in observation_spec.keys(True, True):
            raise KeyError(
                f"{self.ref_log_prob_key!r} is not in the observation spec, got "
                f"{sorted(map(str, observation_spec.keys(True, True)))}: {_NO_REFERENCE}"
            )
        self.claim(observation_spec, self.out_keys)
        ref = observation_spec[self.ref_log_prob_key]
        shape = self.parent_env.batch_size if self.reduce == "sum" else ref.shape
        for key in self.out_keys:
            add_spec(observation_spec, key, (*shape, 1), ref.dtype, shape)
        return observation_spec


def check_reduce(reduce: str | None) -> None:
    """ValueError unless `reduce` is None or "sum"."""
    if reduce not in (None, "sum"):
        raise ValueError(
            f'`reduce` must be None or "sum", got {reduce!r}: "sum" adds up the agents.'
        )


def _recorded_log_prob(tensordict: TensorDictBase, recorded: LogProbKeys) -> Tensor:
    """What the policy recorded; KeyError if it did not."""
    for key in recorded.missing(tensordict):
        get_required(tensordict, key, RECORD_LOG_PROB)
    return cast(Tensor, recorded.read(tensordict))


def _scratch_key(ref_log_prob_key: NestedKey, name: str) -> NestedKey:
    """Scratch entry at the root, whose entries it may hold."""
    return f"_{'_'.join(as_tuple(ref_log_prob_key))}_{name}"


_NO_REFERENCE = "put ReferenceModelLogProbTransform before this transform, or name its key with `ref_log_prob_key`."
_NO_REFERENCE_DIST = (
    "put ReferenceModelLogProbTransform with the same `estimator` before this transform, both into the env or both on "
    "the batch: what it keeps for this estimator is not recorded."
)
