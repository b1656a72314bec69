#!/usr/bin/env bash
# torchrl 0.14.1 with FSDP2 of torch 2.13.0: `fully_shard` cannot be called on a loss module, as
# `DistributedDataParallel` can. It asks `named_parameters(remove_duplicate=False)`, an argument of
# `nn.Module`, which LossModule's own method does not take. Its actor network can be sharded.
#
# Seen: ClipPPOLoss: TypeError: LossModule.named_parameters() got an unexpected keyword argument
# 'remove_duplicate'; actor network: sharded
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0
"$folder/venv/bin/pip" install -q torchrl==0.14.1 tensordict==0.14.3
cd "$folder"
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore - <<'PYTHON'
import os

import torch
import torch.distributed as dist
import torchrl
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributions import Categorical
from torchrl.modules import ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss

dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store", rank=0, world_size=1)


def make():
    network = nn.Linear(4, 2)
    actor = ProbabilisticActor(
        TensorDictModule(network, ["observation"], ["logits"]),
        in_keys=["logits"], distribution_class=Categorical,
    )
    return network, ClipPPOLoss(actor, ValueOperator(nn.Linear(4, 1)), functional=False)


def shard(module):
    try:
        fully_shard(module)
    except TypeError as error:
        return f"TypeError: {error}"
    return "sharded" if type(next(module.parameters())).__name__ == "DTensor" else "not sharded"


found = shard(make()[1]), shard(make()[0])
dist.destroy_process_group()
print(f"torchrl {torchrl.__version__}, torch {torch.__version__}: ClipPPOLoss: {found[0]}; "
      f"actor network: {found[1]}")
assert found[0].startswith("TypeError") and "remove_duplicate" in found[0], found
assert found[1] == "sharded", found
PYTHON
