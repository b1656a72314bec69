"""The stack in Gymnasium, batched, auto-resetting and multi-agent envs.

A judge recomputes all entries of a batch from bare networks.
"""

from collections.abc import Callable
from typing import Any

import gymnasium
import pytest
import torch
from tensordict import NestedKey
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torch.distributions import Categorical
from torch.testing import assert_close
from torchrl.envs import (
    EnvBase,
    GymEnv,
    GymWrapper,
    InitTracker,
    ParallelEnv,
    SerialEnv,
    StepCounter,
    Transform,
    TransformedEnv,
    check_env_specs,
)
from torchrl.modules import OneHotCategorical, TanhNormal
from torchrl.testing.mocking_classes import (
    AutoResettingCountingEnv,
    CountingBatchedEnv,
    MultiAgentCountingEnv,
    NestedCountingEnv,
)

from tests.helpers import (
    WRITTEN,
    WalkEnv,
    collect,
    compose,
    make_actor,
    moved,
    play,
    probabilistic_actor,
    sequence,
    sharp,
    with_transforms,
)
from tests.laws.transform_laws import forks, parallel
from torchrl_kl import KLConstrainedTransform, KLKeys
from torchrl_kl.keys import as_tuple

COEFF = 0.5


class Net(nn.Module):
    """A linear layer on the last `dims` dimensions of whatever comes, scaled down: counts grow."""

    def __init__(self, n_in: int, n_out: int, *, dims: int = 1, tail: nn.Module | None = None):
        super().__init__()
        self.linear, self.dims, self.tail = nn.Linear(n_in, n_out), dims, tail or nn.Identity()

    def forward(self, observation):
        return self.tail(self.linear(0.1 * observation.double().flatten(-self.dims)))


def actor_on(
    n_in: int,
    n_out: int,
    *,
    observation: NestedKey = "observation",
    action: NestedKey = "action",
    distribution: Any = Categorical,
    **kwargs,
) -> Any:
    """A sharp actor: "logits" of a discrete action, or "loc" and "scale" of `n_out` real ones."""
    place: Any = action[:-1] if isinstance(action, tuple) else ()
    params = ["logits"] if distribution in (Categorical, OneHotCategorical) else ["loc", "scale"]
    if len(params) == 2:
        kwargs["tail"] = NormalParamExtractor()
        n_out = 2 * n_out
    keys: dict[str, Any] = {name: (*place, name) if place else name for name in params}
    actor = probabilistic_actor(
        TensorDictModule(Net(n_in, n_out, **kwargs), [observation], list(keys.values())),
        in_keys=keys if place else params,
        out_keys=[action],
        distribution_class=distribution,
        return_log_prob=True,
    )
    return sharp(actor).double()


def binary(**kwargs) -> Any:
    """A switch: one action dimension of two choices."""
    return actor_on(1, 2, tail=nn.Unflatten(-1, (1, 2)), **kwargs)


def without_penalty(batch: Any, reward_key: NestedKey) -> Any:
    """A batch as it was before the stack, wherever its entries are."""
    batch = batch.clone()
    for key in [k for k in batch["next"].keys(True, True) if as_tuple(k)[-1] == "task_reward"]:
        batch["next"][reward_key] = batch["next"][key]
    return batch.exclude(*(k for k in batch.keys(True, True) if as_tuple(k)[-1] in WRITTEN))


def judge(
    make_env: Callable[[], EnvBase],
    actor: Any,
    *,
    place: Any = (),
    reward: NestedKey = "reward",
    sum_agents: bool = False,
    rest: tuple[Any, ...] = (),
    steps: int = 12,
) -> Any:
    """Everything that holds in any env; returns a penalized rollout of a policy that moved.

    `actor` is the reference, `place` the nested tensordict of its action, and `rest` the actors of
    other actions. Log-probs are in float64.
    """

    def at(step: Any, name: str) -> torch.Tensor:
        holder = () if sum_agents and name != "ref_log_prob" else place
        return step[(*holder, name)]

    def stack() -> Any:
        keys = KLKeys(reward=reward)
        return KLConstrainedTransform(actor, COEFF, sum_agents=sum_agents, keys=keys)

    bare = make_env()
    env = TransformedEnv(bare, compose(stack()), auto_unwrap=type(bare) is TransformedEnv)
    check_env_specs(env)
    env.set_seed(0)
    batch = play(env, sequence(moved(actor), *rest), steps).detach()
    step, shape = batch["next"], at(batch["next"], "ref_log_prob").shape
    with torch.no_grad():
        expected = actor.log_prob(batch.select(*actor.in_keys, *actor.dist_sample_keys))
    ref_log_prob, log_prob = expected, batch[actor.log_prob_keys[0]]
    ref_log_prob, log_prob = (x.reshape(*shape, -1).sum(-1) for x in (ref_log_prob, log_prob))
    assert_close(at(step, "ref_log_prob"), ref_log_prob, rtol=0, atol=1e-9)
    kl = (log_prob - ref_log_prob).unsqueeze(-1)
    kl = kl.sum(-2) if sum_agents else kl
    assert_close(at(step, "kl"), kl, rtol=0, atol=1e-9)
    assert kl.abs().max() > 1e-3
    assert_close(at(step, "episode_kl"), at(batch, "episode_kl") + kl)
    assert_close(step[reward], (at(step, "task_reward") - COEFF * kl).to(step[reward].dtype))
    outside = stack()(without_penalty(batch, reward))["next"]
    for name in ("ref_log_prob", "kl", "task_reward", "kl_coeff"):
        assert_close(at(outside, name), at(step, name), rtol=0, atol=1e-9)
    assert_close(outside[reward], step[reward])
    return batch


