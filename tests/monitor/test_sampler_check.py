"""A sampler and an actor that disagree: what KLMonitor finds with real actors."""

import math
import re
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import CompositeDistribution, TensorDictModule
from torch import nn
from torch.distributions import Categorical, Distribution, Normal, kl_divergence
from torch.testing import assert_close
from torchrl.envs.utils import ExplorationType
from torchrl.modules import MaskedCategorical, OneHotCategorical

from tests.helpers import (
    N_ACTIONS,
    N_OBS,
    WalkEnv,
    collect,
    make_actor,
    memory_of,
    moved,
    play,
    probabilistic_actor,
    sharp,
    with_transforms,
)
from torchrl_kl import ConstantKLController, KLConstrainedTransform, KLKeys, KLMonitor
from torchrl_kl.monitor.diagnosis import find_cause

INF = math.inf


class Tempered(Categorical):
    def __init__(self, logits):
        super().__init__(logits=logits / 0.7)


class TopTwo(Categorical):
    def __init__(self, logits):
        super().__init__(logits=logits.masked_fill(logits < logits.topk(2).values[..., -1:], -INF))


class TopP(Categorical):
    """The most likely actions until 0.8 is reached."""

    def __init__(self, logits):
        ranked = logits.softmax(-1).sort(-1, descending=True)
        before = ranked.values.cumsum(-1) - ranked.values
        keep = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, ranked.indices, before < 0.8)
        super().__init__(logits=logits.masked_fill(~keep, -INF))


class LeavesOutTheMostLikely(Categorical):
    """A mask that no entry of the data shows."""

    def __init__(self, logits):
        super().__init__(logits=logits.masked_fill(logits == logits.amax(-1, keepdim=True), -INF))


class Both(Categorical):
    """Temperature and top-k at once."""

    def __init__(self, logits):
        super().__init__(logits=TopTwo(logits / 0.7).logits)


