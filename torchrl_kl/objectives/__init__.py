"""KL(policy || reference) as a term of a loss."""

from torchrl_kl.objectives.penalty_loss import KLPenaltyLoss

__all__ = ["KLPenaltyLoss"]
