"""Log-probabilities in, KL numbers out: the estimators of KL(policy || reference).

One letter per axis: `*B` is any leading shape. Everything is in nats, policy first, on actions that were drawn from the
policy: `log_prob = log pi(a|s)`, `ref_log_prob = log pi_ref(a|s)`, `lr = log_prob - ref_log_prob`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

__all__ = ["ESTIMATORS", "Estimator", "kl_k1", "kl_k2", "kl_k3"]

Estimator = Literal["k1", "k2", "k3"]


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
        One estimate per step, nats, shape (*B); +inf where the reference cannot produce the action. A `log_prob` of
        -inf (an action that the policy cannot draw) contributes 0.

    Raises:
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
        One estimate per step, nats, shape (*B).

    Raises:
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
        One estimate per step, nats, shape (*B); +inf where the reference cannot produce the action.

    Raises:
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


def _log_ratio(log_prob: Tensor, ref_log_prob: Tensor, mask: Tensor | None) -> Tensor:
    if log_prob.shape != ref_log_prob.shape:
        raise ValueError(
            "`log_prob` and `ref_log_prob` must have the same shape, got "
            f"{tuple(log_prob.shape)} and {tuple(ref_log_prob.shape)}: broadcasting them would pair log-probabilities "
            "of different actions; sum over action dimensions or squeeze a trailing dimension of one of them."
        )
    if mask is not None and (mask.dtype != torch.bool or mask.shape != log_prob.shape):
        raise ValueError(
            f"`mask` must be boolean of the shape of `log_prob`, {tuple(log_prob.shape)}, got {mask.dtype} of shape "
            f"{tuple(mask.shape)}: True marks the steps that count."
        )
    counts = log_prob != -torch.inf
    if mask is not None:
        counts = counts & mask
    # `where` stands before all that bends: an excluded step is 0 in value and gradient, never NaN * 0.
    return torch.where(counts, log_prob - ref_log_prob, 0.0)
