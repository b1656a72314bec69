"""Who moves the controller, how often, and the warning where nobody does."""

from typing import Any

import pytest
import torch
from torch.testing import assert_close
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import TransformedEnv, check_env_specs
from torchrl.envs.utils import ExplorationType, set_exploration_type

from tests.helpers import (
    SpyController,
    WalkEnv,
    collect,
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
    AdaptiveKLController,
    KLConstrainedTransform,
    KLDivergenceTransform,
    ReferenceModelLogProbTransform,
    RewardAdjustmentTransform,
)

any_per = pytest.mark.parametrize("per", ["trajectory", "step"])
BY_DEFAULT: Any = None


# Steps whose actions are samples.


@pytest.mark.parametrize("exploration", [None, "random", "mode", "mean", "deterministic"])
def test_only_steps_with_sampled_actions_move_it(exploration):
    actor, controller = make_actor("normal"), SpyController(per="step")
    stack = KLConstrainedTransform(actor, controller, update_every=1)
    env = with_transforms(WalkEnv((2,), discrete=False), stack)
    with set_exploration_type(exploration):
        env.rollout(3, moved(actor), break_when_any_done=False)
    assert bool(controller.calls) == (exploration == "random")


def stack_of(actor: Any, controller: Any) -> list[Any]:
    return [KLConstrainedTransform(actor, controller, update_every=1)]


def parts_of(actor: Any, controller: Any) -> list[Any]:
    adjustment = RewardAdjustmentTransform(controller, update_every=1)
    return [ReferenceModelLogProbTransform(actor), KLDivergenceTransform(), adjustment]


@any_per
@pytest.mark.parametrize("make", [stack_of, parts_of], ids=["stack", "parts"])
@pytest.mark.parametrize("first", [ExplorationType.DETERMINISTIC, "random"], ids=str)
def test_a_trajectory_is_told_from_its_first_step_on_if_all_were_drawn(first, per, make):
    """Steps 0 to 2 and 20 are not drawn: nothing of their trajectories is told from there on."""
    actor, controller = make_actor(), SpyController(per=per)
    env = with_transforms(WalkEnv((3,), longest=8), *make(actor, controller))
    behaviour = moved(actor)
    carried, all_drawn, expected = env.reset(), torch.ones(3, dtype=torch.bool), []
    for t in range(40):
        drawn = t >= 3 and t != 20
        with set_exploration_type(first if not drawn and first != "random" else "random"):
            if drawn or first != "random":
                carried = behaviour(carried)
            else:
                carried = env.rand_action(carried.exclude("action_log_prob", "logits"))
            step, carried = env.step_and_maybe_reset(carried)
        after = step["next"]
        all_drawn &= drawn
        assert after["not_drawn"].squeeze(-1).equal(~all_drawn)
        ended = after["done"].squeeze(-1)
        fed, counted = ("kl", all_drawn) if per == "step" else ("episode_kl", ended & all_drawn)
        expected += after[fed].flatten()[counted].tolist()
        all_drawn |= ended
    n, told = total(controller)
    assert n == len(expected) > 10
    assert_close(told, sum(expected), atol=1e-4, rtol=0)


# Frozen, eval, replay, fake data.


@any_per
def test_nothing_moves_it_while_frozen(per):
    stack, controller = spied(per)
    clone: Any = stack.clone()
    env, batch = with_transforms(WalkEnv((2,)), stack), play(WalkEnv((2,)), policy())
    assert stack.freeze() is stack
    play(env, policy())
    after = clone(batch)["next"]  # clones share the feed, and with it the flag
    assert_close(after["reward"], after["task_reward"] - 0.1 * after["kl"])
    assert clone.frozen
    assert not controller.calls
    assert int(stack.statistics.count) == 0
    assert stack.unfreeze() is stack
    play(env, policy())
    n = len(controller.calls)
    clone(batch)
    assert len(controller.calls) > n > 0


@any_per
@pytest.mark.parametrize("how", ["built", "alone", "appended", "inserted", "cloned"])
def test_eval_stops_batches_but_the_eval_of_an_env_does_not(per, how):
    """TorchRL puts the transforms of an env into eval mode, which must not stop the controller."""
    stack, controller = spied(per)
    env = TransformedEnv(WalkEnv((2,)))
    if how in ("built", "cloned"):
        env = with_transforms(WalkEnv((2,)), stack)
    elif how == "alone":
        env = TransformedEnv(WalkEnv((2,)), stack)
    else:
        env.append_transform(stack) if how == "appended" else env.insert_transform(0, stack)
    check_env_specs(env)
    controller.calls.clear()
    used = stack.clone() if how == "cloned" else stack
    batch = play(WalkEnv((2,)), policy())
    used(batch)
    assert total(controller)[0] == (batch.numel() if per == "step" else batch["next", "done"].sum())
    used.eval()(batch)
    assert len(controller.calls) == 1
    used.train()(batch)
    assert len(controller.calls) == 2


