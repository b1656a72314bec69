"""Entries in other places, several rewards, rewards of many shapes."""

import re
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import Categorical
from torch.testing import assert_close
from torchrl.data import Composite, Unbounded
from torchrl.envs import RenameTransform, check_env_specs

from tests.helpers import (
    N_ACTIONS,
    N_OBS,
    WalkEnv,
    assert_within,
    make_actor,
    moved,
    play,
    probabilistic_actor,
    rounding,
    sharp,
    ulps,
    with_transforms,
)
from torchrl_kl import KLConstrainedTransform, KLKeys, KLRewardTransform

any_batch = pytest.mark.parametrize("batch_size", [(), (2,), (2, 3)], ids=str)
PIECES = {"stack": KLConstrainedTransform, "preset": KLRewardTransform}
either = pytest.mark.parametrize("make", PIECES.values(), ids=PIECES)


def k1(
    batch, policy, reference, *, observation: Any = "observation", action: Any = "action"
) -> torch.Tensor:
    """From the two networks alone, trailing 1."""
    with torch.no_grad():
        logits = [
            actor[0].module(batch[observation]).log_softmax(-1) for actor in (policy, reference)
        ]
    log_prob, ref_log_prob = (x.gather(-1, batch[action].unsqueeze(-1)) for x in logits)
    return log_prob - ref_log_prob


def rounded(batch, *actors) -> torch.Tensor:
    """The rounding of the log-probs of these actors, trailing 1."""
    return torch.stack([rounding(actor, batch) for actor in actors]).sum(0).unsqueeze(-1)


# Nested keys.


def far_actor() -> Any:
    """Its action, log-prob and parameters are in three different branches."""
    net = TensorDictModule(
        nn.Linear(N_OBS, N_ACTIONS), ["observation"], [("hand", "deep", "logits")]
    )
    actor = probabilistic_actor(
        net,
        in_keys={"logits": ("hand", "deep", "logits")},
        out_keys=[("hand", "deep", "action")],
        log_prob_keys=[("record", "log_prob")],
        distribution_class=Categorical,
        return_log_prob=True,
    )
    return sharp(actor)


def far_env(batch_size, *transforms) -> Any:
    return with_transforms(
        WalkEnv(batch_size),
        RenameTransform([], [], in_keys_inv=["action"], out_keys_inv=[("hand", "deep", "action")]),
        RenameTransform(["reward"], [("task", "inner", "reward")]),
        *transforms,
    )


@any_batch
def test_action_log_prob_and_reward_in_three_branches(batch_size):
    actor = far_actor()
    policy = moved(actor)
    reward = ("task", "inner", "reward")

    def stack() -> Any:
        return KLConstrainedTransform(actor, 0.5, keys=KLKeys(reward=reward))

    env = far_env(batch_size, stack())
    check_env_specs(env)
    batch = play(env, policy)
    kl = k1(batch, policy, actor, action=("hand", "deep", "action"))
    assert kl.abs().max() > 1e-2
    following = batch["next"]
    bound, one = rounded(batch, policy, actor), 0.5 * rounded(batch, actor)
    task_reward = following["task", "inner", "task_reward"]
    terms = ulps(task_reward, 0.5 * kl)
    assert_within(following["record", "kl"], kl, bound)
    assert_within(following[reward], task_reward - 0.5 * kl, 0.5 * bound + terms)
    plain = play(far_env(batch_size), policy)
    assert_within(stack()(plain)["next"][reward], following[reward], one + terms)
    preset = KLRewardTransform(actor, 0.5, in_keys=[reward])(plain)["next"]
    assert_within(preset[reward], following[reward], one + terms)
    env = far_env(batch_size, KLRewardTransform(actor, 0.5, in_keys=[reward]))
    check_env_specs(env)
    assert_within(play(env, policy)["next"][reward], following[reward], one + terms)


# Several rewards.


class BonusEnv(WalkEnv):
    """WalkEnv with a second reward of any shape.

    Args:
        shape: of the second reward, beyond the batch.
    """

    def __init__(self, batch_size: tuple[int, ...] = (), shape: tuple[int, ...] = (1,)):
        super().__init__(batch_size)
        self.bonus_shape = shape
        bonus = Unbounded(torch.Size((*batch_size, *shape)))
        self.reward_spec = Composite(
            reward=Unbounded(torch.Size((*batch_size, 1))),
            bonus=bonus,
            shape=torch.Size(batch_size),
        )

    def _step(self, tensordict: Any) -> TensorDictBase:
        out = super()._step(tensordict)
        bonus = 0.1 * out["observation"].sum(-1).reshape(
            *self.batch_size, *(1,) * len(self.bonus_shape)
        )
        return out.set("bonus", bonus.expand(*self.batch_size, *self.bonus_shape).clone())


