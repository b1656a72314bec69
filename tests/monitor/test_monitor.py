"""KLMonitor: each condition is reported if and only if it holds, once per episode, with advice."""

import io
import logging
import math
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from tensordict import TensorDict
from torch.distributions import Categorical

from tests.helpers import (
    WalkEnv,
    collect,
    make_actor,
    moved,
    play,
)
from tests.monitor.batches import names, per_step, steps
from torchrl_kl import (
    ConstantKLController,
    ExponentialKLController,
    KLConstrainedTransform,
    KLKeys,
    KLMonitor,
)
from torchrl_kl.monitor import CONDITIONS


def exact_negative_share(probs: torch.Tensor, values: torch.Tensor, n: int) -> float:
    """P(sum of n draws of `values` < 0), over all counts of 4 outcomes (multinomial)."""
    i, j, k = torch.meshgrid(*[torch.arange(n + 1, dtype=torch.float64)] * 3, indexing="ij")
    counts = torch.stack([i, j, k, n - i - j - k], -1).reshape(-1, 4)
    counts = counts[counts[:, 3] >= 0]
    log_chance = math.lgamma(n + 1) - torch.lgamma(counts + 1).sum(-1) + counts @ probs.log()
    return log_chance.exp()[counts @ values < 0].sum().item()


