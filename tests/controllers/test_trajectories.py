"""Sums over trajectories in pieces, against a loop that sees each stream of steps whole."""

import itertools
import math
import random

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch.testing import assert_close
from torchrl.collectors.utils import split_trajectories

from tests.streams import (
    Loop,
    Step,
    add,
    cut,
    make_batch,
    make_stream,
    make_streams,
    same_totals,
    values_of,
)
from torchrl_kl._feeding import ControllerFeed
from torchrl_kl._tensordict import find_done, find_ends
from torchrl_kl.controllers import AdaptiveKLController
from torchrl_kl.controllers.trajectories import OpenTrajectories

seeds = pytest.mark.parametrize("seed", range(20))


class TestWithIds:
    @seeds
    @pytest.mark.parametrize("n_features", [1, 3])
    @pytest.mark.parametrize("set_truncated", [False, True], ids=["as_it_ends", "set_truncated"])
    @pytest.mark.parametrize("is_init", [False, True], ids=["no_is_init", "is_init"])
    def test_across_batches(self, seed, n_features, set_truncated, is_init):
        rng = random.Random(seed)
        streams = make_streams(rng, 3, 40, n_features, shared_done=True)
        loops, trajectories = [Loop([0.0] * n_features) for _ in streams], OpenTrajectories()
        for rows in cut(streams, rng):
            batch = make_batch(rows, set_truncated=set_truncated, is_init=is_init)
            running, finished = add(trajectories, batch, values_of(rows), "done")
            expected = [loop.walk(row) for loop, row in zip(loops, rows, strict=True)]
            assert_close(running, torch.tensor(expected), rtol=0, atol=0)
            same_totals(finished, [total for loop in loops for total in loop.finished])

    @seeds
    def test_agents_that_end_apart_end_together_with_their_id(self, seed):
        rng = random.Random(seed)
        streams = make_streams(rng, 2, 40, 3, shared_done=False)
        loops, trajectories = [Loop([0.0] * 3) for _ in streams], OpenTrajectories()
        for rows in cut(streams, rng):
            batch = make_batch(rows, per_agent=True)
            running, finished = add(
                trajectories, batch, values_of(rows).unsqueeze(-1), ("agents", "done")
            )
            expected = [loop.walk(row) for loop, row in zip(loops, rows, strict=True)]
            assert_close(running, torch.tensor(expected).unsqueeze(-1), rtol=0, atol=0)
            same_totals(finished, [total for loop in loops for total in loop.finished])

    @seeds
    def test_padded_rows_give_the_same_as_whole_ones(self, seed):
        rng = random.Random(seed)
        streams = make_streams(rng, 3, 40, 1, shared_done=True)
        whole, split = OpenTrajectories(), OpenTrajectories()
        totals, split_totals = [], []
        for rows in cut(streams, rng):
            batch = make_batch(rows).set("value", values_of(rows))
            padded = split_trajectories(batch, prefix="collector")
            batch["running"], finished = add(whole, batch, batch["value"], "done")
            running, split_finished = add(split, padded, padded["value"], "done")
            totals += finished.tolist()
            split_totals += split_finished.tolist()
            expected = split_trajectories(batch, prefix="collector")["running"]
            mask = padded["collector", "mask"]
            assert_close(running[mask], expected[mask], rtol=0, atol=0)
        # Each padded row ends at its trajectory's end, whose truncation is believed at the next
        # call.
        batch = make_batch([[Step(1000 + r, [0.0], True, [False], [False])] for r in range(3)])
        for trajectories, pool in ((whole, totals), (split, split_totals)):
            pool += add(trajectories, batch, torch.zeros(3, 1, 1), "done").finished.tolist()
        assert sorted(totals) == sorted(split_totals)
        assert len(totals) == sum(any(step.done) for stream in streams for step in stream)

    def test_padding_is_not_the_first_trajectory_come_back(self):
        """`split_trajs` pads the ids with 0, which is the id of a collector's first trajectory."""
        trajectories = OpenTrajectories()
        truncated = make_batch([[Step(0, [3.0], True, [False], [True])]])
        assert (
            add(trajectories, truncated, torch.full((1, 1, 1), 3.0), "done").finished.tolist() == []
        )
        padded = TensorDict(
            {
                "observation": torch.ones(1, 2, 1),
                "next": {"done": torch.zeros(1, 2, 1, dtype=torch.bool)},
                "collector": {
                    "traj_ids": torch.tensor([[1, 0]]),
                    "mask": torch.tensor([[True, False]]),
                },
            },
            [1, 2],
        )
        assert add(trajectories, padded, torch.zeros(1, 2, 1), "done").finished.tolist() == [3.0]

    @seeds
    @pytest.mark.parametrize("leading", [(), (2, 2)], ids=str)
    def test_any_leading_shape(self, seed, leading):
        rng = random.Random(seed)
        streams = make_streams(rng, math.prod(leading), 30)
        flat, shaped = OpenTrajectories(), OpenTrajectories()
        for rows in cut(streams, rng):
            batch, values = make_batch(rows), values_of(rows)
            shape = (*leading, batch.shape[-1])
            running, finished = add(flat, batch, values, "done")
            result = add(shaped, batch.reshape(shape), values.reshape(*shape, 1), "done")
            assert_close(result.running, running.reshape(*shape, 1), rtol=0, atol=0)
            assert_close(result.finished, finished, rtol=0, atol=0)

    def test_a_termination_at_the_last_step_is_an_end_at_once_and_only_once(self):
        trajectories = OpenTrajectories()
        ends = make_batch([[Step(0, [3.0], True, [True], [False])]])
        goes_on = make_batch([[Step(1, [1.0], True, [False], [False])]])
        assert add(trajectories, ends, torch.full((1, 1, 1), 3.0), "done").finished.tolist() == [
            3.0
        ]
        running, finished = add(trajectories, goes_on, torch.ones(1, 1, 1), "done")
        assert (running.item(), finished.tolist()) == (1.0, [])

    def test_without_a_terminated_flag_an_end_at_the_last_step_waits(self):
        trajectories = OpenTrajectories()
        ends = make_batch([[Step(0, [3.0], True, [True], [False])]])
        goes_on = make_batch([[Step(1, [1.0], True, [False], [False])]])
        del ends["next", "terminated"]
        assert add(trajectories, ends, torch.full((1, 1, 1), 3.0), "done").finished.tolist() == []
        assert add(trajectories, goes_on, torch.ones(1, 1, 1), "done").finished.tolist() == [3.0]

    def test_an_id_that_begins_anew_is_another_collectors(self):
        """Ids restart with each collector: no sum goes on, and whether a truncation was an end is
        not told.
        """
        trajectories = OpenTrajectories()
        first = [[Step(0, [3.0], True, [False], [False])], [Step(1, [5.0], True, [False], [True])]]
        assert (
            add(trajectories, make_batch(first), values_of(first), "done").finished.tolist() == []
        )
        again = [[Step(0, [1.0], True, [False], [False])], [Step(1, [2.0], True, [False], [False])]]
        running, finished = add(trajectories, make_batch(again), values_of(again), "done")
        assert running.flatten().tolist() == [1.0, 2.0]
        assert finished.tolist() == []

    def test_a_trajectory_moves_with_its_id_not_with_its_row(self):
        trajectories = OpenTrajectories()
        rows = [
            [Step(trajectory, [value], True, [False], [False])]
            for trajectory, value in ((0, 1.0), (1, 10.0))
        ]
        add(trajectories, make_batch(rows), values_of(rows), "done")
        swapped = [[Step(trajectory, [0.0], False, [False], [False])] for trajectory in (1, 0)]
        assert add(
            trajectories, make_batch(swapped), values_of(swapped), "done"
        ).running.flatten().tolist() == [10, 1]

    def test_an_open_trajectory_waits_for_its_id_through_the_batches_of_other_workers(self):
        trajectories = OpenTrajectories()
        one = [[Step(0, [1.0], True, [False], [False])]]
        two = [[Step(0, [2.0], False, [False], [False])]]
        other = [[Step(7, [50.0], True, [False], [False])]]
        end = [[Step(0, [4.0], False, [True], [False])]]
        finished = []
        for rows, set_truncated in ((one, True), (two, False), (other, False), (end, False)):
            batch = make_batch(rows, set_truncated=set_truncated)
            finished.append(add(trajectories, batch, values_of(rows), "done").finished.tolist())
        assert finished == [[], [], [], [7.0]]

    @pytest.mark.filterwarnings("ignore:the KL controller has not been updated:UserWarning")
    @seeds
    def test_batches_of_replay_and_fake_ones_leave_no_trace(self, seed):
        rng = random.Random(seed)
        streams = make_streams(rng, 2, 30, 1, shared_done=True)
        keys = {"done_key": "done", "time_dim": -1}
        controller = AdaptiveKLController(0.1, target=0.5, horizon=100)
        clean, disturbed = (ControllerFeed(controller, update_every=10**9) for _ in range(2))
        for rows in cut(streams, rng):
            batch, values = make_batch(rows), values_of(rows)
            for other in (batch, batch.clone().zero_()):
                disturbed.add_batch(other, values, None, **keys, trace=False)
            sums = [feed.add_batch(batch, values, None, **keys) for feed in (clean, disturbed)]
            assert_close(sums[0], sums[1], rtol=0, atol=0)
            assert clean.stream._open == disturbed.stream._open
        assert clean.statistics.count == disturbed.statistics.count > 0
        assert clean.statistics.sum == disturbed.statistics.sum


