"""Sums over trajectories in pieces, against a loop that sees each stream of steps whole."""

import itertools
import math
import random
from dataclasses import dataclass, field

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch.testing import assert_close
from torchrl.collectors.utils import split_trajectories

from torchrl_kl.controllers.trajectories import OpenTrajectories, find_done

seeds = pytest.mark.parametrize("seed", range(20))


@dataclass
class Step:
    """One step of one env; its values are multiples of 1/8, so that every sum of them is exact."""

    trajectory: int
    value: list[float]
    is_init: bool
    terminated: list[bool]
    truncated: list[bool]

    @property
    def done(self) -> list[bool]:
        return [a or b for a, b in zip(self.terminated, self.truncated, strict=True)]


def make_stream(
    rng: random.Random, ids, n_steps: int, n_features: int, shared_done: bool
) -> list[Step]:
    """What one env gives, with trajectories of 1 to 6 steps; as in a collector, the end of any agent ends the id."""
    steps, trajectory, is_init = [], next(ids), True
    for _ in range(n_steps):
        ends = [rng.random() < 0.3 for _ in range(n_features)]
        terminates = [rng.random() < 0.5 for _ in range(n_features)]
        if shared_done:
            ends, terminates = ends[:1] * n_features, terminates[:1] * n_features
        terminated = [a and b for a, b in zip(ends, terminates, strict=True)]
        truncated = [a and not b for a, b in zip(ends, terminates, strict=True)]
        value = [rng.randint(-40, 40) / 8 for _ in range(n_features)]
        steps.append(Step(trajectory, value, is_init, terminated, truncated))
        is_init = any(ends)
        if is_init:
            trajectory = next(ids)
    return steps


@dataclass
class Loop:
    """The slow, obvious version: walks through one env's steps; knows nothing of batches but where they end."""

    sums: list[float]
    finished: list[float] = field(default_factory=list)
    pending: list[float] = field(default_factory=list)

    def walk(self, steps: list[Step]) -> list[list[float]]:
        self.finished, self.pending = self.pending, []
        running = []
        for step in steps:
            self.sums = [a + b for a, b in zip(self.sums, step.value, strict=True)]
            running.append(self.sums)
            if any(step.done):
                # A truncation at the end of a batch may be the collector's: it is not known yet.
                unsure = step is steps[-1] and not any(step.terminated)
                (self.pending if unsure else self.finished).extend(self.sums)
                self.sums = [0.0] * len(self.sums)
        return running


def make_batch(
    rows: list[list[Step]],
    *,
    ids: bool = True,
    is_init: bool = True,
    set_truncated: bool = False,
    per_agent: bool = False,
) -> TensorDict:
    """The batch (n_envs, T) that a collector would give; flags are (n_envs, T, 1), or one per agent."""

    def flags(name: str) -> torch.Tensor:
        flag = torch.tensor([[getattr(step, name) for step in row] for row in rows])
        return flag.unsqueeze(-1) if per_agent else flag.any(-1, keepdim=True)

    terminated, truncated = flags("terminated"), flags("truncated")
    if set_truncated:
        truncated[:, -1] |= ~terminated[:, -1]
    ends = {"done": terminated | truncated, "terminated": terminated, "truncated": truncated}
    shape = torch.Size([len(rows), len(rows[0])])
    batch = TensorDict({"observation": torch.ones(*shape, 1)}, shape)
    batch["next"] = TensorDict({"agents": ends} if per_agent else ends, shape)
    if ids:
        batch["collector", "traj_ids"] = torch.tensor(
            [[step.trajectory for step in row] for row in rows]
        )
    if is_init:
        batch["is_init"] = torch.tensor([[[step.is_init] for step in row] for row in rows])
    return batch


def values_of(rows: list[list[Step]], dtype=torch.float32) -> torch.Tensor:
    """(n_envs, T, n_features)."""
    return torch.tensor([[step.value for step in row] for row in rows], dtype=dtype)


