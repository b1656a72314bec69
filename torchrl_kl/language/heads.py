"""Actor, critic and reward model over a causal language model.

Axes: B* any leading dimensions, L length of a whole text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import TensorDictModule, dispatch
from torch import Tensor, nn
from torch.nn import functional as F
from torchrl.envs.utils import ExplorationType, exploration_type
from torchrl.modules import ProbabilisticActor, ValueOperator

from torchrl_kl.functional.numbers import check_number
from torchrl_kl.language.bare import bare
from torchrl_kl.language.causal_lm import CausalLM
from torchrl_kl.language.distribution import NextToken
from torchrl_kl.language.reader import StateReader, check_one_per_text

Keys = Sequence[NestedKey]


class LogitsReader(StateReader):
    """Next-token logits of each state, divided by the temperature."""

    def __init__(self, model: nn.Module, temperature: float, cache_bytes: int | None):
        super().__init__(model, clamp_full=True, cache_bytes=cache_bytes)
        self.temperature = check_number("temperature", temperature, above=0)
        self._check(self.lm.n_out)

    def forward(self, tokens: Tensor, position: Tensor) -> Tensor:
        """The logits for each state, (*B, V)."""
        return self.scale(super().forward(tokens, position))

    def scale(self, logits: Tensor) -> Tensor:
        """The logits of the policy, from those of the model."""
        self._check(logits.shape[-1])
        return logits if self.temperature == 1 else logits / self.temperature

    def _check(self, n_out: int | None) -> None:
        size = self.lm.vocab_size
        if n_out is not None and not 2 <= n_out <= (size or n_out):
            raise ValueError(
                f"`model` must have one output per token (from 2 to vocab_size = {size}), got "
                f"{n_out} outputs: a critic's model cannot act, and an actor is built after "
                "`resize_token_embeddings`."
            )


class _Value(StateReader):
    """The single output for each state, (*B, 1)."""

    def __init__(self, model: nn.Module, cache_bytes: int | None):
        super().__init__(model, clamp_full=False, cache_bytes=cache_bytes)
        _check_one_output(self.lm.n_out)

    def forward(self, tokens: Tensor, position: Tensor) -> Tensor:
        value = super().forward(tokens, position)
        _check_one_output(value.shape[-1])
        return value


class CausalLMActor(ProbabilisticActor):
    """A causal language model as a policy whose action is the next token.

    The model is a GPT or a Hugging Face causal language model, also with PEFT's adapters, or any
    module that maps ids (N, T) to logits (N, T, V).

    - In TorchRL's recurrent mode (losses set it) a trajectory is scored in one pass, with the same
      log-probs as step by step; states may be shuffled.
    - In a rollout without gradients (as collectors make it) the keys and values of what was read
      are cached: a step computes one new position of each text. Texts that do not go on from
      those of the last step are read anew. The cache is dropped when weights, adapters or modes of
      the model change. After an edit through `.data` of single elements, or of what is neither a
      weight nor a module (a layer's `eps`, a replaced `forward`), call `clear_cache`.
      Texts of N rows take N * L * 2 * layers * heads * (width of a head) numbers. Copies,
      pickles and `state_dict` do not hold them.
    - Actions are sampled only where the exploration type is RANDOM, which collectors set.

    A text that fills `tokens` may be longer than the model reads: rollouts call the policy on it
    and discard the result. Hugging Face's models may be built in train mode: call `eval()` to turn
    dropout off, or the recorded log-probs are those of a policy with noise. Whether it is causal,
    and may be cached, is tried with five tokens: what a model does only in longer texts (Doge
    beyond its `keep_window_size`) is not noticed.

    Args:
        model: its outputs are the logits of tokens 0 to V - 1.
        temperature: the logits are divided by it, in rollouts and in losses alike.
        in_keys: text (*B, L) and position (*B,), the number of tokens before the padding.
        action_key: the token (*B,), int64. Its log-prob (*B,), nats, is under this key with
            "_log_prob" appended.
        return_log_prob: whether to write the log-prob.
        return_logits: whether to write the logits (*B, V) under "logits". For a large vocabulary
            they fill the memory of a batch; the exact estimator needs them, the others do not.
        cache_bytes: most bytes of cached keys and values, beyond which whole texts are read in
            each step; None: any number; 0: no cache. A policy that is its own reference, its
            adapters switched off, keeps two caches of at most so many bytes.

    Raises:
        TypeError: `model` is not a module, or tokens or position are not int64 or int32.
        ValueError: `temperature` or `cache_bytes` is out of range, the model has one output, is not
            causal (tried in a rollout), or cannot read a state; or the exploration type is MEAN.

    Example:
        >>> import torch
        >>> from torchrl_kl import GPT, CausalLMActor
        >>> actor = CausalLMActor(GPT(vocab_size=11, block_size=8))
        >>> tokens, position = torch.tensor([[0, 2, 8, 6, 10, 3, 10, 10]]), torch.tensor([6])
        >>> logits, action, log_prob = actor(tokens=tokens, position=position)
        >>> logits.shape
        torch.Size([1, 11])
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        temperature: float = 1.0,
        in_keys: Keys = ("tokens", "position"),
        action_key: NestedKey = "action",
        return_log_prob: bool = True,
        return_logits: bool = True,
        cache_bytes: int | None = None,
    ):
        reader = LogitsReader(model, temperature, cache_bytes)
        super().__init__(
            TensorDictModule(reader, in_keys=list(in_keys), out_keys=["logits"]),
            in_keys=["logits"],
            out_keys=[action_key],
            distribution_class=NextToken,
            return_log_prob=return_log_prob,
        )
        self._drawn_keys = [action_key, *(self.log_prob_keys if return_log_prob else [])]
        self.return_logits = return_logits
        if not return_logits:
            self.select_out_keys(*(key for key in self.out_keys if key != "logits"))

    @dispatch(auto_batch_size=False)
    def forward(  # type: ignore[override]
        self, tensordict: TensorDictBase, tensordict_out: TensorDictBase | None = None, **kwargs
    ) -> TensorDictBase:
        """Draws a token for each state; writes it, its log-prob and the logits."""
        plain, kind = tensordict_out is None and not kwargs, exploration_type()
        if kind == ExplorationType.MEAN:
            raise ValueError(
                "the exploration type must be RANDOM, or MODE or DETERMINISTIC for the most likely "
                "token, got MEAN: the mean of token ids is not a token."
            )
        other = None if self.return_logits else tensordict.get("logits", None)  # of another model
        if plain and kind == ExplorationType.RANDOM:
            dist = self.get_dist(tensordict)
            token = dist.sample()
            for key, value in zip(self._drawn_keys, (token, dist.log_prob(token)), strict=False):
                tensordict.set(key, value)
            if not self.return_logits:
                tensordict.pop("logits")
            result = tensordict
        else:
            result = super().forward(tensordict, tensordict_out, **kwargs)
        return result if other is None or result is not tensordict else result.set("logits", other)

    def get_dist(self, tensordict: TensorDictBase, *args: Any, **kwargs: Any) -> NextToken:
        """The distribution of the next token; writes the logits into the states (*B)."""
        # What the superclass does, without its general machinery, which takes longer than a token.
        state = [tensordict.get(key, None) for key in self.in_keys]
        if args or kwargs or any(part is None for part in state):
            return cast(NextToken, super().get_dist(tensordict, *args, **kwargs))
        logits = self.reader(*state)
        tensordict.set("logits", logits)
        return NextToken(logits)

    @property
    def reader(self) -> LogitsReader:
        """The part that maps states to logits."""
        return self[0].module  # type: ignore[index, return-value]

    def clear_cache(self) -> None:
        """Drops the cached keys and values, and their memory."""
        self.reader.clear_cache()


