"""Offline fine-tuning: weighted regression on logged steps, with the KL in the loss."""

import torch
from tensordict.nn import TensorDictModule
from torchrl.envs import GymEnv
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import MLP, ProbabilisticActor
from torchrl.objectives.value.functional import reward2go

from torchrl_kl import ExponentialKLController, KLPenaltyLoss


def make_actor():
    return ProbabilisticActor(
        TensorDictModule(MLP(4, 2, num_cells=[64]), ["observation"], ["logits"]),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
    )


torch.manual_seed(0)
env = GymEnv("CartPole-v1", categorical_action_encoding=True)
env.set_seed(0)
policy, logger = make_actor(), make_actor()  # in practice: a pretrained policy, and a log
with set_exploration_type(ExplorationType.RANDOM), torch.no_grad():
    log = env.rollout(2000, logger, break_when_any_done=False)
returns = reward2go(log["next", "reward"], log["next", "done"], gamma=0.95)
log["weight"] = ((returns - returns.mean()) / returns.std()).exp().clamp(max=10.0)

# The exact KL of the two distributions at the logged states: it reads no action and no log-prob.
controller = ExponentialKLController(1.0, target=0.05, gain=0.2, per="step")
penalty = KLPenaltyLoss(policy, controller)
optimizer = torch.optim.Adam(policy.parameters(), lr=2e-3)
for epoch in range(20):
    penalty.update_controller(log)
    for minibatch in log[torch.randperm(len(log))].split(200):
        log_prob = policy.get_dist(minibatch.copy()).log_prob(minibatch["action"])
        losses = penalty(minibatch)
        optimizer.zero_grad()
        (losses["loss_kl"] - (minibatch["weight"].squeeze(-1) * log_prob).mean()).backward()
        optimizer.step()
    if epoch % 5 == 4:
        print(f"KL {losses['kl']:.4f} nats per step, coefficient {controller.coeff:.3f}")
