"""exact.py against brute force in Python floats and the known values of the digit language."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from torchrl_kl.envs import DigitLanguage
from torchrl_kl.exact import Enumeration, exact_kl
from torchrl_kl.language import GPT

V, R = 3, 3
PROMPTS = torch.tensor([[0, 2], [1, 1]])
RESPONSES = list(itertools.product(range(V), repeat=R))


class Table:
    """A model with a random distribution for each context, in plain Python."""

    def __init__(self, seed, zeros=0.0):
        generator = torch.Generator().manual_seed(seed)
        self.rows = {}
        for prompt in PROMPTS.tolist():
            for length in range(R):
                for prefix in itertools.product(range(V), repeat=length):
                    weights = torch.rand(V, generator=generator, dtype=torch.float64) ** 3 + 1e-3
                    drop = torch.rand(V, generator=generator) < zeros
                    drop[torch.randint(V, (1,), generator=generator)] = False
                    weights[drop] = 0
                    self.rows[(*prompt, *prefix)] = (weights / weights.sum()).tolist()

    def __call__(self, contexts):
        rows = [self.rows[tuple(context)] for context in contexts.tolist()]
        return torch.tensor(rows, dtype=torch.float64).log()

    def distribution(self, prompt):
        """Probability of each response, in the order of RESPONSES."""
        return [math.prod(self.rows[(*prompt, *y[:t])][y[t]] for t in range(R)) for y in RESPONSES]


def reward_fn(texts):
    """Depends on the prompt and on every token; no two responses are equal."""
    weights = torch.tensor([0.3, -0.2, 1.1, -0.47, 0.23], dtype=torch.float64)
    return (texts * weights).sum(-1).cos() + texts[:, 3] * texts[:, 4] / 4


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


def enumeration(reference, reward=reward_fn, **kwargs):
    return Enumeration(reference, reward, PROMPTS, R, **kwargs)


def uniform(size):
    return lambda contexts: torch.zeros(len(contexts), size)


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


# --- the language of digits ----------------------------------------------------------------------

LANGUAGE = DigitLanguage()


def true_language(contexts):
    return LANGUAGE.next_token_probs(contexts).log()


def all_prompts():
    prompts = torch.cartesian_prod(*[torch.arange(10)] * 4)
    return torch.cat([prompts, torch.full((10**4, 1), LANGUAGE.separator)], 1)


@pytest.fixture(scope="module")
def first_digits():
    """Responses of one digit: the reward, and so the KL of the optimum, depend only on it."""
    return Enumeration(true_language, DigitLanguage(response_length=1).preference, all_prompts(), 1)


@pytest.mark.parametrize(
    ("coeff", "objective", "reward", "kl"),
    [
        (1.0, 0.43457, 0.54924, 0.11467),
        (0.5, 0.54682, 0.75936, 0.42508),
        (0.2, 0.76589, 0.98387, 1.08988),
        (0.1, 0.88133, 0.99989, 1.18559),
        (0.0, 1.0, 1.0, 1.18681),
    ],
)
def test_optimum_of_the_language_over_all_prompts(first_digits, coeff, objective, reward, kl):
    optimum = first_digits.optimum(coeff)
    got = (optimum.objective, optimum.reward, optimum.kl)
    assert got == pytest.approx((objective, reward, kl), abs=6e-6)  # five decimals, rounded


def test_coefficient_of_the_language_for_half_a_nat(first_digits):
    assert first_digits.solve_coeff(0.5) == pytest.approx(0.452, abs=6e-4)


def test_optimum_of_whole_responses_changes_the_first_digit_only():
    prompts = all_prompts()[[286, 5715, 1233]]
    whole = Enumeration(true_language, LANGUAGE.preference, prompts, 4)
    short = Enumeration(true_language, DigitLanguage(response_length=1).preference, prompts, 1)
    assert whole.log_probs.shape == (3, 11**4)
    optimum, first = whole.optimum(0.3), short.optimum(0.3)
    assert optimum.reward == pytest.approx(first.reward, abs=1e-12)
    expected = torch.tensor([first.kl, 0, 0, 0], dtype=torch.float64)
    assert_close(optimum.kl_per_position, expected, atol=1e-12, rtol=0)
    assert_close(optimum.token_probs[:, :1], first.token_probs)
    # Prompt 0 2 8 6: tokens 1 3 7 9 are as likely, and 7 is preferred.
    right = math.exp(1 / 0.3) / (3 + math.exp(1 / 0.3))
    probs = optimum.token_probs[0, 0, [1, 3, 7, 9]]
    wrong = (1 - right) / 3
    assert_close(probs, torch.tensor([wrong, wrong, right, wrong], dtype=torch.float64))


def test_exact_kl_gives_the_entropies_of_the_language_over_all_prompts():
    # KL(p || uniform) = log 11 - H(p), on the 64 contexts of 1331 that the language can write.
    entropy = math.log(11) - exact_kl(true_language, uniform(11), all_prompts(), 4)
    expected = torch.tensor([1.18681, 1.20969, 1.17576, 1.10696], dtype=torch.float64)
    assert_close(entropy, expected, atol=6e-6, rtol=0)


def test_log_probs_of_a_gpt_equal_those_of_one_pass_over_whole_texts():
    torch.manual_seed(0)
    gpt = GPT(V, 5, n_layer=1, n_head=1, n_embd=8).eval()
    # With the initial weights all tokens are nearly equal, and their order would not be tested.
    with torch.no_grad():
        for parameter in gpt.parameters():
            parameter += torch.randn_like(parameter) / 2
    responses = enumeration(lambda tokens: gpt(tokens)[:, -1])
    texts = torch.tensor([[*x, *y] for x in PROMPTS.tolist() for y in RESPONSES])
    with torch.no_grad():
        log_probs = gpt(texts[:, :-1])[:, 1:].log_softmax(-1)
    expected = log_probs.gather(-1, texts[:, 2:, None]).sum((1, 2)).view(2, -1)
    assert expected.std() > 0.1
    assert_close(responses.log_probs.float(), expected, atol=1e-5, rtol=1e-5)  # float32 forward
    assert_close(responses.rewards.flatten(), reward_fn(texts))


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


def test_exact_kl_equals_the_kl_of_the_enumeration():
    reference, policy = Spy(Table(7)), Spy(Table(8, zeros=0.4))
    kl = exact_kl(policy, reference, PROMPTS, R, chunk_size=2)
    assert_close(kl, enumeration(Table(7)).values(Table(8, zeros=0.4), 1.0).kl_per_position)
    assert max(size for size, _ in policy.calls + reference.calls) == 2
    assert [policy.grad, reference.grad] == [False, False]


def test_exact_kl_visits_only_what_the_policy_can_write():
    def copy_last_or_next(contexts):
        last = contexts[:, -1:]
        logits = torch.full((len(contexts), 1000), -math.inf)
        return logits.scatter(1, torch.cat([last, (last + 1) % 1000], 1), 0.0)

    policy = Spy(copy_last_or_next)
    kl = exact_kl(policy, uniform(1000), torch.tensor([[5]]), 6, max_texts=32)
    assert_close(kl, torch.full((6,), math.log(500), dtype=torch.float64))
    assert policy.calls == [(2**t, t + 1) for t in range(6)]


# --- errors --------------------------------------------------------------------------------------


def test_too_many_texts_are_refused_after_one_call():
    reference = Spy(uniform(11))
    with pytest.raises(ValueError, match=r"2 \* 11\*\*9999 texts.*use fewer prompts"):
        Enumeration(reference, reward_fn, PROMPTS, 9999)  # a count of too many digits to print
    assert reference.calls == [(1, 2)]
    with pytest.raises(ValueError, match=r"2 \* 3\*\*3 texts, `max_texts` allows 53"):
        enumeration(Table(0), max_texts=53)
    assert enumeration(Table(0), max_texts=54).rewards.numel() == 54
    with pytest.raises(ValueError, match=r"can write 18 contexts up to position 2 of 3.*allows 17"):
        exact_kl(Table(0), Table(1), PROMPTS, R, max_texts=17)


@pytest.mark.parametrize(
    ("prompts", "got"),
    [
        (PROMPTS[0], r"\(2,\) of torch.int64"),
        (PROMPTS.int(), r"\(2, 2\) of torch.int32"),
        (PROMPTS[:0], r"\(0, 2\) of torch.int64"),
    ],
)
def test_wrong_prompts(prompts, got):
    with pytest.raises(ValueError, match="`prompts` must be token ids .* got " + got):
        Enumeration(uniform(V), reward_fn, prompts, R)
    with pytest.raises(ValueError, match="`prompts` must be token ids .* got " + got):
        exact_kl(uniform(V), uniform(V), prompts, R)


def test_wrong_sizes():
    with pytest.raises(ValueError, match="`response_length` must be at least 1, got 0"):
        Enumeration(uniform(V), reward_fn, PROMPTS, 0)
    with pytest.raises(ValueError, match="`chunk_size` must be at least 1, got 0"):
        enumeration(uniform(V), chunk_size=0)


@pytest.mark.parametrize("coeff", [-0.1, math.nan, math.inf])
def test_wrong_coeff(coeff):
    with pytest.raises(ValueError, match=f"`coeff` must be finite and at least 0, got {coeff}"):
        enumeration(uniform(V)).values(uniform(V), coeff)


def test_wrong_logits():
    responses = enumeration(uniform(V))
    with pytest.raises(ValueError, match=r"`policy` must map contexts \(2, 2\) to logits \(2, 3\)"):
        responses.values(uniform(V + 1), 1.0)
    with pytest.raises(ValueError, match=r"`reference` must map .* got \(1, 2, 3\): take the last"):
        enumeration(lambda contexts: torch.zeros(*contexts.shape, V))
    with pytest.raises(ValueError, match=r"`reference` must map .* to logits \(2, 3\)"):
        exact_kl(uniform(V), uniform(V + 1), PROMPTS, R)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_inf_logits(value):
    def broken(contexts):
        return torch.tensor([0.0, value, 0.0]).expand(len(contexts), V)

    with pytest.raises(ValueError, match="`reference` must return logits below inf"):
        enumeration(broken)
    with pytest.raises(ValueError, match="`policy` must return logits below inf"):
        exact_kl(broken, uniform(V), PROMPTS, R)


def test_a_dead_end_that_can_be_reached():
    def stops_after_1(contexts):
        return torch.zeros(len(contexts), V).masked_fill(contexts[:, -1:] == 1, -math.inf)

    prompts = torch.tensor([[0]])
    with pytest.raises(ValueError, match="`policy` must allow some token after every text"):
        Enumeration(uniform(V), lambda texts: texts[:, 1], prompts, 2).values(stops_after_1, 1.0)
    with pytest.raises(ValueError, match=r"`reference` must allow .* after 1 of them"):
        Enumeration(stops_after_1, lambda texts: texts[:, 1], prompts, 2)
    with pytest.raises(ValueError, match=r"`policy` must allow .* after 1 of them"):
        exact_kl(stops_after_1, uniform(V), prompts, 2)


def test_wrong_rewards():
    with pytest.raises(ValueError, match=r"one reward per text, shape \(54,\), got \(54, 1\)"):
        enumeration(uniform(V), lambda texts: reward_fn(texts)[:, None])
    with pytest.raises(ValueError, match="finite rewards, got 18 infinite or NaN ones on 54"):
        enumeration(uniform(V), lambda texts: 0.0 * (1 / (texts[:, 2] != 1)))
