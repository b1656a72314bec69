"""The blocks of a GPT, and the keys and values that they keep.

Axes: N texts, T new tokens, S tokens up to the last new one, H heads, D width of a head.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import _has_any_global_hook

from torchrl_kl.actors.parallel import local

# PyTorch multiplies matrices by a slow loop if they need fewer multiplications than that.
_SMALL_PRODUCT = 400

Keep = Tensor | slice | None  # positions whose outputs are wanted; None: all of them


class Growing:
    """Keys and values of an attention layer, (N, H, S, D), with room for those of later tokens.

    The layers of GPT's cache. Plain attention layers of Hugging Face's caches, which concatenate at
    each token, become such ones.
    """

    keys: Any = None
    values: Any = None
    room = 0  # how many tokens there will be, if that is known
    _buffers: tuple[Tensor, ...] = ()  # of which they are the first part; none before it is needed

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Appends those of new tokens (N, H, T, D); returns all."""
        if self.keys is None:
            self.keys, self.values = keys, values
            return keys, values
        start, new = self.keys.shape[2], (keys, values)
        end = start + keys.shape[2]
        if end > self.room:  # such as with gradients, which need what was there
            self.keys, self.values = (
                torch.cat(both, 2) for both in zip((self.keys, self.values), new, strict=True)
            )
            return self.keys, self.values
        if not self._buffers:
            self._buffers = tuple(_with_room(x, self.room) for x in (self.keys, self.values))
        for buffer, part in zip(self._buffers, new, strict=True):
            buffer.narrow(2, start, end - start).copy_(part)
        self.keys, self.values = (buffer.narrow(2, 0, end) for buffer in self._buffers)
        return self.keys, self.values

    def reorder_cache(self, index: Tensor) -> None:
        """Keeps those of the texts `index`, in this order."""
        both = (self.keys, self.values)  # layers may be on several devices
        self.keys, self.values = (x.index_select(0, index.to(x.device)) for x in both)
        self._buffers = ()


def _with_room(held: Tensor, n_slots: int) -> Tensor:
    n_texts, n_head, n_read, width = held.shape
    if n_slots <= 48:  # slots come first in memory, where attention of one position is faster
        buffer = held.new_empty(n_slots, n_texts, n_head, width).permute(1, 2, 0, 3)
    else:
        buffer = held.new_empty(n_texts, n_head, n_slots, width)
    buffer[:, :, :n_read] = held
    return buffer


class KeyValues:
    """The cache of a GPT; it is used as Hugging Face's are."""

    def __init__(self, n_layer: int):
        self.layers = [Growing() for _ in range(n_layer)]

    def __len__(self) -> int:
        """How many tokens were read."""
        keys = self.layers[0].keys
        return 0 if keys is None else keys.shape[2]

    def reorder_cache(self, index: Tensor) -> None:
        """Keeps the texts `index`, in this order."""
        for layer in self.layers:
            layer.reorder_cache(index)


