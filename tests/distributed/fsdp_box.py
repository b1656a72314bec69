"""What the recipe of several learners shows for FSDP2."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard


def shard(module: nn.Module, *kinds: type[nn.Module]) -> None:
    """Shards all parts of these classes, such as the layers and the whole of a model."""
    for part in reversed([*module.modules()]):  # layers first
        if isinstance(part, kinds):
            fully_shard(part)


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Each rank holds all weights for a time, in which no pass waits for other ranks."""
    parts = [part for part in model.modules() if isinstance(part, FSDPModule)]
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            part.set_reshard_after_forward(part is not model, recurse=False)
            part.reshard()
