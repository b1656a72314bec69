"""Training that can be killed at any moment: start it again, and it goes on bit for bit."""

import os
import sys

import torch
from torchrl.collectors import Collector

from torchrl_kl import AdaptiveKLController, KLConstrainedTransform
from torchrl_kl.envs import DigitLanguageEnv
from torchrl_kl.language import GPT, CausalLMActor


def train(file: str, n_batches: int) -> list[float]:
    """Trains up to a number of batches, from the last saved one on; the mean KL of each batch."""
    torch.manual_seed(0)
    policy = CausalLMActor(GPT(vocab_size=11, block_size=8))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    controller = AdaptiveKLController(init_coeff=0.1, target=0.5, horizon=1000)
    stack = KLConstrainedTransform(policy, controller)
    env = DigitLanguageEnv(batch_size=(64,), seed=0)
    collector = Collector(
        env,
        policy,
        frames_per_batch=256,
        total_frames=-1,
        postproc=stack,
        reset_at_each_iter=True,  # a resumed collector begins new episodes, so all batches do
        auto_register_policy_transforms=False,
    )
    # The stack has the reference, the controller and its open sums; env has its random numbers.
    parts = {"policy": policy, "optimizer": optimizer, "stack": stack, "env": env}
    curve: list[float] = []
    if os.path.exists(file):
        saved = torch.load(file, weights_only=True)  # runs no code
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        torch.set_rng_state(saved["random"])
        curve = saved["curve"]
    batches = iter(collector)
    while len(curve) < n_batches:
        batch = next(batches)
        # REINFORCE: each action counts with the penalized rewards that come after it.
        returns = batch["next", "reward"].squeeze(-1).flip(1).cumsum(1).flip(1)
        log_prob = policy.get_dist(batch.select(*policy.in_keys)).log_prob(batch["action"])
        optimizer.zero_grad()
        (-log_prob * (returns - returns.mean())).mean().backward()
        optimizer.step()
        curve.append(batch["next", "kl"].mean().item())
        state = {name: part.state_dict() for name, part in parts.items()}
        torch.save(state | {"random": torch.get_rng_state(), "curve": curve}, f"{file}.new")
        os.replace(f"{file}.new", file)  # in one step: there is always a whole file
    return curve


if __name__ == "__main__":  # python checkpoint_and_resume.py FILE N_BATCHES
    print([round(kl, 4) for kl in train(sys.argv[1], int(sys.argv[2]))])
