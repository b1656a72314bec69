"""Coefficients computed from rewards: against enumeration, and what is refused."""

import copy
import io
import math
import re
from typing import Any

import pytest
import torch

from torchrl_kl import (
    AdaptiveKLController,
    ConstantKLController,
    ExponentialKLController,
    PIDKLController,
    PlannedKLController,
    coeff_for_budget,
)
from torchrl_kl.controllers.plan import RewardPlan, Reweighted
from torchrl_kl.exact import Enumeration

V, R = 3, 2  # tokens, and tokens of a response
MAKERS = {
    "adaptive": lambda target: AdaptiveKLController("plan", target, 1e4),
    "exponential": lambda target: ExponentialKLController("plan", target),
    "PID": lambda target: PIDKLController("plan", target),
    "planned": lambda target: PlannedKLController(target),
}
planning = pytest.mark.parametrize("make", list(MAKERS.values()), ids=list(MAKERS))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=seeded(seed))


def planned(rewards: torch.Tensor, target: float, **about: torch.Tensor) -> Any:
    plan = RewardPlan()
    return plan.solve(plan.with_samples(rewards, **about), target)


def problem(n_prompts: int, spread: float = 0.0, *, uniform: bool = False):
    """Rewards (P, V**R), the reference's probabilities, and the exact solution."""
    rewards = randn(n_prompts, V**R, seed=1) + spread * randn(n_prompts, 1, seed=2)
    table = randn(2, 200, V, seed=3) * (0 if uniform else 0.5)

    def reference(tokens):
        return table[tokens.shape[1] - 1, tokens[:, -1]]

    def reward_fn(texts):
        return rewards[texts[:, 0], texts[:, 1] * V + texts[:, 2]]

    exact = Enumeration(reference, reward_fn, torch.arange(n_prompts)[:, None], R)
    return rewards, exact.log_probs.exp(), exact


def sample(rewards, probs, per_prompt: int, seed: int = 0):
    """Rewards of responses (N,), and their prompts."""
    drawn = torch.multinomial(probs, per_prompt, replacement=True, generator=seeded(seed))
    prompts = torch.arange(len(rewards)).repeat_interleave(per_prompt)
    return rewards.gather(1, drawn).flatten(), prompts


def bernoulli_kl(p: float, beta: float) -> float:
    """KL of the optimum for a reward of 1 with probability p, else 0: two outcomes, written out."""
    q = p * math.exp(1 / beta) / (p * math.exp(1 / beta) + 1 - p)
    return q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))


