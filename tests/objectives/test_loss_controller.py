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
from torch.utils._python_dispatch import TorchDispatchMode
from torchrl.envs import InitTracker

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
from torchrl_kl import (
    AdaptiveKLController,
    ExponentialKLController,
    KLConstrainedTransform,
    KLPenaltyLoss,
)


class TestController:
    def test_forward_never_moves_it(self):
        for per in ("step", "trajectory"):
            controller = SpyController(per=per)
            loss, batch = make_loss(controller=controller), rollout()
            for _ in range(3):
                loss(batch)["loss_kl"].backward()
            assert controller.calls == []

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_it_may_move_before_backward(self, dtype):
        """The gradient is with the coefficient of `forward`, also where no cast has copied it."""
        actor, reference = make_actor().to(dtype), moved(make_actor()).to(dtype)
        batch, grads = play(WalkEnv((2,), dtype=dtype), actor), []
        for moves in (False, True):
            controller = SpyController(per="step", step=0.25)
            loss = KLPenaltyLoss(actor, controller, reference=reference)
            out = loss(batch)
            if moves:
                loss.update_controller(batch)
            grads.append(torch.autograd.grad(out["loss_kl"], list(loss.parameters())))
        assert controller.coeff > out["kl_coeff"]
        assert_close(*grads, rtol=0, atol=0)

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

    @pytest.mark.parametrize("layer", [nn.Dropout(), nn.BatchNorm1d(N_OBS)])
    @pytest.mark.parametrize("gradient", ["step", "sequence", "k2"])
    def test_it_is_measured_in_eval_mode(self, layer, gradient):
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

    def test_a_batch_without_steps_moves_nothing(self):
        controller = SpyController(step=1.0)
        for gradient in ("step", "sequence"):
            loss = make_loss(controller=controller, gradient=gradient)
            assert loss(rollout()[:, :0])["loss_kl"] == 0
            assert loss.update_controller(rollout()[:, :0]) == 0.1
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
        # Log-probs of at most 2.2 are rounded to the dtype, and their ratio is squared for k2.
        relative = 8 * torch.finfo(dtype).eps
        reductions: Any = (("mean", 1), ("sum", self.N_STEPS))
        for reduction, n_steps in reductions:
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
        batch: Any = play(with_transforms(WalkEnv((2,))), moved(make_actor()), 64).detach()
        batch = torch.cat([batch] * (n_steps // 64), 1)
        del batch["next", "observation"]  # the copies do not continue one another
        batch.names = [None, "time"]
        loss = make_loss(controller=SpyController(), gradient="sequence", weights=weights)
        loss.update_controller(batch[:, :2])
        with CountOps() as mode:
            loss(batch)
            loss.update_controller(batch)
        counts.append(mode.n)
    assert counts[1] < 1.5 * counts[0]  # log2 of 1024 over log2 of 64 is 5/3


@pytest.mark.parametrize("skipped", [1, 2])
def test_batches_may_be_left_out_where_rows_have_no_padding(skipped):
    """Rows in the middle of a trajectory were taken for padded ones, and refused."""
    actor, told = make_actor(), []
    env = with_transforms(WalkEnv((3,), longest=30), InitTracker())
    batches = collect(env, actor, frames=9, batches=9)
    assert (batches[0]["collector", "traj_ids"] == batches[0]["collector", "traj_ids"][:, :1]).all()
    for make in (KLPenaltyLoss, KLConstrainedTransform):
        controller = SpyController()
        fed: Any = make(moved(actor), controller, reference=actor)
        for batch in [*batches[:1], *batches[1 + skipped :]]:
            fed.update_controller(batch) if make is KLPenaltyLoss else fed(batch)
        told.append(total(controller)[0])
    assert told[0] == told[1] > 0
