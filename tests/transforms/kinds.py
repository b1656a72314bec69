"""Every kind of action: its actor, its env, and its KL from the bare networks."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from tensordict.nn import (
    CompositeDistribution,
    TensorDictModule,
    set_composite_lp_aggregate,
)
from torch import nn
from torch.distributions import Categorical, Normal
from torchrl.data import Binary, Composite, Unbounded
from torchrl.data import Categorical as Choice

from tests.helpers import (
    N_ACTIONS,
    N_OBS,
    WalkEnv,
    probabilistic_actor,
    sharp,
    without_kl,
)
from torchrl_kl import (
    KLConstrainedTransform,
)


class PlayedEnv(WalkEnv):
    """WalkEnv with another action, of `spec(batch_size)`; `move(td)` turns it into WalkEnv's."""

    def __init__(
        self, batch_size: tuple[int, ...] = (), *, spec, move, discrete=True, masked=False
    ):
        super().__init__(batch_size, discrete=discrete)
        self.move, self.masked = move, masked
        batch = torch.Size(batch_size)
        self.action_spec = Composite(action=spec(batch), shape=batch)
        if masked:
            self.observation_spec["action_mask"] = Binary(
                shape=torch.Size((*batch, N_ACTIONS)), dtype=torch.bool
            )

    def _step(self, tensordict):
        return self._mask(
            super()._step(tensordict.copy().set("action", self.move(tensordict["action"])))
        )

    def _reset(self, tensordict=None, **_):
        return self._mask(super()._reset(tensordict))

    def _mask(self, tensordict):
        if self.masked:  # forbids another action in each state
            forbidden = (
                tensordict["observation"].abs().sum(-1, keepdim=True) * 10
            ).long() % N_ACTIONS
            tensordict["action_mask"] = torch.arange(N_ACTIONS) != forbidden
        return tensordict


class Parts(nn.Module):
    """The parameters of a composite policy, that picks one of 4 and moves in 2 dimensions."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(N_OBS, N_ACTIONS + 4)

    def forward(self, observation):
        logits, loc, scale = self.linear(observation).split([N_ACTIONS, 2, 2], -1)
        return logits, loc, nn.functional.softplus(scale) + 0.1


def log_softmax_of(logits: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(-1).gather(-1, action.unsqueeze(-1)).squeeze(-1)


def gaussian(loc: torch.Tensor, scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The log-density, without the constant, which drops out of a KL."""
    return (-(((x - loc) / scale) ** 2) / 2 - scale.log()).sum(-1)


@dataclass
class Kind:
    """One kind of action.

    Args:
        net: makes the network.
        params: what it writes.
        distribution: of the action.
        log_prob: of an action from what the network says, up to what policy and reference share.
        env: arguments of PlayedEnv.
        out_keys: of the actor.
        written: where the network writes them, if not there.
        options: others of the actor.
        aggregate: the mode of composite log-probs.
        scale: of its weights.
    """

    net: Callable[[], Any]
    params: Any
    distribution: Any
    log_prob: Callable[..., torch.Tensor]
    env: dict[str, Any]
    out_keys: tuple[Any, ...] = ("action",)
    written: Any = None
    options: dict[str, Any] | None = None
    aggregate: bool | None = None
    scale: float = 0.5


def composite_spec(batch: torch.Size) -> Composite:
    return Composite(
        pick=Choice(N_ACTIONS, shape=batch), move=Unbounded(torch.Size((*batch, 2))), shape=batch
    )


IN_PARTS = {
    "spec": composite_spec,
    "move": lambda action: action["move"] + action["pick"].unsqueeze(-1),
    "discrete": False,
}


def composite(aggregate: bool) -> Kind:
    return Kind(
        net=Parts,
        params=["params"],
        written=[
            ("params", "pick", "logits"),
            ("params", "move", "loc"),
            ("params", "move", "scale"),
        ],
        distribution=CompositeDistribution,
        log_prob=lambda batch, logits, loc, scale: (
            log_softmax_of(logits, batch["action", "pick"])
            + gaussian(loc, scale, batch["action", "move"])
        ),
        env=IN_PARTS,
        out_keys=(("action", "pick"), ("action", "move")),
        options={
            "distribution_kwargs": {
                "distribution_map": {"pick": Categorical, "move": Normal},
                "name_map": {"pick": ("action", "pick"), "move": ("action", "move")},
            }
        },
        aggregate=aggregate,
    )


def mode(kind: Kind):
    """What a script with such an actor sets, from building it to the end."""
    return nullcontext() if kind.aggregate is None else set_composite_lp_aggregate(kind.aggregate)


def make(kind: Kind) -> Any:
    params = list(kind.params.values())[:1] if isinstance(kind.params, dict) else kind.params
    return sharp(
        probabilistic_actor(
            TensorDictModule(kind.net(), ["observation"], kind.written or params),
            in_keys=kind.params,
            out_keys=list(kind.out_keys),
            distribution_class=kind.distribution,
            return_log_prob=True,
            **(kind.options or {}),
        ),
        scale=kind.scale,
    )


def stack_of(kind: Kind, actor, **kwargs) -> Any:
    place = ("action", "kl") if kind.aggregate is False else "kl"  # next to the log-prob
    return KLConstrainedTransform(actor, 0.5, **kwargs), place


def bare(batch, place) -> Any:
    """As the env without the stack would have returned it."""
    batch = without_kl(batch)
    if place != "kl":
        batch = batch.exclude(
            *((*step, "action", name) for step in ((), ("next",)) for name in ADDED)
        )
    return batch


ADDED = ("ref_log_prob", "kl", "kl_estimate", "episode_kl")
