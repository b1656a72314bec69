"""The stack in Gymnasium, batched, auto-resetting and multi-agent envs and in TorchRL's mocks."""

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
    PettingZooWrapper,
    SerialEnv,
    StepCounter,
    Transform,
    TransformedEnv,
    check_env_specs,
)
from torchrl.modules import LSTMModule, OneHotCategorical, TanhNormal
from torchrl.testing.mocking_classes import (
    AutoResetHeteroCountingEnv,
    AutoResettingCountingEnv,
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
    WRITTEN,
    WalkEnv,
    assert_within,
    collect,
    compose,
    make_actor,
    memory_of,
    moved,
    play,
    probabilistic_actor,
    rounding,
    sequence,
    sharp,
    ulps,
    with_transforms,
)
from tests.laws.transform_laws import forks, parallel
from torchrl_kl import GPT, CausalLMActor, KLConstrainedTransform, KLKeys
from torchrl_kl._tensordict import as_tuple
from torchrl_kl.envs import DigitLanguage, DigitLanguageEnv

COEFF = 0.5


class Net(nn.Module):
    """A linear layer on the last `dims` dimensions of whatever comes, scaled down: counts grow."""

    def __init__(self, n_in: int, n_out: int, *, dims: int = 1, tail: nn.Module | None = None):
        super().__init__()
        self.linear, self.dims, self.tail = nn.Linear(n_in, n_out), dims, tail or nn.Identity()

    def forward(self, observation):
        return self.tail(self.linear(0.1 * observation.float().flatten(-self.dims)))


