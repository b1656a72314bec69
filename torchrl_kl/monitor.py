"""Watches a KL-controlled run batch by batch, and says what is wrong and what to do about it."""

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase, is_tensor_collection
from torch import Tensor, nn

from torchrl_kl.actors import reading
from torchrl_kl.actors.log_probs import policy_log_prob
from torchrl_kl.batches import counted_values, find_time_dim
from torchrl_kl.controllers import KLController, KLStatistics
from torchrl_kl.feeding import ControllerFeed
from torchrl_kl.functional.numbers import check_count
from torchrl_kl.functional.sampler import FEWEST, effective_share
from torchrl_kl.keys import KLKeys, MissingKeyError, as_keys, get_required

_ERRORS = 4  # standard errors that a mean KL must be from the target
_ROUNDING = 1e-6  # nats per step: the KL of a policy that is still its reference

_OFF_TARGET = (
    "KL is {kl:.3g}{error} nats per {per} {span} ({count} {values}), {ratio:.2g} times the "
    "target of {target:g}; the coefficient was {coeff:.3g}. {advice}"
)
_MESSAGES = {
    "kl_far_above": _OFF_TARGET,
    "kl_above": _OFF_TARGET,
    "kl_below": _OFF_TARGET,
    "coeff_at_max": "The coefficient is at its upper bound, max_coeff = {coeff:g}: it cannot rise "
    "further. Raise `max_coeff`, or reduce the scale of the reward: the coefficient is in reward "
    "per nat.",
    "coeff_at_min": "The coefficient is at its lower bound, min_coeff = {coeff:g}: it cannot fall "
    "further. Lower the target, or `min_coeff` if the scale of the reward is small.",
    "kl_not_finite": "The KL of {steps} of {count} steps is infinite or NaN. Look for actions to "
    "which the reference gives probability 0 (a mask that only one of the two has) and for NaN in "
    "the logits.",
    "negative_noise": "The mean k1 of this batch is {kl:.3g}{error} nats per step over {count} "
    "steps. This is sampling noise and not a bug: k1 takes either sign and only its mean is the "
    'KL. Do not clamp it: pool more steps, or use estimator="k3" or "exact", which are never '
    "negative.",
    "sampler_disagrees": "The recorded log-probs differ from those that the actor gives the same "
    "actions by up to {largest_difference:.3g} nats, on {share:.1%} of {count} steps: the KL is "
    "that of another policy than the one that is trained. Give the sampler and the actor the same "
    "temperature, top-k, masks and weights; call the monitor before the update.",
    "sampler_far": "The sampler is {kl:.3g} +- {error:.2g} nats per {per} from the policy that is "
    "trained, and {count} samples are worth {share:.1%} of as many of its own: the measured KL is "
    "that of the sampler. Give both the same weights, temperature, top-k, top-p and min-p.",
}
CONDITIONS = tuple(_MESSAGES)
_FAR_ABOVE = (
    "Stop the run. If it has just begun, the policy should still be near its reference: look for "
    "dropout, for weights loaded after the stack was built, and for a sampler with another "
    "temperature or top-k. Otherwise policy updates are too large (learning rate, epochs)."
)
_ABOVE = (
    "The controller raises the coefficient until the KL comes down. If it does not, make the "
    "controller faster (a larger `gain` or `ki`, a smaller `horizon`) or policy updates smaller "
    "(learning rate, epochs)."
)
_BELOW = (
    "The controller lowers the coefficient until the KL comes up; in the first batches, this is "
    "normal. If the KL stays low, make the controller faster, or lower the target."
)
_NOT_UPDATED = (
    "The controller has not moved the coefficient in these batches. Lower `update_every`; check "
    "that trajectories reach `done` and that the stack is not frozen. Workers and a "
    "MultiAsyncCollector use a copy of the stack, which has another controller: use `kl_collector`."
)

# A condition, whether it holds, the numbers in its text, and what else that needs.
Finding = tuple[str, bool, dict[str, float], dict[str, Any]]


class KLMessage(str):
    """A condition that began to hold: a text that says what is wrong and what to do."""

    condition: str  # one of CONDITIONS
    figures: Mapping[str, float]  # the numbers in the text, by name; KL in nats


class ConditionCount(NamedTuple):
    """In how many batches a condition held, and in how many episodes."""

    batches: int
    episodes: int


@dataclass
class _State:
    coeffs: list[float]  # before the window and with each of its batches, once planned
    conditions: dict[str, list[int]]  # batches and episodes in which each held; batches since then
    n_batches: int = 0
    pools: list[list[float]] = field(default_factory=list)  # see KLStatistics; of each batch


