"""Feeds a controller: measured KL of steps or trajectories, and the rewards that it plans from."""

from torchrl_kl._feeding.feed import ControllerFeed, Fed
from torchrl_kl._feeding.rewards import EnvReturns
from torchrl_kl._feeding.sums import kept_steps, sum_trajectories

__all__ = ["ControllerFeed", "EnvReturns", "Fed", "kept_steps", "sum_trajectories"]
