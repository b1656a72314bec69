"""Clones of a stack, each in an env, share its controller but not what they know of their rows."""

import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torchrl.envs import InitTracker, RewardSum, SerialEnv, TransformedEnv
from torchrl.envs.utils import ExplorationType, set_exploration_type

from tests.helpers import WalkEnv, make_actor, play, policy, spied, total, with_transforms
from torchrl_kl import KLConstrainedTransform, PlannedKLController


def returns_of(batch: Any) -> list[float]:
    """Task rewards, summed up over each trajectory that ends in a batch (R, T)."""
    found, sums = [], batch["next", "task_reward"].double().squeeze(-1)
    for row, ends in zip(sums, batch["next", "done"].squeeze(-1), strict=True):
        total = 0.0
        for reward, end in zip(row.tolist(), ends.tolist(), strict=True):
            total += reward
            if end:
                found.append(total)
                total = 0.0
    return found


def test_an_evaluation_leaves_out_no_trajectory_of_the_training():
    """Those that went on after an evaluation passed for its own, whose actions were no samples."""
    stack, controller = spied()
    training, evaluation = (with_transforms(WalkEnv((3,)), one) for one in (stack, stack.clone()))
    actor, n_ended, sums = policy(), 0, 0.0
    state = training.reset()
    with torch.no_grad():
        for _ in range(20):
            with set_exploration_type(ExplorationType.RANDOM):
                step, state = training.step_and_maybe_reset(actor(state))
            ended = step["next", "done"]
            n_ended += int(ended.sum())
            sums += step["next", "episode_kl"][ended].sum().item()
            with set_exploration_type(ExplorationType.DETERMINISTIC):
                evaluation.rollout(2, actor, break_when_any_done=False)
    n, kl = total(controller)
    assert n == n_ended
    assert kl == pytest.approx(sums, rel=1e-5)


def test_a_plan_knows_the_rewards_of_each_env():
    """The rewards of trajectories in different envs were added up."""

    class Listening(PlannedKLController):
        def observe_rewards(self, rewards, **about):
            heard.extend(rewards.tolist())
            return super().observe_rewards(rewards, **about)

    heard: list[float] = []
    stack = KLConstrainedTransform(make_actor(), Listening(0.3), update_every=4)
    envs: Any = SerialEnv(3, [lambda: with_transforms(WalkEnv(), stack.clone()) for _ in range(3)])
    batch = play(envs, policy(), 20)
    returns = torch.tensor(returns_of(batch), dtype=torch.float64)
    assert len(heard) >= 4
    # In an env a float32 reward is added up in float64, here too.
    for one in heard:
        assert (returns - one).abs().min() <= 1e-9


REPLACED: dict[str, Callable[[Any], Any]] = {
    "wrapped": lambda env: TransformedEnv(env, InitTracker()),
    "wrapped twice": lambda env: TransformedEnv(TransformedEnv(env, RewardSum()), InitTracker()),
    "inserted": lambda env: env.insert_transform(0, InitTracker()),
}


def is_fed(controller: Any, env: Any) -> bool:
    """Whether the controller is told of a rollout in the env."""
    before = len(controller.calls)
    play(env, policy())
    return len(controller.calls) > before


@pytest.mark.parametrize("how", REPLACED)
@pytest.mark.filterwarnings("ignore:Nested TransformedEnvs are automatically unwrapped")
def test_freezing_a_stack_freezes_the_clone_that_has_replaced_it_in_its_env(how):
    """TorchRL puts a clone into the outer env, which the user does not have."""
    stack, controller = spied()
    env = REPLACED[how](TransformedEnv(WalkEnv((3,)), stack))
    assert not any(one is stack for one in env.transform.modules())
    stack.freeze()
    assert not is_fed(controller, env)
    stack.unfreeze()
    assert is_fed(controller, env)


def test_a_stack_that_was_frozen_before_it_was_replaced_is_unfrozen():
    stack, controller = spied()
    env = TransformedEnv(WalkEnv((3,)), stack.freeze()).insert_transform(0, InitTracker())
    assert not is_fed(controller, env)
    stack.unfreeze()
    assert is_fed(controller, env)


@pytest.mark.parametrize("copied", [False, True])
def test_what_is_in_the_env_can_be_unfrozen_there(copied):
    """It stayed frozen for ever, since the stack that it has replaced was."""
    stack, _ = spied()
    env = TransformedEnv(WalkEnv((3,)), stack.freeze()).insert_transform(0, InitTracker())
    env = copy.deepcopy(env) if copied else env
    transforms: Any = env.transform
    inside = transforms[-1]
    assert inside.frozen
    assert is_fed(inside.unfreeze().controller, env)
    assert stack.frozen == copied


def test_freezing_a_clone_around_the_same_env_leaves_the_stack_alone():
    stack, controller = spied()
    training = TransformedEnv(WalkEnv((3,)), stack)
    evaluation = TransformedEnv(training.base_env, stack.clone())
    cast(Any, evaluation.transform).freeze()
    assert not is_fed(controller, evaluation)
    assert is_fed(controller, training)


def test_a_clone_for_another_env_is_frozen_by_itself():
    stack, controller = spied()
    training = with_transforms(WalkEnv((3,)), stack)
    for clone in (stack.clone().freeze(), stack.clone()):
        evaluation = with_transforms(WalkEnv((3,)), clone)
        clone.freeze()
        assert not is_fed(controller, evaluation)
    assert is_fed(controller, training)


def test_a_plan_that_is_resumed_leaves_out_trajectories_that_a_clone_had_begun():
    """No state holds the rewards of clones; the rest of a trajectory passed for the whole."""

    class Listening(PlannedKLController):
        def observe_rewards(self, rewards, **about):
            heard.extend(rewards.tolist())
            return super().observe_rewards(rewards, **about)

    heard: list[float] = []
    # Uniform: the KL is exactly 0, and does not tell how far a trajectory has come.
    actor = make_actor()
    for parameter in actor.parameters():
        torch.nn.init.zeros_(parameter)

    def make():
        stack = KLConstrainedTransform(actor, Listening(0.3), update_every=50)
        made: Any = SerialEnv(3, [lambda: with_transforms(WalkEnv(), stack.clone())] * 3)
        return made, stack

    torch.manual_seed(0)
    (env, stack), (resumed, loaded), steps = make(), make(), []
    state = env.reset()
    with set_exploration_type(ExplorationType.RANDOM):
        for t in range(60):
            if t == 2:
                loaded.load_state_dict(stack.state_dict())
                env = resumed
            step, state = env.step_and_maybe_reset(actor(state))
            steps.append(step.clone())
    returns = torch.tensor(returns_of(torch.stack(steps, 1)), dtype=torch.float64)
    assert len(heard) >= 50
    for one in heard:
        assert (returns - one).abs().min() <= 1e-9
