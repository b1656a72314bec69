"""A small GPT, and how it is saved and loaded.

Axes: B* any leading dimensions, T tokens, N texts (B* flattened).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections import Counter
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from tensordict import is_batchedtensor
from torch import Tensor, nn
from torch.nn import functional as F

from torchrl_kl.checkpoint import looks_pickled, write_durably
from torchrl_kl.functional.numbers import check_integers
from torchrl_kl.language.bare import of_parts
from torchrl_kl.language.blocks import SLOTS_FIRST, Block, Keep

_ARGUMENTS = ("vocab_size", "block_size", "n_layer", "n_head", "n_embd", "n_out", "dropout")

_CONFIG, _WEIGHTS = "config.json", "model.safetensors"
_NEXT_CONFIG, _NEXT_WEIGHTS = f"{_CONFIG}.next", f"{_WEIGHTS}.next"  # of a save in progress


def values_hidden(tensor: Tensor) -> bool:
    """True under torch.compile and torch.vmap: decisions must not depend on values."""
    return torch.compiler.is_compiling() or is_batchedtensor(tensor)


@of_parts
class GPT(nn.Module):
    """A causal transformer: the output at position t depends on tokens 0..t only.

    The blocks (pre-norm, biases, GELU), learned positions and initialization are those of GPT-2.
    The output layer has no bias and does not share weights with the embedding.

    Args:
        vocab_size: number of tokens; ids are 0..vocab_size - 1.
        block_size: maximum number of tokens in a text.
        n_layer: number of blocks.
        n_head: attention heads per block.
        n_embd: width, a multiple of n_head.
        n_out: outputs per position. Default: vocab_size, for next-token logits.
        dropout: probability in train mode, for embeddings, attention and residual branches.

    Raises:
        TypeError: a size is not an int, or the tokens are not int64 or int32.
        ValueError: a size, dropout, a length or a token is out of range. Tokens are not checked
            under torch.compile and torch.vmap.

    Reference:
        Radford et al. 2019, "Language models are unsupervised multitask learners", section 2.3.

    Example:
        >>> import torch
        >>> from torchrl_kl import GPT
        >>> gpt = GPT(vocab_size=11, block_size=8)
        >>> gpt(torch.tensor([[0, 2, 8, 6, 10]])).shape
        torch.Size([1, 5, 11])
    """

    slots_first = SLOTS_FIRST  # of a cache that is made for it

    def __init__(
        self,
        vocab_size: int,
        block_size: int,
        *,
        n_layer: int = 3,
        n_head: int = 3,
        n_embd: int = 48,
        n_out: int | None = None,
        dropout: float = 0.0,
    ):
        super().__init__()
        n_out = vocab_size if n_out is None else n_out
        sizes = {"vocab_size": vocab_size, "block_size": block_size, "n_layer": n_layer}
        sizes |= {"n_head": n_head, "n_embd": n_embd, "n_out": n_out}
        _check_sizes(sizes, dropout)
        self.config: dict[str, int | float] = {**sizes, "dropout": dropout}
        self.vocab_size, self.block_size, self.n_out = vocab_size, block_size, n_out
        self.token_embedding = nn.Embedding(vocab_size, n_embd)
        self.position_embedding = nn.Embedding(block_size, n_embd)
        self.dropout = dropout
        self.blocks = nn.ModuleList(
            Block(layer, n_head, n_embd, dropout) for layer in range(n_layer)
        )
        self.norm = nn.LayerNorm(n_embd)
        self.head = nn.Linear(n_embd, n_out, bias=False)
        self._init_weights()

    def _init_weights(self) -> None:
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        # Two branches per block add to the residual stream: its variance must not grow with depth.
        for name, weight in self.blocks.named_parameters():
            if name.endswith("project.weight"):
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * len(self.blocks)))

    def forward(
        self,
        tokens: Tensor,
        *,
        past_key_values: Any = None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
    ) -> Tensor:
        """Outputs at every position: (*B, T) -> (*B, T, n_out), T from 1 to block_size.

        The keywords are those of Hugging Face's causal language models.

        Args:
            tokens: ids, (*B, T).
            past_key_values: a cache of keys and values with a method `update`; `tokens` are then
                the next ones, of the texts that it holds.
            position_ids: the position of each token in its text, (N, T). Default: 0 to T - 1.
            attention_mask: (N, 1, T, S), added to the scores of the S cached positions.
            logits_to_keep: the positions whose outputs are returned: the last ones, if it is a
                number other than 0, or those of an index (K,). T is then their number.
        """
        x = self._embed(tokens, position_ids)
        keep: Keep = logits_to_keep if isinstance(logits_to_keep, Tensor) else None
        if keep is None and logits_to_keep:
            keep = slice(-logits_to_keep, None)
        # Of the last block, only keys and values are needed at the other positions.
        *blocks, last = self.blocks
        for block in blocks:
            x = block(x, past_key_values, attention_mask)
        x = last(x, past_key_values, attention_mask, keep)
        output = self.head(self.norm(x))
        return output if tokens.ndim == 2 else output.view(*tokens.shape[:-1], *output.shape[1:])

    @torch.no_grad()
    def attention_maps(self, tokens: Tensor) -> Tensor:
        """Attention from t to s: (*B, T) -> (*B, n_layer, n_head, T, T), no gradient or dropout."""
        x, maps = self._embed(tokens), []
        for block in cast("list[Block]", self.blocks):
            maps.append(block.attention.maps(block.attention_norm(x)))
            x = block(x)
        stacked = torch.stack(maps, dim=1)
        return stacked.view(*tokens.shape[:-1], *stacked.shape[1:])

    def _embed(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Embeddings of the flattened texts: (*B, T) -> (N, T, n_embd)."""
        self._check_shape(tokens)
        n_tokens = tokens.shape[-1]
        if position_ids is None:
            position_ids = torch.arange(n_tokens, device=tokens.device)
        if not (tokens.device.type == "cpu" or values_hidden(tokens)):
            self._check_ids(tokens)  # a bad index ends the process on an accelerator
        try:
            x = self.token_embedding(tokens.reshape(-1, n_tokens))
        except IndexError:
            self._check_ids(tokens)
            raise
        x = x + self.position_embedding(position_ids)
        return F.dropout(x, self.dropout) if self.dropout and self.training else x

    def _check_shape(self, tokens: Tensor) -> None:
        check_integers("tokens", tokens)
        if tokens.ndim == 0 or not 1 <= tokens.shape[-1] <= self.block_size:
            raise ValueError(
                f"`tokens` must have a last dimension of 1 to `block_size` = {self.block_size}, "
                f"got shape {tuple(tokens.shape)}: build a larger GPT."
            )

    def _check_ids(self, tokens: Tensor) -> None:
        if tokens.numel() == 0:
            return
        low, high = (value.item() for value in tokens.aminmax())
        if low < 0 or high >= self.vocab_size:
            raise ValueError(
                f"`tokens` must lie in 0..{self.vocab_size - 1}, got {low} to {high}: `vocab_size` "
                "must count special tokens (separator, end)."
            )

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Writes `config.json` and `model.safetensors`, so that the two always belong together.

        Whenever a save fails or its process is killed, the folder has the older model or the new
        one. Only one process may save to a folder at a time. Weights that you have tied are saved
        under each name: they are equal when they are loaded, and no longer tied.

        Raises:
            ValueError: the weights do not share one floating-point dtype, or are not those of a
                model of its sizes, which `from_pretrained` builds: parts were changed or added.
            OSError: the files cannot be written.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        layout = torch.contiguous_format
        weights = {name: w.clone(memory_format=layout) for name, w in self.state_dict().items()}
        _check_dtypes(weights)
        self._check_parts()
        content = save(weights)
        config: dict[str, Any] = {"class": type(self).__name__, **self.config}
        config["weights_sha256"] = sha256(content).hexdigest()
        config["config_sha256"] = _config_digest(config)
        next_config, next_weights = folder / _NEXT_CONFIG, folder / _NEXT_WEIGHTS
        if next_config.exists() and (old := folder / _WEIGHTS).exists():
            # A save that was killed half way is completed.
            os.replace(_find_config(folder, old.read_bytes()), folder / _CONFIG)
        try:
            write_durably(next_config, (json.dumps(config, indent=2) + "\n").encode())
            write_durably(next_weights, content)
        except BaseException:
            for file in (next_config, next_weights):
                file.unlink(missing_ok=True)
            raise
        # Between the two, the config of the weights is `next_config`, where it is looked for.
        os.replace(next_weights, folder / _WEIGHTS)
        os.replace(next_config, folder / _CONFIG)

    def _check_parts(self) -> None:
        """ValueError unless `from_pretrained` can read the weights."""
        if type(self).__init__ is not GPT.__init__:  # which may have a `from_pretrained` of its own
            return
        shapes, expected = (
            {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
            for model in (self, self._empty(self.config))
        )
        if shapes != expected:
            changed = sorted(dict(shapes.items() ^ expected.items()))
            raise ValueError(
                f"the weights must be those of a {type(self).__name__} of its sizes, but "
                f"{changed[:3]} were changed, added or removed: merge adapters, remove "
                "parametrizations, or save the weights by RunCheckpoint."
            )

    @classmethod
    def _empty(cls, config: Mapping[str, Any]) -> GPT:
        """A model without values in its weights."""
        with torch.device("meta"):
            return cls(**{name: config[name] for name in _ARGUMENTS})

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str]) -> GPT:
        """Reads what `save_pretrained` wrote, bit for bit, on the CPU and in eval mode.

        Raises:
            FileNotFoundError: one of the two files is missing.
            ValueError: a file was changed since it was saved, was saved by another class, or does
                not belong to the other. No code in a file is run.
        """
        try:
            config, weights = _read_files(Path(folder), cls.__name__)
            gpt = cls._empty(config)
            # `assign` keeps the dtype of the file; a copy would cast to that of the fresh module.
            gpt.load_state_dict(weights, assign=True)
            # Other heads or another dropout would fit the weights too.
            if config["config_sha256"] != _config_digest(config):
                raise ValueError(f"{_CONFIG} was changed since it was saved.")
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"`folder` must contain {_CONFIG} and {_WEIGHTS}, but {error.filename} does "
                "not exist: give a folder written by `save_pretrained`."
            ) from error
        except (TypeError, ValueError, OverflowError, RuntimeError, SafetensorError) as error:
            name = cls.__name__
            raise ValueError(
                f"`folder` {folder} does not contain a valid {name}: {error}"
            ) from error
        return gpt.eval()


