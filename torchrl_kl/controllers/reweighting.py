"""Samples of the reference, reweighted by exp(reward / coeff): their KL, and what it is known to.

Axes: P rows of S samples; a row that is shorter is padded. U units are drawn independently: rows,
or groups of samples in the only row.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from torchrl_kl.functional.numbers import solve_decreasing

_TINY = 1e-300  # instead of 0


class Reweighted:
    """Rows of samples with rewards, each row a sample of one conditional distribution.

    Args:
        rewards: (P, S), any value in padding.
        log_weights: of each sample for the reference, (P, S), -inf for padding.
        units: of one row, the number of the unit of each sample, (S,). None: rows are units, or all
            samples of the only one.
        scale_error: standard error of the logarithm of a scale that the rewards were multiplied by.
    """

    def __init__(
        self,
        rewards: Tensor,
        log_weights: Tensor,
        units: Tensor | None = None,
        scale_error: float = 0.0,
    ):
        samples = torch.arange(rewards.shape[1], device=rewards.device)
        self.units = samples if units is None and len(rewards) == 1 else units
        self.scale_error = scale_error
        held = log_weights > -math.inf
        best = rewards.masked_fill(~held, -math.inf).amax(1, keepdim=True)
        # How far each reward is below the best of its row, (P, S).
        self.gaps = torch.where(held, rewards - best, 0.0)
        self.log_weights = log_weights.log_softmax(1)
        self.weights = self.log_weights.exp()

    @classmethod
    def of_groups(cls, rewards: Tensor, log_weights: Tensor, groups: Tensor) -> Reweighted:
        """Samples (N,), one row for each number in `groups`."""
        order = groups.argsort(stable=True)
        counts = groups.unique(return_counts=True)[1].tolist()
        pairs = torch.stack([rewards, log_weights], 1)[order].split(counts)
        rows = pad_sequence(list(pairs), batch_first=True, padding_value=-math.inf)
        values, log_weights = rows.unbind(-1)
        return cls(values, log_weights)

    @property
    def differ(self) -> bool:
        """Whether the rewards of any row differ."""
        return bool((self.gaps < 0).any())

    def kl(self, coeff: float) -> float:
        """KL of the reweighted to the given samples, nats, mean over the rows."""
        log_total, new = self._reweight(coeff)
        return ((new * self.gaps / coeff).sum(1) - log_total.squeeze(1)).mean().item()

    def _reweight(self, coeff: float) -> tuple[Tensor, Tensor]:
        """Log E[exp(gap / coeff)], (P, 1), and the new weights, (P, S)."""
        exponents = self.log_weights + self.gaps / coeff
        log_total = exponents.logsumexp(1, keepdim=True)
        return log_total, (exponents - log_total).exp()

    def solve(self, budget: float, *, low: float) -> float | None:
        """The coefficient whose KL is `budget`; None if even at `low` the KL is smaller."""
        if self.kl(low) < budget:
            return None
        # The variance of reweighted gaps is at most range^2 / 4, hence KL <= range^2 / (8 coeff^2).
        high = -self.gaps.min().item() / math.sqrt(8 * budget)
        return solve_decreasing(self.kl, budget, high)

    def effective(self, coeff: float) -> Tensor:
        """How many samples carry the new weight of each row, (P,)."""
        return 1 / self._reweight(coeff)[1].square().sum(1)

    def slope(self, coeff: float) -> float:
        """-d KL / d log coeff: the variance of gap / coeff under the new weights."""
        new = self._reweight(coeff)[1]
        centred = self.gaps - (new * self.gaps).sum(1, keepdim=True)
        return (new * centred.square()).sum(1).mean().item() / coeff**2

    def kl_error(self, coeff: float) -> float:
        """Standard error of `kl`."""
        return _jackknife(self._without_units(coeff)[0] - self.kl(coeff))

    def standard_error(self, coeff: float) -> float:
        """Of log(coeff): how far one step of Newton's method moves it where a unit is left out."""
        kls, slopes = self._without_units(coeff)
        moved = _jackknife((kls - self.kl(coeff)) / slopes.clamp_min(_TINY))
        return math.hypot(moved, self.scale_error)

    def _without_units(self, coeff: float) -> tuple[Tensor, Tensor]:
        """KL and slope where one unit is left out, (U,) each."""
        log_total, new = self._reweight(coeff)
        tilted = self.gaps / coeff
        parts = torch.stack([self.weights, new, new * tilted, new * tilted.square()])
        if self.units is None:
            _, _, mean, square = parts.sum(-1)
            each = torch.stack([mean - log_total.squeeze(1), square - mean.square()])
            kls, slopes = (each.sum(1, keepdim=True) - each) / (each.shape[1] - 1)
            return kls, slopes
        left = parts.sum(-1) - self._by_unit(parts)
        mean, square = left[2:] / left[1].clamp_min(_TINY)
        kls = mean - log_total[0] - (left[1] / left[0]).clamp_min(_TINY).log()
        return kls, square - mean.square()

    def _by_unit(self, values: Tensor) -> Tensor:
        """Sums of values (..., 1, S) of one row, (..., U)."""
        units = cast(Tensor, self.units)
        sums = values.new_zeros(*values.shape[:-2], int(units.max()) + 1)
        return sums.index_add(-1, units, values.squeeze(-2))

    def coeff_by_variance(self, budget: float) -> float:
        """sqrt(Var / (2 budget)), exact for normally distributed rewards."""
        return math.sqrt(self._unbiased.mean().item() / (2 * budget))

    @property
    def _unbiased(self) -> Tensor:
        """The variance of the rewards of each row, (P,), without the bias of S."""
        centred = self.gaps - (self.weights * self.gaps).sum(1, keepdim=True)
        variances = (self.weights * centred.square()).sum(1)
        return variances / (1 - self.weights.square().sum(1)).clamp_min(1e-12)

    def error_by_variance(self) -> float:
        """Standard error of the logarithm of `coeff_by_variance`."""
        variances = self._unbiased
        mean = variances.mean()
        if self.units is None:
            error = variances.std() / math.sqrt(len(variances))
        else:
            centred = self.gaps - (self.weights * self.gaps).sum(1, keepdim=True)
            error = self._by_unit(self.weights * (centred.square() - mean)).norm()
        return math.hypot((error / mean / 2).item(), self.scale_error)


def _jackknife(changes: Tensor) -> float:
    """The standard error of a number that changes by so much where a unit is left out, (U,)."""
    return (changes.norm() * math.sqrt(1 - 1 / len(changes))).item()
