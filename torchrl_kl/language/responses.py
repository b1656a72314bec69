"""Batches of TorchRL's LLM API, read as texts whose responses are scored token by token.

Axes: N responses, T tokens of a response at most, L tokens of a whole text at most.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import NamedTuple

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, is_tensor_collection
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from torchrl_kl.batches import MASK_KEY
from torchrl_kl.functional.numbers import check_integers
from torchrl_kl.keys import MissingKeyError, as_tuple, existing_keys, get_stored
from torchrl_kl.language.causal_lm import stated
from torchrl_kl.transforms.base import check_batch

EndTokens = int | Sequence[int] | None  # ids, each of which ends a response

FULL, PROMPT, RESPONSE = ("tokens", "full"), ("tokens", "prompt"), ("tokens", "response")
LOG_PROB = ("log_probs", "full")
SAMPLER_LOG_PROB = ("sampler_log_probs", "full")
KEPT = ("kept", "ids")
_SCORES = {LOG_PROB: "action_log_prob", SAMPLER_LOG_PROB: "sampler_log_prob", KEPT: KEPT}
ATTENDED, ASSISTANT = ("masks", "all_attention_mask"), ("masks", "all_assistant_mask")


def as_steps(
    batch: TensorDictBase, *, pad_token: int | None, eos_token: EndTokens = None
) -> TensorDict:
    """A batch of TorchRL's LLM API, in the layout of `sample_responses`: one step per token.

    It takes what ChatEnv, TransformersWrapper, vLLMWrapper and LLMCollector make, in all their
    modes, lazy or padded. Each element of the batch is one response: what follows
    ("tokens", "prompt") in ("tokens", "full"), and of that what ("masks", "all_assistant_mask")
    has, where there is one. Without a prompt it is the whole dialog.

    TransformersWrapper cuts the end token out of unpadded responses if it is the pad token as well:
    use another pad token, or `pad_output=True` and `eos_token`.

    Keys:
        reads ("tokens", "full"), and ("tokens", "prompt") or ("masks", "all_assistant_mask");
        ("tokens", "response") where TorchRL has cut end tokens out of the prompt in the whole text;
        ("masks", "all_attention_mask"); ("next", "reward"), ("next", "kl_coeff"), "advantage" and
        entries of "next" whose names end in "kl" or "kl_estimate", one number per response;
        ("log_probs", "full"), ("sampler_log_probs", "full") and ("kept", "ids"), from
        ResponseKLTransform.
        writes the keys of `sample_responses`, "action_log_prob" (else `rescore` writes it),
        "sampler_log_prob", "advantage", ("kept", "ids") and KLs only if those are there, and
        ("next", "kl_coeff") if the reward was penalized. The reward, and the KL of a response, is
        at the last token that counts. The last token of a turn has the next turn's first state as
        next state.

    Args:
        batch: any batch size, of N elements.
        pad_token: id that fills texts after the response; it may be `eos_token`. Padded tensors
            without an attention mask are padded with it, too. None: 0, for other batches.
        eos_token: id, or ids, at which the sampler stops. If `pad_token` is among them, the first
            one after a cut-off response is its end. None: all have ended.

    Raises:
        KeyError, ValueError: the text, or what tells where the response is, is missing or does not
            fit; or there is not one reward per response.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl_kl.language import as_steps
        >>> tokens = TensorDict(full=torch.tensor([[5, 6, 7, 8]]), prompt=torch.tensor([[5, 6]]))
        >>> steps = as_steps(TensorDict(tokens=tokens, batch_size=1), pad_token=0)
        >>> steps["action"], steps["position"]
        (tensor([[7, 8]]), tensor([[2, 3]]))
    """
    responses = read_responses(batch, pad_token=pad_token, eos_token=eos_token)
    rewards = torch.zeros(len(responses.tokens), device=responses.tokens.device)
    if (reward := batch.get(("next", "reward"), None)) is not None:
        check_rewards(reward, batch.batch_size)
        rewards = reward.reshape(-1).to(rewards.device)
    steps, rows = make_steps(responses, rewards, eos_token), flat(batch)
    for key, name in _SCORES.items():
        if (values := aligned(rows, key, responses, steps)) is not None:
            steps.set(name, values)
    following = [] if (found := rows.get("next", None)) is None else found.keys()
    kls = [("next", name) for name in following if name.endswith(("kl", "kl_estimate"))]
    # The coefficient is the sign of a penalized reward.
    for key in ("advantage", ("next", "kl_coeff"), *kls):
        values = _rows(rows, key)
        if values and all(value.numel() == 1 for value in values):
            column = torch.stack([value.reshape(1, 1) for value in values]).to(steps.device)
            if key in kls:
                steps[key] = torch.where(steps["next", "done"], column, 0.0)
            elif column.any():
                steps[key] = column.expand(*steps.shape, 1).clone()
    return steps


def flat(batch: TensorDictBase) -> TensorDictBase:
    """A batch (*B) as one of N elements, also of none, which TensorDict's `reshape(-1)` refuses."""
    check_batch(batch)
    return batch.reshape(batch.batch_size.numel())


def choose_tokens(
    model: nn.Module, pad_token: int | None, eos_token: EndTokens
) -> tuple[int | None, EndTokens]:
    """The pad token and the end tokens: those given, or else those of a model's configuration."""
    configs = stated("generation_config", model), stated("config", model)
    if pad_token is None:
        pad_token = next(iter(several(stated("pad_token_id", *configs))), None)
    if eos_token is None:
        ends = several(stated("eos_token_id", *configs))
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


