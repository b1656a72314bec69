"""KL control for reinforcement learning on TorchRL: measure the divergence, charge it, steer its price."""

from torchrl_kl.controllers import (
    AdaptiveKLController,
    ConstantKLController,
    ExponentialKLController,
    KLController,
    KLStatistics,
)
from torchrl_kl.functional import kl_k1, kl_k2, kl_k3
from torchrl_kl.reference import FrozenActor
from torchrl_kl.reward_transforms import RewardAdjustmentTransform
from torchrl_kl.stacks import KLConstrainedTransform, KLRewardTransform
from torchrl_kl.transforms import KLDivergenceTransform, ReferenceModelLogProbTransform

__all__ = [
    "AdaptiveKLController",
    "ConstantKLController",
    "ExponentialKLController",
    "FrozenActor",
    "KLConstrainedTransform",
    "KLController",
    "KLDivergenceTransform",
    "KLRewardTransform",
    "KLStatistics",
    "ReferenceModelLogProbTransform",
    "RewardAdjustmentTransform",
    "kl_k1",
    "kl_k2",
    "kl_k3",
]
