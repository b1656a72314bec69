"""Uses that would change numbers silently are errors, or are warned of once."""

import copy
import pickle
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torch import nn
from torch.distributions import Categorical as Distribution
from torch.distributions import Normal
from torch.testing import assert_close
from torchrl.collectors import Collector
from torchrl.data import (
    Bounded,
    Categorical,
    LazyTensorStorage,
    MultiStep,
    ReplayBuffer,
    Unbounded,
)
from torchrl.envs import MultiStepTransform, Reward2GoTransform, TransformedEnv
from torchrl.modules import AdditiveGaussianModule, EGreedyModule, MaskedCategorical

from tests.helpers import (
    N_ACTIONS,
    N_OBS,
    SpyController,
    WalkEnv,
    collect,
    compose,
    make_actor,
    memory_of,
    moved,
    play,
    policy,
    probabilistic_actor,
    sequence,
    with_transforms,
)
from torchrl_kl import (
    GPT,
    KLConstrainedTransform,
    KLDivergenceTransform,
    KLRewardTransform,
    ReferenceModelLogProbTransform,
    ResponseKLTransform,
    RewardAdjustmentTransform,
    kl_collector,
)
from torchrl_kl._tensordict import MASK_KEY


def parts(actor: Any, controller: Any) -> Any:
    return compose(
        ReferenceModelLogProbTransform(actor),
        KLDivergenceTransform(),
        RewardAdjustmentTransform(controller),
    )


MAKE = {"stack": KLConstrainedTransform, "preset": KLRewardTransform, "parts": parts}
every = pytest.mark.parametrize("make", MAKE.values(), ids=list(MAKE))


class TestAdvantages:
    """Advantages that were computed before the penalty do not contain it."""

    @every
    @pytest.mark.parametrize("key", ["advantage", "value_target", ("agents", "advantage")])
    def test_they_are_refused(self, make, key):
        batch = play(WalkEnv((2,)), policy(), 6).set(key, torch.zeros(2, 6, 1))
        with pytest.raises(RuntimeError, match=r"'(advantage|value_target)'.* already, computed"):
            make(make_actor(), 0.1)(batch)
        make(make_actor(), 0.1)(batch.exclude(key))

    def test_in_a_replay_buffer(self):
        buffer = ReplayBuffer(storage=LazyTensorStorage(24), batch_size=4)
        buffer.append_transform(KLConstrainedTransform(make_actor(), 0.1))
        batch = play(WalkEnv((2,)), policy(), 6).reshape(-1)
        buffer.extend(batch.set("advantage", torch.zeros(12, 1)))
        with pytest.raises(RuntimeError, match="'advantage' already"):
            buffer.sample()

    def test_of_responses(self):
        full = torch.tensor([[5, 6, 7, 8]])
        tokens = TensorDict(full=full, prompt=full[:, :2], batch_size=1)
        batch = TensorDict(tokens=tokens, next={"reward": torch.ones(1, 1)}, batch_size=1)
        batch["advantage"] = torch.zeros(1, 1)
        with pytest.raises(RuntimeError, match="'advantage' already"):
            ResponseKLTransform(GPT(11, 8), 0.1)(batch)
        assert ResponseKLTransform(GPT(11, 8), 0.0)(batch)["next", "kl"].abs() < 1e-5

    def test_a_measurement_leaves_them_right(self):
        batch = play(WalkEnv((2,)), policy(), 6).set("advantage", torch.zeros(2, 6, 1))
        assert (KLConstrainedTransform(make_actor(), 0.0)(batch)["next", "kl"] != 0).any()


