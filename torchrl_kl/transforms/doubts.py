"""Data whose numbers are valid, but that cannot be what the user meant."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor, nn

from torchrl_kl._tensordict import as_tuple, expand_right

_ADVANTAGES = {"advantage", "value_target"}
_SUMMED = "steps_to_next_obs"  # over how many steps MultiStep has added up a reward
_FIRST_STEPS = 32  # of an env, over which the first KL is averaged; or those of the first batch
_HUGE = 0.1  # nats per step, where 0 is expected: a trained policy is usually held below that


def refuse_sums(tensordict: TensorDictBase, *, advantages: bool = True) -> None:
    """RuntimeError if rewards of a batch were added up before they are penalized.

    By MultiStep, or to advantages, of which a batch that workers have penalized may have some.
    """
    found = {as_tuple(key)[-1]: key for key in tensordict.keys(True, True)}
    added = found.keys() & _ADVANTAGES if advantages else None
    if added:
        raise RuntimeError(
            f"the batch has {found[min(added)]!r} already, computed from rewards without the "
            'penalty: compute advantages after the KL transforms, or drop them (`exclude("advantage'
            '", "value_target")`) if they will be computed again.'
        )
    if _SUMMED in found and bool((tensordict.get(found[_SUMMED]) > 1).any()):
        raise RuntimeError(
            f"the batch has {found[_SUMMED]!r} above 1: its rewards are sums of several steps, of "
            "which the KL of the first one alone would be subtracted. Use MultiStep after the KL "
            "transforms: on the batches that a collector returns, or in a replay buffer to which "
            "the stack is appended last, with `invert=True`."
        )


def random_steps(
    tensordict: TensorDictBase,
    log_prob: Tensor,
    mask: Tensor | None,
    traces: Sequence[NestedKey],
) -> Tensor | None:
    """True where a random policy acted, (*B); None if it did nowhere, or nothing tells.

    For its frames (`init_random_frames`) collectors fill what the policy writes with zeros.
    `mask`: True where a step counts, (*B); `traces`: entries that only the policy writes, such as
    logits.
    """
    n_batch, batch_size = tensordict.batch_dims, tensordict.batch_size
    # A log-prob of 0, (*B, *A), alone may be that of a policy that is certain.
    zero = (log_prob == 0).reshape(*batch_size, -1).all(-1) if log_prob.numel() else None
    if zero is None or not zero.any():
        return None
    if mask is not None:
        zero = zero & expand_right(mask, batch_size)
    seen = False
    for key in traces:
        value = tensordict.get(key, None)
        if isinstance(value, Tensor) and value.ndim > n_batch:
            zero, seen = zero & ~value.detach().flatten(n_batch).bool().any(-1), True
    return zero if seen and zero.any() else None


class FirstKL:
    """The KL of the first steps under a reference that is a copy of the policy, so that it is 0."""

    def __init__(self, policy: nn.Module | None):
        # Not the policy itself: it must not be saved, moved or copied with a transform.
        self._policy = (lambda: None) if policy is None else weakref.ref(policy)
        self._total, self._count = 0.0, 0

    def __deepcopy__(self, memo: dict) -> FirstKL:
        return FirstKL(self._policy())

    def __reduce__(self) -> tuple:
        return FirstKL, (None,)

    def add(self, k1: Tensor, reference: nn.Module, *, whole_batch: bool) -> str | None:
        """Adds some steps, (N,); "" if there is no doubt, None if more steps are needed."""
        policy = self._policy()
        if policy is None:
            return ""
        self._total += float(k1.detach().sum())
        self._count += k1.numel()
        if not self._count or (self._count < _FIRST_STEPS and not whole_batch):
            return None
        mean = self._total / self._count
        if not mean > _HUGE or _same_weights(policy, reference):
            return ""
        return (
            f"the first {self._count} steps have a KL of {mean:.2g} nats per step, although the "
            "reference is a copy of the policy: the policy's weights have changed since it was "
            "copied. Load weights into the policy before building the KL transform. If you mean "
            "the KL to the old weights, say so with `reference=`."
        )


def _same_weights(policy: nn.Module, reference: nn.Module) -> bool:
    pairs = zip(policy.parameters(), reference.parameters(), strict=False)
    return all(torch.equal(own.detach().to(other), other.detach()) for own, other in pairs)
