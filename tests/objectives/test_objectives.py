"""KLPenaltyLoss as a module: what it reads, returns, keeps and refuses."""

import copy
import warnings
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torch.testing import assert_close
from torchrl.modules import MaskedCategorical

from tests.helpers import (
    N_ACTIONS,
    N_OBS,
    SpyController,
    WalkEnv,
    collect,
    make_actor,
    moved,
    probabilistic_actor,
)
from tests.objectives.losses import kl_of, make_loss, rollout, weight_of
from torchrl_kl import (
    ConstantKLController,
    FrozenActor,
    KLConstrainedTransform,
    KLPenaltyLoss,
    ReferenceModelLogProbTransform,
)


class TestOutputs:
    def test_the_loss_is_the_coefficient_times_the_mean_kl(self):
        loss, batch = make_loss(), rollout()
        out = loss(batch)
        assert set(out.keys()) == {"loss_kl", "kl", "kl_coeff"}
        assert out.batch_size == ()
        assert_close(out["kl"], kl_of(loss, batch).mean())
        assert_close(out["loss_kl"], 0.5 * out["kl"])
        assert out["kl_coeff"] == 0.5
        assert out["loss_kl"].requires_grad
        assert not out["kl"].requires_grad
        assert not out["kl_coeff"].requires_grad

    def test_reductions(self):
        batch = rollout()
        kl = kl_of(make_loss(), batch)
        assert_close(make_loss(reduction="sum")(batch)["loss_kl"], 0.5 * kl.sum())
        assert_close(make_loss(reduction="none")(batch)["loss_kl"], 0.5 * kl)
        assert_close(make_loss(reduction="none")(batch)["kl"], kl.mean())

    def test_the_batch_is_left_as_it_was(self):
        batch = rollout()
        before = batch.clone()
        for gradient in ("step", "sequence", "k2"):
            make_loss(gradient=gradient)(batch)
        assert set(batch.keys(True, True)) == set(before.keys(True, True))
        assert (batch == before).all()

    def test_by_default_the_reference_is_the_actor_as_it_is_now(self):
        actor, batch = make_actor(), rollout()
        loss = KLPenaltyLoss(actor, 1.0)
        assert loss(batch)["loss_kl"] == 0
        with torch.no_grad():
            actor[0].module.weight.add_(1.0 * torch.randn(N_ACTIONS, N_OBS))
        assert loss(batch)["loss_kl"] > 0.01

    @pytest.mark.parametrize("gradient", ["step", "sequence", "k2"])
    def test_coefficient_0_adds_nothing_not_even_infinity(self, gradient):
        loss, batch = make_loss(controller=0.0, gradient=gradient), rollout()
        with torch.no_grad():
            loss.reference.actor[0].module.bias[batch["action"][0, 2]] = -torch.inf
        out = loss(batch)
        assert out["kl"] == torch.inf
        assert out["loss_kl"] == 0
        out["loss_kl"].backward()  # the weights of the policy became NaN
        assert all((each.grad == 0).all() for each in loss.parameters() if each.grad is not None)

    def test_dispatch(self):
        loss, batch = make_loss(gradient="k2"), rollout().reshape(-1)
        assert loss.in_keys == ["observation", "action", "action_log_prob"]
        assert loss.out_keys == ["loss_kl", "kl", "kl_coeff"]
        entries = {key: batch[key] for key in loss.in_keys}
        expected = loss(batch)
        for value, key in zip(loss(**entries), loss.out_keys, strict=True):
            assert_close(value, expected[key])
        assert make_loss().in_keys == ["observation", "action"]
        in_keys = ["observation", "action", "action_log_prob", ("next", "done")]
        assert make_loss(gradient="sequence").in_keys == in_keys

    def test_keys_can_be_named(self):
        batch = rollout()
        loss = make_loss(gradient="sequence")
        expected = loss(batch)
        renamed = (
            batch.rename_key_("action_log_prob", "mu")
            .rename_key_("action", "a")
            .rename_key_(("next", "done"), ("next", "over"))
        )
        loss.set_keys(action="a", sample_log_prob="mu", done="over")
        assert_close(loss(renamed)["loss_kl"], expected["loss_kl"])
        assert loss.in_keys == ["observation", "a", "mu", ("next", "over")]
        with pytest.raises(ValueError, match="advantage is not an accepted tensordict key"):
            loss.set_keys(advantage="b")


