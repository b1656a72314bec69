"""TorchRL's collectors with what this package adds: batches pass through the stack, and a dead worker is an error.

Left alone, a dead worker can keep the learner waiting for ever: for the acknowledgment of new weights, or for a status
that nobody will set. Each wait of that kind asks here whether all workers are alive.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from queue import Empty
from typing import Any, Protocol

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn
from torchrl.collectors import BaseCollector, Collector, MultiAsyncCollector, MultiSyncCollector
from torchrl.collectors.distributed import DistributedCollector, RayCollector

_POLL_SECONDS = 1.0
_EXIT_SECONDS = 5.0
_PROBE_SECONDS = 10.0


class Link(Protocol):
    """What stands between a collector and the learner."""

    def receive(self, batch: TensorDictBase, collector: WatchedCollector) -> TensorDictBase:
        """A batch as the user gets it."""
        ...

    def send(self, collector: WatchedCollector) -> None:
        """Tells the workers of the coefficient; called before they are asked for work."""


class WatchedCollector(BaseCollector):
    """Mixin that stands before a collector class of TorchRL.

    Args:
        link: what batches go through when they arrive, and what tells the workers of the coefficient.
    """

    def __init__(self, *args: Any, link: Link, **kwargs: Any):
        self._link = link
        try:
            super().__init__(*args, **kwargs)
        except BaseException:
            self._kill()
            raise

    def iterator(self) -> Iterator[TensorDictBase]:
        """Batches as the user gets them."""
        with self._watched():
            self._link.send(self)
            for batch in super().iterator():  # type: ignore[safe-super]
                yield self._link.receive(batch, self)
                self.check_workers()
                self._link.send(self)

    def update_policy_weights_(self, *args: Any, **kwargs: Any) -> None:
        """As TorchRL's; RuntimeError if a worker is dead."""
        with self._watched():
            self.check_workers()
            super().update_policy_weights_(*args, **kwargs)
            self.check_workers()

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Ends everything, and says which worker died, if an exception comes of a dead worker."""
        try:
            yield
        except Exception as error:
            dead = self._find_cause(error)
            if dead is None:
                raise
            with contextlib.suppress(
                Exception
            ):  # what is left of the collector may fail in many ways
                self.shutdown()
            raise RuntimeError(
                f"{dead} of the collector died: the other workers were stopped, and the collector cannot go on. Look "
                "for its traceback above; without one it was killed, by the system for want of memory perhaps."
            ) from error

    def check_workers(self) -> None:
        """RuntimeError if a worker is dead."""
        dead = self._find_dead()
        if dead is not None:
            raise RuntimeError(f"{dead} died.")

    def _find_dead(self) -> str | None:
        """The first dead worker, in words."""
        return None

    def _find_cause(self, error: Exception) -> str | None:
        """The dead worker that an exception comes of, if it does."""
        return self._find_dead()

    def _kill(self) -> None:
        """Kills all worker processes at once."""


class WatchedSingle(WatchedCollector, Collector):
    """A Collector: its worker is this process."""

    def update_policy_weights_(self, policy_or_weights: Any = None, **kwargs: Any) -> None:
        """As TorchRL's, which here takes no module."""
        if isinstance(policy_or_weights, nn.Module):
            weights: Any = TensorDict.from_module(policy_or_weights)
            policy_or_weights = weights.data
        super().update_policy_weights_(policy_or_weights, **kwargs)


class _WatchedProcesses(WatchedCollector):
    """Collectors whose workers are child processes of this one."""

    def _processes(self) -> list[BaseProcess]:
        raise NotImplementedError

    def _find_dead(self) -> str | None:
        codes = [(_exit_code(process), worker) for worker, process in enumerate(self._processes())]
        # TorchRL terminates the others itself when it notices one: those are not the cause.
        dead = sorted((code == -signal.SIGTERM, worker, code) for code, worker in codes if code)
        return f"worker {dead[0][1]} (exit code {dead[0][2]})" if dead else None

    def _find_cause(self, error: Exception) -> str | None:
        if isinstance(error, (RuntimeError, OSError, EOFError)) and self._find_dead() is None:
            # A broken connection is seen before the end of the process that broke it.
            with contextlib.suppress(ValueError):  # closed by TorchRL
                ending = wait(
                    [process.sentinel for process in self._processes()], timeout=_EXIT_SECONDS
                )
                for process in self._processes():
                    if process.sentinel in ending:
                        process.join()
        return self._find_dead()

    def _kill(self) -> None:
        for process in self._processes():
            with contextlib.suppress(ValueError):  # closed by TorchRL
                process.kill()
                process.join()


