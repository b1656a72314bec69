"""Whole responses of a causal language model, without an environment.

Axes: N texts, P tokens of a prompt, T tokens of a response at most, L = P + T.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from tensordict import NestedKey, TensorDict
from torch import Tensor, nn
from torch.nn import functional as F

from torchrl_kl.actors.parallel import without_gradients
from torchrl_kl.functional.numbers import check_integers, working_dtype
from torchrl_kl.keys import as_tuple
from torchrl_kl.language.blocks import fast
from torchrl_kl.language.cache import KeyValueCache, may_cache
from torchrl_kl.language.distribution import draw
from torchrl_kl.language.heads import CausalLMActor, CausalLMRewardModel, LogitsReader
from torchrl_kl.language.responses import EndTokens, several
from torchrl_kl.language.truncation import restrict


@torch.no_grad()
def sample_responses(
    actor: CausalLMActor,
    prompts: Tensor | Sequence[Tensor],
    max_new_tokens: int,
    *,
    pad_token: int,
    eos_token: EndTokens = None,
    reward_fn: Callable[[Tensor], Tensor] | None = None,
    generator: torch.Generator | None = None,
    return_logits: bool = False,
    chunk_size: int = 256,
) -> TensorDict:
    """Samples a response to each prompt, in the layout that collectors of a text env return.

    The batch is (N, T), with time last; each text is stored and read once. KL stacks, KLMonitor,
    losses and GAE (no `average_gae`) take it whole, or in the parts that `minibatches` makes: an
    index such as `batch[rows]` copies a text for each of its tokens, as GAE does for its states.

    A model of `fully_shard` makes each pass wait for the other ranks: let each rank hold all of its
    weights for the time (`unshard`, and `set_reshard_after_forward(False)`), or a rank whose
    responses end earlier leaves the others waiting.

    Keys (under the names that the actor has):
        "tokens": (N, T, L), whole texts: prompt, response, then `pad_token`; "position": (N, T),
        the number of tokens before the action; both also in "next".
        "action", "action_log_prob", "logits" (if asked for): (N, T), nats (N, T), (N, T, V).
        ("kept", "ids"): (N, T, K), of an actor that truncates.
        ("collector", "mask"): (N, T), False after the end, where log-probs and logits are 0.
        ("next", "reward"): (N, T, 1), that of the text at its last token, and 0 elsewhere.
        ("next", "done"), ("next", "terminated"), ("next", "truncated"): (N, T, 1), at that token;
        a response without an end token is truncated, unless `eos_token` is None.

    Args:
        actor: the policy; its temperature applies, and its present mode (train or eval).
        prompts: ids (N, P), or N tensors of any lengths, at least 1; without padding.
        max_new_tokens: T, at least 1.
        pad_token: id that fills texts after the response; it may be `eos_token`.
        eos_token: id that ends a response and belongs to it; or several. None: all have T tokens.
        reward_fn: maps whole texts (N, L), padded after responses, to rewards (N,). None: 0.
        generator: of the samples.
        return_logits: whether to record the logits, for `estimator="exact"`.
        chunk_size: how many texts are sampled together; keys and values are kept for so many.

    Raises:
        TypeError, ValueError: an argument is wrong, texts are too long, or the model is not causal.

    Example:
        >>> import torch
        >>> from torchrl_kl import KLConstrainedTransform
        >>> from torchrl_kl.language import GPT, CausalLMActor, sample_responses
        >>> actor = CausalLMActor(GPT(vocab_size=11, block_size=9))
        >>> prompts = torch.tensor([[0, 2, 8, 6, 10], [5, 7, 1, 5, 10]])
        >>> batch = sample_responses(actor, prompts, 4, pad_token=10)
        >>> KLConstrainedTransform(actor, 0.1)(batch)["next", "kl"].shape
        torch.Size([2, 4, 1])
    """
    for name, count in (("max_new_tokens", max_new_tokens), ("chunk_size", chunk_size)):
        if type(count) is not int or count < 1:
            raise ValueError(f"`{name}` must be an int of at least 1, got {count}.")
    padded, start = _pad(prompts, pad_token)
    ends = several(eos_token)
    reader = _reader_of(actor, padded.shape[1] + max_new_tokens - 1, pad_token, ends)
    texts = F.pad(padded, (0, max_new_tokens), value=pad_token)
    floating = (p.dtype for p in reader.parameters() if p.is_floating_point())
    dtype = working_dtype(next(floating, torch.float32))
    log_probs = torch.zeros_like(texts[:, -max_new_tokens:], dtype=dtype)
    spans = (start, start + max_new_tokens)
    write = partial(_write, actor, ends, pad_token, generator, return_logits)
    with without_gradients(reader):
        parts = [*map(write, *(each.split(chunk_size) for each in (texts, *spans, log_probs)))]
    asked = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    return _batch(actor, texts, *spans, ends, log_probs, asked, reward_fn)


def _pad(prompts: Tensor | Sequence[Tensor], pad_token: int) -> tuple[Tensor, Tensor]:
    """Prompts (N, P), padded on the right, and their lengths (N,)."""
    rows = [prompts] if isinstance(prompts, Tensor) else list(prompts)
    for row in rows:
        check_integers("prompts", row)
    shapes = [tuple(row.shape) for row in rows]
    n_dims = 2 if isinstance(prompts, Tensor) else 1
    if not rows or any(len(shape) != n_dims or 0 in shape for shape in shapes):
        raise ValueError(
            "`prompts` must be ids (N, P), or a list of 1-dimensional tensors, each of at least "
            f"one token, got shapes {shapes}."
        )
    if isinstance(prompts, Tensor):
        return prompts.long(), torch.full_like(prompts[:, 0], prompts.shape[1]).long()
    lengths = torch.tensor([len(row) for row in rows], device=rows[0].device)
    padded = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad_token)
    return padded.long(), lengths


def _reader_of(
    actor: CausalLMActor, n_read: int, pad_token: int, ends: tuple[int, ...]
) -> LogitsReader:
    """What maps states to logits; ValueError if it does not take `n_read` such tokens."""
    if not isinstance(actor, CausalLMActor):
        raise TypeError(f"`actor` must be a CausalLMActor, got {type(actor).__name__}.")
    limit = actor.reader.lm.max_tokens
    if limit is not None and n_read > limit:
        raise ValueError(
            f"prompts and `max_new_tokens` must leave at most {limit} tokens to be read, which is "
            f"what the model takes, got {n_read}: shorten them, or build a larger model."
        )
    size = actor.reader.lm.vocab_size
    for name, token in (("pad_token", pad_token), *(("eos_token", end) for end in ends)):
        if type(token) is not int or not 0 <= token < (size or token + 1):
            of = "" if size is None else f" of {size} tokens"
            raise ValueError(f"`{name}` must lie in the model's vocabulary{of}, got {token!r}.")
    return actor.reader


def _write(
    actor: CausalLMActor,
    ends: tuple[int, ...],
    pad_token: int,
    generator: torch.Generator | None,
    return_logits: bool,
    texts: Tensor,
    start: Tensor,
    end: Tensor,
    log_probs: Tensor,
) -> dict[NestedKey, Tensor]:
    """Writes responses into texts (N, L), their ends (N,) and log-probs (N, T), in place.

    Returns the logits, (N, T, V), 0 after the end, and the kept ids, (N, T, K), as asked for.
    """
    reader = actor.reader
    shortest, longest = int(start.min()), int(start.max())
    lm = copy.copy(reader.lm)
    vars(lm)["model"] = fast(reader.lm.model)
    cache = KeyValueCache(*texts.shape) if lm.caches else None
    even = shortest == longest
    rows, last = torch.arange(len(texts), device=texts.device), start - 1
    token = texts[:, :0]  # (N, 1) after the first step
    ended = torch.zeros_like(start, dtype=torch.bool)
    asked: dict[NestedKey, list[Tensor]] = {}
    for t in range(log_probs.shape[1]):
        width = longest + t
        if not reader.lm.causal:
            reader.lm.check_causal(texts[last.argmax(), :width])
        if t == 1 and cache is not None and not may_cache(reader.lm, texts[:, :width], last, even):
            cache = None
        if cache is None:
            output = lm.at(texts[:, :width], rows, last)
        elif t == 0:
            output = cache.read_texts(lm, texts[:, :width], last)
            cache = cache if cache.buffers else None  # not used in gradient checkpointing
        else:
            output = cache.read_next(lm, token[:, 0], width - 1 if even else last, width)
        logits = reader.scale(output)
        if actor.truncation is not None:
            ids = actor.truncation.keep(logits, bounded=True)
            logits = restrict(logits, ids)
            asked.setdefault(actor.kept_key, []).append(ids)
        log_prob = logits.log_softmax(-1)
        token = draw(log_prob, generator)
        torch.gather(log_prob, 1, token, out=log_probs[:, t : t + 1])
        if return_logits:
            asked.setdefault("logits", []).append(log_prob.masked_fill(ended[:, None], 0.0))
        last = last + 1
        if ends:
            token[ended], log_probs[ended, t] = pad_token, 0.0
            said = torch.isin(token[:, 0], token.new_tensor(ends)) & ~ended
            torch.where(said, last + 1, end, out=end)
            ended |= said
        texts.scatter_(1, last[:, None], token)
        if ends and ended.all():
            break
    n_steps = log_probs.shape[1]
    return {
        key: F.pad(torch.stack(each, 1), (0, 0, 0, n_steps - len(each)))
        for key, each in asked.items()
    }


def _rewards(reward_fn: Callable[[Tensor], Tensor] | None, texts: Tensor, end: Tensor) -> Tensor:
    """Rewards of whole texts (N, L), which end before `end` (N,): (N,)."""
    if reward_fn is None:
        return torch.zeros(len(texts), device=texts.device)
    if isinstance(reward_fn, CausalLMRewardModel):  # scores a text at its end, not after padding
        reward_fn = partial(reward_fn.module, position=end)
    rewards = reward_fn(texts.clone())  # which it may edit
    if not isinstance(rewards, Tensor) or rewards.shape != texts.shape[:1]:
        got = tuple(rewards.shape) if isinstance(rewards, Tensor) else type(rewards).__name__
        raise ValueError(f"`reward_fn` must return a tensor ({len(texts)},), got {got}.")
    return rewards.to(working_dtype(rewards.dtype))


def _batch(
    actor: CausalLMActor,
    texts: Tensor,
    start: Tensor,
    end: Tensor,
    ends: tuple[int, ...],
    log_probs: Tensor,
    asked: dict[NestedKey, Tensor],
    reward_fn: Callable[[Tensor], Tensor] | None,
) -> TensorDict:
    """The layout (N, T) of texts whose responses are the tokens from `start` to `end`."""
    shape, rewards = log_probs.shape, _rewards(reward_fn, texts, end)
    position = start[:, None] + torch.arange(shape[1], device=texts.device)
    tokens = texts[:, None].expand(*shape, -1)
    done = (position == end[:, None] - 1).unsqueeze(-1)
    final = texts.gather(1, end[:, None] - 1)  # (N, 1)
    cut = done & ~torch.isin(final, final.new_tensor(ends))[:, None] if ends else done & False
    tokens_key, position_key = actor.in_keys
    entries: dict[NestedKey, Tensor] = {
        tokens_key: tokens,
        position_key: position,
        actor.dist_sample_keys[0]: texts.gather(1, position),
        actor.log_prob_keys[0]: log_probs,
        ("collector", "mask"): position < end[:, None],
        ("next", *as_tuple(tokens_key)): tokens,
        ("next", *as_tuple(position_key)): position + 1,
        ("next", "reward"): torch.where(done, rewards[:, None, None], 0.0),
        ("next", "done"): done,
        ("next", "terminated"): done & ~cut,
        ("next", "truncated"): cut,
    }
    entries |= asked
    names: list[Any] = [None, "time"]
    return TensorDict(entries, batch_size=shape, device=texts.device, names=names)