class Attention(nn.Module):
    """Causal attention with several heads."""

    calls_parts = True

    def __init__(self, layer: int, n_head: int, n_embd: int, dropout: float):
        super().__init__()
        self.layer = layer
        self.n_head = n_head
        self.dropout = dropout
        self.query_key_value = nn.Linear(n_embd, 3 * n_embd)
        self.project = nn.Linear(n_embd, n_embd)

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values, each (N, H, T, D)."""
        joint, (n_texts, n_tokens, width) = self.query_key_value(x), x.shape
        head_width = width // self.n_head
        if n_tokens == 1:
            return joint.view(n_texts, 3, self.n_head, 1, head_width).unbind(1)
        joint = joint.view(n_texts, n_tokens, 3, self.n_head, head_width)
        return joint.permute(2, 0, 3, 1, 4).unbind(0)

    def forward(self, x: Tensor, cache: KeyValues | None = None, keep: Keep = None) -> Tensor:
        """What the positions `keep` attend to, of the new ones and of those in the cache."""
        query, key, value = self.heads(x)
        if cache is not None:
            key, value = cache.layers[self.layer].update(key, value)
        drop = self.dropout if self.training else 0.0
        n_new = x.shape[1]
        n_all = key.shape[2]
        if n_new == 1 and not drop:
            mixed = _attend_one(query, key, value)
        else:
            mask = None
            if 1 < n_new < n_all:
                mask = torch.ones(n_new, n_all, dtype=torch.bool, device=x.device)
                mask = mask.tril(n_all - n_new)
            causal = n_new == n_all
            mixed = F.scaled_dot_product_attention(query, key, value, mask, drop, is_causal=causal)
            mixed = mixed.transpose(1, 2).reshape(x.shape)
        return self.project(mixed if keep is None else mixed[:, keep])

    def maps(self, x: Tensor) -> Tensor:
        """Attention from t to s, (N, H, T, T)."""
        query, key, _ = self.heads(x)
        scores = query @ key.mT / math.sqrt(key.shape[-1])
        future = torch.ones_like(scores, dtype=torch.bool).triu(1)
        return scores.masked_fill(future, -math.inf).softmax(-1)


# Without it, 4 tokens of a small GPT took 1.02 to 1.04 (64 texts), 1.12 to 1.18 times (1024).
def _attend_one(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of one position, (N, H, 1, D), to S keys and values (N, H, S, D): (N, 1, H * D).

    The fused kernel is made for many positions.
    """
    n_texts, n_head, _, width = query.shape
    scale, shape = width**-0.5, (n_texts, 1, n_head * width)
    if key.shape[2] * width < _SMALL_PRODUCT:
        key, value = key.permute(2, 0, 1, 3), value.permute(2, 0, 1, 3)  # (S, N, H, D)
        scores = (key * query.squeeze(2)).sum(-1).mul_(scale)
        return (scores.softmax(0).unsqueeze(-1) * value).sum(0).view(shape)
    query, key, value = query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)
    scores = torch.baddbmm(query.new_empty(()), query, key.mT, beta=0, alpha=scale)
    return torch.bmm(scores.softmax(-1), value).view(shape)


class Block(nn.Module):
    """Attention and a two-layer network, each added to its input (N, T, H * D)."""

    calls_parts = True

    def __init__(self, layer: int, n_head: int, n_embd: int, dropout: float):
        super().__init__()
        self.attention_norm = nn.LayerNorm(n_embd)
        self.attention = Attention(layer, n_head, n_embd, dropout)
        self.mlp_norm = nn.LayerNorm(n_embd)
        self.expand = nn.Linear(n_embd, 4 * n_embd)
        self.project = nn.Linear(4 * n_embd, n_embd)
        self.dropout = dropout

    def forward(self, x: Tensor, cache: KeyValues | None = None, keep: Keep = None) -> Tensor:
        """(N, T, H * D) to the positions `keep`, (N, K, H * D)."""
        drop = self.dropout if self.training else 0.0
        mixed = self.attention(self.attention_norm(x), cache, keep)
        x = x if keep is None else x[:, keep]
        x = x + (F.dropout(mixed, drop) if drop else mixed)
        hidden = self.project(F.gelu(self.expand(self.mlp_norm(x)), approximate="tanh"))
        return x + (F.dropout(hidden, drop) if drop else hidden)


# Without it, 4 tokens of a small GPT took 1.07 to 1.09 (64 texts), 1.00 to 1.06 times (1024).
def fast(module: Any) -> Any:
    """What a module computes, with fewer calls of modules.

    To be used at once. Parts that are hooked, compiled or of another class are called as modules.
    """
    module = local(module)
    kind = type(module)
    hooks = module._forward_hooks or module._forward_pre_hooks or module._compiled_call_impl
    if hooks or "forward" in vars(module) or _has_any_global_hook():
        return module
    if kind is nn.ModuleList:
        return [fast(part) for part in module]
    if kind is nn.Linear:
        return partial(F.linear, weight=module.weight, bias=module.bias)
    if kind is nn.LayerNorm:
        shape, eps = module.normalized_shape, module.eps
        return partial(
            F.layer_norm, normalized_shape=shape, weight=module.weight, bias=module.bias, eps=eps
        )
    if not vars(kind).get("calls_parts"):
        return module
    view: Any = object.__new__(kind)
    # Entries of `vars` are found before submodules are.
    vars(view).update(vars(module))
    vars(view).update((name, fast(part)) for name, part in module._modules.items())
    return view.forward
