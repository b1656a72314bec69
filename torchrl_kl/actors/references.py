"""The values of `reference=`: None, an actor, a FrozenActor, or a switch of the policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential
from torch import Tensor, nn
from torch.compiler import is_compiling

from torchrl_kl.actors.frozen import FrozenActor, Read, scoring_mode
from torchrl_kl.actors.identity import weights_without_adapters
from torchrl_kl.actors.policy import Borrowed, evaluating
from torchrl_kl.actors.reading import has_compiled_parts, requires_grad

Switch = Callable[[], AbstractContextManager[Any]]


class SwitchedActor(FrozenActor):
    """The policy itself as reference, within the context that `switch()` returns.

    It scores without gradients and in eval mode, and does not change the policy, whose weights are
    not in its `state_dict`. Deep copies score with the same policy.

    State: with PEFT's adapters, `fingerprint`, a hash of all weights but theirs. It is checked when
    a resumed run scores for the first time.
    """

    def __init__(self, actor: nn.Module, switch: Switch, **options: Any):
        # In another process it is a copy of the policy, which serves as well: the weights that
        # PEFT's `disable_adapter` leaves on, those of the base model, do not change.
        policy = cast(ProbabilisticTensorDictSequential, actor)
        self._borrowed = Borrowed((policy, switch))
        super().__init__(actor, **options)

    def _hold(self, actor: nn.Module) -> None:
        """Takes no copy."""

    # A property: as a submodule the policy would be moved and put into eval mode with the env.
    @property
    def actor(self) -> ProbabilisticTensorDictSequential:  # type: ignore[override]
        """The policy with its adapters on; it is the reference within `scoring`."""
        return self._borrowed.held[0]

    def _weights(self) -> dict[str, Tensor]:
        # Of any other switch it is not known which weights it leaves on.
        return weights_without_adapters(self.actor)

    def update_reference(self, source: nn.Module, tau: float = 1.0) -> None:
        """RuntimeError: the reference has no weights that could be moved."""
        raise RuntimeError(
            "`update_reference` needs a reference that is a copy, and this one is the policy "
            "itself within a context: leave `reference` out, or merge the adapters into the base."
        )

    def _look(self, read: Callable[[TensorDictBase], Read], inputs: TensorDictBase) -> Read:
        """What a pass reads; the first time, a ValueError if it depends on weights that learn.

        Others may learn, such as those of a value head in the policy's model.
        """
        if self._looked or is_compiling() or torch.is_inference_mode_enabled():
            return read(inputs)
        weights = self._weights().items()
        learning = [name for name, weight in weights if weight.requires_grad]
        if learning and not has_compiled_parts(self.actor):  # which would be compiled once more
            with torch.enable_grad():
                result = read(inputs.detach())
            learning = learning if requires_grad(result) else []
        if learning:
            raise ValueError(
                "`reference` must not learn, but with the adapters switched off, the policy has "
                f"{len(learning)} weights that require gradients, such as {learning[0]!r}: freeze "
                "them (in PEFT, `bias='none'`, and `modules_to_save` for whole layers that learn), "
                "or leave `reference` out, which takes a copy."
            )
        self._looked = True
        return read(inputs)

    @contextmanager
    def scoring(self, recurrent: bool) -> Iterator[None]:
        """The context of every pass, within that of the switch."""
        self.check_identity()
        # Called anew for each pass: a context manager can often be entered only once.
        context = self._borrowed.held[1]()
        if not isinstance(context, AbstractContextManager):
            raise TypeError(
                "`reference` must return a context manager when called, got "
                f"{type(context).__name__}: pass a function such as PEFT's `model.disable_adapter`."
            )
        # Not an ExitStack: what TensorDict's `to_module` returns must not be asked for its truth.
        with context, evaluating(self.actor), scoring_mode(False, recurrent):
            yield


def as_reference(
    actor: nn.Module,
    reference: nn.Module | Switch | None,
    *,
    log_prob_key: NestedKey | list[NestedKey] | None = None,
    **options: Any,
) -> FrozenActor:
    """The reference that scores the actions of `actor`; `options`: as for FrozenActor."""
    if reference is None:
        return FrozenActor(actor, log_prob_key=log_prob_key, **options)
    # Another actor: its weights, the actions and log-probs of `actor`.
    if isinstance(reference, nn.Module) and not isinstance(reference, FrozenActor):
        return FrozenActor(reference, log_prob_key=log_prob_key, policy=actor, **options)
    if options.get("requires_grad"):
        raise ValueError(
            "`requires_grad` needs a reference that is a copy made here, got a "
            f"{type(reference).__name__}: pass an actor, or leave `reference` out."
        )
    # It is used itself: options that it was not built with would be ignored.
    if isinstance(reference, FrozenActor):
        given = next(((name, value) for name, value in options.items() if value), None)
        if given is not None:
            raise ValueError(
                f"`{given[0]}` must be given to the FrozenActor that is the reference: build "
                f"FrozenActor(actor, {given[0]}={given[1]!r})."
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
        reference.read_for(actor)
        return reference
    if isinstance(reference, AbstractContextManager) or not callable(reference):
        raise TypeError(
            "`reference` must be an actor or a callable that returns a context manager, got "
            f"{type(reference).__name__}: pass `model.disable_adapter`, not "
            "`model.disable_adapter()`, which could be entered only once."
        )
    return SwitchedActor(actor, reference, log_prob_key=log_prob_key, **options)
