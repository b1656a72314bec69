"""One path from log-prob to reward: score, measure, penalize. Each passes on a `KLStep`."""

from __future__ import annotations

import warnings
import weakref
from multiprocessing import parent_process
from typing import Any, cast

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor, nn
from torchrl.data import Composite, TensorSpec
from torchrl.envs import EnvBase, GymWrapper, TransformedEnv

from torchrl_kl.actors.frozen import FrozenActor
from torchrl_kl.actors.policy import Acting
from torchrl_kl.batches import AUTORESET_KEY, counted, expand_right, find_time_dim, of_values
from torchrl_kl.functional.estimators import kl_k1
from torchrl_kl.functional.numbers import widened, working_dtype
from torchrl_kl.keys import (
    RECORD_LOG_PROB,
    MissingKeyError,
    ResolvedKeys,
    as_tuple,
    existing_keys,
)
from torchrl_kl.transforms.base import KLTransform, add_spec
from torchrl_kl.transforms.estimates import Estimate, KLStep

_FIRST_STEPS = 32  # of an env, over which the first KL is averaged; else of the first batch
_HUGE = 0.1  # nats per step, where 0 is expected: a trained policy is usually held below that


def score_env_step(
    reference: FrozenActor,
    acting: Acting,
    tensordict: TensorDictBase,
    estimate: Estimate | None,
    env: EnvBase,
) -> KLStep:
    """Scores the action of an env step (*B), on the policy's side of all action transforms."""
    log_prob = reference.recorded.read(tensordict)  # (*B, *A)
    if log_prob is None:
        _refuse_unrecorded(reference, acting, tensordict, env)
        _refuse_parallel_worker(tensordict)
        # A random policy: the KL is 0, and a recurrent reference keeps its state.
        shape = reference.recorded.batch_size(tensordict)
        zeros = torch.zeros(shape, dtype=reference.dtype, device=tensordict.device)
        states = [tensordict.get(key) for key in reference.own_state_keys]
        return KLStep(None, zeros, drawn=False, states=states)
    score = reference.score(tensordict, timed=False)
    # The outputs, such as logits (*B, V), are dropped but for what the estimate needs.
    params = estimate and estimate.of_reference(tensordict, score, reference.actor)
    return KLStep(log_prob, score.log_prob, None, acting.samples(), params, score.states)


def score_batch(
    reference: FrozenActor,
    tensordict: TensorDictBase,
    estimate: Estimate | None,
    time_dim: int | None,
    *,
    mask: Tensor | None,
    fake: bool = False,
    acting: Acting | None = None,
) -> KLStep:
    """Scores a batch (*B): in one pass along time, or step by step where no dimension is time.

    `mask`: True where an agent acts and its step counts, (*B, *A).
    """
    timed = find_time_dim(tensordict, time_dim) is not None
    log_prob = reference.recorded.require(tensordict)
    log_probs, params = [], []
    # The outputs of a pass, such as logits (rows, T, V), are dropped before the next rows.
    # TensorDict does not split an empty batch.
    chunk = reference.chunk_size if tensordict.batch_size.numel() and tensordict.ndim else None
    for rows in [tensordict] if chunk is None else tensordict.split(chunk):
        score = reference.score(rows, timed=timed, fake=fake)
        if estimate is not None:
            params.append(estimate.of_reference(rows, score, reference.actor))
        log_probs.append(score.log_prob)
    ref_log_prob = _join(log_probs)  # (*B, *A)
    if fake:
        # A collector may make zeros to learn the keys; the log-prob of an action 0 can be -inf.
        ref_log_prob = torch.zeros_like(ref_log_prob)
    elif acting is not None:
        random = acting.random_steps(tensordict, log_prob, mask)
        if random is not None:
            _warn_of_random_steps(random)
            mask = ~random if mask is None else mask & ~expand_right(random, mask.shape)
    return KLStep(log_prob, ref_log_prob, mask, of_reference=_join(params))


def counted_steps(tensordict: TensorDictBase, keys: ResolvedKeys, fake: bool) -> Tensor | None:
    """True where an agent acts and its step counts, (*B, *A); fake data do not count."""
    if fake:
        return torch.zeros(tensordict.batch_size, dtype=torch.bool, device=tensordict.device)
    return counted(tensordict, keys)


def without_random(
    next_tensordict: TensorDictBase, keys: ResolvedKeys, mask: Tensor | None
) -> Tensor | None:
    """The mask (*B, *A) without steps whose actions were not drawn, if a part says so."""
    not_drawn = next_tensordict.get(keys.not_drawn, None)  # (*B, *A, 1)
    if not_drawn is None or not not_drawn.any():
        return mask
    drawn = ~not_drawn.flatten(next_tensordict.batch_dims).any(-1)
    return drawn if mask is None else mask & expand_right(drawn, mask.shape)


