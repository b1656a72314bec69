"""Two references with a coefficient each: a second stack under names of its own."""

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.envs import Compose
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import ProbabilisticActor

from torchrl_kl import KLConstrainedTransform, KLKeys

REWARDS = torch.tensor([0.0, 0.5, 1.0, 0.2])  # of four actions


def make_actor():
    return ProbabilisticActor(
        TensorDictModule(nn.Linear(1, 4), ["observation"], ["logits"]),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )


def log_probs(actor):
    one = TensorDict(observation=torch.ones(1, 1), batch_size=1)
    return actor.get_dist(one).logits[0].detach()


torch.manual_seed(0)
policy, first, second = make_actor(), make_actor(), make_actor()
c1, c2 = 0.3, 0.5
stacks = Compose(
    KLConstrainedTransform(policy, c1, reference=first),
    KLConstrainedTransform(policy, c2, reference=second, keys=KLKeys.named("second")),
)
optimizer = torch.optim.Adam(policy.parameters(), lr=0.03)
for _ in range(400):
    batch = TensorDict(observation=torch.ones(512, 1), batch_size=512)
    with set_exploration_type(ExplorationType.RANDOM), torch.no_grad():
        policy(batch)
    batch["next"] = TensorDict(reward=REWARDS[batch["action"]].unsqueeze(-1), batch_size=512)
    batch = stacks(batch)  # reward - c1 * kl - c2 * second_kl
    advantage = batch["next", "reward"] - batch["next", "reward"].mean()
    optimizer.zero_grad()
    (-advantage.squeeze(-1) * policy.log_prob(batch.copy())).mean().backward()
    optimizer.step()
c = c1 + c2
optimum = (c1 / c * log_probs(first) + c2 / c * log_probs(second) + REWARDS / c).softmax(-1)
for name, p in (("policy", log_probs(policy).exp()), ("optimum", optimum)):
    print(f"{name:8}" + " ".join(f"{value:.2f}" for value in p))
kl, second_kl = (batch["next", key].mean() for key in ("kl", "second_kl"))
print(f"KL {kl:.2f} to the first reference, {second_kl:.2f} to the second, nats")