class _WatchedMulti(_WatchedProcesses):
    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        for scheme in (getattr(self, "_weight_sync_schemes", None) or {}).values():
            queues = getattr(scheme, "_ack_queues", {})
            queues.update(
                {
                    worker: _WatchedQueue(queue, self.check_workers)
                    for worker, queue in queues.items()
                }
            )

    def _processes(self) -> list[BaseProcess]:
        return list(getattr(self, "procs", []))

    def shutdown(self, *args: Any, **kwargs: Any) -> None:
        """As TorchRL's, which leaves threads behind and changes the number of this process' threads."""
        if self._find_dead() is not None:
            self._kill()
        threads = torch.get_num_threads()
        super().shutdown(*args, **kwargs)  # type: ignore[safe-super]
        torch.set_num_threads(threads)
        for scheme in (getattr(self, "_weight_sync_schemes", None) or {}).values():
            scheme.shutdown()


class WatchedMultiSync(_WatchedMulti, MultiSyncCollector):
    """A MultiSyncCollector."""


class WatchedMultiAsync(_WatchedMulti, MultiAsyncCollector):
    """A MultiAsyncCollector."""


class WatchedDistributed(_WatchedProcesses, DistributedCollector):
    """A DistributedCollector; only workers that it launched itself as processes (`launcher="mp"`) are watched."""

    def __init__(self, *args: Any, **kwargs: Any):
        had_group = torch.distributed.is_initialized()
        try:
            with _one_thread_per_child():
                super().__init__(*args, **kwargs)
        except BaseException:
            if torch.distributed.is_initialized() and not had_group:
                torch.distributed.destroy_process_group()
            raise
        self._store: Any = _WatchedStore(self._store, self.check_workers)
        for scheme in (self._weight_sync_schemes or {}).values():
            for transport in (getattr(scheme, "_sender_transports", None) or {}).values():
                transport._store = _WatchedStore(transport._store, self.check_workers)

    def _processes(self) -> list[BaseProcess]:
        return [job for job in getattr(self, "jobs", []) if isinstance(job, BaseProcess)]

    def shutdown(self, *args: Any, **kwargs: Any) -> None:
        """As TorchRL's, which would wait for a dead worker's goodbye."""
        if self._find_dead() is not None and not getattr(self, "_shutdown", False):
            self._kill()
            self._store = self._store.unwatched
            for rank in range(1, self.num_workers + 1):
                self._store.set(f"NODE_{rank}_out", b"down")
        super().shutdown(*args, **kwargs)
        self._kill()  # who has said goodbye and is still there


class WatchedRay(WatchedCollector, RayCollector):
    """A RayCollector. Ray notices the death of an actor; its words are made the same as everywhere."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.update_policy_weights_()  # TorchRL connects the actors to the learner's weights at the first call

    def _find_dead(self) -> str | None:
        return getattr(self, "_dead", None)

    def _find_cause(self, error: Exception) -> str | None:
        self._dead = self._probe_actors()
        return self._dead

    def _probe_actors(self) -> str | None:
        import ray
        from ray.exceptions import RayActorError

        probes = [actor.__ray_ready__.remote() for actor in self.remote_collectors]
        ready, _ = ray.wait(
            probes, num_returns=len(probes), timeout=_PROBE_SECONDS
        )  # an actor may be busy
        for worker, probe in enumerate(probes):
            if probe in ready:
                try:
                    ray.get(probe)
                except RayActorError:
                    return f"worker {worker} (a Ray actor)"
        return None

    def _kill(self) -> None:
        with contextlib.suppress(Exception):  # nothing may hide the error that it is called for
            self.shutdown()


class _WatchedQueue:
    """A queue whose `get` does not outlast the workers."""

    def __init__(self, queue: Any, check: Callable[[], None]):
        self._queue, self._check = queue, check

    def get(self, *args: Any, **kwargs: Any) -> Any:
        while True:
            try:
                return self._queue.get(timeout=_POLL_SECONDS)
            except Empty:
                self._check()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)


class _WatchedStore:
    """A torch.distributed store whose `get` does not outlast the workers."""

    def __init__(self, store: Any, check: Callable[[], None]):
        self.unwatched, self._check = store, check

    def get(self, key: str) -> bytes:
        self._check()
        while not self.unwatched.check([key]):
            time.sleep(1e-3)
            self._check()
        value = self.unwatched.get(key)
        if value == b"busy":  # the caller asks again at once: leave the core to the workers
            time.sleep(1e-3)
        return value

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unwatched, name)


@contextlib.contextmanager
def _one_thread_per_child() -> Iterator[None]:
    """Processes started meanwhile get one thread each, unless the user has said how many.

    TorchRL says so itself for MultiSync- and MultiAsyncCollector, and Ray for its actors.
    """
    given = "OMP_NUM_THREADS" in os.environ
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        yield
    finally:
        if not given:
            del os.environ["OMP_NUM_THREADS"]


def _exit_code(process: BaseProcess) -> int | None:
    """The exit code of a process; None while it runs, or where TorchRL has closed it."""
    try:
        return process.exitcode
    except ValueError:
        return None
