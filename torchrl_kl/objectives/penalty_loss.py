"""KL(policy || reference) as a term of a loss, with the gradient that its name promises.

Axes: *B is the batch of steps; where its last dimension is time, *B is (*R, T), R rows of T steps.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, fields
from functools import reduce
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, TensorDictParams, unravel_key
from tensordict.nn import ProbabilisticTensorDictSequential, dispatch
from torch import Tensor, nn
from torch.distributions import Distribution
from torchrl.modules import set_recurrent_mode
from torchrl.objectives import LossModule

from torchrl_kl import batches
from torchrl_kl.actors.log_probs import log_prob_and_kl, log_probs_by_part, refuse_own_log_prob
from torchrl_kl.actors.parallel import sharded_parts
from torchrl_kl.actors.policy import evaluating
from torchrl_kl.actors.protocol import as_kl_actor
from torchrl_kl.actors.reading import dist_module_of, scored_inputs
from torchrl_kl.actors.references import Switch, as_reference
from torchrl_kl.batches import expand_right, find_time_dim
from torchrl_kl.controllers import KLController, as_controller
from torchrl_kl.feeding import ControllerFeed
from torchrl_kl.functional.estimators import kl_exact, kl_k1, kl_k2
from torchrl_kl.functional.numbers import check_finite, is_floating, uncompiled, widened
from torchrl_kl.functional.sampler import (
    FEWEST,
    SamplerWeights,
    check_sampler_weights,
    sampler_weights,
)
from torchrl_kl.functional.sums import sum_after, sum_before
from torchrl_kl.functional.tiles import TiledCategorical
from torchrl_kl.keys import (
    RECORD_LOG_PROB,
    KLKeys,
    LogProbKeys,
    ResolvedKeys,
    as_tuple,
    get_required,
    sum_action_dims,
)
from torchrl_kl.objectives.one_pass import Pass

Gradient = Literal["step", "sequence", "k2"]
Weights = Literal["step", "trajectory"]
Reduction = Literal["mean", "sum", "none"]


@dataclass
class LossSteps:
    """The steps of a batch; their distributions over actions are computed when first read."""

    find_pass: Callable[[], Pass]  # of the policy
    find_reference: Callable[[], Distribution]
    data: TensorDictBase  # (*B)
    action: NestedKey  # in the data; a composite one has keys of its parts
    acts: Tensor | None  # (*B, *A), of agents: True where one acts in a step that counts

    # Not by `cached_property`, whose lock cannot be compiled in Python 3.11.
    _made: Pass | None = None
    _reference: Distribution | None = None

    @property
    def made(self) -> Pass:
        """The pass of the policy."""
        if self._made is None:
            self._made = self.find_pass()
        return self._made

    @property
    def reference(self) -> Distribution:
        """The distributions of the reference."""
        if self._reference is None:
            self._reference = self.find_reference()
        return self._reference

    def mask_for(self, shape: torch.Size) -> Tensor | None:
        """True where values of a `shape` (*B, ...) count, of that shape; None where all do."""
        return mask_of(self.acts, self.data.batch_size, shape)

    @property
    def mask(self) -> Tensor | None:
        """(*B), True where a step counts; None where all do."""
        return self.mask_for(self.data.batch_size)

    @property
    def count(self) -> Any:
        """How many steps count; where half of the agents act, half a step."""
        n_steps = max(self.data.batch_size.numel(), 1)
        if self.acts is None:
            return n_steps
        return self.acts.sum().clamp_min(1) * (n_steps / max(self.acts.numel(), 1))

    def summed(self, *parts: Tensor) -> Tensor:
        """Values (*B, ...) of the parts of an action, summed to (*B); 0 where the mask is False."""
        found = []
        for part in map(widened, parts):  # in half precision the sum could overflow
            mask = self.mask_for(part.shape)
            part = part if mask is None else torch.where(mask, part, 0.0)
            found.append(sum_action_dims(part, self.data.batch_size))
        return reduce(torch.add, found)

    def log_prob_of(self, dist: Distribution) -> Tensor:
        """The log-prob of the actions, (*B)."""
        return self.summed(*log_probs_by_part(dist, self.data, self.action))


class Terms(NamedTuple):
    """What a batch (*B) adds to the loss, and what was measured on it."""

    steps: LossSteps
    value: Tensor  # (*B), what is minimised, before the coefficient
    kl: Tensor  # (*B), nats
    share: float  # the effective one of the actions of a sampler, 1 without one


class KLPenaltyLoss(LossModule):
    """Minimises KL(policy || reference): next to an actor loss, around one (`loss=`), or alone.

    `loss_kl` is the coefficient times the mean KL over the valid steps. Next to a mean over steps,
    such as ClipPPOLoss, it means the same as in a reward penalized at every step
    (gamma = lambda = 1).

    `gradient` names what is minimised, with `KL_t` the exact KL of the distributions at step t
    and `w_t = pi(a_t|s_t) / pi_old(a_t|s_t)` from the recorded log-prob, 1 on-policy:

    - "step": `KL_t`, with the states taken as given: it ignores that an action may lead to states
      where the policy is far from the reference. It needs no actions, and takes shuffled steps.
    - "sequence": `sum_t W_t KL_t` with `W_t = prod_{u<t} w_u`, differentiated through the weights:
      in expectation the KL between whole trajectories, as for k1 subtracted from the reward.
    - "k2": `w_t (log pi(a_t|s_t) - log pi_ref(a_t|s_t))^2 / 2`, weight detached: the
      expected gradient of "step" from the action alone, for distributions without a known KL.

    `weights` corrects for updates on the same batch, whose states are those of the old policy:

    - "trajectory": by `W_t`. Exact in expectation; its variance grows with the length.
    - "step": each action has only its own ratio, as in PPO. "sequence" then has the value `KL_t`
      and the gradient of `KL_t + w_t sum_{s>t} KL_s` (sum detached), approximate off-policy.

    `sampler_weights="truncated"`, for actions that another engine has drawn, weights the loss and
    `kl` by min(pi_old / pi_sampler, `cap`), detached: the ratio is that of all actions up to a step
    with weights="trajectory", else that of the step. A batch whose effective sample size (of
    weights without a cap) is under a tenth does not move the controller. See `rescore`.

    You may rely on: the reference gets no gradient, is not among `parameters()`, and is in
    `state_dict`; `forward` never moves the controller; padding, NaN too, changes neither value nor
    gradient; a coefficient of 0 adds nothing, not even an infinite KL. You may not rely on
    `loss_kl` being the KL for "k2": `kl` is. With agents, `a_t` is their joint action, and every
    number is divided by their number. Rows that begin or end inside a trajectory count as whole
    ones. Leave out frames of a random policy where log-probs are read. `loss` keeps its target
    networks and its `loss_mask_key`. Do not deep-copy the two losses; build new ones.

    Keys:
        reads the actor's in_keys; "action" and "action_log_prob" unless `gradient` and `weights`
        are "step"; "sampler_log_prob" for `sampler_weights`; ("next", "done") for "sequence" and
        "trajectory"; the mask ("collector", "mask"), or `loss_mask_key`; ("next", "kl_coeff"), the
        sign of a penalized reward.
        reads, if the stack or ResponseKLTransform of the FrozenActor `reference` recorded it there,
        ("next", "ref_log_prob"): "k2" then makes no pass of the reference, unless that has moved
        since it scored a batch in this process. An older batch means the weights that it had then.
        The other gradients need distributions: they make one in each call, which holds less than
        what would be kept.
        writes, without batch size, "loss_kl"; "kl", nats per step, detached: exact, or for "k2" the
        weighted k1, which may be negative; "kl_coeff", reward per nat; what `loss` writes.

    State: `actor_network_params`, `reference`, `loss`, `controller` and its `feed`.

    Args:
        actor: the policy, a probabilistic actor; it records its log-prob if that is read.
        controller: a KLController, or a float for a constant coefficient; reward per nat.
        gradient, weights: see above; by default `weights` is "trajectory" for "sequence", else
            "step".
        reference: as for KLConstrainedTransform, or its FrozenActor; by default a copy of `actor`.
        loss: an actor loss to add to; its outputs are returned too. Built from the same `actor`, it
            gets the distribution of the penalty's pass: add up all losses before `backward`.
        sampler_weights, cap: None or "truncated", and the largest weight, at least 1; see above.
        reduction: over the valid steps: "mean", "sum" or "none", shape (*B), 0 on padding. Where
            ranks of DDP have batches of unequal size, take "sum" and divide by the steps of all.
        time_dim: the last batch dimension, if it is time and the batch does not name it "time".
        functional: as for TorchRL's losses: False uses `actor` itself, whose weights are then under
            `actor_network`. A model of `fully_shard` needs it.

    Raises:
        ValueError: if an option is unknown or "k1", actions are drawn one after another, time is
            missing, `loss` writes an entry of the same name, a model of `fully_shard` is made
            functional, or a log-prob or KL is not finite.
        RuntimeError: if the reward was penalized before, steps of trajectories are shuffled, or a
            recurrent state is not known.

    Reference:
        Y. Tang, R. Munos, "On a few pitfalls in KL divergence gradient estimation for RL" (2025).

    Example:
        >>> from torchrl_kl import KLPenaltyLoss
        >>> from torchrl_kl.language import GPT, CausalLMActor
        >>> from torchrl_kl.envs import DigitLanguageEnv
        >>> actor = CausalLMActor(GPT(vocab_size=11, block_size=8))
        >>> batch = actor(DigitLanguageEnv(batch_size=(5,)).reset())
        >>> loss = KLPenaltyLoss(actor, 0.1)(batch)["loss_kl"]
        >>> round(loss.item(), 6)  # the policy still is the reference
        0.0
    """

    @dataclass
    class _AcceptedKeys(LossModule._AcceptedKeys):
        """Names of entries; `done`, `kl_coeff` and `reward` are under "next"."""

        action: NestedKey = "action"
        sample_log_prob: NestedKey = "action_log_prob"
        sampler_log_prob: NestedKey = "sampler_log_prob"
        done: NestedKey = "done"
        kl_coeff: NestedKey = "kl_coeff"
        reward: NestedKey = "reward"
        advantage: NestedKey = "advantage"

    default_keys = _AcceptedKeys
    tensor_keys: _AcceptedKeys
    actor_network: ProbabilisticTensorDictSequential
    actor_network_params: TensorDictParams
    target_actor_network_params: TensorDictParams
    loss: Any  # a LossModule, or None

    def __init__(
        self,
        actor: nn.Module,
        controller: KLController | float,
        *,
        gradient: Gradient = "step",
        weights: Weights | None = None,
        reference: nn.Module | Switch | None = None,
        loss: LossModule | None = None,
        sampler_weights: SamplerWeights | None = None,
        cap: float = 2.0,
        reduction: Reduction = "mean",
        time_dim: int | None = None,
        functional: bool = True,
    ):
        weights = weights or ("trajectory" if gradient == "sequence" else "step")
        check_options(gradient, weights, reduction)
        check_sampler_weights(sampler_weights, cap)
        if loss is not None and not isinstance(loss, LossModule):
            raise TypeError(f"`loss` must be a LossModule or None, got {type(loss).__name__}.")
        if functional and isinstance(actor, nn.Module) and sharded_parts(actor):
            raise ValueError(
                "`functional` must be False for a model of `fully_shard`, which replaces its "
                "weights in each pass, got True: pass False here and to the `loss`."
            )
        self._functional = functional
        super().__init__()
        self.reference = as_reference(actor, reference)
        if self.reference is not reference:  # no stack has recorded its states
            self.reference.name_states("loss_ref_log_prob")
        actions = self.reference.action_keys
        if len(actions) > 1:  # drawn in turn, the parts have no joint distribution
            dist_module_of(actor)
        policy = cast(ProbabilisticTensorDictSequential, actor)
        if functional:
            self.convert_to_functional(policy, "actor_network")
        else:
            self.actor_network = policy
        self.controller, self.feed = as_controller(controller), ControllerFeed()
        self.loss = loss
        self.gradient, self.weights = gradient, weights
        self.sampler_weights, self.cap = sampler_weights, cap
        self.reduction, self.time_dim = reduction, time_dim
        self._reads_trajectories = gradient == "sequence" or weights == "trajectory"
        self._reads_actions = self._reads_trajectories or gradient == "k2" or bool(sampler_weights)
        recorded = self.reference.recorded
        super().set_keys(
            action=actions[0] if len(actions) == 1 else actions,
            sample_log_prob=recorded.key,
            sampler_log_prob=recorded.sibling("sampler_log_prob"),
        )

    def set_keys(self, **kwargs: Any) -> None:
        """Names entries of this loss, of `loss`, or of both, as a trainer does."""
        own = {field.name for field in fields(self.tensor_keys)}
        others = set() if self.loss is None else {f.name for f in fields(self.loss.tensor_keys)}
        # A name that neither has is refused by the first call.
        super().set_keys(**{n: key for n, key in kwargs.items() if n in own or n not in others})
        if self.loss is not None:
            self.loss.set_keys(**{n: key for n, key in kwargs.items() if n in others})

    @property
    def functional(self) -> bool:
        """Whether the weights of the policy are put into it at each call."""
        return self._functional

    @property
    def in_keys(self) -> list[NestedKey]:
        """What `forward` reads, in the order of its positional arguments."""
        keys: list[Any] = [*self.actor_network.in_keys, *LogProbKeys(self.tensor_keys.action).keys]
        keys += LogProbKeys(self.tensor_keys.sample_log_prob).keys if self._reads_actions else []
        keys += [self.tensor_keys.sampler_log_prob] if self.sampler_weights else []
        keys += [("next", self.tensor_keys.done)] if self._reads_trajectories else []
        keys += [] if self.loss is None else self.loss.in_keys  # which may be the same
        return list(dict.fromkeys(unravel_key(key) for key in keys))

    @property
    def out_keys(self) -> list[NestedKey]:
        """What `forward` writes."""
        return ["loss_kl", "kl", "kl_coeff", *([] if self.loss is None else self.loss.out_keys)]

    @property
    def _named_keys(self) -> ResolvedKeys:
        """The keys of what says which steps count."""
        keys = self.tensor_keys
        return KLKeys(log_prob=keys.sample_log_prob, done=keys.done).resolve()

    @property
    def critic_network(self) -> nn.Module:
        """The critic of `loss`, from which TorchRL's trainers make their GAE."""
        return self.loss.critic_network

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ):
        """The policy's parameters (and those of `loss`), never the reference's."""
        frozen = {id(parameter) for parameter in self.reference.parameters()}
        # LossModule has no `remove_duplicate`, and leaves out names that are not here.
        for name, parameter in nn.Module.named_parameters(self, prefix, recurse, remove_duplicate):
            if id(parameter) not in frozen:
                yield name, parameter

    def _forward_value_estimator_keys(self, **_) -> None:
        """There is no value estimator."""

    @dispatch()
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """The loss of a batch (*B), to which nothing is written."""
        penalizes = self._penalizes(tensordict)
        terms = self._terms(tensordict, penalizes)
        count = terms.steps.count
        # A copy, since autograd keeps it until `backward`.
        coeff = self.controller.coeff.to(terms.value, copy=True)
        loss_kl = coeff * terms.value
        if self.reduction != "none":
            loss_kl = loss_kl.sum() / (count if self.reduction == "mean" else 1)
        kl = terms.kl.sum() / count
        out = TensorDict(loss_kl=loss_kl, kl=kl, kl_coeff=coeff.detach().clone())
        if self.loss is None:
            return out
        with terms.steps.made.given_to(self.loss):
            others = self.loss(tensordict)
        if taken := sorted(set(out.keys()) & set(others.keys())):
            raise ValueError(
                f"`loss` writes {taken} too, which KLPenaltyLoss would overwrite: call the two "
                "losses one after the other."
            )
        return TensorDict({**dict(others.items()), **dict(out.items())})

    @uncompiled  # it branches on numbers; all that follows can then be one graph
    def _penalizes(self, tensordict: TensorDictBase) -> bool:
        """Whether the coefficient is above 0; RuntimeError if the reward was penalized too."""
        penalizes = self.controller.coeff.item() > 0
        if penalizes:
            refuse_penalized(tensordict, self.tensor_keys.kl_coeff)
        return penalizes

    @torch.no_grad()
    def update_controller(self, tensordict: TensorDictBase) -> float:
        """Updates the controller, once, with the KL measured on a batch; returns the coefficient.

        Call it once per batch, before the updates on it: the KL is then that of the policy that
        acted. It is the `kl` of `forward` in eval mode; for "k2" from the recorded log-probs, with
        no pass of the policy; and where those of the reference are recorded, k1 with no pass at
        all, unless no actions are read. It is that of each step for a controller of steps; for
        others summed over the trajectories of (*R, T) that are now complete, of which earlier
        batches may have had the beginning; RuntimeError without a time dimension or if steps are
        shuffled. A controller plans from ("next", "reward"), the task reward; or, in its unit, from
        an "advantage" that is the same at all steps of a trajectory, as GRPO's.
        """
        reward = log_ratio = None
        with evaluating(self.actor_network):
            penalizes = self.controller.coeff.item() > 0
            terms = self._terms(tensordict, penalizes, acted=True)
            steps = terms.steps
            counts = terms.share >= FEWEST
            if self.controller.reads_rewards and not self.feed.frozen and counts:
                reward, log_ratio = self._rewards(steps)
        if reward is None:  # other ranks may have some
            self.feed.plan_from(self.controller)
        reading = self.feed.read(
            self.controller,
            tensordict,
            terms.kl.unsqueeze(-1),
            steps.mask,
            keys=self._named_keys,
            time_dim=self.time_dim,
            observed=self.actor_network.in_keys,
            state_lengths=as_kl_actor(self.actor_network).state_lengths,
            reward=reward,
            log_ratio=log_ratio,
        )
        values = reading.values if counts else None
        if values is not None and self.controller.per == "step":  # the mean over those who act
            values = values * (len(values) / steps.count)
        self.feed.learn(self.controller, reading._replace(values=values))
        return self.controller.coeff.item()

    def _rewards(self, steps: LossSteps) -> tuple[Tensor | None, Tensor | None]:
        """Rewards to plan from, and log-ratios of actions to the reference, (*B, 1) each."""
        key, planning = unravel_key(("next", self.tensor_keys.reward)), self.controller.planning
        fix = "the coefficient is planned from it; name it with `set_keys(reward=...)`."
        reward, shape = self._outcomes(steps), (*steps.data.batch_size, 1)
        if reward is None and (planning or steps.data.get(key, None) is not None):
            reward = get_required(steps.data, key, fix)
        if reward is not None and reward.shape != shape:
            got = f"got {tuple(reward.shape)}: use a controller that does not plan"
            raise ValueError(f"a reward that is planned from must have shape {shape}, {got}.")
        if not planning:  # it then needs no log-ratios
            return reward, None
        log_ratio = self._recorded(steps) - self._ref_log_prob(steps)
        return reward, log_ratio.unsqueeze(-1)

    def _outcomes(self, steps: LossSteps) -> Tensor | None:
        """The advantage of each trajectory at the last step that counts, if it has only one."""
        data, shape = steps.data, (*steps.data.batch_size, 1)
        advantage = data.get(self.tensor_keys.advantage, None)
        in_time = find_time_dim(data, self.time_dim) is not None
        if advantage is None or not in_time or advantage.shape != shape:
            return None
        flags, values = self._flags(steps), widened(advantage.squeeze(-1))

        def from_here(flag: Tensor) -> Tensor:  # the sum over a step and those after it
            return flag.to(values) + sum_after(flag.to(values), flags.last)

        is_last = flags.counts & (from_here(flags.counts) == 1)
        outcomes = torch.where(is_last, values, 0.0)
        if (from_here(outcomes) != values)[flags.counts].any():
            return None
        ended = from_here(flags.ends) > 0  # the end itself need not count
        return torch.where(ended, outcomes, 0.0).unsqueeze(-1)

    def _flags(self, steps: LossSteps) -> batches.Flags:
        """The flags of all agents together."""
        shape = (*steps.data.batch_size, 1)
        return batches.flags(steps.data, self._named_keys, shape, steps.mask)

    def _terms(self, tensordict: TensorDictBase, penalizes: bool, *, acted: bool = False) -> Terms:
        """What a batch (*B) adds.

        `penalizes`: whether the coefficient is above 0. `acted`: whether the policy is the one that
        acted, whose log-probs are those recorded.
        """
        steps, share = self._steps(tensordict), 1.0
        numbers: dict[Any, Tensor] = {}
        if self._reads_actions:
            value, kl, numbers, share = self._weighted(steps, acted)
        else:
            value = kl = steps.summed(self._log_prob_and_kl(steps)[1])
        numbers |= {"kl": kl, "loss_kl": value}
        if not penalizes:  # only measures, also where the KL is infinite
            value = torch.zeros_like(kl).requires_grad_()
            numbers |= {"kl": kl.masked_fill(kl == torch.inf, 0.0), "loss_kl": value}
        check_finite(type(self).__name__, numbers, steps.mask)
        # Both are sums over the agents.
        agents = LogProbKeys(self.tensor_keys.action).batch_size(tensordict)
        n_agents = agents[tensordict.batch_dims :].numel()
        return Terms(steps, value / n_agents, kl.detach() / n_agents, share)

    def _weighted(
        self, steps: LossSteps, acted: bool
    ) -> tuple[Tensor, Tensor, dict[Any, Tensor], float]:
        """`_terms` where actions are read; log-probs that must be finite, by name; the share."""
        recorded, share = self._recorded(steps), 1.0
        ends = self._ends(steps) if self._reads_trajectories else None
        if self.gradient == "k2" or (acted and self._recorded_ref(steps) is not None):
            log_prob = recorded if acted else steps.log_prob_of(steps.made.dist)
            ref_log_prob = self._ref_log_prob(steps)
            ratio = (log_prob - recorded).exp()
            value = ratio.detach() * kl_k2(log_prob, ref_log_prob)
            kl = ratio * kl_k1(log_prob, ref_log_prob)
        else:
            parts, kl = self._log_prob_and_kl(steps)
            log_prob, kl = steps.summed(*parts), steps.summed(kl)
            value = kl
        log_ratio = log_prob - recorded
        if ends is not None and self.weights == "step":
            # The second term is 0 in value and has the gradient of the ratio.
            ratio = log_ratio.exp()
            value = value + (ratio - ratio.detach()) * sum_after(kl.detach(), ends)
        elif ends is not None:
            # W_t, the product of the ratios before. On padding it could overflow: inf * 0 is NaN.
            weight = steps.summed(sum_before(log_ratio, ends)).exp()
            # The gradient of the probability of getting to a step makes "sequence" exact.
            value = (weight if self.gradient == "sequence" else weight.detach()) * value
            kl = weight * kl
        name = LogProbKeys(self.tensor_keys.sample_log_prob).name
        numbers: dict[Any, Tensor] = {name: recorded, "log_prob": log_prob}
        if self.sampler_weights is not None:
            key = self.tensor_keys.sampler_log_prob
            numbers[key] = steps.summed(get_required(steps.data, key, _NO_SAMPLER).detach())
            ends = ends if self.weights == "trajectory" else None
            log_ratio = recorded - numbers[key]
            weight, share = sampler_weights(log_ratio, self.cap, ends, steps.mask)
            value, kl = weight * value, weight * kl
        return value, kl, numbers, share

    def _log_prob_and_kl(self, steps: LossSteps) -> tuple[list[Tensor], Tensor]:
        """The log-prob of the actions by parts, if it is read next, and the KL."""
        pair = (steps.made.dist, steps.reference)
        mask = steps.mask_for(pair[0].batch_shape)
        # A loss reads it of whole distributions itself; of tiles, all is computed together.
        reads = self.loss is not None and isinstance(pair[0], TiledCategorical)
        if not (self._reads_actions or reads):
            return [], kl_exact(*pair, mask=mask)
        return log_prob_and_kl(*pair, steps.data, steps.action, mask)

    def _recorded(self, steps: LossSteps) -> Tensor:
        """The recorded log-prob of the actions, (*B)."""
        refuse_own_log_prob(self.actor_network)
        keys = LogProbKeys(self.tensor_keys.sample_log_prob).keys
        return steps.summed(*(get_required(steps.data, k, _NO_LOG_PROB).detach() for k in keys))

    def _recorded_ref(self, steps: LossSteps) -> Tensor | None:
        """What the stack of the reference recorded of the actions, if it holds for its weights."""
        key = None if self.reference.moved else self.reference.ref_log_prob_key
        return None if key is None else steps.data.get(("next", *as_tuple(key)), None)

    def _ref_log_prob(self, steps: LossSteps) -> Tensor:
        """The log-prob of the actions under the reference, (*B)."""
        recorded = self._recorded_ref(steps)
        if recorded is None:
            return steps.log_prob_of(steps.reference)
        return steps.summed(recorded.detach())

    def _ends(self, steps: LossSteps) -> Tensor:
        """True at the last steps of trajectories, (*B)."""
        flags = self._flags(steps)
        states = batches.read_states(steps.data, self.actor_network.in_keys)
        batches.require_order(states, flags.may_differ)
        return flags.last

    def _steps(self, tensordict: TensorDictBase) -> LossSteps:
        key = batches.MASK_KEY if self.loss_mask_key == "auto" else self.loss_mask_key
        acts = batches.counted(tensordict, self._named_keys, mask_key=key)
        given = tensordict
        if acts is not None:
            read = [*self.in_keys, *self.reference.own_state_keys]
            tensordict = finite_padding(tensordict, acts, read)
        timed = find_time_dim(tensordict, self.time_dim) is not None
        if self._reads_trajectories and not timed:
            raise ValueError(
                f"trajectories need time, but a batch of shape {tuple(tensordict.batch_size)} has "
                'no time dimension: name the last one "time", or pass `time_dim`.'
            )
        network = self.actor_network
        inputs = scored_inputs(network, tensordict)

        def find_pass() -> Pass:
            weights: Any = nullcontext()
            if self.functional:
                weights = self.actor_network_params.to_module(network, preserve_module_state=False)
            # TorchRL runs losses in recurrent mode, which takes shuffled steps for one trajectory.
            with weights, set_recurrent_mode(timed):
                return Pass(network, given, inputs)

        def find_reference() -> Distribution:
            with torch.no_grad():  # a shared reference may receive gradients elsewhere
                return self.reference.get_dist(tensordict, timed=timed)

        return LossSteps(find_pass, find_reference, tensordict, self.tensor_keys.action, acts)


