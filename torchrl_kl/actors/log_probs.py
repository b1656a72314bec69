"""The log-prob that an actor gives actions, for every kind of actor and distribution."""

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import CompositeDistribution
from torch import Tensor
from torch.distributions import Distribution
from torchrl.modules import set_recurrent_mode

from torchrl_kl.actors.densities import log_prob_inside
from torchrl_kl.actors.policy import evaluating
from torchrl_kl.actors.protocol import as_kl_actor
from torchrl_kl.actors.reading import PROBABILISTIC, find_log_prob_keys, has_own, scored_inputs
from torchrl_kl.batches import MASK_KEY, expand_right, find_time_dim
from torchrl_kl.functional.estimators import kl_exact
from torchrl_kl.functional.tiles import TiledCategorical, figures
from torchrl_kl.keys import LogProbKeys, as_tuple, get_required, sibling, sum_action_dims


@torch.no_grad()
def policy_log_prob(
    actor: Any, tensordict: TensorDictBase, timed: bool
) -> tuple[Tensor, TensorDictBase]:
    """A policy's log-prob of actions (*B), nats, (*B, *A), in eval mode; what it read and wrote."""
    actions = actor.dist_sample_keys
    inputs = scored_inputs(actor, tensordict).update(tensordict.select(*actions, strict=False))
    recorded = LogProbKeys(find_log_prob_keys(actor))
    with evaluating(actor), set_recurrent_mode(timed):
        return log_prob_of_actions(actor, inputs, actions, recorded)[0], inputs


def rescore(actor: Any, batch: TensorDictBase, *, time_dim: int | None = None) -> TensorDictBase:
    """A shallow copy of a batch (*B) with the log-probs that `actor` gives its actions in one pass.

    For a sampler that computes other numbers than the loss, or records none: another engine, or a
    cache. The first ratios of an update are then 1 to rounding, and the sampler's KL is measured.

    Keys:
        reads what the actor reads, its action, and the sampler's log-prob if it is there.
        writes the log-prob, in eval mode, nats, (*B), and what the policy records for scoring, as
        one that truncates does. If the sampler recorded its own, it becomes "sampler_log_prob" next
        to it, unless that is there, and ("next", "sampler_kl") is log pi_sampler - log pi, nats,
        (*B, 1), 0 on padding. Its mean over trajectories estimates KL(sampler || policy).

    Args:
        actor: the policy that is trained, of one action.
        batch: is not written to.
        time_dim: as for KLConstrainedTransform.

    Raises:
        KeyError: if the action is missing.

    Example:
        >>> import torch
        >>> from torchrl_kl import rescore
        >>> from torchrl_kl.language import GPT, CausalLMActor, sample_responses
        >>> actor = CausalLMActor(GPT(vocab_size=11, block_size=9))
        >>> batch = sample_responses(actor, torch.tensor([[0, 2, 8, 6, 10]]), 4, pad_token=10)
        >>> rescore(actor, batch)["next", "sampler_kl"].abs().max() < 1e-5
        tensor(True)
    """
    key = find_log_prob_keys(actor)[0]
    sampler_key = sibling(key, "sampler_log_prob")
    log_prob, scored = policy_log_prob(actor, batch, find_time_dim(batch, time_dim) is not None)
    batch = batch.copy()
    for replayed in as_kl_actor(actor).replayed_keys:
        if (value := scored.get(replayed, None)) is not None:
            batch.set(replayed, value)
    sampler = batch.get(sampler_key, batch.get(key, None))
    batch.set(key, log_prob)
    if sampler is not None:
        mask = expand_right(batch.get(MASK_KEY, torch.ones_like(log_prob).bool()), log_prob.shape)
        gap = torch.where(mask, sampler - log_prob, 0.0).detach()
        batch.set(sampler_key, sampler)
        batch.set(("next", *as_tuple(sibling(key, "sampler_kl"))), gap.unsqueeze(-1))
    return batch


def log_prob_of_actions(
    actor: Any, inputs: TensorDictBase, action_keys: Sequence[NestedKey], recorded: LogProbKeys
) -> tuple[Tensor, Distribution | None]:
    """The log-prob of the actions in `inputs`, which gets the outputs, (*B, *A), and the dist."""
    shape, in_turn = recorded.batch_size(inputs), getattr(actor, "return_composite", False)
    # They are read before the pass, in which a part may overwrite them, as gSDEModule does.
    actions = {key: get_required(inputs, key, _NO_ACTION) for key in action_keys}
    dist, parts = None, []
    if in_turn:
        # Parts that are drawn one after another, given those before. The actor's `log_prob` would
        # draw the earlier ones anew and score the later ones after those.
        for module in actor.module.children():  # of a ModuleList or a ModuleDict
            if isinstance(module, PROBABILISTIC):
                keys = [key for key in module.dist_sample_keys if key in actions]
                inputs.update({key: actions[key] for key in keys})
                parts.append(log_prob_of_actions(module, inputs, keys, recorded)[0])
            else:
                module(inputs)
    elif has_own(actor, "log_prob"):
        found = actor.log_prob(inputs)
        parts = [found] if isinstance(found, Tensor) else found.values(True, True)
    else:
        dist = actor.get_dist(inputs)
        parts = log_probs_by_part(dist, actions, action_keys[0])
    return reduce(torch.add, [sum_action_dims(part, shape) for part in parts]), dist


def log_probs_by_part(dist: Any, data: Any, key: NestedKey) -> list[Tensor]:
    """The log-prob of the action `key`, (*B, ...), or of each part; ValueError for other shapes."""
    parts = (dist.dists if isinstance(dist, CompositeDistribution) else {key: dist}).items()
    return [log_prob_inside(part, get_required(data, name, _NO_ACTION)) for name, part in parts]


def log_prob_and_kl(
    policy: Any, reference: Any, data: Any, key: NestedKey, mask: Tensor | None
) -> tuple[list[Tensor], Tensor]:
    """The log-prob of the action `key` by parts, and KL(policy || reference), in one pass."""
    if not isinstance(policy, TiledCategorical):
        return log_probs_by_part(policy, data, key), kl_exact(policy, reference, mask=mask)
    action = get_required(data, key, _NO_ACTION)
    # A loss asks for log-prob and entropy next, which the policy then knows.
    log_prob, *_, kl, _ = figures(policy, action, reference)
    return [log_prob], kl if mask is None else torch.where(mask, kl, 0.0)


def refuse_own_log_prob(actor: Any) -> None:
    """ValueError if log-probs of the distributions of an actor may not be those of its actions."""
    if has_own(actor, "log_prob"):
        raise ValueError(
            "`actor` must have the log-prob of its distribution, got "
            f"{type(actor).__name__} with its own `log_prob`, which losses do not call: use "
            'gradient="step" with weights="step", or write the map into the distribution.'
        )


_NO_ACTION = "rename or change actions before the KL transforms; a loss has `set_keys(action=...)`."