class LogitsAndMask(nn.Module):
    """Every action but one, which depends on the observation."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(N_OBS, N_ACTIONS)

    def forward(self, observation):
        forbidden = (observation.sum(-1).abs() * 10).long() % N_ACTIONS
        return self.linear(observation), nn.functional.one_hot(forbidden, N_ACTIONS) == 0


def actor_drawing(distribution: Any, like: Any) -> Any:
    """An actor with the weights of `like` and another distribution."""
    return probabilistic_actor(
        like[0],
        in_keys=["logits"],
        out_keys=["action"],
        distribution_class=distribution,
        return_log_prob=True,
    )


def masked_actor(like: Any) -> Any:
    net: Any = LogitsAndMask()
    net.linear.load_state_dict(like[0].module.state_dict())
    return probabilistic_actor(
        TensorDictModule(net, ["observation"], ["logits", "allowed"]),
        in_keys={"logits": "logits", "mask": "allowed"},
        out_keys=["action"],
        distribution_class=MaskedCategorical,
        return_log_prob=True,
    )


def watch(sampler: Any, scorer: Any, *, steps: int = 60, env: Any = None, **kwargs) -> Any:
    """What a monitor with the scorer as actor and reference says of one batch."""
    stack = KLConstrainedTransform(scorer, 0.0)
    batch = stack(play(env or WalkEnv((8,)), sampler, steps=steps))
    monitor = KLMonitor(stack.controller, actor=scorer, reference=stack.reference, **kwargs)
    return [message for message in monitor(batch) if message.condition == "sampler_disagrees"]


class TestCauses:
    """Of recorded log-probs that are not the actor's."""

    @pytest.mark.parametrize(
        ("distribution", "said"),
        [
            (
                Tempered,
                "the recorded log-probs are the actor's at temperature 0.7. Divide",
            ),
            (TopTwo, "over its 2 most likely actions: top-k sampling with k = 2"),
            (TopP, "top-p sampling. Sample without top-p"),
            (
                LeavesOutTheMostLikely,
                "no recorded log-prob is smaller than the actor's: the sampler seems to mask",
            ),
            (Both, "it cannot be told from the numbers"),
        ],
    )
    def test_of_a_sampler(self, distribution, said):
        actor = make_actor()
        (message,) = watch(actor_drawing(distribution, actor), actor)
        assert message.text.startswith(
            "The sampler and the actor disagree: recorded log-probs differ from those"
        )
        assert f"Cause: {said}" in message.text or said in message.text
        assert message.text.endswith(
            "the KL is that of another policy than the one that is trained."
        )

    @pytest.mark.parametrize(
        ("distribution", "said"),
        [
            (Tempered, "at temperature 1.43"),  # 1 / 0.7
            (TopTwo, "the actor gives probability 0 to"),
            (LeavesOutTheMostLikely, "the actor gives probability 0 to"),
        ],
    )
    def test_of_a_scorer(self, distribution, said):
        actor = make_actor()
        (message,) = watch(actor, actor_drawing(distribution, actor))
        assert said in message.text

    def test_top_p_is_bracketed(self):
        actor = make_actor()
        (message,) = watch(actor_drawing(TopP, actor), actor)
        low, high = message.text.split("p between ")[1].split(": top-p")[0].split(" and ")
        assert 0.5 < float(low) <= 0.8 <= float(high) < 1

    def test_a_mask_in_the_data_is_named(self):
        actor = make_actor()
        (message,) = watch(masked_actor(actor), actor)
        assert (
            "over the actions that 'allowed' allows. Let the actor read that mask too"
            in message.text
        )

    def test_a_sampler_without_the_scorers_mask(self):
        actor = make_actor()
        (message,) = watch(actor, masked_actor(actor))
        assert "the actor gives probability 0 to" in message.text
        assert "it masks actions that the sampler may draw" in message.text

    def test_weights_that_moved_on_cannot_be_told(self):
        actor = make_actor()
        (message,) = watch(actor, moved(actor))
        assert (
            "it cannot be told from the numbers. Were the actor's weights updated" in message.text
        )
        assert "call the monitor before the update" in message.text

    def test_figures(self):
        actor = make_actor()
        torch.manual_seed(0)
        batch = play(WalkEnv((8,)), actor)
        batch["action_log_prob"][0, :3] += torch.tensor([0.25, -0.5, 0.0])
        (message,) = KLMonitor(ConstantKLController(0.1), actor=actor)(
            KLConstrainedTransform(actor, 0.1)(batch)
        )
        assert "by up to 0.5 nats, on 2.1% of 96 steps" in message.text
        assert_close(
            message.figures, {"share": 2 / 96, "largest_difference": 0.5}, rtol=1e-5, atol=1e-5
        )

    @pytest.mark.parametrize(("error", "n_messages"), [(0.9e-3, 0), (1.1e-3, 1)])
    def test_tolerance(self, error, n_messages):
        actor = make_actor()
        batch = play(WalkEnv((8,)), actor)
        batch["action_log_prob"][3, 3] += error
        monitor = KLMonitor(ConstantKLController(0.1), actor=actor)
        assert len(monitor(KLConstrainedTransform(actor, 0.1)(batch))) == n_messages

    def test_padding_is_not_compared(self):
        actor = make_actor()
        batch = play(WalkEnv((8,)), actor)
        batch["action_log_prob"][:, 5:] = math.nan
        batch["collector", "mask"] = torch.arange(12).expand(8, 12) < 5
        monitor = KLMonitor(ConstantKLController(0.1), actor=actor)
        assert monitor(KLConstrainedTransform(actor, 0.1)(batch)) == []

    def test_a_batch_of_padding_alone_has_nothing_to_compare(self):
        actor = make_actor()
        batch = play(WalkEnv((8,)), actor)
        batch["action_log_prob"] += 1.0
        batch["collector", "mask"] = torch.zeros(8, 12, dtype=torch.bool)
        batch["next", "kl"] = torch.ones(8, 12, 1)
        assert KLMonitor(ConstantKLController(0.1), actor=actor)(batch) == []

    def test_frames_of_a_random_policy(self):
        actor = make_actor()
        batch = play(WalkEnv((8,)), actor)
        batch["action"] = torch.randint(N_ACTIONS, (8, 12))
        batch["action_log_prob"] = torch.zeros(8, 12)
        (message, *_) = KLMonitor(ConstantKLController(0.1), actor=actor)(
            KLConstrainedTransform(actor, 0.1)(batch)
        )
        assert (
            "every recorded log-prob is 0, which a collector writes for the random actions"
            in message.text
        )

    def test_continuous_actions_are_compared_without_a_cause(self):
        actor = make_actor("normal")
        (message,) = watch(actor, moved(actor), env=WalkEnv((8,), discrete=False))
        assert "Do both use the same temperature, bounds, masks and weights?" in message.text
        assert watch(actor, actor, env=WalkEnv((8,), discrete=False)) == []