def cut(streams: list[list[Step]], rng: random.Random) -> list[list[list[Step]]]:
    """The streams in batches of 1 to 8 steps."""
    batches, start, n_steps = [], 0, len(streams[0])
    while start < n_steps:
        length = min(rng.randint(1, 8), n_steps - start)
        batches.append([stream[start : start + length] for stream in streams])
        start += length
    return batches


def same_totals(finished: torch.Tensor, expected: list[float]) -> None:
    assert finished.dtype == torch.float64
    assert finished.ndim == 1
    assert sorted(finished.tolist()) == sorted(expected)


class TestWithIds:
    @seeds
    @pytest.mark.parametrize("n_features", [1, 3])
    @pytest.mark.parametrize("set_truncated", [False, True], ids=["as_it_ends", "set_truncated"])
    @pytest.mark.parametrize("is_init", [False, True], ids=["no_is_init", "is_init"])
    def test_across_batches(self, seed, n_features, set_truncated, is_init):
        rng, ids = random.Random(seed), itertools.count()
        streams = [make_stream(rng, ids, 40, n_features, shared_done=True) for _ in range(3)]
        loops, trajectories = [Loop([0.0] * n_features) for _ in streams], OpenTrajectories()
        for rows in cut(streams, rng):
            batch = make_batch(rows, set_truncated=set_truncated, is_init=is_init)
            running, finished = trajectories.add(batch, values_of(rows), "done")
            expected = [loop.walk(row) for loop, row in zip(loops, rows, strict=True)]
            assert_close(running, torch.tensor(expected), rtol=0, atol=0)
            same_totals(finished, [total for loop in loops for total in loop.finished])

    @seeds
    def test_agents_that_end_apart_end_together_with_their_id(self, seed):
        rng, ids = random.Random(seed), itertools.count()
        streams = [make_stream(rng, ids, 40, 3, shared_done=False) for _ in range(2)]
        loops, trajectories = [Loop([0.0] * 3) for _ in streams], OpenTrajectories()
        for rows in cut(streams, rng):
            batch = make_batch(rows, per_agent=True)
            running, finished = trajectories.add(
                batch, values_of(rows).unsqueeze(-1), ("agents", "done")
            )
            expected = [loop.walk(row) for loop, row in zip(loops, rows, strict=True)]
            assert_close(running, torch.tensor(expected).unsqueeze(-1), rtol=0, atol=0)
            same_totals(finished, [total for loop in loops for total in loop.finished])

    @seeds
    def test_padded_rows_give_the_same_as_whole_ones(self, seed):
        rng, ids = random.Random(seed), itertools.count()
        streams = [make_stream(rng, ids, 40, 1, shared_done=True) for _ in range(3)]
        whole, split = OpenTrajectories(), OpenTrajectories()
        totals, split_totals = [], []
        for rows in cut(streams, rng):
            batch = make_batch(rows).set("value", values_of(rows))
            padded = split_trajectories(batch, prefix="collector")
            batch["running"], finished = whole.add(batch, batch["value"], "done")
            running, split_finished = split.add(padded, padded["value"], "done")
            totals += finished.tolist()
            split_totals += split_finished.tolist()
            expected = split_trajectories(batch, prefix="collector")["running"]
            mask = padded["collector", "mask"]
            assert_close(running[mask], expected[mask], rtol=0, atol=0)
        # Each padded row ends at its trajectory's end, whose truncation is believed at the next call.
        rows = [make_stream(rng, ids, 1, 1, shared_done=True) for _ in range(3)]
        batch = make_batch(
            [[Step(row[0].trajectory, [0.0], True, [False], [False])] for row in rows]
        )
        for trajectories, pool in ((whole, totals), (split, split_totals)):
            pool += trajectories.add(batch, torch.zeros(3, 1, 1), "done").finished.tolist()
        assert sorted(totals) == sorted(split_totals)
        assert len(totals) == sum(any(step.done) for stream in streams for step in stream)

    def test_padding_is_not_the_first_trajectory_come_back(self):
        """`split_trajs` pads the ids with 0, which is the id of a collector's first trajectory."""
        trajectories = OpenTrajectories()
        truncated = make_batch([[Step(0, [3.0], True, [False], [True])]])
        assert (
            trajectories.add(truncated, torch.full((1, 1, 1), 3.0), "done").finished.tolist() == []
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
        assert trajectories.add(padded, torch.zeros(1, 2, 1), "done").finished.tolist() == [3.0]

    @seeds
    @pytest.mark.parametrize("leading", [(), (2, 2)], ids=str)
    def test_any_leading_shape(self, seed, leading):
        rng, ids = random.Random(seed), itertools.count()
        streams = [
            make_stream(rng, ids, 30, 1, shared_done=True) for _ in range(math.prod(leading))
        ]
        flat, shaped = OpenTrajectories(), OpenTrajectories()
        for rows in cut(streams, rng):
            batch, values = make_batch(rows), values_of(rows)
            shape = (*leading, batch.shape[-1])
            running, finished = flat.add(batch, values, "done")
            result = shaped.add(batch.reshape(shape), values.reshape(*shape, 1), "done")
            assert_close(result.running, running.reshape(*shape, 1), rtol=0, atol=0)
            assert_close(result.finished, finished, rtol=0, atol=0)

    def test_a_termination_at_the_last_step_is_an_end_at_once_and_only_once(self):
        trajectories = OpenTrajectories()
        ends = make_batch([[Step(0, [3.0], True, [True], [False])]])
        goes_on = make_batch([[Step(1, [1.0], True, [False], [False])]])
        assert trajectories.add(ends, torch.full((1, 1, 1), 3.0), "done").finished.tolist() == [3.0]
        running, finished = trajectories.add(goes_on, torch.ones(1, 1, 1), "done")
        assert (running.item(), finished.tolist()) == (1.0, [])

    def test_without_a_terminated_flag_an_end_at_the_last_step_waits(self):
        trajectories = OpenTrajectories()
        ends = make_batch([[Step(0, [3.0], True, [True], [False])]])
        goes_on = make_batch([[Step(1, [1.0], True, [False], [False])]])
        del ends["next", "terminated"]
        assert trajectories.add(ends, torch.full((1, 1, 1), 3.0), "done").finished.tolist() == []
        assert trajectories.add(goes_on, torch.ones(1, 1, 1), "done").finished.tolist() == [3.0]

    def test_an_id_that_begins_anew_is_another_collectors(self):
        """Ids restart with each collector: the sum does not, and a truncation before it was an end."""
        trajectories = OpenTrajectories()
        first = [[Step(0, [3.0], True, [False], [False])], [Step(1, [5.0], True, [False], [True])]]
        assert trajectories.add(make_batch(first), values_of(first), "done").finished.tolist() == []
        again = [[Step(0, [1.0], True, [False], [False])], [Step(1, [2.0], True, [False], [False])]]
        running, finished = trajectories.add(make_batch(again), values_of(again), "done")
        assert running.flatten().tolist() == [1.0, 2.0]
        assert finished.tolist() == [5.0]

    def test_a_trajectory_moves_with_its_id_not_with_its_row(self):
        trajectories = OpenTrajectories()
        rows = [
            [Step(trajectory, [value], True, [False], [False])]
            for trajectory, value in ((0, 1.0), (1, 10.0))
        ]
        trajectories.add(make_batch(rows), values_of(rows), "done")
        swapped = [[Step(trajectory, [0.0], False, [False], [False])] for trajectory in (1, 0)]
        assert trajectories.add(
            make_batch(swapped), values_of(swapped), "done"
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
            finished.append(trajectories.add(batch, values_of(rows), "done").finished.tolist())
        assert finished == [[], [], [], [7.0]]

    @seeds
    def test_fake_batches_leave_no_trace(self, seed):
        rng, ids = random.Random(seed), itertools.count()
        streams = [make_stream(rng, ids, 30, 1, shared_done=True) for _ in range(2)]
        clean, disturbed = OpenTrajectories(), OpenTrajectories()
        for rows in cut(streams, rng):
            batch = make_batch(rows)
            fake = batch.clone().zero_()
            assert (
                disturbed.add(fake, torch.zeros_like(values_of(rows)), "done").finished.numel() == 0
            )
            results = [t.add(batch, values_of(rows), "done") for t in (clean, disturbed)]
            assert_close(tuple(results[0]), tuple(results[1]), rtol=0, atol=0)


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
            batch = make_batch(rows, ids=False, per_agent=per_agent)
            done_key = ("agents", "done") if per_agent else "done"
            running, finished = trajectories.add(batch, values_of(rows).unsqueeze(-1), done_key)
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
        running, finished = OpenTrajectories().add(
            batch, torch.tensor([[[1.0], [2.0], [0.0]]]), "done"
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
        running, finished = OpenTrajectories().add(batch, values, "done")
        truth = math.fsum(values.flatten().tolist())
        # Each of the additions rounds a sum that is at most `truth` by half an epsilon of float64.
        assert finished.item() == pytest.approx(truth, abs=n_steps * truth * 2.0**-53)
        assert running.dtype == torch.float32
        assert running[0, -1].item() == torch.tensor(truth, dtype=torch.float32).item()

    def test_a_large_sum_does_not_blur_the_trajectory_after_it(self):
        batch, values = one_row([1e17, 1.0, 2.0], [True, False, True])
        running, finished = OpenTrajectories().add(batch, values, "done")
        assert running.flatten().tolist()[1:] == [1, 3]
        assert finished.tolist()[1] == 3

    @pytest.mark.parametrize("bad", [math.inf, math.nan])
    def test_a_value_that_is_not_finite_stays_in_its_trajectory(self, bad):
        batch, values = one_row([1.0, bad, 1.0, 2.0], [True, True, False, True])
        running, finished = OpenTrajectories().add(batch, values, "done")
        expected = torch.tensor([1.0, bad, 1.0, 3.0])
        assert_close(running.flatten(), expected, rtol=0, atol=0, equal_nan=True)
        assert_close(
            finished, torch.tensor([1.0, bad, 3.0]).double(), rtol=0, atol=0, equal_nan=True
        )

    def test_no_gradient_is_carried(self):
        batch, values = one_row([1.0, 2.0], [False, True])
        running, finished = OpenTrajectories().add(batch, values.requires_grad_(), "done")
        assert not running.requires_grad
        assert not finished.requires_grad

    def test_neither_batch_nor_values_are_written_to(self):
        rng = random.Random(0)
        rows = [make_stream(rng, itertools.count(), 8, 1, shared_done=True)]
        batch, values = make_batch(rows), values_of(rows)
        before, values_before = batch.clone(), values.clone()
        OpenTrajectories().add(batch, values, "done")
        assert set(batch.keys(True, True)) == set(before.keys(True, True))
        assert (batch == before).all()
        assert_close(values, values_before, rtol=0, atol=0)


class TestFindDone:
    def test_it_is_the_one_beside_the_reward(self):
        step = TensorDict(
            {"done": torch.zeros(1), "agents": {"done": torch.zeros(1), "reward": torch.zeros(1)}}
        )
        assert find_done(step, ("agents", "reward")) == ("agents", "done")
        assert find_done(step, "reward") == "done"

    def test_or_else_the_one_at_the_root(self):
        step = TensorDict({"done": torch.zeros(1), "agents": {"reward": torch.zeros(1)}})
        assert find_done(step, ("agents", "reward")) == "done"

    def test_neither_is_an_error_that_says_what_is_there(self):
        step = TensorDict({"agents": {"reward": torch.zeros(1)}})
        message = r"no .*'agents.*'done.* and no .*'done.* in the step, got .*agents.*reward.*name it with `done_key`"
        with pytest.raises(KeyError, match=message):
            find_done(step, ("agents", "reward"))
