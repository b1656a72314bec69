"""Batches of TorchRL's LLM API, read as texts whose responses are scored token by token.

Axes: N responses, T tokens of a response at most, L tokens of a whole text at most.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, is_tensor_collection
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from torchrl_kl.batches import MASK_KEY
from torchrl_kl.functional.numbers import check_integers
from torchrl_kl.keys import MissingKeyError, as_tuple, existing_keys, get_stored
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
        ("log_probs", "full"), ("sampler_log_probs", "full"), ("kept", "ids") and
        ("next", "ref_log_probs", "full"), from ResponseKLTransform.
        writes the keys of `sample_responses`, "action_log_prob" (else `rescore` writes it),
        "sampler_log_prob", ("next", "ref_log_prob"), "advantage", ("kept", "ids") and KLs only if
        those are there, and ("next", "kl_coeff") if the reward was penalized. The reward, and the
        KL of a response, is at the last token that counts. The last token of a turn has the next
        turn's first state as next state.

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
    check_batch(batch)
    reward = batch.get(("next", "reward"), torch.zeros(batch.batch_size))
    steps, _ = read_responses(batch, reward, pad_token=pad_token, eos_token=eos_token)
    rows = batch.reshape(len(steps))
    names = rows.get("next", TensorDict()).keys()
    kls = [("next", name) for name in names if name.endswith(("kl", "kl_estimate"))]
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


def several(eos_token: EndTokens) -> tuple[int, ...]:
    """The ids that end a response; TypeError for anything else, such as the text of a token."""
    if eos_token is None:
        return ()
    ids = eos_token if isinstance(eos_token, Sequence) else [eos_token]
    try:
        return tuple(map(operator.index, ids))
    except TypeError:
        raise TypeError(
            f"`eos_token` must be the id of a token, several ids or None, got {eos_token!r}: pass "
            "`tokenizer.eos_token_id`."
        ) from None


class Places(NamedTuple):
    """Which tokens of the texts of a batch, ("tokens", "full"), are those of steps."""

    mask: Tensor  # (N, T), True where the token of a step counts
    counted: Tensor  # True for the same tokens in all texts one after another, in the same order
    widths: list[int]  # of the texts, N
    shape: Sequence[int] | None  # of the entry, (*B, width); None: each text is a tensor of its own

    def to_steps(self, values: list[Tensor]) -> Tensor:
        """Values of the tokens of each text at steps, (N, T, ...); 0 outside the mask."""
        found = torch.cat(values)[self.counted].to(self.mask.device)
        steps = found.new_zeros((*self.mask.shape, *found.shape[1:]))
        steps[self.mask] = found
        return steps

    def write(self, batch: TensorDictBase, key: NestedKey, values: Tensor) -> None:
        """Writes values of steps (N, T, ...) into a batch (*B); other tokens get NaN, or the id 0.

        A tensor under the first name, as TorchRL's KLRewardTransform writes one, is replaced.
        """
        shape, missing = values.shape[2:], torch.nan if values.is_floating_point() else 0
        written = values.new_full((len(self.counted), *shape), missing, device=self.counted.device)
        written[self.counted] = values[self.mask].to(written.device)
        name, leaf = as_tuple(key)
        held = batch.get(name, None)
        holder = held if is_tensor_collection(held) else batch.empty()
        if self.shape is not None:
            holder.set(leaf, written.reshape(*self.shape, *shape))
        else:
            rows = holder.reshape(len(self.widths)).to_lazystack()
            rows.set(leaf, [*written.split(self.widths)])
            holder = rows.reshape(batch.batch_size)
        batch.set(name, holder)


def read_responses(
    batch: TensorDictBase,
    reward: Tensor,
    *,
    pad_token: int | None,
    eos_token: EndTokens,
    device: torch.device | None = None,
) -> tuple[TensorDict, Places]:
    """The responses of a batch (*B) as steps (N, T), with what is known of their tokens."""
    size = batch.batch_size
    if reward.is_nested or reward.numel() != size.numel():
        shape = "nested" if reward.is_nested else tuple(reward.shape)
        raise ValueError(
            "('next', 'reward') must be one number per response, of shape "
            f"{(*size, 1)} or {(*size, 1, 1)}, got {shape}: sum a reward of each token."
        )
    rows = batch.reshape(size.numel())  # not of -1, which TensorDict refuses where N is 0
    found = [*_read_texts(rows, pad_token, several(eos_token))]
    # With one more text, which is dropped, there is one, and a width of at least 1.
    one = torch.zeros(1, dtype=torch.long, device=found[0][0].device if found else batch.device)
    found.append((one, one.bool(), one[:0].bool()))
    texts, counted, marks = zip(*found, strict=True)
    tokens = pad_sequence([*texts], batch_first=True, padding_value=pad_token or 0)[:-1]
    counts = pad_sequence([*counted], batch_first=True)[:-1]
    steps = _make_steps(tokens.to(device), counts.to(device), reward.reshape(-1), eos_token)
    stored, full = get_stored(rows, FULL), [*marks[:-1]]
    shape = (*size, stored.shape[-1]) if isinstance(stored, Tensor) else None
    places = Places(steps.get(MASK_KEY), torch.cat(marks), [*map(len, full)], shape)
    fix = "leave it out of the batch, and let ResponseKLTransform score the sampled tokens"
    following = rows.get("next", TensorDict(batch_size=rows.batch_size))
    sources = [(rows, key, name) for key, name in _SCORES.items()]
    for name in following.keys():
        if name.endswith("ref_log_probs"):
            sources.append((following, (name, "full"), ("next", name.removesuffix("s"))))
    for source, key, name in sources:
        if values := _of_tokens(source, key, full, fix):
            steps.set(name, places.to_steps(values))
    return steps, places


def _rows(batch: TensorDictBase, key: NestedKey) -> list[Tensor] | None:
    """An entry of each element of a batch (N,); None if it is missing."""
    *path, _ = as_tuple(key)
    there = all(is_tensor_collection(batch.get(name, None)) for name in path)
    value = get_stored(batch, key) if there else None
    return None if value is None else list(value)


def _of_tokens(
    batch: TensorDictBase, key: NestedKey, full: list[Tensor], fix: str
) -> list[Tensor] | None:
    """The same of an entry that has to be as long as the texts."""
    values = _rows(batch, key)
    for i, (row, text) in enumerate(zip(values or [], full, strict=False)):
        if len(row) != len(text):
            raise ValueError(
                f"{key} must have one entry per token of {FULL}, got {len(row)} for the "
                f"{len(text)} tokens of element {i}: {fix}."
            )
    return values


def _read_texts(
    rows: TensorDictBase, pad_token: int | None, ends: Sequence[int]
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Each text without padding, and which tokens count in it and in ("tokens", "full")."""
    full, prompts = _rows(rows, FULL), _rows(rows, PROMPT)
    said = _rows(rows, RESPONSE)
    if full is None or (prompts is None and _rows(rows, ASSISTANT) is None):
        raise MissingKeyError(
            f"the batch must have {FULL} and {PROMPT}, or else {ASSISTANT}: collect it with a "
            "wrapper of TorchRL's LLM API, which writes them, in a mode that returns tokens. It "
            f"has {existing_keys(rows)}."
        )
    masks, assistants = (
        _of_tokens(rows, key, full, "pad both alike, or neither") for key in (ATTENDED, ASSISTANT)
    )
    padded = isinstance(get_stored(rows, FULL), Tensor) and masks is None and pad_token is not None
    all_of = [torch.ones_like(row, dtype=torch.bool) for row in full]
    prompts, said = prompts or [row[:0] for row in full], said or [None] * len(full)
    columns = (full, prompts, said, masks or all_of, assistants or all_of)
    for i, (row, prompt, response, attended, assistant) in enumerate(zip(*columns, strict=True)):
        check_integers(str(FULL), row)
        if padded:
            attended = row != pad_token
            if not attended[: len(prompt)].any():  # a prompt of the end token alone
                attended[len(prompt) - 1 : len(prompt)] = True
        attended = attended.bool()
        before, begin, end = _find_response(i, row, prompt, response, attended, ends)
        counts = torch.zeros_like(row, dtype=torch.bool)
        counts[begin:end] = assistant[begin:end]
        if not len(before):  # the first token has no state
            counts[begin : begin + 1] = False
        counted = torch.cat([torch.zeros_like(before, dtype=torch.bool), counts[begin:end]])
        yield torch.cat([before, row[begin:end]]), counted, counts


