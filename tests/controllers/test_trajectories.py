"""Sums over trajectories in pieces, against a loop that sees each stream of steps whole."""

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch.testing import assert_close
from torchrl.collectors.utils import split_trajectories

from torchrl_kl._feeding import ControllerFeed, sum_trajectories
from torchrl_kl._tensordict import find_done, find_ends
from torchrl_kl.controllers import AdaptiveKLController
from torchrl_kl.controllers.trajectories import OpenTrajectories, TrajectorySums

seeds = pytest.mark.parametrize("seed", range(20))


def add(
    trajectories: OpenTrajectories, batch: TensorDictBase, values: torch.Tensor, done: Any, **kwargs
) -> TrajectorySums:
    """Adds the values of a batch whose last dimension is time; padding is where its mask is False."""
    mask = batch.get(("collector", "mask"), None)
    return sum_trajectories(batch, values, mask, done, trajectories, **kwargs)


@dataclass
class Step:
    """One step of one env; its values are multiples of 1/8, so that every sum of them is exact."""

    trajectory: int
    value: list[float]
    is_init: bool
    terminated: list[bool]
    truncated: list[bool]
    state: float = (
        0.0  # in which it begins; it leaves the next number, or its end a number and a half
    )
    counts: bool = True

    @property
    def done(self) -> list[bool]:
        return [a or b for a, b in zip(self.terminated, self.truncated, strict=True)]


def make_stream(
    rng: random.Random, ids, n_steps: int, n_features: int, shared_done: bool
) -> list[Step]:
    """What one env gives, with trajectories of 1 to 6 steps; as in a collector, the end of any agent ends the id."""
    steps, trajectory, is_init = [], next(ids), True
    for state in range(n_steps):
        ends = [rng.random() < 0.3 for _ in range(n_features)]
        terminates = [rng.random() < 0.5 for _ in range(n_features)]
        if shared_done:
            ends, terminates = ends[:1] * n_features, terminates[:1] * n_features
        terminated = [a and b for a, b in zip(ends, terminates, strict=True)]
        truncated = [a and not b for a, b in zip(ends, terminates, strict=True)]
        value = [rng.randint(-40, 40) / 8 for _ in range(n_features)]
        steps.append(Step(trajectory, value, is_init, terminated, truncated, state))
        is_init = any(ends)
        if is_init:
            trajectory = next(ids)
    return steps


def make_streams(
    rng: random.Random, n_envs: int, n_steps: int, n_features: int = 1, *, shared_done: bool = True
) -> list[list[Step]]:
    """Streams whose trajectories are numbered in the order in which they begin, as a collector does."""
    streams = [
        make_stream(rng, itertools.count(1000 * env), n_steps, n_features, shared_done)
        for env in range(n_envs)
    ]
    numbers: dict[int, int] = {}
    for steps in zip(*streams, strict=True):
        for step in steps:
            step.trajectory = numbers.setdefault(step.trajectory, len(numbers))
    return streams


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
    root: bool = True,
    states: bool = False,
    mask: bool = False,
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
    if per_agent:  # the env resets all agents as soon as one of them is done
        all_agents = {name: flag.any(-2) for name, flag in ends.items()} if root else {}
        ends = {"agents": ends, **all_agents}
    batch["next"] = TensorDict(ends, shape)
    if states:
        state = torch.tensor([[[float(step.state)] for step in row] for row in rows])
        over = torch.tensor([[[any(step.done)] for step in row] for row in rows])
        batch["observation"], batch["next", "observation"] = (
            state,
            state + torch.where(over, 0.5, 1.0),
        )
    if mask:
        batch["collector", "mask"] = torch.tensor([[step.counts for step in row] for row in rows])
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
        # Each padded row ends at its trajectory's end, whose truncation is believed at the next call.
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
        """Ids restart with each collector: no sum goes on, and whether a truncation was an end is not told."""
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


MASKS: dict[str, Callable[[Step, random.Random], bool]] = {
    "first steps": lambda step, rng: not step.is_init,
    "last steps": lambda step, rng: not any(step.done),
    "holes": lambda step, rng: rng.random() < 0.5,
    "few steps": lambda step, rng: rng.random() < 0.1,
    "rows": lambda step, rng: step.state // 8 % 2 == 0,
    "trajectories": lambda step, rng: step.trajectory % 3 > 0,
}


