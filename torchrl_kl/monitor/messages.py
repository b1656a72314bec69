"""What KLMonitor says, and the names of its conditions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torchrl_kl.controllers.base import KLController
from torchrl_kl.monitor.diagnosis import Finding
from torchrl_kl.monitor.texts import TEXT_CONDITIONS

CONDITIONS = (
    "kl_above",
    "kl_below",
    "coeff_at_max",
    "coeff_at_min",
    "kl_not_finite",
    "negative_noise",
    "sampler_disagrees",
    *TEXT_CONDITIONS,
)


@dataclass(frozen=True)
class KLMessage:
    """A condition that began to hold; `str` gives its text."""

    condition: str  # one of CONDITIONS
    text: str  # what is wrong and what to do
    figures: Mapping[str, float]  # the numbers in the text, by name; KL in nats

    def __str__(self) -> str:
        return self.text


class ConditionCount(NamedTuple):
    """In how many batches a condition held, and in how many episodes."""

    batches: int
    episodes: int


ABOVE = (
    "The controller raises the coefficient until the KL comes down. If it does not, let the "
    "controller move faster (a smaller `horizon`, a larger `gain`) and make each policy update "
    "smaller (a lower learning rate, fewer epochs per batch)."
)
BELOW = (
    "The controller lowers the coefficient until the KL comes up. Near the reference, in the first "
    "batches, this is normal. If the KL stays low, let the controller move faster; with a "
    "coefficient near 0 the reward asks for no more divergence: lower the target."
)
NOT_UPDATED = (
    "The controller has not moved the coefficient in these batches. An update waits for "
    "`update_every` finished trajectories (steps with per='step'): lower `update_every`, and check "
    "that trajectories reach `done` and that the stack is not frozen. Workers and a "
    "MultiAsyncCollector use a copy of the stack, which has another controller: use `kl_collector`."
)
IN_DEADBAND = (
    "The controller has not moved the coefficient in these batches. It has a deadband, and ignores "
    "a KL within {:g} standard errors of the target: lower `deadband`, or pool more per update "
    "with `update_every`. If it was not updated: an update waits for `update_every` finished "
    "trajectories (steps with per='step'), and a frozen stack makes none."
)
AT_MAX = (
    "The coefficient is at its upper bound, max_coeff = {:g}: it cannot rise further. Raise "
    "`max_coeff`, or reduce the scale of the reward: the coefficient is in reward per nat."
)
AT_MIN = (
    "The coefficient is at its lower bound, min_coeff = {:g}: it cannot fall further. If the KL is "
    "far below the target, lower the target. Lower `min_coeff` if the scale of the reward is "
    "small: the coefficient is in reward per nat."
)
NOISE = (
    "This is sampling noise and not a bug: k1 takes either sign and only its mean is the KL. Do "
    'not clamp it: use estimator="k3" or "exact", which are never negative, or pool more steps.'
)
ASK_ACTOR = (
    "The sampler and the actor disagree: actions are not drawn from the distribution whose "
    "log-probs are recorded (temperature, top-k, masked actions). Pass `actor=`, so that the "
    "monitor can look for the cause."
)
OTHER_POLICY = (
    "The recorded log-probs are the actor's, but the actions seem to come from another policy: "
    "samples of the reference, demonstrations, or others that were scored again?"
)


def advice(controller: KLController, coeffs: list[float]) -> tuple[str, str]:
    """What is said of a KL above, and below, the target; `coeffs`: around the batches of it."""
    # A coefficient at a bound may have been updated and not have moved.
    at_bound = not controller.min_coeff < controller.coeff.item() < controller.max_coeff
    if not controller.planning and (len(set(coeffs)) > 1 or at_bound):
        return ABOVE, BELOW
    deadband = getattr(controller, "deadband", 0.0)
    unmoved = IN_DEADBAND.format(deadband) if deadband else NOT_UPDATED
    return unmoved, unmoved


def bounds_reached(controller: KLController) -> dict[str, Finding | None]:
    """Whether the coefficient is at a bound of the controller, by condition."""
    if controller.planning:  # the bounds are those of a planned coefficient
        return {}
    coeff = controller.coeff.item()
    low, high = controller.min_coeff, controller.max_coeff  # 0 and inf where there are none
    figures = {"coeff": coeff}
    return {
        "coeff_at_max": (AT_MAX.format(high), figures) if coeff >= high else None,
        "coeff_at_min": (AT_MIN.format(low), figures) if low > 0 and coeff <= low else None,
    }
