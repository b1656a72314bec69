"""Who drew these actions? What a sampler did otherwise than the actor that scores its actions.

N steps, V actions: `log_probs` (N, V) are the scorer's, normalised, in float64; `action` (N,) was drawn, `recorded`
(N,) is the log-prob that the sampler wrote beside it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["BEYOND_CHANCE", "Evidence", "against_policy", "find_cause", "take", "towards_reference"]

BEYOND_CHANCE = math.log(1e6)  # nats of evidence: once in a million batches at most
TEMPERATURES = (0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)
_LEAST = -1e5  # stands for -inf where it is multiplied: 0 * -inf is NaN
_MIN_STEPS = (
    20  # steps with a difference of one sign, before the sign says something: 2 ** -19 by chance
)


class Evidence(NamedTuple):
    """That actions were drawn by something else: `nats`, so much comes by chance at most once in exp(nats)."""

    nats: float
    drawn_by: str


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
    """What the sampler did, said of the first thing that gives the recorded log-prob of every step.

    Args:
        log_probs: the scorer's, (N, V).
        action: (N,).
        recorded: (N,); some differ from the scorer's by more than `tolerance`.
        masks: boolean entries (N, V) of the data that may have masked the sampler's actions, by name.
        tolerance: nats.
    """
    scored = take(log_probs, action)
    impossible = (scored <= _LEAST).double().mean().item()
    if impossible:
        return (
            f"the actor gives probability 0 to {impossible:.0%} of the recorded actions: it masks actions that the "
            "sampler may draw. Give both the same mask"
        )
    gap = recorded - scored
    # A cause gives the very numbers: what is left over must be small beside what it explains.
    limit = min(tolerance, 0.05 * gap.abs().max().item())
    return (
        _temperature(log_probs, action, recorded, limit)
        or _mask(log_probs, action, recorded, masks, limit)
        or _truncation(log_probs, scored, gap, limit)
        or (_UNRECORDED if not recorded.any() else _part(gap, limit))
        or _UNKNOWN
    )


_UNRECORDED = (
    "every recorded one is 0: a collector fills them so for the random actions of `init_random_frames`. Begin to "
    "monitor after them"
)
_UNKNOWN = (
    "the cause cannot be told from the numbers. Were the actor's weights updated since the batch was drawn (call the "
    "monitor before the update)? Does it draw dropout masks, compute in another precision, or see other inputs than "
    "the sampler? Several of temperature, top-k and masks at once look like this too"
)


def _temperature(log_probs: Tensor, action: Tensor, recorded: Tensor, limit: float) -> str | None:
    """Fits `recorded = log_softmax(log_probs / T)[action]` by Gauss-Newton in 1 / T from the best of a grid."""
    if take(log_probs, action).round(decimals=4).unique().numel() < 3:
        return None  # one parameter fits one or two numbers whatever made them
    logits = log_probs.clamp_min(_LEAST)

    def residual(inverse: float) -> tuple[Tensor, Tensor]:
        scaled = (inverse * logits).log_softmax(-1)
        slope = take(logits, action) - (scaled.exp() * logits).sum(-1)
        return take(scaled, action) - recorded, slope

    inverse = min(
        (1 / t for t in TEMPERATURES),
        key=lambda inverse: residual(inverse)[0].square().sum().item(),
    )
    for _ in range(20):
        error, slope = residual(inverse)
        inverse -= ((error * slope).sum() / slope.square().sum().clamp_min(1e-30)).item()
        if not 1e-3 < inverse < 1e3:
            return None
    if residual(inverse)[0].abs().max() > limit:
        return None
    return (
        f"the recorded ones are the actor's at temperature {1 / inverse:.3g}. Divide the actor's logits by the same "
        "temperature, or sample at temperature 1"
    )


def _mask(
    log_probs: Tensor, action: Tensor, recorded: Tensor, masks: Mapping[str, Tensor], limit: float
) -> str | None:
    for name, mask in masks.items():
        masked = torch.where(mask, log_probs, -torch.inf).log_softmax(-1)
        if (take(masked, action) - recorded).abs().max() <= limit:  # not so where it is -inf or NaN
            return (
                f"the recorded ones are the actor's over the actions that {name} allows. Let the actor that scores "
                "read that mask (MaskedCategorical)"
            )
    return None


def _truncation(log_probs: Tensor, scored: Tensor, gap: Tensor, limit: float) -> str | None:
    """Top-k and top-p renormalise over the most likely actions: the gap is minus the log of the mass they hold."""
    kept, inside = _most_likely(log_probs, scored)
    fits = ((gap.unsqueeze(-1) + kept).abs() <= limit) & inside
    if bool(fits.all(0).any()):
        k = int(fits.all(0).int().argmax()) + 1
        return (
            f"the recorded ones are the actor's over its {k} most likely actions: top-k sampling with k = {k}. Sample "
            "without top-k, or renormalise in the scorer in the same way"
        )
    if not bool(fits.any(1).all()):
        return None
    mass = torch.cat([torch.zeros_like(kept[:, :1]), kept.exp()], -1)
    n_kept = fits.int().argmax(-1, keepdim=True)
    low, high = mass.gather(-1, n_kept).max().item(), mass.gather(-1, n_kept + 1).min().item()
    if low >= high:
        return None
    return (
        f"the recorded ones are the actor's over the most likely actions that hold a mass of p, p between {low:.3g} "
        f"and {high:.3g}: top-p sampling. Sample without top-p, or renormalise in the scorer in the same way"
    )


def _part(gap: Tensor, limit: float) -> str | None:
    """A distribution over some of the actions is larger on each of them."""
    if int((gap.abs() > limit).sum()) < _MIN_STEPS:
        return None
    if gap.min() >= -limit:
        mass = (-gap).exp().mean().item()
        return (
            "the recorded ones are never the smaller: as if the sampler masked actions, and left some that hold "
            f"{mass:.0%} of the actor's probability on average. Give both the same mask, top-k or top-p"
        )
    if gap.max() <= limit:
        return (
            "the recorded ones are never the larger: as if the actor masked actions that the sampler may draw. Give "
            "both the same mask, top-k or top-p"
        )
    return None


def _most_likely(log_probs: Tensor, scored: Tensor) -> tuple[Tensor, Tensor]:
    """For k = 1 to V, the log of the mass of the k most likely actions, and whether the drawn one is among them."""
    ranked = log_probs.sort(-1, descending=True).values
    return ranked.logcumsumexp(-1).clamp_max(0.0), scored.unsqueeze(-1) >= ranked


def against_policy(log_probs: Tensor, action: Tensor) -> Evidence:
    """The best evidence that the actions were drawn otherwise than from `log_probs`: at another temperature, top-k.

    If they were drawn from it, exp(sum of log alternative - log_prob) has the mean 1 for each alternative, whatever the
    batch and however one step leads to the next, and so has the mean over alternatives: Markov's inequality then bounds
    how often the evidence passes a value. Nothing is estimated, no distribution of sums assumed.
    """
    scored = take(log_probs, action)
    logits = log_probs.clamp_min(_LEAST)
    by_temperature = [
        (take((logits / t).log_softmax(-1), action) - scored).sum().item() for t in TEMPERATURES
    ]
    kept, inside = _most_likely(log_probs, scored)
    by_k = torch.where(inside.all(0), -kept.sum(0), -torch.inf)
    n_alternatives = len(TEMPERATURES) + len(by_k)
    best = max(range(len(TEMPERATURES)), key=by_temperature.__getitem__)
    k = int(by_k.argmax())
    if by_k[k] > by_temperature[best]:
        always = (
            "the most likely action each time" if k == 0 else f"top-k sampling with k near {k + 1}"
        )
        return Evidence(by_k[k].item() - math.log(n_alternatives), always)
    sharper = TEMPERATURES[best] < 1
    drawn_by = f"a {'lower' if sharper else 'higher'} temperature (near {TEMPERATURES[best]:g})"
    return Evidence(
        by_temperature[best] - math.log(n_alternatives),
        drawn_by + (", top-k or top-p sampling" if sharper else ""),
    )


def towards_reference(log_probs: Tensor, ref_log_probs: Tensor, action: Tensor) -> float:
    """Evidence, nats, that the actions were drawn half-way to the reference: from pi^0.5 pi_ref^0.5, normalised."""
    log_ratio = (take(ref_log_probs, action) - take(log_probs, action)) / 2
    normaliser = ((log_probs.clamp_min(_LEAST) + ref_log_probs.clamp_min(_LEAST)) / 2).logsumexp(-1)
    return (log_ratio - normaliser).sum().item()
