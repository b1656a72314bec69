"""TorchRL's collectors in real processes: what reaches the workers, and dead workers.

Each collector is started with the stack on the learner's side, and again with the reference in the
workers. It collects seven batches while the policy and the coefficient are changed, and then loses
a worker.
"""

import contextlib
import copy
import functools
import gc
import os
import re
import signal
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
from torch.testing import assert_close
from torchrl.collectors import MultiAsyncCollector, MultiSyncCollector
from torchrl.collectors.distributed import DistributedCollector, RayCollector

from tests.helpers import SpyController, moved, total
from torchrl_kl import GPT, CausalLMActor, KLConstrainedTransform, kl_collector
from torchrl_kl.envs import DigitLanguageEnv

N_WORKERS, N_ROWS, FRAMES = 2, 2, 24
N_STEPS = 4  # of a response: batches end inside of responses
MOVED_AFTER, SET_AFTER = 1, 6
KILLED_AFTER = 9  # every worker may have had one batch under way at 6
COEFF, NEW_COEFF = 0.5, 7.0

# Only against hangs. By a thread: waits in C++ do not listen to signals.
pytestmark = pytest.mark.timeout(600, method="thread")

KINDS: dict[str, tuple[type, dict[str, Any]]] = {
    "multi-sync": (MultiSyncCollector, {}),
    "multi-async": (MultiAsyncCollector, {}),
    "gloo-sync": (DistributedCollector, {"sync": True}),
    "gloo-async": (DistributedCollector, {}),
    "ray-sync": (RayCollector, {"sync": True}),
    "ray-async": (RayCollector, {}),
}
# The ways in which a worker's death is met: at the next batch, or at the next update of the
# weights.
STORIES = [
    *[
        (kind, "learner", "batch")
        for kind in ("multi-sync", "multi-async", "gloo-async", "ray-sync")
    ],
    *[(kind, "workers", "weights") for kind in ("multi-sync", "multi-async", "gloo-sync")],
    ("gloo-async", "workers", "batch"),
    pytest.param(("ray-async", "workers", "batch"), marks=pytest.mark.slow, id="ray-async-workers"),
]


def count_threads(texts: torch.Tensor) -> torch.Tensor:
    """A reward that tells how many threads a worker has."""
    return torch.full((len(texts),), float(torch.get_num_threads()))


