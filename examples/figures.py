"""What the pictures of the examples share: their style, bands over seeds, lines at goals."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

plt.style.use(Path(__file__).with_name("style.mplstyle"))
PALETTE = plt.rcParams["axes.prop_cycle"].by_key()["color"]
NO_PENALTY, CONSTANT, ADAPTIVE, IN_LOSS, AMBER, SKY = PALETTE
BLACK, GREY, LIGHT_GREY = "0.1", "0.5", "0.75"


def draw_band(axes: Any, curves: Sequence[Sequence[float]], color: str, **line: Any) -> None:
    """The mean of curves, with a band from the smallest to the largest value."""
    columns = list(zip(*curves, strict=True))
    axes.plot([fmean(values) for values in columns], color=color, **line)
    if len(curves) > 1:
        low, high = [min(values) for values in columns], [max(values) for values in columns]
        axes.fill_between(range(len(columns)), low, high, color=color, alpha=0.2, linewidth=0)


def draw_goal(axes: Any, value: float, text: str) -> None:
    """A dotted line at the value that is aimed at, with its name to the right of the panel."""
    axes.axhline(value, color=BLACK, linestyle=":", linewidth=1.3)
    where = {"xytext": (4, 0), "textcoords": "offset points", "va": "center"}
    axes.annotate(text, (1, value), xycoords=("axes fraction", "data"), fontsize=10, **where)
