"""The coefficient for a budget, against enumeration and against formulas of two-valued rewards."""

import math
import re

import pytest
import torch
from torch.testing import assert_close

from torchrl_kl import Enumeration, coeff_for_budget

V, R = 3, 2


def model(seed: int, scale: float = 1.0):
    """Logits of the next token that depend on the whole context."""
    table = (
        torch.randn(
            2, V + 1, V + 1, V, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
        )
        * scale
    )
    return lambda tokens: table[tokens.shape[1] - 1, tokens[:, 0], tokens[:, -1]]


def rewards_of(seed: int, n_prompts: int) -> torch.Tensor:
    """A reward for each of the V**R responses to each prompt, (P, V**R)."""
    return torch.randn(
        n_prompts, V**R, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )


def enumerate_all(reference, rewards: torch.Tensor) -> Enumeration:
    """The problem whose prompts are 0 .. P - 1 and whose rewards are in a table."""

    def reward_fn(texts):
        return rewards[texts[:, 0], texts[:, 1] * V + texts[:, 2]]

    return Enumeration(reference, reward_fn, torch.arange(len(rewards))[:, None], R)


def uniform(tokens):
    return torch.zeros(len(tokens), V)


def bernoulli_kl(p: float, beta: float) -> float:
    """KL of the optimum for a reward of 1 with probability p, else 0: two outcomes, written out."""
    q = p * math.exp(1 / beta) / (p * math.exp(1 / beta) + 1 - p)
    return q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))


@pytest.mark.parametrize("n_prompts", [1, 3])
@pytest.mark.parametrize("budget", [1e-6, 0.01, 0.3, 1.0, 1.9])
def test_samples_that_are_the_whole_enumeration_give_its_coefficient(n_prompts, budget):
    rewards = rewards_of(0, n_prompts)
    exact = enumerate_all(uniform, rewards).solve_coeff(budget)
    coeff = coeff_for_budget(rewards, budget)
    # Each is bisected to 1e-12; KL ~ 1 / coeff^2 is a difference of numbers of order 1, known to
    # some 1e-16.
    assert coeff == pytest.approx(exact, rel=2e-12 + 1e-15 / budget)
    if n_prompts == 1:
        assert coeff_for_budget(rewards[0], budget) == coeff


@pytest.mark.parametrize("beta", [0.1, 0.2, 0.452, 1.0, 5.0])
@pytest.mark.parametrize("ones", [1, 3, 5, 9])
def test_of_two_valued_rewards_it_is_the_known_one(beta, ones):
    rewards = torch.tensor([1] * ones + [0] * (10 - ones))  # whole numbers will do
    budget = bernoulli_kl(ones / 10, beta)
    if budget < math.log(10 / ones) - 1e-6:  # else the curve is too flat to be inverted
        assert coeff_for_budget(rewards, budget) == pytest.approx(beta, rel=1e-8)


@pytest.mark.parametrize("budget", [0.1, 0.5])
def test_samples_of_the_reference_give_it_within_their_standard_error(budget):
    reference, n_samples = model(1), 4000
    rewards = rewards_of(2, 2)
    responses = enumerate_all(reference, rewards)
    beta = responses.solve_coeff(budget)
    # By the delta method: how a sample moves each prompt's KL(beta), and how KL moves with
    # log(beta).
    probs, factor = responses.log_probs.exp(), (rewards / beta).exp()
    mean_factor = (probs * factor).sum(1, keepdim=True)
    weights = probs * factor / mean_factor
    tilted = (weights * rewards).sum(1, keepdim=True)
    influence = (factor / mean_factor) * (rewards - tilted) / beta - (factor / mean_factor - 1)
    # Of the mean over two prompts.
    variance_of_kl = (probs * influence.square()).sum(1).sum() / n_samples / 4
    slope = (weights * (rewards - tilted).square()).sum(1).mean() / beta**2
    standard_error = (variance_of_kl.sqrt() / slope).item()
    generator = torch.Generator().manual_seed(0)
    repeats = 20
    logs = []
    for _ in range(repeats):
        drawn = torch.multinomial(probs, n_samples, replacement=True, generator=generator)
        logs.append(math.log(coeff_for_budget(rewards.gather(1, drawn), budget) / beta))
    assert standard_error < 0.05
    # The square is for the curvature.
    assert abs(sum(logs) / repeats) < 4 * standard_error / math.sqrt(repeats) + standard_error**2
    assert math.sqrt(sum(log**2 for log in logs) / repeats) == pytest.approx(
        standard_error, rel=4 / math.sqrt(2 * repeats)
    )


def test_prompts_are_not_pooled():
    # One prompt is easy and one is hard; within each, rewards differ by 0.1.
    rewards = torch.tensor([[5.0, 5.1], [0.0, 0.1]], dtype=torch.float64)
    coeff = coeff_for_budget(rewards, 0.1)
    assert coeff == pytest.approx(coeff_for_budget(rewards[1], 0.1), rel=1e-11)
    assert coeff_for_budget(rewards.flatten(), 0.1) > 10 * coeff


def test_a_prompt_without_a_choice_counts_as_no_divergence():
    both = coeff_for_budget(torch.tensor([[1.0, 0.0], [7.0, 7.0]]), 0.1)
    assert both == pytest.approx(coeff_for_budget(torch.tensor([1.0, 0.0]), 0.2), rel=1e-11)