class TestCoeffForBudget:
    @pytest.mark.parametrize("n_prompts", [1, 3])
    @pytest.mark.parametrize("budget", [1e-6, 0.01, 0.3, 1.9])
    def test_samples_that_are_the_whole_enumeration_give_its_coefficient(self, n_prompts, budget):
        rewards, _, exact = problem(n_prompts, uniform=True)
        coeff = coeff_for_budget(rewards, budget)
        # Each is bisected to 1e-12; KL ~ 1 / coeff^2 is a difference of numbers of order 1, known
        # to some 1e-16.
        assert coeff == pytest.approx(exact.solve_coeff(budget), rel=2e-12 + 1e-15 / budget)
        if n_prompts == 1:
            assert coeff_for_budget(rewards[0], budget) == coeff

    @pytest.mark.parametrize("beta", [0.1, 0.452, 1.0, 5.0])
    @pytest.mark.parametrize("ones", [1, 3, 9])
    def test_of_two_valued_rewards_it_is_the_known_one(self, beta, ones):
        rewards = torch.tensor([1] * ones + [0] * (10 - ones))  # whole numbers will do
        budget = bernoulli_kl(ones / 10, beta)
        if budget < math.log(10 / ones) - 1e-6:  # else the curve is too flat to be inverted
            assert coeff_for_budget(rewards, budget) == pytest.approx(beta, rel=1e-8)

    def test_prompts_are_not_pooled_and_one_without_a_choice_has_no_divergence(self):
        rewards = torch.tensor([[5.0, 5.1], [0.0, 0.1]], dtype=torch.float64)
        coeff = coeff_for_budget(rewards, 0.1)
        assert coeff == pytest.approx(coeff_for_budget(rewards[1], 0.1), rel=1e-11)
        assert coeff_for_budget(rewards.flatten(), 0.1) > 10 * coeff
        both = coeff_for_budget(torch.tensor([[1.0, 0.0], [7.0, 7.0]]), 0.1)
        assert both == pytest.approx(coeff_for_budget(torch.tensor([1.0, 0.0]), 0.2), rel=1e-11)

    def test_units_and_shifts(self):
        rewards = randn(2, 9, seed=3)
        coeff = coeff_for_budget(rewards, 0.4)
        for scale in (1000.0, 1e300, 1e-300):
            wanted = pytest.approx(scale * coeff, rel=1e-11, abs=0)
            assert coeff_for_budget(rewards * scale, 0.4) == wanted
        shift = torch.tensor([[1e3], [-1e3]], dtype=torch.float64)  # leaves rewards exact to 1e-13
        assert coeff_for_budget(rewards + shift, 0.4) == pytest.approx(coeff, rel=1e-11)
        halves = torch.tensor([0.0, 1.0, 0.5]).half().requires_grad_()
        assert coeff_for_budget(halves, 0.1) == coeff_for_budget(halves.detach().double(), 0.1)

    def test_up_to_the_largest_budget_there_is_a_coefficient(self):
        rewards, limit = torch.tensor([0.0, 1.0, 1.0, 0.25]), math.log(2)
        assert 0.02 < coeff_for_budget(rewards, limit * (1 - 1e-12)) < 0.04
        message = (
            "`budget` must be below 0.693147 nats, all that these samples can show, got 0.693147: "
            "draw more samples, or lower the budget."
        )
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            coeff_for_budget(rewards, limit)
        rows = torch.tensor([[0.0, 1.0, 1.0, 1.0], [0.0, 0.0, 2.0, 1.0]])
        with pytest.raises(ValueError, match=f"below {(math.log(4 / 3) + math.log(4)) / 2:.6g}"):
            coeff_for_budget(rows, 1.0)

    @pytest.mark.parametrize(
        ("rewards", "budget", "message"),
        [
            (torch.arange(2.0), 0.0, "`budget` must be finite and above 0, got 0"),
            (torch.arange(2.0), "1", "`budget` must be a number, got str"),
            ([0.0, 1.0], 0.1, r"`rewards` must be a tensor, got list: pass `torch\.tensor"),
            (torch.zeros(0, 2), 0.1, r"groups, not empty, got shape \(0, 2\)"),
            (torch.zeros(2, 2, 1), 0.1, r"`rewards` must be the rewards \(N,\) of samples, or"),
            (torch.tensor([1.0, math.nan]), 0.1, "must be finite, got 1 NaN or infinite .* of 2"),
            (torch.tensor([1.0, math.inf]), 0.1, "must be finite, got 1 NaN or infinite .* of 2"),
            (torch.tensor([1e308, -1e308]).double() * 1e300, 0.1, "must be finite, got 2 NaN"),
            (torch.tensor([[0.0], [1.0]]), 0.1, r"must differ .* shape \(2, 1\) with equal"),
        ],
    )
    def test_refusals(self, rewards, budget, message):
        with pytest.raises((TypeError, ValueError), match=message):
            coeff_for_budget(rewards, budget)


