"""Texts, states and actors for the tests of the GPT and of its heads."""

from typing import Any

import torch
from tensordict import TensorDict
from torch.testing import assert_close
from torchrl.modules import set_recurrent_mode

from torchrl_kl.language import GPT, CausalLMActor, CausalLMCritic

PROMPT, LENGTH, SEPARATOR = 4, 9, 10  # a text: prompt, separator, response


def assert_same(actual, expected):
    """The float32 accuracy of both modes: 1e-5 (nats, for log-probabilities)."""
    assert_close(actual, expected, atol=1e-5, rtol=0.0)


def sharp(module, seed=0):
    """Large random weights; with GPT-2's small ones every prediction is nearly uniform."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return module


def blocks_of(gpt) -> list[Any]:
    return list(gpt.blocks)


def make_texts(n, seed=0):
    texts = torch.randint(10, (n, LENGTH), generator=torch.Generator().manual_seed(seed))
    texts[:, PROMPT] = SEPARATOR
    return texts


def states_of(texts) -> Any:
    """All states of each text, the finished one too: (n, 5) states."""
    position = torch.arange(PROMPT + 1, LENGTH + 1).expand(len(texts), -1)
    unwritten = torch.arange(LENGTH) >= position[..., None]
    tokens = texts[:, None].expand(-1, position.shape[1], -1).masked_fill(unwritten, SEPARATOR)
    return TensorDict(tokens=tokens, position=position, batch_size=position.shape)


def trajectories(texts) -> Any:
    """The batch that a collector returns for the texts: [n, 4], last dimension named "time"."""
    states = states_of(texts)
    batch, following = states[:, :-1].clone(), states[:, 1:].clone()
    ended = (following["position"] == LENGTH).unsqueeze(-1)
    first_digit_odd = (texts[:, PROMPT + 1] % 2 == 1)[:, None, None]
    following.update(
        {"done": ended, "terminated": ended, "reward": (ended & first_digit_odd) * 1.0}
    )
    batch["action"] = texts[:, PROMPT + 1 :].clone()
    batch["next"] = following
    batch.names = [None, "time"]
    return batch


def make_actor(**kwargs):
    return CausalLMActor(sharp(GPT(11, 8)), **kwargs)


def make_critic():
    return CausalLMCritic(sharp(GPT(11, 9, n_out=1), seed=1))


def logits_of(actor, states, recurrent):
    with set_recurrent_mode(recurrent):
        return actor.get_dist(states.select("tokens", "position")).logits
