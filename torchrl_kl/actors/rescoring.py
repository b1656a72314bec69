"""The log-probs of the policy in training, next to those of the sampler that drew its actions."""

from __future__ import annotations

from typing import Any, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_kl.actors import reading
from torchrl_kl.batches import MASK_KEY, expand_right, find_time_dim
from torchrl_kl.keys import RECORD_LOG_PROB, as_tuple, get_required, sibling


def rescore(actor: Any, batch: TensorDictBase, *, time_dim: int | None = None) -> TensorDictBase:
    """A shallow copy of a batch (*B) with the log-probs that `actor` gives its actions in one pass.

    For a sampler that computes other numbers than the loss: another engine, or a cache. The first
    ratios of an update are then exactly 1, and how far the sampler is becomes a number.

    Keys:
        reads what the actor reads, its action and its log-prob.
        writes the log-prob, in eval mode, nats, (*B); the sampler's as "sampler_log_prob" next to
        it, unless it is there; ("next", "sampler_kl"), log pi_sampler - log pi, nats, (*B, 1), 0 on
        padding, whose mean over trajectories estimates KL(sampler || policy); what a policy that
        truncates has kept.

    Args:
        actor: the policy that is trained, of one action.
        batch: is not written to.
        time_dim: as for KLConstrainedTransform.

    Raises:
        KeyError: if the action or the log-prob is missing.

    Example:
        >>> import torch
        >>> from torchrl_kl import GPT, CausalLMActor, rescore, sample_responses
        >>> actor = CausalLMActor(GPT(vocab_size=11, block_size=9))
        >>> batch = sample_responses(actor, torch.tensor([[0, 2, 8, 6, 10]]), 4, pad_token=10)
        >>> rescore(actor, batch)["next", "sampler_kl"].abs().max() < 1e-5
        tensor(True)
    """
    key = reading.find_log_prob_keys(actor)[0]
    sampler_key = sibling(key, "sampler_log_prob")
    recorded = get_required(batch, key, RECORD_LOG_PROB)
    timed = find_time_dim(batch, time_dim) is not None
    log_prob, scored = reading.policy_log_prob(actor, batch, timed)
    batch = batch.copy()
    if getattr(actor, "truncation", None) is not None:
        batch.set(actor.kept_key, scored.get(actor.kept_key))
    sampler = cast(Tensor, batch.get(sampler_key, recorded))
    mask = expand_right(batch.get(MASK_KEY, torch.ones_like(log_prob).bool()), log_prob.shape)
    gap = torch.where(mask, sampler - log_prob, 0.0).detach()
    batch.set(key, log_prob).set(sampler_key, sampler)
    batch.set(("next", *as_tuple(sibling(key, "sampler_kl"))), gap.unsqueeze(-1))
    return batch