def on_bonus(actor, **kwargs) -> Any:
    names = ("ref_log_prob", "kl", "task_reward", "kl_coeff", "episode_kl")
    keys: dict[str, Any] = {name: ("of_bonus", name) for name in names}
    return KLConstrainedTransform(actor, 0.2, keys=KLKeys(reward="bonus", **keys), **kwargs)


@any_batch
def test_each_reward_of_an_env_has_its_coefficient_and_reference(batch_size):
    policy, near, far = make_actor(), make_actor(seed=1), make_actor(seed=2)
    plain = play(BonusEnv(batch_size), policy)
    alone = with_transforms(BonusEnv(batch_size), KLConstrainedTransform(near, 0.5))
    check_env_specs(alone)
    both = with_transforms(BonusEnv(batch_size), KLConstrainedTransform(near, 0.5), on_bonus(far))
    check_env_specs(both)
    one, two = play(alone, policy)["next"], play(both, policy)["next"]
    reward = plain["next", "reward"] - 0.5 * k1(plain, policy, near)
    bonus = plain["next", "bonus"] - 0.2 * k1(plain, policy, far)
    bounds = [0.5 * rounded(plain, policy, near) + ulps(plain["next", "reward"], reward)]
    bounds += [0.2 * rounded(plain, policy, far) + ulps(plain["next", "bonus"], bonus)]
    for penalized in (one, two):
        assert_within(penalized["reward"], reward, bounds[0])
    assert_close(one["bonus"], plain["next", "bonus"], rtol=0, atol=0)
    assert_within(two["bonus"], bonus, bounds[1])
    after = on_bonus(far)(KLConstrainedTransform(near, 0.5)(plain))["next"]
    assert_within(after["reward"], reward, bounds[0])
    assert_within(after["bonus"], bonus, bounds[1])


# Shapes of a reward.


@either
@pytest.mark.parametrize("place", ["env", "batch"])
@pytest.mark.parametrize("shape", [(2,), (2, 1), (1, 1)], ids=str)
def test_a_reward_of_several_trailing_dimensions_is_refused(make, place, shape):
    actor = make_actor()
    keys: dict[str, Any] = (
        {"in_keys": ["bonus"]} if make is KLRewardTransform else {"keys": KLKeys(reward="bonus")}
    )
    batch = (2,) if place == "env" else (2, 12)
    shapes = re.escape(f"got {(*batch, 1)} and {(*batch, *shape)}")
    plain = play(BonusEnv((2,), shape), actor)

    def penalize():
        transform = make(actor, 0.5, **keys)
        return (
            transform(plain)
            if place == "batch"
            else play(with_transforms(BonusEnv((2,), shape), transform), actor)
        )

    with pytest.raises(
        ValueError, match=f"{shapes}: .* give the reward one trailing dimension, of size 1"
    ):
        penalize()


@pytest.mark.parametrize("place", ["env", "batch"])
def test_preset_for_agents_that_share_a_reward(place):
    actor = make_actor(agents=True)
    policy = moved(actor)
    base = WalkEnv((2,), n_agents=3, shared_reward=True)
    plain = play(base, policy)
    kl = k1(
        plain, policy, actor, observation=("agents", "observation"), action=("agents", "action")
    ).sum(-2)
    transform = KLRewardTransform(actor, 0.5, sum_agents=True)
    if place == "env":
        env = with_transforms(WalkEnv((2,), n_agents=3, shared_reward=True), transform)
        check_env_specs(env)
        after = play(env, policy)["next", "reward"]
    else:
        after = transform(plain)["next", "reward"]
    reward = plain["next", "reward"] - 0.5 * kl
    bound = 0.5 * rounded(plain, policy, actor).sum(-2) + ulps(plain["next", "reward"], reward)
    assert_within(after, reward, bound)
    with pytest.raises(TypeError, match="`sum_agents` must be True or False, got 'sum'"):
        KLRewardTransform(actor, sum_agents="sum")  # type: ignore[arg-type]
    not_summed = KLRewardTransform(actor, 0.5)
    with pytest.raises(ValueError, match="sum it over agents for a shared reward"):
        not_summed(plain)
