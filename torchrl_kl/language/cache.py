"""Texts that are read in step with a model's own cache: a new token costs one new position.

All rows of a cache have the same number of tokens, so that there is no padding, and no mask. Rows
that end or repeat a prompt are moved by the cache's own `reorder_cache`.

Axes: N texts (rows), R rows in step, L length of a whole text.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from torchrl_kl.actors.parallel import without_gradients
from torchrl_kl.language.blocks import Growing, fast
from torchrl_kl.language.causal_lm import CausalLM, differ_by_rounding, stated
from torchrl_kl.language.prompts import read_at

# Outputs, those that were expected, and the size of numbers from which these were made.
Scores = tuple[Tensor, Tensor, float]


class NotCachedError(Exception):
    """A model's cache cannot be used, with the reason; without one, only in the present mode."""


@contextmanager
def without_cache(lm: CausalLM, problem: NotCachedError) -> Iterator[None]:
    """Reads whole texts; also from now on, with a warning, if there is a reason and it works."""
    lm.caches, works = False, False
    try:
        yield
        works = True
    finally:
        lm.caches = not (works and problem.args)
    if problem.args:
        warnings.warn(
            f"the cache of this model is not used from now on, since {problem}: each new token of "
            "a rollout or a response reads the whole text.",
            stacklevel=3,
        )


class InStep:
    """R texts that are read together, with the cache that the model makes for them, if it does."""

    def __init__(self, lm: CausalLM):
        self.lm = copy.copy(lm)
        vars(self.lm)["model"] = fast(lm.model)
        self.start = self.n_read = 0  # tokens of each text: in the first pass, and in all
        self.moved = False
        self._cache: Any = None

    def read(self, texts: Tensor, end: int) -> Tensor:
        """Reads texts (R, L) up to `end`; the outputs (R, n_out) there."""
        self.start = self.start or end
        if self.lm.caches:
            output = self._read_new(texts, end)
        else:
            rows = torch.arange(len(texts), device=texts.device)
            output = read_at(self.lm, texts, rows, torch.full_like(rows, end - 1))
        self.n_read = end
        return output

    def _read_new(self, texts: Tensor, end: int) -> Tensor:
        try:
            new, keep = texts[:, self.n_read : end], None
            if new.shape[1] > 1:  # as `read_at` does, to the last digit
                keep = torch.tensor([new.shape[1] - 1], device=texts.device)
            output, self._cache = self.lm.read(new, self._cache, keep)
        except Exception as error:  # the model's code may raise anything
            raise NotCachedError(f"it raised {type(error).__name__}: {error}") from error
        if self._cache is None:  # as in gradient checkpointing, while a model trains
            trains = stated("training", self.lm.model)
            raise NotCachedError(*[] if trains else ["a pass makes none"])
        if not hasattr(self._cache, "reorder_cache"):
            raise NotCachedError(f"rows of a {type(self._cache).__name__} cannot be moved")
        if not self.n_read:
            for layer in getattr(self._cache, "layers", ()):
                if type(layer).__name__ == "DynamicLayer" and stated("ndim", layer.keys) == 4:
                    layer.__class__ = _growing(type(layer))
                layer.room = texts.shape[1]
        return output[:, -1]

    def select(self, index: Tensor) -> None:
        """Keeps the rows `index`, in this order; some may be repeated."""
        self.moved = True
        if self._cache is not None:
            self._cache.reorder_cache(index)

    def compare(self, end: int, score: Callable[[], Scores], until: int | None = None) -> None:
        """NotCachedError if outputs of texts of `end` tokens are not those of one pass.

        Nothing is done where such texts, or those of `until` tokens, have been compared before:
        with as short a first pass, and with rows that were moved, if these were. Nor where dropout
        makes two passes differ. `score`: the outputs and those of one pass.
        """
        pairs, until = self.lm.compared[self.moved], until or end
        if any(start <= self.start and until <= last for start, last in pairs):
            return
        cuda = [p.device for p in self.lm.parameters() if p.is_cuda][:1]
        with torch.random.fork_rng(cuda):
            output, expected, size = score()
            if not differ_by_rounding(output, expected, self.lm, size):
                if not differ_by_rounding(score()[1], expected, self.lm, size):
                    return
                error = (output - expected).abs().max().item()
                raise NotCachedError(f"outputs of texts of {end} tokens are off by {error:.2g}")
        for kind in {False, self.moved}:
            pairs = self.lm.compared[kind]
            pairs[:] = [pair for pair in pairs if pair[0] < self.start or pair[1] > end]
            pairs.append((self.start, end))


@cache
def _growing(kind: type) -> type:
    """A class of layers whose objects become growing ones by a change of class."""
    names = ("update", "reorder_cache", "room", "_buffers")
    return type("Growing", (kind,), {name: vars(Growing)[name] for name in names})


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
        self.without_gradients = without_gradients(self.model)
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


