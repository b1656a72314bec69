"""Causal language models as actors, critics and reward models, and a small GPT."""

from torchrl_kl.language.gpt import GPT
from torchrl_kl.language.heads import CausalLMActor, CausalLMCritic, CausalLMRewardModel
from torchrl_kl.language.sampling import sample_responses

__all__ = ["GPT", "CausalLMActor", "CausalLMCritic", "CausalLMRewardModel", "sample_responses"]
