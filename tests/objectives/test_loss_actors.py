"""KLPenaltyLoss with every kind of actor, and around another loss."""

import copy
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import CompositeDistribution, TensorDictModule
from torch import nn
from torch.distributions import Categorical, Independent, Normal, kl_divergence
from torch.testing import assert_close
from torchrl.modules import MaskedCategorical, OneHotCategorical, ValueOperator, set_recurrent_mode
from torchrl.objectives import ClipPPOLoss, DiscreteSACLoss, KLPENPPOLoss, SACLoss, TQCLoss

from tests.helpers import (
    N_ACTIONS,
    N_OBS,
    WalkEnv,
    assert_same,
    collect,
    make_actor,
    memory_of,
    moved,
    play,
    probabilistic_actor,
    sequence,
    with_transforms,
)
from tests.objectives.losses import make_loss, rollout
from torchrl_kl import (
    FrozenActor,
    KLConstrainedTransform,
    KLPenaltyLoss,
    ReferenceModelLogProbTransform,
)


class TestAroundALoss:
    @staticmethod
    def ppo(actor: Any, cls: Any = ClipPPOLoss) -> Any:
        torch.manual_seed(0)
        return cls(actor, ValueOperator(nn.Linear(N_OBS, 1), in_keys=["observation"]))

    @staticmethod
    def batch() -> Any:
        batch = rollout()
        batch["advantage"] = batch["value_target"] = torch.randn(2, 12, 1)
        return batch

    def test_it_returns_both(self):
        actor, batch = moved(make_actor()), self.batch()
        ppo = self.ppo(actor)
        loss = KLPenaltyLoss(actor, 0.5, reference=make_actor(), loss=ppo)
        alone = {
            **dict(ppo(batch)),
            **dict(KLPenaltyLoss(actor, 0.5, reference=make_actor())(batch)),
        }
        out = dict(loss(batch))
        assert out.keys() == alone.keys()
        assert set(loss.out_keys) <= out.keys()
        assert set(loss.in_keys) >= set(ppo.in_keys)
        for key, value in out.items():
            assert_close(value, alone[key])
        torch.stack(
            [value for key, value in out.items() if key.startswith("loss_")]
        ).sum().backward()
        assert all(parameter.grad is not None for parameter in loss.parameters())

    def test_a_loss_of_another_actor_does_not_give_it_its_policy(self):
        batch, other = self.batch(), self.ppo(moved(make_actor(), seed=5))
        assert_close(make_loss(loss=other)(batch)["kl"], make_loss()(batch)["kl"])

    @pytest.mark.parametrize("cls", [SACLoss, TQCLoss])
    def test_a_loss_that_builds_an_entry_late_is_restored(self, cls):
        def build(seed: int) -> Any:
            actor = moved(make_actor("normal"), seed=seed)
            critic = ValueOperator(nn.Linear(N_OBS, 1), in_keys=["observation"])
            options: Any = {} if cls is SACLoss else {"num_qvalue_nets": 2}
            inner = cls(actor, critic, target_entropy=-1.0, **options)
            return KLPenaltyLoss(actor, 0.5, loss=inner)

        saved, fresh = build(1), build(2)
        for loss in (fresh, copy.deepcopy(build(3))):
            loss.load_state_dict(saved.state_dict())
            assert_same(dict(loss.state_dict()), dict(saved.state_dict()))

    def test_a_copy_has_one_policy_too(self):
        actor, batch = moved(make_actor()), self.batch()
        loss = KLPenaltyLoss(actor, 0.5, reference=make_actor(), loss=self.ppo(actor))
        other = copy.deepcopy(loss)
        for one in (loss, other):
            assert len(list(one.parameters())) == 4
            optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
            for _ in range(3):
                out = dict(one(batch))
                optimizer.zero_grad()
                torch.stack([out[key] for key in out if key.startswith("loss_")]).sum().backward()
                optimizer.step()
        assert_same(loss.state_dict(), other.state_dict())
        assert_close(dict(loss(batch)), dict(other(batch)))

    def test_a_loss_for_each_step_is_added_to_a_mean(self):
        actor, values = (
            moved(make_actor()),
            TensorDictModule(
                nn.Linear(N_OBS, N_ACTIONS), in_keys=["observation"], out_keys=["action_value"]
            ),
        )
        options: Any = {
            "action_space": "categorical",
            "num_actions": N_ACTIONS,
            "scalar_output_mode": "exclude",
        }
        sac = DiscreteSACLoss(actor, values, reduction="none", delay_qvalue=False, **options)
        batch = rollout()
        out = KLPenaltyLoss(actor, 0.5, reference=make_actor(), loss=sac)(batch)
        assert_close(out["loss_actor"], sac(batch)["loss_actor"])
        assert_close(out["loss_kl"], 0.5 * out["kl"])
        assert out["loss_actor"].shape == batch.shape

    def test_the_policy_is_trained_once(self):
        actor = moved(make_actor())
        loss = KLPenaltyLoss(actor, 0.5, reference=make_actor(), loss=self.ppo(actor))
        parameters = list(loss.parameters())
        # Two layers.
        assert len(parameters) == len({id(parameter) for parameter in parameters}) == 4
        assert {id(parameter) for parameter in actor.parameters()} < {
            id(parameter) for parameter in parameters
        }

    def test_keys_are_named_for_both(self):
        # A trainer names the reward on the loss that it is given.
        batch = rollout()
        batch["next", "other"] = -3 * batch["next", "reward"]
        values = TensorDictModule(nn.Linear(N_OBS, N_ACTIONS), ["observation"], ["action_value"])
        options: Any = {"action_space": "categorical", "num_actions": N_ACTIONS}
        actor = moved(make_actor())
        sac = DiscreteSACLoss(actor, values, delay_qvalue=False, **options)
        sac.set_keys(log_prob="mine")
        loss = KLPenaltyLoss(actor, 0.5, reference=make_actor(), loss=sac)
        assert sac.tensor_keys.log_prob == "mine"
        before = loss(batch)["loss_qvalue"]
        loss.set_keys(reward="other", kl_coeff="weight", action_value="action_value")
        assert loss.tensor_keys.reward == sac.tensor_keys.reward == "other"
        with pytest.raises(ValueError, match="colour"):
            loss.set_keys(colour="red")
        after = loss(batch)["loss_qvalue"]
        sac.set_keys(reward="other")
        assert_close(after, sac(batch)["loss_qvalue"])
        assert (after - before).abs() > 1e-3

    def test_the_mask_is_named_for_both(self):
        actor, batch = moved(make_actor()), self.batch()
        batch["valid"] = torch.arange(12).expand(2, 12) < 8
        loss = KLPenaltyLoss(actor, 0.5, reference=make_actor(), loss=self.ppo(actor))
        names, results = ("loss_kl", "loss_objective", "loss_critic"), []
        for key, data in (("valid", batch), (None, batch[:, :8]), ("auto", batch)):
            loss.loss_mask_key = key
            results.append(torch.stack([loss(data)[name] for name in names]))
        assert_close(results[0], results[1])
        assert ((results[0] - results[2]).abs() > 1e-5).all()
        with pytest.raises(ValueError, match="loss_mask_key must be 'auto', None or a NestedKey"):
            loss.loss_mask_key = 3

    def test_a_loss_that_writes_a_kl_is_not_overwritten(self):
        actor = moved(make_actor())
        loss = KLPenaltyLoss(actor, 0.5, reference=make_actor(), loss=self.ppo(actor, KLPENPPOLoss))
        with pytest.raises(ValueError, match=r"`loss` writes \['kl'\] too.*one after the other"):
            loss(self.batch())


