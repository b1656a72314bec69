"""What KLMonitor finds in responses of language models: the faults of recorded log-probs.

N responses of at most T tokens. `recorded` and `scored` (N, T) are log-probs of the same tokens, as
the data has them and as the actor gives them; `counted` (N, T) is True for tokens of a response.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import cast

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from torchrl_kl.monitor.diagnosis import Finding, chance

Score = Callable[[TensorDictBase], Tensor]  # the actor's log-probs (N, T) of the actions of steps

TEXT_CONDITIONS = ("first_token_zero", "tokens_cut", "retokenised")
_MIN_STEPS = 20  # tokens before and after the places from which log-probs differ
_CERTAIN = -0.1  # nats
_MOST_AGREE = 0.05  # share of the tokens after such a place that may agree by chance
_MOST_ROWS, _MOST_CUTS = 4, 6  # responses that are repaired, and tokens put back into each
_LEAST_REPAIRED = 3  # log-probs that must agree again: one alone may do so by chance


@dataclass
class TextFaults:
    """The text conditions that hold, and the log-probs that they leave unexplained.

    `pooled`, over batches: of responses with differences, how many there were, and how many tokens
    that tell something were before the first difference, after it, and agree after it.
    """

    tolerance: float  # nats
    pooled: list[int]  # begins with these four counts, which are added to
    findings: dict[str, Finding | None] = field(
        default_factory=lambda: dict.fromkeys(TEXT_CONDITIONS)
    )

    def explain(
        self,
        recorded: Tensor,
        scored: Tensor,
        counted: Tensor,
        steps: TensorDictBase,
        score: Score,
        tokens: tuple[int, ...],
    ) -> Tensor:
        """Adds what it finds; returns the tokens (N, T) whose log-probs are still to be explained.

        `tokens`: the end token and the pad token, which may have been cut out of the responses.
        """
        unlike = (recorded.isnan() | ~counted).all(1) & counted.any(1)
        if unlike.any():
            self._found("retokenised", *_other_lengths(unlike))
        left = counted & ~unlike[:, None]
        gap = (recorded - scored).masked_fill(~left, 0.0)
        zeros = left[:, 0] & (recorded[:, 0] == 0) & (gap[:, 0] > self.tolerance)
        # A sampler that leaves it out does so in each response; top-p gives 0 to some tokens.
        all_zero = bool((recorded[left[:, 0], 0] == 0).all())
        if all_zero and zeros.any() and bool((recorded != 0)[left].any()):
            self._found("first_token_zero", *_first_zero(zeros, scored[:, 0]))
            left[:, 0] &= ~zeros
        differs = left & ~(gap.abs() <= self.tolerance)  # NaN differs
        if not differs.any():
            return left
        repaired = self._repair(recorded, left, differs, steps, score, tokens)
        if repaired is not None:
            self._found("tokens_cut", *repaired)
        elif self._differs_from_a_place_on(left, differs, gap, torch.minimum(recorded, scored)):
            self._found("retokenised", *_from_a_place_on(differs, gap))
        else:
            return left
        return left & ~differs.any(1, keepdim=True)

    def _found(self, condition: str, text: str, figures: dict[str, float]) -> None:
        if self.findings[condition] is None:
            self.findings[condition] = text, figures

    def _differs_from_a_place_on(
        self, left: Tensor, differs: Tensor, gap: Tensor, least: Tensor
    ) -> bool:
        """Whether log-probs agree up to a token and no more after it, as after another token.

        Any other cause (a temperature, other weights) is the same before and after that token.
        """
        rows = differs.any(1)
        after = differs.int().cumsum(1).bool()  # the first one included
        # A token that is all but certain has the same log-prob under many causes.
        telling = left & rows[:, None] & (least < _CERTAIN)
        later = telling & after & ~(differs & (differs.int().cumsum(1) == 1))
        counts = [rows, telling & ~after, later, later & ~differs]
        for i, part in enumerate(counts):
            self.pooled[i] += int(part.sum())
        n_rows, n_before, n_later, n_agreed = self.pooled[:4]
        large = bool(gap[differs].abs().median() >= 10 * self.tolerance)
        enough = n_before >= max(_MIN_STEPS, n_rows) and n_later >= _MIN_STEPS
        return large and enough and n_agreed <= _MOST_AGREE * n_later

    def _repair(
        self,
        recorded: Tensor,
        left: Tensor,
        differs: Tensor,
        steps: TensorDictBase,
        score: Score,
        tokens: tuple[int, ...],
    ) -> Finding | None:
        """What is found if cut tokens that are put back make all log-probs agree again."""
        rows = differs.any(1).nonzero()[:, 0].tolist()
        n_cut, n_repaired, cut = 0, 0, set()
        for i in rows[:_MOST_ROWS]:
            row = cast(TensorDictBase, steps[i : i + 1])
            found = self._put_back(recorded[i], left[i], row, score, tokens)
            if found is None:
                return None
            n_cut, n_repaired = n_cut + len(found), n_repaired + int(differs[i].sum())
            cut |= set(found)
        if n_repaired < _LEAST_REPAIRED:
            return None
        ids = " and ".join(map(str, sorted(cut)))
        text = (
            f"Tokens were cut out of responses: in {len(rows)} of {len(left)}, recorded log-probs "
            f"differ from the actor's, and those of the {min(len(rows), _MOST_ROWS)} that were "
            f"tried agree again if {n_cut} tokens with the id {ids} are put back. {_KEEP_TOKENS}"
        )
        return text, {"responses": len(rows), "tokens": n_cut}

    def _put_back(
        self, recorded: Tensor, left: Tensor, row: TensorDictBase, score: Score, tokens: tuple
    ) -> list[int] | None:
        """The tokens whose return into one response (1, T) makes its log-probs agree, or None."""
        found: list[int] = []
        gap = (recorded - score(row)[0]).abs()
        # The end of a text that grows may be beyond what the model reads.
        while bool((wrong := left & (gap > self.tolerance) & _readable(row)).any()):
            place = int(wrong.nonzero()[0])
            for inserted in _candidates(tokens):
                trial = insert(row, place, inserted)
                gap = (recorded - score(trial)[0]).abs()
                if gap[place] <= self.tolerance and bool(_readable(trial)[place]):
                    row = trial
                    found += inserted
                    break
            else:
                return None
            if len(found) > _MOST_CUTS:
                return None
        return found


def per_token(kl: Tensor, n_tokens: Tensor) -> Tensor:
    """Values (N,) with the mean sum(kl) / sum(n_tokens), and the standard error of this ratio."""
    finite = kl.isfinite()
    kl, n_tokens = kl[finite].double(), n_tokens[finite].double()
    ratio = kl.sum() / n_tokens.sum()
    # What a long response has more of, in KL and in tokens, is no error of the ratio.
    return ratio + (kl - ratio * n_tokens) / n_tokens.mean()


def _readable(row: TensorDictBase) -> Tensor:
    """Steps (T,) of one response whose token is still within the width of the text."""
    return (row["position"] < row["tokens"].shape[-1])[0]


def _candidates(tokens: tuple[int, ...]) -> Iterator[list[int]]:
    """What may have been cut out at one place: one token, or two of them."""
    for n in (1, 2):
        yield from ([token] * n for token in dict.fromkeys(tokens))


def insert(row: TensorDictBase, place: int, tokens: list[int]) -> TensorDict:
    """The steps (1, T) of a response with tokens put in before that of step `place`.

    The text keeps its width. Positions that lie behind it are beyond what can be scored.
    """
    text, position = row["tokens"][0, 0], row["position"]
    at, width = int(position[0, place]), len(text)
    longer = torch.cat([text[:at], text.new_tensor(tokens), text[at:]])[:width]
    later = torch.arange(position.shape[1], device=text.device) >= place
    entries = {
        "tokens": longer.expand(1, position.shape[1], -1),
        "position": (position + len(tokens) * later).clamp(max=width),
        "action": row["action"],
    }
    steps = TensorDict(entries, batch_size=position.shape, device=text.device)
    steps.names = [None, "time"]
    return steps


def _first_zero(zeros: Tensor, scored: Tensor) -> Finding:
    n, mean = int(zeros.sum()), scored[zeros].mean().item()
    text = (
        f"The first token of {n} of {len(zeros)} responses has a recorded log-prob of exactly 0, "
        f"where the actor's is {mean:.3g} nats on average: its sampler did not record it, as "
        "TransformersWrapper does not. A KL from these log-probs is too large by as much. Do not "
        "use ('log_probs', 'response'): ResponseKLTransform scores all tokens again and writes "
        "('log_probs', 'full'), which GRPOLoss reads."
    )
    return text, {"responses": n, "scored": mean}


def _other_lengths(unlike: Tensor) -> Finding:
    n = int(unlike.sum())
    text = (
        f"Recorded log-probs belong to other tokens than those of the batch: {n} of {len(unlike)} "
        f"responses have another number of tokens than of log-probs. {_SAME_TOKENS}"
    )
    return text, {"responses": n}


def _from_a_place_on(differs: Tensor, gap: Tensor) -> Finding:
    n, largest = int(differs.any(1).sum()), gap[differs].abs().max().item()
    text = (
        f"Recorded log-probs belong to other tokens than those of the batch: in {n} of "
        f"{len(differs)} responses they agree with the actor's up to a token, and differ from "
        f"there on by up to {largest:.3g} nats. {_SAME_TOKENS}"
    )
    return text, {"responses": n, "largest_difference": largest}


def never_drawn(
    tokens: tuple[int, ...], name: str, n_steps: int, expected: float, nats: float, why: str | None
) -> tuple[str, Finding]:
    """Of tokens that none of `n_steps` has, though the actor gives them a probability.

    `expected`: the sum of these probabilities; `nats`: the evidence. Returns a condition, too:
    `why` the sampler seems to suppress them, or they were cut out.
    """
    ids = " and ".join(map(str, tokens))
    which = f"the {name} token {ids}" if len(tokens) == 1 else f"one of the {name} tokens {ids}"
    start = (
        f"None of {n_steps} tokens that were looked at is {which}, though by the actor's "
        f"probabilities about {expected:.2g} should be; by chance this happens with a probability "
        f"of at most {chance(nats)}. "
    )
    figures = {"evidence": nats, "expected": expected}
    if why is not None:
        text = (
            f"The sampler and the actor disagree. {start}As {why}, the sampler seems to suppress "
            "it (min_new_tokens, ignore_eos, suppress_tokens, or top-k). Let the actor give it no "
            "probability either, or let the sampler draw it."
        )
        return "sampler_disagrees", (text, figures)
    return "tokens_cut", (f"Tokens were cut out of responses. {start}{_KEEP_TOKENS}", figures)


_KEEP_TOKENS = (
    "TransformersWrapper removes every pad token of an unpadded response, and the end token if "
    "it is the pad token. Set `tokenizer.pad_token` to a token that the model never draws, or "
    "sample with `pad_output=True` and name `eos_token` here and for `as_steps`."
)
_SAME_TOKENS = (
    "The text was tokenised again between sampling and scoring, which gives other ids for the same "
    "text. Score the ids that were sampled: with `input_mode='tokens'` for a wrapper that has "
    "`generate=False`, or with ResponseKLTransform, which reads ids."
)
