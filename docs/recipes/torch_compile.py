"""torch.compile: KLPenaltyLoss and the loss that it is around become one graph."""

import sys
from itertools import pairwise
from statistics import median
from time import perf_counter

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.modules import MLP, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss

from torchrl_kl import AdaptiveKLController, KLPenaltyLoss

BACKEND = sys.argv[1] if len(sys.argv) > 1 else "aot_eager"  # "inductor" needs a C++ compiler
torch.manual_seed(0)
actor = ProbabilisticActor(
    TensorDictModule(MLP(4, 2, num_cells=[64, 64]), ["observation"], ["logits"]),
    in_keys=["logits"],
    distribution_class=torch.distributions.Categorical,
    return_log_prob=True,
)
value = ValueOperator(MLP(4, 1, num_cells=[64, 64]), in_keys=["observation"])
controller = AdaptiveKLController(init_coeff=0.5, target=0.01, horizon=5_000, per="step")
loss = KLPenaltyLoss(actor, controller, loss=ClipPPOLoss(actor, value))
with torch.no_grad():
    for weight in actor.parameters():  # away from the reference
        weight += 0.1 * torch.randn_like(weight)
batch = TensorDict(observation=torch.randn(128, 4), batch_size=(128,))
with torch.no_grad():
    actor(batch)
zeros = torch.zeros(128, 1)
batch["advantage"], batch["value_target"] = torch.randn(2, 128, 1)
batch["next"] = TensorDict(reward=zeros, done=zeros.bool(), batch_size=(128,))
parameters = [weight for weight in loss.parameters() if weight.requires_grad]


def step(function):
    losses = function(batch)
    total = losses["loss_objective"] + losses["loss_critic"] + losses["loss_kl"]
    return [total, *torch.autograd.grad(total, parameters)]


def milliseconds(function):
    times = [perf_counter()]
    for _ in range(50):
        step(function)
        times.append(perf_counter())
    return 1000 * median(end - start for start, end in pairwise(times))


compiled, expected = torch.compile(loss, backend=BACKEND), step(loss)
gap = max((x - y).abs().max() for x, y in zip(step(compiled), expected, strict=True))
print("graphs:", torch._dynamo.utils.counters["stats"]["unique_graphs"])
print(f"loss and gradients at most {gap:.0e} apart")
if BACKEND == "inductor":
    print(f"a step takes {milliseconds(loss):.1f} ms, compiled {milliseconds(compiled):.1f} ms")