def test_units_and_shifts():
    rewards = rewards_of(3, 2)
    coeff = coeff_for_budget(rewards, 0.4)
    assert coeff_for_budget(1000 * rewards, 0.4) == pytest.approx(1000 * coeff, rel=1e-11)
    shift = torch.tensor([[1e3], [-1e3]], dtype=torch.float64)  # leaves rewards exact to 1e-13
    assert coeff_for_budget(rewards + shift, 0.4) == pytest.approx(coeff, rel=1e-11)
    assert coeff_for_budget(rewards * 1e300, 0.4) == pytest.approx(1e300 * coeff, rel=1e-11)
    assert coeff_for_budget(rewards * 1e-300, 0.4) == pytest.approx(1e-300 * coeff, rel=1e-11)


def test_a_larger_budget_needs_a_smaller_coefficient():
    rewards = rewards_of(4, 3)
    coeffs = [coeff_for_budget(rewards, budget / 20) for budget in range(1, 40)]
    assert coeffs == sorted(coeffs, reverse=True)
    assert len(set(coeffs)) == len(coeffs)


def test_just_below_the_largest_budget_there_is_a_coefficient():
    rewards = torch.tensor([0.0, 1.0, 1.0, 0.25])
    limit = math.log(2)
    coeff = coeff_for_budget(rewards, limit * (1 - 1e-12))
    assert 0.02 < coeff < 0.04  # 0.5 / b exp(-1 / b) / 2 + ... = 7e-13
    message = (
        "`budget` must be below 0.693147 nats, all that these samples can show, got 0.693147: "
        "draw more samples, or lower the budget."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        coeff_for_budget(rewards, limit)
    with pytest.raises(ValueError, match=r"`budget` must be below 0.693147 nats, .*, got 5"):
        coeff_for_budget(rewards, 5)


def test_the_largest_budget_is_a_mean_over_prompts():
    rewards = torch.tensor([[0.0, 1.0, 1.0, 1.0], [0.0, 0.0, 2.0, 1.0]])
    limit = (math.log(4 / 3) + math.log(4)) / 2
    assert coeff_for_budget(rewards, limit - 1e-6) > 0
    with pytest.raises(ValueError, match=f"below {limit:.6g} nats"):
        coeff_for_budget(rewards, limit + 1e-6)


@pytest.mark.parametrize("budget", [0.0, -0.1, math.inf, math.nan])
def test_a_budget_out_of_range_is_refused(budget):
    with pytest.raises(ValueError, match=f"`budget` must be finite and above 0, got {budget}"):
        coeff_for_budget(torch.tensor([0.0, 1.0]), budget)


@pytest.mark.parametrize("budget", ["0.1", None, True])
def test_a_budget_that_is_not_a_number_is_refused(budget):
    with pytest.raises(TypeError, match=f"`budget` must be a number, got {type(budget).__name__}"):
        coeff_for_budget(torch.tensor([0.0, 1.0]), budget)


@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (0, 2), (2, 2, 1)])
def test_rewards_of_another_shape_are_refused(shape):
    message = re.escape(
        "`rewards` must be the rewards (N,) of samples, or (P, S) of S samples of each of P "
        f"prompts, not empty, got shape {shape}."
    )
    with pytest.raises(ValueError, match=f"^{message}$"):
        coeff_for_budget(torch.zeros(shape), 0.1)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rewards_that_are_not_finite_are_refused(bad):
    message = "`rewards` and their differences must be finite, got {} NaN or infinite ones of {}"
    with pytest.raises(ValueError, match=message.format(2, 6)):
        coeff_for_budget(torch.tensor([[0.0, bad, 1.0], [0.0, 1.0, bad]]), 0.1)
    with pytest.raises(ValueError, match=message.format(0, 2)):
        coeff_for_budget(torch.tensor([1e308, -1e308], dtype=torch.float64), 0.1)


@pytest.mark.parametrize(
    "rewards", [[0.3], [0.3, 0.3, 0.3], [[0.0, 0.0], [1.0, 1.0]], [[0.0], [1.0]]]
)
def test_rewards_without_a_choice_are_refused(rewards):
    rewards = torch.tensor(rewards)
    message = re.escape(
        "`rewards` must differ between the samples of a prompt, which are one row, got shape "
        f"{tuple(rewards.shape)} with equal rewards in each row: squeeze a trailing dimension of 1."
    )
    with pytest.raises(ValueError, match=f"^{message}$"):
        coeff_for_budget(rewards, 0.1)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64], ids=str
)
def test_any_dtype_is_counted_in_float64(dtype):
    rewards = torch.randint(0, 9, (500,), generator=torch.Generator().manual_seed(0))
    assert coeff_for_budget(rewards.to(dtype), 0.2) == coeff_for_budget(rewards.double(), 0.2)


def test_its_input_is_left_alone():
    rewards = torch.tensor([0.0, 1.0, 0.5], requires_grad=True)
    before = rewards.detach().clone()
    assert type(coeff_for_budget(rewards, 0.1)) is float
    assert_close(rewards.detach(), before, rtol=0, atol=0)


def test_rewards_that_are_not_a_tensor_are_refused():
    with pytest.raises(
        TypeError,
        match=r"^`rewards` must be a tensor, got list: pass `torch\.tensor\(rewards\)`\.$",
    ):
        coeff_for_budget([0.0, 1.0], 0.1)  # type: ignore[arg-type]
