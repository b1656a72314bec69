"""Trajectories that go on from batch to batch: several collectors, evaluations, masks, order, and
what it costs.
"""

import pickle
import random
import sys
from collections import defaultdict
from functools import partial
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from torchrl.collectors import Collector, MultiSyncCollector
from torchrl.envs import InitTracker

from tests.helpers import (
    SpyController,
    WalkEnv,
    assert_same,
    collect,
    make_actor,
    moved,
    play,
    policy,
    spied,
    total,
    with_transforms,
    without_kl,
)
from tests.streams import Operators
from torchrl_kl import AdaptiveKLController, KLConstrainedTransform, RewardAdjustmentTransform


class Sums:
    """A loop over the steps of collectors: the sum of each trajectory so far, and of those that
    ended.
    """

    def __init__(self) -> None:
        self.open: defaultdict[Any, float] = defaultdict(float)
        self.ended: list[float] = []

    def expect(self, collector: int, batch: Any) -> torch.Tensor:
        """The running sums of a measured batch (*R, T) whose env truncates nothing."""
        shape, batch = batch.shape, batch.reshape(-1, batch.shape[-1])
        sums = torch.empty(batch.shape, dtype=torch.float64)
        for row, t in torch.cartesian_prod(*map(torch.arange, batch.shape)).tolist():
            step = batch[row, t]
            if "mask" in batch["collector"].keys() and not step["collector", "mask"]:
                sums[row, t] = float("nan")  # padding
                continue
            key = collector, int(step["collector", "traj_ids"])
            self.open[key] += step["next", "kl"].item()
            sums[row, t] = self.open[key]
            if step["next", "terminated"]:
                self.ended.append(self.open.pop(key))
        return sums.reshape(*shape, 1)


def collector_of(env: Any, frames: int = 12, *, batches: int = 8, **kwargs) -> Collector:
    return Collector(
        env,
        policy(),
        frames_per_batch=frames,
        total_frames=frames * batches,
        auto_register_policy_transforms=False,
        **kwargs,
    )


# Ids that restart.


@pytest.mark.parametrize("set_truncated", [False, True])
def test_two_collectors_share_a_stack_as_their_postproc(set_truncated):
    stack, controller = spied()
    collectors = [
        collector_of(
            WalkEnv((n,), longest=9), 4 * n, batches=15, postproc=stack, set_truncated=set_truncated
        )
        for n in (2, 3)
    ]
    sums, restarted = Sums(), 0
    for pair in zip(*collectors, strict=True):
        restarted += (
            pair[0]["collector", "traj_ids"] == pair[1]["collector", "traj_ids"][:2]
        ).sum()
        for number, batch in enumerate(pair):
            assert_same(batch["next", "episode_kl"].double(), sums.expect(number, batch))
    for collector in collectors:
        collector.shutdown()
    assert restarted > 10
    n, told = total(controller)
    assert n == len(sums.ended) > 20
    assert_close(told, sum(sums.ended), atol=1e-4, rtol=0)


@pytest.mark.parametrize("truncates", [False, True])
def test_frozen_evaluations_in_between_change_nothing(truncates):
    """The running sums of the training, and what the controller is told, are those without them."""
    inside = KLConstrainedTransform(make_actor(), 0.1)
    env = with_transforms(WalkEnv((2,), longest=9), inside)
    training = collect(env, policy(), frames=10, batches=10)
    evaluation = WalkEnv((2,), longest=5, truncates=truncates)
    evaluations = collect(evaluation, moved(policy()), frames=10, batches=10, seed=9)
    assert any(batch["next", "done"][:, -1].any() for batch in evaluations)
    told = []
    for evaluates in (False, True):
        stack, controller = spied()
        for batch, other in zip(training, evaluations, strict=True):
            after = stack(without_kl(batch))
            assert_same(after["next", "episode_kl"], batch["next", "episode_kl"])
            if evaluates:
                stack.freeze()(other)
                stack.unfreeze()
        told.append(controller.calls)
    assert told[0] == told[1]
    assert len(told[0]) > 5


