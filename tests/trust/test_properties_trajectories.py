"""Properties of sums over trajectories that come in pieces, against envs in plain Python."""

import copy
import pickle
import random
from collections import Counter
from typing import Any
from unittest import mock

import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from torchrl.collectors.utils import split_trajectories

from tests.trust.cases import Machine, cases, run
from tests.trust.worlds import Step, Told, World, make_batch
from torchrl_kl._feeding import sum_trajectories
from torchrl_kl.controllers import trajectories
from torchrl_kl.controllers.trajectories import OpenTrajectories

seeds = st.integers(0, 2**20)


class Streams(Machine):
    """Batches of several collectors in any order, some while frozen, with copies in between.

    In a stream for each collector that was never frozen, the totals are told exactly when they are
    known; in one that is shared or was frozen each is told at most once, none is wrong, and
    whatever ends before the last step of a batch is told with it.
    """

    @initialize(
        n_rows=st.lists(st.integers(1, 3), min_size=1, max_size=3),
        n_agents=st.sampled_from([1, 1, 3]),
        truncates=st.booleans(),
        shared=st.booleans(),
        is_init=st.booleans(),
        masked=st.booleans(),
        padded=st.booleans(),
        cut=st.booleans(),
    )
    def make(self, n_rows: list[int], n_agents: int, truncates: bool, shared: bool, **kinds: bool):
        truncates = truncates and n_agents == 1
        self.worlds = [
            World(name, rows, n_agents, truncates=truncates) for name, rows in enumerate(n_rows)
        ]
        self.n_runs = 100  # no world has the states of another
        one = OpenTrajectories()
        self.streams = [one if shared else OpenTrajectories() for _ in n_rows]
        self.shared = shared and len(n_rows) > 1
        # One stream cannot tell whose batch follows whose: hence `new_stream` of the transforms.
        kinds["cut"] = kinds["cut"] and not self.shared
        self.padded = kinds.pop("padded") and n_agents == 1
        self.kinds, self.per_agent = kinds, n_agents > 1
        self.oracles = [Told() for _ in n_rows]
        self.frozen = [False for _ in n_rows]
        self.late: Counter[float] = Counter()  # may be told with any later batch, or never

    @rule(
        which=st.integers(0, 2),
        n_steps=st.integers(1, 6),
        seed=seeds,
        judge=st.sampled_from([True, True, True, False]),
        ends=st.sampled_from([0.1, 0.3, 0.6]),
        counts=st.sampled_from([0.2, 0.7, 1.0]),
    )
    def collect(self, which: int, n_steps: int, seed: int, judge: bool, ends: float, counts: float):
        which %= len(self.worlds)
        counts = counts if self.kinds["masked"] else 1.0
        rows = self.worlds[which].play(random.Random(seed), n_steps, ends, counts)
        batch = make_batch(rows, per_agent=self.per_agent, **self.kinds)
        running, finished = self.add(batch, which, judge)
        self.check_running(rows, running)
        self.check_told(which, rows, Counter(finished.tolist()), judge)

    def add(self, batch: Any, which: int, judge: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """The running sums of the steps, (R, T, F), and the totals that are told."""
        done_key: Any = ("agents", "done") if self.per_agent else "done"
        stream = self.streams[which]
        if not self.padded:
            values = batch["value"].unsqueeze(-1) if self.per_agent else batch["value"]
            mask = batch.get(("collector", "mask"), None)
            sums = sum_trajectories(batch, values, mask, done_key, stream, judge=judge)
            return sums.running.reshape(*batch.shape, -1), sums.finished
        batch["place"] = torch.arange(batch.numel()).reshape(batch.shape)
        batch["counts"] = batch.pop(("collector", "mask"), torch.ones(batch.shape).bool())
        padded: Any = split_trajectories(batch, prefix="collector")
        real = padded["collector", "mask"]
        sums = sum_trajectories(
            padded, padded["value"], padded["counts"] & real, "done", stream, judge=judge
        )
        # Back to where the steps were in the batch.
        running = torch.empty(batch.numel(), 1, dtype=sums.running.dtype)
        running[padded["place"][real]] = sums.running[real]
        return running.reshape(*batch.shape, 1), sums.finished

    def check_running(self, rows: list[list[Step]], running: torch.Tensor) -> None:
        for row, found in zip(rows, running.tolist(), strict=True):
            for step, sums in zip(row, found, strict=True):
                for total, left, value in zip(step.sums, step.left, sums, strict=True):
                    assert left or value == total

    def check_told(
        self, which: int, rows: list[list[Step]], told: Counter[float], judge: bool
    ) -> None:
        oracle = self.oracles[which]
        expected, waited = oracle.follow(rows, judge, self.padded)
        self.frozen[which] |= not judge
        if not self.shared and not self.frozen[which]:
            assert told == Counter(expected)
            return
        # What waited may be told with this batch, a later one, or never, but once.
        at_once = Counter(expected) - Counter(waited)
        assert not at_once - told
        self.late.update(waited)
        rest = told - at_once
        possible = self.late + Counter(x for one in self.oracles for x in one.waiting)
        assert not rest - possible
        for total, number in rest.items():
            taken = min(number, self.late[total])
            self.late[total] -= taken
            for one in self.oracles:
                while taken < number and total in one.waiting:
                    one.waiting.remove(total)
                    taken += 1

    @rule(how=st.sampled_from(["deepcopy", "pickle", "copy", "restore"]))
    def carry(self, how: str) -> None:
        kinds = {
            "deepcopy": copy.deepcopy,
            "pickle": lambda one: pickle.loads(pickle.dumps(one)),
            "copy": lambda one: one.copy(),
        }
        if how == "restore":
            # As after a batch that the controller refused: what it changed is taken back.
            other = World(99, 2, 1, truncates=True).play(random.Random(0), 3, 0.5, 1.0)
            batch = make_batch(other, per_agent=False, **self.kinds)
            for stream in {id(one): one for one in self.streams}.values():
                before = stream.copy()
                sum_trajectories(batch, batch["value"], None, "done", stream)
                stream.restore(before)
            return
        carried = {id(one): kinds[how](one) for one in self.streams}
        self.streams = [carried[id(one)] for one in self.streams]

    @precondition(lambda self: not self.shared)
    @rule(which=st.integers(0, 2))
    def a_new_run_of_a_collector(self, which: int) -> None:
        """Ids and states begin anew, in the stream of a run that ended inside its trajectories."""
        which %= len(self.worlds)
        old = self.worlds[which]
        self.n_runs += 1
        new = World(self.n_runs, len(old.rows), old.n_agents, truncates=old.truncates)
        self.worlds[which] = new
        if self.kinds["cut"]:  # to the stream they look like trajectories that were truncated
            self.late.update(total for row in old.rows for total in row.totals)
        # Which of the last truncations of the old run are judged depends on the ids of both.
        self.frozen[which] = True


def test_streams_in_any_order():
    run(Streams, 300, steps=15)


@cases(
    40,
    seed=seeds,
    n_rows=st.integers(1, 3),
    lengths=st.lists(st.integers(1, 5), min_size=2, max_size=5),
    order=st.randoms(use_true_random=False),
)
def test_a_batch_cut_anywhere_in_time_is_the_whole_batch(seed, n_rows, lengths, order):
    world = World(0, n_rows, 1, truncates=True)
    rows = world.play(random.Random(seed), sum(lengths), 0.3, 1.0)
    for row in rows:
        row[-1].terminated = True  # so that nothing waits for another batch
    kinds: dict[str, Any] = {"is_init": order.random() < 0.5, "masked": False, "per_agent": False}
    whole = make_batch(rows, cut=False, **kinds)
    expected = sum_trajectories(whole, whole["value"], None, "done", OpenTrajectories())
    stream, running, told, start = OpenTrajectories(), [], Counter(), 0
    for length in lengths:
        part = [row[start : start + length] for row in rows]
        batch = make_batch(part, cut=order.random() < 0.5, **kinds)
        start += length
        sums = sum_trajectories(batch, batch["value"], None, "done", stream)
        running.append(sums.running)
        told.update(sums.finished.tolist())
    assert torch.cat(running, 1).equal(expected.running)
    truth = Counter(total for row in rows for step in row for total in step.told)
    # With `cut`, the flags of the last batch hide whether its rows have really ended.
    assert Counter(expected.finished.tolist()) == truth
    assert told == truth


class Dropping(Machine):
    """Trajectories that never go on are dropped, oldest first, and no others."""

    def __init__(self) -> None:
        super().__init__()
        self.stream, self.number = OpenTrajectories(), 0
        self.open: dict[tuple[int, float], float] = {}  # by id and state; the youngest last

    @rule(
        old=st.lists(st.integers(0, 30), max_size=3, unique=True),
        n_new=st.integers(0, 3),
        ends=st.integers(0, 7),
    )
    def add(self, old: list[int], n_new: int, ends: int) -> None:
        keys = [key for i, key in enumerate(self.open) if i in old]
        rows = [(key, self.open[key]) for key in keys]
        for _ in range(n_new):
            rows.append(((self.number, 1000.0 * self.number), 0.0))
            self.number += 1
        if not rows:
            return
        with mock.patch.multiple(trajectories, _MIN_OPEN=4, _OPEN_PER_ROW=2):
            over = [bool(ends >> i & 1) for i in range(len(rows))]
            steps = [
                [
                    Step(
                        key[0],
                        key[1],
                        key[1] + 1,
                        total == 0.0,
                        [1.0],
                        True,
                        [False],
                        [end],
                        True,
                        [total + 1.0],
                        [],
                    )
                ]
                for (key, total), end in zip(rows, over, strict=True)
            ]
            kinds = {"is_init": True, "masked": False, "cut": False, "per_agent": False}
            batch = make_batch(steps, **kinds)
            running, finished = sum_trajectories(batch, batch["value"], None, "done", self.stream)
        assert running.flatten().tolist() == [total + 1.0 for _, total in rows]
        assert finished.tolist() == [
            total + 1.0 for (_, total), end in zip(rows, over, strict=True) if end
        ]
        for key in keys:
            del self.open[key]
        for (key, total), end in zip(rows, over, strict=True):
            if not end:
                self.open[key[0], key[1] + 1] = total + 1.0
        limit = max(4, 2 * len(rows)) if not all(over) else len(self.open)
        for key in list(self.open)[: max(len(self.open) - limit, 0)]:
            del self.open[key]
        assert len(self.stream._open) == len(self.open)


def test_what_never_goes_on_is_dropped():
    run(Dropping, 80, steps=20)
