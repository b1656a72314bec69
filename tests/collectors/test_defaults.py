"""The arguments with which `kl_collector` builds the collectors of TorchRL; none is built here."""

import sys
from typing import Any
from unittest import mock

import pytest
import torch
from tensordict import TensorDict
from torchrl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from torchrl.collectors.distributed import DistributedCollector, RayCollector

from tests.helpers import WalkEnv, make_actor, policy
from torchrl_kl import KLConstrainedTransform, kl_collector
from torchrl_kl.collectors.kl_collector import _WATCHED
from torchrl_kl.collectors.links import restore_trajectories

here = pytest.mark.parametrize("kind", [Collector, MultiSyncCollector, MultiAsyncCollector])
remote = pytest.mark.parametrize("kind", [DistributedCollector, RayCollector])


def arguments(kind: Any, **kwargs: Any) -> dict[str, Any]:
    given: dict[str, Any] = {}
    stack = KLConstrainedTransform(make_actor(), 0.1)
    kwargs = {"frames_per_batch": 15, "total_frames": 30} | kwargs
    with mock.patch.dict(_WATCHED, {kind: lambda *_, **all_of_them: given.update(all_of_them)}):
        kl_collector(kind, WalkEnv, policy(), stack, **kwargs)
    return given


@here
@pytest.mark.parametrize("chosen", [{}, {"auto_register_policy_transforms": True}])
def test_no_transform_is_added_unless_the_user_asks_for_it(kind, chosen):
    given = arguments(kind, **chosen)
    assert given["auto_register_policy_transforms"] is bool(chosen)
    assert (given["frames_per_batch"], given["total_frames"]) == (15, 30)
    assert given.get("num_threads", torch.get_num_threads()) == torch.get_num_threads()
    assert ("num_threads" in given) == (kind is not Collector)


@here
def test_buffers_are_not_used_where_truncations_would_miss_them(kind):
    if kind is not MultiAsyncCollector:
        given = arguments(kind, set_truncated=True)
        assert given.get("use_buffers") is (False if kind is MultiSyncCollector else None)
    assert "use_buffers" not in arguments(kind)


@remote
def test_an_endless_run(kind):
    assert arguments(kind, total_frames=-1)["total_frames"] == sys.maxsize
    assert arguments(kind)["total_frames"] == 30


@remote
def test_each_worker_has_ids_and_a_postproc_of_its_own(kind):
    each: Any = [
        {"postproc": lambda batch: batch.set("seen", 2 * batch["seen"])},
        {"auto_register_policy_transforms": True},
    ]
    given = arguments(kind, num_workers=2, collector_kwargs=each)["collector_kwargs"]
    assert [one["auto_register_policy_transforms"] for one in given] == [False, True]
    ids, seen = [], []
    for one in given:
        collector = TensorDict(traj_ids=torch.arange(3), batch_size=3)
        batch = TensorDict(collector=collector, seen=torch.ones(3), batch_size=3)
        batch = restore_trajectories(one["postproc"](batch))
        ids += batch["collector", "traj_ids"].tolist()
        seen.append(batch["seen"][0].item())
    assert sorted(ids) == list(range(6))
    assert seen == [2, 1]