def test_a_frozen_batch_neither_judges_a_truncation_nor_leaves_one_to_be_told():
    """A truncation in the last step of a batch is judged by a later batch that is not frozen."""
    stack, controller = spied()
    env = WalkEnv((1,), truncates=True)
    batches = [play(env, policy(), 9, seed=n, break_when_any_done=True) for n in range(3)]
    for number, batch in enumerate(batches):
        assert batch["next", "truncated"][0, -1]
        batch["collector", "traj_ids"] = torch.full(batch.shape, number)
    first, evaluation, last = batches
    total_of_first = stack(first)["next", "episode_kl"][0, -1].item()
    stack.freeze()(evaluation)
    assert controller.calls == []
    stack.unfreeze()(last)
    ((told, n),) = controller.calls
    assert n == 1
    assert_close(told, total_of_first, atol=1e-5, rtol=0)


@pytest.mark.filterwarnings("ignore:split_trajs=True produces:UserWarning")
def test_rows_that_torchrl_numbers_anew_in_each_batch_are_refused():
    collector = MultiSyncCollector(
        [partial(WalkEnv, (2,), longest=30)] * 2,
        policy(),
        frames_per_batch=32,
        total_frames=320,
        split_trajs=True,
        postproc=KLConstrainedTransform(make_actor(), SpyController(), time_dim=-1),
        auto_register_policy_transforms=False,
    )
    sums, n_right = Sums(), 0
    try:
        error = r"padded row .*MultiSyncCollector\(split_trajs=True\)"
        with pytest.raises(RuntimeError, match=error):  # noqa: PT012
            for batch in collector:
                right = batch["collector", "mask"]
                expected = sums.expect(0, batch)[right]
                assert_same(batch["next", "episode_kl"][right].double(), expected)
                n_right += 1
    finally:
        collector.shutdown()
    assert n_right > 0  # until a worker has begun a trajectory, the numbers stay


# Masks.


@pytest.mark.parametrize("ids", [False, True], ids=["done_flags", "ids"])
@pytest.mark.parametrize("kind", ["prompt", "last", "holes", "a batch"])
def test_a_mask_that_is_not_a_prefix(kind, ids):
    """Masked steps add and end nothing; a trajectory with a step that counts is told."""
    stack, controller = spied()
    rng, running, expected = random.Random(0), [0.0] * 3, []
    counted = [False] * 3
    env = with_transforms(WalkEnv((3,), longest=6), InitTracker())
    for index, batch in enumerate(collect(env, policy(), frames=36, batches=12, seed=1)):
        if not ids:
            batch.pop("collector")
            batch["next", "done"][:, -1] = True  # each row is whole
        starts, ends = batch["is_init"].squeeze(-1), batch["next", "done"].squeeze(-1)
        mask = {
            "prompt": ~(starts | starts.roll(1, -1)),
            "last": ~ends,
            "holes": torch.tensor([[rng.random() < 0.5 for _ in range(12)] for _ in range(3)]),
            "a batch": torch.full((3, 12), index % 3 != 1),
        }[kind]
        batch["collector", "mask"] = mask
        after = stack(batch)["next"]
        kl = (batch["action_log_prob"].detach() - after["ref_log_prob"]) * mask
        for row in range(3):
            for t in range(12):
                running[row] += kl[row, t].item()
                counted[row] |= bool(mask[row, t])
                assert after["episode_kl"][row, t].item() == pytest.approx(running[row], abs=1e-5)
                assert after["kl"][row, t] == 0 or mask[row, t]
                if ends[row, t]:
                    expected += [running[row]] if counted[row] else []
                    running[row], counted[row] = 0.0, False
    n, told = total(controller)
    assert n == len(expected) > 20
    assert_close(told, sum(expected), atol=1e-4, rtol=0)


# Order.


def adaptive() -> AdaptiveKLController:
    return AdaptiveKLController(0.1, target=0.1, horizon=100)


