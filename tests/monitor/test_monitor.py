"""KLMonitor: each condition is reported if and only if it holds, once per episode, with advice."""

import copy
import io
import math
import pickle
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch.distributions import Categorical
from torch.testing import assert_close

from tests.helpers import WalkEnv, collect, make_actor, moved, play, step_of
from torchrl_kl import (
    AdaptiveKLController,
    ConstantKLController,
    ExponentialKLController,
    KLConstrainedTransform,
    KLKeys,
    KLMonitor,
    PlannedKLController,
)
from torchrl_kl.monitor import CONDITIONS, KLMessage


def per_step(target: float = 0.5, **kwargs) -> ExponentialKLController:
    return ExponentialKLController(1.0, target, per="step", **kwargs)


def per_trajectory() -> AdaptiveKLController:
    return AdaptiveKLController(0.1, 0.5, 10_000)


def steps(*kl: float, **entries) -> Any:
    """A batch of steps in no order, float64: every mean of these numbers is exact."""
    kl_tensor = torch.tensor(kl, dtype=torch.float64).unsqueeze(-1)
    entries = {name: torch.tensor(value).unsqueeze(-1) for name, value in entries.items()}
    return TensorDict(
        next=TensorDict({"kl": kl_tensor, **entries}, batch_size=len(kl)), batch_size=len(kl)
    )


def names(messages: list[KLMessage]) -> list[str]:
    return [message.condition for message in messages]


class TestTarget:
    @pytest.mark.parametrize(
        ("kl", "expected"),
        [
            ((1.0, 1.0), []),  # 2x is not above 2x
            ((1.0 + 2**-40,) * 2, ["kl_above"]),
            ((0.25, 0.25), []),
            ((0.25 - 2**-40,) * 2, ["kl_below"]),
            # 5 values at mean - s and 5 at mean + s: the standard error is s / 3; 4 of them are
            # 0.75 where s is 0.5625, and 0.375 where s is 0.28125.
            ((1.25 - 0.56, 1.25 + 0.56) * 5, ["kl_above"]),
            ((1.25 - 0.57, 1.25 + 0.57) * 5, []),
            ((0.125 - 0.28, 0.125 + 0.28) * 5, ["kl_below"]),
            ((0.125 - 0.29, 0.125 + 0.29) * 5, []),
        ],
    )
    def test_thresholds(self, kl, expected):
        assert names(KLMonitor(per_step(), window=1)(steps(*kl))) == expected

    def test_the_mean_is_over_the_values_of_a_full_window(self):
        # 30 steps of 1.2 and 10 of 0: 0.9 over steps; the mean of the batch means is 0.6.
        # The target is 0.4: 2 times that is 0.8. Then the first batch is forgotten.
        monitor = KLMonitor(per_step(0.4), window=2)
        assert monitor(steps(*[1.2] * 30)) == []
        (message,) = monitor(steps(*[0.0] * 10))
        assert message.condition == "kl_above"
        assert_close(message.figures["kl"], 0.9)
        assert message.figures["count"] == 40
        assert names(monitor(steps(*[0.1] * 10))) == ["kl_below"]

    def test_one_value_has_no_standard_error(self):
        (message,) = KLMonitor(per_step(), window=1)(steps(2.0))
        assert str(message).startswith("KL is 2 nats per step over the last 1 batches (1 steps), ")

    def test_another_estimate_is_compared_with_the_target(self):
        batch = steps(0.5, 0.5, kl_estimate=[2.0, 2.0])
        assert names(KLMonitor(per_step(), window=1)(batch)) == ["kl_above"]
        assert KLMonitor(per_step(), window=1, keys=KLKeys(kl_estimate="kl"))(batch) == []

    def test_padding_does_not_count(self):
        batch = steps(0.5, math.nan, 9.0)
        batch["collector"] = TensorDict(mask=torch.tensor([True, False, False]), batch_size=3)
        monitor = KLMonitor(per_step(), window=1)
        assert monitor(batch) == []
        assert monitor.state_dict()["pools"] == [[1, 0.5, 0.25]]


