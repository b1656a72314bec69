"""A stack in an env: sums of half precision, what it counts, and what is put around it."""

import gc
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from torchrl.data import Categorical, Composite, Unbounded
from torchrl.envs import RewardSum, StepCounter, Transform, TransformedEnv, check_env_specs
from torchrl.envs.utils import ExplorationType, set_exploration_type

from tests.helpers import (
    SpyController,
    WalkEnv,
    assert_same,
    compose,
    make_actor,
    moved,
    play,
    policy,
    spied,
    total,
    with_transforms,
)
from torchrl_kl import (
    KLConstrainedTransform,
    KLDivergenceTransform,
    KLKeys,
    KLRewardTransform,
    ReferenceModelLogProbTransform,
    RewardAdjustmentTransform,
)


def stack_of(actor: Any, controller: Any) -> list[Any]:
    return [KLConstrainedTransform(actor, controller, update_every=1)]


def parts_of(actor: Any, controller: Any) -> list[Any]:
    adjustment = RewardAdjustmentTransform(controller, update_every=1)
    return [ReferenceModelLogProbTransform(actor), KLDivergenceTransform(), adjustment]


made = pytest.mark.parametrize("make", [stack_of, parts_of], ids=["stack", "parts"])


# Half precision.


class LongWalk(WalkEnv):
    """Each episode has 1000 steps."""

    def _reset(self, tensordict=None, **kwargs):
        out = super()._reset(tensordict, **kwargs)
        out["left"] = torch.full_like(out["left"], 1000)
        return out


@pytest.mark.parametrize(
    ("make", "dtype"),
    [(stack_of, torch.bfloat16), (stack_of, torch.float16), (parts_of, torch.bfloat16)],
)
def test_a_sum_of_half_precision_log_probs_is_exact(make, dtype):
    actor, controller = make_actor().to(dtype), SpyController()
    env = with_transforms(LongWalk((2,), dtype=dtype), *make(actor, controller))
    for name in ("kl", "ref_log_prob", "episode_kl"):
        assert env.observation_spec[name].dtype == torch.float32
    check_env_specs(env)
    step = play(env, moved(actor), 1000)["next"]
    assert env.observation_spec.contains(step[:, 0].select(*env.observation_spec.keys()))
    assert step["done"][:, -1].all()
    exact = step["kl"].double().cumsum(1)
    assert exact[:, -1].abs().min() > 1
    # 1000 additions in float32, each of which rounds a sum that is at most `size`.
    size = step["kl"].double().abs().sum(1, keepdim=True).max().item()
    assert_close(step["episode_kl"].double(), exact, atol=1000 * size * 2.0**-24, rtol=0)
    ((told, n),) = controller.calls
    assert n == 2
    assert_close(told, exact[:, -1].mean().item(), atol=1000 * size * 2.0**-24, rtol=0)


class Measured(Transform):
    """Writes a KL that was measured elsewhere, in half precision."""

    def __init__(self, dtype: torch.dtype):
        super().__init__(out_keys=["kl"])
        self.dtype = dtype

    def _step(self, tensordict, next_tensordict):
        kl = torch.full((*next_tensordict.batch_size, 1), 0.1, dtype=self.dtype)
        return next_tensordict.set("kl", kl)

    def _reset(self, tensordict, tensordict_reset):
        return self._step(tensordict, tensordict_reset)

    def transform_observation_spec(self, observation_spec: Any):
        shape = torch.Size((*observation_spec.shape, 1))
        observation_spec["kl"] = Unbounded(shape=shape, dtype=self.dtype)
        return observation_spec


