"""Coefficients planned from rewards: against enumeration, and what is refused."""

import copy
import io
import math
import re
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch.testing import assert_close

from torchrl_kl import (
    AdaptiveKLController,
    ConstantKLController,
    Enumeration,
    ExponentialKLController,
    PIDKLController,
    PlannedKLController,
    coeff_for_budget,
)
from torchrl_kl.controllers.plan import Plan, RewardPlan

V, R = 3, 2  # tokens, and tokens of a response
PLANNING = {
    "adaptive": lambda target, **kwargs: AdaptiveKLController("plan", target, 1e4, **kwargs),
    "exponential": lambda target, **kwargs: ExponentialKLController("plan", target, **kwargs),
    "PID": lambda target, **kwargs: PIDKLController("plan", target, **kwargs),
}
planning = pytest.mark.parametrize("make", list(PLANNING.values()), ids=list(PLANNING))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def solved(plan: RewardPlan) -> Plan:
    made = plan.solve()
    assert made is not None
    return made


def problem(n_prompts: int, spread: float = 0.0):
    """Rewards (P, V**R), the reference's probabilities, and the exact solution."""
    rewards = torch.randn(n_prompts, V**R, dtype=torch.float64, generator=seeded(1))
    rewards += spread * torch.randn(n_prompts, 1, dtype=torch.float64, generator=seeded(2))
    table = torch.randn(2, 200, V, dtype=torch.float64, generator=seeded(3)) / 2

    def reference(tokens):
        return table[tokens.shape[1] - 1, tokens[:, -1]]

    def reward_fn(texts):
        return rewards[texts[:, 0], texts[:, 1] * V + texts[:, 2]]

    exact = Enumeration(reference, reward_fn, torch.arange(n_prompts)[:, None], R)
    return rewards, exact.log_probs.exp(), exact


def sample(rewards, probs, per_prompt: int, seed: int = 0):
    """Rewards of responses (N,), and their prompts."""
    drawn = torch.multinomial(probs, per_prompt, replacement=True, generator=seeded(seed))
    return rewards.gather(1, drawn).flatten(), torch.arange(len(rewards)).repeat_interleave(
        per_prompt
    )


@pytest.mark.parametrize("target", [0.1, 0.4])
@pytest.mark.parametrize("per_prompt", [64, 256])
def test_groups_give_the_exact_coefficient_within_the_counted_error(target, per_prompt):
    rewards, probs, exact = problem(20)
    logs, errors = [], []
    for seed in range(20):
        values, groups = sample(rewards, probs, per_prompt, seed)
        plan = solved(RewardPlan(target).add(values, groups=groups))
        logs.append(math.log(plan.coeff / exact.solve_coeff(target)))
        errors.append(plan.standard_error)
    # Twenty repetitions; the rows' error counts the prompts as drawn, though these are fixed, so
    # it is an upper bound. Reweighting S samples is biased by less than 2 / S.
    mean = sum(logs) / len(logs)
    assert abs(mean) < 4 * max(errors) / math.sqrt(len(logs)) + 2 / per_prompt
    assert max(map(abs, logs)) < 4 * max(errors)


def test_one_prompt_is_solved_as_by_coeff_for_budget():
    rare, crashes = torch.zeros(4096), torch.tensor([0.0, 1.0] * 2048)
    rare[:12], crashes[:4] = 1.0, -1000.0  # far from normally distributed
    values, _ = sample(*problem(1)[:2], 500)
    few = rare * (torch.arange(4096) < 4)  # fewer than it takes, but the variance tells less
    for rewards, target in ((values, 0.3), (rare, 2.0), (few, 4.0), (crashes, 0.3)):
        plan = solved(RewardPlan(target).add(rewards))
        assert plan.coeff == pytest.approx(coeff_for_budget(rewards, target), rel=1e-8)


def test_its_standard_error_is_that_of_repetitions():
    rewards, probs, _ = problem(1)
    plans = [
        solved(RewardPlan(0.3).add(sample(rewards, probs, 400, seed)[0])) for seed in range(100)
    ]
    logs = torch.tensor([math.log(plan.coeff) for plan in plans])
    counted = sum(plan.standard_error for plan in plans) / len(plans)
    # The spread of 100 values is known to 1 / sqrt(200); four of its standard errors.
    assert logs.std().item() == pytest.approx(counted, rel=4 / math.sqrt(200))


