"""Which reference it is: a hash of its weights and structure, saved and checked with its state."""

from __future__ import annotations

from hashlib import sha256

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_OTHER_STATE = (
    "`state_dict` has a reference that does not fit its fingerprint: its weights were changed "
    "after they were saved, or its modules here are of other classes. Load the state unchanged, "
    "into a reference that was built by the same code."
)
_OTHER_REFERENCE = (
    "the reference is not the one that the run was trained against: the state that was loaded has "
    "another fingerprint. Build it from the model that the run began with, out of its own file, "
    "never from the policy that is resumed, whose KL to itself would be 0. If it is the policy "
    "with its adapters switched off, all other weights of its model count, too, such as those of a "
    "value head: load those that learn before it scores, and seed those that are drawn at random."
)


class Identified(nn.Module):
    """Has a `fingerprint` of `actor` in its state, and checks it against what is loaded."""

    actor: nn.Module
    _expected: Tensor | None = None  # the fingerprint in a state that came without weights

    def _weights(self) -> dict[str, Tensor]:
        """The weights that make it the reference that it is, by name."""
        state = self.actor.state_dict()
        return {name: value for name, value in state.items() if isinstance(value, Tensor)}

    def check_identity(self) -> None:
        """RuntimeError if a state was loaded without its weights, and this has others."""
        if self._expected is None:
            return
        if not fingerprint(self.actor, self._weights()).equal(self._expected):
            raise RuntimeError(_OTHER_REFERENCE)
        self._expected = None

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._expected is not None:  # not checked yet
            destination[f"{prefix}fingerprint"] = self._expected
        elif weights := self._weights():
            destination[f"{prefix}fingerprint"] = fingerprint(self.actor, weights)

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ):
        args = local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        super()._load_from_state_dict(state_dict, prefix, *args)
        key, start = f"{prefix}fingerprint", f"{prefix}actor."
        expected = state_dict.get(key)
        if expected is None:
            missing_keys += [key] if self._weights() else []
            return
        unexpected_keys[:] = (name for name in unexpected_keys if name != key)
        weights = {
            name.removeprefix(start): value
            for name, value in state_dict.items()
            if name.startswith(start) and isinstance(value, Tensor)
        }
        # Without weights it is checked when it scores: until then, the policy may be loaded that
        # shares its weights.
        self._expected = None if weights else expected.cpu()
        if weights and not fingerprint(self.actor, weights).equal(expected.cpu()):
            raise RuntimeError(_OTHER_STATE)


def fingerprint(model: nn.Module, weights: dict[str, Tensor]) -> Tensor:
    """SHA-256 of named weights (name, dtype, shape, bytes) and of the model's classes, uint8."""
    digest = sha256()
    for name, module in model.named_modules():
        digest.update(f"{name}:{type(module).__qualname__};".encode())
    for name, value in sorted(weights.items()):
        digest.update(f"{name}:{value.dtype}{tuple(value.shape)};".encode())
        # Each process holds a part of a sharded weight: the hash is that of the whole, as is saved.
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        for part in plain_parts_of(whole):
            part = part.detach().cpu().contiguous()
            digest.update(part.reshape(-1).view(torch.uint8).numpy().data)
    return torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)


def plain_parts_of(value: Tensor) -> list[Tensor]:
    """The plain tensors that hold a value, such as a quantized or sharded weight; or the value."""
    if not is_traceable_wrapper_subclass(value):
        return [value]
    names, _ = value.__tensor_flatten__()  # type: ignore[attr-defined]
    held = [getattr(value, name) for name in names]  # a sharded weight also holds its mesh
    return [part for each in held if isinstance(each, Tensor) for part in plain_parts_of(each)]


def has_adapters(module: nn.Module) -> bool:
    """Whether it is a layer with PEFT's adapters, which are switched without any new weight."""
    return isinstance(getattr(type(module), "disable_adapters", None), property)


def weights_without_adapters(model: nn.Module) -> dict[str, Tensor]:
    """The weights of the model that PEFT's adapters were added to; none if it has no adapters."""
    layers = [module for module in model.modules() if has_adapters(module)]
    added: set[int] = set()
    for layer in layers:  # those around others come first
        added |= {id(weight) for weight in layer.parameters()}
        # What a layer was before; a copy is trained of an `original_module`.
        before = getattr(layer, "base_layer", getattr(layer, "original_module", None))
        added -= {id(weight) for weight in before.parameters()} if before is not None else set()
    weights = model.named_parameters() if layers else ()
    return {name: weight for name, weight in weights if id(weight) not in added}
