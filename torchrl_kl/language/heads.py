"""Actor, critic and reward model over a causal language model.

Axes: B* any leading dimensions, L length of a whole text.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import TensorDictModule, dispatch
from torch import Tensor, nn
from torch.nn import functional as F
from torchrl.envs.utils import ExplorationType, exploration_type
from torchrl.modules import ProbabilisticActor, ValueOperator, recurrent_mode

from torchrl_kl.actors.protocol import KLActor
from torchrl_kl.batches import MASK_KEY, expand_right
from torchrl_kl.functional.numbers import check_count, check_number
from torchrl_kl.functional.tiles import TiledCategorical
from torchrl_kl.keys import as_tuple, get_required, sibling
from torchrl_kl.language.causal_lm import CausalLM, SplitLM, can_split
from torchrl_kl.language.distribution import NextToken
from torchrl_kl.language.gpt import values_hidden
from torchrl_kl.language.prompts import read_at
from torchrl_kl.language.reader import StateReader, check_one_per_text
from torchrl_kl.language.truncation import Truncation, restrict

Keys = Sequence[NestedKey]
HeadChunk = int | Literal["auto"] | None
_TILE = 2**24  # logits: a loss holds four numbers for each, 256 MB in float32
_NO_TEXT = "it is a part of the text that is scored; see the `in_keys` of CausalLMActor."


class LogitsReader(StateReader):
    """Next-token logits of each state, divided by the temperature."""

    def __init__(self, model: nn.Module, temperature: float, head_chunk: HeadChunk = None):
        super().__init__(model, clamp_full=True)
        self.temperature = check_number("temperature", temperature, above=0)
        self._check(self.lm.n_out)
        n_out = self.lm.n_out or self.lm.vocab_size
        if head_chunk == "auto":
            head_chunk = None if n_out is None else max(1, _TILE // n_out)
        self.head_chunk = None if head_chunk is None else check_count("head_chunk", head_chunk)
        self.entropy_read = [True]  # see TiledCategorical

    def dist(self, tokens: Tensor, position: Tensor) -> TiledCategorical | None:
        """The distributions of the next tokens, in tiles; None if one tile is enough."""
        size, cached = self.head_chunk, not (torch.is_grad_enabled() or recurrent_mode())
        if size is None or position.numel() <= size or cached:
            return None
        hidden = values_hidden(tokens) or values_hidden(next(self.parameters(), tokens))
        if hidden or not can_split(self.lm, tokens.reshape(-1, tokens.shape[-1])):
            return None
        split = SplitLM(self.lm)
        states = super().forward(tokens, position, split).flatten(0, -2)
        tile = lambda rows: NextToken(self.scale(split.logits(rows)))  # noqa: E731
        return TiledCategorical(states, tile, position.shape, size, self.entropy_read)

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

    def forward(self, tokens: Tensor, position: Tensor) -> Tensor:
        value = super().forward(tokens, position)
        _check_one_output(value.shape[-1])
        return value


class CausalLMActor(KLActor, ProbabilisticActor):
    """A causal language model as a policy whose action is the next token.

    - In TorchRL's recurrent mode, which losses set, a trajectory is scored in one pass. The
      log-probs are the same as step by step, and states may be shuffled. A prompt of several rows
      is read once, with the model's cache, if outputs and gradients are those of whole rows; in
      train mode its dropout is then that of all these rows.
    - In rollouts without gradients, as of collectors, a step computes one new position of each
      text, with the cache that the model makes for itself, one for texts of the same length. Texts
      that do not continue those of the last step are read anew, and so are all texts after weights,
      adapters or modes of the model have changed. After an edit of single rows or elements through
      `.data`, or of a layer's attributes, call `clear_cache`. Cached outputs are compared with
      those of one pass, on the first texts and again on longer ones. If they differ by more than
      rounding, or the model raises an error, a warning is issued, and whole texts are read.
    - With `top_k`, `top_p` or `min_p` the policy is truncated: its distribution is that of the kept
      tokens, renormalized, and "logits" are -inf for others. The ids of the kept tokens are
      recorded under ("kept", "ids") next to the action (int32, (*B, `top_k`), most likely first,
      padded with the first id), and reused when the token is scored. Without a record they are
      computed, and the drawn token is added to them; `n_rescued` counts the tokens of the last
      batch that were added. A2CLoss passes neither record nor token, so that tokens that are no
      longer kept have log-prob -inf: put it into a KLPenaltyLoss. The reference is never truncated.

    Call `eval()` on a model with dropout: otherwise the recorded log-probs contain its noise.
    Actions are sampled only if the exploration type is RANDOM, which collectors set.

    Args:
        model: a GPT or a Hugging Face causal language model, also with PEFT's adapters, or any
            module that maps ids (N, T) to logits (N, T, V).
        temperature: the logits are divided by it, in rollouts and in losses alike.
        top_k: how many tokens are kept at most; None: all, or 256 with `top_p` or `min_p`.
        top_p: of these, the most likely ones that together have this probability, in (0, 1].
        min_p: of these, those of at least this share of the largest probability, in [0, 1].
        in_keys: text (*B, L) and position (*B,), the number of tokens before the padding.
        action_key: the token (*B,), int64. Its log-prob (*B,), nats, is under this key with
            "_log_prob" appended.
        return_log_prob: whether to write the log-prob.
        return_logits: whether to write the logits (*B, V) under "logits". For a large vocabulary
            they fill the memory of a batch; the exact estimator needs them, the others do not.
        head_chunk: how many positions have logits at a time where a whole batch is scored, as in
            losses; the backward pass computes them again. "auto": as many as have 64 MB of logits,
            for which a loss holds 256 MB. None: all. The model needs `get_decoder`, which those of
            Hugging Face have.

    Raises:
        TypeError: `model` is not a module, or tokens or position are not int64 or int32.
        ValueError: `temperature` is out of range, the model has one output, does not read texts
            of all lengths alike, or cannot read a state; or the exploration type is MEAN.

    Example:
        >>> import torch
        >>> from torchrl_kl.language import GPT, CausalLMActor
        >>> actor = CausalLMActor(GPT(vocab_size=11, block_size=8))
        >>> tokens, position = torch.tensor([[0, 2, 8, 6, 10, 3, 10, 10]]), torch.tensor([6])
        >>> logits, action, log_prob = actor(tokens=tokens, position=position)
        >>> logits.shape
        torch.Size([1, 11])
    """

    state_lengths: Mapping[NestedKey, NestedKey] = {"tokens": "position"}
    replayed_keys: Sequence[NestedKey] = (MASK_KEY,)
    advice = (
        "a language model in CausalLMActor (on batches of whole responses, use "
        "ResponseKLTransform(wrapper.model, ...))"
    )

    def __init__(
        self,
        model: nn.Module,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        in_keys: Keys = ("tokens", "position"),
        action_key: NestedKey = "action",
        return_log_prob: bool = True,
        return_logits: bool = True,
        head_chunk: HeadChunk = "auto",
    ):
        reader = LogitsReader(model, temperature, head_chunk)
        super().__init__(
            TensorDictModule(reader, in_keys=list(in_keys), out_keys=["logits"]),
            in_keys=["logits"],
            out_keys=[action_key],
            distribution_class=NextToken,
            return_log_prob=return_log_prob,
        )
        tokens_key, position_key = self.in_keys
        self.state_lengths = {tokens_key: position_key}
        self.temperature = reader.temperature
        self._drawn_keys = [action_key, *(self.log_prob_keys if return_log_prob else [])]
        self.return_logits = return_logits
        if not return_logits:
            self.select_out_keys(*(key for key in self.out_keys if key != "logits"))
        self.truncation = Truncation.of(top_k, top_p, min_p)
        self.kept_key = (*as_tuple(sibling(action_key, "kept")), "ids")
        self.n_rescued: Tensor | int = 0
        if self.truncation is not None:
            self.replayed_keys = (self.kept_key, action_key, MASK_KEY)
            self.out_keys = [*self.out_keys, self.kept_key]

    @dispatch(auto_batch_size=False)
    def forward(  # type: ignore[override]
        self, tensordict: TensorDictBase, tensordict_out: TensorDictBase | None = None, **kwargs
    ) -> TensorDictBase:
        """Draws a token for each state; writes it, its log-prob and the logits."""
        kind = exploration_type()
        if kind == ExplorationType.MEAN:
            raise ValueError(
                "the exploration type must be RANDOM, or MODE or DETERMINISTIC for the most likely "
                "token, got MEAN: the mean of token ids is not a token."
            )
        if tensordict_out is not None:
            return tensordict_out.update(self(tensordict.copy()).select(*self.out_keys))
        dist = self._dist(tensordict, drawn=False)
        token = dist.sample() if kind == ExplorationType.RANDOM else dist.deterministic_sample
        for key, value in zip(self._drawn_keys, (token, dist.log_prob(token)), strict=False):
            tensordict.set(key, value)
        if self.return_logits and isinstance(dist, TiledCategorical):
            tensordict.set("logits", dist.logits)
        return tensordict if self.return_logits else tensordict.exclude("logits", inplace=True)

    def get_dist(self, tensordict: TensorDictBase, *args: Any, **kwargs: Any) -> Any:
        """The distribution of the next token; writes the logits into the states (*B), if whole."""
        # What the superclass does, without its general machinery, which takes longer than a token.
        dist = self._dist(tensordict, drawn=True)
        dist.mask = tensordict.get(MASK_KEY, True)  # which GRPOLoss reads
        return dist

    def _dist(self, tensordict: TensorDictBase, *, drawn: bool) -> Any:
        """That of states (*B); `drawn`: whether they may have the next token."""
        state: Any = [get_required(tensordict, key, _NO_TEXT) for key in self.in_keys]
        tiled = self.reader.dist(*state)
        made: Any = self.reader(*state) if tiled is None else tiled
        if self.truncation is not None:
            record, action, mask = (
                tensordict.get(key, None) if drawn else None for key in self.replayed_keys
            )
            if action is None:  # a record would be of another state
                ids = self.truncation.keep(made, bounded=not drawn)
            else:
                ids, missing = self.truncation.replay(made, record, action)
                counted = missing if mask is None else missing & expand_right(mask, missing.shape)
                self.n_rescued = counted.sum()
            tensordict.set(self.kept_key, ids)
            made = restrict(made, ids)
        if tiled is not None:
            return made
        tensordict.set("logits", made)
        return NextToken(made)

    def whole(self) -> CausalLMActor:
        """The same policy with all tokens, over the same modules."""
        if self.truncation is None:
            return self
        view = copy.copy(self)
        view.truncation, view.replayed_keys = None, (MASK_KEY,)
        view.out_keys = [key for key in self.out_keys if key != self.kept_key]
        return view

    @property
    def reader(self) -> LogitsReader:
        """The part that maps states to logits."""
        return self[0].module  # type: ignore[index, return-value]

    def clear_cache(self) -> None:
        """Drops the cached keys and values, and their memory."""
        self.reader.clear_cache()


class CausalLMCritic(ValueOperator):
    """A causal language model as a state-value network: V(text so far), one number per state.

    With GAE built with `deactivate_vmap=True` and called within `set_recurrent_mode(True)`, a
    trajectory needs one pass. The critic also reads finished texts: it must take L tokens.

    Args:
        model: a GPT with `n_out=1`, a Hugging Face `...ForTokenClassification` with `num_labels=1`,
            or any module that maps ids (N, T) to (N, T, 1).
        in_keys: text (*B, L) and position (*B,).
        out_keys: the value (*B, 1).

    Raises:
        TypeError, ValueError: as for CausalLMActor; the model must have one output.

    Example:
        >>> import torch
        >>> from torchrl_kl.language import GPT, CausalLMCritic
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
    ):
        reader = _Value(model, clamp_full=False)
        _check_one_output(reader.lm.n_out)
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
            check_one_per_text(position, tokens)
            end = position.flatten().long()
            if ((end < 0) | (end > n_tokens)).any():
                raise ValueError(
                    f"`position` must lie in 0..{n_tokens}, got {end.min()} to {end.max()}: it "
                    "counts tokens before padding."
                )
            texts[rows, end] = self.end_token
        output = read_at(self.lm, texts, rows, end)
        _check_one_output(output.shape[-1])
        return output.view(tokens.shape[:-1])


class CausalLMRewardModel(TensorDictModule):
    """A causal language model that scores whole texts: its output at an end token after the text.

    Call it with a tensordict, or with tokens as the `reward_fn` of an env or of sample_responses. A
    function of yours that calls it must also pass the number of tokens of each text; with tokens
    alone, padding is scored as text.

    Args:
        model: has one output per position, as for CausalLMCritic, and reads at least L + 1 tokens.
        end_token: id of the token that is written after the text.
        in_keys: whole text (*B, L); and position (*B,), the number of its tokens before padding,
            where texts are of several lengths.
        out_keys: the score (*B,), in the units of its training loss.

    Raises:
        TypeError, ValueError: the model has several outputs, or `end_token`, L or a position is out
            of range.

    Example:
        >>> import torch
        >>> from torchrl_kl.language import GPT, CausalLMRewardModel
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