def counted_totals(streams: list[list[Step]]) -> list[float]:
    """Of each trajectory that ended and had a step that counts: the loop that sees streams whole."""
    totals = []
    for stream in streams:
        total, counted = 0.0, False
        for step in stream:
            total, counted = total + step.counts * step.value[0], counted or step.counts
            if any(step.done):
                totals += [total] if counted else []
                total, counted = 0.0, False
    return totals


class TestMasks:
    """Prompt tokens, first and last steps, holes, whole rows: what does not count adds 0 and cuts nothing."""

    @seeds
    @pytest.mark.parametrize("kind", MASKS)
    @pytest.mark.parametrize("is_init", [False, True], ids=["no_is_init", "is_init"])
    @pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
    def test_with_ids(self, seed, kind, is_init, padded):
        rng = random.Random(seed)  # the id 0 is also that of padding
        streams = make_streams(rng, 3, 40, 1, shared_done=True)
        for number, stream in enumerate(streams):
            stream[-1].terminated, stream[-1].truncated = [True], [False]
            for step in stream:
                step.state, step.counts = step.state + 100 * number, MASKS[kind](step, rng)
        trajectories, told, sums = OpenTrajectories(), [], [0.0] * 3
        for rows in cut(streams, rng):
            batch = make_batch(
                rows, is_init=is_init, states=True, mask=True, set_truncated=seed % 3 == 0
            )
            batch["value"] = values_of(rows)
            batch["expected"] = torch.empty_like(batch["value"])
            for r, row in enumerate(rows):
                for t, step in enumerate(row):
                    sums[r] += step.counts * step.value[0]
                    batch["expected"][r, t] = sums[r]
                    sums[r] = 0.0 if any(step.done) else sums[r]
            real = torch.ones(batch.shape, dtype=torch.bool)
            if padded:
                counts = batch.pop(("collector", "mask"))
                batch["counts"] = counts
                batch = split_trajectories(batch, prefix="collector")
                real = batch["collector", "mask"]
                batch["collector", "mask"] = batch.pop("counts") & real
            running, finished = add(trajectories, batch, batch["value"], "done")
            assert_close(running[real], batch["expected"][real], rtol=0, atol=0)
            told += finished.tolist()
        # Truncations in the last step are judged by a later batch, of later trajectories.
        after = [[Step(1000 + row, [0.0], True, [False], [False], state=1000)] for row in range(3)]
        told += add(
            trajectories, make_batch(after, states=True), values_of(after), "done"
        ).finished.tolist()
        assert sorted(told) == sorted(counted_totals(streams))

    @seeds
    @pytest.mark.parametrize("kind", MASKS)
    def test_with_done_flags(self, seed, kind):
        rng = random.Random(seed)
        streams = [make_stream(rng, itertools.count(), 30, 1, shared_done=True) for _ in range(3)]
        for step in itertools.chain(*streams):
            step.counts = MASKS[kind](step, rng)
        batch = make_batch(streams, ids=False, states=True, mask=True)
        values = torch.where(batch["collector", "mask"][..., None], values_of(streams), math.nan)
        running, finished = add(OpenTrajectories(), batch, values, "done")
        same_totals(finished, counted_totals(streams))
        assert running.isfinite().all()

    def test_a_row_without_a_step_that_counts_leaves_an_open_sum_alone(self):
        trajectories, told = OpenTrajectories(), []
        for t, counts in enumerate([True, False, True]):
            rows = [[Step(0, [2.0], t == 0, [t == 2], [False], t, counts)]]
            batch = make_batch(rows, states=True, mask=True)
            running, finished = add(trajectories, batch, values_of(rows), "done")
            told.append((running.item(), finished.tolist()))
        assert told == [(2.0, []), (2.0, []), (4.0, [4.0])]


