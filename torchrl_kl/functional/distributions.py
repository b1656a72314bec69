"""The exact KL(policy || reference) of a step, from logits and between two distributions.

`*B` is any leading shape, V the number of actions. Rows where the mask (*B) is False are first
filled with valid numbers, so that their KL is 0 in value and in gradient, never NaN * 0.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributions import (
    Bernoulli,
    Categorical,
    Distribution,
    Independent,
    OneHotCategorical,
    TransformedDistribution,
    kl_divergence,
)

from torchrl_kl.functional.numbers import is_floating, widened, working_dtype

# Which actions the columns of a categorical distribution are, or None; of TorchRL's, `_torchrl.py`.
COLUMN_READERS: list[Callable[[Distribution], Tensor | None]] = []


def fill_padding(values: Tensor, mask: Tensor | None) -> Tensor:
    """`values` (*B, ...) with 1/2 where the mask (*B) is False: positive, and a probability."""
    if mask is None:
        return values
    return torch.where(mask.reshape(mask.shape + (1,) * (values.ndim - mask.ndim)), values, 0.5)


def split_log_ratio(
    log_prob: Tensor, ref_log_prob: Tensor, counts: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability and log-ratio where finite, 0 elsewhere; and where the log-ratio is +inf."""
    log_ratio = log_prob - ref_log_prob
    # An action that the policy cannot draw does not count: 0 log 0 is 0.
    drawn = log_prob != -torch.inf
    if counts is not None:
        drawn = drawn & counts
    infinite = drawn & (log_ratio == torch.inf)
    # By `where`, so that a replaced entry carries no gradient.
    finite = drawn & ~infinite
    return torch.where(finite, log_prob, 0.0), torch.where(finite, log_ratio, 0.0), infinite


def kl_of_logits(policy: Tensor, reference: Tensor, mask: Tensor | None) -> Tensor:
    """KL(policy || reference) of logits (*B, V), normalized here; shapes have been checked."""
    dtype = working_dtype(torch.promote_types(policy.dtype, reference.dtype))
    log_probs, ref_log_probs = (
        fill_padding(logits, mask).log_softmax(-1, dtype=dtype) for logits in (policy, reference)
    )
    return kl_of_log_probs(log_probs, ref_log_probs)


