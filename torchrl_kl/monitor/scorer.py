"""The policy's log-probs once more: are the recorded ones the actor's, and were the actions drawn from it?"""

from __future__ import annotations

import math
from typing import NamedTuple, cast

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from tensordict.nn import ProbabilisticTensorDictSequential
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution
from torchrl.modules import set_recurrent_mode

from torchrl_kl._tensordict import (
    MASK_KEY,
    as_tuple,
    expand_right,
    find_time_dim,
    holder_batch_size,
    sum_action_dims,
)
from torchrl_kl.actors.frozen import FrozenActor
from torchrl_kl.functional.estimators import kl_exact
from torchrl_kl.monitor.sampling import (
    BEYOND_CHANCE,
    against_policy,
    find_cause,
    take,
    towards_reference,
)
from torchrl_kl.transforms.base import RECORD_LOG_PROB, get_required

__all__ = ["NO_CHANCE", "OTHER_POLICY", "Fault", "Report", "Scorer"]

_TABLE_SIZE = (
    2**23
)  # numbers in a table of log-probs, 64 MiB: of a large vocabulary fewer steps are looked at
NO_CHANCE = "which is no noise: it comes by chance once in a million batches at most. "
OTHER_POLICY = (
    "The recorded log-probs are the actor's, but the actions look drawn by another policy, nearer to the reference. "
    "Does the batch hold the reference's own samples, demonstrations, or another policy's actions scored again?"
)


class Fault(NamedTuple):
    """A sampler and a scorer that disagree: what shows it, its cause and what to do, and the figures."""

    text: str
    figures: dict[str, float]


class Report(NamedTuple):
    """`fault`: what speaks against the samples, or None; `exact_kl`: nats per step, None where not asked for."""

    fault: Fault | None
    exact_kl: float | None


class Scorer:
    """Recomputes what the policy recorded, and compares."""

    def __init__(
        self,
        actor: nn.Module,
        reference: FrozenActor | None,
        *,
        log_prob_key: NestedKey | None,
        tolerance: float,
        time_dim: int | None,
    ):
        if not (hasattr(actor, "get_dist") and hasattr(actor, "log_prob")):
            raise TypeError(
                f"`actor` must be a probabilistic actor (with `get_dist` and `log_prob`), got {type(actor).__name__}: "
                "wrap the network in torchrl.modules.ProbabilisticActor."
            )
        self.actor = cast(ProbabilisticTensorDictSequential, actor)
        self.reference, self.tolerance, self.time_dim = reference, tolerance, time_dim
        keys = [unravel_key(key) for key in self.actor.log_prob_keys]
        if log_prob_key is None and len(keys) != 1:
            raise ValueError(
                f"`actor` must record one log-prob, got the keys {keys}: name the one to use with `log_prob_key`."
            )
        self.log_prob_key = unravel_key(log_prob_key or keys[0])

    @torch.no_grad()
    def report(self, batch: TensorDictBase, *, negative: bool) -> Report:
        """Compares the recorded log-probs with the actor's, then the actions with what the actor draws."""
        recorded = get_required(batch, self.log_prob_key, RECORD_LOG_PROB)
        action_key = self.actor.dist_sample_keys[0]
        inputs = batch.select(*self.actor.in_keys, *self.actor.dist_sample_keys, strict=False)
        get_required(
            inputs,
            action_key,
            "its log-prob is recomputed; `actor` must be the policy of this batch.",
        )
        with set_recurrent_mode(find_time_dim(batch, self.time_dim) is not None):
            dist = self.actor.get_dist(inputs)
            recomputed = self.actor.log_prob(inputs, dist=dist)
        if not isinstance(recomputed, Tensor):  # several action heads have a log-prob each
            recomputed = get_required(
                recomputed, self.log_prob_key, "name one of them with `log_prob_key`."
            )
        holder = holder_batch_size(batch, self.log_prob_key)
        recorded, recomputed = (
            sum_action_dims(value, holder).double() for value in (recorded, recomputed)
        )
        mask = batch.get(MASK_KEY, None)
        counted = (
            torch.ones_like(recorded, dtype=torch.bool)
            if mask is None
            else expand_right(mask, recorded.shape)
        )
        table = _table(dist, inputs.get(action_key), recomputed, counted)
        fault = self._compare(batch, recorded, recomputed, counted, table)
        exact_kl = None
        if fault is None and table is not None:
            fault = _unlike_actions(table)
        if fault is None and negative and self.reference is not None:
            ref_dist = self._reference_dist(batch)
            exact_kl = _mean_kl(dist, ref_dist, counted)
            ref_table = _table(ref_dist, inputs.get(action_key), None, counted)
            if table is not None and ref_table is not None and exact_kl is not None:
                fault = _unlike_kl(table, ref_table, exact_kl)
        return Report(fault, exact_kl)

    def _compare(self, batch, recorded, recomputed, counted, table) -> Fault | None:
        gap = (recorded - recomputed)[counted]
        differs = ~(gap.abs() <= self.tolerance)  # NaN differs
        if not bool(differs.any()):
            return None
        share, largest = (
            differs.double().mean().item(),
            gap.abs().nan_to_num(math.inf, math.inf).max().item(),
        )
        text = (
            "The sampler and the scorer disagree: recorded log-probs differ from those that the actor gives the same "
            f"actions by up to {largest:.3g} nats, on {share:.1%} of {gap.numel()} steps. "
        )
        if table is None:
            text += (
                "Do both use the same temperature, bounds and masks, and the same weights? An action at the bound of a "
                "squashed distribution (TanhNormal) loses its log-prob to rounding."
            )
        else:
            masks = _boolean_masks(batch, table.steps, table.log_probs.shape[-1])
            cause = find_cause(
                table.log_probs, table.action, recorded[table.steps], masks, self.tolerance
            )
            text += f"Cause: {cause}."
        text += " Until then the KL is that of another policy than the one that is trained."
        return Fault(text, {"share": share, "largest_difference": largest})

    def _reference_dist(self, batch: TensorDictBase) -> Distribution:
        reference = cast(FrozenActor, self.reference)
        inputs = reference.inputs(batch)
        for own, key in zip(reference.own_state_keys, reference.state_keys, strict=True):
            if inputs.get(own, None) is None:
                raise RuntimeError(
                    f"the reference is recurrent and its state {own!r} is not in the batch: put the stack into the "
                    "env, which records it, or leave `reference` out."
                )
            inputs.rename_key_(own, key)
        timed = find_time_dim(batch, self.time_dim) is not None
        with reference.scoring(
            timed and not reference.state_keys
        ):  # every step carries its own state
            return reference.actor.get_dist(inputs)


