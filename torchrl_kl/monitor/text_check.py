"""Checks the samples of language models: recorded log-probs and tokens of whole responses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_kl._tensordict import get_required
from torchrl_kl.actors import reading
from torchrl_kl.actors.policy import evaluating
from torchrl_kl.actors.responses import (
    SAMPLER_LOG_PROB,
    EndTokens,
    choose_tokens,
    several,
)
from torchrl_kl.monitor.diagnosis import NEVER_EOS, NEVER_PAD, Finding, PooledEvidence
from torchrl_kl.monitor.sampler_check import SamplerCheck, choose_steps, counted_steps
from torchrl_kl.monitor.texts import TEXT_CONDITIONS, TextFaults, never_drawn

_ROWS = 8  # responses that are scored at a time


@dataclass
class TextCheck(SamplerCheck):
    """Compares responses with what the actor, a language model, gives and draws."""

    pad_token: int | None = None
    eos_token: EndTokens = None

    def __post_init__(self):
        super().__post_init__()
        # By default as the model is configured.
        for part in self.actor.modules():
            self.pad_token, self.eos_token = choose_tokens(part, self.pad_token, self.eos_token)
        self._ends, pad_token = several(self.eos_token), self.pad_token
        self._pads = () if pad_token is None or pad_token in self._ends else (pad_token,)

    @torch.no_grad()
    def look(
        self, steps: TensorDictBase, pooled: PooledEvidence | None, counts: list[int]
    ) -> dict[str, Finding | None]:
        """What speaks against the samples of a batch of responses (N, T), by condition.

        `counts` are pooled over batches: as for TextFaults, then the shortest and longest response.
        """
        get_required(steps, self.action_keys[0], "`actor` must be the policy of this batch.")
        if not len(steps):
            return dict.fromkeys(("sampler_disagrees", *TEXT_CONDITIONS))
        sampled, own = steps.get(SAMPLER_LOG_PROB, None), self.recorded.read(steps)
        recorded = [one.double() for one in (sampled, own) if one is not None]
        counted = counted_steps(steps, steps.get(self.action_keys[0]))
        with evaluating(self.actor):
            scored = torch.cat([self._score(part, True)[0] for part in steps.split(_ROWS)])
            table = self._table_of(steps, scored, counted)
            faults, fault = TextFaults(self.tolerance, counts), None
            for values in recorded:
                left = faults.explain(
                    *(values, scored, counted, steps),
                    score=lambda rows: self._score(rows, True)[0],
                    tokens=(*self._ends, *self._pads),
                )
                fault = fault or self._unlike_recorded(steps, values, scored, left, table)
        looks = {"sampler_disagrees": fault and _advise(fault, _RECORDED)} | faults.findings
        lengths = counted.sum(1)
        counts[4] = min(counts[4] or int(lengths.max()), int(lengths.min()))
        counts[5] = max(counts[5], int(lengths.max()))
        drawn = None if counts[4] == counts[5] else steps.get(self.action_keys[0])[counted]
        condition, finding = self._unlike_model(table, pooled, drawn)
        looks[condition] = looks[condition] or finding
        return looks

    def _table_of(self, steps: TensorDictBase, scored: Tensor, counted: Tensor) -> Any:
        """A table of as many steps as fit into it; the logits of all may be too large."""
        _, dist = self._score(cast(TensorDictBase, steps[:1, :1]), True)
        try:
            n_actions = reading.categorical_log_probs(dist).shape[-1]  # type: ignore[arg-type]
        except TypeError:
            return None
        rows, first = choose_steps(counted.shape, n_actions)
        part: Any = cast(TensorDictBase, steps[rows])[:, first]
        _, dist = self._score(part, True)
        table = self._table(dist, part, scored[rows][:, first], counted[rows][:, first])
        if table is None:
            return None
        places = torch.arange(counted.numel(), device=counted.device).view(counted.shape)
        return table._replace(index=places[rows][:, first].flatten()[table.index])

    def _unlike_model(
        self, table: Any, pooled: PooledEvidence | None, drawn: Tensor | None
    ) -> tuple[str, Finding | None]:
        """A condition, and what speaks for it: tokens that the model did not draw, or never.

        `drawn`: all tokens of the batch; None if all responses have the same length.
        """
        best, finding = self._unlike_actor(table, pooled, (self._ends, self._pads))
        tokens = {NEVER_EOS: self._ends, NEVER_PAD: self._pads}.get(best)
        if finding is None or not tokens:
            return "sampler_disagrees", finding and _advise(finding, _SAMPLED)
        name = "end" if best == NEVER_EOS else "pad"
        ids = [token for token in tokens if token < table.log_probs.shape[-1]]
        expected = table.log_probs[:, ids].exp().sum().item()
        nats, why = finding[1]["evidence"], "all responses have the same length"
        if drawn is not None:
            seen = bool(torch.isin(drawn, drawn.new_tensor(tokens)).any())
            why = "this batch has it in other places" if seen else None
        return never_drawn(tokens, name, len(table.index), expected, nats, why)


def _advise(finding: Finding, advice: str) -> Finding:
    return f"{finding[0]} {advice}", finding[1]


_RECORDED = (
    "TransformersWrapper records log-probs at temperature 1 and without top-k and top-p, whatever "
    "it samples with: where the actor has the sampler's temperature, only these log-probs are "
    "wrong. ResponseKLTransform(temperature=...) does not read them."
)
_SAMPLED = (
    "For a sampler of TorchRL's LLM API: set `temperature` of CausalLMActor and of "
    "ResponseKLTransform to that of `generate_kwargs`, and there `top_k` to 0 (it is 50 by "
    "default) and `top_p` to 1."
)