class TestFirstBatch:
    """Far above the target, one batch is enough; the window only fills in the tenth."""

    @pytest.mark.parametrize(
        ("kl", "expected"),
        [
            ((5.0, 5.0), []),  # 10x is not above 10x
            ((5.0 + 2**-40,) * 2, ["kl_far_above"]),
            # 5 values at mean - s and 5 at mean + s: 4 standard errors are 4 s / 3.
            ((6.0 - 4.1, 6.0 + 4.1) * 5, ["kl_far_above"]),  # 0.53 is above the target
            ((6.0 - 4.2, 6.0 + 4.2) * 5, []),  # 0.4 is not
            ((50.0,), ["kl_far_above"]),
            ((0.0, 0.0), []),
        ],
    )
    def test_thresholds(self, kl, expected):
        assert names(KLMonitor(per_step())(steps(*kl))) == expected

    @pytest.mark.parametrize("count", [1, 2, 8])
    def test_few_values_that_lie_close_together_by_chance(self, count):
        """With a target of 0.02, 4 errors of k1 are 0.8 for one value, and the bound is 0.2."""
        above = 0.02 + 0.8 / math.sqrt(count)
        for kl, expected in ((above - 0.01, []), (above + 0.01, ["kl_far_above"])):
            assert names(KLMonitor(per_step(0.02))(steps(*[kl] * count))) == expected

    def test_hardly_ever_at_the_target(self):
        """2000 batches of two log-ratios N(target, 2 target): each above 4 errors with 3e-5."""
        kls = torch.randn(2000, 2, generator=torch.Generator().manual_seed(0)) * 0.2 + 0.02
        monitor = KLMonitor(per_step(0.02))
        for pair in kls.tolist():
            monitor(steps(*pair))
        assert monitor.counts["kl_far_above"].batches <= 3  # more with probability 7e-7

    def test_says_what_to_do(self):
        monitor = KLMonitor(per_step(), window=3)
        (message,) = monitor(steps(5.9, 6.0, 6.1))
        assert str(message).startswith(
            "KL is 6 +- 0.058 nats per step in this batch (3 steps), 12 times the target of 0.5; "
            "the coefficient was 1. Stop the run."
        )
        figures = {"kl": 6.0, "standard_error": 0.1 * math.sqrt(1 / 3), "count": 3, "target": 0.5}
        assert_close(dict(message.figures), figures)
        assert monitor(steps(5.9, 6.0, 6.1)) == []  # one episode

    def test_also_of_a_batch_that_a_controller_plans_from(self):
        """Of a reference that is not where training began; the window leaves such a batch out."""
        controller = PlannedKLController(0.5, per="step")
        monitor = KLMonitor(controller, window=1)
        assert names(monitor(steps(6.0, 6.0))) == ["kl_far_above"]
        assert controller.planning
        assert monitor.counts["kl_above"] == (0, 0)

    def test_it_is_the_last_batch_alone(self):
        """Also of a window whose mean is far from 10 targets."""
        monitor = KLMonitor(per_step(), window=2)
        assert monitor(steps(*[0.3] * 100)) == []
        assert names(monitor(steps(6.0, 6.0))) == ["kl_far_above"]
        assert monitor.counts["kl_above"] == (0, 0)


