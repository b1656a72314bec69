"""Reading an actor: its keys and modules, and whether it is one."""

from types import MethodType
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchrl_kl.actors.protocol import as_kl_actor, wrappers
from torchrl_kl.keys import RECORD_LOG_PROB, as_tuple

PROBABILISTIC = (ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential)
_LIBRARIES = ("tensordict", "torch", "torchrl")


def check_actor(actor: nn.Module) -> None:
    """TypeError for a module without a distribution, ValueError for uninitialised weights."""
    has_dist = isinstance(actor, nn.Module) and {"get_dist", "log_prob"} <= {*dir(actor)}
    # A library's modules with another `get_dist` draw whole sequences.
    if not has_dist or (has_own(actor, "get_dist") and is_of_library(actor.get_dist)):
        fix = f"wrap {wrappers()}; of an operator with a critic, pass `get_policy_operator()`."
        if isinstance(actor, DistributedDataParallel):
            fix = "wrap the network inside the actor, or the loss, in DistributedDataParallel."
        raise TypeError(
            "`actor` must be a probabilistic actor (with `get_dist` and `log_prob`) that acts step "
            f"by step, got {type(actor).__name__}: {fix}"
        )
    entries = (*actor.named_parameters(), *actor.named_buffers())
    lazy = [name for name, entry in entries if nn.parameter.is_lazy(entry)]
    if lazy:
        raise ValueError(
            f"`actor` has uninitialised weights ({lazy[0]}, ...): run it once on data first, or a "
            "copy would be initialised apart from it."
        )


def is_of_library(thing: Any) -> bool:
    """Whether a class or a method is of TorchRL, or of what TorchRL builds on."""
    return thing.__module__.partition(".")[0] in _LIBRARIES


def has_own(actor: Any, name: str) -> bool:
    """Whether an actor has another method than TorchRL's probabilistic actors."""
    library = [getattr(kind, name) for kind in PROBABILISTIC]
    method = getattr(actor, name, None)
    # Compiled by PyTorch 2.13, `getattr(method, "__func__", None)` is None.
    return not isinstance(method, MethodType) or method.__func__ not in library


def weight_dtype(actor: nn.Module) -> torch.dtype:
    """Dtype of the first weights of an actor that have several bytes, or the default."""
    floating = (p.dtype for p in actor.parameters() if p.is_floating_point())
    return next((one for one in floating if one.itemsize > 1), torch.get_default_dtype())


def check_left_inputs(policy: Any, reader: Any) -> None:
    """ValueError if the policy overwrites what `reader`, such as its reference, has to read."""
    keys = (policy.in_keys, policy.out_keys, reader.in_keys)
    spoiled = set.intersection(*({unravel_key(key) for key in each} for each in keys))
    # A name that begins with "_" is scratch, such as the noise of gSDEModule.
    names = sorted(str(key) for key in spoiled if not as_tuple(key)[-1].startswith("_"))
    if names:
        raise ValueError(
            f"`actor` must leave what it reads as it was, but it writes {names} itself: write to "
            'another key, and a memory to ("next", name), as TorchRL\'s recurrent modules do.'
        )


def read_keys(actor: Any) -> list[NestedKey]:
    """What an actor reads: its `in_keys` without parameters that its own modules write."""
    # Where a module writes ("params", "loc") and the distribution reads "params", TensorDict lists
    # "params" among the `in_keys` of the whole.
    written = [as_tuple(key) for part in actor.modules() for key in getattr(part, "out_keys", [])]
    params = [key for part in _probabilistic_modules(actor) for key in part.in_keys]
    paths = {path[:depth] for path in written for depth in range(1, len(path))}
    return [key for key in actor.in_keys if not (key in params and as_tuple(key) in paths)]


def recurrent_keys(actor: Any) -> list[NestedKey]:
    """Its states: what an actor reads, and writes into "next" for its next step."""
    return [key for key in actor.in_keys if unravel_key(("next", key)) in actor.out_keys]


def scored_inputs(actor: Any, tensordict: TensorDictBase) -> TensorDictBase:
    """What an actor reads to score the actions of a batch, with what it recorded for that."""
    # Its other outputs are left out: parameters in the batch would be taken for inputs.
    replayed = as_kl_actor(actor).replayed_keys
    return tensordict.select(*read_keys(actor), *replayed, strict=False)


def find_log_prob_keys(actor: Any) -> list[NestedKey]:
    """Where an actor records the log-prob of each part of its action; ValueError if twice there."""
    keys = [unravel_key(key) for key in actor.log_prob_keys]
    if len(set(keys)) < len(keys):
        raise ValueError(
            "`actor` must record the log-prob of each part of its action under another key, got "
            f"{keys}: name them with the `log_prob_key` of each ProbabilisticTensorDictModule."
        )
    return keys


def require_recording(actor: nn.Module) -> None:
    """ValueError if an actor, as it was built, does not record the log-prob of its actions."""
    if not all(part.return_log_prob for part in _probabilistic_modules(actor)):
        raise ValueError(
            "`actor` must record the log-prob of its actions, got one with return_log_prob=False: "
            f"{RECORD_LOG_PROB}"
        )


def distributions_of(actor: Any) -> list[tuple[Any, dict[str, Any]]]:
    """The classes that an actor is seen to build for its actions, with their options."""
    if any(has_own(actor, name) for name in ("get_dist", "build_dist_from_params", "log_prob")):
        return []
    parts = _probabilistic_modules(actor)
    if len(parts) > 1 and not actor.return_composite:
        parts = parts[-1:]  # those before it draw what is no action
    return [(part.distribution_class, part.distribution_kwargs) for part in parts]


def _probabilistic_modules(actor: nn.Module) -> list[Any]:
    return [part for part in actor.modules() if isinstance(part, ProbabilisticTensorDictModule)]


def dist_module_of(actor: nn.Module) -> ProbabilisticTensorDictModule:
    """The module that makes an actor's distribution; ValueError if there is not exactly one."""
    found = _probabilistic_modules(actor)
    if len(found) != 1:
        raise ValueError(
            f"`actor` must have one ProbabilisticTensorDictModule, got {len(found)} in "
            f"{type(actor).__name__}, and the KL of the whole action is not in one of its parts: "
            'use KLConstrainedTransform with estimator="k1", which only needs log-probs.'
        )
    return found[0]


def written_params(actor: nn.Module) -> list[NestedKey]:
    """Keys of the parameters that the actor writes; others (an action mask) are the env's."""
    params, read = dist_module_of(actor).in_keys, read_keys(actor)
    return [key for key in params if key not in read]
