"""KL control for reinforcement learning on TorchRL: measure the divergence, charge it, steer its price."""

from torchrl_kl.controllers import (
    AdaptiveKLController,
    ConstantKLController,
    ExponentialKLController,
    KLController,
    KLStatistics,
)
from torchrl_kl.exact import Enumeration, ExactValues, PolicyValues, exact_kl
from torchrl_kl.functional import kl_k1, kl_k2, kl_k3
from torchrl_kl.gpt import GPT, GPTActor, GPTCritic, GPTRewardModel
from torchrl_kl.reference import FrozenActor
from torchrl_kl.reward_transforms import RewardAdjustmentTransform
from torchrl_kl.stacks import KLConstrainedTransform, KLRewardTransform
from torchrl_kl.trainers import KLControlHook
from torchrl_kl.transforms import KLDivergenceTransform, ReferenceModelLogProbTransform

__all__ = [
    "GPT",
    "AdaptiveKLController",
    "ConstantKLController",
    "Enumeration",
    "ExactValues",
    "ExponentialKLController",
    "FrozenActor",
    "GPTActor",
    "GPTCritic",
    "GPTRewardModel",
    "KLConstrainedTransform",
    "KLControlHook",
    "KLController",
    "KLDivergenceTransform",
    "KLRewardTransform",
    "KLStatistics",
    "PolicyValues",
    "ReferenceModelLogProbTransform",
    "RewardAdjustmentTransform",
    "exact_kl",
    "kl_k1",
    "kl_k2",
    "kl_k3",
]
