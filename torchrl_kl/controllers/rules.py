"""Measured KL in, coefficient out: the rules that move the coefficient of the KL penalty."""

from __future__ import annotations

import math
import sys
import warnings
from abc import abstractmethod

import torch
from torch import Tensor

from torchrl_kl.controllers.base import InitCoeff, KLController, Per, TargetKLController
from torchrl_kl.functional.numbers import check_number

# Of PlannedKLController; its docstring says what they do.
_RESPONSE = 12.0  # updates
_SHARE = 0.7
_GROWTH = 0.2
_FASTEST = 2.0
_STEEPEST = 3.0


class ConstantKLController(KLController):
    """A coefficient that never moves; with 0 the KL is only measured.

    `coeff`: reward per nat, at least 0 and finite, or it is a ValueError; `per`: the unit in which
    the transforms pool the KL for the log.

    Example:
        >>> from torchrl_kl import ConstantKLController
        >>> ConstantKLController(0.1).update(kl=3.0, n_steps=64)
        0.1
    """

    def __init__(self, coeff: float, *, per: Per = "trajectory"):
        super().__init__(check_number("coeff", coeff, at_least=0.0), per=per)

    def next_coeff(self, kl: float, n_steps: int) -> float:  # noqa: D102
        return self.coeff.item()


class AdaptiveKLController(TargetKLController):
    """Takes a KL; TorchRL's class of this name takes the list of `-coeff * kl` rewards instead.

    Given a KL, that class always lowers the coefficient. The rule is that of Ziegler et al.:

        coeff <- coeff * (1 + clip(kl / target - 1, -clip, clip) * n_steps / horizon)

    You may rely on: a KL above the target raises the coefficient, one below lowers it, one at the
    target leaves it unchanged; it stays positive and finite (within the range of float64).

    Args:
        init_coeff, target, per: as in `TargetKLController`. Ziegler et al. hold 6 nats
            per trajectory of 24 tokens; per step 0.01 is cautious, 0.05 to 0.1 usual.
        horizon: over so many trajectories (steps) the coefficient changes by a factor of at most
            about exp(clip); above 0.
        clip: the largest relative error that counts, above 0.

    Raises:
        ValueError: if a number is out of its range; in `update`, if `clip * n_steps >= horizon`,
            where the rule would reach zero or change sign.

    Reference:
        D. Ziegler et al., "Fine-Tuning Language Models from Human Preferences" (2019), section 2.2.

    Example:
        >>> from torchrl_kl import AdaptiveKLController
        >>> controller = AdaptiveKLController(init_coeff=0.2, target=6.0, horizon=10_000)
        >>> round(controller.update(kl=9.0, n_steps=512), 6)  # 50 % too high, clipped to 20 %
        0.202048
    """

    _ranges = TargetKLController._ranges | {"horizon": {"above": 0.0}, "clip": {"above": 0.0}}

    def __init__(
        self,
        init_coeff: InitCoeff,
        target: float,
        horizon: float,
        *,
        clip: float = 0.2,
        per: Per = "trajectory",
    ):
        super().__init__(init_coeff, target, per=per)
        self.horizon, self.clip = horizon, clip

    def next_coeff(self, kl: float, n_steps: int) -> float:  # noqa: D102
        if self.clip * n_steps >= self.horizon:
            raise ValueError(
                f"`n_steps` must be less than horizon / clip = {self.horizon / self.clip:g}, got "
                f"{n_steps}: one update could bring the coefficient to zero or below. Raise "
                "`horizon`, lower `clip`, or update more often."
            )
        # The factor is above 0: only underflow or overflow could make the coefficient 0 or inf.
        error = self._relative_error(kl, self.clip)
        value = self.coeff.item() * (1 + error * n_steps / self.horizon)
        return min(max(value, sys.float_info.min), sys.float_info.max)


