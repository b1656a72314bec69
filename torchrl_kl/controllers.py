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
from torch import Tensor, nn

__all__ = [
    "AdaptiveKLController",
    "ConstantKLController",
    "ExponentialKLController",
    "KLController",
    "KLStatistics",
    "Per",
]

Per = Literal["trajectory", "step"]


class _Float64State(nn.Module):
    """A module whose buffers move between devices and keep their dtype: `module.half()` must not round a price."""

    def _apply(self, fn, recurse=True):
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            after = self._buffers[name]
            if buffer is not None and after is not None and after.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(after.device)
        return self


class KLController(_Float64State, ABC):
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
        _check_number("init_coeff", init_coeff, at_least=0.0)
        self.register_buffer("coeff", torch.tensor(float(init_coeff), dtype=torch.float64))

    def update(self, kl: float | Tensor, n_steps: int) -> float:
        """Moves the coefficient after a measurement.

        Args:
            kl: mean KL(policy || reference), nats per trajectory or per step, as `per` says. It may be negative:
                a sample mean of k1 is, now and then.
            n_steps: how many trajectories (or steps, with `per="step"`) are in that mean, at least 1.

        Returns:
            The new coefficient.

        Raises:
            ValueError: if `kl` is NaN or infinite, or `n_steps` is less than 1. The coefficient is then unchanged.
            TypeError: if `n_steps` is not an integer.
        """
        kl = float(kl.detach() if isinstance(kl, Tensor) else kl)
        if not math.isfinite(kl):
            raise ValueError(
                f"`kl` must be finite, got {kl}: the coefficient stays at {self.coeff.item():.6g}. Look for "
                "-inf log-probabilities (masked actions, a reference that cannot produce the policy's action)."
            )
        if isinstance(n_steps, bool) or not isinstance(n_steps, int):
            raise TypeError(f"`n_steps` must be an int, got {type(n_steps).__name__}.")
        if n_steps < 1:
            raise ValueError(f"`n_steps` must be at least 1, got {n_steps}: it counts what is in the mean `kl`.")
        value = self._next_coeff(kl, n_steps)
        self.coeff.fill_(value)
        return value

    @abstractmethod
    def _next_coeff(self, kl: float, n_steps: int) -> float:
        """The coefficient after a valid measurement; may raise, changes nothing."""

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
        _check_number("coeff", coeff, at_least=0.0)
        super().__init__(coeff, per=per)

    def _next_coeff(self, kl: float, n_steps: int) -> float:
        return self.coeff.item()


class AdaptiveKLController(KLController):
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
        per: Per = "trajectory",
    ):
        _check_number("init_coeff", init_coeff, above=0.0)
        super().__init__(init_coeff, per=per)
        self.target = _check_number("target", target, above=0.0)
        self.horizon = _check_number("horizon", horizon, above=0.0)
        self.clip = _check_number("clip", clip, above=0.0)

    def _next_coeff(self, kl: float, n_steps: int) -> float:
        if self.clip * n_steps >= self.horizon:
            raise ValueError(
                f"`n_steps` must be less than horizon / clip = {self.horizon / self.clip:g}, got {n_steps}: one update "
                "could bring the coefficient to zero or below. Raise `horizon`, lower `clip`, or update more often."
            )
        error = min(max(kl / self.target - 1, -self.clip), self.clip)
        value = self.coeff.item() * (1 + error * n_steps / self.horizon)
        return min(max(value, sys.float_info.min), sys.float_info.max)

    def extra_repr(self) -> str:
        """The coefficient, the target and the pace, for `repr`."""
        return f"{super().extra_repr()}, target={self.target:g}, horizon={self.horizon:g}, clip={self.clip:g}"


