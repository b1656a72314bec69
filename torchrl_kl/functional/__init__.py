"""Log-probabilities and distributions in, KL numbers out; sums over masks and trajectories."""

from torchrl_kl.functional.estimators import kl_exact, kl_k1, kl_k2, kl_k3, kl_top_k
from torchrl_kl.functional.sums import masked_mean, masked_sum

__all__ = ["kl_exact", "kl_k1", "kl_k2", "kl_k3", "kl_top_k", "masked_mean", "masked_sum"]
