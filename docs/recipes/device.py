"""The policy on one device, the reference on another or in half precision."""

import torch
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector
from torchrl.envs import GymEnv
from torchrl.modules import MLP, ProbabilisticActor

from torchrl_kl import AdaptiveKLController, FrozenActor, KLConstrainedTransform

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
actor = ProbabilisticActor(
    TensorDictModule(MLP(4, 2, num_cells=[256, 256]), ["observation"], ["logits"]),
    in_keys=["logits"],
    distribution_class=torch.distributions.Categorical,
    return_log_prob=True,
).to(device)
controller = AdaptiveKLController(init_coeff=0.1, target=0.01, horizon=10_000, per="step")
# The reference is made on the device of the actor, and moves with the stack.
stack = KLConstrainedTransform(actor, controller).to(device)
# Half the memory; log-probs are then off by up to about 1e-2 nats.
half = KLConstrainedTransform(actor, 0.0, reference=FrozenActor(actor).to(torch.bfloat16))
collector = Collector(
    GymEnv("CartPole-v1", categorical_action_encoding=True),
    actor,
    frames_per_batch=500,
    total_frames=1000,
    policy_device=device,
    storing_device=device,  # where the batch is, and where the stack scores it
    auto_register_policy_transforms=False,
)
for batch in collector:
    full_kl, half_kl = stack(batch)["next", "kl"], half(batch)["next", "kl"]
    gap = (full_kl - half_kl).abs().max()
    print(f"KL at most {full_kl.abs().max():.0e} nats, in bfloat16 {gap:.0e} apart")
print("the controller's state is always", controller.coeff.dtype)