class TestWithoutIds:
    @seeds
    @pytest.mark.parametrize("per_agent", [False, True], ids=["shared_done", "done_per_agent"])
    def test_each_done_is_an_end_and_each_row_begins_at_zero(self, seed, per_agent):
        rng = random.Random(seed)
        streams = [
            make_stream(rng, itertools.count(), 40, 3, shared_done=not per_agent) for _ in range(3)
        ]
        trajectories = OpenTrajectories()
        for rows in cut(streams, rng):
            expected, totals = [], []
            for row in rows:
                sums = [0.0] * 3
                for step in row:
                    sums = [a + b for a, b in zip(sums, step.value, strict=True)]
                    expected.append(sums)
                    totals += [total for total, done in zip(sums, step.done, strict=True) if done]
                    sums = [
                        0.0 if done else total for total, done in zip(sums, step.done, strict=True)
                    ]
            batch = make_batch(rows, ids=False, per_agent=per_agent, root=not per_agent)
            done_key = ("agents", "done") if per_agent else "done"
            running, finished = add(trajectories, batch, values_of(rows).unsqueeze(-1), done_key)
            assert_close(running, torch.tensor(expected).reshape(running.shape), rtol=0, atol=0)
            same_totals(finished, totals)

    def test_padding_is_not_counted(self):
        batch = TensorDict(
            {
                "next": {"done": torch.tensor([[[False], [True], [True]]])},
                "collector": {"mask": torch.tensor([[True, True, False]])},
            },
            [1, 3],
        )
        running, finished = add(
            OpenTrajectories(), batch, torch.tensor([[[1.0], [2.0], [0.0]]]), "done"
        )
        assert running[0, :2].flatten().tolist() == [1, 3]
        assert finished.tolist() == [3]


