"""KLPenaltyLoss with every kind of actor, and around another loss."""

from typing import Any

import pytest
import torch
from tensordict.nn import CompositeDistribution, TensorDictModule
from torch import nn
from torch.distributions import Categorical, kl_divergence
from torch.testing import assert_close
from torchrl.modules import ValueOperator
from torchrl.objectives import ClipPPOLoss, KLPENPPOLoss

from tests.actors.kinds import chain, composite
from tests.helpers import (
    N_OBS,
    WalkEnv,
    assert_same,
    make_actor,
    memory_of,
    moved,
    play,
    probabilistic_actor,
    sequence,
    sharp,
    with_transforms,
)
from tests.objectives.losses import make_loss, rollout
from torchrl_kl import (
    ExponentialKLController,
    FrozenActor,
    KLPenaltyLoss,
    ReferenceModelLogProbTransform,
)


def around(cls: Any = ClipPPOLoss) -> tuple[Any, Any, Any]:
    """A loss around PPO, the PPO, and a batch for them."""
    actor, batch = moved(make_actor()), rollout()
    ppo = cls(actor, ValueOperator(nn.Linear(N_OBS, 1), in_keys=["observation"]))
    batch["advantage"] = batch["value_target"] = torch.randn(2, 12, 1)
    return KLPenaltyLoss(actor, 0.5, reference=make_actor(), loss=ppo), ppo, batch


class TestAroundALoss:
    def test_it_returns_both_and_trains_the_policy_once(self):
        loss, ppo, batch = around()
        out, alone = dict(loss(batch)), dict(ppo(batch)) | dict(make_loss()(batch))
        assert out.keys() == alone.keys() >= set(loss.out_keys) >= set(ppo.out_keys)
        assert set(loss.in_keys) >= set(ppo.in_keys)
        for key, value in out.items():
            assert_close(value, alone[key])
        torch.stack([out[key] for key in out if key.startswith("loss_")]).sum().backward()
        parameters = list(loss.parameters())  # of two layers
        assert len(parameters) == len({id(parameter) for parameter in parameters}) == 4
        assert all(parameter.grad is not None for parameter in parameters)

    def test_keys_are_named_for_both(self):
        # A trainer names the value target on the loss that it is given.
        loss, ppo, _ = around()
        ppo.set_keys(sample_log_prob="mine")
        assert loss.tensor_keys.sample_log_prob == "action_log_prob"
        loss.set_keys(value_target="other", kl_coeff="weight", done="end")
        assert (ppo.tensor_keys.value_target, loss.tensor_keys.kl_coeff) == ("other", "weight")
        assert loss.tensor_keys.done == ppo.tensor_keys.done == "end"
        with pytest.raises(ValueError, match="colour is not an accepted tensordict key"):
            loss.set_keys(colour="red")

    def test_what_is_refused(self):
        loss, _, batch = around(KLPENPPOLoss)
        with pytest.raises(ValueError, match=r"`loss` writes \['kl'\] too.*one after the other"):
            loss(batch)
        with pytest.raises(TypeError, match="`loss` must be a LossModule or None, got Linear"):
            make_loss(loss=nn.Linear(2, 2))
        with pytest.raises(AttributeError, match="'KLPenaltyLoss' object has no attribute"):
            _ = make_loss().critic_network


@pytest.mark.parametrize("gradient", ["step", "sequence", "k2"])
def test_agents_are_averaged(gradient):
    actor = make_actor(agents=True)
    policy = moved(actor)
    batch = play(with_transforms(WalkEnv((2,), n_agents=3)), policy).detach()
    out = KLPenaltyLoss(policy, 1.0, reference=actor, gradient=gradient)(batch)
    dists = [a.get_dist(batch.select(("agents", "observation"))) for a in (policy, actor)]
    kl = kl_divergence(*dists)
    assert kl.shape == (2, 12, 3)
    if gradient == "k2":
        log_prob, ref_log_prob = (dist.log_prob(batch["agents", "action"]) for dist in dists)
        log_ratio = log_prob - ref_log_prob
        assert_close(out["kl"], log_ratio.mean())
        assert_close(out["loss_kl"], (log_ratio.sum(-1) ** 2 / 2).mean() / 3)  # of all at once
    else:
        assert_close(out["kl"], kl.mean())
        assert_close(out["loss_kl"], kl.mean())


def pair_actor(net: Any, *, joint: bool) -> Any:
    """Two choices, of 2 and 3 actions, as a composite action, or as one choice of 6."""

    def heads(x: torch.Tensor) -> Any:
        a, b = (logits.log_softmax(-1) for logits in x.split([2, 3], -1))
        return (a.unsqueeze(-1) + b.unsqueeze(-2)).flatten(-2) if joint else (a, b)

    parts = {"distribution_map": {"a": Categorical, "b": Categorical}}
    params: Any = ["logits"] if joint else [("params", name, "logits") for name in "ab"]
    return probabilistic_actor(
        sequence(
            TensorDictModule(net, ["observation"], ["x"]), TensorDictModule(heads, ["x"], params)
        ),
        in_keys=params if joint else ["params"],
        distribution_class=Categorical if joint else CompositeDistribution,
        distribution_kwargs={} if joint else parts,
        return_log_prob=True,
    )


