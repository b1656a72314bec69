"""Log-probabilities in, KL numbers out: the estimators of KL(policy || reference).

One letter per axis: `*B` is any leading shape. Everything is in nats, policy first, on actions that were drawn from the
policy: `log_prob = log pi(a|s)`, `ref_log_prob = log pi_ref(a|s)`, `lr = log_prob - ref_log_prob`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributions import Distribution

from torchrl_kl.functional.distributions import (
    kl_of_distributions,
    kl_of_logits,
    split_log_ratio,
)
from torchrl_kl.functional.numbers import check_mask, working_dtype

# Until torchrl_kl/__init__.py imports them from torchrl_kl.functional.
from torchrl_kl.functional.sums import masked_mean, masked_sum, sum_over_trajectories

__all__ = [
    "ESTIMATORS",
    "kl_exact",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "kl_top_k",
    "masked_mean",
    "masked_sum",
    "sum_over_trajectories",
]


def kl_k1(log_prob: Tensor, ref_log_prob: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Log-ratio estimate of KL(policy || reference): `log_prob - ref_log_prob`.

    You may rely on: its mean over the policy's actions is the KL, exactly, and it is the one estimate that can be
    charged to a reward. You may not rely on its sign (near the reference about half of the values are negative), nor on
    its gradient: as a loss its expected gradient is zero.

    Args:
        log_prob: log pi(a|s), nats, shape (*B).
        ref_log_prob: log pi_ref(a|s) of the same actions, nats, shape (*B).
        mask: True where a step counts, boolean, shape (*B). Elsewhere the estimate is 0, whatever stands there.

    Returns:
        One estimate per step, nats, shape (*B); +inf where the reference cannot produce the action, with gradient 0. A
        `log_prob` of -inf (an action that the policy cannot draw) contributes 0.

    Raises:
        TypeError: if the log-probabilities are not floating point.
        ValueError: if the shapes differ or the mask is not boolean.

    Reference:
        J. Schulman, "Approximating KL divergence" (2020).

    Example:
        >>> kl_k1(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0]))
        tensor([ 0.5000, -1.0000])
    """
    return _log_ratio(log_prob, ref_log_prob, mask)


def kl_k2(log_prob: Tensor, ref_log_prob: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Half the squared log-ratio: `lr ** 2 / 2`, a biased measurement of KL(policy || reference).

    You may rely on: it is never negative, and its gradient as a loss is the gradient of the KL (on-policy, one step).
    You may not rely on its mean: it equals the KL only to second order around the reference.

    Args:
        log_prob: log pi(a|s), nats, shape (*B).
        ref_log_prob: log pi_ref(a|s) of the same actions, nats, shape (*B).
        mask: True where a step counts, boolean, shape (*B). Elsewhere the estimate is 0, whatever stands there.

    Returns:
        One estimate per step, nats, shape (*B); +inf where the reference cannot produce the action, with gradient 0.

    Raises:
        TypeError: if the log-probabilities are not floating point.
        ValueError: if the shapes differ or the mask is not boolean.

    Reference:
        J. Schulman, "Approximating KL divergence" (2020).

    Example:
        >>> kl_k2(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0]))
        tensor([0.1250, 0.5000])
    """
    return _log_ratio(log_prob, ref_log_prob, mask).square() / 2


def kl_k3(log_prob: Tensor, ref_log_prob: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Never-negative estimate of KL(policy || reference): `exp(-lr) - 1 + lr`.

    You may rely on: no value is negative, and its mean is the KL wherever the policy's support covers the reference's.
    You may not rely on it where the reference has mass that the policy has not (the mean is then too small by that
    mass), nor as a loss: its expected gradient is that of the other divergence, KL(reference || policy).

    Args:
        log_prob: log pi(a|s), nats, shape (*B).
        ref_log_prob: log pi_ref(a|s) of the same actions, nats, shape (*B).
        mask: True where a step counts, boolean, shape (*B). Elsewhere the estimate is 0, whatever stands there.

    Returns:
        One estimate per step, nats, shape (*B); +inf where the reference cannot produce the action, with gradient 0.

    Raises:
        TypeError: if the log-probabilities are not floating point.
        ValueError: if the shapes differ or the mask is not boolean.

    Reference:
        J. Schulman, "Approximating KL divergence" (2020).

    Example:
        >>> kl_k3(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0]))
        tensor([0.1065, 0.7183])
    """
    log_ratio = _log_ratio(log_prob, ref_log_prob, mask)
    # expm1 keeps the digits that exp(x) - 1 loses near the reference, where the estimate is of the order of x ** 2.
    return torch.expm1(-log_ratio) + log_ratio


