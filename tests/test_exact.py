"""exact.py against brute force in Python floats."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from tests.tables import PROMPTS, RESPONSES, R, Table, V, enumeration, reward_fn, uniform
from torchrl_kl.exact import exact_kl


def rewards_of(prompt):
    return [reward_fn(torch.tensor([[*prompt, *y]])).item() for y in RESPONSES]


def tilted(probs, rewards, coeff):
    weights = [p * math.exp(r / coeff) for p, r in zip(probs, rewards, strict=True)]
    return [w / math.fsum(weights) for w in weights]


def brute_kl(p, q):
    return math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def marginal(probs, length):
    """Probability of each beginning of `length` tokens."""
    sums = dict.fromkeys(itertools.product(range(V), repeat=length), 0.0)
    for y, p in zip(RESPONSES, probs, strict=True):
        sums[y[:length]] += p
    return sums


def over_prompts(fn):
    return math.fsum(fn(tuple(prompt)) for prompt in PROMPTS.tolist()) / len(PROMPTS)


def brute_values(distribution, reference):
    """E[reward] and the KL per position: differences of the KLs of growing prefixes."""

    def prefix_kl(length):
        return over_prompts(
            lambda x: brute_kl(
                marginal(distribution(x), length).values(),
                marginal(reference.distribution(x), length).values(),
            )
        )

    reward = over_prompts(
        lambda x: math.fsum(p * r for p, r in zip(distribution(x), rewards_of(x), strict=True))
    )
    kls = [prefix_kl(length) for length in range(R + 1)]
    return reward, torch.tensor(kls, dtype=torch.float64).diff()


def brute_token_probs(distribution):
    probs = torch.zeros(len(PROMPTS), R, V, dtype=torch.float64)
    for i, prompt in enumerate(PROMPTS.tolist()):
        for y, p in zip(RESPONSES, distribution(tuple(prompt)), strict=True):
            for t, token in enumerate(y):
                probs[i, t, token] += p
    return probs


# --- against brute force -------------------------------------------------------------------------
# Python floats and float64 tensors: sums of 27 terms of order 1, far inside assert_close's 1e-7.


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("zeros", [0.0, 0.4])
def test_policy_values_equal_brute_force(seed, zeros):
    reference, policy = Table(seed), Table(seed + 100, zeros)
    values = enumeration(reference).values(policy, 0.7)
    reward, kl_per_position = brute_values(policy.distribution, reference)
    assert values.reward == pytest.approx(reward, abs=1e-12)
    assert_close(values.kl_per_position, kl_per_position)
    assert values.kl == pytest.approx(kl_per_position.sum().item(), abs=1e-12)
    assert values.objective == pytest.approx(reward - 0.7 * values.kl, abs=1e-12)
    assert_close(values.token_probs, brute_token_probs(policy.distribution))
    expected, _ = brute_values(reference.distribution, reference)
    assert values.reference_reward == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("coeff", [0.05, 0.7, 30.0])
@pytest.mark.parametrize("zeros", [0.0, 0.4])
def test_optimum_equals_brute_force(coeff, zeros):
    reference = Table(1, zeros)
    optimum = enumeration(reference).optimum(coeff)

    def best(prompt):
        return tilted(reference.distribution(prompt), rewards_of(prompt), coeff)

    def log_partition(prompt):
        terms = zip(reference.distribution(prompt), rewards_of(prompt), strict=True)
        return coeff * math.log(math.fsum(p * math.exp(r / coeff) for p, r in terms))

    reward, kl_per_position = brute_values(best, reference)
    assert optimum.reward == pytest.approx(reward, abs=1e-12)
    assert_close(optimum.kl_per_position, kl_per_position)
    assert_close(optimum.token_probs, brute_token_probs(best))
    assert optimum.objective == pytest.approx(over_prompts(log_partition), abs=1e-12)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), coeff=st.floats(0.05, 20), zeros=st.sampled_from([0.0, 0.3]))
def test_regret_is_the_coefficient_times_the_kl_to_the_optimum(seed, coeff, zeros):
    reference, policy = Table(seed), Table(seed + 1, zeros)
    values = enumeration(reference).values(policy, coeff)
    kl_to_optimum = over_prompts(
        lambda x: brute_kl(
            policy.distribution(x), tilted(reference.distribution(x), rewards_of(x), coeff)
        )
    )
    assert values.regret == pytest.approx(coeff * kl_to_optimum, rel=1e-9, abs=1e-12)


def test_gain_is_0_at_the_reference_and_1_at_the_optimum():
    reference, best = Table(2), Table(2)
    for prompt in map(tuple, PROMPTS.tolist()):
        probs = tilted(reference.distribution(prompt), rewards_of(prompt), 0.5)
        for length in range(R):
            for text, p in marginal(probs, length + 1).items():
                best.rows[(*prompt, *text[:length])][text[length]] = p  # normalized by Enumeration
    responses = enumeration(reference)
    at_reference, at_optimum = responses.values(reference, 0.5), responses.values(best, 0.5)
    assert at_reference.kl == 0
    assert at_reference.fraction_of_gain == 0
    assert at_optimum.regret == pytest.approx(0, abs=1e-12)
    assert at_optimum.fraction_of_gain == pytest.approx(1, abs=1e-12)
    values = responses.values(Table(102), 0.5)
    expected = 1 - values.regret / (values.optimum.objective - values.reference_reward)
    assert values.fraction_of_gain == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("constant", "coeff"), [(-1e6 / 3, 0.0), (0.1, 1e10)])
def test_no_fraction_where_nothing_can_be_gained(constant, coeff):
    # J* - J_ref is rounding error of the reward or of coeff * kl, positive for some of the seeds.
    def constant_reward(texts):
        return torch.full((len(texts),), constant, dtype=torch.float64)

    for seed in range(30):
        values = enumeration(Table(seed), constant_reward).values(Table(seed + 1), coeff)
        assert math.isnan(values.fraction_of_gain)
        assert values.optimum.kl == pytest.approx(0, abs=1e-12)


# --- limits and zeros ----------------------------------------------------------------------------


@pytest.mark.parametrize("coeff", [0.0, 1e-310, 1e-6])
def test_optimum_for_coeff_0_is_the_reference_on_its_best_texts(coeff):
    reference = Table(3, zeros=0.3)

    def second_token_is_0(texts):
        return 5.0 - 2.0 * (texts[:, 3] != 0)

    def best(prompt):
        kept = [
            p * (y[1] == 0) for y, p in zip(RESPONSES, reference.distribution(prompt), strict=True)
        ]
        return [p / math.fsum(kept) for p in kept]

    optimum = enumeration(reference, second_token_is_0).optimum(coeff)
    _, kl_per_position = brute_values(best, reference)
    assert optimum.reward == pytest.approx(5.0, abs=1e-12)
    assert_close(optimum.kl_per_position, kl_per_position)
    assert_close(optimum.token_probs, brute_token_probs(best))


def test_texts_impossible_for_the_reference_are_impossible_for_the_optimum():
    # Token 1 has the best reward by far, and the reference never writes it first.
    def never_1_first(contexts):
        logits = torch.zeros(len(contexts), V)
        if contexts.shape[1] == PROMPTS.shape[1]:
            logits[:, 1] = -math.inf
        return logits

    def reward(texts):
        return torch.tensor([0.0, 1000.0, 1.0])[texts[:, 2]]

    responses = enumeration(never_1_first, reward)
    for coeff in (0.0, 1e-310, 0.5):
        optimum = responses.optimum(coeff)
        right = 1 / (1 + math.exp(-1 / coeff if coeff > 0 else -math.inf))
        assert optimum.reward == pytest.approx(right, abs=1e-12)
        kl = math.log(2) + right * math.log(right) + (1 - right) * math.log(max(1 - right, 1e-99))
        expected = torch.tensor([kl, 0.0, 0.0], dtype=torch.float64)
        assert_close(optimum.kl_per_position, expected)


@pytest.mark.parametrize("coeff", [0.0, 0.5])
def test_kl_is_inf_and_never_nan_where_only_the_policy_has_mass(coeff):
    def impossible_2_second(contexts):
        logits = torch.zeros(len(contexts), V)
        if contexts.shape[1] == PROMPTS.shape[1] + 1:
            logits[:, 2] = -math.inf
        # Not a distribution, in contexts that are never reached.
        if contexts.shape[1] == PROMPTS.shape[1] + 2:
            logits[contexts[:, 3] == 2] = -math.inf
        return logits

    policy = Table(4)
    values = enumeration(impossible_2_second).values(policy, coeff)
    first = over_prompts(
        lambda x: brute_kl(marginal(policy.distribution(x), 1).values(), [1 / V] * V)
    )
    expected = torch.tensor([first, math.inf, math.inf], dtype=torch.float64)
    assert_close(values.kl_per_position, expected)
    reward, _ = brute_values(policy.distribution, Table(0))
    assert values.reward == pytest.approx(reward, abs=1e-12)
    assert values.kl == values.regret == math.inf
    assert values.objective == values.fraction_of_gain == -math.inf
    assert math.isfinite(values.optimum.objective)
    assert_close(exact_kl(policy, impossible_2_second, PROMPTS, R), expected)


# --- the coefficient for a budget ----------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), log_coeff=st.floats(-2, 3))
def test_solve_coeff_inverts_the_kl_of_the_optimum(seed, log_coeff):
    reference, coeff = Table(seed), math.exp(log_coeff)
    target = over_prompts(
        lambda x: brute_kl(
            tilted(reference.distribution(x), rewards_of(x), coeff), reference.distribution(x)
        )
    )
    # KL falls as coeff^-2: 1e-15 of rounding on a KL of 1e-4 or more is 1e-11, relatively.
    assert enumeration(reference).solve_coeff(target) == pytest.approx(coeff, rel=1e-9)


def test_solve_coeff_with_an_impossible_text_far_below_the_others():
    # The bracket must come from the texts that the reference can write.
    def never_0(contexts):
        return torch.tensor([-math.inf, 0.0, 0.0]).expand(len(contexts), V)

    responses = enumeration(never_0, lambda texts: torch.tensor([-1e30, 0, 1])[texts[:, 2]])
    assert responses.optimum(responses.solve_coeff(0.3)).kl == pytest.approx(0.3, abs=1e-9)


@pytest.mark.parametrize("target", [0.0, -0.1, math.nan, math.log(3), 2.0, math.inf])
def test_solve_coeff_refuses_what_no_coefficient_has(target):
    responses = enumeration(uniform(V), lambda texts: (texts[:, 2] == 1).float())
    with pytest.raises(ValueError, match=r"`target` must be above 0 and below 1\.09861 nats"):
        responses.solve_coeff(target)
