"""The coefficient for a target KL, from rewards of the reference: before any training."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchrl_kl.functional.numbers import Float64State, check_number, check_tensor, solve_decreasing

_FEWEST = 16  # samples that must carry the weight, before and after the rewards reweight them
_MOST = 65_536  # samples that a plan stores; it drops older ones


class Reweighted:
    """P rows of S samples of the reference, reweighted by exp(reward / coeff): the optimum's.

    Coefficients are in units of `spread`, so that rewards k times as large give the same numbers.

    Args:
        rewards: (P, S).
        log_weights: of each sample for the reference, (P, S).
    """

    def __init__(self, rewards: Tensor, log_weights: Tensor):
        gaps = rewards - rewards.amax(1, keepdim=True)
        self.spread = -gaps.min().item()  # the largest gap between the rewards of a row
        self.gaps = gaps / self.spread if self.spread > 0 else gaps  # within [-1, 0]
        self.log_weights = log_weights.log_softmax(1)

    def kl(self, coeff: float) -> float:
        """KL of the reweighted to the given samples, nats, mean over the rows."""
        exponents = self.log_weights + self.gaps / coeff
        log_total = exponents.logsumexp(1, keepdim=True)
        new = (exponents - log_total).exp()
        return ((new * self.gaps / coeff).sum(1) - log_total.squeeze(1)).mean().item()

    @property
    def limit(self) -> float:
        """The KL at a coefficient of 0, where only each row's best samples are left, nats."""
        best = self.log_weights.masked_fill(self.gaps < 0, -math.inf)
        return 0.0 - best.logsumexp(1).mean().item()

    def solve(self, budget: float) -> float:
        """The coefficient whose KL is `budget`, which must be below the limit."""
        # Rewards within a range have KL <= (range / coeff)^2 / 8 (Hoeffding).
        return solve_decreasing(self.kl, budget, 1 / math.sqrt(8 * budget))

    def effective(self, coeff: float) -> float:
        """How many samples carry the new weight, of all rows."""
        new = (self.log_weights + self.gaps / coeff).softmax(1)
        return (1 / new.square().sum(1)).sum().item()


class RewardPlan(Float64State):
    """Pools rewards of (nearly) the reference until they show the coefficient for a target KL.

    The coefficient is that of `coeff_for_budget`, with three additions:

    - Samples of a group (the responses to a prompt) are compared with each other only. Groups of at
      least 32 and 8 exp(KL) samples on average are the rows of `coeff_for_budget`. In smaller ones
      the group's mean is subtracted, and all samples are one row. If most samples are alone in
      their group, groups are ignored. The coefficient is then too high, by about sqrt(total
      variance / variance within prompts), as if the policy could choose the prompt.
    - Each sample has the weight exp(-log_ratio), which corrects for a policy that has moved.
    - If fewer than 16 samples carry the reweighted mean, as for a target near log N, the rewards
      are taken as normally distributed, beta = sqrt(Var(R) / (2 KL)), unless reweighting gives a
      larger coefficient, as for rare successes.

    The plan waits for 16 effective trajectories or 256 steps, and until the rewards differ.

    State: the samples, (N, 4) float64: reward, log-ratio, length, group; `made`, the coefficient, 0
    before there is one.
    """

    made: Tensor

    def __init__(self):
        super().__init__()
        self.samples = torch.zeros(0, 4, dtype=torch.float64)
        self.reason = "no reward has come yet"  # why there is no plan
        self.register_buffer("made", torch.zeros((), dtype=torch.float64))

    def add(self, rewards: Tensor, **others: Tensor | None) -> None:
        """Pools samples, unless one is refused; see `TargetKLController.observe_rewards`."""
        given = {name: values for name, values in others.items() if values is not None}
        for name, values in {"rewards": rewards, **given}.items():
            if not isinstance(values, Tensor) or values.is_complex():
                got = values.dtype if isinstance(values, Tensor) else type(values).__name__
                raise TypeError(f"`{name}` must be a tensor of real numbers, got {got}.")
            if rewards.ndim != 1 or values.shape != rewards.shape:
                raise ValueError(
                    f"`rewards` and `{name}` must both have the shape (N,), got "
                    f"{tuple(rewards.shape)} and {tuple(values.shape)}: pass one number per sample."
                )
            bad = int((~values.isfinite()).sum())
            if bad > 0 and name != "groups":  # there, a NaN is alone
                raise ValueError(
                    f"`{name}` must be finite, got {bad} NaN or infinite numbers of {len(values)}: "
                    "leave out padding, and find out where the others come from."
                )
            if name == "lengths" and (values < 1).any():
                raise ValueError(
                    f"`lengths` must be at least 1, got {values.min().item():g}: leave out samples "
                    "without a step."
                )
        new = torch.zeros(len(rewards), 4, dtype=torch.float64, device=rewards.device)
        before = self.samples.to(new)
        new[:, 0] = rewards.detach()
        new[:, 1] = given.get("log_ratios", new[:, 1]).detach()
        new[:, 2] = given.get("lengths", torch.ones_like(new[:, 2]))
        # Samples of different calls are in different groups; without groups each has its own.
        number = given.get("groups", torch.arange(len(new))).unique(return_inverse=True)[1]
        new[:, 3] = number + (before[:, 3].max().item() + 1 if len(before) else 0)
        self.samples = torch.cat([before, new])[-_MOST:]

    def solve(self, target: float, fewest: int = _FEWEST) -> float | None:
        """The coefficient for a target, nats per step of a sample, above 0.

        None where there are not `fewest` effective samples, or all are equal; `reason` says it.
        """
        samples, lengths = self.samples, self.samples[:, 2]
        weights = (-samples[:, 1]).softmax(0)
        effective = 1 / weights.square().sum().item() if len(weights) else 0.0
        if effective < fewest:
            found = f"{effective:.1f} of {len(weights)} samples are effective"
            self.reason = f"{found} (those of a moved policy less so); it needs {fewest}"
            return None
        budget = target * (weights * lengths).sum().item()
        rewards, log_weights = _compared(samples)
        rows = Reweighted(rewards[None], log_weights[None])
        if rows.spread == 0:
            found = f"the rewards of all {len(samples)} samples are equal within their groups"
            self.reason = f"{found}: they prefer nothing"
            return None
        per_group = effective / len(samples[:, 3].unique())
        if per_group >= 2 * _FEWEST and budget <= math.log(2 * per_group / _FEWEST):
            rows = Reweighted(*_by_group(samples))
        weights = log_weights.softmax(0)
        squares = weights * (rewards - (weights * rewards).sum()).square()
        variance = (squares.sum() / (1 - weights.square().sum())).item()
        by_variance = math.sqrt(variance / (2 * budget))
        if budget >= rows.limit:
            return by_variance
        found = rows.solve(budget)
        planned = found * rows.spread
        return planned if rows.effective(found) >= _FEWEST else max(planned, by_variance)

    def close(self, planned: float) -> None:
        """Drops the samples, since the plan is made; the largest plan counts."""
        self.samples = self.samples[:0]
        self.made.clamp_(min=planned)

    def get_extra_state(self) -> list[list[float]]:
        """The samples, for `state_dict`; a distributed checkpoint refuses tensors of any size."""
        return self.samples.tolist()

    def set_extra_state(self, state: list[list[float]]) -> None:
        """Takes over the samples of a `state_dict`."""
        self.samples = torch.tensor(state, dtype=torch.float64).reshape(-1, 4)


