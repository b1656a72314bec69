"""A causal language model in two parts: its decoder, and what comes after it.

Axes: S texts, T tokens, K positions, H width of a hidden state.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_kl.actors.policy import evaluating
from torchrl_kl.language.causal_lm import READ_TOGETHER, CausalLM, differ_by_rounding, innermost


class SplitLM:
    """The decoder of a model, and the model with a decoder that answers from memory.

    So the model's own `forward` makes the logits of any hidden states, with all that belongs to its
    head: adapters, scales, caps, hooks. Weights and modes outside the decoder are those of now.
    The model has a `get_decoder`, as those of Hugging Face and GPT do.
    """

    def __init__(self, lm: CausalLM):
        owner, name, self._decoder = _find_decoder(lm)
        self._lm = _copy(lm, owner, name, self._answer)
        self._hidden: Tensor | None = None  # what the decoder answers; None: it is asked
        self._output: Any = None  # that of the decoder, in whatever form

    def _answer(self, *args: Any, **kwargs: Any) -> Any:
        if self._hidden is None:
            self._output = self._decoder(*args, **kwargs)
            return _with_hidden(self._output, _hidden_of(self._output)[:1, :1])
        return _with_hidden(self._output, self._hidden)

    def hidden(self, tokens: Tensor) -> Tensor:
        """The last hidden states (S, T, H) of texts (S, T)."""
        self._lm(tokens)
        hidden = _hidden_of(self._output)
        self._output = _with_hidden(self._output, hidden.new_empty(0))
        return hidden

    def hidden_at(self, tokens: Tensor, row: Tensor, last: Tensor) -> Tensor:
        """The hidden states at pairs of a row and a position, (K,) each: (K, H); see `at`."""
        tokens = tokens[:, : int(last.max()) + 1]
        if torch.is_grad_enabled() or tokens.device.type != "cpu":
            return self.hidden(tokens)[row, last]
        parts = tokens.split(max(1, READ_TOGETHER // tokens.shape[1]))
        return torch.cat([self.hidden(part) for part in parts])[row, last]

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits (K, V) of hidden states (K, H), at least float32."""
        self._hidden = hidden[None]
        try:
            tokens = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
            return self._lm(tokens).squeeze(0)
        finally:
            self._hidden = None


@torch.no_grad()
def can_split(lm: CausalLM, tokens: Tensor) -> bool:
    """Whether a model computes the same in two parts; if not, it warns. Looked at once."""
    if lm.splits is None:
        text, problem = tokens[:1, :8], "its logits differ"
        with torch.autocast(text.device.type, enabled=False), evaluating(lm):
            expected = lm(text)[0]
            try:
                split = SplitLM(lm)
                parts = [split.logits(part) for part in split.hidden(text)[0].split(3)]
                lm.splits = differ_by_rounding(torch.cat(parts), expected, lm)
            except Exception as error:  # the model's code may raise anything
                lm.splits, problem = False, f"{type(error).__name__}: {error}"
        if not lm.splits:
            warnings.warn(
                "the head of this model does not work on a part of the positions alone "
                f"({problem}): the logits of a whole batch are held at once.",
                stacklevel=2,
            )
    return lm.splits


def _find_decoder(lm: CausalLM) -> tuple[nn.Module, str, Callable[..., Any]]:
    """The module that calls the decoder, under which name, and the decoder."""
    decoder: Any = innermost(lm.model).get_decoder()  # type: ignore[operator]
    if not isinstance(decoder, nn.Module):  # a method
        return decoder.__self__, decoder.__name__, decoder
    parts = ((owner, *named) for owner in lm.modules() for named in owner.named_children())
    return next(found for found in parts if found[-1] is decoder)


def _copy(module: nn.Module, owner: nn.Module, name: str, answer: Callable[..., Any]) -> Any:
    """A module without its decoder, with the tensors and settings that it has now."""
    module = getattr(module, "_orig_mod", module)
    view: Any = object.__new__(type(module))
    vars(view).update(
        (key, copy.copy(value) if isinstance(value, dict | list) else value)
        for key, value in vars(module).items()
    )
    parts = view._modules
    if module is owner:
        parts.pop(name, None)
        vars(view)[name] = answer
    parts.update((key, part and _copy(part, owner, name, answer)) for key, part in parts.items())
    return view


def _hidden_of(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def _with_hidden(output: Any, hidden: Tensor) -> Any:
    """An output of a decoder with other hidden states."""
    if isinstance(output, Tensor):
        return hidden
    output = copy.copy(output)
    output.last_hidden_state = hidden
    return output
