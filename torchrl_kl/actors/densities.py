"""Distributions of the libraries whose log-probs are not those of their density."""

import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from tensordict.nn import distributions
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Distribution, Independent, OneHotCategorical
from torchrl import modules
from torchrl.modules import TanhNormal

from torchrl_kl.actors.reading import is_of_library

_POINT = (
    "has all of its probability in one point, where its log-prob is inf: use a distribution that "
    "draws its actions, such as a Normal."
)
_MASS = (
    "is wrong by 0.03 nats where `loc` is 4 scales outside a bound, and by 7 at 6 scales: keep it "
    "inside, or use TanhNormal."
)
_PROBS = (
    "built with `probs` is at least -15.9 in float32, also that of an impossible action, so that "
    "the KL is too small: pass `logits`, such as the logarithm of the probabilities."
)
# What is wrong with a class, and with those that inherit its `log_prob`.
_FAULTS: dict[Any, str] = {
    **dict.fromkeys((modules.Delta, modules.TanhDelta, distributions.Delta), _POINT),
    **dict.fromkeys((modules.TruncatedNormal, distributions.TruncatedNormal), _MASS),
    **dict.fromkeys((Categorical, Bernoulli, OneHotCategorical), _PROBS),
    **dict.fromkeys((modules.OneHotCategorical, distributions.OneHotCategorical), _PROBS),
}


def check_density(found: Any, known: set[str]) -> None:
    """ValueError for a distribution, or a class, without a density; warns of faults not in `known`.

    Looks into all that it is built with, such as the parts of a CompositeDistribution.
    """
    given = found if isinstance(found, Mapping) else {}
    if isinstance(found, partial):
        found, given = found.func, found.keywords
    elif isinstance(found, Distribution):
        found, given = type(found), vars(found)
    if isinstance(found, type):
        own = (base for base in found.__mro__ if base in _FAULTS or "log_prob" in vars(base))
        fault = _FAULTS.get(next(own, None))
        if fault == _POINT:
            raise ValueError(
                f"policy and reference must have densities, got {found.__name__}, which {fault}"
            )
        probs = given.get("probs", None)  # those computed from logits are there, too
        by_probs = probs is not None and given.get("_param", probs) is probs
        if fault is not None and fault not in known and (fault != _PROBS or by_probs):
            known.add(fault)
            warnings.warn(f"the log-prob of a {found.__name__} {fault}", stacklevel=4)
    for part in given.values():
        check_density(part, known)


def log_prob_inside(dist: Distribution, action: Tensor) -> Tensor:
    """The log-prob of an action, -inf outside the bounds of a TanhNormal, where it is finite.

    ValueError for actions of another shape than those of a distribution of a library.
    """
    inner = dist
    while isinstance(inner, Independent):  # which has the same actions
        inner = inner.base_dist
    if is_of_library(type(inner)):  # the user's own may not say its shape
        name, batch = type(inner).__name__, inner.batch_shape
        if "Categorical" in name:  # not all say by their `event_shape` what an action is
            n_dims = len(batch) + ("OneHot" in name)
            fits = action.shape[: len(batch)] == batch and action.ndim == n_dims
        else:  # one without the dimensions of the batch is the same for all of it
            shape = batch + inner.event_shape
            fits = action.shape[action.ndim - len(shape) :] == shape
        if not fits:
            raise ValueError(
                f"policy and reference must have the same actions, got {name} of shape "
                f"{tuple(batch)} for actions of shape {tuple(action.shape)}: build both for one "
                "kind and number."
            )
    log_prob = dist.log_prob(action)
    if isinstance(inner, TanhNormal):
        # A hundredth of the range may be rounding, as of actions in bfloat16.
        gap = (action - (inner.low + inner.high) / 2).abs() - 0.51 * (inner.high - inner.low)
        outside = (gap > 0).unsqueeze(-1).flatten(action.ndim - len(dist.event_shape)).any(-1)
        log_prob = log_prob.masked_fill(outside, -torch.inf)
    return log_prob
