"""From actions to a KL: scoring gives the log-probs, `measure` the KL of each step."""

from __future__ import annotations

import warnings
import weakref
from abc import ABC
from collections.abc import Sequence
from multiprocessing import parent_process
from typing import Any, NamedTuple

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor, nn
from torchrl.data import Composite
from torchrl.envs import EnvBase

from torchrl_kl.actors.frozen import FrozenActor
from torchrl_kl.actors.policy import Acting
from torchrl_kl.actors.reading import require_recording
from torchrl_kl.batches import AUTORESET_KEY, expand_right, find_time_dim, of_values
from torchrl_kl.functional.estimators import ESTIMATORS
from torchrl_kl.keys import (
    RECORD_LOG_PROB,
    KLKeys,
    MissingKeyError,
    ResolvedKeys,
    as_tuple,
    existing_keys,
)
from torchrl_kl.transforms.base import KLTransform, Leaf, Steps
from torchrl_kl.transforms.estimates import Estimate, Estimator, make_estimate

_FIRST_STEPS = 32  # of an env, over which the first KL is averaged; else of the first batch
_HUGE = 0.1  # nats per step, where 0 is expected: a trained policy is usually held below that


class Scored(NamedTuple):
    """Log-probs of the actions of steps (*B), nats, (*B, *A); *A: the agents of nested actions."""

    log_prob: Tensor  # under the policy
    ref_log_prob: Tensor  # under the reference
    estimates: Sequence[Tensor]  # (*B, *A), one if the estimator is "exact" or "top_k"
    drawn: bool = True  # in an env step: whether the policy drew the actions
    states: Sequence[Tensor] = ()  # in an env step: the next recurrent states of the reference


class Measured(NamedTuple):
    """The KL of steps, nats: (*B, *A, 1), or (*B, 1) where agents are summed."""

    kl: Tensor  # k1, which is subtracted
    fed: Tensor  # what the controller is fed: the estimate, or else k1
    mask: Tensor | None  # True where a step counts, (*B, *A) or (*B); None where all do
    log_probs: dict[NestedKey, Tensor]  # from which it came, if this is known, by name


class Scorer(nn.Module):
    """Scores the actions of a policy under a reference, and makes an `estimate` or none.

    `copied`: the policy, if the reference is a copy of it that was not yet used.
    """

    def __init__(
        self,
        reference: FrozenActor,
        acting: Acting,
        estimate: Estimate | None = None,
        *,
        time_dim: int | None = None,
        copied: nn.Module | None = None,
    ):
        super().__init__()
        self.reference, self.acting, self.estimate = reference, acting, estimate
        self.time_dim = time_dim
        self.copied: Any = None if copied is None else _UnsavedPolicy(copied)
        self._first = (0.0, 0)  # of the first steps: the sum of k1, and their number

    def env_step(self, tensordict: TensorDictBase, env: EnvBase) -> Scored:
        """Scores the action of an env step (*B), on the policy's side of all action transforms."""
        reference = self.reference
        log_prob = reference.recorded.read(tensordict)  # (*B, *A)
        if log_prob is None:
            self._refuse_unrecorded(tensordict, env)
            _refuse_parallel_worker(tensordict)
            # A random policy: the KL is 0, and a recurrent reference keeps its state.
            shape = reference.recorded.batch_size(tensordict)
            zeros = torch.zeros(shape, dtype=reference.dtype, device=tensordict.device)
            states = [tensordict.get(key) for key in reference.own_state_keys]
            return Scored(zeros, zeros, [] if self.estimate is None else [zeros], False, states)
        score = reference.score(tensordict, timed=False)
        # The outputs, such as logits (*B, V), are dropped but for the estimate.
        estimates = self._estimate(tensordict, log_prob, score, None)
        drawn = self.acting.samples()
        scored = Scored(log_prob, score.log_prob, estimates, drawn, score.states)
        self._check_first_use(scored, None, enough=_FIRST_STEPS)
        return scored

    def batch(self, tensordict: TensorDictBase, mask: Tensor | None) -> Scored:
        """Scores a batch (*B): in one pass along time, or step by step where no dimension is time.

        `mask`: True where a step counts, (*B, *A). Where none does, data may be of any kind.
        """
        reference, empty = self.reference, mask is not None and not mask.any()
        timed = find_time_dim(tensordict, self.time_dim) is not None
        log_prob = reference.recorded.require(tensordict)
        # The outputs of a pass, such as logits (rows, T, V), are dropped before the next rows.
        # TensorDict does not split an empty batch.
        chunk = reference.chunk_size if tensordict.batch_size.numel() and tensordict.ndim else None
        if chunk is None:
            parts, log_probs, masks = [tensordict], [log_prob], [mask]
        else:
            parts, log_probs = tensordict.split(chunk), log_prob.split(chunk)
            masks = [None] * len(parts) if mask is None else mask.split(chunk)
        found = []
        for rows, own, counts in zip(parts, log_probs, masks, strict=True):
            score = reference.score(rows, timed=timed, fake=empty)
            found.append([score.log_prob, *self._estimate(rows, own, score, counts)])
        # (*B, *A); without a copy if there is only one.
        ref_log_prob, *estimates = (
            each[0] if len(each) == 1 else torch.cat(each) for each in zip(*found, strict=True)
        )
        if not empty:
            self.acting.refuse_random_steps(tensordict, log_prob, ref_log_prob, mask)
        else:
            # A collector may make zeros to learn the keys; the log-prob of an action 0 can be -inf.
            ref_log_prob = torch.zeros_like(ref_log_prob)
        scored = Scored(log_prob, ref_log_prob, estimates)
        self._check_first_use(scored, mask)
        return scored

    def _estimate(
        self, rows: TensorDictBase, log_prob: Tensor, score: Any, mask: Tensor | None
    ) -> list[Tensor]:
        if self.estimate is None:
            return []
        if mask is not None:
            mask = expand_right(mask, log_prob.shape)
        actor = self.reference.actor
        with torch.no_grad():
            return [self.estimate.compute(rows, log_prob.detach(), score, actor, mask)]

    def _load_from_state_dict(self, *args):
        self.copied = None  # a run that goes on
        super()._load_from_state_dict(*args)

    def _check_first_use(self, scored: Scored, mask: Tensor | None, *, enough: int = 1) -> None:
        """Warns once if the policy's weights have changed between the copy and its first use."""
        if self.copied is None or torch.compiler.is_compiling():
            return
        policy = self.copied()
        k1 = scored.log_prob.detach() - scored.ref_log_prob.detach()
        k1 = k1 if mask is None else k1[expand_right(mask, k1.shape)]
        total, count = self._first = self._first[0] + float(k1.sum()), self._first[1] + k1.numel()
        if count < enough:
            return
        self.copied = None
        weights = [] if policy is None else policy.parameters()
        pairs = zip(weights, self.reference.actor.parameters(), strict=False)
        equal = (torch.equal(own.detach().to(other), other.detach()) for own, other in pairs)
        if total >= _HUGE * count and not all(equal):
            warnings.warn(
                f"the first {count} steps have a KL of {total / count:.2g} nats per step, although "
                "the reference is a copy of the policy: the policy's weights have changed since it "
                "was copied. Load weights into the policy before building the KL transform. If you "
                "mean the KL to the old weights, say so with `reference=`.",
                stacklevel=3,
            )

    def _refuse_unrecorded(self, tensordict: TensorDictBase, env: EnvBase) -> None:
        """A policy that ran without recording its log-prob must not pass for a random one."""
        keys, recorded = tensordict.keys(True, True), self.reference.recorded
        found = [key for key in (*self.acting.trace_keys, *recorded.keys) if key in keys]
        traces = [key for key in found if key not in env.action_keys]
        if traces:
            missing = recorded.missing(tensordict)[0]
            raise MissingKeyError(
                f"the policy ran (its {traces} are there) but recorded no {missing!r}: "
                f"{RECORD_LOG_PROB} The data have {existing_keys(tensordict)}."
            )


