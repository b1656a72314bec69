"""What KL control asks of an actor, beyond the interface of TorchRL's probabilistic actors."""

from collections.abc import Mapping, Sequence
from typing import Any

from tensordict import NestedKey
from torch import nn

from torchrl_kl.actors.parallel import unwrapped


class KLActor:
    """The questions, with the answers of most actors; a class that answers otherwise inherits.

    Nothing else is known about an actor of another package: neither attributes nor classes.
    """

    advice: str = ""  # what an error recommends after "wrap a network in ..., or"
    # Entries that are recorded when actions are drawn, and are read when these are scored.
    replayed_keys: Sequence[NestedKey] = ()
    # Of inputs (*B, L) that may hold more than is read: the entry (*B) that says how much is.
    state_lengths: Mapping[NestedKey, NestedKey] = {}
    temperature: float | None = None  # divides its logits; None: not known

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
    """The actor, also of `torch.compile`, or what answers for one that is not a KLActor."""
    actor = unwrapped(actor)
    return actor if isinstance(actor, KLActor) else _OtherActor(actor)


def wrappers() -> str:
    """How to make an actor, for errors."""
    others = [one.advice for one in KLActor.__subclasses__() if one.advice]
    return ", or ".join(["a network in torchrl.modules.ProbabilisticActor", *others])


def known_lengths() -> Mapping[NestedKey, NestedKey]:
    """The `state_lengths` of all classes of actors, for data of an unknown actor."""
    classes = KLActor.__subclasses__()
    return {key: length for one in classes for key, length in one.state_lengths.items()}
