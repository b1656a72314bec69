"""Who moves the controller, and who never does."""

import pytest
import torch
from tensordict.nn import InteractionType
from torch.testing import assert_close
from torchrl.collectors import Collector
from torchrl.data import (
    LazyTensorStorage,
    ReplayBuffer,
    TensorDictReplayBuffer,
)
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
    KLConstrainedTransform,
)


@pytest.mark.parametrize(
    "exploration",
    [
        None,
        ExplorationType.RANDOM,
        ExplorationType.MODE,
        ExplorationType.MEAN,
        ExplorationType.DETERMINISTIC,
    ],
)
def test_only_steps_with_sampled_actions_move_it(exploration):
    actor, controller = make_actor("normal"), SpyController(per="step")
    stack = KLConstrainedTransform(actor, controller, update_every=1)
    env = with_transforms(WalkEnv((2,), discrete=False), stack)
    with set_exploration_type(exploration):
        env.rollout(3, moved(actor), break_when_any_done=False)
    assert bool(controller.calls) == (exploration == ExplorationType.RANDOM)


def test_a_policy_that_samples_by_default_moves_it():
    actor = make_actor(default_interaction_type=InteractionType.RANDOM)
    controller = SpyController(per="step")
    env = with_transforms(WalkEnv((2,)), KLConstrainedTransform(actor, controller, update_every=1))
    env.rollout(3, moved(actor), break_when_any_done=False)
    assert len(controller.calls) == 3


def test_collectors_move_it():
    stack, controller = spied("step")
    collect(with_transforms(WalkEnv((2,)), stack), policy(), frames=8, batches=2)
    assert total(controller)[0] == 16


@pytest.mark.parametrize("per", ["step", "trajectory"])
def test_nothing_moves_it_while_frozen(per):
    stack, controller = spied(per)
    assert stack.freeze() is stack
    env = with_transforms(WalkEnv((2,)), stack)
    play(env, policy())
    stack_outside, controller_outside = spied(per)
    stack_outside.freeze()(play(WalkEnv((2,)), policy()))
    assert not controller.calls + controller_outside.calls
    assert int(stack.statistics.count) == int(stack_outside.statistics.count) == 0
    assert stack.unfreeze() is stack
    play(env, policy())
    stack_outside.unfreeze()(play(WalkEnv((2,)), policy()))
    assert controller.calls
    assert controller_outside.calls


@pytest.mark.parametrize("per", ["step", "trajectory"])
def test_batches_do_not_move_it_after_eval_and_do_again_after_train(per):
    stack, controller = spied(per)
    batch = play(WalkEnv((2,)), policy())
    after = stack.eval()(batch)["next"]
    assert_close(after["reward"], after["task_reward"] - 0.1 * after["kl"])
    assert not controller.calls
    assert int(stack.statistics.count) == 0
    stack.train()(batch)
    assert len(controller.calls) == 1


@pytest.mark.parametrize("how", ["built", "alone", "appended", "inserted", "cloned"])
@pytest.mark.parametrize("per", ["step", "trajectory"])
def test_batches_move_it_after_it_was_in_an_env(per, how):
    """TorchRL puts the transforms of an env into eval mode, which stopped the controller for good.

    So did an env that was only built to look at its specs.
    """
    stack, controller = spied(per)
    if how in ("built", "cloned"):
        env = with_transforms(WalkEnv((2,)), stack)
    elif how == "alone":
        env = TransformedEnv(WalkEnv((2,)), stack)
    else:
        env = TransformedEnv(WalkEnv((2,)))
        env.append_transform(stack) if how == "appended" else env.insert_transform(0, stack)
    check_env_specs(env)
    controller.calls.clear()
    used = stack.clone() if how == "cloned" else stack
    batch = play(WalkEnv((2,)), policy())
    used(batch)
    assert total(controller)[0] == (batch.numel() if per == "step" else batch["next", "done"].sum())
    controller.calls.clear()
    used.eval()(batch)
    assert not controller.calls


def test_a_stack_that_was_in_an_env_is_told_of_no_replay_samples():
    stack, controller = spied("step")
    check_env_specs(with_transforms(WalkEnv((2,)), stack))
    data = play(WalkEnv((2,)), policy()).reshape(-1)
    replay = ReplayBuffer(
        storage=LazyTensorStorage(len(data)), batch_size=8, transform=stack.clone()
    )
    replay.extend(data)
    replay.sample()
    assert not controller.calls


@pytest.mark.parametrize("buffer", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("prefetch", [None, 2])
@pytest.mark.parametrize("appended", [False, True])
@pytest.mark.parametrize("composed", [False, True])
def test_replay_sampling_never_moves_it(buffer, prefetch, appended, composed):
    stack, controller = spied("step")
    data = play(WalkEnv((2,)), policy()).reshape(-1)
    transform = compose(stack) if composed else stack
    kwargs = {} if appended else {"transform": transform}
    replay = buffer(storage=LazyTensorStorage(len(data)), batch_size=8, prefetch=prefetch, **kwargs)
    if appended:
        replay.append_transform(transform)
    replay.extend(data)
    for _ in range(5):
        assert (replay.sample()["next", "kl"] != 0).any()
    assert not controller.calls
    assert int(stack.statistics.count) == 0


def test_reading_a_replay_buffer_by_index_never_moves_it():
    stack, controller = spied("step")
    data = play(WalkEnv((2,)), policy()).reshape(-1)
    replay = ReplayBuffer(storage=LazyTensorStorage(len(data)), batch_size=8, transform=stack)
    replay.extend(data)
    assert (replay[:4]["next", "kl"] != 0).any()
    assert not controller.calls


@pytest.mark.parametrize("per", ["step", "trajectory"])
def test_spec_checks_and_fake_data_never_move_it(per):
    stack, controller = spied(per)
    env = with_transforms(WalkEnv((2,), longest=2), stack)
    with set_exploration_type(ExplorationType.RANDOM):
        check_env_specs(env)
        check_env_specs(env, break_when_any_done=False)
    stack_outside, controller_outside = spied(per)
    collector = Collector(
        WalkEnv((2,)),
        policy(),
        frames_per_batch=8,
        total_frames=8,
        auto_register_policy_transforms=False,
    )
    fake = collector.fake_tensordict()
    collector.shutdown()
    assert fake.names[-1] == "time"
    stack_outside(fake)
    assert not controller.calls + controller_outside.calls
    assert int(stack.statistics.count) == int(stack_outside.statistics.count) == 0


def test_random_actions_never_move_it():
    stack, controller = spied("step")
    after = play(with_transforms(WalkEnv((2,)), stack))["next"]
    assert not controller.calls
    assert_close(after["reward"], after["task_reward"], rtol=0, atol=0)


def test_random_warm_up_frames_are_scored_zero_in_the_env_and_not_counted():
    stack, controller = spied("step")
    batches = collect(
        with_transforms(WalkEnv((2,)), stack), policy(), frames=8, batches=3, init_random_frames=16
    )
    kl = torch.stack([batch["next", "kl"] for batch in batches])
    assert (kl[:2] == 0).all()
    assert (kl[2] != 0).all()
    assert total(controller)[0] == 8
