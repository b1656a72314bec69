"""The private names of TorchRL that this package uses, all tested by test_torchrl_private.py."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from typing import Any

from tensordict import NestedKey
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributions import Distribution
from torchrl.envs.transforms import Transform

from torchrl_kl.functional.distributions import COLUMN_READERS

# Names of what a CheckpointRotation has not yet removed.
DELETED = re.compile(r"\..+\.delete-[0-9a-f]{32}")


def container_of(transform: Transform) -> object:
    """The Compose or env that holds a transform, which may be in no env; None if nothing does."""
    reference = vars(transform)["_container"]
    return None if reference is None else reference()


def declared_keys(transform: Transform) -> tuple[set[NestedKey], set[NestedKey], set[NestedKey]]:
    """The `out_keys`, `in_keys_inv`, `out_keys_inv` given; the properties may ask for specs."""
    names = ("_out_keys", "_in_keys_inv", "_out_keys_inv")
    found: Any = tuple(set(vars(transform).get(name) or ()) for name in names)
    return found


def indices_of(distribution: Distribution) -> Tensor | None:
    """The action of each column of a MaskedCategorical given by `indices`; None: all, in order."""
    if getattr(distribution, "_sparse_mask", False):
        return getattr(distribution, "_mask", None)
    return None


COLUMN_READERS.append(indices_of)


def watch_workers(
    collector: Any, run: Callable[[Callable[[], None]], None], check: Callable[[], None]
) -> None:
    """Makes a DistributedCollector that will be built notice a dead worker wherever it waits.

    It waits for all workers to join, which is left to `run`; later it waits for a worker's answer,
    and calls `check`, which may raise.
    """
    join = collector._init_master_dist

    def watched_join(*args: Any) -> None:
        known = distributed_c10d._world.group_count
        try:
            run(lambda: join(*args))
        except BaseException:
            # Groups are found by their number, which must be that of new workers the next time.
            distributed_c10d._world.group_count = known
            raise
        watch_store(collector, check)

    collector._init_master_dist = watched_join


def release_sender(scheme: Any) -> None:
    """Ends the wait of a SharedMemWeightSyncScheme for workers that are gone."""
    for queue in getattr(scheme, "_ack_queues", {}).values():
        queue.put("updated")


def watch_store(collector: Any, check: Callable[[], None]) -> None:
    """Makes a DistributedCollector call `check`, which may raise, while it waits for a worker."""
    collector._store = _WatchedStore(collector._store, check)


class _WatchedStore:
    """A torch.distributed store whose `get` has no time limit and calls `check` while it waits."""

    def __init__(self, store: Any, check: Callable[[], None]):
        self._unwatched, self._check = store, check

    def get(self, key: str) -> bytes:
        while not self._unwatched.check([key]):
            self._nap()
        value = self._unwatched.get(key)
        if value == b"busy":  # the collector will ask again at once
            self._nap()
        return value

    def _nap(self) -> None:
        self._check()
        time.sleep(1e-3)  # leaves the core to the workers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._unwatched, name)


def ray_pids(actors: Iterable[Any]) -> list[int]:
    """The processes of Ray's actors, in order; 0 for one that is on another machine, or not yet."""
    import ray
    from ray._private import state

    node = ray.get_runtime_context().get_node_id()
    # Also of actors that are starting, which do not answer yet.
    told = [state.actors(actor._actor_id.hex()) or {} for actor in actors]
    return [one["Pid"] if one.get("Address", {}).get("NodeID") == node else 0 for one in told]