def _compared(samples: Tensor) -> tuple[Tensor, Tensor]:
    """Rewards and log-weights, (N,); rewards are centred in their groups if most share one."""
    rewards, log_weights = samples[:, 0], -samples[:, 1]
    _, group, counts = samples[:, 3].unique(return_inverse=True, return_counts=True)
    sizes = counts[group]
    some = sizes > 1
    if 2 * some.sum() < len(sizes):
        return rewards, log_weights
    means = torch.zeros_like(counts, dtype=rewards.dtype).index_add_(0, group, rewards) / counts
    # The mean square of S samples around their own mean is too small, by (S - 1) / S.
    centred = (rewards - means[group]) * (sizes / (sizes - 1)).sqrt()
    return centred[some], log_weights[some]


def _by_group(samples: Tensor) -> tuple[Tensor, Tensor]:
    """Rewards and log-weights of the groups, (P, S) each; padding of short rows has weight 0."""
    _, group, counts = samples[:, 3].unique(return_inverse=True, return_counts=True)
    order = group.argsort(stable=True)
    is_sample = torch.arange(int(counts.max()), device=counts.device) < counts[:, None]
    fills = samples[order[(counts.cumsum(0) - counts)], 0]  # a reward of the row
    rewards = fills[:, None].repeat(1, is_sample.shape[1])
    log_weights = torch.full_like(rewards, -math.inf)
    rewards[is_sample], log_weights[is_sample] = samples[order, 0], -samples[order, 1]
    return rewards, log_weights


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
        rewards: the reward of each response that the reference wrote, real numbers, shape (N,), or
            (P, S) for S samples of each of P prompts. If rewards (N,) are of several prompts,
            differences between prompts count as if the policy could choose the prompt, so that
            the coefficient is too high.
        budget: nats per response, the mean over the prompts, above 0.

    Returns:
        The coefficient, reward per nat, above 0.

    Raises:
        TypeError: if `rewards` is not a tensor, or `budget` not a number.
        ValueError: if `rewards` have another shape, are empty, NaN, infinite or constant for every
            prompt, or if `budget` is not above 0 and below the largest KL the samples can show.

    Reference:
        D. Ziegler et al., "Fine-Tuning Language Models from Human Preferences" (2019), section 2.

    Example:
        >>> import torch
        >>> from torchrl_kl import coeff_for_budget
        >>> round(coeff_for_budget(torch.tensor([0.0, 1.0]), 0.1), 4)  # a fair coin
        1.0599
    """
    check_tensor("rewards", rewards)
    if rewards.ndim not in (1, 2) or rewards.numel() == 0:
        raise ValueError(
            "`rewards` must be the rewards (N,) of samples, or (P, S) of S samples of each of P "
            f"groups, not empty, got shape {tuple(rewards.shape)}."
        )
    budget = check_number("budget", budget, above=0.0)
    values = rewards.detach().double().reshape(-1, rewards.shape[-1])  # (P, S)
    rows = Reweighted(values, torch.zeros_like(values))
    if not math.isfinite(rows.spread):
        bad = int((~values.isfinite()).sum())
        raise ValueError(
            "`rewards` and their differences must be finite, got "
            f"{bad} NaN or infinite ones of {values.numel()}."
        )
    if rows.spread == 0 or budget >= rows.limit:
        raise ValueError(
            f"`budget` must be below {rows.limit:.6g} nats, all that these samples can show (0 if "
            f"the rewards of each row are equal), got {budget:g}: draw more samples, lower the "
            "budget, or squeeze a trailing dimension of 1."
        )
    return rows.spread * rows.solve(budget)
