"""What the examples share: options, the folder of results, runs that can be stopped and resumed.

A script reads its options with `read_options`, opens its folder with `open_folder`, and does its
work inside `stops_cleanly`. Each part of the work is a `Run`, whose `steps` save checkpoints, and
whose result `once` keeps in a file. `Workers` does several parts at a time.

Files are written to a temporary name and then moved into place, so that none is ever half written.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar, get_type_hints

import torch
import tyro
from torchrl.checkpoint import CheckpointRotation, GlobalRNGState
from torchrl.record.loggers import get_logger
from tqdm import tqdm

from torchrl_kl import RunCheckpoint


class Rule(NamedTuple):
    """What a number must fulfil; NaN and inf fulfil none of the rules below."""

    holds: Callable[[float], bool]
    text: str


Count = Annotated[int, Rule(lambda n: n >= 1, "at least 1")]
Index = Annotated[int, Rule(lambda n: n >= 0, "at least 0")]
Positive = Annotated[float, Rule(lambda x: 0 < x < math.inf, "above 0 and finite")]
NonNegative = Annotated[float, Rule(lambda x: 0 <= x < math.inf, "at least 0 and finite")]
Share = Annotated[float, Rule(lambda x: 0 <= x < 1, "at least 0 and below 1")]

T = TypeVar("T", bound="Options")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Options:
    """Options of every script. Numbers are checked by the `Rule` in their type."""

    seed: Index = 0
    """Seed of the initial weights, the data and the samples."""
    quick: bool = False
    """Small defaults: everything runs in seconds, with poor results."""
    threads: Count = 1
    """Threads of each process. More of them slow down next to a busy process."""

    def __post_init__(self):
        hints = get_type_hints(type(self), include_extras=True)
        for field in fields(self):
            value, metadata = (
                getattr(self, field.name),
                getattr(hints[field.name], "__metadata__", ()),
            )
            for rule in metadata:
                if isinstance(rule, Rule) and not rule.holds(value):
                    raise ValueError(f"{flag(field.name)} must be {rule.text}, got {value}.")


@dataclass(frozen=True)
class JobOptions(Options):
    """Options of scripts that write to a folder."""

    # These can differ between a run and its continuation, as they do not change the results.
    FREE: ClassVar[frozenset[str]] = frozenset(
        {"out", "resume", "logger", "threads", "processes", "checkpoint_every"}
    )

    out: Path = Path("runs")
    """Folder of the results. A folder that is in use is refused, or continued with --resume."""
    resume: bool = False
    """Continue with what is in the folder: finished parts are kept, others go on."""
    logger: Literal["csv", "tensorboard", "wandb"] = "csv"
    """Where metrics go, in the folder log. For wandb offline, set WANDB_MODE=offline."""
    checkpoint_every: NonNegative = 60.0
    """Seconds between two checkpoints of a run; 0: one after each step."""


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def read_options(
    kind: type[T], description: str | None, changes: Mapping[str, Mapping[str, Any]]
) -> T:
    """The options of the command line.

    `changes` has the defaults that an option such as `quick` changes when it is given. They never
    change what was given.
    """
    first = tyro.cli(kind, description=description)
    defaults: dict[str, Any] = {}
    for name, changed in changes.items():
        if getattr(first, name):
            defaults |= {name: getattr(first, name), **changed}
    return tyro.cli(kind, description=description, default=replace(kind(), **defaults))


def open_folder(options: JobOptions) -> Path:
    """The folder `out`, new or to be resumed; SystemExit if it is used or has other settings."""
    out, file = options.out, options.out / "config.json"
    settings = json.loads(json.dumps(asdict(options), default=str))
    if out.exists() and any(out.iterdir()):
        if not options.resume:
            raise SystemExit(
                f"--out {out} is in use: choose another folder, or continue with --resume."
            )
        if not file.exists():
            raise SystemExit(f"--out {out} has no config.json to resume: choose another folder.")
        before = json.loads(file.read_text())
        names = (settings.keys() | before.keys()) - options.FREE
        changed = sorted(flag(name) for name in names if settings.get(name) != before.get(name))
        if changed:
            raise SystemExit(
                f"--out {out} has results of other settings ({', '.join(changed)}): choose another "
                "folder, or give the same options."
            )
    out.mkdir(parents=True, exist_ok=True)
    write_json(file, settings)
    return out


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """A temporary file that replaces `file` when the block ends without an error."""
    part = file.with_name(f".{os.getpid()}-{file.name}")
    try:
        yield part
        os.replace(part, file)
    finally:
        part.unlink(missing_ok=True)


def write_json(file: Path, value: Any) -> None:
    """Writes a whole JSON file or none."""
    with replacing(file) as part:
        part.write_text(json.dumps(value, indent=2) + "\n")


def once(file: Path, make: Callable[[], dict]) -> dict:
    """The result in a JSON file; it is made, with the seconds it took, if it is not there.

    Checkpoints in the same folder are no longer needed then, and are removed.
    """
    if not file.exists():
        wall, cpu = time.perf_counter(), time.process_time()
        result = make()
        result["seconds"] = time.perf_counter() - wall
        result["cpu_seconds"] = time.process_time() - cpu
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, result)
        shutil.rmtree(file.parent / "checkpoints", ignore_errors=True)
    return json.loads(file.read_text())


def part(name: str, make: Callable[..., dict], *args: Any) -> dict:
    """The result of a part of a job, as `once` makes it; its options are the last argument."""
    return once(args[-1].out / name / "result.json", lambda: make(*args))


class Stopped(KeyboardInterrupt):
    """Ctrl-C, once the step in progress was done and saved."""


@contextmanager
def stops_cleanly(out: Path) -> Iterator[None]:
    """Ctrl-C ends the script with one line that says how to continue, not with a traceback."""
    try:
        yield
    except KeyboardInterrupt as stop:
        what = f"Stopped {stop}" if isinstance(stop, Stopped) else "Stopped"
        print(f"\n{what}. Give --out {out} --resume to continue.", file=sys.stderr)
        raise SystemExit(130) from None


@contextmanager
def _interrupt_noted() -> Iterator[list[int]]:
    """Ctrl-C fills the list instead of raising; a second one raises, but not in a worker."""
    noted: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield noted  # only the main thread may set handlers
        return

    def note(number: int, frame: Any) -> None:
        if noted and parent_process() is None:
            raise KeyboardInterrupt
        noted.append(number)

    former = signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, former)


class Run:
    """A part of a job in steps that can be stopped after any of them, and resumed bit for bit.

    Attributes:
        folder: where its result, its checkpoints and what it saves are.
        curves: what was logged, by name: pairs of a step and a value.

    Args:
        name: of the folder, and of the run in the logger.
        options: of the job.
        row: where its progress bar goes, if others are shown at the same time.
    """

    def __init__(self, name: str, options: JobOptions, row: int | None = None):
        self.name, self.options, self.row = name, options, row
        self.folder, self.label = options.out / name, name.replace("_", " ")
        self.curves: dict[str, list[list[float]]] = {}

    def steps(
        self, total: int, save: Callable[[Path], Any] = lambda folder: None, **parts: Any
    ) -> Iterator[int]:
        """The steps from the last checkpoint on.

        Args:
            total: number of steps.
            save: called with the folder after the last step, and when it is stopped by Ctrl-C.
            parts: all that changes from step to step: modules, optimizers, schedules; also JSON
                lists and dictionaries. The global random numbers and the curves are included.
        """
        checkpoints = Checkpoints(self.folder / "checkpoints", **parts, curves=self.curves)
        first = checkpoints.load()
        self._open_log()
        self.bar = tqdm(
            range(first, total),
            desc=self.label,
            initial=first,
            total=total,
            position=self.row,
            disable=None,  # quiet where stderr is not a terminal
        )
        saved = time.monotonic()
        try:
            with _interrupt_noted() as noted:
                for step in self.bar:
                    yield step
                    if noted or time.monotonic() - saved >= self.options.checkpoint_every:
                        checkpoints.save(step + 1)
                        saved = time.monotonic()
                    if noted:
                        save(self.folder)
                        raise Stopped(f"{self.label} after {step + 1} of {total} steps")
            save(self.folder)  # also where the last checkpoint was that of the last step
        finally:
            self.bar.close()
            self._log.close()

    def _open_log(self) -> None:
        # Anew: it may have rows of steps that came after the checkpoint.
        # Absolute: W&B writes from a process of its own, possibly one of another folder.
        kind, folder = self.options.logger, self.options.out.absolute() / "log"
        if kind != "wandb":
            shutil.rmtree(folder / self.name, ignore_errors=True)
        wandb = {"project": "torchrl_kl", "log_env_packages": False}
        self._log: Any = get_logger(kind, str(folder), self.name, wandb_kwargs=wandb)
        for name, curve in self.curves.items():
            for step, value in curve:
                self._log.log_scalar(name, value, step=int(step))

    def log(self, step: int, show: str = "", **values: float) -> None:
        """Logs values of a step; `show` is a format string for the progress bar."""
        for name, value in values.items():
            self.curves.setdefault(name, []).append([step, value])
            self._log.log_scalar(name, value, step=step)
        if show:
            self.bar.set_postfix_str(show.format(**values))


class Checkpoints:
    """The last two checkpoints of a run, with its random numbers; archives with checksums."""

    def __init__(self, folder: Path, **parts: Any):
        self.folder = folder
        self._checkpoint = RunCheckpoint(**parts, random=GlobalRNGState())
        self._rotation = CheckpointRotation(folder, keep_last=2)

    def save(self, step: int) -> None:
        """Saves all parts after a number of steps."""
        self._rotation.save(self._checkpoint, step=step)

    def load(self) -> int:
        """Loads the last checkpoint that is intact; after how many steps it was saved."""
        files = sorted(self.folder.glob("checkpoint-*"), reverse=True)
        for file in files:
            try:
                self._checkpoint.load(file)
            except Exception as error:  # whatever the damage leads to
                text = f"{file} cannot be read ({error}): the one before it is used."
                tqdm.write(text, file=sys.stderr)
            else:
                return int(file.stem.split("-")[1])
        if files:  # parts of a damaged one may be loaded already
            raise SystemExit(f"No checkpoint in {self.folder} can be read: remove that folder.")
        return 0


class Workers:
    """Processes that work on parts of a job; if there is one, it is this process.

    Args:
        n: number of processes.
    """

    def __init__(self, n: int):
        self.pool = None
        if n > 1:
            context = get_context("spawn")
            lock = context.RLock()  # progress bars of several processes share the screen
            tqdm.set_lock(lock)
            self.pool = ProcessPoolExecutor(n, context, _prepare_worker, (lock,))
            for _ in range(n):  # starts the workers, which import torch for seconds
                self.pool.submit(int)

    def start(self, fn: Callable[..., Result], *args: Any) -> Callable[[], Result]:
        """Hands a call to a worker, or puts it off in a single process; call what it returns."""
        return self.pool.submit(fn, *args).result if self.pool else partial(fn, *args)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if not self.pool:
            return
        stopped = kind is not None and issubclass(kind, KeyboardInterrupt)
        for worker in active_children() if kind else []:
            if not stopped:  # the other results are not needed
                worker.terminate()
            elif worker.pid:  # it saves what it has learned
                os.kill(worker.pid, signal.SIGINT)
        self.pool.shutdown(cancel_futures=True)


def _prepare_worker(lock: Any) -> None:
    tqdm.set_lock(lock)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # `steps` notes it; nothing else is interrupted
    torch.set_num_threads(1)
