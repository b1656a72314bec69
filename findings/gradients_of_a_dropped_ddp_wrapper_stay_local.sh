#!/usr/bin/env bash
# torch 2.13.0: DistributedDataParallel averages gradients over the ranks in hooks of an object that
# the wrapper owns. If the wrapper is dropped between the forward and the backward pass, as in
# `DistributedDataParallel(model)(x).sum().backward()`, the gradients are computed, but each rank keeps
# its own, without a word. With the wrapper in a variable they are averaged.
#
# Seen: two ranks with inputs of 1 and 2: wrapper kept: 1.5 on both; dropped: 1.0 and 2.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy
cd "$folder"
cat > ranks.py <<'PYTHON'
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing import spawn
from torch.nn.parallel import DistributedDataParallel


def gradient(x, keep):
    model = nn.Linear(1, 1, bias=False)
    if keep:
        wrapper = DistributedDataParallel(model)
        wrapper(x).sum().backward()
    else:
        DistributedDataParallel(model)(x).sum().backward()
    return model.weight.grad.item()


def work(rank):
    store = f"file://{os.getcwd()}/store"
    options = {"rank": rank, "world_size": 2, "timeout": timedelta(seconds=60)}
    dist.init_process_group("gloo", init_method=store, **options)
    x = torch.full((1, 1), rank + 1.0)
    own = torch.tensor([gradient(x, True), gradient(x, False)])
    both = [torch.zeros(2) for _ in range(2)]
    dist.all_gather(both, own)
    dist.destroy_process_group()
    if rank == 0:
        kept, dropped = torch.stack(both, 1).tolist()
        print(f"torch {torch.__version__}: wrapper kept: {kept}; dropped: {dropped}")
        assert (kept, dropped) == ([1.5, 1.5], [1.0, 2.0]), (kept, dropped)


if __name__ == "__main__":
    spawn(work, nprocs=2)
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore ranks.py
