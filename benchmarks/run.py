"""Runs all benchmarks and writes one table, one picture and results.json.

    python benchmarks/run.py --out runs/benchmarks
    python benchmarks/run.py --out runs/benchmarks --quick

Those that measure times run one after the other, alone and with one thread. Those that train
policies follow, in two processes. Some have smaller sizes here than by themselves: see `SIZES`.
"""

from __future__ import annotations

import platform
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from bench_report import Result, arg, make_args, parse_args, quick_flag, table, write

from torchrl_kl.envs import DigitLanguage

TIMED, TRAINED = ("generation", "step_overhead"), ("reward_vs_loss", "estimator_variance")

# Sizes at which all of them take less than six minutes on two cores; the quick ones are smaller.
SIZES: dict[str, dict[str, Any]] = {
    "step_overhead": {"blocks": 15, "batches": 5},
    "reward_vs_loss": {"batches": 30, "seeds": (0,)},
    "estimator_variance": {},
    "generation": {"seconds": 3.0},
}


@dataclass
class Args:
    """What can be set from the command line."""

    out: str = arg("runs/benchmarks", "Folder for the table, the picture and results.json.")
    only: tuple[str, ...] = arg(
        (*TIMED, *TRAINED), "Which benchmarks to run.", choices=(*TIMED, *TRAINED)
    )
    quick: bool = quick_flag()


def run(name: str, folder: str, quick: bool) -> list[Result]:
    """The results of one benchmark; it prints its own tables."""
    benchmark = import_module(name)
    given: dict[str, Any] = {"quick": quick} if quick else dict(SIZES[name])
    if name in TRAINED:
        given["out"] = f"{folder}/{name}"
    return benchmark.results(make_args(benchmark.Args, **given))


def describe(seconds: float, quick: bool) -> str:
    """The heading of the table: what was measured on which machine."""
    size = " Sizes are those of `--quick`, so that figures are rough." if quick else ""
    processor = platform.processor() or platform.machine()
    language = DigitLanguage()
    return (
        "# Benchmarks\n\n"
        f"PyTorch {torch.__version__} on one core of {processor} ({platform.system()}); all took "
        f"{seconds:.0f} seconds.{size} Responses are in the language of "
        f"{language.vocab_size} digits where nothing else is said.\n\n"
        "*ours* and *rival* are times, rates, variances or regrets in the given unit. *ratio* is "
        "how many times as fast as the rival we are (bar ≥), or our cost divided by the rival's "
        "(bar ≤). A row without a ratio has the bar for *ours* itself."
    )


def main() -> None:
    """Runs the chosen benchmarks."""
    args = parse_args(Args, __doc__)
    out, start = Path(args.out), time.perf_counter()
    found = {name: run(name, args.out, args.quick) for name in TIMED if name in args.only}
    # The longest first; two processes, since each has one thread.
    with ProcessPoolExecutor(2) as pool:
        running = {
            name: pool.submit(run, name, args.out, args.quick)
            for name in TRAINED
            if name in args.only
        }
        found |= {name: future.result() for name, future in running.items()}
    results = [result for name in args.only for result in found[name]]
    write(results, out, describe(time.perf_counter() - start, args.quick))
    print(f"\n{table(results)}\nThe table, the picture and results.json are in {out}.")


if __name__ == "__main__":
    main()
