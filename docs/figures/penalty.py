"""What the policy converges to when an estimate of the KL is subtracted from the reward.

Four actions, a uniform reference, a reward of 1 for one action and a coefficient of 0.5. The policy
follows its exact expected gradient, E[(reward - coeff * c) grad log pi], so that nothing is random.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from style import BLACK, ESTIMATORS, new_figure, save
from torch import Tensor

COEFF, LR = 0.5, 0.5
REWARD = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
COLORS = ESTIMATORS
LINES = {"exact": "--", "k3": "-."}


def penalties(name: str, log_ratio: Tensor, probs: Tensor) -> Tensor:
    """The penalty c of each action, (4,)."""
    return {
        "k1": log_ratio,
        "k2": log_ratio**2 / 2,
        "k3": (-log_ratio).exp() - 1 + log_ratio,
        "exact": (probs @ log_ratio).expand(4),
    }[name]


def kl_while_training(name: str, n_updates: int) -> list[float]:
    """KL(policy || reference) after each update, nats."""
    logits, reference, kls = REWARD * 0, math.log(1 / 4), []
    for _ in range(n_updates):
        log_probs = logits.log_softmax(0)
        probs, log_ratio = log_probs.exp(), log_probs - reference
        kls.append(float(probs @ log_ratio))
        gain = REWARD - COEFF * penalties(name, log_ratio, probs)
        # sum_a pi(a) gain(a) grad log pi(a), where grad log pi(a) = one_hot(a) - pi.
        step = LR * probs * (gain - probs @ gain)
        logits = logits + step
    return kls


def optimum() -> float:
    """The KL of the best policy, which is proportional to exp(reward / coeff)."""
    log_probs = (REWARD / COEFF).log_softmax(0)
    return float(log_probs.exp() @ (log_probs - math.log(1 / 4)))


def main(folder: Path | None = None, n_updates: int = 2000) -> Path:
    """Draws the figure and prints where each penalty ends."""
    figure, axes = new_figure(height=3.6)
    best = optimum()
    axes.axhline(best, color=BLACK, linestyle=":", linewidth=1.5, label=f"optimum, {best:.3f}")
    for name, color in COLORS.items():
        kls = kl_while_training(name, n_updates)
        print(f"{name:6} KL {kls[-1]:.3f} after {len(kls)} updates (optimum {best:.3f})")
        axes.plot(range(1, len(kls) + 1), kls, LINES.get(name, "-"), color=color, label=name)
    axes.set_xlabel("updates")
    axes.set_ylabel("KL to the reference (nats)")
    axes.set_xscale("log")
    axes.legend(title="subtracted", loc="upper left", frameon=False)
    axes.set_title("Only k1 in the reward leads to the optimum")
    return save(figure, "penalty", folder)


if __name__ == "__main__":
    main()
