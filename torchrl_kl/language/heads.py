"""Actor, critic and reward model over a GPT.

Axes: B* any leading dimensions, L length of a whole text, N states, S segments.

A state consists of `tokens` (*B, L), the text so far and then padding (any token ids), and
`position` (*B,), the number of tokens before it. Its output is the GPT's at `position - 1`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import NestedKey
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torch.nn import functional as F
from torchrl.modules import ProbabilisticActor, ValueOperator, recurrent_mode

from torchrl_kl.language.gpt import GPT, check_integers, values_hidden

Keys = Sequence[NestedKey]


def _segments(tokens: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """The last row of each segment, (S, L), and the index of each state's segment, (N,).

    A segment is a run of states that are each a prefix of the next one. By causality, its last row
    has the outputs for all of them. Only the texts are compared: states may be in any order.
    """
    real = torch.arange(tokens.shape[1], device=tokens.device) < position[:-1, None]
    same = ((tokens[1:] == tokens[:-1]) | ~real).all(-1)
    last = torch.ones_like(position, dtype=torch.bool)
    last[:-1] = ~(same & (position[1:] >= position[:-1]))
    return tokens[last], last.cumsum(0) - last.long()


class _StateReader(nn.Module):
    """The GPT's output for each state: (*B, L) tokens and (*B,) position -> (*B, n_out).

    In TorchRL's recurrent mode, consecutive states of one text share one row of the GPT, unless
    shapes must not depend on values. Both give the same numbers. With `clamp_full`, a text that
    fills `tokens` and is longer than block_size is read up to there.
    """

    def __init__(self, gpt: GPT, *, clamp_full: bool):
        super().__init__()
        self.gpt, self.clamp_full = gpt, clamp_full

    def forward(self, tokens: Tensor, position: Tensor) -> Tensor:
        self._check_state(tokens, position)
        n_tokens = min(self.gpt.block_size, tokens.shape[-1])
        rows = tokens[..., :n_tokens].reshape(-1, n_tokens)
        # Rows that split_trajs padded are all zeros: position 0 is treated as 1.
        index = position.clamp(1, n_tokens).reshape(-1)
        if recurrent_mode() and not values_hidden(tokens):
            rows, row = _segments(rows, index)
        else:
            row = torch.arange(len(index), device=index.device)
        hidden = self.gpt.hidden_states(rows).flatten(0, 1)
        output = self.gpt.head(hidden.index_select(0, row * n_tokens + index - 1))
        return output.view(*position.shape, self.gpt.n_out)

    def _check_state(self, tokens: Tensor, position: Tensor) -> None:
        check_integers("position", position)
        if tokens.ndim == 0 or position.shape != tokens.shape[:-1]:
            raise ValueError(
                "`position` must have one number per text (the shape of `tokens` without its last "
                f"dimension), got {tuple(position.shape)} and {tuple(tokens.shape)}."
            )
        if values_hidden(tokens):
            return
        length, block_size = tokens.shape[-1], self.gpt.block_size
        most = min(length, block_size)
        full = (position == length) & self.clamp_full
        if not ((position >= 0) & (position <= most) | full).all():
            low, high = position.aminmax()
            raise ValueError(
                f"`position` must lie in 0..{most}, got {low} to {high}: it counts tokens before "
                f"padding, `tokens` have length {length} and the GPT `block_size` = {block_size}."
            )


class GPTActor(ProbabilisticActor):
    """A GPT as a policy whose action is the next token.

    In TorchRL's recurrent mode (losses set it) a trajectory is scored in one pass, with the same
    log-probs as step by step; states may be shuffled. Actions are sampled only where the
    exploration type is RANDOM, which collectors set. A text that fills `tokens` may be longer than
    block_size: rollouts call the policy on it and discard the result.

    Args:
        gpt: its outputs are the logits of tokens 0..n_out - 1.
        in_keys: text (*B, L) and position (*B,).
        action_key: the token (*B,), int64. Its log-prob (*B,), nats, is under this key with
            "_log_prob" appended.
        return_log_prob: whether to write the log-prob.

    Raises:
        TypeError: tokens or position are not int64 or int32.
        ValueError: gpt has one output or more outputs than tokens, or it cannot read a state.

    Example:
        >>> import torch
        >>> from torchrl_kl import GPT, GPTActor
        >>> actor = GPTActor(GPT(vocab_size=11, block_size=8))
        >>> tokens, position = torch.tensor([[0, 2, 8, 6, 10, 3, 10, 10]]), torch.tensor([6])
        >>> logits, action, log_prob = actor(tokens=tokens, position=position)
        >>> logits.shape
        torch.Size([1, 11])
    """

    def __init__(
        self,
        gpt: GPT,
        *,
        in_keys: Keys = ("tokens", "position"),
        action_key: NestedKey = "action",
        return_log_prob: bool = True,
    ):
        if not 2 <= gpt.n_out <= gpt.vocab_size:
            raise ValueError(
                "`gpt` must have one output per token (n_out from 2 to vocab_size = "
                f"{gpt.vocab_size}), got n_out = {gpt.n_out}: a critic's GPT cannot act."
            )
        # A text that fills `tokens` has no next token.
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

    With GAE built with `deactivate_vmap=True` and called within `set_recurrent_mode(True)`, a
    trajectory needs one pass. The critic also reads finished texts: block_size must be at least L.

    Args:
        gpt: a GPT with n_out = 1.
        in_keys: text (*B, L) and position (*B,).
        out_keys: the value (*B, 1).

    Raises:
        TypeError: tokens or position are not int64 or int32.
        ValueError: gpt has several outputs, or it cannot read a state.

    Example:
        >>> import torch
        >>> from torchrl_kl import GPT, GPTCritic
        >>> critic = GPTCritic(GPT(vocab_size=11, block_size=8, n_out=1))
        >>> tokens, position = torch.tensor([[0, 2, 8, 6, 10, 3, 10, 10]]), torch.tensor([6])
        >>> critic(tokens=tokens, position=position).shape
        torch.Size([1, 1])
    """

    def __init__(
        self, gpt: GPT, *, in_keys: Keys = ("tokens", "position"), out_keys: Keys = ("state_value",)
    ):
        _check_one_output(gpt)
        reader = _StateReader(gpt, clamp_full=False)
        super().__init__(reader, in_keys=list(in_keys), out_keys=list(out_keys))


