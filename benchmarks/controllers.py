"""All controllers in loops that differ in everything: which of them holds the KL at its target?

    python benchmarks/controllers.py --out runs/controllers
    python benchmarks/controllers.py --out runs/controllers --quick

Each loop of `loops.py` runs without a penalty, with the constant coefficient whose KL is nearest to
the target at the end, found by search, and with every rule of the package, told the target alone.
The table has, over the seeds, and as multiples of the target:

    steady   batches, after the unpenalised run first passes the target, until the mean KL of five
             batches is within 30 % for good (the median; "never" if it is not at the end)
    largest  the largest KL of a batch, in the worst run
    end      the mean KL of the last third of the batches, lowest and highest

Without a penalty, `first` is the batch in which the KL first passes the target.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import statistics
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bench_report import arg, parse_args, quick_flag
from loops import LOOPS, Curves, Loop, train

from torchrl_kl import (
    AdaptiveKLController,
    ExponentialKLController,
    KLController,
    PIDKLController,
    PlannedKLController,
)

WIDE: dict[str, float] = {"min_coeff": 1e-9, "max_coeff": 1e9}


def adaptive(loop: Loop) -> KLController:
    """With a horizon of ten batches: an update moves the coefficient by at most about 2 %."""
    values = 32 if loop.task == "cartpole" else loop.responses
    values = 2048 if loop.per == "step" else values
    return AdaptiveKLController("plan", loop.target, 10 * values, per=loop.per)


RULES: dict[str, Callable[[Loop], KLController]] = {
    "planned": lambda loop: PlannedKLController(loop.target, per=loop.per),
    "adaptive": adaptive,
    "exponential": lambda loop: ExponentialKLController("plan", loop.target, per=loop.per, **WIDE),
    "PID": lambda loop: PIDKLController("plan", loop.target, per=loop.per, **WIDE),
}
COLORS = {"none": "0.6", "constant": "C7", "adaptive": "C0", "exponential": "C2", "PID": "C4"}
COLORS["planned"] = "C3"


@dataclass
class Args:
    """What can be set from the command line."""

    out: str = arg("runs/controllers", "Folder for the table, the picture and results.json.")
    loops: tuple[str, ...] = arg(
        tuple(loop.name for loop in LOOPS),
        "Which loops to run.",
        quick=("responses", "pendulum, per step"),
        choices=tuple(loop.name for loop in LOOPS),
    )
    seeds: int = arg(3, "Runs of each.", quick=1)
    batches: int = arg(80, "Batches of a run.", quick=4)
    search: int = arg(5, "Runs in which the constant is searched for.", quick=1)
    processes: int = arg(2, "Processes, of one thread each.")
    quick: bool = quick_flag()


def run(job: tuple[Loop, str | float, int, int]) -> Curves:
    """The curves of a loop with a rule by name, or a constant coefficient."""
    torch.set_num_threads(1)
    loop, rule, seed, batches = job
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of targets that are not reached
        controller = RULES[rule](loop) if isinstance(rule, str) else rule
        return train(loop, controller, seed, batches)


def end(curves: Curves, loop: Loop) -> float:
    """The mean KL of the last third, as a multiple of the target."""
    third = curves.kl[-max(1, len(curves.kl) // 3) :]
    return sum(third) / len(third) / loop.target


def search_constant(job: tuple[Loop, float, int, int]) -> float:
    """The constant coefficient whose KL ends nearest to the target, in `n_runs` runs of seed 0."""
    loop, coeff, n_runs, batches = job
    tried: list[tuple[float, float]] = []  # log coefficients, and the KL at the end
    for _ in range(n_runs):
        tried.append((math.log(coeff), max(end(run((loop, coeff, 0, batches)), loop), 1e-3)))
        above = max((one for one in tried if one[1] > 1), default=None)
        below = min((one for one in tried if one[1] <= 1), default=None)
        if above is None or below is None:
            coeff *= min(max(tried[-1][1] ** 0.5, 0.25), 4.0)  # KL goes as coeff ** -2
        else:
            coeff = math.exp((above[0] + below[0]) / 2)
    return math.exp(min(tried, key=lambda one: abs(math.log(one[1])))[0])


def first_pass(curves: Curves, loop: Loop) -> int | None:
    """The batch in which the KL first passes the target."""
    return next((n for n, kl in enumerate(curves.kl) if kl > loop.target), None)


def steady(curves: Curves, loop: Loop) -> int | None:
    """The batch from which the mean KL of five batches is within 30 % for good; None: never."""
    kls, last = curves.kl, -1
    for n in range(len(kls)):
        five = kls[max(0, n - 4) : n + 1]
        if not 0.7 <= sum(five) / len(five) / loop.target <= 1.3:
            last = n
    return None if last >= len(kls) - 5 else last + 1


def cells(runs: list[Curves], free: list[Curves], loop: Loop) -> list[str]:
    """What the table says of the runs of a rule."""
    late = [
        math.inf if (at := steady(one, loop)) is None else at - (first_pass(other, loop) or 0)
        for one, other in zip(runs, free, strict=True)
    ]
    middle = statistics.median_high(late)
    ends = [end(one, loop) for one in runs]
    largest = max(max(one.kl) for one in runs) / loop.target
    return [
        "never" if middle == math.inf else f"{middle:.0f}",
        f"{largest:.2f}",
        f"{min(ends):.2f} to {max(ends):.2f}",
    ]


def table(found: dict[str, dict[str, Any]], loops: list[Loop]) -> str:
    """One row per loop and rule."""
    lines = ["| loop | rule | steady | largest | end |", "|---|---|---|---|---|"]
    for loop in loops:
        rows = found[loop.name]
        passed = [first_pass(one, loop) for one in rows["none"]]
        shown = ", ".join("never" if n is None else str(n) for n in passed)
        lines.append(f"| {loop.name}: {loop.target:g} nats | none | first: {shown} | | |")
        for name, runs in rows.items():
            if name != "none":
                lines.append(f"| | {name} | {' | '.join(cells(runs, rows['none'], loop))} |")
    return "\n".join(lines) + "\n"


def draw(found: dict[str, dict[str, Any]], loops: list[Loop], file: Path) -> None:
    """A panel for each loop: the KL of each batch, as a multiple of the target."""
    from matplotlib.figure import Figure

    columns = min(4, len(loops))
    n_rows = math.ceil(len(loops) / columns)
    figure = Figure(figsize=(3.6 * columns, 2.3 * n_rows + 0.5), layout="constrained")
    axes = figure.subplots(n_rows, columns, squeeze=False, sharex=True, sharey=True).flatten()
    for panel, loop in zip(axes, loops, strict=False):
        panel.axhspan(0.7, 1.3, color="0.9", zorder=0)
        for name, runs in found[loop.name].items():
            kind = name.split()[0]
            width = 1.8 if kind == "planned" else 0.8
            label = kind
            for one in runs:
                kls = [max(kl / loop.target, 1e-2) for kl in one.kl]
                panel.plot(kls, color=COLORS[kind], linewidth=width, label=label)
                label = ""
        panel.set_title(loop.name, fontsize=9)
        panel.set_yscale("log")
        panel.set_ylim(0.05, 20)
    for panel in axes[len(loops) :]:
        panel.set_visible(False)
    figure.supylabel("KL / target", fontsize=10)
    figure.supxlabel("batch", fontsize=10)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=6)
    figure.savefig(file, dpi=110)


def measure(args: Args) -> dict[str, dict[str, Any]]:
    """The curves of each loop and rule, one per seed."""
    loops = [loop for loop in LOOPS if loop.name in args.loops]
    names: list[str | float] = [0.0, *RULES]
    found: dict[str, dict[str, Any]] = {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.processes, context) as pool:
        jobs = [
            (loop, name, seed, args.batches)
            for loop in loops
            for name in names
            for seed in range(args.seeds)
        ]
        curves = iter(pool.map(run, jobs))
        for loop in loops:
            found[loop.name] = {
                "none" if name == 0.0 else str(name): [next(curves) for _ in range(args.seeds)]
                for name in names
            }
            print(f"ran {loop.name}", flush=True)
        starts = [
            statistics.median(one.coeff[-1] for one in found[it.name]["planned"]) for it in loops
        ]
        searches = [
            (loop, start, args.search, args.batches)
            for loop, start in zip(loops, starts, strict=True)
        ]
        constants = list(pool.map(search_constant, searches))
        jobs = [
            (loop, constant, seed, args.batches)
            for loop, constant in zip(loops, constants, strict=True)
            for seed in range(args.seeds)
        ]
        curves = iter(pool.map(run, jobs))
        for loop, constant in zip(loops, constants, strict=True):
            name = f"constant {constant:.2g}"
            found[loop.name][name] = [next(curves) for _ in range(args.seeds)]
    return found


def main() -> None:
    """Runs all, and writes the table, the picture and the curves."""
    args = parse_args(Args, __doc__)
    folder = Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    found = measure(args)
    loops = [loop for loop in LOOPS if loop.name in args.loops]
    text = table(found, loops)
    print(text)
    (folder / "controllers.md").write_text(text)
    (folder / "results.json").write_text(json.dumps(found) + "\n")
    draw(found, loops, folder / "controllers.png")
    print(f"The table, the picture and the curves are in {folder}.")


if __name__ == "__main__":
    main()
