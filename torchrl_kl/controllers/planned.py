"""Holds a target KL from the first batch on, without a coefficient to start from."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchrl_kl.controllers.base import InitCoeff, Per, TargetKLController
from torchrl_kl.controllers.plan import Plan

_RESPONSE, _LEAD = 3.0, 5.0  # updates in which a fast policy answers; that are looked ahead
_PRIOR, _GAIN = 4.0, 0.12  # measurements that the plan counts for; the least weight of a new one
_FLUCTUATION = 0.25  # how far log(coeff) is misjudged by one KL that is known exactly
_BRAKE, _ACCELERATION = math.log(1.5), math.log(10.0)  # how far log(coeff) leaves the needed one
_FAST = 0.2  # share of the acceleration for a policy that is fast
_PULL = 1.5  # by how much log(coeff) of a slow policy follows the KL at once
# Shares of the target: a quarter tells how fast a policy is, as does a jump in one update; where
# the way to the target ends; less per update is a standstill.
_QUARTER, _JUMP, _ARRIVED, _STANDSTILL = 0.25, 0.5, 0.8, 0.01
_SLOW = 4.0  # updates to a quarter of the target, from which on a policy counts as slow
_STATE = (
    "needed",
    "answered",
    "drift",
    "slope",
    "count",
    "last",
    "average",
    "rate",
    "rise",
    "arrived",
)


class PlannedKLController(TargetKLController):
    r"""Plans the coefficient from the first rewards, then holds the KL at the target.

    Its only argument is the target. The coefficient comes from `observe_rewards`, which the
    transforms, the losses and `kl_collector` call. Then each measurement tells which coefficient
    would hold the target, since around it :math:`KL \propto coeff^{-slope}` with the slope of the
    plan (2 for normally distributed rewards)::

        answered <- answered + (log(coeff) - answered) / 3
        seen      = answered + (clip(kl / target, 1/4, 2) - 1) / slope
        needed   <- needed + drift + gain * (seen - needed - drift)
        drift    <- drift + gain ** 2 / (2 - gain) * (seen - needed - drift)
        coeff     = exp(needed + 3 * drift)

    The policy answers to a new coefficient in about three updates, so what is seen is judged
    against the coefficients that it has answered to: the rule needs no derivative to be damped.
    `gain` falls as 1 / n to 0.12, the plan counting for four measurements, and by the factor
    1 / (1 + (standard_error / (target * slope * 0.25)) ** 2), so that a noisy mean moves little.
    The drift follows a need that falls with the learning rate, without lagging behind it.

    Until the KL has reached 0.8 of the target, `needed` is not lowered while the KL rises. If the
    KL would pass the target within five updates, at its present rate, the coefficient is up to 1.5
    times as high; if it would still be near 0, the coefficient is lower, by a factor of 10 ** 0.2
    for a fast policy and of 10 for a slow one, and of 1.5 per update at most. A policy is slow that
    takes four updates to a quarter of the target, and fast if it needs none, or if its KL jumps by
    half the target. Later log(coeff) of a slow one also follows the KL at once, by up to
    1.5 * (kl / target - 1), or the KL would swing around the target.

    You may rely on: the coefficient stays above 0 and finite; k times the rewards give k times the
    coefficient. You may not rely on a KL above the target raising the coefficient at once.

    State: the coefficient and ten 0-dim float64 buffers, changed in place; the plan's samples.

    Args:
        target, deadband, per: as in `TargetKLController`.
        init_coeff: "plan", or a number that is taken for the planned coefficient; either way the
            first coefficient is 1.5 times as high.

    Raises:
        ValueError: if a number is out of its range.

    Reference:
        R. Kalman, "A New Approach to Linear Filtering and Prediction Problems" (1960), for a level
        and a drift with fixed gains; D. Ziegler et al. (2019), section 2, for the optimum.

    Example:
        >>> import torch
        >>> from torchrl_kl import PlannedKLController
        >>> controller = PlannedKLController(target=0.1)
        >>> fair_coin = torch.tensor([0.0, 1.0] * 50)
        >>> round(controller.observe_rewards(fair_coin), 2)  # 1.5 times 1.06, to begin with
        1.59
        >>> [round(controller.update(kl, n_steps=64), 2) for kl in (0.05, 0.1, 0.1, 0.1)]
        [1.55, 1.51, 1.47, 1.44]
    """

    needed: Tensor
    answered: Tensor
    drift: Tensor
    slope: Tensor
    count: Tensor
    last: Tensor
    average: Tensor
    rate: Tensor
    rise: Tensor
    arrived: Tensor

    def __init__(
        self,
        target: float,
        *,
        init_coeff: InitCoeff = "plan",
        deadband: float = 0.0,
        per: Per = "trajectory",
    ):
        super().__init__(init_coeff, target, deadband=deadband, per=per)
        # `last`, `average`, `rate` (per update) are of KL / target; `rise`: updates to a quarter of
        # the target; `arrived` is 0 or 1.
        for name in _STATE:
            self.register_buffer(name, torch.zeros((), dtype=torch.float64))
        self._noise = 0.0  # standard error / target of the measurement that is being judged
        if not self.planning:
            self.coeff.fill_(self._begin(Plan(self.coeff.item(), math.nan, 2.0)))

    def _begin(self, plan: Plan) -> float:
        self.needed.fill_(math.log(plan.coeff))
        self.answered.fill_(math.log(plan.coeff) + _BRAKE)
        # Near the highest reward the KL hardly answers, and a noisy KL would move it far.
        self.slope.fill_(min(max(plan.slope, 0.5), 2.0))
        return plan.coeff * math.exp(_BRAKE)

    def _ignore_noise(self, kl: float, standard_error: float | None) -> float:
        known = standard_error is not None and math.isfinite(standard_error)
        self._noise = standard_error / self.target if known else 0.0  # type: ignore[operator]
        return super()._ignore_noise(kl, standard_error)

    def _next_coeff(self, kl: float, n_steps: int) -> float:
        ratio = min(max(kl / self.target, 0.0), 2.0)
        step = ratio - self.last.item()
        self.last.fill_(ratio)
        self.count += 1
        self.answered += (self.coeff.log() - self.answered) / _RESPONSE
        self.rate += (1.0 if self.count == 1 else 0.3) * (step - self.rate)
        self.average += (ratio - self.average) / 4
        if self.rise == self.count - 1 and max(ratio, self.average.item()) < _QUARTER:
            self.rise.copy_(self.count)  # not when it comes back there later
        elif abs(step) > _JUMP + 2 * self._noise:
            self.rise.zero_()
        if self.average >= _ARRIVED:
            self.arrived.fill_(1.0)
        self._learn(ratio)
        # The policy will have answered in a few updates, when the need has gone on drifting.
        value = (self.needed + _RESPONSE * self.drift).item() + self._extra(ratio)
        value = max(value, self.coeff.log().item() - _BRAKE)
        return math.exp(min(max(value, -700.0), 700.0))

    def _learn(self, ratio: float) -> None:
        """Moves the coefficient that is thought to hold the target, after a KL / target."""
        seen = self.answered.item() + (max(ratio, 0.25) - 1) / self.slope.item()
        surprise = seen - self.needed.item() - self.drift.item()
        if surprise < 0 and not self.arrived and self.rate >= _STANDSTILL:
            return
        noise = self._noise / (self.slope.item() * _FLUCTUATION)
        gain = max(_GAIN, 1 / (_PRIOR + self.count.item())) / (1 + noise**2)
        self.needed += self.drift + gain * surprise
        if self.arrived:
            self.drift += gain**2 / (2 - gain) * surprise

    def _extra(self, ratio: float) -> float:
        """What is added to log(coeff), for a KL / target."""
        slow = min(self.rise.item() / _SLOW, 1.0)
        if self.arrived:
            return slow * _PULL * ((self.average.item() + ratio) / 2 - 1)
        forecast = ratio + _LEAD * self.rate.item()
        if forecast < 1:
            return -(_FAST + (1 - _FAST) * slow) * _ACCELERATION * min(1 - forecast, 1.0)
        return _BRAKE * max(0.0, 1 - self.average.item()) * min(4 * (forecast - 1), 1.0)
