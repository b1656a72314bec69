"""Measured KL in, coefficient out: the price of divergence and who moves it.

The coefficient is what one nat of KL(policy || reference) costs in units of reward. `kl` is always in the unit of
`target`, and a controller declares it: nats per trajectory or nats per step.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from typing import Literal

import torch
from torch import Tensor

from torchrl_kl.functional.numbers import Float64State, check_number

__all__ = [
    "AdaptiveKLController",
    "ConstantKLController",
    "ExponentialKLController",
    "KLController",
    "PIDKLController",
    "Per",
    "TargetKLController",
]

Per = Literal["trajectory", "step"]


class KLController(Float64State, ABC):
    """Steers the coefficient of a KL penalty; the base of all controllers.

    State: `coeff`, a 0-dim float64 buffer, in `state_dict` and changed in place only.

    What a KLMonitor holds it to: `target` (NaN where there is none), `min_coeff` and `max_coeff`. A subclass sets those
    that it has.

    Args:
        init_coeff: the first coefficient, reward per nat, finite.
        per: the unit of the KL that `update` is given: nats per "trajectory" or nats per "step".

    Raises:
        ValueError: if `init_coeff` is not finite or negative, or `per` is neither unit.

    Example:
        A controller of one's own says what the next coefficient is::

            >>> class Doubling(KLController):
            ...     def _next_coeff(self, kl, n_steps):
            ...         return self.coeff.item() * (2 if kl > 1 else 1)
            >>> Doubling(0.1).update(kl=3.0, n_steps=64)
            0.2
    """

    coeff: Tensor
    target: float = math.nan
    min_coeff: float = 0.0
    max_coeff: float = math.inf

    def __init__(self, init_coeff: float, *, per: Per = "trajectory"):
        super().__init__()
        if per not in ("trajectory", "step"):
            raise ValueError(
                f'`per` must be "trajectory" or "step", got {per!r}: it is the unit of the KL and of its target.'
            )
        self.per: Per = per
        check_number("init_coeff", init_coeff, at_least=0.0)
        self.register_buffer("coeff", torch.tensor(float(init_coeff), dtype=torch.float64))

    def update(
        self, kl: float | Tensor, n_steps: int, *, standard_error: float | Tensor | None = None
    ) -> float:
        """Moves the coefficient after a measurement.

        Args:
            kl: mean KL(policy || reference), nats per trajectory or per step, as `per` says. It may be negative:
                a sample mean of k1 is, now and then.
            n_steps: how many trajectories (or steps, with `per="step"`) are in that mean, at least 1.
            standard_error: of that mean, in its unit: only a controller with a deadband asks for it. NaN says that it
                is not known, as for the mean of a single value.

        Returns:
            The new coefficient.

        Raises:
            ValueError: if `kl` is NaN or infinite, `n_steps` is less than 1, or `standard_error` is negative, infinite,
                or not known to a controller with a deadband. The controller is then unchanged.
            TypeError: if `n_steps` is not an integer.
        """
        kl = _as_float(kl)
        if not math.isfinite(kl):
            raise ValueError(
                f"`kl` must be finite, got {kl}: the coefficient stays at {self.coeff.item():.6g}. Look for "
                "-inf log-probabilities (masked actions, a reference that cannot produce the policy's action)."
            )
        if isinstance(n_steps, bool) or not isinstance(n_steps, int):
            raise TypeError(f"`n_steps` must be an int, got {type(n_steps).__name__}.")
        if n_steps < 1:
            raise ValueError(
                f"`n_steps` must be at least 1, got {n_steps}: it counts what is in the mean `kl`."
            )
        if standard_error is not None:
            standard_error = _as_float(standard_error)
            if standard_error < 0 or math.isinf(standard_error):
                raise ValueError(
                    f"`standard_error` must be finite and at least 0, or NaN, got {standard_error}."
                )
        value = self._next_coeff(self._ignore_noise(kl, standard_error), n_steps)
        self.coeff.fill_(value)
        return value

    @abstractmethod
    def _next_coeff(self, kl: float, n_steps: int) -> float:
        """The coefficient after a valid measurement; may raise, and then changes nothing.

        Whoever keeps more state than `coeff` updates that here, in place; `coeff` itself is left to the caller.
        """

    def _ignore_noise(self, kl: float, standard_error: float | None) -> float:
        """The KL that a valid measurement stands for; may raise, changes nothing."""
        return kl

    def extra_repr(self) -> str:
        """The coefficient and the unit, for `repr`."""
        return f"coeff={self.coeff.item():.6g}, per={self.per!r}"


class ConstantKLController(KLController):
    """A coefficient that never moves; 0 only measures.

    Args:
        coeff: reward per nat, at least 0 and finite.
        per: the unit in which the transforms pool the KL for the log, "trajectory" or "step".

    Raises:
        ValueError: if `coeff` is negative or not finite.

    Example:
        >>> controller = ConstantKLController(0.1)
        >>> controller.update(kl=3.0, n_steps=64)
        0.1
    """

    def __init__(self, coeff: float, *, per: Per = "trajectory"):
        check_number("coeff", coeff, at_least=0.0)
        super().__init__(coeff, per=per)

    def _next_coeff(self, kl: float, n_steps: int) -> float:
        return self.coeff.item()


class TargetKLController(KLController):
    """Holds the KL at a target; the base of the closed loops, with a deadband against noise.

    With a deadband, a measurement within so many standard errors of the target counts as the target: a rule of its
    error alone leaves the coefficient as it is. The KL may then rest anywhere in that band: 2 standard errors of a
    tenth of the target are a band of 20 %.

    Args:
        init_coeff: the first coefficient, reward per nat, above 0.
        target: the KL to hold, nats per trajectory or per step, as `per` says; above 0.
        deadband: how many standard errors of the measured mean from the target count as noise, at least 0. 0 heeds
            every measurement; with more, `update` demands the `standard_error`. 2 ignores what chance explains.
        per: the unit of `target` and of the KL, "trajectory" or "step".

    Raises:
        ValueError: if a number is out of its range; in `update`, if there is a deadband and no `standard_error`.

    Example:
        A rule of one's own says what the next coefficient is; the deadband is there already::

            >>> class Steps(TargetKLController):
            ...     def _next_coeff(self, kl, n_steps):
            ...         return self.coeff.item() * 1.1 ** ((kl > self.target) - (kl < self.target))
            >>> controller = Steps(1.0, target=0.5, deadband=2.0)
            >>> controller.update(kl=0.58, n_steps=64, standard_error=0.05)
            1.0
            >>> controller.update(kl=0.62, n_steps=64, standard_error=0.05)
            1.1
    """

    def __init__(
        self, init_coeff: float, target: float, *, deadband: float = 0.0, per: Per = "trajectory"
    ):
        check_number("init_coeff", init_coeff, above=0.0)
        super().__init__(init_coeff, per=per)
        self.target = check_number("target", target, above=0.0)
        self.deadband = check_number("deadband", deadband, at_least=0.0)

    def _ignore_noise(self, kl: float, standard_error: float | None) -> float:
        if self.deadband == 0:
            return kl
        if standard_error is None:
            raise ValueError(
                f"`standard_error` must be given to a controller with a deadband of {self.deadband:g} standard errors, "
                "got None: pass that of the KLStatistics that pooled `kl`, or use deadband=0."
            )
        if math.isnan(standard_error):
            raise ValueError(
                f"`standard_error` must be known to a controller with a deadband of {self.deadband:g} standard errors, "
                "got nan, as from a single value: pool at least two (`update_every`), or use deadband=0."
            )
        return self.target if abs(kl - self.target) <= self.deadband * standard_error else kl

    def _relative_error(self, kl: float, clip: float = 1.0) -> float:
        """`kl / target - 1` within [-clip, clip]; no logarithm, for a sample mean may be negative."""
        return min(max(kl / self.target - 1, -clip), clip)

    def extra_repr(self) -> str:
        """The coefficient, the unit, the target and a deadband if there is one, for `repr`."""
        deadband = f", deadband={self.deadband:g}" if self.deadband > 0 else ""
        return f"{super().extra_repr()}, target={self.target:g}{deadband}"


class AdaptiveKLController(TargetKLController):
    """Takes a KL; TorchRL's class of this name takes the list of `-coeff * kl` rewards, and shrinks when given a KL.

    The proportional rule of Ziegler et al.::

        error = clip(kl / target - 1, -clip, clip)
        coeff <- coeff * (1 + error * n_steps / horizon)

    You may rely on: a KL above the target raises the coefficient, one below lowers it, one at the target leaves it, and
    it stays positive and finite for ever (at the ends of float64 it stops there).

    Args:
        init_coeff: the first coefficient, reward per nat, above 0.
        target: the KL to hold, nats per trajectory or per step, as `per` says; above 0.
        horizon: over so many trajectories (steps) the coefficient changes by a factor of at most about exp(clip); above
            0. A large horizon is a slow, quiet controller.
        clip: the largest relative error that counts, in (0, inf).
        deadband: how many standard errors from the target count as noise; 0 heeds every measurement.
        per: "trajectory" (Ziegler et al.: 6 nats for a response of 24 tokens) or "step" (0.01 is careful, 0.05 to 0.1
            usual, 0.1 to 0.2 bold).

    Raises:
        ValueError: if a number is out of its range; in `update`, if `clip * n_steps >= horizon`, where the rule would
            reach zero or change sign.

    Reference:
        D. Ziegler et al., "Fine-Tuning Language Models from Human Preferences" (2019), section 2.2.

    Example:
        >>> controller = AdaptiveKLController(init_coeff=0.2, target=6.0, horizon=10_000)
        >>> round(controller.update(kl=9.0, n_steps=512), 6)  # 50 % above the target, clipped to 20 %
        0.202048
    """

    def __init__(
        self,
        init_coeff: float,
        target: float,
        horizon: float,
        *,
        clip: float = 0.2,
        deadband: float = 0.0,
        per: Per = "trajectory",
    ):
        super().__init__(init_coeff, target, deadband=deadband, per=per)
        self.horizon = check_number("horizon", horizon, above=0.0)
        self.clip = check_number("clip", clip, above=0.0)

    def _next_coeff(self, kl: float, n_steps: int) -> float:
        if self.clip * n_steps >= self.horizon:
            raise ValueError(
                f"`n_steps` must be less than horizon / clip = {self.horizon / self.clip:g}, got {n_steps}: one update "
                "could bring the coefficient to zero or below. Raise `horizon`, lower `clip`, or update more often."
            )
        error = self._relative_error(kl, self.clip)
        value = self.coeff.item() * (1 + error * n_steps / self.horizon)
        return min(max(value, sys.float_info.min), sys.float_info.max)

    def extra_repr(self) -> str:
        """The coefficient, the target and the pace, for `repr`."""
        return f"{super().extra_repr()}, horizon={self.horizon:g}, clip={self.clip:g}"


class _LogKLController(TargetKLController):
    """Moves the logarithm of the coefficient between two bounds; a subclass says how far."""

    def __init__(
        self,
        init_coeff: float,
        target: float,
        *,
        min_coeff: float,
        max_coeff: float,
        deadband: float,
        per: Per,
    ):
        super().__init__(init_coeff, target, deadband=deadband, per=per)
        self.min_coeff = check_number("min_coeff", min_coeff, above=0.0)
        self.max_coeff = check_number("max_coeff", max_coeff, at_least=self.min_coeff)
        if not self.min_coeff <= init_coeff <= self.max_coeff:
            raise ValueError(
                f"`init_coeff` must lie within [min_coeff, max_coeff] = [{self.min_coeff:g}, {self.max_coeff:g}], "
                f"got {init_coeff:g}: move the bound or start inside."
            )

    @abstractmethod
    def _log_change(self, error: float) -> float:
        """How far log(coeff) is to move for a relative error of the KL in [-1, 1]."""

    def _next_coeff(self, kl: float, n_steps: int) -> float:
        change = self._log_change(self._relative_error(kl))
        value = self.coeff.item() * math.exp(
            min(change, 700.0)
        )  # exp(710) overflows; the bounds decide
        return min(max(value, self.min_coeff), self.max_coeff)

    @property
    def _bounds(self) -> str:
        return f"[{self.min_coeff:g}, {self.max_coeff:g}]"


class ExponentialKLController(_LogKLController):
    """Moves the logarithm of the coefficient by the relative error of the KL.

    ::

        coeff <- clamp(coeff * exp(gain * clip(kl / target - 1, -1, 1)), min_coeff, max_coeff)

    You may rely on: it cannot change sign, it moves by a factor of at most exp(gain) per update however many
    trajectories are in the mean (`n_steps` is not used), and it stays within its bounds.

    Args:
        init_coeff: the first coefficient, reward per nat, within the bounds.
        target: the KL to hold, nats per trajectory or per step, as `per` says; above 0.
        gain: the largest change of log(coeff) per update, above 0.
        min_coeff: the lower bound of the coefficient, above 0.
        max_coeff: the upper bound of the coefficient, at least `min_coeff`.
        deadband: how many standard errors from the target count as noise; 0 heeds every measurement.
        per: the unit of `target` and of the KL, "trajectory" or "step".

    Raises:
        ValueError: if a number is out of its range.

    Example:
        >>> controller = ExponentialKLController(init_coeff=1.0, target=0.5)
        >>> round(controller.update(kl=5.0, n_steps=64), 4)  # far above: the error counts as 1
        1.1052
    """

    def __init__(
        self,
        init_coeff: float,
        target: float,
        *,
        gain: float = 0.1,
        min_coeff: float = 1e-4,
        max_coeff: float = 10.0,
        deadband: float = 0.0,
        per: Per = "trajectory",
    ):
        super().__init__(
            init_coeff, target, min_coeff=min_coeff, max_coeff=max_coeff, deadband=deadband, per=per
        )
        self.gain = check_number("gain", gain, above=0.0)

    def _log_change(self, error: float) -> float:
        return self.gain * error

    def extra_repr(self) -> str:
        """The coefficient, the target, the pace and the bounds, for `repr`."""
        return f"{super().extra_repr()}, gain={self.gain:g}, bounds={self._bounds}"


class PIDKLController(_LogKLController):
    """Moves the logarithm of the coefficient by the KL's error, and by how fast that error changes.

    A policy answers to a new price only after many updates. Until it has, a rule that sums errors up goes on charging
    more (or less), and overshoots; the proportional part takes back what the sum has added as soon as the error
    shrinks. In velocity form, on the logarithm::

        error    = clip(kl / target - 1, -1, 1)
        filtered = smoothing * filtered_before + (1 - smoothing) * error
        change   = filtered - filtered_before
        coeff   <- clamp(coeff * exp(ki * error + kp * change + kd * (change - change_before)), min_coeff, max_coeff)

    Summed up, that is `ki` times the sum of the errors plus `kp` times the filtered error plus `kd` times its change.
    As the coefficient itself is the integral, nothing winds up while it sits on a bound: it leaves the bound in the
    first update that asks for less. The filter starts at 0, as if the KL had been on target.

    The default gains suit a policy that takes 5 to 20 updates to answer and a noise of a tenth of the target.

    You may rely on: from the same state a higher KL never gives a lower coefficient; log(coeff) moves by at most
    ki + 2 kp + 4 kd per update however many trajectories are in the mean (`n_steps` is not used); the coefficient stays
    within its bounds. You may not rely on: a KL above the target raises the coefficient. It may fall while the KL is
    still above and coming down: that is the proportional part.

    State: `coeff`, `filtered_error` and `filtered_change`, 0-dim float64 buffers, changed in place only.

    Args:
        init_coeff: the first coefficient, reward per nat, within the bounds.
        target: the KL to hold, nats per trajectory or per step, as `per` says; above 0.
        kp: proportional gain, in [0, 100]: of the filtered error.
        ki: integral gain, in (0, 100]: how fast an error that stays moves log(coeff), per update.
        kd: derivative gain, in [0, 100]: of the change of the filtered error. It amplifies noise: smooth more.
        smoothing: weight of the past in the exponential moving average of the error, in [0, 1); 0 does not filter.
        min_coeff: the lower bound of the coefficient, above 0.
        max_coeff: the upper bound of the coefficient, at least `min_coeff`.
        deadband: how many standard errors from the target count as noise, an error of 0, with which the coefficient
            settles as the filter does; 0 heeds every measurement.
        per: the unit of `target` and of the KL, "trajectory" or "step".

    Raises:
        ValueError: if a number is out of its range.

    Reference:
        A. Stooke, J. Achiam, P. Abbeel, "Responsive Safety in Reinforcement Learning by PID Lagrangian Methods" (2020),
        which controls a multiplier itself; here its logarithm.

    Example:
        >>> controller = PIDKLController(init_coeff=1.0, target=0.5, kp=0.6, ki=0.08, smoothing=0.7)
        >>> round(controller.update(kl=1.0, n_steps=64), 4)  # exp(0.08 + 0.6 * 0.3)
        1.2969
        >>> round(controller.update(kl=0.6, n_steps=64), 4)  # above the target, and coming down: it eases off
        1.2943
    """

    filtered_error: Tensor
    filtered_change: Tensor

    def __init__(
        self,
        init_coeff: float,
        target: float,
        *,
        kp: float = 0.6,
        ki: float = 0.08,
        kd: float = 0.0,
        smoothing: float = 0.7,
        min_coeff: float = 1e-4,
        max_coeff: float = 10.0,
        deadband: float = 0.0,
        per: Per = "trajectory",
    ):
        super().__init__(
            init_coeff, target, min_coeff=min_coeff, max_coeff=max_coeff, deadband=deadband, per=per
        )
        # With gains up to 100 one update moves log(coeff) by at most 700, which exp can bear.
        self.kp = check_number("kp", kp, at_least=0.0, at_most=100.0)
        self.ki = check_number("ki", ki, above=0.0, at_most=100.0)
        self.kd = check_number("kd", kd, at_least=0.0, at_most=100.0)
        self.smoothing = check_number("smoothing", smoothing, at_least=0.0, below=1.0)
        for name in ("filtered_error", "filtered_change"):
            self.register_buffer(name, torch.zeros((), dtype=torch.float64))

    def _log_change(self, error: float) -> float:
        before, change_before = self.filtered_error.item(), self.filtered_change.item()
        filtered = self.smoothing * before + (1 - self.smoothing) * error
        change = filtered - before
        self.filtered_error.fill_(filtered)
        self.filtered_change.fill_(change)
        return self.ki * error + self.kp * change + self.kd * (change - change_before)

    def extra_repr(self) -> str:
        """The coefficient, the target, the gains, the filter and the bounds, for `repr`."""
        gains = f"kp={self.kp:g}, ki={self.ki:g}, kd={self.kd:g}, smoothing={self.smoothing:g}"
        return f"{super().extra_repr()}, {gains}, bounds={self._bounds}"


def as_controller(controller: KLController | float) -> KLController:
    """A controller as it is, a number as a constant coefficient; TypeError for anything else."""
    if isinstance(controller, KLController):
        return controller
    if isinstance(controller, bool) or not isinstance(controller, (int, float)):
        raise TypeError(
            f"`controller` must be a KLController or a number, got {type(controller).__name__}: a number is a constant "
            "coefficient."
        )
    return ConstantKLController(controller)


def _as_float(value: float | Tensor) -> float:
    return float(value.detach() if isinstance(value, Tensor) else value)
