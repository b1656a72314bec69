"""Collectors whose reference moves, or is the policy itself, in one process and in many."""

import contextlib
import copy
import faulthandler
import functools
import gc
import tempfile
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from torchrl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from torchrl.collectors.distributed import DistributedCollector, RayCollector

from tests.adapters import adapted_actor, base_of
from tests.helpers import WalkEnv, assert_same, make_actor, moved, play
from torchrl_kl import KLConstrainedTransform, kl_collector
from torchrl_kl.collectors import links
from torchrl_kl.collectors.links import PenalizedEnv, SharedFiles, WorkerLink

WHERE = pytest.mark.parametrize("where", ["learner", "workers"])
FRAMES = 24
SECONDS = 600  # for one collector, only against hangs


def collector_of(kind: Any, policy: Any, stack: Any, where: Any, **kwargs) -> Any:
    torch.manual_seed(0)
    arguments: Any = {"frames_per_batch": FRAMES, "total_frames": 4 * FRAMES} | kwargs
    return kl_collector(
        kind, functools.partial(WalkEnv, (3,)), policy, stack, where=where, **arguments
    )


def score(actor: Any, batch: Any) -> torch.Tensor:
    with torch.no_grad():
        return actor.log_prob(batch.select("observation", "action"))


# A reference that moves, in one process; test_collectors.py has the others.


@WHERE
def test_every_batch_is_scored_by_the_reference_of_its_time(where):
    actor = make_actor()
    policy = moved(actor)
    stack: Any = KLConstrainedTransform(actor, 0.1)
    kls = []
    for index, batch in enumerate(collector_of(Collector, policy, stack, where)):
        assert_same(batch["next", "ref_log_prob"], score(stack.reference.actor, batch))
        kls.append(batch["next", "kl"].abs().max())
        stack.update_reference(policy, (0.5, 1.0, 1.0, 1.0)[index])
    assert min(kls[:2]) > 0.05
    assert max(kls[2:]) <= 1e-6


# The policy is not the copied reference from the start, which the stack says.
MOVED = pytest.mark.filterwarnings(
    "ignore:KLConstrainedTransform. the first .* weights have changed"
)


@MOVED
@WHERE
def test_a_state_that_is_loaded_reaches_the_workers_too(where):
    actor = make_actor()
    stack: Any = KLConstrainedTransform(actor, 0.1)
    other: Any = KLConstrainedTransform(make_actor(seed=8), 0.1)
    for index, batch in enumerate(collector_of(Collector, moved(actor), stack, where)):
        assert_same(
            batch["next", "ref_log_prob"],
            score(actor if index == 0 else other.reference.actor, batch),
        )
        if index == 0:
            stack.load_state_dict(other.state_dict())


@WHERE
@pytest.mark.parametrize("loads", [False, True])
def test_a_state_that_is_loaded_after_the_collector_was_built_is_a_run_that_goes_on(where, loads):
    actor = make_actor()
    stack: Any = KLConstrainedTransform(actor, 0.1)
    collector = collector_of(Collector, actor, stack, where, frames_per_batch=120, total_frames=120)
    actor.load_state_dict(moved(actor, scale=1.0).state_dict())
    if loads:
        stack.load_state_dict(copy.deepcopy(stack.state_dict()))
    said = "the policy's weights have changed"
    with contextlib.nullcontext() if loads else pytest.warns(UserWarning, match=said):
        next(iter(collector))  # warnings are errors


def by_assignment(actor: Any, other: Any) -> None:
    actor.load_state_dict(copy.deepcopy(other.state_dict()), assign=True)


def by_data(actor: Any, other: Any) -> None:
    for mine, new in zip(actor.parameters(), other.parameters(), strict=True):
        mine.data.copy_(new)


def by_order(actor: Any, _: Any) -> None:
    for mine in actor.parameters():
        mine.data.copy_(mine.data.flip(0))


@MOVED
@pytest.mark.parametrize("move", [by_assignment, by_data, by_order])
def test_a_move_that_raises_no_version_counter_reaches_the_workers_too(move):
    actor = make_actor()
    stack: Any = KLConstrainedTransform(actor, 0.1)
    scores = []
    for batch in collector_of(Collector, moved(actor), stack, "workers"):
        assert_same(batch["next", "ref_log_prob"], score(stack.reference.actor, batch))
        scores.append((batch["next", "ref_log_prob"] - score(actor, batch)).abs().max())
        # Of two new tensors the counters are equal.
        move(stack.reference.actor, make_actor(seed=8 + len(scores)))
    assert scores[0] <= 1e-5
    assert scores[1] > 0.1