class TestAdvice:
    def test_says_the_figures_and_what_to_do(self):
        controller = per_step()
        monitor = KLMonitor(controller, window=1)
        controller.coeff.fill_(1.5)
        (message,) = monitor(steps(1.9, 2.0, 2.1))
        # the standard error of 1.9, 2.0, 2.1: 0.1 * sqrt(1 / 3)
        assert str(message).startswith(
            "KL is 2 +- 0.058 nats per step over the last 1 batches (3 steps), 4 times the target "
            "of 0.5; the coefficient was 1.5. The controller raises the coefficient until"
        )
        figures = {"kl": 2.0, "standard_error": 0.1 * math.sqrt(1 / 3), "count": 3, "target": 0.5}
        assert_close(dict(message.figures), figures)
        controller.coeff.fill_(1.25)
        (message,) = monitor(steps(0.0, 0.0))
        assert "The controller lowers the coefficient until" in str(message)

    def test_a_controller_without_an_update_is_named(self):
        controller = per_step()
        for kl in (2.0, 0.0):
            (message,) = KLMonitor(controller, window=1)(steps(kl))
            assert "has not moved the coefficient in these" in message
        monitor = KLMonitor(controller, window=1)
        controller.coeff.fill_(2.0)
        restarted = KLMonitor(controller, window=1)  # the coefficient of before the restart
        restarted.load_state_dict(monitor.state_dict())
        at_bound = KLMonitor(per_step(max_coeff=1.0), window=1)
        for message in (*restarted(steps(2.0)), at_bound(steps(2.0))[1]):
            assert "The controller raises the coefficient" in message

    def test_a_plan_is_no_update_and_reaches_no_bound(self):
        controller = ExponentialKLController("plan", 0.5, per="step")
        monitor = KLMonitor(controller, window=1)
        assert monitor(steps(5.0)) == []
        controller.observe_rewards(torch.randn(300, generator=torch.Generator().manual_seed(0)))
        assert not controller.planning
        (message,) = monitor(steps(0.1))
        assert "The controller has not moved the coefficient in these" in str(message)

    def test_a_message_is_a_text(self):
        (message,) = KLMonitor(per_step(max_coeff=1.0))(steps(0.5))
        assert message == str(message) == "\n".join([message])
        for same in (copy.deepcopy(message), pickle.loads(pickle.dumps(message))):
            assert (same, same.condition, same.figures) == (message, "coeff_at_max", {"coeff": 1.0})


class TestTrajectories:
    def test_sums_of_finished_trajectories(self):
        # 0.5 + 0.7 ends; 0.1 goes on in the next batch and ends there with 1.5 more.
        # The mean is (1.2 + 1.6) / 2 = 1.4.
        monitor = KLMonitor(per_trajectory(), window=2)
        ids = TensorDict(traj_ids=torch.tensor([[0, 0, 1]]), batch_size=(1, 3))
        first = step_of(kl=[0.5, 0.7, 0.1], done=[False, True, False])
        second = step_of(kl=[1.0, 0.5, 0.2], done=[False, True, False])
        first["collector"], second["collector"] = ids, ids + torch.tensor([[1, 1, 1]])
        assert monitor(first) == []
        nothing_ended = step_of(kl=[9.0, 9.0], done=[False, False])
        assert KLMonitor(per_trajectory(), window=1)(nothing_ended) == []
        (message,) = monitor(second)
        assert message.condition == "kl_above"
        assert_close(message.figures["kl"], 1.4)
        assert "nats per trajectory over the last 2 batches (2 trajectories)" in str(message)

    @pytest.mark.parametrize("value_key", ["state_value", "v"])
    def test_the_sums_are_those_of_the_stack_also_after_a_critic_wrote_its_values(self, value_key):
        policy = moved(make_actor())
        stack = KLConstrainedTransform(make_actor(), 0.1)
        batches = collect(WalkEnv((4,), longest=9), policy, frames=12, batches=8, postproc=stack)
        actor = policy if value_key == "v" else None
        monitor, totals = KLMonitor(per_trajectory(), actor=actor, window=12), []
        for n, batch in enumerate(batches):
            for step in (batch, batch["next"]):  # the critic has other weights in each batch
                step[value_key] = (n + 1) * step["observation"].sum(-1, keepdim=True)
            monitor(batch)
            totals.append(batch["next", "episode_kl"][batch["next", "terminated"]].double())
        pools = monitor.state_dict()["pools"]
        assert [count for count, _, _ in pools] == [len(total) for total in totals]
        expected = [total.sum().item() for total in totals]
        assert_close([total for _, total, _ in pools], expected, rtol=0, atol=1e-5)
        assert sum(map(len, totals)) > 10

    def test_a_step_that_is_not_finite_takes_its_trajectory_out(self):
        monitor = KLMonitor(per_trajectory(), window=1)
        kl = [0.5, math.nan, 0.7, 0.25]
        batch = step_of(kl=kl, done=[False, True, False, True])
        assert names(monitor(batch)) == ["kl_not_finite"]
        ((count, total, _),) = monitor.state_dict()["pools"]
        assert (count, total) == (1, pytest.approx(0.95, rel=1e-6))


