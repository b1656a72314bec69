"""One pass of a policy for several losses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential
from torch import Tensor
from torch.distributions import Distribution
from torchrl.modules import recurrent_mode
from torchrl.objectives import LossModule

from torchrl_kl.actors.reading import has_own, recurrent_keys
from torchrl_kl.functional.numbers import is_same


class Pass(NamedTuple):
    """What a call of a network's `get_dist` has read, written and returned."""

    network: Any
    state: list[Any]  # see `_state_of`
    buffers: list[Tensor]
    read: dict[Any, Any]
    written: TensorDictBase
    dist: Distribution

    @classmethod
    def of(cls, network: Any, data: TensorDictBase, inputs: TensorDictBase) -> Pass:
        """Calls it on `inputs`, which are those of `data` (*B) without NaN on padding."""
        before = dict(inputs.items(True, True))
        dist = network.get_dist(inputs)
        changed = [k for k, each in inputs.items(True, True) if before.get(k) is not each]
        read = {key: data.get(key) for key in before}
        held = (_state_of(network), [*network.buffers()])
        return cls(network, *held, read, inputs.select(*changed), dist)

    @contextmanager
    def given_to(self, loss: LossModule) -> Iterator[None]:
        """While it is open, a loss that asks its actor for the same distribution gets this one.

        That is where actor, weights and data are the same; the actor runs where one is not.
        """
        network: Any = getattr(loss, "actor_network", None)
        if not _is_same_actor(network, self.network):
            yield
            return
        own, attributes = network.get_dist, vars(network)
        before = {name: each for name, each in attributes.items() if name == "get_dist"}

        def get_dist(tensordict: TensorDictBase, *args: Any, **kwargs: Any) -> Any:
            elsewhere = args or kwargs.get("tensordict_out") is not None
            if elsewhere or not self._is_of(network, tensordict):
                return own(tensordict, *args, **kwargs)
            tensordict.update(self.written)
            return self.dist

        attributes["get_dist"] = get_dist
        try:
            yield
        finally:
            del attributes["get_dist"]
            attributes.update(before)

    def _is_of(self, network: Any, tensordict: TensorDictBase) -> bool:
        if self.state != _state_of(network):
            return False
        # Each loss wraps the buffers anew.
        now = [*network.buffers(), *(tensordict.get(k, each) for k, each in self.read.items())]
        return all(map(is_same, [*self.buffers, *self.read.values()], now))


def _state_of(network: Any) -> list[Any]:
    """The weights, where gradients go and, of a recurrent network, in which mode it runs."""
    mode = recurrent_mode() if recurrent_keys(network) else None
    weights = [(id(each), each.requires_grad) for each in network.parameters()]
    return [torch.is_grad_enabled(), mode, weights]


def _is_same_actor(one: Any, other: Any) -> bool:
    if one is other:
        return True
    # `get_policy_operator` makes a new sequence of the same parts with each call.
    sequences = type(one) is type(other) and isinstance(one, ProbabilisticTensorDictSequential)
    if not sequences or has_own(one, "get_dist"):
        return False
    return [*one.module.children()] == [*other.module.children()]
