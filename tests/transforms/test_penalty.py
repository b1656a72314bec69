"""The penalty: from which rewards, with which numbers, and what cannot be penalized."""

import copy
import math
import re
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from torchrl.data import Bounded, Unbounded
from torchrl.envs import DTypeCastTransform, GymEnv, SerialEnv, TransformedEnv, check_env_specs
from torchrl.modules import TanhNormal

from tests.helpers import (
    WalkEnv,
    compose,
    make_actor,
    moved,
    play,
    policy,
    step_of,
    with_transforms,
)
from tests.transforms.test_envs import actor_on
from torchrl_kl import (
    AdaptiveKLController,
    ConstantKLController,
    KLConstrainedTransform,
    KLDivergenceTransform,
    KLRewardTransform,
    ReferenceModelLogProbTransform,
    RewardAdjustmentTransform,
)
from torchrl_kl.transforms.penalty import check_reward

reward_transform: Any = KLRewardTransform

# The numbers.


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_stack_is_its_three_parts(estimator: Any):
    batch = play(WalkEnv((2,)), policy())
    parts = compose(
        ReferenceModelLogProbTransform(make_actor()),
        KLDivergenceTransform(estimator=estimator),
        RewardAdjustmentTransform(0.3),
    )
    stack = KLConstrainedTransform(make_actor(), 0.3, estimator=estimator)
    actual, expected = stack(batch)["next"], parts(batch)["next"]
    assert set(actual.keys()) == set(expected.keys())
    for name in actual.keys():
        assert_close(actual[name], expected[name], rtol=0, atol=0)


def test_a_kl_in_half_precision_is_summed_in_float32():
    batch = step_of(reward=[0.0] * 300, kl=[0.1] * 300, done=[False] * 299 + [True])
    batch["next", "kl"] = batch["next", "kl"].bfloat16()
    after = RewardAdjustmentTransform(0.1)(batch)["next"]
    assert (after["kl"].dtype, after["episode_kl"].dtype) == (torch.bfloat16, torch.float32)
    assert_close(after["episode_kl"].double(), after["kl"].double().cumsum(1))
    actor = make_actor().bfloat16()
    stack = KLConstrainedTransform(actor, 0.1)
    env = with_transforms(WalkEnv((2,), dtype=torch.bfloat16), stack)
    check_env_specs(env)
    step = play(env, moved(actor))["next"]
    for name in ("kl", "ref_log_prob", "episode_kl"):
        assert env.observation_spec[name].dtype == step[name].dtype == torch.float32
    wide = DTypeCastTransform(torch.float32, torch.float64, in_keys=["ref_log_prob"])
    parts = [ReferenceModelLogProbTransform(actor), wide, KLDivergenceTransform()]
    check_env_specs(with_transforms(WalkEnv((2,), dtype=torch.bfloat16), *parts))


halves = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@halves
@pytest.mark.parametrize("make", [KLConstrainedTransform, KLRewardTransform])
def test_no_penalty_is_lost_in_a_reward_of_half_precision(make, dtype):
    """Of 1, from which bfloat16 cannot subtract less than 0.002, nor float16 less than 0.0002."""
    batch = play(WalkEnv((2,)), policy()).detach()
    batch["next", "reward"] = torch.ones(2, 12, 1, dtype=dtype)
    after = make(make_actor(), 1e-3)(batch)["next"]
    with torch.no_grad():
        dist = make_actor().get_dist(batch.clone())
    kl = batch["action_log_prob"].double() - dist.log_prob(batch["action"]).double()
    expected = 1 - 1e-3 * kl.unsqueeze(-1)
    assert (expected.to(dtype) == 1).any()
    assert after["reward"].dtype == after["kl_coeff"].dtype == torch.float32
    assert_close(after["reward"].double(), expected, rtol=1e-6, atol=0)
    if make is KLConstrainedTransform:
        assert_close(after["task_reward"], torch.ones(2, 12, 1), rtol=0, atol=0)
    assert batch["next", "reward"].dtype == dtype


@halves
def test_an_env_with_rewards_of_half_precision_needs_a_cast(dtype):
    def attach(*casts: Any) -> Any:
        return with_transforms(WalkEnv((2,)), *casts, KLConstrainedTransform(make_actor(), 0.1))

    narrow = DTypeCastTransform(torch.float32, dtype, in_keys=["reward"])
    with pytest.raises(
        TypeError, match="'reward' must be .* in an env float32 or float64"
    ) as error:
        attach(narrow).reset()
    found = re.search(r"with (DTypeCastTransform\(.*\))\.$", str(error.value))
    assert found
    env = attach(narrow.clone(), eval(found[1]))  # the fix that it names
    check_env_specs(env)
    step = play(env, policy())["next"]
    assert_close(step["task_reward"] - 0.1 * step["kl"], step["reward"])
    assert (step["task_reward"] == step["task_reward"].to(dtype)).all()