class TestCoefficient:
    def test_at_a_bound(self):
        for end, said in (("max", "upper bound, max_coeff = 1"), ("min", "lower bound, min_coeff")):
            (message,) = KLMonitor(per_step(**{f"{end}_coeff": 1.0}))(steps(0.5))
            assert (message.condition, message.figures) == (f"coeff_at_{end}", {"coeff": 1.0})
            assert said in message

    def test_elsewhere_it_is_not_reported(self):
        inside = per_step(min_coeff=1 - 1e-9, max_coeff=1 + 1e-9)
        for controller in (inside, ConstantKLController(0.0), AdaptiveKLController(1e-300, 9, 9)):
            assert KLMonitor(controller)(step_of(kl=[0.5], done=[True])) == []


class TestSamples:
    def test_near_the_reference_it_is_noise(self):
        (message,) = KLMonitor(ConstantKLController(0.1))(steps(-0.5, 0.25, 0.0, -0.25))
        # Squared deviations 0.140625, 0.140625, 0.015625, 0.015625: the variance is 0.104167 and
        # the error 0.1614.
        assert message.condition == "negative_noise"
        assert str(message).startswith(
            "The mean k1 of this batch is -0.125 +- 0.16 nats per step over 4 steps. This is "
            "sampling noise and not a bug: k1 takes either sign"
        )
        assert message.figures == {"kl": -0.125, "count": 4}
        (message,) = KLMonitor(ConstantKLController(0.1))(steps(-0.5))
        assert "is -0.5 nats per step over 1 steps. This is" in message
        assert KLMonitor(ConstantKLController(0.1))(steps(-1e-7, -1e-7)) == []  # rounding

    @pytest.mark.parametrize(("value", "noise"), [(math.inf, 0), (math.nan, 0), (-math.inf, 1)])
    def test_steps_that_are_not_finite(self, value, noise):
        """They are in no mean; one of -inf makes the mean negative."""
        monitor = KLMonitor(per_step(), window=1)
        found = monitor(steps(0.5, value, 0.5))
        assert names(found) == ["kl_not_finite", *["negative_noise"] * noise]
        assert str(found[0]).startswith("The KL of 1 of 3 steps is infinite or NaN")
        assert found[0].figures == {"steps": 1, "count": 3}
        assert monitor.state_dict()["pools"] == [[2, 1.0, 0.5]]

    def test_at_the_target_only_noise_is_ever_reported(self):
        """300 batches of 64 steps at a KL of 0.001: only negative means."""
        reference = Categorical(logits=torch.tensor([0.4, 0.0, -0.3, 0.2]).double())
        policy = Categorical(logits=reference.logits + 0.3 * torch.tensor([0.2, 0.05, 0.2, -0.2]))
        target = torch.distributions.kl_divergence(policy, reference).item()
        monitor = KLMonitor(per_step(target), window=10)
        for action in policy.sample((300, 64)):
            monitor(steps(*(policy.log_prob(action) - reference.log_prob(action)).tolist()))
        seen = {name for name, count in monitor.counts.items() if count.batches}
        assert seen == {"negative_noise"}