class _LogKLController(TargetKLController):
    """Moves the logarithm of the coefficient between two bounds; a subclass says how far."""

    _ranges = TargetKLController._ranges | {
        "min_coeff": {"above": 0.0, "at_most": "max_coeff"},
        "max_coeff": {"at_least": "min_coeff"},
    }

    def __init__(
        self, init_coeff: InitCoeff, target: float, min_coeff: float, max_coeff: float, per: Per
    ):
        super().__init__(init_coeff, target, per=per)
        self.min_coeff = min_coeff
        self.max_coeff = max_coeff
        coeff = self.coeff.item()
        if not self.planning and not min_coeff <= coeff <= max_coeff:
            raise ValueError(
                f"`init_coeff` must lie within [min_coeff, max_coeff] = [{min_coeff:g}, "
                f"{max_coeff:g}], got {coeff:g}: move the bound or start inside."
            )

    @abstractmethod
    def _log_change(self, error: float) -> float:
        """How far log(coeff) moves for a relative error of the KL within [-1, 1]."""

    def next_coeff(self, kl: float, n_steps: int) -> float:
        # exp(710) overflows.
        change = min(self._log_change(self._relative_error(kl)), 700.0)
        return min(max(self.coeff.item() * math.exp(change), self.min_coeff), self.max_coeff)


class ExponentialKLController(_LogKLController):
    """Moves the logarithm of the coefficient by the relative error of the KL.

    The rule:

        coeff <- clamp(coeff * exp(gain * clip(kl / target - 1, -1, 1)), min_coeff, max_coeff)

    You may rely on: one update moves it by a factor of at most exp(gain), whatever `n_steps` is; it
    stays within its bounds.

    Args:
        init_coeff, target, per: as in `TargetKLController`; `init_coeff` within bounds.
        gain: the largest change of log(coeff) per update, above 0.
        min_coeff, max_coeff: the bounds of the coefficient, 0 < `min_coeff` <= `max_coeff`.

    Example:
        >>> from torchrl_kl import ExponentialKLController
        >>> controller = ExponentialKLController(init_coeff=1.0, target=0.5)
        >>> round(controller.update(kl=5.0, n_steps=64), 4)  # far above: the error counts as 1
        1.1052
    """

    _ranges = _LogKLController._ranges | {"gain": {"above": 0.0}}

    def __init__(
        self,
        init_coeff: InitCoeff,
        target: float,
        *,
        gain: float = 0.1,
        min_coeff: float = 1e-4,
        max_coeff: float = 10.0,
        per: Per = "trajectory",
    ):
        super().__init__(init_coeff, target, min_coeff, max_coeff, per)
        self.gain = gain

    def _log_change(self, error: float) -> float:
        return self.gain * error