class ExponentialKLController(KLController):
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
        per: Per = "trajectory",
    ):
        _check_number("init_coeff", init_coeff, above=0.0)
        super().__init__(init_coeff, per=per)
        self.target = _check_number("target", target, above=0.0)
        self.gain = _check_number("gain", gain, above=0.0)
        self.min_coeff = _check_number("min_coeff", min_coeff, above=0.0)
        self.max_coeff = _check_number("max_coeff", max_coeff, at_least=self.min_coeff)
        if not self.min_coeff <= init_coeff <= self.max_coeff:
            raise ValueError(
                f"`init_coeff` must lie within [min_coeff, max_coeff] = [{self.min_coeff:g}, {self.max_coeff:g}], "
                f"got {init_coeff:g}: move the bound or start inside."
            )

    def _next_coeff(self, kl: float, n_steps: int) -> float:
        error = min(max(kl / self.target - 1, -1.0), 1.0)
        value = self.coeff.item() * math.exp(min(self.gain * error, 700.0))  # exp(710) overflows; the bounds decide
        return min(max(value, self.min_coeff), self.max_coeff)

    def extra_repr(self) -> str:
        """The coefficient, the target, the pace and the bounds, for `repr`."""
        bounds = f"[{self.min_coeff:g}, {self.max_coeff:g}]"
        return f"{super().extra_repr()}, target={self.target:g}, gain={self.gain:g}, bounds={bounds}"


class KLStatistics(_Float64State):
    """Pooled KL values as (count, sum, sum of squares), never as running means.

    You may rely on: merging the statistics of parts gives the statistics of the whole, however the whole was split
    (to float64 rounding).

    State: `count` (int64), `sum` and `sum_of_squares` (float64), 0-dim buffers, changed in place only.

    Example:
        >>> first, second = KLStatistics(), KLStatistics()
        >>> _ = first.add(torch.tensor([0.5, 1.5])), second.add(torch.tensor([4.0]))
        >>> pooled = first.merge(second)
        >>> pooled.mean, int(pooled.count)
        (2.0, 3)
    """

    count: Tensor
    sum: Tensor
    sum_of_squares: Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("sum", torch.zeros((), dtype=torch.float64))
        self.register_buffer("sum_of_squares", torch.zeros((), dtype=torch.float64))

    def add(self, values: Tensor, *, mask: Tensor | None = None) -> KLStatistics:
        """Pools values, each with the weight 1.

        Args:
            values: KL, nats per trajectory or per step, any shape.
            mask: True where a value counts, boolean, the shape of `values`.

        Returns:
            This object.

        Raises:
            ValueError: if the mask does not fit, or a value that counts is NaN or infinite. Nothing is then added.
        """
        if mask is not None:
            if mask.dtype != torch.bool or mask.shape != values.shape:
                raise ValueError(
                    f"`mask` must be boolean of the shape of `values`, {tuple(values.shape)}, got {mask.dtype} of "
                    f"shape {tuple(mask.shape)}."
                )
            values = values[mask]
        values = values.detach().to(self.sum)
        total, squares = values.sum(), values.square().sum()
        if not math.isfinite(squares.item()):  # finite squares imply a finite sum
            raise ValueError(
                f"`values` must be finite, got a sum of squares of {squares.item()} over {values.numel()} values: look "
                "for -inf log-probabilities. The statistics are unchanged."
            )
        self.count.add_(values.numel())
        self.sum.add_(total)
        self.sum_of_squares.add_(squares)
        return self

    def merge(self, other: KLStatistics) -> KLStatistics:
        """Pools what another object holds (of another worker or micro-batch); returns this object."""
        for buffer, addend in zip(self.buffers(), other.buffers(), strict=True):
            buffer.add_(addend.to(buffer.device))
        return self

    def reset(self) -> KLStatistics:
        """Forgets everything, in place; returns this object."""
        for buffer in self.buffers():
            buffer.zero_()
        return self

    @property
    def mean(self) -> float:
        """Mean of the pooled values, nats; NaN when there are none."""
        return (self.sum / self.count).item()

    @property
    def variance(self) -> float:
        """Unbiased variance of the pooled values, nats squared; NaN when there are fewer than two."""
        count = self.count.item()
        if count < 2:
            return math.nan
        centred = self.sum_of_squares - self.sum.square() / count
        return max(centred.item(), 0.0) / (count - 1)

    def extra_repr(self) -> str:
        """The count and the mean, for `repr`."""
        return f"count={self.count.item()}, mean={self.mean:.6g}"


def _check_number(name: str, value: float, *, above: float | None = None, at_least: float | None = None) -> float:
    """`value` as a float; TypeError unless it is a number, ValueError unless finite and within the bound given."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"`{name}` must be a number, got {type(value).__name__}.")
    low_enough = (above is None or value > above) and (at_least is None or value >= at_least)
    if not (math.isfinite(value) and low_enough):
        bound = f"above {above:g}" if above is not None else f"at least {at_least:g}"
        raise ValueError(f"`{name}` must be finite and {bound}, got {value}.")
    return float(value)
