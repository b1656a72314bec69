"""The parts of the stack: the log-prob under the reference, the KL, and the penalty."""

from tensordict import NestedKey
from torch import nn
from torchrl.data import Composite

from torchrl_kl.actors.protocol import known_lengths
from torchrl_kl.actors.references import Switch, as_reference
from torchrl_kl.controllers import KLController
from torchrl_kl.functional.numbers import working_dtype
from torchrl_kl.keys import KLKeys, as_keys, get_required
from torchrl_kl.transforms.base import KLTransform, Leaf, Steps
from torchrl_kl.transforms.estimates import Estimator, check_estimator
from torchrl_kl.transforms.penalty import NO_KL, Penalizing, Penalty, without_random
from torchrl_kl.transforms.scorer import Scored, ScoringTransform, make_scorer, measure


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
        scorer, self.keys = make_scorer(
            actor, frozen, keys, estimator, time_dim=time_dim, is_copy=reference is None
        )
        self._passed_key = self.keys.passed(estimator)
        # TorchRL wants each of the out_keys in the env's specs.
        super().__init__(
            [*frozen.in_keys, *frozen.action_keys],
            [self.keys.ref_log_prob, self.keys.not_drawn, *frozen.own_state_keys],
        )
        self.scorer = scorer

    def work(self, steps: Steps) -> None:
        """Scores."""
        scored = self.score(steps)
        # Both (*B, *A); KLDivergenceTransform takes the estimate out.
        steps.following.set(self.keys.ref_log_prob, scored.ref_log_prob)
        for estimate in scored.estimates:
            steps.following.set(self._passed_key, estimate)

    def leaves(self, spec: Composite) -> dict[NestedKey, Leaf]:
        """The log-prob under the reference and its recurrent state."""
        own = {self.keys.ref_log_prob: (self.log_prob_shape(), self.reference.dtype)}
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

    def work(self, steps: Steps) -> None:
        """Measures the KL."""
        (tensordict, next_tensordict, mask, moves), recorded = steps, self.keys.recorded
        # (*B, *A); of a random policy in an env there is none, and the KL is 0.
        log_prob = recorded.read(tensordict) if moves is None else recorded.require(tensordict)
        ref_log_prob = get_required(next_tensordict, self.keys.ref_log_prob, _NO_REFERENCE)
        if log_prob is None and ref_log_prob.any():
            log_prob = recorded.require(tensordict)
        log_prob = ref_log_prob if log_prob is None else log_prob.detach()
        estimates = []
        if self.estimator in PASSED:
            key = self.keys.passed(self.estimator)
            get_required(next_tensordict, key, _NO_ESTIMATE)
            estimates = [next_tensordict.pop(key)]
        n_dims = tensordict.batch_dims if self.sum_agents else None
        scored = Scored(log_prob, ref_log_prob, estimates)
        measured = measure(scored, mask, self.keys, self.estimator, sum_to=n_dims)
        for key, value in zip(self.out_keys, (measured.kl, measured.fed), strict=False):
            next_tensordict.set(key, value)

    def leaves(self, spec: Composite) -> dict[NestedKey, Leaf]:
        """The KL and, with another estimator, the estimate."""
        ref = get_required(spec, self.keys.ref_log_prob, _NO_REFERENCE, "observation spec")
        shape = self.parent_env.batch_size if self.sum_agents else ref.shape
        return dict.fromkeys(self.out_keys, ((*shape, 1), working_dtype(ref.dtype)))


class RewardAdjustmentTransform(Penalizing, KLTransform):
    """Subtracts the KL, `reward = task_reward - coeff * kl`, and feeds the controller.

    Each step is penalized with the coefficient of that moment. The KL of finished trajectories (of
    steps, with `per="step"`) is pooled, and the controller is updated with its mean and count.

    A controller that plans its coefficient is given the task rewards of finished trajectories, of a
    batch before it is penalized. Those that begin in the same state are compared with each other.

    The controller is updated in env steps and in calls on a batch, except while frozen, by samples
    of a buffer, after `eval()` (on batches), and by trajectories with random or deterministic
    actions in an env (an argmax is not a sample: its k1 is biased). A batch does not say how its
    actions were chosen: freeze the transform for evaluation batches. While frozen it goes on adding
    up trajectories; after `eval()` it does not.

    You may rely on: the coefficient of every step is recorded; penalizing twice raises an error; a
    call that raises has changed nothing. You may not rely on `episode_kl` of a shuffled batch that
    kept the name "time": the order of its steps is checked only for a controller that is fed
    trajectories. With gamma < 1 the penalty is the discounted KL, but the controller steers the
    undiscounted one.

    Keys:
        reads ("next", "reward"), ("next", "kl") and, if present, ("next", "kl_estimate"), which is
        then what the controller is fed; all of one shape; done flags and, on batches, ("collector",
        "traj_ids"), without which trajectories do not go on from one batch to the next; and, if
        present, ("next", "not_drawn") and what says who acts: ("collector", "mask"), the flags
        before the step, ("agents", "mask") of turn-based envs, and "autoreset", which the stack
        writes in a vectorized Gymnasium env that ignores the action of the step after an end.
        writes ("next", "reward"), ("next", "task_reward"), ("next", "kl_coeff") and, unless a batch
        has no time dimension, ("next", "episode_kl"): the sum over the trajectory so far of what
        the controller is fed, at least float32.

    State: the controller's; the pool since its last update; the sums of trajectories that batches
    left open, but not those in an env, which are entries of its data.

    Args:
        controller, update_every, keys, time_dim: as for KLConstrainedTransform.

    Raises:
        TypeError: if `controller` is neither a KLController nor a number, or the reward is not
            floating point, or in an env half precision; on a batch that becomes float32.
        KeyError: if the reward, the KL or, on a batch, "next" is missing.
        ValueError: if `update_every` is less than 1, KL and reward differ in shape, or one of them
            is not finite. With a coefficient of 0, an infinite KL is only measured.
        RuntimeError: if the reward was penalized before, trajectories cannot be told apart, or
            their steps are not in order.

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
    ):
        self.keys = as_keys(keys).resolve()
        reading = {"time_dim": time_dim, "state_lengths": known_lengths()}
        penalty = Penalty(controller, self.keys, update_every=update_every, **reading)
        super().__init__([self.keys.reward, self.keys.kl], penalty.writes)
        self.penalty = penalty

    def work(self, steps: Steps) -> None:
        """Penalizes steps whose KL was measured."""
        if steps.moves is not None:
            steps = steps._replace(mask=without_random(steps, self.keys))
        self.penalty.adjust(steps, self.penalty.read(steps))

    def leaves(self, spec: Composite) -> dict[NestedKey, Leaf]:
        """The task reward, the coefficient and the running sum."""
        kl = get_required(spec, self.keys.kl, NO_KL, "observation spec")
        return self.penalty.leaves(self.parent_env.full_reward_spec, kl.shape, kl.dtype)


PASSED = ("exact", "top_k")  # estimates that one part makes, in its pass, and the other takes


_NO_REFERENCE = (
    "put ReferenceModelLogProbTransform before this transform, or name its entry with "
    "`KLKeys(ref_log_prob=...)`."
)
_NO_ESTIMATE = (
    "put ReferenceModelLogProbTransform with the same `estimator` before this transform, both into "
    "the env or both on the batch."
)
