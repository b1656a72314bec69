"""Measured KL in, coefficient out: rules, the statistics they are fed, planning for a budget."""

from torchrl_kl.controllers.base import KLController, TargetKLController
from torchrl_kl.controllers.plan import coeff_for_budget
from torchrl_kl.controllers.planned import PlannedKLController
from torchrl_kl.controllers.rules import (
    AdaptiveKLController,
    ConstantKLController,
    ExponentialKLController,
    PIDKLController,
    as_controller,
)
from torchrl_kl.controllers.statistics import KLStatistics

__all__ = [
    "AdaptiveKLController",
    "ConstantKLController",
    "ExponentialKLController",
    "KLController",
    "KLStatistics",
    "PIDKLController",
    "PlannedKLController",
    "TargetKLController",
    "as_controller",
    "coeff_for_budget",
]
