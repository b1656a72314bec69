"""KLPenaltyLoss as a module: what it reads, returns, keeps, refuses, and who moves its controller."""

import copy
import warnings
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import CompositeDistribution, TensorDictModule
from torch import nn
from torch.distributions import Categorical, Independent, Normal, kl_divergence
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torchrl.modules import MaskedCategorical, OneHotCategorical, ValueOperator, set_recurrent_mode
from torchrl.objectives import ClipPPOLoss, KLPENPPOLoss

from tests.helpers import (
    N_ACTIONS,
    N_OBS,
    SpyController,
    WalkEnv,
    assert_same,
    collect,
    make_actor,
    memory_of,
    moved,
    play,
    probabilistic_actor,
    sequence,
    total,
    with_transforms,
)
from torchrl_kl import (
    AdaptiveKLController,
    ConstantKLController,
    ExponentialKLController,
    FrozenActor,
    KLConstrainedTransform,
    KLPenaltyLoss,
    ReferenceModelLogProbTransform,
)


def make_loss(kind: str = "categorical", controller: Any = 0.5, **kwargs) -> Any:
    reference = make_actor(kind)
    return KLPenaltyLoss(moved(reference), controller, **{"reference": reference} | kwargs)


def rollout(kind: str = "categorical", **kwargs) -> Any:
    """Two rows of 12 steps of WalkEnv, through several episodes each."""
    actor = make_actor(kind)
    transforms = memory_of(actor) if kind in ("lstm", "gru") else []
    env = WalkEnv((2,), discrete=kind not in ("normal", "tanh_normal"), **kwargs)
    return play(with_transforms(env, *transforms), moved(actor)).detach()


def weight_of(loss: Any) -> Any:
    return next(loss.parameters())


def kl_of(loss: Any, batch: Any) -> torch.Tensor:
    """The KL of each step, from the two actors and torch's own formula."""
    policy = loss.actor_network.get_dist(batch.select("observation"))
    return kl_divergence(
        policy, loss.reference.actor.get_dist(batch.select("observation"))
    ).detach()


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

    def test_coefficient_0_adds_nothing_not_even_infinity(self):
        loss, batch = make_loss(controller=0.0), rollout()
        with torch.no_grad():
            loss.reference.actor[0].module.bias[0] = -torch.inf
        out = loss(batch)
        assert out["kl"] == torch.inf
        assert out["loss_kl"] == 0

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
        resumed = KLPenaltyLoss(
            copy.deepcopy(actor), SpyController(0.1, per="step")
        )  # captures the wrong reference
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

    def test_weights_too_large_for_the_dtype_stay_away_from_padding(self):
        batch = rollout()
        batch["next", "done"][:] = False
        del batch["next", "observation"]  # or it would say where the episodes end
        batch["action_log_prob"][
            :, -1
        ] = -100.0  # the weight of the way past the last step: exp(100) overflows
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


