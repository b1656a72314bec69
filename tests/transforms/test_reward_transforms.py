"""The transform that subtracts the penalty: from which rewards, what cannot be penalized, and what
it remembers.
"""

import copy
import math
from abc import abstractmethod
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from torchrl.collectors import Collector
from torchrl.data import Bounded
from torchrl.envs import SerialEnv, TransformedEnv, check_env_specs

from tests.helpers import (
    SpyController,
    WalkEnv,
    assert_same,
    collect,
    compose,
    make_actor,
    play,
    policy,
    spied,
    step_of,
    total,
    with_transforms,
    without_kl,
)
from tests.laws.transform_laws import TransformLaws
from torchrl_kl import (
    AdaptiveKLController,
    ConstantKLController,
    ExponentialKLController,
    KLConstrainedTransform,
    KLDivergenceTransform,
    KLKeys,
    KLRewardTransform,
    ReferenceModelLogProbTransform,
    RewardAdjustmentTransform,
)


class RewardAdjustmentLaws(TransformLaws):
    writes = frozenset({"task_reward", "kl_coeff", "episode_kl"})
    penalizes = True

    @abstractmethod
    def controller(self, coeff: float) -> Any:
        """What the transform is given for a coefficient."""

    def before(self):
        return [ReferenceModelLogProbTransform(self.reference()), KLDivergenceTransform()]

    def make(self, seed=0):
        return RewardAdjustmentTransform(self.controller(0.1 + seed)).freeze()


class TestNumberLaws(RewardAdjustmentLaws):
    def controller(self, coeff):
        return coeff


class TestConstantLaws(RewardAdjustmentLaws):
    def controller(self, coeff):
        return ConstantKLController(coeff, per="step")


class TestAdaptiveLaws(RewardAdjustmentLaws):
    def controller(self, coeff):
        return AdaptiveKLController(coeff, target=0.1, horizon=100)


class TestExponentialLaws(RewardAdjustmentLaws):
    def controller(self, coeff):
        return ExponentialKLController(coeff, target=0.1)


# The penalty.


def test_a_positive_kl_lowers_the_reward_and_a_negative_one_raises_it():
    batch = step_of(reward=[1.0, 1.0, 1.0], kl=[0.5, 0.0, -0.25], done=[False, False, True])
    after = RewardAdjustmentTransform(0.5)(batch)["next"]
    assert_close(after["reward"].flatten(), torch.tensor([0.75, 1.0, 1.125]))
    assert_close(after["task_reward"].flatten(), torch.tensor([1.0, 1.0, 1.0]))
    assert_close(after["kl_coeff"].flatten(), torch.tensor([0.5, 0.5, 0.5]))
    assert_close(after["episode_kl"].flatten(), torch.tensor([0.5, 0.5, 0.25]))


@pytest.mark.parametrize("place", ["env", "batch"])
def test_k1_is_subtracted_and_the_estimate_is_fed(place):
    stack, controller = spied(estimator="k3")
    if place == "env":
        batch = play(with_transforms(WalkEnv((2,)), stack), policy())
    else:
        batch = stack(play(WalkEnv((2,)), policy()))
    after = batch["next"]
    assert_close(after["reward"], after["task_reward"] - 0.1 * after["kl"])
    ended = after["done"]
    assert_close(
        total(controller)[1], after["episode_kl"][ended].double().sum().item(), rtol=1e-6, atol=0.0
    )
    first = after["episode_kl"][:, 0]
    assert_close(first, after["kl_estimate"][:, 0])
    assert (first != after["kl"][:, 0]).all()


def test_the_coefficient_is_cast_to_the_dtype_of_the_reward():
    batch = step_of(reward=[1.0], kl=[0.5], done=[True])
    batch["next", "reward"] = batch["next", "reward"].bfloat16()
    after = RewardAdjustmentTransform(0.1)(batch)["next"]
    assert (
        after["reward"].dtype
        == after["kl_coeff"].dtype
        == after["task_reward"].dtype
        == torch.bfloat16
    )
    assert_close(after["reward"].float().item(), 0.95, atol=2**-8, rtol=0)


