"""From actions to a KL: a `Scorer` gives the log-probs, `measure` the KL of each step."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from multiprocessing import parent_process
from typing import Any, NamedTuple

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor, nn
from torchrl.envs import EnvBase

from torchrl_kl.actors.frozen import FrozenActor
from torchrl_kl.actors.policy import Acting
from torchrl_kl.batches import expand_right, find_time_dim, of_values
from torchrl_kl.functional.estimators import ESTIMATORS
from torchrl_kl.keys import RECORD_LOG_PROB, MissingKeyError, ResolvedKeys, as_tuple, existing_keys
from torchrl_kl.transforms.estimates import Estimate

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
