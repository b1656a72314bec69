#!/usr/bin/env bash
# torchrl 0.14.1 with torch 2.13.0: PyTorch's FlopCounterMode follows the modules that are called, and
# asks whether their parameters are in a weak dictionary. Those of a loss module are a tensordict of
# parameters, of which a comparison has no truth value: the loss raises a RuntimeError within the
# counter, and only there. The actor alone can be counted.
#
# Seen: actor: 96 operations; ClipPPOLoss: RuntimeError: Converting a tensordict to boolean value is
# not permitted; without the counter it runs
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0
"$folder/venv/bin/pip" install -q torchrl==0.14.1 tensordict==0.14.3
cd "$folder"
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore - <<'PYTHON'
import torch
import torchrl
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import Categorical
from torch.utils.flop_counter import FlopCounterMode
from torchrl.modules import ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss

actor = ProbabilisticActor(
    TensorDictModule(nn.Linear(4, 2), ["observation"], ["logits"]),
    in_keys=["logits"], distribution_class=Categorical, return_log_prob=True,
)
loss = ClipPPOLoss(actor, ValueOperator(nn.Linear(4, 1)))
batch = actor(TensorDict(observation=torch.randn(6, 4), batch_size=6)).detach()
batch["advantage"], batch["value_target"] = torch.randn(6, 1), torch.zeros(6, 1)
loss(batch)  # runs


def count(call):
    try:
        with FlopCounterMode(display=False) as counter:
            call()
    except RuntimeError as error:
        return f"RuntimeError: {error}"
    return f"{counter.get_total_flops()} operations"


found = count(lambda: actor(batch.copy())), count(lambda: loss(batch))
print(f"torchrl {torchrl.__version__}, torch {torch.__version__}: actor: {found[0]}; "
      f"ClipPPOLoss: {found[1]}")
assert found[0] == "96 operations" and "boolean value" in found[1], found
PYTHON
