"""Ends that a collector writes into the last steps of its batches, with `set_truncated=True`."""

from collections import defaultdict
from typing import Any

import pytest
import torch
from torchrl.collectors import MultiSyncCollector
from torchrl.collectors.distributed import DistributedCollector

from tests.helpers import WalkEnv, policy, spied, total
from torchrl_kl import kl_collector

# Only against hangs. By a thread: waits in C++ do not listen to signals.
pytestmark = pytest.mark.timeout(300, method="thread")


def make_env() -> WalkEnv:
    return WalkEnv((3,), longest=7)


KINDS: dict[str, tuple[type, dict[str, Any]]] = {
    "multi-sync": (MultiSyncCollector, {"set_truncated": True}),
    "gloo": (
        DistributedCollector,
        {"sync": True, "collector_class": "sync", "collector_kwargs": {"set_truncated": True}},
    ),
}


@pytest.mark.parametrize("where", ["learner", "workers"])
@pytest.mark.parametrize("kind", ["multi-sync", pytest.param("gloo", marks=pytest.mark.slow)])
def test_done_flags_are_those_of_the_batch(kind, where):
    """From the second batch on, 40 % of the flags in the buffers were those of the batch before."""
    stack, controller = spied()
    collector_class, arguments = KINDS[kind]
    arguments = arguments | {"where": where, "frames_per_batch": 12, "total_frames": 72}
    sums: dict[int, float] = defaultdict(float)
    ended = []
    collector = kl_collector(collector_class, make_env, policy(), stack, **arguments)
    for batch in collector:
        is_over = batch["next", "left"] == 0
        expected = is_over.clone()
        expected[..., -1, :] = True
        assert torch.equal(batch["next", "done"], expected)
        columns = (batch["collector", "traj_ids"], batch["next", "kl"].double(), is_over)
        numbers = (column.flatten().tolist() for column in columns)
        for number, kl, over in zip(*numbers, strict=True):
            sums[number] += kl
            if over:
                ended.append(sums[number])
    collector.shutdown()
    assert total(controller) == (len(ended), pytest.approx(sum(ended), abs=1e-5))
