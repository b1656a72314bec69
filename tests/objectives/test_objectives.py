"""KLPenaltyLoss as a module: what it reads, returns, saves and refuses."""

import copy
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from tests.helpers import (
    SpyController,
    make_actor,
    moved,
)
from tests.objectives.losses import kl_of, make_loss, rollout, weight_of
from torchrl_kl import FrozenActor, KLConstrainedTransform, KLPenaltyLoss


class TestOutputs:
    def test_the_loss_is_the_coefficient_times_the_mean_kl(self):
        batch = rollout()
        before, kl = batch.clone(), kl_of(make_loss(), batch)
        out = make_loss()(batch)
        assert set(out.keys()) == {"loss_kl", "kl", "kl_coeff"}
        assert out.batch_size == ()
        assert_close(out["kl"], kl.mean())
        assert_close(out["loss_kl"], 0.5 * out["kl"])
        assert out["kl_coeff"] == 0.5
        assert [value.requires_grad for value in out.values()] == [True, False, False]
        assert_close(make_loss(reduction="sum")(batch)["loss_kl"], 0.5 * kl.sum())
        assert_close(make_loss(reduction="none")(batch)["loss_kl"], 0.5 * kl)
        assert_close(make_loss(reduction="none")(batch)["kl"], kl.mean())
        assert set(batch.keys(True, True)) == set(before.keys(True, True))
        assert (batch == before).all()
        assert KLPenaltyLoss(make_actor(), 1.0)(batch)["loss_kl"] == 0  # it is its own reference

    def test_dispatch_and_other_names(self):
        batch, loss = rollout(), make_loss(gradient="k2")
        assert loss.in_keys == ["observation", "action", "action_log_prob"]
        assert loss.out_keys == ["loss_kl", "kl", "kl_coeff"]
        flat, expected = batch.reshape(-1), loss(batch.reshape(-1))
        for value, key in zip(
            loss(**{k: flat[k] for k in loss.in_keys}), loss.out_keys, strict=True
        ):
            assert_close(value, expected[key])
        assert make_loss().in_keys == ["observation", "action"]
        loss = make_loss(gradient="sequence")
        expected = loss(batch)
        batch.rename_key_("action_log_prob", "mu").rename_key_("action", "a")
        batch.rename_key_(("next", "done"), ("next", "over"))
        loss.set_keys(action="a", sample_log_prob="mu", done="over")
        assert_close(loss(batch)["loss_kl"], expected["loss_kl"])
        assert loss.in_keys == ["observation", "a", "mu", ("next", "over")]