def read_responses(
    batch: TensorDictBase, *, pad_token: int | None, eos_token: EndTokens
) -> Responses:
    """The texts of a batch (*B), in the order of its elements; N is their number."""
    rows = flat(batch)
    full, prompts, assistants = (_rows(rows, key) for key in (FULL, PROMPT, ASSISTANT))
    if full is None or (prompts is None and assistants is None):
        raise MissingKeyError(
            f"the batch must have {FULL} and {PROMPT}, or else {ASSISTANT}: collect it with a "
            "wrapper of TorchRL's LLM API, which writes them, in a mode that returns tokens. It "
            f"has {existing_keys(batch)}."
        )
    said, masks = _rows(rows, RESPONSE), _rows(rows, ATTENDED)
    ends = several(eos_token)
    dense = isinstance(get_stored(rows, FULL), Tensor)
    texts = []
    counted = []
    shifts = []
    for i, row in enumerate(full):
        check_integers(str(FULL), row)
        for key, mask in ((ATTENDED, masks), (ASSISTANT, assistants)):
            if mask is not None and len(mask[i]) != len(row):
                raise ValueError(
                    f"{key} must have one entry per token of {FULL}, got {len(mask[i])} for the "
                    f"{len(row)} tokens of element {i}: pad both alike, or neither."
                )
        prompt = row[:0] if prompts is None else prompts[i]
        attended = torch.ones_like(row, dtype=torch.bool) if masks is None else masks[i].bool()
        if masks is None and dense and pad_token is not None:
            attended = row != pad_token
            if not attended[: len(prompt)].any():  # a prompt of the end token alone
                attended[len(prompt) - 1 : len(prompt)] = True
        response = None if said is None else said[i]
        text, start, shift = _read_text(i, row, prompt, response, attended, ends)
        places = torch.arange(len(text), device=text.device)
        counts = places >= max(start, 1)
        if assistants is not None:
            counts &= assistants[i].bool()[(places + shift).clamp(min=0)] & (places + shift >= 0)
        texts.append(text)
        counted.append(counts)
        shifts.append(shift)
    # With one more text, which is dropped, there is one, and a width of at least 1.
    one = torch.zeros(1, dtype=torch.long, device=batch.device)
    tokens = pad_sequence([*texts, one], batch_first=True, padding_value=pad_token or 0)[:-1]
    counts = pad_sequence([*counted, one.bool()], batch_first=True)[:-1]
    width = max(map(len, full)) if full else rows.get(FULL).shape[-1]
    return Responses(tokens, counts, shifts, [*map(len, full)], width)


def _rows(batch: TensorDictBase, key: NestedKey) -> list[Tensor] | None:
    """An entry of each element of a batch (N,); None if it is missing."""
    *path, _ = as_tuple(key)
    there = all(is_tensor_collection(batch.get(name, None)) for name in path)
    value = get_stored(batch, key) if there else None
    return None if value is None else list(value)


def _read_text(
    i: int,
    full: Tensor,
    prompt: Tensor,
    response: Tensor | None,
    attended: Tensor,
    ends: tuple[int, ...],
) -> tuple[Tensor, int, int]:
    """The text without padding, where in it the response begins, and the shift to `full`.

    `full` (W,), `attended` (W,): False for padding, and for pad tokens that the model has sampled.
    """
    start = len(prompt)
    if not full[:start].equal(prompt):
        # Where the pad token ends a turn, TorchRL cuts it out of the prompt, but in `full` only.
        if response is None or not full[len(full) - len(response) :].equal(response):
            raise ValueError(
                f"{FULL} must begin with {PROMPT}, but that of element {i} (of {len(full)} and "
                f"{start} tokens) does not: pad prompts on the left, or leave them unpadded."
            )
        return torch.cat([prompt, response]), start, len(full) - start - len(response)
    if attended.all():
        return full, start, 0
    seen = attended[:start]
    if seen.any() and not seen[-2:].any():  # one pad token may be the end token of a turn
        raise ValueError(
            f"{PROMPT} must be padded on the left, but that of element {i} ends with padding, "
            "after which the response begins: pad it there, or leave it unpadded."
        )
    real = attended.nonzero()[:, 0].tolist() or [0, start - 1]
    first, end = min(real[0], start) if start else real[0], max(real[-1] + 1, start)
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


def aligned(
    rows: TensorDictBase, key: NestedKey, responses: Responses, steps: TensorDictBase
) -> Tensor | None:
    """An entry of the tokens of whole texts, (N,), at steps (N, T, ...); 0 where none counts.

    None if there is no such entry.
    """
    values = _rows(rows, key)
    if not values:
        return None
    mask, position = steps.get(MASK_KEY), steps.get("position")
    at_steps = values[0].new_zeros((*mask.shape, *values[0].shape[1:]), device=mask.device)
    for i, row in enumerate(values):
        if len(row) != responses.widths[i]:
            raise ValueError(
                f"{key} must have one number per token of {FULL}, got {len(row)} for the "
                f"{responses.widths[i]} tokens of element {i}: leave it out of the batch, and let "
                "ResponseKLTransform score the tokens that were sampled."
            )
        at_steps[i, mask[i]] = row.to(mask.device)[position[i, mask[i]] + responses.shift[i]]
    return at_steps


def check_rewards(reward: Tensor, batch_size: torch.Size) -> None:
    """ValueError unless there is one reward for each element of a batch."""
    if reward.is_nested or reward.numel() != batch_size.numel():
        shape = "nested" if reward.is_nested else tuple(reward.shape)
        raise ValueError(
            "('next', 'reward') must be one number per response, of shape "
            f"{(*batch_size, 1)} or {(*batch_size, 1, 1)}, got {shape}: sum a reward of each token."
        )
