"""What the monitor says, and the advice for each condition."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

CONDITIONS = (
    "kl_above",
    "kl_below",
    "coeff_at_max",
    "coeff_at_min",
    "kl_not_finite",
    "negative_noise",
    "sampler_disagrees",
)


@dataclass(frozen=True)
class KLMessage:
    """A condition that began to hold; `str` gives its text."""

    condition: str  # one of CONDITIONS
    text: str  # what is wrong and what to do
    figures: Mapping[str, float]  # the numbers in the text, by name; KL in nats

    def __str__(self) -> str:
        return self.text


def k1_figures(k1: Tensor, exact_kl: float | None) -> tuple[str, dict[str, float]]:
    """A sentence on the mean k1 of a batch, of its steps (N,), and the numbers in it."""
    mean, count, exact = k1.mean().item(), k1.numel(), ""
    figures: dict[str, float] = {"kl": mean, "count": count}
    error = f" +- {k1.std().item() / math.sqrt(count):.2g}" if count > 1 else ""
    if exact_kl is not None:
        figures["exact_kl"] = exact_kl
        exact = f" (the exact KL on the same states is {exact_kl:.3g})"
    return (
        f"The mean k1 of this batch is {mean:.3g}{error} nats over {count} steps{exact}. ",
        figures,
    )


NO_KL = "run the stack (or KLDivergenceTransform) first, or name it with `keys=KLKeys(kl=...)`."
DO_FINITE = (
    "They are left out of the means here, and a controller refuses them. Look for actions that "
    "the reference gives probability 0 (a mask of only one of the two) and for NaN in the logits."
)
DO_UPDATE = (
    "The controller has not been updated yet. An update waits for `update_every` finished "
    "trajectories (steps with per='step'): lower `update_every`, and check that trajectories reach "
    "`done` and that the stack is not frozen."
)
DO_ABOVE = (
    "The controller raises the coefficient until the KL comes down. If it does not, let the "
    "controller move faster (a smaller `horizon`, a larger `gain`) and make each policy update "
    "smaller (a lower learning rate, fewer epochs per batch)."
)
DO_BELOW = (
    "The controller lowers the coefficient until the KL comes up. Near the reference, in the first "
    "batches, this is normal. If the KL stays low, let the controller move faster; with a "
    "coefficient near 0 the reward asks for no more divergence: lower the target."
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
DO_NOISE = (
    "This is sampling noise and not a bug: k1 takes either sign and only its mean is the KL. Do "
    'not clamp it: use estimator="k3" or "exact", which are never negative, or pool more steps.'
)
_CHANCE = "This occurs by chance in at most one of a million batches. "
ASK_ACTOR = (
    f"{_CHANCE}The sampler and the actor disagree: actions are not drawn from the distribution "
    "whose log-probs are recorded (temperature, top-k, masked actions). Pass `actor=`, so that the "
    "monitor can look for the cause."
)
OTHER_POLICY = (
    f"{_CHANCE}The recorded log-probs are the actor's, but the actions seem to come from another "
    "policy: samples of the reference, demonstrations, or others that were scored again?"
)
NO_TABLE = (
    "Do both use the same temperature, bounds, masks and weights? An action at the bound of a "
    "squashed distribution (TanhNormal) loses its log-prob to rounding."
)
