"""Which trajectories of an env must not be told to its controller when they end."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_kl._tensordict import expand_right


class EnvRows:
    """Flags of the trajectories that the rows of an env are in, of the shape of the KL.

    A trajectory is left out if the policy did not draw one of its actions (an argmax is not a
    sample), or if none of its steps had valid numbers. A row that does not go on from what the last
    step has left is in a trajectory of another rollout, of which no flag is known.
    """

    def __init__(self):
        self._not_drawn: Tensor | None = None  # None: all were
        self._without_number: Tensor | None = None  # True if no step was valid yet; None: some were
        # Rows that were reset before the next step; None: all.
        self._begun: list[Tensor | None] = []
        self._left: Tensor | None = None  # the running sums that the last step has left

    def reset(self, rows: Tensor | None) -> None:
        """Begins new trajectories in some rows; None: in all."""
        self._not_drawn = _cleared(self._not_drawn, rows)
        self._without_number = _cleared(self._without_number, rows)
        self._begun = [None] if rows is None else [*self._begun, rows]

    def add(
        self, before: Tensor, after: Tensor, counted: bool | Tensor, valid: Tensor | None
    ) -> None:
        """Adds an env step, which changes the running sums of the KL from `before` to `after`."""
        if self._not_drawn is not None:
            self._not_drawn = self._of_these(self._not_drawn, before)
        if counted is not True:
            drawn = torch.as_tensor(counted, device=after.device).expand(after.shape)
            self._not_drawn = _either(self._not_drawn, ~drawn)
        if valid is not None:
            begun = torch.zeros_like(after, dtype=torch.bool)
            for rows in self._begun:
                begun = begun | (True if rows is None else expand_right(rows, after.shape))
            without = _either(self._of_these(self._without_number, before), begun)
            self._without_number = without & ~expand_right(valid, after.shape)
        elif self._without_number is not None:
            self._without_number = None
        if self._begun:
            self._begun = []
        self._left = after

    def _of_these(self, flags: Tensor | None, before: Tensor) -> Tensor | None:
        """The flags of the rows that go on from the last step; None if no row can."""
        # The shape differs where an env that is not batch-locked steps with another batch.
        if flags is None or self._left is None or self._left.shape != before.shape:
            return None
        return flags & (self._left.to(before) == before)

    def left_out(self, ended: Tensor) -> Tensor:
        """True where a trajectory that has `ended` is left out."""
        out = torch.zeros_like(ended)
        for flags in (self._not_drawn, self._without_number):
            if flags is not None:
                out = out | flags
        return out


def _either(flags: Tensor | None, others: Tensor) -> Tensor:
    return others if flags is None else flags | others


def _cleared(flags: Tensor | None, rows: Tensor | None) -> Tensor | None:
    if flags is None or rows is None:
        return None
    flags = flags & ~expand_right(rows, flags.shape)
    return flags if flags.any() else None
