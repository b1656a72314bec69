"""What all figures share: fonts, sizes, and colours that colour-blind readers can tell apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

# Okabe and Ito (2008).
BLUE, ORANGE, GREEN, PINK, BLACK = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#000000",
)
IMAGES = Path(__file__).parents[1] / "images"


def new_figure(rows: int = 1, height: float = 3.3, **options: Any) -> tuple[Any, Any]:
    """A figure that is legible on a phone: narrow, with panels below one another."""
    plt.rcParams.update(
        {
            "font.size": 11,
            "axes.titlesize": 11.5,
            "axes.titleweight": "bold",
            "axes.titlelocation": "left",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.alpha": 0.25,
            "lines.linewidth": 2.2,
        }
    )
    return plt.subplots(rows, figsize=(5.8, height), layout="constrained", **options)


def save(figure: Any, name: str, folder: Path | None = None) -> Path:
    """Writes a picture; returns its path."""
    path = (folder or IMAGES) / f"{name}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata={"Software": ""})
    plt.close(figure)
    return path