class PIDKLController(_LogKLController):
    """Moves the logarithm of the coefficient by the KL's error, and by how fast that error changes.

    A policy responds to a new coefficient only after many updates, and a rule that only sums errors
    overshoots. The proportional part takes back what the sum has added as the error shrinks:

        error    = clip(kl / target - 1, -1, 1)
        filtered = smoothing * filtered_before + (1 - smoothing) * error
        change   = filtered - filtered_before
        move     = ki * error + kp * change + kd * (change - change_before)
        coeff   <- clamp(coeff * exp(move), min_coeff, max_coeff)

    Nothing winds up at a bound. The default gains suit a policy that takes 5 to 20 updates to
    respond.

    You may rely on: from the same state a higher KL never gives a lower coefficient; log(coeff)
    moves by at most ki + 2 kp + 4 kd per update (`n_steps` is not used) and stays within bounds.
    You may not rely on a KL above the target raising the coefficient while it is coming down.

    State: `coeff`, `filtered_error` and `filtered_change`, 0-dim float64 buffers, changed in place.

    Args:
        init_coeff, target, per: as in `TargetKLController`; `init_coeff` within bounds.
        kp: proportional gain, in [0, 100]: of the filtered error.
        ki: integral gain, in (0, 100]: how fast a lasting error moves log(coeff), per update.
        kd: derivative gain, in [0, 100]: of the change of the filtered error. It amplifies noise.
        smoothing: weight of the past in the moving average of the error, in [0, 1).
        min_coeff, max_coeff: the bounds of the coefficient, 0 < `min_coeff` <= `max_coeff`.

    Reference:
        A. Stooke, J. Achiam, P. Abbeel, "Responsive Safety in Reinforcement Learning by PID
        Lagrangian Methods" (2020), which controls a multiplier itself; here its logarithm.

    Example:
        >>> from torchrl_kl import PIDKLController
        >>> controller = PIDKLController(1.0, target=0.5, kp=0.6, ki=0.08, smoothing=0.7)
        >>> [round(controller.update(kl, n_steps=64), 4) for kl in (1.0, 0.6)]  # 0.6: coming down
        [1.2969, 1.2943]
    """

    filtered_error: Tensor
    filtered_change: Tensor
    # With gains up to 100 one update moves log(coeff) by at most 700, so exp is finite.
    _ranges = _LogKLController._ranges | {
        "kp": {"at_least": 0.0, "at_most": 100.0},
        "ki": {"above": 0.0, "at_most": 100.0},
        "kd": {"at_least": 0.0, "at_most": 100.0},
        "smoothing": {"at_least": 0.0, "below": 1.0},
    }

    def __init__(
        self,
        init_coeff: InitCoeff,
        target: float,
        *,
        kp: float = 0.6,
        ki: float = 0.08,
        kd: float = 0.0,
        smoothing: float = 0.7,
        min_coeff: float = 1e-4,
        max_coeff: float = 10.0,
        per: Per = "trajectory",
    ):
        super().__init__(init_coeff, target, min_coeff, max_coeff, per)
        self.kp = kp
        self.ki = ki
        self.kd = kd
        self.smoothing = smoothing
        for name in ("filtered_error", "filtered_change"):
            self.register_buffer(name, torch.zeros((), dtype=torch.float64))

    def _log_change(self, error: float) -> float:
        # All in Python floats, which are float64 as the buffers are.
        before, change_before = self.filtered_error.item(), self.filtered_change.item()
        filtered = self.smoothing * before + (1 - self.smoothing) * error
        change = filtered - before
        self.filtered_error.fill_(filtered)
        self.filtered_change.fill_(change)
        return self.ki * error + self.kp * change + self.kd * (change - change_before)


