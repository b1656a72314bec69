"""Reading a probabilistic actor: its keys, its distribution, and its log-prob of an action."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, cast

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, unravel_key
from tensordict.nn import (
    CompositeDistribution,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictParams,
)
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, OneHotCategorical
from torch.overrides import TorchFunctionMode
from torchrl.envs.utils import exploration_type
from torchrl.modules import ConsistentDropoutModule, DTActor, LLMMaskedCategorical, OnlineDTActor

from torchrl_kl._tensordict import LogProbKeys, as_tuple, get_required, sibling, sum_action_dims
from torchrl_kl._torchrl import indices_of

_PROBABILISTIC = (ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential)
DIST_METHODS = ("get_dist", "get_dist_params", "build_dist_from_params")
_LOG_PROBS = [kind.log_prob for kind in _PROBABILISTIC]
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


class _CopyGraphs(TorchFunctionMode):
    """Lets `copy.deepcopy` copy tensors with a graph, such as those of a module's last pass."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is Tensor.__deepcopy__ and not args[0].is_leaf:
            value, memo = args
            return memo.setdefault(id(value), value.detach().clone())
        return func(*args, **(kwargs or {}))


@torch.no_grad()  # a copy of TorchScript's weights would be a part of their graph
def copy_actor(actor: nn.Module) -> Any:
    """A deep copy of an actor, without gradients."""
    with _CopyGraphs():
        copied = copy.deepcopy(actor)
    copied.zero_grad()  # it has those of the actor, too
    return copied


def has_compiled_parts(actor: nn.Module) -> bool:
    """Whether torch.compile was called on a part of an actor, or compiles now."""
    return torch.compiler.is_compiling() or any(
        "_orig_mod" in part._modules or getattr(part, "_compiled_call_impl", None) is not None
        for part in actor.modules()
    )


def learns(actor: nn.Module) -> bool:
    """Whether a parameter requires a gradient, or one that TensorDict's `to_module` made of it."""
    # In a pass it makes others, of the same memory, that require gradients as those of the module.
    parts = [part for part in actor.modules() if isinstance(part, TensorDictParams)]
    made = [value for part in parts for value in part.values(True, True)]
    return any(parameter.requires_grad for parameter in (*actor.parameters(), *made))


def requires_grad(value: Any) -> bool:
    """Whether a tensor requires a gradient, or one in a tuple, dictionary or distribution."""
    if isinstance(value, Tensor):
        return value.requires_grad
    if isinstance(value, Distribution):
        value = vars(value)
    parts = value.values() if isinstance(value, dict) else value
    return isinstance(value, dict | tuple) and any(map(requires_grad, parts))


def check_kept_inputs(policy: Any, reader: Any) -> None:
    """ValueError if the policy overwrites what `reader`, such as its reference, has to read."""
    keys = (policy.in_keys, policy.out_keys, reader.in_keys)
    spoiled = set.intersection(*({unravel_key(key) for key in each} for each in keys))
    # TorchRL's modules write back noise that they were given: gSDEModule as scratch, whose name
    # begins with "_", and dropout its mask.
    dropouts = [part for part in policy.modules() if isinstance(part, ConsistentDropoutModule)]
    spoiled -= {unravel_key(key) for part in dropouts for key in part.out_keys[1:]}
    # A decision transformer hides the action of a step from what it gives for that step.
    if any(isinstance(part, (DTActor, OnlineDTActor)) for part in policy.modules()):
        spoiled -= {unravel_key(key) for key in policy.dist_sample_keys}
    names = sorted(str(key) for key in spoiled if not as_tuple(key)[-1].startswith("_"))
    if names:
        raise ValueError(
            f"`actor` must leave what it reads as it was, but it writes {names} itself: nobody "
            "else could tell from the data what it has read. Write to another key, and a memory "
            'to ("next", name), as TorchRL\'s recurrent modules do.'
        )


def read_alike(one: Any, other: Any) -> bool:
    """Whether two actors have the same inputs and modules of the same classes."""
    about = (
        ([unravel_key(key) for key in actor.in_keys], [type(part) for part in actor.modules()])
        for actor in (one, other)
    )
    return next(about) == next(about)


