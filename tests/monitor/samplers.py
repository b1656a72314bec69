"""Samplers that differ from the actor that scores their actions."""

import math
from typing import Any

import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import Categorical
from torchrl.modules import MaskedCategorical

from tests.helpers import N_ACTIONS, N_OBS, WalkEnv, play, probabilistic_actor
from torchrl_kl import KLConstrainedTransform, KLMonitor

INF = math.inf


class Cooler(Categorical):
    def __init__(self, logits):
        super().__init__(logits=logits / 0.8)


class Tempered(Categorical):
    def __init__(self, logits):
        super().__init__(logits=logits / 0.7)


class TopTwo(Categorical):
    def __init__(self, logits):
        super().__init__(logits=logits.masked_fill(logits < logits.topk(2).values[..., -1:], -INF))


class TopOne(Categorical):
    def __init__(self, logits):
        super().__init__(logits=logits.masked_fill(logits < logits.amax(-1, keepdim=True), -INF))


class TopP(Categorical):
    """The most likely actions until 0.8 is reached."""

    def __init__(self, logits):
        ranked = logits.softmax(-1).sort(-1, descending=True)
        before = ranked.values.cumsum(-1) - ranked.values
        keep = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, ranked.indices, before < 0.8)
        super().__init__(logits=logits.masked_fill(~keep, -INF))


class LeavesOutTheMostLikely(Categorical):
    """A mask that no entry of the data shows."""

    def __init__(self, logits):
        super().__init__(logits=logits.masked_fill(logits == logits.amax(-1, keepdim=True), -INF))


class Both(Categorical):
    """Temperature and top-k at once."""

    def __init__(self, logits):
        super().__init__(logits=TopTwo(logits / 0.7).logits)


class LogitsAndMask(nn.Module):
    """Every action but one, which depends on the observation."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(N_OBS, N_ACTIONS)

    def forward(self, observation):
        forbidden = (observation.sum(-1).abs() * 10).long() % N_ACTIONS
        return self.linear(observation), nn.functional.one_hot(forbidden, N_ACTIONS) == 0


def actor_drawing(distribution: Any, like: Any) -> Any:
    """An actor with the weights of `like` and another distribution."""
    return probabilistic_actor(
        like[0],
        in_keys=["logits"],
        out_keys=["action"],
        distribution_class=distribution,
        return_log_prob=True,
    )


def masked_actor(like: Any) -> Any:
    net: Any = LogitsAndMask()
    net.linear.load_state_dict(like[0].module.state_dict())
    return probabilistic_actor(
        TensorDictModule(net, ["observation"], ["logits", "allowed"]),
        in_keys={"logits": "logits", "mask": "allowed"},
        out_keys=["action"],
        distribution_class=MaskedCategorical,
        return_log_prob=True,
    )


def watch(sampler: Any, scorer: Any, *, steps: int = 60, env: Any = None, **kwargs) -> Any:
    """What a monitor with the scorer as actor and reference says of one batch."""
    stack = KLConstrainedTransform(scorer, 0.0)
    batch = stack(play(env or WalkEnv((8,)), sampler, steps=steps))
    monitor = KLMonitor(stack.controller, actor=scorer, reference=stack.reference, **kwargs)
    return [message for message in monitor(batch) if message.condition == "sampler_disagrees"]


def scored_again(batch: Any, actor: Any) -> Any:
    """The same actions, with the log-probs of another actor."""
    with torch.no_grad():
        batch["action_log_prob"] = actor.get_dist(batch.select("observation")).log_prob(
            batch["action"]
        )
    return batch
