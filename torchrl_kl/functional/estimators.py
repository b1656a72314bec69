"""Log-probabilities in, KL numbers out: the estimators of KL(policy || reference).

`*B` is any leading shape. Everything is in nats, policy first, on actions drawn from the policy:
`log_prob = log pi(a|s)`, `ref_log_prob = log pi_ref(a|s)`, `lr = log_prob - ref_log_prob`. Half
precision is computed, and returned, in float32: exp(12) is infinite in float16.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributions import Distribution

from torchrl_kl.functional.distributions import kl_of_distributions, kl_of_logits, split_log_ratio
from torchrl_kl.functional.numbers import check_mask, check_tensor, widened


def kl_k1(log_prob: Tensor, ref_log_prob: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Log-ratio estimate of KL(policy || reference): `log_prob - ref_log_prob`.

    You may rely on: its mean over the policy's actions is the KL, and it is the only estimate that
    may be subtracted from a reward. You may not rely on its sign (near the reference half of the
    values are negative), nor on its gradient, whose expectation is zero.

    Args:
        log_prob: log pi(a|s), nats, shape (*B).
        ref_log_prob: log pi_ref(a|s) of the same actions, nats, shape (*B).
        mask: True where a step counts, boolean, shape (*B). Elsewhere it is 0, even of NaN.

    Returns:
        Nats, shape (*B), at least float32: 0 for a `log_prob` of -inf (the policy cannot draw the
        action), else +inf with gradient 0 where the reference cannot produce the action.

    Raises:
        TypeError: if the log-probabilities are not floating point.
        ValueError: if the shapes differ or the mask is not boolean.

    Reference:
        J. Schulman, "Approximating KL divergence" (2020).

    Example:
        >>> import torch
        >>> from torchrl_kl.functional import kl_k1
        >>> kl_k1(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0]))
        tensor([ 0.5000, -1.0000])
    """
    log_prob, ref_log_prob = _check_pair(log_prob, ref_log_prob, "log_prob", "ref_log_prob")
    check_mask(mask, log_prob.shape, "`log_prob`")
    # The policy cannot draw these: 0 times their log-ratio.
    ignored = log_prob == -torch.inf
    if mask is not None:
        ignored = ignored | ~mask
    log_ratio = (log_prob - ref_log_prob).masked_fill(ignored, 0.0)
    # Filled once more, with a constant: infinity has no slope.
    return log_ratio.masked_fill(log_ratio == torch.inf, torch.inf)


def kl_k2(log_prob: Tensor, ref_log_prob: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Half the squared log-ratio: `lr ** 2 / 2`, a biased estimate of KL(policy || reference).

    You may rely on: it is never negative, and as a loss its expected gradient is that of the KL
    (on-policy, one step). You may not rely on its mean, which is the KL only to second order.

    Arguments, infinite values, errors and the reference are those of `kl_k1`; nats, shape (*B).

    Example:
        >>> import torch
        >>> from torchrl_kl.functional import kl_k2
        >>> kl_k2(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0]))
        tensor([0.1250, 0.5000])
    """
    return kl_k1(log_prob, ref_log_prob, mask=mask).square() / 2


def kl_k3(log_prob: Tensor, ref_log_prob: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Never-negative estimate of KL(policy || reference): `exp(-lr) - 1 + lr`.

    You may rely on: no value is negative, and its mean is the KL wherever the policy's support
    covers the reference's (else it is too small by the reference's mass outside). You may not use
    it as a loss: its expected gradient is that of the other divergence, KL(reference || policy).
    The gradient of float16 inputs is cut off at 65504.

    Arguments, infinite values, errors and the reference are those of `kl_k1`; nats, shape (*B).

    Example:
        >>> import torch
        >>> from torchrl_kl.functional import kl_k3
        >>> kl_k3(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0]))
        tensor([0.1065, 0.7183])
    """
    log_ratio = kl_k1(log_prob, ref_log_prob, mask=mask)
    if torch.float16 in (log_prob.dtype, ref_log_prob.dtype) and log_ratio.requires_grad:
        largest = torch.finfo(torch.float16).max
        # The slope, up to exp(-lr), has to fit into the inputs' gradient.
        log_ratio.register_hook(lambda slope: slope.clamp(-largest, largest))
    # expm1 keeps the digits that exp(x) - 1 loses near the reference, where k3 is about x ** 2 / 2.
    return torch.expm1(-log_ratio) + log_ratio


ESTIMATORS: dict[str, Callable[..., Tensor]] = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}