def read_keys(actor: Any) -> list[NestedKey]:
    """What an actor reads: its `in_keys` without parameters that its own modules write."""
    # A module may write ("params", "loc") where the distribution reads "params": TensorDict's
    # `in_keys` of the whole then list "params", which nobody else writes.
    outs = (getattr(module, "out_keys", []) for module in actor.modules())
    written = [as_tuple(key) for keys in outs for key in keys]
    params = [key for part in _probabilistic_modules(actor) for key in part.in_keys]

    def fills(key: NestedKey) -> bool:
        path = as_tuple(key)
        return any(len(other) > len(path) and other[: len(path)] == path for other in written)

    return [key for key in actor.in_keys if not (key in params and fills(key))]


def trace_keys(actor: Any, recorded: LogProbKeys) -> list[NestedKey]:
    """Entries that only a forward pass leaves, which show that the policy ran."""
    known = {unravel_key(key) for key in (*actor.in_keys, *actor.dist_sample_keys, *recorded.keys)}
    root_keys = [key for key in actor.out_keys if as_tuple(key)[0] != "next"]
    return [key for key in root_keys if unravel_key(key) not in known]


def find_log_prob_keys(actor: Any) -> list[NestedKey]:
    """Where an actor records the log-prob of each part of its action; ValueError if not apart."""
    keys = [unravel_key(key) for key in actor.log_prob_keys]
    if len(set(keys)) < len(keys):
        raise ValueError(
            "`actor` must record the log-prob of each part of its action under another key, got "
            f"{keys}: name them with the `log_prob_key` of each ProbabilisticTensorDictModule."
        )
    return keys


def log_prob_of_actions(
    actor: Any,
    inputs: TensorDictBase,
    action_keys: Sequence[NestedKey],
    recorded: LogProbKeys,
    plain: Sequence[bool] = (),
) -> Tensor:
    """The log-prob of the actions in `inputs`, (*B, *A), nats; writes its outputs into `inputs`.

    `action_keys`: the actor's `dist_sample_keys`, slow to find; `plain`: its `plain_parts`.
    """
    batch_size = recorded.batch_size(inputs)
    log_prob = _log_prob(actor, inputs, action_keys, plain)
    if isinstance(log_prob, Tensor):
        # One sum for several parts, to which the log-prob of one part must not be compared.
        several = action_keys if len(action_keys) > 1 and len(recorded.keys) == 1 else ()
        if recorded.keys[0] in [sibling(key, f"{as_tuple(key)[-1]}_log_prob") for key in several]:
            raise ValueError(
                "`KLKeys.log_prob` must not be that of one part of the action, got "
                f"{recorded.keys[0]!r}, while `composite_lp_aggregate` is on: leave it out, or "
                "call set_composite_lp_aggregate(False)."
            )
        return sum_action_dims(log_prob, batch_size)
    # A policy that records one sum for all parts has another key than its parts have.
    if recorded.missing(log_prob):
        recorded = LogProbKeys(list(log_prob.keys(True, True)))
    return cast(Tensor, recorded.read(log_prob, batch_size))


def plain_parts(actor: Any) -> list[bool]:
    """Which parts of an actor, but its last, are TensorDictModules that only call a network."""
    # Empty if `get_dist` does more than to run the parts and build the distribution of the last.
    kinds: Any = (type(actor), ProbabilisticTensorDictSequential)
    own, theirs = ([getattr(kind, name, None) for name in DIST_METHODS] for kind in kinds)
    parts = actor.module if own == theirs and not actor.return_composite else None
    listed = isinstance(parts, nn.ModuleList)
    if not listed or not isinstance(parts[-1], ProbabilisticTensorDictModule):
        return []

    def is_plain(part: nn.Module) -> bool:
        if type(part) is not TensorDictModule or "_" in part.out_keys:
            return False
        # Any hook or option that was set on the part is an entry of `vars` that differs.
        plain = TensorDictModule(part.module, part.in_keys, part.out_keys)
        plain.training = part.training
        return vars(plain) == vars(part)

    return [is_plain(part) for part in parts[:-1]]