def test_a_shuffled_batch_that_kept_the_name_time_is_refused():
    controller = adaptive()
    stack = KLConstrainedTransform(make_actor(), controller)
    batch = play(WalkEnv((2,), longest=9), policy(), 30)
    shuffled = batch[:, torch.randperm(30)]
    shuffled.names = [None, "time"]
    with pytest.raises(
        ValueError, match="steps of the batch do not follow one another.*shuffle after"
    ):
        stack(shuffled)
    assert controller.coeff == 0.1
    assert int(stack.statistics.count) == 0
    stack(batch)
    assert controller.coeff != 0.1
    for other in (0.1, AdaptiveKLController(0.1, target=0.1, horizon=100, per="step")):
        KLConstrainedTransform(make_actor(), other)(shuffled)  # nobody asks for trajectories


def test_observations_that_are_nan_are_in_order():
    _, controller = spied()
    batch = play(WalkEnv((2,)), policy())
    for step in (batch, batch["next"]):
        step["observation"][..., 0] = float("nan")
        step["seen"] = step["observation"].clone()
    batch["action_log_prob"] = torch.full((2, 12), -1.0)
    batch["next", "kl"] = torch.ones(2, 12, 1)
    after = RewardAdjustmentTransform(controller, update_every=1)(batch)["next"]
    assert after["episode_kl"].max() > 1
    assert total(controller)[0] == int(batch["next", "done"].sum())


# Fake data.


def test_a_batch_whose_root_is_all_zeros_is_not_fake():
    """A collapsed policy: observation 0, action 0, log-prob 0."""
    stack, controller = spied("step")
    batch = play(WalkEnv((2,)), policy()).exclude("logits")
    for key in batch.keys(True, True):
        if "next" not in key:
            batch[key] = torch.zeros_like(batch[key])
    del batch["next", "observation"]
    assert not any(batch[key].any() for key in batch.keys(True, True) if "next" not in key)
    after = stack(batch)["next"]
    assert total(controller)[0] == 24
    assert after["kl"].min() > 0  # the reference is not sure of its first action
    zeros = batch.clone().zero_()
    zeros["next", "done"] = zeros["next", "truncated"] = torch.ones(2, 12, 1, dtype=torch.bool)
    stack(zeros)
    assert total(controller)[0] == 24


# What it costs.


def test_sums_of_trajectories_that_never_go_on_do_not_pile_up():
    stack = KLConstrainedTransform(make_actor(), SpyController())
    collector = collector_of(
        WalkEnv((8,), longest=9), 16, batches=301, reset_at_each_iter=True, postproc=stack
    )
    sizes = [len(pickle.dumps(stack)) for _ in collector]
    collector.shutdown()
    assert len(sizes) == 301
    # At most 64 open sums for each of the 8 envs, of which the numbers get longer: 3 times as many
    # else.
    assert sizes[300] < 1.15 * sizes[100]
    assert sizes[300] < 100_000


@pytest.mark.parametrize("ids", [False, True], ids=["done_flags", "ids"])
def test_a_long_batch_takes_no_loop_over_its_steps(ids):
    """The number of operators, and of calls of Python functions, is that of a short one."""
    stack, _ = spied()
    (short,) = collect(WalkEnv((2,), longest=60), policy(), frames=256, batches=1)
    if not ids:
        short.pop("collector")
    del short["next", "observation"]
    n_operators, n_calls = [], []
    for n in (1, 782):  # 128 and 100,096 steps
        batch: Any = torch.cat([short] * n, 1)
        batch.names = [None, "time"]
        if ids:
            ends = batch["next", "done"].squeeze(-1).long()
            batch["collector", "traj_ids"] = ends.cumsum(-1) - ends + torch.tensor([[0], [10**6]])
        calls = 0

        def count(frame, event, argument):
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(count)
        stack(batch)
        sys.setprofile(None)
        n_calls.append(calls)
        with Operators() as operators:
            stack(batch)
        n_operators.append(operators.n)
    assert n_operators[1] <= 1.2 * n_operators[0]
    assert n_calls[1] <= 1.2 * n_calls[0]
    assert n_operators[0] > 50


def test_the_stacks_of_two_copies_do_not_share_open_sums():
    stack, _ = spied()
    batches = collect(WalkEnv((2,), longest=9), policy(), frames=10, batches=2)
    stack(batches[0])
    copied = pickle.loads(pickle.dumps(stack))
    first, second = (one(batches[1])["next", "episode_kl"] for one in (stack, copied))
    assert_close(first, second, rtol=0, atol=0)
