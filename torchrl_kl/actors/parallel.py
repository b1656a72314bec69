"""Models of several processes: those of DistributedDataParallel, and of `fully_shard`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel


def local(model: Any) -> Any:
    """What DistributedDataParallel wraps: one process computes it without the others."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def unwrapped(model: Any) -> Any:
    """What torch.compile and DistributedDataParallel wrap, in any order."""
    inner = local(getattr(model, "_orig_mod", model))
    return model if inner is model else unwrapped(inner)


def in_wrapper(model: nn.Module, inner: nn.Module) -> nn.Module:
    """A module with the weights of a model, in the DistributedDataParallel of it, if it has one."""
    model = getattr(model, "_orig_mod", model)
    if not isinstance(model, DistributedDataParallel):
        return inner
    view: Any = object.__new__(type(model))  # a copy would average the gradients once more
    # It finds no buffers in parts that were replaced; those of a language model do not change.
    vars(view).update(vars(model), _modules={"module": inner}, forward_sync_buffers=False)
    return view


def sharded_parts(module: nn.Module) -> list[Any]:
    """The modules that `fully_shard` was called with, whether their weights are gathered or not."""
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


def without_gradients(module: nn.Module) -> AbstractContextManager:
    """The fastest context that leaves weights which gradients can be computed for afterwards."""
    # Gathered weights are tensors that are kept, and PyTorch writes into them later.
    return torch.no_grad() if sharded_parts(module) else torch.inference_mode()


def laid_out_as(value: Tensor, like: Tensor) -> Tensor:
    """A weight that is split over the ranks as another one is; all ranks call it."""
    if isinstance(value, DTensor):
        return value if isinstance(like, DTensor) else value.full_tensor()
    if isinstance(like, DTensor):
        return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
    return value
