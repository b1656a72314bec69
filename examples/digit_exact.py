"""Models of the digit language for exact values: contexts to the logits of the next token."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchrl_kl.envs import DigitLanguage
from torchrl_kl.language import GPT

LANGUAGE = DigitLanguage()


def add_separator(prompts: Tensor) -> Tensor:
    """Prompts (N, P) to contexts (N, P + 1), which a response follows."""
    return pad(prompts, (0, 1), value=LANGUAGE.separator)


class SharedPrefixes:
    """Keys and values of prefixes, which a second pass reads for each text that begins with one."""

    def __init__(self, group: Tensor):
        self.group, self.layers = group, []

    def update(self, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values (N, heads, T, width) of a layer, as attention is to read them."""
        if layer == len(self.layers):
            self.layers.append((key, value))
            return key, value
        keys, values = self.layers[layer]
        return torch.cat([keys[self.group], key], 2), torch.cat([values[self.group], value], 2)


def last_outputs(gpt: GPT, texts: Tensor, *after: int) -> Tensor:
    """The outputs (N, n_out) of a GPT at the end of texts (N, T), each followed by some tokens.

    All but the last token is read once for all neighbours that share it: several times faster.
    """
    prefixes, group = texts[:, :-1].unique_consecutive(dim=0, return_inverse=True)
    cache, n_read = SharedPrefixes(group), prefixes.shape[1]
    gpt(prefixes, past_key_values=cache, logits_to_keep=1)
    rest = torch.cat([texts[:, -1:], *(texts.new_full((len(texts), 1), t) for t in after)], 1)
    n_rest = rest.shape[1]
    positions = torch.arange(n_read, n_read + n_rest)[None]
    mask = torch.full((n_rest, n_read + n_rest), -math.inf, dtype=gpt.head.weight.dtype)
    mask = mask.triu(n_read + 1)[None, None]  # of the tokens that are still to come
    rows = {"past_key_values": cache, "position_ids": positions, "attention_mask": mask}
    return gpt(rest, **rows, logits_to_keep=1)[:, 0]


def next_token(gpt: GPT) -> Callable[[Tensor], Tensor]:
    """A GPT as a model of the exact values: contexts to the logits of the next token."""
    return partial(last_outputs, gpt)


def true_next_token(tokens: Tensor) -> Tensor:
    """The language itself as such a model."""
    return LANGUAGE.next_token_probs(tokens).log()
