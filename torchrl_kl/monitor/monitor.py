"""Watches a KL-controlled run batch by batch, and says what is wrong and what to do about it."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, cast

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from torchrl_kl import _tensordict as td
from torchrl_kl._feeding import kept_steps, sum_trajectories
from torchrl_kl._tensordict import MASK_KEY, KLKeys, as_keys, find_done, find_time_dim, get_required
from torchrl_kl.actors.frozen import FrozenActor
from torchrl_kl.actors.reading import read_keys
from torchrl_kl.actors.responses import SAMPLER_LOG_PROB, EndTokens, has_texts, read_steps
from torchrl_kl.controllers.rules import KLController
from torchrl_kl.controllers.statistics import KLStatistics
from torchrl_kl.controllers.trajectories import OpenTrajectories
from torchrl_kl.monitor.diagnosis import Finding, PooledEvidence
from torchrl_kl.monitor.messages import (
    ASK_ACTOR,
    CONDITIONS,
    NOISE,
    OTHER_POLICY,
    ConditionCount,
    KLMessage,
    advice,
    bounds_reached,
)
from torchrl_kl.monitor.sampler_check import counted_steps, default_tolerance
from torchrl_kl.monitor.text_check import TextCheck
from torchrl_kl.monitor.texts import per_token

_BEYOND_CHANCE = math.log(1e6)  # nats: once in a million batches at most
_ERRORS = 4  # standard errors that a mean KL must be from the target
_ROUNDING = 1e-6  # nats per step: the KL of a policy that is still its reference

Looks = dict[str, Finding | None]  # of what was looked for: None where it was not found


@dataclass
class _State:
    # Coefficients before the batches in the window and with each of them, once they are planned.
    coeffs: list[float]
    n_batches: int = 0
    # Of each batch in the window: count, sum and sum of squares of the KL; sum of k1.
    pools: list[list[float]] = field(default_factory=list)
    k1_sums: list[float] = field(default_factory=list)
    evidence: PooledEvidence = field(default_factory=PooledEvidence)
    texts: list[int] = field(default_factory=lambda: [0] * 6)  # see `TextCheck.look`
    # Of each condition: batches and episodes in which it held; how often in a row it then did not.
    conditions: dict[str, list[int]] = field(
        default_factory=lambda: {name: [0, 0, 0] for name in CONDITIONS}
    )


class KLMonitor:
    """Says once per episode what is wrong with a KL-controlled run, and what to do about it.

    Call it on every batch after the stack has run and before the policy is updated. It changes
    neither the batch nor the controller. The conditions:

    - "kl_above", "kl_below": the mean KL of the last `window` batches, pooled over trajectories
      (over steps with `per="step"`), is above 2 times or below 0.5 times the controller's target,
      and 4 standard errors away from the target where it is of more than one value.
    - "coeff_at_max", "coeff_at_min": the coefficient is at a bound of the controller.
    - "kl_not_finite": some steps have an infinite or NaN KL. They are left out of all means, as
      those that a stack with `on_invalid="mask"` has left out; no mean k1 without them is judged.
    - "negative_noise": the mean k1 is negative, as a sample mean near the reference can be.
    - "sampler_disagrees": the recorded log-probs are not the actor's, or the actions were not drawn
      from it. For categorical actions, the message names the cause where it can be told.
    - "first_token_zero", "tokens_cut", "retokenised", for responses of a language model: their
      first log-prob is recorded as 0; tokens that were drawn are missing in them; recorded
      log-probs belong to other tokens.

    A batch may be one of TorchRL's LLM API (before or after ResponseKLTransform) or its form that
    `as_steps` makes. Then `actor` is `CausalLMActor(wrapper.model, temperature=...)`, with the
    temperature of the sampler. Of the responses of such batches, the KL is looked at where it is
    measured; with `per="step"` it is divided by the mean number of tokens of the batch.

    A number after "+-" is a standard error of independent steps (trajectories); of agents with own
    KLs, each has its own. An episode ends when the monitor looked for its condition `window` times
    in a row in vain.

    A trajectory goes on in the next batch where that begins in the state in which it was left. With
    `actor`, what the actor reads is that state; without, all entries of "next" that are at the root
    too, but for values under the names of TorchRL. Call the monitor before a learner adds others.

    With `actor`, the log-probs are recomputed in every `check_every`-th batch and in each one with
    a negative mean k1. Evidence on the actions is pooled over every `check_every`-th batch; over
    all batches if the policy records the parameters of its distribution.

    You may rely on: while the actions are drawn from the policy, each test of the samples reports
    "sampler_disagrees" in a batch with a probability of at most 1e-6, however small or correlated
    the batch. Half of that is for the pooled evidence, wrong in at most one of 2 million runs,
    however long. You may not rely on it for frames of a random policy.

    State: `state_dict`, plain numbers.

    Keys:
        reads ("next", keys.kl_estimate) or else ("next", keys.kl), for the target; ("next",
        keys.kl) as k1; both log-probs, if they are there, for steps that were left out; with
        `actor` its in_keys and the action; done flags, ("collector", "mask") and "traj_ids". Of
        responses: what `as_steps` reads and writes, with the log-probs of their sampler.

    Args:
        controller: the controller of the run, with its target and its bounds.
        actor: the policy that is trained.
        reference: `stack.reference`: the exact KL where mean k1 is negative, if its state is known.
        window: how many batches the mean KL is taken over.
        check_every: the log-probs are recomputed in one of so many batches.
        tolerance: nats a recomputed log-prob may differ by. None: 1e-3, or 0.05 in half precision.
        keys, time_dim: as given to the stack.
        pad_token, eos_token: of a language model, as for `as_steps`; by default those of its
            configuration.

    Raises:
        TypeError: if `controller` or `reference` has another type, or `actor` no distribution.
        ValueError: if a number is out of its range or `reference` comes without `actor`.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_kl import ExponentialKLController, KLMonitor
        >>> controller = ExponentialKLController(1.0, target=0.05, per="step")
        >>> monitor = KLMonitor(controller, window=1)
        >>> batch = TensorDict({("next", "kl"): torch.full((8, 1), 0.2)}, batch_size=8)
        >>> str(*monitor(batch))[:82]
        'KL is 0.2 +- 0 nats per step over the last 1 batches (8 steps), 4 times the target'
        >>> monitor.counts["kl_above"]
        ConditionCount(batches=1, episodes=1)
    """

    def __init__(
        self,
        controller: KLController,
        *,
        actor: nn.Module | None = None,
        reference: FrozenActor | None = None,
        window: int = 10,
        check_every: int = 10,
        tolerance: float | None = None,
        keys: KLKeys = KLKeys(),  # noqa: B008, it is frozen
        time_dim: int | None = None,
        pad_token: int | None = None,
        eos_token: EndTokens = None,
    ):
        if not isinstance(controller, KLController):
            got = f"got {type(controller).__name__}: use stack.controller."
            raise TypeError(f"`controller` must be a KLController, {got}")
        if not isinstance(reference, FrozenActor | None):
            got = f"got {type(reference).__name__}: use `stack.reference`."
            raise TypeError(f"`reference` must be a FrozenActor, {got}")
        if reference is not None and actor is None:
            raise ValueError("`reference` needs `actor`: the exact KL is that of both.")
        for name, value in (("window", window), ("check_every", check_every)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"`{name}` must be an int of at least 1, got {value!r}.")
        if tolerance is not None and not 0 < tolerance < math.inf:
            raise ValueError(f"`tolerance` must be finite and above 0, got {tolerance}.")
        self.controller, self.window, self.check_every = controller, window, check_every
        self.time_dim, self._needs_estimate = time_dim, as_keys(keys).kl_estimate is not None
        self._check, log_prob_key = None, "action_log_prob"
        if actor is not None:
            options = (keys.log_prob, tolerance or default_tolerance(actor), time_dim)
            self._check = TextCheck(actor, reference, *options, pad_token, eos_token)
            pad_token, eos_token = self._check.pad_token, self._check.eos_token
            log_prob_key = self._check.recorded.key
        self.keys = keys.resolve(log_prob_key)
        # A critic may have written its values, which belong to no state, before the monitor looks.
        self._observed = None if actor is None else read_keys(actor)
        self._tokens = {"pad_token": pad_token, "eos_token": eos_token}
        self._state = _State([] if controller.planning else [controller.coeff.item()])
        self._open_trajectories = OpenTrajectories()

    def __call__(self, batch: TensorDictBase) -> list[KLMessage]:
        """Looks at a batch (*B) with "next"; returns the conditions that began, often none.

        Raises:
            KeyError: if the KL, or what the actor reads, is not in the batch.
            RuntimeError: if trajectories need a time dimension.
            ValueError: if the steps of trajectories do not follow one another.
        """
        before = copy.deepcopy(self._state), self._open_trajectories.copy()
        try:
            looks = self._look_responses(batch) if has_texts(batch) else self._look_steps(batch)
        except BaseException:  # the batch may be mended and passed again
            self._state, self._open_trajectories = before
            raise
        self._state.n_batches += 1
        return self._begun(looks | bounds_reached(self.controller))

    @property
    def counts(self) -> dict[str, ConditionCount]:
        """For each condition, in how many batches it held and in how many episodes."""
        return {name: ConditionCount(*it[:2]) for name, it in self._state.conditions.items()}

    def state_dict(self) -> dict[str, Any]:
        """The window, the evidence, the episodes, the counts and the sums of open trajectories."""
        return asdict(self._state) | {"open_trajectories": self._open_trajectories.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continues where another monitor was; a shorter window keeps the latest batches.

        KeyError if the state is not that of a KLMonitor.
        """
        missing = sorted({part.name for part in fields(_State)} - set(state_dict))
        if missing:
            raise KeyError(f"`state_dict` lacks {missing}, got {sorted(state_dict)}.")
        # A copy: the lists in it are appended to.
        state = copy.deepcopy(dict(state_dict))
        self._open_trajectories = OpenTrajectories()
        if "open_trajectories" in state:
            self._open_trajectories.load_state_dict(state.pop("open_trajectories"))
        state["evidence"] = PooledEvidence(**state["evidence"])
        self._state = _State(**state)

    def _begun(self, looks: Looks) -> list[KLMessage]:
        """Counts what holds and returns what began; what was not looked for stays as it was."""
        begun = []
        for name, finding in looks.items():
            batches, episodes, absent = self._state.conditions[name]
            if finding is None:
                absent += 1
            else:
                # The first time, or after a whole window in which it was looked for in vain.
                if episodes == 0 or absent >= self.window:
                    begun.append(KLMessage(name, *finding))
                    episodes += 1
                batches, absent = batches + 1, 0
            self._state.conditions[name] = [batches, episodes, absent]
        return begun

    def _look_steps(self, batch: TensorDictBase) -> Looks:
        """Looks at a batch (*B) of steps."""
        texts = batch if SAMPLER_LOG_PROB in batch.keys() else None
        step = get_required(batch, "next", "pass a collector's batches, after the stack has run.")
        kl = cast(TensorDictBase, step).get(self.keys.kl, None)
        if kl is None and texts is not None:
            return self._look_samples(batch, torch.zeros(0), 0, texts)
        fix = "run the stack (or KLDivergenceTransform) first, or name it with "
        fix += "`keys=KLKeys(kl=...)`."
        # (*B, *F), nats; F is (1,), or more for agents.
        kl = get_required(cast(TensorDictBase, step), self.keys.kl, fix).detach()
        counting = self._counting(batch, kl)
        every = torch.ones_like(kl, dtype=torch.bool)
        counted = every if counting is None else td.expand_right(counting, kl.shape)
        looks = self._look_finite(kl, counted)
        if not math.isnan(self.controller.target):
            looks |= self._look_target(self._measured(batch, counted, counting))
        k1 = kl.double().where(counted, math.inf)[counted_steps(batch, kl)]  # inf: left out
        return looks | self._look_samples(batch, k1, k1.numel(), texts)

    def _look_responses(self, batch: TensorDictBase) -> Looks:
        """Looks at a batch (*B) of TorchRL's LLM API, whose KL is that of whole responses."""
        steps = read_steps(batch, **self._tokens)
        n_tokens = steps.get(MASK_KEY).sum(1)  # (N,)
        following = batch.get("next", None)
        kl = None if following is None else following.get(self.keys.kl, None)
        if kl is None:
            return self._look_samples(steps, torch.zeros(0), 0, steps)
        kl, log_prob = kl.detach().reshape(-1), steps.get("action_log_prob", None)
        counted = answered = n_tokens > 0
        if log_prob is not None:  # NaN in a response that the stack has left out
            left_out = (kl == 0).to(log_prob.device) & log_prob.isnan().any(1)
            steps, counted = cast(TensorDict, steps[~left_out]), counted & ~left_out
        n_tokens = n_tokens[counted]
        looks = self._look_finite(kl, counted, "responses")
        if not math.isnan(self.controller.target):
            measured = self._measured_entry(cast(TensorDictBase, following)).reshape(-1)[counted]
            if self.controller.per == "step":
                measured = per_token(measured, n_tokens)
            looks |= self._look_target(measured, "responses")
        k1 = kl.double().where(counted, math.inf)[answered]
        return looks | self._look_samples(batch, k1, int(n_tokens.sum()), steps, "response")

    def _look_finite(self, kl: Tensor, counted: Tensor, of: str = "steps") -> Looks:
        n_bad, n_steps = int((counted & ~kl.isfinite()).sum()), int(counted.sum())
        text = (
            f"The KL of {n_bad} of {n_steps} {of} is infinite or NaN. They are left out of the "
            "means here, and a controller refuses them. Look for actions that the reference gives "
            "probability 0 (a mask of only one of the two) and for NaN in the logits."
        )
        return {"kl_not_finite": (text, {"steps": n_bad, "count": n_steps}) if n_bad else None}

    def _look_target(self, measured: Tensor, of: str | None = None) -> Looks:
        """Looks at the KL in the controller's unit, (N,): of steps, trajectories, or `of`."""
        controller, pools, coeffs = self.controller, self._state.pools, self._state.coeffs
        target, unit, coeff = controller.target, controller.per, controller.coeff.item()
        pool = KLStatistics().add(measured[measured.isfinite()])
        pools.append([buffer.item() for buffer in pool.buffers()])
        coeffs += [] if controller.planning else [coeff]
        del pools[: -self.window], coeffs[: -self.window - 1]
        # Sums and counts add up: pooled like this, a batch weighs as much as it has values.
        for buffer, values in zip(pool.buffers(), zip(*pools, strict=True), strict=True):
            buffer.fill_(sum(values))
        if len(pools) < self.window or pool.count == 0:
            return {}
        of = of or ("trajectories" if unit == "trajectory" else "steps")
        mean, count = pool.mean, int(pool.count)
        error = pool.standard_error  # NaN of one value
        known = f" +- {error:.2g}" if count > 1 else ""
        figures = {"kl": mean, "standard_error": error, "count": count, "target": target}
        text = (
            f"KL is {mean:.3g}{known} nats per {unit} over the last {self.window} batches "
            f"({count} {of}), {mean / target:.2g} times "
            f"the target of {target:g}; the coefficient is {coeff:.3g}. "
        )
        # The standard errors keep out windows that pass the factor of 2 by chance.
        above = mean > 2 * target and not mean - _ERRORS * error <= target
        below = mean < 0.5 * target and not mean + _ERRORS * error >= target
        if_above, if_below = advice(controller, coeffs)
        return {
            "kl_above": (text + if_above, figures) if above else None,
            "kl_below": (text + if_below, figures) if below else None,
        }

    def _counting(self, batch: TensorDictBase, kl: Tensor) -> Tensor | None:
        """True where a step is not padding, nor left out by the stack, (*B); None: everywhere."""
        mask, kept = batch.get(MASK_KEY, None), kept_steps(batch, kl, self.keys)
        if kept is None or bool(kept.all()):
            return mask
        return kept if mask is None else kept & td.expand_right(mask, kept.shape)

    def _measured(self, batch: TensorDictBase, counted: Tensor, counting: Tensor | None) -> Tensor:
        """The KL in the controller's unit, (N,): of the steps, or of the finished trajectories."""
        step = cast(TensorDictBase, batch.get("next"))
        measured = self._measured_entry(step)
        if self.controller.per == "step":
            return measured[counted]
        if find_time_dim(batch, self.time_dim) is None:
            raise RuntimeError(
                "the target is in nats per trajectory, got a batch of shape "
                f"{tuple(batch.batch_size)} without a time dimension: name the last one 'time', "
                "pass `time_dim`, do not flatten the batch, or use per='step'."
            )
        # A trajectory that began in an earlier batch is summed from there on.
        done_key = find_done(step, self.keys.done, named=self.keys.done_named)
        args = (counting, done_key, self._open_trajectories)
        return sum_trajectories(batch, measured, *args, observed=self._observed).finished

    def _measured_entry(self, step: TensorDictBase) -> Tensor:
        key = self.keys.kl_estimate
        # A stack with the estimator k1 writes no estimate; one that the user names must be there.
        if not self._needs_estimate and step.get(key, None) is None:
            key = self.keys.kl
        return get_required(step, key, "name it with `keys=KLKeys(kl_estimate=...)`.").detach()

    def _look_samples(
        self,
        batch: TensorDictBase,
        k1: Tensor,
        n_steps: int,
        texts: TensorDictBase | None,
        of: str = "step",
    ) -> Looks:
        """Whether the samples can be the policy's; k1: of what counts in `n_steps` steps, (N,).

        `texts`: the steps of a batch of responses; `of`: what each k1 is of.
        """
        total, state = k1.nan_to_num(math.inf, math.inf).sum().item(), self._state
        state.k1_sums.append(total)
        del state.k1_sums[: -self.window]
        # The actor is evaluated in its turn, and where the samples look wrong.
        negative = total < -_ROUNDING * n_steps
        due = self._check is not None and state.n_batches % self.check_every == 0
        fault = exact_kl = None
        looks: Looks = {"negative_noise": None}
        if self._check is not None and texts is None:
            fault, exact_kl = self._check.report(batch, state.evidence, due=due, negative=negative)
        elif self._check is not None and (due or negative):
            # A batch that is checked only for its negative mean is not pooled.
            looks |= self._check.look(texts, state.evidence if due else None, state.texts)
            fault = looks["sampler_disagrees"]
        if fault is not None or negative or due:
            looks["sampler_disagrees"] = fault
        if fault is not None or not negative:
            return looks
        mean, count = k1.mean().item(), k1.numel()
        figures = {"kl": mean, "count": count}
        error = f" +- {k1.std().item() / math.sqrt(count):.2g}" if count > 1 else ""
        text = f"The mean k1 of this batch is {mean:.3g}{error} nats per {of} over {count} {of}s"
        if exact_kl is not None:
            figures["exact_kl"] = exact_kl = exact_kl / count  # of agents together, as k1 may be
            text += f" (the exact KL on the same states is {exact_kl:.3g})"
        # E[exp(-sum of k1)] = E_pi[product of pi_ref / pi] <= 1 on the policy's own actions, so
        # that a sum below -a has a probability of at most exp(-a).
        if max(-total, -sum(state.k1_sums)) >= _BEYOND_CHANCE:
            text += ". This occurs by chance in at most one of a million batches. "
            text += ASK_ACTOR if self._check is None else OTHER_POLICY
            looks["sampler_disagrees"] = text, figures
        else:
            looks["negative_noise"] = f"{text}. {NOISE}", figures
        return looks
