"""Rewards of the reference's samples in, the coefficient for a KL budget out: no training."""

from __future__ import annotations

import math

from torch import Tensor

from torchrl_kl.functional.numbers import check_number, solve_decreasing


def coeff_for_budget(rewards: Tensor, budget: float) -> float:
    """The coefficient with which KL(optimum || reference) = `budget` nats.

    The optimum of `E[r] - beta * KL(policy || reference)` is the reference reweighted by
    `exp(r / beta)`. Samples of the reference with these weights w are samples of the optimum:

        KL(beta) = E_w[r] / beta - log mean exp(r / beta),  w proportional to exp(r / beta)

    `KL(beta)`, its mean over the prompts, falls in `beta`; bisection solves it.

    You may rely on: adding a constant to the rewards (of a prompt) changes nothing, and rewards k
    times as large give a coefficient k times as large, both to rounding. You may not rely on a
    budget near log S, the most that S samples can show: the weight then rests on a few of them.

    Args:
        rewards: the reward of each response that the reference wrote, real numbers of any dtype,
            shape (N,), or (P, S) for S samples of each of P prompts. If the rewards (N,)
            are of several prompts, differences between prompts count as if the policy could choose
            the prompt, so that the coefficient is too high.
        budget: nats per response, the mean over the prompts, above 0.

    Returns:
        The coefficient, reward per nat, above 0.

    Raises:
        TypeError: if `rewards` is not a tensor, or `budget` not a number.
        ValueError: if `rewards` have another shape, are empty, NaN, infinite or constant for every
            prompt, or if `budget` is not above 0 and below the largest KL the samples can show.

    Reference:
        D. Ziegler et al., "Fine-Tuning Language Models from Human Preferences" (2019), section 2,
        for the optimum.

    Example:
        >>> import torch
        >>> from torchrl_kl import coeff_for_budget
        >>> round(coeff_for_budget(torch.tensor([0.0, 1.0]), 0.1), 4)  # a fair coin
        1.0599
    """
    gaps = _gaps(rewards)
    budget = check_number("budget", budget, above=0.0)
    # At beta = 0 only each prompt's best responses are left.
    limit = _kl(gaps.masked_fill(gaps < 0, -math.inf))
    if budget >= limit:
        raise ValueError(
            f"`budget` must be below {limit:.6g} nats, all that these samples can show, got "
            f"{budget:g}: draw more samples, or lower the budget."
        )
    spread = -gaps.min().item()
    # Rewards in units of their spread, so that k times as large ones give the same numbers.
    gaps = gaps / spread
    # The variance of the tilted gaps is at most 1 / 4, hence KL <= 1 / (8 beta^2).
    high = 1 / math.sqrt(8 * budget)
    return spread * solve_decreasing(lambda beta: _kl(gaps / beta), budget, high)


def _gaps(rewards: Tensor) -> Tensor:
    """How far each reward is below the prompt's best (<= 0); checks them all."""
    if not isinstance(rewards, Tensor):
        got = type(rewards).__name__
        raise TypeError(f"`rewards` must be a tensor, got {got}: pass `torch.tensor(rewards)`.")
    shape = tuple(rewards.shape)
    if rewards.ndim not in (1, 2) or rewards.numel() == 0:
        raise ValueError(
            "`rewards` must be the rewards (N,) of samples, or (P, S) of S samples of each of P "
            f"prompts, not empty, got shape {shape}."
        )
    # (P, S) in float64, P = 1 for a single row of samples.
    values = rewards.detach().double().reshape(-1, shape[-1])
    gaps = values - values.amax(1, keepdim=True)
    if not gaps.isfinite().all():
        bad = int((~values.isfinite()).sum())
        raise ValueError(
            "`rewards` and their differences must be finite, got "
            f"{bad} NaN or infinite ones of {values.numel()}."
        )
    if not (gaps < 0).any():
        raise ValueError(
            "`rewards` must differ between the samples of a prompt, which are one row, got shape "
            f"{shape} with equal rewards in each row: squeeze a trailing dimension of 1."
        )
    return gaps


def _kl(log_weights: Tensor) -> float:
    """Mean over the rows of KL(reweighted samples || samples), nats; -inf is a weight of 0."""
    # (P, S), normalized in each row by (P, 1).
    log_total = log_weights.logsumexp(1, keepdim=True)
    weights = (log_weights - log_total).exp()
    # 0 * -inf is NaN, where 0 log 0 is 0.
    tilted = (weights * log_weights.masked_fill(weights == 0, 0.0)).sum(1)
    return (tilted - log_total.squeeze(1) + math.log(log_weights.shape[1])).mean().item()
