"""A small causal language model, and its use as an actor, a critic and a reward model."""

from torchrl_kl.language.gpt import GPT
from torchrl_kl.language.heads import GPTActor, GPTCritic, GPTRewardModel

__all__ = ["GPT", "GPTActor", "GPTCritic", "GPTRewardModel"]
