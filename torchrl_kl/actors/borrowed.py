"""Modules that belong to somebody else, such as the policy in training: used where they are, never owned."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pickle import PicklingError
from typing import Generic, TypeVar

from torch import nn

Held = TypeVar("Held")


class Live(Generic[Held]):
    """Holds what somebody else owns: it is no submodule, and deep copies share it.

    The policy as a submodule of a transform would be moved and put into eval mode with the env that the transform is
    attached to, would be in `state_dict` a second time, and a deep copy of the transform would no longer see it learn.

    Args:
        held: the policy, or what leads to it.
        refusal: why it must not be pickled: in another process it would be a copy that learns nothing. None where such
            a copy does as well.
    """

    def __init__(self, held: Held, *, refusal: str | None = None):
        self.held, self.refusal = held, refusal

    def __deepcopy__(self, memo: dict) -> Live[Held]:
        return self

    def __getstate__(self) -> dict:
        if self.refusal is not None:
            raise PicklingError(self.refusal)
        return self.__dict__


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Eval mode for the time of a pass; afterwards each part of the module is in the mode in which it was."""
    training = [part for part in module.modules() if part.training]
    for part in training:
        part.training = (
            False  # not by `eval()`, at which some modules do more, such as merging their adapters
        )
    try:
        yield
    finally:
        for part in training:
            part.training = True
