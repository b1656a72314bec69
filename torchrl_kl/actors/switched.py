"""What `reference=` may be: nothing, another actor, or a switch that turns the policy itself into its reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple, cast

from tensordict import NestedKey
from tensordict.nn import ProbabilisticTensorDictSequential
from torch import nn

from torchrl_kl.actors.borrowed import Live, evaluating
from torchrl_kl.actors.frozen import FrozenActor

Switch = Callable[[], AbstractContextManager[Any]]


class _Switchable(NamedTuple):
    actor: ProbabilisticTensorDictSequential
    switch: Switch


class SwitchedActor(FrozenActor):
    """The policy itself as reference, for as long as a switch is thrown: LoRA's adapters off, say. No second model.

    It scores without gradients and in eval mode, and leaves the policy as it was: its mode, its gradients, its device.
    Nothing of it is in `state_dict`. Deep copies score with the same policy. A copy in another process (by pickle) has
    a copy of the policy, which is as good while what the switch leaves of it, the base, does not move.

    Args:
        actor: the policy, a probabilistic actor.
        switch: a callable that returns a context manager, in which `actor` is the reference; as PEFT's
            `model.disable_adapter` of the model in `actor` is.
        log_prob_key: where the policy records its log-prob, or those of the parts of its action; by default
            `actor.log_prob_keys`.

    Raises:
        TypeError: if the actor has no distribution, or when it scores, if `switch` returns no context manager.
        ValueError: if it has uninitialised weights.
    """

    def __init__(
        self,
        actor: nn.Module,
        switch: Switch,
        *,
        log_prob_key: NestedKey | list[NestedKey] | None = None,
    ):
        self._live = Live(_Switchable(cast(ProbabilisticTensorDictSequential, actor), switch))
        super().__init__(actor, log_prob_key=log_prob_key)

    def _hold(self, actor: nn.Module) -> None:
        """Takes no copy."""

    @property
    def actor(self) -> ProbabilisticTensorDictSequential:  # type: ignore[override]
        """The policy, with its adapters on; `scoring` turns it into the reference."""
        return self._live.held.actor

    def update_reference(self, source: nn.Module, tau: float = 1.0) -> None:
        """Refuses: there are no weights of its own to move.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "`update_reference` needs a reference with weights of its own, and this one is the policy itself with a "
            "switch thrown: leave `reference` out, and a copy is made that can move, or merge the adapters into the "
            "base."
        )

    @contextmanager
    def scoring(self, recurrent: bool) -> Iterator[None]:
        """Throws the switch besides."""
        context = self._live.held.switch()
        if not isinstance(context, AbstractContextManager):
            raise TypeError(
                f"`reference` must return a context manager when called, got {type(context).__name__}: pass a "
                "function that switches the adapters off for a `with` block, such as PEFT's `model.disable_adapter`."
            )
        with ExitStack() as stack:
            stack.enter_context(context)
            stack.enter_context(evaluating(self.actor))
            stack.enter_context(super().scoring(recurrent))
            yield


def as_reference(
    actor: nn.Module,
    reference: nn.Module | Switch | None,
    *,
    log_prob_key: NestedKey | list[NestedKey] | None = None,
    requires_grad: bool = False,
) -> FrozenActor:
    """The reference that the argument `reference` stands for, to score the actions of `actor`.

    Args:
        actor: the policy.
        reference: None: a frozen copy of `actor`; an actor: a frozen copy of it; a FrozenActor: itself; a callable
            that returns a context manager: `actor` itself, within that context.
        log_prob_key: where the policy records its log-prob, or those of the parts of its action; by default
            `actor.log_prob_keys`.
        requires_grad: whether a copy's weights receive gradients.

    Raises:
        TypeError: if `reference` is something else.
        ValueError: if a FrozenActor or a context is to have gradients.
    """
    if reference is None:
        return FrozenActor(actor, log_prob_key=log_prob_key, requires_grad=requires_grad)
    if isinstance(reference, nn.Module) and not isinstance(reference, FrozenActor):
        return FrozenActor(
            reference, log_prob_key=log_prob_key, requires_grad=requires_grad, policy=actor
        )
    if requires_grad:
        raise ValueError(
            "`requires_grad` needs a reference that is a copy made here, got a "
            f"{type(reference).__name__}: pass an actor, or leave `reference` out."
        )
    if isinstance(reference, FrozenActor):
        if log_prob_key not in (None, reference.log_prob_key):
            raise ValueError(
                f"`log_prob_key` must be that of the FrozenActor, {reference.log_prob_key!r}, got {log_prob_key!r}."
            )
        return reference
    if isinstance(reference, AbstractContextManager) or not callable(reference):
        raise TypeError(
            "`reference` must be an actor or a callable that returns a context manager, got "
            f"{type(reference).__name__}: pass `model.disable_adapter`, not `model.disable_adapter()`, which could be "
            "entered once only."
        )
    return SwitchedActor(actor, reference, log_prob_key=log_prob_key)
