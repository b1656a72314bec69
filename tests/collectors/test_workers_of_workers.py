"""Workers whose parent is another worker: what they do when that one, or the learner, has ended."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest

from torchrl_kl.collectors import processes

# A learner that starts a worker, and prints the number of its process.
LEARNER = "sleep 600 & echo $!; exec sleep 600"


@contextmanager
def worker_between() -> Iterator[tuple[Any, subprocess.Popen]]:
    """A worker as `parent_process` shows it, and the learner that has started it."""
    learner = subprocess.Popen(["sh", "-c", LEARNER], stdout=subprocess.PIPE, text=True)
    assert learner.stdout is not None
    pid = int(learner.stdout.readline())
    sentinel = os.pidfd_open(pid)
    try:
        yield SimpleNamespace(pid=pid, sentinel=sentinel), learner
    finally:
        os.close(sentinel)
        if Path(f"/proc/{pid}").exists():
            os.kill(pid, signal.SIGKILL)
        learner.kill()
        learner.communicate()


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The learner's folder of temporary files."""
    folder = tmp_path / "pymp"
    folder.mkdir()
    monkeypatch.setattr(processes.util, "get_temp_dir", lambda: str(folder))
    monkeypatch.setattr(processes, "_FAREWELL_SECONDS", 0.0)
    monkeypatch.setattr(processes, "POLL_SECONDS", 0.1)
    monkeypatch.setattr(processes.os, "_exit", lambda code: None)
    return folder


def follow(parent: Any, learner: int) -> None:
    """Follows as a worker does, which ends with it; not for ever."""
    thread = Thread(target=processes._follow, args=(parent, learner), daemon=True)
    thread.start()
    thread.join(timeout=60)
    assert not thread.is_alive()


def test_the_folder_stays_while_the_learner_goes_on(folder):
    with worker_between() as (parent, learner):
        Thread(target=lambda: (time.sleep(0.5), os.kill(parent.pid, signal.SIGKILL))).start()
        follow(parent, learner.pid)
    assert folder.exists()


@pytest.mark.parametrize("is_reaped", [False, True])
def test_a_worker_between_ends_with_the_learner(folder, is_reaped):
    """TorchRL's would wait for it without end, and print errors meanwhile."""
    with worker_between() as (parent, learner):
        Thread(
            target=lambda: (time.sleep(0.5), learner.kill(), is_reaped and learner.wait())
        ).start()
        follow(parent, learner.pid)
    assert not folder.exists()


def test_a_learner_of_another_machine_is_not_looked_for(folder):
    with worker_between() as (parent, _):
        alive = []

        def end() -> None:
            time.sleep(0.5)
            alive.append(not processes._is_gone(parent.pid))
            os.kill(parent.pid, signal.SIGTERM)

        Thread(target=end).start()
        follow(parent, 2**22 + 1)  # above the highest number of a process
    assert folder.exists()
    assert alive == [True]
