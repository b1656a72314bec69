"""KLMonitor: the KL against the target, and the coefficient against its bounds."""

import copy
import math

import pytest
import torch
from tensordict import TensorDict
from torch.testing import assert_close

from tests.helpers import (
    WalkEnv,
    collect,
    make_actor,
    moved,
    step_of,
    with_transforms,
)
from tests.monitor.batches import names, per_step, steps
from torchrl_kl import (
    AdaptiveKLController,
    ConstantKLController,
    ExponentialKLController,
    KLConstrainedTransform,
    KLKeys,
    KLMonitor,
)
from torchrl_kl.monitor import KLMessage


class TestTarget:
    @pytest.mark.parametrize(
        ("kl", "expected"),
        [
            (1.0, []),  # 2x is not above 2x
            (1.0 + 2**-40, ["kl_above"]),
            (0.25, []),
            (0.25 - 2**-40, ["kl_below"]),
            (0.5, []),
        ],
    )
    def test_thresholds(self, kl, expected):
        assert names(KLMonitor(per_step(), window=1)(steps(kl, kl))) == expected

    def test_waits_for_a_full_window(self):
        monitor = KLMonitor(per_step(), window=3)
        assert [names(monitor(steps(2.0, 2.0))) for _ in range(5)] == [[], [], ["kl_above"], [], []]

    def test_the_mean_is_over_steps_not_over_batches(self):
        # 30 steps of 1.2 and 10 of 0: 0.9 over steps; the mean of the batch means is 0.6.
        # The target is 0.4: 2 times that is 0.8.
        monitor = KLMonitor(per_step(0.4), window=2)
        monitor(steps(*[1.2] * 30))
        (message,) = monitor(steps(*[0.0] * 10))
        assert message.condition == "kl_above"
        assert_close(message.figures["kl"], 0.9)
        assert message.figures["count"] == 40

    def test_the_window_forgets(self):
        monitor = KLMonitor(per_step(), window=2)
        seen = [names(monitor(steps(*[kl] * 40))) for kl in (9.0, 0.5, 0.5, 0.5)]
        assert seen == [[], ["kl_above"], [], []]
        assert monitor.counts["kl_above"] == (1, 1)

    def test_one_value_has_no_standard_error(self):
        (message,) = KLMonitor(per_step(), window=1)(steps(2.0))
        assert str(message).startswith("KL is 2 nats per step over the last 1 batches (1 steps), ")
        assert math.isnan(message.figures["standard_error"])

    def test_steps_that_the_stack_left_out_do_not_count(self):
        reference = make_actor()
        policy = moved(reference)
        controller = per_step(1e-6)
        stack = KLConstrainedTransform(reference, controller, on_invalid="mask")
        monitor = KLMonitor(controller, window=1)
        (batch,) = collect(WalkEnv((4,)), policy, frames=48, batches=1)
        batch["action_log_prob"][..., :9] = math.nan
        with pytest.warns(UserWarning, match="got invalid numbers"):
            batch = stack(batch)
        monitor(batch)
        kl = batch["next", "kl"]
        ((count, total, _),) = monitor.state_dict()["pools"]
        assert count * 4 == kl.numel()
        assert_close(total, kl[:, 9:].double().sum().item())

    def test_steps_of_equal_distributions_count(self):
        """Their exact KL is 0; a batch of another size rounds their log-probs otherwise."""
        log_prob, kl = torch.rand(8, 20) - 3, torch.rand(8, 20, 1)
        ref_log_prob = log_prob.unsqueeze(-1).clone()
        ref_log_prob[:4], kl[:4] = ref_log_prob[:4] * (1 + 2**-22), 0.0
        step = TensorDict(kl=kl, ref_log_prob=ref_log_prob, batch_size=[8, 20])
        batch = TensorDict(action_log_prob=log_prob, next=step, batch_size=[8, 20])
        (message,) = KLMonitor(per_step(0.05), window=1)(batch)
        assert message.figures["count"] == 160

    @pytest.mark.parametrize("shape", [(8, 20, 1), (8, 20, 2)])
    def test_log_probs_of_the_reference_of_any_shape(self, shape):
        step = TensorDict(kl=torch.rand(8, 20, 1), ref_log_prob=torch.randn(shape))
        batch = TensorDict(action_log_prob=torch.randn(8, 20), next=step, batch_size=[8, 20])
        (message,) = KLMonitor(per_step(0.05), window=1)(batch)
        assert message.figures["count"] == 160

    @pytest.mark.parametrize(
        ("deadband", "said"), [(0.0, "the stack is not"), (2.0, "has a deadband")]
    )
    def test_a_controller_that_did_not_move(self, deadband, said):
        (message,) = KLMonitor(per_step(deadband=deadband), window=1)(steps(2.0, 2.1))
        assert said in str(message)

    def test_says_the_figures_and_what_to_do(self):
        controller = per_step()
        monitor = KLMonitor(controller, window=1)
        controller.coeff.fill_(1.5)
        (message,) = monitor(steps(1.9, 2.0, 2.1))
        # the standard error of 1.9, 2.0, 2.1: 0.1 * sqrt(1 / 3)
        assert str(message).startswith(
            "KL is 2 +- 0.058 nats per step over the last 1 batches (3 steps), 4 times the target "
            "of 0.5; the coefficient is 1.5. The controller raises the coefficient until"
        )
        assert "smaller `horizon`, a larger `gain`" in str(message)
        assert_close(
            dict(message.figures),
            {"kl": 2.0, "standard_error": 0.1 * math.sqrt(1 / 3), "count": 3, "target": 0.5},
        )
        controller.coeff.fill_(1.25)
        (message,) = monitor(steps(0.0, 0.0))
        assert "0 times the target" in str(message)
        assert "The controller lowers the coefficient until" in str(message)
        assert "lower the target" in str(message)

    @pytest.mark.parametrize(("kl", "condition"), [(2.0, "kl_above"), (0.0, "kl_below")])
    def test_a_controller_without_an_update_is_named(self, kl, condition):
        controller = per_step()
        monitor = KLMonitor(controller, window=1)
        (message,) = monitor(steps(kl))
        assert message.condition == condition
        assert (
            "coefficient is 1. The controller has not moved the coefficient in these"
            in message.text
        )
        assert "lower `update_every`, and check that trajectories reach `done`" in message.text
        assert "raises" not in message.text
        assert "lowers" not in message.text

    def test_a_copy_of_the_stack_that_penalizes_is_named(self):
        # TorchRL's MultiAsyncCollector makes a deep copy of its `postproc`.
        policy, controller = make_actor(), per_step(target=5.0)
        stack = KLConstrainedTransform(policy, controller, reference=moved(policy))
        copied, monitor = copy.deepcopy(stack), KLMonitor(controller, window=1)
        (batch,) = collect(WalkEnv(), policy, frames=400, batches=1, postproc=copied)
        (message,) = monitor(batch)
        assert copied.controller.coeff < controller.coeff == 1.0
        assert "use a copy of the stack" in message.text
        assert "use `kl_collector`" in message.text

    def test_a_controller_that_was_stopped_is_named(self):
        controller = per_step()
        monitor = KLMonitor(controller, window=2)
        controller.coeff.fill_(1.5)  # and then the stack was frozen
        said = [message.text for _ in range(3) for message in monitor(steps(0.5, 0.5))]
        said += [message.text for kl in (2.0, 2.1) for message in monitor(steps(kl, kl))]
        assert len(said) == 1
        assert "not moved the coefficient in these batches" in said[0]
        assert "raises" not in said[0]

    def test_no_update_is_told_from_a_restart_and_from_a_bound(self):
        controller = per_step()
        monitor = KLMonitor(controller, window=1)
        controller.coeff.fill_(2.0)
        restarted = KLMonitor(controller, window=1)  # the coefficient of before the restart
        restarted.load_state_dict(monitor.state_dict())
        (message,) = restarted(steps(2.0))
        assert "The controller raises the coefficient" in message.text
        messages = KLMonitor(per_step(max_coeff=1.0), window=1)(steps(2.0))
        assert names(messages) == ["kl_above", "coeff_at_max"]
        assert "The controller raises the coefficient" in messages[0].text

    def test_no_update_in_a_run_that_waits_for_one(self):
        """The steps are far too few for `update_every`; with enough of them the advice changes."""
        reference, advice = make_actor(), []
        for update_every in (100_000, 64):
            stack = KLConstrainedTransform(reference, per_step(1e-3), update_every=update_every)
            monitor = KLMonitor(stack.controller, window=2)
            said = [
                str(message)
                for batch in collect(
                    WalkEnv((8,)), moved(reference), frames=800, batches=3, postproc=stack
                )
                for message in monitor(batch)
                if message.condition == "kl_above"
            ]
            advice.append("has not moved the coefficient in these" in said[0])
        # `collect` plays the whole run first, so that the monitor is built before any update.
        assert advice == [True, False]

    @pytest.mark.parametrize(
        ("mean", "spread", "expected"),
        [
            (1.25, 0.56, ["kl_above"]),
            (1.25, 0.57, []),
            (0.125, 0.28, ["kl_below"]),
            (0.125, 0.29, []),
        ],
    )
    def test_a_mean_that_noise_explains_is_not_reported(self, mean, spread, expected):
        # 5 values at mean - s and 5 at mean + s: the standard error is s / 3; 4 of them are 0.75
        # where s is 0.5625, and 0.375 where s is 0.28125.
        batch = steps(*[mean - spread, mean + spread] * 5)
        assert names(KLMonitor(per_step(0.5), window=1)(batch)) == expected

    def test_another_estimate_is_compared_with_the_target(self):
        batch = steps(0.5, 0.5, kl_estimate=[2.0, 2.0])
        assert names(KLMonitor(per_step(), window=1)(batch)) == ["kl_above"]
        assert KLMonitor(per_step(), window=1, keys=KLKeys(kl_estimate="kl"))(batch) == []
        with pytest.raises(KeyError, match="'other' is not in the data.*KLKeys\\(kl_estimate="):
            KLMonitor(per_step(), keys=KLKeys(kl_estimate="other"))(batch)

    def test_padding_does_not_count(self):
        batch = steps(0.5, math.nan, 9.0)
        batch["collector"] = TensorDict(mask=torch.tensor([True, False, False]), batch_size=3)
        monitor = KLMonitor(per_step(), window=1)
        assert monitor(batch) == []
        assert monitor.state_dict()["pools"] == [[1, 0.5, 0.25]]

    def test_a_batch_of_padding_alone_says_nothing(self):
        batch = steps(-9.0, math.nan)
        batch["collector"] = TensorDict(mask=torch.tensor([False, False]), batch_size=2)
        assert KLMonitor(per_step(), window=1)(batch) == []

    def test_without_a_target_there_is_nothing_to_compare_with(self):
        assert KLMonitor(ConstantKLController(0.1), window=1)(steps(100.0)) == []


