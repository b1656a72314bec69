"""Holds a target KL from the first batch on, without a coefficient to start from."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchrl_kl.controllers.base import InitCoeff, Per, TargetKLController
from torchrl_kl.controllers.plan import Plan

_BRAKE, _ACCELERATION = math.log(1.5), math.log(4.0)
_RESPONSE, _HORIZON = 3.0, 15.0  # updates in which a policy answers; in which it is to arrive
_ARRIVED = 0.8  # share of the target
_STANDSTILL = 0.15  # share of the target by which a KL that has settled moves in that horizon
_PRIOR, _GAIN = 4.0, 0.12  # measurements that the plan counts for; the least weight of a new one
_FLUCTUATION = 0.25  # how far log(coeff) is misjudged by one KL that is known exactly
_STATE = (
    "needed",
    "answered",
    "drift",
    "slope",
    "count",
    "last",
    "average",
    "rate",
    "peak",
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

    Until 0.8 of the target is reached, `needed` only rises, unless the KL has come to a standstill.
    On this way a KL that would pass the target within 15 updates meets up to 1.5 times the
    coefficient, one that would not get there, and never was near, as little as a quarter; both
    vanish on the way.

    You may rely on: the coefficient stays above 0 and finite; k times the rewards give k times the
    coefficient. You may not rely on a KL above the target raising the coefficient at once.

    State: the coefficient and ten 0-dim float64 buffers, changed in place; the plan's samples.

    Args:
        target, deadband, per: as in `TargetKLController`.
        init_coeff: "plan", or a number to begin with instead.

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
        >>> controller.update(kl=0.02, n_steps=64) > controller.update(kl=0.1, n_steps=64)
        True
    """

    needed: Tensor
    answered: Tensor
    drift: Tensor
    slope: Tensor
    count: Tensor
    last: Tensor
    average: Tensor
    rate: Tensor
    peak: Tensor
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
        # `last`, `average`, `rate` (per update), `peak` are of KL / target; `arrived` is 0 or 1.
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
        self.count.fill_(_PRIOR)
        return plan.coeff * math.exp(_BRAKE)

    def _ignore_noise(self, kl: float, standard_error: float | None) -> float:
        known = standard_error is not None and math.isfinite(standard_error)
        self._noise = standard_error / self.target if known else 0.0  # type: ignore[operator]
        return super()._ignore_noise(kl, standard_error)

    def _next_coeff(self, kl: float, n_steps: int) -> float:
        ratio = min(max(kl / self.target, 0.0), 2.0)
        self.answered += (self.coeff.log() - self.answered) / _RESPONSE
        self.rate += 0.3 * (ratio - self.last - self.rate)
        self.average += (ratio - self.average) / 4
        self.last.fill_(ratio)
        self.peak.fill_(max(self.peak.item(), ratio))
        if self.average >= _ARRIVED:
            self.arrived.fill_(1.0)
        rise = _HORIZON * self.rate.item()
        self._learn(ratio, only_up=not self.arrived and rise >= _STANDSTILL)
        # The policy will have answered in a few updates, when the need has gone on drifting.
        value = (self.needed + _RESPONSE * self.drift).item() + self._extra(ratio + rise)
        return math.exp(min(max(value, -700.0), 700.0))

    def _learn(self, ratio: float, only_up: bool) -> None:
        """Moves the coefficient that is thought to hold the target, after a KL / target."""
        seen = self.answered.item() + (max(ratio, 0.25) - 1) / self.slope.item()
        surprise = seen - self.needed.item() - self.drift.item()
        if only_up and surprise < 0:
            return
        self.count += 1
        noise = self._noise / (self.slope.item() * _FLUCTUATION)
        gain = max(_GAIN, 1 / self.count.item()) / (1 + noise**2)
        self.needed += self.drift + gain * surprise
        if self.arrived:
            self.drift += gain**2 / (2 - gain) * surprise

    def _extra(self, forecast: float) -> float:
        """What is added to log(coeff) on the way to the target, for a forecast of KL / target."""
        if self.arrived:
            return 0.0
        way = max(0.0, 1 - self.average.item())
        if forecast >= 1:
            return way * _BRAKE
        # A KL that falls back from near the target is not slow.
        return 0.0 if self.peak >= _ARRIVED else -way * _ACCELERATION * min(1 - forecast, 1.0)
