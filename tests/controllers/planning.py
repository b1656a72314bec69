"""Trajectories and texts with rewards, for controllers that plan from them."""

from typing import Any

import torch
from tensordict import TensorDict
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_kl import PIDKLController
from torchrl_kl.envs import DigitLanguageEnv

# Solved to a relative 1e-9; the rewards are sums of float32 numbers without rounding.
SAME: dict[str, Any] = {"rel": 1e-8}


def reward_of(texts):
    """Whether the first digit of a response (N, 9) is even, plus how large the second one is."""
    return (texts[:, 5] % 2 == 0).float() + texts[:, 6] / 16


def collect(actor, n: int, prompts=None, seed: int = 0):
    """Responses (n, 4), time last."""
    torch.manual_seed(seed)
    env = DigitLanguageEnv(reward_fn=reward_of, batch_size=(n,), seed=seed)
    start = env.reset() if prompts is None else env.reset(prompt=prompts)
    with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
        batch = env.rollout(4, actor, auto_reset=False, tensordict=start)
    batch.names = [None, "time"]
    return batch


def controller(target: float = 0.3, **kwargs):
    return PIDKLController("plan", target, **kwargs)


def totals(batch):
    return batch["next", "reward"].sum((1, 2)).double()


def texts(n_prompts: int, per_prompt: int):
    """Texts (N, 8): a prompt of 4 tokens and 4 more, and rewards that depend on the prompt, too."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(10, (n_prompts, 4), generator=generator)
    prompts = prompts.unique(dim=0).repeat_interleave(per_prompt, 0)
    responses = torch.randint(10, (len(prompts), 4), generator=generator)
    reward = responses[:, :1] / 4 + 3 * prompts[:, :1]
    tokens = TensorDict(full=torch.cat([prompts, responses], 1), prompt=prompts)
    return TensorDict(tokens=tokens, next={"reward": reward}, batch_size=len(prompts))