def _get_dist(actor: Any, inputs: TensorDictBase, plain: Sequence[bool]) -> Distribution:
    """What `actor.get_dist(inputs)` gives; for a small network most of its time is TensorDict's."""
    if not plain or exploration_type() is None:
        return actor.get_dist(inputs)
    *parts, last = actor.module
    for part, is_plain in zip(parts, plain, strict=True):
        inputs = _call_network(part, inputs) if is_plain else part(inputs)
    return last.get_dist(inputs)


def _call_network(part: TensorDictModule, inputs: TensorDictBase) -> TensorDictBase:
    """What a plain `part(inputs)` does."""
    values = [inputs.get(key, None) for key in part.in_keys]
    if not all(isinstance(value, Tensor) for value in values):
        return part(inputs)
    written = part.module(*values)
    outputs = written if isinstance(written, tuple) else (written,)
    if len(outputs) != len(part.out_keys) or not all(isinstance(one, Tensor) for one in outputs):
        return TensorDictModule(lambda *_: written, part.in_keys, part.out_keys)(inputs)
    for key, output in zip(part.out_keys, outputs, strict=True):
        inputs.set(key, output)
    return inputs


def has_own_log_prob(actor: Any) -> bool:
    """Whether the class of an actor has a `log_prob`, which may not be that of its `get_dist`."""
    return getattr(actor.log_prob, "__func__", None) not in _LOG_PROBS


def refuse_own_log_prob(actor: Any) -> None:
    """ValueError if log-probs of the distributions of an actor may not be those of its actions."""
    if has_own_log_prob(actor):
        raise ValueError(
            "`actor` must have the log-prob of its distribution, got "
            f"{type(actor).__name__} with its own `log_prob`, which losses do not call: use "
            'gradient="step" with weights="step", or write the map into the distribution.'
        )


def _log_prob(
    actor: Any, inputs: TensorDictBase, action_keys: Sequence[NestedKey], plain: Sequence[bool] = ()
) -> Tensor | TensorDictBase:
    """One log-prob, or one for each part of the action, under the actor's keys."""
    return_composite = getattr(actor, "return_composite", False)
    if not return_composite and has_own_log_prob(actor):
        return actor.log_prob(inputs)
    # Before the pass, in which a part may write an action of its own, as gSDEModule does.
    needed_for = "the reference scores the policy's action."
    actions = {key: get_required(inputs, key, needed_for) for key in action_keys}
    if not return_composite:
        dist = _get_dist(actor, inputs, plain)
        if isinstance(dist, CompositeDistribution):
            for key, part in dist.dists.items():
                check_shape(part, actions[unravel_key(key)])
            return actor.log_prob(_with(inputs, actions), dist=dist)
        return log_prob_of(dist, actions[action_keys[0]])
    # Parts that are drawn one after another are scored each after those before it. (The actor's
    # `log_prob` draws the earlier parts anew and scores the later ones after those.)
    log_probs = TensorDict(batch_size=inputs.batch_size)
    parts = actor.module
    for module in parts.values() if isinstance(parts, nn.ModuleDict) else parts:
        if not isinstance(module, _PROBABILISTIC):
            module(inputs)
            continue
        keys = [key for key in module.dist_sample_keys if key in actions]
        log_prob = _log_prob(module, _with(inputs, {key: actions[key] for key in keys}), keys)
        if isinstance(log_prob, Tensor):
            log_prob = TensorDict().set(find_log_prob_keys(module)[0], log_prob)
        log_probs.update(log_prob)
    return log_probs


def log_prob_of(dist: Distribution, action: Tensor) -> Tensor:
    """The log-prob of an action (*B, ...); ValueError if it has not the shape of those of `dist`.

    It would be broadcast, to the log-prob of other actions.
    """
    check_shape(dist, action)
    return dist.log_prob(action)


