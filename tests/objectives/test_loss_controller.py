"""Who moves the controller of a KLPenaltyLoss, and sums over long trajectories."""

import copy
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import Categorical
from torch.testing import assert_close

from tests.helpers import (
    N_OBS,
    SpyController,
    WalkEnv,
    collect,
    make_actor,
    moved,
    play,
    probabilistic_actor,
    total,
    with_transforms,
)
from tests.objectives.losses import kl_of, make_loss, rollout
from torchrl_kl import KLPenaltyLoss, PlannedKLController


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_only_update_controller_moves_it_and_it_may_before_backward(dtype):
    """The gradient is with the coefficient of `forward`, also where no cast has copied it."""
    actor, reference = make_actor().to(dtype), moved(make_actor()).to(dtype)
    batch, grads = play(WalkEnv((2,), dtype=dtype), actor), []
    for moves in (False, True):
        controller = SpyController(per="step", step=0.25)
        loss = KLPenaltyLoss(actor, controller, reference=reference)
        out = loss(batch)
        assert controller.calls == []
        if moves:
            assert loss.update_controller(batch) == pytest.approx(0.35)
            assert loss(batch)["kl_coeff"].item() == pytest.approx(0.35)
        grads.append(torch.autograd.grad(out["loss_kl"], list(loss.parameters())))
    assert_close(*grads, rtol=0, atol=0)


def test_per_step_it_is_fed_the_mean_over_valid_steps_in_any_order():
    batch = rollout()
    batch["collector", "mask"] = torch.rand(2, 12) > 0.3
    for data in (batch, batch[:, torch.randperm(12)], batch.reshape(-1)):
        controller = SpyController(per="step")
        loss = make_loss(controller=controller)
        loss.update_controller(data)
        kl = kl_of(loss, batch)[batch["collector", "mask"]].mean().item()
        assert controller.calls == [(pytest.approx(kl), int(batch["collector", "mask"].sum()))]


@pytest.mark.parametrize("without", ["action_log_prob", ("next", "reward")])
def test_a_first_coefficient_that_is_given_needs_neither_rewards_nor_log_probs(without):
    batch = rollout()
    first, controller = 0.4, PlannedKLController(0.3, init_coeff=0.4, per="step")
    loss = make_loss(controller=controller)
    assert loss.update_controller(batch.exclude(without)) != first
    loss.feed.frozen, before = True, controller.coeff.item()
    assert loss.update_controller(batch.exclude("action_log_prob")) == before


@pytest.mark.parametrize("gradient", ["step", "sequence"])
def test_per_trajectory_it_is_fed_the_mean_of_their_sums(gradient):
    batches = collect(with_transforms(WalkEnv((2,))), moved(make_actor()), frames=14, batches=4)
    whole: Any = torch.cat(batches, 1)
    whole.names = [None, "time"]
    sums, ends = [], whole["next", "done"].squeeze(-1)
    for row_kl, row_done in zip(kl_of(make_loss(), whole), ends, strict=True):
        parts = row_kl.tensor_split((row_done.nonzero().flatten() + 1).tolist())
        sums += [part.sum().item() for part in parts[:-1]]
    assert len(sums) == ends.sum() > 8
    for data in ([whole], batches):  # they may come in pieces
        controller = SpyController()
        loss = make_loss(controller=controller, gradient=gradient)
        for batch in data:
            loss.update_controller(batch)
        assert len(controller.calls) == len(data)
        assert total(controller) == (len(sums), pytest.approx(sum(sums), rel=1e-5))


@pytest.mark.parametrize("layer", [nn.Dropout(), nn.BatchNorm1d(N_OBS)])
@pytest.mark.parametrize("gradient", ["step", "k2"])
def test_it_is_measured_in_eval_mode(layer, gradient):
    # Noise of dropout would be measured as divergence; a measurement must not move statistics.
    actor, controller = make_actor(), SpyController(per="step")
    actor[0].module = nn.Sequential(layer, actor[0].module)
    batch = play(WalkEnv((1,)), actor.eval(), 24)[0]
    loss = KLPenaltyLoss(actor.train(), controller, gradient=gradient)
    before = copy.deepcopy(actor.state_dict())
    loss.update_controller(batch)
    assert controller.calls == [(pytest.approx(0, abs=1e-6), 24)]
    assert all(part.training for part in loss.actor_network.modules())
    assert_close(actor.state_dict(), before, rtol=0, atol=0)


class Planned(PlannedKLController):
    """Keeps what it would plan from."""

    def __init__(self, per: Any = "trajectory"):
        super().__init__(0.5, per=per)
        self.seen: list[dict[str, Any]] = []

    def observe_rewards(self, rewards, **kwargs):
        self.seen.append(dict(kwargs, rewards=rewards))
        return self.coeff.item()


def test_a_plan_is_made_from_the_task_rewards():
    loss, batch = make_loss(controller=Planned()), rollout()
    loss.update_controller(batch)
    [seen] = loss.controller.seen
    ref_log_prob = loss.reference.actor.log_prob(batch.select("observation", "action"))
    first = int(batch["next", "done"][0].flatten().nonzero()[0]) + 1
    log_ratio = (batch["action_log_prob"] - ref_log_prob).detach()[0, :first]
    assert len(seen["rewards"]) == batch["next", "done"].sum()
    assert_close(seen["rewards"][0].float(), batch["next", "reward"][0, :first].sum())
    assert_close(seen["log_ratios"][0].float(), log_ratio.sum())
    batch["next", "reward"] = batch["next", "reward"].expand(2, 12, 3)
    with pytest.raises(ValueError, match=r"must have shape \(2, 12, 1\), got \(2, 12, 3\)"):
        loss.update_controller(batch)


