"""A small GPT and its heads for TorchRL: actor, critic and reward model.

Axes: B* any leading dimensions, T tokens, L length of a whole text, N states, S segments.

A state is a pair of keys: `tokens` (*B, L) holds the text so far, then padding (any ids of the
vocabulary, they never matter); `position` (*B,) is the number of real tokens. The output for a
state is the GPT's output at index `position - 1`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tensordict import NestedKey, is_batchedtensor
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torch.nn import functional as F
from torchrl.modules import ProbabilisticActor, ValueOperator, recurrent_mode


def _values_hidden(tensor: Tensor) -> bool:
    # Under torch.compile and torch.vmap no decision may depend on values.
    return torch.compiler.is_compiling() or is_batchedtensor(tensor)


def _check_integers(name: str, tensor: Tensor) -> None:
    if tensor.dtype not in (torch.int32, torch.int64):
        raise TypeError(
            f"`{name}` must be int64 or int32, got {tensor.dtype}: convert it with `.long()`."
        )


class _Attention(nn.Module):
    def __init__(self, n_head: int, n_embd: int, dropout: float):
        super().__init__()
        self.n_head, self.dropout = n_head, dropout
        self.query_key_value = nn.Linear(n_embd, 3 * n_embd)
        self.project = nn.Linear(n_embd, n_embd)

    def heads(self, x: Tensor) -> list[Tensor]:
        """Queries, keys and values, each (N, n_head, T, n_embd / n_head)."""
        joint = self.query_key_value(x).unflatten(-1, (3 * self.n_head, -1))
        return list(joint.transpose(1, 2).chunk(3, dim=1))

    def maps(self, x: Tensor) -> Tensor:
        query, key, _ = self.heads(x)
        scores = query @ key.transpose(-1, -2) / math.sqrt(key.shape[-1])
        future = torch.ones_like(scores, dtype=torch.bool).triu(1)
        return scores.masked_fill(future, -math.inf).softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.heads(x)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return self.project(mixed.transpose(1, 2).flatten(2))


class _Block(nn.Module):
    def __init__(self, n_head: int, n_embd: int, dropout: float):
        super().__init__()
        self.attention_norm = nn.LayerNorm(n_embd)
        self.attention = _Attention(n_head, n_embd, dropout)
        self.mlp_norm = nn.LayerNorm(n_embd)
        self.expand = nn.Linear(n_embd, 4 * n_embd)
        self.project = nn.Linear(4 * n_embd, n_embd)
        self.dropout = nn.Dropout(dropout)

    def attention_maps(self, x: Tensor) -> Tensor:
        return self.attention.maps(self.attention_norm(x))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        hidden = F.gelu(self.expand(self.mlp_norm(x)), approximate="tanh")
        return x + self.dropout(self.project(hidden))


class GPT(nn.Module):
    """A causal transformer: output t is a function of tokens 0..t alone.

    Pre-norm blocks, learned positions, GELU, biases and initialisation are those of GPT-2: weights
    from N(0, 0.02^2), those that write into the residual stream from N(0, 0.02^2 / (2 n_layer)).
    The output layer has no bias and is not tied to the embedding.

    Args:
        vocab_size: number of tokens: ids are 0..vocab_size - 1.
        block_size: the most tokens it can read.
        n_layer: number of blocks.
        n_head: attention heads per block.
        n_embd: width, a multiple of n_head.
        n_out: outputs per position. Default: vocab_size (next-token logits).
        dropout: probability in train mode: of embeddings, attention weights, residual branches.

    Raises:
        TypeError: a size is no int, or tokens are no integers.
        ValueError: a size is below 1, n_embd is no multiple of n_head, dropout is outside [0, 1), a
            text is empty or longer than block_size, a token is outside the vocabulary (values are
            not checked under torch.compile and torch.vmap).

    Reference:
        Radford et al. 2019, "Language models are unsupervised multitask learners", section 2.3.

    Example:
        >>> gpt = GPT(vocab_size=11, block_size=8)
        >>> tokens = torch.tensor([[0, 2, 8, 6, 10]])
        >>> gpt(tokens).shape
        torch.Size([1, 5, 11])
        >>> gpt.attention_maps(tokens).shape
        torch.Size([1, 3, 3, 5, 5])
    """

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
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(_Block(n_head, n_embd, dropout) for _ in range(n_layer)))
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

    def forward(self, tokens: Tensor) -> Tensor:
        """Outputs at every position: (*B, T) -> (*B, T, n_out), T from 1 to block_size."""
        return self.head(self.hidden_states(tokens))

    def hidden_states(self, tokens: Tensor) -> Tensor:
        """What the output layer reads: (*B, T) -> (*B, T, n_embd).

        `gpt(tokens)` is `gpt.head(gpt.hidden_states(tokens))`. Where few positions are needed,
        index this first and apply `head` to them alone.
        """
        x = self.norm(self.blocks(self._embed(tokens)))
        return x.view(*tokens.shape, x.shape[-1])

    @torch.no_grad()
    def attention_maps(self, tokens: Tensor) -> Tensor:
        """Attention weights: (*B, T) -> (*B, n_layer, n_head, T, T), of t to s at [..., t, s].

        Rows sum to 1, the future has weight 0. Without gradients and without dropout of the maps.
        """
        x = self._embed(tokens)
        maps = []
        for block in cast("Iterable[_Block]", self.blocks):
            maps.append(block.attention_maps(x))
            x = block(x)
        stacked = torch.stack(maps, dim=1)
        return stacked.view(*tokens.shape[:-1], *stacked.shape[1:])

    def _embed(self, tokens: Tensor) -> Tensor:
        """Embeds flat texts: (*B, T) -> (N, T, n_embd)."""
        self._check_tokens(tokens)
        n_tokens = tokens.shape[-1]
        x = self.token_embedding(tokens.reshape(-1, n_tokens))
        return self.dropout(x + self.position_embedding.weight[:n_tokens])

    def _check_tokens(self, tokens: Tensor) -> None:
        _check_integers("tokens", tokens)
        if tokens.ndim == 0 or not 1 <= tokens.shape[-1] <= self.block_size:
            raise ValueError(
                f"`tokens` must have 1 to `block_size` = {self.block_size} tokens last, got shape "
                f"{tuple(tokens.shape)}: build the GPT with a larger `block_size`."
            )
        if _values_hidden(tokens):
            return
        # On an accelerator a bad index kills the process: the check is worth its microseconds.
        if ((tokens < 0) | (tokens >= self.vocab_size)).any():
            raise ValueError(
                f"`tokens` must lie in 0..{self.vocab_size - 1}, got {tokens.min().item()} to "
                f"{tokens.max().item()}: `vocab_size` must count special tokens (separator, end)."
            )

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Writes `config.json` and `model.safetensors`; creates the folder and its parents."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        config = json.dumps({"class": type(self).__name__, **self.config}, indent=2)
        (folder / "config.json").write_text(config + "\n", encoding="utf-8")
        weights = {name: value.contiguous() for name, value in self.state_dict().items()}
        save_file(weights, folder / "model.safetensors")

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str]) -> GPT:
        """Reads what `save_pretrained` wrote: the same weights bit for bit, on the CPU.

        The model comes back in eval mode, as elsewhere under this name: call `train()` for dropout.

        Raises:
            FileNotFoundError: one of the two files is not there.
            ValueError: a file is damaged, of another class, or does not fit the other.
        """
        config_file, weights_file = (Path(folder) / n for n in ("config.json", "model.safetensors"))
        for file in (config_file, weights_file):
            if not file.is_file():
                raise FileNotFoundError(
                    f"`folder` must hold config.json and model.safetensors, {file} is not there: "
                    "was it written by `save_pretrained`?"
                )
        try:
            with torch.device("meta"):
                gpt = cls(**_read_config(config_file, cls.__name__))
            # `assign` keeps the dtype of the file; a copy would cast to that of the fresh module.
            gpt.load_state_dict(load_file(weights_file), assign=True)
        except (TypeError, ValueError, RuntimeError, SafetensorError) as error:
            raise ValueError(f"`folder` {folder} holds no valid {cls.__name__}: {error}") from error
        return gpt.eval()


def _check_sizes(sizes: dict[str, int], dropout: float) -> None:
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool):
            raise TypeError(f"`{name}` must be an int, got {type(size).__name__}.")
        if size < 1:
            raise ValueError(f"`{name}` must be at least 1, got {size}.")
    n_embd, n_head = sizes["n_embd"], sizes["n_head"]
    if n_embd % n_head:
        raise ValueError(
            f"`n_embd` must be a multiple of `n_head`, got {n_embd} and {n_head}: heads share it."
        )
    if not 0 <= dropout < 1:
        raise ValueError(f"`dropout` must lie in [0, 1), got {dropout}.")


def _read_config(file: Path, name: str) -> dict[str, Any]:
    config = json.loads(file.read_text(encoding="utf-8"))
    found = config.pop("class", None) if isinstance(config, dict) else None
    if found != name:
        raise ValueError(f"`class` must be {name!r}, got {found!r}: load it with that class.")
    expected = {"vocab_size", "block_size", "n_layer", "n_head", "n_embd", "n_out", "dropout"}
    if config.keys() != expected:
        raise ValueError(f"its keys must be class and {sorted(expected)}, got {sorted(config)}.")
    return config


def _segments(tokens: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """Joins neighbouring states that are prefixes of one text.

    Row i + 1 continues row i when the text of row i is a prefix of its own. By causality the last
    row of a run of continuing rows answers for all of them. As the texts alone decide, any batch
    may come in: trajectories in order, several in a row, cut ones, shuffled states.

    From (N, T) and (N,) to the last row of each segment (S, T) and the segment of each state (N,).
    """
    real = torch.arange(tokens.shape[1], device=tokens.device) < position[:-1, None]
    same = ((tokens[1:] == tokens[:-1]) | ~real).all(-1)
    last = torch.ones_like(position, dtype=torch.bool)
    last[:-1] = ~(same & (position[1:] >= position[:-1]))
    return tokens[last], last.cumsum(0) - last.long()


class _StateReader(nn.Module):
    """The GPT's output for states: (*B, L) tokens and (*B,) position -> (*B, n_out).

    In TorchRL's recurrent mode neighbouring states of one text share a row of the GPT: a trajectory
    costs one pass. Outside it, and where shapes may not depend on values (torch.compile,
    torch.vmap), every state is a row. Both give the same numbers. With `clamp_full` a text that
    fills `tokens` may be longer than block_size and is read up to there: right where the output is
    for a next token, which such a text cannot have.
    """

    def __init__(self, gpt: GPT, *, clamp_full: bool):
        super().__init__()
        self.gpt, self.clamp_full = gpt, clamp_full

    def forward(self, tokens: Tensor, position: Tensor) -> Tensor:
        self._check_state(tokens, position)
        n_tokens = min(self.gpt.block_size, tokens.shape[-1])
        rows = tokens[..., :n_tokens].reshape(-1, n_tokens)
        # Rows padded by split_trajs are all zeros: position 0 is read as 1.
        index = position.clamp(1, n_tokens).reshape(-1)
        if recurrent_mode() and not _values_hidden(tokens):
            rows, row = _segments(rows, index)
        else:
            row = torch.arange(len(index), device=index.device)
        hidden = self.gpt.hidden_states(rows).flatten(0, 1)
        output = self.gpt.head(hidden.index_select(0, row * n_tokens + index - 1))
        return output.view(*position.shape, self.gpt.n_out)

    def _check_state(self, tokens: Tensor, position: Tensor) -> None:
        _check_integers("position", position)
        if tokens.ndim == 0 or position.shape != tokens.shape[:-1]:
            raise ValueError(
                "`position` must have the shape of `tokens` without its last dimension (one number "
                f"per text, no trailing 1), got {tuple(position.shape)} and {tuple(tokens.shape)}."
            )
        if _values_hidden(tokens):
            return
        length, block_size = tokens.shape[-1], self.gpt.block_size
        if ((position < 0) | (position > length)).any():
            raise ValueError(
                f"`position` must lie in 0..{length}, the length of `tokens`, got "
                f"{position.min().item()} to {position.max().item()}: it counts the real tokens."
            )
        unreadable = position > block_size
        if self.clamp_full:
            unreadable = unreadable & (position < length)
        if unreadable.any():
            raise ValueError(
                f"`position` must be at most `block_size` = {block_size}, got "
                f"{position[unreadable].max().item()}: the text is longer than the GPT can read, "
                "build it with a larger `block_size`."
            )


class GPTActor(ProbabilisticActor):
    """A GPT as a policy whose action is the next token.

    Reads a state, writes the logits, the drawn token and its log-probability. In TorchRL's
    recurrent mode (losses set it, a value estimator on its own does not) a trajectory is scored in
    one pass; the log-probabilities are those of step-by-step evaluation, also on shuffled states.
    Like every TorchRL actor it takes the mode unless `set_exploration_type` says RANDOM;
    collectors say so.

    A state whose text fills `tokens` has no next token. Rollouts still call the policy on such rows
    when they wait for others (`break_when_all_done`), and drop the result: there the actor answers
    from the first `block_size` tokens. Any other text longer than that is an error.

    Args:
        gpt: its n_out outputs are the logits of the tokens 0..n_out - 1.
        in_keys: text (*B, L), position (*B,).
        action_key: the drawn token (*B,), int64; its log-probability (*B,), in nats, stands beside
            it with "_log_prob" appended.
        return_log_prob: whether to write the log-probability.

    Raises:
        ValueError: gpt has one output or more outputs than tokens; a state cannot be read.
        TypeError: tokens or position are no integers.

    Example:
        >>> from tensordict import TensorDict
        >>> actor = GPTActor(GPT(vocab_size=11, block_size=8))
        >>> tokens = torch.tensor([[0, 2, 8, 6, 10, 3, 10, 10, 10]])
        >>> state = TensorDict(tokens=tokens, position=torch.tensor([6]), batch_size=[1])
        >>> actor(state)["action_log_prob"].shape
        torch.Size([1])
    """

    def __init__(
        self,
        gpt: GPT,
        *,
        in_keys: Sequence[NestedKey] = ("tokens", "position"),
        action_key: NestedKey = "action",
        return_log_prob: bool = True,
    ):
        if not 2 <= gpt.n_out <= gpt.vocab_size:
            raise ValueError(
                "`gpt` must have one output per token (n_out from 2 to vocab_size = "
                f"{gpt.vocab_size}), got n_out = {gpt.n_out}: a critic's GPT cannot act."
            )
        reader = _StateReader(gpt, clamp_full=True)
        super().__init__(
            TensorDictModule(reader, in_keys=list(in_keys), out_keys=["logits"]),
            in_keys=["logits"],
            out_keys=[action_key],
            distribution_class=torch.distributions.Categorical,
            return_log_prob=return_log_prob,
        )


class GPTCritic(ValueOperator):
    """A GPT as a state-value network: V(text so far), one number per state.

    It follows TorchRL's recurrent mode as `GPTActor` does: wrap GAE in `set_recurrent_mode(True)`
    and give it `deactivate_vmap=True`, or it pays one pass per state. The value of a finished text
    is read too (the terminal next state), so block_size must be the whole length of `tokens`: one
    more than a language model of the same texts needs.

    Args:
        gpt: with n_out = 1.
        in_keys: text (*B, L), position (*B,).
        out_keys: the value (*B, 1).

    Raises:
        ValueError: gpt has several outputs; a state cannot be read.
        TypeError: tokens or position are no integers.

    Example:
        >>> from tensordict import TensorDict
        >>> critic = GPTCritic(GPT(vocab_size=11, block_size=9, n_out=1))
        >>> tokens = torch.tensor([[0, 2, 8, 6, 10, 3, 10, 10, 10]])
        >>> state = TensorDict(tokens=tokens, position=torch.tensor([6]), batch_size=[1])
        >>> critic(state)["state_value"].shape
        torch.Size([1, 1])
    """

    def __init__(
        self,
        gpt: GPT,
        *,
        in_keys: Sequence[NestedKey] = ("tokens", "position"),
        out_keys: Sequence[NestedKey] = ("state_value",),
    ):
        _check_one_output(gpt)
        reader = _StateReader(gpt, clamp_full=False)
        super().__init__(reader, in_keys=list(in_keys), out_keys=list(out_keys))


class _TextScorer(nn.Module):
    """The GPT's single output at an end token put behind each text: (*B, L) -> (*B,)."""

    def __init__(self, gpt: GPT, end_token: int):
        super().__init__()
        self.gpt, self.end_token = gpt, end_token

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.ndim == 0 or tokens.shape[-1] >= self.gpt.block_size:
            raise ValueError(
                "`tokens` must have a last dimension of at most `block_size` - 1 = "
                f"{self.gpt.block_size - 1}, since the end token takes one place; got shape "
                f"{tuple(tokens.shape)}: build the GPT with a larger `block_size`."
            )
        text = F.pad(tokens, (0, 1), value=self.end_token)
        return self.gpt.head(self.gpt.hidden_states(text)[..., -1, :]).squeeze(-1)


