"""The transforms: one path from log-prob to penalized reward, whole or in parts."""

from torchrl_kl.transforms.parts import (
    KLDivergenceTransform,
    ReferenceModelLogProbTransform,
    RewardAdjustmentTransform,
)
from torchrl_kl.transforms.stack import KLConstrainedTransform, KLRewardTransform

__all__ = [
    "KLConstrainedTransform",
    "KLDivergenceTransform",
    "KLRewardTransform",
    "ReferenceModelLogProbTransform",
    "RewardAdjustmentTransform",
]
