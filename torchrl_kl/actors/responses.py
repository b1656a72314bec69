"""Batches of TorchRL's LLM API, read as texts whose responses are scored token by token.

Axes: N responses, T tokens of a response at most, L tokens of a whole text at most.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, is_tensor_collection
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence

from torchrl_kl._tensordict import MASK_KEY, check_batch, existing_keys
from torchrl_kl.functional.numbers import check_integers

EndTokens = int | Sequence[int] | None  # ids, each of which ends a response

FULL, PROMPT, RESPONSE = ("tokens", "full"), ("tokens", "prompt"), ("tokens", "response")
LOG_PROB, SAMPLED_LOG_PROB = ("log_probs", "full"), ("log_probs", "response")
SAMPLER_LOG_PROB = "sampler_log_prob"  # of steps, as the sampler recorded it
ATTENDED, ASSISTANT = ("masks", "all_attention_mask"), ("masks", "all_assistant_mask")


def as_steps(
    batch: TensorDictBase, *, pad_token: int | None, eos_token: EndTokens = None
) -> TensorDict:
    """A batch of TorchRL's LLM API, in the layout of `sample_responses`: one step per token.

    It takes what ChatEnv, TransformersWrapper, vLLMWrapper and LLMCollector make, in all their
    modes, lazy or padded. Texts are read as token ids and never tokenised again. Each element of
    the batch is one response: what follows ("tokens", "prompt") in ("tokens", "full"), and of that
    what ("masks", "all_assistant_mask") has, where there is one. Without a prompt it is the whole
    dialog, of which the tokens of the assistant count.

    TransformersWrapper cuts the end token out of unpadded responses if it is the pad token as well.
    Use another pad token, or `pad_output=True`, with which it is read if `eos_token` is given. In
    its tokens mode, such a wrapper also hides the end tokens in a prompt from the model, so that
    the responses are not drawn from the policy that is scored: there, use another pad token.

    Keys:
        reads ("tokens", "full"), and ("tokens", "prompt") or ("masks", "all_assistant_mask");
        ("tokens", "response") where TorchRL has cut end tokens out of the prompt in the whole text;
        ("masks", "all_attention_mask"); ("next", "reward") and ("next", "kl_coeff"), one number
        per response; ("log_probs", "full"), from ResponseKLTransform; ("log_probs", "response").
        writes the keys of `sample_responses`, "action_log_prob" only if those log-probs are there,
        ("next", "kl_coeff") if the reward was penalized, and what the sampler recorded as
        "sampler_log_prob", which only KLMonitor reads: NaN for a response with another number of
        tokens. The reward is at the last token that counts; that of an empty response is in no
        step. The last token of a turn in a dialog has the next turn's first state as next state.

    Args:
        batch: any batch size, of N elements. A single pad token on a prompt's right is not noticed.
        pad_token: id that fills texts after the response; it may be `eos_token`. Padded tensors (no
            lazy stacks) without an attention mask are padded with it, too: prompts of several
            tokens that begin with it need a mask. None: 0, for batches with a mask or unpadded.
        eos_token: id that ends a response, or all ids at which the sampler stops. If `pad_token` is
            among them, the first one after a cut-off response is its end. None: all have ended.

    Raises:
        KeyError: the text is missing, or what tells where the response is.
        ValueError: a text does not begin with its prompt, has another number of tokens than its
            masks or log-probs, or there is not one reward per response.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_kl import as_steps
        >>> tokens = TensorDict(full=torch.tensor([[5, 6, 7, 8]]), prompt=torch.tensor([[5, 6]]))
        >>> steps = as_steps(TensorDict(tokens=tokens, batch_size=1), pad_token=0)
        >>> steps["action"], steps["position"]
        (tensor([[7, 8]]), tensor([[2, 3]]))
    """
    responses = read_responses(batch, pad_token=pad_token, eos_token=eos_token)
    steps = make_steps(responses, _rewards(batch, responses.tokens), eos_token)
    unlike = add_measured(steps, batch, responses)
    if unlike:
        raise ValueError(
            f"{LOG_PROB} must have one number per token of {FULL}, but those of {len(unlike)} of "
            f"{len(steps)} elements belong to other tokens: leave them out of the batch, and let "
            "ResponseKLTransform score the tokens that were sampled."
        )
    return steps


def read_steps(batch: TensorDictBase, *, pad_token: int | None, eos_token: EndTokens) -> TensorDict:
    """What `as_steps` reads, without rewards, and with NaN for log-probs of other tokens."""
    responses = read_responses(batch, pad_token=pad_token, eos_token=eos_token)
    steps = make_steps(responses, torch.zeros(len(responses.tokens)), eos_token)
    add_measured(steps, batch, responses)
    return steps


def has_texts(batch: TensorDictBase) -> bool:
    """Whether a batch is one of TorchRL's LLM API."""
    return bool(batch.batch_dims) and bool(_rows(flat(batch), FULL)[0])


