"""TorchRL's collectors with a link to the stack, and with errors that name dead workers.

TorchRL 0.14.1 notices most deaths by itself, but not where it waits without end.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import signal
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from functools import partial
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from threading import Event, Thread
from typing import Any, cast

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase
from torch import distributed, nn
from torchrl.collectors import BaseCollector, Collector, MultiAsyncCollector, MultiSyncCollector
from torchrl.collectors.distributed import DistributedCollector, RayCollector
from torchrl.collectors.utils import split_trajectories
from torchrl.weight_update import (
    DistributedWeightSyncScheme,
    SharedMemWeightSyncScheme,
    WeightSyncScheme,
)

from torchrl_kl import _torchrl
from torchrl_kl._torchrl import ray_pids
from torchrl_kl.collectors.links import LearnerLink, WorkerLink, restore_trajectories
from torchrl_kl.collectors.processes import (
    POLL_SECONDS,
    EndingStrategy,
    kill_stopped,
)

_EXIT_SECONDS = 5.0
_ANSWER_SECONDS = 60.0  # for a worker of a DistributedCollector that is to end
_PROBE_SECONDS = 10.0
_STOPPED = "stopped by a signal, then killed"
_USER_ERRORS = (ArithmeticError, LookupError, TypeError, ValueError)


class WatchedCollector(BaseCollector):
    """Mixin for a collector class of TorchRL, to be placed before it; `split_trajs` is as there."""

    _n_stacked = 0  # dimensions that a batch of a collector of collectors has in front

    def __init__(
        self, *args: Any, link: LearnerLink | WorkerLink, split_trajs: bool = False, **kwargs: Any
    ):
        self._link, self._split_trajs = link, split_trajs
        self._cat_results = kwargs.get("cat_results")
        # `_stopped`: of workers, by process; `_over`: shut down, or nothing refers to this.
        self._stopped, self._over = Counter[int](), Event()
        self._built, self._named = False, False
        reference: weakref.ref[WatchedCollector] = weakref.ref(
            self, lambda _, over=self._over: over.set()
        )
        # Python waits for child processes when it exits, for ever if Ctrl-C has left the loop.
        atexit.register(_shut_down, reference)
        looked_at = (partial(_look_at, reference), self._stopped, self._over)
        Thread(target=kill_stopped, args=looked_at, daemon=True).start()
        try:
            with self._naming_dead():
                super().__init__(*args, **kwargs)
        except BaseException:
            _shut_down(reference)
            raise
        self._built = True

    def __iter__(self) -> Iterator[TensorDictBase]:
        """Batches as the user gets them: of rows, or of whole trajectories."""
        for batch in super().__iter__():
            yield _name_time(batch)

    def iterator(self) -> Iterator[TensorDictBase]:
        """Batches of rows; of `trajs_per_batch`, what TorchRL joins to trajectories."""
        with self._naming_dead():
            self._link.send(self)
            for batch in super().iterator():  # type: ignore[safe-super]
                yield self._receive(batch)
                # What the user's loop has changed, before synchronous workers are asked again.
                self._link.send(self)

    def _receive(self, batch: TensorDictBase) -> TensorDictBase:
        # The rows of several workers, (num_workers, *env, T), may come as a lazy stack.
        if isinstance(batch, LazyStackedTensorDict):
            batch = LazyStackedTensorDict.maybe_dense_stack(batch.unbind(0), 0)
        batch = restore_trajectories(batch)
        # `cat_results` counts the dimensions before rows of several collectors were stacked.
        if self._cat_results == batch.ndim - 1 - self._n_stacked:
            raise RuntimeError(
                f"`cat_results` = {self._cat_results} joined the rows of several workers along "
                "time, so their open trajectories would look finished: leave it out, or make envs "
                "with a batch size."
            )
        batch = self._link.receive(_name_time(batch))
        # At once: asynchronous workers go on while the user learns from the batch.
        self._link.send(self)
        # Split last: TorchRL's own option gives the trajectories of each batch new ids first.
        return split_trajectories(batch, prefix="collector") if self._split_trajs else batch

    def update_policy_weights_(self, *args: Any, **kwargs: Any) -> None:
        """As TorchRL's, which may wait without end for the answer of a dead worker."""
        update = partial(super().update_policy_weights_, *args, **kwargs)
        with self._naming_dead():
            self._watch(update) if self._processes() else update()

    def shutdown(self, *args: Any, **kwargs: Any) -> None:
        """As TorchRL's; RuntimeError if a worker died meanwhile or before."""
        try:
            self._shut_down(*args, **kwargs)
        finally:
            self._over.set()
        # Those that were terminated needed too long, or had another one's failure to end for.
        dead = None if self._named else self._find_failed(ignored=-signal.SIGTERM)
        if dead is not None:
            self._named = True
            raise RuntimeError(
                f"{dead} of the collector died before it was shut down in order: look for its "
                "traceback above. All workers have ended; what this one did last may be lost."
            )

    def _shut_down(self, *args: Any, **kwargs: Any) -> None:
        super().shutdown(*args, **kwargs)  # type: ignore[safe-super]

    def _watch(self, call: Callable[[], None]) -> None:
        """Calls in a thread that may hang for ever, while this one looks after the workers."""
        outcome = Future[None]()

        def run() -> None:
            try:
                outcome.set_result(call())
            except BaseException as error:
                outcome.set_exception(error)

        self._refuse_dead()
        Thread(target=run, daemon=True).start()
        while not wait([outcome], timeout=POLL_SECONDS).done:
            self._refuse_dead()
        outcome.result()

    @contextlib.contextmanager
    def _naming_dead(self) -> Iterator[None]:
        """Shuts down and names the dead worker where an exception comes from one."""
        try:
            yield
        except Exception as error:
            dead = self._find_dead(error)
            if dead is None:
                raise
            self._named = True
            _shut_down(weakref.ref(self))
            raise RuntimeError(
                f"{dead} of the collector died: the other workers were stopped, and the collector "
                "cannot go on. Look for its traceback above; if there is none, it was killed, "
                "perhaps by the system for lack of memory."
            ) from error

    def _find_dead(self, error: Exception) -> str | None:
        """The dead worker that an exception comes from, in words; None if it has another cause."""
        # The last one is TorchRL's when a worker that it terminates needs more than 0.1 seconds.
        if isinstance(error, _USER_ERRORS) and "close a process" not in str(error):
            return None
        processes = self._processes()
        if processes and self._find_failed() is None:
            # A broken connection is seen before the end of the process that broke it.
            by_sentinel = {process.sentinel: process for process in processes}
            for ending in connection.wait(list(by_sentinel), timeout=_EXIT_SECONDS):
                by_sentinel[cast(int, ending)].join()
        return self._find_failed()

    def _find_failed(self, *, ignored: int = 0) -> str | None:
        """The first worker process that has failed, with another code than `ignored`, in words."""
        failed = []
        for worker, process in enumerate(self._processes()):
            with contextlib.suppress(ValueError):  # TorchRL has closed it
                code = process.exitcode
                why = _STOPPED if self._stopped[process.pid or 0] else f"exit code {code}"
                if code and code != ignored:
                    # TorchRL terminates the others when it notices one: those come last.
                    failed.append((code == -signal.SIGTERM, worker, why))
        return "worker {1} ({2})".format(*min(failed)) if failed else None

    def _refuse_dead(self) -> None:
        dead = self._find_failed()
        if dead is not None:
            raise RuntimeError(f"{dead} died.")

    def _processes(self) -> list[BaseProcess]:
        """The workers that are child processes of this one."""
        # MultiSyncCollector and MultiAsyncCollector keep them as `procs`, DistributedCollector as
        # `jobs`; a Collector has none, and those of a RayCollector are Ray's.
        jobs = [*getattr(self, "procs", []), *getattr(self, "jobs", [])]
        return [job for job in jobs if isinstance(job, BaseProcess)]

    def _pids(self) -> list[int]:
        """The workers' processes on this machine, by number."""
        pids = []
        for process in self._processes():
            with contextlib.suppress(ValueError):  # TorchRL has closed it
                pids.append(process.pid or 0)
        return pids


