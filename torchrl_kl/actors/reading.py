"""Reading a probabilistic actor: its keys, its distribution, and its log-prob of an action."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from tensordict.nn import (
    CompositeDistribution,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
)
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, OneHotCategorical
from torchrl.modules import LLMMaskedCategorical, set_recurrent_mode

from torchrl_kl._torchrl import indices_of
from torchrl_kl.actors.densities import log_prob_inside
from torchrl_kl.actors.policy import evaluating
from torchrl_kl.batches import MASK_KEY, expand_right, find_time_dim
from torchrl_kl.functional.tiles import TiledCategorical, over_tiles
from torchrl_kl.keys import (
    RECORD_LOG_PROB,
    LogProbKeys,
    as_tuple,
    get_required,
    sibling,
    sum_action_dims,
)

_PROBABILISTIC = (ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential)
# Those that do not all say by their `event_shape` whether actions are numbers or one-hot vectors.
_CATEGORICAL = (Categorical, LLMMaskedCategorical, OneHotCategorical)
_LIBRARIES = ("tensordict", "torch", "torchrl")


def check_actor(actor: nn.Module) -> None:
    """TypeError for a module without a distribution, ValueError for uninitialised weights."""
    if any(kind.__module__.startswith("torchrl.modules.llm") for kind in type(actor).__mro__):
        raise TypeError(
            f"`actor` must act step by step, got {type(actor).__name__}, which writes whole "
            "responses: use ResponseKLTransform(wrapper.model, ...) on its batches, or "
            "CausalLMActor(wrapper.model) where an actor is asked for."
        )
    has_dist = hasattr(actor, "get_dist") and hasattr(actor, "log_prob")
    if not (isinstance(actor, nn.Module) and has_dist):
        raise TypeError(
            "`actor` must be a probabilistic actor (with `get_dist` and `log_prob`), got "
            f"{type(actor).__name__}: wrap a network in torchrl.modules.ProbabilisticActor, or a "
            "language model in CausalLMActor; of an operator with a critic, pass "
            "`get_policy_operator()`."
        )
    entries = (*actor.named_parameters(), *actor.named_buffers())
    lazy = [name for name, entry in entries if nn.parameter.is_lazy(entry)]
    if lazy:
        raise ValueError(
            f"`actor` has uninitialised weights ({lazy[0]}, ...): run it once on data first, or a "
            "copy would be initialised apart from it."
        )


def weight_dtype(actor: nn.Module) -> torch.dtype:
    """Dtype of the first weights of an actor, of those of several bytes if any, or the default."""
    floating = [p.dtype for p in actor.parameters() if p.is_floating_point()]  # one byte: stored
    return min(floating, key=lambda one: one.itemsize == 1, default=torch.get_default_dtype())


def stated_temperature(actor: nn.Module) -> float | None:
    """What an actor divides its logits by, if a part of it says so as a number."""
    found = (getattr(part, "temperature", None) for part in actor.modules())
    return next((float(each) for each in found if isinstance(each, int | float)), None)


def check_kept_inputs(policy: Any, reader: Any) -> None:
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
    # A module may write ("params", "loc") where the distribution reads "params", which TensorDict
    # then lists among the `in_keys` of the whole.
    written = [as_tuple(key) for part in actor.modules() for key in getattr(part, "out_keys", [])]
    params = [key for part in _probabilistic_modules(actor) for key in part.in_keys]
    paths = {path[:depth] for path in written for depth in range(1, len(path))}
    return [key for key in actor.in_keys if not (key in params and as_tuple(key) in paths)]


def state_lengths(actor: Any) -> Mapping[NestedKey, NestedKey]:
    """For states that hold more than the actor reads, such as whole texts, where it stops."""
    return getattr(actor, "state_lengths", {})


def scored_inputs(actor: Any, tensordict: TensorDictBase) -> TensorDictBase:
    """What an actor reads to score the actions of a batch: also which ones its sampler kept."""
    # Without its other outputs: parameters left in the batch would be taken for inputs.
    return tensordict.select(*read_keys(actor), *getattr(actor, "replayed_keys", ()), strict=False)


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
    cache. The first ratios of an update are then exactly 1, and how far the sampler is becomes a
    number.

    Keys:
        reads what the actor reads, its action, and the sampler's log-prob if it is there.
        writes the log-prob, in eval mode, nats, (*B); the sampler's, if any, as "sampler_log_prob"
        next to it, unless it is there, and with it ("next", "sampler_kl"), log pi_sampler - log pi,
        nats, (*B, 1), 0 on padding, whose mean over trajectories estimates KL(sampler || policy);
        what a policy that truncates has kept.

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
    if getattr(actor, "truncation", None) is not None:
        batch.set(actor.kept_key, scored.get(actor.kept_key))
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
    """The log-prob of the actions in `inputs`, (*B, *A), nats, and the dist; writes its outputs."""
    shape, in_turn = recorded.batch_size(inputs), getattr(actor, "return_composite", False)
    if not in_turn and _has_own(actor, "log_prob"):
        found = actor.log_prob(inputs)
        parts = [found] if isinstance(found, Tensor) else found.values(True, True)
        return reduce(torch.add, [sum_action_dims(part, shape) for part in parts]), None
    # Before the pass, in which a part may write an action of its own, as gSDEModule does.
    actions = {key: get_required(inputs, key, _NO_ACTION) for key in action_keys}
    if in_turn:
        return _log_prob_in_turn(actor, inputs, actions, recorded), None
    dist = actor.get_dist(inputs)
    parts = log_probs_by_part(dist, actions, action_keys[0])
    return reduce(torch.add, [sum_action_dims(part, shape) for part in parts]), dist


def _log_prob_in_turn(
    actor: Any, inputs: TensorDictBase, actions: dict[NestedKey, Tensor], recorded: LogProbKeys
) -> Tensor:
    """The log-prob of an action whose parts are drawn one after another, given those before."""
    # The actor's `log_prob` would draw the earlier parts anew and score the later ones after those.
    found = []
    for module in actor.module.children():  # of a ModuleList or a ModuleDict
        if not isinstance(module, _PROBABILISTIC):
            module(inputs)
            continue
        keys = [key for key in module.dist_sample_keys if key in actions]
        inputs.update({key: actions[key] for key in keys})
        found.append(log_prob_of_actions(module, inputs, keys, recorded)[0])
    return reduce(torch.add, found)


def log_probs_by_part(dist: Any, data: Any, key: NestedKey) -> list[Tensor]:
    """The log-prob of the action `key`, (*B, ...), or of each part; ValueError for other shapes."""
    found, composite = [], isinstance(dist, CompositeDistribution)
    for name, part in (dist.dists if composite else {key: dist}).items():
        action = get_required(data, name, _NO_ACTION)
        _check_shape(part, action)
        found.append(log_prob_inside(part, action))
    return found


def _check_shape(dist: Distribution, action: Tensor) -> None:
    """ValueError for actions of another shape than those of a distribution of a library."""
    while isinstance(dist, Independent):  # which has the same actions
        dist = dist.base_dist
    if type(dist).__module__.partition(".")[0] not in _LIBRARIES:
        return  # the user's own may not say its shape
    name, batch = type(dist).__name__, dist.batch_shape
    if isinstance(dist, _CATEGORICAL):
        n_dims = len(batch) + ("OneHot" in name)
        fits = action.shape[: len(batch)] == batch and action.ndim == n_dims
    else:  # one without the dimensions of the batch is the same for all of it
        shape = batch + dist.event_shape
        fits = action.shape[action.ndim - len(shape) :] == shape
    if not fits:
        raise ValueError(
            f"policy and reference must have the same actions, got {name} of shape {tuple(batch)} "
            f"for actions of shape {tuple(action.shape)}: build both for one kind and number."
        )


def _has_own(actor: Any, name: str) -> bool:
    """Whether the class of an actor has a method that is not that of the library."""
    library = [getattr(kind, name) for kind in _PROBABILISTIC]
    return getattr(getattr(actor, name, None), "__func__", None) not in library


def distributions_of(actor: Any) -> list[tuple[Any, dict[str, Any]]]:
    """The classes that an actor is seen to build for its actions, with their options."""
    if any(_has_own(actor, name) for name in ("get_dist", "build_dist_from_params", "log_prob")):
        return []
    parts = _probabilistic_modules(actor)
    parts = parts if getattr(actor, "return_composite", False) else parts[-1:]
    return [(part.distribution_class, part.distribution_kwargs) for part in parts]


def refuse_own_log_prob(actor: Any) -> None:
    """ValueError if log-probs of the distributions of an actor may not be those of its actions."""
    if _has_own(actor, "log_prob"):
        raise ValueError(
            "`actor` must have the log-prob of its distribution, got "
            f"{type(actor).__name__} with its own `log_prob`, which losses do not call: use "
            'gradient="step" with weights="step", or write the map into the distribution.'
        )


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


def over_log_probs(fn: Callable[..., Any], dist: Any, actions: Tensor) -> Sequence[Tensor]:
    """What `fn` computes of log-probs of all actions, (*B, n_actions), and of some, (*B, ...).

    Of rows (K, ...) where the distribution is tiled; TypeError if it has no such log-probs.
    """
    if isinstance(dist, TiledCategorical):
        return over_tiles(lambda dist, some: fn(dist.logits, some), dist=dist, some=actions)
    # With `indices` a MaskedCategorical has no column for each action.
    if not isinstance(dist, (Categorical, OneHotCategorical)) or indices_of(dist) is not None:
        raise TypeError(
            "the top k need a Categorical, OneHotCategorical or MaskedCategorical distribution "
            f'(with a mask, not with indices), got {type(dist).__name__}: use `estimator="exact"`.'
        )
    return fn(dist.logits, actions)


_NO_ACTION = "rename or change actions before the KL transforms; a loss has `set_keys(action=...)`."
