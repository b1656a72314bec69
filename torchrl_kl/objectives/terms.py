"""What each step adds to a KL loss: its exact or sampled KL, weighted by importance ratios.

Axes: *B is the batch of steps; where its last dimension is time, *B is (*R, T), R rows of T steps.
"""

from __future__ import annotations

import warnings
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributions import Distribution

from torchrl_kl._tensordict import expand_right, sum_action_dims
from torchrl_kl.functional import kl_exact, kl_k1, kl_k2, kl_k3, sum_after, sum_before
from torchrl_kl.functional.numbers import working_dtype

Gradient = Literal["step", "sequence", "k2", "k3"]
Weights = Literal["step", "trajectory"]
Reduction = Literal["mean", "sum", "none"]

_EXACT = ("step", "sequence")  # computed from the distributions
_SAMPLED = {"k2": kl_k2, "k3": kl_k3}  # and from the action alone


class Steps(NamedTuple):
    """The steps of a batch.

    Args:
        policy: its distribution over the actions of each step.
        reference: that of the reference.
        batch_size: *B.
        mask: True where a step counts, (*B); None where all do.
        action: what the policy did; None where no action is read.
        recorded: its log-prob when it was drawn.
        ends: True at the last step of each trajectory, (*B); None where nothing is added up.
    """

    policy: Distribution
    reference: Distribution
    batch_size: torch.Size
    mask: Tensor | None
    action: Tensor | None = None
    recorded: Tensor | None = None
    ends: Tensor | None = None

    def terms(self, gradient: Gradient, weights: Weights) -> tuple[Tensor, Tensor]:
        """What is minimised, and the measured KL; nats, (*B) each, 0 where the mask is False."""
        exact = self._exact_kl() if gradient in _EXACT else None
        if exact is not None and self.action is None:
            return exact, exact
        log_prob, ref_log_prob, log_ratio = self._log_probs()
        ratio = log_ratio.exp()
        if exact is not None:
            value = kl = exact
        else:
            value = ratio.detach() * _SAMPLED[gradient](log_prob, ref_log_prob, mask=self.mask)
            kl = ratio * kl_k1(log_prob, ref_log_prob, mask=self.mask)
        if self.ends is None:
            return value, kl
        if weights == "step":
            later = sum_after(kl.detach(), self.ends)
            return value + (ratio - ratio.detach()) * later, kl
        log_way = sum_before(log_ratio, self.ends)
        if self.mask is not None:  # on padding the weight could overflow, and inf * 0 is NaN
            log_way = torch.where(self.mask, log_way, 0.0)
        way = log_way.exp()
        # The gradient of the probability of getting to a step is what makes "sequence" exact.
        return (way if gradient == "sequence" else way.detach()) * value, way * kl

    def _exact_kl(self) -> Tensor:
        mask = self.mask
        if mask is not None:
            mask = expand_right(mask, self.policy.batch_shape)
        return self._sum(kl_exact(self.policy, self.reference, mask=mask))

    def _log_probs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Under the policy and the reference, and log w_t, 0 where a step does not count."""
        action, recorded = cast(Tensor, self.action), cast(Tensor, self.recorded)
        log_prob = self._sum(self.policy.log_prob(action))
        ref_log_prob = self._sum(self.reference.log_prob(action))
        log_ratio = log_prob - self._sum(recorded.detach())
        if self.mask is not None:
            log_ratio = torch.where(self.mask, log_ratio, 0.0)
        return log_prob, ref_log_prob, log_ratio

    def _sum(self, values: Tensor) -> Tensor:
        """Sums action dimensions and agents, in at least float32."""
        return sum_action_dims(values.to(working_dtype(values.dtype)), self.batch_size)


def check_options(gradient: str, weights: str | None, reduction: str) -> None:
    """ValueError for an unknown option or "k1"; a warning for "k3"."""
    if gradient == "k1":
        raise ValueError(
            '`gradient` must not be "k1": as a loss its expected gradient is zero, it would only '
            "add noise. Subtract k1 from the reward (KLConstrainedTransform), or use "
            '"sequence", which has the same expected gradient.'
        )
    for name, value, choices in (
        ("gradient", gradient, (*_EXACT, *_SAMPLED)),
        ("weights", weights, (None, "step", "trajectory")),
        ("reduction", reduction, ("mean", "sum", "none")),
    ):
        if value not in choices:
            raise ValueError(f"`{name}` must be one of {choices}, got {value!r}.")
    if gradient == "k3":
        warnings.warn(
            'gradient="k3" minimises the other divergence: its expected gradient as a loss is that '
            'of KL(reference || policy). Use "k2" for the gradient of KL(policy || reference) from '
            "the action alone.",
            stacklevel=3,
        )