def kl_exact(
    policy: Tensor | Distribution, reference: Tensor | Distribution, *, mask: Tensor | None = None
) -> Tensor:
    """Exact KL(policy || reference) of each step: `sum_a pi(a) (log pi(a) - log pi_ref(a))`.

    You may rely on: it has the value and the gradient of the step's KL. You may not rely on its
    gradient for what an action does to later states, nor subtract it from a reward: it is the same
    for every action. Rounding may leave it just below 0.

    Args:
        policy: logits or log-probabilities of all V actions, shape (*B, V), normalized here; or a
            distribution of batch shape (*B): categorical (also one-hot or masked), independent,
            transformed by a bijection with constant parameters (TanhNormal), tensordict's
            CompositeDistribution, or of any pair registered with torch.
        reference: of the same kind, shape and bijection.
        mask: True where a step counts, boolean, shape (*B). Elsewhere the KL is 0, even of invalid
            parameters, but what a distribution computed when it was built keeps its gradient.

    Returns:
        Nats, shape (*B), at least float32; +inf with gradient 0 where the reference cannot take an
        action that the policy can, NaN where a row is not a distribution.

    Raises:
        TypeError: if the two are not alike or not floating point, or no KL is registered for them.
        ValueError: if shapes, actions or bijections differ, or the mask does not fit.

    Reference:
        A. Amini, T. Vieira, R. Cotterell, "Better Estimation of the KL Divergence Between Language
        Models" (2025).

    Example:
        >>> import torch
        >>> from torchrl_kl.functional import kl_exact
        >>> probs, ref_probs = torch.tensor([[0.5, 0.5], [1, 0]]), torch.tensor([[0.25, 0.75]] * 2)
        >>> kl_exact(probs.log(), ref_probs.log())
        tensor([0.1438, 1.3863])
    """
    if isinstance(policy, Distribution) and isinstance(reference, Distribution):
        check_mask(mask, policy.batch_shape, "the batch shape of `policy`")
        return kl_of_distributions(policy, reference, mask)
    if not isinstance(policy, Tensor) or not isinstance(reference, Tensor):
        raise TypeError(
            "`policy` and `reference` must both be tensors of logits or both torch.distributions, "
            f"got {type(policy).__name__} and {type(reference).__name__}."
        )
    _check_pair(policy, reference, "policy", "reference")
    if policy.ndim == 0:
        raise ValueError(
            "`policy` and `reference` must have their actions in the last dimension, got tensors "
            "without dimensions: for the log-probability of one action use `kl_k1`."
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
    """KL(policy || reference), exact on k actions: `sum_top pi lr + [a not in top] w lr(a)`.

    `w = exp(log_prob - log_prob.detach())` is 1 in value and carries the score of the sampled tail.

    You may rely on: its mean over the policy's actions is the KL, and so for the gradients, for any
    choice of the k actions; k = 0 is k1 with its score, k = V is `kl_exact`. You may not rely on
    its sign, nor that it varies less than k1, nor subtract it from a reward.

    Args:
        top_log_probs: log pi of k actions, nats, shape (*B, k); normalized over all actions.
        top_ref_log_probs: log pi_ref of the same actions, nats, shape (*B, k).
        log_prob: log pi(a|s) of the action drawn, nats, shape (*B).
        ref_log_prob: log pi_ref(a|s) of the same action, nats, shape (*B).
        in_top_k: True where the action drawn is one of the k, boolean, shape (*B).
        mask: True where a step counts, boolean, shape (*B). Elsewhere the estimate is 0.

    Returns:
        Nats, shape (*B), at least float32; +inf with gradient 0 where the reference lacks an action
        that counts.

    Raises:
        TypeError: if the log-probabilities are not floating point.
        ValueError: if the shapes do not fit, or `in_top_k` or the mask is not boolean.

    Example:
        >>> import torch
        >>> from torchrl_kl.functional import kl_top_k
        >>> top, ref_top = torch.tensor([[0.5]]).log(), torch.tensor([[0.25]]).log()
        >>> kl_top_k(top, ref_top, top[:, 0], ref_top[:, 0], torch.tensor([True]))
        tensor([0.3466])
    """
    names = ("top_log_probs", "top_ref_log_probs")
    top, ref_top = _check_pair(top_log_probs, top_ref_log_probs, *names)
    drawn, ref_drawn = _check_pair(log_prob, ref_log_prob, "log_prob", "ref_log_prob")
    if top_log_probs.ndim == 0 or top_log_probs.shape[:-1] != log_prob.shape:
        raise ValueError(
            "`top_log_probs` must have the shape of `log_prob` and one more dimension, of size k, "
            f"got {tuple(top_log_probs.shape)} and {tuple(log_prob.shape)}."
        )
    shape = log_prob.shape
    check_mask(in_top_k, shape, "`log_prob`", name="in_top_k", means="draws from the top k")
    check_mask(mask, shape, "`log_prob`")
    # `rows` (*B, 1) says which top actions count, `tail` (*B) which drawn ones.
    rows, tail = (None, ~in_top_k) if mask is None else (mask.unsqueeze(-1), mask & ~in_top_k)
    top, top_ratio, top_infinite = split_log_ratio(top, ref_top, rows)
    drawn, ratio, infinite = split_log_ratio(drawn, ref_drawn, tail)
    # Only the tail carries the score's weight: the exact part depends on no sample.
    estimate = (top.exp() * top_ratio).sum(-1) + (drawn - drawn.detach()).exp() * ratio
    return torch.where(infinite | top_infinite.any(-1), torch.inf, estimate)


def _check_pair(
    log_prob: Tensor, ref_log_prob: Tensor, name: str, ref_name: str
) -> tuple[Tensor, Tensor]:
    """Both, at least float32; raises unless they are floating point and of one shape."""
    check_tensor(name, log_prob)
    check_tensor(ref_name, ref_log_prob)
    if log_prob.shape != ref_log_prob.shape:
        raise ValueError(
            f"`{name}` and `{ref_name}` must have the same shape, got {tuple(log_prob.shape)} and "
            f"{tuple(ref_log_prob.shape)}: broadcasting would pair log-probabilities of different "
            "actions; sum over action dimensions or squeeze a trailing dimension."
        )
    if not (log_prob.is_floating_point() and ref_log_prob.is_floating_point()):
        raise TypeError(
            f"`{name}` and `{ref_name}` must be floating point, got {log_prob.dtype} and "
            f"{ref_log_prob.dtype}: log-probabilities, not actions."
        )
    return widened(log_prob), widened(ref_log_prob)