@pytest.mark.parametrize(
    ("kind", "n", "size", "target"),
    [
        ("exponential", 512, None, 0.5),
        ("exponential", 1024, 4, 0.5),
        ("exponential", 1024, 16, 0.5),
        ("normal", 512, None, 2.0),
        ("normal", 1024, 4, 1.0),
    ],
)
def test_its_standard_error_counts_tails_and_groups(kind, n, size, target):
    """A few large rewards, or groups, carry most of what is not known."""
    logs, counted = [], []
    for seed in range(200):
        numbers = torch.rand(n, dtype=torch.float64, generator=seeded(seed))
        rewards = -numbers.log() if kind == "exponential" else torch.special.ndtri(numbers)
        groups = None if size is None else torch.arange(n) // size
        plan = RewardPlan(target).add(rewards, groups=groups).solve()
        if plan is not None:
            logs.append(math.log(plan.coeff))
            counted.append(plan.standard_error)
    assert len(logs) > 150
    # The spread of 200 values is known to 1 / sqrt(400); four of its standard errors.
    spread = torch.tensor(logs).std().item()
    assert sum(counted) / len(counted) == pytest.approx(spread, rel=0.2)


def test_its_slope_is_the_derivative_of_the_kl():
    rewards, probs, exact = problem(1)
    values, _ = sample(rewards, probs, 100_000)
    plan = solved(RewardPlan(0.3).add(values))
    beta = exact.solve_coeff(0.3)
    step = 1e-4
    kls = [exact.optimum(beta * math.exp(sign * step)).kl for sign in (-1, 1)]
    # A tenth: the sampling error of 100,000 samples is some 1 %.
    assert plan.slope == pytest.approx((kls[0] - kls[1]) / (2 * step) / 0.3, rel=0.1)


def test_pairs_are_reweighted_with_the_skewness_of_all_rewards():
    chance, target = 0.25, 0.5
    rewards = (torch.rand(6000, generator=seeded(4)) < chance).double()
    pairs = torch.arange(6000) // 2
    plan = solved(RewardPlan(target).add(rewards, groups=pairs.double()))
    exact = coeff_for_budget(torch.tensor([[1.0, 0.0, 0.0, 0.0]]), target)
    # The differences within pairs are symmetric. Reweighted themselves, they would give 0.40, where
    # 0.48 is exact: 10 standard errors below.
    assert plan.standard_error < 0.02
    assert abs(math.log(plan.coeff / exact)) < 4 * plan.standard_error


@pytest.mark.parametrize("spread", [0.5, 2.0])
def test_pooled_prompts_give_too_high_a_coefficient_and_groups_do_not(spread):
    rewards, probs, exact = problem(200, spread)
    values, groups = sample(rewards, probs, 4)
    right = exact.solve_coeff(0.2)
    pooled = solved(RewardPlan(0.2).add(values))
    small = solved(RewardPlan(0.2).add(values, groups=groups))
    within = (probs * (rewards - (probs * rewards).sum(1, keepdim=True)).square()).sum(1).mean()
    means = (probs * rewards).sum(1)
    ratio = (1 + means.var() / within).sqrt().item()
    # The ratio of standard deviations, to a tenth: the law is exact for normal rewards.
    assert pooled.coeff / right == pytest.approx(ratio, rel=0.15)
    assert small.coeff / right == pytest.approx(1, rel=0.1)


def test_what_differs_between_the_prompts_of_pairs_does_not_count():
    rewards = torch.randn(2, 2000, generator=seeded(0)) + 5 * torch.randn(2000, generator=seeded(1))
    plan = solved(RewardPlan(0.3).add(rewards.flatten(), groups=torch.arange(2000).repeat(2)))
    assert plan.coeff == pytest.approx(1 / math.sqrt(0.6), rel=4 * plan.standard_error)


def test_normal_rewards_and_a_target_that_samples_cannot_show():
    rewards = 3 + 2 * torch.randn(200, dtype=torch.float64, generator=seeded(0))
    # log 200 is 5.3: the variance decides, whose root is known to 1 / sqrt(400).
    for target in (4.0, 8.0):  # of 4 a few samples would carry the weight
        plan = solved(RewardPlan(target).add(rewards))
        assert plan.coeff == pytest.approx(2 / math.sqrt(2 * target), rel=4 / math.sqrt(400))
        assert plan.slope == 2
        assert plan.standard_error == pytest.approx(1 / math.sqrt(400), rel=0.3)


