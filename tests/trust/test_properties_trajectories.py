"""Properties of sums over trajectories that come in pieces, against envs in plain Python."""

import copy
import pickle
import random
import textwrap
from collections import Counter
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule
from torchrl.collectors.utils import split_trajectories

from tests.trust.cases import Machine, cases, run
from tests.trust.worlds import World, make_batch
from torchrl_kl import KLKeys
from torchrl_kl.batches import Flags, counted, flags, read_states, require_order
from torchrl_kl.trajectories import Trajectories, TrajectorySums

seeds = st.integers(0, 2**20)


def find_flags(batch: Any, values: Any, mask: Any) -> Flags:
    """The flags of a batch, whose steps follow one another."""
    agents = ("next", "agents", "done") in batch.keys(True)
    keys = KLKeys(done=("agents", "done") if agents else None)
    named = keys.resolve(("agents", "action_log_prob") if agents else "action_log_prob")
    counts = counted(batch, named, mask_key=None)
    if mask is not None and counts is not None:
        counts = counts & mask.unsqueeze(-1)
    found = flags(batch, named, values.shape, mask if counts is None else counts)
    require_order(read_states(batch), found.may_differ)
    return found


def read(table: Trajectories, batch: Any, values: Any, mask: Any) -> TrajectorySums:
    """The sums of a batch."""
    found = find_flags(batch, values, mask)
    return table.add(found, read_states(batch).values(), values)


def add(table: Trajectories, batch: Any, values: Any, mask: Any) -> TrajectorySums:
    """Adds a batch, and makes what is open the state."""
    sums = read(table, batch, values, mask)
    table.keep(sums.opened)
    return sums


