"""Watches a KL-controlled run, batch by batch, and says in words what is wrong and what to do."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, cast

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from torch import Tensor, nn

from torchrl_kl._tensordict import MASK_KEY, beside, expand_right, find_time_dim
from torchrl_kl.actors.frozen import FrozenActor
from torchrl_kl.controllers.rules import KLController
from torchrl_kl.controllers.statistics import KLStatistics
from torchrl_kl.controllers.trajectories import OpenTrajectories, find_done
from torchrl_kl.monitor.sampling import BEYOND_CHANCE
from torchrl_kl.monitor.scorer import NO_CHANCE, OTHER_POLICY, Fault, Scorer
from torchrl_kl.transforms.base import get_required

__all__ = ["CONDITIONS", "ConditionCount", "KLMessage", "KLMonitor"]

CONDITIONS = (
    "kl_above",
    "kl_below",
    "coeff_at_max",
    "coeff_at_min",
    "kl_not_finite",
    "negative_noise",
    "sampler_disagrees",
)

_ERRORS = 4  # standard errors that a mean KL must be from the target
_ROUNDING = 1e-6  # nats per step: a policy that still is its reference is no finding


@dataclass(frozen=True)
class KLMessage:
    """What began to hold, what it was seen by, and what to do; `str` is the sentence.

    Args:
        condition: one of `CONDITIONS`.
        text: the sentence.
        figures: the numbers in it, by name; KL in nats.
    """

    condition: str
    text: str
    figures: Mapping[str, float]

    def __str__(self) -> str:
        return self.text


class ConditionCount(NamedTuple):
    """In how many batches a condition held, and in how many episodes of it."""

    batches: int
    episodes: int


@dataclass
class _Condition:
    batches: int = 0
    episodes: int = 0
    lasts: bool = False
    absent: int = 0  # how often in a row it was looked for and not found, while it lasts


class KLMonitor:
    """Says once per episode what is wrong with a KL-controlled run, and what to do about it.

    Call it on every batch after the stack has run and before the policy is updated. It reads; it changes neither the
    batch nor the controller. The conditions:

    - "kl_above", "kl_below": the mean KL of the last `window` batches, pooled over trajectories (steps, with
      `per="step"`), is above 2 times or below 0.5 times the controller's target, and 4 standard errors off it: near a
      small target k1 is mostly noise.
    - "coeff_at_max", "coeff_at_min": the coefficient is at a bound of the controller.
    - "kl_not_finite": steps whose KL is infinite or NaN; they are left out of all means.
    - "negative_noise": the mean k1 of the batch is negative, as a mean of samples is by chance near the reference.
    - "sampler_disagrees": the recorded log-probs are not the actor's, or the actions were not drawn from it. The
      message names the temperature, top-k, top-p or mask that explains it, or says that the cause cannot be told.

    An episode of a condition ends when the condition was looked for `window` times in a row and not found.

    You may rely on: on actions drawn from the policy as it is, each test of the samples reports "sampler_disagrees" in
    one batch of a million at most, however small or correlated the batch. You may not rely on it for frames that a
    random policy drew (`init_random_frames`): begin after them.

    With `actor` the log-probs are recomputed, which costs one forward pass without gradients: in every `check_every`-th
    batch, and in each whose mean k1 is negative (with `reference`, one more pass of that then). Causes are named for
    categorical actions only.

    State: `state_dict`, plain numbers: the window, the episodes and the counts. The sums of trajectories that are still
    open are not saved: a restarted collector begins new ones.

    Keys:
        reads ("next", "kl") and ("next", "kl_estimate") where there is one, else ("next", "kl") for both; with `actor`
        its in_keys, the action and its log-prob; done flags and ("collector", "mask") and ("collector", "traj_ids").

    Args:
        controller: the one that moves; its target and its bounds are what is held against.
        actor: the policy that is trained, to recompute log-probs with.
        reference: the stack's frozen actor, `stack.reference`, for the exact KL beside a negative estimate.
        window: how many batches the mean KL is taken over.
        check_every: every so many batches the log-probs are recomputed.
        tolerance: by how many nats a recomputed log-prob may differ from the recorded one; rounding of half precision
            needs 0.05 or so.
        kl_key: k1 of each step, under "next".
        measured_key: what is held against the target; by default "kl_estimate" beside the KL where there is one, else
            the KL.
        log_prob_key: where the policy records its log-prob; by default found with `actor.log_prob_keys`.
        done_key: what ends a trajectory; by default "done" beside the KL, or at the root.
        time_dim: the batch dimension that is time, for batches that do not name it "time"; it must be the last.

    Raises:
        TypeError: if `controller` is no KLController, `actor` has no distribution or `reference` is no FrozenActor.
        ValueError: if a number is out of its range, `reference` comes without `actor`, or the actor records several
            log-probs and no key is given.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl_kl import ExponentialKLController
        >>> monitor = KLMonitor(ExponentialKLController(1.0, target=0.05, per="step"), window=2)
        >>> batch = TensorDict(next=TensorDict(kl=torch.full((8, 1), 0.2), batch_size=8), batch_size=8)
        >>> for _ in range(3):
        ...     for message in monitor(batch):
        ...         print(str(message)[:85])
        KL is 0.2 +- 0 nats per step over the last 2 batches (16 steps), 4 times the target o
        >>> monitor.counts["kl_above"]
        ConditionCount(batches=2, episodes=1)
    """

    def __init__(
        self,
        controller: KLController,
        *,
        actor: nn.Module | None = None,
        reference: FrozenActor | None = None,
        window: int = 10,
        check_every: int = 10,
        tolerance: float = 1e-3,
        kl_key: NestedKey = "kl",
        measured_key: NestedKey | None = None,
        log_prob_key: NestedKey | None = None,
        done_key: NestedKey | None = None,
        time_dim: int | None = None,
    ):
        if not isinstance(controller, KLController):
            raise TypeError(
                f"`controller` must be a KLController, got {type(controller).__name__}: pass the one that the stack "
                "moves, `stack.controller`."
            )
        if reference is not None and not isinstance(reference, FrozenActor):
            raise TypeError(
                f"`reference` must be a FrozenActor, got {type(reference).__name__}: pass `stack.reference`."
            )
        if reference is not None and actor is None:
            raise ValueError(
                "`reference` needs `actor` beside it: the exact KL is that of the two distributions."
            )
        for name, value in (("window", window), ("check_every", check_every)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"`{name}` must be an int of at least 1, got {value!r}.")
        if not 0 < tolerance < math.inf:
            raise ValueError(
                f"`tolerance` must be finite and above 0, got {tolerance}: rounding alone takes some."
            )
        self.controller, self.window = controller, window
        self.kl_key, self.measured_key = unravel_key(kl_key), measured_key
        self.done_key, self.time_dim = done_key, time_dim
        self.check_every = check_every
        self._scorer = None
        if actor is not None:
            self._scorer = Scorer(
                actor, reference, log_prob_key=log_prob_key, tolerance=tolerance, time_dim=time_dim
            )
        self._conditions = {name: _Condition() for name in CONDITIONS}
        self._n_batches = 0
        self._pools: deque[KLStatistics] = deque(maxlen=window)
        self._k1_sums: deque[float] = deque(maxlen=window)
        self._open_trajectories = OpenTrajectories()

    def __call__(self, batch: TensorDictBase) -> list[KLMessage]:
        """Looks at one batch (*B) that has "next"; returns what began with it, often nothing.

        Raises:
            KeyError: if the KL, or what the actor reads, is not in the batch.
            RuntimeError: if the target is per trajectory and the batch has no time dimension, or the reference is
                recurrent and its state is not in the batch.
        """
        step = cast(
            TensorDictBase,
            get_required(batch, "next", "pass a collector's batches, after the stack has run."),
        )
        kl = get_required(step, self.kl_key, _NO_KL).detach()
        mask = batch.get(MASK_KEY, None)
        counted = (
            torch.ones_like(kl, dtype=torch.bool) if mask is None else expand_right(mask, kl.shape)
        )
        finite = counted & kl.isfinite()
        looks: dict[str, KLMessage | None] = {"kl_not_finite": _look_finite(kl, counted, finite)}
        looks |= (
            self._look_target(batch, counted)
            | self._look_coeff()
            | self._look_samples(batch, kl[counted].double())
        )
        self._n_batches += 1
        return self._begun(looks)

    @property
    def counts(self) -> dict[str, ConditionCount]:
        """For each condition, in how many batches it held and in how many episodes."""
        return {
            name: ConditionCount(it.batches, it.episodes) for name, it in self._conditions.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """The window, the episodes and the counts, as plain numbers."""
        return {
            "n_batches": self._n_batches,
            "pools": [[buffer.item() for buffer in pool.buffers()] for pool in self._pools],
            "k1_sums": list(self._k1_sums),
            "conditions": {name: asdict(it) for name, it in self._conditions.items()},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on where the monitor that gave the state was; a shorter window keeps the latest batches.

        Raises:
            KeyError: if the state is not that of a KLMonitor.
        """
        missing = {"n_batches", "pools", "k1_sums", "conditions"} - set(state_dict)
        if missing:
            raise KeyError(
                f"`state_dict` lacks {sorted(missing)}, got {sorted(state_dict)}: it is no KLMonitor's."
            )
        self._n_batches = state_dict["n_batches"]
        self._pools.clear()
        for values in state_dict["pools"]:
            pool = KLStatistics()
            for buffer, value in zip(pool.buffers(), values, strict=True):
                buffer.fill_(value)
            self._pools.append(pool)
        self._k1_sums = deque(state_dict["k1_sums"], maxlen=self.window)
        self._conditions |= {
            name: _Condition(**it) for name, it in state_dict["conditions"].items()
        }

    def _begun(self, looks: dict[str, KLMessage | None]) -> list[KLMessage]:
        """Counts what holds and returns what had not held; what was not looked for stays as it was."""
        begun = []
        for name, message in looks.items():
            condition = self._conditions[name]
            if message is None:
                condition.absent += 1
                condition.lasts = condition.lasts and condition.absent < self.window
                continue
            condition.batches, condition.absent = condition.batches + 1, 0
            if not condition.lasts:
                condition.lasts, condition.episodes = True, condition.episodes + 1
                begun.append(message)
        return begun

    def _look_target(self, batch: TensorDictBase, counted: Tensor) -> dict[str, KLMessage | None]:
        target = self.controller.target
        if math.isnan(target):
            return {}
        self._pools.append(self._pool(batch, counted))
        pool = KLStatistics()
        for part in self._pools:
            pool.merge(part)
        if len(self._pools) < self.window or pool.count == 0:
            return {}
        mean, count, unit = pool.mean, int(pool.count), self.controller.per
        error = math.sqrt(pool.variance / count) if count > 1 else 0.0
        figures = {"kl": mean, "standard_error": error, "count": count, "target": target}
        text = (
            f"KL is {mean:.3g} +- {error:.2g} nats per {unit} over the last {self.window} batches "
            f"({count} {'trajectories' if unit == 'trajectory' else 'steps'}), {mean / target:.2g} times the target of "
            f"{target:g}; the coefficient is {self.controller.coeff.item():.3g}. "
        )
        # Of noise alone a window passes 2x now and then: what a KL at the target could well give is no finding.
        above = mean > 2 * target and mean - _ERRORS * error > target
        below = mean < 0.5 * target and mean + _ERRORS * error < target
        return {
            "kl_above": KLMessage("kl_above", text + _DO_ABOVE, figures) if above else None,
            "kl_below": KLMessage("kl_below", text + _DO_BELOW, figures) if below else None,
        }

    def _pool(self, batch: TensorDictBase, counted: Tensor) -> KLStatistics:
        """The KL of the batch in the controller's unit: of its steps, or of the trajectories that ended in it."""
        step = cast(TensorDictBase, batch.get("next"))
        key = self.measured_key or beside(self.kl_key, "kl_estimate")
        if self.measured_key is None and step.get(key, None) is None:
            key = self.kl_key
        measured = get_required(step, key, "name it with `measured_key`.").detach()
        if self.controller.per == "trajectory":
            if find_time_dim(batch, self.time_dim) is None:
                raise RuntimeError(
                    f"the target is in nats per trajectory, and in a batch of shape {tuple(batch.batch_size)} without "
                    'a time dimension trajectories cannot be told apart: name the last dimension "time" or pass '
                    "`time_dim`, monitor the collector's batches before they are flattened, or use per='step'."
                )
            done_key = find_done(step, self.kl_key, self.done_key)
            measured = self._open_trajectories.add(
                batch, torch.where(counted, measured, 0.0), done_key
            ).finished
        else:
            measured = measured[counted]
        return KLStatistics().add(measured[measured.isfinite()])

    def _look_coeff(self) -> dict[str, KLMessage | None]:
        coeff, low, high = (
            self.controller.coeff.item(),
            self.controller.min_coeff,
            self.controller.max_coeff,
        )
        at_max = f"The coefficient is at its upper bound, max_coeff = {high:g}: {_DO_AT_MAX}"
        at_min = f"The coefficient is at its lower bound, min_coeff = {low:g}: {_DO_AT_MIN}"
        looks: dict[str, KLMessage | None] = {}
        if high < math.inf:
            looks["coeff_at_max"] = (
                KLMessage("coeff_at_max", at_max, {"coeff": coeff}) if coeff >= high else None
            )
        if low > 0:
            looks["coeff_at_min"] = (
                KLMessage("coeff_at_min", at_min, {"coeff": coeff}) if coeff <= low else None
            )
        return looks

    def _look_samples(self, batch: TensorDictBase, k1: Tensor) -> dict[str, KLMessage | None]:
        """Whether the actions and their log-probs can be the policy's; k1: the steps that count, flat."""
        total = k1.nan_to_num(math.inf, math.inf).sum().item()
        self._k1_sums.append(total)
        negative = total < -_ROUNDING * k1.numel()
        due = self._n_batches % self.check_every == 0
        fault, exact_kl, checked = None, None, False
        if self._scorer is not None and (negative or due):
            fault, exact_kl = self._scorer.report(batch, negative=negative)
            checked = True
        if not (negative or checked):
            return {"negative_noise": None}
        # E[exp(-sum of k1)] = E_pi[product of pi_ref / pi] <= 1 on the policy's own actions: a sum of -a comes by
        # chance once in exp(a), at most.
        by_chance = max(-total, -sum(self._k1_sums)) < BEYOND_CHANCE
        if fault is None and negative and not by_chance:
            fault = Fault(
                f"{_mean_k1(k1)}, {NO_CHANCE}{OTHER_POLICY if checked else _ASK_ACTOR}",
                {"kl": k1.mean().item()},
            )
        return {
            "negative_noise": _noise(k1, exact_kl) if negative and fault is None else None,
            "sampler_disagrees": None if fault is None else KLMessage("sampler_disagrees", *fault),
        }


