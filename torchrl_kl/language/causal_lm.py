"""Calling a causal language model, whoever wrote it.

Axes: N texts, T tokens, K positions, H width of a hidden state.
"""

from __future__ import annotations

import copy
import inspect
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_kl.actors.parallel import in_wrapper, local, sharded_parts, unwrapped
from torchrl_kl.actors.policy import evaluating

CACHE_KEYWORDS = ("cache", "past_key_values", "cache_params")  # the first since transformers 5.24


class CausalLM(nn.Module):
    """A module that maps token ids (N, T) to outputs (N, T, n_out), or to an object's `.logits`.

    Keywords of Hugging Face's models are used where the `forward` of the model has them.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        if not isinstance(model, nn.Module):
            raise TypeError(f"`model` must be a torch.nn.Module, got {type(model).__name__}.")
        if hasattr(model, "get_dist"):  # an actor, or a wrapper of TorchRL's LLM API
            raise TypeError(
                "`model` must be a language model that maps token ids to logits, got "
                f"{type(model).__name__}: pass the model in it, such as `wrapper.model`."
            )
        self.model = model
        inner, config = innermost(model), _text_config(innermost(model))
        self._keywords = frozenset(inspect.signature(inner.forward).parameters)
        adapters = stated("peft_config", unwrapped(model), default={}).values()
        adds_tokens = any(stated("is_prompt_learning", adapter) for adapter in adapters)
        if adds_tokens or "decoder_input_ids" in self._keywords:
            raise ValueError(
                "`model` must be causal, with one output per token, but "
                f"{type(inner).__name__} has an encoder, or an adapter that adds virtual tokens: "
                "use a Hugging Face `...ForCausalLM`, and adapters of the weights, such as LoRA."
            )
        # Its cache is used until an output has differed; see `differs`.
        self._cache_keyword = next(filter(self._keywords.__contains__, CACHE_KEYWORDS), "")
        # RoBERTa and its kin do not count pad tokens, but for those in a cache.
        by_ids = (hasattr(m, "create_position_ids_from_input_ids") for m in inner.modules())
        self.caches = bool(self._cache_keyword) and not any(by_ids)
        # From how many tokens to how many; of rows that stayed in place, and of others.
        self.compared: dict[bool, list[tuple[int, int]]] = {False: [], True: []}
        self.causal = 1  # up to how many tokens texts were compared
        self.splits: bool | None = None  # whether its head works apart; see `SplitLM`
        # Whether prompts can be read once, with gradients or not, at which lengths; see `read_at`.
        self.read_once: dict[bool, dict[tuple[int, ...], bool]] = {False: {}, True: {}}
        # Sizes, where the model states them: by the names of GPT, or in Hugging Face's `config`.
        self.n_out: int | None = stated("n_out", inner)
        self.vocab_size: int | None = stated("vocab_size", inner, config)
        self.max_tokens: int | None = stated("block_size", inner) or _most_positions(inner, config)

    def forward(self, tokens: Tensor, keep: Tensor | None = None) -> Tensor:
        """Outputs at the positions `keep` (K,), or at all: (N, K, n_out), at least float32."""
        model = self.model if torch.is_grad_enabled() else local(self.model)
        return self._call(model, tokens, keep, use_cache=False)[0]

    def read(
        self, tokens: Tensor, cache: Any = None, keep: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """The same of tokens (N, T) that follow those in a cache; and the cache.

        It is of the model's own making, from None; None if the model makes none.
        """
        if cache is None and (make := stated("new_cache", innermost(next(self.children())))):
            cache = make()
        options = {"use_cache": True} | ({} if cache is None else {self._cache_keyword: cache})
        # Compiled, each length would be anew.
        return self._call(unwrapped(self.model), tokens, keep, **options)

    def _call(
        self, model: Any, tokens: Tensor, keep: Tensor | None, **options: Any
    ) -> tuple[Tensor, Any]:
        if "use_cache" not in self._keywords:
            del options["use_cache"]
        if keep is not None and "logits_to_keep" in self._keywords:
            options["logits_to_keep"] = keep
        made = model(tokens, **options)
        output, cache = _logits_of(made, tokens), options.get(self._cache_keyword)
        output = output if keep is None or "logits_to_keep" in options else output[:, keep]
        return output, stated(self._cache_keyword, made, default=cache)

    @torch.no_grad()
    def check_causal(self, tokens: Tensor, length: int) -> None:
        """ValueError unless texts of up to `length` tokens are read alike, whatever follows.

        Texts of lengths that double, from the longest one so far on, are compared with their first
        half and their first three quarters alone: two texts, since rounding may, rarely, send a
        token to another expert, of arbitrary ids, or of these `tokens` if the vocabulary is not
        known. All ranks have to read a sharded model equally often, so that it is compared once.
        """
        most = self.max_tokens or (2 * length if self.vocab_size else length)
        length = min(length, most)
        if length <= self.causal:
            return
        pool = torch.arange(min(self.vocab_size, 5)) if self.vocab_size else tokens.unique().cpu()
        generator = torch.Generator().manual_seed(0)
        texts = pool[torch.randint(len(pool), (2, most), generator=generator)].to(tokens.device)
        sharded = bool(sharded_parts(self))
        lm = copy.copy(self)
        vars(lm)["model"] = unwrapped(self.model)  # compiled, each length would be anew
        with torch.autocast(tokens.device.type, enabled=False), evaluating(self):
            while self.causal < length:
                n = length if sharded else min(2 * self.causal, most)
                if not all(lm._reads_alike(texts[:, :n], part) for part in (n // 2, 3 * n // 4)):
                    raise ValueError(NOT_CAUSAL.format(self.causal, n))
                self.causal = sys.maxsize if sharded else n

    def _reads_alike(self, texts: Tensor, n: int) -> bool:
        """Whether the first `n` tokens of texts (N, T) are read as they are alone."""
        last = torch.arange(max(0, n - 64), n, device=texts.device)
        alone, within = self(texts[:, :n], last), self(texts, last)
        self(texts[:, :1])  # dynamic NTK remembers the longest text until it reads a short one
        differ = [
            [not differ_by_rounding(*pair, self) for pair in zip(*rows, strict=True)]
            for rows in zip(within, alone, strict=True)
        ]
        precise = all(p.element_size() >= 4 for p in self.parameters())
        return min(map(sum, differ)) <= (0 if precise else len(last) // 2)


NOT_CAUSAL = (
    "`model` must be causal, but its outputs depend on later tokens: those of the first {0} tokens "
    "of a text are others where it has {1}. Use a decoder, in Hugging Face's configurations of "
    "encoders `is_decoder=True`; texts of at most {0} tokens, or a configuration that reads texts "
    "of all lengths alike, for longrope one with a `short_factor` that is equal to `long_factor`; "
    "and no quantization with one scale for all tokens, as by `quantize_dynamic`."
)


def _logits_of(output: Any, tokens: Tensor) -> Tensor:
    """Outputs (N, K, n_out) for ids (N, T), at least float32."""
    output = stated("logits", output, default=output)
    if stated("ndim", output) != 3:
        shape = f" of {tuple(stated('shape', output, default=()))}"
        raise ValueError(
            "`model` must return outputs (N, T, n_out), or an object that has them as "
            f"`.logits`, got {type(output).__name__}{shape} for ids {tuple(tokens.shape)}: use "
            "a Hugging Face `...ForCausalLM`, or `...ForTokenClassification` with num_labels=1 "
            "in place of `...ForSequenceClassification`."
        )
    # A log-softmax in bfloat16 would be off by a hundredth of a nat.
    return output.float() if output.element_size() < 4 else output


def differ_by_rounding(
    output: Tensor, expected: Tensor, model: nn.Module, size: float = 1.0
) -> bool:
    """Whether outputs (*B, n_out) of a model differ by no more than the rounding of its weights.

    `size`: the least largest number of which digits were rounded.
    """
    dtypes = [p.dtype for p in model.parameters() if p.is_floating_point()][:1]
    device = output.device.type
    if torch.is_autocast_enabled(device):
        dtypes.append(torch.get_autocast_dtype(device))
    # Models of Hugging Face compute some parts in float32 where their weights are float64.
    eps = max(torch.finfo(dtype).eps for dtype in (torch.float32, *dtypes))
    # A token that is never drawn, such as a banned one, may be any distance below the others.
    drawn = [logits > logits.amax(-1, keepdim=True) - 60 for logits in (output, expected)]
    output, expected = (logits[drawn[0] | drawn[1]] for logits in (output, expected))
    sizes = expected[expected.isfinite()].abs()
    size = max(size, sizes.max().item()) if len(sizes) else size
    # Right models were off by 1e-6 times their largest logit in float32, wrong ones by 1e-3.
    atol = 2 * eps ** (2 / 3) * size
    return bool(output.isclose(expected, rtol=eps, atol=atol, equal_nan=True).all())


class SplitLM:
    """The decoder of a model, and the model with a decoder that answers from memory.

    The model's own `forward` thus makes the logits of any hidden states, with all that belongs to
    its head: adapters, scales, caps, hooks. Weights and modes outside the decoder are those of now.
    The model needs `get_decoder`, which GPT and those of Hugging Face have.
    """

    def __init__(self, lm: CausalLM):
        inner = innermost(lm.model)
        decoder = inner.get_decoder()
        # That of Llama 4 returns the whole model.
        self._decoder = inner.model if decoder is inner else decoder
        self._lm = _without_decoder(lm, self._decoder, self._answer)
        self._whole = copy.copy(self._lm)  # it reads texts
        vars(self._whole)["model"] = in_wrapper(lm.model, self._lm.model)
        self._hidden: Tensor | None = None  # what the decoder answers; None: it is asked
        self._output: Any = None  # that of the decoder, in whatever form

    def _answer(self, *args: Any, **kwargs: Any) -> Any:
        if self._hidden is None:
            self._output = self._decoder(*args, **kwargs)
            return _with_hidden(self._output, _hidden_of(self._output)[:1, :1])
        return _with_hidden(self._output, self._hidden)

    def __call__(self, tokens: Tensor, keep: Tensor) -> Tensor:
        """The last hidden states of texts (N, T) at the positions `keep` (K,): (N, K, H)."""
        self._whole(tokens)
        return self._take(keep)

    def read(
        self, tokens: Tensor, cache: Any = None, keep: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """The same of tokens (N, T) that follow those in a cache, as `CausalLM.read`."""
        _, cache = self._whole.read(tokens, cache)
        return self._take(keep), cache

    def _take(self, keep: Tensor | None) -> Tensor:
        """The hidden states (N, K, H) of the last pass, which are forgotten, as is a cache."""
        hidden, fields = _hidden_of(self._output), stated("keys", self._output, default=tuple)()
        caches = dict.fromkeys({*CACHE_KEYWORDS} & {*fields})
        self._output = _with_hidden(self._output, hidden.new_empty(0), **caches)
        return hidden if keep is None else hidden[:, keep]

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
        # A sharded model is not asked: a rank with a smaller batch would not do so.
        problem = "its weights are sharded" if sharded_parts(lm) else _problem_in_parts(lm, tokens)
        lm.splits = not problem
        if problem:
            warnings.warn(
                "the head of this model does not work on a part of the positions alone "
                f"({problem}): the logits of a whole batch are held at once.",
                stacklevel=2,
            )
    return lm.splits


def _problem_in_parts(lm: CausalLM, tokens: Tensor) -> str:
    """Why the head of a model does not work on a part of the positions; empty if it does."""
    text = tokens[:1, :8]
    with torch.autocast(text.device.type, enabled=False), evaluating(lm):
        try:
            expected = lm(text)[0]
            split = SplitLM(lm)
            hidden = split(text, torch.arange(text.shape[1], device=text.device))[0]
            parts = torch.cat([split.logits(part) for part in hidden.split(3)])
            return "" if differ_by_rounding(parts, expected, lm) else "its logits differ"
        except Exception as error:  # the model's code may raise anything
            return f"{type(error).__name__}: {error}"


def _without_decoder(lm: CausalLM, decoder: Any, answer: Callable[..., Any]) -> CausalLM:
    """A model with `answer` for its decoder, and the tensors and settings that it has now."""
    memo: dict[int, Any] = {id(decoder): _Answering(decoder, answer)}  # and all that is not copied
    for part in lm.modules():
        held = (*vars(part).values(), *part.parameters(False), *part.buffers(False))
        memo.update((id(value), value) for value in held if isinstance(value, Tensor))
    memo[id(lm.model)] = copy.deepcopy(unwrapped(lm.model), memo)
    view = copy.deepcopy(lm, memo)
    if not isinstance(decoder, nn.Module):  # a method
        setattr(memo[id(decoder.__self__)], decoder.__name__, answer)
    return view


class _Answering(nn.Module):
    """A decoder whose calls a function answers; wrappers may ask for all else that it has."""

    def __init__(self, decoder: Any, answer: Callable[..., Any]):
        super().__init__()
        vars(self).update(decoder=decoder, forward=answer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.decoder, name)


def _hidden_of(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def _with_hidden(output: Any, hidden: Tensor, **fields: Any) -> Any:
    """An output of a decoder with other hidden states, and other fields."""
    if isinstance(output, Tensor):
        return hidden
    return replace(output, last_hidden_state=hidden, **fields)


def innermost(model: nn.Module) -> Any:
    """The module whose `forward` names its arguments, inside PEFT and other wrappers."""
    model = unwrapped(model)
    base = stated("get_base_model", model)
    return model if base is None else innermost(base())


def stated(name: str, *holders: Any, default: Any = None) -> Any:
    """What the first of the holders, models or their configurations, has under a name, not None."""
    found = (getattr(holder, name, None) for holder in holders)
    return next((value for value in found if value is not None), default)


def _text_config(model: nn.Module) -> Any:
    """A Hugging Face model's configuration; of one that reads images too, that of its texts."""
    config = stated("config", model)
    find = stated("get_text_config", config)
    return config if find is None else find(decoder=True)


def _most_positions(model: nn.Module, config: Any) -> int | None:
    """How many tokens a table of positions has room for; None if a model has no such table."""
    names = ("max_position_embeddings", "max_target_positions")
    limit = next((found for name in names if (found := stated(name, config))), None)
    if limit is None:  # that of MPT's biases
        return stated("max_seq_len", config)
    for name, table in (*model.named_modules(), *model.named_buffers()):
        if "pos" not in name and "wpe" not in name:
            continue
        if isinstance(table, nn.Embedding):
            if table.num_embeddings - stated("offset", table, default=0) == limit:
                padding = table.padding_idx  # RoBERTa's positions begin after it
                return limit if padding is None else limit - padding - 1
        elif isinstance(table, Tensor) and table.shape[:1] == (limit,):
            return limit
    return None
