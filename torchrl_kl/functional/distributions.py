"""The exact KL(policy || reference) of a step: from log-probabilities, and between two distributions.

`*B` is any leading shape, V the number of actions. A row of the mask (*B) that is False is replaced by a harmless one
before anything is computed from it, so that it is 0 in value and in gradient, never NaN * 0.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributions import (
    Categorical,
    Distribution,
    Independent,
    OneHotCategorical,
    TransformedDistribution,
    kl_divergence,
)

from torchrl_kl.functional.numbers import working_dtype

__all__ = ["kl_of_distributions", "kl_of_logits", "split_log_ratio"]


def split_log_ratio(
    log_prob: Tensor, ref_log_prob: Tensor, counts: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability and log-ratio where they are finite, 0 elsewhere; and where the log-ratio is +inf.

    Neither carries a gradient from where it is replaced: infinity has no slope. NaN is not replaced.

    Args:
        log_prob: log pi, any shape.
        ref_log_prob: log pi_ref, same shape.
        counts: where an entry counts, boolean, of a shape that broadcasts to theirs; None: everywhere. An entry that
            the policy cannot draw does not count.
    """
    drawn = log_prob != -torch.inf
    if counts is not None:
        drawn = drawn & counts
    infinite = drawn & (ref_log_prob == -torch.inf) & ~log_prob.isnan()
    finite = drawn & ~infinite
    return (
        torch.where(finite, log_prob, 0.0),
        torch.where(finite, log_prob - ref_log_prob, 0.0),
        infinite,
    )


def kl_of_logits(policy: Tensor, reference: Tensor, mask: Tensor | None) -> Tensor:
    """KL(policy || reference) of logits (*B, V), normalised here; shapes have been checked.

    Args:
        policy: logits or log-probabilities, (*B, V).
        reference: logits or log-probabilities, (*B, V).
        mask: True where a row counts, (*B); elsewhere both rows become uniform.
    """
    dtype = torch.promote_types(policy.dtype, reference.dtype)
    if mask is not None:
        rows = mask.unsqueeze(-1)
        policy, reference = torch.where(rows, policy, 0.0), torch.where(rows, reference, 0.0)
    log_probs, ref_log_probs = (
        x.log_softmax(-1, dtype=working_dtype(dtype)) for x in (policy, reference)
    )
    log_probs, log_ratio, infinite = split_log_ratio(log_probs, ref_log_probs, None)
    kl = (log_probs.exp() * log_ratio).sum(-1)
    return torch.where(infinite.any(-1), torch.inf, kl).to(dtype)


def kl_of_distributions(
    policy: Distribution, reference: Distribution, mask: Tensor | None
) -> Tensor:
    """KL(policy || reference) of shape `batch_shape`; the shape of the mask has been checked.

    Raises:
        TypeError: if no KL is registered for the pair.
        ValueError: if the shapes, the bijections or the actions differ.
    """
    try:
        return _kl(policy, reference, mask)
    except NotImplementedError:
        raise TypeError(
            "`policy` and `reference` must be a pair of distributions with a registered KL divergence, got "
            f"{_name(policy)} and {_name(reference)}: register one with `torch.distributions.register_kl`, or estimate "
            "it from samples with `kl_k1`."
        ) from None


def _kl(policy: Distribution, reference: Distribution, mask: Tensor | None) -> Tensor:
    _check_equal(
        "batch_shape", policy, reference, tuple(policy.batch_shape), tuple(reference.batch_shape)
    )
    if isinstance(policy, Mapping) and isinstance(reference, Mapping):
        return _kl_of_composites(policy, reference, mask)
    if isinstance(policy, Categorical | OneHotCategorical) and isinstance(
        reference, Categorical | OneHotCategorical
    ):
        return _kl_of_categoricals(policy, reference, mask)
    if isinstance(policy, Independent) and isinstance(reference, Independent):
        return _kl_of_independent(policy, reference, mask)
    if isinstance(policy, TransformedDistribution) and isinstance(
        reference, TransformedDistribution
    ):
        return _kl_of_transformed(policy, reference, mask)
    return _registered_kl(policy, reference, mask)


def _kl_of_categoricals(
    policy: Categorical | OneHotCategorical,
    reference: Categorical | OneHotCategorical,
    mask: Tensor | None,
) -> Tensor:
    # Not the registered KL: its gradient is NaN where the policy has a logit of -inf, as masked actions have, and it is
    # inf where the reference's probability is below the smallest number of the dtype.
    columns, ref_columns = _columns(policy), _columns(reference)
    alike = (
        columns is ref_columns
        if columns is None or ref_columns is None
        else torch.equal(columns, ref_columns)
    )
    if not alike:
        raise ValueError(
            "`policy` and `reference` must be over the same actions, got "
            f"{_name(policy)} and {_name(reference)} with different `indices`: build both with the same `indices`, or "
            "with a boolean `mask`."
        )
    log_probs, ref_log_probs = _log_probs(policy, mask), _log_probs(reference, mask)
    _check_equal(
        "number of actions", policy, reference, log_probs.shape[-1], ref_log_probs.shape[-1]
    )
    return kl_of_logits(log_probs, ref_log_probs, None)