class TestEpisodes:
    def test_once_while_it_lasts_and_again_after_it_ended(self):
        monitor = KLMonitor(per_step(), window=1)
        seen = [names(monitor(steps(kl))) for kl in (2.0, 2.0, 0.5, 2.0, 0.0, 2.0)]
        assert seen == [["kl_above"], [], [], ["kl_above"], ["kl_below"], ["kl_above"]]
        assert monitor.counts["kl_above"] == (4, 3)
        assert set(monitor.counts) == set(CONDITIONS)

    def test_it_ends_when_it_was_missed_for_a_window(self):
        """A condition that comes and goes from batch to batch is one episode, not one per batch."""
        monitor, seen = KLMonitor(ConstantKLController(0.1), window=3), []
        for bad in map(int, "1001010001"):
            seen.append(names(monitor(steps(math.inf if bad else 0.5))))
        assert seen == [["kl_not_finite"], *[[]] * 8, ["kl_not_finite"]]
        assert monitor.counts["kl_not_finite"] == (4, 2)

    def test_a_restart_goes_on(self):
        """Message for message as without the restart, wherever it falls, open trajectories too."""
        levels = torch.randn(30, generator=torch.Generator().manual_seed(3)) + 0.6
        batches = []
        for n, level in enumerate(levels.tolist()):  # what begins in a batch ends in the next one
            batch = step_of(kl=[level, level + 0.01], done=[n > 0, False])
            batch["collector", "traj_ids"] = torch.tensor([[n, n + 1]])
            batches.append(batch)

        def run(cut: int) -> tuple[list[list[str]], Any]:
            monitor, seen = KLMonitor(per_trajectory(), window=1), []
            for index, batch in enumerate(batches):
                if index == cut:
                    buffer = io.BytesIO()
                    torch.save(monitor.state_dict(), buffer)
                    buffer.seek(0)
                    monitor = KLMonitor(per_trajectory(), window=1)
                    monitor.load_state_dict(torch.load(buffer, weights_only=True))
                seen.append([str(message) for message in monitor(batch)])
            return seen, monitor.counts

        whole = run(-1)
        assert sum(map(len, whole[0])) >= 8
        assert all(run(cut) == whole for cut in (0, 7, 20))

    @pytest.mark.parametrize("missing", ["action", "action_log_prob"])
    def test_a_call_that_raises_changes_nothing(self, missing):
        reference = make_actor()
        policy, controller = moved(reference), ExponentialKLController(1.0, 0.1)
        stack = KLConstrainedTransform(reference, controller)
        monitor = KLMonitor(controller, actor=policy, window=1)
        for batch in collect(WalkEnv((4,)), policy, frames=40, batches=2, postproc=stack):
            before = str(monitor.state_dict())
            with pytest.raises(KeyError, match=missing):
                monitor(batch.exclude(missing))
            assert str(monitor.state_dict()) == before
            monitor(batch)


class TestErrors:
    @pytest.mark.parametrize(
        ("kwargs", "error", "message"),
        [
            ({"controller": 0.1}, TypeError, "`controller` must be a KLController, got float"),
            ({"actor": torch.nn.Linear(1, 1)}, TypeError, "`actor` must be a probabilistic actor"),
            ({"keys": "kl"}, TypeError, "`keys` must be KLKeys, got str"),
            ({"window": 0}, ValueError, "`window` must be an int of at least 1, got 0"),
            ({"window": 1.5}, ValueError, "`window` must be an int of at least 1, got 1.5"),
            ({"window": True}, ValueError, "`window` must be an int of at least 1, got True"),
        ],
    )
    def test_arguments(self, kwargs, error, message):
        with pytest.raises(error, match=message):
            KLMonitor(**{"controller": per_step()} | kwargs)

    @pytest.mark.parametrize(
        ("controller", "keys", "next_keys", "error", "message"),
        [
            (per_step(), {}, [], KeyError, "'next' is not in the data: run the stack before"),
            (
                per_step(),
                {},
                ["reward"],
                KeyError,
                "'kl' is not in the data: .*KLKeys.*have reward",
            ),
            (per_step(), {"kl_estimate": "x"}, ["kl"], KeyError, "'x' is not in the data.*KLKeys"),
            (per_trajectory(), {}, ["kl"], RuntimeError, "batch of shape \\(2,\\) without a time"),
        ],
    )
    def test_batches(self, controller, keys, next_keys, error, message):
        batch = TensorDict({("next", key): torch.zeros(2, 1) for key in next_keys}, batch_size=2)
        with pytest.raises(error, match=message):
            KLMonitor(controller, keys=KLKeys(**keys))(batch)

    def test_a_state_of_something_else(self):
        with pytest.raises(KeyError, match="lacks \\['coeffs', 'conditions', 'traj"):
            KLMonitor(per_step()).load_state_dict({"n_batches": 1, "pools": []})


def test_reads_and_changes_nothing():
    policy = make_actor()
    stack = KLConstrainedTransform(make_actor(seed=1), per_step())
    batch = stack(play(WalkEnv((2,)), policy))
    before, coeff = batch.clone(), stack.controller.coeff.item()
    rng = torch.get_rng_state()
    KLMonitor(stack.controller, actor=policy)(batch)
    assert set(batch.keys(True, True)) == set(before.keys(True, True))
    assert (batch == before).all()
    assert stack.controller.coeff == coeff
    assert torch.equal(torch.get_rng_state(), rng)
    assert policy.training