class WatchedSingle(WatchedCollector, Collector):
    """A Collector: its worker is this process."""

    def update_policy_weights_(self, policy_or_weights: Any = None, **kwargs: Any) -> None:
        """As TorchRL's, which does not take a module here."""
        if isinstance(policy_or_weights, nn.Module):
            policy_or_weights = cast(Any, TensorDict.from_module(policy_or_weights)).data
        super().update_policy_weights_(policy_or_weights, **kwargs)

    def follow(self, coeff: float, weights: dict[str, torch.Tensor]) -> None:
        """Sets what the copy of the stack in the env follows."""
        cast(Any, self.env).follow(coeff, weights)


class _WatchedMulti(WatchedCollector):
    def __init__(self, *args: Any, **kwargs: Any):
        if kwargs.get("weight_updater") is None:  # as TorchRL does, which would keep it to itself
            kwargs.setdefault("weight_sync_schemes", {"policy": SharedMemWeightSyncScheme()})
        self._schemes = kwargs.get("weight_sync_schemes") or {}
        _end_workers_on_failure(self._schemes)
        super().__init__(*args, **kwargs)

    def _shut_down(self, *args: Any, **kwargs: Any) -> None:
        # TorchRL changes the number of threads of this process, and leaves some.
        threads = torch.get_num_threads()
        super()._shut_down(*args, **kwargs)
        for process in self._processes():
            with contextlib.suppress(ValueError):  # TorchRL has closed it
                process.join(_EXIT_SECONDS)  # it may have been killed a moment ago
        torch.set_num_threads(threads)
        for scheme in self._schemes.values():
            _torchrl.release_sender(scheme)
            scheme.shutdown()  # when Python exits it would be too late, and never return