def test_a_coefficient_of_zero_only_measures():
    """It subtracts nothing for an infinite KL, which stays in its trajectory."""
    kl, ends = [math.inf, 1.0, 0.5, 0.25], [False, True, False, True]
    batch = step_of(reward=[1.0] * 4, kl=kl, done=ends)
    after = RewardAdjustmentTransform(0.0)(batch)["next"]
    assert after["reward"].flatten().tolist() == [1.0] * 4
    assert after["episode_kl"].flatten().tolist() == [math.inf, math.inf, 0.5, 0.75]
    batch = play(WalkEnv((2,)), policy()).set("advantage", torch.zeros(2, 12, 1))
    after = KLConstrainedTransform(make_actor(), 0.0)(batch)["next"]  # advantages stay right
    assert_close(after["reward"], batch["next", "reward"], rtol=0, atol=0)
    assert (after["kl"] != 0).any()


# What cannot be penalized.


@pytest.mark.parametrize(
    ("entries", "error", "text"),
    [
        ({"reward": [1, 2]}, TypeError, "'reward' must be floating .* got torch.int64"),
        (
            {"kl": [math.inf, 0.5]},
            ValueError,
            "'kl'.* has 1 of 2 that are not, the first inf at .0, 0, 0",
        ),
        ({"kl_estimate": [math.nan, 0.5]}, ValueError, "'kl_estimate'.* has 1 of 2"),
        ({"reward": [1.0, math.nan]}, ValueError, "'reward'.* has 1 of 2"),
        ({"kl_coeff": [0.1, 0.1]}, RuntimeError, "the batch has 'kl_coeff': .* twice. Use one"),
        ({"kl": None}, KeyError, "'kl' is not in the data: put KL.* have done, reward."),
        ({"reward": None}, KeyError, "'reward' is not in the data: name the reward"),
    ],
    ids=["integer", "infinite", "nan", "reward", "penalized", "no kl", "no reward"],
)
@pytest.mark.parametrize("per", ["step", "trajectory"])
def test_what_cannot_be_penalized(entries, error, text, per):
    known = {"reward": [1.0, 1.0], "kl": [0.5, 0.5], "done": [False, True]} | entries
    batch = step_of(**{name: value for name, value in known.items() if value is not None})
    transform = RewardAdjustmentTransform(ConstantKLController(0.1, per=per))
    for each in (transform, transform.freeze()):
        with pytest.raises(error, match=text):
            each(batch)
    assert int(transform.statistics.count) == 0


@pytest.mark.parametrize("first", [KLConstrainedTransform, KLRewardTransform])
def test_an_env_that_was_penalized_is_refused_when_the_second_is_attached(first):
    def make(cls=KLRewardTransform) -> Any:
        return cls(make_actor(), 0.1)

    text = "the env has 'kl_coeff': 'reward' was penalized .* twice. Use one"
    env = TransformedEnv(WalkEnv((2,)), make(first))
    for attach in (
        lambda: with_transforms(WalkEnv((2,)), make(first), make()),
        lambda: TransformedEnv(env, make(), auto_unwrap=False),
        lambda: TransformedEnv(
            SerialEnv(2, lambda: TransformedEnv(WalkEnv(), make(first))), make()
        ),
        lambda: env.append_transform(make()),
    ):
        with pytest.raises(RuntimeError, match=text):
            attach()
    batch = make(first)(play(WalkEnv((2,)), policy()))
    with pytest.raises(RuntimeError, match="the batch has 'kl_coeff'"):
        reward_transform(make_actor(), out_keys=[("other", "reward")])(batch)


# The preset.


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_script_for_the_class_that_torchrl_had(requires_grad):
    """Of which nothing but the import is changed; the sign is right."""
    base_env = GymEnv("Pendulum-v1")
    actor = actor_on(3, 1, distribution=TanhNormal)
    reference = copy.deepcopy(actor)
    transform = KLRewardTransform(actor, out_keys="reward_kl", requires_grad=requires_grad)
    env = TransformedEnv(base_env, transform)
    check_env_specs(env)
    actor.load_state_dict(moved(actor).state_dict())
    rollout = env.rollout(5, actor)
    with torch.no_grad():
        ref_log_prob = reference.get_dist(rollout.copy()).log_prob(rollout["action"])
    kl = (rollout["action_log_prob"].detach() - ref_log_prob).unsqueeze(-1)
    assert kl.abs().min() > 1e-3
    result = rollout["next", "reward_kl"]
    assert_close(result.detach(), (rollout["next", "reward"] - kl).float())
    assert (rollout["next", "kl_coeff"] == 1).all()
    parameters = list(transform.parameters())
    assert all(p.requires_grad == requires_grad for p in parameters)
    assert result.requires_grad == requires_grad
    if requires_grad:
        result.sum().backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in parameters)


