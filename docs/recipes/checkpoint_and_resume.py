"""Training that can be stopped at any moment: start it again, and it goes on bit for bit.

Everything that changes is a part of the checkpoint. All objects are built before it is loaded, by
the same code in a new run and in a resumed one; the reference then comes from the checkpoint.
"""

import sys
from typing import Any

import torch
from torchrl.checkpoint import CheckpointRotation, GlobalRNGState
from torchrl.collectors import Collector

from torchrl_kl import (
    GPT,
    AdaptiveKLController,
    CausalLMActor,
    KLConstrainedTransform,
    RunCheckpoint,
)
from torchrl_kl.envs import DigitLanguageEnv


def train(folder: str, n_batches: int = 20) -> list[float]:
    """Trains up to a number of batches, from the last checkpoint on; the mean KL of each batch."""
    torch.manual_seed(0)
    policy = CausalLMActor(GPT(vocab_size=11, block_size=8))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    controller = AdaptiveKLController(init_coeff=0.1, target=0.5, horizon=1000)
    stack = KLConstrainedTransform(policy, controller)
    env = DigitLanguageEnv(batch_size=(64,), seed=0)
    # A resumed collector begins new episodes, so here each batch begins new ones anyway.
    options: dict[str, Any] = {"reset_at_each_iter": True, "auto_register_policy_transforms": False}
    collector = Collector(
        env, policy, frames_per_batch=256, total_frames=-1, postproc=stack, **options
    )
    curve: list[float] = []
    # The stack has the controller, what it was fed, and the reference; env has its random numbers.
    parts = {"policy": policy, "optimizer": optimizer, "stack": stack, "env": env}
    checkpoint = RunCheckpoint(**parts, random=GlobalRNGState(), curve=curve)
    rotation = CheckpointRotation(folder, keep_last=2)
    if rotation.latest() is not None:
        rotation.load_latest(checkpoint)
    batches = iter(collector)
    while len(curve) < n_batches:
        batch = next(batches)
        # REINFORCE: each action counts with the penalised rewards that come after it.
        returns = batch["next", "reward"].squeeze(-1).flip(1).cumsum(1).flip(1)
        log_prob = policy.get_dist(batch.select(*policy.in_keys)).log_prob(batch["action"])
        optimizer.zero_grad()
        (-log_prob * (returns - returns.mean())).mean().backward()
        optimizer.step()
        curve.append(batch["next", "kl"].mean().item())
        rotation.save(checkpoint, step=len(curve))
    return curve


if __name__ == "__main__":
    print([round(kl, 4) for kl in train(sys.argv[1])])
