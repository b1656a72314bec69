"""Open trajectories: masked steps, and batches of several collectors."""

import itertools
import math
import random
from collections.abc import Callable

import pytest
import torch
from torch.testing import assert_close
from torchrl.collectors.utils import split_trajectories

from tests.streams import (
    Operators,
    Step,
    add,
    cut,
    make_batch,
    make_stream,
    make_streams,
    same_totals,
    values_of,
)
from torchrl_kl.controllers.trajectories import OpenTrajectories

seeds = pytest.mark.parametrize("seed", range(8))


MASKS: dict[str, Callable[[Step, random.Random], bool]] = {
    "first steps": lambda step, rng: not step.is_init,
    "last steps": lambda step, rng: not any(step.done),
    "holes": lambda step, rng: rng.random() < 0.5,
    "few steps": lambda step, rng: rng.random() < 0.1,
    "rows": lambda step, rng: step.state // 8 % 2 == 0,
    "trajectories": lambda step, rng: step.trajectory % 3 > 0,
}


def counted_totals(streams: list[list[Step]]) -> list[float]:
    """Of each trajectory that ended with a step that counts: the loop that sees streams whole."""
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
    """Prompt tokens, first and last steps, holes, whole rows: what does not count adds 0 and cuts
    nothing.
    """

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
    """Ids restart with each collector: a trajectory goes on where id and state come back."""

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

    def test_what_former_collectors_left_truncated_delays_nothing(self):
        trajectories = OpenTrajectories()

        def collect(n_batches, value, ids_apart=1):
            for n in range(n_batches):
                flags = {"is_init": True, "truncated": [True]}
                row = self.one(ids_apart * n, 10 * value + n, value + n, **flags)
                yield self.add(trajectories, row)[1]

        assert [*collect(2, 10.0)] == [[], [10.0]]
        # Once the same id comes before, what the former one left is told.
        assert [*collect(5, 20.0)] == [[], [20.0], [11.0], [22.0], [23.0]]
        resumed = OpenTrajectories()
        resumed.load_state_dict(trajectories.state_dict())
        trajectories = resumed
        assert [*collect(4, 30.0)] == [[24.0], [30.0], [31.0], [32.0]]
        # Ids are left out where a collector resets its envs between batches.
        assert [*collect(5, 40.0, 2)] == [[21.0], [40.0], [33.0], [42.0], [43.0]]

    def test_joined_batches_of_a_collector_that_begins_do_not_follow_those_of_another(self):
        """Later rows have later ids than what the other has left, but the first ones do not."""
        trajectories = OpenTrajectories()
        self.add(trajectories, self.one(0, 50, 3.0, is_init=True), set_truncated=True)
        rows = [
            *self.one(0, 100, 1.0, is_init=True, terminated=[True]),
            *self.one(1, 200, 1.0, is_init=True),
            *self.one(2, 101, 1.0, is_init=True),
            *self.one(1, 201, 1.0),
        ]
        assert self.add(trajectories, rows) == ([1.0, 1.0, 1.0, 2.0], [1.0])
        assert self.add(trajectories, self.one(0, 51, 2.0, terminated=[True])) == ([5.0], [5.0])

    def test_many_joined_batches_take_no_loop_over_operators(self):
        n_operators = []
        for n in (10, 500):
            rows = [*itertools.chain(*(self.one(0, t, 1.0) for t in range(n)))]
            with Operators() as operators:
                assert self.add(OpenTrajectories(), rows) == ([*range(1, n + 1)], [])
            n_operators.append(operators.n)
        assert n_operators[1] <= 1.2 * n_operators[0]

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

    def test_a_frozen_batch_that_goes_on_hands_a_truncation_to_the_next_one(self):
        trajectories = OpenTrajectories()
        going_on = [self.one(1, 100 + t, 1.0, is_init=t == 0)[0] for t in range(3)]
        before = self.one(0, 0, 2.0, is_init=True, truncated=[True])[0]
        frozen = self.one(2, 10, 9.0, is_init=True, truncated=[True])[0]
        after = self.one(3, 20, 4.0, is_init=True)[0]
        assert self.add(trajectories, [before, going_on[0]])[1] == []
        assert self.add(trajectories, [frozen, going_on[1]], judge=False) == ([9.0, 2.0], [])
        # The one before it has ended; the one that ended while frozen is not told.
        assert self.add(trajectories, [after, going_on[2]]) == ([4.0, 3.0], [2.0])

    def test_what_is_restored_is_judged_again(self):
        trajectories = OpenTrajectories()
        self.add(trajectories, self.one(0, 0, 1.0, is_init=True, truncated=[True]))
        before = trajectories.copy()
        for _ in range(2):
            assert self.add(trajectories, self.one(1, 9, 2.0, is_init=True)) == ([2.0], [1.0])
            trajectories.restore(before)

    def test_a_sum_goes_on_through_a_frozen_batch(self):
        trajectories = OpenTrajectories()
        self.add(trajectories, self.one(0, 0, 1.0, is_init=True))
        assert self.add(trajectories, self.one(0, 1, 1.0), judge=False) == ([2.0], [])
        assert self.add(trajectories, self.one(0, 2, 1.0, terminated=[True])) == ([3.0], [3.0])

    def test_a_row_whose_beginning_was_not_seen_is_not_told(self):
        trajectories = OpenTrajectories()
        rows = self.one(0, 3, 1.0, terminated=[True])
        assert self.add(trajectories, rows, is_init=True) == ([1.0], [])
        self.add(trajectories, self.one(3, 0, 1.0, is_init=True), is_init=True)
        # Nor refused where a mask only hides steps.
        rows = [self.one(4, 7, 1.0, terminated=[True])[0] + self.one(5, 0, 2.0, is_init=True)[0]]
        assert self.add(trajectories, rows, mask=True, is_init=True) == ([1.0, 2.0], [])

    @pytest.mark.parametrize("ids", [False, True], ids=["no_ids", "ids"])
    def test_a_reset_before_the_end_of_a_trajectory_begins_another(self, ids):
        """As in rollouts that were joined along time: the first is not told, as in an env."""
        rows = [[Step(t // 4, [1.0], t in (0, 2, 4), [t == 3], [False]) for t in range(6)]]
        batch = make_batch(rows, ids=ids)
        result = add(OpenTrajectories(), batch, values_of(rows), "done")
        assert result.running.flatten().tolist() == [1, 2, 1, 2, 1, 2]
        same_totals(result.finished, [2.0])

    def test_what_never_goes_on_is_dropped_oldest_first(self):
        trajectories = OpenTrajectories()
        for number in range(400):
            self.add(trajectories, self.one(number, 2 * number, 1.0, is_init=True))
        assert len(trajectories._open) == 256
        assert self.add(trajectories, self.one(143, 287, 1.0)) == ([1.0], [])
        assert self.add(trajectories, self.one(399, 799, 1.0)) == ([2.0], [])
        # All of one batch may stay open.
        rows = [self.one(number, 1000 + 2 * number, 1.0, is_init=True)[0] for number in range(300)]
        self.add(trajectories, rows)
        assert self.add(trajectories, self.one(0, 1001, 1.0)) == ([2.0], [])

    def test_batches_that_nothing_follows_do_not_pile_up(self):
        """Each collector gives one batch, of the id 0, so that none seems to follow another."""
        trajectories = OpenTrajectories()
        for number in range(400):
            self.add(trajectories, self.one(0, 2 * number, 1.0, is_init=True))
        state = trajectories.state_dict()
        assert len(state["unfollowed"]) == len(state["open"]) == 256

    @pytest.mark.parametrize("is_init", [False, True], ids=["no_is_init", "is_init"])
    def test_a_padded_row_that_goes_on_under_another_id_is_refused(self, is_init):
        trajectories = OpenTrajectories()
        self.add(trajectories, self.one(3, 0, 1.0, is_init=True), mask=True)
        before = dict(trajectories._open)
        with pytest.raises(RuntimeError, match=r"padded row .*MultiSyncCollector.*kl_collector\("):
            self.add(trajectories, self.one(4, 1, 1.0), mask=True, is_init=is_init)
        assert trajectories._open == before
        unseen = [
            [Step(5, [0.0], False, [False], [False], 1, counts=False)]
        ]  # nothing is known of it
        self.add(trajectories.copy(), unseen, mask=True, is_init=True)
        assert self.add(trajectories, self.one(3, 1, 1.0), mask=True) == ([2.0], [])

    def test_rows_that_are_joined_along_time_are_refused(self):
        """What the first of two workers left open would be cut where the second begins."""
        trajectories = OpenTrajectories()
        rows = [self.one(0, 0, 1.0)[0] + self.one(5, 70, 1.0)[0]]
        with pytest.raises(RuntimeError, match=r'cat_results=-1`\)\? Use `cat_results="stack"`'):
            self.add(trajectories, rows)
        assert not trajectories._open
