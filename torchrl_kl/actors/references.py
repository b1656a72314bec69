"""What `reference=` may be: nothing, an actor, a FrozenActor, or a switch of the policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple, cast

from tensordict import NestedKey
from tensordict.nn import ProbabilisticTensorDictSequential
from torch import nn

from torchrl_kl.actors.frozen import FrozenActor, scoring_mode
from torchrl_kl.actors.policy import Borrowed, evaluating

Switch = Callable[[], AbstractContextManager[Any]]


class _Switchable(NamedTuple):
    actor: ProbabilisticTensorDictSequential
    switch: Switch


class SwitchedActor(FrozenActor):
    """The policy itself as reference within a context: LoRA's adapters off, say.

    It scores without gradients and in eval mode, and leaves the policy as it was: its mode, its
    gradients, its device. Nothing of it is in `state_dict`. Deep copies score with the same policy.
    A copy in another process (by pickle) has a copy of the policy, which serves as well while the
    weights that the switch leaves on, the base, do not change.

    `switch` returns a context manager in which `actor` is the reference, such as PEFT's
    `model.disable_adapter`, or a pass raises a TypeError. `options`: as for FrozenActor.
    """

    def __init__(self, actor: nn.Module, switch: Switch, **options: Any):
        policy = cast(ProbabilisticTensorDictSequential, actor)
        self._borrowed = Borrowed(_Switchable(policy, switch))
        super().__init__(actor, **options)

    def _hold(self, actor: nn.Module) -> None:
        """Takes no copy."""

    @property
    def actor(self) -> ProbabilisticTensorDictSequential:  # type: ignore[override]
        """The policy, with its adapters on; `scoring` turns it into the reference."""
        return self._borrowed.held.actor

    def update_reference(self, source: nn.Module, tau: float = 1.0) -> None:
        """RuntimeError: it has no weights to move."""
        raise RuntimeError(
            "`update_reference` needs a reference that is a copy, and this one is the policy "
            "itself within a context: leave `reference` out, or merge the adapters into the base."
        )

    @contextmanager
    def scoring(self, recurrent: bool) -> Iterator[None]:
        """The context of every pass, within that of the switch."""
        context = self._borrowed.held.switch()
        if not isinstance(context, AbstractContextManager):
            raise TypeError(
                "`reference` must return a context manager when called, got "
                f"{type(context).__name__}: pass a function such as PEFT's `model.disable_adapter`."
            )
        with ExitStack() as stack:
            stack.enter_context(context)
            stack.enter_context(evaluating(self.actor))
            stack.enter_context(scoring_mode(False, recurrent))
            yield


def as_reference(
    actor: nn.Module,
    reference: nn.Module | Switch | None,
    *,
    log_prob_key: NestedKey | list[NestedKey] | None = None,
    **options: Any,
) -> FrozenActor:
    """The reference that the argument `reference` means, to score the actions of `actor`.

    None: a frozen copy of `actor`; an actor: a frozen copy of it; a FrozenActor: itself; a callable
    that returns a context manager: `actor` itself, within that context.

    Raises:
        TypeError: if `reference` is something else.
        ValueError: if one of `options`, as for FrozenActor, is given that it cannot take.
    """
    if reference is None:
        return FrozenActor(actor, log_prob_key=log_prob_key, **options)
    if isinstance(reference, nn.Module) and not isinstance(reference, FrozenActor):
        return FrozenActor(reference, log_prob_key=log_prob_key, policy=actor, **options)
    if options.get("requires_grad"):
        raise ValueError(
            "`requires_grad` needs a reference that is a copy made here, got a "
            f"{type(reference).__name__}: pass an actor, or leave `reference` out."
        )
    if isinstance(reference, FrozenActor):
        given = [name for name, value in options.items() if value]
        if given:
            raise ValueError(
                f"`{given[0]}` must be given to the FrozenActor that is the reference: build "
                f"FrozenActor(actor, {given[0]}=True)."
            )
        if not reference.asks(actor):
            raise ValueError(
                "`reference` asks another policy than `actor` for its log-probs: build it with "
                "FrozenActor(..., policy=actor, recompute_log_prob=True)."
            )
        if log_prob_key not in (None, reference.log_prob_key):
            raise ValueError(
                "`KLKeys.log_prob` must be that of the FrozenActor, "
                f"{reference.log_prob_key!r}, got {log_prob_key!r}."
            )
        return reference
    if isinstance(reference, AbstractContextManager) or not callable(reference):
        raise TypeError(
            "`reference` must be an actor or a callable that returns a context manager, got "
            f"{type(reference).__name__}: pass `model.disable_adapter`, not "
            "`model.disable_adapter()`, which could be entered only once."
        )
    return SwitchedActor(actor, reference, log_prob_key=log_prob_key, **options)
