"""What KL control asks of an actor, beyond the interface of TorchRL's probabilistic actors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tensordict import NestedKey
from torch import nn


class KLActor:
    """The questions, with the answers of any actor; a class of actors that differ inherits from it.

    Nothing else is known about an actor of another package: neither attributes nor classes.
    """

    advice: str = ""  # what an error recommends after "wrap a network in ..., or"
    # Entries that were recorded when actions were drawn, and are read where these are scored.
    replayed_keys: Sequence[NestedKey] = ()
    # Of inputs (*B, L) that may hold more than is read: the entry (*B) that says how much is.
    state_lengths: Mapping[NestedKey, NestedKey] = {}
    temperature: float | None = None  # by which it divides its logits, if it says so

    def whole(self) -> Any:
        """The same actor without limits on its actions: what a reference is a copy of."""
        return self


class _OtherActor(KLActor):
    """An actor of TorchRL, or of a user."""

    def __init__(self, actor: nn.Module):
        self.actor = actor

    def whole(self) -> nn.Module:
        return self.actor


def as_kl_actor(actor: nn.Module) -> KLActor:
    """The actor, or what answers for one that is no KLActor."""
    return actor if isinstance(actor, KLActor) else _OtherActor(actor)


def wrappers() -> str:
    """What makes an actor of what, for errors."""
    others = [one.advice for one in KLActor.__subclasses__() if one.advice]
    return ", or ".join(["a network in torchrl.modules.ProbabilisticActor", *others])


def known_lengths() -> Mapping[NestedKey, NestedKey]:
    """The `state_lengths` of all classes of actors, for data of which the actor is not known."""
    found = [one.state_lengths for one in KLActor.__subclasses__()]
    return {key: length for lengths in found for key, length in lengths.items()}
