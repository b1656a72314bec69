"""The rules that hold a target, on a policy that needs many updates to follow a coefficient.

The policy is a softmax over four actions which follows its exact gradient slowly, so that nothing
is random. PlannedKLController begins with what it plans from rewards of the reference; the other
rules begin ten times too low.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from style import AMBER, BLUE, GREEN, SKY, draw_target, new_figure, save

from torchrl_kl import (
    AdaptiveKLController,
    ExponentialKLController,
    KLController,
    PIDKLController,
    PlannedKLController,
    coeff_for_budget,
)

TARGET, START, LR = 0.3, 0.06, 0.25
REWARD = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
RULES = {
    "planned": (PlannedKLController(TARGET), GREEN, "-"),
    "adaptive, from 0.06": (AdaptiveKLController(START, TARGET, horizon=5_000), BLUE, "-."),
    "exponential, from 0.06": (ExponentialKLController(START, TARGET, gain=0.1), AMBER, "--"),
    "PID, from 0.06": (PIDKLController(START, TARGET), SKY, ":"),
}


def train(controller: KLController, n_updates: int) -> tuple[list[float], list[float]]:
    """The KL and the coefficient of each batch."""
    if controller.planning:
        controller.observe_rewards(REWARD.repeat(128))  # the transforms and losses do this
    logits, kls, coeffs = REWARD * 0, [], []
    for _ in range(n_updates):
        log_probs = logits.log_softmax(0)
        probs, log_ratio = log_probs.exp(), log_probs + math.log(4)
        kls.append(float(probs @ log_ratio))
        coeffs.append(controller.coeff.item())
        gain = REWARD - coeffs[-1] * log_ratio
        logits = logits + LR * probs * (gain - probs @ gain)
        if len(kls) > 1:  # the KL of the batch of the plan, 0, says nothing about it
            controller.update(kls[-1], n_steps=512)
    return kls, coeffs


def main(folder: Path | None = None, n_updates: int = 500) -> Path:
    """Draws the figure and prints where each rule ends."""
    figure, (upper, lower) = new_figure(2, height=6, sharex=True)
    answer = coeff_for_budget(REWARD, TARGET)
    draw_target(upper, TARGET)
    draw_target(lower, answer, "exact")
    for name, (controller, color, line) in RULES.items():
        kls, coeffs = train(controller, n_updates)
        print(f"{name:26} KL {kls[-1]:.3f}, at most {max(kls):.3f}; coefficient {coeffs[-1]:.3f}")
        upper.plot(kls, line, color=color, label=name)
        lower.plot(coeffs, line, color=color, label=name)
    upper.set_title("All rules bring the KL to its target ...")
    lower.set_title("... and find its coefficient; a plan starts near it")
    upper.set_ylabel("KL (nats)")
    lower.set_ylabel("coefficient (reward per nat)")
    lower.set_yscale("log")
    lower.yaxis.set_major_formatter("{x:g}")
    lower.set_xlabel("batches")
    upper.legend(frameon=False)
    print(f"coefficient of the optimum {answer:.3f}")
    return save(figure, "controllers", folder)


if __name__ == "__main__":
    main()
