"""The three parts of the stack as transforms: the log-prob under the reference, the KL, the penalty."""

from __future__ import annotations

from typing import cast

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor, nn
from torchrl.data import Composite

from torchrl_kl._tensordict import (
    MASK_KEY,
    KLKeys,
    add_spec,
    as_tuple,
    copy_batch,
    counted_steps,
    expand_right,
    get_required,
    is_fake,
    state_spec,
)
from torchrl_kl.actors.references import Switch, as_reference
from torchrl_kl.controllers import KLController
from torchrl_kl.transforms.base import KLTransform, require_spec
from torchrl_kl.transforms.estimates import Estimator, make_estimate
from torchrl_kl.transforms.kl_step import KLStep
from torchrl_kl.transforms.penalty import NO_KL, PenaltyTransform
from torchrl_kl.transforms.steps import measure, score_batch, score_env_step

__all__ = [
    "KLDivergenceTransform",
    "ReferenceModelLogProbTransform",
    "RewardAdjustmentTransform",
]


class ReferenceModelLogProbTransform(KLTransform):
    """Writes log pi_ref(a|s), the log-prob of the policy's action under a frozen copy of an actor.

    You may rely on: the copy changes by `update_reference` only and never has gradients; identical
    weights give the policy's own log-prob; the action scored is the policy's, not the env's, if
    action transforms come before this one.

    Keys:
        reads the actor's in_keys and its action; in an env also its log-prob, to know whether the
        policy ran.
        writes ("next", "ref_log_prob"): nats per step, batch shape of the tensordict that holds the
        action; zero where a random policy acted. A recurrent reference adds its state,
        ("next", "ref_<state>"). For "exact" and "top_k" also ("next", "_ref_log_prob_dist"), which
        the KLDivergenceTransform after this one takes away: the reference's parameters, or its
        log-probs (*B, k) of the policy's top k.

    Args:
        actor: the policy; a frozen copy of it becomes the reference.
        estimator: that of the KLDivergenceTransform that follows.
        reference: another actor to copy and freeze; or a FrozenActor, which is used as it is; or,
            for no copy at all, a callable that returns a context manager in which `actor` itself is
            the reference, such as PEFT's `model.disable_adapter`.
        keys: names of the entries: `log_prob`, `ref_log_prob` and `top_k`.
        time_dim: the batch dimension that is time, for batches that do not name it "time"; it must
            be the last.
        zero_states: whether a recurrent reference may begin inside a trajectory from a zero state.
        recompute_log_prob: whether `actor` itself is asked for its present log-prob of an action
            where it recorded none, as FrozenActor says; the KLDivergenceTransform after this one
            uses it.

    Raises:
        TypeError: if `actor` has no distribution, or not a categorical one for "top_k", or
            `reference` is none of these.
        ValueError: if `actor` has uninitialised weights, or the estimator is unknown.
        KeyError: in a step, if the policy ran but did not record its log-prob, or its top k.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import TensorDictModule
        >>> from torchrl.modules import ProbabilisticActor
        >>> from torchrl_kl import ReferenceModelLogProbTransform
        >>> actor = ProbabilisticActor(
        ...     TensorDictModule(torch.nn.Linear(3, 2), ["observation"], ["logits"]),
        ...     in_keys=["logits"],
        ...     distribution_class=torch.distributions.Categorical,
        ...     return_log_prob=True,
        ... )
        >>> step = TensorDict(observation=torch.randn(5, 3), next=TensorDict(batch_size=5), batch_size=5)
        >>> batch = ReferenceModelLogProbTransform(actor)(actor(step))
        >>> torch.equal(batch["next", "ref_log_prob"], batch["action_log_prob"])
        True
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
    ):
        keys = keys or KLKeys()
        frozen = as_reference(
            actor,
            reference,
            log_prob_key=keys.log_prob,
            zero_states=zero_states,
            recompute_log_prob=recompute_log_prob,
        )
        self.keys = keys.resolve(frozen.log_prob_key)
        super().__init__(
            in_keys=[*frozen.in_keys, *frozen.action_keys],
            out_keys=[self.keys.ref_log_prob, *frozen.own_state_keys],
        )
        self.reference, self.time_dim = frozen, time_dim
        self.action_keys = frozen.action_keys
        self.estimate = make_estimate(estimator, frozen.actor, self.keys)
        self._scored: KLStep | None = None  # of the env step that is being made

    def update_reference(self, source: nn.Module, tau: float = 1.0) -> None:
        """Moves the reference towards `source`, a share `tau` of the way; see `FrozenActor.update_reference`."""
        self.reference.update_reference(source, tau)

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        # Action transforms before this one have not yet turned the policy's action into the env's.
        env = self.env
        if env is not None:
            self._scored = score_env_step(self.reference, tensordict, self.estimate, env)
        return tensordict

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        step, self._scored = cast(KLStep, self._scored), None
        self._write(tensordict, next_tensordict, step)
        counted = torch.full_like(step.ref_log_prob, step.counted, dtype=torch.bool)
        tensordict.set(_hidden(self.keys.ref_log_prob, "counted"), counted)
        for key, state in zip(self.reference.own_state_keys, step.states, strict=True):
            next_tensordict.set(key, state)
        return next_tensordict

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Scores a batch (*B) that has "next"; returns a shallow copy with the results.

        Args:
            tensordict: the batch. Where its last dimension is time (named "time", or given as
                `time_dim`) the reference is evaluated once, in recurrent mode; else step by step.

        Raises:
            KeyError: if the policy's log-prob or "next" is not there.
            RuntimeError: if the reference is recurrent and its state is not known.
        """
        self.refuse_wrong_order()
        tensordict = copy_batch(tensordict)
        step = score_batch(self.reference, tensordict, self.estimate, self.time_dim)
        self._write(tensordict, tensordict.get("next"), step)
        return tensordict

    def _write(
        self, tensordict: TensorDictBase, next_tensordict: TensorDictBase, step: KLStep
    ) -> None:
        next_tensordict.set(self.keys.ref_log_prob, step.ref_log_prob)
        if step.of_reference is not None:
            next_tensordict.set(_hidden(self.keys.ref_log_prob, "dist"), step.of_reference)
        if step.log_prob is not None and self.keys.recorded.missing(tensordict):
            tensordict.set(_hidden(self.keys.ref_log_prob, "policy"), step.log_prob)

    def transform_input_spec(self, input_spec: Composite) -> Composite:
        """Adds the reference's recurrent state to the state spec, so that batched envs carry it."""
        self.declare_states(state_spec(input_spec), self.reference)
        return input_spec

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Adds the log-prob under the reference and its recurrent state."""
        self.claim(observation_spec, [self.keys.ref_log_prob])
        shape = self.log_prob_shape()
        add_spec(observation_spec, self.keys.ref_log_prob, shape, self.reference.dtype, shape)
        self.declare_reference(observation_spec, self.reference)
        return observation_spec


class KLDivergenceTransform(KLTransform):
    """Writes the k1 estimate of KL(policy || reference) of each step, and another estimate on request.

    `kl = log_prob - ref_log_prob` is the only one that may be subtracted from a reward. A reward is
    not differentiated: a penalty c moves the policy along E[c grad log pi], which is the gradient
    of the KL for k1 alone. As penalties, k2 and k3 nearly vanish at the reference, and an exact KL
    is the same whatever action its step takes, so it does not hold that action back at all. So
    `estimator` chooses what is *measured* in addition to k1, for logs and controllers: "exact" has
    no sampling noise within a step, "top_k" only that of its tail; both have the mean of k1.

    You may rely on: the mean of `kl` over the policy's actions is the KL, and so is that of "exact"
    and "top_k". You may not rely on the sign of `kl` and "top_k", nor on the means of k2 (and of k3
    where the policy lacks support).

    Keys:
        reads "action_log_prob" and ("next", "ref_log_prob"), batch shape of the tensordict that
        holds them; for "exact" the parameters of its distribution that the policy records, for
        "top_k" what TopKActor records; and what ReferenceModelLogProbTransform with the same
        estimator kept.
        writes ("next", "kl"): nats per step, that shape plus a trailing 1; with another estimator
        ("next", "kl_estimate") of the same shape. Zero in an env step where no policy ran or a
        batched env skips the row, and on padding (("collector", "mask") False).
        drops, on a batch, what the estimate has used: the reference's part, and unless
        `keep_dist_params` the policy's recorded parameters or top k. (In an env the policy's record
        stays in the rollout.)

    Args:
        estimator: what is measured: "k1", "k2", "k3", "exact" or "top_k".
        actor: for "exact": an actor with the policy's distribution class and keys. Its weights are
            not kept.
        sum_agents: whether agents that share a reward have one KL, the sum of theirs; it is then at
            the root by default. Else there is one KL per agent.
        keep_dist_params: whether a batch keeps the policy's recorded parameters (or top k), for a
            loss that reads them. ClipPPOLoss does not, KLPENPPOLoss does.
        keys: names of the entries: `log_prob`, `ref_log_prob`, `kl`, `kl_estimate` and `top_k`.

    Raises:
        TypeError: if `sum_agents` is not a bool.
        ValueError: if the estimator is unknown, "exact" has no actor, or what policy and reference
            recorded differs in shape.
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
    ):
        if not isinstance(sum_agents, bool):
            raise TypeError(f"`sum_agents` must be True or False, got {sum_agents!r}.")
        self.keys = (keys or KLKeys()).resolve(sum_agents=sum_agents)
        self.sum_agents, self.keep_dist_params = sum_agents, keep_dist_params
        estimate = make_estimate(estimator, actor, self.keys)
        out_keys = [self.keys.kl, *([] if estimate is None else [self.keys.kl_estimate])]
        super().__init__(
            in_keys=[*self.keys.recorded.keys, self.keys.ref_log_prob], out_keys=out_keys
        )
        self.estimate = estimate

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        counted = tensordict.get(_hidden(self.keys.ref_log_prob, "counted"), None)
        log_prob = self._log_prob(tensordict)
        if counted is not None and log_prob is None and counted.any():
            log_prob = self.keys.recorded.require(tensordict)
        counts = log_prob is not None if counted is None else bool(counted.all())
        step = self._measure(
            tensordict, next_tensordict, log_prob, tensordict.get("_step", None), counts
        )
        counted = torch.full_like(cast(Tensor, step.kl), counts, dtype=torch.bool)
        tensordict.set(_hidden(self.keys.kl, "counted"), counted)
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
            log_prob = self.keys.recorded.require(tensordict)
        mask = counted_steps(tensordict)
        self._measure(tensordict, tensordict.get("next"), log_prob, mask, True)
        if self.estimate is not None and not self.keep_dist_params:
            for key in self.estimate.policy_keys:
                tensordict.pop(key, None)
        return tensordict

    def _log_prob(self, tensordict: TensorDictBase) -> Tensor | None:
        """What the policy recorded, or what it was asked for instead."""
        log_prob = self.keys.recorded.read(tensordict)
        if log_prob is None:
            log_prob = tensordict.pop(_hidden(self.keys.ref_log_prob, "policy"), None)
        return log_prob

    def _measure(
        self,
        tensordict: TensorDictBase,
        next_tensordict: TensorDictBase,
        log_prob: Tensor | None,
        mask: Tensor | None,
        counted: bool,
    ) -> KLStep:
        """Reads what was scored, writes what is measured."""
        ref_log_prob = get_required(next_tensordict, self.keys.ref_log_prob, _NO_REFERENCE)
        of_reference = None
        if self.estimate is not None:
            hidden = _hidden(self.keys.ref_log_prob, "dist")
            of_reference = next_tensordict.pop(hidden, None)
            if self.estimate.policy_keys and of_reference is None and log_prob is not None:
                get_required(next_tensordict, hidden, _NO_REFERENCE_DIST)
        step = KLStep(log_prob, ref_log_prob, mask, counted, of_reference)
        step = measure(step, tensordict, self.estimate, sum_agents=self.sum_agents)
        for key, value in zip(self.out_keys, (step.kl, step.estimate), strict=False):
            next_tensordict.set(key, value)
        return step

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Adds the KL of the step.

        Raises:
            KeyError: if no transform before this one declares the log-prob under the reference.
        """
        ref = require_spec(observation_spec, self.keys.ref_log_prob, _NO_REFERENCE)
        self.claim(observation_spec, self.out_keys)
        shape = self.parent_env.batch_size if self.sum_agents else ref.shape
        for key in self.out_keys:
            add_spec(observation_spec, key, (*shape, 1), ref.dtype, shape)
        return observation_spec


class RewardAdjustmentTransform(PenaltyTransform):
    """Subtracts the KL from the reward, `reward = task_reward - coeff * kl`, and feeds the controller.

    A step is penalized with the coefficient of that moment, then the controller is updated. What has
    been measured is pooled, and the controller is updated once with the pooled mean and the count:
    of finished trajectories, or with `per="step"` of steps. (One trajectory at a time, its clip
    would make it steer the median.)

    The controller moves in the steps of an env and in calls on a batch. It does not move while
    frozen, in a replay buffer or after `eval()` (on batches), or in env steps with random or
    deterministic actions (an argmax is not a sample: its k1 is biased). A batch does not say how
    its actions were chosen: freeze the transform for batches of an evaluation.

    You may rely on: every step's coefficient is recorded; penalizing twice raises an error; a call
    on a batch leaves its input alone. With gamma < 1 the reward penalizes the discounted KL, while
    the controller holds the undiscounted one.

    Keys:
        reads ("next", "reward"), ("next", "kl"), and ("next", "kl_estimate") where there is one,
        which the controller is then fed; all of one shape.
        writes ("next", "reward"), ("next", "task_reward"), ("next", "kl_coeff"), the reward's
        shape, and ("next", "episode_kl"), the sum of what the controller is fed over the trajectory
        up to this step, at least float32. A batch without a time dimension gets no "episode_kl".

    State: the controller's, and `statistics`, the pool since its last update. The sums of
    trajectories that are still open are not saved: a restarted collector begins new ones.

    Args:
        controller: a KLController, or a float for a constant coefficient.
        update_every: how many finished trajectories (steps, if the controller counts per step) an
            update waits for. None: a batch updates once with what it finished, however few; in an
            env an update waits for 16 trajectories or 256 steps.
        keys: names of the entries.
        time_dim: the batch dimension that is time, for batches that do not name it "time"; it must
            be the last.

    Raises:
        TypeError: if `controller` is neither a KLController nor a number.
        ValueError: if `update_every` is less than 1, or 1 for a controller with a deadband; if KL
            and reward differ in shape, or a batch for a controller of trajectories is not in order.
        RuntimeError: if the reward was penalized before, or the controller would have to be fed
            from a batch whose trajectories cannot be told apart.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_kl import RewardAdjustmentTransform
        >>> done = torch.ones(1, 1, dtype=torch.bool)
        >>> step = TensorDict(reward=torch.ones(1, 1), kl=torch.full((1, 1), 0.5), done=done)
        >>> batch = TensorDict(next=step, batch_size=1)
        >>> penalized = RewardAdjustmentTransform(0.1, time_dim=-1)(batch)
        >>> penalized["next", "reward"], batch["next", "reward"]
        (tensor([[0.9500]]), tensor([[1.]]))
    """

    def __init__(
        self,
        controller: KLController | float,
        *,
        update_every: int | None = None,
        keys: KLKeys | None = None,
        time_dim: int | None = None,
    ):
        resolved = (keys or KLKeys()).resolve()
        super().__init__(
            controller,
            resolved,
            in_keys=[resolved.kl],
            out_keys=[],
            update_every=update_every,
            time_dim=time_dim,
        )

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        counted = tensordict.get(_hidden(self.keys.kl, "counted"), None)
        counts = counted is None or bool(counted.all())
        step = self._read(next_tensordict, tensordict.get("_step", None), counts)
        self.adjust_env_step(tensordict, next_tensordict, step)
        return next_tensordict

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Penalizes a batch (*B) that has "next"; returns a shallow copy with the results.

        Raises:
            KeyError: if the reward, the KL or "next" is not there.
            RuntimeError: if the reward was penalized before, or the controller cannot be fed.
        """
        self.refuse_wrong_order()
        tensordict = copy_batch(tensordict)
        self.refuse_penalized_batch(tensordict)
        mask = tensordict.get(MASK_KEY, None)
        step = self._read(tensordict.get("next"), mask, True)
        self.adjust_batch(tensordict, step, trace=not is_fake(tensordict))
        return tensordict

    def _read(self, next_tensordict: TensorDictBase, mask: Tensor | None, counted: bool) -> KLStep:
        kl = get_required(next_tensordict, self.keys.kl, NO_KL)
        estimate = next_tensordict.get(self.keys.kl_estimate, None)
        if mask is not None:
            covered = expand_right(mask, kl.shape)
            kl = torch.where(covered, kl, 0.0)
            estimate = None if estimate is None else torch.where(covered, estimate, 0.0)
        return KLStep(None, kl, mask, counted, kl=kl, estimate=estimate)

    def transform_input_spec(self, input_spec: Composite) -> Composite:
        """Adds the running sum to the state spec, so that batched envs carry it."""
        kl = require_spec(self.parent_env.full_observation_spec, self.keys.kl, NO_KL)
        self.declare_episode_kl(input_spec, kl.dtype)
        return input_spec

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Adds the task reward, the coefficient and the running sum.

        Raises:
            RuntimeError: if the reward was penalized by a transform before this one.
            KeyError: if no transform before this one declares the KL.
            ValueError: if the KL does not have the reward's shape.
        """
        self.refuse_penalized(observation_spec.keys(True, True), "the env")
        kl = require_spec(observation_spec, self.keys.kl, NO_KL)
        self.declare_penalty(observation_spec, kl.shape, kl.dtype)
        return observation_spec


def _hidden(key: NestedKey, name: str) -> NestedKey:
    """A scratch entry at the root, by which one part tells the next what is not recorded."""
    return f"_{'_'.join(as_tuple(key))}_{name}"


_NO_REFERENCE = (
    "put ReferenceModelLogProbTransform before this transform, or name its entry with "
    "`KLKeys(ref_log_prob=...)`."
)
_NO_REFERENCE_DIST = (
    "put ReferenceModelLogProbTransform with the same `estimator` before this transform, both into the "
    "env or both on the batch: what it keeps for this estimator is not recorded."
)
