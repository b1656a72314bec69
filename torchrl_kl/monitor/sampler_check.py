"""Recomputes the log-probs that a policy recorded, and checks the samples against the policy."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torch.distributions import Distribution
from torchrl.modules import set_recurrent_mode

from torchrl_kl import _tensordict as td
from torchrl_kl.actors import reading
from torchrl_kl.actors.frozen import FrozenActor, weight_dtype
from torchrl_kl.actors.policy import evaluating
from torchrl_kl.actors.recurrent import UnknownStateError
from torchrl_kl.functional.estimators import kl_exact
from torchrl_kl.monitor import diagnosis
from torchrl_kl.monitor.diagnosis import Finding, PooledEvidence

_BEYOND_CHANCE = math.log(2e6)  # nats: half of 1e-6 for the batch, half for the pooled evidence
_TABLE_SIZE = 2**23  # numbers in a table of log-probs, 64 MiB: many actions, fewer steps


class _Table(NamedTuple):
    """Log-probs of all actions (N, V) and the drawn ones (N,), at N steps by flat `index` (N,)."""

    log_probs: Tensor
    action: Tensor
    index: Tensor


def counted_steps(batch: TensorDictBase, values: Tensor) -> Tensor:
    """True where a step is not padding, the shape of `values`."""
    every = torch.ones((), dtype=torch.bool, device=values.device)
    return td.expand_right(batch.get(td.MASK_KEY, every), values.shape)


def choose_steps(shape: torch.Size, n_actions: int) -> tuple[Tensor, slice]:
    """Which steps of a batch (*N, T) fit into a table: some rows, evenly spaced, and their first T.

    Which ones are used must not depend on their actions, nor on how soon a text ends.
    """
    n_rows, most = shape[:-1].numel(), max(_TABLE_SIZE // n_actions, 1)
    rows = torch.arange(0, n_rows, max(math.ceil(n_rows / most), 1))
    return rows, slice(max(most // max(len(rows), 1), 1))


def default_tolerance(actor: Any) -> float:
    """Nats by which an actor's log-probs may differ because its weights are rounded."""
    reading.check_actor(actor)
    return 0.05 if torch.finfo(weight_dtype(actor)).bits <= 16 else 1e-3