def one_row(values: list[float], ends: list[bool]) -> tuple[TensorDictBase, torch.Tensor]:
    batch = TensorDict({"next": {"done": torch.tensor(ends).view(1, -1, 1)}}, [1, len(values)])
    return batch, torch.tensor(values).view(1, -1, 1)


class TestNumbers:
    def test_a_long_row_is_summed_in_float64(self):
        n_steps = 20_000
        batch, values = one_row([0.1] * n_steps, [False] * (n_steps - 1) + [True])
        running, finished = add(OpenTrajectories(), batch, values, "done")
        truth = math.fsum(values.flatten().tolist())
        # Each of the additions rounds a sum that is at most `truth` by half an epsilon of float64.
        assert finished.item() == pytest.approx(truth, abs=n_steps * truth * 2.0**-53)
        assert running.dtype == torch.float32
        assert running[0, -1].item() == torch.tensor(truth, dtype=torch.float32).item()

    def test_a_large_sum_does_not_blur_the_trajectory_after_it(self):
        batch, values = one_row([1e17, 1.0, 2.0], [True, False, True])
        running, finished = add(OpenTrajectories(), batch, values, "done")
        assert running.flatten().tolist()[1:] == [1, 3]
        assert finished.tolist()[1] == 3

    @pytest.mark.parametrize("bad", [math.inf, math.nan])
    def test_a_value_that_is_not_finite_stays_in_its_trajectory(self, bad):
        batch, values = one_row([1.0, bad, 1.0, 2.0], [True, True, False, True])
        running, finished = add(OpenTrajectories(), batch, values, "done")
        expected = torch.tensor([1.0, bad, 1.0, 3.0])
        assert_close(running.flatten(), expected, rtol=0, atol=0, equal_nan=True)
        assert_close(
            finished, torch.tensor([1.0, bad, 3.0]).double(), rtol=0, atol=0, equal_nan=True
        )

    def test_no_gradient_is_carried(self):
        batch, values = one_row([1.0, 2.0], [False, True])
        running, finished = add(OpenTrajectories(), batch, values.requires_grad_(), "done")
        assert not running.requires_grad
        assert not finished.requires_grad

    def test_neither_batch_nor_values_are_written_to(self):
        rng = random.Random(0)
        rows = [make_stream(rng, itertools.count(), 8, 1, shared_done=True)]
        batch, values = make_batch(rows), values_of(rows)
        before, values_before = batch.clone(), values.clone()
        add(OpenTrajectories(), batch, values, "done")
        assert set(batch.keys(True, True)) == set(before.keys(True, True))
        assert (batch == before).all()
        assert_close(values, values_before, rtol=0, atol=0)


