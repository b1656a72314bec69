"""Every kind of action: what its log-prob is summed over, and which action is scored.

Actors and envs are in float64, where all ways to the same number agree to 1e-9.
"""

from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    CompositeDistribution,
    NormalParamExtractor,
    TensorDictModule,
    set_composite_lp_aggregate,
)
from torch import Tensor, nn
from torch.distributions import Categorical, Normal, kl_divergence
from torch.testing import assert_close
from torchrl.data import Bounded, Composite, MultiCategorical, Unbounded
from torchrl.data import Categorical as Choice
from torchrl.envs import ActionDiscretizer, ActionScaling, GymEnv, check_env_specs
from torchrl.modules import TanhNormal

from tests.helpers import (
    N_ACTIONS,
    N_OBS,
    WalkEnv,
    assert_same,
    moved,
    play,
    probabilistic_actor,
    sharp,
    with_transforms,
    without_kl,
)
from torchrl_kl import KLConstrainedTransform, KLDivergenceTransform, KLKeys, KLRewardTransform

reals: Any = {"dtype": torch.float64}
td_module: Any = TensorDictModule  # annotated more narrowly than it takes its keys


def close(actual: Tensor, expected: Tensor) -> None:
    assert_close(actual, expected, rtol=0, atol=1e-9)


def log_softmax_of(logits: Tensor, action: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, action.unsqueeze(-1)).squeeze(-1)


def gaussian(loc: Tensor, scale: Tensor, x: Tensor) -> Tensor:
    """The log-density, without the constant, which drops out of a KL."""
    return (-(((x - loc) / scale) ** 2) / 2 - scale.log()).sum(-1)


