"""The stack in envs with several agents, nested keys and other structures."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torchrl.envs import (
    EnvBase,
    PettingZooWrapper,
    check_env_specs,
)
from torchrl.modules import OneHotCategorical, TanhNormal
from torchrl.testing.mocking_classes import (
    AutoResetHeteroCountingEnv,
    ContinuousActionVecMockEnv,
    CountingBatchedEnv,
    CountingEnv,
    CountingEnvWithString,
    DiscreteActionVecMockEnv,
    EnvWithScalarAction,
    HeterogeneousCountingEnv,
    IncrementingEnv,
    MultiAgentCountingEnv,
    MultiKeyCountingEnv,
    NestedCountingEnv,
)

from tests.gpt_helpers import sharp as sharp_gpt
from tests.helpers import (
    with_transforms,
)
from tests.transforms.judging import (
    COEFF,
    actor_on,
    assert_sums_restart,
    binary,
    judge,
)
from torchrl_kl import GPT, CausalLMActor, KLConstrainedTransform, KLKeys
from torchrl_kl.envs import DigitLanguage, DigitLanguageEnv

# TorchRL's mocks.

STATES, SWITCH = ("data", "states"), ("data", "action")
MOCKS: dict[str, tuple[Callable[[], EnvBase], Callable[[], Any], dict[str, Any]]] = {
    "CountingEnv": (lambda: CountingEnv(3), binary, {}),
    "CountingEnv(2, 3)": (lambda: CountingEnv(3, batch_size=torch.Size([2, 3])), binary, {}),
    "IncrementingEnv": (lambda: IncrementingEnv(3), binary, {}),
    "CountingEnvWithString": (lambda: CountingEnvWithString(max_steps=3), binary, {}),
    "CountingBatchedEnv": (
        lambda: CountingBatchedEnv(max_steps=torch.tensor([2, 4]), batch_size=torch.Size([2])),
        binary,
        {},
    ),
    "ContinuousActionVecMockEnv": (
        ContinuousActionVecMockEnv,
        lambda: actor_on(7, 7, distribution=TanhNormal),
        {},
    ),
    "DiscreteActionVecMockEnv": (
        DiscreteActionVecMockEnv,
        lambda: actor_on(7, 7, distribution=OneHotCategorical),
        {},
    ),
    "EnvWithScalarAction": (
        lambda: EnvWithScalarAction(singleton=True),
        lambda: actor_on(3, 1, distribution=TanhNormal),
        {},
    ),
    "NestedCountingEnv": (
        lambda: NestedCountingEnv(3, batch_size=torch.Size([2])),
        lambda: binary(observation=STATES, action=SWITCH),
        {"place": ("data",), "reward": ("data", "reward")},
    ),
    "NestedCountingEnv, root reward": (
        lambda: NestedCountingEnv(
            3, nest_reward=False, nest_done=False, batch_size=torch.Size([2])
        ),
        lambda: binary(observation=STATES, action=SWITCH),
        {"place": ("data",), "sum_agents": True},
    ),
    "MultiKeyCountingEnv": (
        lambda: MultiKeyCountingEnv(3),
        lambda: actor_on(
            3, 2, observation=("nested_1", "observation"), action=("nested_1", "action")
        ),
        {
            "place": ("nested_1",),
            "reward": ("nested_1", "gift"),
            "rest": lambda: other_actors_of_keys(),
        },
    ),
    "MultiAgentCountingEnv": (
        lambda: MultiAgentCountingEnv(2, max_steps=3),
        lambda: actor_of_agent(0),
        {
            "place": ("agents", "agent_0"),
            "reward": ("agents", "agent_0", "reward"),
            "rest": lambda: (actor_of_agent(1),),
        },
    ),
}


def other_actors_of_keys() -> tuple[Any, ...]:
    place = "nested_2"
    return (
        actor_on(300, 2, dims=3, distribution=OneHotCategorical),
        actor_on(
            2,
            1,
            observation=(place, "observation"),
            action=(place, "azione"),
            distribution=TanhNormal,
        ),
    )


def actor_of_agent(index: int) -> Any:
    path = ("agents", f"agent_{index}")
    tail = nn.Unflatten(-1, (1, 2))
    return actor_on(
        12, 2, dims=2, tail=tail, observation=(*path, "observation"), action=(*path, "action")
    )


@pytest.mark.parametrize("name", MOCKS)
def test_mocks(name):
    make_env, make, keys = MOCKS[name]
    rest = keys.get("rest", tuple)()
    judge(make_env, make(), **{**keys, "rest": rest})


@pytest.mark.parametrize("kind", [HeterogeneousCountingEnv, AutoResetHeteroCountingEnv])
def test_agents_of_different_kinds(kind):
    """Agents with spaces of different shapes share no actor, but their specs take the stack."""
    actor = actor_on(
        8, 2, observation=("lazy", "lidar"), action=("lazy", "action"), distribution=TanhNormal
    )
    stack = KLConstrainedTransform(actor, COEFF, keys=KLKeys(reward=("lazy", "reward")))
    env = with_transforms(
        kind(max_steps=3, **({"auto_reset": True} if "Auto" in kind.__name__ else {})), stack
    )
    check_env_specs(env, return_contiguous=False)
    batch = env.rollout(8, break_when_any_done=False, return_contiguous=False)
    if kind is HeterogeneousCountingEnv:  # the other one never shows its ends
        assert batch["next", "lazy", "done"].any()
    assert batch["next", "lazy", "kl"].shape == (8, 3, 1)
    assert (batch["next", "lazy", "kl"] == 0).all()  # a random policy


# The digit language.


@pytest.mark.parametrize("batch_size", [(), (4,)], ids=str)
def test_the_digit_language(batch_size):
    actor: Any = sharp_gpt(CausalLMActor(GPT(11, 9, n_layer=1, n_head=2, n_embd=8)))
    batch = judge(lambda: DigitLanguageEnv(DigitLanguage(), batch_size=batch_size, seed=0), actor)
    assert_sums_restart(batch)
    assert batch["next", "done"][..., 3::4, :].all()


# Many agents that die, each at its time.


def knights_archers_zombies() -> EnvBase:
    """Archers that cross a line die, and leave the other one alone."""
    pettingzoo = pytest.importorskip(
        "pettingzoo", reason='needs the test extra: pip install -e ".[test]"'
    )
    name, kwargs = (
        "butterfly/knights_archers_zombies_v11",
        {"line_death": True, "max_zombies": 2, "max_arrows": 2},
    )
    env = pettingzoo.make("parallel", name, max_cycles=60, **kwargs)
    groups = {"archers": ["archer_0", "archer_1"], "knights": ["knight_0", "knight_1"]}
    return PettingZooWrapper(env, group_map=groups, use_mask=True, done_on_any=False, seed=0)


def actor_of_group(group: str, seed: int) -> Any:
    # Each agent sees 11 things, of 5 numbers each.
    keys: dict[str, Any] = {"observation": (group, "observation"), "action": (group, "action")}
    return actor_on(5 * 11, 6, dims=2, seed=seed, **keys)


@pytest.mark.filterwarnings("ignore:PettingZoo in TorchRL is tested using version:UserWarning")
def test_pettingzoo():
    batch = judge(
        knights_archers_zombies,
        actor_of_group("archers", 7),  # whose archers walk off at different times
        place=("archers",),
        reward=("archers", "reward"),
        rest=(actor_of_group("knights", 1),),
        steps=60,
    )
    step = batch["next"]
    assert step["archers", "kl"].shape == (60, 2, 1)
    dead = step["archers", "done"]
    assert (dead.all(-2) != dead.any(-2)).any()  # one goes on without the other
    assert not step["done"][dead.any(-2).int().argmax()].any()