class _Rows(NamedTuple):
    """Rows of a rollout that go on in step."""

    rows: Tensor  # (R,), in ascending order
    steps: InStep
    output: Tensor  # (R, n_out), after the last token


class CachedTexts:
    """N texts and what was read of them: those that go on by a token cost one position.

    Others are read anew. Texts are compared in full: it does not matter where they are from.
    """

    def __init__(self, lm: CausalLM, tokens: Tensor, weights: list[Any]):
        self.lm, self.weights = lm, weights  # that read the texts
        self._texts = torch.full_like(tokens, -1)
        self._parts: list[_Rows] = []

    def fits(self, tokens: Tensor, weights: list[Any]) -> bool:
        """Whether it holds texts of this shape, read with these weights."""
        held = self._texts
        same = (held.shape, held.dtype, held.device) == (tokens.shape, tokens.dtype, tokens.device)
        return same and WeightsReader.equal(self.weights, weights)

    def read(self, tokens: Tensor, length: Tensor) -> Tensor:
        """Texts (N, L) and their lengths (N,), at least 1, to outputs (N, n_out)."""
        if len(self._parts) > 2 and len(self._parts) > 2 * len(length.unique()):
            self._parts = []  # rows of one length become one part again
        going = (self._go_on(part, tokens, length) for part in self._parts)
        parts = [part for part in going if part is not None]
        if sum(len(part.rows) for part in parts) < len(tokens):
            waiting = torch.ones_like(length, dtype=torch.bool)
            for part in parts:
                waiting[part.rows] = False
            for n in length[waiting].unique().tolist():
                rows, steps = (waiting & (length == n)).nonzero()[:, 0], InStep(self.lm)
                parts.append(_Rows(rows, steps, steps.read(tokens[rows], n)))
        self._parts = parts
        self._texts.copy_(tokens)
        if len(parts) == 1:
            return parts[0].output
        output = parts[0].output.new_empty(len(tokens), parts[0].output.shape[1])
        for part in parts:
            output[part.rows] = part.output
        return output

    def _go_on(self, part: _Rows, tokens: Tensor, length: Tensor) -> _Rows | None:
        """Reads the next token of rows that have one; None if none has."""
        rows, steps, _ = part
        n, held = steps.n_read, self._texts
        if len(rows) < len(tokens):
            tokens = tokens[rows]
            length = length[rows]
            held = held[rows]
        same = (tokens[:, :n] == held[:, :n]).all(1)
        going = same & (length == n + 1)
        n_going = int(going.sum())
        if n_going == 0:
            # Else each reading may have its own dropout, or changes that were not looked for.
            kept = self.lm.caches and not self.lm.model.training
            return part if kept and (same & (length == n)).all() else None
        if n_going < len(rows):
            index = going.nonzero()[:, 0]
            steps.select(index)
            rows, tokens = rows[index], tokens[index]
        output = steps.read(tokens, n + 1)
        self._compare(steps, tokens, output)
        return _Rows(rows, steps, output)

    def _compare(self, steps: InStep, tokens: Tensor, output: Tensor) -> None:
        """Compares four rows: at their first lengths, then where they are longer by a 64th."""
        n, some = steps.n_read, slice(None, None, -(-len(tokens) // 4))
        texts = tokens[some, :n]
        rows = torch.arange(len(texts), device=texts.device)

        def score() -> Scores:
            return output[some], read_at(self.lm, texts, rows, torch.full_like(rows, n - 1)), 1.0

        steps.compare(n, score, n if n >= tokens.shape[1] - 1 else n - n // 65)


class RolloutCache:
    """The cached texts of a model, dropped as soon as it would compute something else.

    Two sets are kept: a policy with adapters may be its own reference while they are off.
    """

    def __init__(self, lm: CausalLM):
        self.lm, self._reader = lm, WeightsReader(lm)
        self._sets: dict[tuple[Any, ...], CachedTexts] = {}  # by modes, the latest one last

    def read(self, tokens: Tensor, length: Tensor) -> Tensor:
        """Outputs (N, n_out) at the end of texts (N, L), of lengths (N,)."""
        try:
            return self._read(tokens, length)
        except NotCachedError as problem:
            self._sets.clear()
            with without_cache(self.lm, problem):
                return self._read(tokens, length)

    def _read(self, tokens: Tensor, length: Tensor) -> Tensor:
        weights, modes = self._reader.weights(), self._reader.modes()
        texts = self._sets.pop(modes, None)
        with self._reader.without_gradients:
            if texts is None or not texts.fits(tokens, weights):
                texts = CachedTexts(self.lm, tokens, weights)
            output = texts.read(tokens, length)
        # Kept only after a pass that ended: one that raised may have written half of its keys.
        self._sets[modes] = texts
        while len(self._sets) > 2:
            del self._sets[next(iter(self._sets))]
        return output.clone()  # a tensor that a loss may use
