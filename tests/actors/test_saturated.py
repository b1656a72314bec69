"""Where a TanhNormal is saturated, what it records is the log-prob of another action."""

from typing import Any

import pytest
import torch
from torch.testing import assert_close
from torchrl.envs import TransformedEnv
from torchrl.modules import TanhNormal

from tests.helpers import WalkEnv, assert_within, make_actor, moved, play, rounding
from torchrl_kl import KLConstrainedTransform, ReferenceModelLogProbTransform


def saturated(loc: float = 8.0, **kwargs) -> Any:
    """The saturated actor: the scale is about 0.3."""
    actor = make_actor("tanh_normal", **kwargs)
    with torch.no_grad():
        actor[0].module[0].weight.mul_(0.01)
        actor[0].module[0].bias.copy_(torch.tensor([loc, -loc, -1.5, -1.5]))
    return actor


def rescored(batch: Any, **kwargs) -> torch.Tensor:
    """The log-prob of the recorded actions, which no cache of draws knows."""
    dist = TanhNormal(batch["loc"].detach(), batch["scale"].detach(), **kwargs)
    return dist.log_prob(batch["action"].detach())


@pytest.mark.parametrize("bounds", [{}, {"low": -2.0, "high": 3.0}])
@pytest.mark.parametrize("place", ["env", "batch"])
def test_identical_weights_have_no_kl(place, bounds):
    actor = saturated(distribution_kwargs=bounds)
    env: Any = WalkEnv((8,), discrete=False)
    stack = KLConstrainedTransform(actor, 0.1)
    batch = play(TransformedEnv(env, stack) if place == "env" else env, actor, 20)
    assert (batch["action_log_prob"] - rescored(batch, **bounds)).mean() > 1
    after = (batch if place == "env" else stack(batch))["next"]
    assert_within(after["kl"], torch.zeros(8, 20, 1), rounding(actor, batch))


def test_the_kl_is_that_of_the_action():
    actor = saturated()
    behaviour = moved(actor, scale=0.1)
    batch = play(WalkEnv((8,), discrete=False), behaviour, 20)
    after = KLConstrainedTransform(actor, 0.1)(batch)["next"]
    expected = rescored(batch) - after["ref_log_prob"]
    assert_close(after["kl"].squeeze(-1), expected.detach(), rtol=0, atol=1e-5)


def test_what_is_not_rounded_is_what_was_recorded():
    actor = saturated(6.5)
    batch = play(WalkEnv((8,), discrete=False), moved(actor, scale=0.01), 20)
    after = KLConstrainedTransform(actor, 0.1)(batch)["next"]
    free = (batch["action"].abs() < 1 - 2e-6).all(-1)
    assert 0 < free.sum() < free.numel()
    kl = (batch["action_log_prob"] - after["ref_log_prob"])[free]
    assert_close(after["kl"].squeeze(-1)[free], kl.detach(), rtol=0, atol=0)


@pytest.mark.parametrize("make", [KLConstrainedTransform, ReferenceModelLogProbTransform])
def test_without_the_parameters_the_cause_is_named(make):
    actor = saturated()
    batch = play(WalkEnv((2,), discrete=False), actor, 6).exclude("loc", "scale")
    transform = make(actor, 0.1) if make is KLConstrainedTransform else make(actor)
    with pytest.warns(UserWarning, match="actions of a TanhNormal are rounded.*tanh_loc"):
        transform(batch)