class CausalLMCritic(ValueOperator):
    """A causal language model as a state-value network: V(text so far), one number per state.

    The model is a GPT with `n_out=1`, a Hugging Face `...ForTokenClassification` with
    `num_labels=1`, or any module that maps ids (N, T) to (N, T, 1).

    With GAE built with `deactivate_vmap=True` and called within `set_recurrent_mode(True)`, a
    trajectory needs one pass. The critic also reads finished texts: it must take L tokens.

    Args:
        model: has one output per position.
        in_keys: text (*B, L) and position (*B,).
        out_keys: the value (*B, 1).
        cache_bytes: as for CausalLMActor.

    Raises:
        TypeError: `model` is not a module, or tokens or position are not int64 or int32.
        ValueError: the model has several outputs, or it cannot read a state.

    Example:
        >>> import torch
        >>> from torchrl_kl import GPT, CausalLMCritic
        >>> critic = CausalLMCritic(GPT(vocab_size=11, block_size=9, n_out=1))
        >>> tokens, position = torch.tensor([[0, 2, 8, 6, 10, 3, 10, 10, 10]]), torch.tensor([6])
        >>> critic(tokens=tokens, position=position).shape
        torch.Size([1, 1])
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        in_keys: Keys = ("tokens", "position"),
        out_keys: Keys = ("state_value",),
        cache_bytes: int | None = None,
    ):
        reader = _Value(model, cache_bytes)
        super().__init__(reader, in_keys=list(in_keys), out_keys=list(out_keys))


class _TextScorer(nn.Module):
    """The single output at an end token after each text: (*B, L) -> (*B,)."""

    def __init__(self, model: nn.Module, end_token: int):
        super().__init__()
        self.lm, self.end_token = CausalLM(model), end_token
        size, most = self.lm.vocab_size, self.lm.max_tokens
        _check_one_output(self.lm.n_out)
        if end_token < 0 or (size is not None and end_token >= size):
            raise ValueError(
                f"`end_token` must lie in the vocabulary of {size} tokens, got {end_token}: build "
                "the model with a `vocab_size` that counts it."
            )
        self.max_length = None if most is None else most - 1

    def forward(self, tokens: Tensor, position: Tensor | None = None) -> Tensor:
        n_tokens, most = tokens.shape[-1] if tokens.ndim else 0, self.max_length
        if tokens.ndim == 0 or (most is not None and n_tokens > most):
            raise ValueError(
                f"`tokens` must have a last dimension of at most {most}, since the end token takes "
                f"one of the model's places, got shape {tuple(tokens.shape)}."
            )
        texts = F.pad(tokens, (0, 1), value=self.end_token).reshape(-1, n_tokens + 1)
        rows = torch.arange(len(texts), device=texts.device)
        end = torch.full_like(rows, n_tokens)
        if position is not None:
            end = _check_ends(position, tokens).flatten().long()
            texts[rows, end] = self.end_token
        output = bare(self.lm).at(texts, rows, end)
        _check_one_output(output.shape[-1])
        return output.view(tokens.shape[:-1])


def _check_ends(position: Tensor, tokens: Tensor) -> Tensor:
    """Numbers of tokens (*B,) of texts (*B, L); raises unless they are from 0 to L."""
    check_one_per_text(position, tokens)
    low, high = (int(value) for value in position.aminmax()) if position.numel() else (0, 0)
    if low < 0 or high > tokens.shape[-1]:
        raise ValueError(
            f"`position` must lie in 0..{tokens.shape[-1]}, got {low} to {high}: it counts tokens "
            "before padding."
        )
    return position


class CausalLMRewardModel(TensorDictModule):
    """A causal language model that scores whole texts: its output at an end token after the text.

    Call it with a tensordict, or with tokens as the `reward_fn` of an env; as that of
    sample_responses it scores each text where its response ends. A function that you
    write as `reward_fn` and that calls this model must also pass the number of tokens of each text;
    with tokens alone, padding is scored as text.

    Args:
        model: has one output per position, as for CausalLMCritic, and reads at least L + 1 tokens.
        end_token: id of the token that is written after the text.
        in_keys: whole text (*B, L); and position (*B,), the number of its tokens before padding,
            where texts are of several lengths.
        out_keys: the score (*B,), in the units of its training loss.

    Raises:
        TypeError: `model` is not a module, or position is not int64 or int32.
        ValueError: the model has several outputs, `end_token` is outside its vocabulary, L is too
            large, or a position is not one of 0 to L for each text.

    Example:
        >>> import torch
        >>> from torchrl_kl import GPT, CausalLMRewardModel
        >>> gpt = GPT(vocab_size=12, block_size=10, n_out=1)
        >>> reward_model = CausalLMRewardModel(gpt, end_token=11)
        >>> reward_model(torch.tensor([[0, 2, 8, 6, 10, 7, 3, 9, 1]])).shape
        torch.Size([1])
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        end_token: int,
        in_keys: Keys = ("tokens",),
        out_keys: Keys = ("score",),
    ):
        scorer = _TextScorer(model, end_token)
        super().__init__(scorer, in_keys=list(in_keys), out_keys=list(out_keys))


def _check_one_output(n_out: int | None) -> None:
    if n_out not in (None, 1):
        raise ValueError(
            f"`model` must have one output per position, got {n_out}: use GPT(..., n_out=1), or a "
            "Hugging Face model for token classification with num_labels=1."
        )
