"""An action of two parts, one discrete and one continuous: their KLs are added."""

import gymnasium as gym
import numpy as np
import torch
from tensordict.nn import CompositeDistribution, TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.collectors import Collector
from torchrl.envs import GymWrapper
from torchrl.modules import ProbabilisticActor

from torchrl_kl import KLConstrainedTransform


class Throw(gym.Env):
    """Picks one of three balls and throws it; the reward is high near the observed target."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Dict(ball=gym.spaces.Discrete(3), force=gym.spaces.Box(-9, 9, (2,)))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.target = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        return self.target, {}

    def step(self, action):
        miss = np.square(action["force"] / (1 + action["ball"]) - self.target).sum()
        return self.target, -float(miss), True, False, {}


def heads(out):
    logits, loc, scale = out.split([3, 2, 2], -1)
    return logits, loc, nn.functional.softplus(scale) + 0.1


def make_actor():
    ball, force = ("params", "ball"), ("params", "force")
    params = [(*ball, "logits"), (*force, "loc"), (*force, "scale")]
    parts = {"ball": torch.distributions.Categorical, "force": torch.distributions.Normal}
    linear = TensorDictModule(nn.Linear(2, 7), ["observation"], ["out"])
    return ProbabilisticActor(
        TensorDictSequential(linear, TensorDictModule(heads, ["out"], params)),
        in_keys=["params"],
        out_keys=list(parts),
        distribution_class=CompositeDistribution,
        distribution_kwargs={"distribution_map": parts},
        return_log_prob=True,
    )


torch.manual_seed(0)
policy = make_actor()
stack = KLConstrainedTransform(policy, 0.1, reference=make_actor(), estimator="exact")
env = GymWrapper(Throw(), categorical_action_encoding=True)
env.set_seed(0)
options = {"postproc": stack, "auto_register_policy_transforms": False}
(batch,) = Collector(env, policy, frames_per_batch=500, total_frames=500, **options)
step = batch["next"]
print(f"k1 {step['kl'].mean():.3f}, exact {step['kl_estimate'].mean():.3f} nats per step")
