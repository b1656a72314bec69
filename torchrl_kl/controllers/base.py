"""What all controllers share: the coefficient, its unit, the target, the deadband against noise.

The coefficient is what one nat of KL(policy || reference) subtracts from the reward. `kl` is always
in the unit of `target`, which a controller declares: nats per trajectory or nats per step.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from numbers import Real
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from torchrl_kl.controllers.plan import Plan, RewardPlan
from torchrl_kl.functional.numbers import Float64State, check_number, uncompiled

Per = Literal["trajectory", "step"]
InitCoeff = float | Literal["plan"]
_ENOUGH = 256  # rewards without a plan after which the user is warned


class KLController(Float64State, ABC):
    """Steers the coefficient of a KL penalty; the base of all controllers.

    State: `coeff`, a 0-dim float64 buffer, changed in place only. Arguments are not part of it, nor
    a `target` that was changed: a resumed run sets them again. All but `per` may be changed.

    Args:
        init_coeff: the first coefficient, reward per nat, at least 0 and finite.
        per: the unit of the KL that `update` is given: nats per "trajectory" or per "step".

    Raises:
        ValueError: if `init_coeff` is out of its range, or `per` is neither unit.

    Example:
        >>> from torchrl_kl import KLController
        >>> class Doubling(KLController):
        ...     def _next_coeff(self, kl, n_steps):
        ...         return self.coeff.item() * (2 if kl > 1 else 1)
        >>> Doubling(0.1).update(kl=3.0, n_steps=64)
        0.2
    """

    coeff: Tensor
    # Of settings, which are checked whenever they are set: `check_number` has the kinds of bounds,
    # and a bound may be the name of another setting.
    _ranges: ClassVar[dict[str, Any]] = {}
    # KLMonitor reads these; a subclass sets those that it has.
    min_coeff: float = 0.0
    max_coeff: float = math.inf
    plan: RewardPlan | None
    _target: float = math.nan

    def __init__(self, init_coeff: float, *, per: Per = "trajectory"):
        super().__init__()
        self.per: Per = per
        self.plan = None
        coeff = check_number("init_coeff", init_coeff, at_least=0.0)
        self.register_buffer("coeff", torch.tensor(coeff, dtype=torch.float64))

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "coeff":  # as one number, in place: transforms, losses and workers have it
            # A parameter would be read here, but never learned: it is no number.
            value = value.tolist() if type(value) is Tensor else value
            self.coeff.fill_(check_number(name, value, at_least=0.0))
            return
        if name in self._ranges:
            bounds = {
                kind: getattr(self, bound) if isinstance(bound, str) else bound
                for kind, bound in self._ranges[name].items()
            }
            value = check_number(name, value, **bounds)
        elif name == "per" and value != self.__dict__.get("per", value):
            raise ValueError(
                f"`per` cannot be changed, got {value!r} for {self.per!r}: what was measured so "
                "far is in that unit. Build another controller."
            )
        elif name == "per" and value not in ("trajectory", "step"):
            raise ValueError(f'`per` must be "trajectory" or "step", got {value!r}.')
        super().__setattr__(name, value)  # type: ignore[arg-type]

    @property
    def target(self) -> float:
        """The KL to hold, nats per `per`, which may be changed; NaN for a rule without a target."""
        return self._target

    @target.setter
    def target(self, target: float) -> None:
        self._target = check_number("target", target, above=0.0)

    @property
    def planning(self) -> bool:
        """Whether it waits for rewards, from which it plans its coefficient."""
        return self.plan is not None and not bool(self.plan.made)

    @uncompiled
    def update(
        self, kl: float | Tensor, n_steps: int, *, standard_error: float | Tensor | None = None
    ) -> float:
        """Moves the coefficient after a measurement; an error leaves the controller unchanged.

        Args:
            kl: mean KL(policy || reference), nats per `per`; a sample mean may be negative.
            n_steps: how many trajectories (steps with `per="step"`) are in the mean, at least 1.
            standard_error: of that mean, at least 0, for a controller with a deadband. NaN: not
                known.

        Returns:
            The new coefficient, reward per nat.

        Raises:
            ValueError: if a number is out of its range, also what the rule of a subclass gives, or
                a deadband needs a `standard_error`.
            TypeError: if `n_steps` is not an integer.
            RuntimeError: if the controller still waits for rewards to plan from.
        """
        if self.planning:
            raise RuntimeError(
                "the coefficient is not planned yet: pass rewards to `observe_rewards` before the "
                "first `update`, as the transforms and losses do."
            )
        kl = _as_float("kl", kl)
        if not math.isfinite(kl):
            raise ValueError(
                f"`kl` must be finite, got {kl}: look for -inf log-probabilities (masked actions, "
                f"a reference without the action). The coefficient stays {self.coeff.item():.6g}."
            )
        if isinstance(n_steps, bool) or not isinstance(n_steps, int):
            raise TypeError(f"`n_steps` must be an int, got {type(n_steps).__name__}.")
        if n_steps < 1:
            raise ValueError(f"`n_steps` must be at least 1, got {n_steps}.")
        standard_error = (
            None if standard_error is None else _as_float("standard_error", standard_error)
        )
        if standard_error is not None and (standard_error < 0 or math.isinf(standard_error)):
            raise ValueError(
                f"`standard_error` must be finite and at least 0, or NaN, got {standard_error}."
            )
        # Only now does anything change: what is refused above leaves no trace.
        value = float(self._next_coeff(self._ignore_noise(kl, standard_error), n_steps))
        if not (value >= 0 and math.isfinite(value)):
            raise ValueError(
                f"`{type(self).__name__}._next_coeff` must return a finite number of at least 0, "
                f"got {value}. The coefficient stays {self.coeff.item():.6g}."
            )
        self.coeff.fill_(value)
        return value

    @abstractmethod
    def _next_coeff(self, kl: float, n_steps: int) -> float:
        """The next coefficient, which the caller sets; other state is updated here, in place.

        It may raise, and then changes nothing.
        """

    def _ignore_noise(self, kl: float, standard_error: float | None) -> float:
        """The KL that the rule sees for a valid measurement; may raise, changes nothing."""
        return kl

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, metadata: Any, strict: bool, *lists: list[str]
    ) -> None:
        """Refuses numbers that no update gives, which makes `load_state_dict` a RuntimeError."""
        errors = lists[-1]
        # A buffer that is not one finite number here is a subclass's, which may have any value.
        numbers = (name for name, own in self._buffers.items() if _is_number(own))
        for name in numbers:
            loaded = state_dict.get(f"{prefix}{name}", torch.zeros(()))
            if not _is_number(loaded):
                errors.append(f"`{name}` must be one finite number, got {loaded.tolist()}.")
        coeff = state_dict.get(f"{prefix}coeff", self.coeff)
        lowest, highest = self.min_coeff, self.max_coeff
        if self.plan is not None and not state_dict.get(f"{prefix}plan.made", self.plan.made):
            lowest, highest = 0.0, math.inf  # until there is a plan
        if not errors and not lowest <= coeff.item() <= highest:
            errors.append(
                f"`coeff` must lie within [{lowest:g}, {highest:g}], got "
                f"{coeff.item():g}: build the controller with the bounds of the one that was saved."
            )
        if not errors:
            super()._load_from_state_dict(state_dict, prefix, metadata, strict, *lists)

    def extra_repr(self) -> str:
        """The coefficient and the unit, for `repr`."""
        return f"coeff={self.coeff.item():.6g}, per={self.per!r}"


class TargetKLController(KLController):
    """Holds the KL at a target; the base of the closed loops, with a deadband against noise.

    A measurement within `deadband` standard errors of the target counts as the target: the KL may
    settle anywhere in that band.

    Args:
        init_coeff: the first coefficient, reward per nat, above 0; or "plan": it is computed from
            the rewards of the first trajectories, see `observe_rewards`.
        target: the KL to hold, nats per trajectory or per step, as `per` says; above 0.
        deadband: how many standard errors from the target count as noise, at least 0; above 0,
            `update` needs the `standard_error`. 2 is usual.
        per: the unit of `target` and of the KL, "trajectory" or "step".

    Raises:
        ValueError: if a number is out of its range.

    Example:
        >>> from torchrl_kl import TargetKLController
        >>> class Steps(TargetKLController):
        ...     def _next_coeff(self, kl, n_steps):
        ...         return self.coeff.item() * 1.1 ** ((kl > self.target) - (kl < self.target))
        >>> controller = Steps(1.0, target=0.5, deadband=2.0)
        >>> [controller.update(kl, n_steps=64, standard_error=0.05) for kl in (0.58, 0.62)]
        [1.0, 1.1]
    """

    _ranges: ClassVar[dict[str, Any]] = {"deadband": {"at_least": 0.0}}
    # What `repr` shows of a subclass.
    _settings: tuple[str, ...] = ()

    def __init__(
        self,
        init_coeff: InitCoeff,
        target: float,
        *,
        deadband: float = 0.0,
        per: Per = "trajectory",
    ):
        planned = init_coeff == "plan"
        if not planned:
            check_number("init_coeff", init_coeff, above=0.0)  # type: ignore[arg-type]
        super().__init__(0.0 if planned else init_coeff, per=per)  # type: ignore[arg-type]
        self.target = target
        if planned:
            self.plan = RewardPlan(self.target)
        self.deadband = deadband

    @uncompiled
    def observe_rewards(
        self,
        rewards: Tensor,
        *,
        groups: Tensor | None = None,
        log_ratios: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> float:
        """Pools task rewards until they tell the coefficient; the transforms and losses call it.

        At first the policy is the reference, whose rewards tell the coefficient for the target:
        `RewardPlan` has the formula. Until then the coefficient is range / sqrt(2 * target) of the
        rewards so far, whose optimum spends at most a quarter of the target, or 0 while all rewards
        are equal. After the plan, and with a number as `init_coeff`, nothing changes.

        Args:
            rewards: one number per trajectory, its task reward summed up; with `per="step"` per
                step, or per piece of a trajectory with `lengths`. Shape (N,).
            groups: a number for each, equal for those that began alike, such as the responses to
                a prompt: only these are compared. None: all are.
            log_ratios: log pi - log pi_ref of each, nats, if the policy has moved. None: 0.
            lengths: with `per="step"` how many steps each has, at least 1. None: 1.

        Returns:
            The coefficient, reward per nat.

        Raises:
            TypeError: if one of them is not a tensor of real numbers.
            ValueError: if a number is not finite, shapes differ, or `lengths` are given for a
                target per trajectory.
            RuntimeError: if the target cannot be spent, or rewards that keep coming carry no
                preference.
        """
        if self.plan is None or self.plan.made:
            return self.coeff.item()
        if lengths is not None and self.per != "step":
            raise ValueError(
                "`lengths` must be None for a target per trajectory, got a tensor: it would "
                'multiply the target. Leave it out, or use `per="step"`.'
            )
        self.plan.target = self.target  # which may have been changed since
        before = self.plan.samples
        try:
            self.plan.add(rewards, groups=groups, log_ratios=log_ratios, lengths=lengths)
            plan = self.plan.solve()
            coeff = self.plan.cautious_coeff if plan is None else self._begin(plan)
        except BaseException:  # the same rewards may come again, for another target
            self.plan.samples = before
            raise
        self.coeff.fill_(coeff)
        if plan is None:
            self._warn_waiting()
        else:
            self.plan.close()
        return self.coeff.item()

    def _begin(self, plan: Plan) -> float:
        """The first coefficient after the plan; other state is set here. It may raise."""
        return plan.coeff

    def _warn_waiting(self) -> None:
        plan = self.plan
        if plan is None or plan.warned or len(plan.samples) < _ENOUGH:
            return
        plan.warned = True
        warnings.warn(
            f"no coefficient could be planned from {len(plan.samples)} rewards so far: "
            f"{plan.reason}. The coefficient is {self.coeff.item():.4g} until more rewards come.",
            stacklevel=3,
        )

    def _ignore_noise(self, kl: float, standard_error: float | None) -> float:
        if self.deadband == 0:
            return kl
        if standard_error is None or math.isnan(standard_error):
            raise ValueError(
                f"`standard_error` must be known where deadband={self.deadband:g}, got "
                f"{standard_error}: pass that of the KLStatistics that pooled `kl`, which needs at "
                "least two values (`update_every`), or use deadband=0."
            )
        # The target, not no update: a filter goes on with an error of 0.
        return self.target if abs(kl - self.target) <= self.deadband * standard_error else kl

    def _relative_error(self, kl: float, clip: float = 1.0) -> float:
        # Not a logarithm of the ratio: a sample mean may be negative.
        return min(max(kl / self.target - 1, -clip), clip)

    def extra_repr(self) -> str:
        """The coefficient, the unit, the target, a deadband and the settings, for `repr`."""
        names = ("target", *(["deadband"] if self.deadband > 0 else []), *self._settings)
        return ", ".join([super().extra_repr(), *(f"{n}={getattr(self, n):g}" for n in names)])


def _is_number(buffer: Tensor | None) -> bool:
    return buffer is not None and buffer.numel() == 1 and math.isfinite(buffer.item())


def _as_float(name: str, value: float | Tensor) -> float:
    if isinstance(value, Tensor):
        if value.numel() != 1:
            shape = tuple(value.shape)
            raise ValueError(f"`{name}` must be one number, got shape {shape}: pass the mean.")
        value = value.item()
    # `Real` includes the scalars of NumPy.
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"`{name}` must be a number, got {type(value).__name__}.")
    return float(value)