class TestParameters:
    def test_the_reference_is_saved_and_never_trained(self):
        loss, batch = make_loss(gradient="sequence"), rollout()
        frozen = {parameter.data_ptr() for parameter in loss.reference.parameters()}
        assert frozen
        assert not frozen & {parameter.data_ptr() for parameter in loss.parameters()}
        assert [name for name, _ in loss.named_parameters()] == [
            "actor_network_params.module.0.module.weight",
            "actor_network_params.module.0.module.bias",
        ]
        before = copy.deepcopy(loss.reference.state_dict())
        optimizer = torch.optim.SGD(loss.parameters(), 0.1, weight_decay=0.1)
        loss.train().requires_grad_(True)(batch)["loss_kl"].backward()
        optimizer.step()
        assert weight_of(loss).grad.abs().max() > 0
        assert_close(dict(loss.reference.state_dict()), dict(before), rtol=0, atol=0)
        assert all(not parameter.requires_grad for parameter in loss.reference.parameters())
        assert not loss.reference.actor.training

    def test_a_restart_keeps_reference_and_coefficient(self):
        batch, actor = rollout(), moved(make_actor())
        loss = KLPenaltyLoss(
            actor, SpyController(0.1, step=0.2, per="step"), reference=make_actor()
        )
        loss.update_controller(batch)
        # Captures the wrong reference.
        resumed = KLPenaltyLoss(copy.deepcopy(actor), SpyController(0.1, per="step"))
        assert resumed(batch)["loss_kl"] == 0
        resumed.load_state_dict(loss.state_dict())
        assert resumed.controller.coeff.item() == pytest.approx(0.3)
        assert_close(resumed(batch)["loss_kl"], loss(batch)["loss_kl"], rtol=0, atol=0)

    def test_a_frozen_actor_is_shared(self):
        transform = ReferenceModelLogProbTransform(make_actor())
        loss = make_loss(reference=transform.reference)
        assert loss.reference is transform.reference
        assert isinstance(make_loss().reference, FrozenActor)

    @pytest.mark.parametrize("gradient", ["step", "k2"])
    def test_one_that_takes_gradients_elsewhere_takes_none_here(self, gradient):
        loss = make_loss(reference=FrozenActor(make_actor(), requires_grad=True), gradient=gradient)
        loss(rollout())["loss_kl"].backward()
        assert weight_of(loss).grad is not None
        assert all(parameter.grad is None for parameter in loss.reference.parameters())
        assert len(list(loss.parameters())) == 2

    def test_it_follows_the_module_to_another_dtype(self):
        loss = make_loss().double()
        batch = rollout().reshape(-1)
        batch["observation"] = batch["observation"].double()
        assert loss(batch)["loss_kl"].dtype == torch.float64
        assert loss.controller.coeff.dtype == torch.float64
        assert make_loss()(rollout())["loss_kl"].dtype == torch.float32


