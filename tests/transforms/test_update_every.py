"""When the controller is updated, and the warning where it never is."""

import warnings
from contextlib import contextmanager
from typing import Any

import pytest
from torchrl.envs.utils import ExplorationType, set_exploration_type

from tests.helpers import (
    SpyController,
    WalkEnv,
    make_actor,
    play,
    policy,
    spied,
    with_transforms,
)
from torchrl_kl import AdaptiveKLController, KLConstrainedTransform

BY_DEFAULT: Any = None


def counts(controller: SpyController) -> list[int]:
    return [n for _, n in controller.calls]


def test_a_batch_updates_once_with_what_it_finished():
    stack, controller = spied(update_every=BY_DEFAULT)
    for seed in range(5):
        batch = play(WalkEnv((2,)), policy(), 3 + 7 * seed, seed=seed)
        stack(batch)
        assert sum(counts(controller)) == total_done(seed)
        assert len(controller.calls) <= seed + 1
    assert len(controller.calls) == 5


def total_done(last_seed: int) -> int:
    batches = (play(WalkEnv((2,)), policy(), 3 + 7 * s, seed=s) for s in range(last_seed + 1))
    return sum(int(batch["next", "done"].sum()) for batch in batches)


def test_a_batch_that_finished_nothing_updates_nothing():
    stack, controller = spied(update_every=BY_DEFAULT)
    batch = play(WalkEnv((2,), longest=30), policy(), 1)
    assert not batch["next", "done"].any()
    stack(batch)
    assert not controller.calls


def test_a_deadband_waits_for_two():
    controller = AdaptiveKLController(0.1, target=1e-3, horizon=100, deadband=0.1)
    stack = KLConstrainedTransform(make_actor(), controller)
    batch = play(WalkEnv((1,), longest=2), policy(), 2)
    assert int(batch["next", "done"].sum()) == 1
    stack(batch)
    assert int(stack.statistics.count) == 1
    stack(batch)
    assert int(stack.statistics.count) == 0


@pytest.mark.parametrize(("per", "needed"), [("trajectory", 16), ("step", 256)])
def test_in_an_env_it_waits_for_16_trajectories_or_256_steps(per, needed):
    stack, controller = spied(per, update_every=BY_DEFAULT)
    env = with_transforms(WalkEnv((3,)), stack)
    after = play(env, policy(), 200)["next"]
    n = 600 if per == "step" else int(after["done"].sum())
    assert sum(counts(controller)) + int(stack.statistics.count) == n
    assert len(controller.calls) == n // (needed + 2) or len(controller.calls) == n // needed
    assert all(needed <= one < needed + 3 for one in counts(controller))  # up to 3 come at once


@pytest.mark.parametrize("place", ["env", "batch"])
@pytest.mark.parametrize("update_every", [1, 20])
def test_a_number_waits_in_both(place, update_every):
    stack, controller = spied("step", update_every=update_every)
    if place == "env":
        play(with_transforms(WalkEnv((2,)), stack), policy(), 50)
        assert counts(controller) == [max(2, update_every)] * (50 if update_every == 1 else 5)
    else:
        for _ in range(5):
            stack(play(WalkEnv((2,)), policy(), 4))  # 8 steps
        assert counts(controller) == ([8] * 5 if update_every == 1 else [24])


# A controller that is never fed.


