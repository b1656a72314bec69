"""The picture of the README: its program, with the KL controlled and without, over five seeds."""

from __future__ import annotations

import contextlib
import io
import re
import time
from pathlib import Path

import torch
from style import ADAPTIVE, NO_PENALTY, draw_target, new_figure, save

README = Path(__file__).parents[2] / "README.md"
LINE = r"reward ([\d.]+), KL (-?[\d.]+), coefficient ([\d.]+), goals (\d+)"
TARGET = 0.2
RUNS = {"no KL penalty": NO_PENALTY, "KL penalty, adaptive coefficient": ADAPTIVE}


def train(seed: int, control: bool, batches: int) -> list[list[float]]:
    """Reward, KL, coefficient and goals of each batch that the program prints."""
    programs = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.S)
    (program,) = (text for text in programs if "goals" in text)
    changes = {"seed(0)": f"seed({seed})", ": 30_000": f": {batches * 1000}"}
    if not control:
        changes["(actor, controller, "] = "(actor, 0.0, "
    for old, new in changes.items():
        assert old in program, f"{old!r} is no longer in the program of the README"
        program = program.replace(old, new)
    printed, start = io.StringIO(), time.process_time()
    with contextlib.redirect_stdout(printed):
        exec(compile(program, "README.md", "exec"), {})
    rows = [list(map(float, found)) for found in re.findall(LINE, printed.getvalue())]
    last = torch.tensor(rows[3 * batches // 4 :])
    print(
        f"seed {seed}, {'controlled' if control else 'without a penalty'}, "
        f"{time.process_time() - start:.0f} s of CPU; last quarter: "
        + "reward {:.2f}, KL {:.3f}, coefficient {:.2f}, goals {:.1f}".format(*last.mean(0))
        + f"; KL / target {last[:, 1].mean() / TARGET:.2f}",
        flush=True,
    )
    return rows


def main(folder: Path | None = None, seeds: int = 5, batches: int = 30) -> Path:
    """Draws the figure and prints the last quarter of each run."""
    figure, panels = new_figure(2, ncols=2, figsize=(9, 5.2), sharex=True)
    panels = list(panels.flat)
    for name, color in RUNS.items():
        # (seeds, batches, 4)
        runs = torch.tensor([train(seed, "adaptive" in name, batches) for seed in range(seeds)])
        for axes, column in zip(panels, (0, 3, 1, 2), strict=True):
            if column == 2 and "adaptive" not in name:
                continue  # its coefficient is 0
            values = runs[:, :, column]
            mean = values.mean(0)
            low, high = values.amin(0), values.amax(0)
            axes.plot(range(1, batches + 1), mean, color=color, label=name)
            axes.fill_between(range(1, batches + 1), low, high, color=color, alpha=0.2, linewidth=0)
    titles = {
        "The reward rises either way, ...": "share of coasting",
        "... but only the penalty keeps the goals": "goals per batch",
        "The controller brings the KL to its target": "KL, nats per step",
        "... and finds the coefficient for it": "coefficient",
    }
    for axes, (title, unit) in zip(panels, titles.items(), strict=True):
        axes.set(title=title, ylabel=unit)
    for axes in panels[2:]:
        axes.set(xlabel="batches of 1000 steps", xticks=range(0, batches + 1, 5))
    draw_target(panels[2], TARGET)
    panels[2].set(ylim=(-0.02, 0.82), yticks=(0, TARGET, 0.4, 0.6, 0.8))
    panels[3].set_ylim(0, 1)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return save(figure, "finetune", folder)


if __name__ == "__main__":
    main()