ESTIMATORS: dict[str, Callable[..., Tensor]] = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}


def kl_exact(
    policy: Tensor | Distribution, reference: Tensor | Distribution, *, mask: Tensor | None = None
) -> Tensor:
    """Exact KL(policy || reference) of each step, over all actions: `sum_a pi(a) (log pi(a) - log pi_ref(a))`.

    You may rely on: no sample enters, so that it has the value and the gradient of the KL of the step, and given the
    state no variance. You may not rely on its gradient for what an action does to later states, nor charge it to a
    reward: it is the same for every action of the step. Rounding may leave it a few units below 0.

    Actions that the policy cannot take add nothing. Where the reference cannot take an action that the policy can, the
    step is +inf and its gradient 0. Half precision is computed in float32.

    Args:
        policy: logits or log-probabilities of all V actions, shape (*B, V), normalised here; or a distribution of batch
            shape (*B). Between distributions: categorical ones by their log-probabilities (one-hot and masked
            ones too), independent and transformed ones (TanhNormal) through their bases, the latter if both share the
            bijection, whose parameters are taken as constants; tensordict's CompositeDistribution as the sum over its
            parts; all others as registered with torch.
        reference: the same for the reference: same kind, same shape.
        mask: True where a step counts, boolean, shape (*B). Elsewhere the KL is 0, whatever stands there; but
            the gradient of what a distribution computed when it was built (Categorical normalises) is its own.

    Returns:
        The KL of each step, nats, shape (*B). NaN where a row is no distribution (every logit -inf, or one NaN).

    Raises:
        TypeError: if one is a tensor and the other a distribution, if tensors are not floating point, or if no KL is
            registered for the pair of distributions.
        ValueError: if shapes, actions or bijections differ, or the mask is not boolean of shape (*B).

    Reference:
        A. Amini, T. Vieira, R. Cotterell, "Better Estimation of the KL Divergence Between Language Models" (2025).

    Example:
        >>> kl_exact(torch.tensor([[0.5, 0.5], [1.0, 0.0]]).log(), torch.tensor([[0.25, 0.75], [0.5, 0.5]]).log())
        tensor([0.1438, 0.6931])
        >>> from torch.distributions import Normal
        >>> kl_exact(Normal(torch.ones(2), torch.ones(2)), Normal(torch.zeros(2), torch.ones(2)))
        tensor([0.5000, 0.5000])
    """
    if isinstance(policy, Distribution) and isinstance(reference, Distribution):
        check_mask(mask, policy.batch_shape, "the batch shape of `policy`")
        return kl_of_distributions(policy, reference, mask)
    if not isinstance(policy, Tensor) or not isinstance(reference, Tensor):
        raise TypeError(
            "`policy` and `reference` must both be tensors of logits or both torch.distributions, got "
            f"{type(policy).__name__} and {type(reference).__name__}."
        )
    _check_pair(policy, reference, "policy", "reference")
    if policy.ndim == 0:
        raise ValueError(
            "`policy` and `reference` must have their actions in the last dimension, got tensors without dimensions: "
            "for the log-probability of one action use `kl_k1`."
        )
    check_mask(mask, policy.shape[:-1], "`policy` without its last dimension")
    return kl_of_logits(policy, reference, mask)


