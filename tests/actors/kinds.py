"""Actors of every kind in float64, and the log-prob of their actions by hand."""

import math
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import (
    CompositeDistribution,
    InteractionType,
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import Tensor, nn
from torch.distributions import Bernoulli, Categorical, Normal
from torch.distributions import OneHotCategorical as TorchOneHot
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import IndependentNormal, MaskedCategorical, OneHotCategorical, TanhNormal

from tests.helpers import N_ACTIONS, N_OBS, moved, probabilistic_actor, sequence, sharp

in_sequence: Any = ProbabilisticTensorDictSequential
RANDOM = {"default_interaction_type": InteractionType.RANDOM, "return_log_prob": True}


def linear(out: Any = "logits", n: int = N_ACTIONS, read: Any = "observation") -> Any:
    return TensorDictModule(nn.Linear(N_OBS, n), [read], [out])


def draw(kind: Any, params: Any, out: Any = "action", **kwargs: Any) -> Any:
    make: Any = ProbabilisticTensorDictModule
    return make(in_keys=params, out_keys=[out], distribution_class=kind, **RANDOM, **kwargs)


def choosing(kind: Any = Categorical, n: int = N_ACTIONS, **kwargs: Any) -> Any:
    """A choice from logits."""
    return probabilistic_actor(
        linear(n=n), in_keys=["logits"], distribution_class=kind, **RANDOM | kwargs
    )


def gaussian(kind: Any = Normal, size: int = 2) -> Any:
    """Real numbers; bounded parameters, since a TanhNormal far from 0 rounds to its bound."""
    net = nn.Sequential(nn.Linear(N_OBS, 2 * size), nn.Tanh(), NormalParamExtractor())
    keys: Any = ["loc", "scale"]
    module = TensorDictModule(net, ["observation"], keys)
    return probabilistic_actor(module, in_keys=keys, distribution_class=kind, **RANDOM)


def masked() -> Any:
    return probabilistic_actor(
        linear(),
        in_keys={"logits": "logits", "mask": "action_mask"},
        distribution_class=MaskedCategorical,
        **RANDOM,
    )


def agents() -> Any:
    return probabilistic_actor(
        linear(("agents", "logits"), read=("agents", "observation")),
        in_keys={"logits": ("agents", "logits")},
        out_keys=[("agents", "action")],
        distribution_class=Categorical,
        **RANDOM,
    )


def composite(first: Any = Categorical, second: Any = OneHotCategorical) -> Any:
    """Two choices at once."""
    heads = [linear(("params", name, "logits")) for name in ("first", "second")]
    return probabilistic_actor(
        sequence(*heads),
        in_keys=["params"],
        out_keys=["first", "second"],
        distribution_class=CompositeDistribution,
        distribution_kwargs={"distribution_map": {"first": first, "second": second}},
        **RANDOM,
    )


class Sees(nn.Module):
    """Logits of the second draw, which depend on the first."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(N_OBS + N_ACTIONS, N_ACTIONS)

    def forward(self, observation: Tensor, first: Tensor) -> Tensor:
        first = nn.functional.one_hot(first, N_ACTIONS).to(observation)
        return self.linear(torch.cat([observation, first], -1))


def chain() -> Any:
    """Two draws, the second after seeing the first."""
    return in_sequence(
        linear("first_logits"),
        draw(Categorical, {"logits": "first_logits"}, "first"),
        TensorDictModule(Sees(), ["observation", "first"], ["second_logits"]),
        draw(Categorical, {"logits": "second_logits"}, "second"),
        return_composite=True,
    )


class Sharper(ProbabilisticTensorDictSequential):
    """Builds its distribution itself."""

    def build_dist_from_params(self, tensordict):
        return Categorical(logits=2 * tensordict["logits"])


class Doubled(ProbabilisticTensorDictSequential):
    """Plays twice what it draws, and knows the density of that."""

    def forward(self, tensordict, *args, **kwargs):  # type: ignore[override]
        out = super().forward(tensordict, *args, **kwargs)
        out["action"] = 2 * out["action"]
        out["action_log_prob"] = out["action_log_prob"] - math.log(2)
        return out

    def log_prob(self, tensordict):
        return self.get_dist(tensordict).log_prob(tensordict["action"] / 2) - math.log(2)


KINDS: dict[str, Callable[[], Any]] = {
    "Categorical": choosing,
    "OneHotCategorical": lambda: choosing(OneHotCategorical),
    "one-hot of torch": lambda: choosing(TorchOneHot),
    "MaskedCategorical": masked,
    "Bernoulli": lambda: choosing(Bernoulli),
    "Normal": gaussian,
    "IndependentNormal": lambda: gaussian(IndependentNormal),
    "TanhNormal": lambda: gaussian(TanhNormal),
    "agents": agents,
    "composite": composite,
    "one draw after another": chain,
    "its own distribution": lambda: Sharper(*choosing().module),
    "its own log-prob": lambda: Doubled(*gaussian().module),
}


def actor_of(kind: str, seed: int = 0) -> Any:
    return moved(sharp(KINDS[kind]().double()), seed=seed)


def observed(*shape: int) -> Any:
    """What the actors read, (*B); three agents, of which each reads the same entries."""
    read = torch.randn(*shape, 3, N_OBS).double()
    mask = torch.rand(*shape, N_ACTIONS) < 0.5
    mask[..., 0] = True
    group = TensorDict(observation=read, batch_size=(*shape, 3))
    return TensorDict(observation=read[..., 0, :], action_mask=mask, agents=group, batch_size=shape)


def act(actor: Any, data: Any, seed: int = 0) -> Any:
    """A batch of what an actor draws from `data`."""
    torch.manual_seed(seed)
    with set_exploration_type(ExplorationType.RANDOM):
        return actor(data.clone()).detach()


def by_hand(kind: str, actor: Any, batch: Any) -> Tensor:
    """The log-prob of the actions of a batch, from the networks and the formulas alone."""

    def run(part: Any) -> Any:
        return part.module(*(batch[key] for key in part.in_keys))

    def chosen(logits: Tensor, action: Tensor) -> Tensor:
        action = action if action.ndim < logits.ndim else action.long().argmax(-1)
        return logits.log_softmax(-1).gather(-1, action.unsqueeze(-1)).squeeze(-1)

    def normal(params: Any, x: Tensor) -> Tensor:
        loc, scale = params
        squares = ((x - loc) / scale) ** 2
        return (-squares / 2 - scale.log() - math.log(2 * math.pi) / 2).sum(-1)

    first, *parts = actor.module
    if kind == "agents":
        return chosen(run(first), batch["agents", "action"])
    if kind == "one draw after another":
        return chosen(run(first), batch["first"]) + chosen(run(parts[1]), batch["second"])
    if kind == "composite":
        heads = list(first.module)[:2]
        return chosen(run(heads[0]), batch["first"]) + chosen(run(heads[1]), batch["second"])
    params, action = run(first), batch["action"]
    if kind == "TanhNormal":
        return normal(params, action.atanh()) - torch.log1p(-(action**2)).sum(-1)
    if kind == "its own log-prob":
        return normal(params, action / 2) - 2 * math.log(2)
    if "Normal" in kind:
        return normal(params, action)
    if kind == "MaskedCategorical":
        return chosen(params.masked_fill(~batch["action_mask"], -torch.inf), action)
    if kind == "Bernoulli":
        return (action * params - nn.functional.softplus(params)).sum(-1)
    return chosen(2 * params if kind == "its own distribution" else params, action)
