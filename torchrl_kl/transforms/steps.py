"""One path from log-prob to reward: score, measure, penalize. Each passes on a `KLStep`."""

from __future__ import annotations

import warnings
from multiprocessing import parent_process
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor, nn
from torchrl.data import Composite
from torchrl.envs import EnvBase

from torchrl_kl import _tensordict as td
from torchrl_kl.actors.frozen import FrozenActor
from torchrl_kl.actors.policy import Acting
from torchrl_kl.functional import kl_k1
from torchrl_kl.transforms.base import KLTransform
from torchrl_kl.transforms.doubts import FirstSteps
from torchrl_kl.transforms.estimates import Estimate, KLStep


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
        log_prob = reference.present_log_prob(tensordict, env_actions=env.action_keys)
    inputs = reference.inputs(tensordict)
    if log_prob is None:
        _refuse_unrecorded(reference, acting, tensordict, env)
        _refuse_parallel_worker(tensordict)
        # A random policy: the KL is 0, and a recurrent reference keeps its state.
        shape = reference.recorded.batch_size(tensordict)
        zeros = torch.zeros(shape, dtype=reference.dtype, device=tensordict.device)
        states = [inputs.get(key) for key in reference.own_state_keys]
        return KLStep(None, zeros, counted=False, states=states)
    score = reference.step(inputs)
    # The outputs, such as logits (*B, V), are dropped but for what the estimate needs.
    kept = estimate and estimate.of_reference(tensordict, score.outputs, reference.actor)
    counted = acting.samples()
    return KLStep(log_prob, score.log_prob, None, counted, kept, score.states)


def score_batch(
    reference: FrozenActor,
    tensordict: TensorDictBase,
    estimate: Estimate | None,
    time_dim: int | None,
    *,
    fake: bool,
    acting: Acting | None = None,
) -> KLStep:
    """Scores a batch (*B): in one pass along time, or step by step where no dimension is time."""
    timed = td.find_time_dim(tensordict, time_dim) is not None
    log_prob = reference.recorded.read(tensordict)
    if log_prob is None:
        log_prob = reference.present_log_prob(tensordict, timed=timed)
    if log_prob is None:
        log_prob = reference.recorded.require(tensordict)
    log_probs, kept, states = [], [], []
    # The outputs of a pass, such as logits (rows, T, V), are dropped before the next rows.
    # TensorDict does not split an empty batch.
    chunk = reference.chunk_size if tensordict.batch_size.numel() and tensordict.ndim else None
    for rows in [tensordict] if chunk is None else tensordict.split(chunk):
        score = reference.trajectories(rows) if timed else reference.step(reference.inputs(rows))
        if estimate is not None:
            kept.append(estimate.of_reference(rows, score.outputs, reference.actor))
        log_probs.append(score.log_prob)
        states = score.states  # a recurrent reference scores all rows at once
    mask = td.counted_steps(tensordict, fake)
    told = None if fake else acting
    random = None if told is None else told.random_steps(tensordict, log_prob, mask)
    ref_log_prob = _join(log_probs)  # (*B, *A)
    # A collector may make zeros to learn the keys; the log-prob of an action 0 can be -inf.
    ref_log_prob = torch.zeros_like(ref_log_prob) if fake else ref_log_prob
    step = KLStep(log_prob, ref_log_prob, mask, True, _join(kept), states)
    return step if random is None else step._replace(valid=~random)


def _join(parts: list[Any]) -> Any:
    # Tensors or tensordicts along dimension 0; without a copy if there is only one.
    if not parts or parts[0] is None:
        return None
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def measure(
    step: KLStep, tensordict: TensorDictBase, estimate: Estimate | None, *, sum_agents: bool = False
) -> KLStep:
    """Adds k1 and the estimate; both are 0 outside the mask and where no policy ran."""
    if step.log_prob is None:
        values = [torch.zeros_like(step.ref_log_prob)] * (1 if estimate is None else 2)
    else:
        log_prob, mask = step.log_prob.detach(), step.mask
        if mask is not None:
            mask = td.expand_right(mask, log_prob.shape)  # (*B) to (*B, *A)
        values = [kl_k1(log_prob, step.ref_log_prob, mask=mask)]
        if estimate is not None:
            values.append(estimate(tensordict, step._replace(log_prob=log_prob, mask=mask)))
    if sum_agents:
        values = [td.sum_action_dims(value, tensordict.batch_size) for value in values]
    # TorchRL's rewards have one more dimension than its log-probs.
    kl, *estimates = [value.unsqueeze(-1) for value in values]
    return step._replace(kl=kl, estimate=estimates[0] if estimates else None)


def penalize(kl: Tensor, reward: Tensor, coeff: Tensor, key: NestedKey) -> tuple[Tensor, Tensor]:
    """The penalized reward `reward - coeff * kl`, and the coefficient of each entry."""
    check_reward(kl, reward, key)
    # `coeff` is 0-dim float64; the product is taken in the reward's dtype.
    applied = torch.empty_like(reward).copy_(coeff)
    penalized = torch.addcmul(reward, applied, kl.to(reward.dtype), value=-1)
    # A coefficient of 0 subtracts nothing: 0 * inf would be NaN.
    return torch.where(applied.bool(), penalized, reward), applied


def check_reward(kl: Tensor, reward: Tensor, key: NestedKey) -> None:
    """ValueError or TypeError for a reward that no KL can be subtracted from."""
    check_reward_shape(kl.shape, reward.shape, key)
    if not reward.is_floating_point():
        raise TypeError(
            f"{key!r} must be floating point, got {reward.dtype}: the coefficient would be "
            "rounded to an integer. Cast the reward before the penalty."
        )