def flat(batch: TensorDictBase) -> TensorDictBase:
    """A batch (*B) as one of N elements, also of none, which TensorDict's `reshape(-1)` refuses."""
    check_batch(batch)
    return batch.reshape(batch.batch_size.numel())


def tokens_of(model: nn.Module, name: str) -> tuple[int, ...]:
    """The token ids that a model's configuration has under a name, such as "eos_token_id"."""
    while isinstance(model, nn.DataParallel | DistributedDataParallel):  # which hide what they hold
        model = model.module
    for source in ("generation_config", "config"):
        found = getattr(getattr(model, source, None), name, None)
        each = found if isinstance(found, list | tuple) else [found]
        ids = tuple(token for token in each if isinstance(token, int) and token >= 0)
        if ids:
            return ids
    return ()


def choose_tokens(
    model: nn.Module, pad_token: int | None, eos_token: EndTokens
) -> tuple[int | None, EndTokens]:
    """The pad token and the end tokens: those given, or else those of a model's configuration."""
    if pad_token is None:
        pad_token = next(iter(tokens_of(model, "pad_token_id")), None)
    if eos_token is None:
        ends = tokens_of(model, "eos_token_id")
        eos_token = ends[0] if len(ends) == 1 else ends or None
    return pad_token, eos_token


def several(eos_token: EndTokens) -> tuple[int, ...]:
    """The ids that end a response; TypeError for anything else, such as the text of a token."""
    if eos_token is None:
        return ()
    one = isinstance(eos_token, str) or not isinstance(eos_token, Sequence)
    try:
        return tuple(map(operator.index, (eos_token,) if one else eos_token))  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(
            f"`eos_token` must be the id of a token, several ids or None, got {eos_token!r}: pass "
            "`tokenizer.eos_token_id`."
        ) from None


class Responses(NamedTuple):
    """Texts and their tokens that count."""

    tokens: Tensor  # (N, L), padded on the right
    counted: Tensor  # (N, L), True for the tokens of the response
    shift: list[int]  # token j of a text is token j + shift of its ("tokens", "full")
    widths: list[int]  # of ("tokens", "full"), N
    width: int  # the largest of them; without any, that of the empty entry
    starts: list[int]  # of the responses in their texts

    def to(self, device: torch.device | None) -> Responses:
        """The same on another device; None: where they are."""
        return self._replace(tokens=self.tokens.to(device), counted=self.counted.to(device))


def read_responses(
    batch: TensorDictBase, *, pad_token: int | None, eos_token: EndTokens
) -> Responses:
    """The texts of a batch (*B), in the order of its elements; N is their number."""
    rows = flat(batch)
    full, dense = _rows(rows, FULL)
    entries = [_rows(rows, key)[0] for key in (PROMPT, RESPONSE, ATTENDED, ASSISTANT)]
    if full is None or (entries[0] is None and entries[3] is None):
        raise KeyError(
            f"the batch must have {FULL} and {PROMPT}, or else {ASSISTANT}, got "
            f"{existing_keys(batch)}: collect it with a wrapper of TorchRL's LLM API, which writes "
            "them, in a mode that returns tokens."
        )
    ends = several(eos_token)
    texts, counted, shifts, starts = [], [], [], []
    for i, row in enumerate(full):
        check_integers(str(FULL), row)
        prompt, response, attended, assistant = (None if one is None else one[i] for one in entries)
        for key, mask in ((ATTENDED, attended), (ASSISTANT, assistant)):
            if mask is not None and len(mask) != len(row):
                raise ValueError(
                    f"{key} must have one entry per token of {FULL}, got {len(mask)} for the "
                    f"{len(row)} tokens of element {i}: pad both alike, or neither."
                )
        told, n_prompt = attended is not None, 0 if prompt is None else len(prompt)
        if not told and dense and pad_token is not None:
            attended = row != pad_token
        if attended is not None and 0 < n_prompt <= len(row):
            seen = attended[:n_prompt].bool()
            if seen.any() and not seen[-2:].any():
                raise ValueError(
                    f"{PROMPT} must be padded on the left, but that of element {i} ends with "
                    "padding, after which the response begins: pad it there, or leave it unpadded."
                )
            if not told:  # not of padding only
                attended[n_prompt - 1] = True
        text, start, shift = _read_text(i, row, prompt, response, attended, ends)
        counts = torch.arange(len(text), device=text.device) >= max(start, 1)
        if assistant is not None:
            places = torch.arange(len(text), device=text.device) + shift
            counts &= assistant.bool()[places.clamp(min=0)] & (places >= 0)
        texts.append(text)
        counted.append(counts)
        shifts.append(shift)
        starts.append(start)
    if (dense or pad_token is not None) and entries[2] is None and entries[3] is None and ends:
        _warn_of_padding(texts, starts, ends, None if dense else pad_token)
    if rows.get("history", None) is not None:
        shapes = zip(map(len, full), shifts, starts, strict=True)
        _check_padding(texts, [*shapes])
    # With one more text, which is dropped, there is one, and a width of at least 1.
    one = torch.zeros(1, dtype=torch.long, device=batch.device)
    padding = {"batch_first": True, "padding_value": pad_token or 0}
    tokens = pad_sequence([*texts, one], **padding)[:-1]
    counts = pad_sequence([*counted, one.bool()], batch_first=True)[:-1]
    width = max(map(len, full)) if full else rows.get(FULL).shape[-1]
    return Responses(tokens, counts, shifts, [*map(len, full)], width, starts)


