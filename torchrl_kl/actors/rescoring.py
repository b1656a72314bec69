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
    """Replaces recorded log-probs by those that `actor` gives the actions in one pass.

    For a sampler that computes other numbers than the loss: another engine, a cache, a padding.
    The first ratios of an update are then exactly 1, and the rest is a number: `sampler_kl`.

    Keys:
        reads what the actor reads, its action and its log-prob.
        writes the log-prob, nats, (*B), in eval mode; the sampler's under "sampler_log_prob" next
        to it, unless it is there; ("next", "sampler_kl"): log pi_sampler - log pi, nats, (*B, 1), 0
        on padding. Its mean over trajectories estimates KL(sampler || policy).

    Args:
        actor: the policy that is trained, of one action.
        batch: steps (*B), which are not written to, with "next".
        time_dim: the last batch dimension, if it is time and the batch does not name it "time".

    Returns:
        A shallow copy of the batch.

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
    reading.check_actor(actor)
    key = reading.find_log_prob_keys(actor)[0]
    sampler_key = sibling(key, "sampler_log_prob")
    recorded = get_required(batch, key, RECORD_LOG_PROB)
    timed = find_time_dim(batch, time_dim) is not None
    log_prob = reading.policy_log_prob(actor, batch, timed)
    batch = batch.copy()
    sampler = cast(Tensor, batch.get(sampler_key, recorded))
    mask = batch.get(MASK_KEY, None)
    gap = sampler.detach() - log_prob
    if mask is not None:
        gap = torch.where(expand_right(mask, gap.shape), gap, 0.0)
    batch.set(key, log_prob).set(sampler_key, sampler)
    batch.set(("next", *as_tuple(sibling(key, "sampler_kl"))), gap.unsqueeze(-1))
    return batch
