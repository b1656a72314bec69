"""A recurrent actor that begins its trajectories from a learned state."""

from typing import Any

import pytest
import torch
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torch import nn
from torchrl.data import Unbounded
from torchrl.envs import InitTracker, TensorDictPrimer
from torchrl.modules import recurrent_mode

from tests.helpers import (
    N_ACTIONS,
    N_OBS,
    WalkEnv,
    assert_within,
    collect,
    moved,
    play,
    probabilistic_actor,
    sequence,
    sharp,
    with_transforms,
)
from torchrl_kl import KLConstrainedTransform


class LearnedStart(TensorDictModuleBase):
    """A cell whose state is `start` where `is_init`."""

    def __init__(self, size: int = 4):
        super().__init__()
        self.in_keys: Any = ["observation", "h", "is_init"]
        self.out_keys: Any = ["features", ("next", "h")]
        self.cell = nn.GRUCell(N_OBS, size)
        self.start = nn.Parameter(torch.ones(size))

    def forward(self, tensordict: Any) -> Any:
        steps = tensordict.unbind(-1) if recurrent_mode() else [tensordict]
        state, states = steps[0]["h"], []
        for step in steps:
            state = torch.where(step["is_init"], self.start, state)
            shape = state.shape
            flat = self.cell(step["observation"].reshape(-1, N_OBS), state.reshape(-1, shape[-1]))
            state = flat.reshape(shape)
            states.append(state)
        states = torch.stack(states, -2) if recurrent_mode() else state
        tensordict["features"] = states
        tensordict["next", "h"] = states
        return tensordict

    def make_tensordict_primer(self) -> TensorDictPrimer:
        return TensorDictPrimer({"h": Unbounded(4)}, expand_specs=True)


def make_actor() -> Any:
    head = TensorDictModule(nn.Linear(4, N_ACTIONS), ["features"], ["logits"])
    return sharp(
        probabilistic_actor(
            sequence(LearnedStart(), head),
            in_keys=["logits"],
            distribution_class=torch.distributions.Categorical,
            return_log_prob=True,
        )
    )


def make_env(actor: Any, *transforms: Any) -> Any:
    memory = (InitTracker(), actor[0][0].make_tensordict_primer())
    return with_transforms(WalkEnv((2,)), *memory, *transforms)


@pytest.mark.parametrize("place", ["env", "batch"])
def test_identical_weights_have_no_kl_from_the_first_step_on(place):
    actor = make_actor()
    stack = KLConstrainedTransform(actor, 0.1)
    if place == "env":
        batch = play(make_env(actor, stack), actor)
    else:
        (batch,) = collect(make_env(actor), actor, frames=24, batches=1, postproc=stack)
    assert batch["is_init"].sum() > 2
    # Four terms per dot product, four cells at most in a row.
    assert_within(batch["next", "kl"], torch.zeros(2, 12, 1), 64 * torch.finfo(torch.float32).eps)


def test_env_and_batch_give_the_same():
    actor = make_actor()
    behaviour = moved(actor)
    inside = play(make_env(actor, KLConstrainedTransform(actor, 0.1)), behaviour)
    outside = KLConstrainedTransform(actor, 0.1)(play(make_env(actor), behaviour))
    assert (inside["next", "kl"].abs() > 0.01).any()
    bound = 256 * torch.finfo(torch.float32).eps
    assert_within(outside["next", "kl"], inside["next", "kl"], bound)


def test_a_batch_without_steps_is_refused():
    actor = make_actor()
    batch = play(make_env(actor), actor)[:, :0]
    with pytest.raises(
        ValueError, match=r"must have steps, got the shape \(2, 0\) with an empty time"
    ):
        KLConstrainedTransform(actor, 0.1)(batch)
