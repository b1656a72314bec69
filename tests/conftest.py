"""One thread and the same random numbers in every test."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings
from torchrl.envs.utils import set_exploration_type

# Small tensors: a second thread costs more than it gives, and several workers may share the cores.
torch.set_num_threads(1)

# No deadline: what a test needs depends on the machine. Derandomised: a failure comes back at the next run.
settings.register_profile("torchrl_kl", deadline=None, derandomize=True)
settings.load_profile("torchrl_kl")


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_exploration_type() -> Iterator[None]:
    # A collector that was left in mid-run restores, when it is collected, the type of the moment it began.
    with set_exploration_type(None):
        yield
