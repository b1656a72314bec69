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
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from multiprocessing import connection, util
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Event, Thread
from typing import Any, cast

from torchrl.envs import EnvBase
from torchrl.weight_update import WeightStrategy

POLL_SECONDS = 1.0
STOPPED_LOOKS = 10  # so often in a row a worker must be found stopped before it is killed
_FAREWELL_SECONDS = 5.0


def _status_of(pid: int) -> tuple[str, int]:
    """The state of a process, such as "T" if a signal has stopped it, and its parent. Linux.

    "" and 0 if it is gone.
    """
    try:
        # "PID (NAME) STATE PARENT ...", where the name may contain anything.
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "", 0
    state, parent, *_ = stat.rpartition(")")[2].split()
    return state, int(parent)


def kill_stopped(find_pids: Callable[[], Iterable[int]], looks: Counter[int], over: Event) -> None:
    """Kills, until `over` is set, the processes that stay stopped.

    For a dead worker there is an error wherever the learner waits; for a silent one there is none.
    `looks` counts how often a process was found stopped, less how often it was found to run since.
    Looks are counted, and not seconds: if the whole run is suspended, nobody looks.
    """
    while not over.wait(POLL_SECONDS):
        for pid in find_pids():
            state, _ = _status_of(pid)
            if state == "T":
                looks[pid] += 1
                if looks[pid] >= STOPPED_LOOKS:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            elif looks[pid] and state not in ("", "Z", "X"):
                looks[pid] -= 1  # it was continued, or it runs to its end


def worker_env(
    create_env_fn: Callable[..., EnvBase] | EnvBase, *, learner: int, **kwargs: Any
) -> EnvBase:
    """The user's env in a worker, whose process ends with the learner's, or if the env fails."""

    def make() -> EnvBase:
        return create_env_fn if isinstance(create_env_fn, EnvBase) else create_env_fn(**kwargs)

    if os.getpid() == learner:  # TorchRL makes an env there too
        return make()
    _end_with_learner(learner)
    with _ending_on_failure():
        env = make()
    env.close = _ending_on_failure()(env.close)
    return env


@contextlib.contextmanager
def _ending_on_failure() -> Iterator[None]:
    """Ends this worker if what runs in it fails: TorchRL would go on, or wait for other workers."""
    try:
        yield
    except BaseException:
        traceback.print_exc()
        os._exit(1)


@cache
def _end_with_learner(learner: int) -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:  # else Ray ends its actors
        Thread(target=_follow, args=(parent, learner), daemon=True).start()


def _follow(parent: BaseProcess, learner: int) -> None:
    """Ends this worker after its parent: the learner, or a worker of its that has started this."""
    between = cast(int, parent.pid) if parent.pid != learner else 0
    # Otherwise the learner may be on another machine.
    watched = _status_of(between)[1] == learner if between else False
    while not connection.wait([parent.sentinel], POLL_SECONDS if watched else None):
        if _is_gone(learner):
            os.kill(between, signal.SIGKILL)  # TorchRL lets it wait for the learner for ever
    # The learner removes its folder when it ends by itself, and not when a signal ends it. It goes
    # on, and needs the folder, if only the worker in between has ended.
    if not between or (watched and _is_gone(learner)):
        shutil.rmtree(util.get_temp_dir(), ignore_errors=True)
    time.sleep(_FAREWELL_SECONDS)  # in which TorchRL may close the env and end the process
    os._exit(1)


def _is_gone(pid: int) -> bool:
    """Whether a process of this machine has ended."""
    return _status_of(pid)[0] in ("", "Z", "X")


class EndingStrategy(WeightStrategy):
    """Ends a worker that cannot take new weights.

    TorchRL's threads that receive weights would write a line, and the learner would wait for ever.
    """

    def __init__(self, extract_as: Any):
        super().__init__(extract_as=extract_as)
        self._learner = os.getpid()

    def apply_weights(self, *args: Any, **kwargs: Any) -> None:
        """As TorchRL's."""
        in_worker = os.getpid() != self._learner
        with _ending_on_failure() if in_worker else contextlib.nullcontext():
            super().apply_weights(*args, **kwargs)
