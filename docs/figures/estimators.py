"""Mean and noise of the estimators of KL(policy || reference), by how far apart the two are.

The reference is uniform over 8 actions, the policy favours some of them more and more. All values
are exact: expectations over the 8 actions of the policy.
"""

from __future__ import annotations

from pathlib import Path

import torch
from style import ESTIMATORS, new_figure, save

from torchrl_kl.functional import kl_exact, kl_k1, kl_k2, kl_k3

FUNCTIONS = {"k1": (kl_k1, "-"), "k2": (kl_k2, "-"), "k3": (kl_k3, (0, (2, 2)))}


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
    upper.plot(kl, kl, color="0.8", linewidth=9, label="true KL")
    for name, (estimator, line) in FUNCTIONS.items():
        values = estimator(log_probs, reference)  # of each action, (S, 8)
        mean = (probs * values).sum(-1)
        std = (probs * (values - mean[:, None]) ** 2).sum(-1).sqrt()
        for axes, curve in ((upper, mean), (lower, std)):
            axes.plot(kl, curve, linestyle=line, color=ESTIMATORS[name], label=name)
        at = int((kl - 0.1).abs().argmin())
        print(f"{name}: mean {mean[at]:.3f}, standard deviation {std[at]:.3f} at {kl[at]:.3f} nats")
    lower.plot(kl, 0 * kl, "--", color=ESTIMATORS["exact"], label="exact")
    upper.set_title("The mean of k1 and k3 is the true KL, that of k2 is not")
    lower.set_title("Only the exact KL of a step has no noise")
    upper.set_ylabel("mean (nats)")
    lower.set_ylabel("standard deviation (nats)")
    lower.set_xlabel("KL(policy || reference), nats per step")
    upper.legend(frameon=False)
    lower.legend(frameon=False)
    return save(figure, "estimators", folder)


if __name__ == "__main__":
    main()