class KLMonitor:
    """Says once per episode what is wrong with a KL-controlled run, and what to do about it.

    Call it on every batch after the stack has run and before the policy is updated. It changes
    neither the batch nor the controller. The conditions:

    - "kl_far_above": the mean KL of this batch alone, which may be the first, is above 10 times the
      controller's target, and 4 standard errors above it: stop the run. The error of n values is
      at least sqrt(2 target / n), that of k1 at the target.
    - "kl_above", "kl_below": the mean KL of the last `window` batches, pooled over trajectories
      (over steps with `per="step"`), is above 2 times or below 0.5 times the target, and 4 standard
      errors away from it if more than one value was pooled. Batches from which a controller plans
      its first coefficient are left out.
    - "coeff_at_max", "coeff_at_min": the coefficient is at a bound of the controller.
    - "kl_not_finite": some steps have an infinite or NaN KL. They are left out of all means.
    - "negative_noise": the mean k1 is negative, as a sample mean near the reference can be.
    - "sampler_disagrees": the recorded log-probs are not those that `actor` gives the actions.
    - "sampler_far": with a sampler's log-probs in the batch (see `rescore`), the effective sample
      size of its steps, or of its rows with `per="trajectory"`, is under a tenth.

    An episode ends when its condition did not hold in `window` batches in a row. With `actor`,
    log-probs are recomputed in the first batch of each `window`, and in each one with a negative
    mean k1; they may differ by 1e-3 nats, or 0.05 in half precision. Of a batch of TorchRL's LLM
    API, pass it `as_steps(batch, ...)`. State: `state_dict`, plain numbers and bytes.

    With several learners it sees the batches of its own rank, while the coefficient is of all.

    You may not rely on it to notice actions that were drawn from another distribution than the one
    whose log-probs are recorded.

    Keys:
        reads ("next", keys.kl), and ("next", keys.kl_estimate) for the target if it is there; done
        flags, ("collector", "mask") and "traj_ids"; with `actor` what it reads and records.

    Args:
        controller: the controller of the run, with its target and its bounds.
        actor: the policy that is trained.
        window: how many batches the mean KL is taken over.
        keys, time_dim: as given to the stack.

    Raises:
        TypeError, ValueError: if an argument has another type, or is out of its range.

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
        window: int = 10,
        keys: KLKeys | None = None,
        time_dim: int | None = None,
    ):
        if not isinstance(controller, KLController):
            got = f"got {type(controller).__name__}: use `stack.controller`."
            raise TypeError(f"`controller` must be a KLController, {got}")
        keys = as_keys(keys)
        self.controller, self.actor = controller, actor
        self.window, self.time_dim = check_count("window", window), time_dim
        self._needs_estimate = keys.kl_estimate is not None
        self._observed = None  # what shows that a trajectory goes on in the next batch
        if actor is None:
            self.keys = keys.resolve()
        else:
            reading.check_actor(actor)
            self.keys = keys.resolve(reading.find_log_prob_keys(actor))
            # A critic may have written its values, which belong to no state.
            self._observed = reading.read_keys(actor)
            half = torch.finfo(reading.weight_dtype(actor)).bits <= 16
            self._tolerance = 0.05 if half else 1e-3  # nats
        coeffs = [] if controller.planning else [controller.coeff.item()]
        self._state = _State(coeffs, {name: [0, 0, 0] for name in CONDITIONS})
        self._feed = ControllerFeed()  # which only sums up, and updates nothing

    def __call__(self, batch: TensorDictBase) -> list[KLMessage]:
        """Looks at a batch (*B) with "next"; returns the conditions that began, often none.

        KeyError if an entry is missing; ValueError for whole responses; RuntimeError if the target
        is per trajectory and the steps do not follow one another along time. Nothing has changed
        then.
        """
        if is_tensor_collection(batch.get("tokens", None)):
            raise ValueError(
                f"the monitor reads steps, got a batch of shape {tuple(batch.batch_size)} of whole "
                "responses, as TorchRL's LLM API has them: pass `as_steps(batch, pad_token=...)`, "
                "which takes their KL along."
            )
        fix = "run the stack before the monitor, or name the entry with `KLKeys(kl=...)`."
        step: Any = get_required(batch, "next", fix)
        k1 = get_required(step, self.keys.kl, fix).detach()  # (*B, *A, 1)
        counted = counted_values(batch, self.keys, k1)
        k1 = k1.double()[counted]  # (N,)
        coeffs = self._state.coeffs
        if not self.controller.planning:
            coeffs = [*coeffs, self.controller.coeff.item()][-self.window - 1 :]
        pools = self._state.pools
        opened = pool = None
        if not math.isnan(self.controller.target):
            # A stack with the estimator k1 writes no estimate; one that is named must be there.
            key = self.keys.kl_estimate
            key = key if self._needs_estimate or step.get(key, None) is not None else self.keys.kl
            measured = get_required(step, key, "name it with `KLKeys(kl_estimate=...)`.").detach()
            options: Any = {"time_dim": self.time_dim, "observed": self._observed}
            reading: Any = self._feed.read(
                self.controller, batch, measured, counted, keys=self.keys, **options
            )
            opened = reading.opened
            pool = KLStatistics().add(reading.values[reading.values.isfinite()])
            counts = KLStatistics() if reading.planning else pool
            pools = [*pools, [buffer.item() for buffer in counts.buffers()]][-self.window :]
        applied = step.get(self.keys.kl_coeff, None)  # an update may have followed
        coeff = self.controller.coeff if applied is None else applied.flatten()[-1]
        found = [*self._look_at_numbers(k1), *self._look_at_batch(pool, coeff.item())]
        found += [*self._look_at_window(pools, coeffs, coeff.item())]
        found += [*self._look_at_samples(batch, k1), *self._look_at_sampler(batch)]
        n_batches = self._state.n_batches + 1  # from here on the state changes
        self._state = _State(coeffs, self._state.conditions, n_batches, pools)
        if opened is not None:
            self._feed.trajectories.keep(opened)
        return self._count(found)

    @property
    def counts(self) -> dict[str, ConditionCount]:
        """For each condition, in how many batches it held and in how many episodes."""
        return {name: ConditionCount(*it[:2]) for name, it in self._state.conditions.items()}

    def state_dict(self) -> dict[str, Any]:
        """The window, the episodes and counts, and the sums of open trajectories."""
        return asdict(self._state) | {"trajectories": self._feed.trajectories.pack()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on where another monitor was; KeyError if the state is not that of a KLMonitor."""
        if missing := sorted(set(self.state_dict()) - set(state_dict)):
            raise MissingKeyError(f"`state_dict` lacks {missing}, got {sorted(state_dict)}.")
        state = copy.deepcopy(dict(state_dict))
        self._feed.trajectories.unpack(state.pop("trajectories"))
        self._state = _State(**state)

    def _count(self, found: list[Finding]) -> list[KLMessage]:
        """Counts what holds; returns what began. What was not looked for stays as it was."""
        begun = []
        for name, holds, figures, others in found:
            batches, episodes, absent = self._state.conditions[name]
            if not holds:
                self._state.conditions[name] = [batches, episodes, absent + 1]
                continue
            # The first time, or after a window in which it was looked for and not found.
            if episodes == 0 or absent >= self.window:
                begun.append(KLMessage(_MESSAGES[name].format(**figures, **others)))
                begun[-1].condition, begun[-1].figures = name, figures
                episodes += 1
            self._state.conditions[name] = [batches + 1, episodes, 0]
        return begun

    def _look_at_numbers(self, k1: Tensor) -> Iterator[Finding]:
        """The KL of the steps that count, (N,), may not be finite; the coefficient at a bound."""
        controller, coeff = self.controller, self.controller.coeff.item()
        n_bad = int((~k1.isfinite()).sum())
        yield "kl_not_finite", n_bad > 0, {"steps": n_bad, "count": k1.numel()}, {}
        if not controller.planning:  # the bounds are those of a planned coefficient
            # Without bounds they are 0 and inf.
            yield "coeff_at_max", coeff >= controller.max_coeff, {"coeff": coeff}, {}
            yield "coeff_at_min", 0 < coeff <= controller.min_coeff, {"coeff": coeff}, {}

    def _look_at_batch(self, pool: KLStatistics | None, applied: float) -> Iterator[Finding]:
        """Compares the mean KL of this batch alone with ten times the target."""
        if pool is None or pool.count == 0:
            return
        target = self.controller.target
        # Few values may lie close together by chance: at the target, k1 varies by this much. The
        # standard error of one value is NaN, which `max` passes over.
        error = max(math.sqrt(2 * target / int(pool.count)), pool.standard_error)
        far = pool.mean > 10 * target and pool.mean - _ERRORS * error > target
        figures, others = self._describe(pool, "in this batch", applied)
        yield "kl_far_above", far, figures, others | {"advice": _FAR_ABOVE}

    def _look_at_window(
        self, pools: list[list[float]], coeffs: list[float], applied: float
    ) -> Iterator[Finding]:
        """Compares the mean KL of a full window with the target."""
        controller, pool = self.controller, KLStatistics()
        # Sums and counts add up, so that a batch weighs as much as it has values.
        for buffer, values in zip(pool.buffers(), zip(*pools, strict=True), strict=False):
            buffer.fill_(sum(values))
        if len(pools) < self.window or pool.count == 0:
            return
        mean, error = pool.mean, pool.standard_error
        target, coeff = controller.target, controller.coeff.item()
        # The standard errors, NaN of one value, keep out windows that are off by chance.
        above = mean > 2 * target and not mean - _ERRORS * error <= target
        below = mean < 0.5 * target and not mean + _ERRORS * error >= target
        # A coefficient at a bound may have been updated and not have moved.
        at_bound = not controller.min_coeff < coeff < controller.max_coeff
        updated = not controller.planning and (len(set(coeffs)) > 1 or at_bound)
        advice = (_ABOVE if above else _BELOW) if updated else _NOT_UPDATED
        figures, others = self._describe(pool, f"over the last {self.window} batches", applied)
        yield "kl_above", above, figures, others | {"advice": advice}
        yield "kl_below", below, figures, others | {"advice": advice}

    def _describe(
        self, pool: KLStatistics, span: str, applied: float
    ) -> tuple[dict[str, float], dict[str, Any]]:
        """The figures of a message, and what else it says, of the pool of some batches."""
        target = self.controller.target
        per = self.controller.per
        mean = pool.mean
        error = pool.standard_error
        count = int(pool.count)
        figures = {"kl": mean, "standard_error": error, "count": count, "target": target}
        others = {
            "error": f" +- {error:.2g}" if count > 1 else "",
            "per": per,
            "span": span,
            "values": {"trajectory": "trajectories", "step": "steps"}[per],
            "ratio": mean / target,
            "coeff": applied,
        }
        return figures, others

    def _look_at_samples(self, batch: TensorDictBase, k1: Tensor) -> Iterator[Finding]:
        """Whether the policy can have drawn the samples; k1: of the steps that count, (N,)."""
        # The actor is evaluated once per window, and whenever the samples look wrong.
        negative = k1.nan_to_num(math.inf, math.inf).sum().item() < -_ROUNDING * k1.numel()
        differs, count = False, k1.numel()
        if self.actor is not None and (negative or self._state.n_batches % self.window == 0):
            differs, figures, others = self._unlike_actor(batch)
            yield "sampler_disagrees", differs, figures, others
        error = f" +- {k1.std().item() / math.sqrt(count):.2g}" if count > 1 else ""
        figures = {"kl": k1.mean().item(), "count": count}
        yield "negative_noise", negative and not differs, figures, {"error": error}

    def _look_at_sampler(self, batch: TensorDictBase) -> Iterator[Finding]:
        """Whether a sampler that is not the policy is too far from it."""
        recorded, per = self.keys.recorded, self.controller.per
        sampler = batch.get(recorded.sibling("sampler_log_prob"), None)
        if sampler is None:
            return
        ratios = (recorded.require(batch) - sampler).double()
        mask = counted_values(batch, self.keys, sampler)
        if per == "trajectory":
            ratios, mask = torch.where(mask, ratios, 0.0).sum(-1), mask.any(-1)
        ratios = ratios[mask]
        share, pool = effective_share(ratios), KLStatistics().add(-ratios[ratios.isfinite()])
        figures = {"kl": pool.mean, "error": pool.standard_error, "share": share}
        yield "sampler_far", not share >= FEWEST, figures, {"per": per, "count": ratios.numel()}

    @torch.no_grad()
    def _unlike_actor(self, batch: TensorDictBase) -> tuple[bool, dict[str, float], dict[str, Any]]:
        """Whether the recorded log-probs are not those that the actor gives the actions."""
        recorded = self.keys.recorded.require(batch).double()  # (*B, *A)
        timed = find_time_dim(batch, self.time_dim) is not None
        scored = policy_log_prob(self.actor, batch, timed)[0].double()
        gap = (recorded - scored).abs()
        gap = gap[counted_values(batch, self.keys, gap)]
        differs = ~(gap <= self._tolerance)  # NaN differs
        largest = gap.nan_to_num(math.inf, math.inf).max().item() if gap.numel() else 0.0
        figures = {"share": differs.double().mean().item(), "largest_difference": largest}
        return bool(differs.any()), figures, {"count": gap.numel()}
