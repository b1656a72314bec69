"""Where things stand in a TensorDict: neighbouring keys, batch shapes, specs, masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from torch import Tensor
from torchrl.data import Composite, Unbounded

MASK_KEY = ("collector", "mask")
TRAJECTORY_KEY = ("collector", "traj_ids")


def as_tuple(key: NestedKey) -> tuple[str, ...]:
    """A key as a tuple of strings."""
    return (key,) if isinstance(key, str) else cast(tuple[str, ...], key)


def beside(key: NestedKey, name: str) -> NestedKey:
    """The key called `name` that stands in the same place of the tree as `key`."""
    return unravel_key((*as_tuple(key)[:-1], name))


def holder_batch_size(tensordict: TensorDictBase, key: NestedKey) -> torch.Size:
    """Batch size of the (nested) tensordict that holds `key`; of the root where there is no such entry."""
    holder = tensordict.get(as_tuple(key)[:-1], None) if len(as_tuple(key)) > 1 else None
    return tensordict.batch_size if holder is None else holder.batch_size


def sum_action_dims(log_prob: Tensor, batch_size: torch.Size) -> Tensor:
    """Sums what stands beyond the batch: a `Normal` gives one log-prob per action dimension."""
    extra = tuple(range(len(batch_size), log_prob.ndim))
    return log_prob.sum(extra) if extra else log_prob


class LogProbKeys:
    """Where the log-prob of an action stands: one entry, or one for each part of a composite action, to be added up.

    A composite action is drawn by one policy, whose KL is the sum over its parts: it belongs to the branch of the tree
    that holds all of them.

    Args:
        key: of the entry, or a list of those of the parts.
    """

    def __init__(self, key: NestedKey | list[NestedKey]):
        self.keys = [unravel_key(one) for one in (key if isinstance(key, list) else [key])]
        first, *others = (as_tuple(one)[:-1] for one in self.keys)
        depth = len(first)
        while any(path[:depth] != first[:depth] for path in others):
            depth -= 1
        self.branch = first[:depth]
        self._inside = self.beside("log_prob")

    @property
    def key(self) -> NestedKey | list[NestedKey]:
        """The one key, or the list of several."""
        return self.keys[0] if len(self.keys) == 1 else self.keys

    def beside(self, name: str) -> NestedKey:
        """The key called `name` in the branch that holds all of them."""
        return unravel_key((*self.branch, name))

    def batch_size(self, tensordict: TensorDictBase) -> torch.Size:
        """Batch size of that branch: the shape of the log-prob."""
        return holder_batch_size(tensordict, self._inside)

    def missing(self, tensordict: TensorDictBase) -> list[NestedKey]:
        """Those that are not there."""
        return [key for key in self.keys if tensordict.get(key, None) is None]

    def read(self, tensordict: TensorDictBase) -> Tensor | None:
        """The log-prob of the whole action, nats, shape `batch_size`; None if an entry is not there."""
        values = [tensordict.get(key, None) for key in self.keys]
        if any(value is None for value in values):
            return None
        return _add_up(values, self.batch_size(tensordict))

    def add_up(self, log_probs: TensorDictBase, batch_size: torch.Size) -> Tensor:
        """The sum over the parts and over what stands beyond the batch."""
        return _add_up([log_probs.get(key) for key in self.keys], batch_size)


def _add_up(parts: list[Tensor], batch_size: torch.Size) -> Tensor:
    first, *others = (sum_action_dims(part, batch_size) for part in parts)
    return sum(others, first)


def expand_right(value: Tensor, shape: Sequence[int]) -> Tensor:
    """Expands a value that has the first dimensions of `shape` (or the same with trailing ones) to all of it.

    A root "done" (*B, 1) thus reaches a reward per agent (*B, n_agents, 1).
    """
    if value.shape == torch.Size(shape):
        return value
    while value.ndim and value.shape[-1] == 1 and value.shape != torch.Size(shape[: value.ndim]):
        value = value.squeeze(-1)
    return value.reshape(*value.shape, *(1,) * (len(shape) - value.ndim)).expand(shape)


def existing_keys(tensordict: TensorDictBase) -> str:
    """The keys of a tensordict as a short, sorted text for an error message."""
    return ", ".join(sorted(str(key) for key in tensordict.keys(True, True)))


def add_spec(
    spec: Composite, key: NestedKey, shape: Sequence[int], dtype: torch.dtype, holder: torch.Size
) -> None:
    """Adds an unbounded leaf to an observation or state spec; missing branches get the batch size `holder`."""
    path = as_tuple(key)
    for depth in range(1, len(path)):
        if path[:depth] not in spec.keys(True):
            spec[path[:depth]] = Composite(shape=holder, device=spec.device)  # type: ignore[arg-type]
    spec[key] = Unbounded(shape=torch.Size(shape), dtype=dtype, device=spec.device)


def state_spec(input_spec: Composite) -> Composite:
    """The state spec of an env's input spec, made if there is none."""
    if input_spec["full_state_spec"] is None:
        input_spec["full_state_spec"] = Composite(shape=input_spec.shape, device=input_spec.device)  # type: ignore[arg-type]
    return input_spec["full_state_spec"]


def find_time_dim(tensordict: TensorDictBase, time_dim: int | None) -> int | None:
    """The batch dimension of a batch that is time: the last one, if it is named "time" or given; else None.

    Raises:
        ValueError: if the dimension given or named is not the last one.
    """
    if time_dim is None:
        names = tensordict.names if tensordict.batch_dims else []
        if "time" not in names:
            return None
        time_dim = names.index("time")
    last = tensordict.batch_dims - 1
    if time_dim not in (last, -1) or last < 0:
        raise ValueError(
            f"`time_dim` must be the last batch dimension, got {time_dim} for a batch of shape "
            f"{tuple(tensordict.batch_size)}: transpose the batch, as TorchRL's recurrent modules ask for too."
        )
    return last


def is_fake(tensordict: TensorDictBase) -> bool:
    """Whether a batch is all zeros at its root: the stand-in that collectors and buffers allocate storage with."""
    values = [
        value
        for key, value in tensordict.items(True, True)
        if as_tuple(key)[0] != "next" and isinstance(value, Tensor)
    ]
    return bool(values) and not any(bool(value.any()) for value in values)