class WatchedMultiSync(_WatchedMulti, MultiSyncCollector):
    """A MultiSyncCollector."""


class WatchedMultiAsync(_WatchedMulti, MultiAsyncCollector):
    """A MultiAsyncCollector."""


class WatchedDistributed(WatchedCollector, DistributedCollector):
    """A DistributedCollector, whose workers are watched if they are processes of this machine."""

    _open = False  # whether there may be workers, and their process group
    _answer_by = math.inf

    def __init__(self, *args: Any, **kwargs: Any):
        if distributed.is_initialized():
            raise RuntimeError(
                "a DistributedCollector makes the process group of torch.distributed, and this "
                "process has one already: shut down its other collector first, or use a "
                "MultiSyncCollector or a RayCollector, of which there may be several."
            )
        self._started, self._open = False, True
        if kwargs.get("weight_updater") is None:  # as TorchRL does
            how = {"backend": kwargs.get("backend", "gloo"), "sync": kwargs.get("sync", False)}
            kwargs.setdefault("weight_sync_schemes", {"policy": DistributedWeightSyncScheme(**how)})
        _end_workers_on_failure(kwargs.get("weight_sync_schemes") or {})
        _torchrl.watch_workers(self, self._watch, self._refuse_dead)
        given = "OMP_NUM_THREADS" in os.environ
        # One thread per worker, as TorchRL sets it for MultiSyncCollector, and Ray for its actors.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        try:
            super().__init__(*args, **kwargs)
        finally:
            if not given:
                del os.environ["OMP_NUM_THREADS"]
        self._started = True

    def __del__(self) -> None:
        # As TorchRL's other collectors do: workers of workers would keep Python from its end.
        with contextlib.suppress(Exception):
            if self._open:
                self.shutdown()

    def _refuse_dead(self) -> None:
        super()._refuse_dead()
        if time.monotonic() > self._answer_by:
            raise RuntimeError(f"a worker has not answered for {_ANSWER_SECONDS:.0f} seconds.")

    def _shut_down(self, *args: Any, **kwargs: Any) -> None:
        if not self._open:
            return
        self._answer_by = time.monotonic() + _ANSWER_SECONDS
        try:
            # TorchRL would wait for the last message of a dead worker.
            if self._started and self._find_failed() is None:
                with contextlib.suppress(RuntimeError):  # workers that do not answer are ended
                    super()._shut_down(*args, **kwargs)
        finally:
            # Those that did not end by themselves; for the others this does nothing.
            for end in (BaseProcess.terminate, BaseProcess.kill):
                for job in self._processes():
                    end(job)
                    job.join(_EXIT_SECONDS)
            self._open = False
            if distributed.is_initialized():
                distributed.destroy_process_group()