def test_an_integer_reward_is_not_left_alone_silently():
    batch = step_of(reward=[1, 2], kl=[0.75, 0.5], done=[False, True])
    with pytest.raises(
        TypeError,
        match="'reward' must be floating point, got torch.int64: the coefficient would be",
    ):
        RewardAdjustmentTransform(0.8)(batch)


def test_the_penalized_reward_has_no_bounds():
    env = WalkEnv((2,))
    env.reward_spec = Bounded(0.0, 1.0, shape=torch.Size((2, 1)))
    penalized = with_transforms(env, KLConstrainedTransform(make_actor(), 0.1))
    assert penalized.reward_spec.is_in(torch.full((2, 1), -7.0))
    assert not env.reward_spec.is_in(torch.full((2, 1), -7.0))
    named = with_transforms(env, KLRewardTransform(make_actor(), out_keys=["penalized"]))
    assert not named.reward_spec.is_in(torch.full((2, 1), -7.0))


def test_a_coefficient_of_zero_only_measures():
    batch = play(WalkEnv((2,)), policy())
    after = KLConstrainedTransform(make_actor(), 0.0)(batch)["next"]
    assert_close(after["reward"], batch["next", "reward"], rtol=0, atol=0)
    assert (after["kl_coeff"] == 0).all()
    assert (after["kl"] != 0).any()


def test_a_coefficient_of_zero_subtracts_nothing_for_an_infinite_kl():
    batch = step_of(reward=[1.0, 1.0], kl=[math.inf, 0.5], done=[False, True])
    after = RewardAdjustmentTransform(0.0)(batch)["next"]
    assert_close(after["reward"].flatten(), torch.tensor([1.0, 1.0]))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("per", ["step", "trajectory"])
def test_an_infinite_kl_with_a_coefficient_is_an_error(per, frozen):
    batch = step_of(reward=[1.0, 1.0], kl=[math.inf, 0.5], done=[False, True])
    transform = RewardAdjustmentTransform(ConstantKLController(0.1, per=per))
    if frozen:
        transform.freeze()
    with pytest.raises(ValueError, match="'kl'.* has 1 of 2, the first inf at .0, 0, 0.*log-prob"):
        transform(batch)
    assert int(transform.statistics.count) == 0


def test_an_infinite_kl_stays_in_its_trajectory():
    batch = step_of(
        reward=[1.0] * 4, kl=[math.inf, 1.0, 0.5, 0.25], done=[False, True, False, True]
    )
    after = RewardAdjustmentTransform(0.0)(batch)["next"]
    assert_close(after["episode_kl"].flatten(), torch.tensor([math.inf, math.inf, 0.5, 0.75]))


def test_of_steps_that_count_the_controller_is_fed_the_estimate():
    estimates = [3.0, 5.0, 7.0, 13.0]
    batch = step_of(reward=[1.0] * 4, kl=[2.0] * 4, kl_estimate=estimates, done=[False] * 4)
    batch["collector", "mask"] = torch.tensor([[True, True, False, True]])
    controller = SpyController(per="step")
    after = RewardAdjustmentTransform(controller)(batch)["next", "reward"]
    assert controller.calls == [(7.0, 3)]
    assert_close(after.flatten(), torch.tensor([0.8, 0.8, 1.0, 0.8]))


# What cannot be penalized.


def test_a_batch_that_was_penalized_is_refused():
    batch = KLConstrainedTransform(make_actor(), 0.1)(play(WalkEnv((2,)), policy()))
    stacks = KLConstrainedTransform(make_actor(), 0.1), KLRewardTransform(make_actor())
    for second in (*stacks, RewardAdjustmentTransform(0.1)):
        with pytest.raises(
            RuntimeError, match="the batch has 'kl_coeff': 'reward' was penalized .* twice. Use one"
        ):
            second(batch)