class DieAt:
    """A reward whose n-th call kills the process, unless that is the learner's."""

    def __init__(self, n: int):
        self.left, self.learner = n, os.getpid()

    def __call__(self, texts: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left == 0 and os.getpid() != self.learner:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.zeros(len(texts))


@pytest.fixture(scope="module")
def no_threads_set():
    with mock.patch.dict(os.environ):
        os.environ.pop("OMP_NUM_THREADS", None)  # the workers must be given one by other means
        yield


@dataclass
class Story:
    """What happened to a collector."""

    is_async: bool
    ahead: bool  # whether steps may be penalized long before they arrive
    controller: SpyController
    references: tuple[Any, Any]  # before and after it was updated
    batches: list[Any] = field(default_factory=list)
    error: BaseException | None = None
    seconds_to_error: float = 0.0
    left: list[str] = field(default_factory=list)
    threads: int = 0


def workers_alive() -> set[psutil.Process]:
    """Processes below this one that collect: not Ray's, nor multiprocessing's tracker."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it ends just now
            command = " ".join(process.cmdline())
            if "spawn_main" in command or re.match("ray::(Collector|ConnectionInfo)", command):
                found.add(process)
    return found


def wait_for_end(before: set[psutil.Process]) -> list[str]:
    """What is still there of the processes that were started since, after some time to end in."""
    _, alive = psutil.wait_procs(workers_alive() - before, timeout=300)
    zombies = [
        process
        for process in psutil.Process().children()
        if process.status() == psutil.STATUS_ZOMBIE
    ]
    return [repr(process) for process in (*alive, *zombies)]


@pytest.fixture(scope="module", params=STORIES, ids="-".join)
def story(request) -> Story:
    kind, where, death = request.param
    if kind.startswith("ray"):
        request.getfixturevalue("ray_runtime")
    else:
        request.getfixturevalue("no_threads_set")
    torch.manual_seed(0)
    collector_class, arguments = KINDS[kind]
    policy = CausalLMActor(GPT(11, 8, n_layer=1, n_head=1, n_embd=8))
    controller = SpyController(COEFF)
    stack = KLConstrainedTransform(policy, controller, update_every=1)
    before = workers_alive()
    is_async = kind.endswith("-async")
    ahead = is_async and where == "workers"
    told = Story(is_async, ahead, controller, (copy.deepcopy(policy), moved(policy)))
    collector = kl_collector(
        collector_class,
        # Actors of Ray do not find the tests.
        functools.partial(
            DigitLanguageEnv,
            batch_size=(N_ROWS,),
            reward_fn=None if kind.startswith("ray") else count_threads,
        ),
        policy,
        stack,
        where=where,
        num_workers=N_WORKERS,
        frames_per_batch=FRAMES,
        total_frames=100 * FRAMES,
        **arguments,
    )
    started = 0.0
    try:
        assert isinstance(collector, collector_class)
        for n, batch in enumerate(collector):
            told.batches.append(batch.clone())
            if n == MOVED_AFTER:
                policy.load_state_dict(moved(policy).state_dict())
                collector.update_policy_weights_()
            elif n == SET_AFTER:
                controller.coeff.fill_(NEW_COEFF)
                stack.update_reference(policy)
            elif n == KILLED_AFTER:
                workers = [
                    process
                    for process in workers_alive() - before
                    if "ConnectionInfo" not in process.cmdline()[0]
                ]
                assert len(workers) == N_WORKERS
                workers[-1].kill()
                started = time.monotonic()
                if death == "weights":
                    collector.update_policy_weights_()
    except RuntimeError as error:
        told.error, told.seconds_to_error = error, time.monotonic() - started
    told.left = wait_for_end(before)
    collector.shutdown()
    told.threads = torch.get_num_threads()
    return told


def values(story: Story, key: str, n: int) -> torch.Tensor:
    return story.batches[n]["next", key]


def test_every_step_records_its_penalty(story):
    for batch in story.batches:
        after = batch["next"]
        assert_close(after["reward"], after["task_reward"] - after["kl_coeff"] * after["kl"])
    for n in range(SET_AFTER + 1):
        assert (values(story, "kl_coeff", n) == COEFF).all()


def test_the_next_batch_has_the_new_coefficient(story):
    later = torch.cat(
        [values(story, "kl_coeff", n) for n in range(SET_AFTER + 1, KILLED_AFTER + 1)]
    )
    if story.ahead:
        assert set(later.flatten().tolist()) in ({COEFF, NEW_COEFF}, {NEW_COEFF})
    else:
        assert (later == NEW_COEFF).all()


def test_the_policy_moves_and_the_reference_does_not(story):
    for n in range(MOVED_AFTER + 1):
        assert_close(
            values(story, "kl", n), torch.zeros_like(values(story, "kl", n)), atol=1e-5, rtol=0
        )
    assert (
        max(values(story, "kl", n).abs().max() for n in range(MOVED_AFTER + 1, SET_AFTER + 1)) > 0.1
    )
    for batch in story.batches[: SET_AFTER + 1]:
        expected = story.references[0].log_prob(batch.select("tokens", "position", "action"))
        assert_close(batch["next", "ref_log_prob"], expected, atol=1e-5, rtol=0)


def test_the_reference_moves_when_it_is_told_to(story):
    followed = []
    for batch in story.batches[SET_AFTER + 1 :]:
        taken = batch.select("tokens", "position", "action")
        old, new = (reference.log_prob(taken.copy()) for reference in story.references)
        follows = (batch["next", "ref_log_prob"] - new).abs() <= 1e-5
        stays = (batch["next", "ref_log_prob"] - old).abs() <= 1e-5
        assert (follows | stays if story.ahead else follows).all()  # nothing in between
        followed.append((follows & ~stays).any())
    assert followed[-1]


def test_the_last_dimension_is_time(story):
    shape = (
        (N_ROWS, FRAMES // N_ROWS)
        if story.is_async
        else (N_WORKERS, N_ROWS, FRAMES // N_WORKERS // N_ROWS)
    )
    for batch in story.batches:
        assert batch.names[-1] == "time"
        assert batch.shape == shape


def test_the_controller_is_told_of_whole_trajectories(story):
    trajectories = defaultdict(list)
    for batch in story.batches:
        for step in batch.reshape(-1):
            trajectories[int(step["collector", "traj_ids"])].append(step["next"])
    finished = [steps for steps in trajectories.values() if any(step["done"] for step in steps)]
    assert all(len(steps) == N_STEPS for steps in finished)
    assert sum(len(steps) for steps in trajectories.values()) == FRAMES * len(story.batches)
    n, kl = total(story.controller)
    assert n == len(finished)
    assert kl == pytest.approx(
        sum(step["kl"].item() for steps in finished for step in steps), rel=1e-12
    )


def test_a_dead_worker_is_an_error_and_nothing_is_left(story):
    assert isinstance(story.error, RuntimeError)
    assert re.search(r"worker [01] \((exit code -9|a Ray actor)\)", str(story.error))
    assert story.seconds_to_error < 300
    assert story.left == []
    assert not torch.distributed.is_initialized()


def test_workers_have_one_thread_and_the_learner_keeps_its_own(story):
    for batch in story.batches:
        ends = batch["next", "done"]
        assert (
            batch["next", "task_reward"][ends] <= 1
        ).all()  # the threads of a worker, but for Ray
    assert story.threads == 1  # what conftest.py sets


def test_a_worker_that_cannot_start_leaves_nothing():
    before = workers_alive()
    policy = CausalLMActor(GPT(11, 8, n_layer=1, n_head=1, n_embd=8))
    with pytest.raises(TypeError, match="`language` must be a DigitLanguage"):
        kl_collector(
            DistributedCollector,
            functools.partial(DigitLanguageEnv, "no language"),
            policy,
            KLConstrainedTransform(policy, 0.1),
            frames_per_batch=FRAMES,
            total_frames=FRAMES,
        )
    assert wait_for_end(before) == []
    assert not torch.distributed.is_initialized()


def test_the_only_worker_dies_in_the_middle_of_a_batch():
    """TorchRL would ask for its status for ever."""
    before = workers_alive()
    policy = CausalLMActor(GPT(11, 8, n_layer=1, n_head=1, n_embd=8))
    collector = kl_collector(
        DistributedCollector,
        functools.partial(DigitLanguageEnv, batch_size=(N_ROWS,), reward_fn=DieAt(8)),
        policy,
        KLConstrainedTransform(policy, 0.1),
        frames_per_batch=FRAMES,
        total_frames=100 * FRAMES,
    )
    with pytest.raises(RuntimeError, match=r"worker 0 \(exit code -9\) of the collector died"):
        for _ in collector:
            pass
    assert wait_for_end(before) == []
    assert not torch.distributed.is_initialized()


def kill_workers(collector: Any) -> None:
    """As TorchRL's shutdown of workers that do not end: it may not wait until they are gone."""
    for process in collector.procs:
        process.kill()


@pytest.mark.parametrize("moment", ["between", "shutdown"])
def test_a_worker_that_dies_between_two_batches_or_in_the_end_is_named_at_shutdown(moment):
    before = workers_alive()
    policy = CausalLMActor(GPT(11, 8, n_layer=1, n_head=1, n_embd=8))
    collector = kl_collector(
        MultiSyncCollector,
        functools.partial(DigitLanguageEnv, batch_size=(N_ROWS,)),
        policy,
        KLConstrainedTransform(policy, 0.1),
        frames_per_batch=FRAMES,
        total_frames=100 * FRAMES,
    )
    next(iter(collector))
    (worker,) = workers_alive() - before
    if moment == "between":
        worker.kill()
    ending = mock.patch.object(MultiSyncCollector, "shutdown", kill_workers)
    with (
        ending if moment == "shutdown" else contextlib.nullcontext(),
        pytest.raises(RuntimeError, match=r"^worker 0 \(exit code -9\) .* before it was shut down"),
    ):
        collector.shutdown()
    collector.shutdown()  # it was told once
    assert wait_for_end(before) == []


def close_never() -> None:
    time.sleep(3600)


def make_env_that_never_closes() -> DigitLanguageEnv:
    env = DigitLanguageEnv(batch_size=(N_ROWS,))
    env.close = close_never  # type: ignore[method-assign]
    return env


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make_env", "forgotten"),
    [
        (functools.partial(DigitLanguageEnv, batch_size=(N_ROWS,)), True),
        (make_env_that_never_closes, False),
    ],
    ids=["forgotten", "never-closes"],
)
def test_workers_end_with_an_endless_collector(make_env, forgotten, monkeypatch):
    """One that is forgotten, or whose worker does not answer when it is shut down."""
    monkeypatch.setattr("torchrl_kl.collectors.watched._ANSWER_SECONDS", 10.0)
    before = workers_alive()
    policy = CausalLMActor(GPT(11, 8, n_layer=1, n_head=1, n_embd=8))
    stack = KLConstrainedTransform(policy, 0.1)
    arguments: dict[str, Any] = {"frames_per_batch": FRAMES, "total_frames": -1}
    collector = kl_collector(DistributedCollector, make_env, policy, stack, **arguments)
    batches = iter(collector)
    assert [next(batches).numel() for _ in range(3)] == 3 * [FRAMES]
    if not forgotten:
        collector.shutdown()
    del collector, batches
    gc.collect()
    assert wait_for_end(before) == []
    assert not torch.distributed.is_initialized()


