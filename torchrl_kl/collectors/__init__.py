"""One call that connects a KL stack to any of TorchRL's collectors."""

from torchrl_kl.collectors.kl_collector import kl_collector

__all__ = ["kl_collector"]