class TestParameters:
    @pytest.mark.parametrize("shared", [False, True])
    def test_the_reference_is_saved_and_never_trained(self, shared):
        frozen = FrozenActor(make_actor()) if shared else make_actor()
        loss, batch = make_loss(gradient="sequence", reference=frozen), rollout()
        assert (loss.reference is frozen) == shared
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
        assert all(parameter.grad is None for parameter in loss.reference.parameters())
        assert not loss.reference.actor.training

    @pytest.mark.parametrize("gradient", ["step", "sequence", "k2"])
    def test_without_functional_calls_the_actor_is_used_itself(self, gradient):
        batch, found = rollout(), []
        for functional in (True, False):
            loss = make_loss(gradient=gradient, functional=functional)
            out = loss(batch)
            out["loss_kl"].backward()
            found.append((dict(out.detach()), [weight.grad for weight in loss.parameters()]))
            assert loss.functional == functional
        assert_close(found[1], found[0], rtol=0, atol=0)
        names = [name for name, _ in loss.named_parameters(remove_duplicate=False)]
        assert names == [f"actor_network.module.0.module.{name}" for name in ("weight", "bias")]

    def test_a_restart_restores_reference_and_controller(self):
        batch, actor = rollout(), moved(make_actor())
        controllers = [SpyController(0.1, step=0.2) for _ in range(2)]
        loss = KLPenaltyLoss(actor, controllers[0], reference=make_actor())
        loss.update_controller(batch)
        # Captures the wrong reference.
        resumed = KLPenaltyLoss(copy.deepcopy(actor), controllers[1])
        assert resumed(batch)["loss_kl"] == 0
        resumed.load_state_dict(loss.state_dict())
        assert {"controller.coeff", "feed.statistics.sum"} <= loss.state_dict().keys()
        assert controllers[1].coeff.item() == pytest.approx(0.3)
        assert_close(resumed(batch)["loss_kl"], loss(batch)["loss_kl"], rtol=0, atol=0)
        assert_close(dict(resumed.state_dict()), dict(loss.state_dict()), rtol=0, atol=0)


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
    @pytest.mark.parametrize("kind", ["categorical", "tanh_normal"])
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

    def test_weights_too_large_for_the_dtype_stay_away_from_padding(self):
        batch = rollout()
        batch["next", "done"][:] = False
        del batch["next", "observation"]  # or it would say where the episodes end
        # The weight of the way past the last step: exp(100) overflows.
        batch["action_log_prob"][:, -1] = -100.0
        one, other = (make_loss(gradient="sequence")(b) for b in (batch, self.padded(batch)))
        assert one["loss_kl"].isfinite()
        assert_close(one["loss_kl"], other["loss_kl"])

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
        loss.loss_mask_key = "numbers"  # 0 where a step does not count
        batch["numbers"] = batch["valid"].long()
        assert_close(loss(batch)["loss_kl"] > 0, batch["valid"].squeeze(-1))


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "match"),
        [
            ({"gradient": "k1"}, r'must not be "k1".* is zero.*Subtract k1 from the reward'),
            ({"gradient": "k3"}, r"`gradient` must be one of \('step', 'sequence', 'k2'\), got"),
            ({"weights": "exact"}, r"`weights` must be one of \('step', 'trajectory'\), got"),
            ({"reduction": "max"}, r"`reduction` must be one of \('mean', 'sum', 'none'\), got"),
        ],
    )
    def test_an_unknown_option(self, options, match):
        with pytest.raises(ValueError, match=match):
            make_loss(**options)

    @pytest.mark.parametrize("options", [{"gradient": "sequence"}, {"weights": "trajectory"}])
    def test_trajectories_need_time_and_order(self, options):
        loss, batch = make_loss(**options), rollout()
        expected = loss(batch)["loss_kl"]
        assert_close(loss(batch[[1, 0]])["loss_kl"], expected)  # whole rows may be shuffled
        with pytest.raises(RuntimeError, match="'observation'.*shuffle whole rows, not steps"):
            loss(batch[:, torch.randperm(12)])
        make_loss(gradient="k2")(batch[:, torch.randperm(12)])
        batch.names = [None, None]
        with pytest.raises(ValueError, match=r"shape \(2, 12\) has no time .*`time_dim`"):
            loss(batch)
        assert_close(make_loss(**options, time_dim=-1)(batch)["loss_kl"], expected)

    @pytest.mark.parametrize(
        ("key", "match"),
        [
            ("action_log_prob", "action_log_prob.*return_log_prob=True"),
            ("action", "'action' is not in the data.*set_keys"),
            (("next", "done"), r"where trajectories end: .*`set_keys\(done="),
        ],
    )
    def test_an_entry_that_is_missing(self, key, match):
        batch = rollout().exclude(key)
        make_loss()(batch)  # each step's own KL asks for none
        with pytest.raises(KeyError, match=match):
            make_loss(gradient="sequence")(batch)

    def test_a_reward_is_penalized_once(self):
        batch = KLConstrainedTransform(make_actor(), 0.1)(rollout())
        with pytest.raises(RuntimeError, match=r"'kl_coeff'\) other than 0.*again.*drop the entry"):
            make_loss()(batch)
        assert make_loss(controller=0.0)(batch)["kl"] > 0  # which only measures
        assert make_loss()(KLConstrainedTransform(make_actor(), 0.0)(rollout()))["loss_kl"] > 0
        nested = rollout()
        nested["next", "agents", "weight"] = torch.full((2, 12, 3, 1), 0.1)
        loss = make_loss()
        loss(nested)
        loss.set_keys(kl_coeff="weight")
        with pytest.raises(RuntimeError, match=r"\('next', 'agents', 'weight'\)"):
            loss(nested)