@pytest.mark.parametrize("weights", ["step", "trajectory"])
@pytest.mark.parametrize("gradient", ["step", "sequence", "k2"])
def test_a_composite_action_is_one_choice_of_all_pairs(gradient, weights):
    """In value, measured KL, gradient and plan. It was refused: "use one loss for each"."""
    nets = [sharp(nn.Linear(N_OBS, 5).double(), seed) for seed in (0, 1)]
    batch = play(WalkEnv((2,)), make_actor()).select("observation", "done", "next")
    batch["observation"], batch["next", "observation"] = (
        data["observation"].double() for data in (batch, batch["next"])
    )
    with torch.no_grad():
        batch = pair_actor(nets[0], joint=False)(batch).exclude("params", "x")
    batch["a_log_prob"] = batch["a_log_prob"] + 0.1 * torch.randn(
        2, 12, generator=torch.Generator().manual_seed(0)
    )
    batch["action"] = 3 * batch["a"] + batch["b"]
    batch["action_log_prob"] = batch["a_log_prob"] + batch["b_log_prob"]
    found = []
    for joint in (False, True):
        actor, reference = (pair_actor(net, joint=joint) for net in nets)
        options: Any = {"gradient": gradient, "weights": weights, "reference": reference}
        loss = KLPenaltyLoss(actor, 0.5, **options)
        out = loss(batch)
        grads = torch.autograd.grad(out["loss_kl"], [*loss.parameters()])
        planned = KLPenaltyLoss(actor, ExponentialKLController("plan", 1.0), **options)
        found.append([out["loss_kl"], out["kl"], *grads, planned.update_controller(batch)])
    assert found[0][1] > 0.01
    assert_close(found[0], found[1])


def test_what_a_composite_action_lacks_is_named():
    actor = composite()
    batch = play(WalkEnv((2,)), make_actor()).exclude("action_log_prob")
    loss = KLPenaltyLoss(actor, 0.1, gradient="k2")
    with pytest.raises(KeyError, match=r"'first_log_prob' is not.*set_keys\(sample_log_prob="):
        loss(batch)
    loss.set_keys(sample_log_prob="done")
    with pytest.raises(
        KeyError, match=r"'first' is not in the data: rename or change actions before"
    ):
        loss(batch)


def test_actions_that_are_drawn_in_turn_have_no_exact_kl():
    with pytest.raises(ValueError, match=r'one Prob.*got 2.*KLConstrainedTransform with .*"k1"'):
        KLPenaltyLoss(chain(), 0.1)


def recorded(kind: str) -> tuple[Any, Any, Any]:
    """Policy, reference, and a batch that carries the state of both, step by step."""
    # A loss reads that of the reference only if it is given it as a FrozenActor.
    reference = make_actor(kind)
    policy = moved(reference)
    stack = ReferenceModelLogProbTransform(reference)
    env = with_transforms(WalkEnv((2,)), *memory_of(policy), stack)
    return policy, reference, play(env, policy).detach()


class TestRecurrent:
    @pytest.mark.parametrize("kind", ["lstm", "gru"])
    @pytest.mark.parametrize("gradient", ["step", "k2"])
    def test_rows_and_shuffled_steps_give_the_same(self, kind, gradient):
        policy, reference, batch = recorded(kind)
        options: Any = {"gradient": gradient, "reduction": "none"}
        loss = KLPenaltyLoss(policy, 1.0, reference=FrozenActor(reference), **options)
        per_step = loss(batch)["loss_kl"]
        assert per_step.detach().std() > 0.01
        states = [key for key in batch.keys() if str(key).startswith("ref_")]
        # The reference runs through the rows by itself.
        assert_same(loss(batch.exclude(*states))["loss_kl"], per_step)
        order = torch.randperm(24)
        assert_same(loss(batch.reshape(-1)[order])["loss_kl"], per_step.reshape(-1)[order])
        with pytest.raises(RuntimeError, match="its state .* is not in the data"):
            loss(batch.exclude(*states).reshape(-1))

    def test_sequence_runs_through_memory_too(self):
        policy, reference, batch = recorded("lstm")
        values = [
            KLPenaltyLoss(
                policy, 1.0, reference=FrozenActor(reference), gradient=gradient, weights="step"
            )(batch)["loss_kl"]
            for gradient in ("step", "sequence")
        ]
        assert_close(values[0], values[1])  # one value, two gradients
        weight = list(policy.parameters())[-1]
        one, other = (torch.autograd.grad(value, weight)[0] for value in values)
        assert (one - other).norm() > 0.1 * one.norm()

    def test_the_recorded_state_of_another_reference_is_not_read(self):
        policy, _, batch = recorded("lstm")
        loss = KLPenaltyLoss(policy, 1.0, reference=make_actor("lstm", seed=5), reduction="none")
        states = [key for key in batch.keys() if str(key).startswith("ref_")]
        assert_same(loss(batch)["loss_kl"], loss(batch.exclude(*states))["loss_kl"])
        with pytest.raises(RuntimeError, match="its state"):
            loss(batch.reshape(-1))