@pytest.mark.parametrize("target", [0.1, 0.4])
def test_a_policy_that_has_moved_is_weighted_back(target):
    rewards, probs, exact = problem(1)
    moved = (probs.log() + rewards / 2).softmax(1)
    drawn = torch.multinomial(moved, 4000, replacement=True, generator=seeded(0))[0]
    ratios = (moved / probs).log()[0, drawn]
    plan = solved(RewardPlan(target).add(rewards[0, drawn], log_ratios=ratios))
    error = math.log(plan.coeff / exact.solve_coeff(target))
    assert abs(error) < 4 * plan.standard_error
    unweighted = solved(RewardPlan(target).add(rewards[0, drawn]))
    assert abs(math.log(unweighted.coeff / exact.solve_coeff(target))) > abs(error)


def test_a_policy_that_has_moved_too_far_makes_no_plan():
    plan = RewardPlan(0.3).add(torch.randn(100), log_ratios=10 * torch.arange(100.0))
    assert plan.solve() is None
    assert re.match(r"1\.0 of 100 samples are effective after the policy's own drift", plan.reason)


def test_units_and_shifts():
    values, groups = sample(*problem(20)[:2], 32)
    plan = solved(RewardPlan(0.3).add(values, groups=groups))
    other = solved(RewardPlan(0.3).add(1000 * values + groups, groups=groups))
    assert other.coeff == pytest.approx(1000 * plan.coeff, rel=1e-7)
    twice = solved(RewardPlan(0.15).add(values, groups=groups, lengths=0 * values + 2))
    assert twice.coeff == pytest.approx(plan.coeff, rel=1e-8)


def test_any_split_between_workers_gives_the_same_plan():
    values, groups = sample(*problem(20)[:2], 32)
    whole = solved(RewardPlan(0.3).add(values, groups=groups))
    parts = [
        RewardPlan(0.3).add(values[part], groups=groups[part])
        for part in (slice(0, 100), slice(100, None))
    ]
    merged = solved(parts[1].merge(parts[0]))
    assert merged.coeff == pytest.approx(whole.coeff, rel=1e-9)
    with pytest.raises(ValueError, match="must be another RewardPlan, got this object"):
        parts[0].merge(parts[0])
    with pytest.raises(TypeError, match="must be a RewardPlan, got Tensor"):
        parts[0].merge(values)


def test_a_merge_renumbers_new_groups_only_and_leaves_the_other_as_it_was():
    plan, other = RewardPlan(0.3), RewardPlan(0.3)
    plan.new_groups(3)
    other.add(torch.randn(2), groups=torch.tensor([0.0, other.new_groups(1)]))
    plan.merge(other)
    assert plan.samples[:, 3].tolist() == [0, -4]
    assert other.samples[:, 3].tolist() == [0, -1]


def test_rewards_without_a_preference_make_no_plan():
    plan = RewardPlan(0.3).add(torch.ones(300))
    assert plan.solve() is None
    assert plan.reason.startswith("the rewards of all 300 samples are equal within their groups")
    assert plan.cautious_coeff == 0
    plan.add(torch.ones(70_000))
    with pytest.raises(RuntimeError, match=r"^70300 samples gave no plan: the rewards of all"):
        plan.solve()


def test_a_target_that_cannot_be_spent_is_refused():
    rewards = torch.tensor([1.0, 1.0, 0.0, 0.0] * 250)
    message = (
        r"^`target` asks for 0.8 nats per sample, but a policy that always has the highest reward "
        r"is only 0.6931 nats from the reference"
    )
    with pytest.raises(RuntimeError, match=message):
        RewardPlan(0.8).add(rewards).solve()


def test_a_target_that_samples_seem_not_to_allow_waits_for_more_of_them():
    # A fair coin allows log 2 = 0.69 nats; these 64 throws seem to allow 0.47.
    plan = RewardPlan(0.5).add(torch.tensor([1.0] * 40 + [0.0] * 24))
    assert plan.solve() is None
    assert plan.reason.startswith("the target of 0.5 nats per sample is near the 0.47 nats (")
    found = plan.add(torch.tensor([1.0, 0.0] * 400)).solve()
    assert found is not None
    assert 0.29 < found.coeff < 0.39  # exact: 0.335


def test_pooled_samples_keep_no_graph():
    plan = RewardPlan(0.1).add(torch.ones(2), log_ratios=torch.zeros(2, requires_grad=True))
    assert not plan.samples.requires_grad


