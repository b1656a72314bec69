"""The diagram of the README: how policy, reference, KL, reward and controller are connected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.patches import FancyBboxPatch
from style import BLUE, GREEN, ORANGE, new_figure, save

BOXES = {  # text, centre, colour
    "policy": ("policy $\\pi$\n(is trained)", (1.1, 3.0), BLUE),
    "reference": ("frozen reference\n$\\pi_{ref}$", (1.1, 1.0), GREEN),
    "kl": ("KL of each step\n$\\log\\,\\pi - \\log\\,\\pi_{ref}$", (4.6, 2.0), ORANGE),
    "reward": ("reward =\ntask reward\n- coeff $\\cdot$ KL", (8.35, 3.0), BLUE),
    "controller": ("controller\nholds a target KL", (8.35, 1.0), GREEN),
}
ARROWS = [  # from, to, text, where the text is
    (("policy", 1.0, 0.0), ("kl", -1.0, 0.5), "log-prob", (3.35, 2.95)),
    (("reference", 1.0, 0.0), ("kl", -1.0, -0.5), "log-prob of the\nsame action", (3.75, 1.15)),
    (("kl", 1.0, 0.5), ("reward", -1.0, 0.0), "k1", (6.2, 2.85)),
    (("kl", 1.0, -0.5), ("controller", -1.0, 0.0), "mean", (6.2, 1.15)),
    (("controller", 0.0, 1.0), ("reward", 0.0, -1.0), "coefficient", (9.15, 2.0)),
]
HALF_WIDTH, HALF_HEIGHT = 1.4, 0.55


def edge(point: tuple[str, float, float]) -> tuple[float, float]:
    """A point on the edge of a box, from shares of its half width and half height."""
    name, x, y = point
    centre = BOXES[name][1]
    return centre[0] + x * HALF_WIDTH, centre[1] + y * HALF_HEIGHT


def main(folder: Path | None = None) -> Path:
    """Draws the figure."""
    figure, axes = new_figure()
    figure.set_size_inches(6.4, 3.1)
    axes.set(xlim=(-0.35, 9.95), ylim=(0.4, 3.6))
    axes.axis("off")
    for text, (x, y), color in BOXES.values():
        corner = (x - HALF_WIDTH, y - HALF_HEIGHT)
        size: dict[str, Any] = {"width": 2 * HALF_WIDTH, "height": 2 * HALF_HEIGHT}
        axes.add_patch(
            FancyBboxPatch(
                corner, **size, boxstyle="round,pad=0,rounding_size=0.15", fc=color + "22", ec=color
            )
        )
        axes.text(x, y, text, ha="center", va="center", fontsize=11)
    for start, end, text, place in ARROWS:
        axes.annotate(
            "",
            edge(end),
            edge(start),
            arrowprops={"arrowstyle": "-|>", "lw": 1.6, "color": "black"},
        )
        axes.text(*place, text, ha="center", va="center", fontsize=10)
    return save(figure, "diagram", folder)


if __name__ == "__main__":
    main()