def _check_sizes(sizes: dict[str, int], dropout: float) -> None:
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool):
            raise TypeError(f"`{name}` must be an int, got {type(size).__name__}.")
        if size < 1:
            raise ValueError(f"`{name}` must be at least 1, got {size}.")
    n_embd, n_head = sizes["n_embd"], sizes["n_head"]
    if n_embd % n_head:
        raise ValueError(f"`n_embd` must be a multiple of `n_head`, got {n_embd} and {n_head}.")
    if not 0 <= dropout < 1:
        raise ValueError(f"`dropout` must lie in [0, 1), got {dropout}.")


def _check_dtypes(weights: Mapping[str, Tensor]) -> None:
    dtypes = {weight.dtype for weight in weights.values()}
    if len(dtypes) != 1 or not all(dtype.is_floating_point for dtype in dtypes):
        got = sorted(map(str, dtypes))
        raise ValueError(f"the weights must share one floating-point dtype, got {got}.")


def _config_digest(config: Mapping[str, Any]) -> str:
    """SHA-256 of all entries but the one that has it."""
    entries = {key: value for key, value in config.items() if key != "config_sha256"}
    return sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


def _find_config(folder: Path, weights: bytes) -> Path:
    """The config that was saved with the content of a weights file; else `config.json`."""
    digest = sha256(weights).hexdigest()
    for file in (folder / _CONFIG, folder / _NEXT_CONFIG):
        with contextlib.suppress(OSError, ValueError, RecursionError):
            config = json.loads(file.read_text(encoding="utf-8"))
            if isinstance(config, dict) and config.get("weights_sha256") == digest:
                return file
    return folder / _CONFIG


