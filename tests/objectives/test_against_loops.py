"""KLPenaltyLoss against loops over single steps: off-policy, with steps that do not count."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import kl_divergence
from torch.testing import assert_close

from tests.objectives.losses import make_loss, rollout, weight_of

OPTIONS = [
    (gradient, weights)
    for gradient in ("step", "sequence", "k2")
    for weights in ("step", "trajectory")
]


def off_policy() -> Any:
    """Two rows of 12 steps of another policy, with holes in the middle of trajectories."""
    batch = rollout()
    batch["action_log_prob"] = batch["action_log_prob"] + 0.3 * torch.randn(2, 12)
    batch["collector", "mask"] = torch.rand(2, 12) < 0.7
    return batch


def by_loops(loss: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """What is minimised, and the measured KL, of each step, (2, 12), as the docstring says."""
    policy, reference = (
        actor.get_dist(batch.select("observation"))
        for actor in (loss.actor_network, loss.reference.actor)
    )
    exact, action = kl_divergence(policy, reference), batch["action"]
    k1 = policy.log_prob(action) - reference.log_prob(action).detach()
    ratio = (policy.log_prob(action) - batch["action_log_prob"]).exp()
    done, mask = batch["next", "done"].squeeze(-1), batch["collector", "mask"]
    exact_, ratio_ = exact.detach(), ratio.detach()
    sampled, follows = loss.gradient == "k2", loss.weights == "trajectory"
    values, kls = torch.zeros(2, 12), torch.zeros(2, 12)
    for row in range(2):
        way = torch.ones(())
        for t in range(12):
            at = row, t
            if mask[at]:
                value = ratio_[at] * k1[at] ** 2 / 2 if sampled else exact[at]
                kl = ratio_[at] * k1[at].detach() if sampled else exact_[at]
                if follows:
                    kl = way.detach() * kl
                    value = (way if loss.gradient == "sequence" else way.detach()) * value
                    way = way * ratio[at]
                elif loss.gradient == "sequence":
                    end = t + int(done[row, t:].int().argmax()) if done[row, t:].any() else 11
                    later = (exact_ * mask)[row, t + 1 : end + 1].sum()
                    value = value + (ratio[at] - ratio_[at]) * later
                values[at], kls[at] = value, kl
            way = torch.ones(()) if done[at] else way
    return values, kls


@pytest.mark.parametrize(("gradient", "weights"), OPTIONS)
def test_value_kl_and_gradient(gradient, weights):
    batch = off_policy()
    loss = make_loss(gradient=gradient, weights=weights, reduction="none")
    values, kls = by_loops(loss, batch)
    out = loss(batch)
    assert_close(out["loss_kl"], 0.5 * values)
    assert_close(out["kl"], kls.sum() / batch["collector", "mask"].sum())
    grads = [torch.autograd.grad(one.sum(), weight_of(loss)) for one in (out["loss_kl"], values)]
    assert_close(grads[0][0], 0.5 * grads[1][0])


@pytest.mark.parametrize(("gradient", "weights"), OPTIONS)
def test_an_invalid_step_is_left_out_alone_and_the_batch_stays_as_it_was(gradient, weights):
    batch = off_policy()
    batch["collector", "mask"][0] = True
    without = batch.clone()
    without["collector", "mask"][0, 1] = False
    batch["observation"][0, 1] = batch["next", "observation"][0, 0] = torch.nan
    before = batch.clone()
    options: Any = {"gradient": gradient, "weights": weights, "reduction": "none"}
    expected = make_loss(**options)(without)
    with pytest.warns(UserWarning, match="'log_prob'|'kl'"):  # where it came from
        out = make_loss(on_invalid="mask", **options)(batch)
    assert_close(dict(out), dict(expected))
    for key in before.keys(True, True):
        assert_close(batch[key], before[key], equal_nan=True)


@pytest.mark.parametrize(("gradient", "weights"), [one for one in OPTIONS if one[0] != "k2"])
@pytest.mark.parametrize("controller", [0.0, 0.5])
def test_an_action_that_only_the_reference_forbids_and_nobody_took(gradient, weights, controller):
    batch = off_policy()
    batch["collector", "mask"][0] = True
    without = batch.clone()
    without["collector", "mask"][0, 2] = False
    state, other = batch["observation"][0, 2], (batch["action"][0, 2] + 1) % 4

    def forbid(module: Any, args: Any, logits: Tensor) -> Tensor:
        there = (args[0] == state).all(-1, keepdim=True) & (torch.arange(4) == other)
        return logits.masked_fill(there, -torch.inf)

    def make(**kwargs: Any) -> Any:
        loss = make_loss(
            gradient=gradient, weights=weights, reduction="none", controller=controller, **kwargs
        )
        loss.reference.actor[0].module.register_forward_hook(forbid)
        return loss

    expected = make()(without)
    with pytest.warns(UserWarning, match="'kl' has 1 of 24"):
        out = make(on_invalid="mask")(batch)
    assert_close(dict(out), dict(expected))
    if controller == 0:
        out = make()(batch)  # which only measures
        assert out["kl"] == torch.inf
        assert_close(out["loss_kl"], torch.zeros(2, 12))


def test_an_action_that_nobody_took_is_not_read_from_samples():
    """The gradient "k2" sees only actions that were taken, also next to an invalid step."""
    batch = off_policy()
    batch["collector", "mask"][0] = True
    without = batch.clone()
    without["collector", "mask"][0, 1] = False
    batch["action_log_prob"][0, 1] = torch.nan
    state, other = batch["observation"][0, 2], (batch["action"][0, 2] + 1) % 4

    def make(**kwargs: Any) -> Any:
        loss = make_loss(gradient="k2", reduction="none", **kwargs)
        loss.reference.actor[0].module.register_forward_hook(
            lambda _, args, logits: logits.masked_fill(
                (args[0] == state).all(-1, keepdim=True) & (torch.arange(4) == other), -torch.inf
            )
        )
        return loss

    expected = make()(without)
    with pytest.warns(UserWarning, match="'action_log_prob' has 1 of 24"):
        out = make(on_invalid="mask")(batch)
    assert_close(dict(out), dict(expected))
