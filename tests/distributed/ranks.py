"""Runs cases on several ranks at once, in processes of one group, and returns what each found."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

Case = Callable[[int, Path], Any]  # of its rank, and of a folder that all ranks share
SECONDS = 60  # a rank that waits longer for the others fails


def on_ranks(cases: Sequence[Case], n_ranks: int, folder: Path) -> dict[str, list[Any]]:
    """What each case returns on each rank, by the name of the case."""
    spawn(_run, (n_ranks, cases, folder), nprocs=n_ranks)  # raises what a rank has raised
    found = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(n_ranks)]
    return {name: [each[name] for each in found] for name in found[0]}


def _run(rank: int, n_ranks: int, cases: Sequence[Case], folder: Path) -> None:
    torch.set_num_threads(1)
    limit, store = timedelta(seconds=SECONDS), f"file://{folder}/store"
    dist.init_process_group("gloo", store, limit, world_size=n_ranks, rank=rank)
    found = {}
    for case in cases:
        torch.manual_seed(rank)
        found[case.__name__] = case(rank, folder)
    torch.save(found, folder / f"{rank}.pt")
    dist.barrier()  # before one of them leaves
    dist.destroy_process_group()


def n_collectives() -> int:
    """How many collectives this rank has begun so far."""
    return dist.group.WORLD._get_sequence_number_for_group()  # type: ignore[union-attr]
