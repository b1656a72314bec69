"""A robot's policy that writes its action as tokens, one for each joint, as VLA models do."""

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import Categorical, Independent
from torchrl.collectors import Collector
from torchrl.data import Binary, Composite, MultiCategorical, Unbounded
from torchrl.envs import EnvBase
from torchrl.modules import MLP, ProbabilisticActor

from torchrl_kl import ExponentialKLController, KLConstrainedTransform

JOINTS, BINS = 3, 16


class Reach(EnvBase):
    """Each joint is told its place; the reward falls with the distance. Tokens become torques."""

    def __init__(self):
        super().__init__()
        self.observation_spec = Composite(observation=Unbounded((JOINTS,)))
        self.action_spec = MultiCategorical([BINS] * JOINTS)
        self.reward_spec = Unbounded((1,))
        self.done_spec = Composite(done=Binary(1, dtype=torch.bool))

    def _reset(self, tensordict):
        self.goal = torch.rand(JOINTS) * 2 - 1
        return TensorDict(observation=self.goal)

    def _step(self, tensordict):
        torque = (tensordict["action"] + 0.5) * 2 / BINS - 1  # the centre of each bin
        reward = -(torque - self.goal).abs().mean(-1, keepdim=True)
        return TensorDict(observation=self.goal, reward=reward, done=torch.rand(1) < 0.1)

    _set_seed = torch.manual_seed


torch.manual_seed(0)
net = nn.Sequential(MLP(JOINTS, JOINTS * BINS, num_cells=[64]), nn.Unflatten(-1, (JOINTS, BINS)))
actor = ProbabilisticActor(
    TensorDictModule(net, ["observation"], ["logits"]),  # (*B, JOINTS, BINS)
    in_keys=["logits"],
    distribution_class=lambda logits: Independent(Categorical(logits=logits), 1),
    return_log_prob=True,
)
controller = ExponentialKLController(0.05, target=0.3, per="step", gain=0.2)
stack = KLConstrainedTransform(actor, controller, estimator="exact")
optimizer = torch.optim.Adam(actor.parameters(), lr=3e-3)
options = {"frames_per_batch": 400, "total_frames": 8000, "auto_register_policy_transforms": False}
for n, batch in enumerate(Collector(Reach(), actor, postproc=stack, **options)):
    gain = batch["next", "reward"] - batch["next", "reward"].mean()
    optimizer.zero_grad()
    (-gain.squeeze(-1) * actor.log_prob(batch.copy())).mean().backward()
    optimizer.step()
    if n % 5 == 4:
        reward, kl = (batch["next", key].mean() for key in ("task_reward", "kl_estimate"))
        print(f"reward {reward:.2f}, KL {kl:.3f} nats per action, beta {controller.coeff:.3f}")
