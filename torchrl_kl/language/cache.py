"""Keys and values of the texts of a rollout, so that a step computes one new position per text.

Axes: N texts (rows), R some of them, L length of a whole text, W the longest prefix that is read,
H heads, D width of a head.
"""

from __future__ import annotations

import copy
import warnings
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torchrl_kl.actors.parallel import without_gradients
from torchrl_kl.actors.policy import evaluating
from torchrl_kl.language.blocks import fast
from torchrl_kl.language.causal_lm import CausalLM, differ_by_rounding


class KeyValueCache:
    """Preallocated keys and values of N texts, which the attention layers of a model share.

    A model takes it as `past_key_values` or `cache`. Each text begins in slot 0, so that texts of
    any lengths up to `capacity` share the buffers, of 2 * layers * H * D numbers per row and token.
    """

    is_compileable = False  # asked by Hugging Face's models

    def __init__(self, n_rows: int, capacity: int):
        self.n_rows, self.capacity = n_rows, capacity
        self.buffers: list[tuple[Tensor, Tensor]] = []  # of each layer: (N, H, capacity, D)
        self._rows: Tensor | None = None  # those that are read from slot 0; None: all of them
        self._slots: int | Tensor | None = None  # of the next position; None: read from slot 0
        self._width = 0  # how many slots attention reads

    def read_texts(
        self, lm: CausalLM, tokens: Tensor, last: Tensor, rows: Tensor | None = None
    ) -> Tensor:
        """Reads texts (R, W) into `rows`; the outputs (R, n_out) at their positions `last`."""
        self._rows = rows
        self._slots = None
        self._width = 0
        every = torch.arange(len(tokens), device=tokens.device)
        return lm.at(tokens, every, last, cache=self)

    def read_next(self, lm: CausalLM, token: Tensor, slots: int | Tensor, width: int) -> Tensor:
        """Reads one more token (N,) of each text into its slot; the outputs (N, n_out) there.

        `slots`: one number where all texts are equally long. `width`: the largest slot plus 1.
        """
        self._rows = None
        self._slots = slots
        self._width = width
        options: dict[str, Any] = {"cache": self}
        if isinstance(slots, int):
            options["position_ids"] = token.new_full((1, 1), slots)
        else:
            options["position_ids"] = slots[:, None]
            unread = torch.arange(width, device=token.device) > slots[:, None]
            dtype = self.buffers[0][0].dtype
            # Added to the scores: 0, or the lowest number where nothing may be read.
            mask = torch.zeros_like(unread, dtype=dtype)
            mask.masked_fill_(unread, torch.finfo(dtype).min)
            options["attention_mask"] = mask[:, None, None]
        return lm(token[:, None], **options)[:, 0]

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Writes new keys and values (R, H, T, D); returns those that attention reads."""
        if layer_idx == len(self.buffers):
            # Zeros, since slots that a mask hides must not hold NaN.
            pair = (keys, values)
            # Slots come first in memory, where attention of one position reads them faster.
            new = [
                x.new_zeros(self.capacity, self.n_rows, x.shape[1], x.shape[3]).permute(1, 2, 0, 3)
                if self.capacity <= 48
                else x.new_zeros(self.n_rows, x.shape[1], self.capacity, x.shape[3])
                for x in pair
            ]
            self.buffers.append((new[0], new[1]))
        held = self.buffers[layer_idx]
        for buffer, new in zip(held, (keys, values), strict=True):
            if isinstance(self._slots, int):
                buffer.narrow(2, self._slots, 1).copy_(new)
            elif self._slots is not None:
                every = torch.arange(self.n_rows, device=new.device)
                buffer[every, :, self._slots] = new[:, :, 0]
            elif self._rows is None:
                buffer[:, :, : new.shape[2]] = new
            else:
                buffer[self._rows, :, : new.shape[2]] = new
        if self._slots is None:
            return keys, values
        return held[0].narrow(2, 0, self._width), held[1].narrow(2, 0, self._width)

    # Hugging Face's models build their masks from these.

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """How many positions are before the new one."""
        return max(self._width - 1, 0)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """The slot of the first new position."""
        return self.get_seq_length()

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """How many positions attention reads, and the first of them."""
        return self._width or query_length, 0


def may_cache(lm: CausalLM, tokens: Tensor, last: Tensor, even: bool) -> bool:
    """Whether a model computes the same with a cache as without; if not, it warns and uses none.

    Compared once for texts of equal lengths (`even`) and once for others, with the shortest and the
    longest of the texts (N, W) at hand, in eval mode. `last` (N,): the positions that are read.
    """
    if not lm.caches or even in lm.compared or tokens.shape[1] < 2:
        return lm.caches
    rows = torch.stack([last.argmin(), last.argmax()])
    tokens, last = tokens[rows], last[rows]
    every = torch.arange(2, device=rows.device)
    cache, width = KeyValueCache(*tokens.shape), tokens.shape[1]
    with torch.autocast(tokens.device.type, enabled=False), evaluating(lm):
        expected = lm.at(tokens, every, last)
        try:
            cache.read_texts(lm, tokens[:, :-1], (last - 1).clamp(min=0))
            new = tokens.gather(1, last[:, None])[:, 0]
            output = cache.read_next(lm, new, width - 1 if even else last, width)
        except Exception as error:  # the model's code may raise anything
            lm.caches, problem = False, f"raised {type(error).__name__}: {error}"
        else:
            lm.caches = differ_by_rounding(output, expected, lm)
            problem = f"differed by {(output - expected).abs().max().item():.2g}"
    lm.compared.add(even)
    if not lm.caches:
        warnings.warn(
            f"keys and values of this model cannot be cached, since a pass with them {problem}: "
            "each step of a rollout reads whole texts.",
            stacklevel=2,
        )
    return lm.caches


class WeightsReader:
    """Tells whether weights, modules, adapters or modes of a model have changed.

    PyTorch does not count edits through `.data`, which many libraries use, nor those of another
    process: vectors and the diagonals of matrices are compared, too. Hooks count as modules do.
    """

    def __init__(self, model: nn.Module):
        self.model, self._n_replaced = model, 0
        self._find_tensors()

    def modes(self) -> tuple[Any, ...]:
        """All that decides what the model computes, other than its tensors."""
        device = self._tensors[0].device.type if self._tensors else "cpu"
        autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        adapters = [
            (layer.disable_adapters, *layer.active_adapters, *getattr(layer, "scaling", {}).items())
            for layer in self._adapters
        ]
        return autocast, *[module.training for module in self._modules], *adapters

    def weights(self) -> list[Any]:
        """How often tensors were replaced and edited, and elements of them; see `equal`."""
        parts = [held.get(name) for held, name in self._entries]
        same = len(parts) == sum(map(len, self._held)) and all(map(is_, parts, self._parts))
        if not same or [t.data_ptr() for t in self._tensors] != self._pointers:
            self._n_replaced += 1
            self._find_tensors()
        edits = sum(t._version for t in self._counting)
        return [(self._n_replaced, edits), *map(torch.cat, self._views.values())]

    @staticmethod
    def equal(one: list[Any], other: list[Any]) -> bool:
        """Whether no change was seen between two calls of `weights`."""
        return one[0] == other[0] and all(map(torch.equal, one[1:], other[1:]))

    def _find_tensors(self) -> None:
        self._modules = list(self.model.modules())
        kinds = [(m, getattr(type(m), "disable_adapters", None)) for m in self._modules]
        self._adapters: list[Any] = [m for m, switch in kinds if isinstance(switch, property)]
        names = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks")
        self._held = [vars(module)[name] for module in self._modules for name in names]
        self._entries = [(entries, name) for entries in self._held for name in entries]
        self._parts = [entries[name] for entries, name in self._entries]
        tensors = [part for part in self._parts if isinstance(part, Tensor) and part.numel()]
        self._counting = [t for t in tensors if not t.is_inference()]
        # Quantized and sharded ones are only counted.
        self._tensors = [t for t in tensors if not is_traceable_wrapper_subclass(t)]
        self._pointers = [t.data_ptr() for t in self._tensors]
        self._views: dict[Any, list[Tensor]] = {}
        for t in self._tensors:
            view = t.detach()
            while view.ndim > 1:
                view = view.diagonal()
            if view.element_size() == 2:  # which autocast to another dtype refuses to join
                view = view.view(torch.int16)
            kind = view.device, view.dtype, view.is_contiguous()
            self._views.setdefault(kind, []).append(view.reshape(-1))


class CachedTexts:
    """N texts and what was read of them: one that goes on by a token costs one position.

    Others are read anew, alone. Texts are compared in full: it does not matter where they are from.
    """

    def __init__(self, lm: CausalLM, tokens: Tensor, weights: list[Any]):
        self.weights = weights  # that read the texts
        self.lm = copy.copy(lm)  # another one if modules or hooks have changed
        vars(self.lm)["model"] = fast(lm.model)
        n_rows, capacity = tokens.shape
        self.cache = KeyValueCache(n_rows, capacity)
        self._tokens = torch.full_like(tokens, -1)  # the texts that were read
        self._lengths = tokens.new_zeros(len(tokens))  # how much was read of them

    def fits(self, tokens: Tensor, weights: list[Any]) -> bool:
        """Whether it holds texts of this shape, read with these weights."""
        held = self._tokens
        same = (held.shape, held.dtype, held.device) == (tokens.shape, tokens.dtype, tokens.device)
        return same and WeightsReader.equal(self.weights, weights)

    def read(self, lm: CausalLM, tokens: Tensor, length: Tensor) -> Tensor | None:
        """Texts (N, L) and their lengths (N,), at least 1, to outputs (N, n_out).

        None if the model does not compute the same with a cache.
        """
        last = length - 1
        shortest, longest = (int(value) for value in length.aminmax())
        even = shortest == longest
        if not may_cache(lm, tokens[:, :longest], last, even):
            return None
        new = tokens[:, longest - 1 : longest] if even else tokens.gather(1, last[:, None])
        stale = self._find_stale(tokens[:, :longest], last, new)
        if len(stale) == len(tokens):
            self._tokens.copy_(tokens)
            output = self.cache.read_texts(self.lm, tokens[:, :longest], last)
        else:
            if len(stale):
                width = int(length[stale].max())
                self._tokens[stale] = tokens[stale]
                self.cache.read_texts(self.lm, tokens[stale, :width], last[stale], stale)
            slots = longest - 1 if even else last
            output = self.cache.read_next(self.lm, new[:, 0], slots, longest)
        self._lengths.copy_(length)
        return output

    def _find_stale(self, tokens: Tensor, last: Tensor, new: Tensor) -> Tensor:
        """The rows of which not all but the last token, `new` (N, 1), was read."""
        held, unread = self._tokens[:, : tokens.shape[1]], self._lengths < last
        # What is held of a text that goes on differs in the new token only.
        held.scatter_(1, last[:, None], new)
        if held.equal(tokens) and not unread.any():
            return last.new_empty(0)
        before = torch.arange(tokens.shape[1], device=tokens.device) < last[:, None]
        other = (held != tokens) & before
        return (unread | other.any(1)).nonzero()[:, 0]


class RolloutCache:
    """The cached texts of a model, dropped as soon as it would compute something else.

    Two sets are kept: a policy with adapters may be its own reference while they are off.
    """

    def __init__(self, lm: CausalLM):
        self.lm, self._reader = lm, WeightsReader(lm)
        self._sets: dict[tuple[Any, ...], CachedTexts] = {}  # by modes, the latest one last

    def read(self, tokens: Tensor, length: Tensor) -> Tensor | None:
        """Outputs (N, n_out) at the end of texts (N, L); None if they may not be cached."""
        weights, modes = self._reader.weights(), self._reader.modes()
        texts = self._sets.pop(modes, None)
        with without_gradients(self.lm):
            if texts is None or not texts.fits(tokens, weights):
                texts = CachedTexts(self.lm, tokens, weights)
            output = texts.read(self.lm, tokens, length)
        # Kept only after a pass that ended: one that raised may have written half of its keys.
        if texts.cache.buffers:  # none if the model used no cache, as in gradient checkpointing
            self._sets[modes] = texts
        while len(self._sets) > 2:
            del self._sets[next(iter(self._sets))]
        return None if output is None else output.clone()  # a tensor that a loss may use
