"""The estimators of a step's KL other than k1."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, get_args

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor, nn

from torchrl_kl.actors.frozen import Score
from torchrl_kl.actors.policy import Borrowed
from torchrl_kl.actors.reading import dist_module_of, written_params
from torchrl_kl.batches import expand_right
from torchrl_kl.functional.distributions import joint
from torchrl_kl.functional.estimators import ESTIMATORS, kl_exact, kl_top_k
from torchrl_kl.functional.tiles import figures, over_log_probs
from torchrl_kl.keys import (
    LogProbKeys,
    ResolvedKeys,
    as_tuple,
    get_required,
    holder_batch_size,
    sum_action_dims,
)

Estimator = Literal["k1", "k2", "k3", "exact", "top_k"]


class Estimate(nn.Module, ABC):
    """An estimate of KL(policy || reference) of each step; it alone reads the `policy_keys`."""

    def __init__(self, policy_keys: list[NestedKey]):
        super().__init__()
        self.policy_keys = policy_keys

    @abstractmethod
    def forward(
        self,
        tensordict: TensorDictBase,
        log_prob: Tensor,
        score: Score,
        reference: nn.Module,
        mask: Tensor | None,
    ) -> Tensor:
        """The estimate for a batch (*B), nats, (*B, *A); only where `mask` is True is it one.

        `log_prob`: that of the policy, (*B, *A); `score`: of a pass of the actor `reference`.
        """


class SampledEstimate(Estimate):
    """k2 or k3: a function of the two log-probs."""

    def __init__(self, estimator: str):
        super().__init__([])
        self.estimator = estimator

    def forward(self, tensordict, log_prob, score, reference, mask):  # noqa: D102
        return ESTIMATORS[self.estimator](log_prob, score.log_prob, mask=mask)


class ExactEstimate(Estimate):
    """The KL of the two distributions, from their parameters."""

    def __init__(self, actor: nn.Module, recorded: LogProbKeys):
        super().__init__(written_params(actor))
        # Only what builds the distribution: the network is not needed. It may learn, such as a
        # temperature.
        self._of_policy = Borrowed(dist_module_of(actor))
        self.recorded = recorded

    @torch.no_grad()
    def forward(self, tensordict, log_prob, score, reference, mask):  # noqa: D102
        for key in self.policy_keys:
            get_required(tensordict, key, _RECORD_PARAMS)
        of_policy, of_reference = self._of_policy.held, dist_module_of(reference)
        key = of_reference.in_keys[0]
        if score.outputs.get(key, None) is None and self.policy_keys == [key]:
            # Of the reference, logits are never all there: they are made in tiles.
            return figures(tensordict.get(key), reference=score.dist)[0]
        # The parameters, such as logits (*B, V).
        params = tensordict.select(*of_policy.in_keys).detach()
        ref_params = score.outputs.select(*of_reference.in_keys).detach()
        _check_shapes(params, ref_params)
        if mask is not None:
            # Padding has no valid parameters (a scale of 0, say): take the reference's there.
            for key, param in params.items(True, True):  # which of a lazy stack are whole, too
                counts = expand_right(mask, param.shape)
                params.set(key, torch.where(counts, param, ref_params.get(key)))
        policy, ref = of_policy.get_dist(params), of_reference.get_dist(ref_params)
        # One of them may be a Normal, (*B, n), and the other an Independent one, (*B).
        n_batch = min(len(policy.batch_shape), len(ref.batch_shape))
        # The batch shape of a Normal includes the action dimensions, (*B, n), summed afterwards.
        policy, ref = joint(policy, n_batch), joint(ref, n_batch)
        if mask is not None:
            mask = expand_right(mask, policy.batch_shape)
        kl = kl_exact(policy, ref, mask=mask)
        return sum_action_dims(kl, self.recorded.batch_size(tensordict))


class TopKEstimate(Estimate):
    """Exact on the k most likely actions, which the policy recorded, and sampled on the rest."""

    def __init__(self, top_k_key: NestedKey):
        super().__init__([top_k_key])
        self.top_k_key = top_k_key

    def forward(self, tensordict, log_prob, score, reference, mask):  # noqa: D102
        # Of the reference's log-probs (*B, V), those of the policy's k actions (*B, k).
        dist = score.dist or dist_module_of(reference).get_dist(score.outputs)
        actions = self._recorded(tensordict, "actions")
        one_per_step = holder_batch_size(tensordict, self.top_k_key)
        if not actions.shape[:-1] == dist.batch_shape == one_per_step:
            raise ValueError(
                "the top k measure one choice per step, got choices of shape "
                f"{tuple(actions.shape[:-1])} of the policy and {tuple(dist.batch_shape)} of "
                f"the reference in a batch of shape {tuple(one_per_step)}: use the exact estimator."
            )
        (ref_top,) = over_log_probs(lambda all_, some: [all_.gather(-1, some)], dist, actions)
        return kl_top_k(
            self._recorded(tensordict, "log_probs").detach(),
            ref_top,
            log_prob,
            score.log_prob,
            self._recorded(tensordict, "in_top_k"),
            mask=mask,
        )

    def _recorded(self, tensordict: TensorDictBase, name: str) -> Tensor:
        return get_required(tensordict, (*as_tuple(self.top_k_key), name), _RECORD_TOP_K)


def make_estimate(estimator: Estimator, actor: nn.Module, keys: ResolvedKeys) -> Estimate | None:
    """The estimate of that name; None for k1, which is always measured."""
    check_estimator(estimator)
    if estimator == "exact":
        return ExactEstimate(actor, keys.recorded)
    if estimator == "top_k":
        return TopKEstimate(keys.top_k)
    return None if estimator == "k1" else SampledEstimate(estimator)


def check_estimator(estimator: str) -> None:
    """ValueError for an unknown name."""
    if estimator not in get_args(Estimator):
        names = list(get_args(Estimator))
        raise ValueError(f"`estimator` must be one of {names}, got {estimator!r}.")


def _check_shapes(params: TensorDictBase, of_reference: TensorDictBase) -> None:
    for key, param in params.items(True, True):
        ref_param = get_required(of_reference, key, _SAME_NAMES)
        if param.shape != ref_param.shape:
            raise ValueError(
                f"{key!r} of policy and reference must have the same shape, got "
                f"{tuple(param.shape)} and {tuple(ref_param.shape)}: choose among the same actions."
            )


_DROPPED = "If another stack has measured this batch, it dropped them: put both into one Compose."
_RECORD_PARAMS = (
    'let the policy record its parameters, or use TopKActor with `estimator="top_k"`. ' + _DROPPED
)
_RECORD_TOP_K = (
    "collect with TopKActor(actor, k), or name its record with `KLKeys(top_k=...)`. " + _DROPPED
)
_SAME_NAMES = "policy and reference must name their parameters alike."
