"""exact.py against brute force in Python floats, on the language of digits, and its errors."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from tests.tables import PROMPTS, RESPONSES, R, Table, V, enumeration, reward_fn, uniform
from torchrl_kl.exact import Enumeration, enumerate_kl


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


@settings(max_examples=6)
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

    for seed in range(10):
        values = enumeration(Table(seed), constant_reward).values(Table(seed + 1), coeff)
        assert math.isnan(values.fraction_of_gain)
        assert values.optimum.kl == pytest.approx(0, abs=1e-12)


# --- limits and zeros ----------------------------------------------------------------------------


@pytest.mark.parametrize("coeff", [0.0, 1e-310, 1e-6])
def test_optimum_for_coeff_0_is_the_reference_on_its_best_texts(coeff):
    reference = Table(3, zeros=0.3)
    probs = {
        (*x, *y): p
        for x in map(tuple, PROMPTS.tolist())
        for y, p in zip(RESPONSES, reference.distribution(x), strict=True)
    }

    def second_token_is_0(texts):
        impossible = torch.tensor([probs[tuple(text)] == 0 for text in texts.tolist()])
        return 5.0 - 2.0 * (texts[:, 3] != 0) + 1000.0 * impossible

    def best(prompt):
        weights = [probs[(*prompt, *y)] * (y[1] == 0) for y in RESPONSES]
        return [p / math.fsum(weights) for p in weights]

    optimum = enumeration(reference, second_token_is_0).optimum(coeff)
    _, kl_per_position = brute_values(best, reference)
    assert optimum.reward == pytest.approx(5.0, abs=1e-12)
    assert_close(optimum.kl_per_position, kl_per_position)
    assert_close(optimum.token_probs, brute_token_probs(best))


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
    assert_close(enumerate_kl(policy, impossible_2_second, PROMPTS, R), expected)


# --- the coefficient for a budget ----------------------------------------------------------------


@settings(max_examples=5)
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


@pytest.mark.parametrize("target", [0.0, -0.1, math.nan, math.log(3), 2.0, math.inf])
def test_solve_coeff_refuses_what_no_coefficient_has(target):
    responses = enumeration(uniform(V), lambda texts: (texts[:, 2] == 1).float())
    with pytest.raises(ValueError, match=r"`target` must be above 0 and below 1\.09861 nats"):
        responses.solve_coeff(target)


# --- the walks -----------------------------------------------------------------------------------


class Spy:
    """Records the sizes and the gradient mode of the calls of a callable."""

    def __init__(self, fn):
        self.fn, self.calls, self.grad = fn, [], False

    def __call__(self, texts):
        self.calls.append(tuple(texts.shape))
        self.grad |= torch.is_grad_enabled()
        return self.fn(texts)


def test_chunks_bound_every_call_and_change_nothing():
    whole = enumeration(Table(5)).values(Table(6), 0.5)
    reference, policy, reward = Spy(Table(5)), Spy(Table(6)), Spy(reward_fn)
    values = enumeration(reference, reward, chunk_size=7).values(policy, 0.5)
    assert values.regret == whole.regret
    for spy in (reference, policy, reward):
        assert max(size for size, _ in spy.calls) == 7
        assert not spy.grad
    # Each of the 2 + 6 + 18 contexts once, and one more call for the size of the vocabulary.
    assert sum(size for size, _ in policy.calls) == 26
    assert sum(size for size, _ in reference.calls) == 27
    assert sum(size for size, _ in reward.calls) == 54


def test_enumerate_kl_equals_the_kl_of_the_enumeration():
    reference, policy = Spy(Table(7)), Spy(Table(8, zeros=0.4))
    kl = enumerate_kl(policy, reference, PROMPTS, R, chunk_size=2)
    assert_close(kl, enumeration(Table(7)).values(Table(8, zeros=0.4), 1.0).kl_per_position)
    assert max(size for size, _ in policy.calls + reference.calls) == 2
    assert [policy.grad, reference.grad] == [False, False]


def test_enumerate_kl_visits_only_what_the_policy_can_write():
    def copy_last_or_next(contexts):
        last = contexts[:, -1:]
        logits = torch.full((len(contexts), 1000), -math.inf)
        return logits.scatter(1, torch.cat([last, (last + 1) % 1000], 1), 0.0)

    policy = Spy(copy_last_or_next)
    kl = enumerate_kl(policy, uniform(1000), torch.tensor([[5]]), 6, max_texts=32)
    assert_close(kl, torch.full((6,), math.log(500), dtype=torch.float64))
    assert policy.calls == [(2**t, t + 1) for t in range(6)]


# --- errors ---------------------------------------------------------------------------------------


def test_too_many_texts_are_refused_after_one_call():
    reference = Spy(uniform(11))
    with pytest.raises(ValueError, match=r"2 \* 11\*\*9999 texts.*use fewer prompts"):
        Enumeration(reference, reward_fn, PROMPTS, 9999)  # a count of too many digits to print
    assert reference.calls == [(1, 2)]
    with pytest.raises(ValueError, match=r"2 \* 3\*\*3 texts, `max_texts` allows 53"):
        enumeration(Table(0), max_texts=53)
    assert enumeration(Table(0), max_texts=54).rewards.numel() == 54
    with pytest.raises(ValueError, match=r"can write 18 contexts up to position 2 of 3.*allows 17"):
        enumerate_kl(Table(0), Table(1), PROMPTS, R, max_texts=17)


@pytest.mark.parametrize("function", [Enumeration, enumerate_kl])
@pytest.mark.parametrize(
    ("prompts", "length", "error", "match"),
    [
        (PROMPTS.tolist(), R, TypeError, "`prompts` must be a tensor of token ids, got list"),
        (PROMPTS[0], R, ValueError, r"`prompts` must be token ids .* got \(2,\) of torch.int64"),
        (PROMPTS.int(), R, ValueError, r"must be token ids .* got \(2, 2\) of torch.int32"),
        (PROMPTS[:0], R, ValueError, r"must be token ids .* got \(0, 2\) of torch.int64"),
        (PROMPTS, 2.0, ValueError, "`response_length` must be an int of at least 1, got 2.0"),
        (PROMPTS, 0, ValueError, "`response_length` must be an int of at least 1, got 0"),
    ],
)
def test_wrong_sizes(function, prompts, length, error, match):
    second = reward_fn if function is Enumeration else uniform(V)
    with pytest.raises(error, match=match):
        function(uniform(V), second, prompts, length)


@pytest.mark.parametrize(
    ("coeff", "error", "match"),
    [
        (-0.1, ValueError, "`coeff` must be finite and at least 0, got -0.1"),
        (math.nan, ValueError, "`coeff` must be finite and at least 0, got nan"),
        (torch.ones(2), TypeError, "`coeff` must be a number, got Tensor"),
    ],
)
def test_wrong_coeff(coeff, error, match):
    with pytest.raises(error, match=match):
        enumeration(uniform(V)).values(uniform(V), coeff)


def broken(value):
    return lambda contexts: torch.tensor([0.0, value, 0.0]).expand(len(contexts), V)


@pytest.mark.parametrize(
    ("model", "error", "match"),
    [
        (lambda contexts: contexts.tolist(), TypeError, "must return a tensor, got list: of a Hug"),
        (uniform(V + 1), ValueError, r"must map contexts \(2, 2\) to logits \(2, 3\) of the next"),
        (broken(math.nan), ValueError, "must return logits below inf"),
        (broken(math.inf), ValueError, "must return logits below inf"),
    ],
)
def test_wrong_logits(model, error, match):
    with pytest.raises(error, match=f"`policy` {match}"):
        enumeration(uniform(V)).values(model, 1.0)
    with pytest.raises(error, match=f"`reference` {match}"):
        enumerate_kl(uniform(V), model, PROMPTS, R)


def test_a_dead_end_that_can_be_reached():
    def stops_after_1(contexts):
        return torch.zeros(len(contexts), V).masked_fill(contexts[:, -1:] == 1, -math.inf)

    prompts = torch.tensor([[0]])
    with pytest.raises(ValueError, match=r"`reference` must allow .* after 1 of them"):
        Enumeration(stops_after_1, lambda texts: texts[:, 1], prompts, 2)
    with pytest.raises(ValueError, match=r"`policy` must allow .* after 1 of them"):
        enumerate_kl(stops_after_1, uniform(V), prompts, 2)


@pytest.mark.parametrize(
    ("rewards", "error", "match"),
    [
        (lambda texts: [1.0] * len(texts), TypeError, "`reward_fn` must return a tensor, got list"),
        (lambda texts: texts[:, :1], ValueError, r"shape \(54,\), got \(54, 1\)"),
        (lambda texts: 1 / (texts[:, 2] != 1), ValueError, "18 infinite or NaN ones on 54"),
    ],
)
def test_wrong_rewards(rewards, error, match):
    with pytest.raises(error, match=match):
        enumeration(uniform(V), rewards)