class WatchedRay(WatchedCollector, RayCollector):
    """A RayCollector. Ray's own error for a dead actor does not say which worker it was."""

    _known: Sequence[int] = ()

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if kwargs.get("num_workers_per_collector", 1) > 1:
            given = (one.get("cat_results") for one in kwargs.get("collector_kwargs") or ())
            self._cat_results = next((one for one in given if one is not None), None)
            self._n_stacked = int(self._sync)
        self.update_policy_weights_()  # TorchRL connects the actors to the policy at the first call

    def add_collectors(self, *args: Any, **kwargs: Any) -> None:
        """As TorchRL's, which would wait for one actor after the other to start."""
        import ray

        super().add_collectors(*args, **kwargs)
        starting = [actor.__ray_ready__.remote() for actor in self.remote_collectors]
        while starting:
            started, starting = ray.wait(starting)
            ray.get(started)

    def follow(self, coeff: float, weights: dict[str, torch.Tensor]) -> None:
        """Sends what the copies of the stack in the envs follow."""
        # No answer is waited for: an actor treats its messages in order, between two batches.
        for actor in self.remote_collectors:
            actor.cascade_execute.remote("env.follow", coeff, weights)

    def _find_dead(self, error: Exception) -> str | None:
        import ray
        from ray.exceptions import RayActorError

        probes = [actor.__ray_ready__.remote() for actor in self.remote_collectors]
        ready, _ = ray.wait(probes, num_returns=len(probes), timeout=_PROBE_SECONDS)
        for worker, probe in enumerate(probes):
            if probe in ready:  # else the actor is busy
                try:
                    ray.get(probe)
                except RayActorError:
                    stopped = any(self._stopped[pid] for pid in self._known[worker : worker + 1])
                    return f"worker {worker} (a Ray actor{', ' + _STOPPED if stopped else ''})"
        return None

    def _pids(self) -> Sequence[int]:
        actors = getattr(self, "remote_collectors", ())
        if not (len(self._known) == len(actors) and all(self._known)):
            self._known = ray_pids(actors)
        return self._known


def _name_time(batch: TensorDictBase) -> TensorDictBase:
    batch.names = [*[None] * (batch.ndim - 1), "time"]
    return batch


def _end_workers_on_failure(schemes: dict[str, WeightSyncScheme]) -> None:
    for scheme in schemes.values():
        scheme.strategy = EndingStrategy(scheme.strategy.extract_as)


def _look_at(reference: weakref.ref[WatchedCollector]) -> Sequence[int]:
    """The workers' processes; all are ended if one fails before the collector is built."""
    collector = reference()
    if collector is None:
        return ()
    # TorchRL waits for one worker after the other to start, which may take each of them minutes.
    if not collector._built and collector._find_failed() is not None:
        for process in collector._processes():
            with contextlib.suppress(ValueError):  # TorchRL has closed it
                process.terminate()
    return collector._pids()


def _shut_down(reference: weakref.ref[WatchedCollector]) -> None:
    """Ends what is left of a collector, which may fail in many ways."""
    collector = reference()
    if collector is not None:
        with contextlib.suppress(Exception):
            collector.shutdown()