class TestRewardsOfSeveralSteps:
    """MultiStep adds up the rewards of several steps, of which each has a KL."""

    refused: Any = {"match": r"'steps_to_next_obs' above 1: .* Use MultiStep after the KL"}

    def batch(self) -> Any:
        (batch,) = collect(WalkEnv((2,)), policy(), frames=16, batches=1)
        return batch

    @every
    def test_they_are_refused(self, make):
        batch, stack = self.batch(), make(make_actor(), 0.1)
        with pytest.raises(RuntimeError, **self.refused):
            stack(MultiStep(0.9, 3)(batch.clone()))
        one_step = stack(MultiStep(0.9, 1)(batch.clone()))
        assert_close(one_step["next", "reward"], stack(batch)["next", "reward"])

    @pytest.mark.parametrize("where", ["learner", "workers"])
    def test_as_a_postproc_too(self, where):
        stack = KLConstrainedTransform(make_actor(), SpyController())
        arguments: Any = {"postproc": MultiStep(0.9, 3), "where": where}
        arguments |= {"frames_per_batch": 16, "total_frames": 16}
        collector = kl_collector(Collector, lambda: WalkEnv((2,)), policy(), stack, **arguments)
        with pytest.raises(RuntimeError, **self.refused):
            next(iter(collector))

    @pytest.mark.parametrize("invert", [False, True])
    def test_in_a_replay_buffer_the_stack_is_last(self, invert):
        batch, stack = self.batch(), KLConstrainedTransform(make_actor(), 0.1)
        buffer = ReplayBuffer(storage=LazyTensorStorage(16, ndim=2), batch_size=16)
        buffer.append_transform(MultiStepTransform(3, 0.9))
        buffer.append_transform(stack, invert=invert)
        buffer.extend(batch.clone())
        if not invert:
            with pytest.raises(RuntimeError, **self.refused):
                buffer.sample()
            return
        expected = MultiStep(0.9, 3)(stack(batch))["next", "reward"]
        # The last steps wait for the rewards that follow them.
        assert_close(buffer[:]["next", "reward"], expected[:, : buffer[:].shape[1]])

    @pytest.mark.parametrize("first", [False, True])
    @every
    def test_rewards_to_go_of_a_buffer_whose_samples_are_penalized_are_refused(self, make, first):
        stack, to_go = make(make_actor(), 0.1), Reward2GoTransform(0.9)
        buffer = ReplayBuffer(storage=LazyTensorStorage(8), batch_size=8)
        for transform in (stack, to_go) if first else (to_go, stack):
            buffer.append_transform(transform)
        buffer.extend(play(WalkEnv((2,), longest=2), policy(), 4).reshape(-1))
        with pytest.raises(RuntimeError, match=r"Reward2GoTransform .* Penalize before: .*invert"):
            buffer.sample()

    def test_rewards_to_go_of_penalized_rewards_or_next_to_them(self):
        stack, batch = KLConstrainedTransform(make_actor(), 0.1), self.batch().reshape(-1)
        batch["next", "done"][-1] = True
        expected = stack(batch)
        for to_go, penalized in (
            (Reward2GoTransform(0.9), True),
            (Reward2GoTransform(0.9, out_keys=["reward_to_go"]), False),
        ):
            buffer = ReplayBuffer(storage=LazyTensorStorage(16), batch_size=16)
            buffer.append_transform(to_go)
            buffer.append_transform(copy.deepcopy(stack), invert=penalized)
            buffer.extend(batch.clone())
            buffer.sample()
            wanted = to_go.inv(expected.clone()) if penalized else expected
            assert_close(buffer[:]["next", "reward"], wanted["next", "reward"])


