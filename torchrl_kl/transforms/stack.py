"""The transforms in one line: the whole stack, and the one-piece drop-in for TorchRL's former class."""

from __future__ import annotations

from typing import Literal, cast

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from torch import Tensor, nn
from torchrl.data import Composite
from torchrl.envs.transforms import Compose, Transform

from torchrl_kl.transforms.penalty import Charge, add_reward_like
from torchrl_kl.transforms.estimates import Estimator
from torchrl_kl._tensordict import as_tuple, beside, expand_right, sum_action_dims
from torchrl_kl.actors.switched import Switch, as_reference
from torchrl_kl.transforms.base import get_required
from torchrl_kl.controllers.rules import KLController
from torchrl_kl.functional.estimators import kl_k1
from torchrl_kl.actors.frozen import FrozenActor
from torchrl_kl.transforms.adjustment import RewardAdjustmentTransform
from torchrl_kl.transforms.measuring import (
    KLDivergenceTransform,
    ReferenceModelLogProbTransform,
    ReferenceTransform,
    check_reduce,
)

__all__ = ["KLConstrainedTransform", "KLRewardTransform"]


class KLConstrainedTransform(Compose):
    """The three transforms, wired: log-prob under the reference, KL divergence, reward adjustment.

    Put it last in an env's transforms: what stands before it sees the task, what stands after it would take penalties
    for rewards and observations. Outside an env, pass it as a collector's `postproc` or call it on a batch.

    Keys: those of ReferenceModelLogProbTransform, KLDivergenceTransform and RewardAdjustmentTransform. With an
    estimator other than k1 the controller is fed that measurement; the reward is charged k1 always, for
    the reason that KLDivergenceTransform gives.

    State: that of the three.

    Args:
        actor: the policy; a frozen copy of it becomes the reference.
        controller: a KLController, or a float for a constant coefficient, reward per nat.
        estimator: what is measured: "k1", "k2", "k3"; "exact", from the parameters that the policy records of its
            distribution; or "top_k", from what TopKActor records.
        update_every: how many finished trajectories (or steps) an update of the controller waits for.
        reward_key: the reward to charge.
        log_prob_key: where the policy records its log-prob, or a list of where it records those of the parts of a
            composite action, which are added up; by default `actor.log_prob_keys`.
        ref_log_prob_key, kl_key, kl_estimate_key, task_reward_key, kl_coeff_key, episode_kl_key: where the results go;
            by default as the parts say. A second stack in one env needs keys of its own.
        done_key: what ends a trajectory; by default "done" beside the reward, or at the root.
        top_k_key: where the policy records its top k; by default "top_k" beside its log-prob.
        keep_dist_params: whether batches keep the parameters (or top k) that "exact" (or "top_k") has read.
        reduce: "sum" adds up the KL of the agents that share a reward; None keeps one per agent.
        time_dim: the batch dimension that is time, for batches that do not name it "time"; it must be the last.
        zero_states: whether a recurrent reference may begin inside a trajectory from a zero state.
        reference: another actor to copy and freeze; or a FrozenActor, which is used as it is; or, for no copy at all, a
            callable that returns a context manager in which `actor` itself is the reference, such as PEFT's
            `model.disable_adapter`.
        recompute_log_prob: whether `actor` itself is asked for its log-prob of an action where it recorded none, as
            ReferenceModelLogProbTransform says.

    Example:
        >>> from tensordict.nn import TensorDictModule
        >>> from torchrl.envs import GymEnv, TransformedEnv
        >>> from torchrl.modules import ProbabilisticActor
        >>> actor = ProbabilisticActor(
        ...     TensorDictModule(nn.Linear(4, 2), ["observation"], ["logits"]),
        ...     in_keys=["logits"],
        ...     distribution_class=torch.distributions.Categorical,
        ...     return_log_prob=True,
        ... )
        >>> env = GymEnv("CartPole-v1", categorical_action_encoding=True)
        >>> env = TransformedEnv(env, Compose(KLConstrainedTransform(actor, 0.1)))
        >>> env.rollout(3, actor)["next", "kl"].abs().max() < 1e-6  # the policy is still its reference
        tensor(True)
    """

    def __init__(
        self,
        actor: nn.Module,
        controller: KLController | float,
        *,
        estimator: Estimator = "k1",
        update_every: int = 64,
        reward_key: NestedKey = "reward",
        log_prob_key: NestedKey | list[NestedKey] | None = None,
        ref_log_prob_key: NestedKey | None = None,
        kl_key: NestedKey | None = None,
        kl_estimate_key: NestedKey | None = None,
        task_reward_key: NestedKey | None = None,
        kl_coeff_key: NestedKey | None = None,
        episode_kl_key: NestedKey | None = None,
        done_key: NestedKey | None = None,
        top_k_key: NestedKey | None = None,
        keep_dist_params: bool = False,
        reduce: Literal["sum"] | None = None,
        time_dim: int | None = None,
        zero_states: bool = False,
        reference: nn.Module | Switch | None = None,
        recompute_log_prob: bool = False,
    ):
        scoring = ReferenceModelLogProbTransform(
            actor,
            estimator=estimator,
            ref_log_prob_key=ref_log_prob_key,
            log_prob_key=log_prob_key,
            time_dim=time_dim,
            zero_states=zero_states,
            top_k_key=top_k_key,
            reference=reference,
            recompute_log_prob=recompute_log_prob,
        )
        divergence = KLDivergenceTransform(
            estimator=estimator,
            actor=actor,
            log_prob_key=scoring.reference.log_prob_key,
            ref_log_prob_key=scoring.ref_log_prob_key,
            kl_key=kl_key,
            kl_estimate_key=kl_estimate_key,
            top_k_key=top_k_key,
            keep_dist_params=keep_dist_params,
            reduce=reduce,
        )
        adjustment = RewardAdjustmentTransform(
            controller,
            update_every=update_every,
            reward_key=reward_key,
            kl_key=divergence.kl_key,
            measured_key=divergence.measured_key,
            task_reward_key=task_reward_key,
            kl_coeff_key=kl_coeff_key,
            episode_kl_key=episode_kl_key,
            done_key=done_key,
            time_dim=time_dim,
        )
        super().__init__([scoring, divergence, adjustment])

    @property
    def _parts(self) -> list[Transform]:
        return cast(list[Transform], list(self.transforms))

    @property
    def adjustment(self) -> RewardAdjustmentTransform:
        """The part that charges, which holds the controller."""
        return cast(RewardAdjustmentTransform, self._parts[-1])

    @property
    def controller(self) -> KLController:
        """Who moves the coefficient."""
        return self.adjustment.controller

    @property
    def divergence(self) -> KLDivergenceTransform:
        """The part that measures."""
        return cast(KLDivergenceTransform, self._parts[1])

    @property
    def reference(self) -> FrozenActor:
        """The frozen actor."""
        return cast(ReferenceModelLogProbTransform, self._parts[0]).reference

    def update_reference(self, source: nn.Module, tau: float = 1.0) -> None:
        """Moves the reference towards `source`, a share `tau` of the way, as `FrozenActor.update_reference` does."""
        self.reference.update_reference(source, tau)

    def freeze(self) -> KLConstrainedTransform:
        """Stops the controller; rewards are still charged."""
        self.adjustment.freeze()
        return self

    def unfreeze(self) -> KLConstrainedTransform:
        """Lets the controller move again."""
        self.adjustment.unfreeze()
        return self

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        return self._parts[0]._inv_call(
            tensordict
        )  # the other parts have no inverse, and every step asks

    def set_container(self, container: Transform) -> None:
        """Refuses an env whose reward is charged already, before any other complaint about it."""
        self.reset_parent()
        Transform.set_container(self, container)
        if self.parent is not None:
            self.adjustment.refuse_charged_env(self.parent)
        super().set_container(container)

    def _rebuild_up_to(self, final_transform: Transform):
        # TorchRL's own fails for the first transform of a Compose within a Compose that has nothing before it.
        container = self.__dict__["_container"]
        outer = None if container is None else container()
        if not isinstance(outer, Compose):
            return super()._rebuild_up_to(final_transform)
        parent, _ = outer._rebuild_up_to(self)  # type: ignore[misc]
        if parent is None:
            return None, None
        for transform in self._parts:
            if transform is final_transform:
                break
            parent.append_transform(transform.clone())
        return parent, parent.transform

    def clone(self) -> KLConstrainedTransform:
        """A copy without a parent that shares the parts' tensors."""
        clone = Transform.clone(self)
        clone.transforms = nn.ModuleList(part.clone() for part in self._parts)
        for part in clone._parts:
            part.set_container(clone)
        return clone


