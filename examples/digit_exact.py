"""Models of the digit language for exact values: contexts to the logits of the next token."""

from __future__ import annotations

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


def last_outputs(gpt: GPT, texts: Tensor, *after: int) -> Tensor:
    """The outputs (N, n_out) of a GPT at the end of texts (N, T), each followed by some tokens.

    All but the last token is read once for all neighbours that share it: several times faster.
    """
    prefixes, group = texts[:, :-1].unique_consecutive(dim=0, return_inverse=True)
    cache = gpt.new_cache()
    gpt(prefixes, cache=cache, logits_to_keep=1)
    cache.reorder_cache(group)
    rest = torch.cat([texts[:, -1:], *(texts.new_full((len(texts), 1), t) for t in after)], 1)
    return gpt(rest, cache=cache, logits_to_keep=1)[:, 0]


def next_token(gpt: GPT) -> Callable[[Tensor], Tensor]:
    """A GPT as a model of the exact values: contexts to the logits of the next token."""
    return partial(last_outputs, gpt)


def true_next_token(tokens: Tensor) -> Tensor:
    """The language itself as such a model."""
    return LANGUAGE.next_token_probs(tokens).log()
