"""One thread and the same random numbers in every test."""

import os
from collections.abc import Iterator

# Before torch is imported, and inherited by every process that a test starts. A second thread costs
# more than it gives with small tensors, and next to another busy process many times more.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings
from torchrl.envs.utils import set_exploration_type

torch.set_num_threads(1)

# No deadline: what a test needs depends on the machine. Derandomized: a failure comes back.
settings.register_profile("torchrl_kl", deadline=None, derandomize=True)
settings.load_profile("torchrl_kl")


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_exploration_type() -> Iterator[None]:
    # A collector that was left in mid-run restores, when it is freed, the type of when it began.
    with set_exploration_type(None):
        yield