class TestActions:
    """Of actions that were not drawn from the distribution whose log-probs are recorded."""

    @staticmethod
    def scored_again(batch: Any, actor: Any) -> Any:
        """The same actions, with the log-probs of another actor."""
        with torch.no_grad():
            batch["action_log_prob"] = actor.get_dist(batch.select("observation")).log_prob(
                batch["action"]
            )
        return batch

    @pytest.mark.parametrize(
        ("distribution", "said"),
        [
            (Tempered, "a lower temperature (near 0.7), top-k or top-p sampling"),
            (TopTwo, "top-k sampling with k near 2"),
        ],
    )
    def test_a_sampler_that_another_scores(self, distribution, said):
        actor = make_actor()
        stack = KLConstrainedTransform(moved(actor, seed=5), 0.1)
        batch = self.scored_again(
            play(WalkEnv((8,)), actor_drawing(distribution, actor), steps=200), actor
        )
        (message,) = KLMonitor(stack.controller, actor=actor)(stack(batch))
        assert message.condition == "sampler_disagrees"
        assert (
            f"the actions were not drawn from it. They look like {said}: by chance" in message.text
        )
        assert message.figures["evidence"] > math.log(1e6)

    @pytest.mark.filterwarnings("ignore")
    def test_modes_are_reported(self):
        actor = make_actor()
        stack = KLConstrainedTransform(moved(actor, seed=5), 0.1)
        batches = collect(
            WalkEnv((8,)),
            actor,
            frames=400,
            batches=1,
            postproc=stack,
            exploration_type=ExplorationType.DETERMINISTIC,
        )
        (message,) = KLMonitor(stack.controller, actor=actor)(batches[0])
        assert "They look like the most likely action each time" in message.text
        assert "ExplorationType.RANDOM" in message.text


class Cooler(Categorical):
    def __init__(self, logits):
        super().__init__(logits=logits / 0.8)


class TestPooling:
    """Temperature 0.8 with log-probs recorded at 1: no batch of 200 steps shows it alone."""

    def run(self, monitor: KLMonitor, n_batches: int, sampler: Any = None, keep: Any = ()) -> list:
        """The batches in which the sampler was reported; `keep`: what is not recorded."""
        actor, stack = self.actor(), KLConstrainedTransform(moved(self.actor(), seed=5), 0.1)
        played = play(WalkEnv((n_batches,)), sampler or actor_drawing(Cooler, actor), steps=200)
        batch = stack(TestActions.scored_again(played, actor)).exclude(*keep)
        return [
            index
            for index, one in enumerate(batch.unbind(0))
            for message in monitor(one)
            if message.condition == "sampler_disagrees"
        ]

    def actor(self) -> Any:
        return sharp(make_actor(), scale=0.25)

    def test_it_is_found_within_30_batches(self):
        monitor = KLMonitor(ConstantKLController(0.1), actor=self.actor())
        (index,) = self.run(monitor, 30)
        assert 3 < index < 30

    def test_a_policy_that_records_no_parameters_is_pooled_when_it_is_evaluated(self):
        monitor = KLMonitor(ConstantKLController(0.1), actor=self.actor(), check_every=1)
        assert self.run(monitor, 30, keep=["logits"])
        monitor = KLMonitor(ConstantKLController(0.1), actor=self.actor(), check_every=10)
        assert self.run(monitor, 30, keep=["logits"]) == []
        assert monitor.state_dict()["evidence"]["n_batches"] == 3

    def test_says_so(self):
        monitor = KLMonitor(ConstantKLController(0.1), actor=self.actor())
        actor, stack = self.actor(), KLConstrainedTransform(moved(self.actor(), seed=5), 0.1)
        played = play(WalkEnv((30,)), actor_drawing(Cooler, actor), steps=200)
        batch = stack(TestActions.scored_again(played, actor))
        said = [m for one in batch.unbind(0) for m in monitor(one) if "disagrees" in m.condition]
        assert len(said) == 1  # one episode
        n_batches = monitor.state_dict()["evidence"]["n_batches"]
        assert n_batches == 30
        assert re.search(
            r"look like a lower temperature \(near 0\.\d\), top-k or top-p sampling: by chance "
            r"\d+ batches would show this with a probability of at most 1e-6",
            said[0].text,
        )
        assert said[0].figures["evidence"] >= math.log(2e6)

    def test_clean_batches_are_not_reported(self):
        monitor = KLMonitor(ConstantKLController(0.1), actor=self.actor())
        assert self.run(monitor, 60, sampler=self.actor()) == []
        assert monitor.state_dict()["evidence"]["n_batches"] == 60

    def test_the_evidence_survives_a_restart(self):
        whole = KLMonitor(ConstantKLController(0.1), actor=self.actor())
        (index,) = self.run(whole, 30)
        actor, stack = self.actor(), KLConstrainedTransform(moved(self.actor(), seed=5), 0.1)
        played = play(WalkEnv((30,)), actor_drawing(Cooler, actor), steps=200)
        batches = stack(TestActions.scored_again(played, actor)).unbind(0)
        first = KLMonitor(ConstantKLController(0.1), actor=self.actor())
        for batch in batches[:index]:
            assert not [m for m in first(batch) if "disagrees" in m.condition]
        second = KLMonitor(ConstantKLController(0.1), actor=self.actor())
        second.load_state_dict(first.state_dict())
        assert [m for m in second(batches[index]) if "disagrees" in m.condition]

    def test_a_batch_that_is_chosen_for_its_negative_mean_is_not_pooled(self):
        actor = self.actor()
        stack = KLConstrainedTransform(actor, 0.1)
        batch = stack(play(WalkEnv((8,)), actor)).exclude("logits")
        monitor = KLMonitor(ConstantKLController(0.1), actor=actor, check_every=2)
        for sign, n_batches in ((1, 1), (-1, 1), (-1, 2), (1, 2)):
            batch["next", "kl"] = torch.full((8, 12, 1), 1e-3 * sign)
            monitor(batch)
            assert monitor.state_dict()["evidence"]["n_batches"] == n_batches

    def test_a_uniform_policy_is_not_reported(self):
        """The last layer is often zero at the start: no action is then the most likely one."""
        actor = sharp(make_actor(), scale=0.0)
        stack = KLConstrainedTransform(actor, 0.1)
        monitor = KLMonitor(stack.controller, actor=actor, reference=stack.reference)
        assert monitor(stack(play(WalkEnv((8,)), actor, steps=50))) == []


