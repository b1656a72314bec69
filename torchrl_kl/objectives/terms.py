"""What each step adds to a KL loss: its exact or sampled KL, weighted by importance ratios.

Axes: *B is the batch of steps; where its last dimension is time, *B is (*R, T), R rows of T steps.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import fields
from typing import Any, Literal, NamedTuple, cast

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, TensorDictParams, unravel_key
from torch import Tensor, nn
from torch.distributions import Distribution
from torchrl.objectives import LossModule

from torchrl_kl._tensordict import (
    MASK_KEY,
    TRAJECTORY_KEY,
    as_tuple,
    expand_right,
    find_time_dim,
    get_required,
    leaf_keys,
    require_order,
    sum_action_dims,
)
from torchrl_kl.actors.policy import Acting
from torchrl_kl.actors.reading import log_prob_of
from torchrl_kl.functional import kl_exact, kl_k1, kl_k2, kl_k3, sum_after, sum_before
from torchrl_kl.functional.numbers import working_dtype

Gradient = Literal["step", "sequence", "k2", "k3"]
Weights = Literal["step", "trajectory"]
Reduction = Literal["mean", "sum", "none"]

# Computed from the distributions, and from the action alone.
_EXACT = ("step", "sequence")
_SAMPLED = {"k2": kl_k2, "k3": kl_k3}


class Steps(NamedTuple):
    """The steps of a batch, with their distributions over actions."""

    policy: Distribution
    reference: Distribution
    batch_size: torch.Size  # *B
    mask: Tensor | None  # (*B), True where a step counts; None where all do
    action: Tensor | None = None  # what the policy did; None where no action is read
    recorded: Tensor | None = None  # its log-prob when it was drawn
    ends: Tensor | None = None  # (*B), True at last steps; None where nothing is added up

    def terms(self, gradient: Gradient, weights: Weights) -> tuple[Tensor, Tensor]:
        """What is minimised, and the measured KL; nats, (*B) each, 0 where the mask is False."""
        exact = self._exact_kl() if gradient in _EXACT else None
        if exact is not None and self.action is None:
            return exact, exact
        log_prob, ref_log_prob, log_ratio = self._log_probs()
        ratio = log_ratio.exp()
        if exact is not None:
            value = kl = exact
        else:
            value = ratio.detach() * _SAMPLED[gradient](log_prob, ref_log_prob, mask=self.mask)
            kl = ratio * kl_k1(log_prob, ref_log_prob, mask=self.mask)
        if self.ends is None:
            return value, kl
        if weights == "step":
            # The second term is 0 in value and has the gradient of the ratio.
            later = sum_after(kl.detach(), self.ends)
            # An infinite KL is found by itself; 0 times it would make the steps before it NaN.
            later = torch.where(later.isfinite(), later, 0.0)
            return value + (ratio - ratio.detach()) * later, kl
        # W_t, the product of the ratios of the steps before. Unmasked, it could overflow on
        # padding, and inf * 0 is NaN.
        way = self._masked(sum_before(log_ratio, self.ends)).exp()
        # The gradient of the probability of getting to a step is what makes "sequence" exact.
        return (way if gradient == "sequence" else way.detach()) * value, way * kl

    def numbers(self, gradient: Gradient, recorded_key: NestedKey) -> dict[NestedKey, Tensor]:
        """What the terms of a step are made of before they are added up, (*B) each, detached."""
        found: dict[NestedKey, Tensor] = {}
        if gradient in _EXACT:
            found["kl"] = self._exact_kl().detach()
        if self.action is None:
            return found
        action, recorded = self.action, cast(Tensor, self.recorded)
        log_probs = {
            "log_prob": self.policy.log_prob(action),
            "ref_log_prob": self.reference.log_prob(action),
            recorded_key: recorded,
        }
        return found | {key: self._sum(each.detach()) for key, each in log_probs.items()}

    def _exact_kl(self) -> Tensor:
        # (*B), or (*B, ...) with agents and separate action dimensions, which are summed.
        shape = self.policy.batch_shape
        mask = None if self.mask is None else expand_right(self.mask, shape)
        return self._sum(kl_exact(self.policy, self.reference, mask=mask))

    def _log_probs(self) -> tuple[Tensor, Tensor, Tensor]:
        # Under the policy and the reference, and log w_t, 0 where a step does not count: (*B) each.
        action, recorded = cast(Tensor, self.action), cast(Tensor, self.recorded)
        log_prob = self._sum(self.policy.log_prob(action))
        ref_log_prob = self._sum(log_prob_of(self.reference, action))
        return log_prob, ref_log_prob, self._masked(log_prob - self._sum(recorded.detach()))

    def _masked(self, values: Tensor) -> Tensor:
        return values if self.mask is None else torch.where(self.mask, values, 0.0)

    def _sum(self, values: Tensor) -> Tensor:
        # (*B, ...) -> (*B): half precision would overflow in sums over many dimensions.
        return sum_action_dims(values.to(working_dtype(values.dtype)), self.batch_size)


def drawn_log_ratio(
    policy: Distribution,
    reference: Distribution,
    action: Tensor,
    recorded: Tensor | None,
    shape: torch.Size,
) -> Tensor:
    """Log of the ratio of the policy that drew the actions to the reference, nats, of `shape`."""
    # That policy may be an earlier one, whose log-prob is what was recorded.
    log_prob = policy.log_prob(action).detach() if recorded is None else recorded.detach()
    ref_log_prob = log_prob_of(reference, action)
    return sum_action_dims(log_prob, shape) - sum_action_dims(ref_log_prob, shape)


def check_options(gradient: str, weights: str | None, reduction: str) -> None:
    """ValueError for an unknown option or "k1"."""
    if gradient == "k1":
        raise ValueError(
            '`gradient` must not be "k1": as a loss its expected gradient is zero. Subtract k1 '
            'from the reward (KLConstrainedTransform), or use "sequence", the same in expectation.'
        )
    for name, value, choices in (
        ("gradient", gradient, (*_EXACT, *_SAMPLED)),
        ("weights", weights, (None, "step", "trajectory")),
        ("reduction", reduction, ("mean", "sum", "none")),
    ):
        if value not in choices:
            raise ValueError(f"`{name}` must be one of {choices}, got {value!r}.")


def warn_of_k3(gradient: str) -> None:
    """A warning if the gradient is "k3"."""
    if gradient == "k3":
        warnings.warn(
            'gradient="k3" minimises the other divergence in expectation, KL(reference || policy): '
            'use "k2" for KL(policy || reference) from the action alone.',
            stacklevel=3,
        )


def find_shared(params: Any, loss: nn.Module) -> TensorDictParams:
    """Those of `loss` that hold the very tensors of `params`, or else `params`.

    A deepcopy of two objects with the same tensors would have two policies, since TensorDict copies
    each object by itself; one object is copied once.
    """
    keys = set(params.keys(True, True))
    parts: list[Any] = [part for part in loss.modules() if isinstance(part, TensorDictParams)]
    for part in parts:
        same_keys = set(part.keys(True, True)) == keys
        if same_keys and all(part.get(key) is params.get(key) for key in keys):
            return part
    return params


def build_late(loss: Any, *_: Any) -> None:
    """Lets the loss inside build what SACLoss builds only when its state is asked for."""
    loss.loss.state_dict()


def finite_padding(
    tensordict: TensorDictBase, mask: Tensor, keys: Iterable[NestedKey]
) -> TensorDictBase:
    """A shallow copy with 0 for NaN and inf on padding."""
    # Times a gradient of 0 they would be NaN.
    tensordict = tensordict.copy()
    for key in leaf_keys(tensordict, keys):
        value = tensordict.get(key, None)
        if isinstance(value, Tensor) and value.is_floating_point():
            keep = expand_right(mask, value.shape) | value.isfinite()
            tensordict.set(key, torch.where(keep, value, 0.0))
    return tensordict


def reduce_steps(values: Tensor, mask: Tensor, reduction: Reduction) -> Tensor:
    """Over the steps that count; `values` are 0 elsewhere."""
    if reduction == "none":
        return values
    total = values.sum()
    return total if reduction == "sum" else total / mask.sum().clamp_min(1)


def find_last_steps(
    tensordict: TensorDictBase,
    mask: Tensor | None,
    done_key: NestedKey,
    observed: Iterable[NestedKey],
    what: str,
) -> Tensor:
    """True at the last step of each trajectory, (*B); ValueError if steps are not in order."""
    ids, done = tensordict.get(TRAJECTORY_KEY, None), tensordict.get(done_key, None)
    if ids is None or done is not None:
        ends = expand_right(read_done(tensordict, done_key), tensordict.batch_size)
    else:
        ids = ids.reshape(tensordict.batch_size)
        # A row (T,) ends with a trajectory; before that one ends where the id changes.
        ends = torch.ones_like(ids, dtype=torch.bool)
        ends[..., :-1] = ids[..., 1:] != ids[..., :-1]
    if tensordict.get("next", None) is not None:
        padded = torch.zeros_like(ends) if mask is None else ~mask
        # (*R, T - 1): between a step and the next one.
        may_differ = (ends | padded)[..., :-1] | padded[..., 1:]
        fix = f"{what} adds up along trajectories. Shuffle whole rows, not steps."
        require_order(tensordict, list(observed), may_differ, fix)
    return ends


def read_done(tensordict: TensorDictBase, done_key: NestedKey) -> Tensor:
    """Where trajectories end, (*B, 1), or (*B) where the data were made by hand."""
    fix = "trajectories end there; name it with `set_keys(done=...)`."
    return get_required(tensordict, done_key, fix)


def require_time(tensordict: TensorDictBase, time_dim: int | None, what: str) -> None:
    """ValueError unless a dimension of the batch is known to be time."""
    if find_time_dim(tensordict, time_dim) is None:
        raise ValueError(
            f"{what} needs whole trajectories, but a batch of shape "
            f"{tuple(tensordict.batch_size)} has no time dimension: name the last one "
            '"time" (collectors do, `reshape(-1)` loses it), or pass `time_dim`.'
        )


def read_mask(tensordict: TensorDictBase, key: NestedKey | None) -> Tensor | None:
    """True where a step counts, (*B); None where all do. TypeError unless it is boolean.

    `key`: a LossModule's `loss_mask_key`, "auto" for that of the collectors, None for no mask.
    """
    key = MASK_KEY if key == "auto" else key
    mask = None if key is None else tensordict.get(key, None)
    if mask is None:
        return None
    if mask.dtype != torch.bool:
        raise TypeError(f"the mask {key!r} must be boolean, got {mask.dtype}: use `.bool()`.")
    return expand_right(mask, tensordict.batch_size)


def without_random(
    tensordict: TensorDictBase, acting: Acting, log_prob_key: NestedKey, mask: Tensor | None
) -> Tensor | None:
    """The mask (*B) without the steps of a random policy, whose log-prob nobody knows."""
    recorded = tensordict.get(log_prob_key, None)
    random = None if recorded is None else acting.random_steps(tensordict, recorded, mask)
    if random is None:
        return mask
    return ~random if mask is None else mask & ~random


def split_keys(
    keys: dict[str, Any], loss: LossModule, inner: LossModule | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Names of entries for a loss, and those for the one inside; unknown ones are for the first."""
    known, known_inside = (
        set() if one is None else {field.name for field in fields(cast(Any, one.tensor_keys))}
        for one in (loss, inner)
    )
    inside = {name: key for name, key in keys.items() if name in known_inside}
    own = {name: key for name, key in keys.items() if name in known or name not in inside}
    return own, inside


def refuse_penalized(tensordict: TensorDictBase, kl_coeff: NestedKey) -> None:
    """RuntimeError if a reward of the batch was penalized for its KL."""
    step = cast(TensorDictBase, tensordict.get("next", TensorDict()))
    name = as_tuple(kl_coeff)[-1]
    # In every nested tensordict: agents may have separate rewards.
    for key in step.keys(True, True):
        if as_tuple(key)[-1] == name and bool((step.get(key) != 0).any()):
            raise RuntimeError(
                f"the batch has {unravel_key(('next', key))!r} other than 0: this loss would "
                "penalize the KL again. Drop it, or set the coefficient of the transform to 0, "
                "or, if both are meant, pass `allow_penalized_reward=True`."
            )
