"""How rewards of the reference tell the coefficient, and what that saves.

The policy is a softmax over four actions which follows its exact gradient, so that only the 512
rewards of the plan are random. One action has the reward 1, the others 0.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from style import AMBER, BLACK, BLUE, GREEN, SKY, draw_target, new_figure, save

from torchrl_kl import AdaptiveKLController, KLController, PlannedKLController, coeff_for_budget

TARGET, LR = 0.3, 1.5
REWARD = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)


def kl_of_optimum(rewards: torch.Tensor, coeff: float) -> float:
    """KL of the reference, from which `rewards` (N,) are samples, reweighted by exp(R / coeff)."""
    log_weights = (rewards / coeff).log_softmax(0)
    return float((log_weights.exp() * log_weights).sum()) + math.log(len(rewards))


def train(controller: KLController, rewards: torch.Tensor, n_batches: int) -> list[float]:
    """The KL of each batch; `rewards`: those of the first one."""
    if controller.planning:
        controller.observe_rewards(rewards)  # the transforms and losses do this
    logits, kls = REWARD * 0, []
    for _ in range(n_batches):
        log_probs = logits.log_softmax(0)
        probs, log_ratio = log_probs.exp(), log_probs - (REWARD * 0).log_softmax(0)
        kls.append(float(probs @ log_ratio))
        gain = REWARD - controller.coeff.item() * log_ratio
        logits = logits + LR * probs * (gain - probs @ gain)
        if len(kls) > 1:  # the KL of the batch of the plan, 0, says nothing about it
            controller.update(kls[-1], n_steps=512)
    return kls


def main(folder: Path | None = None, n_batches: int = 120) -> Path:
    """Draws the figure and prints where each run ends."""
    torch.manual_seed(0)
    figure, (upper, lower) = new_figure(2, height=6)
    rewards = REWARD[torch.randint(4, (512,))]
    coeffs = torch.linspace(0.12, 2, 95).tolist()
    upper.plot(coeffs, [kl_of_optimum(REWARD, c) for c in coeffs], color=BLACK, label="exact")
    sampled = [kl_of_optimum(rewards, c) for c in coeffs]
    upper.plot(coeffs, sampled, "--", color=BLUE, label="from 512 rewards")
    planned = coeff_for_budget(rewards[None], TARGET)
    upper.plot([planned] * 2, [0, TARGET], ":", color=BLUE)
    upper.annotate(f"planned: {planned:.2f}", (planned, TARGET), (6, 6), textcoords="offset points")
    upper.set(xlabel="coefficient (reward per nat)", ylabel="KL of the optimum (nats)")
    upper.set_title("512 rewards of the reference give the coefficient")
    runs = {
        "planned": (PlannedKLController(TARGET), GREEN, "-"),
        "adaptive from 0.06": (AdaptiveKLController(0.06, TARGET, 2000), AMBER, "--"),
        "adaptive from 6": (AdaptiveKLController(6.0, TARGET, 2000), SKY, "-."),
    }
    for name, (controller, color, line) in runs.items():
        kls = train(controller, rewards, n_batches)
        lower.plot(kls, line, color=color, label=name)
        near = [abs(kl / TARGET - 1) < 0.2 for kl in kls]
        late = max((i for i, is_near in enumerate(near) if not is_near), default=-1) + 1
        print(f"{name:28} within 20 % from batch {late}, KL at most {max(kls):.3f} nats")
    lower.set(xlabel="batches", ylabel="KL (nats)")
    lower.set_title("A planned start reaches the target sooner than a guess")
    for axes in (upper, lower):
        draw_target(axes, TARGET)
        axes.legend(frameon=False, loc="upper right")
    print(f"planned {planned:.3f}, exact {coeff_for_budget(REWARD[None], TARGET):.3f}")
    return save(figure, "plan", folder)


if __name__ == "__main__":
    main()