class TestNegative:
    def negative_batch(self, policy, stack, steps=4) -> Any:
        for seed in range(50):
            batch = stack(play(WalkEnv((4,)), policy, steps=steps, seed=seed))
            if batch["next", "kl"].mean() < -1e-3:
                return batch
        raise AssertionError("no batch came out negative")

    def test_noise_comes_with_the_exact_kl(self):
        reference = make_actor()
        policy = moved(reference, scale=0.1)
        stack = KLConstrainedTransform(reference, 0.1)
        batch = self.negative_batch(policy, stack)
        monitor = KLMonitor(stack.controller, actor=policy, reference=stack.reference)
        (message,) = monitor(batch)
        with torch.no_grad():
            p, q = (
                actor.get_dist(batch.select("observation")).logits.log_softmax(-1)
                for actor in (policy, reference)
            )
        exact = (p.exp() * (p - q)).sum(-1).mean().item()
        assert message.condition == "negative_noise"
        assert_close(message.figures["exact_kl"], exact, rtol=1e-4, atol=1e-7)
        assert (
            f"(the exact KL on the same states is {exact:.3g}). This is sampling noise"
            in message.text
        )

    def test_the_exact_kl_leaves_padding_out(self):
        reference = make_actor()
        policy = moved(reference, scale=0.1)
        stack = KLConstrainedTransform(reference, 0.1)
        batch = self.negative_batch(policy, stack)
        (whole,) = KLMonitor(stack.controller, actor=policy, reference=stack.reference)(batch)
        padded: Any = torch.cat([batch, batch.clone()], 1)
        padded["observation"][:, 4:] += 10.0
        padded["collector", "mask"] = torch.arange(8).expand(4, 8) < 4
        (message,) = KLMonitor(stack.controller, actor=policy, reference=stack.reference)(padded)
        assert_close(message.figures, whole.figures, rtol=1e-5, atol=1e-7)

    def test_without_a_reference_it_is_noise_all_the_same(self):
        reference = make_actor()
        policy = moved(reference, scale=0.1)
        stack = KLConstrainedTransform(reference, 0.1)
        (message,) = KLMonitor(stack.controller, actor=policy)(self.negative_batch(policy, stack))
        assert message.condition == "negative_noise"
        assert "exact KL on" not in message.text

    @pytest.mark.parametrize("kind", ["categorical", "normal"])
    def test_a_reference_in_bfloat16(self, kind):
        reference = make_actor(kind)
        policy = moved(reference, scale=0.1)
        stack = KLConstrainedTransform(reference, 0.1)
        batch = stack(play(WalkEnv((4,), discrete=kind != "normal"), policy, steps=4))
        batch["next", "kl"] = -batch["next", "kl"].abs() * 0.01
        stack.reference.bfloat16()
        monitor = KLMonitor(stack.controller, actor=policy, reference=stack.reference)
        (message,) = monitor(batch)
        with torch.no_grad():
            p = policy.get_dist(batch.select("observation"))
            q = reference.bfloat16().get_dist(batch.select("observation").bfloat16())
        if kind == "normal":
            expected = kl_divergence(p, Normal(q.loc.float(), q.scale.float())).sum(-1)
        else:
            expected = kl_divergence(p, Categorical(logits=q.logits.float()))
        assert message.condition == "negative_noise"
        assert expected.mean() > 5e-3
        # The same distributions: what is left are roundings of float32.
        assert_close(message.figures["exact_kl"], expected.mean().item(), rtol=1e-4, atol=1e-6)

    def test_continuous_actions_have_an_exact_kl_too(self):
        reference = make_actor("normal")
        policy = moved(reference, scale=0.05)
        stack = KLConstrainedTransform(reference, 0.1)
        env = WalkEnv((4,), discrete=False)
        batch = next(
            batch
            for seed in range(50)
            if (batch := stack(play(env, policy, steps=4, seed=seed)))["next", "kl"].mean() < -1e-3
        )
        (message,) = KLMonitor(stack.controller, actor=policy, reference=stack.reference)(batch)
        with torch.no_grad():
            p, q = (actor.get_dist(batch.select("observation")) for actor in (policy, reference))
        assert isinstance(p, Normal)
        variance = (p.scale / q.scale) ** 2
        exact = (
            ((variance + ((p.loc - q.loc) / q.scale) ** 2 - 1 - variance.log()) / 2)
            .sum(-1)
            .mean()
            .item()
        )
        assert_close(message.figures["exact_kl"], exact, rtol=1e-4, atol=1e-6)

    def test_the_references_own_actions_are_reported(self):
        """Drawn by the reference, scored by the policy: the mean k1 is -KL(reference || policy)."""
        reference = make_actor()
        policy = moved(reference, scale=0.3)
        stack = KLConstrainedTransform(reference, 0.1)
        batch = stack(TestActions.scored_again(play(WalkEnv((8,)), reference, steps=200), policy))
        assert batch["next", "kl"].mean() < 0
        (message,) = KLMonitor(stack.controller, actor=policy, reference=stack.reference)(batch)
        assert message.condition == "sampler_disagrees"
        assert "the exact KL on the same states is" in message.text
        assert "samples of the reference, demonstrations" in message.text
        (message,) = KLMonitor(stack.controller, actor=policy)(batch)
        assert (
            "one of a million batches. The recorded log-probs are the actor's, but" in message.text
        )