def _find_response(
    i: int,
    full: Tensor,
    prompt: Tensor,
    response: Tensor | None,
    attended: Tensor,
    ends: Sequence[int],
) -> tuple[Tensor, int, int]:
    """The tokens before a response, without padding, and where it begins and ends in `full`.

    `attended`: False for padding, and for pad tokens that the model has sampled.
    """
    start = len(prompt)
    if not full[:start].equal(prompt):
        # Where the pad token ends a turn, TorchRL cuts it out of the prompt, but in `full` only.
        if response is None or not full[len(full) - len(response) :].equal(response):
            raise ValueError(
                f"{FULL} must begin with {PROMPT}, but that of element {i} (of {len(full)} and "
                f"{start} tokens) does not: pad prompts on the left, or leave them unpadded."
            )
        return prompt, len(full) - len(response), len(full)
    seen = attended[:start]
    if seen.any() and not seen[-2:].any():  # one pad token may be the end token of a turn
        raise ValueError(
            f"{PROMPT} must be padded on the left, but that of element {i} ends with padding, "
            "after which the response begins: pad it there, or leave it unpadded."
        )
    real = attended.nonzero()[:, 0].tolist() or [0, start - 1]
    begin = start or real[0]
    end = max(real[-1] + 1, begin)
    # Padding may begin with the end token: there is nothing else after what a model has said.
    if end < len(full) and full[end] in ends and (end == start or full[end - 1] not in ends):
        end += 1
    return full[real[0] : begin], begin, end


