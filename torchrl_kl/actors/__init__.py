"""Reading actors, and the reference (frozen, moving or switched) that scores their actions."""

from torchrl_kl.actors.frozen import FrozenActor
from torchrl_kl.actors.log_probs import rescore
from torchrl_kl.actors.top_k import TopKActor

__all__ = ["FrozenActor", "TopKActor", "rescore"]
