"""The whole stack as one transform, and the preset with the interface of TorchRL's former class."""

from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from torch import Tensor, nn
from torchrl.data import Composite

from torchrl_kl.actors.protocol import as_kl_actor
from torchrl_kl.actors.references import Switch, as_reference
from torchrl_kl.controllers import ConstantKLController, KLController
from torchrl_kl.functional.numbers import check_number
from torchrl_kl.keys import KLKeys, as_keys, as_tuple
from torchrl_kl.transforms.base import Leaf, Steps
from torchrl_kl.transforms.estimates import Estimator
from torchrl_kl.transforms.penalty import Penalizing, Penalty
from torchrl_kl.transforms.scorer import ScoringTransform, make_scorer, measure


class KLConstrainedTransform(Penalizing, ScoringTransform):
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
            policy's distribution, without a `get_dist` that its class may have; or "top_k", from
            what TopKActor records.
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

    Raises:
        TypeError, ValueError, KeyError, RuntimeError: as the three parts do.

    Example:
        >>> from torchrl.envs import TransformedEnv
        >>> from torchrl_kl import KLConstrainedTransform
        >>> from torchrl_kl.language import GPT, CausalLMActor
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
    ):
        keys = as_keys(keys)
        frozen = as_reference(actor, reference, log_prob_key=keys.log_prob, chunk_size=chunk_size)
        options: Any = {"time_dim": time_dim, "is_copy": reference is None}
        scorer, resolved = make_scorer(
            actor, frozen, keys, estimator, sum_agents=sum_agents, **options
        )
        penalty = Penalty(
            controller,
            resolved,
            update_every=update_every,
            time_dim=time_dim,
            records=self.records,
            observed=frozen.in_keys,
            state_lengths=as_kl_actor(actor).state_lengths,
        )
        self.keys, self.estimator, self.sum_agents = resolved, estimator, sum_agents
        self._measured = [resolved.ref_log_prob, resolved.kl] if self.records else []
        self._measured += [] if estimator == "k1" else [resolved.kl_estimate]
        flags = [resolved.not_drawn] if self.records else []
        super().__init__(
            [resolved.reward, *frozen.in_keys, *frozen.action_keys],
            [*penalty.writes, *self._measured, *flags, *frozen.own_state_keys],
        )
        self.scorer, self.penalty = scorer, penalty

    @property
    def measured_key(self) -> NestedKey:
        """The entry that the controller is fed."""
        return self._measured[-1]

    def observe(self, tensordict: TensorDictBase) -> None:
        """Feeds the controller with a batch (*B) that the workers of a collector penalized."""
        self.penalty.observe(tensordict)

    def work(self, steps: Steps) -> None:
        """Scores, measures and penalizes."""
        scored = self.score(steps)
        n_dims = steps.data.batch_dims if self.sum_agents else None
        measured = measure(scored, steps.mask, self.keys, self.estimator, sum_to=n_dims)
        self.penalty.adjust(steps, measured)
        values = (scored.ref_log_prob, measured.kl, measured.fed)
        for key, value in zip(self._measured, values, strict=False):
            steps.following.set(key, value)

    def leaves(self, spec: Composite) -> dict[NestedKey, Leaf]:
        """All entries but the reward."""
        # The log-prob is (*B, *A); those of the KL are (*shape, 1).
        acting, dtype = self.log_prob_shape(), self.reference.dtype
        shape = self.parent_env.batch_size if self.sum_agents else acting
        kl_shape, rewards = torch.Size((*shape, 1)), self.parent_env.full_reward_spec
        shapes = ((shape, dtype) for shape in (acting, kl_shape, kl_shape))
        measured = dict(zip(self._measured, shapes, strict=False))
        return measured | self.penalty.leaves(rewards, kl_shape, dtype) | super().leaves(spec)


class KLRewardTransform(KLConstrainedTransform):
    """Reward minus a constant times the KL: `out = reward - coef * (log_prob - ref_log_prob)`.

    A KLConstrainedTransform that writes only the result, with the interface of TorchRL's former
    class of this name and the right sign: up to TorchRL 0.7.2 that class added the penalty. For
    more options, such as another reference or other keys, use KLConstrainedTransform.

    Keys:
        reads ("next", "reward"), the actor's in_keys, the action and its log-prob.
        writes ("next", out_keys[0]) and ("next", "kl_coeff"): the reward's shape.

    Args:
        actor: as for KLConstrainedTransform.
        coef: the coefficient, reward per nat, at least 0.
        in_keys, out_keys: the key of the reward, "reward" by default, and that of the result, by
            default the same.
        requires_grad: whether the reference's weights receive gradients.

    Raises:
        ValueError: if `in_keys` or `out_keys` is not one key, or `coef` is negative or not finite;
            other errors are those of KLConstrainedTransform.

    Example:
        >>> from torchrl.envs import TransformedEnv
        >>> from torchrl_kl import KLRewardTransform
        >>> from torchrl_kl.language import GPT, CausalLMActor
        >>> from torchrl_kl.envs import DigitLanguageEnv
        >>> actor = CausalLMActor(GPT(vocab_size=11, block_size=8))
        >>> transform = KLRewardTransform(actor, out_keys="reward_kl")
        >>> rollout = TransformedEnv(DigitLanguageEnv(), transform).rollout(4, actor)
        >>> penalty = rollout["next", "reward"] - rollout["next", "reward_kl"]
        >>> penalty.abs().max() < 1e-5  # the policy is its reference
        tensor(True)
    """

    records = False

    def __init__(
        self,
        actor: nn.Module,
        coef: float | Tensor = 1.0,
        in_keys: NestedKey | list[NestedKey] | None = None,
        out_keys: NestedKey | list[NestedKey] | None = None,
        requires_grad: bool = False,
    ):
        reward_key = _one_key("in_keys", "reward" if in_keys is None else in_keys)
        out_key = _one_key("out_keys", reward_key if out_keys is None else out_keys)
        keys = KLKeys(reward=reward_key, penalized=out_key)
        coef = coef.item() if isinstance(coef, Tensor) else coef
        controller = ConstantKLController(check_number("coef", coef, at_least=0.0))
        super().__init__(actor, controller, keys=keys)
        if requires_grad:
            self.reference.requires_grad = True
            self.reference.actor.requires_grad_()

    @property
    def coef(self) -> Tensor:
        """The coefficient, 0-dim float64, under the name of the former class."""
        return self.controller.coeff


def _one_key(name: str, keys: NestedKey | list[NestedKey]) -> NestedKey:
    keys = keys if isinstance(keys, list) else [keys]
    if len(keys) != 1:
        raise ValueError(f"`{name}` must be one key, got {keys}: use one transform per reward.")
    return unravel_key(as_tuple(keys[0]))
