"""What all benchmarks share: command line, timing in turns, results, and how they are shown."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

Args = TypeVar("Args")
FARTHEST = 20  # how many times better or worse than its bar a result is drawn


def arg(default: Any, help: str, *, quick: Any = None, choices: Sequence[str] | None = None) -> Any:
    """A field of an Args dataclass: its default, its `--help`, and its default with `--quick`."""
    metadata = {"help": help, "quick": quick, "choices": choices}
    if isinstance(default, tuple):  # several values on the command line
        metadata["several"] = type(default[0])
    return field(default=default, metadata=metadata)


def quick_flag() -> Any:
    """The field `quick` of an Args dataclass."""
    return arg(False, "Run at a small size, in seconds; the figures are then rough.")


def make_args(args: type[Args], **given: Any) -> Args:
    """An Args dataclass from what was given; with `quick`, small sizes are the other defaults."""
    small = {f.name: f.metadata["quick"] for f in fields(args) if f.metadata["quick"] is not None}  # type: ignore[arg-type]
    return args(**(small if given.get("quick") else {}) | given)


def parse_args(args: type[Args], description: str | None) -> Args:
    """An Args dataclass from the command line."""
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,  # what was not given is not there
    )
    for f in fields(args):  # type: ignore[arg-type]
        flag, metadata = f"--{f.name.replace('_', '-')}", f.metadata
        text = f"{metadata['help']} ({f.default})"
        if f.default is False:
            parser.add_argument(flag, action="store_true", help=text)
        else:
            kind = metadata.get("several", type(f.default))
            options: dict[str, Any] = {"nargs": "+"} if "several" in metadata else {}
            parser.add_argument(flag, type=kind, help=text, choices=metadata["choices"], **options)
    return make_args(args, **vars(parser.parse_args()))


@dataclass
class Result:
    """One answer: a figure of ours, that of what it is compared with, and the bar.

    `ratio` is what the bar is about: how many times as fast as the rival we are, or a cost of ours
    divided by the rival's. Without a rival the bar is about `ours`. Without a bar, `ok` is None.
    """

    question: str
    ours: float
    rival: float | None = None
    ratio: float | None = None
    bar: float | None = None
    ok: bool | None = None
    unit: str = ""
    at_least: bool = True  # whether the bar is the least that is asked for, or the most

    def __post_init__(self):
        if self.bar is not None:
            reached = self.value >= self.bar if self.at_least else self.value <= self.bar
            self.ok = bool(reached)

    @property
    def value(self) -> float:
        """What the bar is about."""
        return self.ours if self.ratio is None else self.ratio

    @classmethod
    def speed(cls, question: str, ours: float, rival: float, bar: float | None = None) -> Result:
        """How many times as fast as the rival: both in seconds."""
        return cls(question, ours, rival, rival / ours, bar, unit="s")

    @classmethod
    def cost(
        cls, question: str, ours: float, rival: float, bar: float | None = None, unit: str = "s"
    ) -> Result:
        """Our cost as a multiple of the rival's."""
        return cls(question, ours, rival, ours / rival, bar, unit=unit, at_least=False)

    @classmethod
    def error(cls, question: str, ours: float, bar: float, unit: str = "nats") -> Result:
        """An error that must not exceed the bar."""
        return cls(question, ours, bar=bar, unit=unit, at_least=False)


def race(
    contestants: dict[str, Callable[[], float | None]], seconds: float, least: int
) -> dict[str, float]:
    """The median seconds of each contestant, which run in turns, one warm-up turn first.

    Other work on the machine then slows all of them alike. A contestant that returns a number has
    timed itself. There are as many turns as fit into `seconds`, from `least` to 100.
    """
    start = time.perf_counter()
    for contestant in contestants.values():
        contestant()
    turn = time.perf_counter() - start
    times: dict[str, list[float]] = {name: [] for name in contestants}
    order = list(contestants.items())
    for _ in range(min(100, max(least, int(seconds / turn)))):
        for name, contestant in order:
            start = time.perf_counter()
            own = contestant()
            elapsed = time.perf_counter() - start
            times[name].append(elapsed if own is None else own)
        order.reverse()  # nobody always follows the same one
    return {name: statistics.median(values) for name, values in times.items()}


def number(value: float | None) -> str:
    """Three digits of a number, for people."""
    if value is None:
        return ""
    if value and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.1e}"
    digits = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:.{digits}f}"


def wanted(result: Result) -> str:
    """The bar of a result, for people."""
    return "" if result.bar is None else f"{'≥' if result.at_least else '≤'} {result.bar:g}"


def table(results: list[Result]) -> str:
    """The results as one table of Markdown."""
    lines = [
        "| question | ours | rival | unit | ratio | bar | ok |",
        "|---|---|---|---|---|---|---|",
    ]
    verdicts = {True: "yes", False: "**no**", None: ""}
    for result in results:
        cells = [result.question, number(result.ours), number(result.rival), result.unit]
        cells += [number(result.ratio), wanted(result), verdicts[result.ok]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw(results: list[Result], file: Path) -> None:
    """A picture of all results that have a bar: how far inside or outside of it they are."""
    from matplotlib.figure import Figure

    barred = [result for result in results if result.bar is not None][::-1]
    figure = Figure(figsize=(11, 1.4 + 0.34 * len(barred)), layout="constrained")
    axes = figure.subplots()
    for row, result in enumerate(barred):
        bar, value = float(result.bar or 0.0), max(result.value, 1e-12)
        margin = value / bar if result.at_least else bar / value
        margin = min(max(margin, 1 / FARTHEST), FARTHEST)
        color = "#2a7f62" if result.ok else "#c0392b"
        axes.plot([1, margin], [row, row], color=color, linewidth=7, solid_capstyle="butt")
        axes.plot(margin, row, "o", color=color, markersize=9)
        text = f"{number(result.value)} ({wanted(result)})"
        axes.annotate(text, (1.01, row), xycoords=("axes fraction", "data"), va="center")
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xscale("log")
    margins = [0.5, 2.0, *(line.get_xdata()[-1] for line in axes.lines)]  # type: ignore[index]
    axes.set_xlim(min(margins) / 1.1, max(margins) * 1.1)
    ticks = [t for t in (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20) if min(margins) <= t <= max(margins)]
    axes.set_xticks(ticks, [f"{t:g}" for t in ticks])
    axes.minorticks_off()
    axes.set_yticks(range(len(barred)), [result.question for result in barred])
    axes.set_ylim(-0.7, len(barred) - 0.3)
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel("times better than the bar (right of the line: reached)")
    figure.savefig(file, dpi=130)


def write(results: list[Result], folder: Path, heading: str) -> None:
    """Writes results.json, results.md and results.png."""
    folder.mkdir(parents=True, exist_ok=True)
    content = json.dumps([asdict(result) for result in results], indent=2)
    (folder / "results.json").write_text(content + "\n")
    (folder / "results.md").write_text(f"{heading}\n\n{table(results)}")
    draw(results, folder / "results.png")
