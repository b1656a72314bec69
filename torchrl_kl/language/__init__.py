"""Causal language models as actors, critics and reward models, and a small GPT."""

from torchrl_kl.language.gpt import GPT
from torchrl_kl.language.heads import CausalLMActor, CausalLMCritic, CausalLMRewardModel
from torchrl_kl.language.minibatches import minibatches
from torchrl_kl.language.response_kl import ResponseKLTransform
from torchrl_kl.language.responses import as_steps
from torchrl_kl.language.sampling import sample_responses

__all__ = [
    "GPT",
    "CausalLMActor",
    "CausalLMCritic",
    "CausalLMRewardModel",
    "ResponseKLTransform",
    "as_steps",
    "minibatches",
    "sample_responses",
]
