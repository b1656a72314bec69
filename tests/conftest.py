"""One thread and the same random numbers in every test."""

import pytest
import torch
from hypothesis import settings

# Small tensors: a second thread costs more than it gives, and several workers may share the cores.
torch.set_num_threads(1)

# No deadline: what a test needs depends on the machine. Derandomised: a failure comes back at the next run.
settings.register_profile("torchrl_kl", deadline=None, derandomize=True)
settings.load_profile("torchrl_kl")


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)
