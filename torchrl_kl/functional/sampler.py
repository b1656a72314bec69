"""Corrections for actions that another sampler than the policy in training drew.

`log_ratio` is log pi - log pi_sampler of the actions, nats, 0 on padding.
"""

import math
from typing import Literal, get_args

from torch import Tensor

from torchrl_kl.functional.numbers import check_number
from torchrl_kl.functional.sums import running_sum

SamplerWeights = Literal["truncated"]
FEWEST = 0.1  # the effective sample size, as a share, below which a batch moves no controller


def check_sampler_weights(weights: SamplerWeights | None, cap: float) -> None:
    """ValueError for another option, or a cap below 1."""
    options = (None, *get_args(SamplerWeights))
    if weights not in options:
        raise ValueError(f"`sampler_weights` must be one of {options}, got {weights!r}.")
    check_number("cap", cap, at_least=1)


def sampler_weights(
    log_ratio: Tensor, cap: float, ends: Tensor | None, mask: Tensor | None
) -> tuple[Tensor, float]:
    """min(pi / pi_sampler, cap) of each step (*B), detached, and their effective share.

    With `ends` (*B), True at last steps, the ratio is that of the trajectory up to the step. A sum
    along trajectories is then that of the policy, but for the cap.
    """
    total = log_ratio.detach() if ends is None else running_sum(log_ratio.detach(), ends)
    counted = mask if ends is None else ends
    share = effective_share(total if counted is None else total[counted])
    return total.clamp(max=math.log(cap)).exp(), share


def effective_share(log_ratio: Tensor) -> float:
    """The effective sample size of ratios (N,), not capped, as a share of N; 1 of none."""
    if not log_ratio.numel():
        return 1.0
    weights = (log_ratio.double() - log_ratio.max()).exp()
    return (weights.sum() ** 2 / weights.square().sum() / weights.numel()).item()