def _rows(batch: TensorDictBase, key: NestedKey) -> tuple[list[Tensor] | None, bool]:
    """An entry of each element of a batch (N,), None if it is missing; whether it is one tensor."""
    holder = batch.get(key[0], None)
    if not is_tensor_collection(holder) or holder.get(key[1], None, as_list=True) is None:
        return None, False
    value = holder.get(key[1], as_list=True)
    return (list(value.unbind(0)), True) if isinstance(value, Tensor) else (list(value), False)


def _warn_of_padding(texts: list[Tensor], starts: list[int], ends: Sequence, only: Any) -> None:
    """Warns if all that follows an end (or two, if `only` is one) is one token, or `only` that."""
    after = []
    for response in (text[start:] for text, start in zip(texts, starts, strict=True)):
        is_end = torch.isin(response, response.new_tensor(ends))
        rows = (response[place + 1 :] for place in is_end.nonzero()[:1, 0].tolist())
        after += [row for row in rows if len(row) > (only in ends)]
    if after and ((rest := torch.cat(after)) == (rest[0] if only is None else only)).all():
        how = "a lazy stack needs" if only is not None else f"pass `pad_token={int(rest[0])}`, or"
        warnings.warn(
            f"responses go on after their end token, with {int(rest[0])} only. It looks like "
            f"padding, but is counted as text: {how} {ATTENDED}.",
            stacklevel=2,
        )


def _check_padding(texts: list[Tensor], shapes: list[tuple[int, int, int]]) -> None:
    """ValueError if chats, which begin alike, were padded with one token that counts as text.

    For `pad_output=True`, TransformersWrapper pads chats with the first id of the tokenized pad
    token. That is not the pad token if the tokenizer puts another one before each text, and then
    its masks take the padding for text: all chats of a call have the same `shapes`, but begin
    with different numbers of that token.
    """
    groups: dict[tuple[int, int, int], list[Tensor]] = {}
    for text, shape in zip(texts, shapes, strict=True):
        if len(text) and not shape[1]:  # nothing was left out on the left
            groups.setdefault(shape, []).append(text)
    for group in groups.values():
        runs = [int((text == text[0]).int().cumprod(0).sum()) for text in group]
        first = group[runs.index(max(runs))][0]
        runs = [run if text[0] == first else 0 for text, run in zip(group, runs, strict=True)]
        after = {tuple(text[run : run + 1].tolist()) for text, run in zip(group, runs, strict=True)}
        if max(runs) > 1 and len(set(runs)) > 1 and (min(runs) or len(after) == 1):
            raise ValueError(
                f"{PROMPT} must be padded with the pad token, but chats of one width begin with "
                f"{min(runs)} to {max(runs)} tokens {int(first)}, none of which {ATTENDED} leaves "
                "out: TransformersWrapper pads with what its tokenizer puts before a text. Set "
                "`wrapper.padding_value = tokenizer.pad_token_id`, or use `pad_output=False`."
            )


def _read_text(
    i: int,
    full: Tensor,
    prompt: Tensor | None,
    response: Tensor | None,
    attended: Tensor | None,
    ends: tuple[int, ...],
) -> tuple[Tensor, int, int]:
    """The text without padding, where in it the response begins, and the shift to `full`.

    `full` (W,), `attended` (W,): False for padding, and for pad tokens that the model has sampled.
    """
    start = 0 if prompt is None else len(prompt)
    if prompt is not None and not full[:start].equal(prompt):
        # Where the pad token ends a turn, TorchRL cuts it out of the prompt, but in `full` only.
        if response is None or not full[len(full) - len(response) :].equal(response):
            raise ValueError(
                f"{FULL} must begin with {PROMPT}, but that of element {i} (of {len(full)} and "
                f"{start} tokens) does not: pad prompts on the left, or leave them unpadded."
            )
        text = torch.cat([prompt, response])
        return text, start, len(full) - len(text)
    first, end = 0, len(full)
    if attended is not None and not attended.all():
        real = attended.nonzero()[:, 0].tolist() or [0, start - 1]
        first = real[0] if prompt is None else min(real[0], start)
        end = max(real[-1] + 1, start)
        # Padding may begin with the end token: there is nothing else after what a model has said.
        if end < len(full) and full[end] in ends and (end == start or full[end - 1] not in ends):
            end += 1
    return full[first:end], start - first, first


