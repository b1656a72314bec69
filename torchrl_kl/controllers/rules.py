"""Measured KL in, coefficient out: the rules that move the coefficient of the KL penalty."""

from __future__ import annotations

import math
import sys
from abc import abstractmethod

import torch
from torch import Tensor

from torchrl_kl.controllers.base import InitCoeff, KLController, Per, TargetKLController
from torchrl_kl.functional.numbers import check_number


class ConstantKLController(KLController):
    """A coefficient that never moves; with 0 the KL is only measured.

    Args:
        coeff: reward per nat, at least 0 and finite.
        per: the unit in which the transforms pool the KL for the log.

    Raises:
        ValueError: if `coeff` is negative or not finite.

    Example:
        >>> from torchrl_kl import ConstantKLController
        >>> ConstantKLController(0.1).update(kl=3.0, n_steps=64)
        0.1
    """

    moves = False

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
        self.horizon = check_number("horizon", horizon, above=0.0)
        self.clip = check_number("clip", clip, above=0.0)

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

    def __init__(
        self, init_coeff: InitCoeff, target: float, min_coeff: float, max_coeff: float, per: Per
    ):
        super().__init__(init_coeff, target, per=per)
        self.min_coeff = check_number("min_coeff", min_coeff, above=0.0)
        self.max_coeff = check_number("max_coeff", max_coeff, at_least=self.min_coeff)
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
        self.gain = check_number("gain", gain, above=0.0)

    def _log_change(self, error: float) -> float:
        return self.gain * error


class PIDKLController(_LogKLController):
    """Moves the logarithm of the coefficient by the KL's error, and by how fast that error changes.

    A policy responds to a new coefficient only after many updates, so that a rule that only sums
    errors overshoots. The proportional part takes back what the sum has added as the error shrinks:

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
        # With gains up to 100 one update moves log(coeff) by at most 700, so exp is finite.
        self.kp = check_number("kp", kp, at_least=0.0, at_most=100.0)
        self.ki = check_number("ki", ki, above=0.0, at_most=100.0)
        self.kd = check_number("kd", kd, at_least=0.0, at_most=100.0)
        self.smoothing = check_number("smoothing", smoothing, at_least=0.0, below=1.0)
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


def as_controller(controller: KLController | float) -> KLController:
    """A controller unchanged, a number as a constant coefficient; TypeError for anything else."""
    if isinstance(controller, KLController):
        return controller
    if isinstance(controller, bool) or not isinstance(controller, (int, float)):
        got = type(controller).__name__
        raise TypeError(f"`controller` must be a KLController or a number, got {got}.")
    return ConstantKLController(controller)
