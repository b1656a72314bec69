"""Composite actions of which a module before the distribution writes a part."""

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    CompositeDistribution,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    set_composite_lp_aggregate,
)
from torch import nn
from torch.distributions import Categorical
from torch.testing import assert_close
from torchrl.envs.utils import ExplorationType

from tests.helpers import N_ACTIONS, N_OBS
from torchrl_kl import FrozenActor


@pytest.mark.parametrize("spoiled", ["first", "second"])
def test_of_a_composite_action_all_parts_are_scored_as_recorded(spoiled):
    """Also a part whose key a module before the distribution writes."""
    params = [("params", name, "logits") for name in ("first", "second")]
    networks = [nn.Linear(N_OBS, N_ACTIONS) for _ in params]
    logits = [
        TensorDictModule(net, ["observation"], [key])
        for net, key in zip(networks, params, strict=True)
    ]
    zeros = TensorDictModule(lambda x: torch.zeros(len(x)).long(), ["observation"], [spoiled])
    make: Any = ProbabilisticTensorDictModule
    draw = make(
        in_keys=["params"],
        out_keys=["first", "second"],
        distribution_class=CompositeDistribution,
        distribution_kwargs={"distribution_map": {"first": Categorical, "second": Categorical}},
        default_interaction_type=ExplorationType.RANDOM,
        return_log_prob=True,
    )
    in_sequence: Any = ProbabilisticTensorDictSequential
    actor = in_sequence(*logits, zeros, draw)
    observation = torch.randn(20, N_OBS)
    with set_composite_lp_aggregate(False):
        batch = actor(TensorDict(observation=observation, batch_size=20)).detach()
        reference = FrozenActor(actor)
        score = reference.step(reference.inputs(batch)).log_prob
    expected = sum(
        Categorical(logits=net(observation)).log_prob(batch[name])
        for net, name in zip(networks, ("first", "second"), strict=True)
    )
    assert batch[spoiled].any()
    assert_close(score, torch.as_tensor(expected).detach())
