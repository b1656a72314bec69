"""Flags of the trajectories in the rows of an env, step by step."""

import pytest
import torch
from torch import Tensor

from torchrl_kl.transforms.rows import EnvRows


def column(*values) -> Tensor:
    return torch.tensor(values)[:, None]


def flags(rows: EnvRows, n: int = 2) -> list[bool]:
    return rows.left_out(torch.ones(n, 1, dtype=torch.bool)).flatten().tolist()


START, FIRST, SECOND, THIRD = (column(float(n), n + 10.0) for n in range(4))


@pytest.mark.parametrize("counted", [False, column(False, True)], ids=["all", "first"])
def test_a_trajectory_with_an_action_that_was_not_drawn_is_left_out_to_its_end(counted):
    rows = EnvRows()
    rows.reset(None)
    rows.add(START, FIRST, counted, None)
    expected = [True, counted is False]
    assert flags(rows) == expected
    rows.add(FIRST, SECOND, True, None)
    assert flags(rows) == expected
    rows.reset(torch.tensor([True, False]))
    assert flags(rows) == [False, expected[1]]
    rows.add(SECOND, THIRD, True, None)
    assert flags(rows) == [False, expected[1]]
    rows.reset(None)
    assert flags(rows) == [False, False]


def test_rows_of_another_rollout_have_no_flags():
    rows = EnvRows()
    rows.reset(None)
    rows.add(START, FIRST, False, torch.tensor([False, False]))
    # The second row begins where another rollout left it.
    rows.add(column(1.0, 5.0), SECOND, True, torch.tensor([False, False]))
    assert flags(rows) == [True, False]
    rows.add(torch.zeros(3, 1), torch.ones(3, 1), True, torch.tensor([False] * 3))
    assert flags(rows, 3) == [False] * 3


def test_a_trajectory_is_left_out_until_one_of_its_steps_is_valid():
    rows = EnvRows()
    rows.reset(None)
    rows.add(START, FIRST, True, torch.tensor([False, True]))
    assert flags(rows) == [True, False]
    rows.add(FIRST, SECOND, True, torch.tensor([False, False]))
    assert flags(rows) == [True, False]
    rows.reset(torch.tensor([False, True]))
    rows.add(SECOND, THIRD, True, torch.tensor([False, False]))
    assert flags(rows) == [True, True]
    rows.add(THIRD, START, True, torch.tensor([True, False]))
    assert flags(rows) == [False, True]
    rows.add(START, FIRST, True, None)
    assert flags(rows) == [False, False]
