#!/usr/bin/env bash
# torchrl 0.14.1 with FSDP2 of torch 2.13.0: `fully_shard` leaves the weights of the root gathered
# after a forward without gradients, until the next backward. A loss module that is built in that time
# takes the gathered tensors as its parameters. An optimizer over `loss.parameters()` then updates
# tensors that the network gives up: the root's own layers are not trained, without a word. A loss
# that is built before the first forward, or after `network.reshard()`, has sharded parameters alone.
#
# Seen: built before a forward: 4 of 4 actor parameters are DTensors; after it: 2 of 4; change of the
# weights by one step of SGD: 0.09, 0.09 (sharded layer), 0.0, 0.0 (layer of the root)
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
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributions import Categorical
from torchrl.modules import ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss

dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store", rank=0, world_size=1)
torch.manual_seed(0)
network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
fully_shard(network[0])
fully_shard(network)
actor = ProbabilisticActor(
    TensorDictModule(network, ["observation"], ["logits"]),
    in_keys=["logits"], distribution_class=Categorical, return_log_prob=True,
)
critic = ValueOperator(nn.Linear(4, 1))


def n_sharded(loss):
    of_actor = [weight for name, weight in loss.named_parameters() if "actor" in name]
    return sum(type(weight).__name__ == "DTensor" for weight in of_actor), len(of_actor)


def weights():
    network.reshard()
    return [weight.full_tensor().clone() for weight in network.parameters()]


first = n_sharded(ClipPPOLoss(actor, critic))
before = weights()
with torch.no_grad():
    batch = actor(TensorDict(observation=torch.randn(6, 4), batch_size=6))
batch["advantage"], batch["value_target"] = torch.randn(6, 1), torch.zeros(6, 1)
loss = ClipPPOLoss(actor, critic)
second = n_sharded(loss)
optimizer = torch.optim.SGD(loss.parameters(), 1.0)
loss(batch)["loss_objective"].backward()
optimizer.step()
moved = [(a - b).abs().max().item() for a, b in zip(before, weights(), strict=True)]
dist.destroy_process_group()
print(f"torchrl {torchrl.__version__}, torch {torch.__version__}: built before a forward: {first} "
      f"DTensors; after it: {second}; change of the weights: {[round(x, 2) for x in moved]}")
assert first == (4, 4) and second == (2, 4), (first, second)
assert min(moved[:2]) > 0 and moved[2:] == [0, 0], moved
PYTHON
