"""The rule that needs a target only: from a plan of the rewards, searched for under a bound."""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor

from torchrl_kl.controllers.base import InitCoeff, Per, TargetKLController

# The docstring says what they do.
_RESPONSE = 12.0  # updates
_SHARE = 0.7
_STEEPEST = 1.5
_MOST, _LEAST = 2.0, 1e-4  # times the plan


class PlannedKLController(TargetKLController):
    """Needs the target only: plans a coefficient, searches for the right one, and holds the target.

    It starts at 1.2 times the plan (see `observe_rewards`). At update n:

        x      = sqrt(clip(kl / target, 0, 4))
        rise   = x - average;  then average <- average + rise / 6
        speed  = the largest rise, or change of x, so far
        power  = clip(0.7 / speed - 1, 0, 1.5)
        error  = x ** 2 - 1 above the target,
                 (x - 1) * (1 - max(rise, 0) / speed) below it
        coeff <- coeff * exp(error / 12) * (max(x, 0.7) / max(x before, 0.7)) ** power
        coeff <- clip(coeff, 1e-4 * plan, 2 * plan)

    - x grows evenly where a policy moves evenly, and goes as 1 / coeff where it has settled.
    - A lasting error of 1 moves log(coeff) by 1 in 12 updates, in which most policies respond.
      Below the target it waits for a policy that is on its way, the more the faster it is. A rise
      that the fall of the coefficient explains does not count: a fall by a factor f raises
      average by 1 / f, to at most 1.
    - The power damps a slow policy, which a sum of errors alone lets swing; a policy that comes
      from the reference to the target in one or two updates is too fast to be damped. What the
      start and the power add, `1.2 * (1 / 0.7) ** power`, is taken back in the first 12 updates.
    - The plan takes the whole spread of the rewards for what the policy can choose, so that the
      right coefficient is hardly above it. It is made again from the rewards of each batch, and the
      largest one counts: rewards that grow need a larger coefficient.

    At 2 * plan, with a KL that stays above the target, a warning says once that no coefficient will
    do: that KL does not come from the rewards. Updates are too large, or the noise of the penalties
    moves the policy, and a larger coefficient adds to it. At 1e-4 * plan a warning says that the
    target is out of reach.

    You may rely on: k times the rewards give k times the coefficient; it stays within its bounds.
    You may not rely on a steady KL where it is not steady with a constant coefficient.

    State: the plan; `coeff`, `last` and `average` (x and its mean), `speed` and `n_updates`: 0-dim
    float64 buffers.

    Args:
        target, per: as in `TargetKLController`. Per step 0.01 nats is cautious and 0.2 much; per
            response 3 nats let a language model change its style.
        init_coeff: "plan", or the first coefficient, for data without rewards: then nothing is
            planned, and it stays within 1e-4 and 1e4 times this one.

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

    last: Tensor
    average: Tensor
    speed: Tensor
    n_updates: Tensor
    plans_again = True
    _margin = _SHARE**-0.5

    def __init__(self, target: float, *, init_coeff: InitCoeff = "plan", per: Per = "trajectory"):
        super().__init__(init_coeff, target, per=per)
        self._given = self.coeff.item()  # 0 where it is planned
        for name in ("last", "average", "speed", "n_updates"):
            self.register_buffer(name, torch.zeros((), dtype=torch.float64))
        self._warned = False

    def next_coeff(self, kl: float, n_steps: int) -> float:  # noqa: D102
        x, before = math.sqrt(min(max(kl / self.target, 0.0), 4.0)), self.last.item()
        self.n_updates += 1
        n = self.n_updates.item()
        rise = x - self.average.item()
        self.average += rise / (_RESPONSE / 2)
        speed = max(self.speed.item(), rise, abs(x - before), 0.01)
        self.speed.fill_(speed)
        self.last.fill_(x)
        move = (x**2 - 1 if x > 1 else (x - 1) * (1 - max(rise, 0.0) / speed)) / _RESPONSE
        if move < 0:  # what x would be with the new coefficient, where it has settled
            self.average.fill_(min(self.average.item() * math.exp(-move), 1.0))
        power = min(max(_SHARE / speed - 1, 0.0), _STEEPEST)
        value = self.coeff.item() * math.exp(move)
        value *= (max(x, _SHARE) / max(before, _SHARE)) ** power
        if n <= _RESPONSE:
            margin = 1.0 if self.plan is None else self._margin
            value *= (margin * _SHARE**-power) ** (-1 / _RESPONSE)
        first, most, of = self._given, 1 / _LEAST, "first coefficient"
        if self.plan is not None:
            first, most, of = self.plan.made.item(), _MOST, "plan"
        bounded = min(max(value, _LEAST * first), most * first)
        # Noise may bring it to a bound for a moment.
        stays = x < 1 if value < bounded else value > bounded and min(x, self.average.item()) > 1
        if stays and not self._warned:
            self._warned = True
            found = f"the coefficient is {bounded:.3g} and the KL {kl:.3g} nats per {self.per}: "
            why = _UNREACHED if value < bounded else _UNHELD.format(most, of)
            warnings.warn(found + why, stacklevel=4)
        return bounded


_UNREACHED = (
    "almost without a penalty the policy does not reach the target either. Lower `target`, or "
    "train faster or longer."
)
_UNHELD = (
    "{:,.0f} times the {} does not bring it down to the target, and a larger coefficient would not "
    "either. Lower the learning rate, collect more trajectories per batch, train the critic before "
    "the policy, or raise `target`."
)
