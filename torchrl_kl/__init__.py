"""KL control for reinforcement learning on TorchRL: measures the KL and adapts its penalty."""

from os import path as _path

import torchrl_kl.language  # noqa: F401 (its actors answer what the other rooms ask)
from torchrl_kl.actors import FrozenActor, TopKActor, rescore
from torchrl_kl.collectors import kl_collector
from torchrl_kl.controllers import (
    AdaptiveKLController,
    ConstantKLController,
    ExponentialKLController,
    KLController,
    KLStatistics,
    PIDKLController,
    PlannedKLController,
    TargetKLController,
    coeff_for_budget,
)
from torchrl_kl.keys import KLKeys
from torchrl_kl.monitor import KLMonitor
from torchrl_kl.objectives import KLPenaltyLoss
from torchrl_kl.trainers import KLControlHook
from torchrl_kl.transforms import (
    KLConstrainedTransform,
    KLDivergenceTransform,
    KLRewardTransform,
    ReferenceModelLogProbTransform,
    RewardAdjustmentTransform,
)

__all__ = [
    "AdaptiveKLController",
    "ConstantKLController",
    "ExponentialKLController",
    "FrozenActor",
    "KLConstrainedTransform",
    "KLControlHook",
    "KLController",
    "KLDivergenceTransform",
    "KLKeys",
    "KLMonitor",
    "KLPenaltyLoss",
    "KLRewardTransform",
    "KLStatistics",
    "PIDKLController",
    "PlannedKLController",
    "ReferenceModelLogProbTransform",
    "RewardAdjustmentTransform",
    "TargetKLController",
    "TopKActor",
    "coeff_for_budget",
    "kl_collector",
    "rescore",
]

__version__ = "0.1.0"

# In a checkout, `envs` is a symbolic link to a folder next to the package. Where files came without
# such links (sdists, some file systems), the package is also looked for next to this one.
if not _path.isdir(_path.join(__path__[0], "envs")):
    __path__.append(_path.dirname(__path__[0]))