def test_a_batch_penalized_in_its_env_is_refused():
    batch = play(with_transforms(WalkEnv((2,)), KLRewardTransform(make_actor())), policy())
    with pytest.raises(RuntimeError, match="the batch has 'kl_coeff'"):
        KLConstrainedTransform(make_actor(), 0.1)(batch)


@pytest.mark.parametrize("first", [KLConstrainedTransform, KLRewardTransform])
@pytest.mark.parametrize("second", [KLConstrainedTransform, KLRewardTransform])
def test_an_env_that_was_penalized_is_refused_when_the_second_is_attached(first, second):
    def make(cls):
        return cls(make_actor(), 0.1)

    refused = pytest.raises(
        RuntimeError, match="the env has 'kl_coeff': 'reward' was penalized .* twice. Use one"
    )
    with refused:
        with_transforms(WalkEnv((2,)), make(first), make(second))
    with refused:
        TransformedEnv(TransformedEnv(WalkEnv((2,)), make(first)), make(second), auto_unwrap=False)
    with refused:
        TransformedEnv(TransformedEnv(WalkEnv((2,)), make(first)), make(second), auto_unwrap=True)
    with refused:
        TransformedEnv(SerialEnv(2, lambda: TransformedEnv(WalkEnv(), make(first))), make(second))
    env = TransformedEnv(WalkEnv((2,)), make(first))
    with refused:
        env.append_transform(make(second))


def test_a_task_reward_of_the_env_is_not_a_sign_of_a_penalty():
    batch = play(WalkEnv((2,)), policy())
    batch["next", "task_reward"] = torch.zeros(2, 12, 1)
    KLConstrainedTransform(make_actor(), 0.1)(batch)


def test_two_stacks_on_two_rewards():
    batch = play(WalkEnv((2,)), policy())
    batch["next", "bonus"] = torch.ones(2, 12, 1)
    other = RewardAdjustmentTransform(
        0.5,
        keys=KLKeys(
            reward="bonus", kl_coeff="bonus_coeff", task_reward="task_bonus", episode_kl="bonus_kl"
        ),
    )
    after = compose(KLConstrainedTransform(make_actor(), 0.1), other)(batch)["next"]
    assert_close(after["reward"], batch["next", "reward"] - 0.1 * after["kl"])
    assert_close(after["bonus"], 1.0 - 0.5 * after["kl"])
    env = with_transforms(
        WalkEnv((2,)),
        KLRewardTransform(make_actor(), 0.5, out_keys=[("other", "reward")]),
        KLConstrainedTransform(make_actor(), 0.1),
    )
    check_env_specs(env)
    after = play(env, policy())["next"]
    assert_close(after["other", "reward"], after["task_reward"] - 0.5 * after["kl"])
    assert_close(after["reward"], after["task_reward"] - 0.1 * after["kl"])


def test_kl_and_reward_of_different_shapes_are_an_error():
    actor = make_actor(agents=True)
    env = WalkEnv((2,), n_agents=3, shared_reward=True)
    text = (
        r"KL and 'reward' must have the same shape, got \(2, 3, 1\) and \(2, 1\): "
        r".* sum it over agents"
    )
    with pytest.raises(ValueError, match=text):
        with_transforms(env, KLConstrainedTransform(actor, 0.1)).reset()
    with pytest.raises(ValueError, match=text.replace("(2, ", "(2, 12, ")):
        KLConstrainedTransform(actor, 0.1)(play(env, actor))