def assert_sums_restart(batch: Any) -> None:
    """After a done the running sum is that of the next step alone."""
    ends = batch["next", "done"][..., :-1, :]
    assert ends.any()
    sums, kl = (batch["next", name][..., 1:, :] for name in ("episode_kl", "kl"))
    assert_close(sums[ends], kl[ends])


# Gymnasium.


def cartpole(**kwargs) -> EnvBase:
    return GymEnv("CartPole-v1", categorical_action_encoding=True, **kwargs)


def sync_vector(mode: str) -> EnvBase:
    """Two envs in this process that reset themselves, or are reset."""
    autoreset = gymnasium.vector.AutoresetMode(mode)
    make = [lambda: gymnasium.make("CartPole-v1")] * 2
    env = gymnasium.vector.SyncVectorEnv(make, autoreset_mode=autoreset)
    return GymWrapper(env, categorical_action_encoding=True)


ENVS: dict[str, tuple[Callable[[], EnvBase], Callable[[], Any]]] = {
    "one hot": (
        lambda: GymEnv("CartPole-v1"),
        lambda: actor_on(4, 2, distribution=OneHotCategorical),
    ),
    "pendulum": (
        lambda: with_transforms(GymEnv("Pendulum-v1"), StepCounter(5)),
        lambda: actor_on(3, 1, distribution=TanhNormal),
    ),
    "resets itself": (lambda: sync_vector("SameStep"), lambda: actor_on(4, 2)),
    "is reset": (lambda: sync_vector("Disabled"), lambda: actor_on(4, 2)),
    "serial": (lambda: SerialEnv(2, cartpole), lambda: actor_on(4, 2)),
    "parallel": (lambda: parallel(cartpole), lambda: actor_on(4, 2)),
    "auto-resetting": (
        lambda: AutoResettingCountingEnv(4, auto_reset=True),  # type: ignore[call-arg]
        binary,
    ),
}


@pytest.mark.parametrize("name", ENVS)
@forks
def test_envs_that_end(name):
    made: list[EnvBase] = []

    def make() -> EnvBase:
        made.append(ENVS[name][0]())
        return made[-1]

    try:
        assert_sums_restart(judge(make, ENVS[name][1](), steps=40))
    finally:
        for env in made:
            if isinstance(env, ParallelEnv):
                env.close(raise_if_closed=False)


class NativeWalk(WalkEnv):
    """A walk that begins anew inside `step`, as simulators on a GPU do."""

    def _step(self, tensordict):
        out, new = super()._step(tensordict), self._reset()
        for name in ("observation", "left"):
            out[name] = torch.where(out["done"], new[name], out[name])
        return out


def collect_native(transform: Transform) -> Any:
    env = with_transforms(NativeWalk((3,)), transform)
    env._torchrl_native_autoreset = True  # what GymEnv(..., native_autoreset=True) sets
    (batch,) = collect(env, moved(make_actor()), frames=36, batches=1)
    return batch


def test_an_env_that_resets_rows_natively():
    batch = collect_native(KLConstrainedTransform(make_actor(), COEFF))
    step, ends = batch["next"], batch["next", "done"]
    with torch.no_grad():
        read = batch.select("observation", "action")
        policy, reference = (each.log_prob(read) for each in (moved(make_actor()), make_actor()))
    kl = (policy - reference).unsqueeze(-1)
    # TorchRL blanks what a natively reset env observed at its ends, the record of the KL included.
    assert step["kl"][ends].isnan().all()
    assert_close(step["kl"][~ends], kl[~ends], rtol=0, atol=1e-5)
    sums = torch.zeros(3, 1)
    for t in range(kl.shape[1]):  # rows that go on keep their sum when others begin anew
        assert_close(batch["episode_kl"][:, t], sums, rtol=0, atol=1e-5)
        sums = torch.where(ends[:, t], 0.0, sums + kl[:, t])
    # Of the reward nothing is lost.
    task = collect_native(InitTracker())
    assert_close(batch["action"], task["action"], rtol=0, atol=0)
    assert_close(step["reward"], task["next", "reward"] - COEFF * kl, rtol=0, atol=1e-5)


# TorchRL's mocks of nested keys and groups of agents.


def actor_of_agent(index: int) -> Any:
    keys: Any = {name: ("agents", f"agent_{index}", name) for name in ("observation", "action")}
    return actor_on(12, 2, dims=2, tail=nn.Unflatten(-1, (1, 2)), **keys)


def binary_in_data() -> Any:
    return binary(observation=("data", "states"), action=("data", "action"))


MOCKS: dict[str, tuple[Callable[[], EnvBase], Callable[[], Any], dict[str, Any]]] = {
    "rows": (
        lambda: CountingBatchedEnv(max_steps=torch.tensor([2, 4]), batch_size=torch.Size([2])),
        binary,
        {},
    ),
    "nested": (
        lambda: NestedCountingEnv(3, batch_size=torch.Size([2])),
        binary_in_data,
        {"place": ("data",), "reward": ("data", "reward")},
    ),
    "nested, root reward": (
        lambda: NestedCountingEnv(3, nest_reward=False, nest_done=False),
        binary_in_data,
        {"place": ("data",), "sum_agents": True},
    ),
    "agents": (
        lambda: MultiAgentCountingEnv(2, max_steps=3),
        lambda: actor_of_agent(0),
        {
            "place": ("agents", "agent_0"),
            "reward": ("agents", "agent_0", "reward"),
            "rest": lambda: (actor_of_agent(1),),
        },
    ),
}


@pytest.mark.parametrize("name", MOCKS)
def test_mocks(name):
    make_env, make, keys = MOCKS[name]
    judge(make_env, make(), **{**keys, "rest": keys.get("rest", tuple)()})
