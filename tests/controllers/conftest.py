"""What several test files of this folder need."""

import pytest
import torch

from torchrl_kl import GPT, CausalLMActor


@pytest.fixture(scope="module")
def actor():
    torch.manual_seed(0)
    return CausalLMActor(GPT(vocab_size=11, block_size=8, n_layer=1, n_head=1, n_embd=8))