class TestController:
    def test_forward_never_moves_it(self):
        for per in ("step", "trajectory"):
            controller = SpyController(per=per)
            loss, batch = make_loss(controller=controller), rollout()
            for _ in range(3):
                loss(batch)["loss_kl"].backward()
            assert controller.calls == []

    def test_per_step_it_is_told_the_mean_over_valid_steps(self):
        controller = SpyController(per="step", step=0.25)
        loss, batch = make_loss(controller=controller), rollout()
        batch["collector", "mask"] = torch.rand(2, 12) > 0.3
        assert loss.update_controller(batch) == pytest.approx(0.35)
        n_steps = int(batch["collector", "mask"].sum())
        kl = kl_of(loss, batch)[batch["collector", "mask"]].mean().item()
        assert controller.calls == [(pytest.approx(kl), n_steps)]
        assert loss(batch)["kl_coeff"].item() == pytest.approx(0.35)

    @pytest.mark.parametrize("gradient", ["step", "sequence"])
    def test_per_trajectory_it_is_told_the_mean_of_their_sums(self, gradient):
        controller = SpyController()
        loss, batch = make_loss(controller=controller, gradient=gradient), rollout()
        loss.update_controller(batch)
        sums, total = [], 0.0
        for row_kl, row_done in zip(
            kl_of(loss, batch), batch["next", "done"].squeeze(-1), strict=True
        ):
            total = 0.0
            for kl, done in zip(row_kl.tolist(), row_done.tolist(), strict=True):
                total += kl
                if done:
                    sums.append(total)
                    total = 0.0
        assert len(sums) > 4
        assert controller.calls == [(pytest.approx(sum(sums) / len(sums), rel=1e-5), len(sums))]

    def test_trajectories_may_come_in_pieces(self):
        batches = collect(with_transforms(WalkEnv((2,))), moved(make_actor()), frames=14, batches=4)
        controllers = SpyController(), SpyController()
        for controller, data in zip(controllers, ([torch.cat(batches, 1)], batches), strict=True):
            loss = make_loss(controller=controller)
            for batch in data:
                loss.update_controller(batch)
        whole, pieces = (
            (sum(n for _, n in c.calls), sum(kl * n for kl, n in c.calls)) for c in controllers
        )
        assert len(controllers[1].calls) > 1
        assert whole == (pieces[0], pytest.approx(pieces[1], rel=1e-5))

    def test_a_second_collector_does_not_continue_the_sums_of_the_first(self):
        # Both count their trajectories from 0, and the first one ends inside some.
        def run(seed: int) -> list[Any]:
            env = with_transforms(WalkEnv((2,)))
            return collect(env, moved(make_actor()), frames=14, batches=2, seed=seed)

        runs = [run(seed) for seed in (0, 1)]
        first_end, second_start = runs[0][-1][:, -1], runs[1][0][:, 0]
        ids = ("collector", "traj_ids")
        assert not first_end["next", "done"].all()
        told = {}
        for order in ((0,), (1,), (0, 1)):
            controller = SpyController()
            loss = make_loss(controller=controller)
            for index in order:
                for batch in runs[index]:
                    shifted = batch.clone()
                    if index == 1:  # the same numbers as those that were left open
                        shifted[ids] += first_end[ids].min() - second_start[ids].min()
                    loss.update_controller(shifted)
            told[order] = total(controller)
        count, kl = (sum(told[(index,)][i] for index in (0, 1)) for i in (0, 1))
        assert told[0, 1] == (count, pytest.approx(kl, rel=1e-5))

    def test_trajectories_of_two_collectors_that_alternate_are_kept_apart(self):
        runs = [
            collect(
                with_transforms(WalkEnv((2,))), moved(make_actor()), frames=14, batches=4, seed=s
            )
            for s in (0, 1)
        ]
        told = []
        for data in (
            runs[0],
            runs[1],
            [batch for pair in zip(*runs, strict=True) for batch in pair],
        ):
            controller = SpyController()
            loss = make_loss(controller=controller)
            for batch in data:
                loss.update_controller(batch)
            told.append(total(controller))
        count, kl = (told[0][i] + told[1][i] for i in (0, 1))
        assert told[2] == (count, pytest.approx(kl, rel=1e-5))

    def test_per_step_neither_time_nor_order_nor_ends_are_needed(self):
        controllers = [SpyController(per="step") for _ in range(2)]
        batch = rollout()
        make_loss(controller=controllers[0]).update_controller(batch)
        shuffled = batch[:, torch.randperm(12)].exclude(("next", "done"))
        make_loss(controller=controllers[1]).update_controller(shuffled)
        assert controllers[0].calls == [(pytest.approx(controllers[1].calls[0][0]), 24)]

    def test_per_trajectory_the_steps_must_follow_one_another(self):
        controller = SpyController()
        loss, batch = make_loss(controller=controller), rollout()
        with pytest.raises(ValueError, match="the steps of the batch do not follow one another"):
            loss.update_controller(batch[:, torch.randperm(12)])
        assert controller.calls == []

    def test_an_infinite_kl_moves_nothing(self):
        controller = SpyController(step=1.0)
        loss, batch = make_loss(controller=controller), rollout()
        healthy = copy.deepcopy(loss)
        with torch.no_grad():
            loss.reference.actor[0].module.bias[0] = -torch.inf
        with pytest.raises(ValueError, match="must be finite"):
            loss.update_controller(batch)
        assert controller.calls == []
        assert loss.statistics.count == 0
        assert healthy.update_controller(batch) == pytest.approx(1.1)

    def test_the_mask_that_was_named_says_which_trajectories_count(self):
        batch = rollout()
        first = batch["next", "done"][0].flatten().nonzero()[0].item() + 1
        told = []
        for key in ("auto", "valid", None):
            controller = SpyController()
            loss, data = make_loss(controller=controller), batch.clone()
            data["collector", "mask"] = torch.arange(12).expand(2, 12) < (
                first if key == "auto" else 0
            )
            data["valid"] = torch.arange(12).expand(2, 12) < first
            loss.loss_mask_key = key
            before = set(data.keys(True, True))
            loss.update_controller(data)
            assert set(data.keys(True, True)) == before
            told += controller.calls
        assert told[0] == told[1]
        assert told[0][1] < told[2][1] == batch["next", "done"].sum()

    def test_no_finished_trajectory_moves_nothing(self):
        controller = SpyController()
        assert make_loss(controller=controller).update_controller(rollout()[:, :1]) == 0.1
        assert controller.calls == []

    def test_with_a_deadband_a_single_trajectory_waits_for_another(self):
        controllers = [ExponentialKLController(1.0, 0.01, deadband=1.0) for _ in range(2)]
        losses = [make_loss(controller=controller) for controller in controllers]
        batch = collect(with_transforms(WalkEnv((1,))), moved(make_actor()), frames=24, batches=1)[
            0
        ]
        first, second = (batch["next", "done"].flatten().nonzero().flatten()[:2] + 1).tolist()
        assert losses[0].update_controller(batch[:, :first]) == 1.0
        losses[1].load_state_dict(losses[0].state_dict())  # a restart in between forgets nothing
        moved_to = losses[1].update_controller(batch[:, first:second])
        together = make_loss(controller=ExponentialKLController(1.0, 0.01, deadband=1.0))
        assert moved_to == pytest.approx(together.update_controller(batch[:, :second]))
        assert moved_to != 1.0
        assert losses[1].statistics.count == 0

    def test_a_refused_measurement_is_not_refused_for_ever(self):
        loss, batch = (
            make_loss(controller=AdaptiveKLController(1.0, 0.01, horizon=0.6, per="step")),
            rollout(),
        )
        with pytest.raises(
            ValueError, match="`n_steps` must be less than horizon / clip = 3, got 24"
        ):
            loss.update_controller(batch)
        assert loss.update_controller(batch[:, :1]) > 1.0

    def test_a_trajectory_needs_a_time_dimension(self):
        with pytest.raises(
            ValueError, match="a controller that counts nats per trajectory needs whole traj"
        ):
            make_loss(controller=SpyController()).update_controller(rollout().reshape(-1))

    def test_ends_are_needed(self):
        with pytest.raises(KeyError, match="trajectories end there"):
            make_loss(controller=SpyController()).update_controller(
                rollout().exclude(("next", "done"))
            )

    def test_what_is_not_a_controller(self):
        with pytest.raises(
            TypeError, match="`controller` must be a KLController or a number, got str"
        ):
            make_loss(controller="adaptive")


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

    def test_the_policy_is_trained_once(self):
        actor = moved(make_actor())
        loss = KLPenaltyLoss(actor, 0.5, reference=make_actor(), loss=self.ppo(actor))
        parameters = list(loss.parameters())
        assert (
            len(parameters) == len({id(parameter) for parameter in parameters}) == 4
        )  # two layers
        assert {id(parameter) for parameter in actor.parameters()} < {
            id(parameter) for parameter in parameters
        }

    def test_a_loss_that_writes_a_kl_is_not_overwritten(self):
        actor = moved(make_actor())
        loss = KLPenaltyLoss(actor, 0.5, reference=make_actor(), loss=self.ppo(actor, KLPENPPOLoss))
        with pytest.raises(ValueError, match=r"`loss` writes \['kl'\] too.*one after the other"):
            loss(self.batch())


