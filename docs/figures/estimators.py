"""Mean and noise of the estimators of KL(policy || reference), by how far apart the two are.

The reference is uniform over 8 actions, the policy favours some of them more and more. All values
are exact: expectations over the 8 actions of the policy.
"""

from __future__ import annotations

from pathlib import Path

import torch
from style import BLACK, BLUE, GREEN, ORANGE, PINK, new_figure, save

from torchrl_kl import kl_exact, kl_k1, kl_k2, kl_k3

ESTIMATORS = {"k1": (kl_k1, BLUE, "-"), "k2": (kl_k2, ORANGE, "-"), "k3": (kl_k3, PINK, "-.")}


def main(folder: Path | None = None) -> Path:
    """Draws the figure and prints a row of it."""
    # (S, 8): the policy's log-probs at S distances from the reference.
    scales = torch.linspace(0.02, 2.6, 60, dtype=torch.float64)[:, None]
    generator = torch.Generator().manual_seed(1)
    direction = torch.randn(8, generator=generator, dtype=torch.float64)
    log_probs = (scales * direction).log_softmax(-1)
    reference = torch.zeros_like(log_probs).log_softmax(-1)
    probs, kl = log_probs.exp(), kl_exact(log_probs, reference)
    figure, (upper, lower) = new_figure(2, height=6, sharex=True)
    upper.plot(kl, kl, ":", color=BLACK, label="true KL")
    for name, (estimator, color, line) in ESTIMATORS.items():
        values = estimator(log_probs, reference)  # of each action, (S, 8)
        mean = (probs * values).sum(-1)
        std = (probs * (values - mean[:, None]) ** 2).sum(-1).sqrt()
        upper.plot(kl, mean, line, color=color, label=name)
        lower.plot(kl, std, line, color=color, label=name)
        at = int((kl - 0.1).abs().argmin())
        print(f"{name}: mean {mean[at]:.3f}, standard deviation {std[at]:.3f} at {kl[at]:.3f} nats")
    lower.plot(kl, 0 * kl, "--", color=GREEN, label="exact")
    upper.set_title("k1 and k3 have the right mean, k2 has not")
    lower.set_title("k1 is noisy near it, k3 far from it; exact is not")
    upper.set_ylabel("mean (nats)")
    lower.set_ylabel("standard deviation (nats)")
    lower.set_xlabel("KL(policy || reference), nats per step")
    upper.legend(frameon=False)
    lower.legend(frameon=False)
    return save(figure, "estimators", folder)


if __name__ == "__main__":
    main()
