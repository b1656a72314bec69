"""Rewards of the first trajectories in, the coefficient for a target KL out, before any training.

Axes: N samples, in P rows of S at most; a row holds the samples that are compared.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchrl_kl.controllers.reweighting import Reweighted
from torchrl_kl.functional.numbers import Float64State, check_number, uncompiled

_LARGEST_ERROR = 0.25  # standard error of log(coeff) above which more samples are waited for
_FEWEST = 16  # samples that must carry the weight, before and after the rewards reweight them
_MOST = 65_536  # samples without a plan, after which it is given up
_ROW = 16  # samples of a group from which each group is reweighted by itself
_SHOWN = 2  # of a row, on average, that must carry the new weight
_CLEARLY = 3  # standard errors by which a target must exceed all that a policy can spend
_TINY = 1e-300  # instead of the variance of equal rewards
_LOWEST = 1024  # how far below the rule of the variance a coefficient is looked for
_COLUMNS = ("rewards", "log_ratios", "lengths", "groups")


class Plan(NamedTuple):
    """A planned coefficient."""

    coeff: float  # reward per nat
    standard_error: float  # of its logarithm, counted
    slope: float  # -d log KL / d log coeff at the target


class RewardPlan(Float64State):
    r"""Pools rewards of (nearly) the reference until they tell the coefficient for a target KL.

    The optimum of :math:`E_\pi[R] - \beta KL(\pi \| \pi_{ref})` is the reference reweighted by
    :math:`\exp(R / \beta)`, and :math:`KL(\beta) = E_w[R] / \beta - \log E[\exp(R / \beta)]` with
    these weights; see `coeff_for_budget`. Here

    - samples of one group (the responses to a prompt) are compared with each other. Where most
      samples are in groups of at least 16, each group is reweighted by itself. In smaller groups
      the differences to the group's mean are pooled; those of pairs do not show how skewed the
      rewards are, so all samples are pooled then, with the variance within pairs. Without groups
      all samples are pooled, and what differs between prompts counts as if the policy could choose
      it: the coefficient is then too high, by a factor of about sqrt(total variance / variance
      within prompts).
    - a policy that has moved is corrected for: a sample has the weight exp(-log_ratio). Fewer
      than 16 effective samples make no plan.
    - where too few samples carry the reweighted mean, as for a target near log N, the rewards count
      as normally distributed, :math:`\beta = \sqrt{Var(R) / (2 KL)}`. If reweighting gives a larger
      coefficient, as for rare successes, that one is taken.

    The plan is made once the counted standard error of its logarithm is at most 0.25.

    State: the samples, (N, 4) float64: reward, log-ratio, length, group; `made`, 0 or 1;
    `n_groups`, how many groups `new_groups` has numbered.

    Args:
        target: nats per step of a sample, above 0.

    Raises:
        ValueError: if `target` is not above 0 and finite.

    Example:
        >>> import torch
        >>> from torchrl_kl.controllers.plan import RewardPlan
        >>> pool = RewardPlan(0.1).add(torch.tensor([0.0, 1.0] * 50))
        >>> round(pool.solve().coeff, 2)  # a fair coin
        1.06
    """

    made: Tensor
    n_groups: Tensor

    def __init__(self, target: float):
        super().__init__()
        self.target = check_number("target", target, above=0.0)
        self.samples = torch.zeros(0, 4, dtype=torch.float64)
        self.reason = "no reward has come yet"
        self.warned = False
        for name in ("made", "n_groups"):
            self.register_buffer(name, torch.zeros((), dtype=torch.float64))

    def add(
        self,
        rewards: Tensor,
        *,
        groups: Tensor | None = None,
        log_ratios: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> RewardPlan:
        """Pools samples (N,); returns this object. Nothing is added where an error is raised.

        Args:
            rewards: the task reward of each sample, before any penalty.
            groups: a number for each sample, whole numbers from 0 to 2 ** 53, equal for those that
                began alike; or those of `new_groups`. None: nothing is known.
            log_ratios: log pi - log pi_ref of each sample, nats. None: 0.
            lengths: steps of each sample, for a target per step, at least 1. None: 1.

        Raises:
            TypeError: if one of them is not a tensor of real numbers.
            ValueError: if the shapes differ, a number is not finite, a length is less than 1, or a
                group negative.
        """
        columns = [rewards, log_ratios, lengths, groups]
        for name, column in zip(_COLUMNS, columns, strict=True):
            _check_real(name, column)
        zeros = torch.zeros(rewards.shape, dtype=torch.float64)
        for name, column in zip(_COLUMNS[1:], columns[1:], strict=True):
            if rewards.ndim != 1 or (column is not None and column.shape != rewards.shape):
                shape = tuple(rewards.shape) if column is None else tuple(column.shape)
                raise ValueError(
                    f"`rewards` and `{name}` must both have the shape (N,), got "
                    f"{tuple(rewards.shape)} and {shape}: pass one number per sample."
                )
        defaults = [zeros, zeros, zeros + 1, zeros + torch.nan]
        filled = [
            default if column is None else column.detach().to(default)
            for column, default in zip(columns, defaults, strict=True)
        ]
        new = torch.stack(filled, 1)
        for name, numbers in zip(_COLUMNS[:3], new.unbind(1), strict=False):
            if not numbers.isfinite().all():
                bad = int((~numbers.isfinite()).sum())
                raise ValueError(
                    f"`{name}` must be finite, got {bad} NaN or infinite numbers of {len(new)}: "
                    "mask those of padding, and find out where the others come from."
                )
        if len(new) and not (shortest := new[:, 2].min()) >= 1:
            raise ValueError(
                f"`lengths` must be at least 1, got {shortest:g}: leave out samples without a step."
            )
        if len(new) and (lowest := new[:, 3].nan_to_num(0.0).min()) < -self.n_groups:
            raise ValueError(
                f"`groups` must be whole numbers from 0 on, got {lowest:g}: negative ones are from "
                "`new_groups` of this object. Leave `groups` out if nothing is known."
            )
        self.samples = torch.cat([self.samples, new])
        return self

    @uncompiled
    def new_groups(self, n: int) -> float:
        """The first of `n` numbers that follow one another, all negative, for groups of this pool.

        Where two pools are merged, these are different groups, also if their numbers are equal.
        """
        self.n_groups += n
        return -self.n_groups.item()

    def merge(self, other: RewardPlan) -> RewardPlan:
        """Adds the samples of another object (of a worker); returns this object.

        The plan is the same for any split of the samples in which the groups of `new_groups` are
        whole. TypeError for another type.
        """
        if not isinstance(other, RewardPlan):
            raise TypeError(f"`other` must be a RewardPlan, got {type(other).__name__}.")
        if other is self:
            raise ValueError("`other` must be another RewardPlan, got this object.")
        samples = other.samples.clone()
        samples[:, 3] -= self.n_groups * (samples[:, 3] < 0)
        self.samples = torch.cat([self.samples, samples])
        self.n_groups += other.n_groups
        return self

    def solve(self) -> Plan | None:
        """The plan, or None where more samples are needed; `reason` then says why.

        Raises:
            RuntimeError: if the target cannot be spent, or 65,536 samples were not enough.
        """
        plan = self._solve()
        if plan is None and len(self.samples) >= _MOST:
            raise RuntimeError(_GIVEN_UP.format(len(self.samples), self.reason))
        return plan

    def _solve(self) -> Plan | None:
        weights = (-self.samples[:, 1]).softmax(0)
        effective = 1 / weights.square().sum().item() if len(weights) else 0.0
        if effective < _FEWEST:
            self.reason = _TOO_FEW.format(effective, len(weights), _FEWEST)
            return None
        budget = self.target * (weights * self.samples[:, 2]).sum().item()
        rows = self._rows()
        if not rows.differ:
            self.reason = _EQUAL.format(len(weights))
            return None
        by_variance = Plan(rows.coeff_by_variance(budget), rows.error_by_variance(), 2.0)
        lowest = by_variance.coeff / _LOWEST
        found = rows.solve(budget, low=lowest)
        carried = rows.effective(found or lowest)
        shown = carried.sum() >= _FEWEST and carried.mean() >= _SHOWN
        if found is None and shown:
            most, error = rows.kl(lowest), rows.kl_error(lowest)
            if budget > most + _CLEARLY * error:
                raise RuntimeError(_UNSPENDABLE.format(budget, most))
            self.reason = _NEAR_MOST.format(budget, most, error)
            return None
        plan = by_variance
        if found is not None:
            plan = Plan(found, rows.standard_error(found), rows.slope(found) / budget)
            errors = plan.standard_error + by_variance.standard_error
            if not shown and math.log(found / by_variance.coeff) <= 2 * errors:
                plan = by_variance
        if not plan.standard_error <= _LARGEST_ERROR:
            self.reason = _UNCERTAIN.format(100 * plan.standard_error, 100 * _LARGEST_ERROR)
            return None
        return plan

    def _rows(self) -> Reweighted:
        """The samples in the rows in which they are compared."""
        rewards, log_weights, groups = self.samples[:, 0], -self.samples[:, 1], self.samples[:, 3]
        # NaN is a group of its own.
        _, units, counts = groups.unique(return_inverse=True, return_counts=True)
        sizes = counts[units]
        large = sizes >= _ROW
        if 2 * large.sum() >= len(sizes):
            return Reweighted.of_groups(rewards[large], log_weights[large], units[large])
        some = sizes >= 2
        if 2 * some.sum() >= len(sizes):
            # Unbiased for the variance within groups: S / (S - 1) of the mean square.
            means = torch.zeros_like(counts, dtype=rewards.dtype).index_add_(0, units, rewards)
            apart = rewards - (means / counts)[units]
            apart *= (sizes / (sizes - 1).clamp_min(1)).sqrt()
            apart, rewards = apart[some], rewards[some]
            if 2 * (sizes > 2).sum() >= len(apart):
                return Reweighted(apart[None], log_weights[some][None], units[some])
            within, total = apart.square(), rewards.var(correction=0).clamp_min(_TINY)
            scaled = (rewards - rewards.mean()) * (within.mean() / total).sqrt()
            # Both samples of a pair have the same square: there are half as many.
            error = within.std() / within.mean().clamp_min(_TINY) / math.sqrt(2 * len(within))
            return Reweighted(scaled[None], log_weights[some][None], units[some], error.item())
        return Reweighted(rewards[None], log_weights[None], units)

    @property
    def cautious_coeff(self) -> float:
        """A coefficient for as long as there is no plan: range(R) / sqrt(2 KL), reward per nat.

        Rewards within a range have KL(beta) <= range^2 / (8 beta^2) (Hoeffding): the optimum of
        this coefficient spends at most a quarter of the target. It is 0 while no two rewards
        differ, when the policy cannot have learned a preference.
        """
        if not len(self.samples):
            return 0.0
        rewards, length = self.samples[:, 0], self.samples[:, 2].mean().item()
        spread = (rewards.max() - rewards.min()).item()
        return spread / math.sqrt(2 * self.target * length)

    def close(self) -> None:
        """Drops the samples, since the plan is made."""
        self.samples = self.samples[:0]
        self.made.fill_(1.0)

    def get_extra_state(self) -> Tensor:
        """The samples, for `state_dict`."""
        return self.samples

    def set_extra_state(self, state: Tensor) -> None:
        """Takes over the samples of a `state_dict`."""
        self.samples = state.clone()


def _check_real(name: str, values: Tensor | None) -> None:
    if values is not None and not isinstance(values, Tensor):
        got = type(values).__name__
        raise TypeError(f"`{name}` must be a tensor, got {got}: pass `torch.as_tensor({name})`.")
    if values is not None and values.is_complex():
        raise TypeError(f"`{name}` must be real numbers, got {values.dtype}.")


_TOO_FEW = (
    "{:.1f} of {} samples are effective after the policy's own drift is weighted away, and a plan "
    "needs {}"
)
_EQUAL = (
    "the rewards of all {} samples are equal within their groups, so they carry no preference that "
    "a coefficient could be set for"
)
_UNCERTAIN = "its standard error would be {:.0f} %, and at most {:.0f} % is wanted"
_NEAR_MOST = (
    "the target of {:.4g} nats per sample is near the {:.4g} nats (standard error {:.2g}) of a "
    "policy that always has the highest reward"
)
_GIVEN_UP = (
    "{} samples gave no plan: {}. Pass a number as `init_coeff`, and look at the rewards that the "
    "controller is given."
)
_UNSPENDABLE = (
    "`target` asks for {:.4g} nats per sample, but a policy that always has the highest reward is "
    "only {:.4g} nats from the reference: lower `target`, or use a ConstantKLController."
)