class TestHalfPrecision:
    """Sums over many steps are made, and returned, in float32."""

    N_STEPS = 140_000  # times a KL of one half: beyond the largest number of float16, 65504

    def batch(self, dtype: torch.dtype) -> Any:
        done = torch.zeros(1, self.N_STEPS, 1, dtype=torch.bool)
        done[:, 999::1000] = True
        batch = TensorDict(
            observation=torch.ones(1, self.N_STEPS, 1, dtype=dtype),
            action=torch.zeros(1, self.N_STEPS, dtype=torch.long),
            action_log_prob=torch.zeros(1, self.N_STEPS, dtype=dtype),
            next=TensorDict(done=done, batch_size=(1, self.N_STEPS)),
            batch_size=(1, self.N_STEPS),
        )
        batch.names = [None, "time"]
        return batch

    @staticmethod
    def actor(dtype: torch.dtype, bias: float) -> Any:
        """Two actions; the logits are 0 and `bias`."""
        net = nn.Linear(1, 2, dtype=dtype)
        nn.init.zeros_(net.weight)
        net.bias.data = torch.tensor([0.0, bias], dtype=dtype)
        return probabilistic_actor(
            TensorDictModule(net, ["observation"], ["logits"]),
            in_keys=["logits"],
            distribution_class=Categorical,
            return_log_prob=True,
        )

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("gradient", ["step", "sequence", "k2"])
    def test_sums_and_means(self, dtype, gradient):
        batch = self.batch(dtype)
        policy, reference = self.actor(dtype, 0.0), self.actor(dtype, 2.0)
        log_probs, ref_log_probs = (
            torch.tensor([0.0, bias]).log_softmax(-1) for bias in (0.0, 2.0)
        )
        batch["action_log_prob"][:] = log_probs[0].to(dtype)
        ratio = log_probs[0] - ref_log_probs[0]
        exact = (log_probs.exp() * (log_probs - ref_log_probs)).sum()
        value, kl = (ratio**2 / 2, ratio) if gradient == "k2" else (exact, exact)
        # The log-probs of both are rounded to the dtype, at most 2.2; a ratio of about 1.4 is squared for k2.
        relative = 8 * torch.finfo(dtype).eps
        for reduction, n_steps in (("mean", 1), ("sum", self.N_STEPS)):
            loss = KLPenaltyLoss(
                policy, 1.0, reference=reference, gradient=gradient, weights="step",
                reduction=reduction,
            )  # fmt: skip
            out = loss(batch)
            assert all(entry.dtype == torch.float32 for entry in out.values())
            assert_close(out["loss_kl"].detach(), n_steps * value, rtol=relative, atol=0)
            assert_close(out["kl"], kl, rtol=relative, atol=0)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_trajectories_of_a_controller(self, dtype):
        controller = SpyController()
        policy, reference = self.actor(dtype, 0.0), self.actor(dtype, 2.0)
        loss = KLPenaltyLoss(policy, controller, reference=reference)
        loss.update_controller(self.batch(dtype))
        per_step = KLPenaltyLoss(policy, 1.0, reference=reference)(self.batch(dtype))["kl"].item()
        assert controller.calls == [(pytest.approx(1000 * per_step, rel=1e-5), 140)]


