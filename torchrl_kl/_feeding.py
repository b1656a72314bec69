"""Feeds a controller: reads and pools the measured KL of steps or of whole trajectories."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable
from functools import partial
from typing import cast

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor, nn

from torchrl_kl import _tensordict as td
from torchrl_kl.controllers import (
    ConstantKLController,
    KLController,
    KLStatistics,
    TargetKLController,
)
from torchrl_kl.controllers.trajectories import OpenTrajectories, Segments, TrajectorySums

_ENV_TRAJECTORIES, _ENV_STEPS = 16, 256  # an update in an env waits for so many by default
_PATIENCE = {"batches": 10, "env steps": 10_000}  # without an update, before the user is warned
# They show no state: a collector may set "truncated" in the last step of a batch.
_FLAGS = {"done", "terminated", "truncated", "is_init"}


class ControllerFeed(nn.Module):
    """Pools measured KL and updates a controller with the mean and the count of the pool."""

    def __init__(self, controller: KLController, update_every: int | None = None):
        super().__init__()
        self.controller, self.statistics = controller, KLStatistics()
        self.update_every = update_every
        if update_every is not None:
            self._check_update_every(update_every)
        # The open trajectories of batches that come without those of their collector.
        self.stream = OpenTrajectories()
        self._idle = dict.fromkeys(_PATIENCE, 0)  # batches and env steps since the last update
        self._warned = False

    @property
    def adaptive(self) -> bool:
        """Whether the coefficient can change."""
        return not isinstance(self.controller, ConstantKLController)

    def add_batch(
        self,
        tensordict: TensorDictBase,
        values: Tensor,
        mask: Tensor | None,
        *,
        done_key: NestedKey,
        done_named: bool = True,
        time_dim: int | None = None,
        observed: Iterable[NestedKey] | None = None,
        stream: OpenTrajectories | None = None,
        move: bool = True,
        trace: bool = True,
    ) -> Tensor | None:
        """Pools the measured KL of a batch; returns its running sums, None without time dimension.

        `stream`: the open trajectories of the collector of the batch; `move`: whether the
        controller may be updated; `trace`: whether the batch may change any state, which a replay
        sample and fake data may not. The rest is as for `sum_trajectories` and `find_done`.

        RuntimeError if trajectories are needed and cannot be told apart; ValueError if the steps do
        not follow one another, or a value is NaN or infinite: nothing has changed then.
        """
        move = move and trace
        needs_trajectories = move and self.adaptive and self.controller.per == "trajectory"
        stream = self.stream if stream is None else stream
        before, running, finished = stream.copy(), None, values.new_zeros(0)
        if td.find_time_dim(tensordict, time_dim) is not None:
            step = cast(TensorDictBase, tensordict.get("next"))
            done = td.find_done(step, done_key, named=done_named)
            sums = stream if trace else OpenTrajectories()
            # `running` is like `values`, (*B, *A, 1); `finished` holds one total each, (N,).
            checks = {"judge": move, "check_order": needs_trajectories}
            running, finished = sum_trajectories(
                tensordict, values, mask, done, sums, observed=observed, **checks
            )
        elif needs_trajectories:
            raise RuntimeError(_NO_TIME.format(tuple(tensordict.batch_size)))
        if move:
            pooled = (values, mask) if self.controller.per == "step" else (finished,)
            try:
                self.pool(*pooled)
            except ValueError:
                # The user may repair the batch and pass it again.
                stream.restore(before)
                raise
        return running

    def pool(
        self, values: Tensor | None, mask: Tensor | None = None, *, in_env: bool = False
    ) -> None:
        """Adds the values in the mask, nats per trajectory or step; may update the controller."""
        if values is not None and mask is not None:
            values = values[td.expand_right(mask, values.shape)]
        if values is not None and values.numel():
            controller, pool = self.controller, self.statistics
            # A coefficient of 0 only measures: an infinite KL must not stop the training.
            if controller.coeff.item() == 0:
                values = values[values.isfinite()]
            count = int(pool.add(values).count.item())
            if count >= self._needed(in_env):
                mean, standard_error = pool.mean, pool.standard_error
                # Before the update: values that the controller refuses must not come back.
                pool.reset()
                # One update with the mean. With one for each trajectory, the clip of a controller
                # would make it steer the median.
                controller.update(mean, count, standard_error=standard_error)
                self._idle = dict.fromkeys(_PATIENCE, 0)
        if self.adaptive and not self._warned:
            self._count_idle("env steps" if in_env else "batches")

    def _needed(self, in_env: bool) -> int:
        if self.update_every is not None:
            return self.update_every
        if in_env:
            return _ENV_STEPS if self.controller.per == "step" else _ENV_TRAJECTORIES
        return 2 if self._deadband else 1  # a single value has no standard error

    @property
    def _deadband(self) -> bool:
        return isinstance(self.controller, TargetKLController) and self.controller.deadband > 0

    def _check_update_every(self, given: int) -> None:
        if isinstance(given, bool) or not isinstance(given, int) or given < 1:
            raise ValueError(f"`update_every` must be None or an int of at least 1, got {given!r}.")
        if given == 1 and self._deadband:
            raise ValueError(
                "`update_every` must be at least 2 for a controller with a deadband, got 1: a "
                "single value has no standard error."
            )

    def _count_idle(self, what: str) -> None:
        self._idle[what] += 1
        if self._idle[what] < _PATIENCE[what]:
            return
        self._warned = True
        unit = "steps" if self.controller.per == "step" else "finished trajectories"
        count, needed = int(self.statistics.count), self._needed(what == "env steps")
        warnings.warn(
            f"the KL controller has not been updated for {_PATIENCE[what]:,} {what}: an update "
            f"waits for {needed} {unit}, {count} came, {needed - count} are missing. Lower "
            '`update_every`, collect longer batches, or use a controller with per="step".',
            stacklevel=2,
        )


def sum_trajectories(
    tensordict: TensorDictBase,
    values: Tensor,
    mask: Tensor | None,
    done_key: NestedKey,
    stream: OpenTrajectories,
    *,
    observed: Iterable[NestedKey] | None = None,
    judge: bool = True,
    check_order: bool = True,
) -> TrajectorySums:
    """Sums values over the trajectories of a batch (*B) whose last dimension is time.

    `values`: nats, (*B, *F); `mask`: True where a step counts, (*B); `stream`: what earlier batches
    left open; `observed`: keys that show whether steps follow one another, which `check_order`
    requires, by default all; `judge`: see `OpenTrajectories.add`. Returns running sums, (*B, *F) in
    at least float32, and the totals of the trajectories that have finished, float64, (N,).
    """
    step = cast(TensorDictBase, tensordict.get("next"))
    n_steps, n_rows = tensordict.batch_size[-1], tensordict.batch_size[:-1].numel()
    n_values = values.shape[tensordict.batch_dims :].numel()

    # Rows R = all but the last dimension of *B: (R, T, F) for values, (R, T) for steps.
    def per_value(flag: Tensor) -> Tensor:
        return td.expand_right(flag, values.shape).reshape(n_rows, n_steps, n_values)

    def per_step(entry: Tensor, name: str) -> Tensor:
        if entry.numel() != n_rows * n_steps:
            raise ValueError(
                f"`{name}` must have one number per step of a batch of shape "
                f"{tuple(tensordict.batch_size)}, got shape {tuple(entry.shape)}."
            )
        return entry.reshape(n_rows, n_steps)

    done = cast(Tensor, td.find_ends(step, done_key, values.shape))
    terminated = td.find_ends(step, done_key, values.shape, "terminated")
    left = tensordict.get(done_key, None)  # at the root: True if an agent was done before the step
    ids, is_init = tensordict.get(td.TRAJECTORY_KEY, None), tensordict.get("is_init", None)
    is_init = is_init.bool() if is_init is not None and is_init.numel() else None
    keys = _state_keys(tensordict, observed)
    segments = Segments(
        done=per_value(done.bool()),
        terminated=per_value((torch.zeros_like(done) if terminated is None else terminated).bool()),
        left=None if left is None else per_value(left.bool()),
        mask=None if mask is None else per_step(mask, "mask"),
        ids=None if ids is None else per_step(ids, "traj_ids").to(values.device),
        is_init=None if is_init is None else per_step(is_init, "is_init")[:, 0],
        states_before=partial(_digests, tensordict, keys, tensordict.batch_dims),
        states_after=partial(_digests, step, keys, tensordict.batch_dims),
    )
    if check_order:
        _check_order(tensordict, segments, keys, is_init)
    running, finished = stream.add(per_value(values), segments, judge=judge)
    dtype = torch.promote_types(values.dtype, torch.float32)
    return TrajectorySums(running.reshape(values.shape).to(dtype), finished)


def _check_order(
    tensordict: TensorDictBase, segments: Segments, keys: list[NestedKey], is_init: Tensor | None
) -> None:
    """Raises if steps do not follow one another, or if rows of several workers are joined."""
    ends = segments.done.any(-1)  # (R, T)
    if not ends.numel():
        return
    # (R, T - 1): whether step t + 1 has another id than step t, and whether it may begin anew:
    # behind an end, in another trajectory, in padding, or where the env says so.
    changed = torch.zeros_like(ends[:, 1:])
    if segments.ids is not None:
        changed = segments.ids[:, 1:] != segments.ids[:, :-1]
    may_differ = ends[:, :-1] | changed
    if segments.mask is not None:
        may_differ = may_differ | ~segments.mask[:, 1:]
    if is_init is not None:
        may_differ = may_differ | is_init.reshape(ends.shape)[:, 1:]
    may_differ = may_differ.reshape(*tensordict.batch_size[:-1], may_differ.shape[-1])
    td.require_order(tensordict, keys, may_differ, _SHUFFLED)
    # Another id behind a step that is not done: the rows of two workers were joined there.
    done = tensordict.get(("next", "done"), None)
    if done is not None:
        ends = ends | done.reshape(*ends.shape, -1).any(-1)
    seams = changed & ~ends[:, :-1]
    if segments.mask is not None:
        seams = seams & segments.mask[:, 1:]
    if seams.any():
        raise RuntimeError(_SEAMS)


def _state_keys(
    tensordict: TensorDictBase, observed: Iterable[NestedKey] | None
) -> list[NestedKey]:
    """Keys of what a step leaves and the next one begins with: of `observed`, or of all entries."""
    step = cast(TensorDictBase, tensordict.get("next"))
    if observed is None:
        leaves = (key for key in step.keys(True, True) if isinstance(step.get(key), Tensor))
        observed = sorted(leaves, key=str)
    return [
        key
        for key in observed
        if td.as_tuple(key)[-1] not in _FLAGS
        and all(each.get(key, None) is not None for each in (tensordict, step))
    ]


def _digests(
    batch: TensorDictBase, keys: list[NestedKey], n_dims: int, places: Tensor
) -> list[bytes]:
    """Digests of the states at steps, numbered row by row, (N,); empty where nothing shows one."""
    if not keys:
        return [b""] * len(places)
    parts = []
    for key in keys:
        # (*R, T, ...) -> (R * T, ...) -> (N, bytes)
        value = batch.get(key).detach().flatten(0, n_dims - 1)
        data = value.index_select(0, places.to(value.device)).cpu().reshape(len(places), -1)
        parts.append(data.view(torch.uint8))
    states = torch.cat(parts, 1).numpy()
    whole = states.view(f"V{states.shape[1]}").ravel().tolist()  # one `bytes` for each row
    if states.shape[1] <= 64:
        return whole
    # Long states, such as images, are kept as hashes: they are compared, never read.
    return [hashlib.blake2b(state, digest_size=8).digest() for state in whole]


_NO_TIME = (
    "the controller is fed nats per trajectory, and in a batch of shape {} without a time dimension"
    ' trajectories cannot be told apart: name the last dimension "time" or pass `time_dim`, call '
    "freeze() first, or use a controller with per='step'."
)
_SHUFFLED = (
    "The controller adds up the KL along trajectories: shuffle after the stack, or whole rows."
)
_SEAMS = (
    "a row of the batch has another trajectory behind a step that is not done: does the collector "
    'join the rows of its workers along time (`cat_results=-1`)? Use `cat_results="stack"`.'
)