def kl_of_log_probs(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """The same of log-probs (*B, V)."""
    log_probs, log_ratio, infinite = split_log_ratio(log_probs, ref_log_probs, None)
    kl = (log_probs.exp() * log_ratio).sum(-1)
    return torch.where(infinite.any(-1), torch.inf, kl)


def kl_of_distributions(
    policy: Distribution, reference: Distribution, mask: Tensor | None
) -> Tensor:
    """KL(policy || reference) of shape `batch_shape`, at least float32; the mask was checked."""

    # In half precision the KL of two Normals, a difference of rounded 1s, is off by about 0.01.
    def prepare(param: Tensor) -> Tensor:
        param = widened(param)
        of_steps = mask is not None and param.shape[: mask.ndim] == mask.shape
        return fill_padding(param, mask) if of_steps else param

    policy, reference = _with_params(policy, prepare), _with_params(reference, prepare)
    try:
        kl = _kl(policy, reference)
    except NotImplementedError:  # PyTorch's, for a pair without a formula
        raise TypeError(
            "`policy` and `reference` must be a pair of distributions with a registered KL "
            f"divergence, got {_name(policy)} and {_name(reference)}: register one with "
            "`torch.distributions.register_kl`, or estimate it from samples with `kl_k1`."
        ) from None
    return kl if mask is None else torch.where(mask, kl, 0.0)


def _with_params(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A copy of a distribution, with all of its floating-point tensors, and its parts', changed."""
    if isinstance(value, Distribution):
        changed = copy.copy(value)
        for name, part in tuple(vars(value).items()):  # reading an attribute may store others
            if name.startswith("_unbroadcasted_"):
                # Without batch dimensions, a (3, 3) matrix would pass for three rows of 3 numbers.
                part = getattr(value, name.removeprefix("_unbroadcasted_"))
            elif name == "_capacitance_tril":  # nor has that of LowRankMultivariateNormal
                part = part.expand(*value.batch_shape, *part.shape[-2:])
            setattr(changed, name, _with_params(part, change))
        return changed
    if isinstance(value, dict):  # the parts of a CompositeDistribution
        return {name: _with_params(part, change) for name, part in value.items()}
    return change(value) if is_floating(value) else value


def _kl(policy: Distribution, reference: Distribution) -> Tensor:
    check_equal("batch_shape", policy, reference, lambda dist: tuple(dist.batch_shape))
    for kinds, kl in (
        (Mapping, _kl_of_composites),
        ((Categorical, OneHotCategorical), _kl_of_categoricals),
        (Bernoulli, _kl_of_bernoullis),
        (Independent, _kl_of_independent),
        (TransformedDistribution, _kl_of_transformed),
    ):
        if isinstance(policy, kinds) and isinstance(reference, kinds):
            return kl(policy, reference)
    # A CompositeDistribution, paired here with another kind, has no event shape.
    check_equal("event_shape", policy, reference, lambda d: tuple(getattr(d, "_event_shape", ())))
    return kl_divergence(policy, reference)


def _kl_of_categoricals(policy: Distribution, reference: Distribution) -> Tensor:
    # The gradient of the registered KL is NaN where the policy has a logit of -inf, as masked
    # actions have, and its value is inf where the reference's probability underflows.
    columns, ref_columns = columns_of(policy), columns_of(reference)
    alike = columns is ref_columns
    if columns is not None and ref_columns is not None:
        alike = torch.equal(columns, ref_columns)
    if not alike:
        raise ValueError(
            f"`policy` and `reference` must be over the same actions, got {_name(policy)} and "
            f"{_name(reference)} with different `indices`: give both the same `indices`, or a mask."
        )
    check_equal("number of actions", policy, reference, lambda dist: dist._param.shape[-1])
    return kl_of_logits(log_probs_of(policy), log_probs_of(reference), None)


def columns_of(dist: Distribution) -> Tensor | None:
    """The action of each column of a categorical, (*B, V) or (V,); None: all actions, in order."""
    return next((found for read in COLUMN_READERS if (found := read(dist)) is not None), None)


def log_probs_of(dist: Any) -> Tensor:
    """Log-probs (*B, V) of a categorical distribution."""
    # Its `logits` are clamped where it was built with probabilities: 0 becomes 1e-7. Some
    # probability is positive; log-probabilities never are.
    return _logs(dist._param, (dist._param > 0).any(-1, keepdim=True))


def _logs(param: Tensor, are_probs: Tensor) -> Tensor:
    drawn = are_probs & (param != 0)
    log_probs = torch.where(drawn, torch.where(drawn, param, 1.0).log(), -torch.inf)
    return torch.where(are_probs, log_probs, param)


def _kl_of_bernoullis(policy: Any, reference: Any) -> Tensor:
    # The registered KL is inf where the reference's probability rounds to 0 or 1, which in float32
    # a logit of 17 does.
    return kl_of_logits(_log_odds(policy), _log_odds(reference), None)


def _log_odds(dist: Any) -> Tensor:
    # (*B, 2), of 1 and 0. What it was not built with is held once it was read.
    held, param = vars(dist), dist._param
    are_probs = torch.tensor("probs" in held, device=param.device)
    if "probs" in held and "logits" in held:
        are_probs = ((param != held["logits"]) & ~param.isnan()).any()
    param = param.unsqueeze(-1)
    return _logs(torch.cat([param, torch.where(are_probs, 1 - param, 0.0)], -1), are_probs)


def _kl_of_composites(policy: Any, reference: Any) -> Tensor:
    # A CompositeDistribution is a mapping of independent parts: their KLs add up.
    check_equal("parts", policy, reference, lambda dist: sorted(map(str, dist)))
    n = len(policy.batch_shape)
    first, *others = (_kl(joint(policy[name], n), joint(reference[name], n)) for name in policy)
    return sum(others, first)


def joint(dist: Distribution, n_batch: int) -> Distribution:
    """The distribution with `n_batch` batch dimensions; further ones become those of an event."""
    n_more = len(dist.batch_shape) - n_batch
    return Independent(dist, n_more) if n_more > 0 else dist


def _kl_of_independent(policy: Any, reference: Any) -> Tensor:
    n = policy.reinterpreted_batch_ndims
    if n != reference.reinterpreted_batch_ndims:
        raise NotImplementedError  # as PyTorch does; `kl_exact` makes it a TypeError
    # The base has n more batch dimensions, (*B, ...).
    kl = _kl(policy.base_dist, reference.base_dist)
    return kl.flatten(-n).sum(-1) if n > 0 else kl


def _kl_of_transformed(policy: Any, reference: Any) -> Tensor:
    # A shared bijection with constant parameters changes no divergence: it is that of the bases.
    if policy.transforms != reference.transforms:
        raise ValueError(
            f"`policy` and `reference` must share one bijection, got {_name(policy)} and "
            f"{_name(reference)} with different transforms: give both the same parameters."
        )
    if not all(transform.bijective for transform in policy.transforms):
        raise ValueError(
            f"`policy` and `reference` must share a bijection, got {_name(policy)}, which maps "
            "several points to one: the KL of the bases is then only an upper bound."
        )
    return _kl(policy.base_dist, reference.base_dist)


def check_equal(what: str, policy: Any, reference: Any, read: Callable[[Any], object]) -> None:
    """ValueError unless `read` gives the same for both."""
    got, ref_got = read(policy), read(reference)
    if got != ref_got:
        raise ValueError(
            f"`policy` and `reference` must have the same {what}, got {got} of {_name(policy)} and "
            f"{ref_got} of {_name(reference)}: broadcasting would pair different steps or actions."
        )


def _name(dist: Distribution) -> str:
    """Class name, with that of the base in parentheses: TanhNormal(Independent(Normal))."""
    base = getattr(dist, "base_dist", None)
    return type(dist).__name__ if base is None else f"{type(dist).__name__}({_name(base)})"