class Parts(nn.Module):
    """The parameters of a composite policy, that picks one of 4 and moves in 2 dimensions."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(N_OBS, N_ACTIONS + 4)

    def forward(self, observation):
        logits, loc, scale = self.linear(observation).split([N_ACTIONS, 2, 2], -1)
        return logits, loc, nn.functional.softplus(scale) + 0.1


def linear(n: int = N_ACTIONS, tail: Any = None) -> nn.Module:
    return nn.Sequential(nn.Linear(N_OBS, n), tail or nn.Identity())


class Kind(NamedTuple):
    net: Any  # makes the network
    params: Any  # what it writes
    distribution: Any
    log_prob: Any  # of (batch, *params), up to what policy and reference share
    spec: Any  # of the action, from the batch size
    move: Any = lambda action: action  # WalkEnv's action
    discrete: bool = True


def gaussian_kind(distribution: Any, of: Any = lambda action: action, spec: Any = None) -> Kind:
    return Kind(
        lambda: linear(4, NormalParamExtractor()),
        ["loc", "scale"],
        distribution,
        lambda batch, loc, scale: gaussian(loc, scale, of(batch["action"])),
        spec or (lambda batch: Unbounded(torch.Size((*batch, 2)), **reals)),
        discrete=False,
    )


COMPOSITE = Kind(
    Parts,
    [("params", "pick", "logits"), ("params", "move", "loc"), ("params", "move", "scale")],
    CompositeDistribution,
    lambda batch, logits, loc, scale: (
        log_softmax_of(logits, batch["action", "pick"])
        + gaussian(loc, scale, batch["action", "move"])
    ),
    lambda batch: Composite(
        pick=Choice(N_ACTIONS, shape=batch),
        move=Unbounded(torch.Size((*batch, 2)), **reals),
        shape=batch,
    ),
    lambda action: action["move"] + action["pick"].unsqueeze(-1),
    discrete=False,
)
KINDS = {
    "categorical per dimension": Kind(
        lambda: linear(4, nn.Unflatten(-1, (2, 2))),
        ["logits"],
        Categorical,
        lambda batch, logits: log_softmax_of(logits, batch["action"]).sum(-1),
        lambda batch: MultiCategorical((2, 2), shape=torch.Size((*batch, 2))),
        lambda action: action.sum(-1),
    ),
    "tanh_normal": gaussian_kind(  # policy and reference share tanh
        TanhNormal, torch.atanh, lambda batch: Bounded(-1.0, 1.0, torch.Size((*batch, 2)), **reals)
    ),
    "normal": gaussian_kind(Normal),
    "composite": COMPOSITE,
    "aggregated": COMPOSITE,
}
every_kind = pytest.mark.parametrize("name", KINDS)
composites = pytest.mark.parametrize("name", ["composite", "aggregated"])


class PlayedEnv(WalkEnv):
    """WalkEnv with the action of a kind."""

    def __init__(self, batch_size: tuple[int, ...], name: str):
        self.kind = KINDS[name]
        super().__init__(batch_size, discrete=self.kind.discrete, dtype=torch.float64)
        batch = torch.Size(batch_size)
        self.action_spec = Composite(action=self.kind.spec(batch), shape=batch)

    def _step(self, tensordict):
        action = self.kind.move(tensordict["action"])
        return super()._step(tensordict.copy().set("action", action))


def mode(name: str) -> Any:
    """What a script with such an actor sets, from building it to the end."""
    parts = KINDS[name] is COMPOSITE
    return set_composite_lp_aggregate(name == "aggregated") if parts else nullcontext()


def make(name: str) -> Any:
    kind = KINDS[name]
    options: Any = {"in_keys": kind.params}
    if kind is COMPOSITE:
        keys = {part: ("action", part) for part in ("pick", "move")}
        kinds = {"distribution_map": {"pick": Categorical, "move": Normal}, "name_map": keys}
        options = {
            "in_keys": ["params"],
            "out_keys": [*keys.values()],
            "distribution_kwargs": kinds,
        }
    net = td_module(kind.net(), ["observation"], kind.params)
    options |= {"distribution_class": kind.distribution, "return_log_prob": True}
    scale = 0.1 if name == "tanh_normal" else 0.5
    return sharp(probabilistic_actor(net, **options), scale=scale).double()


def stack_of(name: str, actor: Any, **kwargs) -> tuple[Any, Any]:
    """The stack, and where it writes the KL: next to the log-prob."""
    place = ("action", "kl") if name == "composite" else "kl"
    return KLConstrainedTransform(actor, 0.5, **kwargs), place


def bare(batch: Any) -> Any:
    """As the env without the stack would have returned it."""
    written = ("ref_log_prob", "kl", "kl_estimate", "episode_kl", "not_drawn")
    of_parts = [(*step, "action", key) for step in ((), ("next",)) for key in written]
    batch = without_kl(batch)
    return batch.exclude(*of_parts) if not isinstance(batch["action"], Tensor) else batch


def said(actors: Any, batch: Any) -> list[tuple[Tensor, ...]]:
    """What the bare networks say."""
    with torch.no_grad():
        params = [actor[0].module(batch["observation"]) for actor in actors]
    return [each if isinstance(each, tuple) else (each,) for each in params]


@every_kind
def test_the_kl_of_the_step_is_that_of_the_whole_action(name):
    with mode(name):
        actor = make(name)
        policy = moved(actor, scale=0.1)
        stack, place = stack_of(name, actor)
        env = with_transforms(PlayedEnv((2, 3), name), stack)
        check_env_specs(env)
        batch = play(env, policy)
        following = batch["next"]
        p, q = (KINDS[name].log_prob(batch, *each) for each in said((policy, actor), batch))
        assert following[place].shape == following["reward"].shape == (2, 3, 12, 1)
        close(following[place].squeeze(-1), p - q)
        assert (p - q).abs().min() > 0
        penalized = following["task_reward"] - 0.5 * following[place]
        assert_close(following["reward"].double(), penalized, rtol=0, atol=1e-5)  # it is float32
        after = stack_of(name, actor)[0](bare(batch))["next"]
        close(after[place], following[place])
        assert_close(after["reward"], following["reward"])
        own = stack_of(name, actor)[0](play(PlayedEnv((2,), name), make(name)))["next", place]
        close(own, torch.zeros_like(own))


@composites
def test_exact_is_the_sum_over_the_parts(name):
    with mode(name):
        actor = make(name)
        policy = moved(actor)
        stack, place = stack_of(name, actor, estimator="exact")
        batch = play(with_transforms(PlayedEnv((2,), name), stack), policy)
        p, q = said((policy, actor), batch)
        expected = kl_divergence(*(Categorical(logits=each[0]) for each in (p, q)))
        moves = (Normal(*each[1:], validate_args=None) for each in (p, q))
        expected = expected + kl_divergence(*moves).sum(-1)
        key = ("action", "kl_estimate") if place != "kl" else "kl_estimate"
        close(batch["next", key].squeeze(-1), expected)
        recorded = bare(batch)
        recorded["collector", "mask"] = torch.arange(12).expand(2, 12) < 7
        after = stack_of(name, actor, estimator="exact")[0](recorded)["next", key].squeeze(-1)
        close(after, torch.where(recorded["collector", "mask"], expected, 0.0))


@pytest.mark.parametrize(
    ("keys", "branch", "shape"),
    [
        ([("agents", "pick"), ("agents", "move")], ("agents",), (5, 3)),
        ([("agents", "pick"), "root"], (), (5,)),
        ([("agents", "deep", "far"), ("agents", "move")], ("agents",), (5, 3)),
        ([("agents", "deep", "far"), ("agents", "wide", "far")], ("agents",), (5, 3)),
    ],
    ids=["one branch", "the root and a branch", "a branch and one inside", "two inside"],
)
def test_parts_in_several_branches_are_added_where_all_of_them_are_held(keys, branch, shape):
    agents = TensorDict(pick=torch.randn(5, 3), move=torch.randn(5, 3, 2), batch_size=(5, 3))
    agents["deep"] = TensorDict(far=torch.randn(5, 3, 4, 2), batch_size=(5, 3, 4))
    agents["wide"] = agents["deep"].clone()
    batch = TensorDict(agents=agents, root=torch.randn(5, 2), batch_size=5)
    ref_log_prob = torch.randn(shape)
    batch["next"] = TensorDict(agents=TensorDict(batch_size=(5, 3)), batch_size=5)
    batch["next", (*branch, "ref_log_prob")] = ref_log_prob
    after = KLDivergenceTransform(keys=KLKeys(log_prob=keys))(batch)["next"]
    whole = sum(batch[key].reshape(*shape, -1).sum(-1) for key in keys)
    assert_close(after[(*branch, "kl")], (whole - ref_log_prob).unsqueeze(-1))


def test_a_part_that_was_not_recorded_is_an_error():
    actor = make("composite")
    stack = stack_of("composite", actor)[0]
    batch = play(PlayedEnv((2,), "composite"), actor).exclude(("action", "move_log_prob"))
    with pytest.raises(KeyError, match=r"'move_log_prob'\) is not in the data.*return_log_prob="):
        stack(batch)
    env = with_transforms(PlayedEnv((2,), "composite"), stack)
    step = actor(env.reset()).exclude(("action", "move_log_prob"), "params")
    with pytest.raises(KeyError, match=r"pick_log_prob'\)\] are there\) but recorded no .*'move"):
        env.step(step)


# Which action.


@pytest.mark.parametrize("make_it", [KLConstrainedTransform, KLRewardTransform])
@pytest.mark.parametrize("kind", ["discrete", "scaled"])
def test_the_action_scored_is_the_one_of_the_policy(kind, make_it):
    """Before action transforms turn it into the env's."""
    net = nn.Linear(3, 5 if kind == "discrete" else 2)
    tail = nn.Unflatten(-1, (1, 5)) if kind == "discrete" else NormalParamExtractor()
    params = ["logits"] if kind == "discrete" else ["loc", "scale"]
    actor = sharp(
        probabilistic_actor(
            td_module(nn.Sequential(net, tail), ["observation"], params),
            in_keys=params,
            distribution_class=Categorical if kind == "discrete" else TanhNormal,
            return_log_prob=True,
        ),
        scale=0.1,
    )
    turning = ActionDiscretizer(5, categorical=True) if kind == "discrete" else ActionScaling()
    env = with_transforms(GymEnv("Pendulum-v1"), turning, make_it(actor, 0.5))
    env.set_seed(0)
    batch = play(env, moved(actor, scale=0.1), 10)
    with torch.no_grad():
        ref_log_prob = actor.log_prob(batch.select("observation", "action"))
    kl = batch["action_log_prob"].reshape(10, 1) - ref_log_prob.reshape(10, 1)
    assert kl.abs().max() > 1e-2
    plain = with_transforms(GymEnv("Pendulum-v1"), turning.clone())
    plain.set_seed(0)
    task = play(plain, moved(actor, scale=0.1), 10)["next", "reward"]
    assert_same(batch["next", "reward"], (task - 0.5 * kl).detach())
