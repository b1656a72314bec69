"""The private names of TorchRL that this package uses, all tested by test_torchrl_private.py."""

from __future__ import annotations

from typing import Any

from tensordict import NestedKey
from torch import Tensor
from torch.distributions import Distribution
from torchrl.envs.transforms import Transform

from torchrl_kl.functional.distributions import COLUMN_READERS


def container_of(transform: Transform) -> object:
    """The Compose or env that holds a transform, which may be in no env; None if nothing does."""
    reference = vars(transform)["_container"]
    return None if reference is None else reference()


def declared_keys(transform: Transform) -> tuple[set[NestedKey], set[NestedKey], set[NestedKey]]:
    """The `out_keys`, `in_keys_inv`, `out_keys_inv` given; the properties may ask for specs."""
    names = ("_out_keys", "_in_keys_inv", "_out_keys_inv")
    found: Any = tuple(set(vars(transform).get(name) or ()) for name in names)
    return found


def indices_of(distribution: Distribution) -> Tensor | None:
    """The action of each column of a MaskedCategorical given by `indices`; None: all, in order."""
    if getattr(distribution, "_sparse_mask", False):
        return getattr(distribution, "_mask", None)
    return None


COLUMN_READERS.append(indices_of)
