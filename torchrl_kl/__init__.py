"""KL control for reinforcement learning on TorchRL: measures the KL and adapts its penalty."""

import sys as _sys
from importlib import util as _util
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
from torchrl_kl.plots import plot_frontier
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
    "plot_frontier",
    "rescore",
]

__version__ = "0.1.0"

# In a checkout, `envs` is a symbolic link to a folder next to the package. Where files came without
# such links (sdists, some file systems), it is loaded from that folder.
if not _path.isdir(_path.join(__path__[0], "envs")):
    _file = _path.join(_path.dirname(__path__[0]), "envs", "__init__.py")
    _spec = _util.spec_from_file_location("torchrl_kl.envs", _file)
    assert _spec is not None
    assert _spec.loader is not None
    envs = _sys.modules["torchrl_kl.envs"] = _util.module_from_spec(_spec)
    _spec.loader.exec_module(envs)