def test_padding_may_hold_anything():
    batch = play(WalkEnv((2,)), policy()).detach()
    batch["collector", "mask"] = counts = torch.arange(12).expand(2, 12) < 9
    for key in ("action_log_prob", ("next", "reward")):
        batch[key][~counts] = math.nan
    after = KLConstrainedTransform(make_actor(), 0.1)(batch)["next"]
    assert (after["kl"][~counts] == 0).all()
    assert after["reward"][counts].isfinite().all()
    batch = step_of(reward=[1.0, 1.0], kl=[2.0, 2.0], done=[False, True])
    batch["collector", "mask"] = torch.tensor([[True, False]])
    assert RewardAdjustmentTransform(0.5)(batch)["next", "reward"].flatten().tolist() == [0, 1]


def test_the_penalized_reward_has_no_bounds():
    env = WalkEnv((2,))
    env.reward_spec = Bounded(0.0, 1.0, shape=torch.Size((2, 1)))
    penalized = with_transforms(env, KLConstrainedTransform(make_actor(), 0.1))
    assert penalized.reward_spec.is_in(torch.full((2, 1), -7.0))
    assert not env.reward_spec.is_in(torch.full((2, 1), -7.0))


def test_a_row_that_an_env_skips_has_no_kl():
    env = with_transforms(SerialEnv(3, WalkEnv), KLConstrainedTransform(make_actor(), 0.1))
    torch.manual_seed(0)
    data = policy()(env.reset())
    data["_step"] = torch.tensor([True, False, True])
    kl = env.step(data)["next", "kl"].squeeze(-1)
    assert (kl != 0).tolist() == [True, False, True]


def test_a_policy_that_is_certain_is_no_random_one():
    actor = policy()
    with torch.no_grad():
        actor[0].module.bias[1] = 1e3
    batch = play(WalkEnv((2,)), actor, 6)
    assert (batch["action_log_prob"] == 0).all()
    assert (KLConstrainedTransform(make_actor(), 0.1)(batch)["next", "kl"] > 0).all()


@pytest.mark.parametrize("coef", [0.5, torch.tensor(0.5)], ids=["number", "tensor"])
def test_the_preset_is_the_stack_with_one_result(coef):
    batch = play(WalkEnv((2,)), policy())
    batch["collector", "mask"] = torch.arange(12).expand(2, 12) < 9
    assert batch["action_log_prob"].requires_grad
    after = KLRewardTransform(make_actor(), coef, "reward")(batch)["next"]
    expected = KLConstrainedTransform(make_actor(), 0.5)(batch)["next"]
    for name in ("reward", "kl_coeff"):
        assert_close(after[name], expected[name], rtol=0, atol=0)
    assert not after["reward"].requires_grad
    assert set(after.keys()) - set(batch["next"].keys()) == {"kl_coeff"}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"coef": -0.1}, "`coef` must be .*at least 0.*, got -0.1"),
        ({"coef": math.nan}, "`coef` must be .*at least 0.*, got nan"),
        ({"in_keys": ["a", "b"]}, r"`in_keys` must be one key, got \['a', 'b'\]: use one"),
        ({"out_keys": ["a", "b"]}, r"`out_keys` must be one key, got \['a', 'b'\]: use one"),
    ],
    ids=str,
)
def test_what_the_preset_refuses(options, text):
    with pytest.raises((ValueError, TypeError), match=text):
        reward_transform(make_actor(), **options)


@pytest.mark.parametrize("make", [KLConstrainedTransform, KLRewardTransform])
def test_a_reward_of_another_shape_is_refused(make):
    actor, env = make_actor(agents=True), WalkEnv((2,), n_agents=3, shared_reward=True)
    text = r"got \(2,.* 3, 1\) and \(2,.* 1\): .* sum it over agents.* trailing dimension"
    with pytest.raises(ValueError, match=text):
        make(actor, 0.5)(play(env, actor))
    with pytest.raises(ValueError, match=text):
        with_transforms(env, make(actor, 0.5)).reset()


@pytest.mark.parametrize(("kl", "reward"), [((2, 1), (2,)), ((2, 1), (2, -1, 1)), ((1, 1), (1,))])
def test_without_agents_it_does_not_speak_of_them(kl, reward):
    """As of the stacked rewards of MultiAction."""
    with pytest.raises(ValueError, match="trailing dimension, of size 1") as error:
        check_reward(torch.Size(kl), Unbounded(torch.Size(reward)), "reward")
    assert "agents" not in str(error.value)


def test_clones_share_the_controller_and_copies_do_not():
    controller = AdaptiveKLController(0.1, target=0.1, horizon=100)
    stack = KLConstrainedTransform(make_actor(), controller, update_every=1)
    clone, copied = stack.clone(), copy.deepcopy(stack)
    stack(play(WalkEnv((2,)), policy()))
    assert stack.controller is controller
    assert clone.controller.coeff == controller.coeff != 0.1
    assert copied.controller.coeff.item() == 0.1
    assert "penalty.controller.coeff" in stack.state_dict()
