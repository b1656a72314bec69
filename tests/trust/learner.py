"""A learner whose workers come to harm; test_processes.py starts it as a process.

    python learner.py KIND WHERE TROUBLE...

TROUBLE is "MOMENT-HARM", and all of them happen in this process, one after another; or a way in
which the learner itself ends: "break", "raise", "sigint", "sigterm" or "sigkill"; or "two", which
uses two collectors at once. One line of JSON is printed for each trouble.
"""

import contextlib
import functools
import gc
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch
from torchrl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from torchrl.collectors.distributed import DistributedCollector, RayCollector
from torchrl.weight_update.weight_sync_schemes import WeightStrategy

from torchrl_kl import GPT, CausalLMActor, KLConstrainedTransform, kl_collector
from torchrl_kl.envs import DigitLanguageEnv

KINDS: dict[str, tuple[type, dict[str, Any]]] = {
    "single": (Collector, {}),
    "multi-sync": (MultiSyncCollector, {"num_workers": 2}),
    "multi-async": (MultiAsyncCollector, {"num_workers": 2}),
    "gloo-sync": (DistributedCollector, {"num_workers": 2, "sync": True}),
    "gloo-async": (DistributedCollector, {"num_workers": 2}),
    "ray-sync": (RayCollector, {"num_workers": 2, "sync": True}),
    "ray-async": (RayCollector, {"num_workers": 2}),
}
HARMED, ALONE = 1, -1  # the worker that comes to harm; the env of a Collector
ROWS, FRAMES = 2, 24
LATE = 120  # seconds that the others need to start, so that nobody may wait for them
SECONDS = 60  # within which there must be an error, however many batches the others collect


def do_harm(harm: str, clock: Path) -> None:
    """What happens to the process that calls it; `clock` is the file that tells when it was."""
    clock.write_text(str(time.time()))
    if harm == "raising":
        raise ValueError("the worker raises")
    os.kill(os.getpid(), {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}[harm])


class HarmedEnv(DigitLanguageEnv):
    """An env that does harm to its process when it is closed, and to its third batch's reward."""

    moment = ""
    harm: Any = None

    def close(self, **kwargs: Any) -> None:
        if self.moment == "shutdown":
            self.moment = ""
            self.harm()
        super().close(**kwargs)


