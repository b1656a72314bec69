"""The outputs of a causal language model for the states of an environment of texts.

Axes: B* any leading dimensions, L length of a whole text, N states, S texts.

A state consists of `tokens` (*B, L), the text so far and then padding (any token ids), and
`position` (*B,), the number of tokens before it. Its output is the model's at `position - 1`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torchrl.modules import recurrent_mode

from torchrl_kl.functional.numbers import check_integers
from torchrl_kl.language.cache import RolloutCache
from torchrl_kl.language.causal_lm import CausalLM, SplitLM
from torchrl_kl.language.gpt import values_hidden
from torchrl_kl.language.prompts import read_at

_LARGE = 2**27  # bytes


class StateReader(nn.Module):
    """The model's output for each state: (*B, L) tokens and (*B,) position -> (*B, n_out).

    In TorchRL's recurrent mode, states of one text share one row of the model. Elsewhere, without
    gradients, keys and values are cached. With gradients, or where shapes must not depend on
    values, each state is read in whole. `state_dict` drops the cache, so that a saved run goes on
    as a resumed one, bit for bit.

    Args:
        model: maps ids to outputs.
        clamp_full: whether a text that fills `tokens` and is longer than the model's block_size is
            read up to there, since a rollout calls the policy on it and drops the result.
    """

    def __init__(self, model: nn.Module, *, clamp_full: bool):
        super().__init__()
        self.lm, self.clamp_full = CausalLM(model), clamp_full
        self._cache: RolloutCache | None = None
        self.register_state_dict_pre_hook(_drop_cache)

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles begin without a cache.
        return {**self.__dict__, "_cache": None}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> StateReader:
        self.clear_cache()  # it would hold the old weights until the next step
        return super()._apply(fn, recurse)

    def forward(self, tokens: Tensor, position: Tensor, split: SplitLM | None = None) -> Tensor:
        """The output for each state; with `split`, the last hidden state."""
        weight = next(self.parameters(), tokens)
        hidden = values_hidden(tokens) or values_hidden(weight)  # an ensemble's weights are batched
        n_tokens = self._check_state(tokens, position, hidden)
        # Rows that split_trajs padded are all zeros: position 0 is treated as 1.
        length = position.clamp(1, n_tokens).flatten()
        if not len(length):
            output = read_at(self.lm, tokens.new_zeros(0, 1), length, length)
        elif hidden:
            rows = tokens[..., :n_tokens].reshape(-1, n_tokens)
            output = self.lm(rows)[torch.arange(len(length), device=rows.device), length - 1]
        elif recurrent_mode():
            texts, row = _find_texts(tokens[..., :n_tokens], length)
            output = read_at(self.lm, texts, row, length - 1, split)
        else:
            rows = tokens[..., :n_tokens].reshape(-1, n_tokens)
            if torch.is_grad_enabled():
                every = torch.arange(len(rows), device=rows.device)
                output = read_at(self.lm, rows, every, length - 1, split)
            else:
                output = self._read_next(rows, length)
        return output.view(*position.shape, output.shape[-1])

    def _read_next(self, rows: Tensor, length: Tensor) -> Tensor:
        """The outputs of a step of a rollout, (N, n_out)."""
        self._cache = self._cache or RolloutCache(self.lm)
        return self._cache.read(rows, length)

    def clear_cache(self) -> None:
        """Drops the cached keys and values."""
        self._cache = None

    def _check_state(self, tokens: Tensor, position: Tensor, hidden: bool) -> int:
        """How much of `tokens` the model may read."""
        check_one_per_text(position, tokens)
        length, limit = tokens.shape[-1], self.lm.max_tokens
        most = length if limit is None else min(length, limit)
        if hidden or not position.numel():
            return most
        low, high = (int(value) for value in position.aminmax())
        too_long = high > most and ((position > most) & (position != length)).any()
        if low < 0 or too_long or (high > most and not self.clamp_full):
            raise ValueError(
                f"`position` must lie in 0..{most}, got {low} to {high}: it counts tokens before "
                f"padding, `tokens` have length {length} and the model reads at most {limit}."
            )
        if high > self.lm.causal:
            self.lm.check_causal(tokens, high)
        return most


def _drop_cache(reader: StateReader, prefix: str, keep_vars: bool) -> None:
    reader.clear_cache()


def check_one_per_text(position: Tensor, tokens: Tensor) -> None:
    """Raises unless `position` (*B,) has an integer for each text in `tokens` (*B, L)."""
    check_integers("position", position)
    if tokens.ndim == 0 or position.shape != tokens.shape[:-1]:
        raise ValueError(
            "`position` must have one number per text (the shape of `tokens` without its last "
            f"dimension), got {tuple(position.shape)} and {tuple(tokens.shape)}."
        )


def _find_texts(tokens: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    """Texts that contain all states: (*B, L) and (N,) to (S, L) and the row of each state, (N,)."""
    if tokens.ndim > 2 and tokens.stride(-2) == 0:  # each text is stored once for all its states
        rows = tokens[..., 0, :].reshape(-1, tokens.shape[-1])
        states = tokens.shape[-2]
        return rows, torch.arange(len(rows), device=rows.device).repeat_interleave(states)
    rows = tokens.reshape(-1, tokens.shape[-1])
    large = tokens.untyped_storage().nbytes() >= _LARGE
    if large and len(rows) > 3 and not rows[:4].diff(dim=0).any():
        _warn_of_copies()
    return _segments(rows, length)


@cache
def _warn_of_copies() -> None:
    warnings.warn(
        "a text is stored again for each of its tokens, so that memory grows with the square of "
        "the length: an index such as `batch[rows]` or `batch[mask]` copies texts, and so does GAE "
        "for the states it is given. Give losses and GAE the parts that `minibatches` makes.",
        stacklevel=2,
    )


def _segments(tokens: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """The last row of each segment, (S, L), and the index of each state's segment, (N,).

    A segment is a run of states that are each a prefix of the next one. By causality, its last row
    has the outputs for all of them. Only the texts are compared: states may be in any order.
    """
    real = torch.arange(tokens.shape[1], device=tokens.device) < position[:-1, None]
    same = ((tokens[1:] == tokens[:-1]) | ~real).all(-1)
    last = torch.ones_like(position, dtype=torch.bool)
    last[:-1] = ~(same & (position[1:] >= position[:-1]))
    return tokens[last], last.cumsum(0) - last.long()
