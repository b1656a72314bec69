"""A small GPT, and how it is saved and loaded.

Axes: B* any leading dimensions, T tokens, N texts (B* flattened).
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn import functional as F

from torchrl_kl.functional.numbers import check_integers
from torchrl_kl.language.blocks import Block, Keep, KeyValues

_FILE = "model.safetensors"


def values_hidden(tensor: Tensor) -> bool:
    """True under torch.compile and torch.vmap: decisions must not depend on values."""
    vmapped: Any = torch._C._functorch  # type: ignore[attr-defined]
    return torch.compiler.is_compiling() or vmapped.is_batchedtensor(tensor)


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
        TypeError, ValueError: a size, `dropout`, or tokens are of a wrong type or out of range.

    Reference:
        Radford et al. 2019, "Language models are unsupervised multitask learners", section 2.3.

    Example:
        >>> import torch
        >>> from torchrl_kl.language import GPT
        >>> gpt = GPT(vocab_size=11, block_size=8)
        >>> gpt(torch.tensor([[0, 2, 8, 6, 10]])).shape
        torch.Size([1, 5, 11])
    """

    calls_parts = True

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
        self.vocab_size = vocab_size
        self.block_size = block_size
        self.n_out = n_out
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
        cache: KeyValues | None = None,
        logits_to_keep: int | Tensor = 0,
    ) -> Tensor:
        """Outputs at every position: ids (*B, T) -> (*B, T, n_out), T from 1 to block_size.

        The keywords are those of Hugging Face's causal language models: tokens follow those in the
        `cache`, which begins as `new_cache()` and takes them in; `logits_to_keep`: how many of the
        last positions, or which ones (K,), have outputs.
        """
        keep: Keep = logits_to_keep if isinstance(logits_to_keep, Tensor) else None
        if keep is None and logits_to_keep:
            keep = slice(-logits_to_keep, None)
        output = self.head(self.hidden(tokens, cache, keep))
        return output if tokens.ndim == 2 else output.view(*tokens.shape[:-1], *output.shape[1:])

    def new_cache(self) -> KeyValues:
        """An empty cache, with which tokens can be read part by part."""
        return KeyValues(len(self.blocks))

    def hidden(self, tokens: Tensor, cache: KeyValues | None, keep: Keep) -> Tensor:
        """The last hidden states at the positions `keep`, of which `head` makes the outputs."""
        x = self._embed(tokens, 0 if cache is None else len(cache))
        # Of the last block, only keys and values are needed at the other positions.
        *blocks, last = self.blocks
        for block in blocks:
            x = block(x, cache)
        return self.norm(last(x, cache, keep))

    def get_decoder(self) -> Any:
        """What makes the last hidden states, as Hugging Face's models name it."""
        return self.hidden

    @torch.no_grad()
    def attention_maps(self, tokens: Tensor) -> Tensor:
        """Attention from t to s: (*B, T) -> (*B, n_layer, n_head, T, T), no gradient or dropout."""
        x, maps = self._embed(tokens), []
        for block in cast("list[Block]", self.blocks):
            maps.append(block.attention.maps(block.attention_norm(x)))
            x = block(x)
        stacked = torch.stack(maps, dim=1)
        return stacked.view(*tokens.shape[:-1], *stacked.shape[1:])

    def _embed(self, tokens: Tensor, n_read: int = 0) -> Tensor:
        """Embeddings of the flattened texts: (*B, T) -> (N, T, n_embd)."""
        n_tokens = self._check_shape(tokens, n_read)
        places = torch.arange(n_read, n_read + n_tokens, device=tokens.device)
        if not (tokens.device.type == "cpu" or values_hidden(tokens)):
            self._check_ids(tokens)  # a bad index ends the process on an accelerator
        try:
            x = self.token_embedding(tokens.reshape(-1, n_tokens))
        except IndexError:
            self._check_ids(tokens)
            raise
        x = x + self.position_embedding(places)
        return F.dropout(x, self.dropout) if self.dropout and self.training else x

    def _check_shape(self, tokens: Tensor, n_read: int) -> int:
        check_integers("tokens", tokens)
        n_tokens = tokens.shape[-1] if tokens.ndim else 0
        if not 1 <= n_tokens <= self.block_size - n_read:
            after = f", after the {n_read} in the cache" if n_read else ""
            raise ValueError(
                f"`tokens` must have a last dimension of 1 to `block_size` = {self.block_size}"
                f"{after}, got shape {tuple(tokens.shape)}: build a larger GPT."
            )
        return n_tokens

    def _check_ids(self, tokens: Tensor) -> None:
        low, high = (int(value) for value in tokens.aminmax()) if tokens.numel() else (0, 0)
        if low < 0 or high >= self.vocab_size:
            raise ValueError(
                f"`tokens` must lie in 0..{self.vocab_size - 1}, got {low} to {high}: `vocab_size` "
                "must count special tokens (separator, end)."
            )

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Writes `model.safetensors`, with the sizes in its metadata; OSError if it cannot.

        If a save fails or its process is killed, the file has the older model or the new one.
        Weights that you have tied are saved under each name, and no longer tied when loaded.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: w.contiguous().clone() for name, w in self.state_dict().items()}
        config = json.dumps({"class": type(self).__name__, **self.config})
        unfinished = folder / f"{_FILE}.unfinished"
        try:
            with unfinished.open("wb") as file:
                file.write(save(weights, {"config": config}))
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, folder / _FILE)
        finally:
            unfinished.unlink(missing_ok=True)

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str]) -> GPT:
        """Reads what `save_pretrained` wrote, bit for bit, on the CPU and in eval mode.

        ValueError if the file is damaged or was saved by another class. No code in it is run.
        """
        path = Path(folder) / _FILE
        if not path.is_file():
            raise FileNotFoundError(f"`folder` must contain {_FILE}, but {path} does not exist.")
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                # Copies, since kernels round otherwise where memory is not aligned.
                weights = {name: file.get_tensor(name).clone() for name in file.keys()}
            sizes = json.loads(metadata["config"])
            if (name := sizes.pop("class")) != cls.__name__:
                raise ValueError(f"it was saved by the class {name}")
            with torch.device("meta"):
                gpt = cls(**sizes)
            # `assign` keeps the dtype of the file; a copy would cast to that of the fresh module.
            gpt.load_state_dict(weights, assign=True)
        except (KeyError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
            raise ValueError(
                f"{path} must be an undamaged file that {cls.__name__}.save_pretrained wrote: "
                f"{type(error).__name__}: {error}."
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