def _columns(dist: Distribution) -> Tensor | None:
    """Actions that the columns stand for in a MaskedCategorical given by `indices`; None: all, in order."""
    return getattr(dist, "_mask", None) if getattr(dist, "_sparse_mask", False) else None


def _log_probs(dist: Categorical | OneHotCategorical, mask: Tensor | None) -> Tensor:
    """Log-probabilities (*B, V) from what the distribution was built with.

    Built from probabilities, its `logits` are clamped: a probability of 0 would pass for one of 1e-7.
    """
    param = cast(Tensor, dist._param)
    if mask is not None:
        param = torch.where(mask.unsqueeze(-1), param, 0.0)
    # Probabilities add up to 1, so that one is positive; log-probabilities never are.
    are_probs = (param > 0).any(-1, keepdim=True)
    drawn = are_probs & (param != 0)
    log_probs = torch.where(drawn, torch.where(drawn, param, 1.0).log(), -torch.inf)
    return torch.where(are_probs, log_probs, param)


def _kl_of_composites(policy: Any, reference: Any, mask: Tensor | None) -> Tensor:
    """Of tensordict's CompositeDistribution, a mapping of independent parts: the sum over them."""
    _check_equal("parts", policy, reference, sorted(map(str, policy)), sorted(map(str, reference)))
    n = len(policy.batch_shape)

    def of_part(part: Distribution, ref_part: Distribution) -> Tensor:
        counts = mask
        if counts is not None:
            counts = counts.reshape(counts.shape + (1,) * (len(part.batch_shape) - n)).expand(
                part.batch_shape
            )
        kl = _kl(part, ref_part, counts)
        return kl.flatten(n).sum(-1) if kl.ndim > n else kl

    first, *others = (of_part(part, reference[name]) for name, part in policy.items())
    return sum(others, first)


def _kl_of_independent(policy: Independent, reference: Independent, mask: Tensor | None) -> Tensor:
    n = policy.reinterpreted_batch_ndims
    if n != reference.reinterpreted_batch_ndims:
        raise NotImplementedError
    if n == 0:
        return _kl(policy.base_dist, reference.base_dist, mask)
    if mask is not None:
        mask = mask.reshape(mask.shape + (1,) * n).expand(policy.base_dist.batch_shape)
    return _kl(policy.base_dist, reference.base_dist, mask).flatten(-n).sum(-1)


def _kl_of_transformed(
    policy: TransformedDistribution, reference: TransformedDistribution, mask: Tensor | None
) -> Tensor:
    """Through the bases: a bijection that both share changes no divergence. Its parameters are taken as constants."""
    if policy.transforms != reference.transforms:
        try:  # a pair of its own, such as Gumbel and Gumbel
            return _registered_kl(policy, reference, mask)
        except NotImplementedError:
            raise ValueError(
                f"`policy` and `reference` must share one bijection, got {_name(policy)} and {_name(reference)} with "
                "different transforms: give both the same transforms with the same parameters (bounds, scales)."
            ) from None
    if not all(transform.bijective for transform in policy.transforms):
        raise ValueError(
            f"`policy` and `reference` must share a bijection, got {_name(policy)} with a transform that maps several "
            "points to one: the divergence of the bases is then only an upper bound."
        )
    return _kl(policy.base_dist, reference.base_dist, mask)


def _registered_kl(policy: Distribution, reference: Distribution, mask: Tensor | None) -> Tensor:
    # A CompositeDistribution, here beside another kind, has no event shape at all.
    event_shape, ref_event_shape = (
        tuple(getattr(dist, "_event_shape", ())) for dist in (policy, reference)
    )
    _check_equal("event_shape", policy, reference, event_shape, ref_event_shape)
    if mask is None:
        return kl_divergence(policy, reference)
    kl = kl_divergence(_cover(policy, mask), _cover(reference, mask))
    return torch.where(mask, kl, 0.0)


def _cover(dist: Distribution, mask: Tensor) -> Distribution:
    """Copy whose parameters are 1/2 where the mask is False: a real, positive number and a probability."""
    covered = copy.copy(dist)
    for name, value in vars(dist).items():
        if isinstance(value, Distribution):
            vars(covered)[name] = _cover(value, mask)
        elif (
            isinstance(value, Tensor)
            and value.is_floating_point()
            and value.shape[: mask.ndim] == mask.shape
        ):
            rows = mask.reshape(mask.shape + (1,) * (value.ndim - mask.ndim))
            vars(covered)[name] = torch.where(rows, value, 0.5)
    return covered


def _check_equal(
    what: str, policy: Distribution, reference: Distribution, got: object, ref_got: object
) -> None:
    if got != ref_got:
        raise ValueError(
            f"`policy` and `reference` must have the same {what}, got {got} of {_name(policy)} and {ref_got} of "
            f"{_name(reference)}: broadcasting them would pair distributions of different steps or actions."
        )


def _name(dist: Distribution) -> str:
    """Name of the class, with that of the base in parentheses: TanhNormal(Independent(Normal))."""
    base = getattr(dist, "base_dist", None)
    return type(dist).__name__ if base is None else f"{type(dist).__name__}({_name(base)})"
