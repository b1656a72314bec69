"""Numbers with which no sum, penalty or loss can go on: NaN, infinite, or too large to square."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor

OnInvalid = Literal["raise", "mask"]

LIMIT = 2.0**64  # the square of a larger number overflows float32, as in the loss of any critic
_norm = torch.linalg.vector_norm


def seem_valid(values: Iterable[Tensor | None]) -> bool:
    """Whether all numbers are valid, by the fastest test; it may say no of valid ones."""
    # A compiled step cannot branch on numbers.
    if torch.compiler.is_compiling():
        return True
    for each in values:
        if each is None or not each.is_floating_point():
            continue
        # A norm takes a microsecond. That of many large numbers may exceed the limit; in a sum 1e30
        # and -1e30 would cancel. A comparison with NaN is False.
        size = abs(each.item()) if each.numel() == 1 else _norm(each).item()
        if not size < LIMIT:
            return False
    return True


def is_valid(values: Tensor) -> Tensor:
    """True where a number is finite and within the limit; the shape of `values`."""
    return values.detach().abs() < LIMIT  # False for NaN


class Guard:
    """What is done about invalid numbers: an error, or their steps are left out with one warning.

    ValueError unless `on_invalid` is "raise" or "mask".
    """

    def __init__(self, on_invalid: OnInvalid):
        if on_invalid not in get_args(OnInvalid):
            raise ValueError(f'`on_invalid` must be "raise" or "mask", got {on_invalid!r}.')
        self.masks = on_invalid == "mask"
        self._warned = False

    def valid_steps(
        self,
        entries: Mapping[Any, Tensor],
        shape: torch.Size,
        mask: Tensor | None,
        owner: str,
        *,
        allowed: Mapping[Any, float] | None = None,
        causes: Mapping[Any, Any] | None = None,
    ) -> Tensor:
        """True where a step (*B) has valid numbers only, or does not count.

        Unless it masks, ValueError with the key, the count and the first place of invalid numbers.

        Args:
            entries: the numbers of the steps by key, (*B, ...) each.
            shape: *B.
            mask: True where a step counts, (*B); None: everywhere.
            owner: the class that the message names.
            allowed: an infinity by key that is valid there.
            causes: further entries, (*B, ...), of which those that are NaN are named, too.
        """
        device = next(iter(entries.values())).device
        counts = torch.ones(shape, dtype=torch.bool, device=device) if mask is None else mask
        valid, found = torch.ones_like(counts), []
        for key, values in entries.items():
            fine = is_valid(values)
            if allowed is not None and key in allowed:
                fine = fine | (values == allowed[key])
            # (*B, ...) -> (*B): the steps that count and have an invalid number.
            wrong = counts & ~fine.reshape(*shape, -1).all(-1)
            if wrong.any():
                valid = valid & ~wrong
                found.append(_described(key, values, ~fine, wrong))
        for key, values in (causes or {}).items() if found else ():
            if not isinstance(values, Tensor):
                continue
            wrong = counts & values.isnan().reshape(*shape, -1).any(-1)
            if wrong.any():
                found.insert(0, _described(key, values, values.isnan(), wrong))
        if found:
            self._report(f"{owner} got invalid numbers: {'; '.join(found)}.")
        return valid

    def _report(self, what: str) -> None:
        if not self.masks:
            raise ValueError(
                f"{what} All must be finite and less than 2 ** 64, whose square overflows float32; "
                "a log-prob is -inf where the policy or the reference cannot take the action. Find "
                'out where they come from, or leave such steps out with `on_invalid="mask"`.'
            )
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{what} Such steps are neither penalized nor counted, their KL is 0, and an "
                "invalid reward becomes 0. You will not be warned again.",
                stacklevel=2,
            )


def _described(key: Any, values: Tensor, invalid: Tensor, wrong: Tensor) -> str:
    """The key, how many numbers are invalid in the steps (*B) that are `wrong`, and the first."""
    invalid = invalid & wrong.reshape(wrong.shape + (1,) * (invalid.ndim - wrong.ndim))
    place = tuple(invalid.nonzero()[0].tolist())
    count = int(invalid.sum())
    return f"{key!r} has {count} of {values.numel()}, the first {values[place].item()} at {place}"
