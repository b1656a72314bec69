"""The KL to the reference and the KL to the old policy, in one run of exact policy gradients."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from style import AMBER, BLUE, new_figure, save

from torchrl_kl.functional import kl_exact

COEFF, LR = 0.3, 0.4
REWARD = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)


def main(folder: Path | None = None, n_updates: int = 60) -> Path:
    """Draws the figure and prints its last point."""
    logits, reference = REWARD * 0, (REWARD * 0).log_softmax(0)
    to_reference, to_old = [], []
    for _ in range(n_updates):
        old = logits.log_softmax(0)
        probs, gain = old.exp(), REWARD - COEFF * (old + math.log(4))
        logits = logits + LR * probs * (gain - probs @ gain)
        new = logits.log_softmax(0)
        to_reference.append(float(kl_exact(new, reference)))
        to_old.append(float(kl_exact(old, new)))
    figure, axes = new_figure(height=3.4)
    axes.plot(to_reference, color=BLUE, label="KL to the reference: how far training has gone")
    axes.plot(to_old, "--", color=AMBER, label="KL to the old policy: how far one update went")
    axes.set_title("One grows while the other goes to 0")
    axes.set_xlabel("updates")
    axes.set_ylabel("nats per step")
    axes.set_yscale("log")
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.2))
    print(f"to the reference {to_reference[-1]:.4f}, to the old policy {to_old[-1]:.2e} nats")
    return save(figure, "two_divergences", folder)


if __name__ == "__main__":
    main()
