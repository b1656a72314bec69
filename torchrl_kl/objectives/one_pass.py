"""One pass of a policy for several losses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.modules import recurrent_mode
from torchrl.objectives import LossModule

from torchrl_kl.actors.reading import recurrent_keys
from torchrl_kl.functional.numbers import is_same


class Pass:
    """A call of the `get_dist` of a network, with what it has read and written."""

    def __init__(self, network: Any, data: TensorDictBase, inputs: TensorDictBase):
        # `inputs` are those of `data` (*B), but for padding.
        before = dict(inputs.items(True, True))
        self.network, self.dist = network, network.get_dist(inputs)
        changed = [k for k, each in inputs.items(True, True) if before.get(k) is not each]
        self.written = inputs.select(*changed)
        self.read = {key: data.get(key) for key in before}
        self.weights, self.buffers = self._weights(), [*network.buffers()]

    def _weights(self) -> list[Any]:
        """The weights, where gradients go and in which modes it runs."""
        mode = recurrent_mode() if recurrent_keys(self.network) else None
        weights = [(id(each), each.requires_grad) for each in self.network.parameters()]
        return [torch.is_grad_enabled(), self.network.training, mode, weights]

    def _is_of(self, tensordict: TensorDictBase) -> bool:
        """Whether the network would now compute the same of a batch."""
        if self.weights != self._weights():
            return False
        # Each loss wraps the buffers anew.
        now = [*self.network.buffers(), *(tensordict.get(k, v) for k, v in self.read.items())]
        return all(map(is_same, [*self.buffers, *self.read.values()], now))

    @contextmanager
    def given_to(self, loss: LossModule | None) -> Iterator[None]:
        """While it is open, a loss that would make the same pass of the network gets this one."""
        network = self.network
        if getattr(loss, "actor_network", None) is not network or "get_dist" in vars(network):
            yield
            return
        own = network.get_dist

        def get_dist(tensordict: TensorDictBase, *args: Any, **kwargs: Any) -> Any:
            elsewhere = args or kwargs.get("tensordict_out") is not None
            if elsewhere or not self._is_of(tensordict):
                return own(tensordict, *args, **kwargs)
            tensordict.update(self.written)
            return self.dist

        vars(network)["get_dist"] = get_dist
        try:
            yield
        finally:
            del vars(network)["get_dist"]
