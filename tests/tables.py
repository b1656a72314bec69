"""Small policies as tables of probabilities, and what brute force says of them."""

from __future__ import annotations

import itertools
import math

import torch

from torchrl_kl.exact import Enumeration

V, R = 3, 3
PROMPTS = torch.tensor([[0, 2], [1, 1]])
RESPONSES = list(itertools.product(range(V), repeat=R))


class Table:
    """A model with a random distribution for each context, in plain Python."""

    def __init__(self, seed, zeros=0.0):
        generator = torch.Generator().manual_seed(seed)
        self.rows = {}
        for prompt in PROMPTS.tolist():
            for length in range(R):
                for prefix in itertools.product(range(V), repeat=length):
                    weights = torch.rand(V, generator=generator, dtype=torch.float64) ** 3 + 1e-3
                    drop = torch.rand(V, generator=generator) < zeros
                    drop[torch.randint(V, (1,), generator=generator)] = False
                    weights[drop] = 0
                    self.rows[(*prompt, *prefix)] = (weights / weights.sum()).tolist()

    def __call__(self, contexts):
        rows = [self.rows[tuple(context)] for context in contexts.tolist()]
        return torch.tensor(rows, dtype=torch.float64).log()

    def distribution(self, prompt):
        """Probability of each response, in the order of RESPONSES."""
        return [math.prod(self.rows[(*prompt, *y[:t])][y[t]] for t in range(R)) for y in RESPONSES]


def reward_fn(texts):
    """Depends on the prompt and on every token; no two responses are equal."""
    weights = torch.tensor([0.3, -0.2, 1.1, -0.47, 0.23], dtype=torch.float64)
    return (texts * weights).sum(-1).cos() + texts[:, 3] * texts[:, 4] / 4


def enumeration(reference, reward=reward_fn, **kwargs):
    return Enumeration(reference, reward, PROMPTS, R, **kwargs)


def uniform(size):
    return lambda contexts: torch.zeros(len(contexts), size)