class GPTRewardModel(TensorDictModule):
    """A GPT that scores whole texts: the one output at an end token appended to the text.

    A TensorDict module and also a plain function of tokens, such as an env takes for its reward.

    Args:
        gpt: with n_out = 1 and a block_size of at least L + 1.
        in_keys: whole text (*B, L), no padding.
        out_keys: the score (*B,), in units of its training loss (log odds for pairwise
            preferences).
        end_token: id to append. Default: the last of the vocabulary.

    Raises:
        ValueError: gpt has several outputs, end_token is no token, a text leaves no room for it.

    Example:
        >>> from tensordict import TensorDict
        >>> reward_model = GPTRewardModel(GPT(vocab_size=12, block_size=10, n_out=1))
        >>> tokens = torch.tensor([[0, 2, 8, 6, 10, 7, 3, 9, 1]])
        >>> score = reward_model(tokens)
        >>> score.shape
        torch.Size([1])
        >>> torch.equal(reward_model(TensorDict(tokens=tokens, batch_size=[1]))["score"], score)
        True
    """

    def __init__(
        self,
        gpt: GPT,
        *,
        in_keys: Sequence[NestedKey] = ("tokens",),
        out_keys: Sequence[NestedKey] = ("score",),
        end_token: int | None = None,
    ):
        _check_one_output(gpt)
        end_token = gpt.vocab_size - 1 if end_token is None else end_token
        if not 0 <= end_token < gpt.vocab_size:
            raise ValueError(
                f"`end_token` must lie in 0..{gpt.vocab_size - 1}, got {end_token}: build the GPT "
                "with a `vocab_size` that counts it."
            )
        scorer = _TextScorer(gpt, end_token)
        super().__init__(scorer, in_keys=list(in_keys), out_keys=list(out_keys))


def _check_one_output(gpt: GPT) -> None:
    if gpt.n_out != 1:
        raise ValueError(
            f"`gpt` must have one output, got n_out = {gpt.n_out}: build it with `n_out=1`."
        )