class CountOps(TorchDispatchMode):
    """Counts the calls of tensor operations."""

    n = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.n += 1
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("weights", ["step", "trajectory"])
def test_no_loop_runs_over_the_steps(weights):
    counts = []
    for n_steps in (64, 1024):
        batch = play(with_transforms(WalkEnv((2,))), moved(make_actor()), 64).detach()
        batch: Any = torch.cat([batch] * (n_steps // 64), 1).exclude(("next", "observation"))
        batch.names = [None, "time"]
        loss = make_loss(controller=SpyController(), gradient="sequence", weights=weights)
        loss.update_controller(batch[:, :2])
        with CountOps() as mode:
            loss(batch)
            loss.update_controller(batch)
        counts.append(mode.n)
    assert counts[1] < 1.5 * counts[0]  # log2 of 1024 over log2 of 64 is 5/3


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
            assert_close(
                out["kl"], (policies.log_prob(action) - references.log_prob(action)).mean()
            )
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
        loss = KLPenaltyLoss(policy, 1.0, reference=reference, gradient=gradient, reduction="none")
        per_step = loss(batch)["loss_kl"]
        states = [key for key in batch.keys() if str(key).startswith("ref_")]
        assert_same(
            loss(batch.exclude(*states))["loss_kl"], per_step
        )  # the reference runs through the rows by itself
        order = torch.randperm(24)
        assert_same(loss(batch.reshape(-1)[order])["loss_kl"], per_step.reshape(-1)[order])
        assert per_step.detach().std() > 0.01

    def test_sequence_runs_through_memory_too(self):
        policy, reference, batch = self.recorded("lstm")
        values = [
            KLPenaltyLoss(policy, 1.0, reference=reference, gradient=gradient, weights="step")(
                batch
            )["loss_kl"]
            for gradient in ("step", "sequence")
        ]
        assert_close(values[0], values[1])  # one value, two gradients
        one, other = (
            torch.autograd.grad(value, list(policy.parameters())[-1])[0] for value in values
        )
        assert (one - other).norm() > 0.1 * one.norm()

    def test_the_policy_is_run_through_time(self):
        # Gradients of later steps reach what earlier steps left in memory: that of one step's state alone is smaller.
        policy, reference, batch = self.recorded("lstm")
        grads = []
        for data in (batch, batch.reshape(-1)):
            loss: Any = KLPenaltyLoss(copy.deepcopy(policy), 1.0, reference=reference)
            loss(data)["loss_kl"].backward()
            grads.append(torch.cat([parameter.grad.flatten() for parameter in loss.parameters()]))
        assert (grads[0] - grads[1]).norm() > 0.01 * grads[0].norm()

    def test_an_unknown_state_is_refused(self):
        policy, reference, batch = self.recorded("lstm")
        bare = batch.exclude("ref_h", "ref_c")
        loss = KLPenaltyLoss(policy, 1.0, reference=reference)
        with pytest.raises(
            RuntimeError, match=r"its state \['ref_h', 'ref_c'\] is not in the data"
        ):
            loss(bare.reshape(-1))
        starts = bare["is_init"].squeeze(-1)
        assert not starts[:, 1].any()
        with pytest.raises(RuntimeError, match="begins inside a trajectory and the state"):
            loss(bare[:, 1:])

    def test_the_frozen_actor_takes_no_mode_from_around_it(self):
        _, reference, batch = self.recorded("lstm")
        frozen: Any = FrozenActor(reference)
        expected = frozen.get_dist(batch, timed=True).logits
        with set_recurrent_mode(True):
            flat = frozen.get_dist(batch.reshape(-1), timed=False).logits
        assert_same(flat, expected.reshape(24, -1))
        assert not flat.requires_grad