class TestEpisodes:
    def test_once_while_it_lasts_and_again_after_it_ended(self):
        monitor = KLMonitor(per_step(), window=1)
        seen = [names(monitor(steps(kl))) for kl in (2.0, 2.0, 0.5, 2.0, 0.0, 2.0)]
        assert seen == [["kl_above"], [], [], ["kl_above"], ["kl_below"], ["kl_above"]]
        assert monitor.counts["kl_above"] == (4, 3)
        assert monitor.counts["kl_below"] == (1, 1)

    def test_it_ends_when_it_was_missed_for_a_window(self):
        """A condition that comes and goes from batch to batch is one episode, not one per batch."""
        monitor, seen = KLMonitor(ConstantKLController(0.1), window=3), []
        for bad in map(int, "1001010001"):
            seen.append(names(monitor(steps(math.inf if bad else 0.5))))
        assert seen == [["kl_not_finite"], *[[]] * 8, ["kl_not_finite"]]
        assert monitor.counts["kl_not_finite"] == (4, 2)

    def test_each_condition_has_its_episodes(self):
        monitor = KLMonitor(per_step(max_coeff=1.0), window=1)
        assert names(monitor(steps(0.5))) == ["coeff_at_max"]
        assert names(monitor(steps(2.0))) == ["kl_above"]
        assert set(monitor.counts) == set(CONDITIONS)

    def test_a_restart_goes_on(self):
        """Message for message as without the restart, wherever it falls."""
        levels = (
            torch.randn(30, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) + 0.6
        )
        batches = [steps(kl, kl + 0.01) for kl in levels.tolist()]

        def run(cut: int) -> tuple[list[list[str]], Any]:
            monitor, seen = KLMonitor(per_step(), window=2), []
            for index, batch in enumerate(batches):
                if index == cut:
                    buffer = io.BytesIO()
                    torch.save(monitor.state_dict(), buffer)
                    buffer.seek(0)
                    monitor = KLMonitor(per_step(), window=2)
                    monitor.load_state_dict(torch.load(buffer, weights_only=True))
                seen.append([str(message) for message in monitor(batch)])
            return seen, monitor.counts

        whole = run(-1)
        assert sum(map(len, whole[0])) >= 8
        assert all(run(cut) == whole for cut in range(0, 30, 3))

    @pytest.mark.parametrize("missing", ["action", "observation", "action_log_prob"])
    def test_a_batch_that_is_refused_leaves_no_trace(self, missing):
        reference = make_actor()
        policy, controller = moved(reference), ExponentialKLController(1.0, 0.1)
        stack = KLConstrainedTransform(reference, controller)
        batches = collect(WalkEnv((4,)), policy, frames=40, batches=3, postproc=stack)
        monitors = [KLMonitor(controller, actor=policy, window=3, check_every=1) for _ in "12"]
        for batch in batches:
            with pytest.raises(KeyError, match=missing):
                monitors[0](batch.exclude(missing))
            assert monitors[0](batch) == monitors[1](batch)
        assert monitors[0].state_dict() == monitors[1].state_dict()

    def test_a_look_that_is_interrupted_leaves_no_trace(self):
        policy = make_actor()
        stack = KLConstrainedTransform(policy, ExponentialKLController(1.0, 0.1))
        monitor = KLMonitor(stack.controller, actor=policy, check_every=1)
        for batch in collect(WalkEnv((4,)), policy, frames=40, batches=2, postproc=stack):
            before = monitor.state_dict()
            handle = policy[0].module.register_forward_pre_hook(Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                monitor(batch)
            handle.remove()
            assert monitor.state_dict() == before
            monitor(batch)

    def test_a_shorter_window_keeps_the_latest(self):
        monitor, shorter = KLMonitor(per_step(), window=3), KLMonitor(per_step(), window=2)
        for kl in (0.25, 0.5, 0.75):
            monitor(steps(kl))
        shorter.load_state_dict(monitor.state_dict())
        shorter(steps(0.875))
        assert [pool[1] for pool in shorter.state_dict()["pools"]] == [0.75, 0.875]
        assert shorter.state_dict()["k1_sums"] == [0.75, 0.875]


class TestFinite:
    @pytest.mark.parametrize("value", [math.inf, math.nan])
    def test_counts_such_steps_and_leaves_them_out(self, value):
        monitor = KLMonitor(per_step(), window=1)
        (message,) = monitor(steps(0.5, value, 0.5))
        assert message.condition == "kl_not_finite"
        assert str(message).startswith("The KL of 1 of 3 steps is infinite or NaN")
        assert "the reference gives probability 0" in str(message)
        assert message.figures == {"steps": 1, "count": 3}
        assert monitor.state_dict()["pools"] == [[2, 1.0, 0.5]]

    def test_a_batch_with_an_infinite_step_is_not_negative(self):
        monitor = KLMonitor(ConstantKLController(0.1), window=2)
        assert names(monitor(steps(-20.0, math.inf))) == ["kl_not_finite"]
        assert names(monitor(steps(-20.0))) == ["sampler_disagrees"]


class TestNegative:
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

    def test_a_policy_that_is_its_reference_up_to_rounding_is_not_reported(self):
        assert KLMonitor(ConstantKLController(0.1))(steps(-1e-7, -1e-7)) == []

    def test_one_step_has_no_standard_error(self):
        (message,) = KLMonitor(ConstantKLController(0.1))(steps(-0.5))
        assert str(message).startswith(
            "The mean k1 of this batch is -0.5 nats per step over 1 steps. This is sampling noise"
        )

    @pytest.mark.parametrize(
        ("total", "expected"), [(-13.8, "negative_noise"), (-13.9, "sampler_disagrees")]
    )
    def test_beyond_chance_is_a_sum_that_comes_once_in_a_million(self, total, expected):
        # log(1e6) = 13.8155
        (message,) = KLMonitor(ConstantKLController(0.1))(steps(*[total / 8] * 8))
        assert message.condition == expected

    def test_beyond_chance_says_what_to_pass(self):
        (message,) = KLMonitor(ConstantKLController(0.1))(steps(*[-0.1] * 200))
        assert "at most one of a million batches" in str(message)
        assert "(temperature, top-k, masked actions). Pass `actor=`, so that" in str(message)

    def test_the_window_is_summed_too(self):
        monitor = KLMonitor(ConstantKLController(0.1), window=3)
        seen = [names(monitor(steps(-5.0))) for _ in range(3)]
        assert seen == [["negative_noise"], [], ["sampler_disagrees"]]

    def test_the_bound_by_enumeration(self):
        """P(sum of k1 <= -a) <= exp(-a) on the policy's own actions."""
        policy = Categorical(logits=torch.tensor([0.3, -1.0, 0.9]).double())
        reference = Categorical(logits=torch.tensor([-2.0, 1.0, 0.0]).double())
        grid = torch.cartesian_prod(*[torch.arange(3)] * 6)
        probability = policy.log_prob(grid).sum(-1).exp()
        total = (policy.log_prob(grid) - reference.log_prob(grid)).sum(-1)
        assert total.min() < -3
        for a in (0.5, 1.0, 2.0, 3.0):
            chance = probability[total <= -a].sum()
            assert 0 < chance <= math.exp(-a)


class TestHealthyRun:
    @pytest.mark.parametrize("scale", [0.3, 1.0, 3.0])
    def test_at_the_target_only_noise_is_ever_reported(self, scale):
        """300 batches of 64 steps at a KL of 0.001, 0.008 and 0.07: only negative means."""
        reference = Categorical(logits=torch.tensor([0.4, 0.0, -0.3, 0.2]).double())
        policy = Categorical(
            logits=reference.logits + scale * torch.tensor([0.2, 0.05, 0.2, -0.2]).double()
        )
        target = torch.distributions.kl_divergence(policy, reference).item()
        monitor = KLMonitor(per_step(target), window=10)
        for action in policy.sample((300, 64)):
            monitor(steps(*(policy.log_prob(action) - reference.log_prob(action)).tolist()))
        counts = monitor.counts
        assert {name for name, count in counts.items() if count.batches} <= {"negative_noise"}
        # How often the mean of 64 is negative, by the distribution of the counts of the actions.
        log_ratio = policy.logits - reference.logits
        share = exact_negative_share(policy.probs, log_ratio, 64)
        error = math.sqrt(300 * share * (1 - share))
        assert abs(counts["negative_noise"].batches - 300 * share) <= 4 * error + 1e-9

    def test_a_real_loop_with_all_checks_on(self):
        reference = make_actor()
        policy = moved(reference, scale=0.1)
        stack = KLConstrainedTransform(reference, 0.1)
        monitor = KLMonitor(
            stack.controller, actor=policy, reference=stack.reference, check_every=1
        )
        for batch in collect(WalkEnv((4,)), policy, frames=48, batches=25, postproc=stack):
            monitor(batch)
        assert monitor.counts["sampler_disagrees"] == (0, 0)


class TestInterface:
    def test_reads_and_changes_nothing(self):
        policy = make_actor()
        stack = KLConstrainedTransform(make_actor(seed=1), per_step())
        batch = stack(play(WalkEnv((2,)), policy))
        before, coeff = batch.clone(), stack.controller.coeff.item()
        rng = torch.get_rng_state()
        KLMonitor(stack.controller, actor=policy, reference=stack.reference)(batch)
        assert set(batch.keys(True, True)) == set(before.keys(True, True))
        assert (batch == before).all()
        assert stack.controller.coeff == coeff
        assert torch.equal(torch.get_rng_state(), rng)
        assert policy.training

    def test_messages_go_to_a_log(self, caplog):
        for message in KLMonitor(per_step(), window=1)(steps(2.0)):
            logging.getLogger("run").warning(message)
        assert "4 times the target" in caplog.text

    def test_keys_of_agents_are_found_by_the_actor_or_named(self):
        actor = make_actor(agents=True)
        policy = moved(actor)
        keys = KLKeys(reward=("agents", "reward"))
        controller = ExponentialKLController(1.0, 0.5, per="step")
        stack = KLConstrainedTransform(actor, controller, keys=keys)
        batch = stack(play(WalkEnv((2,), n_agents=3), policy))
        monitor = KLMonitor(controller, actor=policy, reference=stack.reference, keys=keys)
        alone = KLMonitor(controller, keys=KLKeys(kl=("agents", "kl")))
        for watcher in (monitor, alone):
            watcher(batch)
            n_values = watcher.state_dict()["pools"][0][0]
            assert n_values == batch["next", "agents", "kl"].numel() == 72
        assert monitor.counts["sampler_disagrees"] == (0, 0)

    @pytest.mark.parametrize("name", ["window", "check_every"])
    @pytest.mark.parametrize("value", [0, 1.5, True])
    def test_numbers_out_of_range(self, name, value):
        with pytest.raises(ValueError, match=f"`{name}` must be an int of at least 1, got {value}"):
            KLMonitor(per_step(), **{name: value})

    @pytest.mark.parametrize("value", [0.0, math.inf, math.nan])
    def test_tolerance_out_of_range(self, value):
        with pytest.raises(ValueError, match="`tolerance` must be finite and above 0"):
            KLMonitor(per_step(), tolerance=value)

    def test_wrong_types(self):
        wrong: Any = 0.1
        with pytest.raises(
            TypeError, match="`controller` must be a KLController, got float.*stack.controller"
        ):
            KLMonitor(wrong)
        with pytest.raises(TypeError, match="`actor` must be a probabilistic actor.*got Linear"):
            KLMonitor(per_step(), actor=torch.nn.Linear(1, 1))
        not_frozen: Any = make_actor()
        with pytest.raises(
            TypeError, match="`reference` must be a FrozenActor, got ProbabilisticActor.*reference`"
        ):
            KLMonitor(per_step(), actor=make_actor(), reference=not_frozen)
        stack = KLConstrainedTransform(make_actor(), 0.1)
        with pytest.raises(ValueError, match="`reference` needs `actor`"):
            KLMonitor(per_step(), reference=stack.reference)

    def test_missing_entries(self):
        with pytest.raises(
            KeyError, match="'next' is not in the data, got observation: pass a collector's batches"
        ):
            KLMonitor(per_step())(TensorDict(observation=torch.zeros(2), batch_size=2))
        with pytest.raises(KeyError, match="'kl' is not in the data, got reward: run the stack"):
            KLMonitor(per_step())(
                TensorDict(next=TensorDict(reward=torch.zeros(2), batch_size=2), batch_size=2)
            )
        with pytest.raises(
            KeyError,
            match="lacks \\['coeffs', 'conditions', 'evidence', 'k1_sums', 'texts'\\]",
        ):
            KLMonitor(per_step()).load_state_dict({"n_batches": 1, "pools": []})
