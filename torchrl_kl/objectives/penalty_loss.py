"""KL(policy || reference) as a term of a loss, with the gradient that its name promises.

Axes: *B is the batch of steps; where its last dimension is time, *B is (*R, T), R rows of T steps.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, TensorDictParams, unravel_key
from tensordict.nn import ProbabilisticTensorDictSequential, dispatch
from torch import Tensor, nn
from torch.distributions import Distribution
from torchrl.modules import set_recurrent_mode
from torchrl.objectives import LossModule

from torchrl_kl._feeding import ControllerFeed
from torchrl_kl._tensordict import (
    MASK_KEY,
    RECORD_LOG_PROB,
    TRAJECTORY_KEY,
    as_tuple,
    expand_right,
    find_time_dim,
    get_required,
    holder_batch_size,
    require_order,
    sum_action_dims,
)
from torchrl_kl.actors.references import Switch, as_reference
from torchrl_kl.controllers import KLController, KLStatistics, as_controller
from torchrl_kl.functional import kl_exact, kl_k1, kl_k2, kl_k3, sum_after, sum_before
from torchrl_kl.functional.numbers import working_dtype

__all__ = ["KLPenaltyLoss"]

Gradient = Literal["step", "sequence", "k2", "k3"]
Weights = Literal["step", "trajectory"]


_EXACT = ("step", "sequence")  # what is minimised from the distributions
_SAMPLED = {"k2": kl_k2, "k3": kl_k3}  # and from the action alone


class _Terms(NamedTuple):
    """Per step, (*B), 0 where the mask is False: what is minimised, and the measured KL (detached)."""

    loss: Tensor
    kl: Tensor
    mask: Tensor


class KLPenaltyLoss(LossModule):
    r"""Minimises KL(policy || reference): beside any actor loss, around one (`loss=`), or alone.

    `loss_kl` is the controller's coefficient times the mean over the valid steps of the batch, in nats per step. An
    actor loss that is a mean over steps too, such as ClipPPOLoss, then trades the same reward for the same nat as it
    does with a reward charged `coeff * kl` at every step (gamma = lambda = 1).

    What is minimised, by `gradient`, with :math:`KL_t` the exact KL of the distributions at step t and
    :math:`w_t = \pi(a_t|s_t) / \pi_{old}(a_t|s_t)` from the recorded log-prob, a weight that is 1 on-policy:

    - "step": :math:`KL_t`, states taken as given. It misses that a token leads to later states where the policy is far
      from the reference. Needs no action, and works on shuffled steps.
    - "sequence": :math:`\sum_t W_t KL_t` with :math:`W_t = \prod_{u<t} w_u`, differentiated through the weights. Its
      expected gradient is that of the KL between whole trajectories, which k1 charged to the reward has too: on-policy
      it is the gradient of the exact :math:`KL_t` plus :math:`\sum_t (\sum_{s>t} KL_s) \nabla \log \pi(a_t|s_t)`.
    - "k2": :math:`w_t (\log \pi(a_t|s_t) - \log \pi_{ref}(a_t|s_t))^2 / 2`, the weight detached: the expected gradient
      of "step" from the action alone, for distributions whose KL is not known.
    - "k3" warns: its expected gradient is that of the other divergence, KL(reference || policy).
    - "k1" is refused: its expected gradient is zero. Charge it to the reward (`KLConstrainedTransform`).

    After updates on the same batch the states are still those of the old policy. `weights` says what is done about it
    (no ratio is clipped, neither here nor by the loss beside it):

    - "trajectory": every step is weighted with :math:`W_t`, the ratio of the way there. Exact in expectation for
      whole trajectories; its variance grows with their length.
    - "step": each action has its own ratio only, as in PPO. "step" and "k2" are then taken over the old policy's
      states; "sequence" becomes :math:`KL_t + w_t \sum_{s>t} KL_s`, the sum detached. An approximation off-policy,
      alike on-policy, and right for long trajectories.

    You may rely on: the reference gets no gradient, is not among `parameters()`, and is in `state_dict`; `forward`
    never moves the controller; what stands on padded steps, NaN too, changes neither value nor gradient. You may not
    rely on the value of `loss_kl` being the KL for "k2" and "k3": `kl` is. With agents, everything is the mean over
    the agents (of their joint trajectories). Rows that begin or end inside a trajectory are taken for whole ones.

    Keys:
        reads the actor's in_keys; "action" and "action_log_prob" unless both `gradient` and `weights` are "step";
        ("next", "done") or ("collector", "traj_ids") for "sequence" and "trajectory"; ("collector", "mask"), True where
        a step counts, if it is there (`loss_mask_key` names another; TorchRL's "shifted_valid" is not asked: a step
        without a value target still has a KL); ("next", "kl_coeff"), the sign of a charged reward.
        writes, into a new tensordict without batch size, "loss_kl"; "kl", the KL in nats per step, detached: exact for
        "step" and "sequence", the weighted k1 (which may be negative) for "k2" and "k3"; "kl_coeff", reward per nat.
        With `loss` also what that writes.

    State: `actor_network_params`, `reference`, `controller`, `statistics`, which holds a single measured value until a
    controller with a deadband can be told two, and, if given, `loss`. The sums of trajectories that `update_controller`
    saw only in part are not saved.

    Args:
        actor: the policy, a probabilistic actor. It records its log-prob, unless `gradient` and `weights` are "step".
        controller: a KLController, or a float for a constant coefficient; reward per nat.
        gradient: "step", "sequence", "k2" or "k3".
        weights: "trajectory" or "step"; by default "trajectory" for "sequence" and else "step".
        reference: the actor to stay close to, of which a frozen copy is made; or a FrozenActor, which is used as it is
            (a transform's, say: one copy serves both); or, for no copy at all, a callable that returns a context
            manager in which `actor` itself is the reference, such as PEFT's `model.disable_adapter`. By default a copy
            of `actor` as it is now, which `loss.reference.update_reference` moves.
        loss: an actor loss to add to; its outputs are returned beside these.
        reduction: over the steps: "mean" over the valid ones; "sum"; or "none", shape (*B), 0 on padding.
        time_dim: the batch dimension that is time, for batches that do not name it "time"; it must be the last.
        allow_charged_reward: whether this loss may charge a batch whose reward was charged for the KL too.

    Raises:
        ValueError: if an option is unknown, `gradient` is "k1", the actor has several actions, the batch has no time
            dimension where one is needed, or `loss` writes an entry of the same name.
        KeyError: if the recorded log-prob, the action, or the ends of trajectories are needed and not there.
        TypeError: if `controller` is neither a KLController nor a number.
        RuntimeError: if the reward was charged before, or the reference is recurrent and its state is not known.

    Reference:
        Y. Tang and R. Munos, "On a few pitfalls in KL divergence gradient estimation for RL" (2025).

    Example:
        >>> from tensordict.nn import TensorDictModule
        >>> from torchrl.modules import ProbabilisticActor
        >>> actor = ProbabilisticActor(
        ...     TensorDictModule(nn.Linear(3, 2), ["observation"], ["logits"]),
        ...     in_keys=["logits"],
        ...     distribution_class=torch.distributions.Categorical,
        ...     return_log_prob=True,
        ... )
        >>> loss = KLPenaltyLoss(actor, 0.1)
        >>> batch = TensorDict(observation=torch.randn(5, 3), batch_size=5)
        >>> loss(batch)["loss_kl"].item()  # the policy is the reference still
        0.0
        >>> _ = torch.nn.init.normal_(actor[0].module.weight)
        >>> loss(batch)["loss_kl"].item() > 0
        True
    """

    @dataclass
    class _AcceptedKeys(LossModule._AcceptedKeys):
        """Names of the entries that are read.

        Attributes:
            action: what the policy did.
            sample_log_prob: the log-prob of it when it was drawn.
            done: in "next", what ends a trajectory.
            kl_coeff: in "next" or a branch of it, the coefficient that a reward was charged with.
        """

        action: NestedKey = "action"
        sample_log_prob: NestedKey = "action_log_prob"
        done: NestedKey = "done"
        kl_coeff: NestedKey = "kl_coeff"

    default_keys = _AcceptedKeys
    tensor_keys: _AcceptedKeys
    actor_network: ProbabilisticTensorDictSequential
    actor_network_params: TensorDictParams
    target_actor_network_params: TensorDictParams

    def __init__(
        self,
        actor: nn.Module,
        controller: KLController | float,
        *,
        gradient: Gradient = "step",
        weights: Weights | None = None,
        reference: nn.Module | Switch | None = None,
        loss: LossModule | None = None,
        reduction: Literal["mean", "sum", "none"] = "mean",
        time_dim: int | None = None,
        allow_charged_reward: bool = False,
    ):
        _check_options(gradient, weights, reduction)
        super().__init__()
        self.reference = as_reference(actor, reference)
        self.convert_to_functional(
            cast("ProbabilisticTensorDictSequential", actor), "actor_network"
        )
        self.controller = as_controller(controller)
        self.loss = loss
        self.gradient = gradient
        self.weights = weights or ("trajectory" if gradient == "sequence" else "step")
        self.reduction = reduction
        self.time_dim = time_dim
        self.allow_charged_reward = allow_charged_reward
        self.statistics = KLStatistics()
        self._open_trajectories = OpenTrajectories()
        action_key, *others = self.reference.action_keys
        if others:
            raise ValueError(
                f"`actor` must have one action, got {self.reference.action_keys}: use one loss per action, each with "
                "an actor of its own."
            )
        self.set_keys(action=action_key, sample_log_prob=self.reference.log_prob_key)

    @property
    def in_keys(self) -> list[NestedKey]:
        """What `forward` reads, in the order of its positional arguments."""
        keys: list[NestedKey] = [*self.actor_network.in_keys, self.tensor_keys.action]
        if self._reads_actions:
            keys.append(self.tensor_keys.sample_log_prob)
        if self._reads_trajectories:
            keys.append(("next", *as_tuple(self.tensor_keys.done)))
        others = [] if self.loss is None else self.loss.in_keys
        return list(dict.fromkeys(unravel_key(key) for key in (*keys, *others)))

    @property
    def out_keys(self) -> list[NestedKey]:
        """What `forward` writes."""
        return ["loss_kl", "kl", "kl_coeff", *([] if self.loss is None else self.loss.out_keys)]

    def named_parameters(self, prefix: str = "", recurse: bool = True):
        """The policy's parameters (and those of `loss`), never the reference's."""
        frozen = {id(parameter) for parameter in self.reference.parameters()}
        for name, parameter in super().named_parameters(prefix, recurse):
            if id(parameter) not in frozen:
                yield name, parameter

    def _forward_value_estimator_keys(self, **_) -> None:
        """There is no value estimator."""

    @dispatch()
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """The loss of a batch (*B), which is left as it was."""
        coeff = self.controller.coeff
        if coeff > 0 and not self.allow_charged_reward:
            self._refuse_charged(tensordict)
        terms = self._terms(tensordict)
        coeff = coeff.to(terms.loss)
        # A coefficient of 0 charges nothing, not even infinity.
        penalty = torch.where(coeff == 0, 0.0, coeff * terms.loss)
        out = TensorDict(
            loss_kl=_reduce(penalty, terms.mask, self.reduction),
            kl=_reduce(terms.kl, terms.mask, "mean"),
            kl_coeff=coeff.detach().clone(),
        )
        return out if self.loss is None else _join(self.loss(tensordict), out)

    @torch.no_grad()
    def update_controller(self, tensordict: TensorDictBase) -> float:
        """Moves the controller once, with the KL measured on a batch.

        Call it once per batch, before the updates on it: the measurement is then the KL of the policy that acted. It
        is the `kl` of `forward`: summed over the trajectories that are now complete (a trajectory may come in pieces,
        in successive calls) for a controller that counts per trajectory, per valid step for one that counts per step.

        Args:
            tensordict: batch of shape (*B), or (*R, T) with time for a controller that counts per trajectory.

        Returns:
            The coefficient from now on; the old one where no trajectory was completed, or a single one and the
            controller has a deadband: it then counts with the next.

        Raises:
            ValueError: if the KL is NaN or infinite (the coefficient is then unchanged), or the controller counts per
                trajectory and the batch has no time dimension.
        """
        terms = self._terms(tensordict)
        if self.controller.per == "step":
            measured = terms.kl[terms.mask]
        else:
            if find_time_dim(tensordict, self.time_dim) is None:
                raise ValueError(
                    _no_time(tensordict, "a controller that counts nats per trajectory")
                )
            self._done(tensordict)
            steps = tensordict.copy().set(
                MASK_KEY, terms.mask
            )  # the mask may stand elsewhere, or not be asked for
            measured = self._open_trajectories.add(steps, terms.kl, self.tensor_keys.done).finished
        pool = self.statistics.add(measured)
        count, mean, standard_error = int(pool.count), pool.mean, pool.standard_error
        if count >= self._needed_values:
            pool.reset()  # first: a measurement that the controller refuses must not be refused for ever
            self.controller.update(mean, count, standard_error=standard_error)
        return self.controller.coeff.item()

    @property
    def _needed_values(self) -> int:
        """How many values an update of the controller needs: one has no standard error for a deadband."""
        return (
            2
            if isinstance(self.controller, TargetKLController) and self.controller.deadband > 0
            else 1
        )

    @property
    def _reads_actions(self) -> bool:
        return self.gradient != "step" or self.weights == "trajectory"

    @property
    def _reads_trajectories(self) -> bool:
        return self.gradient == "sequence" or self.weights == "trajectory"

    def _terms(self, tensordict: TensorDictBase) -> _Terms:
        """What each step contributes, before the coefficient."""
        mask = self._mask(tensordict)
        if mask is not None:
            keys = [
                *self.actor_network.in_keys,
                *self.reference.own_state_keys,
                self.tensor_keys.action,
            ]
            tensordict = _finite_padding(tensordict, mask, keys)
        policy, reference = self._distributions(tensordict)
        if self._reads_actions:
            value, kl = self._weighted(tensordict, policy, reference, mask)
        else:
            value = kl = _exact(policy, reference, tensordict.batch_size, mask)
        # With agents these are sums over them, as for one actor with all their actions.
        n_agents = math.prod(
            holder_batch_size(tensordict, self.tensor_keys.action)[tensordict.batch_dims :]
        )
        mask = torch.ones_like(kl, dtype=torch.bool) if mask is None else mask
        return _Terms(value / n_agents, kl.detach() / n_agents, mask)

    def _mask(self, tensordict: TensorDictBase) -> Tensor | None:
        """True where a step counts, (*B); None where all do."""
        key = MASK_KEY if self.loss_mask_key == "auto" else self.loss_mask_key
        mask = None if key is None else tensordict.get(key, None)
        return None if mask is None else expand_right(mask, tensordict.batch_size)

    def _distributions(self, tensordict: TensorDictBase) -> tuple[Distribution, Distribution]:
        """The policy's and the reference's, over the actions of each step."""
        timed = find_time_dim(tensordict, self.time_dim) is not None
        if self._reads_trajectories and not timed:
            raise ValueError(
                _no_time(tensordict, f"gradient={self.gradient!r} with weights={self.weights!r}")
            )
        inputs = tensordict.select(*self.actor_network.in_keys, strict=False)
        # TorchRL runs all losses in recurrent mode, where a flat batch of shuffled steps would be taken for one text.
        with (
            self.actor_network_params.to_module(self.actor_network, preserve_module_state=False),
            set_recurrent_mode(timed),
        ):
            policy = self.actor_network.get_dist(inputs)
        with (
            torch.no_grad()
        ):  # also for a shared reference whose weights may receive gradients elsewhere
            return policy, self.reference.get_dist(tensordict, timed=timed)

    def _log_probs(
        self,
        tensordict: TensorDictBase,
        policy: Distribution,
        reference: Distribution,
        mask: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of the actions, under the policy and the reference, and log w_t (0 where the mask is False); (*B) each."""
        action = get_required(
            tensordict, self.tensor_keys.action, "name it with `set_keys(action=...)`."
        )
        old = get_required(tensordict, self.tensor_keys.sample_log_prob, RECORD_LOG_PROB).detach()
        log_probs = (policy.log_prob(action), reference.log_prob(action), old)
        log_prob, ref_log_prob, old = (
            sum_action_dims(value, tensordict.batch_size) for value in log_probs
        )
        log_weight = log_prob - old
        return (
            log_prob,
            ref_log_prob,
            log_weight if mask is None else torch.where(mask, log_weight, 0.0),
        )

    def _weighted(
        self,
        tensordict: TensorDictBase,
        policy: Distribution,
        reference: Distribution,
        mask: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """What is minimised and the measured KL where the actions count, importance-weighted; (*B) each."""
        log_prob, ref_log_prob, log_weight = self._log_probs(tensordict, policy, reference, mask)
        weight = log_weight.exp()
        if self.gradient in _EXACT:
            value = kl = _exact(policy, reference, tensordict.batch_size, mask)
        else:
            value = weight.detach() * _SAMPLED[self.gradient](log_prob, ref_log_prob, mask=mask)
            kl = weight * kl_k1(log_prob, ref_log_prob, mask=mask)
        if self.weights == "trajectory":
            way = sum_before(log_weight, self._ends(tensordict, mask))
            way = (
                way if mask is None else torch.where(mask, way, 0.0)
            ).exp()  # on padding it could overflow: inf * 0
            # The gradient of these weights, of the probability of getting there, is what makes "sequence" exact.
            return (way if self.gradient == "sequence" else way.detach()) * value, way * kl
        if self.gradient == "sequence":
            later = sum_after(kl.detach(), self._ends(tensordict, mask))
            value = value + (weight - weight.detach()) * later
        return value, kl

    def _ends(self, tensordict: TensorDictBase, mask: Tensor | None) -> Tensor:
        """True at the last step of each trajectory, (*B)."""
        ids = tensordict.get(TRAJECTORY_KEY, None)
        if (
            ids is None
            or tensordict.get(("next", *as_tuple(self.tensor_keys.done)), None) is not None
        ):
            ends = expand_right(self._done(tensordict), tensordict.batch_size)
        else:
            ids = ids.reshape(tensordict.batch_size)
            ends = torch.ones_like(ids, dtype=torch.bool)
            ends[..., :-1] = ids[..., 1:] != ids[..., :-1]
        padded = torch.zeros_like(ends) if mask is None else ~mask
        self._check_order(tensordict, (ends | padded)[..., :-1] | padded[..., 1:])
        return ends

    def _done(self, tensordict: TensorDictBase) -> Tensor:
        key = ("next", *as_tuple(self.tensor_keys.done))
        return get_required(
            tensordict, key, "trajectories end there; name it with `set_keys(done=...)`."
        )

    def _check_order(self, tensordict: TensorDictBase, may_differ: Tensor) -> None:
        """Refuses shuffled steps whose dimension kept the name "time"; `may_differ` is (*R, T - 1)."""
        after = cast("TensorDictBase", tensordict[..., 1:])
        before = cast("TensorDictBase", tensordict[..., :-1])
        for key in self.actor_network.in_keys:
            following = before.get(("next", *as_tuple(key)), None)
            if following is not None:
                equal = (after.get(key) == following).reshape(*may_differ.shape, -1).all(-1)
                if not bool((equal | may_differ).all()):
                    raise ValueError(
                        f"the steps of the batch do not follow one another: {key!r} is not what the step before has in "
                        f'"next", and no trajectory ends there, but gradient={self.gradient!r} with '
                        f"weights={self.weights!r} adds up along trajectories. Shuffle whole rows, not steps."
                    )

    def _refuse_charged(self, tensordict: TensorDictBase) -> None:
        """RuntimeError if a reward of the batch was charged for its KL."""
        next_tensordict, name = (
            tensordict.get("next", None),
            as_tuple(self.tensor_keys.kl_coeff)[-1],
        )
        if next_tensordict is None:
            return
        signs = [key for key in next_tensordict.keys(True, True) if as_tuple(key)[-1] == name]
        charged = [key for key in signs if bool((next_tensordict.get(key) != 0).any())]
        if charged:
            raise RuntimeError(
                f"the batch has {unravel_key(('next', charged[0]))!r} other than 0: a reward was charged for the KL "
                "already, and this loss would charge it again. Drop the loss, or let the transform only measure (a "
                "coefficient of 0), or, if both are meant, pass `allow_charged_reward=True`."
            )


def _exact(
    policy: Distribution, reference: Distribution, batch_size: torch.Size, mask: Tensor | None
) -> Tensor:
    """The KL of each step, summed over action dimensions and agents, 0 where the mask is False; (*B)."""
    if mask is not None:
        mask = expand_right(mask, policy.batch_shape)
    return sum_action_dims(kl_exact(policy, reference, mask=mask), batch_size)


def _finite_padding(
    tensordict: TensorDictBase, mask: Tensor, keys: Iterable[NestedKey]
) -> TensorDictBase:
    """A shallow copy with 0 for NaN and inf on padding: times a gradient of 0 they would be NaN in the weights'."""
    tensordict = tensordict.copy()
    for key in keys:
        value = tensordict.get(key, None)
        if value is not None and value.is_floating_point():
            keep = expand_right(mask, value.shape) | value.isfinite()
            tensordict.set(key, torch.where(keep, value, 0.0))
    return tensordict


def _reduce(values: Tensor, mask: Tensor, reduction: str) -> Tensor:
    """Over the steps that count; `values` are 0 elsewhere."""
    if reduction == "none":
        return values
    total = values.sum()
    return total if reduction == "sum" else total / mask.sum().clamp_min(1)


def _join(outputs: TensorDictBase, own: TensorDictBase) -> TensorDictBase:
    """Both outputs in one; ValueError where one would overwrite the other."""
    taken = sorted(set(own.keys()) & set(outputs.keys()))
    if taken:
        raise ValueError(
            f"`loss` writes {taken} too, which KLPenaltyLoss would overwrite (KLPENPPOLoss calls the divergence from "
            'the old policy "kl"): call the two losses one after the other.'
        )
    return outputs.update(own)


def _no_time(tensordict: TensorDictBase, what: str) -> str:
    return (
        f"{what} needs whole trajectories, and in a batch of shape {tuple(tensordict.batch_size)} none of the "
        'dimensions is known to be time: name the last one "time" (collectors do, `reshape(-1)` loses it), or pass '
        "`time_dim`."
    )


def _check_options(gradient: str, weights: str | None, reduction: str) -> None:
    if gradient == "k1":
        raise ValueError(
            '`gradient` must not be "k1": as a loss its expected gradient is zero, it would only add noise. Charge k1 '
            'to the reward (KLConstrainedTransform), or use "sequence", which has the same expected gradient.'
        )
    gradients = (*_EXACT, *_SAMPLED)
    for name, value, choices in (
        ("gradient", gradient, gradients),
        ("weights", weights, (None, "step", "trajectory")),
        ("reduction", reduction, ("mean", "sum", "none")),
    ):
        if value not in choices:
            raise ValueError(f"`{name}` must be one of {choices}, got {value!r}.")
    if gradient == "k3":
        warnings.warn(
            'gradient="k3" minimises the other divergence: the expected gradient of k3 as a loss is that of '
            'KL(reference || policy). Use "k2" for the gradient of KL(policy || reference) from the action alone.',
            stacklevel=3,
        )
