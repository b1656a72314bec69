"""Invalid numbers of a step: refused by name, or left out of KL, reward and controller."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from torchrl_kl import _tensordict as td
from torchrl_kl._tensordict import ResolvedKeys
from torchrl_kl.functional.invalid import Guard, is_valid, seem_valid
from torchrl_kl.transforms.estimates import KLStep


class Guarded(Protocol):
    """A transform with a guard."""

    guard: Guard
    keys: ResolvedKeys


def without_invalid(
    transform: Guarded,
    tensordict: TensorDictBase,
    step: KLStep,
    reward: Tensor | None = None,
    *,
    coeff: Tensor | None = None,
    causes: Sequence[NestedKey] | None = None,
) -> tuple[KLStep, Tensor | None]:
    """A step (*B) and its reward without invalid numbers, or ValueError, as the guard says.

    `coeff`: subtracts nothing if it is 0, and an infinite KL is then no error; `causes`: entries
    that are named, too, where they are NaN.
    """
    given = (step.ref_log_prob, step.log_prob, step.estimate, reward)
    if step.valid is None and seem_valid(given):
        return step, reward
    guard, keys = transform.guard, transform.keys
    batch_size, mask = tensordict.batch_size, step.mask
    # Without a log-prob, `ref_log_prob` is the KL that was measured elsewhere.
    measured = step.log_prob is not None
    names = [keys.ref_log_prob if measured else keys.kl, keys.kl_estimate, keys.reward]
    of_reference, estimate, task = (("next", *td.as_tuple(key)) for key in names)
    names = (of_reference, keys.recorded.name, estimate, task)
    entries = {name: each for name, each in zip(names, given, strict=True) if each is not None}
    infinite = {of_reference: -torch.inf if measured else torch.inf, estimate: torch.inf}
    only_measures = coeff is not None and coeff.item() == 0 and not guard.masks
    valid = guard.valid_steps(
        entries,
        batch_size,
        None if mask is None else td.expand_right(mask, batch_size),
        type(transform).__name__,
        allowed=infinite if only_measures else None,
        causes={key: tensordict.get(key, None) for key in causes or ()},
    )
    if step.valid is not None:
        valid = valid & step.valid
    if valid.all():  # large ones, or rubbish on padding
        return step, reward

    def counted(values: Tensor | None) -> Tensor | None:
        """0 in steps that are left out."""
        if values is None:
            return None
        return torch.where(td.expand_right(valid, values.shape), values, 0.0)

    names = ("ref_log_prob", "kl", "estimate")
    step = step._replace(valid=valid, **{name: counted(getattr(step, name)) for name in names})
    if reward is not None:
        kept = td.expand_right(valid, reward.shape) | is_valid(reward)
        reward = torch.where(kept, reward, 0.0)
    return step, reward


def pass_on(tensordict: TensorDictBase, key: NestedKey, step: KLStep) -> None:
    """Tells the part of the stack that reads `key` which steps were left out."""
    if step.valid is not None:
        tensordict.set(td.hidden_key(key, "valid"), step.valid)


def passed_on(tensordict: TensorDictBase, key: NestedKey) -> Tensor | None:
    """Which steps the part that wrote `key` has kept, (*B); None: all."""
    return tensordict.pop(td.hidden_key(key, "valid"), None)