def _look_finite(kl: Tensor, counted: Tensor, finite: Tensor) -> KLMessage | None:
    n_bad, n_steps = int((counted & ~finite).sum()), int(counted.sum())
    if not n_bad:
        return None
    text = (
        f"The KL of {n_bad} of {n_steps} steps is infinite or NaN; they are left out of the means here, and a "
        "controller refuses them. Look for actions that the reference gives probability 0 (masks that only one of "
        "the two uses, a reference trained on fewer actions) and for NaN in the policy's logits."
    )
    return KLMessage("kl_not_finite", text, {"steps": n_bad, "count": n_steps})


def _mean_k1(k1: Tensor) -> str:
    error = f" +- {k1.std().item() / math.sqrt(k1.numel()):.2g}" if k1.numel() > 1 else ""
    return (
        f"The mean k1 of this batch is {k1.mean().item():.3g}{error} nats over {k1.numel()} steps"
    )


def _noise(k1: Tensor, exact_kl: float | None) -> KLMessage:
    figures: dict[str, float] = {"kl": k1.mean().item(), "count": k1.numel()}
    beside = ""
    if exact_kl is not None:
        figures["exact_kl"] = exact_kl
        beside = f" (the exact KL on the same states is {exact_kl:.3g})"
    text = (
        f"{_mean_k1(k1)}{beside}: noise, no bug. k1 takes either sign and only its mean is the KL; near the "
        "reference half of all batches come out negative. Do not clamp it. For a log that is never negative measure "
        'with estimator="k3" or "exact", or pool more steps.'
    )
    return KLMessage("negative_noise", text, figures)


