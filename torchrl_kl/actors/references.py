"""The values of `reference=`: None, an actor, a FrozenActor, or a switch of the policy."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from tensordict import NestedKey
from tensordict.nn import ProbabilisticTensorDictSequential
from torch import nn

from torchrl_kl.actors.frozen import FrozenActor
from torchrl_kl.actors.policy import Borrowed, evaluating
from torchrl_kl.actors.protocol import as_kl_actor
from torchrl_kl.actors.reading import check_actor, find_log_prob_keys
from torchrl_kl.functional.tiles import within

Switch = Callable[[], AbstractContextManager[Any]]


class SwitchedActor(FrozenActor):
    """The policy itself as reference, within the context that `switch()` returns.

    The weights that are active in the context must not be trained; this is not checked. With PEFT,
    set `bias="none"`.
    """

    def __init__(self, actor: nn.Module, switch: Switch, **options: Any):
        # In another process it is a copy, which serves as well: the base model does not change.
        self._borrowed = Borrowed((as_kl_actor(actor).whole(), switch))
        super().__init__(actor, **options)

    def _hold(self, actor: nn.Module) -> None:
        """Takes no copy: the policy is borrowed."""

    @property
    def actor(self) -> ProbabilisticTensorDictSequential:  # type: ignore[override]
        """The policy with its adapters on; it is the reference within `scoring`."""
        return self._borrowed.held[0]

    def update_reference(self, source: nn.Module, tau: float = 1.0) -> None:
        """RuntimeError: the reference has no weights that could be moved."""
        raise RuntimeError(
            "`update_reference` needs a copy, and this reference is the policy itself within a "
            "context: leave `reference` out, or merge the adapters into the base."
        )

    @contextmanager
    def scoring(self, timed: bool) -> Iterator[None]:
        """The context of each pass, within that of the switch."""
        context = self._borrowed.held[1]()
        if not isinstance(context, AbstractContextManager):
            raise TypeError(
                "`reference` must return a context manager when called, got "
                f"{type(context).__name__}: pass a function such as PEFT's `model.disable_adapter`."
            )
        with context, evaluating(self.actor), super().scoring(timed):
            yield

    def _scored(self, dist: Any, timed: bool) -> Any:
        return within(super()._scored(dist, timed), self.scoring(timed))


def as_reference(
    actor: nn.Module,
    reference: nn.Module | Switch | None,
    *,
    log_prob_key: NestedKey | list[NestedKey] | None = None,
    chunk_size: int | None = None,
) -> FrozenActor:
    """The reference that scores the actions of `actor`; the options are those of FrozenActor."""
    check_actor(actor)
    # Another actor gives the weights; the log-probs are those that `actor` records.
    options: Any = {"log_prob_key": log_prob_key or find_log_prob_keys(actor)}
    options["chunk_size"] = chunk_size
    if isinstance(reference, FrozenActor):
        if chunk_size is not None:
            raise ValueError(
                "`chunk_size` needs a reference that is a copy made here, got a FrozenActor: give "
                "it to the FrozenActor."
            )
        if log_prob_key not in (None, reference.log_prob_key):
            raise ValueError(
                "`KLKeys.log_prob` must be that of the FrozenActor, "
                f"{reference.log_prob_key!r}, got {log_prob_key!r}."
            )
    elif reference is None or isinstance(reference, nn.Module):
        copied = actor if reference is None else reference
        if any(weight.is_meta for weight in copied.parameters()):
            name = "actor" if reference is None else "reference"
            raise ValueError(
                f"`{name}` has weights on the meta device, of which a copy would stay empty: load "
                "them first, or build FrozenActor(actor), load its weights, and pass it as "
                "`reference`."
            )
        reference = FrozenActor(copied, **options)
    elif isinstance(reference, AbstractContextManager) or not callable(reference):
        raise TypeError(
            "`reference` must be an actor or a callable that returns a context manager, got "
            f"{type(reference).__name__}: pass `model.disable_adapter`, not "
            "`model.disable_adapter()`, which could be entered only once."
        )
    else:
        reference = SwitchedActor(actor, reference, **options)
    reference.read_for(actor)
    return reference
