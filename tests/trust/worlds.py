"""Envs with trajectories in plain Python, and the totals of what ends in them, step by step."""

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDict


@dataclass
class Row:
    """One env: F agents, each of which leaves at some time; with one, that is its episode."""

    name: float  # states of rows are apart
    n_agents: int
    time: int = 0
    trajectory: int = -1
    is_init: bool = True
    left: list[bool] = field(default_factory=list)
    totals: list[float] = field(default_factory=list)
    counted: list[int] = field(default_factory=list)

    def begin(self) -> None:
        self.is_init, self.left = True, [False] * self.n_agents
        self.totals, self.counted = [0.0] * self.n_agents, [0] * self.n_agents


@dataclass
class Step:
    """What a step shows, and the sums of its trajectories after it."""

    trajectory: int
    state: float
    next_state: float
    is_init: bool
    value: list[float]
    counts: bool
    left: list[bool]  # before the step
    over: list[bool]  # after it
    sums: list[float]
    totals: list[float]  # of those that ended with this step, if any step of them counted


class World:
    """The envs of one collector, which numbers their trajectories as they begin."""

    def __init__(self, name: int, n_rows: int, n_agents: int):
        self.rows = [Row(1000.0 * name + 100.0 * r, n_agents) for r in range(n_rows)]
        self.n_agents, self.n_ids = n_agents, 0
        for row in self.rows:
            row.begin()
            self._number(row)

    def _number(self, row: Row) -> None:
        row.trajectory, self.n_ids = self.n_ids, self.n_ids + 1

    def play(
        self, rng: random.Random, n_steps: int, ends: float, counts: float, *, cut: bool
    ) -> list[list[Step]]:
        """The next steps of all rows; trajectories end, and steps count, with a probability.

        `cut`: whether the collector ends all trajectories with the last step, as TorchRL's
        `set_truncated` does: ids and states go on.
        """
        played: list[list[Step]] = [[] for _ in self.rows]
        for t in range(n_steps):
            for row, steps in zip(self.rows, played, strict=True):
                steps.append(self._step(row, rng, ends, counts, cut and t == n_steps - 1))
        return played

    def _step(self, row: Row, rng: random.Random, ends: float, counts: float, cut: bool) -> Step:
        agents = range(self.n_agents)
        value = [rng.randint(-(2**30), 2**30) / 8 for _ in agents]
        counted = rng.random() < counts
        over = [row.left[i] or rng.random() < ends for i in agents]
        for i in agents:
            row.totals[i] += value[i] * counted
            row.counted[i] += counted
        new = [i for i in agents if (over[i] or cut) and not row.left[i]]
        totals = [row.totals[i] for i in new if row.counted[i]]
        state, reset = row.name + row.time / 64, all(over)
        row.time += 1
        step = Step(
            row.trajectory,
            state,
            state + (1 / 128 if reset else 1 / 64),
            row.is_init,
            value,
            counted,
            row.left,
            [each or cut for each in over],
            list(row.totals),
            totals,
        )
        row.is_init = False
        for i in new:
            row.totals[i], row.counted[i] = 0.0, 0
        row.left = over
        if reset:
            row.begin()
        if any(over):  # as in TorchRL, also in each step after one in which an agent left
            self._number(row)
        return step


def make_batch(
    rows: list[list[Step]], *, is_init: bool, masked: bool, per_agent: bool
) -> TensorDict:
    """The batch (R, T) of a collector."""
    shape = torch.Size([len(rows), len(rows[0])])

    def per_step(get: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([[get(step) for step in row] for row in rows], dtype=dtype)

    over = per_step(lambda s: s.over, torch.bool)[..., None]  # (R, T, F, 1)
    left = per_step(lambda s: s.left, torch.bool)[..., None]
    batch = TensorDict(
        observation=per_step(lambda s: [s.state], torch.float64),
        collector=TensorDict(
            traj_ids=per_step(lambda s: s.trajectory, torch.int64), batch_size=shape
        ),
        next=TensorDict(
            observation=per_step(lambda s: [s.next_state], torch.float64),
            done=over.all(-2),
            batch_size=shape,
        ),
        value=per_step(lambda s: s.value, torch.float64),
        batch_size=shape,
    )
    if per_agent:
        agents = over.shape[:-1]
        batch["next", "agents"] = TensorDict(done=over, batch_size=agents)
        batch["agents"] = TensorDict(done=left, batch_size=agents)
    if is_init:
        batch["is_init"] = per_step(lambda s: [s.is_init], torch.bool)
    if masked:
        batch["collector", "mask"] = per_step(lambda s: s.counts, torch.bool)
    batch.names = [None, "time"]
    return batch
