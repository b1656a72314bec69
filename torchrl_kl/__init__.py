"""KL control for reinforcement learning on TorchRL: measure the divergence, charge it, steer its price."""

from torchrl_kl.controllers.budget import coeff_for_budget
from torchrl_kl.collectors.kl_collector import kl_collector
from torchrl_kl.controllers.rules import (
    AdaptiveKLController,
    ConstantKLController,
    ExponentialKLController,
    KLController,
    PIDKLController,
    TargetKLController,
)
from torchrl_kl.exact import Enumeration, ExactValues, PolicyValues, exact_kl
from torchrl_kl.functional.estimators import (
    kl_exact,
    kl_k1,
    kl_k2,
    kl_k3,
    kl_top_k,
    masked_mean,
    masked_sum,
    sum_over_trajectories,
)
from torchrl_kl.language.gpt import GPT, GPTActor, GPTCritic, GPTRewardModel
from torchrl_kl.monitor.monitor import KLMonitor
from torchrl_kl.objectives.penalty_loss import KLPenaltyLoss
from torchrl_kl.actors.frozen import FrozenActor
from torchrl_kl.transforms.adjustment import RewardAdjustmentTransform
from torchrl_kl.transforms.stack import KLConstrainedTransform, KLRewardTransform
from torchrl_kl.controllers.statistics import KLStatistics
from torchrl_kl.actors.top_k import TopKActor
from torchrl_kl.trainers import KLControlHook
from torchrl_kl.transforms.measuring import KLDivergenceTransform, ReferenceModelLogProbTransform

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
    "KLMonitor",
    "KLPenaltyLoss",
    "KLRewardTransform",
    "KLStatistics",
    "PIDKLController",
    "PolicyValues",
    "ReferenceModelLogProbTransform",
    "RewardAdjustmentTransform",
    "TargetKLController",
    "TopKActor",
    "coeff_for_budget",
    "exact_kl",
    "kl_collector",
    "kl_exact",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "kl_top_k",
    "masked_mean",
    "masked_sum",
    "sum_over_trajectories",
]