@pytest.mark.parametrize("place", ["env", "batch"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_kl_in_half_precision_is_summed_in_float32(dtype, place):
    controller = SpyController()
    adjustment = RewardAdjustmentTransform(controller, update_every=1)
    if place == "env":
        env = with_transforms(LongWalk((2,)), Measured(dtype), adjustment)
        check_env_specs(env)
        controller.calls.clear()
        step = play(env, policy(), 1000)["next"]
    else:
        step = adjustment(play(with_transforms(LongWalk((2,)), Measured(dtype)), policy(), 1000))
        step = step["next"]
    assert (step["kl"].dtype, step["episode_kl"].dtype) == (dtype, torch.float32)
    exact = step["kl"].double().cumsum(1)
    # 1000 additions in float32, each of which rounds a sum that is at most the last one.
    bound = 1000 * exact.max().item() * 2.0**-24
    assert_close(step["episode_kl"].double(), exact, atol=bound, rtol=0)
    ((told, n),) = controller.calls
    assert n == 2
    assert_close(told, exact[:, -1].mean().item(), atol=bound, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_cast_leaves_the_coefficient_alone(dtype):
    transform: Any = KLRewardTransform(make_actor(), coef=0.1).to(dtype)
    assert transform.coef.dtype == torch.float64
    assert transform.coef.item() == 0.1
    bare = play(WalkEnv((2,)), policy())
    after = transform(bare)["next"]
    assert_close(after["kl_coeff"], torch.full((2, 12, 1), 0.1), rtol=0, atol=0)


# Steps that are not samples.


@made
@pytest.mark.parametrize("per", ["trajectory", "step"])
@pytest.mark.parametrize(
    "first", [ExplorationType.DETERMINISTIC, ExplorationType.MODE, "random", "sampled"], ids=str
)
def test_a_trajectory_that_did_not_begin_with_samples_is_not_told(first, per, make):
    actor, controller = make_actor(), SpyController(per=per)
    env = with_transforms(WalkEnv((3,), longest=8), *make(actor, controller))
    behaviour = moved(actor)
    carried, sampled, expected = env.reset(), torch.ones(3, dtype=torch.bool), []
    for t in range(40):
        draws = t >= 3 or first == "sampled"
        exploration = ExplorationType.RANDOM if draws or first == "random" else first
        with set_exploration_type(exploration):
            acted = (
                env.rand_action(carried) if not draws and first == "random" else behaviour(carried)
            )
            step, carried = env.step_and_maybe_reset(acted)
        after = step["next"]
        sampled &= draws
        ended = after["done"].squeeze(-1)
        if per == "step":
            expected += after["kl"].flatten().tolist() if draws else []
        else:
            expected += after["episode_kl"].flatten()[ended & sampled].tolist()
        sampled |= ended  # the next one is told, if it is drawn from its first step on
    n, told = total(controller)
    assert n == len(expected) > 10
    assert_close(told, sum(expected), atol=1e-4, rtol=0)


class OneForAll(WalkEnv):
    """Agents with a flag each, of which only the first is ever done: the env resets all of them
    then.
    """

    def __init__(self):
        super().__init__((2,), n_agents=3)
        flag = Categorical(2, dtype=torch.bool, shape=torch.Size((2, 3, 1)))
        flags = {"done": flag, "terminated": flag.clone()}
        self.full_done_spec["agents"] = Composite(flags, shape=(2, 3))

    def _mark(self, out):
        first = torch.tensor([[True], [False], [False]])
        for name in ("done", "terminated"):
            out["agents", name] = out[name].unsqueeze(-2) & first
        return out

    def _step(self, tensordict):
        return self._mark(super()._step(tensordict))

    def _reset(self, tensordict=None, **kwargs):
        return self._mark(super()._reset(tensordict, **kwargs))


@pytest.mark.parametrize("place", ["env", "batch"])
def test_an_env_that_resets_all_agents_when_one_is_done_ends_all_of_their_trajectories(place):
    actor, controller = make_actor(agents=True), SpyController()
    keys = KLKeys(reward=("agents", "reward"))
    stack = KLConstrainedTransform(actor, controller, update_every=1, keys=keys)
    if place == "env":
        batch = play(with_transforms(OneForAll(), stack), moved(actor), 20)
    else:
        batch = stack(play(OneForAll(), moved(actor), 20))
    ended = batch["next", "done"].squeeze(-1)
    starts = torch.cat([torch.ones(2, 1, dtype=torch.bool), ended[:, :-1]], 1)
    after = batch["next", "agents"]
    assert_close(after["episode_kl"][starts], after["kl"][starts], atol=1e-6, rtol=0)
    n, told = total(controller)
    assert n == 3 * int(ended.sum())
    assert_close(told, after["episode_kl"][ended].double().sum().item(), atol=1e-5, rtol=0)


# What is put around it.


def test_transforms_around_it_leave_it_usable():
    stack, controller = spied()
    env: Any = TransformedEnv(WalkEnv((2,)), stack)
    expected = play(TransformedEnv(WalkEnv((2,)), spied()[0]), policy())["next"]
    assert env.append_transform(StepCounter()) is env
    env.insert_transform(0, RewardSum())
    assert stack.controller is controller
    assert stack.freeze().frozen
    stack.unfreeze()
    check_env_specs(env)
    controller.calls.clear()
    after = play(env, policy())["next"]
    for key in expected.keys():
        assert_same(after[key], expected[key])
    assert after["step_count"].max() > 1
    assert_close(after["episode_reward"][:, 0], after["task_reward"][:, 0])
    assert controller.calls
    for one in (stack, env.transform[1]):
        assert one is stack


def test_one_stack_in_two_envs_is_refused():
    stack, _ = spied()
    env = TransformedEnv(WalkEnv((2,)), stack)
    for attach in (
        lambda: TransformedEnv(WalkEnv((3,)), stack),
        lambda: TransformedEnv(WalkEnv((3,)), compose(stack)),
        lambda: TransformedEnv(WalkEnv((3,)), RewardSum()).append_transform(stack),
    ):
        with pytest.raises(AttributeError, match=r"already set. Call `transform.clone\(\)`"):
            attach()
    assert play(env, policy())["next", "episode_kl"].shape == (2, 12, 1)


@pytest.mark.parametrize(
    "make", [KLConstrainedTransform, KLRewardTransform], ids=lambda c: c.__name__
)
@pytest.mark.parametrize("depth", [1, 2])
def test_one_compose_with_a_stack_in_two_envs_is_refused(depth, make):
    """TorchRL lets a Compose move to another env while the first still has it."""
    inner = compose(RewardSum(), make(make_actor(), 0.1))
    composed = inner if depth == 1 else compose(StepCounter(), inner)
    env = TransformedEnv(WalkEnv((2,)), composed)
    with pytest.raises(RuntimeError, match=f"{make.__name__} is in another env already"):
        TransformedEnv(WalkEnv((3,)), composed)
    del env
    gc.collect()
    moved_on = TransformedEnv(WalkEnv((3,)), composed)
    assert play(moved_on, policy())["next", "kl_coeff"].shape == (3, 12, 1)
