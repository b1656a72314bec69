"""Pixels: policy and value share a convolutional trunk, which runs once for all losses."""

import gymnasium
import numpy as np
import torch
from torchrl.collectors import Collector
from torchrl.envs import GymWrapper
from torchrl.modules import ActorValueOperator, ConvNet, ProbabilisticActor, SafeModule
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from torchrl_kl import ExponentialKLController, KLPenaltyLoss


class Follow(gymnasium.Env):
    """Five steps, each with a reward of 1 if the paddle is below the falling ball."""

    observation_space = gymnasium.spaces.Box(0, 1, (1, 6, 6), np.float32)
    action_space = gymnasium.spaces.Discrete(3)  # left, stay, right

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.row, (self.ball, self.paddle) = -1, self.np_random.integers(6, size=2)
        return self.step(1)[0], {}

    def step(self, action):
        self.row, self.paddle = self.row + 1, np.clip(self.paddle + action - 1, 0, 5)
        picture = np.zeros((1, 6, 6), np.float32)
        picture[0, self.row, self.ball] = picture[0, 5, self.paddle] = 1
        return picture, float(self.ball == self.paddle), self.row == 5, False, {}


torch.manual_seed(0)
trunk = SafeModule(ConvNet(1, num_cells=[8, 16], kernel_sizes=3), ["observation"], ["hidden"])
options = {"distribution_class": torch.distributions.Categorical, "return_log_prob": True}
logits = SafeModule(torch.nn.Linear(64, 3), ["hidden"], ["logits"])
value = SafeModule(torch.nn.Linear(64, 1), ["hidden"], ["state_value"])
both = ActorValueOperator(trunk, ProbabilisticActor(logits, ["logits"], **options), value)
actor = both.get_policy_operator()  # trunk and policy head; the reference is a copy of both
controller = ExponentialKLController(0.2, target=0.2, gain=0.2, per="step")
loss = KLPenaltyLoss(actor, controller, loss=ClipPPOLoss(actor, both.get_value_head()))
gae = GAE(gamma=0.99, lmbda=0.95, value_network=both.get_value_operator())
optimizer, passes = torch.optim.Adam(loss.parameters(), lr=4e-3), []
env = GymWrapper(Follow(), categorical_action_encoding=True)
env.set_seed(0)
for batch in Collector(env, actor, frames_per_batch=1000, total_frames=8000):
    loss.update_controller(batch)
    gae(batch)
    for index in torch.randint(1000, (32, 125)):
        losses = loss(batch[index])
        optimizer.zero_grad()
        sum(losses[key] for key in ("loss_objective", "loss_critic", "loss_kl")).backward()
        optimizer.step()
    reward, kl = batch["next", "reward"].mean(), losses["kl"]
    print(f"reward {reward:.2f}, KL {kl:.3f}, coefficient {controller.coeff:.2f}")
trunk.register_forward_hook(lambda *_: passes.append("trunk"))
loss(batch)
print("passes of the trunk:", len(passes))
print("reference weights that learn:", len({*loss.parameters()} & {*loss.reference.parameters()}))