class TestWhen:
    def test_every_so_many_batches(self):
        """The disagreement begins in the third batch; the fourth is the next that is checked."""
        actor = make_actor()
        stack = KLConstrainedTransform(make_actor(seed=5), 0.1)
        honest = stack(play(WalkEnv((8,)), actor))
        tempered = stack(play(WalkEnv((8,)), actor_drawing(Tempered, actor)))
        assert (honest["next", "kl"].mean() > 0) & (tempered["next", "kl"].mean() > 0)
        monitor = KLMonitor(stack.controller, actor=actor, check_every=3, window=2)
        seen = [len(monitor(batch)) for batch in [honest] * 2 + [tempered] * 6]
        assert seen == [0, 0, 0, 1, 0, 0, 0, 0]
        assert monitor.counts["sampler_disagrees"] == (2, 1)  # batches 4 and 7, one episode

    def test_a_negative_batch_is_checked_out_of_turn(self):
        actor = make_actor()
        stack = KLConstrainedTransform(actor, 0.1)
        honest = stack(play(WalkEnv((8,)), actor))
        tempered = stack(play(WalkEnv((8,)), actor_drawing(Tempered, actor)))
        tempered["next", "kl"] = -tempered["next", "kl"].abs()
        monitor = KLMonitor(stack.controller, actor=actor, check_every=1000)
        assert monitor(honest) == []
        (message,) = monitor(tempered)
        assert "temperature 0.7" in message.text


