"""What modules compute, without the overhead of calling modules, which can double a token's time.

A module of PyTorch is called as a function of its weights, so that the math is written once.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from operator import is_
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.module import _has_any_global_hook

_Module = TypeVar("_Module", bound=nn.Module)
_Kind = TypeVar("_Kind", bound=type[nn.Module])

_OF_PARTS: set[type[nn.Module]] = set()


def of_parts(kind: _Kind) -> _Kind:
    """Marks a class whose `forward` does nothing with its submodules but call them."""
    _OF_PARTS.add(kind)
    return kind


def bare(module: _Module) -> _Module:
    """A copy of a module of parts that computes the same, with fewer calls; it shares the weights.

    Parts that are hooked, compiled, parametrized or of another class, such as layers with adapters,
    are called as modules. To be used at once: it does not see hooks or weights that come later.
    """
    if torch.compiler.is_compiling() or _has_any_global_hook():
        return module
    if type(module) not in _OF_PARTS or _is_changed(module):
        return module
    view = type(module).__new__(type(module))
    # Entries of `vars` are found before submodules are.
    vars(view).update(vars(module))
    vars(view).update((name, _function(part)) for name, part in module._modules.items())
    return view


class BareView:
    """The bare copy of a module for many calls: made anew if an attribute of a part has changed."""

    def __init__(self, module: nn.Module):
        self.module, self._view, self._made_at = module, module, -1
        self._parts: list[nn.Module] = []
        self._attributes: list[Any] = []

    def get(self, n_replaced: int) -> Any:
        """The copy; `n_replaced` differs from last time if weights, modules or hooks do."""
        if _has_any_global_hook():
            return self.module
        attributes = _attributes(self._parts)
        # By identity: a comparison of values could be one of tensors.
        same = n_replaced == self._made_at and len(attributes) == len(self._attributes)
        if not (same and all(map(is_, attributes, self._attributes))):
            self._parts, self._made_at = [*_parts(self.module)], n_replaced
            self._view, self._attributes = bare(self.module), _attributes(self._parts)
        return self._view


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """The module and those that `bare` looks at inside it."""
    yield module
    if type(module) in _OF_PARTS or type(module) is nn.ModuleList:
        for part in module.children():
            yield from _parts(part)


def _attributes(parts: list[nn.Module]) -> list[Any]:
    return [value for part in parts for value in (type(part), *vars(part).values())]


def _is_changed(module: nn.Module) -> bool:
    """Whether a call of the module does more than the `forward` of its class."""
    hooks = module._forward_hooks or module._forward_pre_hooks
    backward_hooks = module._backward_hooks or module._backward_pre_hooks
    return bool(hooks or backward_hooks or module._compiled_call_impl or "forward" in vars(module))


def _function(module: Any) -> Any:
    """What a call of the module computes; of a list, that of each module in it."""
    kind = type(module)
    if kind is nn.ModuleList:
        return [_function(part) for part in module._modules.values()]
    if kind in _OF_PARTS:
        part = bare(module)
        return module if part is module else part.forward
    if kind not in (nn.Linear, nn.LayerNorm, nn.Embedding) or _is_changed(module):
        return module
    weights = module._parameters
    if kind is nn.Embedding:  # lookups of the others change the weights, or their gradients
        plain = weights.keys() == {"weight"} and not (module.max_norm or module.sparse)
        plain = plain and module.padding_idx is None and not module.scale_grad_by_freq
        return partial(torch.embedding, weights["weight"]) if plain else module
    if weights.keys() != {"weight", "bias"}:  # one is computed from others
        return module
    if kind is nn.Linear:
        return partial(F.linear, **weights)
    return partial(
        F.layer_norm, normalized_shape=module.normalized_shape, eps=module.eps, **weights
    )
