"""What is known about a step, and the estimators of its KL other than k1."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor, nn

from torchrl_kl.actors.frozen import Score
from torchrl_kl.actors.policy import Borrowed
from torchrl_kl.actors.reading import dist_module_of, written_params
from torchrl_kl.batches import expand_right
from torchrl_kl.functional.distributions import joint
from torchrl_kl.functional.estimators import ESTIMATORS, kl_exact, kl_top_k
from torchrl_kl.functional.tiles import figures, over_log_probs
from torchrl_kl.keys import (
    ResolvedKeys,
    as_tuple,
    get_required,
    holder_batch_size,
    sum_action_dims,
)

Estimator = Literal["k1", "k2", "k3", "exact", "top_k"]


class KLStep(NamedTuple):
    """What is known about a batch of steps (*B), nats; *A: the agents, if actions are nested."""

    log_prob: Tensor | None  # under the policy, (*B, *A); None where no policy ran
    ref_log_prob: Tensor | None  # of the same action under the reference, (*B, *A)
    mask: Tensor | None = None  # True where a step counts, (*B); None where all do
    drawn: bool = True  # in an env: whether the policy drew the actions
    of_reference: TensorDictBase | None = None  # what the estimator needs of the reference's pass
    states: Sequence[Tensor] = ()  # the next recurrent states of the reference
    kl: Tensor | None = None  # k1, (*B, *A, 1), or (*B, 1) where agents are summed
    estimate: Tensor | None = None  # another measurement of the same KL

    @property
    def measured(self) -> Tensor:
        """What the controller is fed: the estimate, or else k1."""
        return self.kl if self.estimate is None else self.estimate  # type: ignore[return-value]


class Estimate(nn.Module):
    """An estimate of KL(policy || reference) of each step; it alone reads the `policy_keys`."""

    def __init__(self, policy_keys: list[NestedKey]):
        super().__init__()
        self.policy_keys = policy_keys

    def of_reference(
        self, tensordict: TensorDictBase, score: Score, reference: nn.Module
    ) -> TensorDictBase | None:
        """What it keeps of a pass of `reference` over a batch (*B)."""
        return None

    @abstractmethod
    def forward(self, tensordict: TensorDictBase, step: KLStep) -> Tensor:
        """The estimate, nats, shape of the log-probs and `step.mask`; 0 where that is False."""


class SampledEstimate(Estimate):
    """k2 or k3: a function of the two log-probs."""

    def __init__(self, estimator: str):
        super().__init__([])
        self.estimator = estimator

    def forward(self, tensordict, step: Any):  # noqa: D102
        return ESTIMATORS[self.estimator](step.log_prob, step.ref_log_prob, mask=step.mask)


class ExactEstimate(Estimate):
    """The KL of the two distributions, from their parameters."""

    def __init__(self, actor: nn.Module, keys: ResolvedKeys, reference: nn.Module):
        super().__init__(written_params(actor))
        # Only the modules that build the distributions: the networks are not needed. That of the
        # policy may change, such as a temperature that is learned; that of the reference may be of
        # another class, or have other options. Without another it is the policy's of now.
        own, other = dist_module_of(actor), dist_module_of(reference)
        self._of_policy = Borrowed(own)
        self.ref_dist_module = copy.deepcopy(own) if other is own else other
        self.recorded = keys.recorded

    def of_reference(self, tensordict, score, reference):  # noqa: D102
        (key, *others), dist = dist_module_of(reference).in_keys, score.dist
        if score.outputs.get(key, None) is None and self.policy_keys == [key]:
            # Of the reference, logits are never all there: they are made in tiles.
            policy: Any = get_required(tensordict, key, _RECORD_PARAMS)
            (kl,) = figures(policy, reference=dist)
            return TensorDict(kl=kl, batch_size=tensordict.batch_size)
        # The parameters, such as logits (*B, V).
        return score.outputs.select(key, *others).detach()

    @torch.no_grad()
    def forward(self, tensordict, step: Any):  # noqa: D102
        for key in self.policy_keys:
            get_required(tensordict, key, _RECORD_PARAMS)
        dist_module, mask = self._of_policy.held, step.mask
        if (kl := step.of_reference.get("kl", None)) is not None:
            return kl if mask is None else torch.where(mask, kl, 0.0)
        params = tensordict.select(*dist_module.in_keys).detach()
        _check_shapes(params, step.of_reference)
        if mask is not None:
            # Padding has no valid parameters (a scale of 0, say): take the reference's there.
            for key, param in params.items(True, True):  # which of a lazy stack are whole, too
                counts = expand_right(mask, param.shape)
                params.set(key, torch.where(counts, param, step.of_reference.get(key)))
        policy = dist_module.get_dist(params)
        reference = self.ref_dist_module.get_dist(step.of_reference)
        # One of them may be a Normal, (*B, n), and the other an Independent one, (*B).
        n_batch = min(len(policy.batch_shape), len(reference.batch_shape))
        policy, reference = joint(policy, n_batch), joint(reference, n_batch)
        # The batch shape of a Normal includes the action dimensions, (*B, n), summed afterwards.
        if mask is not None:
            mask = expand_right(mask, policy.batch_shape)
        kl = kl_exact(policy, reference, mask=mask)
        return sum_action_dims(kl, self.recorded.batch_size(tensordict))


class TopKEstimate(Estimate):
    """Exact on the k most likely actions, which the policy recorded, and sampled on the rest."""

    def __init__(self, top_k_key: NestedKey):
        super().__init__([top_k_key])
        self.top_k_key = top_k_key

    def of_reference(self, tensordict, score, reference):  # noqa: D102
        # Of log-probs (*B, V), those of the policy's k actions (*B, k) are kept.
        dist = score.dist or dist_module_of(reference).get_dist(score.outputs)
        actions = self._recorded(tensordict, "actions")
        one_per_step = holder_batch_size(tensordict, self.top_k_key)
        if not actions.shape[:-1] == dist.batch_shape == one_per_step:
            raise ValueError(
                "the top k measure one choice per step, got choices of shape "
                f"{tuple(actions.shape[:-1])} of the policy and {tuple(dist.batch_shape)} of "
                f"the reference in a batch of shape {tuple(one_per_step)}: use the exact estimator."
            )
        (kept,) = over_log_probs(lambda all_, some: [all_.gather(-1, some)], dist, actions)
        return TensorDict(log_probs=kept, batch_size=score.outputs.batch_size)

    def forward(self, tensordict, step: Any):  # noqa: D102
        return kl_top_k(
            self._recorded(tensordict, "log_probs").detach(),
            step.of_reference.get("log_probs"),
            step.log_prob,
            step.ref_log_prob,
            self._recorded(tensordict, "in_top_k"),
            mask=step.mask,
        )

    def _recorded(self, tensordict: TensorDictBase, name: str) -> Tensor:
        return get_required(tensordict, (*as_tuple(self.top_k_key), name), _RECORD_TOP_K)


def make_estimate(
    estimator: Estimator,
    actor: nn.Module | None,
    keys: ResolvedKeys,
    reference: nn.Module | None = None,
) -> Estimate | None:
    """The estimate of that name; None for k1, which is always measured."""
    names = get_args(Estimator)
    if estimator not in names:
        raise ValueError(f"`estimator` must be one of {list(names)}, got {estimator!r}.")
    if estimator == "exact":
        if actor is None:
            raise ValueError('`estimator="exact"` needs `actor`, got None: pass the policy.')
        return ExactEstimate(actor, keys, actor if reference is None else reference)
    if estimator == "top_k":
        return TopKEstimate(keys.top_k)
    return None if estimator == "k1" else SampledEstimate(estimator)


def require_one_kind(policy: nn.Module, reference: nn.Module) -> None:
    """ValueError if two actors are seen to build different distributions of equal parameters."""
    modules = [dist_module_of(actor) for actor in (policy, reference)]
    own, other = ((each.distribution_class, _written(each.distribution_kwargs)) for each in modules)
    if own != other or [*modules[0].parameters()]:  # one that learns begins alike
        raise ValueError(
            "`reference` must have the distribution class and options of the policy for `estimator="
            '"exact"` in separate parts: use KLConstrainedTransform, where each actor has its own.'
        )


def _written(options: Mapping[str, Any]) -> str:
    # As text: tensors, and what holds some, cannot be compared by ==.
    numbers = {
        n: each.tolist() if isinstance(each, Tensor) else each for n, each in options.items()
    }
    return repr(sorted(numbers.items()))


def _check_shapes(params: TensorDictBase, of_reference: TensorDictBase) -> None:
    for key, param in params.items(True, True):
        ref_param = get_required(of_reference, key, _SAME_NAMES)
        if param.shape != ref_param.shape:
            raise ValueError(
                f"{key!r} of policy and reference must have the same shape, got "
                f"{tuple(param.shape)} and {tuple(ref_param.shape)}: choose among the same actions."
            )


_DROPPED = "If another stack has measured this batch, it dropped them: put both into one Compose."
_RECORD_PARAMS = (
    'let the policy record its parameters, or use TopKActor with `estimator="top_k"`. ' + _DROPPED
)
_RECORD_TOP_K = (
    "collect with TopKActor(actor, k), or name its record with `KLKeys(top_k=...)`. " + _DROPPED
)
_SAME_NAMES = "policy and reference must name their parameters alike."