def test_too_few_samples_wait_for_more():
    plan = RewardPlan(0.1).add(torch.tensor([0.0, 1.0] * 7 + [0.0]))
    assert plan.solve() is None
    assert plan.reason.startswith("15.0 of 15 samples are effective")
    assert plan.add(torch.ones(1)).solve() is not None
    skewed = RewardPlan(0.01).add(torch.tensor([0.0] * 40 + [1.0]))
    assert skewed.solve() is None
    assert skewed.reason.startswith("its standard error would be")


def test_the_cautious_coefficient_spends_at_most_a_quarter():
    for seed in range(5):
        values, _ = sample(*problem(1)[:2], 60, seed)
        plan = RewardPlan(0.4).add(values)
        assert coeff_for_budget(values, 0.4 / 4) <= plan.cautious_coeff


@pytest.mark.parametrize("column", ["log_ratios", "lengths", "groups"])
def test_other_shapes_are_refused(column):
    with pytest.raises(ValueError, match=rf"and `{column}` must both .*\(3,\) and \(4,\)"):
        RewardPlan(0.3).add(torch.ones(3), **{column: torch.ones(4)})
    with pytest.raises(ValueError, match="must both have the shape"):
        RewardPlan(0.3).add(torch.ones(3, 1))
    assert not len(RewardPlan(0.3).add(torch.ones(0), **{column: torch.ones(0)}).samples)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_numbers_that_are_not_finite_are_refused(bad):
    plan = RewardPlan(0.3)
    good, numbers = torch.ones(3), torch.tensor([0.0, bad, 1.0])
    for name in ("rewards", "log_ratios", "lengths"):
        with pytest.raises(ValueError, match=rf"`{name}` must be finite, got 1 NaN .* of 3"):
            plan.add(**{"rewards": good, name: numbers})
    assert not len(plan.samples)


# Controllers.


@planning
def test_a_controller_plans_and_then_follows_its_rule(make):
    values, groups = sample(*problem(20)[:2], 32)
    controller = make(0.3)
    assert controller.planning
    assert controller.coeff == 0
    with pytest.raises(RuntimeError, match="the coefficient is not planned yet"):
        controller.update(0.2, 10)
    plan = solved(RewardPlan(0.3).add(values, groups=groups))
    assert controller.observe_rewards(values, groups=groups) == plan.coeff
    assert not controller.planning
    # Rewards that come later change nothing; the KL does.
    assert controller.observe_rewards(100 * values) == plan.coeff
    assert controller.update(0.4, 10) > plan.coeff


@planning
def test_an_interrupted_run_plans_alike(make):
    values, _ = sample(*problem(1)[:2], 200)
    whole, first, second = make(0.3), make(0.3), make(0.3)
    expected = whole.observe_rewards(values)
    first.observe_rewards(values[:12])
    assert first.planning
    assert first.coeff.item() == first.plan.cautious_coeff > 0
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    assert second.coeff == first.coeff
    assert second.observe_rewards(values[12:]) == pytest.approx(expected, rel=1e-9)
    third = make(0.3)
    third.load_state_dict(second.state_dict())
    assert not third.planning
    assert third.update(0.7, 5) == second.update(0.7, 5)
    assert copy.deepcopy(third).coeff == third.coeff


def test_a_controller_that_cannot_plan_says_so_once():
    controller = PIDKLController("plan", 0.3)
    with pytest.warns(UserWarning, match="no coefficient could be planned from 300 rewards so far"):
        controller.observe_rewards(torch.ones(300))
    controller.observe_rewards(torch.ones(300))
    assert controller.coeff == 0


def test_a_plan_outside_the_bounds_is_refused():
    controller = PIDKLController("plan", 0.1)
    with pytest.raises(ValueError, match="the planned coefficient must lie within .*: move"):
        controller.observe_rewards(torch.tensor([0.0, 1000.0] * 50))


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_rewards_at_which_a_plan_was_interrupted_are_not_counted(error):
    plan = (controller := PIDKLController("plan", 0.1)).plan
    assert plan is not None
    with mock.patch.object(plan, "solve", side_effect=error), pytest.raises(error):
        controller.observe_rewards(torch.randn(100))
    assert not len(plan.samples)


def test_with_a_number_rewards_change_nothing():
    controller = PIDKLController(0.2, 0.3)
    assert controller.observe_rewards(torch.randn(100)) == 0.2
    assert controller.plan is None
    assert not ConstantKLController(0.1).planning