class TestRandomFrames:
    """`init_random_frames` gives steps that no policy made, with a log-prob of 0."""

    @pytest.mark.parametrize("make", [KLConstrainedTransform, parts], ids=["stack", "parts"])
    @pytest.mark.parametrize("kind", ["categorical", "tanh_normal"])
    def test_they_are_as_in_an_env(self, make, kind):
        actor, results, told = make_actor(kind), [], []
        behaviour, options = moved(actor), {"frames": 12, "batches": 2, "init_random_frames": 12}
        for place in ("env", "postproc"):
            controller = SpyController(per="step")
            transform: Any = make(actor, controller)
            penalty = transform if make is KLConstrainedTransform else transform[2]
            penalty.feed.update_every = 1 if place == "postproc" else 12
            env: Any = WalkEnv((2,), discrete=kind == "categorical")
            if place == "env":
                results.append(collect(TransformedEnv(env, transform), behaviour, **options))
            else:
                with pytest.warns(UserWarning, match="in 12 of 12 steps.*init_random_frames"):
                    results.append(collect(env, behaviour, postproc=transform, **options))
            told.append(controller.calls)
        for inside, outside in zip(*results, strict=True):
            for name in ("kl", "reward", "task_reward"):
                expected = inside["next", name]
                assert_close(outside["next", name], expected, rtol=1e-4, atol=1e-4)
        assert (results[0][0]["next", "kl"] == 0).all()
        assert [n for _, n in told[0]] == [n for _, n in told[1]] == [12]

    def test_they_may_be_mixed_with_others(self):
        batch = play(WalkEnv((2,)), policy(), 6)
        expected = KLConstrainedTransform(make_actor(), 0.1)(batch)
        for key in ("action_log_prob", "logits"):
            batch[key][0, 2] = 0
        transform = KLConstrainedTransform(make_actor(), 0.1)
        with pytest.warns(UserWarning, match="in 1 of 12 steps"):
            after = transform(batch)["next"]
        transform(batch)  # warnings are errors
        assert after["kl"][0, 2] == 0
        assert after["reward"][0, 2] == batch["next", "reward"][0, 2]
        others = torch.ones(2, 6, dtype=torch.bool)
        others[0, 2] = False
        assert_close(after["kl"][others], expected["next", "kl"][others], rtol=0, atol=0)

    def test_a_policy_that_is_certain_is_no_random_one(self):
        actor = policy()
        with torch.no_grad():
            actor[0].module.bias[1] = 1e3
        batch = play(WalkEnv((2,)), actor, 6)
        assert (batch["action_log_prob"] == 0).all()
        for each in (batch, batch.exclude("logits")):  # also where nothing tells
            assert (KLConstrainedTransform(make_actor(), 0.1)(each)["next", "kl"] > 0).all()

    @pytest.mark.parametrize("make", [KLConstrainedTransform, parts], ids=["stack", "parts"])
    def test_nor_is_one_whose_mask_leaves_one_action(self, make):
        # Its head begins with zeros: all that it writes there is 0.
        network = nn.Linear(N_OBS, N_ACTIONS)
        nn.init.zeros_(network.weight)
        nn.init.zeros_(network.bias)
        actor = probabilistic_actor(
            TensorDictModule(network, ["observation"], ["logits"]),
            in_keys={"logits": "logits", "mask": "legal"},
            distribution_class=MaskedCategorical,
            return_log_prob=True,
        )
        batch = play(WalkEnv((2,)), policy(), 6)
        batch["legal"] = torch.ones(2, 6, N_ACTIONS, dtype=torch.bool)
        batch["legal"][:, 2:4, 1:] = False  # one action is left in four steps
        actor(batch)
        batch["action_log_prob"][0, 5] = 0  # one frame of a random policy
        controller = SpyController(per="step")
        with pytest.warns(UserWarning, match="in 1 of 12 steps"):
            make(moved(actor), controller)(batch)
        assert sum(count for _, count in controller.calls) == 11


class TestOldWeights:
    """Weights that are loaded into the policy after the reference was copied from it."""

    def built(self, make) -> tuple[Any, Any]:
        actor = make_actor()
        transform = make(actor, 0.1)
        actor.load_state_dict(moved(actor, scale=1.0).state_dict())
        return transform, actor

    @every
    @pytest.mark.parametrize("place", ["env", "batch"])
    def test_it_is_said_once(self, make, place):
        transform, actor = self.built(make)
        said = r"Transform: the first \d+ steps have a KL of .* the policy's weights have changed"
        env: Any = WalkEnv((8,))
        if place == "env":
            env = TransformedEnv(env, transform)
            with pytest.warns(UserWarning, match=said) as caught:
                play(env, actor, 40)
        else:
            batch = play(env, actor, 40)
            with pytest.warns(UserWarning, match=said) as caught:
                transform(batch)
            transform(batch)  # warnings are errors
        assert len(caught) == 1

    def test_weights_that_are_a_little_off_are_not_warned_of(self):
        """Between 0.02 nats per step of any sign and a mean of 0.1."""
        actor = make_actor()
        transform = KLConstrainedTransform(actor, 0.1)
        actor.load_state_dict(moved(actor, scale=0.1).state_dict())
        kl = transform(play(WalkEnv((8,)), actor, 40))["next", "kl"]  # warnings are errors
        assert kl.abs().mean() > 0.04
        assert kl.mean() < 0.05

    @every
    def test_a_policy_that_is_trained_later_is_not_warned_of(self, make):
        actor = make_actor()
        transform = make(actor, 0.1)
        transform(play(WalkEnv((2,)), actor))
        actor.load_state_dict(moved(actor, scale=1.0).state_dict())
        transform(play(WalkEnv((2,)), actor))

    def test_clones_for_envs_of_a_policy_that_was_trained_meanwhile_are_not_warned_of(self):
        actor = make_actor()
        transform = KLConstrainedTransform(actor, 0.1)
        for scale in (0.0, 3.0, 3.0, 3.0, 3.0):
            actor.load_state_dict(moved(make_actor(), scale=scale).state_dict())
            batch = play(TransformedEnv(WalkEnv((8,)), transform.clone()), actor)
        assert batch["next", "kl"].mean() > 0.1

    def test_a_run_that_goes_on_is_not_warned_of(self):
        transform, actor = self.built(KLConstrainedTransform)
        transform.load_state_dict(transform.state_dict())
        transform(play(WalkEnv((8,)), actor, 40))

    def test_a_reference_that_is_given_or_moved_is_not_warned_of(self):
        actor = make_actor()
        given = KLConstrainedTransform(actor, 0.1, reference=make_actor())
        to_itself = KLConstrainedTransform(actor, 0.1)
        actor.load_state_dict(moved(actor, scale=1.0).state_dict())
        to_itself.update_reference(make_actor())
        for transform in (given, to_itself):
            transform(play(WalkEnv((8,)), actor, 40))

    def test_copies(self):
        transform, actor = self.built(KLConstrainedTransform)
        batch = play(WalkEnv((8,)), actor, 40)
        pickle.loads(pickle.dumps(transform))(batch)  # in another process nobody knows the policy
        first, second = copy.deepcopy(transform), copy.deepcopy(transform)
        with pytest.warns(UserWarning, match="the policy's weights have changed"):
            first(batch)
        second(batch)  # it has been said