class TestIdentity:
    """Ids restart with each collector: a trajectory goes on where its id and its state come back."""

    def one(self, trajectory: int, state: float, value: float, **kwargs) -> list[list[Step]]:
        flags = {"is_init": False, "terminated": [False], "truncated": [False]} | kwargs
        return [[Step(trajectory, [value], state=state, **flags)]]

    def add(
        self, trajectories, rows, *, judge: bool = True, **kwargs
    ) -> tuple[list[float], list[float]]:
        batch = make_batch(rows, **{"states": True, "is_init": False} | kwargs)
        running, finished = add(trajectories, batch, values_of(rows), "done", judge=judge)
        return running.flatten().tolist(), finished.tolist()

    @pytest.mark.parametrize("set_truncated", [False, True], ids=["as_it_ends", "set_truncated"])
    def test_two_collectors_in_turn(self, set_truncated):
        rng = random.Random(0)
        collectors = []
        for number in range(2):
            streams = make_streams(rng, 2, 60)
            for row, stream in enumerate(streams):
                for step in stream:
                    step.state += 1000 * number + 100 * row
            collectors.append(streams)
        trajectories, told = OpenTrajectories(), []
        sums = [[0.0, 0.0], [0.0, 0.0]]
        for start in range(0, 60, 4):
            for streams, totals in zip(collectors, sums, strict=True):
                rows = [stream[start : start + 4] for stream in streams]
                expected = []
                for r, row in enumerate(rows):
                    for step in row:
                        totals[r] += step.value[0]
                        expected.append(totals[r])
                        totals[r] = 0.0 if any(step.done) else totals[r]
                running, finished = self.add(trajectories, rows, set_truncated=set_truncated)
                assert running == expected
                told += finished
        everything = [total for streams in collectors for total in counted_totals(streams)]
        assert not set(told) - set(everything)
        # Missing are at most the truncations of the last batch of each, which nothing has judged.
        assert len(everything) - 4 <= len(told) <= len(everything)

    def test_an_evaluation_that_is_truncated_at_the_end_of_a_frozen_batch_is_never_told(self):
        trajectories = OpenTrajectories()
        self.add(trajectories, self.one(0, 0, 1.0, is_init=True))
        self.add(trajectories, self.one(0, 50, 9.0, is_init=True, truncated=[True]), judge=False)
        assert self.add(trajectories, self.one(0, 1, 2.0)) == ([3.0], [])
        assert self.add(trajectories, self.one(0, 2, 2.0, terminated=[True])) == ([5.0], [5.0])

    def test_a_frozen_batch_between_a_truncation_and_the_next_one_only_delays_the_judgement(self):
        trajectories = OpenTrajectories()
        self.add(trajectories, self.one(0, 0, 1.0, is_init=True, truncated=[True]))
        frozen = self.one(1, 7, 2.0, is_init=True, terminated=[True])
        assert self.add(trajectories, frozen, judge=False) == ([2.0], [2.0])
        assert self.add(trajectories, self.one(2, 9, 3.0, is_init=True)) == ([3.0], [1.0])

    def test_a_sum_goes_on_through_a_frozen_batch(self):
        trajectories = OpenTrajectories()
        self.add(trajectories, self.one(0, 0, 1.0, is_init=True))
        assert self.add(trajectories, self.one(0, 1, 1.0), judge=False) == ([2.0], [])
        assert self.add(trajectories, self.one(0, 2, 1.0, terminated=[True])) == ([3.0], [3.0])

    def test_a_row_whose_beginning_was_not_seen_is_not_told(self):
        trajectories = OpenTrajectories()
        rows = self.one(0, 3, 1.0, terminated=[True])
        assert self.add(trajectories, rows, is_init=True) == ([1.0], [])

    def test_what_never_goes_on_is_dropped_oldest_first(self):
        trajectories = OpenTrajectories()
        for number in range(400):
            self.add(trajectories, self.one(number, 2 * number, 1.0, is_init=True))
        assert len(trajectories._open) == 256
        assert self.add(trajectories, self.one(143, 287, 1.0)) == ([1.0], [])
        assert self.add(trajectories, self.one(399, 799, 1.0)) == ([2.0], [])

    @pytest.mark.parametrize("is_init", [False, True], ids=["no_is_init", "is_init"])
    def test_a_padded_row_that_goes_on_under_another_id_is_refused(self, is_init):
        trajectories = OpenTrajectories()
        self.add(trajectories, self.one(3, 0, 1.0, is_init=True), mask=True)
        before = dict(trajectories._open)
        with pytest.raises(RuntimeError, match=r"padded row .*MultiSyncCollector.*kl_collector\("):
            self.add(trajectories, self.one(4, 1, 1.0), mask=True, is_init=is_init)
        assert trajectories._open == before
        assert self.add(trajectories, self.one(3, 1, 1.0), mask=True) == ([2.0], [])

    def test_rows_that_are_joined_along_time_are_refused(self):
        """What the first of two workers left open would be cut where the second begins."""
        trajectories = OpenTrajectories()
        rows = [self.one(0, 0, 1.0)[0] + self.one(5, 70, 1.0)[0]]
        with pytest.raises(RuntimeError, match=r'cat_results=-1`\)\? Use `cat_results="stack"`'):
            self.add(trajectories, rows)
        assert not trajectories._open


