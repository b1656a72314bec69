"""Numbers of which the distributions in tests/functional are made."""

import torch


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def loc_and_scale(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    return randn(*shape), 0.5 + torch.rand(*shape, dtype=torch.float64)
