"""Controllers and batches for the tests of the monitor."""

from typing import Any

import torch
from tensordict import TensorDict

from torchrl_kl import ExponentialKLController
from torchrl_kl.monitor import KLMessage


def per_step(target: float = 0.5, **kwargs) -> ExponentialKLController:
    return ExponentialKLController(1.0, target, per="step", **kwargs)


def steps(*kl: float, **entries) -> Any:
    """A batch of steps in no order, float64: every mean of these numbers is exact."""
    kl_tensor = torch.tensor(kl, dtype=torch.float64).unsqueeze(-1)
    entries = {name: torch.tensor(value).unsqueeze(-1) for name, value in entries.items()}
    return TensorDict(
        next=TensorDict({"kl": kl_tensor, **entries}, batch_size=len(kl)), batch_size=len(kl)
    )


def names(messages: list[KLMessage]) -> list[str]:
    return [message.condition for message in messages]
