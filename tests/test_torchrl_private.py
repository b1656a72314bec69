"""The private names of TorchRL that torchrl_kl/_torchrl.py uses, and what they mean.

They are those of torchrl 0.14.1. A failure names the version that has changed one.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torchrl
from torchrl.envs import Compose, TransformedEnv
from torchrl.envs.transforms import ObservationNorm, RewardScaling
from torchrl.modules import MaskedCategorical

from tests.helpers import WalkEnv
from torchrl_kl import _torchrl

ROOT = Path(__file__).parents[1]
CHANGED = f"torchrl {torchrl.__version__} has renamed or changed it: adapt torchrl_kl/_torchrl.py"


def test_the_container_of_a_transform():
    transform: Any = RewardScaling(0.0, 1.0)
    assert _torchrl.container_of(transform) is None, CHANGED
    compose = Compose(transform)
    assert "_container" in vars(transform), CHANGED
    assert _torchrl.container_of(transform) is compose, CHANGED
    env: Any = TransformedEnv(WalkEnv(), compose)
    assert _torchrl.container_of(env.transform) is env, CHANGED


def test_the_declared_keys_of_a_transform():
    transform = ObservationNorm(0.0, 1.0, ["a"], ["b"], in_keys_inv=["c"], out_keys_inv=["d"])
    assert _torchrl.declared_keys(transform) == ({"b"}, {"c"}), CHANGED


def test_a_masked_categorical_of_indices():
    logits, indices = torch.zeros(4), torch.tensor([3, 1])
    found = _torchrl.indices_of(MaskedCategorical(logits=logits, indices=indices))
    assert found is not None, CHANGED
    assert found.tolist() == [3, 1], CHANGED
    mask = torch.tensor([True, False, True, True])
    assert _torchrl.indices_of(MaskedCategorical(logits=logits, mask=mask)) is None, CHANGED
    assert _torchrl.indices_of(torch.distributions.Categorical(logits=logits)) is None


NAMES = ("_container", "_out_keys", "_in_keys_inv", "_post_step_mdp_hooks", "_sparse_mask")


@pytest.mark.parametrize("name", NAMES)
def test_no_other_module_uses_it(name):
    users = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "torchrl_kl").rglob("*.py"))
        if re.search(rf"\b{name}\b", path.read_text())
    ]
    assert users == ["torchrl_kl/_torchrl.py"]