class TestActors:
    @pytest.mark.parametrize("kind", ["lstm", "gru"])
    def test_a_recurrent_one_is_scored_over_time(self, kind):
        reference = make_actor(kind)
        policy = moved(reference)
        stack = KLConstrainedTransform(reference, 0.1)
        env = with_transforms(WalkEnv((4,)), *memory_of(policy))
        batches = collect(env, policy, frames=40, batches=2, postproc=stack)
        monitor = KLMonitor(stack.controller, actor=policy, check_every=1)
        for batch in batches:
            assert [m for m in monitor(batch) if m.condition == "sampler_disagrees"] == []
        batches[1]["action_log_prob"][0, 0] += 0.5
        assert [m.condition for m in monitor(batches[1])][-1] == "sampler_disagrees"

    def test_a_recurrent_reference_in_the_env_has_its_state_in_the_batch(self):
        reference = make_actor("lstm")
        policy = moved(reference, scale=0.05)
        stack = KLConstrainedTransform(reference, 0.1)
        env = with_transforms(WalkEnv((4,)), *memory_of(policy), stack)
        (batch,) = collect(env, policy, frames=40, batches=1)
        batch["next", "kl"] = -batch["next", "kl"].abs() - 0.01
        (message,) = KLMonitor(stack.controller, actor=policy, reference=stack.reference)(batch)
        assert 0 < message.figures["exact_kl"] < 0.1

    def test_elsewhere_it_must_be_known(self):
        """Rows that begin with their trajectories begin with a zero state; later rows have none."""
        reference = make_actor("lstm")
        policy = moved(reference)
        stack = KLConstrainedTransform(reference, 0.1)
        env = with_transforms(WalkEnv((4,)), *memory_of(policy))
        first, second = collect(env, policy, frames=40, batches=2, postproc=stack)
        inside = KLConstrainedTransform(reference, 0.1)
        carried, *_ = collect(
            with_transforms(WalkEnv((4,)), *memory_of(policy), inside),
            *(policy,),
            frames=40,
            batches=1,
        )
        monitor = KLMonitor(stack.controller, actor=policy, reference=stack.reference)
        for batch in (first, second, carried):
            batch["next", "kl"] = batch["next", "kl"].abs()
        assert monitor(second) == []  # only a negative mean asks for the exact KL
        for batch in (first, second, carried):
            batch["next", "kl"] = -batch["next", "kl"] * 0.01 - 1e-4
        (one,) = KLMonitor(stack.controller, actor=policy, reference=stack.reference)(first)
        (other,) = KLMonitor(stack.controller, actor=policy, reference=stack.reference)(carried)
        assert_close(one.figures["exact_kl"], other.figures["exact_kl"], rtol=1e-5, atol=1e-6)
        with pytest.raises(RuntimeError, match="a row of the batch begins inside a trajectory"):
            monitor(second)

    def test_one_hot_actions(self):
        actor = make_actor()
        one_hot = actor_drawing(OneHotCategorical, actor)
        batch = play(WalkEnv((8,)), actor)
        batch["action"] = nn.functional.one_hot(batch["action"], N_ACTIONS)
        batch["action_log_prob"] = batch["action_log_prob"] + 0.5
        batch["next", "kl"] = torch.ones(8, 12, 1)
        (message,) = KLMonitor(ConstantKLController(0.1), actor=one_hot)(batch)
        assert "Cause: no recorded log-prob is smaller" in message.text

    def test_of_several_heads_all_are_summed_or_one_is_named(self):
        class TwoHeads(nn.Linear):
            def forward(self, observation):
                logits = super().forward(observation)
                return logits, -logits

        actor = probabilistic_actor(
            TensorDictModule(
                TwoHeads(N_OBS, 4),
                ["observation"],
                [("params", "a", "logits"), ("params", "b", "logits")],
            ),
            in_keys=["params"],
            distribution_class=CompositeDistribution,
            distribution_kwargs={"distribution_map": {"a": Categorical, "b": Categorical}},
            return_log_prob=True,
        )
        batch = actor(TensorDict(observation=torch.randn(50, N_OBS), batch_size=50)).detach()
        batch["next"] = TensorDict(kl=torch.ones(50, 1), batch_size=50)
        batch["b_log_prob"] += 0.25
        said = {}
        for key in (None, "a_log_prob", "b_log_prob"):
            monitor = KLMonitor(ConstantKLController(0.1), actor=actor, keys=KLKeys(log_prob=key))
            said[key] = [str(message) for message in monitor(batch)]
        assert said["a_log_prob"] == []
        for key in (None, "b_log_prob"):  # by default the sum over the parts is compared
            assert "by up to 0.25 nats, on 100.0% of 50 steps" in said[key][0]
        batch["other"] = batch["a_log_prob"] + batch["b_log_prob"] - 0.25
        monitor = KLMonitor(ConstantKLController(0.1), actor=actor, keys=KLKeys(log_prob="other"))
        assert monitor(batch) == []  # of a policy that records one sum
        with pytest.raises(KeyError, match="'b_log_prob' is not in the data, got .*a_log_prob"):
            KLMonitor(ConstantKLController(0.1), actor=actor)(batch.exclude("b_log_prob"))

    @pytest.mark.parametrize("allowed", [[0, 2, 3], [1, 2, 0]])
    def test_logits_of_a_sparse_mask_are_not_in_the_order_of_actions(self, allowed):
        class Sparse(MaskedCategorical):
            def __init__(self, logits):
                indices = torch.tensor(allowed).expand(*logits.shape[:-1], 3)
                super().__init__(logits=logits, indices=indices)

        sparse = actor_drawing(Sparse, make_actor())
        batch = play(WalkEnv((8,)), sparse)
        batch["next", "kl"] = torch.ones(8, 12, 1)
        assert KLMonitor(ConstantKLController(0.1), actor=sparse)(batch) == []
        batch["action_log_prob"] += 0.5
        (message,) = KLMonitor(ConstantKLController(0.1), actor=sparse)(batch)
        assert "Do both use the same temperature" in message.text  # no cause is guessed

    def test_a_large_vocabulary_is_looked_at_in_part(self, monkeypatch):
        """A few evenly spaced steps are enough, as all of them have the cause."""
        actor = make_actor()
        monkeypatch.setattr("torchrl_kl.monitor.sampler_check._TABLE_SIZE", 100 * N_ACTIONS)
        sizes: list[int] = []
        monkeypatch.setattr(
            "torchrl_kl.monitor.diagnosis.find_cause",
            lambda *args: sizes.append(len(args[2])) or find_cause(*args),
        )
        (message,) = watch(actor_drawing(Tempered, actor), actor)
        assert "temperature 0.7" in message.text
        assert "of 480 steps" in message.text
        assert sizes == [96]  # every fifth of 480 steps: the fewest that leave at most 100

    def test_missing_entries(self):
        actor = make_actor()
        batch = KLConstrainedTransform(actor, 0.1)(play(WalkEnv((2,)), actor))
        for key, said in (
            ("action_log_prob", "'action_log_prob' is not in the data.*return_log_prob=True"),
            ("observation", "observation"),
            ("action", "'action' is not in the data"),
        ):
            with pytest.raises(KeyError, match=said):
                KLMonitor(ConstantKLController(0.1), actor=actor)(batch.exclude(key))

    def test_a_distribution_without_a_closed_form(self):
        """Without an exact KL the samples alone show that it is noise."""

        class Own(Distribution):
            has_rsample = False

            def __init__(self, loc, scale):
                self.normal = Normal(loc, scale)
                super().__init__(self.normal.batch_shape, validate_args=False)

            def sample(self, sample_shape=()):
                return self.normal.sample(sample_shape)

            def log_prob(self, value):
                return self.normal.log_prob(value)

        base = make_actor("normal")
        policy = probabilistic_actor(
            base[0],
            in_keys=["loc", "scale"],
            out_keys=["action"],
            distribution_class=Own,
            return_log_prob=True,
        )
        stack = KLConstrainedTransform(policy, 0.1)
        batch = stack(play(WalkEnv((4,), discrete=False), policy, steps=4))
        batch["next", "kl"] = torch.full((4, 4, 1), -0.1)
        (message,) = KLMonitor(stack.controller, actor=policy, reference=stack.reference)(batch)
        assert message.condition == "negative_noise"
        assert "exact KL on" not in message.text
