"""How workers are watched, with processes that are no workers: dead, stopped, or in the way."""

import contextlib
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest
from tensordict import TensorDict

from tests.helpers import WalkEnv
from torchrl_kl.collectors import processes, watched
from torchrl_kl.collectors.processes import EndingStrategy, kill_stopped, worker_env


@contextlib.contextmanager
def sleeper(name: str = "sleep") -> Iterator[subprocess.Popen]:
    """A process that does nothing."""
    process = subprocess.Popen([name, "600"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def until(condition: Any) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def watching(monkeypatch) -> Iterator[tuple[list[int], Counter[int]]]:
    """The processes that are watched, and how often each was found stopped."""
    monkeypatch.setattr(processes, "POLL_SECONDS", 0.02)
    pids, looks, over = list[int](), Counter[int](), Event()
    thread = Thread(target=kill_stopped, args=(lambda: pids, looks, over), daemon=True)
    thread.start()
    yield pids, looks
    over.set()
    thread.join(timeout=60)
    assert not thread.is_alive()


class TestStopped:
    def test_one_that_stays_stopped_is_killed_and_another_goes_on(self, watching):
        pids, looks = watching
        with sleeper() as stopped, sleeper() as busy:
            pids += [busy.pid, stopped.pid]
            stopped.send_signal(signal.SIGSTOP)
            assert stopped.wait(timeout=60) == -signal.SIGKILL
            assert busy.poll() is None
        assert looks[stopped.pid] >= processes.STOPPED_LOOKS
        assert looks[busy.pid] == 0

    def test_one_that_goes_on_in_time_lives(self, watching, monkeypatch):
        monkeypatch.setattr(processes, "STOPPED_LOOKS", 10**9)
        pids, looks = watching
        with sleeper() as process:
            pids.append(process.pid)
            process.send_signal(signal.SIGSTOP)
            until(lambda: looks[process.pid] > 5)
            process.send_signal(signal.SIGCONT)
            until(lambda: looks[process.pid] == 0)
            assert process.poll() is None

    @pytest.mark.parametrize(
        ("states", "expected"),
        [
            ("TTTSTRSS", [1, 2, 3, 2, 3, 2, 1, 0]),
            ("TTTZX ", [1, 2, 3, 3, 3, 3]),  # what has ended keeps them: they say why it died
            ("T" * 9 + "S", [*range(1, 10), 8]),
            ("T" * 10 + "Z", [*range(1, 10), "killed", 10, 10]),
        ],
    )
    def test_how_often_one_was_found_stopped(self, states, expected, monkeypatch):
        each, looks, seen = iter(states), Counter[int](), []
        monkeypatch.setattr(processes, "_status_of", lambda pid: (next(each).strip(), 0))

        def kill(pid: int, number: int) -> None:
            seen.append("killed")
            raise ProcessLookupError  # it has ended meanwhile

        monkeypatch.setattr(processes.os, "kill", kill)
        turns = iter([False] * len(states) + [True])
        waits: Any = SimpleNamespace(wait=lambda seconds: seen.append(looks[7]) or next(turns))
        kill_stopped(lambda: [7], looks, waits)
        assert seen == [0, *expected]


def test_the_status_of_a_process_whose_name_looks_like_one(tmp_path):
    name = tmp_path / "a) T 1"
    name.write_text("#!/bin/sh\nwhile :; do sleep 1; done\n")
    name.chmod(0o700)
    with sleeper(str(name)) as process:
        until(lambda: processes._status_of(process.pid)[0] == "S")
        assert processes._status_of(process.pid) == ("S", os.getpid())
    assert processes._status_of(process.pid) == ("", 0)
    assert processes._is_gone(process.pid)
    assert not processes._is_gone(os.getpid())


class Ended(BaseException):
    """In place of the end of this process."""


@pytest.fixture
def ending(monkeypatch) -> None:
    def end(code: int) -> None:
        assert code == 1
        raise Ended

    monkeypatch.setattr(processes.os, "_exit", end)
    monkeypatch.setattr(processes, "_end_with_learner", lambda learner: None)


def failing(**kwargs: Any) -> Any:
    raise ValueError("no env")


@pytest.mark.usefixtures("ending")
class TestEndingOnFailure:
    OTHER = 2**22 + 1  # above the highest number of a process

    def test_an_env_that_cannot_be_made_ends_a_worker_only(self):
        with pytest.raises(Ended):
            worker_env(failing, learner=self.OTHER)
        with pytest.raises(ValueError, match="no env"):
            worker_env(failing, learner=os.getpid())

    def test_so_does_one_that_cannot_be_closed(self):
        def make(**kwargs: Any) -> Any:
            env = WalkEnv((2,))
            env.close = lambda **kwargs: failing()  # type: ignore[method-assign]
            return env

        with pytest.raises(Ended):
            worker_env(make, learner=self.OTHER).close()
        with pytest.raises(ValueError, match="no env"):
            worker_env(make, learner=os.getpid()).close()

    def test_an_env_is_given_its_arguments_or_is_taken_as_it_is(self):
        env = WalkEnv((2,))
        assert worker_env(env, learner=self.OTHER) is env
        made = worker_env(WalkEnv, learner=self.OTHER, batch_size=(3,))
        assert made.batch_size == (3,)

    def test_so_do_weights_that_do_not_fit(self):
        strategy = EndingStrategy("tensordict")
        given = (TensorDict(a=1.0), TensorDict(b=1.0))
        with pytest.raises(KeyError):
            strategy.apply_weights(*given)
        strategy._learner = self.OTHER
        with pytest.raises(Ended):
            strategy.apply_weights(*given)


class Workers(watched.WatchedSingle):
    """A collector of which only the workers are there."""

    def __init__(self, *codes: int | None):  # of their exit; None: alive
        self.procs = [FakeProcess(worker, code) for worker, code in enumerate(codes)]
        self._stopped, self._named, self._over = Counter[int](), False, Event()


class FakeProcess(processes.BaseProcess):
    """A process without one."""

    def __init__(self, number: int, code: int | None):
        self.number, self.code, self.ready = number, code, -1

    def __del__(self) -> None:
        """Has nothing to end."""

    @property
    def pid(self) -> int:
        return self.number + 1

    @property
    def sentinel(self) -> int:
        return self.ready

    def join(self, timeout: float | None = None) -> None:
        self.code = 1 if self.code is None else self.code

    @property
    def exitcode(self) -> int | None:
        if self.code == 256:
            raise ValueError("process object is closed")
        return self.code


class TestTheDead:
    @pytest.mark.parametrize(
        ("codes", "ignored", "expected"),
        [
            ((None, 0), 0, None),
            ((None, 1), 0, "worker 1 (exit code 1)"),
            ((-15, -9), 0, "worker 1 (exit code -9)"),  # TorchRL has terminated the other
            ((-15, None), 0, "worker 0 (exit code -15)"),
            ((-15, None), -15, None),
            ((256, 1), 0, "worker 1 (exit code 1)"),  # closed by TorchRL
        ],
    )
    def test_the_one_that_failed_first_is_named(self, codes, ignored, expected):
        assert Workers(*codes)._find_failed(ignored=ignored) == expected

    def test_one_that_was_stopped_is_said_to_be(self):
        workers = Workers(None, -9)
        workers._stopped[2] = 10
        assert workers._find_failed() == "worker 1 (stopped by a signal, then killed)"

    def test_only_processes_are_looked_at(self):
        workers: Any = Workers(1)
        workers.jobs = [SimpleNamespace(exitcode=1)]  # of another launcher
        assert workers._processes() == workers.procs
        assert workers._pids() == [1]

    def test_a_call_that_waits_for_a_dead_worker_is_left(self, monkeypatch):
        monkeypatch.setattr(watched, "POLL_SECONDS", 0.02)
        workers: Any = Workers(None, None)
        over = Event()
        Thread(target=lambda: (time.sleep(0.2), setattr(workers.procs[1], "code", 1))).start()
        with pytest.raises(RuntimeError, match="worker 1 .exit code 1. died"):
            workers._watch(lambda: over.wait(60))
        with pytest.raises(RuntimeError, match="worker 1"):
            workers._watch(lambda: pytest.fail("it is called although a worker is dead"))
        over.set()

    def test_the_error_of_a_watched_call_is_raised(self):
        with pytest.raises(ValueError, match="no env"):
            Workers(None)._watch(failing)
        assert Workers(None)._watch(lambda: None) is None

    def test_a_worker_may_die_instead_of_taking_weights(self, monkeypatch):
        monkeypatch.setattr(watched, "POLL_SECONDS", 0.02)
        workers, over = Workers(None, None), Event()
        monkeypatch.setattr(
            watched.Collector, "update_policy_weights_", lambda *_, **__: over.wait(60)
        )
        Thread(target=lambda: (time.sleep(0.2), setattr(workers.procs[1], "code", 1))).start()
        with pytest.raises(RuntimeError, match="worker 1 .exit code 1. of the collector died"):
            workers.update_policy_weights_()
        assert not over.is_set()
        assert workers._over.is_set()
        over.set()

    def test_a_broken_connection_is_seen_before_the_end_of_a_process(self):
        workers = Workers(None, None)
        reading, writing = os.pipe()
        os.close(writing)
        idle = os.pipe()
        workers.procs[0].ready, workers.procs[1].ready = idle[0], reading
        try:
            assert workers._find_dead(EOFError()) == "worker 1 (exit code 1)"
        finally:
            for end in (reading, *idle):
                os.close(end)

    def test_errors_of_the_user_are_not_of_a_worker(self):
        assert Workers(1)._find_dead(ValueError("a user's")) is None
        slow = ValueError("Cannot close a process while it is still running.")
        assert Workers(1)._find_dead(slow) == "worker 0 (exit code 1)"