class KLRewardTransform(ReferenceTransform):
    """Reward minus a constant times the KL in one piece: `out = reward - coef * (log_prob - ref_log_prob)`.

    A drop-in for the class of this name that TorchRL once had for all environments (0.7, say), with the sign right:
    that one added the penalty. For a coefficient that adapts use KLConstrainedTransform.

    Keys:
        reads ("next", "reward"), the actor's in_keys, the action and its log-prob.
        writes ("next", out_keys[0]) and ("next", "kl_coeff"): the reward's shape.

    Args:
        actor: the policy; a frozen copy of it becomes the reference.
        coef: the coefficient, reward per nat, at least 0.
        in_keys: the reward's key, a list of one; by default ["reward"].
        out_keys: where the result goes, a list of one; by default `in_keys`.
        requires_grad: whether the reference's weights receive gradients.
        kl_coeff_key: where the coefficient goes; by default "kl_coeff" beside the result.
        log_prob_key: where the policy records its log-prob, or a list of where it records those of the parts of a
            composite action, which are added up; by default `actor.log_prob_keys`.
        reduce: "sum" adds up the KL of the agents that share a reward; None keeps one per agent.
        reference: another actor to copy and freeze; or a FrozenActor, which is used as it is; or, for no copy at all, a
            callable that returns a context manager in which `actor` itself is the reference.
        recompute_log_prob: whether `actor` itself is asked for its log-prob of an action where it recorded none, as
            ReferenceModelLogProbTransform says.

    Raises:
        ValueError: if `in_keys` or `out_keys` is not one key, `coef` is negative, or KL and reward differ in shape.
        RuntimeError: if the reward was charged before.

    Example:
        >>> from tensordict.nn import NormalParamExtractor, TensorDictModule
        >>> from torchrl.envs import GymEnv, TransformedEnv
        >>> from torchrl.modules import ProbabilisticActor, TanhNormal
        >>> net = nn.Sequential(nn.Linear(3, 2), NormalParamExtractor())
        >>> actor = ProbabilisticActor(
        ...     TensorDictModule(net, ["observation"], ["loc", "scale"]),
        ...     in_keys=["loc", "scale"],
        ...     distribution_class=TanhNormal,
        ...     return_log_prob=True,
        ... )
        >>> env = TransformedEnv(GymEnv("Pendulum-v1"), KLRewardTransform(actor, out_keys="reward_kl"))
        >>> rollout = env.rollout(3, actor)
        >>> torch.equal(rollout["next", "reward_kl"], rollout["next", "reward"])  # still its reference
        True
    """

    coef: Tensor

    def __init__(
        self,
        actor: nn.Module,
        coef: float | Tensor = 1.0,
        in_keys: NestedKey | list[NestedKey] | None = None,
        out_keys: NestedKey | list[NestedKey] | None = None,
        requires_grad: bool = False,
        *,
        kl_coeff_key: NestedKey | None = None,
        log_prob_key: NestedKey | list[NestedKey] | None = None,
        reduce: Literal["sum"] | None = None,
        reference: nn.Module | Switch | None = None,
        recompute_log_prob: bool = False,
    ):
        check_reduce(reduce)
        frozen = as_reference(
            actor, reference, log_prob_key=log_prob_key, requires_grad=requires_grad
        )
        self.reduce = reduce
        self.reward_key = _one_key("in_keys", in_keys or ["reward"])
        self.out_key = _one_key("out_keys", out_keys or [self.reward_key])
        self.kl_coeff_key = kl_coeff_key or beside(self.out_key, "kl_coeff")
        super().__init__(
            frozen,
            in_keys=[self.reward_key, *frozen.in_keys, *frozen.action_keys],
            out_keys=[self.out_key, self.kl_coeff_key],
            time_dim=None,
            zero_states=False,
            policy=actor if recompute_log_prob else None,
        )
        coef = torch.as_tensor(coef)
        if coef.numel() != 1:
            raise ValueError(
                f"`coef` must be one number, got shape {tuple(coef.shape)}: use one transform per reward."
            )
        coef = coef.reshape(())
        if not bool(coef.isfinite() & (coef >= 0)):
            raise ValueError(
                f"`coef` must be finite and at least 0, got {coef.item()}: divergence is charged, not paid for."
            )
        self.register_buffer("coef", coef)
        self._charge = Charge(self.reward_key, self.out_key, self.kl_coeff_key)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Charges a batch that has "next"; returns a shallow copy with the results.

        Raises:
            KeyError: if the reward, the policy's log-prob or "next" is not there.
            RuntimeError: if the reward was charged before, or a recurrent reference's state is not known.
        """
        if "next" in tensordict.keys():
            self._charge.refuse_charged(tensordict.get("next").keys(True, True), "the batch")
        return super().forward(tensordict)

    def _write(self, tensordict, next_tensordict, log_prob, ref_log_prob, mask):
        if log_prob is None or ref_log_prob is None:
            reward = get_required(next_tensordict, self.reward_key, "name it with `in_keys`.")
            kl = torch.zeros_like(reward)
        else:
            log_prob = log_prob.detach()
            if mask is not None:
                mask = expand_right(mask, log_prob.shape)
            kl = kl_k1(log_prob, ref_log_prob, mask=mask)
            if self.reduce == "sum":
                kl = sum_action_dims(kl, tensordict.batch_size)
            kl = kl.unsqueeze(-1)
        self._charge(next_tensordict, kl, self.coef)

    def set_container(self, container: Transform) -> None:
        """Refuses an env whose reward is charged already, as soon as one is known."""
        super().set_container(container)
        if self.parent is not None:
            self._charge.refuse_charged(
                self.parent_env.full_observation_spec.keys(True, True), "the env"
            )

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Adds the coefficient, and the charged reward if it does not replace the reward.

        Raises:
            RuntimeError: if the reward was charged by a transform before this one.
        """
        self._charge.refuse_charged(observation_spec.keys(True, True), "the env")
        reward = self.parent_env.full_reward_spec[self.reward_key]
        new_keys = {self.kl_coeff_key, self.out_key} - {self.reward_key}
        self.claim(observation_spec, new_keys)
        for key in new_keys:
            add_reward_like(observation_spec, key, reward)
        return super().transform_observation_spec(observation_spec)

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        """The charged reward has no bounds."""
        return self._charge.unbounded_reward_spec(reward_spec)


def _one_key(name: str, keys: NestedKey | list[NestedKey]) -> NestedKey:
    keys = keys if isinstance(keys, list) else [keys]
    if len(keys) != 1:
        raise ValueError(f"`{name}` must be one key, got {keys}: use one transform per reward.")
    return unravel_key(as_tuple(keys[0]))