def test_what_is_not_there_is_named():
    batch = step_of(reward=[1.0], kl=[0.5], done=[True])
    with pytest.raises(
        KeyError, match=r"'wage' is not in the data, got done, kl, reward: name the reward"
    ):
        RewardAdjustmentTransform(0.1, keys=KLKeys(reward="wage"))(batch)
    with pytest.raises(
        KeyError,
        match=r"'kl' is not in the data, got done, reward: put KLDivergenceTransform before",
    ):
        RewardAdjustmentTransform(0.1)(batch.exclude(("next", "kl")))
    with pytest.raises(
        KeyError, match=r"'kl' is not in the observation spec, got left, observation: put"
    ):
        with_transforms(WalkEnv(), RewardAdjustmentTransform(0.1)).reset()


@pytest.mark.parametrize("controller", ["0.1", None, True, torch.tensor(0.1), ConstantKLController])
def test_a_controller_must_be_one(controller: Any):
    with pytest.raises(TypeError, match="`controller` must be a KLController or a number, got"):
        RewardAdjustmentTransform(controller)


@pytest.mark.parametrize("coeff", [1, 0, 0.25])
def test_a_number_is_a_constant_controller(coeff):
    controller = RewardAdjustmentTransform(coeff).controller
    assert isinstance(controller, ConstantKLController)
    assert controller.coeff.item() == coeff


@pytest.mark.parametrize("update_every", [0, -1, 2.5, True])
def test_update_every_must_be_positive(update_every):
    with pytest.raises(
        ValueError, match=f"`update_every` must be None or an int of at least 1, got {update_every}"
    ):
        RewardAdjustmentTransform(0.1, update_every=update_every)


def test_a_flat_batch_cannot_feed_a_controller_of_trajectories():
    batch = play(WalkEnv((2,)), policy()).reshape(-1)
    stack, controller = spied()
    with pytest.raises(
        RuntimeError, match=r"nats per trajectory.*shape \(24,\).*`time_dim`, call freeze"
    ):
        stack(batch)
    after = stack.freeze()(batch)["next"]
    assert "episode_kl" not in after.keys()
    KLConstrainedTransform(make_actor(), 0.1)(batch)
    per_step, controller = spied("step")
    per_step(batch)
    assert total(controller)[0] == 24


# Its state.


def test_a_restart_goes_on_where_it_stopped():
    def make():
        controller = AdaptiveKLController(0.1, target=0.5, horizon=200)
        return KLConstrainedTransform(make_actor(), controller, update_every=20)

    batches = [play(WalkEnv((2,)), policy(), 20, seed=seed) for seed in range(6)]
    whole, before = make(), make()
    for batch in batches:
        whole(batch)
    for batch in batches[:3]:
        before(batch)
    after = make()
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    assert 0 < int(after.statistics.count) < 20
    for batch in batches[3:]:
        after(batch)
    assert_close(after.state_dict(), whole.state_dict(), rtol=0, atol=0)
    assert whole.controller.coeff != 0.1


def test_the_buffer_that_a_collector_hands_out_twice_stays_clean():
    stack, controller = spied("step")
    collector = Collector(
        WalkEnv((2,)),
        policy(),
        frames_per_batch=8,
        total_frames=32,
        postproc=stack,
        return_same_td=True,
        auto_register_policy_transforms=False,
    )
    storage = set()
    for batch in collector:
        storage.add(batch["observation"].data_ptr())
        assert_close(
            batch["next", "reward"], batch["next", "task_reward"] - 0.1 * batch["next", "kl"]
        )
    collector.shutdown()
    assert len(storage) == 1  # the same buffer each time
    assert total(controller)[0] == 32


def test_a_frozen_stack_goes_on_summing_from_batch_to_batch():
    stack = KLConstrainedTransform(make_actor(), SpyController()).freeze()
    inside = KLConstrainedTransform(make_actor(), SpyController()).freeze()
    batches = collect(
        with_transforms(WalkEnv((2,), longest=9), inside), policy(), frames=10, batches=4
    )
    assert not all(
        (batch["episode_kl"][:, 0] == 0).all() for batch in batches
    )  # some rows begin inside
    for batch in batches:
        assert_same(stack(without_kl(batch))["next", "episode_kl"], batch["next", "episode_kl"])
