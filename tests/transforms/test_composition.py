"""Transforms own a scorer and a penalty: what a class must define, and what it may not inherit."""

from typing import Any

import pytest
import torch
from torch.testing import assert_close
from torchrl.envs import Compose, TransformedEnv

from tests.helpers import WalkEnv, make_actor, play, policy
from torchrl_kl import KLConstrainedTransform, KLDivergenceTransform
from torchrl_kl.transforms.base import KLTransform
from torchrl_kl.transforms.estimates import Estimate
from torchrl_kl.transforms.scoring import ScoringTransform

ABSTRACT = [KLTransform, ScoringTransform, Estimate]


@pytest.mark.parametrize("base", ABSTRACT, ids=lambda base: base.__name__)
def test_a_class_that_lacks_a_method_cannot_be_built(base):
    with pytest.raises(TypeError, match=f"Can't instantiate abstract class {base.__name__}"):
        base([], [])
    for missing in base.__abstractmethods__:
        methods: Any = dict.fromkeys(base.__abstractmethods__ - {missing}, lambda *_: None)
        with pytest.raises(TypeError, match=f"abstract method '?{missing}"):
            type("Partial", (base,), methods)([], [])
    every: Any = dict.fromkeys(base.__abstractmethods__, lambda *_: None)
    type("Whole", (base,), every)(*([], [])[: 1 if base is Estimate else 2])


def test_a_subclass_of_a_concrete_one_is_concrete():
    class Mine(KLDivergenceTransform):
        pass

    assert Mine().out_keys == ["kl"]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_first_transform_of_nested_composes_finds_its_env(depth):
    stack: Any = KLConstrainedTransform(make_actor(), 0.1)
    for _ in range(depth):
        stack = Compose(stack)
    env = TransformedEnv(WalkEnv((2,)), stack)
    torch.manual_seed(0)
    inside = play(env, policy())["next", "kl"]
    torch.manual_seed(0)
    batch = KLConstrainedTransform(make_actor(), 0.1)(play(WalkEnv((2,)), policy()))
    # Log-probs of up to 8 nats, of which the passes round the last digit.
    assert_close(inside, batch["next", "kl"], rtol=0, atol=8 * 2 * torch.finfo().eps)