class TestChangedActions:
    """Actions that were changed after the policy had drawn them and recorded their log-prob."""

    SAID = r"in the first \d+ steps the log-probs that the policy recorded differ by .* nats"

    def acting(self, kind: str) -> tuple[Any, Any]:
        """The actor, and the policy that acts with its weights."""
        if kind == "greedy":
            actor = make_actor()
            random = EGreedyModule(Categorical(N_ACTIONS), eps_init=0.5, eps_end=0.5)
            return actor, sequence(actor, random)
        bound = Bounded(-0.1, 0.1, torch.Size((2,))) if kind == "projected" else None
        actor = make_actor("normal", safe=bound is not None, spec=bound)
        if kind == "projected":
            return actor, actor
        noise = AdditiveGaussianModule(Unbounded(2), sigma_init=0.5, sigma_end=0.5)
        return actor, sequence(actor, noise)

    @every
    @pytest.mark.parametrize("place", ["env", "batch"])
    @pytest.mark.parametrize("kind", ["noise", "greedy", "projected"])
    def test_they_are_said_once(self, make, place, kind):
        actor, acting = self.acting(kind)
        env: Any = WalkEnv((8,), discrete=kind == "greedy")
        transform = make(actor, 0.1)
        if place == "env":
            with pytest.warns(UserWarning, match=self.SAID) as caught:
                play(TransformedEnv(env, transform), acting, 40)
        else:
            batch = play(env, acting, 40)
            with pytest.warns(UserWarning, match=self.SAID) as caught:
                transform(batch)
            transform(batch)  # warnings are errors
        assert len(caught) == 1

    def test_by_how_much(self):
        actor, acting = self.acting("noise")
        batch = play(WalkEnv((2,), discrete=False), acting, 8)
        log_prob = Normal(batch["loc"], batch["scale"]).log_prob(batch["action"])
        gap = (log_prob - batch["action_log_prob"]).sum(-1).abs().mean().item()
        with pytest.warns(UserWarning, match=f"in the first 16 steps .* by {gap:.2g} nats"):
            KLConstrainedTransform(actor, 0.1)(batch)

    def test_padding_and_random_frames_are_left_out(self):
        actor, acting = self.acting("noise")
        batch = play(WalkEnv((2,), discrete=False), acting, 8)
        drawn = play(WalkEnv((2,), discrete=False), actor, 8)
        padded: Any = torch.cat([drawn, batch], 1)
        padded.set(MASK_KEY, (torch.arange(16) < 8).expand(2, 16))
        padded.names = [None, "time"]
        KLConstrainedTransform(actor, 0.1)(padded)

    def test_rows_that_a_step_skips_are_left_out(self):
        actor = make_actor()
        env = TransformedEnv(WalkEnv((64,)), KLConstrainedTransform(actor, 0.1))
        step = actor(env.reset())
        step["_step"] = torch.arange(64) < 32
        step["action_log_prob"][32:] -= 5.0
        kl = env.step(step)["next", "kl"]  # warnings are errors
        assert (kl[32:] == 0).all()

    def test_a_run_that_goes_on_and_a_reference_of_its_own(self):
        actor, acting = self.acting("noise")
        batch = play(WalkEnv((2,), discrete=False), acting, 8)
        going_on = KLConstrainedTransform(actor, 0.1)
        going_on.load_state_dict(going_on.state_dict())
        given = KLConstrainedTransform(actor, 0.1, reference=make_actor("normal", seed=3))
        copied = pickle.loads(pickle.dumps(given))
        for transform in (going_on, given, copied):
            with pytest.warns(UserWarning, match=self.SAID):
                transform(batch)

    def test_a_policy_that_drew_them_with_other_weights_is_not_warned_of(self):
        for kind in ("normal", "tanh_normal"):
            actor = make_actor(kind)
            batch = play(WalkEnv((8,), discrete=False), moved(actor), 40)
            KLConstrainedTransform(actor, 0.1)(batch)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("kind", ["categorical", "normal"])
    def test_half_precision_is_not_warned_of(self, kind, dtype):
        actor = make_actor(kind).to(dtype)
        env = WalkEnv((8,), discrete=kind == "categorical", dtype=dtype)
        KLConstrainedTransform(actor, 0.1)(play(env, actor, 40))

    @every
    @pytest.mark.parametrize("n_envs", [3, 300])
    def test_bounds_of_all_envs_are_not_warned_of(self, make, n_envs):
        # (n_envs, 2), as `env.action_spec` has them, not (2,), as `action_spec_unbatched` has.
        low = -torch.arange(1.0, n_envs + 1)[:, None].expand(n_envs, 2)
        actor = make_actor("tanh_normal", distribution_kwargs={"low": low, "high": -low})
        transform = make(actor, 0.1)
        rollout = play(TransformedEnv(WalkEnv((n_envs,), discrete=False), transform), actor, 40)
        assert rollout["next", "reward"].isfinite().all()

    def test_an_actor_of_another_class_may_draw_as_it_likes(self):
        class Tempered(TensorDictModuleBase):
            """Draws at a temperature of 2, and records the logits of its part."""

            def __init__(self, part: Any):
                super().__init__()
                self.part, self.in_keys, self.out_keys = part, part.in_keys, part.out_keys
                self.dist_sample_keys, self.log_prob_keys = ["action"], ["action_log_prob"]

            def get_dist(self, tensordict):
                return Distribution(logits=self.part[0](tensordict)["logits"] / 2)

            def log_prob(self, tensordict):
                return self.get_dist(tensordict).log_prob(tensordict["action"])

            def forward(self, tensordict):
                tensordict["action"] = self.get_dist(tensordict).sample()
                return tensordict.set("action_log_prob", self.log_prob(tensordict))

        actor = Tempered(make_actor())
        batch = play(WalkEnv((2,)), actor, 6)
        assert "logits" in batch.keys()
        assert (KLConstrainedTransform(actor, 0.1)(batch)["next", "kl"].abs() < 1e-5).all()

    def test_a_saturated_tanh_normal(self):
        actor = make_actor("tanh_normal")
        linear, _, params = actor.module[0].module
        actor.module[0].module = nn.Sequential(linear, params)
        with torch.no_grad():
            linear.weight.zero_()
            linear.bias[:2] = 9
        batch = play(WalkEnv((8,), discrete=False), actor, 40)
        with pytest.warns(UserWarning, match=self.SAID):
            KLConstrainedTransform(actor, 0.1)(batch)


class TestNames:
    """Errors name what the user wrote."""

    def test_a_log_prob_that_was_not_recorded(self):
        batch = play(WalkEnv((2,)), make_actor(return_log_prob=False), 6)
        with pytest.raises(
            KeyError, match=r"reference=FrozenActor\(actor, recompute_log_prob=True"
        ):
            KLConstrainedTransform(make_actor(), 0.1)(batch)

    def test_the_state_of_a_recurrent_reference(self):
        actor = make_actor("lstm")
        batch = play(with_transforms(WalkEnv((2,)), *memory_of(actor)), actor, 6).reshape(-1)
        with pytest.raises(RuntimeError, match="put KLConstrainedTransform or Reference"):
            KLConstrainedTransform(actor, 0.1)(batch)
