"""Reading actors, and the frozen, moving or switched reference that scores their actions."""

from torchrl_kl.actors.frozen import FrozenActor
from torchrl_kl.actors.top_k import TopKActor

__all__ = ["FrozenActor", "TopKActor"]
