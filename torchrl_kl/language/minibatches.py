"""Minibatches of whole responses: N of T tokens at most, in texts of L tokens at most."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from torchrl_kl.batches import MASK_KEY, expand_right
from torchrl_kl.functional.numbers import check_count
from torchrl_kl.keys import as_tuple, get_required
from torchrl_kl.language.reader import check_one_per_text
from torchrl_kl.transforms.base import check_batch


def minibatches(
    batch: TensorDictBase,
    n_tokens: int,
    *,
    shuffle: bool = True,
    generator: torch.Generator | None = None,
    in_keys: Sequence[NestedKey] = ("tokens", "position"),
) -> Iterator[TensorDictBase]:
    """Splits a batch (N, T) into parts of responses of similar length, each cut to its longest.

    Responses to one prompt are kept together if reading it once would save a tenth of all tokens. A
    part stores each text once; `batch[rows]` copies it for every token.

    TorchRL's losses are means over the steps that count. The mean of a batch, and its gradient, is
    the sum over parts of `part["collector", "mask"].sum() / batch["collector", "mask"].sum()` times
    that of the part; for a mean over responses, of `len(part) / N`. What a loss normalizes by its
    input, such as advantages, is normalized within a part.

    Args:
        batch: in the layout of `sample_responses` and `as_steps`. Entries become (n, T', ...),
            texts (n, T', L'). Without ("collector", "mask") all steps count.
        n_tokens: the most tokens in the texts of a part together, with prompts and padding. A
            longer text is a part of its own.
        shuffle: whether parts are in random order, and texts of equal length in random parts.
        generator: of this order.
        in_keys: text and position, as those of the actor.

    Raises:
        TypeError, ValueError, KeyError: the batch is not (N, T) or lacks texts and positions, or
            `n_tokens` is below 1.

    Example:
        >>> import torch
        >>> from torchrl_kl.language import GPT, CausalLMActor, minibatches, sample_responses
        >>> actor, prompts = CausalLMActor(GPT(11, block_size=24)), torch.randint(11, (8, 4))
        >>> batch = sample_responses(actor, prompts, 20, pad_token=0, eos_token=7)
        >>> sum(len(part) for part in minibatches(batch, n_tokens=48))
        8
    """
    check_count("n_tokens", n_tokens)
    check_batch(batch)
    if batch.batch_dims != 2:
        raise ValueError(
            "`batch` must be responses (N, T), as of `sample_responses` or `as_steps`, got batch "
            f"size {tuple(batch.batch_size)}: split it before steps are flattened or shuffled."
        )
    fix = "minibatches are cut by it: pass `in_keys` as to CausalLMActor."
    tokens, position = (get_required(batch, key, fix) for key in in_keys)
    check_one_per_text(position, tokens)
    mask = expand_right(batch.get(MASK_KEY, torch.ones_like(position).bool()), position.shape)
    steps, start = torch.arange(1, batch.shape[1] + 1, device=mask.device), position[:, 0]
    sizes = torch.stack([torch.where(mask, n, 1).amax(1) for n in (steps, position + 1)], 1)
    in_prompt = torch.arange(tokens.shape[-1], device=mask.device) < start[:, None]
    _, groups = tokens[:, 0].where(in_prompt, -1).unique(dim=0, return_inverse=True)
    lengths = sizes[:, 1]
    longest = torch.zeros_like(lengths).scatter_reduce(0, groups, lengths, "amax")[groups]
    read_once = (start * (1 - 1 / groups.bincount()[groups])).sum()
    pays = read_once - (longest - lengths).sum() > 0.1 * lengths.sum()

    def order(n: int) -> Tensor:
        device = None if generator is None else generator.device
        rows = torch.randperm(n, generator=generator, device=device) if shuffle else torch.arange(n)
        return rows.to(mask.device)

    rows = order(len(batch))
    for key in (lengths, groups, longest) if pays else (lengths,):  # the last one counts most
        rows = rows[key[rows].argsort(descending=True, stable=True)]
    counts, widest = [], 0
    for length in lengths[rows].tolist():
        widest = max(widest, length)
        if not counts or (counts[-1] + 1) * widest > n_tokens:
            counts.append(0)
            widest = length
        counts[-1] += 1
    parts = rows.split(counts)
    chosen = (parts[i] for i in order(len(parts)).tolist())
    return (_take(batch, each, sizes[each].amax(0).tolist(), in_keys) for each in chosen)


def _take(
    batch: TensorDictBase, rows: Tensor, size: list[int], in_keys: Sequence[NestedKey]
) -> Any:
    """Rows of a batch, cut to a size: so many steps, and so many tokens of a text."""
    n_steps, width = size
    tokens, position = map(as_tuple, in_keys)
    most = {position: width - 1, ("next", *position): width}

    def take(key: NestedKey, value: Tensor) -> Tensor:
        key = as_tuple(key)
        value = value[..., :width] if key in (tokens, ("next", *tokens)) else value
        if value.stride(1) == 0:  # the same for all steps, and so it stays
            return value[:, :1][rows].expand(-1, n_steps, *value.shape[2:])
        value = value[:, :n_steps][rows]
        return value.clamp(max=most[key]) if key in most else value

    shape = [len(rows), n_steps]
    return batch.named_apply(take, nested_keys=True, batch_size=shape, names=batch.names)