def loop(table: Trajectories, batch: Any, found: Flags, values: Any) -> tuple[Any, Any, Any]:
    """The loop in the docstring of the table: running sums, finished ones, and what is left."""
    n_places, n_steps = batch.numel(), batch.shape[-1]

    def lines(entry: Any) -> list[Any]:  # agent by agent, row by row
        return entry.reshape(n_places, -1).T.flatten().tolist()

    ends, counts, breaks, renamed = map(lines, found[:4])
    ids = lines(found.ids)
    before, after = (each["observation"].flatten().tolist() for each in (batch, batch["next"]))
    old = (table.table.get(name, torch.zeros(0)) for name in FIELDS)
    entries = list(zip(*(entry.tolist() for entry in old), strict=True))
    unfinished = {(agent, i) for agent, i, _, s, _ in entries if s[-2] or s[-1]}
    first: dict[Any, int] = {}
    for t, i in enumerate(ids):
        if t % n_steps == 0 or breaks[t - 1] or ends[t - 1]:
            first.setdefault((t // n_places, i), t)
    left: list[Any] = []

    def begins(t: int) -> bool:
        if found.begins is not None:
            return lines(found.begins)[t]
        name = t // n_places, ids[t]
        is_new = first[name] == t and name not in unfinished
        return is_new or (t % n_steps > 0 and ends[t - 1])

    def resume(t: int) -> Any:
        if found.begins is not None and lines(found.begins)[t]:
            return None
        for number in reversed(range(len(entries))):
            agent, i, named, (total, n, unseen), state = entries[number]
            same = agent == t // n_places and (i == ids[t] or not named)
            if same and state == [before[t % n_places]]:
                entries.pop(number)
                return total, n, not unseen
        return None

    def leave(t: int, total: float, n: int, whole: bool) -> None:
        state, name = [after[t % n_places]], (t // n_places, ids[t], not renamed[t])
        left.append((*name, [total, float(n), float(not whole)], state))

    names: dict[str, Any] = {
        "rows": [range(i, i + n_steps) for i in range(0, len(ids), n_steps)],
        "values": lines(values),
        "running": [0.0] * len(ids),
        "finished": [],
    }
    names |= {"ends": ends, "counts": counts, "breaks": breaks}
    names |= {"begins": begins, "resume": resume, "leave": leave}
    text = Trajectories.__doc__ or ""
    exec(textwrap.dedent(text[text.index("        for row") : text.index("    `leave`")]), names)
    return names["running"], names["finished"], [*entries, *left]


FIELDS = ("agents", "ids", "named", "sums", "left0")


@cases(
    60,
    seed=seeds,
    n_agents=st.sampled_from([1, 3]),
    is_init=st.booleans(),
    counts=st.sampled_from([0.3, 1.0]),
    cut=st.booleans(),
)
def test_the_table_is_the_loop_of_its_docstring(seed, n_agents, is_init, counts, cut):
    """Also of streams that share ids and states, rows in any order, and breaks without an end."""
    rng, table = random.Random(seed), Trajectories()
    for _ in range(5):
        world = World(0, 3, n_agents)  # of the same states and ids in each run
        for _ in range(rng.randint(1, 2)):
            rows = world.play(rng, rng.randint(1, 4), 0.3, counts, cut=cut and n_agents == 1)
            rng.shuffle(rows)
            if n_agents == 1 and rng.random() < 0.3:
                rows = [[step for row in rows for step in row]]
            batch = make_batch(rows, is_init=is_init, masked=True, per_agent=n_agents > 1)
            values = batch["value"].unsqueeze(-1) if n_agents > 1 else batch["value"]
            found = find_flags(batch, values, batch["collector", "mask"])
            running, finished, left = loop(table, batch, found, values)
            sums = table.add(found, read_states(batch).values(), values)
            shape = (batch.numel(), -1)
            assert sums.running.reshape(shape).T.flatten().tolist() == running
            assert sums.finished[:, 0].tolist() == finished
            table.keep(sums.opened)
            opened = [sums.opened[name].tolist() for name in FIELDS]
            assert list(zip(*opened, strict=True)) == left


class Streams(Machine):
    """Batches of several collectors in any order, joined along time, cut, padded; copies between.

    All running sums are those of the envs, and what ends is told exactly once. Where collectors
    share a table without `is_init`, what has the id of an unfinished trajectory may be missing, but
    nothing else is told.
    """

    @initialize(
        n_rows=st.lists(st.integers(1, 3), min_size=1, max_size=3),
        n_agents=st.sampled_from([1, 1, 3]),
        shared=st.booleans(),
        is_init=st.booleans(),
        masked=st.booleans(),
        padded=st.booleans(),
        cut=st.booleans(),
    )
    def make(self, n_rows: list[int], n_agents: int, shared: bool, padded: bool, **kinds: bool):
        self.worlds = [World(name, rows, n_agents) for name, rows in enumerate(n_rows)]
        self.n_runs = 100  # no world has the states of another
        one = Trajectories()
        self.tables = [one if shared else Trajectories() for _ in n_rows]
        self.cut = kinds.pop("cut") and n_agents == 1
        self.padded, self.per_agent = padded and n_agents == 1, n_agents > 1
        self.kinds, self.shared = kinds, shared and len(n_rows) > 1
        self.skipped = [False] * len(n_rows)  # whether a batch was left out

    @rule(
        which=st.integers(0, 2),
        n_steps=st.integers(1, 6),
        along_time=st.booleans(),
        seed=seeds,
        ends=st.sampled_from([0.1, 0.3, 0.6]),
        counts=st.sampled_from([0.2, 0.7, 1.0]),
    )
    def collect(
        self,
        which: int,
        n_steps: int,
        along_time: bool,
        seed: int,
        ends: float,
        counts: float,
    ):
        which %= len(self.worlds)
        counts = counts if self.kinds["masked"] else 1.0
        rows = self.worlds[which].play(random.Random(seed), n_steps, ends, counts, cut=self.cut)
        along_time = along_time and not (self.padded or self.per_agent or self.cut)
        if along_time:  # as MultiSyncCollector(cat_results=0) joins single envs
            rows = [[step for row in rows for step in row]]
        batch = make_batch(rows, per_agent=self.per_agent, **self.kinds)
        running, finished = self.add(batch, self.tables[which])
        told, truth = Counter(finished), Counter(x for r in rows for s in r for x in s.totals)
        exact = self.kinds["is_init"] or not self.shared
        if self.skipped[which]:
            assert not told - truth
            return
        for row, found in zip(rows, running.tolist(), strict=True):
            for step, sums in zip(row, found, strict=True):
                for total, left, value in zip(step.sums, step.left, sums, strict=True):
                    assert left or value == total
        assert told == truth if exact else not told - truth
        self.skipped[which] |= not exact

    def add(self, batch: Any, table: Trajectories) -> tuple[torch.Tensor, list[float]]:
        """The running sums of the steps, (R, T, F), and the totals that are told."""
        mask = batch.get(("collector", "mask"), None)
        values = batch["value"].unsqueeze(-1) if self.per_agent else batch["value"]
        if not self.padded:
            sums = add(table, batch, values, mask)
            return sums.running.reshape(*batch.shape, -1), sums.finished[:, 0].tolist()
        batch["place"] = torch.arange(batch.numel()).reshape(batch.shape)
        batch["counts"] = torch.ones(batch.shape).bool() if mask is None else mask
        batch.pop(("collector", "mask"), None)
        padded: Any = split_trajectories(batch, prefix="collector")
        real = padded["collector", "mask"]
        sums = add(table, padded, padded["value"], padded["counts"] & real)
        # Back to where the steps were in the batch.
        running = torch.empty(batch.numel(), 1, dtype=sums.running.dtype)
        running[padded["place"][real]] = sums.running[real]
        return running.reshape(*batch.shape, 1), sums.finished[:, 0].tolist()

    @rule(how=st.sampled_from(["deepcopy", "pickle", "state_dict", "pure"]))
    def carry(self, how: str) -> None:
        def loaded(table: Trajectories) -> Trajectories:
            other = Trajectories()
            other.unpack(table.pack())
            return other

        if how == "pure":  # a batch that is read, but not learned from
            other = World(99, 2, 1).play(random.Random(0), 3, 0.5, 1.0, cut=False)
            batch = make_batch(other, per_agent=False, **self.kinds)
            for table in self.tables:
                read(table, batch, batch["value"], None)
            return
        kinds = {
            "deepcopy": copy.deepcopy,
            "pickle": lambda one: pickle.loads(pickle.dumps(one)),
            "state_dict": loaded,
        }
        carried = {id(one): kinds[how](one) for one in self.tables}
        self.tables = [carried[id(one)] for one in self.tables]

    @precondition(lambda self: self.kinds["is_init"])
    @rule(which=st.integers(0, 2))
    def a_new_run_of_a_collector(self, which: int) -> None:
        """Ids and states begin anew, after a run that ended inside its trajectories."""
        which %= len(self.worlds)
        old = self.worlds[which]
        self.n_runs += 1
        self.worlds[which] = World(self.n_runs, len(old.rows), old.n_agents)

    @precondition(lambda self: self.kinds["is_init"])
    @rule(which=st.integers(0, 2), seed=seeds)
    def a_batch_is_left_out(self, which: int, seed: int) -> None:
        """What goes on behind it is not told until its next end."""
        which %= len(self.worlds)
        self.worlds[which].play(random.Random(seed), 3, 0.2, 1.0, cut=self.cut)
        self.skipped[which] = True


def test_streams_in_any_order():
    run(Streams, 300, steps=12)


@cases(
    40,
    seed=seeds,
    n_rows=st.integers(1, 3),
    lengths=st.lists(st.integers(1, 5), min_size=2, max_size=5),
    is_init=st.booleans(),
)
def test_a_batch_cut_anywhere_in_time_is_the_whole_batch(seed, n_rows, lengths, is_init):
    rows = World(0, n_rows, 1).play(random.Random(seed), sum(lengths), 0.3, 1.0, cut=False)
    whole = make_batch(rows, is_init=is_init, masked=False, per_agent=False)
    expected = add(Trajectories(), whole, whole["value"], None)
    table, running, told = Trajectories(), [], Counter[float]()
    for batch in whole.split(lengths, 1):
        sums = add(table, batch, batch["value"], None)
        running.append(sums.running)
        told.update(sums.finished[:, 0].tolist())
    assert torch.cat(running, 1).equal(expected.running)
    assert Counter(expected.finished[:, 0].tolist()) == told


@cases(40, seed=seeds, n_new=st.lists(st.integers(1, 200), min_size=1, max_size=8))
def test_what_never_goes_on_is_dropped(seed, n_new):
    """The oldest first; so many as four batches have rows stay open, and 256 at least."""
    table, n = Trajectories(), 0
    for size in n_new:
        rows = World(seed, size, 1).play(random.Random(seed), 1, 0.0, 1.0, cut=False)
        batch = make_batch(rows, is_init=True, masked=False, per_agent=False)
        batch["collector", "traj_ids"] += n
        n += size
        add(table, batch, batch["value"], None)
        limit = max(256, 4 * size)
        ids = table.table["ids"].tolist()
        assert ids == list(range(max(0, n - limit), n))[-len(ids) :]
        assert min(limit, size) <= len(ids) <= limit
