"""Data whose numbers are valid, but that cannot be what the user meant."""

from __future__ import annotations

import contextlib
import copy
import weakref
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from torchrl_kl._tensordict import as_tuple, expand_right, sum_action_dims
from torchrl_kl.actors.frozen import FrozenActor
from torchrl_kl.actors.policy import Acting, Borrowed

_ADVANTAGES = {"advantage", "value_target"}
_SUMMED = "steps_to_next_obs"  # over how many steps MultiStep has added up a reward
_FIRST_STEPS = 32  # of an env, over which the first KL is averaged; or those of the first batch
_GAP = 0.02  # nats per step, where 0 is expected: the same parameters give the same log-prob
_INFINITE = 1e3  # nats, of an action that the policy cannot have drawn
_HUGE = 0.1  # nats per step, where 0 is expected: a trained policy is usually held below that


def refuse_sums(tensordict: TensorDictBase, *, advantages: bool = True) -> None:
    """RuntimeError if rewards of a batch were added up before they are penalized.

    By MultiStep, or to advantages, of which a batch that workers have penalized may have some.
    """
    found = {as_tuple(key)[-1]: key for key in tensordict.keys(True, True)}
    added = found.keys() & _ADVANTAGES if advantages else None
    if added:
        raise RuntimeError(
            f"the batch has {found[min(added)]!r} already, computed from rewards without the "
            'penalty: compute advantages after the KL transforms, or drop them (`exclude("advantage'
            '", "value_target")`) if they will be computed again.'
        )
    if _SUMMED in found and bool((tensordict.get(found[_SUMMED]) > 1).any()):
        raise RuntimeError(
            f"the batch has {found[_SUMMED]!r} above 1: its rewards are sums of several steps, of "
            "which the KL of the first one alone would be subtracted. Use MultiStep after the KL "
            "transforms: on the batches that a collector returns, or in a replay buffer to which "
            "the stack is appended last, with `invert=True`."
        )


class FirstSteps:
    """What the first steps show: weights loaded too late, actions changed after they were drawn."""

    def __init__(self, policy: nn.Module, acting: Acting, reference: FrozenActor, *, copied: bool):
        # Not the policy itself: it must not be saved, moved or copied with a transform.
        self._policy: Any = weakref.ref(policy)
        self.copied = [copied]  # whether the reference is a copy of it: the KL then begins at 0
        self._recorded, self._state_keys = reference.recorded, reference.state_keys
        self._forgets = False  # whether the data lacks the state of a recurrent policy
        # An actor of another class may draw and score as it likes.
        self._dist_module = acting.dist_module if acting.is_plain(policy) else Borrowed(None)
        self._k1, self._size, self._count = 0.0, 0.0, 0
        self._gap, self._draws = 0.0, 0

    def __deepcopy__(self, memo: dict) -> FirstSteps:
        other = copy.copy(self)  # with the same list: no copy expects what one no longer does
        other._policy = self._policy
        return other

    def __getstate__(self) -> dict[str, Any]:
        # In another process nobody knows the policy.
        return vars(self) | {"_policy": None}

    def add_draws(
        self, tensordict: TensorDictBase, mask: Tensor | None = None, *, whole_batch: bool = False
    ) -> None:
        """Compares recorded log-probs with those of the recorded actions, in some steps (*B).

        `mask`: True where a step counts, (*B). Nothing is compared where the policy did not record
        the parameters of its distribution. Also notes whether the policy's state is missing.
        """
        self._forgets |= any(tensordict.get(key, None) is None for key in self._state_keys)
        module, shape = self._dist_module.held, tensordict.batch_size
        if module is None:
            return
        keys = [*module.in_keys, *module.dist_sample_keys, *self._recorded.keys]
        if any(not isinstance(tensordict.get(key, None), Tensor) for key in keys):
            return
        steps = tensordict.select(*keys).detach()
        if whole_batch and shape:  # of which a few will do
            counted = torch.ones(shape, dtype=torch.bool, device=tensordict.device)
            counted = counted if mask is None else expand_right(mask, shape)
            steps, mask = steps[counted.nonzero()[: 8 * _FIRST_STEPS].unbind(-1)], None
        recorded: Any = self._recorded.read(steps)  # (N, *A)
        # What cannot be compared is another's matter: parameters that are not valid, or options of
        # the distribution, such as bounds, that fit only all envs of a step.
        with contextlib.suppress(Exception), torch.no_grad():
            log_prob = module.get_dist(steps).log_prob(steps.get(module.dist_sample_keys[0]))
            gap = (recorded - sum_action_dims(log_prob, recorded.shape)).abs().nan_to_num()
            if gap.shape != recorded.shape:
                return
            if mask is not None:
                gap = gap[expand_right(mask, gap.shape)]
            self._gap += float(gap.clamp_max(_INFINITE).sum())
            self._draws += gap.numel()

    def add(self, k1: Tensor, reference: nn.Module, *, whole_batch: bool) -> str | None:
        """Adds the k1 of some steps, (N,); "" if there is no doubt, None if more are needed."""
        self._k1 += float(k1.detach().sum())
        self._size += float(k1.detach().abs().sum())
        self._count += k1.numel()
        if not self._count or (self._count < _FIRST_STEPS and not whole_batch):
            return None
        gap = self._gap / max(self._draws, 1)
        mean, size = self._k1 / self._count, self._size / self._count
        if gap > _GAP:
            return (
                f"in the first {self._draws} steps the log-probs that the policy recorded differ "
                f"by {gap:.2g} nats per step from those of the recorded actions. Were the actions "
                "changed after they were drawn (exploration noise, epsilon-greedy, `safe=True`, "
                "rounding at a bound of a TanhNormal), or is `actor` not the policy that drew "
                "them (another temperature or mask)? The KL is off by up to as much."
            )
        policy: nn.Module | None = self._policy and self._policy()
        if policy is None or not self.copied[0] or not size > _GAP:
            return ""
        first = f"the first {self._count} steps have a KL of {mean:.2g} nats per step, although "
        if _same_weights(policy, reference):
            return first + _FORGETS if self._forgets else ""
        return first + _OLD_WEIGHTS if mean > _HUGE else ""


_FORGETS = (
    "policy and reference have the same weights, and the data lacks the recurrent state of the "
    "policy. In an env without a place for it, TorchRL's recurrent modules begin anew at each "
    "step: add `make_tensordict_primer()` of the module to the env's transforms."
)
_OLD_WEIGHTS = (
    "the reference is a copy of the policy: the policy's weights have changed since it was "
    "copied. Load weights into the policy before building the KL transform. If you mean the KL to "
    "the old weights, say so with `reference=`."
)


def _same_weights(policy: nn.Module, reference: nn.Module) -> bool:
    pairs = zip(policy.parameters(), reference.parameters(), strict=False)
    return all(torch.equal(own.detach().to(other), other.detach()) for own, other in pairs)
