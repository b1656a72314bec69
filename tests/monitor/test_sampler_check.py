"""A sampler and an actor that disagree: what KLMonitor finds in batches of real actors."""

import copy
import math
import re
from typing import Any

import pytest
import torch
from torch.distributions import Categorical
from torch.testing import assert_close
from torchrl.envs.utils import ExplorationType

from tests.helpers import (
    N_ACTIONS,
    WalkEnv,
    collect,
    make_actor,
    moved,
    play,
    sharp,
)
from tests.monitor.samplers import (
    INF,
    Both,
    Cooler,
    LeavesOutTheMostLikely,
    Tempered,
    TopOne,
    TopP,
    TopTwo,
    actor_drawing,
    masked_actor,
    scored_again,
    watch,
)
from torchrl_kl import ConstantKLController, KLConstrainedTransform, KLMonitor


# The transforms doubt such batches, too.
@pytest.mark.filterwarnings("ignore:.*the log-probs that the policy recorded differ")
class TestCauses:
    """Of recorded log-probs that are not the actor's."""

    @pytest.mark.parametrize(
        ("distribution", "said"),
        [
            (
                Tempered,
                "the recorded log-probs are the actor's at temperature 0.7. Divide",
            ),
            (TopOne, "the sampler takes the most likely action each time. Let it draw"),
            (TopTwo, "over its 2 most likely actions: top-k sampling with k = 2"),
            (TopP, "top-p sampling. Sample without top-p"),
            (
                LeavesOutTheMostLikely,
                "no recorded log-prob is smaller than the actor's: the sampler seems to draw from",
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
            (TopTwo, "the actor gives probability 0 to "),
            (LeavesOutTheMostLikely, "the actor gives probability 0 to "),
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
        found = re.search(r"the actor gives probability 0 to (\d+) of (\d+) recorded", message.text)
        assert found
        assert 0 < int(found[1]) < int(found[2])
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
        batch = scored_again(
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


class TestPooling:
    """Temperature 0.8 with log-probs recorded at 1: no batch of 200 steps shows it alone."""

    def run(self, monitor: KLMonitor, n_batches: int, sampler: Any = None, keep: Any = ()) -> list:
        """The batches in which the sampler was reported; `keep`: what is not recorded."""
        actor, stack = self.actor(), KLConstrainedTransform(moved(self.actor(), seed=5), 0.1)
        played = play(WalkEnv((n_batches,)), sampler or actor_drawing(Cooler, actor), steps=200)
        batch = stack(scored_again(played, actor)).exclude(*keep)
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
        batch = stack(scored_again(played, actor))
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

    @pytest.mark.parametrize("scale", [0.25, 1.0, 9.0])
    def test_modes_are_no_low_temperature(self, scale):
        actor = sharp(make_actor(), scale=scale)
        stack = KLConstrainedTransform(moved(self.actor(), seed=5), 0.1)
        played = play(WalkEnv((200,)), actor_drawing(TopOne, actor), steps=8)
        batch, said = stack(scored_again(played, actor)), []
        monitor = KLMonitor(ConstantKLController(0.1), actor=actor)
        unsaid = copy.deepcopy(monitor.state_dict()["conditions"])
        for one in batch.unbind(0):
            said += [m.text for m in monitor(one) if "disagrees" in m.condition]
            monitor.load_state_dict(monitor.state_dict() | {"conditions": unsaid})  # say it again
        assert len(said) > 100
        assert all("They look like the most likely action each time" in text for text in said)

    def test_clean_batches_are_not_reported(self):
        monitor = KLMonitor(ConstantKLController(0.1), actor=self.actor())
        assert self.run(monitor, 60, sampler=self.actor()) == []
        assert monitor.state_dict()["evidence"]["n_batches"] == 60

    def test_the_evidence_survives_a_restart(self):
        whole = KLMonitor(ConstantKLController(0.1), actor=self.actor())
        (index,) = self.run(whole, 30)
        actor, stack = self.actor(), KLConstrainedTransform(moved(self.actor(), seed=5), 0.1)
        played = play(WalkEnv((30,)), actor_drawing(Cooler, actor), steps=200)
        batches = stack(scored_again(played, actor)).unbind(0)
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

    def test_recorded_parameters_that_are_not_valid_are_not_pooled(self):
        class Strict(Categorical):
            def __init__(self, logits):
                super().__init__(logits=logits, validate_args=True)

        actor = actor_drawing(Strict, make_actor())
        batch = KLConstrainedTransform(actor, 0.1)(play(WalkEnv((8,)), actor))
        batch["next", "kl"] = torch.ones(8, 12, 1)
        batch["collector", "mask"] = torch.arange(12).expand(8, 12) < 5
        batch["logits"] = batch["logits"].masked_fill(~batch["collector", "mask"][..., None], INF)
        monitor = KLMonitor(ConstantKLController(0.1), actor=actor)
        assert monitor(batch) == monitor(batch) == []
        assert monitor.state_dict()["evidence"]["n_batches"] == 1  # where it was evaluated

    def test_a_uniform_policy_is_not_reported(self):
        """The last layer is often zero at the start: no action is then the most likely one."""
        actor = sharp(make_actor(), scale=0.0)
        stack = KLConstrainedTransform(actor, 0.1)
        monitor = KLMonitor(stack.controller, actor=actor, reference=stack.reference)
        assert monitor(stack(play(WalkEnv((8,)), actor, steps=50))) == []