def kl_top_k(
    top_log_probs: Tensor,
    top_ref_log_probs: Tensor,
    log_prob: Tensor,
    ref_log_prob: Tensor,
    in_top_k: Tensor,
    *,
    mask: Tensor | None = None,
) -> Tensor:
    """KL(policy || reference), exact on k actions and sampled on the rest: `sum_top pi lr + [a not in top] w lr(a)`.

    `w = exp(log_prob - log_prob.detach())` is 1 in value: a surrogate that carries the score of the sampled action, so
    that autograd finds the whole gradient, `(lr + 1) grad log pi(a)` in the tail and not only `grad log pi(a)`.

    You may rely on: over actions drawn from the policy, its mean is the KL and its gradient has the mean of the KL's
    gradient, for any k and any choice of the k actions. k = 0 is k1 with its score, k = V is `kl_exact`. The mean
    square of the sampled term only falls as actions are added to the k; a step takes 2 k + 2 numbers and one bit. You
    may not rely on its sign where the tail is drawn, nor that it varies less than k1 (where lr is nearly the same for
    all actions it varies more), nor charge it to a reward.

    Args:
        top_log_probs: log pi of k actions, as a rule the policy's most likely ones, nats, shape (*B, k); normalised
            over all actions, not over the k.
        top_ref_log_probs: log pi_ref of the same actions, nats, shape (*B, k).
        log_prob: log pi(a|s) of the action drawn, nats, shape (*B).
        ref_log_prob: log pi_ref(a|s) of the action drawn, nats, shape (*B).
        in_top_k: True where the action drawn is one of the k, boolean, shape (*B).
        mask: True where a step counts, boolean, shape (*B). Elsewhere the estimate is 0, whatever stands there.

    Returns:
        One estimate per step, nats, shape (*B). Where the reference cannot take one of the k actions (which the policy
        can) or the action drawn from the tail, it is +inf and its gradient 0. Half precision is computed in float32.

    Raises:
        TypeError: if the log-probabilities are not floating point.
        ValueError: if the shapes do not fit, or `in_top_k` or the mask is not boolean.

    Example:
        >>> probs, ref_probs = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.25, 0.25, 0.5])
        >>> estimates = [  # k = 1, after each of the three actions
        ...     kl_top_k(probs[:1].log(), ref_probs[:1].log(), probs[a].log(), ref_probs[a].log(), torch.tensor(a == 0))
        ...     for a in range(3)
        ... ]
        >>> (probs * torch.stack(estimates)).sum(), kl_exact(probs.log(), ref_probs.log())
        (tensor(0.2180), tensor(0.2180))
    """
    _check_pair(top_log_probs, top_ref_log_probs, "top_log_probs", "top_ref_log_probs")
    _check_pair(log_prob, ref_log_prob, "log_prob", "ref_log_prob")
    if top_log_probs.shape[:-1] != log_prob.shape or top_log_probs.ndim == 0:
        raise ValueError(
            "`top_log_probs` must have the shape of `log_prob` and k actions in one more dimension, got "
            f"{tuple(top_log_probs.shape)} and {tuple(log_prob.shape)}: k = 0 is a last dimension of size 0."
        )
    check_mask(
        in_top_k,
        log_prob.shape,
        "`log_prob`",
        name="in_top_k",
        means="the actions drawn from the top k",
    )
    check_mask(mask, log_prob.shape, "`log_prob`")

    dtype = torch.promote_types(log_prob.dtype, ref_log_prob.dtype)
    work = working_dtype(dtype)
    rows, tail = (None, ~in_top_k) if mask is None else (mask.unsqueeze(-1), mask & ~in_top_k)
    top, top_ratio, top_infinite = split_log_ratio(
        top_log_probs.to(work), top_ref_log_probs.to(work), rows
    )
    drawn, ratio, infinite = split_log_ratio(log_prob.to(work), ref_log_prob.to(work), tail)
    # The score's weight stands on the tail alone: the exact part depends on no sample.
    estimate = (top.exp() * top_ratio).sum(-1) + (drawn - drawn.detach()).exp() * ratio
    return torch.where(infinite | top_infinite.any(-1), torch.inf, estimate).to(dtype)


def _log_ratio(log_prob: Tensor, ref_log_prob: Tensor, mask: Tensor | None) -> Tensor:
    _check_pair(log_prob, ref_log_prob, "log_prob", "ref_log_prob")
    check_mask(mask, log_prob.shape, "`log_prob`")
    counts = log_prob != -torch.inf
    if mask is not None:
        counts = counts & mask
    # `where` stands before all that bends: an excluded step is 0 in value and gradient, never NaN * 0.
    log_ratio = torch.where(counts, log_prob - ref_log_prob, 0.0)
    return torch.where(
        log_ratio == torch.inf, torch.inf, log_ratio
    )  # as a constant: infinity has no slope


def _check_pair(log_prob: Tensor, ref_log_prob: Tensor, name: str, ref_name: str) -> None:
    if log_prob.shape != ref_log_prob.shape:
        raise ValueError(
            f"`{name}` and `{ref_name}` must have the same shape, got "
            f"{tuple(log_prob.shape)} and {tuple(ref_log_prob.shape)}: broadcasting them would pair log-probabilities "
            "of different actions; sum over action dimensions or squeeze a trailing dimension of one of them."
        )
    if not (log_prob.is_floating_point() and ref_log_prob.is_floating_point()):
        raise TypeError(
            f"`{name}` and `{ref_name}` must be floating point, got {log_prob.dtype} and {ref_log_prob.dtype}: "
            "log-probabilities, not actions."
        )