class _UnsavedPolicy(weakref.ref):
    """A policy that is not saved, moved or copied with a transform; nothing in other processes."""

    def __deepcopy__(self, memo: dict) -> _UnsavedPolicy:
        return self

    def __reduce__(self) -> tuple:
        return type(None), ()


def _refuse_parallel_worker(tensordict: TensorDictBase) -> None:
    """RuntimeError in a worker of a ParallelEnv, which receives no log-probs."""
    if parent_process() is None:
        return
    # Only there does a step hold a mask "_reset" in memory that is shared with another process.
    # A worker without buffers receives shared memory too, but no such mask.
    masks = [key for key in tensordict.keys(True, True) if as_tuple(key)[-1] == "_reset"]
    if any(m.device.type == "cpu" and m.is_shared() for m in map(tensordict.get, masks)):
        raise RuntimeError(
            "the KL transforms are inside the workers of a ParallelEnv, where no log-prob of the "
            "policy arrives: put them around it, TransformedEnv(ParallelEnv(...), stack), or pass "
            "`use_buffers=False` to ParallelEnv."
        )


def measure(
    scored: Scored,
    mask: Tensor | None,
    keys: ResolvedKeys,
    estimator: str,
    *,
    sum_to: int | None = None,
) -> Measured:
    """The KL of each step, 0 outside the mask (*B, *A); `sum_to`: over agents, to so many dims."""
    log_prob, ref_log_prob, estimates, *_ = scored
    counts = None if mask is None else expand_right(mask, log_prob.shape)
    names = ["k1"] if estimates else dict.fromkeys(("k1", estimator))
    values = [ESTIMATORS[name](log_prob.detach(), ref_log_prob, mask=counts) for name in names]
    values += [each if counts is None else torch.where(counts, each, 0.0) for each in estimates]
    if sum_to is not None:
        values = [value.flatten(sum_to).sum(-1) for value in values]
        mask = of_values(mask, (*values[0].shape, 1))
    # TorchRL's rewards have one more dimension than its log-probs.
    values = [value.unsqueeze(-1) for value in values]
    sources = {keys.recorded.name: log_prob, keys.ref_log_prob: ref_log_prob}
    return Measured(values[0], values[-1], mask, sources)


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

    def begin_step(self, tensordict: TensorDictBase, env: EnvBase) -> None:
        """Also scores the action, on the policy's side."""
        # A Compose inverts from last to first: action transforms before this one have not yet
        # turned the policy's action into the env's.
        self._scored = self.scorer.env_step(tensordict, env)
        super().begin_step(tensordict, env)

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
    *,
    time_dim: int | None,
    is_copy: bool,
    sum_agents: bool = False,
) -> tuple[Scorer, ResolvedKeys]:
    """A scorer for the actions of `actor`, and all keys; `is_copy`: whether `frozen` is one."""
    if keys.log_prob is None:
        require_recording(actor)
    resolved = keys.resolve(frozen.log_prob_key, sum_agents=sum_agents)
    frozen.name_states(resolved.ref_log_prob)
    estimate, acting = make_estimate(estimator, actor, resolved), Acting.of(actor, frozen.recorded)
    copied = actor if is_copy else None
    return Scorer(frozen, acting, estimate, time_dim=time_dim, copied=copied), resolved