def check_reward_shape(kl: torch.Size, reward: torch.Size, reward_key: NestedKey) -> None:
    """ValueError unless KL and reward have the same shape."""
    if kl != reward:
        raise ValueError(
            f"the KL and {reward_key!r} must have the same shape, got {tuple(kl)} and "
            f"{tuple(reward)}: the KL would be broadcast; sum it over agents for a shared reward "
            "(`sum_agents=True`), and give the reward one trailing dimension, of size 1."
        )


def _refuse_unrecorded(
    reference: FrozenActor, acting: Acting, tensordict: TensorDictBase, env: EnvBase
) -> None:
    """A policy that ran without recording its log-prob must not pass for a random one."""
    keys, recorded = tensordict.keys(True, True), reference.recorded
    left = [key for key in (*acting.trace_keys, *recorded.keys) if key in keys]
    traces = [key for key in left if key not in env.action_keys]
    if traces:
        missing = recorded.missing(tensordict)[0]
        raise KeyError(
            f"the policy ran (its {traces} are there) but left no {missing!r}, got "
            f"{td.existing_keys(tensordict)}: {td.RECORD_LOG_PROB}"
        )


def _refuse_parallel_worker(tensordict: TensorDictBase) -> None:
    """RuntimeError in a worker of a ParallelEnv, which receives no log-probs."""
    if parent_process() is None:
        return
    # Only there does a step hold a mask "_reset" in memory that is shared with another process.
    # A worker without buffers receives shared memory too, but no such mask.
    masks = [key for key in tensordict.keys(True, True) if td.as_tuple(key)[-1] == "_reset"]
    if any(m.device.type == "cpu" and m.is_shared() for m in map(tensordict.get, masks)):
        raise RuntimeError(
            "the KL transforms are inside the workers of a ParallelEnv, where no log-prob of the "
            "policy arrives: put them around it, TransformedEnv(ParallelEnv(...), stack), or pass "
            "`use_buffers=False` to ParallelEnv."
        )


class ScoringTransform(KLTransform):
    """Base of the transforms that score actions under a reference."""

    reference: FrozenActor
    acting: Acting
    estimate: Estimate | None
    _first: FirstSteps | None = None  # until it was looked at
    _warned_of_random = False

    def update_reference(self, source: nn.Module, tau: float = 1.0) -> None:
        """Moves the reference towards `source`; see `FrozenActor.update_reference`."""
        self.reference.update_reference(source, tau)
        _expect_any(self)

    def watch_first(self, policy: nn.Module, *, copied: bool) -> None:
        """Warns once if the first steps are not what `policy`, perhaps `copied` before, drew."""
        self._first = FirstSteps(policy, self.acting, self.reference, copied=copied)
        self.register_load_state_dict_post_hook(_expect_any)  # a run that goes on

    def look_at_first(self, step: KLStep, batch: TensorDictBase | None = None) -> None:
        """Looks at the first steps, or at a whole `batch`; later there is nothing to do."""
        if self._first is None or step.log_prob is None or torch.compiler.is_compiling():
            return
        counts, k1 = step.counting, step.log_prob - step.ref_log_prob
        if batch is not None:
            self._first.add_draws(batch, counts, whole_batch=True)
        k1 = k1 if counts is None else k1[td.expand_right(counts, k1.shape)]
        doubt = self._first.add(k1, self.reference.actor, whole_batch=batch is not None)
        if doubt is not None:
            _expect_any(self)  # clones, which share it, may be made for later weights
            self._first = None
        if doubt:
            warnings.warn(f"{type(self).__name__}: {doubt}", stacklevel=2)

    def warn_of_random_steps(self, step: KLStep) -> None:
        """Warns once of steps of a batch that a random policy has made."""
        if step.valid is None or self._warned_of_random:
            return
        self._warned_of_random = True
        warnings.warn(
            f"{type(self).__name__}: in {int((~step.valid).sum())} of {step.valid.numel()} steps "
            "the log-prob and all that the policy writes is 0, as in the frames of a random policy "
            "(`init_random_frames`). Such steps are neither penalized nor counted. Put the "
            "transform into the env, which tells them apart, to be without this warning.",
            stacklevel=2,
        )

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        # A Compose inverts from last to first: action transforms before this one have not yet
        # turned the policy's action into the env's. A replay buffer calls this too, without an env.
        env = self.env
        if env is not None:
            score = score_env_step(self.reference, self.acting, tensordict, self.estimate, env)
            if self._first is not None and not torch.compiler.is_compiling():
                self._first.add_draws(tensordict, tensordict.get("_step", None))
            vars(self)["_scored"] = score  # until `_step`; `nn.Module.__setattr__` takes longer
        return tensordict

    def _take_score(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> KLStep:
        """The score of this env step; writes its next recurrent states."""
        # (*B), False in rows that are skipped, as also a transform before this one may decide.
        mask = tensordict.get("_step", None)
        step: KLStep = vars(self).pop("_scored")._replace(mask=mask)
        for key, state in zip(self.reference.own_state_keys, step.states, strict=True):
            next_tensordict.set(key, state)
        return step

    def transform_input_spec(self, input_spec: Composite) -> Composite:
        """Adds the reference's recurrent state to the state spec."""
        # Batched envs carry only actions and what is in the state spec to their workers.
        self.declare_states(td.state_spec(input_spec), self.reference)
        return input_spec


def _expect_any(transform: ScoringTransform, _: object = None) -> None:
    if transform._first is not None:
        transform._first.copied[0] = False
