"""The rule that needs a target only: from a plan of the rewards, searched for under a bound."""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor

from torchrl_kl.controllers.base import InitCoeff, Per, TargetKLController
from torchrl_kl.controllers.plan import RewardPlan

_RESPONSE = 12.0  # updates
_SHARE = 0.7
_STEEPEST = 1.5
_MOST, _LEAST = 2.0, 1e-4  # times the plan


class PlannedKLController(TargetKLController):
    """Needs the target only: plans a coefficient, searches for the right one, and holds the target.

    It starts at 1.2 times the plan (see `observe_rewards`). At update n:

        x       = sqrt(clip(kl / target, 0, 4))
        rise    = x - average;  then average <- average + rise / 12
        recent <- recent + (x - recent) / 6
        speed   = the largest change of x, or x - recent, so far, at least 0.01
        power   = clip(0.7 / speed - 1, 0, 1.5)
        error   = x ** 2 - 1 above the target,
                  2 * (x - 1) * (1 - clip(rise / speed, 0, 1)) below it
        average <- min(average * exp(-error / 12), 1) below the target
        coeff  <- coeff * exp(error / 12) * (max(x, 0.7) / max(x before, 0.7)) ** power
        coeff  <- clip(coeff, 1e-4 * plan, 2 * plan / max(x, 1))

    x grows evenly where a policy moves evenly, and goes as 1 / coeff where it has settled. A
    lasting error of 1 moves log(coeff) by 1 in 12 updates, in which most policies respond. Below
    the target it waits for a rise that the fall of coeff does not explain. The power damps a slow
    policy. What start and power add, 1.2 * (1 / 0.7) ** power, 12 updates take back.

    The plan takes the whole spread of the rewards for what the policy can choose, so that the right
    coefficient is hardly above it. Each 16 trajectories or 256 steps make one, all of a batch
    together, and the largest counts. Where log-ratios are nearly normal, penalties vary as
    coeff * sqrt(2 * kl), and rewards as plan * sqrt(2 * target): up to 4 targets, the upper bound
    lets penalties vary twice as much. If the rule asks for more while x and average are both above
    sqrt(1 / 0.7), a warning says once what helps: most often updates are too large, or noise of the
    penalties moves the policy. At 1e-4 * plan one says that the target is out of reach.

    You may rely on: k times the rewards give k times the coefficient; it stays within its bounds.
    You may not rely on a steady KL where it is not steady with a constant coefficient, nor on a low
    bound after a reward that is far larger than all others, or after `target` was raised.

    State: the plan; `coeff`, `last` (x), `average`, `recent`, `speed`, `n_updates`: 0-dim float64.

    Args:
        target, per: as in `TargetKLController`. Per step 0.01 nats is cautious and 0.2 much; per
            response 3 nats let a language model change its style.
        init_coeff: "plan", or the first coefficient, which does not wait for rewards; no upper
            bound is below it. Before a plan, it stays within 1e-4 and 1e4 times this one.

    Example:
        >>> import torch
        >>> from torchrl_kl import PlannedKLController
        >>> controller = PlannedKLController(target=0.1)
        >>> fair_coin = torch.tensor([0.0, 1.0] * 50)
        >>> round(controller.observe_rewards(fair_coin), 2)
        1.27
        >>> [round(controller.update(kl, n_steps=64), 2) for kl in (0.05, 0.1, 0.12)]
        [1.25, 1.23, 1.23]
    """

    plan: RewardPlan
    last: Tensor
    average: Tensor
    recent: Tensor
    speed: Tensor
    n_updates: Tensor
    plans_again = True
    _margin = _SHARE**-0.5

    def __init__(self, target: float, *, init_coeff: InitCoeff = "plan", per: Per = "trajectory"):
        super().__init__(init_coeff, target, per=per)
        self._given = self.coeff.item()  # 0 where it is planned
        self.plan = self.plan or RewardPlan()
        for name in ("last", "average", "recent", "speed", "n_updates"):
            self.register_buffer(name, torch.zeros((), dtype=torch.float64))
        self._warned = False

    @property
    def planning(self) -> bool:
        """Whether it waits for rewards, from which it plans its first coefficient."""
        return self._given == 0 and super().planning

    def next_coeff(self, kl: float, n_steps: int) -> float:  # noqa: D102
        x, before = math.sqrt(min(max(kl / self.target, 0.0), 4.0)), self.last.item()
        self.n_updates += 1
        rise = x - self.average.item()
        self.average += rise / _RESPONSE
        self.recent += (x - self.recent.item()) / (_RESPONSE / 2)
        speed = max(self.speed.item(), abs(x - before), x - self.recent.item(), 0.01)
        self.speed.fill_(speed)
        self.last.fill_(x)
        error = x**2 - 1 if x > 1 else 2 * (x - 1) * (1 - min(max(rise / speed, 0.0), 1.0))
        move = math.exp(error / _RESPONSE)
        if error < 0:  # what x would be with the new coefficient, where it has settled
            self.average.fill_(min(self.average.item() / move, 1.0))
        power = min(max(_SHARE / speed - 1, 0.0), _STEEPEST)
        value = self.coeff.item() * move * (max(x, _SHARE) / max(before, _SHARE)) ** power
        if self.n_updates <= _RESPONSE:
            margin = 1.0 if self._given else self._margin
            value *= (margin * _SHARE**-power) ** (-1 / _RESPONSE)
        plan = self.plan.made.item()
        first, most = (plan, _MOST / max(x, 1.0)) if plan else (self._given, 1e4)
        bounded = min(max(value, _LEAST * first), max(most * first, self._given))
        held = _SHARE * min(x, self.average.item()) ** 2 <= 1
        stays = x < 1 if value < bounded else value > bounded and not held
        if stays and not self._warned:
            self._warned = True
            found = f"the coefficient is {bounded:.3g} and the KL {kl:.3g} nats per {self.per}: "
            warnings.warn(found + (_UNREACHED if value < bounded else _UNHELD), stacklevel=4)
        return bounded


_UNREACHED = (
    "almost without a penalty the policy does not reach the target either. Lower `target`, or "
    "train faster or longer."
)
_UNHELD = (
    "at its upper bound it does not bring it down to the target; a larger one adds noise, and need "
    "not either. Lower the learning rate, collect more trajectories per batch, train the "
    "critic before the policy, or raise `target`."
)