class TestTrajectories:
    controller = AdaptiveKLController(0.1, 0.5, 10_000)

    def test_sums_of_finished_trajectories(self):
        # 0.5 + 0.7 ends; 0.1 goes on in the next batch and ends there with 1.5 more.
        # The mean is (1.2 + 1.6) / 2 = 1.4.
        monitor = KLMonitor(self.controller, window=2)
        ids = TensorDict(traj_ids=torch.tensor([[0, 0, 1]]), batch_size=(1, 3))
        first = step_of(kl=[0.5, 0.7, 0.1], done=[False, True, False])
        second = step_of(kl=[1.0, 0.5, 0.2], done=[False, True, False])
        first["collector"], second["collector"] = ids, ids + torch.tensor([[1, 1, 1]])
        assert monitor(first) == []
        (message,) = monitor(second)
        assert message.condition == "kl_above"
        assert_close(message.figures["kl"], 1.4)
        assert message.figures["count"] == 2
        assert "nats per trajectory over the last 2 batches (2 trajectories)" in str(message)

    def test_two_collectors_that_alternate_are_kept_apart(self):
        """Both number their trajectories from 0, and leave some open in every batch."""
        reference = make_actor()
        runs = [
            collect(
                WalkEnv((4,), longest=9),
                moved(reference),
                frames=12,
                batches=6,
                seed=seed,
                postproc=KLConstrainedTransform(reference, 0.1),
            )
            for seed in (0, 1)
        ]
        monitor, totals = KLMonitor(self.controller, window=12), []
        for pair in zip(*runs, strict=True):
            for batch in pair:
                monitor(batch)
                totals.append(batch["next", "episode_kl"][batch["next", "terminated"]].double())
        pools = monitor.state_dict()["pools"]
        assert [count for count, _, _ in pools] == [len(total) for total in totals]
        expected = [total.sum().item() for total in totals]
        assert_close([total for _, total, _ in pools], expected, rtol=0, atol=1e-5)
        assert sum(map(len, totals)) > 10

    @pytest.mark.parametrize(("value_key", "knows"), [("state_value", False), ("v", True)])
    def test_values_of_a_critic_that_learns_do_not_part_a_trajectory(self, value_key, knows):
        reference = make_actor()
        policy, stack = moved(reference), KLConstrainedTransform(reference, 0.1)
        batches = collect(WalkEnv((4,), longest=9), policy, frames=12, batches=8, postproc=stack)
        monitors = [KLMonitor(self.controller, actor=policy if knows else None) for _ in range(2)]
        for n, batch in enumerate(batches):
            monitors[0](batch)
            for step in (batch, batch["next"]):  # the critic has other weights in each batch
                step[value_key] = (n + 1) * step["observation"].sum(-1, keepdim=True)
            monitors[1](batch)
        before, behind = (monitor.state_dict()["pools"] for monitor in monitors)
        assert before == behind
        assert sum(count for count, _, _ in before) > 10

    def test_padding_after_the_end_is_not_summed(self):
        batch = step_of(kl=[0.5, 0.7, math.nan, 9.0], done=[False, True, False, False])
        batch["collector"] = TensorDict(
            mask=torch.tensor([[True, True, False, False]]), batch_size=(1, 4)
        )
        monitor = KLMonitor(self.controller)
        monitor(batch)
        ((count, total, _),) = monitor.state_dict()["pools"]
        assert count == 1
        assert_close(total, 1.2, rtol=1e-6, atol=0.0)

    def test_a_window_in_which_nothing_ended_says_nothing(self):
        batch = step_of(kl=[9.0, 9.0], done=[False, False])
        monitor = KLMonitor(self.controller, window=1)
        assert monitor(batch) == []
        assert monitor.counts["kl_above"] == (0, 0)

    def test_without_time_they_cannot_be_told_apart(self):
        with pytest.raises(
            RuntimeError, match="batch of shape \\(2,\\) without a time dimension.*`time_dim`"
        ):
            KLMonitor(self.controller)(steps(0.5, 0.5))

    def test_the_same_for_a_stack_on_batches_and_one_in_the_env(self):
        reference, pools = make_actor(), []
        policy = moved(reference)
        for in_env in (True, False):
            stack = KLConstrainedTransform(reference, AdaptiveKLController(0.1, 0.5, 10_000))
            stack.freeze()
            env = with_transforms(WalkEnv((4,)), stack) if in_env else WalkEnv((4,))
            batches = collect(env, policy, frames=80, batches=3, postproc=None if in_env else stack)
            monitor = KLMonitor(stack.controller)
            for batch in batches:
                monitor(batch)
            pools.append(monitor.state_dict()["pools"])
        totals = batches[0]["next", "episode_kl"][batches[0]["next", "done"]]
        assert pools[1][0][0] == totals.numel() > 10
        assert_close(pools[1][0][1], totals.double().sum().item(), rtol=1e-5, atol=1e-5)
        assert_close(pools[0], pools[1], rtol=1e-4, atol=1e-4)


