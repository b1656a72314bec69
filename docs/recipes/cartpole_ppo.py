"""PPO on CartPole, with the KL to a frozen reference held at 0.01 nats per step."""

import torch
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector
from torchrl.envs import GymEnv
from torchrl.modules import MLP, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from torchrl_kl import AdaptiveKLController, KLConstrainedTransform

torch.manual_seed(0)
env = GymEnv("CartPole-v1", categorical_action_encoding=True)
env.set_seed(0)
actor = ProbabilisticActor(  # in practice, load the weights of a trained policy here
    TensorDictModule(MLP(4, 2, num_cells=[64, 64]), ["observation"], ["logits"]),
    in_keys=["logits"],
    distribution_class=torch.distributions.Categorical,
    return_log_prob=True,
)
value = ValueOperator(MLP(4, 1, num_cells=[64, 64]), in_keys=["observation"])
loss, gae = ClipPPOLoss(actor, value), GAE(gamma=0.99, lmbda=0.95, value_network=value)
optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3)

# The stack freezes its own copy of the actor: the reference.
controller = AdaptiveKLController(init_coeff=1.0, target=0.01, horizon=5_000, per="step")
stack = KLConstrainedTransform(actor, controller)
collector = Collector(
    env,
    actor,
    frames_per_batch=500,
    total_frames=3000,
    postproc=stack,  # penalizes the rewards of every batch, and moves the coefficient
    auto_register_policy_transforms=False,
)
for batch in collector:
    for _ in range(4):
        gae(batch)  # after the stack: advantages of the penalized reward
        for minibatch in batch[torch.randperm(len(batch))].split(100):
            losses = loss(minibatch)
            optimizer.zero_grad()
            (losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]).backward()
            optimizer.step()
    kl, coeff = batch["next", "kl"].mean(), batch["next", "kl_coeff"].mean()
    print(f"KL {kl:+.4f} nats per step, coefficient {coeff:.3f}")
