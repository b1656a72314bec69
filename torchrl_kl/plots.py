"""Pictures of runs, drawn by matplotlib where it is installed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torchrl_kl.exact import PolicyValues


def plot_frontier(
    kl: Tensor | Sequence[float],
    reward: Tensor | Sequence[float],
    *,
    names: Sequence[str] | None = None,
    label: str | None = None,
    optima: Iterable[PolicyValues] = (),
    ax: Any = None,
) -> Any:
    """Draws the reward of runs against sqrt(KL), as points, and a line from run to run by their KL.

    Near the reference the best reward is a line: it exceeds that of the reference by
    sqrt(2 Var(R) KL), with the variance of the reference's rewards R.

    Args:
        kl: KL(policy || reference) of N runs, nats, (N,); or (N, S), of S seeds of each. The line
            goes through the means over the seeds.
        reward: in the shape of `kl`: what is trained on, or better what training does not see.
        names: N texts that are written at the points, such as the targets of the runs.
        label: text for the legend.
        optima: the best policies, drawn as the exact frontier, such as
            `[enumeration.optimum(coeff) for coeff in coeffs]`.
        ax: matplotlib's Axes to draw on. None: those of a new figure.

    Returns:
        The Axes; `ax.figure.savefig(path)` writes the picture.

    Raises:
        ImportError: if matplotlib is not installed.
        ValueError: if shapes differ, or a number is not finite or is a KL below 0.

    Example:
        >>> from torchrl_kl import plot_frontier
        >>> axes = plot_frontier([0.1, 0.4], [0.5, 0.7], names=["target 0.1", "target 0.4"])
        >>> axes.get_xlabel()
        'sqrt(KL), KL in nats'
    """
    columns = _read_runs(kl, reward)
    if names is not None and len(names) != len(columns[0]):
        raise ValueError(
            f"`names` must have one text for each of {len(columns[0])} runs, got {names}."
        )
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        raise ImportError("plot_frontier needs matplotlib: `pip install matplotlib`.") from None
    ax = plt.subplots()[1] if ax is None else ax
    best = sorted((max(each.kl, 0.0) ** 0.5, each.reward) for each in optima)  # rounded below 0
    if best:
        ax.plot(*zip(*best, strict=True), color="0.1", label="exact frontier")
    x, y = (values.mean(1) for values in columns)
    order = x.argsort()
    (line,) = ax.plot(x.sqrt()[order], y[order], "--", label=label)
    ax.plot(columns[0].sqrt().flatten(), columns[1].flatten(), "o", color=line.get_color())
    for name, *place in zip(names or (), x.sqrt().tolist(), y.tolist(), strict=False):
        ax.annotate(name, place, (6, -12), textcoords="offset points")
    ax.set(xlabel="sqrt(KL), KL in nats", ylabel="reward")
    ax.set_xlim(left=0, auto=None)
    if best or label:
        ax.legend()
    return ax


def _read_runs(kl: Any, reward: Any) -> list[Tensor]:
    """The KL and the reward of each seed of each run, (N, S), checked."""
    kls, rewards = (torch.as_tensor(x, dtype=torch.float64).detach().cpu() for x in (kl, reward))
    if kls.ndim not in (1, 2) or kls.shape != rewards.shape:
        raise ValueError(
            "`kl` and `reward` must have the same shape, (runs,) or (runs, seeds), got "
            f"{tuple(kls.shape)} and {tuple(rewards.shape)}: pass one number for each run."
        )
    if not ((kls >= 0) & kls.isfinite() & rewards.isfinite()).all():
        raise ValueError(
            "`kl` must be at least 0, and all numbers finite, got KLs from "
            f"{kls.min():.3g} to {kls.max():.3g} and rewards from {rewards.min():.3g} to "
            f"{rewards.max():.3g}: a mean of few k1 may be negative, so pool more batches, or "
            'measure with estimator="exact".'
        )
    return [values if values.ndim == 2 else values.unsqueeze(1) for values in (kls, rewards)]
