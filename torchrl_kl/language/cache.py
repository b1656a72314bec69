"""Keys and values of the texts of a rollout, so that a step computes one new position per text.

Axes: N texts (rows), R some of them, L length of a whole text, W the longest prefix that is read,
H heads, D width of a head.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from torchrl_kl.language.bare import BareView
from torchrl_kl.language.causal_lm import CausalLM
from torchrl_kl.language.fingerprint import Fingerprint, Values


class CacheTooLargeError(MemoryError):
    """Keys and values would take more than the bytes that are allowed."""


class KeyValueCache:
    """Preallocated keys and values of N texts, which the attention layers of a model share.

    A model takes it as `past_key_values`. Each text begins in slot 0, so that texts of any lengths
    share the buffers. They hold 2 * layers * H * D numbers per row and token.

    Args:
        n_rows: number of texts (N).
        capacity: slots per text, the length of the longest one.
        max_bytes: most bytes of all buffers; None: any number.

    Raises:
        CacheTooLargeError: in the first call, if the buffers need more than `max_bytes`.
    """

    is_compileable = False  # asked by Hugging Face's models

    def __init__(self, n_rows: int, capacity: int, max_bytes: int | None = None):
        self.n_rows, self.capacity, self.max_bytes = n_rows, capacity, max_bytes
        self.buffers: list[tuple[Tensor, Tensor]] = []  # of each layer: (N, H, capacity, D)
        self._rows: Tensor | None = None  # those that are read from slot 0; None: all of them
        self._slots: int | Tensor | None = None  # of the next position; None: read from slot 0
        self._width = 0  # how many slots attention reads
        self._slots_first = 0  # up to this capacity, slots come first in memory

    def read_texts(
        self, lm: CausalLM, tokens: Tensor, last: Tensor, rows: Tensor | None = None
    ) -> Tensor:
        """Reads texts (R, W) into `rows`; the outputs (R, n_out) at their positions `last`."""
        self._rows, self._slots, self._width = rows, None, 0
        self._slots_first = lm.slots_first
        every = torch.arange(len(tokens), device=tokens.device)
        return lm.at(tokens, every, last, past_key_values=self)

    def read_next(self, lm: CausalLM, token: Tensor, slots: int | Tensor, width: int) -> Tensor:
        """Reads one more token (N,) of each text into its slot; the outputs (N, n_out) there.

        `slots`: one number where all texts are equally long. `width`: the largest slot plus 1.
        """
        self._rows, self._slots, self._width = None, slots, width
        options: dict[str, Any] = {"past_key_values": self}
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
            self._allocate(keys, values)
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

    @property
    def n_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(x.numel() * x.element_size() for pair in self.buffers for x in pair)

    def _allocate(self, keys: Tensor, values: Tensor) -> None:
        # Of keys and of values, whose width differs in some models, and in autocast also the dtype.
        pair, n_slots = (keys, values), self.capacity
        sizes = [self.n_rows * x.shape[1] * n_slots * x.shape[3] * x.element_size() for x in pair]
        needed = self.n_bytes + sum(sizes)
        if self.max_bytes is not None and needed > self.max_bytes:
            raise CacheTooLargeError(f"{needed} bytes of keys and values exceed {self.max_bytes}.")
        # Zeros, since slots that a mask hides must not hold NaN.
        if n_slots > self._slots_first:
            buffers = [x.new_zeros(self.n_rows, x.shape[1], n_slots, x.shape[3]) for x in pair]
        else:
            buffers = [x.new_zeros(n_slots, self.n_rows, x.shape[1], x.shape[3]) for x in pair]
            buffers = [buffer.permute(1, 2, 0, 3) for buffer in buffers]
        self.buffers.append((buffers[0], buffers[1]))

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


class CachedTexts:
    """Outputs at the last positions of N texts, with a cache of what was read of them before.

    A text of which all but the last token was read costs one position. Others are read anew, alone.
    Texts are compared in full, so it does not matter where they come from.
    """

    def __init__(self, tokens: Tensor, values: Values, max_bytes: int | None):
        self.values = values  # of the weights that read the texts
        n_rows, capacity = tokens.shape
        self._cache = KeyValueCache(n_rows, capacity, max_bytes)
        self._tokens = torch.full_like(tokens, -1)  # the texts that were read
        self._lengths = tokens.new_zeros(len(tokens))  # how much was read of them

    @property
    def n_bytes(self) -> int:
        """Bytes of the keys and values."""
        return self._cache.n_bytes

    def fits(self, tokens: Tensor, values: Values) -> bool:
        """Whether it holds texts of this shape, read with weights of these `values`."""
        held = self._tokens
        same = (held.shape, held.dtype, held.device) == (tokens.shape, tokens.dtype, tokens.device)
        return same and self.values.equal(values)

    def read(self, lm: CausalLM, tokens: Tensor, length: Tensor) -> Tensor:
        """Texts (N, L) and their lengths (N,), at least 1, to outputs (N, n_out)."""
        last = length - 1
        shortest, longest = (int(value) for value in length.aminmax())
        even = shortest == longest
        new = tokens[:, longest - 1 : longest] if even else tokens.gather(1, last[:, None])
        stale = self._find_stale(tokens[:, :longest], last, new)
        if len(stale) == len(tokens):
            self._tokens.copy_(tokens)
            output = self._cache.read_texts(lm, tokens[:, :longest], last)
        else:
            if len(stale):
                width = int(length[stale].max())
                self._tokens[stale] = tokens[stale]
                self._cache.read_texts(lm, tokens[stale, :width], last[stale], stale)
            slots = longest - 1 if even else last
            output = self._cache.read_next(lm, new[:, 0], slots, longest)
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

    def __init__(self, lm: CausalLM, max_bytes: int | None):
        self.max_bytes = max_bytes
        self._fingerprint, self._view = Fingerprint(lm), BareView(lm)
        self._sets: dict[tuple[Any, ...], CachedTexts] = {}  # by modes, the latest one last
        self._too_large: set[torch.Size] = set()

    def read(self, tokens: Tensor, length: Tensor) -> Tensor | None:
        """Outputs (N, n_out) at the end of texts (N, L); None if they may not be cached."""
        if tokens.shape in self._too_large:
            return None
        values, modes = self._fingerprint.values(), self._fingerprint.modes()
        texts = self._sets.pop(modes, None)
        try:
            with torch.inference_mode():  # PyTorch's fastest
                if texts is None or not texts.fits(tokens, values):
                    texts = CachedTexts(tokens, values, self.max_bytes)
                lm = self._view.get(values.versions[0])
                output = texts.read(lm, tokens, length)
        except CacheTooLargeError:
            self._too_large.add(tokens.shape)
            warnings.warn(
                f"the keys and values of {tokens.shape[0]} texts of {tokens.shape[1]} tokens need "
                f"more than `cache_bytes` = {self.max_bytes}: each step reads whole texts.",
                stacklevel=2,
            )
            return None
        # Kept only after a pass that ended: one that raised may have written half of its keys.
        if texts.n_bytes:  # 0 if the model used no cache, as in gradient checkpointing
            self._sets[modes] = texts
        while len(self._sets) > 2:
            del self._sets[next(iter(self._sets))]
        return output.clone()  # a tensor that a loss may use
