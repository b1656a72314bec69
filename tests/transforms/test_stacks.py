"""The stack in one line, and the one-piece drop-in."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torchrl.collectors import Collector
from torchrl.envs import InitTracker, RewardSum, SerialEnv, TransformedEnv, check_env_specs
from torchrl.modules import ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from tests.helpers import (
    N_OBS,
    SpyController,
    WalkEnv,
    assert_same,
    compose,
    make_actor,
    memory_of,
    moved,
    play,
    with_transforms,
    without_kl,
)
from tests.laws.transform_laws import TransformLaws
from torchrl_kl import (
    AdaptiveKLController,
    ConstantKLController,
    ExponentialKLController,
    FrozenActor,
    KLConstrainedTransform,
    KLDivergenceTransform,
    KLKeys,
    KLRewardTransform,
    ReferenceModelLogProbTransform,
    RewardAdjustmentTransform,
)

STACK = frozenset({"ref_log_prob", "kl", "task_reward", "kl_coeff", "episode_kl"})


def policy() -> Any:
    return moved(make_actor())


class TestKLConstrainedTransformLaws(TransformLaws):
    writes, penalizes = STACK, True

    def make(self, seed=0):
        return KLConstrainedTransform(self.reference(seed), 0.1 + seed)


class TestAdaptiveKLConstrainedTransformLaws(TransformLaws):
    writes, penalizes = STACK | {"kl_estimate"}, True

    def make(self, seed=0):
        controller = AdaptiveKLController(0.1 + seed, target=0.1, horizon=100)
        return KLConstrainedTransform(self.reference(seed), controller, estimator="k3").freeze()


class TestKLRewardTransformLaws(TransformLaws):
    writes, penalizes = frozenset({"kl_coeff"}), True

    def make(self, seed=0):
        return KLRewardTransform(self.reference(seed), 0.1 + seed)


class TestKLRewardTransformWithOutKeysLaws(TransformLaws):
    writes = frozenset({"kl_coeff", "reward_kl"})

    def make(self, seed=0):
        return KLRewardTransform(self.reference(seed), 0.1 + seed, out_keys=["reward_kl"])


# The stack.


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
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


def test_what_it_holds_can_be_had():
    controller = ExponentialKLController(0.1, target=0.1)
    stack = KLConstrainedTransform(make_actor(), controller)
    assert stack.controller is controller
    assert isinstance(stack.reference, FrozenActor)
    assert (stack.estimate, stack.measured_key) == (None, "kl")
    assert stack.keys.kl_coeff == "kl_coeff"
    measured = KLConstrainedTransform(make_actor(), 0.1, estimator="k3")
    assert measured.measured_key == "kl_estimate"


@pytest.mark.parametrize("name", ["reward", "log_prob", "done", "time_dim", "update_every"])
def test_its_arguments_reach_the_parts(name):
    batch = play(WalkEnv((2,)), policy(), 20)
    controller = SpyController()
    names = {"reward": "reward", "log_prob": "action_log_prob", "done": "done"}
    arguments: dict[str, Any] = {"update_every": 1}
    if name == "time_dim":
        batch.names = [None, None]
        arguments["time_dim"] = 1
    elif name == "update_every":
        arguments["update_every"] = 1000
    elif name == "log_prob":
        batch.rename_key_("action_log_prob", "logp")
        names["log_prob"] = "logp"
    else:
        batch["next"].rename_key_(names[name], "new")
        if name == "done":
            batch["next"].pop("terminated")
        names[name] = "new"
    keys = KLKeys(**names)  # type: ignore[arg-type]
    after = KLConstrainedTransform(make_actor(), controller, keys=keys, **arguments)(batch)["next"]
    ended = int(after[names["done"]].sum())
    assert [n for _, n in controller.calls] == ([] if name == "update_every" else [ended])
    assert (after[names["reward"]] != after["task_reward"]).all()


def test_zero_states_reach_the_reference():
    actor = make_actor("lstm")
    batch = play(with_transforms(WalkEnv((2,), longest=9), *memory_of(actor)), moved(actor), 8)[
        :, 1:
    ]
    with pytest.raises(RuntimeError, match="zero_states=True"):
        KLConstrainedTransform(actor, 0.1)(batch)
    reference = FrozenActor(actor, zero_states=True)
    KLConstrainedTransform(actor, 0.1, reference=reference)(batch)


@pytest.mark.parametrize("nest", ["appended", "inserted", "within", "unwrapped"])
def test_wherever_it_is_put_in_an_env(nest):
    stack = KLConstrainedTransform(make_actor(), 0.1)
    env: Any = TransformedEnv(WalkEnv((2,)), RewardSum())
    if nest == "appended":
        env.append_transform(stack)
    elif nest == "inserted":
        env = TransformedEnv(WalkEnv((2,)), InitTracker())
        env.insert_transform(0, stack)
    elif nest == "within":
        env = TransformedEnv(WalkEnv((2,)), compose(RewardSum(), compose(stack)))
    else:
        env = TransformedEnv(env, stack, auto_unwrap=True)
    check_env_specs(env)
    inside = play(env, policy())
    after = KLConstrainedTransform(make_actor(), 0.1)(without_kl(inside))
    for name in STACK | {"reward"}:
        assert_same(after["next", name], inside["next", name])


def test_a_clone_shares_the_controller_and_a_deepcopy_does_not():
    stack = KLConstrainedTransform(
        make_actor(), AdaptiveKLController(0.1, target=0.1, horizon=1000), update_every=1
    )
    clone: Any = stack.clone()
    copied = copy.deepcopy(stack)
    env = TransformedEnv(WalkEnv((2,)), stack)
    assert clone.parent is None
    play(env, policy())
    assert stack.controller.coeff != 0.1
    assert clone.controller.coeff == stack.controller.coeff
    assert copied.controller.coeff.item() == 0.1


def test_its_controller_keeps_float64_through_casts():
    controller = ConstantKLController(0.1)
    stack: Any = KLConstrainedTransform(make_actor(), controller).to(torch.bfloat16)
    assert stack.controller.coeff.dtype == torch.float64
    assert stack.controller.coeff.item() == 0.1
    assert all(p.dtype == torch.bfloat16 for p in stack.reference.parameters())


# The one piece.


def test_kl_reward_against_a_hand_computation():
    actor = make_actor()
    batch = play(WalkEnv((2,)), moved(actor))
    weight, bias = (p.detach() for p in actor.parameters())
    logits = batch["observation"] @ weight.T + bias
    ref_log_prob = logits.log_softmax(-1).gather(-1, batch["action"].unsqueeze(-1))
    kl = batch["action_log_prob"].detach().unsqueeze(-1) - ref_log_prob
    after = KLRewardTransform(actor, 0.7, "reward", "reward_kl")(batch)["next"]
    assert_close(after["reward_kl"].detach(), batch["next", "reward"] - 0.7 * kl, atol=1e-5, rtol=0)
    assert_close(after["reward"], batch["next", "reward"], rtol=0, atol=0)
    assert (after["kl_coeff"] == torch.tensor(0.7)).all()
    in_place = KLRewardTransform(actor, coef=torch.tensor(0.7))(batch)["next"]
    assert_close(in_place["reward"].detach(), after["reward_kl"].detach(), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["normal", "tanh_normal"])
def test_kl_reward_sums_action_dimensions(kind):
    actor = make_actor(kind)
    env = WalkEnv((2,), discrete=False)
    after = play(
        with_transforms(env, KLRewardTransform(actor, out_keys="penalized")), moved(actor)
    )["next"]
    expected = KLConstrainedTransform(actor, 1.0)(play(env, moved(actor)))["next"]
    assert_close(after["reward"], expected["task_reward"], rtol=0, atol=0)
    assert_close(after["penalized"].detach(), expected["reward"], atol=1e-4, rtol=1e-5)


def test_kl_reward_of_agents():
    actor = make_actor(agents=True)
    transform = KLRewardTransform(actor, 0.5, in_keys=[("agents", "reward")])
    env = with_transforms(WalkEnv((2,), n_agents=3), transform)
    check_env_specs(env)
    inside = play(env, moved(actor))
    after = KLRewardTransform(actor, 0.5, in_keys=[("agents", "reward")])(without_kl(inside))
    assert_same(after["next", "agents", "reward"], inside["next", "agents", "reward"])
    assert inside["next", "agents", "kl_coeff"].shape == (2, 12, 3, 1)
    with pytest.raises(
        ValueError, match=r"must have the same shape, got \(2, 12, 3, 1\) and \(2, 12, 1\)"
    ):
        KLRewardTransform(actor)(play(WalkEnv((2,), n_agents=3, shared_reward=True), actor))


@pytest.mark.parametrize("place", ["env", "batch"])
def test_kl_reward_with_a_recurrent_reference(place):
    actor = make_actor("lstm")
    transform = KLRewardTransform(actor, 0.5)
    env = with_transforms(
        SerialEnv(2, WalkEnv), *memory_of(actor), *([transform] if place == "env" else [])
    )
    batch = play(env, moved(actor))
    after = (batch if place == "env" else transform(batch))["next", "reward"]
    bare = without_kl(batch)
    expected = KLConstrainedTransform(actor, 0.5)(bare)["next", "reward"]
    assert_same(after.detach(), expected)


def test_kl_reward_leaves_padding_alone():
    batch = play(WalkEnv((2,)), policy())
    batch["collector", "mask"] = torch.arange(12).expand(2, 12) < 5
    after = KLRewardTransform(make_actor())(batch)["next", "reward"]
    assert_close(after[:, 5:], batch["next", "reward"][:, 5:], rtol=0, atol=0)
    assert (after[:, :5] != batch["next", "reward"][:, :5]).all()


def test_gradients_reach_the_reference_on_request_only():
    batch = play(WalkEnv((2,)), policy()).detach()
    transform = KLRewardTransform(make_actor(), requires_grad=True)
    transform(batch)["next", "reward"].sum().backward()
    gradients = [p.grad for p in transform.reference.parameters()]
    # The reward rises with the reference's log-prob: the gradient of the sum of log softmax.
    probs = torch.softmax(make_actor()[0].module(batch["observation"]), -1).detach()
    expected = (nn.functional.one_hot(batch["action"], 4) - probs).flatten(0, 1).T @ batch[
        "observation"
    ].flatten(0, 1)
    assert_close(gradients[0], expected, atol=1e-4, rtol=1e-4)
    without = KLRewardTransform(make_actor())
    assert not without(batch)["next", "reward"].requires_grad
    assert not any(p.requires_grad for p in without.parameters())


def test_the_reward_carries_no_gradient_of_the_policy():
    batch = play(WalkEnv((2,)), policy())
    assert batch["action_log_prob"].requires_grad
    assert not KLRewardTransform(make_actor())(batch)["next", "reward"].requires_grad


def test_kl_reward_is_cast_whole():
    transform = KLRewardTransform(make_actor(), 0.5).to(torch.float64)
    floating = [v for v in transform.state_dict().values() if v.is_floating_point()]
    assert len(floating) > 2
    assert all(value.dtype == torch.float64 for value in floating)
    actor = make_actor().double()
    env = with_transforms(WalkEnv((2,), dtype=torch.float64), transform)
    check_env_specs(env)
    assert play(env, moved(actor))["next", "reward"].dtype == torch.float32


def test_the_coefficient_is_in_the_state_dict():
    saved = KLRewardTransform(make_actor(), 0.25).state_dict()
    assert [v.item() for name, v in saved.items() if "coeff" in name] == [0.25]
    other = KLRewardTransform(make_actor(seed=3), 0.75)
    other.load_state_dict(saved)
    assert other.coef.item() == 0.25


@pytest.mark.parametrize("coef", [-0.1, float("nan"), float("inf")])
def test_a_coefficient_that_cannot_be(coef):
    with pytest.raises(ValueError, match=rf"`coef` must be .*at least 0.*, got {coef}"):
        KLRewardTransform(make_actor(), coef)


@pytest.mark.parametrize("name", ["in_keys", "out_keys"])
def test_one_reward_per_transform(name):
    make: Any = KLRewardTransform
    with pytest.raises(
        ValueError,
        match=rf"`{name}` must be one key, got \['a', 'b'\]: use one transform per reward",
    ):
        make(make_actor(), **{name: ["a", "b"]})


def test_kl_reward_without_a_reward():
    batch = play(WalkEnv((2,)), policy()).exclude(("next", "reward"))
    with pytest.raises(
        KeyError, match="'reward' is not in the data, got .*name the reward to penalize"
    ):
        KLRewardTransform(make_actor())(batch)


def test_two_rewards_at_the_root():
    batch = play(WalkEnv((2,)), policy())
    batch["next", "bonus"] = torch.ones(2, 12, 1)
    make: Any = KLRewardTransform
    keys = KLKeys(kl_coeff="bonus_coeff")
    second = make(make_actor(), 0.2, in_keys="bonus", out_keys="bonus", keys=keys)
    after = compose(KLRewardTransform(make_actor(), 0.1), second)(batch)["next"]
    assert_close(
        (batch["next", "reward"] - after["reward"]) * 2, 1.0 - after["bonus"], atol=1e-5, rtol=0
    )


# In training.


@pytest.mark.parametrize("place", ["env", "postproc"])
def test_ten_ppo_updates_leave_the_reference_where_it_was(place):
    actor: Any = make_actor()
    critic = ValueOperator(nn.Linear(N_OBS, 1), in_keys=["observation"])
    controller = AdaptiveKLController(0.1, target=1e-3, horizon=1000)
    stack = KLConstrainedTransform(actor, controller, update_every=4)
    before = [p.clone() for p in stack.reference.parameters()]
    env: Any = SerialEnv(4, WalkEnv)
    collector = Collector(
        with_transforms(env, stack) if place == "env" else env,
        actor,
        frames_per_batch=64,
        total_frames=320,
        postproc=None if place == "env" else stack,
        auto_register_policy_transforms=False,
    )
    advantage = GAE(gamma=1.0, lmbda=0.95, value_network=critic)
    loss = ClipPPOLoss(actor, critic)
    optimizer = torch.optim.Adam([*loss.parameters(), *stack.parameters()], lr=0.02)
    kls, coeffs = [], []
    for batch in collector:
        kls.append(batch["next", "kl"].abs().max().item())
        coeffs.append(batch["next", "kl_coeff"].mean().item())
        for _ in range(2):
            advantage(batch)
            terms = loss(batch.reshape(-1))
            optimizer.zero_grad()
            (terms["loss_objective"] + terms["loss_critic"] + terms["loss_entropy"]).backward()
            optimizer.step()
        assert all(p.grad is None for p in stack.parameters())
    collector.shutdown()
    assert kls[0] < 1e-6 < 1e-2 < kls[-1]
    assert coeffs[-1] > coeffs[0] > 0.09 if place == "postproc" else controller.coeff != 0.1
    for parameter, old in zip(stack.reference.parameters(), before, strict=True):
        assert_close(parameter, old, rtol=0, atol=0)
    for parameter, old in zip(actor.parameters(), before, strict=True):
        assert (parameter != old).any()
