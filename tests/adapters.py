"""Policies with a low-rank adapter, as in LoRA training: a frozen base and a switch."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torch.distributions import Categorical
from torchrl.envs import InitTracker, Transform
from torchrl.modules import LSTMModule

from tests.helpers import N_ACTIONS, N_OBS, probabilistic_actor, sequence, sharp


class Adapted(nn.Module):
    """A frozen linear layer plus a trainable product of two narrow ones, with dropout."""

    def __init__(self, n_in: int, n_out: int):
        super().__init__()
        self.base = nn.Linear(n_in, n_out).requires_grad_(False)
        self.down, self.up = nn.Linear(n_in, 2, bias=False), nn.Linear(2, n_out, bias=False)
        self.dropout = nn.Dropout(0.5)
        self.enabled = True

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(self.dropout(x))
        return y + self.up(self.down(x)) if self.enabled else y

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """The base alone, for as long as the context lasts."""
        self.enabled = False
        try:
            yield
        finally:
            self.enabled = True


def adapted_actor(kind: str = "categorical", **kwargs) -> tuple[Any, Adapted]:
    """An actor for WalkEnv with its adapter, which in an "lstm" changes what the memory sees."""
    if kind == "lstm":
        layer = Adapted(N_OBS, N_OBS)
        core = LSTMModule(
            input_size=N_OBS,
            hidden_size=8,
            in_keys=["seen", "h", "c"],
            out_keys=["features", ("next", "h"), ("next", "c")],
        )
        head = TensorDictModule(nn.Linear(8, N_ACTIONS), ["features"], ["logits"])
        net = sequence(TensorDictModule(layer, ["observation"], ["seen"]), core, head)
    else:
        layer = Adapted(N_OBS, N_ACTIONS)
        net = TensorDictModule(layer, ["observation"], ["logits"])
    kwargs = {"return_log_prob": True} | kwargs
    actor = probabilistic_actor(net, in_keys=["logits"], distribution_class=Categorical, **kwargs)
    return sharp(actor).eval(), layer


def base_of(actor: Any, layer: Adapted) -> Any:
    """A copy of the actor whose adapter is always off."""
    with torch.no_grad(), layer.disable_adapter():
        return copy.deepcopy(actor)


def memory_of_adapted(actor: Any) -> list[Transform]:
    return [InitTracker(), actor[0][1].make_tensordict_primer()]