@pytest.mark.parametrize("per", ["trajectory", "step"])
@pytest.mark.parametrize("padded", [False, True])
def test_a_plan_is_made_from_advantages_of_whole_trajectories(per, padded):
    """Those of GRPO, in whose unit the loss is; other advantages are not what a choice gains."""
    batch = rollout()
    ends = batch["next", "done"].squeeze(-1)
    number = 1 + ends.cumsum(1) - ends.long() + 10 * torch.arange(2)[:, None]
    batch["advantage"] = number.unsqueeze(-1).float() / 7
    mask = torch.ones(2, 12, dtype=torch.bool)
    if padded:
        mask[1, 9:] = False
        inside = int((~ends[0, 1:]).nonzero()[0]) + 1
        mask[0, inside] = ends[0, inside - 1]  # a hole in a trajectory does not end it
        batch["collector", "mask"] = mask
        batch["advantage"][1, 9:] = torch.nan
        ends = ends & mask
        ends[1, 8] = True  # the last step that counts
    loss = make_loss(controller=Planned(per))
    loss.update_controller(batch)
    rewards = loss.controller.seen[-1]["rewards"].float()
    paid = batch["advantage"][ends].flatten()
    assert len(paid) > 2
    assert_close(rewards[rewards != 0].sort()[0], paid.sort()[0])
    assert len(rewards) == (len(paid) if per == "trajectory" else 24 - int((~mask).sum()))
    batch["advantage"][0, 0] += 1e-3
    loss.update_controller(batch)
    assert not torch.equal(loss.controller.seen[-1]["rewards"].float(), rewards)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (lambda batch: batch[:, [3, 1, 0, 2]], RuntimeError, "do not follow one another"),
        (lambda batch: batch.reshape(-1), RuntimeError, "per trajectory.* without a time dim"),
        (lambda batch: batch.exclude(("next", "done")), KeyError, "where trajectories end"),
        (lambda batch: batch.apply(lambda x: x / 0 if x.is_floating_point() else x), ValueError,
         "KLPenaltyLoss needs finite numbers"),
    ],
)  # fmt: skip
def test_a_batch_that_is_refused_changes_nothing(change, error, match):
    batch, controller = rollout(), SpyController(step=1.0)
    loss = make_loss(controller=controller)
    before = copy.deepcopy(loss.state_dict())
    with pytest.raises(error, match=match):
        loss.update_controller(change(batch))
    assert controller.calls == []
    assert_close(loss.state_dict(), before, rtol=0, atol=0)
    assert loss.update_controller(batch) == pytest.approx(1.1)


@pytest.mark.parametrize("gradient", ["step", "sequence"])
@pytest.mark.parametrize("n_steps", [0, 1])
def test_no_finished_trajectory_moves_nothing(gradient, n_steps):
    controller = SpyController(step=1.0)
    loss = make_loss(controller=controller, gradient=gradient)
    assert loss.update_controller(rollout()[:, :n_steps]) == 0.1
    assert loss(rollout()[:, :n_steps])["loss_kl"].isfinite()
    assert controller.calls == []


N_STEPS = 140_000  # times a KL of one half: beyond the largest number of float16, 65504


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("gradient", ["step", "sequence", "k2"])
def test_sums_and_means_of_half_precision_are_made_in_float32(dtype, gradient):
    def actor(bias: float) -> Any:
        """Two actions; the logits are 0 and `bias`."""
        net = nn.Linear(1, 2, dtype=dtype)
        nn.init.zeros_(net.weight)
        net.bias.data = torch.tensor([0.0, bias], dtype=dtype)
        net = TensorDictModule(net, ["observation"], ["logits"])
        options: Any = {"distribution_class": Categorical, "return_log_prob": True}
        return probabilistic_actor(net, in_keys=["logits"], **options)

    shape = (1, N_STEPS)
    done = (torch.arange(N_STEPS) % 1000 == 999).reshape(*shape, 1)
    batch = TensorDict(
        observation=torch.ones(*shape, 1, dtype=dtype),
        action=torch.zeros(shape, dtype=torch.long),
        next=TensorDict(done=done, batch_size=shape),
        batch_size=shape,
    )
    batch.names = [None, "time"]
    log_probs, ref_log_probs = (torch.tensor([0.0, bias]).log_softmax(-1) for bias in (0.0, 2.0))
    batch["action_log_prob"] = log_probs[0].to(dtype).expand(shape)
    ratio = log_probs[0] - ref_log_probs[0]
    exact = (log_probs.exp() * (log_probs - ref_log_probs)).sum()
    value, kl = (ratio**2 / 2, ratio) if gradient == "k2" else (exact, exact)
    controller = SpyController()
    options: Any = {"gradient": gradient, "weights": "step", "reference": actor(2.0)}
    loss = KLPenaltyLoss(actor(0.0), controller, reduction="sum", **options)
    out = loss(batch)
    assert all(entry.dtype == torch.float32 for entry in out.values())
    # Log-probs of at most 2.2 are rounded to the dtype, and their ratio is squared for k2.
    tolerance: Any = {"rtol": 8 * torch.finfo(dtype).eps, "atol": 0}
    assert_close(out["loss_kl"].detach(), 0.1 * N_STEPS * value, **tolerance)
    assert_close(out["kl"], kl, **tolerance)
    loss.update_controller(batch)
    assert controller.calls == [(pytest.approx(1000 * out["kl"].item(), rel=1e-5), 140)]
