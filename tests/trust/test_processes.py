"""Workers that are killed, stopped or raise, and learners that end: an error, and nothing is left.

Each test starts learner.py as a process with its own folder for temporary files, and looks from
outside at what remains. One learner goes through several troubles, one after another, and uses a
new collector at the end: it must be as usable as before. The default lane has a few cells of the
matrix, the slow lane more, and the long one has all of them.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

HERE = Path(__file__).parent
SECONDS = 60  # within which there must be an error
HANGS = 300  # seconds for each trouble, after which a learner is ended with all that it started
# Not the package's: a cache of PyTorch, Ray's logs, and the test's own.
KEPT = re.compile("torchinductor_.*|ray|trouble")
MOMENTS = ("birth", "start", "rollout", "weights", "shutdown")
HARMS = ("killed", "stopped", "raising")
ENDS = {"break": 0, "raise": 1, "sigint": 1, "sigterm": -15, "sigkill": -9}

# Only against hangs.
pytestmark = pytest.mark.timeout(1800, method="thread")


@dataclass
class Run:
    """What a learner has printed and left."""

    code: int
    told: list[dict[str, Any]]
    errors: str
    processes: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    shared: list[str] = field(default_factory=list)

    def assert_nothing_left(self) -> None:
        assert self.processes == []
        assert self.files == []
        assert self.shared == []


def family(folder: Path) -> Iterator[psutil.Process]:
    """All processes that a run has started, also those whose parents are gone."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("TMPDIR") == str(folder):
                yield process


def run(kind: str, where: str, *troubles: str) -> Run:
    """Runs learner.py to its end, and ends whatever it has left."""
    folder = Path(tempfile.mkdtemp(prefix="kl"))  # short: sockets of Ray are in it
    environment = os.environ | {"TMPDIR": str(folder), "PYTHONPATH": str(HERE.parents[1])}
    command = [sys.executable, "-W", "ignore", str(HERE / "learner.py"), kind, where, *troubles]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    learner = subprocess.Popen(command, env=environment, **pipes)  # type: ignore[call-overload]
    pids, given_up = {learner.pid}, time.monotonic() + HANGS * len(troubles)
    try:
        while learner.poll() is None and time.monotonic() < given_up:
            with contextlib.suppress(psutil.Error, subprocess.TimeoutExpired):
                pids |= {p.pid for p in psutil.Process(learner.pid).children(recursive=True)}
                learner.wait(timeout=0.5)
        deadline = time.monotonic() + SECONDS
        while list(family(folder)) and time.monotonic() < deadline:
            time.sleep(0.5)
        left = [repr(process) for process in family(folder)]
    finally:
        for process in [learner, *family(folder)]:
            with contextlib.suppress(psutil.Error):
                process.kill()
        printed, errors = learner.communicate()
        files = sorted(path.name for path in folder.iterdir() if not KEPT.fullmatch(path.name))
        shutil.rmtree(folder, ignore_errors=True)
    names = [path.name for path in Path("/dev/shm").iterdir()]
    marks = [mark for pid in pids for mark in (f"kl{pid}-", f"_{pid}_")]
    shared = [name for name in names if any(mark in name for mark in marks)]
    told = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    return Run(learner.returncode, told, errors, left, files, shared)


def check(found: Run, kind: str, troubles: list[str]) -> None:
    """Each trouble has led to an error that names the worker, and nothing is left."""
    *cells, last = found.told
    assert [cell["trouble"] for cell in cells] == troubles, found.errors[-3000:]
    for cell in cells:
        harm = cell["trouble"].split("-")[1]
        assert cell["seconds"] < SECONDS, cell
        assert cell["alive"] == 0, cell
        assert not cell["group"], cell
        assert cell["torch_threads"] == 1, cell
        if kind == "single":  # its env is in the learner's process
            assert cell["error"] == "ValueError: the worker raises", cell
        else:
            assert (cell["error"] or "").startswith("RuntimeError: worker 1 ("), cell
            assert ("stopped by a signal" in cell["error"]) == (harm == "stopped"), cell
    assert last["frames"] == 72
    assert found.code == 0, found.errors[-3000:]
    found.assert_nothing_left()


def troubles_of(kind: str) -> list[str]:
    """All cells of a kind of collector."""
    if kind == "single":
        return ["start-raising", "rollout-raising", "shutdown-raising"]
    # Ray has processes in stock, and kills its actors without closing their envs.
    moments = MOMENTS[1:-1] if kind.startswith("ray") else MOMENTS
    cells = [f"{moment}-{harm}" for moment in moments for harm in HARMS]
    return [cell for cell in cells if cell != "birth-raising"]


@pytest.mark.parametrize(
    ("kind", "where", "troubles"),
    [
        ("gloo-async", "learner", ["birth-killed"]),
        pytest.param(
            *("multi-sync", "learner", ["birth-stopped", "start-raising", "shutdown-raising"]),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("multi-sync", "workers", ["rollout-stopped", "weights-raising"]),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_some_harms(kind, where, troubles):
    check(run(kind, where, *troubles), kind, troubles)


@pytest.mark.long
@pytest.mark.parametrize("where", ["learner", "workers"])
@pytest.mark.parametrize("kind", ["single", "multi-sync", "multi-async", "gloo", "ray"])
def test_all_harms(kind, where):
    if kind in ("gloo", "ray"):  # each way of collecting in one place
        kind += "-sync" if where == "learner" else "-async"
    troubles = troubles_of(kind)
    check(run(kind, where, *troubles), kind, troubles)


def check_end(kind: str, where: str, how: str) -> None:
    """The learner ends in that way, and nothing is left of it."""
    found = run(kind, where, how)
    assert found.told == [{"how": how}], found.errors[-3000:]
    # Ray's own handler of SIGTERM ends the process with 15, or aborts it.
    ways = {-15, 15, -6} if (how, kind) == ("sigterm", "ray-async") else {ENDS[how]}
    assert found.code in ways
    found.assert_nothing_left()


@pytest.mark.parametrize(
    ("kind", "where", "how"),
    [("multi-async", "workers", "sigterm"), ("multi-sync", "workers", "sigint")],
)
def test_a_learner_that_is_interrupted(kind, where, how):
    check_end(kind, where, how)


@pytest.mark.long
@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("where", ["learner", "workers"])
@pytest.mark.parametrize("kind", ["single", "multi-sync", "multi-async", "gloo-async", "ray-async"])
def test_a_learner_that_ends_without_shutdown(kind, where, how):
    check_end(kind, where, how)


@pytest.mark.long
@pytest.mark.parametrize("where", ["learner", "workers"])
@pytest.mark.parametrize("kind", ["single", "multi-sync", "multi-async", "ray-sync", "ray-async"])
def test_two_collectors_at_once(kind, where):
    found = run(kind, where, "two")
    assert [one.get("two", one.get("frames")) for one in found.told] == [[72, 72], 72]
    found.assert_nothing_left()


@pytest.mark.long
def test_two_process_groups_are_refused():
    found = run("gloo-sync", "learner", "two")
    assert found.code == 1
    assert "this process has one already: shut down its other collector first" in found.errors
    found.assert_nothing_left()