class TestCoefficient:
    def test_at_the_upper_bound(self):
        controller = per_step(max_coeff=1.0)
        (message,) = KLMonitor(controller)(steps(0.5))
        assert message == KLMessage("coeff_at_max", message.text, {"coeff": 1.0})
        assert str(message).startswith(
            "The coefficient is at its upper bound, max_coeff = 1: it cannot rise"
        )
        assert "Raise `max_coeff`" in str(message)

    def test_at_the_lower_bound(self):
        (message,) = KLMonitor(per_step(min_coeff=1.0))(steps(0.5))
        assert message.condition == "coeff_at_min"
        assert str(message).startswith(
            "The coefficient is at its lower bound, min_coeff = 1: it cannot fall"
        )
        assert "Lower `min_coeff`" in str(message)

    @pytest.mark.parametrize(
        "controller",
        [
            per_step(min_coeff=1 - 1e-9, max_coeff=1 + 1e-9),
            ConstantKLController(0.0),
            AdaptiveKLController(1e-300, 0.5, 100, per="step"),
        ],
    )
    def test_elsewhere_it_is_not_reported(self, controller):
        monitor = KLMonitor(controller)
        assert monitor(steps(0.5)) == []
        assert monitor.counts["coeff_at_max"].batches == monitor.counts["coeff_at_min"].batches == 0

    @pytest.mark.parametrize("rewards", [[], [0.0, 1000.0]])
    def test_before_the_plan_no_bound_is_reached_and_nothing_has_moved(self, rewards):
        controller = ExponentialKLController("plan", 0.5, per="step")
        if rewards:
            controller.observe_rewards(torch.tensor(rewards))
            assert controller.coeff > controller.max_coeff
        monitor = KLMonitor(controller, window=1)
        (message,) = monitor(steps(0.1))
        assert message.condition == "kl_below"
        assert "The controller has not moved the coefficient in these" in str(message)

    def test_a_plan_is_no_update(self):
        controller = ExponentialKLController("plan", 0.5, per="step")
        monitor = KLMonitor(controller, window=1)
        assert monitor(steps(0.5)) == []
        controller.observe_rewards(torch.randn(200, generator=torch.Generator().manual_seed(0)))
        assert not controller.planning
        (message,) = monitor(steps(0.1))
        assert "The controller has not moved the coefficient in these" in str(message)

    def test_follows_the_controller(self):
        controller = per_step(gain=1.0, max_coeff=2.0)
        monitor, seen = KLMonitor(controller, window=2), []
        for kl in (
            5.0,
            5.0,
            0.5,
            0.0,
            0.0,
            0.5,
            5.0,
            5.0,
        ):  # the coefficient: 2 after the first, 2, 2, 0.74, ...
            controller.update(kl, 1)
            seen.append([name for name in names(monitor(steps(0.5))) if name.startswith("coeff")])
        assert seen == [["coeff_at_max"], [], [], [], [], [], [], ["coeff_at_max"]]
        assert monitor.counts["coeff_at_max"] == (4, 2)
