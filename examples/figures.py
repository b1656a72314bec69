"""What the pictures of the examples share: their style, bands over seeds, direct labels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

plt.style.use(Path(__file__).with_name("style.mplstyle"))

# Okabe and Ito's colours, which the colour-blind can tell apart.
BLUE, ORANGE, GREEN, PURPLE = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
BLACK, GREY, LIGHT_GREY = "0.1", "0.5", "0.75"


def draw_band(axes: Any, curves: Sequence[Sequence[float]], color: str, **line: Any) -> None:
    """The mean of curves, with a band from the smallest to the largest value."""
    columns = list(zip(*curves, strict=True))
    axes.plot([fmean(values) for values in columns], color=color, **line)
    if len(curves) > 1:
        low, high = [min(values) for values in columns], [max(values) for values in columns]
        axes.fill_between(range(len(columns)), low, high, color=color, alpha=0.2, linewidth=0)


def label(axes: Any, x: float, y: float, text: str, color: str, **where: Any) -> None:
    """A label next to a point of the data, in the colour of what it names."""
    where = {"xytext": (6, 0), "ha": "left", "va": "center", "fontsize": 10} | where
    axes.annotate(text, (x, y), textcoords="offset points", color=color, **where)


def draw_goal(axes: Any, value: float, text: str, x: float) -> None:
    """A dotted line at the value that is aimed at, with its name above it."""
    axes.axhline(value, color=BLACK, linestyle=":", linewidth=1.3)
    label(axes, x, value, text, BLACK, xytext=(0, 4), va="bottom")
