"""Collectors whose reference moves, or is the policy itself: in one process, and as a copy of it in real ones."""

import copy
import faulthandler
import functools
import gc
import logging
import sys
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
from torchrl_kl.collectors.workers import MakeChargedEnv, ReferenceFile

WHERE = pytest.mark.parametrize("where", ["learner", "workers"])
FRAMES = 24
SECONDS = 240  # for one collector, from start to end


def collector_of(kind: Any, policy: Any, stack: Any, where: Any, **kwargs) -> Any:
    torch.manual_seed(0)
    arguments: Any = {"frames_per_batch": FRAMES, "total_frames": 4 * FRAMES} | kwargs
    return kl_collector(
        kind, functools.partial(WalkEnv, (3,)), policy, stack, where=where, **arguments
    )


def score(actor: Any, batch: Any) -> torch.Tensor:
    with torch.no_grad():
        return actor.log_prob(batch.select("observation", "action"))


@pytest.fixture
def ray_runtime():
    import ray
    from ray import cloudpickle

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    for name in ("tests.helpers", "tests.adapters"):  # actors of Ray do not find the tests
        cloudpickle.register_pickle_by_value(sys.modules[name])
    yield
    for name in ("tests.helpers", "tests.adapters"):
        cloudpickle.unregister_pickle_by_value(sys.modules[name])
    ray.shutdown()


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


def test_nothing_is_written_while_nothing_moves(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(ReferenceFile, "write", lambda *_: pytest.fail("nothing moved"))
    stack: Any = KLConstrainedTransform(make_actor(), 0.1)
    for _ in collector_of(Collector, make_actor(), stack, "workers"):
        assert list(tmp_path.iterdir())


def test_the_folder_lasts_as_long_as_the_collector(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    collector = collector_of(
        Collector, make_actor(), KLConstrainedTransform(make_actor(), 0.1), "workers"
    )
    assert list(tmp_path.iterdir())
    collector.shutdown()
    del collector
    gc.collect()
    assert not list(tmp_path.iterdir())
    with pytest.raises(TypeError, match="no_such_argument"):
        collector_of(
            Collector,
            make_actor(),
            KLConstrainedTransform(make_actor(), 0.1),
            "workers",
            no_such_argument=1,
        )
    assert not list(tmp_path.iterdir())


def test_a_version_replaces_the_one_before(tmp_path):
    file = ReferenceFile(tmp_path)
    for value in (1.0, 2.0):
        file.write({"a.b": torch.full((2,), value)})
        assert file.count.item() == value
        assert_close(file.read(), {"a.b": torch.full((2,), value)})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["reference", "reference_count"]


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
        (MultiSyncCollector, "workers", {}),
        (MultiAsyncCollector, "workers", {}),
        (DistributedCollector, "workers", {"sync": True}),
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
    base, source = base_of(actor, layer), torch.tensor(0.1, dtype=torch.float64)
    stack = KLConstrainedTransform(actor, 0.1, reference=lambda: layer.disable_adapter())
    env = MakeChargedEnv(functools.partial(WalkEnv, (3,)), stack, source, in_process=False)()
    batch = play(env, actor)
    assert_same(batch["next", "ref_log_prob"], score(base, batch))
    assert batch["next", "kl"].abs().max() > 0.1
    transforms: Any = env.transform
    assert transforms[0].reference.actor is not actor
