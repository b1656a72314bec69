"""Outputs at positions of texts, of which equal prompts are read once.

Axes: N texts, R of them, T tokens, K positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchrl_kl.actors.parallel import sharded_parts, unwrapped
from torchrl_kl.actors.policy import evaluating
from torchrl_kl.language.causal_lm import CausalLM, SplitLM, differ_by_rounding, stated

_TOGETHER = 2048  # tokens whose keys stay in the cache of a CPU; 16 times as many fill no memory
_LEAST_SAVED = 256  # positions that cost as much as a second pass of a small model


def read_at(
    lm: CausalLM, tokens: Tensor, row: Tensor, last: Tensor, split: SplitLM | None = None
) -> Tensor:
    """Outputs of texts (N, T) at pairs of a row and a position, (K,) each: (K, n_out).

    With `split`, hidden states. Only positions from the first to the last one asked for go through
    the output layer. Prompts, the tokens up to the first position that is asked for in a row, are
    read once where many are equal, with the model's own cache, which gradients pass through; these
    rows share the dropout of their prompt. Whole rows are read of models in wrappers, such as those
    of torch.compile and of several processes, and where a cache computes something else.
    """
    if not len(last):  # models of Hugging Face read no empty batch
        return lm(tokens.new_zeros(1, 1))[:0, 0]
    last = last.long()
    first = last.new_full((len(tokens),), tokens.shape[1]).scatter_reduce(0, row, last, "amin")
    end = torch.zeros_like(first).scatter_reduce(0, row, last + 1, "amax")
    base = torch.empty_like(first)  # where the outputs of each row would begin
    reader: CausalLM | SplitLM = split or lm
    found: list[Tensor] = []
    n_found = 0
    for rows, prompt in _parts(lm, reader, tokens, first, end):
        texts = tokens[rows, : int(end[rows].max())]
        start = int(first[rows].min())
        output = _read(reader, texts, start, prompt)
        base[rows] = torch.arange(len(rows), device=base.device) * output.shape[1] + n_found - start
        found.append(output.flatten(0, 1))
        n_found += len(found[-1])
    return (found[0] if len(found) == 1 else torch.cat(found))[base[row] + last]


def _parts(
    lm: CausalLM, reader: Any, tokens: Tensor, first: Tensor, end: Tensor
) -> list[tuple[Tensor, Tensor | None]]:
    """Rows (R,) that are read together, and the number of the prompt of each; None: read whole."""
    grad, cpu = torch.is_grad_enabled(), tokens.device.type == "cpu"
    n_most = max(1, 16 * _TOGETHER // int(end.max()))
    n_together = max(1, _TOGETHER // int(end.max())) if cpu else n_most
    whole = first < end
    parts: list[tuple[Tensor, Tensor | None]] = []
    for n in first[first < end - 1].unique().tolist():
        rows = (first == n).nonzero()[:, 0]
        texts = tokens[rows, : int(end[rows].max())]
        prompts = texts[:, : n + 1]
        least = _LEAST_SAVED + 0.1 * texts.numel()
        if prompts.numel() < least:
            continue
        unique, prompt = prompts.unique(dim=0, return_inverse=True)
        sizes = prompt.bincount()
        saved = prompts.numel() - unique.numel()
        if saved < least or not _reads_once(lm, reader, texts, n, prompt):
            continue
        whole[rows] = False
        part = torch.zeros_like(prompt)
        if not grad:  # whole groups together, unless a group is too large
            before = (sizes.cumsum(0) - sizes)[prompt]  # rows of earlier groups
            place = prompt.argsort(stable=True).argsort() - before  # in its own one
            pairs = torch.stack([before // n_together, place // n_most], 1)
            part = pairs.unique(dim=0, return_inverse=True)[1]
        for i in part.unique().tolist():
            some = (part == i).nonzero()[:, 0]
            parts.append((rows[some], prompt[some] - prompt[some].min()))
    rows = whole.nonzero()[:, 0]
    some = rows.split(n_together if cpu and not grad else len(tokens))
    return [*parts, *((each, None) for each in some if len(each))]


def _read(reader: Any, texts: Tensor, start: int, prompt: Tensor | None) -> Tensor:
    """Outputs (R, K, n_out) of texts (R, T) from the position `start` on."""
    if prompt is None:
        return reader(texts, torch.arange(start, texts.shape[1], device=texts.device))
    rows = torch.arange(len(texts), device=texts.device)
    one = torch.empty_like(prompt).scatter_(0, prompt, rows)[: int(prompt.max()) + 1]
    keep = torch.tensor([start], device=texts.device)
    output, cache = reader.read(texts[one, : start + 1], None, keep)
    if texts.shape[1] == start + 1:
        return output[prompt]
    cache.reorder_cache(prompt)
    return torch.cat([output[prompt], reader.read(texts[:, start + 1 :], cache)[0]], 1)


def _reads_once(lm: CausalLM, reader: Any, texts: Tensor, start: int, prompt: Tensor) -> bool:
    """Whether texts (R, T) can be read so, which is compared where a length has doubled."""
    wrapped = unwrapped(lm.model) is not lm.model or sharded_parts(lm)
    # The cache would lack layers.
    names = ("gradient_checkpointing", "layerdrop")
    partial = any(m.training and any(stated(name, m) for name in names) for m in lm.modules())
    if wrapped or partial or not lm.caches:
        return False
    known = lm.read_once[torch.is_grad_enabled()]
    n_learning = sum(weight.requires_grad for weight in lm.parameters())
    key = start.bit_length(), texts.shape[1].bit_length(), n_learning
    if False not in known.values() and key not in known:
        pair = (prompt == prompt.bincount().argmax()).nonzero()[:2, 0]  # of the largest group
        some = torch.cat([texts[pair[:1]].flip(1), texts[pair]])
        groups = prompt.new_tensor([1, 0, 0])
        with torch.autocast(texts.device.type, enabled=False), evaluating(lm):
            try:
                output, slope = _with_gradient(lm, reader, some, start, groups)
                expected, true_slope = _with_gradient(lm, reader, some, start, None)
                # Of hidden states none is far below the others, as logits of banned tokens are.
                size = 1.0 if reader is lm else expected.abs().max()
                known[key] = differ_by_rounding(output / size, expected / size, lm)
                size = true_slope.abs().max().clamp(min=1e-30)
                known[key] &= differ_by_rounding(slope / size, true_slope / size, lm)
            except Exception:  # the model's code may raise anything, such as where it has no cache
                known[key] = False
    return False not in known.values()


def _with_gradient(
    lm: CausalLM, reader: Any, texts: Tensor, start: int, prompt: Tensor | None
) -> tuple[Tensor, Tensor]:
    """What `_read` returns, and the gradient of a weighted sum of it, of the smallest weights.

    These are in all layers, and need little memory.
    """
    output = _read(reader, texts, start, prompt)
    weights = [weight for weight in lm.parameters() if weight.requires_grad]
    if not (torch.is_grad_enabled() and weights):
        return output, torch.ones(1)
    weights = sorted(weights, key=Tensor.numel)[:64]
    signs = torch.randn(output.shape, generator=torch.Generator().manual_seed(0))
    value = (output * signs.to(output)).sum()
    found = torch.autograd.grad(value, weights, allow_unused=True, materialize_grads=True)
    return output.detach(), torch.cat([each.flatten().cpu() for each in found])
