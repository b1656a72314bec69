"""Actors and envs for the estimators "exact" and "top_k", and what they must measure."""

from typing import Any

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import Normal, kl_divergence
from torchrl.data import Binary
from torchrl.envs import Transform
from torchrl.modules import MaskedCategorical

from tests.helpers import (
    N_ACTIONS,
    N_OBS,
    WalkEnv,
    compose,
    make_actor,
    memory_of,
    probabilistic_actor,
    rounding,
    sharp,
    with_transforms,
)
from torchrl_kl import (
    KLConstrainedTransform,
    KLDivergenceTransform,
    ReferenceModelLogProbTransform,
    TopKActor,
)

SCRATCH = "_ref_log_prob_dist"
K = 2
both = pytest.mark.parametrize("estimator", ["exact", "top_k"])


def as_policy(actor, estimator: str, k: int = K) -> Any:
    return TopKActor(actor, k) if estimator == "top_k" else actor


def stack(actor, estimator: Any, controller: Any = 0.1, **kwargs) -> Any:
    return KLConstrainedTransform(actor, controller, estimator=estimator, **kwargs)


def parts(actor, estimator, **kwargs) -> Any:
    """The stack without the penalty, by hand."""
    return compose(
        ReferenceModelLogProbTransform(actor, estimator=estimator),
        KLDivergenceTransform(estimator=estimator, actor=actor, **kwargs),
    )


class Forbids(Transform):
    """An env that forbids one action, another one in each state."""

    def _call(self, next_tensordict):
        forbidden = (
            next_tensordict["observation"].abs().sum(-1, keepdim=True) * 10
        ).long() % N_ACTIONS
        return next_tensordict.set("action_mask", torch.arange(N_ACTIONS) != forbidden)

    def _reset(self, tensordict, tensordict_reset):
        return self._call(tensordict_reset)

    def transform_observation_spec(self, observation_spec: Any):
        shape = torch.Size((*observation_spec.shape, N_ACTIONS))
        observation_spec["action_mask"] = Binary(N_ACTIONS, shape=shape, dtype=torch.bool)
        return observation_spec


def categorical_actor(distribution, params: Any = ("logits",)) -> Any:
    net = TensorDictModule(nn.Linear(N_OBS, N_ACTIONS), ["observation"], ["logits"])
    return sharp(
        probabilistic_actor(
            net, in_keys=params, distribution_class=distribution, return_log_prob=True
        ),
        scale=0.7,
    )


def make(kind: str) -> Any:
    if kind == "masked":
        return categorical_actor(MaskedCategorical, {"logits": "logits", "mask": "action_mask"})
    if kind == "agents":
        return make_actor(agents=True)
    return make_actor(kind)


def env_for(kind: str, actor, *transforms: Transform, **kwargs) -> Any:
    env = WalkEnv(
        (2,),
        discrete=kind not in ("normal", "tanh_normal"),
        n_agents=3 if kind == "agents" else None,
        **kwargs,
    )
    needs = memory_of(actor) if kind in ("lstm", "gru") else [Forbids()] if kind == "masked" else []
    return with_transforms(env, *needs, *transforms)


def params_of(kind: str, actor, batch) -> Any:
    """What the bare network says of every step."""
    observation = batch["agents", "observation"] if kind == "agents" else batch["observation"]
    with torch.no_grad():
        return actor[0].module(observation)


def recorded_params(kind: str, batch) -> Any:
    """What an actor wrote of every step: logits, or loc and scale."""
    if kind in ("normal", "tanh_normal"):
        return batch["loc"], batch["scale"]
    return batch["agents", "logits"] if kind == "agents" else batch["logits"]


def log_probs_in(kind: str, logits: torch.Tensor, batch) -> torch.Tensor:
    """Log-probs of all actions; exp(-60) of a forbidden one, which no sum notices."""
    if kind == "masked":
        logits = logits.masked_fill(~batch["action_mask"], -60.0)
    return logits.log_softmax(-1)


def kl_between(kind: str, p, q, batch) -> torch.Tensor:
    """The KL of each step from the parameters of both, trailing 1."""
    if kind in ("normal", "tanh_normal"):  # a bijection that both share changes no KL
        return kl_divergence(Normal(*p), Normal(*q)).sum(-1, keepdim=True)
    p, q = (log_probs_in(kind, logits, batch) for logits in (p, q))
    return (p.exp() * (p - q)).sum(-1, keepdim=True)


def top_k_from(kind: str, q, batch) -> torch.Tensor:
    """The estimate of each step from the policy's record and the reference's logits, trailing 1."""
    holder = batch["agents"] if kind == "agents" else batch
    top, q = holder["top_k"], log_probs_in(kind, q, batch)
    exact = (top["log_probs"].exp() * (top["log_probs"] - q.gather(-1, top["actions"]))).sum(-1)
    action = holder["action"]
    action = action.long().argmax(-1) if action.shape == q.shape else action
    drawn = holder["action_log_prob"] - q.gather(-1, action.unsqueeze(-1)).squeeze(-1)
    return (exact + torch.where(top["in_top_k"], 0.0, drawn)).unsqueeze(-1)


def rounding_of(
    kind: str, estimator: str, policy, reference, batch, *, whole: bool = True
) -> torch.Tensor:
    """The rounding of the estimate of each step, trailing 1.

    Args:
        kind: of the actors.
        estimator: "exact" or "top_k".
        policy, reference: the actors.
        batch: what was recorded.
        whole: whether the policy, too, is evaluated twice; else its record is read.
    """
    batch = batch.detach()
    steps, read = 1, batch
    for name in ("h", "c"):
        if f"ref_{name}" in batch.keys():
            steps, read = batch.shape[-1], read.copy().set(name, batch[f"ref_{name}"])

    def of_reference(known: Any) -> torch.Tensor:
        q = recorded_params(kind, known)
        if estimator == "top_k":
            return top_k_from(kind, q, batch)
        return kl_between(kind, recorded_params(kind, batch), q, batch)

    bound = rounding(reference, read, of_reference, steps=steps)
    if whole:
        q = params_of(kind, reference, batch)
        bound = bound + rounding(
            policy, batch, lambda p: kl_between(kind, recorded_params(kind, p), q, batch)
        )
    return bound
