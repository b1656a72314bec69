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
@pytest.mark.parametrize("coeff", [0.0, 0.5])
def test_a_number_that_is_not_finite_is_named(gradient, weights, coeff):
    batch = off_policy()
    batch["collector", "mask"][0] = True
    loss = make_loss(controller=coeff, gradient=gradient, weights=weights)
    wrong = batch.clone()
    wrong["observation"][0, 1] = wrong["next", "observation"][0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"'(log_prob|kl)' has .* the first nan at \(0, 1\)"):
        loss(wrong)
    if "action_log_prob" in loss.in_keys:
        batch["action_log_prob"][0, 1] = torch.nan
        with pytest.raises(ValueError, match=r"'action_log_prob' has 1 of 24 .* nan at \(0, 1\)"):
            loss(batch)


@pytest.mark.parametrize(("gradient", "weights"), OPTIONS)
def test_an_infinite_kl_is_measured_with_a_coefficient_of_0_and_else_an_error(gradient, weights):
    batch, options = off_policy(), {"gradient": gradient, "weights": weights}
    batch["collector", "mask"][0] = True
    losses: Any = [make_loss(controller=coeff, **options) for coeff in (0.0, 0.5)]
    for loss in losses:
        with torch.no_grad():
            loss.reference.actor[0].module.bias[batch["action"][0, 2]] = -torch.inf
    out = losses[0](batch)
    assert out["kl"] == torch.inf
    assert out["loss_kl"] == 0
    out["loss_kl"].backward()
    assert all(parameter.grad is None for parameter in losses[0].parameters())
    with pytest.raises(ValueError, match="'kl' has .* the first inf at"):
        losses[1](batch)
