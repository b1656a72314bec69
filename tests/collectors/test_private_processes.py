"""The private names of TorchRL, PyTorch and Ray that torchrl_kl/_torchrl.py uses for processes."""

import inspect
import multiprocessing
import os
from typing import Any

import pytest
import torchrl
from torch import distributed
from torch.distributed import distributed_c10d
from torchrl.collectors.distributed import DistributedCollector
from torchrl.weight_update import SharedMemWeightSyncScheme

from torchrl_kl import _torchrl

CHANGED = f"torchrl {torchrl.__version__} or what it needs has renamed or changed it"


def test_the_number_of_process_groups():
    before = distributed_c10d._world.group_count
    store = distributed.HashStore()  # type: ignore[attr-defined]
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert distributed_c10d._world.group_count == before + 1, CHANGED
    finally:
        distributed.destroy_process_group()
        distributed_c10d._world.group_count = before
    assert distributed_c10d._world.group_count == before, CHANGED


class FailingJoin:
    """As a DistributedCollector whose workers do not join, after the group was made."""

    def _init_master_dist(self, world_size: int, backend: str) -> None:
        distributed_c10d._world.group_count += 1
        raise TimeoutError("nobody came")


def test_a_join_that_fails_gives_its_number_back():
    method = inspect.signature(DistributedCollector._init_master_dist)
    assert list(method.parameters) == ["self", "world_size", "backend"], CHANGED
    assert "self._init_master_dist(" in inspect.getsource(DistributedCollector), CHANGED
    assert "self._store, " in inspect.getsource(DistributedCollector._init_master_dist), CHANGED

    collector, before = FailingJoin(), distributed_c10d._world.group_count
    _torchrl.watch_workers(collector, lambda join: join(), lambda: None)
    with pytest.raises(TimeoutError, match="nobody came"):
        collector._init_master_dist(3, "gloo")
    assert distributed_c10d._world.group_count == before


def test_the_wait_for_weights_is_ended():
    scheme: Any = SharedMemWeightSyncScheme()
    assert scheme._ack_queues == {}, CHANGED
    scheme._ack_queues = {0: multiprocessing.Queue(), 1: multiprocessing.Queue()}
    _torchrl.release_sender(scheme)
    scheme._wait_for_ack()  # without end if `release_sender` had not answered


def test_the_processes_of_actors(ray_runtime):
    import ray

    @ray.remote(num_cpus=0)
    class Actor:
        def pid(self) -> int:
            return os.getpid()

    actors: Any = [Actor.remote(), Actor.remote()]
    pids = ray.get([actor.pid.remote() for actor in actors])
    assert _torchrl.ray_pids(actors) == pids, f"ray {ray.__version__}: {CHANGED}"
    ray.get([actor.__ray_ready__.remote() for actor in actors])
