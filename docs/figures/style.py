"""What all figures share: the style and the palette of the examples' pictures, and narrow sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

DOCS = Path(__file__).parents[1]
IMAGES = DOCS / "images"
plt.style.use(DOCS.parent / "examples" / "style.mplstyle")
PALETTE = plt.rcParams["axes.prop_cycle"].by_key()["color"]
NO_PENALTY, CONSTANT, ADAPTIVE, IN_LOSS, AMBER, SKY = PALETTE  # of runs, the first four
ORANGE, BLUE, GREEN, PINK, BLACK = NO_PENALTY, CONSTANT, ADAPTIVE, IN_LOSS, "0.1"  # of other things
ESTIMATORS = {"k1": BLUE, "k2": AMBER, "k3": PINK, "exact": GREEN}


def new_figure(rows: int = 1, height: float = 3.3, **options: Any) -> tuple[Any, Any]:
    """A figure that is legible on a phone: narrow, with panels below one another."""
    plt.rcParams.update({"axes.titlesize": 11.5, "lines.linewidth": 2.2})
    return plt.subplots(rows, **{"figsize": (5.8, height)} | options)


def draw_target(axes: Any, value: float, name: str = "target") -> None:
    """A dotted line at the value that is aimed at, with its name to the right of the panel."""
    axes.axhline(value, color=BLACK, linestyle=":", linewidth=1.5)
    where = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "fontsize": 10}
    axes.annotate(f"{name}\n{value:.2g}", (1, value), xycoords=("axes fraction", "data"), **where)


def save(figure: Any, name: str, folder: Path | None = None) -> Path:
    """Writes a picture; returns its path."""
    path = (folder or IMAGES) / f"{name}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata={"Software": ""})
    plt.close(figure)
    return path