class TestMask:
    @staticmethod
    def padded(batch: Any) -> Any:
        """The batch with four more steps in each row that do not count, full of NaN."""
        padding = batch[:, :4].apply(
            lambda x: torch.full_like(x, torch.nan) if x.is_floating_point() else x
        )
        padded: Any = torch.cat([batch, padding], 1)
        padded["collector", "mask"] = torch.arange(16).expand(2, 16) < 12
        padded.names = [None, "time"]
        return padded

    @pytest.mark.parametrize("weights", ["step", "trajectory"])
    @pytest.mark.parametrize("gradient", ["step", "sequence", "k2"])
    @pytest.mark.parametrize("kind", ["categorical", "normal", "tanh_normal"])
    def test_nan_on_padding_changes_neither_value_nor_gradient(self, kind, gradient, weights):
        batch = rollout(kind)
        results = []
        for data in (batch, self.padded(batch)):
            loss = make_loss(kind, gradient=gradient, weights=weights)
            out = loss(data)
            out["loss_kl"].backward()
            results.append((out["loss_kl"].detach(), out["kl"], weight_of(loss).grad))
        assert results[0][2].isfinite().all()
        assert_close(results[1], results[0])

    def test_nan_on_padding_takes_no_second_pass(self, monkeypatch):
        loss, batch, passes = make_loss(gradient="sequence"), self.padded(rollout()), []
        score = KLPenaltyLoss._distributions
        monkeypatch.setattr(
            KLPenaltyLoss, "_distributions", lambda *args: passes.append(1) or score(*args)
        )
        loss(batch)
        assert len(passes) == 1

    def test_weights_too_large_for_the_dtype_stay_away_from_padding(self):
        batch = rollout()
        batch["next", "done"][:] = False
        del batch["next", "observation"]  # or it would say where the episodes end
        # The weight of the way past the last step: exp(100) overflows.
        batch["action_log_prob"][:, -1] = -100.0
        results = [
            make_loss(gradient="sequence")(data)["loss_kl"].detach()
            for data in (batch, self.padded(batch))
        ]
        assert results[0].isfinite()
        assert_close(*results)

    @pytest.mark.parametrize("gradient", ["step", "k2"])
    def test_padding_that_allows_no_action_at_all(self, gradient):
        # split_trajs pads masks of actions with False.
        net = TensorDictModule(nn.Linear(N_OBS, N_ACTIONS), ["observation"], ["logits"])
        actor = probabilistic_actor(
            net,
            in_keys=["logits", "mask"],
            distribution_class=MaskedCategorical,
            return_log_prob=True,
        )
        allowed = torch.tensor([True, True, False, True]).expand(6, N_ACTIONS).clone()
        batch = actor(
            TensorDict(observation=torch.randn(6, N_OBS), mask=allowed, batch_size=6)
        ).detach()
        padded = batch.clone()
        padded["mask"][4:] = False
        padded["collector", "mask"] = torch.arange(6) < 4
        results = []
        for data in (batch[:4], padded):
            loss: Any = KLPenaltyLoss(moved(actor), 1.0, reference=actor, gradient=gradient)
            value = loss(data)["loss_kl"]
            value.backward()
            results.append((value.detach(), weight_of(loss).grad))
        assert results[0][1].abs().max() > 1e-4
        assert_close(results[1], results[0])

    def test_another_mask_can_be_named_or_none(self):
        loss, batch = make_loss(reduction="none"), rollout()
        batch["valid"] = torch.rand(2, 12, 1) > 0.5
        batch["collector", "mask"] = torch.zeros(2, 12, dtype=torch.bool)
        assert loss(batch)["loss_kl"].count_nonzero() == 0
        assert loss(batch)["kl"] == 0
        loss.loss_mask_key = "valid"
        assert_close(loss(batch)["loss_kl"] > 0, batch["valid"].squeeze(-1))
        loss.loss_mask_key = None
        assert (loss(batch)["loss_kl"] > 0).all()

    @pytest.mark.parametrize("weights", ["step", "trajectory"])
    @pytest.mark.parametrize("gradient", ["step", "sequence", "k2"])
    def test_frames_of_a_random_policy_have_no_weights(self, gradient, weights):
        actor, options = make_actor(), {"frames": 12, "batches": 2, "init_random_frames": 12}
        behaviour = moved(actor)
        batch: Any = torch.cat(collect(WalkEnv((2,)), behaviour, **options), 1)
        batch.names = [None, "time"]
        batch["collector", "mask"] = torch.arange(12).expand(2, 12) < 10
        given: Any = {"gradient": gradient, "weights": weights, "reference": actor}
        loss = KLPenaltyLoss(moved(behaviour, seed=3), 1.0, **given)
        masked = batch.clone()
        masked["collector", "mask"] = batch["collector", "mask"] & (torch.arange(12) >= 6)
        values = loss(batch)["loss_kl"].detach(), loss(masked)["loss_kl"].detach()
        if gradient == weights == "step":  # they have states, too
            assert_close(values[0], kl_of(loss, batch)[:, :10].mean())
            assert (values[0] - values[1]).abs() > 1e-3
        else:
            assert_close(*values)


