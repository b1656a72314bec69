"""A script for the class that TorchRL 0.7 had, of which nothing but the import is changed."""

import copy
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torch.testing import assert_close
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import GymEnv, StepCounter, TransformedEnv, check_env_specs
from torchrl.modules import ProbabilisticActor, TanhNormal

from tests.helpers import compose
from torchrl_kl import KLRewardTransform


def make_actor(env) -> Any:
    torch.manual_seed(0)
    n_obs = env.observation_spec["observation"].shape[-1]
    n_act = env.action_spec.shape[-1]
    module = TensorDictModule(
        nn.Sequential(nn.Linear(n_obs, n_act * 2), NormalParamExtractor()),
        in_keys=["observation"],
        out_keys=["loc", "scale"],
    )
    make: Any = ProbabilisticActor
    return make(
        module, in_keys=["loc", "scale"], distribution_class=TanhNormal, return_log_prob=True
    )


def learn(actor) -> None:
    """Another policy, in place."""
    with torch.no_grad():
        TensorDict(dict(actor.named_parameters()), []).apply_(lambda x: x.data.copy_(x.data + 0.3))


def expected(reference, rollout, coef: float) -> torch.Tensor:
    """The reward minus coef times log pi - log pi_ref, from TorchRL's own distribution."""
    with torch.no_grad():
        loc, scale = reference[0].module(rollout["observation"])
        ref_log_prob = TanhNormal(loc, scale).log_prob(rollout["action"])
    kl = rollout["action_log_prob"].detach() - ref_log_prob
    return rollout["next", "reward"] - coef * kl.unsqueeze(-1)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.float64, torch.float32], ids=str)
def test_pendulum_with_the_result_next_to_the_reward(requires_grad, dtype):
    base_env = GymEnv("Pendulum-v1")
    actor = make_actor(base_env)
    reference = copy.deepcopy(actor)
    transform = KLRewardTransform(actor, out_keys="reward_kl", requires_grad=requires_grad)
    if dtype is not None:
        transform = transform.to(dtype)
    env = TransformedEnv(base_env, transform)
    check_env_specs(env)
    learn(actor)
    rollout = env.rollout(5, actor)
    assert (rollout["next", "reward"] != rollout["next", "reward_kl"]).all()
    assert_close(
        rollout["next", "reward_kl"].detach(),
        expected(reference, rollout, 1.0),
        atol=1e-4,
        rtol=1e-4,
    )
    assert rollout["next", "reward_kl"].dtype == torch.float32
    parameters = list(transform.parameters())
    assert parameters
    assert all(
        p.dtype == (dtype or torch.float32) and p.requires_grad == requires_grad for p in parameters
    )
    assert rollout["next", "reward_kl"].requires_grad == requires_grad
    if requires_grad:
        rollout["next", "reward_kl"].sum().backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in parameters)


@pytest.mark.parametrize("in_keys", [None, "reward", ["reward"]], ids=str)
@pytest.mark.parametrize("coef", [0.5, torch.tensor(0.5)], ids=["number", "tensor"])
def test_pendulum_with_the_result_in_the_reward(in_keys, coef):
    base_env = GymEnv("Pendulum-v1")
    actor = make_actor(base_env)
    reference = copy.deepcopy(actor)
    env = TransformedEnv(base_env, compose(StepCounter(), KLRewardTransform(actor, coef, in_keys)))
    check_env_specs(env)
    learn(actor)
    env.set_seed(0)
    rollout = env.rollout(5, actor)
    bare = GymEnv("Pendulum-v1")
    bare.set_seed(0)
    plain = bare.rollout(5, actor)
    assert_close(plain["action"], rollout["action"])
    assert_close(
        rollout["next", "reward"].detach(), expected(reference, plain, 0.5), atol=1e-4, rtol=1e-4
    )


def test_as_a_module_and_in_a_replay_buffer():
    base_env = GymEnv("Pendulum-v1")
    actor = make_actor(base_env)
    reference = copy.deepcopy(actor)
    learn(actor)
    batch = base_env.rollout(8, actor).detach()
    after = KLRewardTransform(reference, 0.5, out_keys="reward_kl")(batch)
    assert_close(after["next", "reward_kl"], expected(reference, batch, 0.5), atol=1e-4, rtol=1e-4)
    buffer = ReplayBuffer(storage=LazyTensorStorage(8), batch_size=8)
    buffer.append_transform(KLRewardTransform(reference, 0.5, out_keys="reward_kl"))
    buffer.extend(batch)
    sample: Any = buffer.sample()
    assert_close(
        sample["next", "reward_kl"], expected(reference, sample, 0.5), atol=1e-4, rtol=1e-4
    )
