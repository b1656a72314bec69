"""Numbers that must stay exact: float64 state, dtypes to compute in, checks, a solved equation."""

import math
from collections.abc import Callable, Mapping
from operator import ge, gt, le, lt
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

_Method = TypeVar("_Method", bound=Callable[..., Any])
_BOUNDS = {"above": gt, "at_least": ge, "below": lt, "at_most": le}


class Float64State(nn.Module):
    """A module whose buffers move between devices but keep their dtype, even in `module.half()`."""

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):
        # In place, also with `assign=True`: others may have these buffers.
        if not any(buffer.is_meta for buffer in self.buffers(recurse=False)):  # those hold nothing
            local_metadata = local_metadata | {"assign_to_params_buffers": False}
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

    def _apply(self, fn, recurse=True):
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            # The former values, since a cast there and back would round them.
            after = self._buffers[name]
            if buffer is not None and after is not None and after.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(after.device)
        return self


def uncompiled(method: _Method) -> _Method:
    """Leaves a method that branches on numbers, or edits 0-dim float64 state, out of any graph."""
    # The code that PyTorch 2.13 makes of such an edit edits a copy: the state would never change.
    return torch.compiler.disable(method)  # type: ignore[return-value]


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of what is computed and recorded: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def widened(values: Tensor) -> Tensor:
    """The values in their `working_dtype`."""
    return values.to(working_dtype(values.dtype))


def check_number(name: str, value: object, **bounds: float) -> float:
    """`value` as a float, finite and within the bounds: `above`, `at_least`, `below`, `at_most`."""
    if type(value) is bool or not isinstance(value, (int, float)):
        raise TypeError(f"`{name}` must be a number, got {type(value).__name__}.")
    within = all(_BOUNDS[kind](value, bound) for kind, bound in bounds.items())
    if not (within and math.isfinite(value)):
        finite = [(kind, bound) for kind, bound in bounds.items() if math.isfinite(bound)]
        wanted = [f"{kind.replace('_', ' ')} {bound:g}" for kind, bound in finite]
        raise ValueError(f"`{name}` must be {' and '.join(['finite', *wanted])}, got {value}.")
    return float(value)


def check_count(name: str, value: int) -> int:
    """`value`, an int of at least 1; ValueError for anything else."""
    if type(value) is not int or value < 1:
        raise ValueError(f"`{name}` must be an int of at least 1, got {value!r}.")
    return value


def check_mask(
    mask: Tensor | None,
    shape: torch.Size,
    of: str,
    *,
    name: str = "mask",
    means: str = "the steps that count",
) -> None:
    """ValueError unless the mask is None, or boolean of the shape of what `of` names."""
    if mask is None:
        return
    check_tensor(name, mask)
    if mask.dtype != torch.bool or mask.shape != shape:
        raise ValueError(
            f"`{name}` must be boolean of the shape of {of}, {tuple(shape)}, got {mask.dtype} of "
            f"shape {tuple(mask.shape)}: True marks {means}."
        )


def check_finite(
    owner: str, entries: Mapping[Any, Tensor | None], mask: Tensor | None = None
) -> None:
    """ValueError if a step that counts, by `mask` (*B), has a NaN or infinite number."""
    if torch.compiler.is_compiling():  # a compiled step cannot branch on numbers
        return
    for key, values in entries.items():
        # A quick test: the sum is finite unless a number is wrong or very large.
        if values is None or math.isfinite(values.detach().sum(dtype=torch.float64).item()):
            continue
        wrong = ~values.detach().isfinite()
        if mask is not None:
            wrong = wrong & mask.reshape(mask.shape + (1,) * (values.ndim - mask.ndim))
        if wrong.any():
            place = tuple(wrong.nonzero()[0].tolist())
            raise ValueError(
                f"{owner} needs finite numbers, but {key!r} has {int(wrong.sum())} of "
                f"{values.numel()} that are not, the first {values[place].item()} at {place}. A "
                "log-prob is -inf where the policy or the reference cannot take the action, as "
                "outside the bounds (`low`, `high`) of a TanhNormal; NaN comes from diverged "
                "weights or from the env."
            )


def solve_decreasing(function: Callable[[float], float], value: float, high: float) -> float:
    """The x in (0, `high`] where a decreasing function is `value`; its relative error is 1e-12."""
    low = high / 2
    while function(low) < value:
        high, low = low, low / 2
    while high / low > 1 + 1e-12:
        # The geometric mean, since x may be of any size.
        middle = math.sqrt(high) * math.sqrt(low)
        low, high = (middle, high) if function(middle) >= value else (low, middle)
    return low


def check_tensor(name: str, tensor: object) -> None:
    """TypeError unless it is a tensor."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"`{name}` must be a tensor, got {type(tensor).__name__}.")


def is_floating(value: Any) -> bool:
    """Whether it is a tensor of floating point."""
    return isinstance(value, Tensor) and value.is_floating_point()


def is_same(value: Any, other: Any) -> bool:
    """Whether they are one object, or tensors of equal values."""
    # A lazily stacked batch makes a new tensor each time that an entry is read.
    tensors = isinstance(value, Tensor) and isinstance(other, Tensor)
    return value is other or (tensors and torch.equal(value, other))


def check_integers(name: str, tensor: Tensor) -> None:
    """TypeError unless it is a tensor of int64 or int32."""
    check_tensor(name, tensor)
    if tensor.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"`{name}` must be int64 or int32, got {tensor.dtype}: use `.long()`.")
