"""Which trajectories of an env must not be told to its controller when they end."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_kl._tensordict import expand_right


class EnvRows:
    """Flags of the trajectories that the rows of an env are in, of the shape of the KL.

    A trajectory is left out if the policy did not draw one of its actions (an argmax is not a
    sample), or if none of its steps had valid numbers.
    """

    def __init__(self):
        self._not_drawn: Tensor | None = None  # None: all were
        self._without_number: Tensor | None = None  # True if no step was valid yet; None: some were
        self._begun: list[
            Tensor | None
        ] = []  # rows that were reset before the next step; None: all

    def reset(self, rows: Tensor | None) -> None:
        """Begins new trajectories in some rows; None: in all."""
        self._not_drawn = _cleared(self._not_drawn, rows)
        self._without_number = _cleared(self._without_number, rows)
        self._begun = [None] if rows is None else [*self._begun, rows]

    def add(self, like: Tensor, counted: bool | Tensor, valid: Tensor | None) -> None:
        """Adds an env step, of a KL of the shape of `like`."""
        if counted is not True:
            drawn = torch.as_tensor(counted, device=like.device).expand(like.shape)
            self._not_drawn = _either(self._not_drawn, ~drawn)
        if valid is not None:
            begun = torch.zeros_like(like, dtype=torch.bool)
            for rows in self._begun:
                begun = begun | (True if rows is None else expand_right(rows, like.shape))
            before = _either(self._without_number, begun)
            self._without_number = before & ~expand_right(valid, like.shape)
        elif self._without_number is not None:
            self._without_number = None
        if self._begun:
            self._begun = []

    def left_out(self, ended: Tensor) -> Tensor:
        """True where a trajectory that has `ended` is left out."""
        out = torch.zeros_like(ended)
        for flags in (self._not_drawn, self._without_number):
            if flags is not None and flags.shape == out.shape:
                out = out | flags
        return out


def _either(flags: Tensor | None, others: Tensor) -> Tensor:
    # The shape differs where an env that is not batch-locked steps with another batch.
    return others if flags is None or flags.shape != others.shape else flags | others


def _cleared(flags: Tensor | None, rows: Tensor | None) -> Tensor | None:
    if flags is None or rows is None:
        return None
    flags = flags & ~expand_right(rows, flags.shape)
    return flags if flags.any() else None
