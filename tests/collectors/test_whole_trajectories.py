"""Batches of whole trajectories, as of `split_trajs` and `trajs_per_batch`."""

from typing import Any

import pytest
from torchrl.collectors import Collector

from tests.helpers import WalkEnv, policy, spied
from torchrl_kl import ExponentialKLController, KLMonitor, kl_collector

SHAPES: dict[str, dict[str, Any]] = {
    "split": {"split_trajs": True},
    "padded": {"trajs_per_batch": 2, "traj_format": "padded"},
    "cat": {"trajs_per_batch": 2, "traj_format": "cat"},
}


@pytest.mark.parametrize("where", ["learner", "workers"])
@pytest.mark.parametrize("shape", SHAPES)
def test_their_last_dimension_is_time(where, shape):
    """It had no name, so that a monitor could not tell trajectories."""
    stack, _ = spied()
    arguments: Any = {"where": where, "frames_per_batch": 15, "total_frames": 60}
    collector = kl_collector(
        Collector, lambda: WalkEnv((3,)), policy(), stack, **arguments, **SHAPES[shape]
    )
    monitor = KLMonitor(ExponentialKLController(0.1, target=0.5), window=100)
    n_ended, kl = 0, 0.0
    for batch in collector:
        assert batch.names == [*[None] * (batch.ndim - 1), "time"]
        monitor(batch)
        ends = batch["next", "done"]
        n_ended += int(ends.sum())
        kl += batch["next", "episode_kl"][ends].double().sum().item()
    pools = monitor.state_dict()["pools"]
    assert sum(pool[0] for pool in pools) == n_ended > 4
    assert sum(pool[1] for pool in pools) == pytest.approx(kl, abs=1e-4)