def test_nothing_is_sent_while_nothing_moves(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(PenalizedEnv, "follow", lambda *_: pytest.fail("nothing moved"))
    stack: Any = KLConstrainedTransform(make_actor(), 0.1)
    for _ in collector_of(Collector, make_actor(), stack, "workers"):
        assert not list(tmp_path.iterdir())  # one process needs no files


def test_nothing_is_written_while_nothing_moves(monkeypatch):
    stack = KLConstrainedTransform(make_actor(), 0.1)
    link = WorkerLink(stack, over_ray=False, in_process=False)
    with monkeypatch.context() as patch:
        patch.setattr(SharedFiles, "write", lambda *_: pytest.fail("nothing moved"))
        link.send(None)
    stack.update_reference(moved(make_actor()))
    link.send(None)
    assert link.files is not None
    assert link.files.numbers.tolist() == [pytest.approx(0.1), 1]


def test_the_folder_lasts_as_long_as_the_link(monkeypatch, tmp_path):
    monkeypatch.setattr(links, "get_temp_dir", lambda: str(tmp_path))
    stack = KLConstrainedTransform(make_actor(), 0.1)
    link = WorkerLink(stack, over_ray=False, in_process=False)
    assert list(tmp_path.iterdir())
    del link
    gc.collect()
    assert not list(tmp_path.iterdir())
    wrong: Any = {"no_such_argument": 1}
    with pytest.raises(TypeError, match="no_such_argument"):
        collector_of(MultiSyncCollector, make_actor(), stack, "workers", **wrong)
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_a_version_replaces_the_one_before(tmp_path):
    files = SharedFiles(tmp_path, 0.0)
    for value in (1.0, 2.0):
        files.write(3 * value, {"a.b": torch.full((2,), value)})
        assert files.numbers.tolist() == [3 * value, value]
        assert_close(files.read(), {"a.b": torch.full((2,), value)})
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["numbers", "reference"]


# The policy itself, its adapters off.


@WHERE
def test_the_policy_itself_is_the_reference(where):
    actor, layer = adapted_actor()
    base = base_of(actor, layer)
    stack = KLConstrainedTransform(actor, 0.1, reference=layer.disable_adapter)
    for batch in collector_of(Collector, actor, stack, where):
        assert_same(batch["next", "ref_log_prob"], score(base, batch))
        assert_same(batch["action_log_prob"], score(actor, batch))
        assert batch["next", "kl"].abs().max() > 0.1
        with torch.no_grad():
            layer.up.weight.mul_(-1.2)
    assert stack.reference.actor is actor
    assert not any(".actor." in name for name in stack.state_dict())


@pytest.mark.parametrize(
    ("kind", "where", "kwargs"),
    [
        (MultiSyncCollector, "learner", {}),
        pytest.param(MultiSyncCollector, "workers", {}, marks=pytest.mark.slow),
        pytest.param(MultiAsyncCollector, "workers", {}, marks=pytest.mark.slow),
        pytest.param(DistributedCollector, "workers", {"sync": True}, marks=pytest.mark.slow),
        (RayCollector, "workers", {"sync": True}),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_with_real_workers(kind, where, kwargs, request):
    if kind is RayCollector:
        request.getfixturevalue("ray_runtime")
    faulthandler.dump_traceback_later(SECONDS, exit=True)  # a hang must fail, not block
    actor, layer = adapted_actor()
    base = base_of(actor, layer)
    first = copy.deepcopy(actor)
    stack = KLConstrainedTransform(actor, 0.1, reference=layer.disable_adapter)
    collector = collector_of(kind, actor, stack, where, num_workers=2, **kwargs)
    moves = []
    try:
        for batch in collector:
            assert_same(batch["next", "ref_log_prob"], score(base, batch))
            assert batch["next", "kl"].abs().max() > 0.1
            moves.append((batch["action_log_prob"] - score(first, batch)).abs().max().item())
            with torch.no_grad():
                layer.up.weight.mul_(-1.2)
            collector.update_policy_weights_()
        assert moves[0] <= 1e-5
        if kind is not MultiAsyncCollector:  # its last batch may have been under way for some time
            assert moves[-1] > 0.1
    finally:
        collector.shutdown()
        faulthandler.cancel_dump_traceback_later()


def test_a_switch_that_is_a_closure_acts_on_the_copy():
    actor, layer = adapted_actor()
    base = base_of(actor, layer)
    stack = KLConstrainedTransform(actor, 0.1, reference=lambda: layer.disable_adapter())
    link = WorkerLink(stack, over_ray=False, in_process=False)
    env = link.env_factory(functools.partial(WalkEnv, (3,)))()
    batch = play(env, actor)
    assert_same(batch["next", "ref_log_prob"], score(base, batch))
    assert batch["next", "kl"].abs().max() > 0.1
    transforms: Any = env.transform
    assert transforms[0].reference.actor is not actor
