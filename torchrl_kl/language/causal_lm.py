"""Calling a causal language model, whoever wrote it. Axes: N texts, T tokens, K positions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from torchrl_kl.language.bare import of_parts

READ_TOGETHER = 2048  # tokens, without gradients on a CPU
CACHE_KEYWORDS = {"past_key_values", "position_ids", "attention_mask"}


@of_parts
class CausalLM(nn.Module):
    """A module that maps token ids (N, T) to outputs (N, T, n_out), such as next-token logits.

    The result may have the outputs as `.logits`. Keywords of Hugging Face's models are used where
    the model's `forward` has them.

    Args:
        model: a GPT, a Hugging Face model, also with PEFT's adapters or compiled, or any module.
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
        _check_adapters(model)
        self._keywords = frozenset(inspect.signature(_innermost(model).forward).parameters)
        if "decoder_input_ids" in self._keywords:
            raise ValueError(
                f"`model` must be causal, but {type(_innermost(model)).__name__} has an encoder, "
                "which sees whole texts: use a decoder alone, a Hugging Face `...ForCausalLM`."
            )
        # Whether its keys and values may be cached: no longer once a trial of it has failed.
        self.caches = self._keywords >= CACHE_KEYWORDS and _attends_to_all(model)
        self.tried = self.causal = False  # whether it was tried if it caches, and found causal
        # Sizes, where the model states them: by the names of GPT, or in Hugging Face's `config`.
        inner = _innermost(model)
        config = _text_config(inner)
        self.n_out: int | None = getattr(inner, "n_out", None)
        vocab_size = getattr(config, "vocab_size", None)
        self.vocab_size: int | None = getattr(inner, "vocab_size", vocab_size)
        limit = getattr(inner, "block_size", _most_positions(config))
        self.max_tokens: int | None = limit if limit is None or limit > 0 else None
        # Up to how many slots attention is faster if those of a cache come first in memory.
        self.slots_first: int = getattr(inner, "slots_first", 16)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> CausalLM:
        # In half precision, far positions would be rotated by other angles: Hugging Face's
        # `from_pretrained(dtype=...)` does not round these frequencies either.
        exact = [
            (module._buffers, name, value)
            for module in self.modules()
            for name, value in module._buffers.items()
            if value is not None and not value.is_meta and name.endswith("inv_freq")
        ]
        super()._apply(fn, recurse)
        for buffers, name, value in exact:
            buffers[name] = value.to(cast(Tensor, buffers[name]).device)
        return self

    def forward(self, tokens: Tensor, keep: Tensor | None = None, **options: Any) -> Tensor:
        """Outputs at the positions `keep` (K,), or at all: (N, K, n_out), at least float32.

        `options`: past_key_values, position_ids and attention_mask, for models that cache.
        """
        if "use_cache" in self._keywords:
            options["use_cache"] = "past_key_values" in options
        if keep is not None and "logits_to_keep" in self._keywords:
            options["logits_to_keep"] = keep
        model = self.model
        if "past_key_values" in options:  # torch.compile would compile each length anew
            model = getattr(model, "_orig_mod", model)
        output = model(tokens, **options)
        output = output if isinstance(output, Tensor) else getattr(output, "logits", output)
        if not isinstance(output, Tensor) or output.ndim != 3:
            shape = f" of {tuple(output.shape)}" if isinstance(output, Tensor) else ""
            raise ValueError(
                "`model` must return outputs (N, T, n_out), or an object that has them as "
                f"`.logits`, got {type(output).__name__}{shape} for ids {tuple(tokens.shape)}: use "
                "a Hugging Face `...ForCausalLM`, or `...ForTokenClassification` with num_labels=1 "
                "in place of `...ForSequenceClassification`."
            )
        if keep is not None and "logits_to_keep" not in options:
            output = output[:, keep]
        # A log-softmax in bfloat16 would be off by a hundredth of a nat.
        return output.float() if output.element_size() < 4 else output

    def at(self, tokens: Tensor, row: Tensor, last: Tensor, **options: Any) -> Tensor:
        """Outputs of texts (N, T) at pairs of a row and a position, (K,) each: (K, n_out).

        Only positions from the first to the last one asked for go through the output layer.
        """
        if not len(last):  # models of Hugging Face read no empty batch
            return self(tokens.new_zeros(1, 1))[:0, 0]
        first, final = (int(value) for value in last.aminmax())
        keep = torch.arange(first, final + 1, device=tokens.device)
        tokens = tokens[:, : final + 1]
        if options or torch.is_grad_enabled() or tokens.device.type != "cpu":
            return self(tokens, keep, **options)[row, last - first]
        # What a few texts compute stays in the processor's cache.
        parts = tokens.split(max(1, READ_TOGETHER // (final + 1)))
        return torch.cat([self(part, keep) for part in parts])[row, last - first]


def _innermost(model: nn.Module) -> nn.Module:
    """The module whose `forward` names its arguments, inside PEFT and torch.compile."""
    model = getattr(model, "_orig_mod", model)
    if hasattr(model, "get_base_model"):
        return _innermost(model.get_base_model())  # type: ignore[operator]
    return model


def _text_config(model: nn.Module) -> Any:
    """A Hugging Face model's configuration; of one that reads images too, that of its texts."""
    config = getattr(model, "config", None)
    find = getattr(config, "get_text_config", None)
    return config if find is None else find(decoder=True)


def _check_adapters(model: nn.Module) -> None:
    """Refuses PEFT's prompts, which move the positions of outputs, and adapters of later tokens."""
    model = getattr(model, "_orig_mod", model)
    for name, config in getattr(model, "peft_config", {}).items():
        if getattr(config, "num_virtual_tokens", None) and config.peft_type != "PREFIX_TUNING":
            raise ValueError(
                f"`model` must have one output per token, but its adapter {name!r} of type "
                f"{config.peft_type.value} adds {config.num_virtual_tokens} virtual tokens: use an "
                "adapter of the weights, such as LoRA."
            )
        if getattr(config, "alora_invocation_tokens", None):
            raise ValueError(
                f"`model` must be causal, but its adapter {name!r} begins at the last tokens "
                f"{config.alora_invocation_tokens} of a text, so that outputs depend on later "
                "tokens: use LoRA without `alora_invocation_tokens`."
            )


def _most_positions(config: Any) -> int | None:
    """How many tokens a Hugging Face model reads, if its configuration says so.

    Of two scales of positions (LongRoPE), as many as have the first one: in a longer text, also
    the first tokens would have other outputs than they had in a rollout.
    """
    limit = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if rope.get("rope_type", rope.get("type")) != "longrope":
        return limit
    first = getattr(config, "original_max_position_embeddings", limit)
    return rope.get("original_max_position_embeddings", first)


def _attends_to_all(model: nn.Module) -> bool:
    """Whether all layers attend to the whole text, as a model without a `config` is taken to do."""
    config = _text_config(_innermost(model))
    layers = getattr(config, "layer_types", None) or ["full_attention"]
    layers = [*layers, *getattr(config, "attention_layers", ())]  # GPT-Neo's name
    slides = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    masks = getattr(config, "_attn_implementation", "sdpa") in ("sdpa", "eager")
    return masks and not slides and set(layers) <= {"full_attention", "global"}
