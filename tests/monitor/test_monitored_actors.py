"""KLMonitor with actors and references of every kind, and when it evaluates them."""

import copy
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import CompositeDistribution, TensorDictModule
from torch import nn
from torch.distributions import Categorical, Distribution, Normal, kl_divergence
from torch.testing import assert_close
from torchrl.envs import DTypeCastTransform
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import MaskedCategorical, OneHotCategorical, ProbabilisticActor, TanhNormal

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
    with_transforms,
)
from tests.monitor.samplers import (
    Tempered,
    actor_drawing,
    masked_actor,
    scored_again,
    watch,
)
from torchrl_kl import ConstantKLController, KLConstrainedTransform, KLKeys, KLMonitor
from torchrl_kl.monitor.diagnosis import find_cause
from torchrl_kl.monitor.sampler_check import default_tolerance

FLOAT8 = torch.float8_e4m3fn


@pytest.mark.parametrize("layer", [nn.Dropout(), nn.BatchNorm1d(N_OBS)])
def test_the_actor_is_evaluated_in_eval_mode(layer):
    # Noise of dropout would pass for another sampler; watching must not move statistics.
    actor, stack = make_actor(), KLConstrainedTransform(make_actor(), 0.1)
    actor[0].module = nn.Sequential(layer, actor[0].module)
    batch = stack(play(WalkEnv((2,)), actor.eval())).reshape(-1)
    before = copy.deepcopy(actor.train().state_dict())
    assert not [m for m in KLMonitor(stack.controller, actor=actor)(batch) if "ampler" in m.text]
    assert all(part.training for part in actor.modules())
    assert_close(actor.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("dtype", "tolerance", "found"),
    [
        (torch.float32, None, True),
        (torch.bfloat16, None, False),
        (torch.float16, None, False),
        (torch.bfloat16, 1e-3, True),
    ],
)
def test_half_precision_is_no_disagreement(dtype, tolerance, found):
    actor = make_actor().to(dtype)
    env = with_transforms(WalkEnv((4,)), DTypeCastTransform(torch.float32, dtype))
    batch = KLConstrainedTransform(actor, 0.1)(play(env, actor))
    batch["action_log_prob"] = batch["action_log_prob"].float() - 0.02
    monitor = KLMonitor(ConstantKLController(0.1), actor=actor, tolerance=tolerance)
    conditions = [message.condition for message in monitor(batch.reshape(-1))]
    assert ("sampler_disagrees" in conditions) == found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, FLOAT8])
def test_the_tolerance_follows_the_precision(dtype):
    few_bits = dtype in (torch.bfloat16, FLOAT8)
    assert default_tolerance(make_actor().to(dtype)) == (0.05 if few_bits else 1e-3)
    wrong: Any = "x"
    with pytest.raises(TypeError, match="`actor` must be a probabilistic actor"):
        KLMonitor(ConstantKLController(0.1), actor=wrong)


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

    def test_the_exact_kl_of_agents_is_that_of_all_where_their_k1_is(self):
        reference, env = make_actor(agents=True), WalkEnv((4,), n_agents=3, shared_reward=True)
        policy = moved(reference, scale=0.1)
        stack = KLConstrainedTransform(
            reference, 0.1, sum_agents=True, keys=KLKeys(reward="reward")
        )
        batch = next(
            batch
            for seed in range(50)
            if (batch := stack(play(env, policy, steps=4, seed=seed)))["next", "kl"].mean() < -1e-3
        )
        monitor = KLMonitor(
            stack.controller,
            actor=policy,
            reference=stack.reference,
            keys=KLKeys(kl="kl", reward="reward"),
        )
        (message,) = monitor(batch)
        with torch.no_grad():
            p, q = (
                actor.get_dist(batch.select(("agents", "observation"))).logits.log_softmax(-1)
                for actor in (policy, reference)
            )
        exact = (p.exp() * (p - q)).sum((-1, -2)).mean().item()
        assert_close(message.figures["exact_kl"], exact, rtol=1e-4, atol=1e-7)
        assert_close(message.figures["kl"], batch["next", "kl"].double().mean().item())

    @pytest.mark.filterwarnings("ignore:.*got invalid numbers")
    def test_a_mean_without_the_infinite_ones_is_not_judged(self):
        """Of actions of which the reference has a half, those that it has are likelier there."""
        policy, reference = make_actor(), masked_actor(make_actor())
        stack = KLConstrainedTransform(policy, 0.1, reference=reference, on_invalid="mask")
        for options in ({}, {"actor": policy}):
            batch = stack(play(WalkEnv((8,)), policy, steps=200))
            assert batch["next", "kl"].sum() < -100
            assert KLMonitor(stack.controller, **options)(batch) == []

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

    @pytest.mark.filterwarnings("ignore:.*the log-probs that the policy recorded differ")
    def test_the_references_own_actions_are_reported(self):
        """Drawn by the reference, scored by the policy: the mean k1 is -KL(reference || policy)."""
        reference = make_actor()
        policy = moved(reference, scale=0.3)
        stack = KLConstrainedTransform(reference, 0.1)
        batch = stack(scored_again(play(WalkEnv((8,)), reference, steps=200), policy))
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
        (message,) = monitor(second)
        assert message.condition == "negative_noise"
        assert "exact_kl" not in message.figures

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

    @pytest.mark.filterwarnings("ignore:.*the log-probs that the policy recorded differ")
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


@pytest.mark.parametrize(("loc", "told"), [(2.0, False), (8.0, True)])
def test_a_saturated_tanh_normal_is_told_once(loc, told):
    """Its actions are rounded to a bound after their log-prob was recorded."""

    def params(observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return observation + loc, torch.full_like(observation, 0.3)

    actor = ProbabilisticActor(
        TensorDictModule(params, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        distribution_kwargs={"tanh_loc": False},
        return_log_prob=True,
    )
    batch = TensorDict(observation=torch.zeros(64, 50, 1), batch_size=(64, 50))
    with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
        batch = actor(batch)
    done = (torch.arange(50) == 49).expand(64, 50).unsqueeze(-1)
    batch["next"] = TensorDict(done=done, kl=torch.zeros(64, 50, 1), batch_size=(64, 50))
    batch.names = [None, "time"]
    monitor = KLMonitor(ConstantKLController(0.1), actor=actor)
    messages = [message for _ in range(3) for message in monitor(batch)]
    found = [m for m in messages if m.condition == "sampler_disagrees"]
    assert len(found) == told
    assert all("An action at the bound of a squashed distribution" in m.text for m in found)
