"""exact.py on the language of digits and on a GPT: known values, chunks, wrong input."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from tests.tables import PROMPTS, RESPONSES, R, Table, V, enumeration, reward_fn, uniform
from torchrl_kl import ExponentialKLController
from torchrl_kl.envs import DigitLanguage
from torchrl_kl.exact import Enumeration, exact_kl
from torchrl_kl.language import GPT

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


@pytest.mark.parametrize("coeff", ["1", None, True, torch.ones(2)])
def test_coeff_of_another_type(coeff):
    with pytest.raises(TypeError, match="`coeff` must be a number, got "):
        enumeration(uniform(V)).values(uniform(V), coeff)


def test_the_coefficient_of_a_controller_is_read_once():
    controller = ExponentialKLController(0.5, target=0.1)
    values = enumeration(uniform(V)).values(uniform(V), controller.coeff)
    objective = values.optimum.objective
    controller.update(1.0, 1)
    assert type(values.coeff) is float
    assert (values.coeff, values.optimum.objective) == (0.5, objective)


def test_prompts_may_be_edited_later():
    prompts = PROMPTS.clone()
    responses = Enumeration(uniform(V), reward_fn, prompts, R)
    prompts.zero_()
    kinds = []

    def policy(contexts):
        kinds.extend(contexts[:, : PROMPTS.shape[1]].unique(dim=0).tolist())
        return uniform(V)(contexts)

    responses.values(policy, 1.0)
    assert sorted({tuple(kind) for kind in kinds}) == sorted({tuple(p) for p in PROMPTS.tolist()})


@pytest.mark.parametrize(("function", "second"), [(Enumeration, reward_fn), (exact_kl, uniform(V))])
def test_what_is_not_a_tensor(function, second):
    with pytest.raises(TypeError, match="`prompts` must be a tensor of token ids, got list"):
        function(uniform(V), second, PROMPTS.tolist(), R)
    with pytest.raises(TypeError, match="`response_length` must be an int, got float"):
        function(uniform(V), second, PROMPTS, 2.0)
    with pytest.raises(TypeError, match="must return a tensor, got list: of a Hugging Face"):
        function(lambda contexts: contexts.tolist(), second, PROMPTS, R)


def test_rewards_that_are_no_tensor():
    rewards: Any = lambda texts: [1.0] * len(texts)  # noqa: E731
    with pytest.raises(TypeError, match="`reward_fn` must return a tensor, got list"):
        enumeration(uniform(V), rewards)


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
