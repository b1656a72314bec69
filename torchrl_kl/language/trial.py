"""A trial of whether a model computes the same with cached keys and values as without."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from torchrl_kl.actors.policy import evaluating
from torchrl_kl.actors.reading import has_compiled_parts
from torchrl_kl.language.cache import KeyValueCache
from torchrl_kl.language.causal_lm import CausalLM


def may_cache(lm: CausalLM) -> bool:
    """Whether keys and values of the model may be cached: tried once, on two short texts.

    Some models number positions in a way of their own, or expect a mask of another kind. A model
    of which the outputs depend on later tokens raises a ValueError.
    """
    check_causal(lm)
    if not lm.tried:
        problem = _find_problem(lm)
        lm.tried = True
        if problem is not None:
            lm.caches = False
            warnings.warn(
                f"keys and values of this model cannot be cached ({problem}): each step of a "
                "rollout reads whole texts.",
                stacklevel=2,
            )
    return lm.caches


def warn_if_not_causal(lm: CausalLM) -> None:
    """Warns if a model that learns depends on later tokens where texts are only scored.

    A compiled one, which would be compiled for more shapes, is not tried.
    """
    if lm.causal or has_compiled_parts(lm) or not any(p.requires_grad for p in lm.parameters()):
        return
    try:
        check_causal(lm)
    except ValueError as error:
        lm.causal = True  # warned once
        warnings.warn(
            f"{error} The KL of such a model is not that of texts that it samples.", stacklevel=2
        )


@torch.no_grad()
def check_causal(lm: CausalLM) -> None:
    """ValueError if the outputs of a model depend on later tokens: tried once, on short texts."""
    texts = None if lm.causal else _texts(lm)
    if texts is None:
        return
    tokens, _, weight = texts
    shorter = tokens[:, :-1]  # some models read tokens otherwise in texts of another length
    with torch.autocast(weight.device.type, enabled=False), evaluating(lm):
        lm.causal = _close(lm(shorter), lm(tokens)[:, :-1], weight.dtype)
    if not lm.causal:
        raise ValueError(
            "`model` must be causal, but its outputs depend on later tokens: use a decoder, in "
            "Hugging Face's configurations of encoders `is_decoder=True`, and no quantization "
            "with one scale for all tokens, as by `quantize_dynamic`."
        )


def _texts(lm: CausalLM) -> tuple[Tensor, Tensor, Tensor] | None:
    """Two texts, their numbers, and a weight; None if the model reads only one or two tokens."""
    n_tokens = 5 if lm.max_tokens is None else min(5, lm.max_tokens)
    weight = next((p for p in lm.parameters() if p.is_floating_point()), torch.zeros(()))
    if n_tokens < 3:
        return None
    tokens = torch.tensor([[0, 1, 0, 1, 1], [1, 0, 0, 1, 0]], device=weight.device)
    tokens = tokens[:, :n_tokens].clamp(max=(lm.vocab_size or 2) - 1)
    return tokens, torch.arange(2, device=tokens.device), weight


def _find_problem(lm: CausalLM) -> str | None:
    """What differs with a cache from without, for texts of equal and of different lengths."""
    texts = _texts(lm)
    if not lm.caches or texts is None:
        return None
    tokens, each, weight = texts
    n_tokens = tokens.shape[1]
    with torch.inference_mode(), torch.autocast(weight.device.type, enabled=False), evaluating(lm):
        for last in (torch.full_like(each, n_tokens - 1), each + (n_tokens - 2)):
            expected = lm.at(tokens, each, last)
            try:
                output = _read_with_cache(lm, tokens, last)
            except Exception as error:  # the model's code may raise anything
                return f"it raised {type(error).__name__}: {error}"
            if not _close(output, expected, weight.dtype):
                return f"its outputs differ by {(output - expected).abs().max().item():.2g}"
    return None


def _close(output: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Whether outputs of weights of a dtype differ by rounding only."""
    # Models of Hugging Face compute some parts in float32 where their weights are float64.
    eps = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    # How far a token is below that is never drawn, such as a banned one, does not matter.
    floor, own_floor = (each.amax(-1, keepdim=True) - 60 for each in (expected, output))
    sizes = expected.abs().where(expected > floor, 0.0).nan_to_num(posinf=0.0)
    atol = eps**0.5 * sizes.max().item()
    output, expected = output.clamp(min=own_floor), expected.clamp(min=floor)
    return bool(output.isclose(expected, rtol=eps, atol=atol, equal_nan=True).all())


def _read_with_cache(lm: CausalLM, tokens: Tensor, last: Tensor) -> Tensor:
    """Outputs at the positions `last`, after those before them were read into a cache."""
    cache, width = KeyValueCache(*tokens.shape), tokens.shape[1]
    cache.read_texts(lm, tokens[:, : width - 1], last - 1)
    slots = width - 1 if (last == width - 1).all() else last
    return cache.read_next(lm, tokens.gather(1, last[:, None])[:, 0], slots, width)
