"""The estimates of a step's KL that need more than its two log-probs."""

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple, get_args

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor, nn

from torchrl_kl.actors.frozen import Score
from torchrl_kl.actors.policy import Borrowed
from torchrl_kl.actors.reading import dist_module_of, written_params
from torchrl_kl.batches import expand_right
from torchrl_kl.functional.distributions import joint
from torchrl_kl.functional.estimators import kl_exact, kl_top_k
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


class Estimate(NamedTuple):
    """An estimate of KL(policy || reference) of each step that is made while the reference scores.

    `compute(tensordict, log_prob, score, reference, mask)` gives it for a batch (*B), nats, (*B,
    *A), right where `mask` is True. `log_prob`: that of the policy, (*B, *A); `score`: of a pass of
    the actor `reference`.
    """

    policy_keys: list[NestedKey]  # what it alone reads of what the policy recorded
    compute: Callable[..., Tensor]


def make_estimate(estimator: Estimator, actor: nn.Module, keys: ResolvedKeys) -> Estimate | None:
    """The estimate of that name; None for those that `measure` makes of two log-probs."""
    check_estimator(estimator)
    if estimator == "exact":
        params = written_params(actor)
        # The policy's distribution module is shared, since it may learn (a temperature).
        of_policy = Borrowed(dist_module_of(actor))
        return Estimate(params, partial(_exact, of_policy, params, keys.recorded))
    return Estimate([keys.top_k], partial(_top_k, keys.top_k)) if estimator == "top_k" else None


def _exact(
    policy: Borrowed,
    policy_keys: list[NestedKey],
    recorded: LogProbKeys,
    tensordict: TensorDictBase,
    log_prob: Tensor,
    score: Score,
    reference: nn.Module,
    mask: Tensor | None,
) -> Tensor:
    """The KL of the two distributions, from their parameters."""
    for key in policy_keys:
        get_required(tensordict, key, _RECORD_PARAMS)
    of_policy, of_reference = policy.held, dist_module_of(reference)
    key = of_reference.in_keys[0]
    tiled = score.dist is not None and score.outputs.get(key, None) is None
    if tiled and policy_keys == [key]:
        # Of the reference, logits are never all there: they are made in tiles.
        return figures(tensordict.get(key), reference=score.dist)[0]
    # The parameters, such as logits (*B, V).
    params = tensordict.select(*of_policy.in_keys).detach()
    ref_params = score.outputs.select(*of_reference.in_keys, strict=False).detach()
    _check_shapes(params, ref_params)
    if mask is not None:
        # Padding has no valid parameters (a scale of 0, say): take the reference's there.
        for key, param in params.items(True, True):  # which of a lazy stack are whole, too
            counts = expand_right(mask, param.shape)
            params.set(key, torch.where(counts, param, ref_params.get(key)))
    dist, ref = of_policy.get_dist(params), of_reference.get_dist(ref_params)
    # One of them may be a Normal, (*B, n), and the other an Independent one, (*B).
    n_batch = min(len(dist.batch_shape), len(ref.batch_shape))
    # The batch shape of a Normal includes the action dimensions, (*B, n), summed afterwards.
    dist, ref = joint(dist, n_batch), joint(ref, n_batch)
    if mask is not None:
        mask = expand_right(mask, dist.batch_shape)
    return sum_action_dims(kl_exact(dist, ref, mask=mask), recorded.batch_size(tensordict))


def _top_k(
    top_k_key: NestedKey,
    tensordict: TensorDictBase,
    log_prob: Tensor,
    score: Score,
    reference: nn.Module,
    mask: Tensor | None,
) -> Tensor:
    """Exact on the k most likely actions, which the policy recorded, and sampled on the rest."""
    actions, top, in_top_k = (
        get_required(tensordict, (*as_tuple(top_k_key), name), _RECORD_TOP_K)
        for name in ("actions", "log_probs", "in_top_k")
    )
    # Of the reference's log-probs (*B, V), those of the policy's k actions (*B, k).
    dist = score.dist or dist_module_of(reference).get_dist(score.outputs)
    one_per_step = holder_batch_size(tensordict, top_k_key)
    if not actions.shape[:-1] == dist.batch_shape == one_per_step:
        raise ValueError(
            "the top k measure one choice per step, got choices of shape "
            f"{tuple(actions.shape[:-1])} of the policy and {tuple(dist.batch_shape)} of "
            f"the reference in a batch of shape {tuple(one_per_step)}: use the exact estimator."
        )
    (ref_top,) = over_log_probs(lambda all_, some: [all_.gather(-1, some)], dist, actions)
    return kl_top_k(top.detach(), ref_top, log_prob, score.log_prob, in_top_k, mask=mask)


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