class TestPolicies:
    @pytest.mark.parametrize("kind", ["normal", "tanh_normal"])
    def test_real_actions(self, kind):
        loss, batch = make_loss(kind, controller=1.0), rollout(kind)
        observation = batch.select("observation")
        policy, reference = (
            a.get_dist(observation.copy()) for a in (loss.actor_network, loss.reference.actor)
        )
        if kind == "tanh_normal":  # the KL does not change under a bijection that both share
            policy, reference = policy.base_dist.base_dist, reference.base_dist.base_dist
        expected = kl_divergence(policy, reference).sum(-1)
        assert_close(make_loss(kind, controller=1.0, reduction="none")(batch)["loss_kl"], expected)
        sampled = make_loss(kind, controller=1.0, reduction="none", gradient="k2")(batch)["loss_kl"]
        assert sampled.shape == (2, 12)

    @pytest.mark.parametrize("kind", ["one_hot", "masked", "independent"])
    def test_other_distributions(self, kind):
        cls, names, n_out = {
            "one_hot": (OneHotCategorical, ["logits"], N_ACTIONS),
            "masked": (MaskedCategorical, ["logits", "mask"], N_ACTIONS),
            "independent": (lambda loc: Independent(Normal(loc, 1.0), 1), ["loc"], 2),
        }[kind]
        actors = []
        for seed in (0, 1):
            torch.manual_seed(seed)
            net = TensorDictModule(nn.Linear(N_OBS, n_out), ["observation"], names[:1])
            actors.append(probabilistic_actor(net, in_keys=names, distribution_class=cls))
        batch = TensorDict(observation=torch.randn(6, N_OBS), batch_size=6)
        batch["mask"] = torch.tensor([True, True, False, True]).expand(6, 4)
        logits, ref_logits = (actor[0].module(batch["observation"]) for actor in actors)
        if kind == "independent":
            expected = (logits - ref_logits).square().sum(-1) / 2
        else:
            keep = batch["mask"][0] if kind == "masked" else torch.ones(4, dtype=torch.bool)
            log_probs, ref_log_probs = (x[:, keep].log_softmax(-1) for x in (logits, ref_logits))
            expected = (log_probs.exp() * (log_probs - ref_log_probs)).sum(-1)
        loss = KLPenaltyLoss(actors[0], 1.0, reference=actors[1], reduction="none")
        assert_close(loss(batch)["loss_kl"], expected)

    @pytest.mark.parametrize("gradient", ["step", "sequence", "k2"])
    def test_agents_are_averaged(self, gradient):
        actor = make_actor(agents=True)
        policy = moved(actor)
        batch = play(with_transforms(WalkEnv((2,), n_agents=3)), policy).detach()
        out = KLPenaltyLoss(policy, 1.0, reference=actor, gradient=gradient)(batch)
        policies, references = (
            a.get_dist(batch.select(("agents", "observation"))) for a in (policy, actor)
        )
        kl = kl_divergence(policies, references)
        assert kl.shape == (2, 12, 3)
        if gradient == "k2":
            action = batch["agents", "action"]
            log_ratio = policies.log_prob(action) - references.log_prob(action)
            assert_close(out["kl"], log_ratio.mean())
            assert_close(out["loss_kl"], (log_ratio.sum(-1) ** 2 / 2).mean() / 3)  # of all at once
        else:
            assert_close(out["kl"], kl.mean())
            assert_close(out["loss_kl"], kl.mean())

    def test_several_actions_are_refused(self):
        net = nn.Sequential(nn.Linear(N_OBS, 2 * N_ACTIONS), nn.Unflatten(-1, (2, N_ACTIONS)))
        split = TensorDictModule(
            lambda x: tuple(x.unbind(-2)), ["x"], [("params", name, "logits") for name in "ab"]
        )
        actor = probabilistic_actor(
            sequence(TensorDictModule(net, ["observation"], ["x"]), split),
            in_keys=["params"],
            distribution_class=CompositeDistribution,
            distribution_kwargs={"distribution_map": {"a": Categorical, "b": Categorical}},
            return_log_prob=True,
        )
        with pytest.raises(ValueError, match=r"`actor` must have one action, got \['a', 'b'\]"):
            KLPenaltyLoss(actor, 0.1, reference=FrozenActor(actor, log_prob_key="a_log_prob"))