def test_an_initial_coefficient_of_another_name_is_refused():
    with pytest.raises(TypeError, match="`init_coeff` must be a number, got str"):
        PIDKLController("auto", 0.3)  # type: ignore[arg-type]


# The rule that holds the target after the plan.


def simulate(
    controller,
    respond,
    n: int,
    beta: Callable[[int], float],
    noise: float = 0.0,
    slope: float = 1.6,
):
    """KL / target of a policy that answers within `respond` updates; `beta` holds the target."""
    kl, kls, generator = 0.0, [], seeded(0)
    for step in range(n):
        wanted = (beta(step) / controller.coeff.item()) ** slope
        kl += (wanted - kl) / respond
        seen = kl * (1 + noise * torch.randn((), generator=generator).item())
        controller.update(seen * controller.target, 500, standard_error=noise * controller.target)
        kls.append(kl)
    return kls


@pytest.mark.parametrize("respond", [2.0, 4.0])
@pytest.mark.parametrize("off", [0.8, 1.0, 1.25])
def test_it_holds_the_target_when_the_plan_is_a_quarter_off(respond, off):
    controller = PlannedKLController(0.5, init_coeff=off)
    kls = simulate(controller, respond, 120, lambda step: 1.0, noise=0.09)
    assert max(kls) < 1.6
    assert all(abs(kl - 1) < 0.2 for kl in kls[40:])
    assert sum(kls[60:]) / 60 == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize("respond", [1.0, 4.0, 8.0])
def test_it_comes_down_from_a_plan_that_is_twice_too_high(respond):
    controller = PlannedKLController(0.5, init_coeff=2.0)
    kls = simulate(controller, respond, 200, lambda step: 1.0, noise=0.09)
    assert sum(kls[140:]) / 60 == pytest.approx(1, abs=0.03)


def test_a_slow_policy_is_let_go_and_does_not_overshoot():
    slow, held = PlannedKLController(0.5, init_coeff=1.0), ConstantKLController(1.0)
    held.target = 0.5
    kls = [simulate(each, 15.0, 40, lambda step: 1.0) for each in (slow, held)]
    assert kls[0][10] > 1.05 * kls[1][10]
    assert max(kls[0]) < 1.2


def test_a_fast_policy_stays_fast_when_its_kl_falls_later():
    controller = PlannedKLController(0.5, init_coeff=1.0)
    simulate(controller, 2.0, 30, lambda step: 1.0)
    assert controller.arrived
    assert controller.rise == 0
    for kl in (0.3, *[0.1] * 12):  # below a quarter of the target, also on average, without a jump
        controller.update(kl, 9)
    assert controller.rise == 0


def test_it_follows_a_need_that_falls():
    controller = PlannedKLController(0.5, init_coeff=1.0)
    kls = simulate(controller, 3.0, 300, lambda step: math.exp(-0.004 * step))
    # Without a drift it would lag by 0.004 / 0.12 in log(coeff), 5 % in the KL.
    assert sum(kls[200:]) / 100 == pytest.approx(1, abs=0.015)


def test_its_state_goes_on_alike():
    first, second = PlannedKLController(0.5, init_coeff=1.0), PlannedKLController(0.5)
    simulate(first, 3.0, 30, lambda step: 1.0)
    plan = {"_extra_state": torch.zeros(0, 4), "made": torch.ones(()), "n_groups": torch.zeros(())}
    state = {f"plan.{name}": value for name, value in plan.items()}
    second.load_state_dict(first.state_dict() | state)
    for kl in (0.1, 0.8, 0.5):
        assert first.update(kl, 9) == second.update(kl, 9)
    assert_close(first.needed, second.needed, rtol=0, atol=0)


def test_extreme_measurements_leave_it_finite():
    controller = PlannedKLController(0.5, init_coeff=1.0)
    for kl in (1e300, -1e300, 0.0) * 300:
        assert 0 < controller.update(kl, 1) < math.inf


def test_a_noisy_mean_moves_it_less():
    moves = []
    for error in (0.0, 0.5):
        controller = PlannedKLController(0.5, init_coeff=1.0)
        simulate(controller, 2.0, 40, lambda step: 1.0)
        before = controller.coeff.item()
        moves.append(controller.update(0.8, 9, standard_error=error) - before)
    assert 0 < 5 * moves[1] < moves[0]
