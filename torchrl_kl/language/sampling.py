"""Whole responses of a causal language model, without an environment.

Axes: N texts, P tokens of a prompt, T tokens of a response at most, L = P + T.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tensordict import NestedKey, TensorDict
from torch import Tensor, nn
from torch.nn import functional as F

from torchrl_kl.actors.parallel import without_gradients
from torchrl_kl.functional.numbers import check_integers, working_dtype
from torchrl_kl.keys import as_tuple
from torchrl_kl.language.cache import InStep, NotCachedError, Scores, without_cache
from torchrl_kl.language.causal_lm import NOT_CAUSAL
from torchrl_kl.language.distribution import draw
from torchrl_kl.language.heads import CausalLMActor, CausalLMRewardModel, LogitsReader
from torchrl_kl.language.prompts import read_at
from torchrl_kl.language.responses import EndTokens, several
from torchrl_kl.language.truncation import restrict

_PASS = 16  # rows of one more position that cost as much as a pass does, whatever it reads


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

    The batch is (N, T), with time last. Texts are read with the cache that the model makes for
    itself, equal prompts once, and each is stored once. KL stacks, KLMonitor, losses and GAE (no
    `average_gae`) take the batch whole, or in the parts that `minibatches` makes: an index such as
    `batch[rows]` copies a text for each of its tokens, as GAE does for its states.

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
        generator: of the samples, which do not depend on what is sampled together.
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
    n_read = padded.shape[1] + max_new_tokens - 1
    reader = _reader_of(actor, n_read, pad_token, ends)
    reader.lm.check_causal(padded, n_read)
    texts = F.pad(padded, (0, max_new_tokens), value=pad_token)
    floating = (p.dtype for p in reader.parameters() if p.is_floating_point())
    dtype = working_dtype(next(floating, torch.float32))
    size, device = (max_new_tokens, len(texts)), texts.device
    # Of each text its own, whatever is sampled together.
    drawn = torch.rand(size, dtype=torch.float64, device=device, generator=generator).T
    end, log_probs = start.clone(), torch.zeros_like(drawn, dtype=dtype)
    asked: dict[NestedKey, Tensor] = {}
    for rows, lead in _parts(padded, start, max_new_tokens, chunk_size):
        draft = _Draft(actor, ends, return_logits, texts[rows], start[rows], lead, drawn[rows])
        with without_gradients(reader):
            found = draft.write()
        texts[rows], end[rows], log_probs[rows] = draft.texts, draft.end, found.to(dtype)
        for key, values in draft.asked.items():
            if key not in asked:
                asked[key] = values.new_zeros(len(texts), *values.shape[1:])
            asked[key][rows] = values
    return _batch(actor, texts, start, end, ends, log_probs, asked, reward_fn)


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


def _parts(
    prompts: Tensor, start: Tensor, n_new: int, chunk_size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Which of the prompts (N, P) are sampled together, shorter ones first, and their leads.

    The lead of a prompt is the first of them that is equal to it, if many are equal; or itself.
    """
    order, lengths = torch.arange(len(start), device=start.device), start.tolist()
    # Equal ones become neighbours by a hash, modulo 2**64.
    hashes = (prompts * torch.full_like(prompts[0], 0x5DEECE66D).cumprod(0)).sum(1)
    found, by_hash = hashes.sort()
    grouped = 8 * int((found[1:] == found[:-1]).sum()) >= len(order)  # else moving takes as long
    if grouped or len({*lengths}) > 1:
        order = by_hash[start[by_hash].argsort(stable=True)]
        lengths = start[order].tolist()
    for first in range(0, len(order), chunk_size):
        for i, j in _cut(lengths, n_new, first, min(first + chunk_size, len(order))):
            rows, lead = order[i:j], torch.arange(j - i, device=order.device)
            if grouped:
                texts, size = prompts[rows], start[rows]
                same = (texts[1:] == texts[:-1]).all(1) & (size[1:] == size[:-1])
                lead = lead.where(F.pad(~same, (1, 0), value=True), 0).cummax(0)[0]
            yield rows, lead


def _cut(lengths: Sequence[int], n_new: int, i: int, j: int) -> list[tuple[int, int]]:
    """Parts of the texts i to j, ordered by the lengths of their prompts, that take less time."""

    def cost(i: int, j: int) -> int:  # of a pass for each token: as many rows more as it has
        return (n_new + lengths[j - 1] - lengths[i]) * (_PASS + j - i)

    cuts = (k for k in range(i + 1, j) if lengths[k - 1] < lengths[k])
    best = min(cuts, key=lambda k: cost(i, k) + cost(k, j), default=i)
    if best == i or cost(i, best) + cost(best, j) >= cost(i, j):
        return [(i, j)]
    return _cut(lengths, n_new, i, best) + _cut(lengths, n_new, best, j)