_NO_LOG_PROB = RECORD_LOG_PROB.replace("KLKeys(log_prob=", "set_keys(sample_log_prob=")
_NO_SAMPLER = "`rescore` writes it, and `set_keys(sampler_log_prob=...)` names it."


def check_options(gradient: str, weights: str, reduction: str) -> None:
    """ValueError for an unknown option or "k1"."""
    if gradient == "k1":
        raise ValueError(
            '`gradient` must not be "k1": as a loss its expected gradient is zero. Subtract k1 '
            'from the reward (KLConstrainedTransform), or use "sequence", the same in expectation.'
        )
    options = {"gradient": gradient, "weights": weights, "reduction": reduction}
    for (name, value), choices in zip(options.items(), (Gradient, Weights, Reduction), strict=True):
        if value not in get_args(choices):
            raise ValueError(f"`{name}` must be one of {get_args(choices)}, got {value!r}.")


def mask_of(acts: Tensor | None, batch_size: torch.Size, shape: torch.Size) -> Tensor | None:
    """True where values of a `shape` (*B, ...) count, of that shape; `acts`: (*B, *A)."""
    if acts is not None and shape[: acts.ndim] != acts.shape:  # they are of all agents together
        acts = batches.of_values(acts, (*batch_size, 1))
    return None if acts is None else expand_right(acts, shape)


def finite_padding(data: TensorDictBase, acts: Tensor, keys: list[NestedKey]) -> TensorDictBase:
    """A shallow copy with 0 for NaN and inf on padding; `acts`: (*B, *A)."""
    data = data.copy()  # there, NaN times a gradient of 0 would be NaN
    for key in batches.leaf_keys(data, keys):
        value = data.get(key, None)
        if is_floating(value):
            valid = mask_of(acts, data.batch_size, value.shape) | value.isfinite()
            data.set(key, torch.where(valid, value, 0.0))
    return data


def refuse_penalized(tensordict: TensorDictBase, kl_coeff: NestedKey) -> None:
    """RuntimeError if a reward of the batch was penalized for its KL."""
    name = unravel_key(("next", kl_coeff))[-1]
    # In every nested tensordict: agents may have separate rewards.
    for key in tensordict.keys(True, True):
        if key[0] == "next" and key[-1] == name and bool((tensordict.get(key) != 0).any()):
            raise RuntimeError(
                f"the batch has {key!r} other than 0: its KL would be penalized again. Give the "
                "transform the coefficient 0, or, if both are meant, drop the entry."
            )
