"""Illegal actions: policy and reference get the same mask, and the KL is that of legal actions."""

import gymnasium as gym
import numpy as np
import torch
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector
from torchrl.envs import DTypeCastTransform, GymWrapper, TransformedEnv
from torchrl.modules import MLP, MaskedCategorical, ProbabilisticActor

from torchrl_kl import KLConstrainedTransform


class Corridor(gym.Env):
    """Three actions: left, right, stay. A step into a wall is illegal."""

    action_space = gym.spaces.Discrete(3)
    observation_space = gym.spaces.Dict(
        observation=gym.spaces.Box(0, 1, (5,), np.float32), mask=gym.spaces.MultiBinary(3)
    )

    def look(self):
        legal = np.array([self.place > 0, self.place < 4, True], dtype=np.int8)
        return {"observation": np.eye(5, dtype=np.float32)[self.place], "mask": legal}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = 0
        return self.look(), {}

    def step(self, action):
        self.place += (-1, 1, 0)[action]
        return self.look(), float(self.place == 4), self.place == 4, False, {}


def make_actor():
    return ProbabilisticActor(
        TensorDictModule(MLP(5, 3, num_cells=[32]), ["observation"], ["logits"]),
        in_keys={"logits": "logits", "mask": "mask"},
        distribution_class=MaskedCategorical,
        return_log_prob=True,
    )


torch.manual_seed(0)
policy, reference = make_actor(), make_actor()
stack = KLConstrainedTransform(policy, 0.1, reference=reference, estimator="exact")
env = GymWrapper(Corridor(), categorical_action_encoding=True)
collector = Collector(
    TransformedEnv(env, DTypeCastTransform(torch.int8, torch.bool, in_keys=["mask"])),
    policy,
    frames_per_batch=200,
    total_frames=200,
    postproc=stack,
    auto_register_policy_transforms=False,
)
for batch in collector:
    step = batch["next"]
    print(f"k1 {step['kl'].mean():.3f}, exact {step['kl_estimate'].mean():.3f} nats per step")