class _TextScorer(nn.Module):
    """The GPT's single output at an end token appended to each text: (*B, L) -> (*B,)."""

    def __init__(self, gpt: GPT, end_token: int):
        super().__init__()
        self.gpt, self.end_token = gpt, end_token

    def forward(self, tokens: Tensor) -> Tensor:
        most = self.gpt.block_size - 1
        if tokens.ndim == 0 or tokens.shape[-1] > most:
            raise ValueError(
                f"`tokens` must have a last dimension of at most `block_size` - 1 = {most}, since "
                f"the end token takes one place, got shape {tuple(tokens.shape)}."
            )
        text = F.pad(tokens, (0, 1), value=self.end_token)
        return self.gpt.head(self.gpt.hidden_states(text)[..., -1, :]).squeeze(-1)


class GPTRewardModel(TensorDictModule):
    """A GPT that scores whole texts: its output at an end token appended to the text.

    Call it with a tensordict, or with tokens as the `reward_fn` of an env.

    Args:
        gpt: a GPT with n_out = 1 and a block_size of at least L + 1.
        in_keys: whole text (*B, L), without padding.
        out_keys: the score (*B,), in the units of its training loss.
        end_token: id of the appended token. Default: vocab_size - 1.

    Raises:
        ValueError: gpt has several outputs, end_token is outside the vocabulary, or L is too large.

    Example:
        >>> import torch
        >>> from torchrl_kl import GPT, GPTRewardModel
        >>> reward_model = GPTRewardModel(GPT(vocab_size=12, block_size=10, n_out=1))
        >>> reward_model(torch.tensor([[0, 2, 8, 6, 10, 7, 3, 9, 1]])).shape
        torch.Size([1])
    """

    def __init__(
        self,
        gpt: GPT,
        *,
        in_keys: Keys = ("tokens",),
        out_keys: Keys = ("score",),
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
        raise ValueError(f"`gpt` must have one output, got n_out = {gpt.n_out}: use `n_out=1`.")