@dataclass
class _Draft:
    """N texts that are written in step; those with longer prompts are given their own tokens."""

    actor: CausalLMActor
    ends: tuple[int, ...]
    return_logits: bool
    prompts: Tensor  # (N, L), with padding
    start: Tensor  # (N,), lengths of the prompts, shorter ones first
    lead: Tensor  # (N,), the first text with the same prompt, which is read for all of them
    uniform: Tensor  # (N, T), numbers by which tokens are drawn

    def write(self) -> Tensor:
        """Writes the responses, and returns their log-probs (N, T), 0 after the end."""
        self.reader = self.actor.reader
        steps = InStep(self.reader.lm)
        try:
            self._write(steps)
            steps.compare(int(self.end.max()) - 1, self._scores)
        except NotCachedError as problem:
            if not steps.lm.caches:
                sizes = int(self.start[0]), int(self.end.max()) - 1
                raise ValueError(NOT_CAUSAL.format(*sizes)) from problem
            with without_cache(self.reader.lm, problem):
                return self.write()
        return self.log_probs.gather(1, self.at)

    def _write(self, steps: InStep) -> None:
        self.texts, n_new = self.prompts.clone(), self.uniform.shape[1]
        self.at = self.start[:, None] + torch.arange(n_new, device=self.start.device)  # (N, T)
        self.drawn = torch.zeros_like(self.texts, dtype=torch.float64)
        self.drawn.scatter_(1, self.at, self.uniform)
        self.log_probs, self.asked = torch.zeros_like(self.drawn), {}
        self.end, begins = self.start + n_new, {*self.start.tolist()}
        self.events = begins | {start + n_new for start in begins}  # where rows begin or end
        self.numbers = torch.arange(len(self.start), device=self.start.device)
        self.rows = (self.lead == self.numbers).nonzero()[:, 0]  # that are read
        n = int(self.start[0])
        while self._leave(steps, n):
            output = steps.read(self.texts[self.rows], n)
            self._append(n, self._join(steps, n, output))
            n += 1

    def _leave(self, steps: InStep, n: int) -> bool:
        """Drops rows that have ended before token `n`, once they are many; whether any is left."""
        if n not in self.events:
            return True
        rows = self.numbers[self.rows]
        index = (self.end[rows] > n).nonzero()[:, 0]
        if 0 < 8 * len(index) < 7 * len(rows):
            steps.select(index)
            self.rows = rows[index]
        return len(index) > 0

    def _join(self, steps: InStep, n: int, output: Tensor) -> Tensor:
        """Adds the rows whose prompts have just been read; the outputs of those that are drawn."""
        if n in self.events:
            rows = self.numbers[self.rows]
            new = ((self.start == n) & (self.lead != self.numbers)).nonzero()[:, 0]
            if len(new):
                index = torch.cat(
                    [self.numbers[: len(rows)], torch.searchsorted(rows, self.lead[new])]
                )
                rows, order = torch.cat([rows, new]).sort()
                steps.select(index[order])
                output = output[index[order]]
            drawn = (self.start[rows] <= n) & (self.end[rows] > n)
            all_read = len(rows) == len(self.start)
            all_drawn = drawn.all()
            whole = slice(None)
            self.rows = whole if all_read else rows
            self.picked = whole if all_drawn else drawn.nonzero()[:, 0]  # of these
            self.who = whole if all_read and all_drawn else rows[self.picked]
        return output[self.picked]

    def _append(self, n: int, output: Tensor) -> None:
        """Draws token `n` of the rows `who` from the model's outputs."""
        who, truncation = self.who, self.actor.truncation
        logits = self.reader.scale(output)
        if truncation is not None:
            ids = truncation.keep(logits, bounded=True)
            logits = restrict(logits, ids)
            self._record(self.actor.kept_key, n, ids)
        log_prob = logits.log_softmax(-1)
        token = draw(log_prob, self.drawn[who, n, None])
        self.log_probs[who, n] = log_prob.gather(1, token)[:, 0].to(self.log_probs.dtype)
        self.texts[who, n] = token[:, 0]
        if self.return_logits:
            self._record("logits", n, log_prob)
        if self.ends:
            said = torch.isin(token[:, 0], token.new_tensor(self.ends))
            if said.any():
                self.end[who] = torch.where(said, n + 1, self.end[who])
                self.events.add(n + 1)

    def _record(self, key: NestedKey, n: int, values: Tensor) -> None:
        """Keeps values (R, K) of token `n` of the rows `who`."""
        if key not in self.asked:
            self.asked[key] = values.new_zeros(*self.at.shape, values.shape[1])
        self.asked[key][self.numbers[self.who], n - self.start[self.who]] = values

    def _scores(self) -> Scores:
        """The log-probs of eight responses, from the shortest to the longest, and by one pass."""
        places = torch.linspace(0, len(self.end) - 1, min(8, len(self.end)))
        rows = self.end.argsort()[places.long().to(self.end.device)].tolist()
        recorded, scored, size = zip(*map(self._score, rows), strict=True)
        return torch.cat(recorded), torch.cat(scored), max(size)

    def _score(self, row: int) -> Scores:
        """The log-probs of a response, those by one pass, and the largest logit."""
        reader, start, end = self.reader, int(self.start[row]), int(self.end[row])
        last = torch.arange(start - 1, end - 1, device=self.end.device)
        text = self.texts[row : row + 1]
        logits = reader.scale(read_at(reader.lm, text, torch.zeros_like(last), last))
        size = logits[logits.isfinite()].abs().max().item()
        if self.actor.truncation is not None:
            logits = restrict(logits, self.asked[self.actor.kept_key][row, : end - start])
        found = logits.log_softmax(-1).gather(1, text[0, start:end, None])[:, 0]
        return self.log_probs[row, start:end], found.to(self.log_probs.dtype), size


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