class TestAgents:
    """Agents with done flags of their own: one that is done ends its trajectory, and the others go on."""

    @seeds
    @pytest.mark.parametrize("set_truncated", [False, True], ids=["as_it_ends", "set_truncated"])
    def test_ids_change_when_any_agent_leaves(self, seed, set_truncated):
        rng, n_agents = random.Random(seed), 3
        ids = itertools.count()
        batches, totals = [], []
        running: list[list[float]] = []
        trajectory, left, sums = next(ids), [False] * n_agents, [0.0] * n_agents
        for t in range(40):
            gone = [was or rng.random() < 0.2 for was in left]
            value = [rng.randint(-40, 40) / 8 for _ in range(n_agents)]
            sums = [a + b for a, b in zip(sums, value, strict=True)]
            running.append(sums)
            totals += [s for s, g, was in zip(sums, gone, left, strict=True) if g and not was]
            batches.append((trajectory, t, left, gone, value))
            trajectory = next(ids) if any(gone) else trajectory
            sums = [0.0 if g else s for s, g in zip(sums, gone, strict=True)]
            left = [False] * n_agents if all(gone) else gone
            sums = [0.0] * n_agents if all(gone) else sums
        trajectories, told, start = OpenTrajectories(), [], 0
        while start < 40:
            steps = batches[start : start + rng.randint(1, 8)]
            batch = self.batch(steps, set_truncated)
            values = torch.tensor([[step[4] for step in steps]]).unsqueeze(-1)
            result = add(trajectories, batch, values, ("agents", "done"))
            present = ~batch["agents", "done"]
            expected = torch.tensor(running[start : start + len(steps)])[None, :, :, None]
            assert_close(result.running[present], expected[present], rtol=0, atol=0)
            told += result.finished.tolist()
            start += len(steps)
        assert sorted(told) == sorted(totals)

    def batch(self, steps: list[Any], set_truncated: bool) -> TensorDict:
        """A batch (1, T) of steps (id, time, who left before, who is gone after, values)."""
        shape = (1, len(steps))
        before, after = (torch.tensor([[step[i] for step in steps]]).unsqueeze(-1) for i in (2, 3))
        time = torch.tensor([[float(step[1])] for step in steps])[None]
        root_done = after.all(-2)
        flags = {"done": after, "terminated": after.clone()}
        step = TensorDict(
            {
                "agents": flags,
                "done": root_done,
                "terminated": root_done.clone(),
                "observation": time + 1,
            },
            shape,
        )
        if set_truncated:
            step["agents", "done"][:, -1] = step["done"][:, -1] = True
        ids = torch.tensor([[one[0] for one in steps]])
        return TensorDict(
            {
                "observation": time,
                "agents": {"done": before},
                "next": step,
                "collector": {"traj_ids": ids},
            },
            shape,
        )


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
        message = r"no .*'agents.*'done.* and no .*'done.* in the step, got .*agents.*reward.*`KLKeys\(done=\.\.\.\)`"
        with pytest.raises(KeyError, match=message):
            find_done(step, ("agents", "done"), named=False)


class TestFindEnds:
    def test_an_agent_ends_at_its_flag_and_at_that_of_the_root(self):
        flags = TensorDict(done=torch.tensor([[True], [False]]), batch_size=2)
        step = TensorDict(agents=flags, done=torch.tensor([False]))
        shape = (2, 1)
        assert find_ends(step, ("agents", "done"), shape).flatten().tolist() == [True, False]
        step["done"] = torch.tensor([True])
        assert find_ends(step, ("agents", "done"), shape).flatten().tolist() == [True, True]
        assert find_ends(step, ("agents", "done"), shape, "terminated") is None

    def test_a_flag_that_is_named_at_the_root_is_the_only_one(self):
        step = TensorDict(done=torch.tensor([True]), my_end=torch.tensor([False]))
        assert find_ends(step, "my_end", (1,)).tolist() == [False]