_NO_KL = (
    "run the stack (or KLDivergenceTransform) before the monitor, or name its key with `kl_key`."
)
_DO_ABOVE = (
    "The controller raises the price until KL comes down. If it does not: let the controller move faster (a smaller "
    "`horizon`, a larger `gain`), and each update of the policy less (a lower learning rate, fewer epochs per batch)."
)
_DO_BELOW = (
    "The controller lowers the price until KL comes up. In the first batches, while the policy is still its reference, "
    "that is as it should be. If it stays: lower the coefficient or let the controller move faster; at a price near "
    "0 the reward itself asks for no more divergence, then lower the target."
)
_DO_AT_MAX = (
    "the price cannot rise further, and a KL above the target stays there. Raise `max_coeff`, or bring the reward's "
    "scale down: the coefficient is reward per nat."
)
_DO_AT_MIN = (
    "the price cannot fall further, and a KL below the target stays there. If KL is far below, the policy asks for no "
    "more divergence: lower the target. Lower `min_coeff` if the reward's scale is small: the coefficient is reward "
    "per nat."
)
_ASK_ACTOR = (
    "The sampler and the scorer disagree: actions are not drawn from the distribution whose log-probs are recorded "
    "(temperature, top-k, masked actions). Pass `actor=` and the log-probs are recomputed and the cause looked for."
)