class PlannedKLController(TargetKLController):
    """Needs the target only: plans a first coefficient, searches for the right one, and holds it.

    Let `x = sqrt(kl / target)`: it grows evenly where a policy moves evenly, and goes as 1 / coeff
    where it has settled; and `rise` what x is above its mean over 6 updates.

    - It starts at 1.2 times the plan (see `observe_rewards`), with which kl would settle at 0.7 of
      the target: a fast policy passes what it settles at. This margin is taken back within 12
      updates.
    - The error is `kl / target - 1` above the target, at most 1, and `log(kl / target)` below.
      log(coeff) moves by 0.7 / 12 of it: a lasting error of 1 moves it by 0.7 in 12 updates, in
      which most policies respond.
    - Below the target it waits for a policy that is on its way: it moves by the share
      1 - rise / speed of that, where speed is the largest rise so far, or jump from one update
      to the next. A policy at full speed is not held by the penalty. A rise that the fall of the
      coefficient explains, as x goes as 1 / coeff, does not count.
    - While the error keeps its sign, it moves faster with each update, by a fifth of the error or
      of 1, whichever is less, up to twice as fast: where chance decides most of the rewards, a plan
      is a hundred times too high.
    - coeff also goes as a power of x, within 0.7 and 2: a sum of errors alone swings where the
      policy is slow, and this damps it. The power is 0.7 / speed - 1, from 0 to 3: none where the
      policy comes from the reference to the target in one or two updates, too fast to be damped.
    - The coefficient stays within 1e-4 and 1e4 times the first one. There a warning says, once,
      which KL the policy has: nothing holds it at the target.

    You may rely on: k times the rewards give k times the coefficient. You may not rely on a steady
    KL where it is not steady with a constant coefficient: where the KL hardly answers, the search
    goes too far, and the KL many times over the target.

    State: the plan; `coeff`, `last` and `average` (x and its mean), `speed`, `pace` and
    `n_updates`: 0-dim float64 buffers.

    Args:
        target, per: as in `TargetKLController`. Per step 0.01 nats is cautious and 0.2 much; per
            response 3 nats let a language model change its style.
        init_coeff: "plan", or the first coefficient; there is no margin to take back then.

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
    pace: Tensor
    n_updates: Tensor
    _margin = _SHARE**-0.5

    def __init__(self, target: float, *, init_coeff: InitCoeff = "plan", per: Per = "trajectory"):
        super().__init__(init_coeff, target, per=per)
        for name in ("last", "average", "speed", "pace", "n_updates"):
            self.register_buffer(name, torch.zeros((), dtype=torch.float64))
        self._warned = False
        self._given = self.coeff.item()  # 0 where it is planned

    def next_coeff(self, kl: float, n_steps: int) -> float:  # noqa: D102
        x = math.sqrt(min(max(kl / self.target, 0.0), 4.0))
        self.n_updates += 1
        n = self.n_updates.item()
        rise = x - self.average.item()
        self.average += rise / min(n + 1, _RESPONSE / 2)
        jump = abs(x - self.last.item())
        self.speed.fill_(max(self.speed.item(), rise, jump, 0.01))
        error = min(x**2 - 1, 1.0) if x > 1 else 2 * math.log(max(x, 0.1))
        pace = self.pace.item() * math.copysign(1 + _GROWTH * min(abs(error), 1.0), error)
        pace = min(max(pace, 1.0), _FASTEST)
        self.pace.fill_(math.copysign(pace, error))
        if error < 0:
            error *= min(1 - rise / self.speed.item(), 1.0)
        move = _SHARE / _RESPONSE * pace * error
        if move < 0:  # what x would be with the new coefficient, where it has settled
            self.average.fill_(min(self.average.item() * math.exp(-move), 1.0))
        power = min(max(_SHARE / self.speed.item() - 1, 0.0), _STEEPEST)
        before, now = max(self.last.item(), _SHARE), max(x, _SHARE)
        self.last.fill_(x)
        value = self.coeff.item() * math.exp(move) * (now / before) ** power
        if n <= _RESPONSE:  # the margin, and what the power is going to add
            margin = self._margin if self.plan is not None else 1.0
            value *= (margin * _SHARE**-power) ** (-1 / _RESPONSE)
        first = self._given if self.plan is None else self.plan.made.item()
        bounded = min(max(value, 1e-4 * first), 1e4 * first)
        if bounded != value and not self._warned:
            self._warned = True
            found = f"the coefficient is {bounded:.3g} and the KL {kl:.3g} nats per {self.per}: "
            warnings.warn(found + (_UNREACHED if value < first else _UNHELD), stacklevel=4)
        return bounded


_UNREACHED = (
    "almost without a penalty the policy does not reach the target either. Lower `target`, or "
    "train faster or longer."
)
_UNHELD = (
    "10,000 times the first coefficient does not bring it down to the target. Make policy updates "
    "smaller (learning rate, epochs), or raise `target`."
)


def is_constant(controller: KLController) -> bool:
    """Whether its coefficient never moves; a subclass may have a rule, such as a schedule."""
    rules = [(kind.next_coeff, kind.update) for kind in (type(controller), ConstantKLController)]
    return rules[0] == rules[1]


def as_controller(controller: KLController | float) -> KLController:
    """A controller unchanged, a number as a constant coefficient; TypeError for anything else."""
    if isinstance(controller, KLController):
        return controller
    if isinstance(controller, bool) or not isinstance(controller, (int, float)):
        got = type(controller).__name__
        raise TypeError(f"`controller` must be a KLController or a number, got {got}.")
    return ConstantKLController(controller)