def check_shape(dist: Distribution, action: Tensor) -> None:
    """ValueError for actions of another shape than those of a distribution of a library."""
    while isinstance(dist, Independent):  # which has the same actions
        dist = dist.base_dist
    name, batch = type(dist).__name__, dist.batch_shape
    if type(dist).__module__.partition(".")[0] not in _LIBRARIES:
        return  # the user's own may not say its shape
    if isinstance(dist, _CATEGORICAL):
        takes, n_dims = ("one-hot vectors", 1) if "OneHot" in name else ("numbers", 0)
        fits = action.shape[: len(batch)] == batch and action.ndim == len(batch) + n_dims
    else:  # one without the dimensions of the batch is the same for all of it
        shape = batch + dist.event_shape
        takes = f"actions of shape {tuple(shape)}"
        fits = action.shape[action.ndim - len(shape) :] == shape
    if not fits:
        raise ValueError(
            f"policy and reference must have the same actions, got {name} of shape {tuple(batch)}, "
            f"which takes {takes}, for actions of shape {tuple(action.shape)}: build both for "
            "actions of one kind and number."
        )


def _with(inputs: TensorDictBase, entries: dict[NestedKey, Any]) -> TensorDictBase:
    for key, value in entries.items():
        inputs.set(key, value)
    return inputs


def _probabilistic_modules(actor: nn.Module) -> list[Any]:
    return [part for part in actor.modules() if isinstance(part, ProbabilisticTensorDictModule)]


def own_methods(actor: nn.Module, methods: Sequence[str]) -> list[str]:
    """Which of these methods of a sequence of modules its class replaces."""
    kind = type(getattr(actor, "_orig_mod", actor))  # within torch.compile
    if not issubclass(kind, ProbabilisticTensorDictSequential):
        return []
    homes = {name: next(each for each in kind.__mro__ if name in vars(each)) for name in methods}
    known = ("tensordict", "torchrl", "torchrl_kl")
    return [name for name in methods if homes[name].__module__.partition(".")[0] not in known]


def refuse_own_methods(actor: nn.Module, methods: Sequence[str] = DIST_METHODS) -> None:
    """TypeError if the class of an actor replaces methods that will not be called."""
    own = own_methods(actor, methods)
    if own:
        kind = type(getattr(actor, "_orig_mod", actor))
        raise TypeError(
            f"`actor` must choose as its parts do, got {kind.__name__} with its own "
            f"{', '.join(own)}, which would not be called: write it into a part, such as the "
            "distribution class."
        )


def dist_module_of(actor: nn.Module) -> ProbabilisticTensorDictModule:
    """The module that makes an actor's distribution; ValueError if there is not exactly one."""
    found = _probabilistic_modules(actor)
    if len(found) != 1:
        raise ValueError(
            f"`actor` must have one ProbabilisticTensorDictModule, got {len(found)} in "
            f"{type(actor).__name__}: the KL of the whole action is not in one of its parts."
        )
    return found[0]


def written_params(actor: nn.Module) -> list[NestedKey]:
    """Keys of the parameters that the actor writes; others (an action mask) are the env's."""
    # Before `read_keys`: it refuses a module that has no keys.
    params = dist_module_of(actor).in_keys
    read = read_keys(actor)
    return [key for key in params if key not in read]


def categorical_log_probs(dist: torch.distributions.Distribution) -> Tensor:
    """Log-probs of all actions, (*B, n_actions); TypeError if the distribution has none."""
    kinds = (torch.distributions.Categorical, torch.distributions.OneHotCategorical)
    # With `indices` a MaskedCategorical has no column for each action.
    if not isinstance(dist, kinds) or indices_of(dist) is not None:
        raise TypeError(
            "the top k need a Categorical, OneHotCategorical or MaskedCategorical distribution "
            f'(with a mask, not with indices), got {type(dist).__name__}: use `estimator="exact"`.'
        )
    return dist.logits


def action_index(action: Tensor, log_probs: Tensor) -> Tensor:
    """The number of each action, (*B), from numbers (*B) or one-hot vectors (*B, n_actions)."""
    return action if action.ndim < log_probs.ndim else action.long().argmax(-1)