@pytest.mark.slow
def test_rows_that_the_workers_of_an_actor_join_along_time_are_refused(ray_runtime):
    policy = CausalLMActor(GPT(11, 8, n_layer=1, n_head=1, n_embd=8))
    collector = kl_collector(
        RayCollector,
        functools.partial(DigitLanguageEnv, batch_size=()),
        policy,
        KLConstrainedTransform(policy, 0.1),
        frames_per_batch=FRAMES,
        total_frames=FRAMES,
        sync=True,
        collector_class="sync",
        num_workers_per_collector=2,
        collector_kwargs={"cat_results": 0},
    )
    with pytest.raises(RuntimeError, match="`cat_results` = 0 joined the rows of several workers"):
        next(iter(collector))
    collector.shutdown(shutdown_ray=False)


def test_a_second_process_group_is_refused():
    policy = CausalLMActor(GPT(11, 8, n_layer=1, n_head=1, n_embd=8))
    arguments: dict[str, Any] = {"frames_per_batch": FRAMES, "total_frames": FRAMES}
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match="this process has one already: shut down its oth"):
            kl_collector(
                DistributedCollector,
                functools.partial(DigitLanguageEnv, batch_size=(N_ROWS,)),
                policy,
                KLConstrainedTransform(policy, 0.1),
                **arguments,
            )
        gc.collect()
        assert torch.distributed.is_initialized()  # the user's group is left as it was
    finally:
        torch.distributed.destroy_process_group()