class TestGradients:
    def test_k1_is_refused_with_the_reason(self):
        with pytest.raises(
            ValueError,
            match=r'must not be "k1".*expected gradient is zero.*Subtract k1 from the reward',
        ):
            make_loss(gradient="k1")

    def test_k3_warns_with_the_reason(self):
        with pytest.warns(
            UserWarning, match=r"the other divergence.*KL\(reference \|\| policy\)"
        ) as records:
            KLPenaltyLoss(make_actor(), 0.1, gradient="k3")
        assert records[0].filename == __file__

    def test_the_others_do_not_warn(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for gradient in ("step", "sequence", "k2"):
                make_loss(gradient=gradient)

    @pytest.mark.parametrize(
        ("name", "choices"),
        [
            ("gradient", "step.*sequence.*k2.*k3"),
            ("weights", "step.*trajectory"),
            ("reduction", "mean.*sum.*none"),
        ],
    )
    def test_an_unknown_option_is_refused(self, name, choices):
        with pytest.raises(
            ValueError, match=rf"`{name}` must be one of .*{choices}.*, got 'exact'"
        ):
            make_loss(**{name: "exact"})
        loss, batch = make_loss(), rollout()
        setattr(loss, name, "exact")  # later, it was an obscure error, or a mean
        with pytest.raises(ValueError, match=rf"`{name}` must be one of .*{choices}"):
            loss(batch)

    @pytest.mark.parametrize("options", [{"gradient": "sequence"}, {"weights": "trajectory"}])
    def test_trajectories_need_a_time_dimension(self, options):
        loss, batch = make_loss(**options), rollout()
        expected = loss(batch)["loss_kl"]
        batch.names = [None, None]
        with pytest.raises(
            ValueError, match=r"needs whole trajectories.*shape \(2, 12\).*`time_dim`"
        ):
            loss(batch)
        assert_close(make_loss(**options, time_dim=-1)(batch)["loss_kl"], expected)

    def test_shuffled_steps_that_kept_the_name_of_time_are_refused(self):
        batch = rollout()[0]
        assert batch.names == ["time"]
        loss = make_loss(gradient="sequence")
        loss(batch)
        shuffled = batch[torch.randperm(len(batch))]
        with pytest.raises(
            ValueError, match=r"do not follow one another: 'observation'.*Shuffle whole rows"
        ):
            loss(shuffled)
        make_loss(gradient="k2")(shuffled)

    def test_whole_rows_may_be_shuffled(self):
        batch = rollout()
        loss = make_loss(gradient="sequence")
        assert_close(loss(batch[torch.tensor([1, 0])])["loss_kl"], loss(batch)["loss_kl"])

    @pytest.mark.parametrize("gradient", ["sequence", "k2"])
    def test_a_log_prob_that_was_not_recorded(self, gradient):
        batch = rollout().exclude("action_log_prob")
        make_loss()(batch)  # each step's own KL asks for none
        with pytest.raises(KeyError, match="action_log_prob.*return_log_prob=True"):
            make_loss(gradient=gradient)(batch)

    def test_an_action_that_is_not_there(self):
        with pytest.raises(KeyError, match=r"'action' is not in the data.*set_keys\(action="):
            make_loss(gradient="k2")(rollout().exclude("action"))


class TestPenalizedTwice:
    @staticmethod
    def penalized(coeff: float) -> Any:
        return KLConstrainedTransform(make_actor(), coeff)(rollout())

    def test_a_penalized_reward_is_an_error(self):
        with pytest.raises(
            RuntimeError, match=r"'kl_coeff'\) other than 0.*again.*`allow_penalized_reward=True`"
        ):
            make_loss()(self.penalized(0.1))

    def test_unless_asked_for(self):
        batch = self.penalized(0.1)
        assert make_loss(allow_penalized_reward=True)(batch)["loss_kl"] > 0

    def test_a_measured_one_is_fine(self):
        assert make_loss()(self.penalized(0.0))["loss_kl"] > 0

    def test_a_loss_that_only_measures_is_fine(self):
        assert make_loss(controller=ConstantKLController(0.0))(self.penalized(0.1))["kl"] > 0

    def test_it_is_seen_in_a_nested_tensordict_and_under_another_name(self):
        batch = rollout()
        batch["next", "agents", "kl_coeff"] = torch.full((2, 12, 3, 1), 0.1)
        with pytest.raises(RuntimeError, match=r"\('next', 'agents', 'kl_coeff'\)"):
            make_loss()(batch)
        loss = make_loss()
        loss.set_keys(kl_coeff="weight")
        loss(batch)
        batch["next", "weight"] = torch.full((2, 12, 1), 0.1)
        with pytest.raises(RuntimeError, match=r"\('next', 'weight'\)"):
            loss(batch)
