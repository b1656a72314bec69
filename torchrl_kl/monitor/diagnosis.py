"""Which distribution were these actions drawn from, if not from the actor's?

N steps, V actions: `log_probs` (N, V) are the actor's, normalised, in float64; `action` (N,) was
drawn; `recorded` (N,) is the log-prob that the sampler wrote.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

Finding = tuple[str, dict[str, float]]  # what is wrong and what to do; the numbers in it, by name

TEMPERATURES = (0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)
TOP_KS = (1, 2, 3, 5, 10, 20, 50, 100, 200, 500, 1000)
TOP_PS = (0.5, 0.7, 0.8, 0.9, 0.95, 0.99)
# What a sampler looks like under each alternative, in the order of `log_ratios`.
SAMPLERS = (
    *(f"a lower temperature (near {t:g}), top-k or top-p sampling" for t in TEMPERATURES if t < 1),
    *(f"a higher temperature (near {t:g})" for t in TEMPERATURES if t > 1),
    "the most likely action each time",
    *(f"top-k sampling with k near {k}" for k in TOP_KS if k > 1),
    *(f"top-p sampling with p near {p:g}" for p in TOP_PS),
    *("a sampler that never draws the end token", "a sampler that never draws the pad token"),
)
GREEDY = len(TEMPERATURES)
NEVER_EOS, NEVER_PAD = len(SAMPLERS) - 2, len(SAMPLERS) - 1
N_ALTERNATIVES = len(SAMPLERS)
_LEAST = -1e5  # replaces -inf where it is multiplied: 0 * -inf is NaN
_MIN_STEPS = 20  # differences of one sign before the sign counts: 2 ** -19 by chance
_MOST_WEALTH = 30.0  # nats; evidence beyond this would have to decay after a fault is repaired


def take(log_probs: Tensor, action: Tensor) -> Tensor:
    """The log-prob of each action, (N,)."""
    return log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1)


def find_cause(
    log_probs: Tensor,
    action: Tensor,
    recorded: Tensor,
    masks: Mapping[str, Tensor],
    tolerance: float,
) -> str:
    """The first cause that explains why some `recorded` differ by more than `tolerance` (nats).

    `masks` are boolean entries (N, V) of the data that may have masked the sampler's actions.
    """
    scored = take(log_probs, action)
    # From here on all that was drawn is possible under the actor.
    if impossible := int((scored <= _LEAST).sum()):
        return (
            f"the actor gives probability 0 to {impossible} of {len(scored)} recorded actions: it "
            "masks actions that the sampler may draw. Give both the same mask."
        )
    gap = recorded - scored
    # A true cause leaves next to nothing unexplained, whatever the tolerance allows.
    limit = min(tolerance, 0.05 * gap.abs().max().item())
    temperature = _fit_temperature(log_probs, action, recorded, limit)
    if temperature is not None:
        return (
            f"the recorded log-probs are the actor's at temperature {temperature:.3g}. Divide the "
            "actor's logits by the same temperature, or sample at temperature 1."
        )
    for name, mask in masks.items():
        # (N, V), over the actions that this entry allows alone.
        masked = torch.where(mask, log_probs, -torch.inf).log_softmax(-1)
        if (take(masked, action) - recorded).abs().max() <= limit:  # False for -inf and NaN
            return (
                f"the recorded log-probs are the actor's over the actions that {name} allows. Let "
                "the actor read that mask too (MaskedCategorical)."
            )
    return (
        _truncation(log_probs, scored, gap, limit)
        or _subset(recorded, gap, limit)
        or "it cannot be told from the numbers. Were the actor's weights updated after the batch "
        "was drawn (call the monitor before the update)? Does the actor use dropout, another "
        "precision or other inputs, or are temperature, top-k and masks combined?"
    )


def _fit_temperature(
    log_probs: Tensor, action: Tensor, recorded: Tensor, limit: float
) -> float | None:
    """Fits `recorded = log_softmax(log_probs / T)[action]`: Gauss-Newton in 1 / T from a grid."""
    # One parameter can fit one or two numbers, whatever their cause; near 0 it fits zeros.
    few = take(log_probs, action).round(decimals=4).unique().numel() < 3
    if few or not bool((recorded.abs() > limit).any()):
        return None
    logits = log_probs.clamp_min(_LEAST)

    # At 1 / T = inverse: what is left unexplained, and its derivative with respect to 1 / T, (N,).
    def residual(inverse: float) -> tuple[Tensor, Tensor]:
        scaled = (inverse * logits).log_softmax(-1)
        slope = take(logits, action) - (scaled.exp() * logits).sum(-1)
        return take(scaled, action) - recorded, slope

    inverse = min((1 / t for t in TEMPERATURES), key=lambda it: residual(it)[0].square().sum())
    for _ in range(20):
        error, slope = residual(inverse)
        inverse -= ((error * slope).sum() / slope.square().sum().clamp_min(1e-30)).item()
        if not 1e-3 < inverse < 1e3:
            return None
    return 1 / inverse if residual(inverse)[0].abs().max() <= limit else None


def _truncation(log_probs: Tensor, scored: Tensor, gap: Tensor, limit: float) -> str | None:
    """Top-k and top-p renormalise: the gap is minus the log of the mass of the kept actions."""
    ranked = log_probs.sort(-1, descending=True).values
    kept = ranked.logcumsumexp(-1).clamp_max(0.0)  # (N, V): log-mass of the k most likely
    fits = ((gap.unsqueeze(-1) + kept).abs() <= limit) & (scored.unsqueeze(-1) >= ranked)
    # Top-k: one k fits every step.
    if bool(fits.all(0).any()):
        k = int(fits.all(0).int().argmax()) + 1
        if k == 1:
            return "the sampler takes the most likely action each time. Let it draw actions."
        return (
            f"the recorded log-probs are the actor's over its {k} most likely actions: top-k "
            f"sampling with k = {k}. Sample without top-k, or truncate the actor too."
        )
    # Top-p: a k of each step, such that one p lies between the masses without and with the k-th.
    if not bool(fits.any(1).all()):
        return None
    mass = torch.cat([torch.zeros_like(kept[:, :1]), kept.exp()], -1)  # (N, V + 1)
    last = fits.int().argmax(-1, keepdim=True)  # (N, 1): the rank of the last kept action
    low, high = mass.gather(-1, last).max().item(), mass.gather(-1, last + 1).min().item()
    if low >= high:
        return None
    return (
        "the recorded log-probs are the actor's over the most likely actions of a mass of p, p "
        f"between {low:.3g} and {high:.3g}: top-p sampling. Sample without top-p, or truncate the "
        "actor too."
    )


def _subset(recorded: Tensor, gap: Tensor, limit: float) -> str | None:
    """A distribution that is renormalised over some of the actions is larger on each of them."""
    if not recorded.any():
        return (
            "every recorded log-prob is 0, which a collector writes for the random actions of "
            "`init_random_frames`. Call the monitor only after these frames."
        )
    if int((gap.abs() > limit).sum()) < _MIN_STEPS:
        return None
    found = None
    if gap.min() >= -limit:
        found = "smaller than the actor's: the sampler seems to draw from fewer actions"
    elif gap.max() <= limit:
        found = "larger than the actor's: the actor seems to give probability to fewer actions"
    return found and (
        f"no recorded log-prob is {found} (a mask, top-k or top-p), perhaps with a temperature, "
        "too. Give both the same."
    )


def log_ratios(
    log_probs: Tensor, action: Tensor, never: tuple[tuple[int, ...], ...] = ((), ())
) -> Tensor:
    """Log-likelihood, nats, (N_ALTERNATIVES,), under each alternative minus that under the actor.

    If the actions were drawn from `log_probs`, the mean of the exponential is 1 for each
    alternative, for any batch and however one step leads to the next: also if a text ends with an
    action. `never`: the end tokens and the pad token, where there are any.
    """
    scored = take(log_probs, action)  # (N,)
    logits = log_probs.clamp_min(_LEAST)
    ratios = [(take((logits / t).log_softmax(-1), action) - scored).sum() for t in TEMPERATURES]
    ranked = log_probs.topk(min(max(TOP_KS), log_probs.shape[-1]), -1).values

    def keep(least: Tensor) -> Tensor:
        # Ties with the least likely one are kept: a uniform policy must not look like k = 1.
        kept = log_probs.where(log_probs >= least.unsqueeze(-1), -torch.inf).logsumexp(-1)
        return torch.where(scored >= least, -kept, -torch.inf).sum()

    # The k-th largest log-prob of each step, (N,).
    ratios += [keep(ranked[:, min(k, ranked.shape[-1]) - 1]) for k in TOP_KS]
    # The first at which p is reached; all of the ranked ones where it is not.
    mass = ranked.exp().cumsum(-1)
    for p in TOP_PS:
        last = (mass < p).sum(-1, keepdim=True).clamp_max(ranked.shape[-1] - 1)
        ratios.append(keep(ranked.gather(-1, last).squeeze(-1)))
    for tokens in never:
        ids = action.new_tensor([token for token in tokens if token < log_probs.shape[-1]])
        others = log_probs.index_fill(-1, ids, -torch.inf).logsumexp(-1)
        each = torch.where(torch.isin(action, ids), -torch.inf, -others)
        ratios.append(each.sum() if len(ids) else scored.new_zeros(()))
    return torch.stack(ratios)


def chance(nats: float) -> str:
    """The least power of ten, such as 1e-7, that a probability of exp(-nats) does not exceed."""
    return "0" if math.isinf(nats) else f"1e-{math.floor(nats / math.log(10))}"


@dataclass
class PooledEvidence:
    """Evidence against the actor, pooled over batches between which the actor may change.

    It is a bet that starts with a wealth of 1. Before the n-th batch 1 / (n (n + 1)) of that is
    spread over the alternatives; the likelihood ratios of this and all later batches multiply it.
    On the actor's own actions the wealth ever exceeds exp(x) with a probability of at most exp(-x)
    (Ville's inequality), unless whether a batch is added depends on what is in it.
    """

    n_batches: int = 0
    log_wealth: list[float] = field(default_factory=lambda: [-math.inf] * N_ALTERNATIVES)

    def add(self, ratios: Tensor) -> Tensor:
        """Adds the log-ratios of a batch; returns the evidence for each alternative, nats."""
        self.n_batches += 1
        # The stakes of all batches add up to 1, so the wealth is a martingale from the start.
        stake = -math.log(self.n_batches * (self.n_batches + 1) * N_ALTERNATIVES)
        wealth = torch.tensor([self.log_wealth, [stake] * N_ALTERNATIVES], dtype=torch.float64)
        # Infinite if the actor cannot have drawn an action.
        evidence = (wealth.logsumexp(0) + ratios.cpu()).clamp_max(1e9)
        evidence -= (evidence.max() - _MOST_WEALTH).clamp_min(0.0)  # of all: their order remains
        self.log_wealth = evidence.tolist()
        return evidence
