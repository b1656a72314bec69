"""Two stacks in one env, one reward for several agents, and batches that only look like
trajectories.
"""

from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch.testing import assert_close

from tests.helpers import (
    SpyController,
    WalkEnv,
    assert_same,
    make_actor,
    memory_of,
    moved,
    play,
    with_transforms,
    without_kl,
)
from torchrl_kl import (
    KLConstrainedTransform,
    KLDivergenceTransform,
    KLKeys,
    KLRewardTransform,
    ReferenceModelLogProbTransform,
    RewardAdjustmentTransform,
)


def policy():
    return moved(make_actor())


def test_a_shared_reward_is_penalized_with_the_sum_over_agents():
    actor = make_actor(agents=True)
    behaviour = moved(actor)
    stack = KLConstrainedTransform(actor, 0.5, sum_agents=True)
    env = with_transforms(WalkEnv((2,), n_agents=3, shared_reward=True), stack)
    batch = play(env, behaviour)
    each = batch["agents", "action_log_prob"] - batch["next", "agents", "ref_log_prob"]
    assert batch["next", "kl"].shape == batch["next", "reward"].shape
    assert_same(batch["next", "kl"], each.sum(-1, keepdim=True))
    outside = KLConstrainedTransform(actor, 0.5, sum_agents=True)(
        play(WalkEnv((2,), n_agents=3, shared_reward=True), behaviour)
    )
    for name in ("kl", "reward", "episode_kl"):
        assert_same(outside["next", name], batch["next", name])


def test_whether_agents_are_summed_is_a_bool():
    for make in (KLDivergenceTransform, partial(KLConstrainedTransform, make_actor(), 0.1)):
        with pytest.raises(TypeError, match="`sum_agents` must be True or False, got 'sum'"):
            make(sum_agents="sum")  # type: ignore[arg-type]


def test_a_second_stack_without_keys_of_its_own_is_refused():
    make: Any = KLConstrainedTransform
    keys = KLKeys(kl_coeff="other_coeff", task_reward="other_task")
    second = make(make_actor(seed=4), 0.1, keys=keys)
    with pytest.raises(
        RuntimeError, match=r"would overwrite \['ref_log_prob', 'kl'\], which the env has already"
    ):
        with_transforms(WalkEnv((2,)), make(make_actor(), 0.1), second).rollout(2)


def test_a_result_elsewhere_is_not_computed_from_a_penalized_reward():
    batch = KLConstrainedTransform(make_actor(), 0.1)(play(WalkEnv((2,)), policy()))
    with pytest.raises(RuntimeError, match="the batch has 'kl_coeff'"):
        KLRewardTransform(make_actor(), out_keys=[("other", "reward")])(batch)


def test_padding_keeps_its_reward_whatever_its_kl():
    mask = torch.tensor([[True, True, False]])
    following = TensorDict(
        reward=torch.ones(1, 3, 1),
        kl=torch.tensor([0.5, 0.5, float("nan")]).reshape(1, 3, 1),
        done=torch.tensor([False, True, False]).reshape(1, 3, 1),
        batch_size=(1, 3),
    )
    batch = TensorDict(
        next=following, collector=TensorDict(mask=mask, batch_size=(1, 3)), batch_size=(1, 3)
    )
    spy = SpyController()
    out = RewardAdjustmentTransform(spy, time_dim=-1, update_every=1)(batch)["next"]
    expected = torch.tensor([1 - 0.5 * float(spy.coeff), 1 - 0.5 * float(spy.coeff), 1.0])
    assert_close(out["reward"].flatten(), expected)


def test_a_batch_with_nothing_at_its_root_is_not_fake():
    following = TensorDict(
        reward=torch.ones(2, 1), kl=torch.ones(2, 1), done=torch.ones(2, 1).bool(), batch_size=2
    )
    spy = SpyController()
    RewardAdjustmentTransform(spy, time_dim=-1, update_every=1)(
        TensorDict(next=following, batch_size=2)
    )
    assert spy.calls


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_a_shuffled_batch_without_states_is_refused(kind):
    actor = make_actor(kind)
    batch = play(with_transforms(WalkEnv(()), *memory_of(actor)), moved(actor), 20)
    order = torch.arange(20).flip(0)
    with pytest.raises(ValueError, match="do not follow one another"):
        ReferenceModelLogProbTransform(actor, zero_states=True)(without_kl(batch[order]))
