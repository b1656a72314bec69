"""A KLPenaltyLoss for the actors of tests.helpers, and data for it."""

from typing import Any

import torch
from torch.distributions import kl_divergence

from tests.helpers import WalkEnv, make_actor, memory_of, moved, play, with_transforms
from torchrl_kl import KLPenaltyLoss


def make_loss(kind: str = "categorical", controller: Any = 0.5, **kwargs) -> Any:
    reference = make_actor(kind)
    return KLPenaltyLoss(moved(reference), controller, **{"reference": reference} | kwargs)


def rollout(kind: str = "categorical", **kwargs) -> Any:
    """Two rows of 12 steps of WalkEnv, through several episodes each."""
    actor = make_actor(kind)
    transforms = memory_of(actor) if kind in ("lstm", "gru") else []
    env = WalkEnv((2,), discrete=kind not in ("normal", "tanh_normal"), **kwargs)
    return play(with_transforms(env, *transforms), moved(actor)).detach()


def weight_of(loss: Any) -> Any:
    return next(loss.parameters())


def kl_of(loss: Any, batch: Any) -> torch.Tensor:
    """The KL of each step, from the two actors and torch's own formula."""
    policy = loss.actor_network.get_dist(batch.select("observation"))
    return kl_divergence(
        policy, loss.reference.actor.get_dist(batch.select("observation"))
    ).detach()
