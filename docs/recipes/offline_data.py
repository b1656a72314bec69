"""Logged data: who drew the actions decides what the recorded log-prob measures."""

import torch
from tensordict.nn import TensorDictModule
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import GymEnv
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import MLP, ProbabilisticActor

from torchrl_kl import KLConstrainedTransform, ReferenceModelLogProbTransform
from torchrl_kl.functional import kl_exact


def make_actor():
    return ProbabilisticActor(
        TensorDictModule(MLP(4, 2, num_cells=[64]), ["observation"], ["logits"]),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )


torch.manual_seed(0)
env = GymEnv("CartPole-v1", categorical_action_encoding=True)
env.set_seed(0)
logger, policy, reference = make_actor(), make_actor(), make_actor()
with set_exploration_type(ExplorationType.RANDOM):
    logged = env.rollout(400, logger, break_when_any_done=False).detach()
buffer = ReplayBuffer(storage=LazyTensorStorage(400), batch_size=100)
buffer.extend(logged)

# 1. The log holds log-probs: k1 is the KL of the policy that logged, and not of yours.
stack = KLConstrainedTransform(logger, 0.1, reference=reference)
print(f"logging policy, k1    {stack(logged)['next', 'kl'].mean():.3f} nats per step")

# 2. The KL of your policy at the logged states needs distributions and no actions.
sample = buffer.sample()
with torch.no_grad():
    own, other = policy.get_dist(sample.copy()), reference.get_dist(sample.copy())
print(f"your policy, exact    {kl_exact(own, other).mean():.3f} nats per step")

# 3. The log-probs were not recorded: a model of the logger is asked for them.
sample = buffer.sample().exclude("action_log_prob", "logits")
with torch.no_grad():
    sample["action_log_prob"] = logger.get_dist(sample.copy()).log_prob(sample["action"])
scored = ReferenceModelLogProbTransform(logger, reference=reference)(sample)
print(f"reference's log-prob {scored['next', 'ref_log_prob'].mean():.3f} nats per action")
