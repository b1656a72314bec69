"""The base classes of all controllers: a coefficient, its unit, a target and a plan.

The coefficient is what one nat of KL(policy || reference) subtracts from the reward. `kl` is always
in the unit of `target`, which a controller declares: nats per trajectory or nats per step.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from numbers import Real
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from torchrl_kl.controllers.plan import RewardPlan
from torchrl_kl.functional.numbers import Float64State, check_count, check_number, uncompiled

Per = Literal["trajectory", "step"]
InitCoeff = float | Literal["plan"]
_TRAJECTORIES, _STEPS = 16, 256  # effective samples that a plan takes


class KLController(Float64State, ABC):
    """Steers the coefficient of a KL penalty; the base of all controllers.

    State: `coeff`, a 0-dim float64 buffer, changed in place only. Arguments are not part of it: a
    resumed run gives them again. They are checked when the controller is built, not when an
    attribute is changed later.

    Args:
        init_coeff: the first coefficient, reward per nat, at least 0 and finite.
        per: the unit of the KL that `update` is given: nats per "trajectory" or per "step".

    Attributes:
        moves: whether `update` may change the coefficient; False in ConstantKLController only. A
            schedule derives from KLController.
        group: the ranks that train one policy (`torch.distributed.group.WORLD`). Transforms and
            losses then feed it with the KL of all of them, so that their controllers stay equal;
            `update` itself takes what it is given. None: of this process. Copies have none.

    Raises:
        ValueError: if `init_coeff` is out of its range, or `per` is neither unit.

    Example:
        >>> from torchrl_kl import KLController
        >>> class Doubling(KLController):
        ...     def next_coeff(self, kl, n_steps):
        ...         return self.coeff.item() * (2 if kl > 1 else 1)
        >>> Doubling(0.1).update(kl=3.0, n_steps=64)
        0.2
    """

    coeff: Tensor
    moves: ClassVar[bool] = True
    group: ProcessGroup | None = None
    target: float = math.nan  # NaN for a rule without a target
    min_coeff: float = 0.0
    max_coeff: float = math.inf
    plan: RewardPlan | None
    _margin: ClassVar[float] = 1.0  # the first coefficient, as a multiple of the planned one
    plans_again: ClassVar[bool] = False  # whether it plans from all rewards, not the first alone

    def __init__(self, init_coeff: float, *, per: Per = "trajectory"):
        super().__init__()
        if per not in ("trajectory", "step"):
            raise ValueError(f'`per` must be "trajectory" or "step", got {per!r}.')
        self.per: Per = per
        self.plan = None
        coeff = check_number("init_coeff", init_coeff, at_least=0.0)
        self.register_buffer("coeff", torch.tensor(coeff, dtype=torch.float64))

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "coeff":  # as one number, in place: transforms, losses and workers have it
            value = value.tolist() if type(value) is Tensor else value
            self.coeff.fill_(check_number(name, value, at_least=0.0))
        else:
            super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        # PyTorch can neither copy nor pickle a process group.
        return self.__dict__ | {"group": None}

    @property
    def planning(self) -> bool:
        """Whether it waits for rewards, from which it plans its coefficient."""
        return self.plan is not None and not bool(self.plan.made)

    @property
    def reads_rewards(self) -> bool:
        """Whether `observe_rewards` changes it."""
        return self.planning or self.plans_again

    @uncompiled
    def update(self, kl: float | Tensor, n_steps: int) -> float:
        """Moves the coefficient after a measurement; an error leaves the controller unchanged.

        Args:
            kl: mean KL(policy || reference), nats per `per`; a sample mean may be negative.
            n_steps: how many trajectories (steps with `per="step"`) are in the mean, at least 1.

        Returns:
            The new coefficient, reward per nat.

        Raises:
            ValueError: if a number is out of its range or `n_steps` is not an integer; also if
                `next_coeff` returns such a number.
            TypeError: if `kl` is not a number.
            RuntimeError: if the controller still waits for rewards to plan from.
        """
        if self.planning:
            raise RuntimeError(
                "the coefficient is not planned yet: pass rewards to `observe_rewards` before the "
                "first `update`, as the transforms and losses do."
            )
        if isinstance(kl, Tensor):
            if kl.numel() != 1:
                shape = tuple(kl.shape)
                raise ValueError(f"`kl` must be one number, got shape {shape}: pass the mean.")
            kl = kl.item()
        # `Real` includes the scalars of NumPy.
        if type(kl) is bool or not isinstance(kl, Real):
            raise TypeError(f"`kl` must be a number, got {type(kl).__name__}.")
        if not math.isfinite(kl):
            raise ValueError(
                f"`kl` must be finite, got {kl}: look for -inf log-probabilities (masked actions, "
                f"a reference without the action). The coefficient stays {self.coeff.item():.6g}."
            )
        value = float(self.next_coeff(float(kl), check_count("n_steps", n_steps)))
        check_number(f"{type(self).__name__}.next_coeff", value, at_least=0.0)
        self.coeff.fill_(value)
        return value

    @abstractmethod
    def next_coeff(self, kl: float, n_steps: int) -> float:
        """Returns the next coefficient, which `update` sets, and updates other state in place.

        If it raises, it must not have changed any state.
        """

    def _load_from_state_dict(self, state_dict, prefix, metadata, strict, *lists):
        coeff, errors = state_dict.get(f"{prefix}coeff", self.coeff), lists[-1]
        if 0 <= coeff.min() <= coeff.max() < math.inf:
            super()._load_from_state_dict(state_dict, prefix, metadata, strict, *lists)
        else:  # a RuntimeError
            errors.append(f"`coeff` must be finite and at least 0, got {coeff.tolist()}.")

    def extra_repr(self) -> str:
        """The coefficient, the unit and the settings, for `repr`."""
        settings = [
            f"{name}={value:g}"
            for name, value in vars(self).items()
            if type(value) in (int, float) and not name.startswith("_")
        ]
        return ", ".join([f"coeff={self.coeff.item():.6g}", f"per={self.per!r}", *settings])


class TargetKLController(KLController):
    """Holds the KL at a target; the base of the closed loops.

    Args:
        init_coeff: the first coefficient, reward per nat, above 0; or "plan": it is computed from
            the first rewards, see `observe_rewards`.
        target: the KL to hold, nats per trajectory or per step, as `per` says; above 0.
        per: the unit of `target` and of the KL, "trajectory" or "step".

    Raises:
        ValueError: if a number is out of its range, here and in each subclass.

    Example:
        >>> from torchrl_kl import TargetKLController
        >>> class FixedSteps(TargetKLController):
        ...     def next_coeff(self, kl, n_steps):
        ...         return self.coeff.item() * 1.1 ** ((kl > self.target) - (kl < self.target))
        >>> controller = FixedSteps(1.0, target=0.5)
        >>> [controller.update(kl, n_steps=64) for kl in (0.5, 0.62)]
        [1.0, 1.1]
    """

    def __init__(self, init_coeff: InitCoeff, target: float, *, per: Per = "trajectory"):
        planned = init_coeff == "plan"
        coeff = 0.0 if planned else check_number("init_coeff", init_coeff, above=0.0)
        super().__init__(coeff, per=per)
        self.target = check_number("target", target, above=0.0)
        self.plan = RewardPlan() if planned else None

    @uncompiled
    def observe_rewards(
        self,
        rewards: Tensor,
        *,
        groups: Tensor | None = None,
        log_ratios: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> float:
        """Pools task rewards until they show the coefficient; the transforms and losses call it.

        At first the policy is the reference, whose rewards show the coefficient for the target:
        see `RewardPlan`. Until they do, the coefficient is range / sqrt(2 * target) of the rewards
        so far, whose optimum spends at most a quarter of the target (Hoeffding: KL <= range^2 / (8
        beta^2)). After the plan, or with a number as `init_coeff`, this call changes nothing,
        unless the controller plans again: it then makes a plan from each 16 trajectories or 256
        steps, with the policy that acted as the reference.

        Args:
            rewards: one number per trajectory, its task reward summed up; with `per="step"` one
                per step, or one per trajectory with `lengths`. Shape (N,).
            groups: a number for each, equal for samples of this call that began alike, such as the
                responses to a prompt: only these are compared. None: all samples are compared.
            log_ratios: log pi - log pi_ref of each, nats, if the policy has moved. None: 0.
            lengths: with `per="step"` how many steps each has, at least 1. None: 1.

        Returns:
            The coefficient, reward per nat.

        Raises:
            TypeError: if one of them is not a tensor of real numbers.
            ValueError: if a number is not finite, shapes differ, or `lengths` are given for a
                target per trajectory.
        """
        plan, planning = self.plan, self.planning
        if plan is None or not self.reads_rewards:
            return self.coeff.item()
        if lengths is not None and self.per != "step":
            raise ValueError(
                "`lengths` must be None for a target per trajectory, got a tensor: it would "
                'multiply the target. Leave it out, or use `per="step"`.'
            )
        log_ratios = log_ratios if planning else None
        plan.add(rewards, groups=groups, log_ratios=log_ratios, lengths=lengths)
        samples = plan.samples
        # Consecutive steps are correlated, so that more of them are needed.
        fewest = _STEPS if self.per == "step" and lengths is None else _TRAJECTORIES
        if not planning:
            if len(samples) >= fewest:
                plan.close(plan.solve(self.target, fewest) or 0.0)  # 0 if they are equal
            return self.coeff.item()
        planned = plan.solve(self.target, fewest)
        if planned is not None:
            plan.close(planned)
            planned *= self._margin
            self.coeff.fill_(min(max(planned, self.min_coeff), self.max_coeff))
        elif len(samples):
            spread = (samples[:, 0].max() - samples[:, 0].min()).item()
            budget = self.target * samples[:, 2].mean().item()
            self.coeff.fill_(spread / math.sqrt(2 * budget))
        return self.coeff.item()

    def _relative_error(self, kl: float, clip: float = 1.0) -> float:
        # Not a logarithm of the ratio: a sample mean may be negative.
        return min(max(kl / self.target - 1, -clip), clip)
