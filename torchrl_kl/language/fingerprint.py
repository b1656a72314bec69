"""Whether a model would still compute what it computed before."""

from __future__ import annotations

import math
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchrl_kl.actors.identity import has_adapters, plain_parts_of


class Values(NamedTuple):
    """What is compared of a model's tensors."""

    versions: tuple[int, int]  # how often tensors were replaced, and edited in place
    sample: list[Tensor]  # elements of each of them, one tensor per device, dtype and layout

    def equal(self, other: Values) -> bool:
        """Whether no change was seen between the two."""
        samples = zip(self.sample, other.sample, strict=True)
        return self.versions == other.versions and all(a.equal(b) for a, b in samples)


class Fingerprint:
    """Tells whether the weights, buffers, modules, adapters or modes of a model have changed.

    PyTorch counts edits in place, but not those through `.data`, which many libraries use, nor
    those of another process. So elements of each row and column are compared too: an edit of a
    whole tensor, row or column of a matrix is always seen. Hooks count as modules do.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self._n_replaced = 0
        self._find_parts()

    def modes(self) -> tuple[Any, ...]:
        """All that decides what the model computes, other than its tensors."""
        device = self._tensors[0].device.type if self._tensors else "cpu"
        return (
            tuple(module.training for module in self._modules),
            tuple(_adapter_state(layer) for layer in self._adapters),
            torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device),
        )

    def values(self) -> Values:
        """What is compared of the tensors, as they are now."""
        if not self._parts_are_held():
            self._n_replaced += 1
            self._find_parts()
        edits = sum(t._version for t in self._counting)
        sample = [torch.cat(views) for views in self._views.values()]
        return Values((self._n_replaced, edits), sample)

    def _find_parts(self) -> None:
        self._modules = list(self.model.modules())
        self._adapters = [module for module in self._modules if has_adapters(module)]
        held: list[Any] = [
            entries
            for module in self._modules
            for entries in (
                *(module._parameters, module._buffers, module._modules),
                *(module._forward_hooks, module._forward_pre_hooks),
            )
        ]
        self._held, self._sizes = held, list(map(len, held))
        self._entries = [(entries, name) for entries in held for name in entries]
        self._parts = [entries[name] for entries, name in self._entries]
        found = {id(t): t for t in self._parts if isinstance(t, Tensor)}
        self._tensors = [t for t in found.values() if t.numel()]
        self._counting = [t for t in self._tensors if not t.is_inference()]
        self._pointers = [t.data_ptr() for t in self._tensors]
        self._views: dict[Any, list[Tensor]] = {}
        for part in (part for tensor in self._tensors for part in plain_parts_of(tensor)):
            values = part.detach()
            if values.dtype in (torch.float16, torch.bfloat16):
                values = values.view(torch.int16)  # autocast to another dtype refuses to join them
            for view in _elements(values):
                # `cat` is faster if all or none of its tensors are contiguous.
                kind = view.device, view.dtype, view.is_contiguous()
                self._views.setdefault(kind, []).append(view)

    def _parts_are_held(self) -> bool:
        return (
            list(map(len, self._held)) == self._sizes
            and all(map(is_, [held.get(name, self) for held, name in self._entries], self._parts))
            and [t.data_ptr() for t in self._tensors] == self._pointers
        )


def _elements(tensor: Tensor) -> list[Tensor]:
    """Views (elements,) that visit each row and column of a matrix, and all of a vector."""
    order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
    tensor = tensor.permute(order)  # as it lies in memory
    if tensor.ndim == 1:
        return [tensor]
    if not tensor.is_contiguous():  # a part of another tensor
        return [view for part in tensor.unbind() for view in _elements(part)]
    width = tensor.shape[-1] if tensor.ndim else 1
    rows = tensor.numel() // width
    # With no common divisor of step and width, the elements visit all columns in turn.
    steps = range(min(rows, width), 0, -1)
    return [tensor.view(-1)[:: next(step for step in steps if math.gcd(step, width) == 1)]]


def _adapter_state(layer: Any) -> tuple[Any, ...]:
    """Which adapters of a layer are on, merged into the weights, and how strong they are."""
    strengths = tuple(getattr(layer, "scaling", {}).items())
    merged = getattr(layer, "merged", False)  # not in a layer of which a copy is trained
    return layer.disable_adapters, merged, tuple(layer.active_adapters), strengths
