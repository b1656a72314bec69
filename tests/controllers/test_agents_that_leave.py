"""Open trajectories of agents that leave one by one, while others go on."""

import itertools
import random
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch.testing import assert_close
from torchrl.collectors.utils import split_trajectories

from tests.streams import add
from torchrl_kl.controllers.trajectories import OpenTrajectories, Segments

seeds = pytest.mark.parametrize("seed", range(8))


class TestAgents:
    """Agents with done flags of their own: one that is done ends its trajectory, and the others go
    on.
    """

    @seeds
    @pytest.mark.parametrize(
        ("terminates", "set_truncated"),
        [(True, False), (True, True), (False, False), (False, True)],
    )
    def test_ids_change_when_any_agent_leaves(self, seed, terminates, set_truncated):
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
            batch = self.batch(steps, terminates, set_truncated)
            values = torch.tensor([[step[4] for step in steps]]).unsqueeze(-1)
            result = add(trajectories, batch, values, ("agents", "done"))
            present = ~batch["agents", "done"]
            expected = torch.tensor(running[start : start + len(steps)])[None, :, :, None]
            assert_close(result.running[present], expected[present], rtol=0, atol=0)
            told += result.finished.tolist()
            start += len(steps)
        none = [False] * n_agents
        later = self.batch([(10**6, 999, none, none)], terminates, False)
        told += add(
            trajectories, later, torch.zeros(1, 1, 3, 1), ("agents", "done")
        ).finished.tolist()
        if set_truncated and not all(batches[-1][3]):  # those that are present are cut there
            totals += [s for s, was in zip(sums, left, strict=True) if not was]
        assert sorted(told) == sorted(totals)

    @seeds
    @pytest.mark.parametrize("terminates", [True, False])
    @pytest.mark.parametrize("tracked", [True, False])
    @pytest.mark.parametrize("set_truncated", [False, True], ids=["as_it_ends", "set_truncated"])
    def test_rows_that_torchrl_has_split_where_an_agent_leaves(
        self, seed, terminates, tracked, set_truncated
    ):
        rng, ids = random.Random(seed), itertools.count()
        none = [False] * 3
        steps, begins = [], []
        totals: dict[str, list[float]] = {"agents": [], "others": []}
        trajectory, left, sums = next(ids), none, [0.0] * 3
        for t in range(40):
            gone = [was or rng.random() < 0.2 for was in left]
            value = [rng.randint(-40, 40) / 8 for _ in range(3)]
            sums = [a + b for a, b in zip(sums, value, strict=True)]
            steps.append((trajectory, t, left, gone, value))
            begins.append(t == 0 or all(steps[t - 1][3]))
            for i, group in enumerate(("agents", "agents", "others")):
                totals[group] += [sums[i]] if gone[i] and not left[i] else []
            trajectory = next(ids) if any(gone) else trajectory
            left, sums = (none, [0.0] * 3) if all(gone) else (gone, sums)
        if set_truncated:  # the agents that are present in the last step are cut there
            begun = all(steps[-1][3])
            for i, group in enumerate(("agents", "agents", "others")):
                totals[group] += [] if left[i] or begun else [sums[i]]
        streams = {group: OpenTrajectories() for group in totals}
        told: dict[str, list[float]] = {group: [] for group in totals}
        for start in [*range(0, 40, 7), 40]:
            chunk = steps[start : start + 7] or [(10**6, 999, none, none, [0.0] * 3)]
            batch: Any = self.batch(chunk, terminates, set_truncated and start < 40)
            batch["agents", "value"] = torch.tensor([[[[v] for v in one[4]] for one in chunk]])
            if tracked:
                batch["is_init"] = torch.tensor([begins[start : start + 7] or [True]])[..., None]
            for each in (batch, batch["next"]):  # the third agent has a group of its own
                flags = each["agents"]
                each["others"] = {key: value[:, :, 2:] for key, value in flags.items()}
                each["agents"] = {key: value[:, :, :2] for key, value in flags.items()}
            batch = split_trajectories(batch, prefix="collector")
            batch.names = [None, "time"]
            for group, stream in streams.items():
                sums = add(stream, batch, batch[group, "value"], (group, "done"))
                told[group] += sums.finished.tolist()
        assert {group: sorted(each) for group, each in told.items()} == {
            group: sorted(each) for group, each in totals.items()
        }

    @pytest.mark.parametrize("joined", [False, True])
    def test_rows_that_are_left_in_the_same_state_keep_their_own_sums(self, joined):
        """As in an env of few states: with the first step one of two agents leaves each row."""
        values, trajectories = [1.0, 10.0, 100.0], OpenTrajectories()
        none, first, both = [False, False], [True, False], [True, True]
        batches: list[Any] = []
        for t, (left, gone) in enumerate([(none, first), (first, first), (first, both)]):
            rows: list[Any] = [
                self.batch([(3 * t + r, 0, left, gone, [])], True, False) for r in range(3)
            ]
            batch: Any = torch.cat(rows)
            batch["next", "observation"] = batch["observation"]
            batch["is_init"] = torch.full((3, 1, 1), t == 0)
            batches.append(batch)
        added = torch.tensor(values).view(3, 1, 1, 1).expand(3, 1, 2, 1)
        parts = [[batches[0]], batches[1:]] if joined else [[batch] for batch in batches]
        running, told = [], []
        for part in parts:
            n = len(part)
            joint: Any = torch.cat(part)
            sums = add(trajectories, joint, added.repeat(n, 1, 1, 1), ("agents", "done"))
            running += sums.running[:, 0, 1, 0].tolist()
            told += sums.finished.tolist()
        assert running == [n * value for n in (1, 2, 3) for value in values]
        assert sorted(told) == sorted(values + [3 * value for value in values])

    def batch(self, steps: list[Any], terminates: bool, set_truncated: bool) -> TensorDict:
        """A batch (1, T) of steps (id, time, who left before, who is gone after, values)."""
        shape = (1, len(steps))
        before, after = (torch.tensor([[step[i] for step in steps]]).unsqueeze(-1) for i in (2, 3))
        time = torch.tensor([[float(step[1])] for step in steps])[None]
        root_done = after.all(-2)
        flags = {"done": after, "terminated": after & terminates}
        step = TensorDict(
            {
                "agents": flags,
                "done": root_done,
                "terminated": root_done & terminates,
                "observation": time + 1 + root_done / 2,
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


def test_a_trajectory_that_goes_on_hides_no_other_one_in_the_same_state():
    """Row 0 goes on under its id; row 1, whose first agent has left, under another."""

    def segments(ids, done, left, is_init, before, after):
        nobody = torch.zeros(2, 2, 2, dtype=torch.bool)
        return Segments(
            done=done,
            terminated=nobody,
            left=left,
            any_done=done.any(-1),
            any_left=left.any(-1),
            mask=None,
            ids=torch.tensor(ids)[:, None].expand(2, 2),
            is_init=is_init,
            states_before=lambda at: [before[i // 2] for i in at.tolist()],
            states_after=lambda at: [after[i // 2] for i in at.tolist()],
        )

    nobody = torch.zeros(2, 2, 2, dtype=torch.bool)
    cut, first_left, begins = nobody.clone(), nobody.clone(), nobody[..., 0].clone()
    cut[:, -1], first_left[1, :, 0], begins[:, 0] = True, True, True
    trajectories, values = OpenTrajectories(), torch.ones(2, 2, 2)
    values[1] = 10.0
    trajectories.add(values, segments([7, 8], cut, nobody, begins, [b"0", b"1"], [b"s", b"s"]))
    later = segments([7, 9], nobody, first_left, nobody[..., 0], [b"s", b"s"], [b"t", b"u"])
    sums = trajectories.add(torch.ones(2, 2, 2), later)
    assert sums.running[:, :, 1].tolist() == [[3.0, 4.0], [21.0, 22.0]]
    assert sums.finished.tolist() == [20.0]  # of the agent that has left
