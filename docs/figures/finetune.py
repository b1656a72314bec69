"""The picture of the README: its program, with the KL controlled and without, over three seeds."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import torch
from style import BLUE, ORANGE, new_figure, save

README = Path(__file__).parents[2] / "README.md"
LINE = r"reward ([+-][\d.]+), KL (-?[\d.]+), coefficient ([\d.]+), falls (\d+)"
RUNS = {"no KL penalty": ORANGE, "KL penalty, adaptive coefficient": BLUE}


def train(seed: int, control: bool, batches: int) -> list[list[float]]:
    """Reward, KL, coefficient and falls of each batch that the program prints."""
    programs = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.S)
    (program,) = (text for text in programs if "falls" in text)
    changes = {"seed(0)": f"seed({seed})", ": 20_000": f": {batches * 1000}"}
    if not control:
        changes["(actor, controller, "] = "(actor, 0.0, "
    for old, new in changes.items():
        assert old in program, f"{old!r} is no longer in the program of the README"
        program = program.replace(old, new)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(program, "README.md", "exec"), {})
    return [list(map(float, found)) for found in re.findall(LINE, printed.getvalue())]


def main(folder: Path | None = None, seeds: int = 3, batches: int = 20) -> Path:
    """Draws the figure and prints the last batches."""
    figure, panels = new_figure(2, height=5.4, sharex=True)
    for name, color in RUNS.items():
        # (seeds, batches, 4)
        runs = torch.tensor([train(seed, "adaptive" in name, batches) for seed in range(seeds)])
        for axes, column in zip(panels, (0, 3), strict=True):
            values = runs[:, :, column]
            mean = values.mean(0)
            low, high = values.amin(0), values.amax(0)
            axes.plot(range(batches), mean, color=color, label=name)
            axes.fill_between(range(batches), low, high, color=color, alpha=0.2, linewidth=0)
        last = runs[:, -5:].mean((0, 1)).tolist()
        print(
            name,
            "last 5 batches: reward {:.2f}, KL {:.3f}, coeff {:.2f}, falls {:.1f}".format(*last),
        )
    panels[0].set_title("The reward for speed rises either way,")
    panels[1].set_title("but without a penalty the policy forgets to balance")
    panels[0].set_ylabel("speed to the right")
    panels[1].set_ylabel("falls per 1000 steps")
    panels[1].set_xlabel("batches of 1000 steps")
    panels[1].set_xticks(range(0, batches, 5))
    panels[0].legend(frameon=False)
    return save(figure, "finetune", folder)


if __name__ == "__main__":
    main()