@dataclass
class SamplerCheck:
    """Compares the recorded log-probs with the actor's, and the actions with what it draws."""

    actor: Any
    reference: FrozenActor | None
    log_prob_key: NestedKey | list[NestedKey] | None
    tolerance: float  # nats
    time_dim: int | None

    def __post_init__(self):
        reading.check_actor(self.actor)
        log_prob_key = self.log_prob_key or reading.find_log_prob_keys(self.actor)
        self.recorded = td.LogProbKeys(log_prob_key)
        self.action_keys = self.actor.dist_sample_keys
        self._reads = [*reading.read_keys(self.actor), *self.action_keys]
        try:
            self._dist_module = reading.dist_module_of(self.actor)
        except ValueError:  # several distributions: they have no table of actions
            self._dist_module = None

    @torch.no_grad()
    def report(
        self, batch: TensorDictBase, pooled: PooledEvidence, *, due: bool, negative: bool
    ) -> tuple[Finding | None, float | None]:
        """What speaks against the samples of a batch (*B); the sum of the exact KL if computed.

        The actor is evaluated if it is this batch's turn (`due`) or the mean k1 is `negative`. The
        evidence of the batch is added to that of earlier ones, `pooled`.
        """
        for key in self.action_keys:
            td.get_required(batch, key, "`actor` must be the policy that drew this batch.")
        recorded = self.recorded.require(batch).double()  # (*B), as all that follows
        counted = counted_steps(batch, recorded)
        recorded_dist = self._dist(batch)
        scored, dist, fault = recorded, recorded_dist, None
        evaluate = due or negative
        timed = evaluate and td.find_time_dim(batch, self.time_dim) is not None
        if evaluate:
            scored, dist = self._score(batch, timed)
        table = self._table(dist, batch, scored, counted)
        if evaluate:
            fault = self._unlike_recorded(batch, recorded, scored, counted, table)
        # A batch that is checked only for its negative mean is not pooled: its content chose it.
        pools = due or recorded_dist is not None
        _, unlike = self._unlike_actor(table, pooled if pools else None)
        fault = fault or unlike
        exact_kl = None
        if fault is None and negative and self.reference is not None:
            with contextlib.suppress(UnknownStateError):
                ref_dist = self.reference.get_dist(batch, timed=timed)
                # A TypeError or ValueError means that no closed form is known.
                with contextlib.suppress(TypeError, ValueError):
                    kl = kl_exact(cast(Distribution, dist), ref_dist)
                    kl = td.sum_action_dims(kl, counted.shape)
                    exact_kl = kl.double()[counted].sum().item()
        return fault, exact_kl

    def _score(self, batch: TensorDictBase, timed: bool) -> tuple[Tensor, Distribution | None]:
        """The actor's log-probs of the actions of a batch (*B), nats, and its distribution."""
        inputs = batch.select(*self._reads, strict=False)
        with evaluating(self.actor), set_recurrent_mode(timed):
            scored = reading.log_prob_of_actions(
                self.actor, inputs, self.action_keys, self.recorded
            )
        return scored.double(), self._dist(inputs)

    def _dist(self, params: TensorDictBase) -> Distribution | None:
        """The distribution from parameters that the actor wrote; None where they are missing."""
        module = self._dist_module
        if module is None or any(params.get(key, None) is None for key in module.in_keys):
            return None
        try:
            return module.get_dist(params)
        except ValueError:  # validated, and what is recorded in padding is not valid
            return None

    def _table(
        self, dist: Distribution | None, batch: TensorDictBase, log_prob: Tensor, counted: Tensor
    ) -> _Table | None:
        """What the policy could have drawn, and drew; None unless one categorical action a step."""
        try:
            log_probs = reading.categorical_log_probs(cast(Distribution, dist))  # (*B, V)
        except TypeError:
            return None
        if log_probs.shape[:-1] != counted.shape:
            return None
        action = reading.action_index(batch.get(self.action_keys[0]), log_probs)
        used = torch.zeros_like(counted).reshape(-1, counted.shape[-1] if counted.ndim else 1)
        used[choose_steps(counted.shape, log_probs.shape[-1])] = True
        index = (used.flatten() & counted.flatten()).nonzero().squeeze(-1)
        action = action.flatten()[index].long()
        log_probs = log_probs.reshape(-1, log_probs.shape[-1])[index].double().log_softmax(-1)
        error = (diagnosis.take(log_probs, action) - log_prob.flatten()[index]).nan_to_num()
        if bool((error.abs() > max(self.tolerance, 1e-3)).any()):
            return None
        return _Table(log_probs, action, index)

    def _unlike_recorded(
        self,
        batch: TensorDictBase,
        recorded: Tensor,
        scored: Tensor,
        counted: Tensor,
        table: _Table | None,
    ) -> Finding | None:
        """Log-probs (*B) that were recorded and are not the actor's, `scored`, and why."""
        gap = (recorded - scored)[counted]
        differs = ~(gap.abs() <= self.tolerance)  # NaN differs
        if not bool(differs.any()):
            return None
        share = differs.double().mean().item()
        largest = gap.abs().nan_to_num(math.inf, math.inf).max().item()
        cause = (
            "Do both use the same temperature, bounds, masks and weights? An action at the bound "
            "of a squashed distribution (TanhNormal) loses its log-prob to rounding."
        )
        if table is not None:
            log_probs, action, index = (part[counted.flatten()[table.index]] for part in table)
            shape = (*recorded.shape, log_probs.shape[-1])
            # Any boolean entry with a number for each action may be the sampler's mask.
            masks = {
                repr(key): value.flatten(0, -2)[index]
                for key, value in batch.exclude("next").items(True, True)
                if value.shape == shape and value.dtype == torch.bool
            }
            values = recorded.flatten()[index]
            found = diagnosis.find_cause(log_probs, action, values, masks, self.tolerance)
            cause = f"Cause: {found}"
        text = (
            "The sampler and the actor disagree: recorded log-probs differ from those that the "
            f"actor gives the same actions by up to {largest:.3g} nats, on {share:.1%} of "
            f"{gap.numel()} steps. {cause} Until this is repaired, the KL is that of another "
            "policy than the one that is trained."
        )
        return text, {"share": share, "largest_difference": largest}

    def _unlike_actor(
        self,
        table: _Table | None,
        pooled: PooledEvidence | None,
        never: tuple[tuple[int, ...], ...] = ((), ()),
    ) -> tuple[int, Finding | None]:
        """Actions that the actor did not draw, by this batch alone or by all that were pooled.

        Returns the alternative that explains them best, too; `never`: as for `log_ratios`.
        """
        if table is None:
            return 0, None
        ratios = diagnosis.log_ratios(table.log_probs, table.action, never)
        # Each alternative has the same share of the bet, so together they have a mean of 1.
        evidence, where = ratios - math.log(len(ratios)), "this batch"
        if pooled is not None:
            together = pooled.add(ratios)
            if together.logsumexp(-1) > evidence.logsumexp(-1):
                evidence, where = together, f"{pooled.n_batches} batches"
        nats, best = evidence.logsumexp(-1).item(), int(evidence.argmax())
        # Temperatures so low that they draw nothing else are as likely.
        if evidence[diagnosis.GREEDY] > evidence[best] - 0.01:
            best = diagnosis.GREEDY
        if nats < _BEYOND_CHANCE:
            return best, None
        text = (
            "The sampler and the actor disagree: the recorded log-probs are the actor's, but the "
            f"actions were not drawn from it. They look like {diagnosis.SAMPLERS[best]}: by chance "
            f"{where} would show this with a probability of at most "
            f"{diagnosis.chance(nats)}. Sample from the distribution whose log-probs are "
            "recorded (temperature 1, no top-k, ExplorationType.RANDOM), or record those of the "
            "one that is sampled."
        )
        return best, (text, {"evidence": nats})
