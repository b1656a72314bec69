"""Rewards that a user gives to a plan: numbers that are refused, a changed target, groups."""

from typing import cast

import pytest
import torch

from torchrl_kl import PlannedKLController
from torchrl_kl.controllers.plan import Plan, RewardPlan


class TestObservedByHand:
    """Numbers that do not tell a plan are refused by name."""

    @pytest.mark.parametrize("name", ["rewards", "groups", "log_ratios", "lengths"])
    @pytest.mark.parametrize(
        ("wrong", "says"),
        [
            ([0.0, 1.0], "a tensor, got list"),
            (torch.ones(2) + 1j, "real numbers, got torch.complex64"),
        ],
    )
    def test_of_another_type(self, name, wrong, says):
        given = {"rewards": torch.tensor([0.0, 1.0])} | {name: wrong}
        with pytest.raises(TypeError, match=f"`{name}` must be {says}"):
            PlannedKLController(0.1, per="step").observe_rewards(**given)

    @pytest.mark.parametrize("length", [0.0, -1.0])
    def test_lengths_below_one(self, length):
        given = PlannedKLController(0.1, per="step")
        with pytest.raises(ValueError, match=f"`lengths` must be at least 1, got {length:g}"):
            given.observe_rewards(torch.tensor([0.0, 1.0]), lengths=torch.tensor([3.0, length]))
        assert given.plan is not None
        assert not len(given.plan.samples)

    def test_lengths_for_a_target_per_trajectory(self):
        """They multiplied it."""
        with pytest.raises(ValueError, match=r"`lengths` must be None for a target per trajectory"):
            PlannedKLController(0.1).observe_rewards(torch.ones(2), lengths=torch.ones(2))


def test_a_target_that_is_changed_before_the_plan_is_planned_for():
    """The plan was made for the target that the controller was built with."""
    rewards, changed = torch.tensor([0.0, 1.0] * 200), PlannedKLController(0.3)
    changed.target = 0.05
    expected = PlannedKLController(0.05).observe_rewards(rewards)
    assert changed.observe_rewards(rewards) == expected


class TestGroupsOfAPool:
    def test_they_stay_apart_when_two_pools_are_merged(self):
        """Groups of two workers, each numbered by its own pool, with means far apart."""
        generator = torch.Generator().manual_seed(0)
        coin = torch.randint(0, 2, (20, 32), generator=generator).double()  # 20 groups
        values = coin + 100 * torch.arange(20.0).unsqueeze(1)
        whole, first, second = RewardPlan(0.1), RewardPlan(0.1), RewardPlan(0.1)
        for part, rows in ((first, values[:10]), (second, values[10:]), (whole, values)):
            for row in rows:
                groups = torch.full((32,), part.new_groups(1), dtype=torch.float64)
                part.add(row, groups=groups)
        # Where groups are mixed, the differences of 100 between them count as preferences.
        for plan in (whole, first.merge(second)):
            assert plan.samples[:, 3].unique().numel() == 20
            assert torch.equal(plan.samples[:, 0], values.flatten())
        assert cast(Plan, first.solve()).coeff == pytest.approx(cast(Plan, whole.solve()).coeff)
        assert first.new_groups(1) not in first.samples[:, 3]

    def test_negative_numbers_are_refused(self):
        plan = RewardPlan(0.1)
        with pytest.raises(ValueError, match="`groups` must be whole numbers from 0 on, got -1"):
            plan.add(torch.ones(2), groups=torch.tensor([0, -1]))
        assert len(plan.samples) == 0
