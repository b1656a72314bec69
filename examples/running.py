"""What the examples share: options, the folder of results, training loops, worker processes.

A training loop runs over the `steps` of a `Run`, which shows a progress bar and logs metrics.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import tyro
from torchrl.record.loggers import get_logger
from tqdm import tqdm

T = TypeVar("T", bound="Options")


@dataclass(frozen=True)
class Options:
    """Options of every script."""

    seed: int = 0  # Seed of the initial weights, the data and the samples.
    quick: bool = False  # Small defaults: everything runs in seconds, too short to learn.
    threads: int = 1  # Threads of each process. More slow down next to a busy process.


@dataclass(frozen=True)
class JobOptions(Options):
    """Options of scripts that write to a folder."""

    out: Path = Path("runs")  # Folder of the results, which must be new or empty.
    logger: Literal["csv", "tensorboard"] = "csv"  # How metrics are written, in the folder log.
    processes: int = 2  # Processes that train runs at the same time.


def read_options(kind: type[T], description: str | None, **changes: Mapping[str, Any]) -> T:
    """The options of the command line; `changes` are defaults that change if an option is given."""
    first = tyro.cli(kind, description=description)
    given = [changed for name, changed in changes.items() if getattr(first, name)]
    defaults = {name: value for changed in given for name, value in changed.items()}
    if first.quick:
        print("--quick is too short to learn: it shows that all runs.", file=sys.stderr)
    return tyro.cli(kind, description=description, default=replace(kind(), **defaults))


def open_folder(options: JobOptions) -> Path:
    """Makes the folder `out`, with the options in config.json; SystemExit if it is in use."""
    if options.out.exists() and any(options.out.iterdir()):
        raise SystemExit(f"--out {options.out} is in use: choose another folder, or remove it.")
    options.out.mkdir(parents=True, exist_ok=True)
    write_json(options.out / "config.json", asdict(options))
    return options.out


def write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=2, default=str) + "\n")


class Run:
    """A training loop with a progress bar and a log; `curves` has what was logged, by name.

    Its model is saved in `folder`. `row` is that of its bar, next to those of other processes;
    where there is no bar, a line says `every` so many steps what it would show.
    """

    def __init__(self, name: str, options: JobOptions, row: int | None = None, every: int = 0):
        self.name, self.row, self.folder = name, row, options.out / name
        self.every = every
        self.curves: dict[str, list[float]] = {}
        self.logger: Any = get_logger(options.logger, str(options.out / "log"), name)

    def steps(self, total: int) -> Iterator[int]:
        """The steps of the loop, from 0."""
        self.label, self.total = self.name.replace("_", " "), total
        # disable=None: no bar where stderr is not a terminal.
        self.bar = tqdm(range(total), desc=self.label, position=self.row, disable=None)
        yield from self.bar

    def log(self, step: int, show: str = "", **values: float) -> None:
        """Logs values of a step; `show` is a format string for the progress bar."""
        for name, value in values.items():
            self.curves.setdefault(name, []).append(value)
            self.logger.log_scalar(name, value, step=step)
        if show:
            self.bar.set_postfix_str(show.format(**values))
        if show and self.bar.disable and self.every and (step + 1) % self.every == 0:
            done = f"{self.label} {step + 1}/{self.total}"
            print(f"{done}: {show.format(**values)}", file=sys.stderr, flush=True)


def workers(options: JobOptions) -> ProcessPoolExecutor:
    """Processes that share the screen for their progress bars."""
    context = get_context("spawn")
    tqdm.set_lock(lock := context.RLock())
    start = (lock, options.threads)
    return ProcessPoolExecutor(options.processes, context, _start_worker, start)


def _start_worker(lock: Any, threads: int) -> None:
    tqdm.set_lock(lock)
    torch.set_num_threads(threads)