def _make_steps(texts: Tensor, counts: Tensor, rewards: Tensor, eos_token: EndTokens) -> TensorDict:
    """The steps (N, T) of texts (N, L), of their tokens that count, and of rewards (N,)."""
    lengths = counts.sum(1, keepdim=True)  # (N, 1)
    n_steps = max(lengths.flatten().tolist(), default=1) or 1
    step = torch.arange(n_steps, device=texts.device)
    # The places of the tokens that count, then those of the others.
    places = counts.long().argsort(dim=1, descending=True, stable=True)[:, :n_steps]
    mask, last = step < lengths, step == lengths - 1
    position = torch.where(mask, places, texts.shape[1] - 1)
    # A state after the user's next message follows on the last token of a turn.
    following = torch.where(last, position + 1, position.roll(-1, 1))
    action = texts.gather(1, position)
    done = last.unsqueeze(-1)
    ended = done if eos_token is None else torch.isin(action, action.new_tensor(several(eos_token)))
    ended = done & ended.view(done.shape)
    tokens, names = texts[:, None].expand(-1, n_steps, -1), [None, "time"]
    return TensorDict(
        tokens=tokens,
        position=position,
        action=action,
        collector=TensorDict(mask=mask, batch_size=mask.shape),
        next=TensorDict(
            tokens=tokens,
            position=following,
            reward=torch.where(done, rewards.to(done.device)[:, None, None], 0.0),
            done=done,
            terminated=ended,
            truncated=done & ~ended,
            batch_size=mask.shape,
        ),
        batch_size=mask.shape,
        device=texts.device,
        names=names,
    )