def _join(parts: list[Any]) -> Any:
    # Tensors or tensordicts along dimension 0; without a copy if there is only one.
    if not parts or parts[0] is None:
        return None
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def measure(
    step: KLStep, tensordict: TensorDictBase, estimate: Estimate | None, *, sum_agents: bool = False
) -> KLStep:
    """Adds k1 and the estimate; both are 0 outside the mask and where no policy ran."""
    ref_log_prob: Any = step.ref_log_prob
    if step.log_prob is None:
        values = [widened(torch.zeros_like(ref_log_prob))] * (1 if estimate is None else 2)
    else:
        log_prob = step.log_prob.detach()
        mask = None if step.mask is None else expand_right(step.mask, log_prob.shape)
        values = [kl_k1(log_prob, ref_log_prob, mask=mask)]
        if estimate is not None:
            values.append(estimate(tensordict, step._replace(log_prob=log_prob, mask=mask)))
    if sum_agents:
        values = [value.flatten(tensordict.batch_dims).sum(-1) for value in values]
        step = step._replace(mask=of_values(step.mask, (*values[0].shape, 1)))
    # TorchRL's rewards have one more dimension than its log-probs.
    kl, *estimates = [value.unsqueeze(-1) for value in values]
    return step._replace(kl=kl, estimate=estimates[0] if estimates else None)


def penalize(kl: Tensor, reward: Tensor, coeff: Tensor) -> tuple[Tensor, Tensor]:
    """The penalized reward `reward - coeff * kl`, and the coefficient of each entry."""
    # `coeff` is 0-dim float64; the product is taken in the reward's dtype.
    applied = torch.empty_like(reward).copy_(coeff)
    penalized = torch.addcmul(reward, applied, kl.to(reward.dtype), value=-1)
    # A coefficient of 0 subtracts nothing: 0 * inf would be NaN.
    return torch.where(applied.bool(), penalized, reward), applied


def check_reward(
    kl: torch.Size, reward: Tensor | TensorSpec, key: NestedKey, *, in_env: bool = False
) -> None:
    """ValueError or TypeError for a reward that no KL of shape `kl` can be subtracted from."""
    shape = reward.shape
    if kl != shape:
        n, fix = len(shape) - 1, ""
        if shape[n:] == (1,) and kl[:n] == shape[:n] and kl.numel() > shape.numel():
            fix = "sum it over agents for a shared reward (`sum_agents=True`), and "
        raise ValueError(
            f"the KL and {key!r} must have the same shape, got {tuple(kl)} and {tuple(shape)}: the "
            f"KL would be broadcast; {fix}give the reward of an action one trailing dimension, of "
            "size 1 (the sum, before the KL transforms, if the action takes several steps of the "
            "env)."
        )
    dtype = cast(torch.dtype, reward.dtype)
    # A batch's reward becomes float32; the spec of an env says what it is.
    if not dtype.is_floating_point or (in_env and working_dtype(dtype) != dtype):
        raise TypeError(
            f"{key!r} must be floating point, in an env float32 or float64, got {dtype}: the "
            "penalty would be rounded away. Cast the reward before the penalty, in an env with "
            f"DTypeCastTransform({dtype}, torch.float32, in_keys=[{key!r}])."
        )


def _refuse_unrecorded(
    reference: FrozenActor, acting: Acting, tensordict: TensorDictBase, env: EnvBase
) -> None:
    """A policy that ran without recording its log-prob must not pass for a random one."""
    keys, recorded = tensordict.keys(True, True), reference.recorded
    found = [key for key in (*acting.trace_keys, *recorded.keys) if key in keys]
    traces = [key for key in found if key not in env.action_keys]
    if traces:
        missing = recorded.missing(tensordict)[0]
        raise MissingKeyError(
            f"the policy ran (its {traces} are there) but recorded no {missing!r}: "
            f"{RECORD_LOG_PROB} The data have {existing_keys(tensordict)}."
        )


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


def _warn_of_random_steps(random: Tensor) -> None:
    # Python shows a warning of one place only once.
    warnings.warn(
        f"in {int(random.sum())} of {random.numel()} steps the log-prob and all that the policy "
        "writes is 0, as in the frames of a random policy (`init_random_frames`). Such steps are "
        "neither penalized nor counted. Put the KL transforms into the env, which tells them "
        "apart, to be without this warning.",
        stacklevel=3,
    )


class _UnsavedPolicy(weakref.ref):
    """A policy that is not saved, moved or copied with a transform; nothing in other processes."""

    def __deepcopy__(self, memo: dict) -> _UnsavedPolicy:
        return self

    def __reduce__(self) -> tuple:
        return type(None), ()


