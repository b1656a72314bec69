"""An actor's distribution: where its parameters stand, and the log-probs of all actions of a categorical one."""

from __future__ import annotations

import torch
from tensordict import NestedKey
from tensordict.nn import ProbabilisticTensorDictModule
from torch import Tensor, nn

from torchrl_kl.actors.reading import read_keys


def dist_module_of(actor: nn.Module) -> ProbabilisticTensorDictModule:
    """The one module of an actor that turns parameters into a distribution; it has no weights.

    Raises:
        ValueError: if there is none, or more than one.
    """
    found = [
        module for module in actor.modules() if isinstance(module, ProbabilisticTensorDictModule)
    ]
    if len(found) != 1:
        raise ValueError(
            f"`actor` must have one ProbabilisticTensorDictModule, got {len(found)} in {type(actor).__name__}: the KL "
            "of the whole action cannot be read from the parameters of one of several distributions."
        )
    return found[0]


def written_params(actor: nn.Module) -> list[NestedKey]:
    """The keys of the distribution's parameters that the actor writes; others (an action mask) come from the env."""
    params = dist_module_of(actor).in_keys
    read = read_keys(actor)
    return [key for key in params if key not in read]


def categorical_log_probs(dist: torch.distributions.Distribution) -> Tensor:
    """Log-probs of all actions, shape (*B, n_actions).

    Raises:
        TypeError: if the distribution is not a categorical one over all actions.
    """
    categorical = isinstance(
        dist, (torch.distributions.Categorical, torch.distributions.OneHotCategorical)
    )
    if not categorical or getattr(dist, "_sparse_mask", False):  # `indices`: no slot per action
        raise TypeError(
            "the top k need a Categorical, OneHotCategorical or MaskedCategorical distribution (with a mask, not with "
            f'indices), got {type(dist).__name__}: use `estimator="exact"`.'
        )
    return dist.logits


def action_index(action: Tensor, log_probs: Tensor) -> Tensor:
    """The number of each action, shape (*B), from numbers or one-hot vectors.

    Args:
        action: shape (*B) or (*B, n_actions).
        log_probs: those of all actions, shape (*B, n_actions).
    """
    return action if action.ndim < log_probs.ndim else action.long().argmax(-1)
