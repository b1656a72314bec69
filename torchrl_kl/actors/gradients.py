"""Whether an actor learns, and whether what it computes depends on weights that do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict.nn import TensorDictParams
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributions import Distribution


def learns(actor: nn.Module) -> bool:
    """Whether a parameter requires a gradient, or one that TensorDict's `to_module` made of it."""
    # In a pass it makes others, of the same memory, that require gradients as those of the module.
    parts = [part for part in actor.modules() if isinstance(part, TensorDictParams)]
    made = [value for part in parts for value in part.values(True, True)]
    return any(parameter.requires_grad for parameter in (*actor.parameters(), *made))


def reads_weights(read: Callable[[], Any]) -> bool:
    """Whether what `read` returns depends on weights that require gradients.

    What a pass makes and lets require one, as gradient checkpointing does with the outputs of
    embeddings, is another tensor in the next pass.
    """
    with torch.enable_grad():
        leaves = _leaves(read())
        again = _leaves(read()) if leaves else {}
    return any(key in again or isinstance(leaf, nn.Parameter) for key, leaf in leaves.items())


def _leaves(value: Any) -> dict[int, Tensor]:
    """Where the graph of a tensor begins, or of those in a tuple, dictionary or distribution."""
    if isinstance(value, Distribution):
        value = vars(value)
    if isinstance(value, dict | tuple):
        parts = value.values() if isinstance(value, dict) else value
        return {key: leaf for part in parts for key, leaf in _leaves(part).items()}
    requires_grad = isinstance(value, Tensor) and value.requires_grad
    waiting = [get_gradient_edge(value).node] if requires_grad else []
    seen, leaves = set(waiting), {}
    for node in waiting:
        if isinstance(leaf := getattr(node, "variable", None), Tensor):
            leaves[id(leaf)] = leaf
        new = {after for after, _ in node.next_functions if after is not None} - seen
        waiting += new
        seen |= new
    return leaves
