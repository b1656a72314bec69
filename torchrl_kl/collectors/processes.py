"""Learner and workers watch each other: none of them waits for, or outlives, one that is gone."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from multiprocessing import connection, util
from pathlib import Path
from threading import Event, Thread
from typing import Any

from torchrl.envs import EnvBase
from torchrl.weight_update import WeightStrategy

POLL_SECONDS = 1.0
STOPPED_LOOKS = 10  # so often in a row a worker must be found stopped before it is killed
_FAREWELL_SECONDS = 5.0


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal, so that it is alive and silent. Linux only."""
    try:
        # "PID (NAME) STATE ...", where the name may contain anything.
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[:1] == ["T"]


def kill_stopped(find_pids: Callable[[], Iterable[int]], killed: set[int], over: Event) -> None:
    """Kills, until `over` is set, the processes that stay stopped, and adds them to `killed`.

    For a dead worker there is an error wherever the learner waits; for a silent one there is none.
    Looks are counted, and not seconds: if the whole run is suspended, nobody looks.
    """
    looks: Counter[int] = Counter()
    while not over.wait(POLL_SECONDS):
        looks = Counter({pid: looks[pid] + 1 for pid in find_pids() if is_stopped(pid)})
        for pid in (pid for pid, count in looks.items() if count >= STOPPED_LOOKS):
            killed.add(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def worker_env(
    create_env_fn: Callable[..., EnvBase] | EnvBase, *, learner: int, **kwargs: Any
) -> EnvBase:
    """The user's env in a worker, whose process ends when that of the learner ends."""

    def make() -> EnvBase:
        return create_env_fn if isinstance(create_env_fn, EnvBase) else create_env_fn(**kwargs)

    if os.getpid() == learner:  # TorchRL makes an env there too
        return make()
    _end_with_learner()
    try:
        return make()
    except Exception:
        # TorchRL would send the error to a learner that may be waiting for another worker.
        traceback.print_exc()
        raise SystemExit(1) from None


@cache
def _end_with_learner() -> None:
    learner = multiprocessing.parent_process()
    if learner is not None:  # else Ray ends its actors
        Thread(target=_follow, args=(learner.sentinel,), daemon=True).start()


def _follow(sentinel: int) -> None:
    connection.wait([sentinel])
    # The learner removes its folder when it ends by itself, and not when a signal ends it.
    shutil.rmtree(util.get_temp_dir(), ignore_errors=True)
    time.sleep(_FAREWELL_SECONDS)  # in which TorchRL may close the env and end the process
    os._exit(1)


class EndingStrategy(WeightStrategy):
    """Ends a worker that cannot take new weights.

    TorchRL's threads that receive weights would write a line, and the learner would wait for ever.
    """

    def __init__(self, extract_as: Any):
        super().__init__(extract_as=extract_as)
        self._learner = os.getpid()

    def apply_weights(self, *args: Any, **kwargs: Any) -> None:
        """As TorchRL's."""
        try:
            super().apply_weights(*args, **kwargs)
        except BaseException:
            if os.getpid() == self._learner:
                raise
            traceback.print_exc()
            os._exit(1)