class TestRecurrent:
    @staticmethod
    def recorded(kind: str) -> tuple[Any, Any, Any]:
        """Policy, reference, and a batch that carries the state of both, step by step."""
        # A loss reads that of the reference only if it is given it as a FrozenActor.
        reference = make_actor(kind)
        policy = moved(reference)
        env = with_transforms(
            WalkEnv((2,)), *memory_of(policy), ReferenceModelLogProbTransform(reference)
        )
        return policy, reference, play(env, policy).detach()

    @pytest.mark.parametrize("kind", ["lstm", "gru"])
    @pytest.mark.parametrize("gradient", ["step", "k2"])
    def test_rows_and_shuffled_steps_give_the_same(self, kind, gradient):
        policy, reference, batch = self.recorded(kind)
        loss = KLPenaltyLoss(
            policy, 1.0, reference=FrozenActor(reference), gradient=gradient, reduction="none"
        )
        per_step = loss(batch)["loss_kl"]
        states = [key for key in batch.keys() if str(key).startswith("ref_")]
        # The reference runs through the rows by itself.
        assert_same(loss(batch.exclude(*states))["loss_kl"], per_step)
        order = torch.randperm(24)
        assert_same(loss(batch.reshape(-1)[order])["loss_kl"], per_step.reshape(-1)[order])
        assert per_step.detach().std() > 0.01

    def test_sequence_runs_through_memory_too(self):
        policy, reference, batch = self.recorded("lstm")
        values = [
            KLPenaltyLoss(
                policy, 1.0, reference=FrozenActor(reference), gradient=gradient, weights="step"
            )(batch)["loss_kl"]
            for gradient in ("step", "sequence")
        ]
        assert_close(values[0], values[1])  # one value, two gradients
        one, other = (
            torch.autograd.grad(value, list(policy.parameters())[-1])[0] for value in values
        )
        assert (one - other).norm() > 0.1 * one.norm()

    def test_the_policy_is_run_through_time(self):
        # Gradients of later steps reach what earlier steps left in memory.
        policy, reference, batch = self.recorded("lstm")
        grads = []
        for data in (batch, batch.reshape(-1)):
            loss: Any = KLPenaltyLoss(copy.deepcopy(policy), 1.0, reference=FrozenActor(reference))
            loss(data)["loss_kl"].backward()
            grads.append(torch.cat([parameter.grad.flatten() for parameter in loss.parameters()]))
        assert (grads[0] - grads[1]).norm() > 0.01 * grads[0].norm()

    def test_an_unknown_state_is_refused(self):
        policy, reference, batch = self.recorded("lstm")
        bare = batch.exclude("ref_h", "ref_c")
        loss = KLPenaltyLoss(policy, 1.0, reference=FrozenActor(reference))
        with pytest.raises(
            RuntimeError, match=r"its state \['ref_h', 'ref_c'\] is not in the data"
        ):
            loss(bare.reshape(-1))
        starts = bare["is_init"].squeeze(-1)
        assert not starts[:, 1].any()
        with pytest.raises(RuntimeError, match="begins inside a trajectory and the state"):
            loss(bare[:, 1:])

    @pytest.mark.parametrize("kind", ["lstm", "gru"])
    def test_the_recorded_state_of_another_reference_is_not_read(self, kind):
        policy, _, batch = self.recorded(kind)
        loss = KLPenaltyLoss(policy, 1.0, reference=make_actor(kind, seed=5), reduction="none")
        states = [key for key in batch.keys() if str(key).startswith("ref_")]
        per_step = loss(batch)["loss_kl"]
        assert_same(per_step, loss(batch.exclude(*states))["loss_kl"])
        with pytest.raises(RuntimeError, match="its state .* give its `reference` to a loss"):
            loss(batch.reshape(-1))

    def test_a_row_is_not_scored_from_the_state_at_its_own_end(self):
        # A corridor that looks the same everywhere, and a reference that a stack has just used.
        class Corridor(WalkEnv):
            def _reset(self, tensordict=None, **kwargs):
                out = super()._reset(tensordict, **kwargs)
                out["observation"].fill_(1.0)
                return out

            def _step(self, tensordict):
                out = super()._step(tensordict)
                out["observation"] = torch.ones_like(out["observation"])
                return out

        reference = make_actor("lstm")
        policy = moved(reference)
        env = with_transforms(Corridor((2,), longest=40), *memory_of(policy))
        batches = collect(env, policy, frames=12, batches=2, seed=3)
        assert not batches[1]["is_init"].any()
        stack = KLConstrainedTransform(policy, 0.0, reference=reference)
        loss = KLPenaltyLoss(policy, 1.0, reference=stack.reference)
        stack(batches[0])
        loss(batches[0])
        stack(batches[1])
        with pytest.raises(RuntimeError, match="begins inside a trajectory and the state"):
            loss(batches[1])

    @pytest.mark.parametrize("kind", ["lstm", "gru"])
    def test_a_row_inside_a_trajectory_may_begin_from_a_zero_state(self, kind):
        reference = make_actor(kind)
        policy = moved(reference)
        env = with_transforms(WalkEnv((2,), longest=40), *memory_of(policy))
        inside = collect(env, policy, frames=12, batches=2, seed=3)[1]
        assert not inside["is_init"].any()
        with pytest.raises(
            RuntimeError, match=r"`reference=FrozenActor\(actor, zero_states=True\)`"
        ):
            KLPenaltyLoss(policy, 1.0, reference=reference)(inside)
        loss = KLPenaltyLoss(policy, 1.0, reference=FrozenActor(reference, zero_states=True))
        first = inside.exclude("h", "c")
        first["is_init"][:, 0] = True  # from which a reference begins with a zero state
        frozen = FrozenActor(reference).get_dist(first, timed=True)
        with torch.no_grad(), set_recurrent_mode(True):
            own = policy.get_dist(inside.clone())
        assert_close(loss(inside)["kl"], kl_divergence(own, frozen).mean())

    def test_the_frozen_actor_takes_no_mode_from_around_it(self):
        _, reference, batch = self.recorded("lstm")
        frozen: Any = FrozenActor(reference)
        expected = frozen.get_dist(batch, timed=True).logits
        with set_recurrent_mode(True):
            flat = frozen.get_dist(batch.reshape(-1), timed=False).logits
        assert_same(flat, expected.reshape(24, -1))
        assert not flat.requires_grad
