"""The transforms that score actions: what TorchRL sees of a `Scorer`."""

from abc import ABC
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torch import nn
from torchrl.data import Composite

from torchrl_kl.actors.frozen import FrozenActor
from torchrl_kl.actors.policy import Acting
from torchrl_kl.actors.reading import require_recording
from torchrl_kl.batches import AUTORESET_KEY
from torchrl_kl.keys import KLKeys, ResolvedKeys
from torchrl_kl.transforms.base import KLTransform, Leaf, Steps
from torchrl_kl.transforms.estimates import Estimator, make_estimate
from torchrl_kl.transforms.scorer import Scored, Scorer


class ScoringTransform(KLTransform, ABC):
    """Base of the transforms that own a `Scorer`, in an env with the reference's state."""

    scorer: Scorer
    records = True  # whether it writes more than its result
    _scored: Scored | None = None  # of the action of an env step, until `_step`

    @property
    def reference(self) -> FrozenActor:
        """The frozen reference."""
        return self.scorer.reference

    @property
    def recorded_keys(self) -> list[NestedKey]:  # type: ignore[override]
        """What its estimate reads that the policy recorded."""
        estimate = self.scorer.estimate
        return [] if estimate is None else estimate.policy_keys

    def update_reference(self, source: nn.Module, tau: float = 1.0) -> None:
        """Moves the reference towards `source`; see `FrozenActor.update_reference`."""
        self.reference.update_reference(source, tau)
        self.scorer.copied = None

    def carried(self) -> list[NestedKey]:
        """The entries that go on from step to step."""
        late = [AUTORESET_KEY] if self.resets_late else []
        return [*super().carried(), *self.reference.own_state_keys, *late]

    def _reset(self, tensordict, tensordict_reset):
        """Also marks the rows whose next step only resets them."""
        tensordict_reset = super()._reset(tensordict, tensordict_reset)
        if self.resets_late:  # but not if all rows are reset, which it does at once
            shape = (*tensordict_reset.batch_size, 1)
            mark = torch.full(shape, not self._was_reset, device=tensordict_reset.device)
            tensordict_reset.set(AUTORESET_KEY, mark)
        return tensordict_reset

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        # A Compose inverts from last to first: action transforms before this one have not yet
        # turned the policy's action into the env's.
        if (env := self.env) is not None:
            self._scored = self.scorer.env_step(tensordict, env)
        return super()._inv_call(tensordict)

    def score(self, steps: Steps) -> Scored:
        """The log-probs; of an env step, also writes the next states, and what was not drawn."""
        score, self._scored = self._scored, None
        if steps.moves is not None or score is None:
            return self.scorer.batch(steps.data, steps.mask)
        tensordict, next_tensordict = steps.data, steps.following
        for key, state in zip(self.reference.own_state_keys, score.states, strict=True):
            next_tensordict.set(key, state)
        if (mark := tensordict.get(AUTORESET_KEY, None)) is not None:
            next_tensordict.set(AUTORESET_KEY, torch.zeros_like(mark))
        if self.records:
            # Of the trajectory so far; a reset sets it to False.
            not_drawn = tensordict.get(self.keys.not_drawn, None)
            if not_drawn is None or not score.drawn:
                shape = (*score.log_prob.shape, 1)
                full = torch.full(shape, not score.drawn, device=tensordict.device)
                not_drawn = full if not_drawn is None else not_drawn | full
            next_tensordict.set(self.keys.not_drawn, not_drawn)
        return score

    def leaves(self, spec: Composite) -> dict[NestedKey, Leaf]:
        """The reference's recurrent state, and what was not drawn."""
        batch_size, shape = self.parent_env.batch_size, self.log_prob_shape()
        leaves: dict[NestedKey, Leaf] = {
            key: ((*batch_size, *leaf.shape), leaf.dtype)
            for key, leaf in self.reference.state_specs().items()
        }
        if self.resets_late:
            leaves[AUTORESET_KEY] = ((*batch_size, 1), torch.bool)
        if self.records:
            leaves[self.keys.not_drawn] = ((*shape, 1), torch.bool)
        return leaves


def make_scorer(
    actor: nn.Module,
    frozen: FrozenActor,
    keys: KLKeys,
    estimator: Estimator,
    is_copy: bool,
    *,
    sum_agents: bool = False,
    time_dim: int | None = None,
) -> tuple[Scorer, ResolvedKeys]:
    """A scorer for the actions of `actor`, and all keys; `is_copy`: whether `frozen` is one."""
    if keys.log_prob is None:
        require_recording(actor)
    resolved = keys.resolve(frozen.log_prob_key, sum_agents=sum_agents)
    frozen.name_states(resolved.ref_log_prob)
    estimate = make_estimate(estimator, actor, resolved)
    options: Any = {"time_dim": time_dim, "copied": actor if is_copy else None}
    return Scorer(frozen, Acting.of(actor, frozen.recorded), estimate, **options), resolved
