"""Cases of four ranks: batches of other sizes on each of them, and the union of all in one."""

import random
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict

from tests.helpers import SpyController
from torchrl_kl import (
    AdaptiveKLController,
    ExponentialKLController,
    PIDKLController,
    PlannedKLController,
    RewardAdjustmentTransform,
)

N_RANKS, N_BATCHES = 4, 12
PLAN_SIZES, PLAN_BATCHES = [0, 3, 20, 7], {"trajectory": 1, "step": 9}  # 256 steps make a plan
RULES: dict[str, Any] = {
    "adaptive": lambda: AdaptiveKLController(1.0, target=0.5, horizon=100),
    "exponential": lambda: ExponentialKLController(1.0, target=0.5),
    "pid": lambda: PIDKLController(1.0, target=0.5),
    "spy": lambda: SpyController(1.0, step=0.1),
}


def batch_of(kl: torch.Tensor, reward: torch.Tensor, start: torch.Tensor) -> Any:
    """Trajectories of one step, with a column of padding; of nothing but padding if N is 0."""
    n = len(kl)
    columns = {"kl": kl, "reward": reward, "observation": start}
    shape = (max(n, 1), 2, 1)
    entries = {name: torch.zeros(shape, dtype=torch.float64) for name in columns}
    for name, values in columns.items():
        entries[name][:n, 0, 0] = values
    mask = torch.zeros(shape[:2], dtype=torch.bool)
    mask[:n, 0] = True
    done = mask.unsqueeze(-1)
    step = TensorDict({**entries, "done": done, "terminated": done}, batch_size=shape[:2])
    batch = TensorDict(
        {"observation": entries["observation"], "next": step, ("collector", "mask"): mask},
        batch_size=shape[:2],
    )
    batch.names = [None, "time"]
    return batch


def sizes() -> list[list[int]]:
    """Of each batch on each rank: 0 to 7 values; nothing on the last rank, nor in batch 4."""
    rng = random.Random(0)
    found = [[*(rng.randint(0, 7) for _ in range(N_RANKS - 1)), 0] for _ in range(N_BATCHES)]
    found[4] = [0] * N_RANKS
    return found


def values(n_batch: int) -> list[torch.Tensor]:
    """The KL of each trajectory of a batch, on each rank."""
    generator = torch.Generator().manual_seed(n_batch)
    drawn = [torch.randn(n, generator=generator, dtype=torch.float64) for n in sizes()[n_batch]]
    return [0.5 + each for each in drawn]


def feed(group: Any, kls: list[torch.Tensor], kind: str, update_every: int | None) -> Any:
    """The state after each batch, of a controller that is fed the KL of batches."""
    controller, states = RULES[kind](), []
    controller.group = group
    transform = RewardAdjustmentTransform(controller, update_every=update_every)
    for kl in kls:
        transform(batch_of(kl, torch.zeros_like(kl), torch.zeros_like(kl)))
        numbers = [*controller.state_dict().values(), *transform.statistics.state_dict().values()]
        states.append([number.item() for number in numbers])
    return states, getattr(controller, "calls", [])


def pools(rank: int, folder: Path) -> Any:
    kls = [values(n)[rank] for n in range(N_BATCHES)]
    return {
        (kind, every): feed(dist.group.WORLD, kls, kind, every)
        for kind in RULES
        for every in (None, 10)
    }


def plan_samples(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rewards, log-ratios and states of two kinds, in which trajectories begin on all ranks."""
    generator = torch.Generator().manual_seed(rank)
    n = PLAN_SIZES[rank]
    start = 1 + torch.arange(n, dtype=torch.float64) % 2
    reward = rank + 3 * start + torch.randn(n, generator=generator, dtype=torch.float64)
    return reward, 0.1 * torch.randn(n, generator=generator, dtype=torch.float64), start


def plans(rank: int, folder: Path) -> Any:
    reward, log_ratio, start = plan_samples(rank)
    found = {}
    for per in ("trajectory", "step"):
        controller = PlannedKLController(0.1, per=per)
        controller.group = dist.group.WORLD
        for _ in range(PLAN_BATCHES[per]):
            RewardAdjustmentTransform(controller)(batch_of(log_ratio, reward, start))
        found[per] = {name: value.item() for name, value in controller.named_buffers()}
    return found
