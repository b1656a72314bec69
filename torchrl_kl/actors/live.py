"""The acting policy itself, asked for what it did not record."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor, nn
from torchrl.modules import set_recurrent_mode

from torchrl_kl.actors.reading import check_actor, log_prob_of_actions, read_keys, traces_of
from torchrl_kl._tensordict import LogProbKeys
from torchrl_kl.actors.borrowed import Live

_REFUSAL = (
    "a transform with `recompute_log_prob` cannot be sent to another process, where the policy would be a copy that "
    "does not learn: let the policy record its log-prob (`return_log_prob=True`) instead, or keep the transform in the "
    "learner's process, as the collector's `postproc`."
)


class LivePolicy:
    """The acting policy, whose log-probs of today stand in for those that it did not record.

    Args:
        policy: a probabilistic actor.
        recorded: where its log-prob would stand.
    """

    def __init__(self, policy: nn.Module, recorded: LogProbKeys):
        check_actor(policy)
        self._live: Live[Any] = Live(policy, refusal=_REFUSAL)
        self.recorded = recorded

    def ran(self, tensordict: TensorDictBase, action_keys: Collection[NestedKey]) -> bool:
        """Whether a step of an env was drawn by it: it left other entries than the env's actions.

        Raises:
            ValueError: if it leaves none, so that one cannot tell.
        """
        policy = self._live.held
        traces = [key for key in traces_of(policy, self.recorded) if key not in action_keys]
        if not traces:
            raise ValueError(
                f"`actor` writes {policy.out_keys} only: with `recompute_log_prob` its actions in an env could not be "
                "told from random ones (of a warm-up, of a check of the specs), whose log-prob is not the policy's. "
                "Let it keep another of its out_keys, the parameters of its distribution, say."
            )
        return any(tensordict.get(key, None) is not None for key in traces)

    @torch.no_grad()
    def log_prob(self, tensordict: TensorDictBase, *, timed: bool) -> Tensor:
        """Its log-prob of the actions now, nats.

        Args:
            tensordict: what it reads, and the action; shape (*B).
            timed: whether the last dimension is time, which is then run through in one pass.
        """
        policy = self._live.held
        inputs = tensordict.select(*read_keys(policy), *policy.dist_sample_keys, strict=False)
        with set_recurrent_mode(timed):
            return log_prob_of_actions(policy, inputs, policy.dist_sample_keys, self.recorded)