class _Table(NamedTuple):
    """Log-probs of all actions (N, V), and the drawn ones (N,), of N of the steps, which are True in `steps` (*B)."""

    log_probs: Tensor
    action: Tensor
    steps: Tensor


def _unlike_actions(table: _Table) -> Fault | None:
    evidence = against_policy(table.log_probs, table.action)
    if evidence.nats < BEYOND_CHANCE:
        return None
    batches = f"1e{evidence.nats / math.log(10):.0f}"
    text = (
        "The sampler and the scorer disagree: the recorded log-probs are the actor's, but the actions were not drawn "
        f"from it. They look like {evidence.drawn_by}; by chance that comes once in {batches} batches. Sample from the "
        "distribution whose log-probs are recorded (temperature 1, no top-k, ExplorationType.RANDOM), or record those "
        "of the one that is sampled: the mean of k1 is the KL on the policy's own actions alone."
    )
    return Fault(text, {"evidence": evidence.nats})


def _unlike_kl(table: _Table, ref_table: _Table, exact_kl: float) -> Fault | None:
    nats = towards_reference(table.log_probs, ref_table.log_probs, table.action)
    if nats < BEYOND_CHANCE:
        return None
    text = (
        f"The mean of k1 is negative where the exact KL on the same states is {exact_kl:.3g} nats per step, {NO_CHANCE}"
        f"{OTHER_POLICY}"
    )
    return Fault(text, {"evidence": nats, "exact_kl": exact_kl})


def _mean_kl(dist: Distribution, ref_dist: Distribution, counted: Tensor) -> float | None:
    """The exact KL, nats per step; None where no closed form is known."""
    try:
        kl = sum_action_dims(kl_exact(dist, ref_dist), counted.shape)
    except (TypeError, ValueError):  # no KL is known for the pair, or the bijections differ
        return None
    return kl.double()[counted].mean().item()


def _table(dist, action: Tensor, log_prob: Tensor | None, counted: Tensor) -> _Table | None:
    """What a categorical policy with one action per step could have drawn, and drew; None of another policy."""
    if not isinstance(dist, Categorical) or dist.logits.shape[:-1] != counted.shape:
        return None
    if action.shape == dist.logits.shape:
        action = action.int().argmax(-1)  # one-hot
    steps = _thin(counted, max(_TABLE_SIZE // dist.logits.shape[-1], 1))
    log_probs, action = dist.logits[steps].double().log_softmax(-1), action[steps].long()
    in_order = bool(
        (action < log_probs.shape[-1]).all()
    )  # not so where the logits are those of a sparse mask
    if in_order and log_prob is not None:
        in_order = torch.allclose(take(log_probs, action), log_prob[steps], atol=1e-3)
    if not in_order:
        return None
    return _Table(log_probs, action, steps)


def _thin(counted: Tensor, at_most: int) -> Tensor:
    """So many of the True ones, evenly spaced: which steps are looked at must not depend on their actions."""
    index = counted.flatten().nonzero().squeeze(-1)
    if len(index) <= at_most:
        return counted
    thinned = torch.zeros_like(counted).flatten()
    thinned[index[torch.linspace(0, len(index) - 1, at_most, device=index.device).long()]] = True
    return thinned.reshape(counted.shape)


def _boolean_masks(batch: TensorDictBase, steps: Tensor, n_actions: int) -> dict[str, Tensor]:
    """Entries of the batch that may be masks of actions, (N, V) at the steps."""
    return {
        repr(key): value[steps]
        for key, value in batch.items(True, True)
        if as_tuple(key)[0] != "next"
        and isinstance(value, Tensor)
        and value.dtype == torch.bool
        and value.shape == (*steps.shape, n_actions)
    }