@pytest.mark.parametrize("how", ["given", "appended", "composed", "by index"])
def test_replay_sampling_never_moves_it(how):
    stack, controller = spied("step")
    data = play(WalkEnv((2,)), policy()).reshape(-1)
    transform = compose(stack) if how == "composed" else stack
    given = None if how == "appended" else transform
    replay = ReplayBuffer(storage=LazyTensorStorage(len(data)), batch_size=8, transform=given)
    if how == "appended":
        replay.append_transform(transform)
    replay.extend(data)
    sample: Any = replay[:4] if how == "by index" else replay.sample()
    assert (sample["next", "kl"] != 0).any()
    assert not controller.calls
    assert int(stack.statistics.count) == 0
    stack.train()(data)  # so a buffer tells a transform that its batches are not new
    assert total(controller)[0] == 24


def test_replay_sampling_leaves_open_trajectories_alone():
    stack, _ = spied(time_dim=-1)
    batches = collect(WalkEnv((2,), longest=9), policy(), frames=8, batches=6)
    sampled, _ = spied(time_dim=-1)
    for batch in batches:
        expected = stack(batch)["next", "episode_kl"]
        assert sampled.train()(batch)["next", "episode_kl"].equal(expected)
        sampled.eval()(batches[0])


@any_per
def test_spec_checks_and_fake_data_never_move_it(per):
    stack, controller = spied(per)
    env = with_transforms(WalkEnv((2,), longest=2), stack)
    with set_exploration_type(ExplorationType.RANDOM):
        check_env_specs(env)
    options: Any = {"frames_per_batch": 8, "total_frames": 8}
    collector = Collector(WalkEnv((2,)), policy(), auto_register_policy_transforms=False, **options)
    fake = collector.fake_tensordict()
    collector.shutdown()
    assert fake.names[-1] == "time"
    stack(fake)
    fake["next", "done"] = fake["next", "truncated"] = torch.ones(2, 4, 1, dtype=torch.bool)
    stack(fake)  # as a collector ends it
    assert not controller.calls
    assert int(stack.statistics.count) == 0


# How many values an update waits for.


@pytest.mark.parametrize(("per", "needed"), [("trajectory", 16), ("step", 256)])
def test_in_an_env_it_waits_for_16_trajectories_or_256_steps(per, needed):
    stack, controller = spied(per, update_every=BY_DEFAULT)
    after = play(with_transforms(WalkEnv((3,)), stack), policy(), 100)["next"]
    n = 300 if per == "step" else int(after["done"].sum())
    assert total(controller)[0] + int(stack.statistics.count) == n >= needed
    assert all(needed <= one < needed + 3 for _, one in controller.calls)  # up to 3 come at once


# A controller that is never fed.


def adaptive(per: Any = "trajectory", coeff: Any = 0.1) -> AdaptiveKLController:
    return AdaptiveKLController(coeff, target=0.1, horizon=100, per=per)


def long_batch() -> Any:
    batch = play(WalkEnv((2,), longest=60), policy(), 2, seed=3)
    assert not batch["next", "done"].any()
    return batch


def test_ten_batches_without_an_update_warn_once_with_what_came_and_the_fix():
    stack = KLConstrainedTransform(make_actor(), adaptive(), update_every=7)
    stack(play(WalkEnv((2,), longest=2), policy(), 2))  # 2 trajectories
    for _ in range(8):
        stack(long_batch())  # warnings are errors
    text = (
        r"has not been updated for 10 batches: an update waits for 7 finished trajectories, and 2 "
        r'came\. Lower `update_every`, collect longer batches, use .* per="step"'
    )
    with pytest.warns(UserWarning, match=text):
        stack(long_batch())
    for _ in range(12):
        stack(long_batch())
    frozen = KLConstrainedTransform(make_actor(), adaptive()).freeze()
    for other in (frozen, KLConstrainedTransform(make_actor(), 0.1)):
        for _ in range(12):
            other(long_batch())  # it is not to move, and not missed


@pytest.mark.parametrize(
    ("per", "text"),
    [("trajectory", "16 finished trajectories, and 0"), ("step", "256 steps, and 22")],
)
def test_ten_thousand_env_steps_without_an_update_warn_once(per, text):
    stack = KLConstrainedTransform(make_actor(), adaptive(per))
    stack.penalty.feed._idle["env steps"] = 9_989  # as after so many
    env = with_transforms(WalkEnv((2,), longest=999), stack)
    play(env, policy(), 10, seed=3)
    with pytest.warns(UserWarning, match=f"for 10,000 env steps: an update waits for {text} came"):
        play(env, policy(), 1, seed=3)
    play(env, policy(), 12, seed=3)


def test_a_plan_that_gets_no_rewards_is_warned_of():
    stack = KLConstrainedTransform(make_actor(), adaptive(coeff="plan"))
    for _ in range(9):
        stack(long_batch())
    with pytest.warns(UserWarning, match="it plans its coefficient from the rewards of finished"):
        stack(long_batch())
