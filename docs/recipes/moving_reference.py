"""A reference that follows the policy: a slow average, or a copy every few batches."""

import torch
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector
from torchrl.envs import GymEnv
from torchrl.modules import MLP, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from torchrl_kl import KLConstrainedTransform


def train(update_reference):
    torch.manual_seed(0)
    env = GymEnv("CartPole-v1", categorical_action_encoding=True)
    env.set_seed(0)
    actor = ProbabilisticActor(
        TensorDictModule(MLP(4, 2, num_cells=[64, 64]), ["observation"], ["logits"]),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )
    value = ValueOperator(MLP(4, 1, num_cells=[64, 64]), in_keys=["observation"])
    loss, gae = ClipPPOLoss(actor, value), GAE(gamma=0.99, lmbda=0.95, value_network=value)
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3)
    stack = KLConstrainedTransform(actor, 0.1)
    collector = Collector(
        env,
        actor,
        frames_per_batch=500,
        total_frames=3000,
        postproc=stack,
        auto_register_policy_transforms=False,
    )
    for n, batch in enumerate(collector):
        for _ in range(4):
            gae(batch)
            losses = loss(batch)
            optimizer.zero_grad()
            (losses["loss_objective"] + losses["loss_critic"]).backward()
            optimizer.step()
        update_reference(stack, actor, n)
    return batch["next", "kl"].mean()


def every_third_batch(stack, actor, n):
    if n % 3 == 2:
        stack.update_reference(actor)  # a copy: the KL begins again at 0


print(f"fixed    {train(lambda stack, actor, n: None):+.4f} nats per step")
print(f"average  {train(lambda stack, actor, n: stack.update_reference(actor, tau=0.3)):+.4f}")
print(f"copy     {train(every_third_batch):+.4f}")
