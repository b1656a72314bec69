"""Rewards of several collectors, in an env that looks the same everywhere, give one plan."""

import itertools
from collections import defaultdict
from typing import Any

import pytest
import torch
from torchrl.collectors import Collector

from tests.helpers import WalkEnv, make_actor, policy
from torchrl_kl import KLConstrainedTransform, PlannedKLController, kl_collector


class Same(WalkEnv):
    """Its observations are 1; the reward is the action, plus a number that only it has."""

    count = itertools.count(1)

    def _reset(self, tensordict=None, **kwargs):
        out = super()._reset(tensordict, **kwargs)
        return out.set("observation", torch.ones_like(out["observation"]))

    def _step(self, tensordict):
        out = super()._step(tensordict)
        reward = tensordict["action"].unsqueeze(-1) + 2.0 ** -next(self.count)
        return out.update({"observation": torch.ones_like(out["observation"]), "reward": reward})


class Listening(PlannedKLController):
    """Remembers the rewards that it was given, and never has enough."""

    def __init__(self):
        super().__init__(1e-4)
        self.heard: list[float] = []

    def observe_rewards(self, rewards, **about):
        self.heard += rewards.tolist()
        return self.coeff.item()


@pytest.mark.filterwarnings("ignore:the KL controller has planned no coefficient")
@pytest.mark.parametrize("where", ["learner", "workers"])
@pytest.mark.parametrize("order", ["in turn", "one by one"])
@pytest.mark.parametrize("resumed", [False, True])
def test_they_are_not_mixed(where, order, resumed):
    """Trajectory ids begin at 0 in each collector: rewards of two trajectories were added up."""
    torch.manual_seed(0)
    controller: Any = Listening()
    stack = KLConstrainedTransform(make_actor(), controller)
    numbers: Any = {"where": where, "frames_per_batch": 6, "total_frames": 12}
    make_env: Any = lambda: Same((2,), longest=5)  # noqa: E731
    expected: list[float] = []

    def collector():
        return kl_collector(Collector, make_env, policy(), stack, **numbers)

    def add(batch: Any, sums: dict[int, float]) -> None:
        ids, step = batch["collector", "traj_ids"], batch["next"]
        rows = (ids, step["task_reward"].double(), step["done"])
        for number, reward, done in zip(*(row.flatten().tolist() for row in rows), strict=True):
            sums[number] += reward
            if done:
                expected.append(sums[number])
        if resumed:
            stack.load_state_dict(stack.state_dict())

    for _ in range(4):
        collectors = [collector() for _ in range(2)]
        known: list[dict[int, float]] = [defaultdict(float) for _ in collectors]
        if order == "in turn":
            for batches in zip(*collectors, strict=True):
                for batch, sums in zip(batches, known, strict=True):
                    add(batch, sums)
        else:
            for one, sums in zip(collectors, known, strict=True):
                for batch in one:
                    add(batch, sums)
    assert len(expected) > 10
    assert sorted(controller.heard) == pytest.approx(sorted(expected), abs=1e-12)


@pytest.mark.parametrize("stopped", [False, True])
def test_what_a_batch_truncates_is_told_by_the_next_collector_too(stopped):
    """Only the next batch shows whether a truncation was that of the collector."""
    torch.manual_seed(0)

    def new_stack() -> KLConstrainedTransform:
        return KLConstrainedTransform(make_actor(), Listening())

    stack, expected, heard = new_stack(), [], []
    make_env: Any = lambda: WalkEnv((2,), longest=2, truncates=True)  # noqa: E731
    numbers: Any = {"frames_per_batch": 4, "total_frames": 12}
    collector = iter(kl_collector(Collector, make_env, policy(), stack, **numbers))
    for _ in range(3):
        controller: Any = stack.controller
        batch = next(collector)
        assert batch["next", "truncated"][:, -1].all()
        heard += controller.heard
        assert sorted(heard) == pytest.approx(sorted(expected), abs=1e-12)
        expected += batch["next", "task_reward"].double().sum((1, 2)).tolist()
        controller.heard.clear()
        if stopped:
            state = stack.state_dict()
            stack = new_stack()
            stack.load_state_dict(state)
            collector = iter(kl_collector(Collector, make_env, policy(), stack, **numbers))


def test_what_was_collected_while_frozen_is_a_part_of_the_trajectories_that_go_on():
    """As while a critic warms up: the rest of a trajectory was taken for a whole one."""
    controller: Any = Listening()
    stack = KLConstrainedTransform(make_actor(), controller).freeze()
    totals, whole = torch.zeros(4), []
    torch.manual_seed(0)
    collector = Collector(
        WalkEnv((4,), longest=9),
        make_actor(),
        frames_per_batch=12,
        total_frames=48,
        postproc=stack,
        auto_register_policy_transforms=False,
    )
    for n, batch in enumerate(collector):
        assert bool(controller.heard) == (n >= 2)
        step = batch["next"]
        for reward, done in zip(*(step[k].unbind(1) for k in ("reward", "done")), strict=True):
            totals += reward.squeeze(-1)
            whole += totals[done.squeeze(-1)].tolist() if n >= 2 else []
            totals[done.squeeze(-1)] = 0.0
        if n == 1:
            stack.unfreeze()
    collector.shutdown()
    assert sorted(controller.heard) == pytest.approx(sorted(whole), abs=1e-5)
    assert len(whole) > 3
