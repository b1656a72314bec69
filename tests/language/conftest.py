"""What several test files of this folder need."""

import pytest
import torch
from tensordict import set_list_to_stack


@pytest.fixture
def lists_are_stacked():
    """As TorchRL's LLM API expects, and with the same random numbers for each test."""
    with set_list_to_stack(True):
        torch.manual_seed(0)
        yield
