"""Several agents: a KL for each of them, or one KL for a reward that they share."""

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.data import Categorical, Composite, Unbounded
from torchrl.envs import EnvBase
from torchrl.modules import ProbabilisticActor

from torchrl_kl import KLConstrainedTransform, KLKeys


class Agree(EnvBase):
    """Two agents see random numbers and are rewarded, together and each, for the same action."""

    def __init__(self):
        super().__init__()
        agents = Composite(observation=Unbounded((2, 4)), shape=(2,))
        self.observation_spec = Composite(agents=agents)
        self.action_spec = Composite(agents=Composite(action=Categorical(3, (2,)), shape=(2,)))
        reward = Composite(reward=Unbounded((2, 1)), shape=(2,))
        self.reward_spec = Composite(agents=reward, team_reward=Unbounded((1,)))
        self.done_spec = Composite(done=Categorical(2, (1,), dtype=torch.bool))

    def _reset(self, tensordict):
        return self.observation_spec.rand()

    def _step(self, tensordict):
        first, second = tensordict["agents", "action"]
        reward = (first == second).float().reshape(1)
        out = self.observation_spec.rand()
        out["agents", "reward"] = reward.expand(2, 1).clone()
        return out.update(TensorDict(team_reward=reward, done=torch.rand(1) < 0.1))

    def _set_seed(self, seed):
        torch.manual_seed(seed)


def make_actor():
    return ProbabilisticActor(
        TensorDictModule(nn.Linear(4, 3), [("agents", "observation")], [("agents", "logits")]),
        in_keys={"logits": ("agents", "logits")},
        out_keys=[("agents", "action")],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )


torch.manual_seed(0)
policy, reference = make_actor(), make_actor()
own, shared = KLKeys(reward=("agents", "reward")), KLKeys(reward="team_reward")
each = KLConstrainedTransform(policy, 0.1, reference=reference, keys=own)
team = KLConstrainedTransform(policy, 0.1, reference=reference, keys=shared, sum_agents=True)
collect = {"frames_per_batch": 100, "auto_register_policy_transforms": False}
(batch,) = Collector(Agree(), policy, total_frames=100, **collect)
print("each agent:", tuple(each(batch)["next", "agents", "kl"].shape))
print("the team:  ", tuple(team(batch)["next", "kl"].shape))