def _read_files(folder: Path, name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config and the weights of a model of class `name`."""
    content = (folder / _WEIGHTS).read_bytes()
    config = json.loads(_find_config(folder, content).read_text(encoding="utf-8"))
    found = config.get("class") if isinstance(config, dict) else None
    if found != name:
        raise ValueError(f"`class` must be {name!r}, got {found!r}: load it with that class.")
    expected = {*_ARGUMENTS, "weights_sha256", "config_sha256"}
    if config.keys() - {"class"} != expected:
        raise ValueError(f"its keys must be class and {sorted(expected)}, got {sorted(config)}.")
    if config["weights_sha256"] != sha256(content).hexdigest():
        if looks_pickled(content):
            raise ValueError(
                f"{_WEIGHTS} is a pickle, which can run code when it is loaded: load it where you "
                "trust it, and save the model by `save_pretrained`."
            )
        raise ValueError(f"{_WEIGHTS} is not the file that {_CONFIG} was saved with.")
    weights = load(content)
    _check_dtypes(weights)
    # Compared before the model is built, which takes minutes for thousands of blocks.
    sizes = Counter(key.split(".")[1] for key in weights if key.startswith("blocks."))
    if (n_layer := config["n_layer"]) != len(sizes):
        n_blocks = len(sizes)
        raise ValueError(f"`n_layer` must be the {n_blocks} blocks of {_WEIGHTS}, got {n_layer!r}.")
    if len(set(sizes.values())) > 1:
        raise ValueError(f"the blocks of {_WEIGHTS} must have the same weights, got {sizes}.")
    return config, weights