class TestPlan:
    def test_one_prompt_is_solved_as_by_coeff_for_budget(self):
        rare, crashes = torch.zeros(4096), torch.tensor([0.0, 1.0] * 2048)
        rare[:16], crashes[:4] = 1.0, -1000.0  # far from normally distributed
        values, _ = sample(*problem(1)[:2], 500)
        for rewards, target in ((values, 0.3), (rare, 2.0), (crashes, 0.3)):
            assert planned(rewards, target) == pytest.approx(
                coeff_for_budget(rewards, target), rel=1e-8
            )

    @pytest.mark.parametrize("per_prompt", [2, 4, 16, 64])
    @pytest.mark.parametrize("spread", [0.0, 5.0])
    def test_groups_are_compared_with_themselves(self, per_prompt, spread):
        rewards, probs, exact = problem(200, spread)
        values, groups = sample(rewards, probs, per_prompt)
        coeff, right = planned(values, 0.2, groups=groups), exact.solve_coeff(0.2)
        # Pooled differences count the spread between prompts a little; 400 samples know it to 4 %.
        assert coeff == pytest.approx(right, rel=0.15)
        means, within = (probs * rewards).sum(1), (probs * rewards.square()).sum(1)
        ratio = (1 + means.var() / (within - means.square()).mean()).sqrt().item()
        if spread:  # the ratio of standard deviations, which is exact for normal rewards
            assert planned(values, 0.2) == pytest.approx(right * ratio, rel=0.2)

    def test_large_groups_are_rows_of_coeff_for_budget(self):
        scales = torch.tensor([0.3, 1.0, 2.0]).unsqueeze(1)  # the rewards of prompts differ
        rewards = scales * randn(3, 64) + 10 * torch.arange(3).unsqueeze(1)
        order = torch.randperm(192, generator=seeded(1))
        groups = torch.arange(3).repeat_interleave(64)[order]
        for target in (0.1, 1.0, 2.0):  # 64 samples show up to log(64 / 8) = 2.08
            coeff = planned(rewards.flatten()[order], target, groups=groups)
            assert coeff == pytest.approx(coeff_for_budget(rewards, target), rel=1e-8)
        most = torch.cat([rewards.flatten(), rewards[0, :32]])  # rows of different lengths
        groups = torch.cat([torch.arange(3).repeat_interleave(64), torch.full((32,), 9)])
        coeff = planned(most, 0.5, groups=groups)
        kls = [
            Reweighted(row[None], torch.zeros(1, len(row))).kl
            for row in (*rewards, rewards[0, :32])
        ]
        spreads = [(row.max() - row.min()).item() for row in (*rewards, rewards[0, :32])]
        mean = sum(kl(coeff / spread) for kl, spread in zip(kls, spreads, strict=True)) / 4
        assert mean == pytest.approx(0.5, rel=1e-6)

    def test_groups_are_those_of_one_call(self):
        rewards, plan = torch.tensor([0.0, 1.0] * 20), RewardPlan()
        for shift in (0.0, 100.0):  # of which two groups of 20 have the number 7
            plan.samples = plan.with_samples(rewards[:20] + shift, groups=torch.full((20,), 7))
        expected = planned(rewards, 0.1) * math.sqrt(20 / 19)
        assert plan.solve(plan.samples, 0.1) == pytest.approx(expected)
        alone = planned(rewards, 0.1, groups=torch.arange(40))  # most samples are alone
        assert alone == planned(rewards, 0.1)
        half = planned(rewards, 0.1, groups=torch.arange(40).clamp(max=20))  # 20 are alone
        assert half == pytest.approx(planned(rewards[20:], 0.1, groups=torch.zeros(20)))

    def test_normal_rewards_and_a_target_that_samples_cannot_show(self):
        rewards = 3 + 2 * randn(200)
        # log 200 is 5.3: the variance decides, whose root is known to 1 / sqrt(400).
        for target in (4.0, 8.0):  # of 4 a few samples would carry the weight
            wanted = pytest.approx(2 / math.sqrt(2 * target), rel=4 / math.sqrt(400))
            assert planned(rewards, target) == wanted
        coin = torch.tensor([1.0, 0.0] * 8)  # of which no policy is 0.8 nats away
        assert planned(coin, 0.8) == pytest.approx(0.5 * math.sqrt(16 / 15) / math.sqrt(1.6))
        few = torch.zeros(4096)
        few[:6] = 1.0  # reweighting gives more than the variance
        assert planned(few, 4.0) == pytest.approx(coeff_for_budget(few, 4.0), rel=1e-8)

    @pytest.mark.parametrize("target", [0.1, 0.4])
    def test_a_policy_that_has_moved_is_weighted_back(self, target):
        rewards, probs, exact = problem(1)
        moved = (probs.log() + rewards / 2).softmax(1)
        drawn = torch.multinomial(moved, 4000, replacement=True, generator=seeded(0))[0]
        ratios = (moved / probs).log()[0, drawn]
        coeff, right = (
            planned(rewards[0, drawn], target, log_ratios=ratios),
            exact.solve_coeff(target),
        )
        # 4000 samples know a standard deviation to 1 / sqrt(8000); four of these.
        assert coeff == pytest.approx(right, rel=4 / math.sqrt(8000))
        assert abs(planned(rewards[0, drawn], target) - right) > abs(coeff - right)

    def test_samples_without_weight_change_nothing(self):
        coin, zeros = torch.tensor([0.0, 1.0] * 50), torch.zeros(100)
        log_ratios, lengths = torch.cat([zeros, zeros + 99]), torch.cat([zeros + 1, zeros + 9])
        coeff = planned(coin.repeat(2), 0.1, log_ratios=log_ratios, lengths=lengths)
        assert coeff == pytest.approx(planned(coin, 0.1))

    def test_steps_of_a_trajectory_have_the_target_each(self):
        values, groups = sample(*problem(20)[:2], 32)
        coeff = planned(values, 0.3, groups=groups)
        twice = planned(values, 0.15, groups=groups, lengths=0 * values + 2)
        assert twice == pytest.approx(coeff, rel=1e-8)
        assert planned(1000 * values, 0.3) == pytest.approx(1000 * planned(values, 0.3), rel=1e-7)

    @pytest.mark.parametrize(
        ("rewards", "about", "reason"),
        [
            (torch.ones(300), {}, "the rewards of all 300 samples are equal within their groups"),
            (torch.arange(15.0), {}, r"15\.0 of 15 samples are effective .* needs 16"),
            (randn(100), {"log_ratios": 10 * torch.arange(100.0)}, r"1\.0 of 100 samples are"),
            (torch.zeros(0), {}, r"0\.0 of 0 samples"),
        ],
    )
    def test_more_samples_are_waited_for(self, rewards, about, reason):
        plan = RewardPlan()
        assert plan.solve(plan.with_samples(rewards, **about), 0.1) is None
        assert re.match(reason, plan.reason)
        assert planned(torch.tensor([0.0, 1.0] * 8), 0.1) is not None

    @pytest.mark.parametrize(
        ("name", "values", "message"),
        [
            ("lengths", torch.ones(3), r"and `lengths` must both .*\(2,\) and \(3,\)"),
            ("rewards", torch.ones(2, 1), r"must both have the shape \(N,\), got \(2, 1\)"),
            ("groups", [0, 1], "`groups` must be a tensor of real numbers, got list"),
            ("rewards", torch.ones(2) + 1j, "`rewards` .* real numbers, got torch.complex64"),
            ("log_ratios", torch.tensor([0.0, math.nan]), "`log_ratios` .* finite, got 1 .* of 2"),
            ("rewards", torch.tensor([math.inf] * 2), "`rewards` must be finite, got 2 .* of 2"),
            ("lengths", torch.tensor([3.0, 0.0]), "`lengths` must be at least 1, got 0: leave"),
        ],
    )
    def test_refusals(self, name, values, message):
        controller: Any = PlannedKLController(0.1, per="step")
        given = {"rewards": torch.arange(2.0)} | {name: values}
        with pytest.raises((TypeError, ValueError), match=message):
            controller.observe_rewards(**given)
        assert not len(controller.plan.samples)
        assert controller.coeff == 0

    def test_the_last_samples_are_held_without_a_graph(self):
        plan = RewardPlan()
        plan.samples = plan.with_samples(torch.ones(9), log_ratios=torch.ones(9).requires_grad_())
        samples = plan.with_samples(torch.zeros(65_535))
        assert not samples.requires_grad
        assert samples[:, 0].sum() == 1


