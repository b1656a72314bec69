"""The KL as a term of the loss: the reward is left alone, and the gradient is exact."""

import torch
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector
from torchrl.envs import GymEnv
from torchrl.modules import MLP, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from torchrl_kl import ExponentialKLController, KLPenaltyLoss

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
controller = ExponentialKLController(init_coeff=1.0, target=0.01, gain=0.3, per="step")
loss = KLPenaltyLoss(actor, controller, loss=ClipPPOLoss(actor, value))
gae = GAE(gamma=0.99, lmbda=0.95, value_network=value)
optimizer = torch.optim.Adam(loss.parameters(), lr=1e-3)
collector = Collector(
    env,
    actor,
    frames_per_batch=500,
    total_frames=3000,
    auto_register_policy_transforms=False,
)
for batch in collector:
    loss.update_controller(batch)  # once per batch; the loss itself never moves it
    for _ in range(4):
        gae(batch)
        for minibatch in batch[torch.randperm(len(batch))].split(100):
            losses = loss(minibatch)
            optimizer.zero_grad()
            sum(losses[key] for key in ("loss_objective", "loss_critic", "loss_kl")).backward()
            optimizer.step()
    print(f"exact KL {losses['kl']:.4f} nats per step, coefficient {losses['kl_coeff']:.3f}")
