"""A2C, one update per batch, with a constant coefficient."""

import torch
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector
from torchrl.envs import GymEnv
from torchrl.modules import MLP, ProbabilisticActor, ValueOperator
from torchrl.objectives import A2CLoss
from torchrl.objectives.value import GAE

from torchrl_kl import KLConstrainedTransform

torch.manual_seed(0)
env = GymEnv("CartPole-v1", categorical_action_encoding=True)
env.set_seed(0)
actor = ProbabilisticActor(
    TensorDictModule(MLP(4, 2, num_cells=[64, 64]), ["observation"], ["logits"]),
    in_keys=["logits"],
    distribution_class=torch.distributions.Categorical,
    return_log_prob=True,  # A2C does not need it, the stack does
)
value = ValueOperator(MLP(4, 1, num_cells=[64, 64]), in_keys=["observation"])
loss, gae = A2CLoss(actor, value), GAE(gamma=0.99, lmbda=1.0, value_network=value)
optimizer = torch.optim.Adam(loss.parameters(), lr=3e-3)

stack = KLConstrainedTransform(actor, 0.5)  # a number is a constant coefficient
collector = Collector(
    env,
    actor,
    frames_per_batch=200,
    total_frames=1200,
    postproc=stack,
    auto_register_policy_transforms=False,
)
for batch in collector:
    gae(batch)
    losses = loss(batch)
    optimizer.zero_grad()
    (losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]).backward()
    optimizer.step()
    task, penalized = batch["next", "task_reward"].mean(), batch["next", "reward"].mean()
    print(f"task reward {task:.3f}, penalized {penalized:.4f} per step")