def make_steps(responses: Responses, rewards: Tensor, eos_token: EndTokens) -> TensorDict:
    """The layout (N, T) of responses and their rewards (N,)."""
    texts, counted = responses.tokens, responses.counted
    lengths = counted.sum(1, keepdim=True)  # (N, 1)
    n_steps = max(lengths.flatten().tolist(), default=1) or 1
    step = torch.arange(n_steps, device=texts.device)
    # The places of the tokens that count, then those of the others.
    places = counted.long().argsort(dim=1, descending=True, stable=True)[:, :n_steps]
    mask = step < lengths
    position = torch.where(mask, places, places.new_full((), texts.shape[1] - 1)).clamp(min=0)
    # A state after the user's next message follows on the last token of a turn.
    following = torch.cat([position[:, 1:], position[:, -1:] + 1], 1)
    last = step == lengths - 1
    following = torch.where(last, position + 1, following)
    action = texts.gather(1, position)
    done = last.unsqueeze(-1)
    ended = done if eos_token is None else torch.isin(action, action.new_tensor(several(eos_token)))
    cut = done & ~ended.view(done.shape)
    tokens = texts[:, None].expand(-1, n_steps, -1)
    steps = TensorDict(
        tokens=tokens,
        position=position,
        action=action,
        collector=TensorDict(mask=mask, batch_size=mask.shape),
        next=TensorDict(
            tokens=tokens,
            position=following,
            reward=torch.where(done, rewards[:, None, None], 0.0),
            done=done,
            terminated=done & ~cut,
            truncated=cut,
            batch_size=mask.shape,
        ),
        batch_size=mask.shape,
        device=texts.device,
    )
    steps.names = [None, "time"]
    return steps


def add_measured(steps: TensorDictBase, batch: TensorDictBase, responses: Responses) -> list[int]:
    """Writes log-probs and coefficient of a batch into its steps (N, T): 0 where no token counts.

    Log-probs are NaN in elements that have another number of tokens; of ("log_probs", "full") these
    are returned.
    """
    rows, unlike = flat(batch), []
    sampled, full = _rows(rows, SAMPLED_LOG_PROB)[0], _rows(rows, LOG_PROB)[0]
    if sampled is not None:
        steps.set(SAMPLER_LOG_PROB, _align(sampled, responses, responses.starts, steps)[0])
    if full is not None:
        firsts = [-shift for shift in responses.shift]
        log_probs, unlike = _align(full, responses, firsts, steps)
        steps.set("action_log_prob", log_probs)
    coeff = rows.get(("next", "kl_coeff"), None)  # the sign of a penalized reward
    if coeff is not None and coeff.numel() == len(steps) and coeff.any():
        steps["next", "kl_coeff"] = coeff.reshape(-1, 1, 1).expand(*steps.shape, 1).clone()
    return unlike


def _align(
    values: list[Tensor], responses: Responses, firsts: list[int], steps: TensorDictBase
) -> tuple[Tensor, list[int]]:
    """Log-probs that begin at token `firsts[i]` of text i, at steps (N, T); which do not fit."""
    mask, position = steps.get(MASK_KEY), steps.get("position")
    dtype = values[0].dtype if values else None
    log_probs, unlike = torch.zeros(mask.shape, dtype=dtype, device=mask.device), []
    for i, (row, first) in enumerate(zip(values, firsts, strict=True)):
        if len(row) == responses.widths[i] - responses.shift[i] - first:
            log_probs[i, mask[i]] = row.to(mask.device)[position[i, mask[i]] - first]
        else:
            log_probs[i, mask[i]] = torch.nan
            unlike.append(i)
    return log_probs, unlike


def _rewards(batch: TensorDictBase, tokens: Tensor) -> Tensor:
    """The reward of each response, (N,); zeros if the batch has none."""
    reward = batch.get(("next", "reward"), None)
    if reward is None:
        return torch.zeros(len(tokens), device=tokens.device)
    check_rewards(reward, batch.batch_size)
    return reward.reshape(-1).to(tokens.device)


def check_rewards(reward: Tensor, batch_size: torch.Size) -> None:
    """ValueError unless there is one reward for each element of a batch."""
    if reward.is_nested or reward.numel() != batch_size.numel():
        shape = "nested" if reward.is_nested else tuple(reward.shape)
        raise ValueError(
            "('next', 'reward') must be one number per response, of shape "
            f"{(*batch_size, 1)} or {(*batch_size, 1, 1)}, got {shape}: sum a reward of each token."
        )