class TestControllers:
    @planning
    def test_it_plans_and_then_follows_its_rule(self, make):
        values, groups = sample(*problem(20)[:2], 32)
        controller, coeff = make(0.3), planned(values, 0.3, groups=groups)
        assert controller.planning
        with pytest.raises(RuntimeError, match="the coefficient is not planned yet"):
            controller.update(0.2, 10)
        first = controller.observe_rewards(values, groups=groups)
        assert controller.plan.made == coeff
        assert not controller.planning
        # Rewards that come later do not change it; the KL does.
        assert controller.observe_rewards(100 * values) == first
        again = planned(100 * values, 0.3) if controller.reads_rewards else coeff
        assert controller.plan.made == again
        assert controller.update(0.9, 10) > first

    @planning
    def test_an_interrupted_run_plans_alike(self, make):
        values, _ = sample(*problem(1)[:2], 200)
        whole, first, second, third = (make(0.3) for _ in range(4))
        expected = whole.observe_rewards(values)
        first.observe_rewards(values[:12])
        spread = (values[:12].max() - values[:12].min()).item()
        assert first.coeff.item() == pytest.approx(spread / math.sqrt(2 * 0.3))
        # The optimum for this coefficient spends at most a quarter of the target.
        assert coeff_for_budget(values[:12], 0.3 / 4) <= first.coeff.item()
        before = copy.deepcopy(first.state_dict())
        file = io.BytesIO()
        torch.save(before, file)
        file.seek(0)
        second.load_state_dict(torch.load(file, weights_only=True))
        assert second.coeff == first.coeff
        assert second.observe_rewards(values[12:]) == pytest.approx(expected, rel=1e-9)
        third.load_state_dict(second.state_dict())
        assert not third.planning
        assert third.update(0.7, 5) == second.update(0.7, 5)
        third.load_state_dict(before)
        assert third.planning

    def test_steps_are_alike_so_that_more_are_waited_for(self):
        coin = torch.tensor([0.0, 1.0] * 64)
        controller: Any = PlannedKLController(0.1, per="step")
        controller.observe_rewards(coin)
        assert controller.planning
        assert "128.0 of 128 samples are effective" in controller.plan.reason
        controller.observe_rewards(coin)
        assert controller.plan.made == pytest.approx(planned(coin, 0.1))
        by_trajectory = PlannedKLController(0.1, per="step")
        by_trajectory.observe_rewards(coin, lengths=0 * coin + 4)
        assert not by_trajectory.planning
        few = PlannedKLController(0.1, per="step")
        coeff = few.observe_rewards(coin[:4], lengths=0 * coin[:4] + 5)
        assert coeff == pytest.approx(1 / math.sqrt(2 * 0.1 * 5))

    def test_bounds_hold_from_the_plan_on(self):
        rewards = torch.tensor([0.0, 1000.0] * 50)
        controller: Any = ExponentialKLController("plan", 0.01)
        controller.observe_rewards(rewards[:2])
        assert controller.coeff > controller.max_coeff
        before = copy.deepcopy(controller.state_dict())
        ExponentialKLController("plan", 0.01).load_state_dict(before)
        assert controller.observe_rewards(rewards) == controller.max_coeff
        assert controller.plan.made > controller.max_coeff

    def test_a_target_that_is_changed_before_the_plan_is_planned_for(self):
        rewards, changed = torch.tensor([0.0, 1.0] * 200), PlannedKLController(0.3)
        changed.target = 0.05
        expected = PlannedKLController(0.05).observe_rewards(rewards)
        assert changed.observe_rewards(rewards) == expected

    def test_a_later_plan_takes_the_policy_for_the_reference(self):
        controller: Any = PlannedKLController(0.3)
        coin = torch.tensor([0.0, 1.0] * 20)
        controller.observe_rewards(coin)
        controller.observe_rewards(0 * coin)  # that are equal plan nothing
        assert controller.plan.made == planned(coin, 0.3)
        controller.observe_rewards(3 * coin, log_ratios=torch.arange(40.0))
        assert controller.plan.made == planned(3 * coin, 0.3)
        assert not len(controller.plan.samples)

    def test_with_a_number_rewards_change_nothing(self):
        controller = PIDKLController(0.2, 0.3)
        assert controller.observe_rewards(torch.randn(100)) == 0.2
        assert controller.plan is None
        assert not ConstantKLController(0.1).planning
        with pytest.raises(TypeError, match="`init_coeff` must be a number, got str"):
            PIDKLController("auto", 0.3)  # type: ignore[arg-type]

    def test_lengths_for_a_target_per_trajectory_are_refused(self):
        with pytest.raises(ValueError, match="`lengths` must be None for a target per trajectory"):
            PlannedKLController(0.1).observe_rewards(torch.ones(2), lengths=torch.ones(2))