def actor_on(
    n_in: int,
    n_out: int,
    *,
    observation: NestedKey = "observation",
    action: NestedKey = "action",
    distribution: Any = Categorical,
    seed: int = 0,
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
    return sharp(actor, seed)


def binary(**kwargs) -> Any:
    """A switch: one action dimension of two choices."""
    return actor_on(1, 2, tail=nn.Unflatten(-1, (1, 2)), **kwargs)


def without_penalty(batch: Any, reward_key: NestedKey) -> Any:
    """A batch as it was before the stack, wherever its entries are."""
    batch = batch.clone()
    for key in [
        key for key in batch["next"].keys(True, True) if as_tuple(key)[-1] == "task_reward"
    ]:
        batch["next"][reward_key] = batch["next"][key]
    for key in [key for key in batch.keys(True, True) if as_tuple(key)[-1] in WRITTEN]:
        del batch[key]  # type: ignore[arg-type]
    return batch


def bound_of(actor: Any, batch: Any, **kwargs) -> torch.Tensor:
    """The rounding of a reference's log-prob, which reads the state of its memory."""
    for name in ("h", "c"):
        if f"ref_{name}" in batch.keys():
            batch = batch.copy().set(name, batch[f"ref_{name}"])
            kwargs["steps"] = batch.shape[-1]
    return rounding(actor, batch, **kwargs)


def judge(
    make_env: Callable[[], EnvBase],
    actor: Any,
    *,
    place: Any = (),
    reward: NestedKey = "reward",
    sum_agents: bool = False,
    rest: tuple[Any, ...] = (),
    memory: Callable[[], list[Transform]] = list,
    steps: int = 12,
) -> Any:
    """Everything that holds in any env; returns a penalized rollout of a policy that moved.

    Args:
        make_env: the env.
        actor: the reference.
        place: the nested tensordict of the actor's action and of all that is made of it.
        reward: the reward that is penalized.
        sum_agents: whether the KL of all agents is summed, at the root.
        rest: the actors of the other actions.
        memory: what a recurrent policy needs in its env.
        steps: of the rollout, through the ends of episodes.
    """
    penalized_at = () if sum_agents else place

    def at(step, name):
        return step[(*(place if name == "ref_log_prob" else penalized_at), name)]

    def stack():
        return KLConstrainedTransform(
            actor, COEFF, sum_agents=sum_agents, keys=KLKeys(reward=reward)
        )

    def penalized_env():
        env = make_env()
        transforms = compose(*memory(), stack())
        return TransformedEnv(env, transforms, auto_unwrap=type(env) is TransformedEnv)

    def of_agents(values):
        return values.sum(-1, keepdim=True) if sum_agents else values.unsqueeze(-1)

    env = penalized_env()
    check_env_specs(env)
    env.set_seed(0)
    batch = play(env, sequence(moved(actor), *rest), steps)
    step = batch["next"]
    ref_log_prob = at(step, "ref_log_prob")
    bound = bound_of(actor, batch)
    # Against the distributions themselves, on what was seen and done.
    if not memory():
        seen = batch.select(*actor.in_keys, *actor.dist_sample_keys)
        with torch.no_grad():
            expected = actor.log_prob(seen)
        expected = expected.reshape(*ref_log_prob.shape, -1).sum(-1)
        assert_within(ref_log_prob, expected, bound)
    log_prob = batch[actor.log_prob_keys[0]].detach()
    log_prob = log_prob.reshape(*ref_log_prob.shape, -1).sum(-1)
    kl, terms = of_agents(log_prob - ref_log_prob), of_agents(log_prob.abs() + ref_log_prob.abs())
    assert_within(at(step, "kl"), kl, ulps(terms))
    assert at(step, "kl").abs().max() > 1e-3
    # What is subtracted, and when the sum begins anew.
    task_reward, penalty = at(step, "task_reward"), COEFF * at(step, "kl")
    assert_within(step[reward], task_reward - penalty, ulps(task_reward, penalty))
    before = at(batch, "episode_kl")
    assert_within(at(step, "episode_kl"), before + at(step, "kl"), ulps(before, at(step, "kl")))
    # Outside as inside.
    outside = stack()(without_penalty(batch, reward))["next"]
    assert_within(at(outside, "ref_log_prob"), ref_log_prob, bound)
    assert_within(at(outside, "kl"), at(step, "kl"), of_agents(bound) + ulps(terms))
    for name in ("task_reward", "kl_coeff"):
        assert_close(at(outside, name), at(step, name), rtol=0, atol=0)
    moved_by = COEFF * (of_agents(bound) + ulps(terms)) + ulps(task_reward, penalty)
    assert_within(outside[reward], step[reward], moved_by)
    # The reference itself has no divergence.
    own = play(penalized_env(), sequence(actor, *rest), steps)
    bound = bound_of(actor, own, actions=True)
    kl = at(own["next"], "kl")
    assert_within(kl, torch.zeros_like(kl), of_agents(bound))
    return batch


def assert_sums_restart(batch: Any, place: Any = (), done: NestedKey = "done") -> None:
    """After a done the running sum is that of the next step alone."""
    ends = batch["next"][done][..., :-1, :]
    assert ends.any()
    sums, kl = (batch["next"][(*place, name)][..., 1:, :] for name in ("episode_kl", "kl"))
    assert_within(sums[ends], kl[ends], ulps(kl[ends]))


# Gymnasium.


def cartpole(**kwargs) -> EnvBase:
    return GymEnv("CartPole-v1", categorical_action_encoding=True, **kwargs)


@pytest.mark.parametrize("one_hot", [False, True])
def test_cartpole(one_hot):
    actor = actor_on(4, 2, distribution=OneHotCategorical if one_hot else Categorical)
    batch = judge(
        lambda: GymEnv("CartPole-v1", categorical_action_encoding=not one_hot), actor, steps=60
    )
    assert_sums_restart(batch)
    assert (batch["next", "task_reward"] == 1).all()


def test_pendulum():
    def make():
        return with_transforms(GymEnv("Pendulum-v1"), StepCounter(5))

    batch = judge(make, actor_on(3, 1, distribution=TanhNormal))
    assert_sums_restart(batch)


def sync_vector(name: str, mode: str) -> EnvBase:
    autoreset_mode = gymnasium.vector.AutoresetMode(mode)
    env = gymnasium.vector.SyncVectorEnv(
        [lambda: gymnasium.make(name)] * 2, autoreset_mode=autoreset_mode
    )
    return GymWrapper(env, categorical_action_encoding=True)


VECTORS: dict[str, Callable[[str], EnvBase]] = {
    "processes": lambda name: GymEnv(name, num_envs=2, categorical_action_encoding=True),
    "resets itself": lambda name: sync_vector(name, "SameStep"),
    "is reset": lambda name: sync_vector(name, "Disabled"),
}


@pytest.mark.parametrize("kind", VECTORS)
@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1"])
@forks
def test_gymnasium_vector_envs(kind, name):
    actor = actor_on(4, 2) if name == "CartPole-v1" else actor_on(3, 1, distribution=TanhNormal)
    batch = judge(lambda: VECTORS[kind](name), actor, steps=40)
    assert batch["next", "kl"].shape == (2, 40, 1)
    if name == "CartPole-v1":
        assert_sums_restart(batch)


def test_a_recurrent_reference_in_a_vector_env_begins_each_episode_from_zero():
    core = LSTMModule(
        input_size=4,
        hidden_size=8,
        in_keys=["observation", "h", "c"],
        out_keys=["f", ("next", "h"), ("next", "c")],
    )
    net = sequence(core, TensorDictModule(nn.Linear(8, 2), ["f"], ["logits"]))
    actor = sharp(
        probabilistic_actor(
            net, in_keys=["logits"], distribution_class=Categorical, return_log_prob=True
        ),
        scale=1.0,
    )
    batch = judge(
        lambda: VECTORS["resets itself"]("CartPole-v1"),
        actor,
        memory=lambda: memory_of(actor),
        steps=30,
    )
    assert_sums_restart(batch)
    starts = batch["is_init"].squeeze(-1)
    assert starts[:, 1:].any()
    assert (batch["ref_h"][starts] == 0).all()
    assert (batch["ref_h"][~starts] != 0).flatten(1).any(-1).all()


# Batched envs.


@pytest.mark.parametrize("kind", ["serial", "parallel"])
@forks
def test_around_a_batched_env(kind):
    made: list[EnvBase] = []

    def make():
        made.append(SerialEnv(2, cartpole) if kind == "serial" else parallel(cartpole))
        return made[-1]

    try:
        assert_sums_restart(judge(make, actor_on(4, 2), steps=40))
    finally:
        for env in made:
            if isinstance(env, ParallelEnv):
                env.close(raise_if_closed=False)


# Envs that reset themselves.


def test_an_auto_resetting_env():
    def make():
        return AutoResettingCountingEnv(4, auto_reset=True)  # type: ignore[call-arg]

    batch = judge(make, binary(), steps=30)
    assert_sums_restart(batch)
    ends = batch["next", "done"].squeeze(-1)
    # The last action of an episode was chosen before the reset: it is scored where it was chosen.
    with torch.no_grad():
        logits = binary()[0].module(batch["observation"][ends])
    expected = Categorical(logits=logits).log_prob(batch["action"][ends])[..., 0]
    bound = rounding(binary(), batch)[ends]
    assert_within(batch["next", "ref_log_prob"][ends], expected, bound)
    assert (batch["kl"][1:][ends[:-1]] == 0).all()


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
        reference, policy = (
            Categorical(logits=actor[0].module(batch["observation"])).log_prob(batch["action"])
            for actor in (make_actor(), moved(make_actor()))
        )
    kl = (policy - reference).unsqueeze(-1)
    bound = (rounding(make_actor(), batch) + rounding(moved(make_actor()), batch)).unsqueeze(-1)
    # TorchRL blanks what a natively reset env observed at its ends, the record of the KL included.
    assert step["kl"][ends].isnan().all()
    assert_within(step["kl"][~ends], kl[~ends], bound[~ends])
    sums, off = torch.zeros(3, 1), torch.zeros(3, 1, dtype=torch.float64)
    for t in range(kl.shape[1]):  # rows that go on keep their sum when others begin anew
        assert_within(batch["episode_kl"][:, t], sums, off)
        off = torch.where(ends[:, t], 0.0, off + bound[:, t] + ulps(sums, kl[:, t]))
        sums = torch.where(ends[:, t], 0.0, sums + kl[:, t])
    # Of the reward nothing is lost.
    task = collect_native(InitTracker())
    assert_close(batch["action"], task["action"], rtol=0, atol=0)
    task_reward = task["next", "reward"]
    off = COEFF * bound + ulps(task_reward, COEFF * kl)
    assert_within(step["reward"], task_reward - COEFF * kl, off)


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