@contextmanager
def warned(n: int):
    """What is warned of, which is `n` times."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught
    told = [w for w in caught if "has not been updated" in str(w.message)]
    assert len(told) == n
    assert all(w.category is UserWarning for w in told)


def long_batch() -> Any:
    batch = play(WalkEnv((2,), longest=60), policy(), 2, seed=3)
    assert not batch["next", "done"].any()
    return batch


def adaptive(**kwargs) -> AdaptiveKLController:
    return AdaptiveKLController(0.1, target=0.1, horizon=100, **kwargs)


def test_ten_batches_without_an_update_warn_once_with_the_missing_count_and_the_fix():
    stack = KLConstrainedTransform(make_actor(), adaptive(), update_every=7)
    batch = play(WalkEnv((2,), longest=2), policy(), 2)
    with warned(0):
        stack(batch)  # 2 trajectories
        for _ in range(8):
            stack(long_batch())
    message = (
        r"has not been updated for 10 batches: an update waits for 7 finished trajectories, "
        r"2 came, "
        r'5 are missing\. Lower `update_every`, collect longer batches, or use .* per="step"'
    )
    with pytest.warns(UserWarning, match=message):
        stack(long_batch())
    with warned(0):
        for _ in range(30):
            stack(long_batch())


def test_the_count_goes_on_in_a_resumed_run():
    stacks = [KLConstrainedTransform(make_actor(), adaptive(), update_every=7) for _ in range(3)]
    with warned(0):
        for _ in range(9):
            stacks[0](long_batch())
    stacks[1].load_state_dict(stacks[0].state_dict())
    with pytest.warns(UserWarning, match="has not been updated for 10 batches"):
        stacks[1](long_batch())
    stacks[2].load_state_dict(stacks[1].state_dict())
    with warned(0):
        for _ in range(12):
            stacks[2](long_batch())


@pytest.mark.parametrize("per", ["trajectory", "step"])
def test_ten_thousand_env_steps_without_an_update_warn_once(per):
    stack = KLConstrainedTransform(make_actor(), adaptive(per=per), update_every=10**6)
    stack.feed._idle["env steps"] = 9_989  # as after so many
    env = with_transforms(WalkEnv((2,)), stack)
    with warned(0):
        play(env, policy(), 10)
    unit = "steps" if per == "step" else "finished trajectories"
    message = (
        rf"for 10,000 env steps: an update waits for 1000000 {unit}, \d+ came, 99\d+ are missing"
    )
    with pytest.warns(UserWarning, match=message):
        play(env, policy(), 1)
    with warned(0):
        play(env, policy(), 20)


@pytest.mark.parametrize(
    ("per", "text"), [("trajectory", "16 finished trajectories, 0 came"), ("step", "256 steps, 2 ")]
)
def test_it_says_for_how_many_an_update_waits_by_default(per, text):
    stack = KLConstrainedTransform(make_actor(), adaptive(per=per))
    stack.feed._idle["env steps"] = 9_999
    with pytest.warns(UserWarning, match=f"an update waits for {text}"):
        play(with_transforms(WalkEnv((2,)), stack), policy(), 1)
    if per == "trajectory":
        on_batches = KLConstrainedTransform(make_actor(), adaptive())
        on_batches.feed._idle["batches"] = 9
        with pytest.warns(UserWarning, match="waits for 1 finished trajectories, 0 came, 1 are"):
            on_batches(long_batch())


def test_each_env_step_is_counted():
    stack = KLConstrainedTransform(make_actor(), adaptive(), update_every=10**6)
    play(with_transforms(WalkEnv((2,)), stack), policy(), 25)
    assert stack.feed._idle["env steps"] == 25


def test_an_update_begins_the_count_again():
    stack = KLConstrainedTransform(make_actor(), adaptive())
    done = play(WalkEnv((2,), longest=2), policy(), 2)
    with warned(0):
        for _ in range(4):
            for _ in range(8):
                stack(long_batch())
            stack(done)


@pytest.mark.parametrize("how", ["frozen", "eval", "constant"])
def test_a_controller_that_is_not_to_move_is_not_missed(how):
    stack = KLConstrainedTransform(make_actor(), 0.1 if how == "constant" else adaptive())
    if how == "frozen":
        stack.freeze()
    elif how == "eval":
        stack.eval()
    with warned(0):
        for _ in range(30):
            stack(long_batch())
    if how == "frozen":
        with warned(0), set_exploration_type(ExplorationType.RANDOM):
            stack.feed._idle["env steps"] = 9_999
            play(with_transforms(WalkEnv((2,)), stack), policy(), 5)