class HarmfulReward:
    """A reward whose twentieth call does harm."""

    def __init__(self, harm: Any):
        self.left, self.harm = 20, harm

    def __call__(self, texts: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left == 0:
            self.harm()
        return torch.zeros(len(texts))


def make_env(worker: int, learner: int, moment: str, harm: str, folder: Path) -> DigitLanguageEnv:
    """The env of a worker, which may come to harm unless it is in the learner's process."""
    act = functools.partial(do_harm, harm, folder / "clock")
    # TorchRL also makes an env of a worker in the learner's process; a Collector has no other.
    if worker != HARMED and (worker != ALONE or not moment):
        if moment in ("birth", "start") and os.getpid() != learner:
            time.sleep(LATE)
        return DigitLanguageEnv(batch_size=(ROWS,))
    if moment == "start":
        act()
    if moment == "weights":
        apply = WeightStrategy.apply_weights

        def harmful(*args: Any, **kwargs: Any) -> None:
            if (folder / "armed").exists():
                act()
            apply(*args, **kwargs)

        mock.patch.object(WeightStrategy, "apply_weights", harmful).start()
    env = HarmedEnv(
        batch_size=(ROWS,), reward_fn=HarmfulReward(act) if moment == "rollout" else None
    )
    env.moment, env.harm = moment, act
    env.is_closed = False  # else TorchRL would not close it
    return env


def build(kind: str, where: str, moment: str = "", harm: str = "", folder: Path = Path()) -> Any:
    collector_class, arguments = KINDS[kind]
    # A copy of it is more than a pipe holds: who starts a worker waits until that has read it.
    policy = CausalLMActor(GPT(vocab_size=11, block_size=8))
    stack = KLConstrainedTransform(policy, 0.1)
    workers = range(arguments.get("num_workers", 0)) or [ALONE]
    envs = [functools.partial(make_env, n, os.getpid(), moment, harm, folder) for n in workers]
    return kl_collector(
        collector_class,
        envs if len(envs) > 1 else envs[0],
        policy,
        stack,
        where=where,  # type: ignore[arg-type]
        frames_per_batch=FRAMES,
        total_frames=1000 * FRAMES,
        **arguments,
    )


def harm_at_birth(harm: str, clock: Path) -> None:
    """Does harm to a worker as soon as its process is there."""
    while len(workers := collectors_alive()) <= HARMED:
        time.sleep(0.01)
    clock.write_text(str(time.time()))
    os.kill(workers[-1], {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}[harm])


def collectors_alive() -> list[int]:
    """The processes below this one that collect."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            command = " ".join(process.cmdline())
            if "spawn_main" in command or command.startswith(("ray::Collector", "ray::Connection")):
                found.append(process.pid)
    return found


def files() -> set[str]:
    """Temporary files of this process and of its workers."""
    folder = Path(os.environ["TMPDIR"])
    return {path.name for path in folder.iterdir() if path.name not in ("ray", "trouble")}


def happen(kind: str, where: str, trouble: str) -> dict[str, Any]:
    """Lets a worker come to harm and tells what is left."""
    moment, harm = trouble.split("-")
    folder = Path(os.environ["TMPDIR"]) / "trouble"
    folder.mkdir(exist_ok=True)
    for name in ("armed", "clock"):
        (folder / name).unlink(missing_ok=True)
    error, collector = None, None
    if moment == "birth":
        threading.Thread(target=harm_at_birth, args=(harm, folder / "clock"), daemon=True).start()
    try:
        collector = build(kind, where, moment, harm, folder)
        for n, _ in enumerate(collector):
            if n == 1 and moment == "weights":
                (folder / "armed").touch()
                collector.update_policy_weights_()
            if n == 2 and moment == "shutdown":
                break
            clock = folder / "clock"
            if clock.exists() and time.time() > clock.stat().st_mtime + SECONDS:
                break
        collector.shutdown()
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    over = time.time()
    began = float((folder / "clock").read_text()) if (folder / "clock").exists() else None
    if collector is not None:
        collector.shutdown()
    del collector
    gc.collect()
    deadline = time.time() + 20
    while collectors_alive() and time.time() < deadline:
        time.sleep(0.1)
    return {
        "error": error,
        "seconds": None if began is None else over - began,
        "alive": len(collectors_alive()),
        "threads": [thread.name for thread in threading.enumerate()],
        "torch_threads": torch.get_num_threads(),
        "descriptors": psutil.Process().num_fds(),
        "files": sorted(files()),
        "group": torch.distributed.is_initialized(),
    }


def use_again(kind: str, where: str) -> int:
    """Collects three batches with a collector to which nothing happens."""
    collector = build(kind, where)
    batches = [batch for batch, _ in zip(collector, range(3), strict=False)]
    collector.shutdown()
    return sum(batch.numel() for batch in batches)


def use_two(kind: str, where: str) -> list[int]:
    """Collects three batches with each of two collectors, in turn."""
    collectors = [build(kind, where) for _ in range(2)]
    frames = [0, 0]
    try:
        for _, *batches in zip(range(3), *collectors, strict=False):
            frames = [n + batch.numel() for n, batch in zip(frames, batches, strict=True)]
    finally:
        for collector in collectors:
            collector.shutdown()
    return frames


def end(kind: str, where: str, how: str) -> None:
    """Ends this process in the middle of the loop, without `shutdown()`."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    collector = build(kind, where)
    for n, _ in enumerate(collector):
        if n < 2:
            continue
        print(json.dumps({"how": how}), flush=True)
        if how == "break":
            break
        if how == "raise":
            raise ZeroDivisionError("the learner raises")
        os.kill(os.getpid(), getattr(signal, how.upper()))
        time.sleep(60)


def main() -> None:
    kind, where, *troubles = sys.argv[1:]
    if kind.startswith("ray"):
        import logging

        import ray

        # Ray starts its workers at niceness 15: on a busy machine they would hardly ever run.
        os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
        ray.init(
            num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR
        )
    # Names of semaphores in /dev/shm, which else do not tell whose they are.
    multiprocessing.current_process()._config["semprefix"] = f"/kl{os.getpid()}"  # type: ignore[attr-defined]
    for trouble in troubles:
        if trouble == "two":
            print(json.dumps({"two": use_two(kind, where)}), flush=True)
            continue
        if "-" not in trouble:
            end(kind, where, trouble)
            return
        told = {"trouble": trouble, **happen(kind, where, trouble)}
        print(json.dumps(told), flush=True)
    print(json.dumps({"frames": use_again(kind, where), "files": sorted(files())}), flush=True)


if __name__ == "__main__":
    main()