class ScoringTransform(KLTransform):
    """Base of the transforms that score actions under a reference."""

    reference: FrozenActor
    acting: Acting
    estimate: Estimate | None
    time_dim: int | None
    _policy: Any = None  # of which the reference is a copy that was not yet used
    _first = (0.0, 0)  # of the first steps: the sum of k1, and their number

    def watch_first_use(self, policy: nn.Module) -> None:
        """Will warn if the policy's weights have changed when this is used."""
        self._policy = _UnsavedPolicy(policy)
        self.register_load_state_dict_post_hook(_expect_any)  # a run that goes on

    def carried(self) -> list[NestedKey]:
        """The entries that go on from step to step."""
        late = [AUTORESET_KEY] if ignores_after_end(self.env) else []
        return [*super().carried(), *self.reference.own_state_keys, *late]

    def _reset(self, tensordict, tensordict_reset):
        """Also marks the rows whose next step only resets them."""
        tensordict_reset = super()._reset(tensordict, tensordict_reset)
        if ignores_after_end(self.env):  # but not if all rows are reset, which it does at once
            shape = (*tensordict_reset.batch_size, 1)
            mark = torch.full(shape, not self._was_reset, device=tensordict_reset.device)
            tensordict_reset.set(AUTORESET_KEY, mark)
        return tensordict_reset

    def update_reference(self, source: nn.Module, tau: float = 1.0) -> None:
        """Moves the reference towards `source`; see `FrozenActor.update_reference`."""
        self.reference.update_reference(source, tau)
        _expect_any(self)

    def score_batch(self, tensordict: TensorDictBase, fake: bool) -> KLStep:
        """Scores a batch (*B); see the function of this name."""
        step = score_batch(
            self.reference,
            tensordict,
            self.estimate,
            self.time_dim,
            mask=counted_steps(tensordict, self.keys, fake),
            fake=fake,
            acting=self.acting,
        )
        self.check_first_use(step)
        return step

    def check_first_use(self, step: KLStep, *, enough: int = 1) -> None:
        """Warns once if the policy's weights have changed between the copy and its first use."""
        if self._policy is None or step.log_prob is None or torch.compiler.is_compiling():
            return
        policy = self._policy()
        k1 = step.log_prob.detach() - cast(Tensor, step.ref_log_prob).detach()
        k1 = k1 if step.mask is None else k1[expand_right(step.mask, k1.shape)]
        total, count = self._first = self._first[0] + float(k1.sum()), self._first[1] + k1.numel()
        if count < enough:
            return
        _expect_any(self)
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

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        # A Compose inverts from last to first: action transforms before this one have not yet
        # turned the policy's action into the env's.
        env = self.env
        if env is not None:
            score = score_env_step(self.reference, self.acting, tensordict, self.estimate, env)
            self.check_first_use(score, enough=_FIRST_STEPS)
            vars(self)["_scored"] = score  # until `_step`; `nn.Module.__setattr__` takes longer
        return super()._inv_call(tensordict)

    def _take_score(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> KLStep:
        """The score of this env step; writes its next recurrent states, and what was not drawn."""
        # Rows may be skipped, which a transform before this one may decide after the score.
        step: KLStep = vars(self).pop("_scored")._replace(mask=counted(tensordict, self.keys))
        for key, state in zip(self.reference.own_state_keys, step.states, strict=True):
            next_tensordict.set(key, state)
        if (mark := tensordict.get(AUTORESET_KEY, None)) is not None:
            next_tensordict.set(AUTORESET_KEY, torch.zeros_like(mark))
        if not self.record:
            return step
        # Of the trajectory so far; a reset sets it to False.
        not_drawn = tensordict.get(self.keys.not_drawn, None)
        if not_drawn is None or not step.drawn:
            shape = (*self.keys.recorded.batch_size(tensordict), 1)
            full = torch.full(shape, not step.drawn, device=tensordict.device)
            not_drawn = full if not_drawn is None else not_drawn | full
        next_tensordict.set(self.keys.not_drawn, not_drawn)
        return step

    def declare_reference(self, spec: Composite) -> None:
        """Adds the reference's recurrent state, and what was not drawn, to an observation spec."""
        self.claim(spec, self.reference.own_state_keys)
        batch_size = self.parent_env.batch_size
        for key, leaf in self.reference.state_specs().items():
            add_spec(spec, key, (*batch_size, *leaf.shape), leaf.dtype, batch_size)
        if ignores_after_end(self.parent_env):
            add_spec(spec, AUTORESET_KEY, (*batch_size, 1), torch.bool, batch_size)
        if self.record:
            shape = self.log_prob_shape()
            add_spec(spec, self.keys.not_drawn, (*shape, 1), torch.bool, shape)


def ignores_after_end(env: EnvBase | None) -> bool:
    """Whether it is a vectorized Gymnasium env that ignores the action of the step after an end."""
    base = env.base_env if isinstance(env, TransformedEnv) else env
    mode = getattr(base, "autoreset_mode", None) if isinstance(base, GymWrapper) else None
    return getattr(mode, "name", None) == "NEXT_STEP"


def _expect_any(transform: ScoringTransform, _: object = None) -> None:
    transform._policy = None
