"""Streams of steps as the envs of a collector give them, the batches that they are cut into, and a
loop over them.
"""

import itertools
import random
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch.utils._python_dispatch import TorchDispatchMode

from torchrl_kl._feeding import sum_trajectories
from torchrl_kl.controllers.trajectories import OpenTrajectories, TrajectorySums


class Operators(TorchDispatchMode):
    """Counts the operators that are called."""

    n = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.n += 1
        return func(*args, **(kwargs or {}))


def add(
    trajectories: OpenTrajectories, batch: TensorDictBase, values: torch.Tensor, done: Any, **kwargs
) -> TrajectorySums:
    """Adds the values of a batch, time last; padding is where its mask is False."""
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
    """What one env gives, with trajectories of 1 to 6 steps; as in a collector, the end of any
    agent ends the id.
    """
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
    """Streams whose trajectories are numbered in the order in which they begin, as a collector
    does.
    """
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
    """The slow, obvious version: walks through one env's steps; knows nothing of batches but where
    they end.
    """

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
    """The batch (n_envs, T) that a collector would give; flags are (n_envs, T, 1), or one per
    agent.
    """

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