class TestFindDone:
    def test_it_is_the_one_that_is_named_or_next_to_the_reward(self):
        step = TensorDict({"done": torch.zeros(1), "agents": {"done": torch.zeros(1)}})
        for named in (False, True):
            assert find_done(step, ("agents", "done"), named=named) == ("agents", "done")
            assert find_done(step, "done", named=named) == "done"

    def test_or_else_the_one_at_the_root_if_none_is_named(self):
        step = TensorDict({"done": torch.zeros(1), "agents": {"reward": torch.zeros(1)}})
        assert find_done(step, ("agents", "done"), named=False) == "done"
        with pytest.raises(KeyError, match="there is no .*agents.*done"):
            find_done(step, ("agents", "done"))

    def test_neither_is_an_error_that_says_what_is_there(self):
        step = TensorDict({"agents": {"reward": torch.zeros(1)}})
        message = (
            r"no .*'agents.*'done.* and no .*'done.* in the step, got .*agents.*reward"
            r".*`KLKeys\(done=\.\.\.\)`"
        )
        with pytest.raises(KeyError, match=message):
            find_done(step, ("agents", "done"), named=False)


class TestFindEnds:
    def ends(self, *args) -> list[bool]:
        found = find_ends(*args)
        assert found is not None
        return found.flatten().tolist()

    def test_an_agent_ends_at_its_flag_and_at_that_of_the_root(self):
        flags = TensorDict(done=torch.tensor([[True], [False]]), batch_size=2)
        step = TensorDict(agents=flags, done=torch.tensor([False]))
        shape = (2, 1)
        assert self.ends(step, ("agents", "done"), shape) == [True, False]
        step["done"] = torch.tensor([True])
        assert self.ends(step, ("agents", "done"), shape) == [True, True]
        assert find_ends(step, ("agents", "done"), shape, "terminated") is None

    def test_a_flag_that_is_named_at_the_root_is_the_only_one(self):
        step = TensorDict(done=torch.tensor([True]), my_end=torch.tensor([False]))
        assert self.ends(step, "my_end", (1,)) == [False]
