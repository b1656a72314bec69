"""Probabilistic actors: what they read and leave behind, and the log-prob of an action."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensordict import NestedKey, TensorDict, TensorDictBase, unravel_key
from tensordict.nn import (
    CompositeDistribution,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
)
from torch import Tensor, nn

from torchrl_kl._tensordict import LogProbKeys, as_tuple, beside, sum_action_dims


def check_actor(actor: nn.Module) -> None:
    """Refuses what has no distribution, and weights that are not there yet.

    Raises:
        TypeError: if it has no distribution.
        ValueError: if it has uninitialised weights.
    """
    if not (
        isinstance(actor, nn.Module) and hasattr(actor, "get_dist") and hasattr(actor, "log_prob")
    ):
        raise TypeError(
            f"`actor` must be a probabilistic actor (with `get_dist` and `log_prob`), got {type(actor).__name__}: "
            "wrap the network in torchrl.modules.ProbabilisticActor; a deterministic policy has no KL."
        )
    lazy = [name for name, p in actor.named_parameters() if nn.parameter.is_lazy(p)]
    if lazy:
        raise ValueError(
            f"`actor` has uninitialised weights ({lazy[0]}, ...): run it once on data first; a copy made now would be "
            "initialised apart from the policy."
        )


def read_keys(actor: Any) -> list[NestedKey]:
    """What an actor reads from others: TorchRL's `in_keys` also name a branch of parameters that it fills itself."""
    written = [
        as_tuple(key) for module in actor.modules() for key in getattr(module, "out_keys", [])
    ]
    params = [key for part in _probabilistic_modules(actor) for key in part.in_keys]

    def fills(key: NestedKey) -> bool:
        path = as_tuple(key)
        return any(len(other) > len(path) and other[: len(path)] == path for other in written)

    return [key for key in actor.in_keys if not (key in params and fills(key))]


def traces_of(actor: Any, recorded: LogProbKeys) -> list[NestedKey]:
    """Entries that only its forward pass leaves behind: with them and no log-prob, the policy did run."""
    known = {unravel_key(key) for key in (*actor.in_keys, *actor.dist_sample_keys, *recorded.keys)}
    return [
        key
        for key in actor.out_keys
        if as_tuple(key)[0] != "next" and unravel_key(key) not in known
    ]


def find_log_prob_keys(actor: Any) -> list[NestedKey]:
    """Where an actor records the log-prob of its action, or those of its parts.

    Raises:
        ValueError: if parts share a key: the last one drawn overwrites the others there.
    """
    keys = [unravel_key(key) for key in actor.log_prob_keys]
    if len(set(keys)) < len(keys):
        raise ValueError(
            f"`actor` must record the log-prob of each part of its action under a key of its own, got {keys}: name "
            "them with the `log_prob_key` of each ProbabilisticTensorDictModule."
        )
    return keys


def log_prob_of_actions(
    actor: Any, inputs: TensorDictBase, action_keys: Sequence[NestedKey], recorded: LogProbKeys
) -> Tensor:
    """The log-prob of the actions in `inputs`, nats, summed over the parts and dimensions of the action.

    Args:
        actor: a probabilistic actor.
        inputs: what it reads, and the action. What it writes on the way is left there, the parameters of its
            distribution among it.
        action_keys: its `dist_sample_keys`, which take long to find.
        recorded: where the policy records its log-prob; the result has the shape of the batch there.
    """
    batch_size = recorded.batch_size(inputs)
    log_prob = _log_prob(actor, inputs, action_keys[0])
    if isinstance(log_prob, Tensor):
        if len(action_keys) > 1:
            _refuse_one_part(action_keys, recorded)
        return sum_action_dims(log_prob, batch_size)
    if recorded.missing(log_prob):  # the policy's is one sum under a key of its own
        recorded = LogProbKeys(list(log_prob.keys(True, True)))
    return recorded.add_up(log_prob, batch_size)


def _refuse_one_part(action_keys: Sequence[NestedKey], recorded: LogProbKeys) -> None:
    """ValueError if the policy's log-prob is of one part of the action, where the reference gives the whole's."""
    parts = [beside(key, f"{as_tuple(key)[-1]}_log_prob") for key in action_keys]
    if len(recorded.keys) == 1 and recorded.keys[0] in parts:
        raise ValueError(
            f"`log_prob_key` must not be that of one part of the action, got {recorded.keys[0]!r}, while "
            "`composite_lp_aggregate` is on: the reference then gives the log-prob of the whole action. Leave the key "
            "out, or call set_composite_lp_aggregate(False)."
        )


def _log_prob(actor: Any, inputs: TensorDictBase, action_key: NestedKey) -> Tensor | TensorDictBase:
    """One log-prob, or one for each part of the action, under the actor's keys."""
    if not getattr(actor, "return_composite", False):
        dist = actor.get_dist(inputs)
        if isinstance(dist, CompositeDistribution):
            return actor.log_prob(inputs, dist=dist)
        return dist.log_prob(inputs[action_key])  # what the actor's own does, with less ado
    # Parts that are drawn one after another: each given those before it. (The actor's own `log_prob` draws the
    # earlier parts anew and scores the later ones after those.)
    log_probs = TensorDict(batch_size=inputs.batch_size)
    for module in (
        actor.module.values() if isinstance(actor.module, nn.ModuleDict) else actor.module
    ):
        if not isinstance(
            module, ProbabilisticTensorDictModule | ProbabilisticTensorDictSequential
        ):
            module(inputs)
            continue
        log_prob = _log_prob(module, inputs, module.dist_sample_keys[0])
        if isinstance(log_prob, Tensor):
            log_prob = TensorDict().set(find_log_prob_keys(module)[0], log_prob)
        log_probs.update(log_prob)
    return log_probs


def _probabilistic_modules(actor: nn.Module) -> list[Any]:
    return [
        module for module in actor.modules() if isinstance(module, ProbabilisticTensorDictModule)
    ]
