"""One thread and the same random numbers in every test."""

import itertools
import os
from collections.abc import Iterator

# Before torch is imported, and inherited by every process that a test starts. A second thread costs
# more than it gives with small tensors, and next to another busy process many times more.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from gymnasium.utils import seeding
from hypothesis import settings
from torchrl.envs.utils import set_exploration_type

from torchrl_kl.envs import DigitLanguageEnv

torch.set_num_threads(1)

# No deadline: what a test needs depends on the machine. Derandomized: a failure comes back.
settings.register_profile("torchrl_kl", deadline=None, derandomize=True)
settings.load_profile("torchrl_kl")


# Envs without a seed would draw other states in each run of a test.
_seeds = itertools.count()
set_env_seed, _np_random = DigitLanguageEnv._set_seed, seeding.np_random


def _any(seed: int | None) -> int:
    return 1000 + next(_seeds) if seed is None else seed


DigitLanguageEnv._set_seed = lambda self, seed: set_env_seed(self, _any(seed))
seeding.np_random = lambda seed=None: _np_random(_any(seed))


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    global _seeds
    _seeds = itertools.count()
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_exploration_type() -> Iterator[None]:
    # A collector that was left in mid-run restores, when it is freed, the type of when it began.
    with set_exploration_type(None):
        yield
