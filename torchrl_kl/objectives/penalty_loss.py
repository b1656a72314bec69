"""KL(policy || reference) as a term of a loss, with the gradient that its name promises.

Axes: *B is the batch of steps; where its last dimension is time, *B is (*R, T), R rows of T steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, TensorDictParams, unravel_key
from tensordict.nn import ProbabilisticTensorDictSequential, dispatch
from torch import Tensor, nn
from torch.distributions import Distribution
from torchrl.modules import set_recurrent_mode
from torchrl.objectives import LossModule

from torchrl_kl._feeding import ControllerFeed, Fed
from torchrl_kl._tensordict import (
    RECORD_LOG_PROB,
    as_tuple,
    find_time_dim,
    get_required,
    holder_batch_size,
)
from torchrl_kl.actors.policy import Acting, evaluating
from torchrl_kl.actors.reading import refuse_own_log_prob
from torchrl_kl.actors.references import Switch, as_reference
from torchrl_kl.controllers import KLController, as_controller
from torchrl_kl.functional.invalid import Guard, OnInvalid, seem_valid
from torchrl_kl.objectives.terms import (
    Gradient,
    Reduction,
    Steps,
    Weights,
    build_late,
    check_options,
    drawn_log_ratio,
    find_last_steps,
    find_shared,
    finite_padding,
    read_done,
    read_mask,
    reduce_steps,
    refuse_penalized,
    require_time,
    split_keys,
    warn_of_k3,
    without_random,
)


class KLPenaltyLoss(Fed, LossModule):
    """Minimises KL(policy || reference): next to an actor loss, around one (`loss=`), or alone.

    `loss_kl` is the coefficient times the mean KL over the valid steps of the batch, nats per step.
    Added to a loss that is a mean over steps too, such as ClipPPOLoss, a coefficient means the same
    as in a reward penalized by `coeff * kl` at every step (gamma = lambda = 1).

    `gradient` names what is minimised, with `KL_t` the exact KL of the distributions at step t
    and `w_t = pi(a_t|s_t) / pi_old(a_t|s_t)` from the recorded log-prob, 1 on-policy:

    - "step": `KL_t`, states taken as given. It misses that an action leads to later states
      where the policy is far from the reference. Needs no action, and takes shuffled steps.
    - "sequence": `sum_t W_t KL_t` with `W_t = prod_{u<t} w_u`, differentiated through
      the weights. Its expected gradient is that of the KL between whole trajectories, as for k1
      subtracted from the reward.
    - "k2": `w_t (log pi(a_t|s_t) - log pi_ref(a_t|s_t))^2 / 2`, weight detached: the
      expected gradient of "step" from the action alone, for distributions without a known KL.
    - "k3" warns: its expected gradient is that of the other divergence, KL(reference || policy).
    - "k1" is refused: its expected gradient is zero.

    `weights` corrects for updates on the same batch, whose states are those of the old policy:

    - "trajectory": every step is weighted with `W_t`. Exact in expectation for whole
      trajectories; its variance grows with their length.
    - "step": each action has only its own ratio, as in PPO. "sequence" then has the value `KL_t`
      and the gradient of `KL_t + w_t sum_{s>t} KL_s` (sum detached), approximate off-policy.

    You may rely on: the reference gets no gradient, is not among `parameters()`, and is in
    `state_dict`; `forward` never moves the controller; padded steps, NaN too, change neither value
    nor gradient; half precision is summed and returned in float32. You may not rely on `loss_kl`
    being the KL for "k2" and "k3": `kl` is. With agents, `a_t` is the action of all, and all is
    divided by their number. Rows that begin or end inside a trajectory count as whole ones. Where
    log-probs are read, frames of a random policy do not count, if the batch has logits or the like.
    `loss` has the target networks: pass `loss` to SoftUpdate, call its `make_value_estimator`.

    Keys:
        reads the actor's in_keys; "action" and "action_log_prob" unless both `gradient` and
        `weights` are "step"; ("next", "done") or ("collector", "traj_ids") for "sequence" and
        "trajectory"; ("collector", "mask"), True where a step counts, if it is there
        (`loss_mask_key` names another); ("next", "kl_coeff"), the sign of a penalized reward.
        writes, without batch size, "loss_kl"; "kl", nats per step, detached: exact for "step" and
        "sequence", the weighted k1 (which may be negative) for "k2" and "k3"; "kl_coeff", reward
        per nat; what `loss` writes.

    State: `actor_network_params`, `reference`, `loss`, the controller and what it is fed: the pool
    since its last update and the sums of open trajectories.

    Args:
        actor: the policy, a probabilistic actor; it records its log-prob if that is read.
        controller: a KLController, or a float for a constant coefficient; reward per nat.
        gradient: "step", "sequence", "k2" or "k3".
        weights: "trajectory" or "step"; by default "trajectory" for "sequence" and else "step".
        reference: as for KLConstrainedTransform, or its FrozenActor; by default a copy of `actor`.
        loss: an actor loss to add to; its outputs are returned too.
        reduction: over the valid steps: "mean", "sum" or "none", shape (*B), 0 on padding.
        time_dim: the last batch dimension, if it is time and the batch does not name it "time".
        allow_penalized_reward: whether the loss takes a batch whose reward was penalized already.
        on_invalid: what to do where a log-prob or KL is NaN, infinite, or at least 2 ** 64: "raise"
            an error that names it, or "mask" the step as if it were padding, with one warning.

    Raises:
        ValueError: if an option is unknown or "k1", the actor has several actions, time is missing
            or shuffled, `loss` writes an entry of the same name, or a number is invalid.
        KeyError: if the recorded log-prob, the action, or the ends of trajectories are missing.
        TypeError: if `controller` is neither a KLController nor a number.
        RuntimeError: if the reward was penalized before, or a recurrent state is not known.

    Reference:
        Y. Tang, R. Munos, "On a few pitfalls in KL divergence gradient estimation for RL" (2025).

    Example:
        >>> from torchrl_kl import GPT, CausalLMActor, KLPenaltyLoss
        >>> from torchrl_kl.envs import DigitLanguageEnv
        >>> actor = CausalLMActor(GPT(vocab_size=11, block_size=8))
        >>> batch = actor(DigitLanguageEnv(batch_size=(5,)).reset())
        >>> KLPenaltyLoss(actor, 0.1)(batch)["loss_kl"].item()  # the policy still is the reference
        0.0
    """

    @dataclass
    class _AcceptedKeys(LossModule._AcceptedKeys):
        """Names of entries; the last ones are under "next". Only trainers need `terminated`."""

        action: NestedKey = "action"
        sample_log_prob: NestedKey = "action_log_prob"
        done: NestedKey = "done"
        terminated: NestedKey = "terminated"
        kl_coeff: NestedKey = "kl_coeff"
        reward: NestedKey = "reward"

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
        reduction: Reduction = "mean",
        time_dim: int | None = None,
        allow_penalized_reward: bool = False,
        on_invalid: OnInvalid = "raise",
    ):
        check_options(gradient, weights, reduction)
        warn_of_k3(gradient)
        if loss is not None and not isinstance(loss, LossModule):
            raise TypeError(f"`loss` must be a LossModule or None, got {type(loss).__name__}.")
        super().__init__()
        self.reference = as_reference(actor, reference)
        if self.reference is not reference:  # no stack has recorded its states
            self.reference.name_states("loss_ref_log_prob")
        self.acting, actions = Acting.of(actor, self.reference.recorded), self.reference.action_keys
        if len(actions) > 1:
            raise ValueError(f"`actor` must have one action, got {actions}: use one loss for each.")
        self.convert_to_functional(cast(ProbabilisticTensorDictSequential, actor), "actor_network")
        self.feed = ControllerFeed(as_controller(controller))
        self.loss, self.guard = loss, Guard(on_invalid)
        if loss is not None:
            self.actor_network_params = find_shared(self.actor_network_params, loss)
            self.register_load_state_dict_pre_hook(build_late)
        self.gradient: Gradient = gradient
        self.weights: Weights = weights or ("trajectory" if gradient == "sequence" else "step")
        self.reduction: Reduction = reduction
        self.time_dim, self.allow_penalized_reward = time_dim, allow_penalized_reward
        # Of this loss alone: the keys of `loss` were chosen where it was built.
        super().set_keys(action=actions[0], sample_log_prob=self.reference.log_prob_key)

    def set_keys(self, **kwargs: Any) -> None:
        """Names entries of this loss, of `loss`, or of both, as a trainer does."""
        own, inner = split_keys(kwargs, self, self.loss)
        super().set_keys(**own)  # which refuses a name that neither has
        if self.loss is not None:
            self.loss.set_keys(**inner)

    @property
    def loss_mask_key(self) -> Any:
        """Which mask says where a step counts, as in TorchRL's losses; `loss` is given it, too."""
        return self._loss_mask_key

    @loss_mask_key.setter
    def loss_mask_key(self, key: Any) -> None:
        cast(Any, LossModule.loss_mask_key).fset(self, key)
        if self.loss is not None:
            self.loss.loss_mask_key = key

    @property
    def in_keys(self) -> list[NestedKey]:
        """What `forward` reads, in the order of its positional arguments."""
        keys = [*self.actor_network.in_keys, self.tensor_keys.action]
        keys += [self.tensor_keys.sample_log_prob] if self._reads_actions else []
        keys += [self._done_key] if self._reads_trajectories else []
        others = [] if self.loss is None else self.loss.in_keys  # which may be the same
        return list(dict.fromkeys(unravel_key(key) for key in (*keys, *others)))

    @property
    def out_keys(self) -> list[NestedKey]:
        """What `forward` writes."""
        return ["loss_kl", "kl", "kl_coeff", *([] if self.loss is None else self.loss.out_keys)]

    @property
    def critic_network(self) -> nn.Module:
        """That of `loss`, from which TorchRL's trainers make their GAE."""
        return cast(Any, self.loss).critic_network

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
        """The loss of a batch (*B), to which nothing is written."""
        coeff = self.controller.coeff
        if coeff > 0 and not self.allow_penalized_reward:
            refuse_penalized(tensordict, self.tensor_keys.kl_coeff)
        # (*B) each; the coefficient is 0-dim.
        value, kl, mask = self._terms(tensordict)
        coeff = coeff.to(value, copy=True)  # of now: autograd keeps it until `backward`
        # A coefficient of 0 adds nothing, not even infinity.
        penalty = torch.where(coeff == 0, 0.0, coeff * value)
        loss_kl, kl = reduce_steps(penalty, mask, self.reduction), reduce_steps(kl, mask, "mean")
        out = TensorDict(loss_kl=loss_kl, kl=kl, kl_coeff=coeff.detach().clone())
        if self.loss is None:
            return out
        others = self.loss(tensordict)
        if taken := sorted(set(out.keys()) & set(others.keys())):
            raise ValueError(
                f"`loss` writes {taken} too, which KLPenaltyLoss would overwrite: call the two "
                "losses one after the other."
            )
        # With reduction="none", those of some losses have the batch size of the batch.
        return TensorDict({**dict(others.items()), **dict(out.items())})

    @torch.no_grad()
    def update_controller(self, tensordict: TensorDictBase) -> float:
        """Updates the controller, once, with the KL measured on a batch; returns the coefficient.

        Call it once per batch, before the updates on it: the KL is then that of the policy that
        acted. It is the `kl` of `forward` in eval mode: of each valid step for a controller of
        steps; else summed over the trajectories of (*R, T) that are now complete. They may come in
        pieces: a row continues the one that has its id and was left in the state where it begins.
        Without a complete trajectory, or with only one and a deadband, the coefficient waits.
        A controller that plans its coefficient is given ("next", "reward") first, the task reward.

        Raises:
            ValueError: if the KL is NaN or infinite (the coefficient is then unchanged), or a
                controller of trajectories gets no time dimension or steps in another order.
        """
        with evaluating(self.actor_network):
            _, kl, mask = self._terms(tensordict)
            counted = None if mask.all() else mask
            if self.controller.planning:
                self._plan(tensordict, counted)
        if self.controller.per == "step":
            self.feed.pool(kl[mask])
        else:
            require_time(tensordict, self.time_dim, "a controller that counts nats per trajectory")
            read_done(tensordict, self._done_key)
            self.feed.add_batch(tensordict, kl, counted, **self._order)
        return self.controller.coeff.item()

    def _plan(self, tensordict: TensorDictBase, mask: Tensor | None) -> None:
        """Gives the task rewards of a batch (*B) to a controller that plans from them."""
        step = cast(TensorDictBase, tensordict.get("next"))
        fix = "the coefficient is planned from it; name it with `set_keys(reward=...)`."
        reward = get_required(step, self.tensor_keys.reward, fix)
        action_key = self.tensor_keys.action
        action = get_required(tensordict, action_key, "name it with `set_keys`.")
        recorded = tensordict.get(self.tensor_keys.sample_log_prob, None)
        # (*B) or, with agents, (*B, *A); a reward has one more dimension.
        shape, dists = holder_batch_size(tensordict, action_key), self._distributions(tensordict)
        log_ratio = drawn_log_ratio(*dists, action, recorded, shape)[..., None]
        if log_ratio.shape != reward.shape:
            raise ValueError(
                f"the reward must have the shape {tuple(log_ratio.shape)} of the log-prob of the "
                f"actions and a trailing 1, got {tuple(reward.shape)}: give `init_coeff` a number."
            )
        given = (tensordict, reward, log_ratio, mask)
        self.feed.rewards.add_batch(self.controller, *given, stream=self.feed.stream, **self._order)

    # Properties, since `gradient` and `weights` may be set later.
    @property
    def _reads_trajectories(self) -> bool:
        return self.gradient == "sequence" or self.weights == "trajectory"

    @property
    def _reads_actions(self) -> bool:
        return self._reads_trajectories or self.gradient != "step"

    @property
    def _order(self) -> dict[str, Any]:
        observed = self.actor_network.in_keys
        return {"done_key": self.tensor_keys.done, "time_dim": self.time_dim, "observed": observed}

    @property
    def _options(self) -> str:
        return f"gradient={self.gradient!r} with weights={self.weights!r}"

    @property
    def _done_key(self) -> NestedKey:
        return unravel_key(("next", *as_tuple(self.tensor_keys.done)))

    def _terms(self, tensordict: TensorDictBase) -> tuple[Tensor, Tensor, Tensor]:
        """What is minimised, before the coefficient, the measured KL, and the mask; (*B) each."""
        check_options(self.gradient, self.weights, self.reduction)  # they may have been set later
        mask = read_mask(tensordict, self.loss_mask_key)
        if self._reads_actions:
            mask = without_random(tensordict, self.acting, self.tensor_keys.sample_log_prob, mask)
        steps = self._steps(tensordict, mask)
        value, kl = steps.terms(self.gradient, self.weights)
        while not seem_valid((value, kl, steps.recorded)):
            valid = self._valid(tensordict, steps, mask, value, kl)
            known = valid.all() if mask is None else valid.equal(mask)
            # Again, and not by `where`: a gradient of 0 times NaN would be NaN. Without the steps
            # that are invalid by themselves, weights of others may still overflow.
            steps = self._steps(tensordict, valid & value.isfinite() if known else valid)
            value, measured = steps.terms(self.gradient, self.weights)
            if known:
                break  # they are valid, but many or large, or infinite with a coefficient of 0
            mask, kl = valid, measured
        # With agents they are sums over them, as for one actor with all their actions.
        agents = holder_batch_size(tensordict, self.tensor_keys.action)[tensordict.batch_dims :]
        mask = torch.ones_like(kl, dtype=torch.bool) if mask is None else mask
        return value / agents.numel(), kl.detach() / agents.numel(), mask

    def _steps(self, tensordict: TensorDictBase, mask: Tensor | None) -> Steps:
        action_key, recorded_key = self.tensor_keys.action, self.tensor_keys.sample_log_prob
        if mask is not None:
            inputs = (*self.actor_network.in_keys, *self.reference.own_state_keys)
            tensordict = finite_padding(tensordict, mask, (*inputs, action_key, recorded_key))
        steps = Steps(*self._distributions(tensordict), tensordict.batch_size, mask)
        if not self._reads_actions:
            return steps
        refuse_own_log_prob(self.actor_network)
        action = get_required(tensordict, action_key, "name it with `set_keys(action=...)`.")
        recorded = get_required(tensordict, recorded_key, RECORD_LOG_PROB)
        ends = None
        if self._reads_trajectories:
            observed = self.actor_network.in_keys
            ends = find_last_steps(tensordict, mask, self._done_key, observed, self._options)
        return steps._replace(action=action, recorded=recorded, ends=ends)

    def _valid(
        self, tensordict: TensorDictBase, steps: Steps, mask: Tensor | None, *terms: Tensor
    ) -> Tensor:
        """The mask (*B) without steps of invalid numbers; ValueError unless they are masked."""
        measures = self.controller.coeff.item() == 0 and not self.guard.masks
        infinite = {"kl": torch.inf, "loss_kl": torch.inf, "ref_log_prob": -torch.inf}
        causes = {key: tensordict.get(key, None) for key in self.actor_network.in_keys}
        options: dict[str, Any] = {"allowed": infinite if measures else None, "causes": causes}
        made_of = steps.numbers(self.gradient, self.tensor_keys.sample_log_prob)
        # Where the numbers of all steps are valid, their weights may still be too large.
        for numbers in (made_of, dict(zip(("loss_kl", "kl"), terms, strict=True))):
            valid = self.guard.valid_steps(
                numbers, tensordict.batch_size, mask, type(self).__name__, **options
            )
            mask = valid if mask is None else mask & valid
            if not valid.all():
                break
        return cast(Tensor, mask)

    def _distributions(self, tensordict: TensorDictBase) -> tuple[Distribution, Distribution]:
        timed = find_time_dim(tensordict, self.time_dim) is not None
        if self._reads_trajectories:
            require_time(tensordict, self.time_dim, self._options)
        network = self.actor_network
        inputs = tensordict.select(*network.in_keys, strict=False)
        weights = self.actor_network_params.to_module(network, preserve_module_state=False)
        # TorchRL runs all losses in recurrent mode, which takes shuffled steps for one trajectory.
        with weights, set_recurrent_mode(timed):
            policy = network.get_dist(inputs)
        # A shared reference may receive gradients elsewhere.
        with torch.no_grad():
            return policy, self.reference.get_dist(tensordict, timed=timed)
