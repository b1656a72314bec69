"""What moves a controller: the measured KL of steps or whole trajectories, read from batches and pooled."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Sequence
from typing import cast

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor, nn

from torchrl_kl._tensordict import (
    TRAJECTORY_KEY,
    as_tuple,
    expand_right,
    find_done,
    find_ends,
    find_time_dim,
    require_order,
    steps_follow,
)
from torchrl_kl.controllers import (
    ConstantKLController,
    KLController,
    KLStatistics,
    TargetKLController,
)
from torchrl_kl.controllers.trajectories import OpenTrajectories, Segments, TrajectorySums

_ENV_TRAJECTORIES, _ENV_STEPS = 16, 256  # an update in an env waits for so many by default
_PATIENCE = {"batches": 10, "env steps": 10_000}  # without an update, before the user is warned
_FLAGS = {"done", "terminated", "truncated", "is_init"}  # a collector's truncation changes them


class ControllerFeed(nn.Module):
    """Pools measured KL and updates a controller once with the mean and the count of the pool.

    One trajectory at a time, the clip of a controller would make it steer the median, not the mean.

    State: the controller's and `statistics`, the pool since its last update. The sums of
    trajectories that are still open are not saved: a restarted collector begins new ones.

    Args:
        controller: what is updated.
        update_every: how many values (finished trajectories, or steps with `per="step"`) an update
            waits for. None: a batch updates once with what it finished, however few; in an env an
            update waits for 16 trajectories or 256 steps.
    """

    def __init__(self, controller: KLController, update_every: int | None = None):
        super().__init__()
        check_update_every(controller, update_every)
        self.controller = controller
        self.statistics = KLStatistics()
        self.update_every = update_every
        self.stream = OpenTrajectories()  # of batches that come without one of their collector
        self._idle = dict.fromkeys(_PATIENCE, 0)  # since the last update
        self._warned = False

    @property
    def adaptive(self) -> bool:
        """Whether the controller ever moves."""
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
        """Pools what a batch measured; returns the running sums of its trajectories.

        Args:
            tensordict: the batch, shape (*B), with "next".
            values: the measured KL of each step, nats, shape (*B, *F).
            mask: True where a step counts, shape (*B), or None where all do.
            done_key: what ends a trajectory, under "next".
            done_named: False where "done" at the root of "next" may take its place.
            time_dim: the batch dimension that is time, if it is not named "time".
            observed: what tells whether steps follow one another; by default all that is shared.
            stream: the open trajectories of the collector that the batch comes from.
            move: whether the controller may move.
            trace: whether the batch may leave any trace: not a sample of a replay buffer or fake data.

        Returns:
            Shape of `values`, at least float32; None where the batch has no time dimension.

        Raises:
            RuntimeError: if trajectories are needed and the batch has no time dimension, joins the
                rows of several workers along time, or numbers open trajectories anew.
            ValueError: if trajectories are needed and the steps do not follow one another, or a
                value is NaN or infinite; nothing has changed then.
        """
        move = move and trace
        needs_trajectories = move and self.adaptive and self.controller.per == "trajectory"
        stream = self.stream if stream is None else stream
        sums, before = stream if trace else OpenTrajectories(), stream.copy()
        running, finished = None, values.new_zeros(0)
        if find_time_dim(tensordict, time_dim) is not None:
            step = cast(TensorDictBase, tensordict.get("next"))
            done = find_done(step, done_key, named=done_named)
            running, finished = sum_trajectories(
                tensordict, values, mask, done, sums,
                observed=observed, judge=move, check_order=needs_trajectories,
            )  # fmt: skip
        elif needs_trajectories:
            raise RuntimeError(
                "the controller is fed nats per trajectory, and in a batch of shape "
                f"{tuple(tensordict.batch_size)} without a time dimension trajectories cannot be told "
                'apart: name the last dimension "time" or pass `time_dim`, call freeze() first, or use '
                "a controller with per='step'."
            )
        if move:
            if self.controller.per == "step":
                finished = values if mask is None else values[expand_right(mask, values.shape)]
            try:
                self.pool(finished)
            except ValueError:
                stream.restore(before)  # the same batch, mended, may be given again
                raise
        return running

    def pool(self, values: Tensor | None, *, in_env: bool = False) -> None:
        """Adds values, nats per trajectory or per step as the controller counts; may update it.

        Raises:
            ValueError: if a value is NaN or infinite and the coefficient is not 0.
        """
        if values is not None and values.numel():
            if self.controller.coeff.item() == 0:  # only measures: must not stop the training
                values = values[values.isfinite()]
            self.statistics.add(values)
            if int(self.statistics.count) >= self._needed(in_env):
                self._update()
        if self.adaptive and not self._warned:
            self._count_idle("env steps" if in_env else "batches")

    def _needed(self, in_env: bool) -> int:
        if self.update_every is not None:
            return self.update_every
        if in_env:
            return _ENV_STEPS if self.controller.per == "step" else _ENV_TRAJECTORIES
        return 2 if _has_deadband(self.controller) else 1  # a single value has no standard error

    def _update(self) -> None:
        pool = self.statistics
        mean, count, standard_error = pool.mean, int(pool.count), pool.standard_error
        pool.reset()  # first: a measurement that the controller refuses is not to be refused for ever
        self.controller.update(mean, count, standard_error=standard_error)
        self._idle = dict.fromkeys(_PATIENCE, 0)

    def _count_idle(self, what: str) -> None:
        """Warns once when a controller that should move has not been updated for long."""
        self._idle[what] += 1
        if self._idle[what] < _PATIENCE[what]:
            return
        self._warned = True
        unit = "steps" if self.controller.per == "step" else "finished trajectories"
        count, needed = int(self.statistics.count), self._needed(what == "env steps")
        warnings.warn(
            f"the KL controller has not been updated for {_PATIENCE[what]:,} {what}: an update waits for "
            f"{needed} {unit}, {count} came, {needed - count} are missing. Lower `update_every`, collect "
            'longer batches, or use a controller with per="step".',
            stacklevel=2,
        )


def check_update_every(controller: KLController, update_every: int | None) -> None:
    """ValueError unless `update_every` is None or a number of values that the controller can be told."""
    if update_every is None:
        return
    if isinstance(update_every, bool) or not isinstance(update_every, int) or update_every < 1:
        raise ValueError(
            f"`update_every` must be None or an int of at least 1, got {update_every!r}."
        )
    if update_every == 1 and _has_deadband(controller):
        raise ValueError(
            "`update_every` must be at least 2 for a controller with a deadband, got 1: a single value "
            "has no standard error."
        )


def _has_deadband(controller: KLController) -> bool:
    return isinstance(controller, TargetKLController) and controller.deadband > 0


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
    """Sums values over the trajectories of a batch (*B) whose last dimension is time; see `ControllerFeed.add_batch`.

    Returns:
        Running sums, the shape and dtype of `values` (half precision in float32), and the totals of
        the trajectories that have finished, float64, (N,).
    """
    step = cast(TensorDictBase, tensordict.get("next"))
    n_steps, n_values = tensordict.batch_size[-1], values.shape[tensordict.batch_dims :].numel()
    n_rows = tensordict.batch_size[:-1].numel()

    def per_value(flag: Tensor) -> Tensor:
        return expand_right(flag, values.shape).reshape(n_rows, n_steps, n_values)

    def per_step(entry: Tensor) -> Tensor:
        return entry.reshape(n_rows, n_steps)

    done = cast(Tensor, find_ends(step, done_key, values.shape))
    terminated = find_ends(step, done_key, values.shape, "terminated")
    left = tensordict.get(done_key, None)
    ids, is_init = tensordict.get(TRAJECTORY_KEY, None), tensordict.get("is_init", None)
    states = _States(tensordict, _observed_keys(tensordict) if observed is None else observed)
    segments = Segments(
        done=per_value(done),
        terminated=per_value(torch.zeros_like(done) if terminated is None else terminated),
        left=None if left is None else per_value(left),
        mask=None if mask is None else per_step(mask),
        ids=None if ids is None else per_step(ids).to(values.device),
        is_init=None if is_init is None or not is_init.numel() else per_step(is_init)[:, 0],
        follows=None if mask is None or ids is None else per_step(states.follow()),
        first_states=states.first,
        last_states=states.last,
    )
    if check_order:
        _require_order(tensordict, segments, states.keys, is_init)
        _refuse_seams(step, segments)
    flat = values.reshape(n_rows, n_steps, n_values)
    running, finished = stream.add(flat, segments, judge=judge)
    dtype = torch.promote_types(values.dtype, torch.float32)
    return TrajectorySums(running.reshape(values.shape).to(dtype), finished)


def _require_order(
    tensordict: TensorDictBase,
    segments: Segments,
    keys: Sequence[NestedKey],
    is_init: Tensor | None,
) -> None:
    may_differ = segments.done.any(-1)[:, :-1]
    if segments.ids is not None:
        may_differ = may_differ | (segments.ids[:, 1:] != segments.ids[:, :-1])
    if segments.mask is not None:
        may_differ = may_differ | ~segments.mask[:, 1:]
    if is_init is not None:
        may_differ = may_differ | is_init.reshape(segments.done.shape[:2])[:, 1:]
    shape = (*tensordict.batch_size[:-1], may_differ.shape[-1])
    consequence = (
        "The controller adds up the KL along trajectories: shuffle after the stack, or whole rows."
    )
    require_order(tensordict, keys, may_differ.reshape(shape), consequence)


def _refuse_seams(step: TensorDictBase, segments: Segments) -> None:
    """RuntimeError if the rows of several workers follow one another along time."""
    if segments.ids is None:
        return
    ends = segments.done.any(-1)
    done = step.get("done", None)
    if done is not None:
        ends = ends | done.reshape(*ends.shape, -1).any(-1)
    seams = (segments.ids[:, 1:] != segments.ids[:, :-1]) & ~ends[:, :-1]
    if segments.mask is not None:
        seams = seams & segments.mask[:, 1:]
    if seams.any():
        raise RuntimeError(
            "a row of the batch has another trajectory behind a step that is not done: does the collector "
            'join the rows of its workers along time (`cat_results=-1`)? Use `cat_results="stack"`.'
        )


def _observed_keys(tensordict: TensorDictBase) -> list[NestedKey]:
    """What a step shows and the next one begins with: what the data and "next" share, but flags."""
    step = cast(TensorDictBase, tensordict.get("next"))
    shared = [key for key in step.keys(True, True) if tensordict.get(key, None) is not None]
    return sorted((key for key in shared if isinstance(step.get(key), Tensor)), key=str)


class _States:
    """Digests of the states that rows begin and end with, empty where nothing shows a state."""

    def __init__(self, tensordict: TensorDictBase, keys: Iterable[NestedKey]):
        self.tensordict = tensordict
        step = tensordict.get("next")
        self.keys = [
            key
            for key in keys
            if as_tuple(key)[-1] not in _FLAGS
            and not (tensordict.get(key, None) is None or step.get(key, None) is None)
        ]

    def follow(self) -> Tensor:
        """Whether each step begins in the state that the one before left, (*R, T)."""
        follows = torch.ones(self.tensordict.batch_size, dtype=torch.bool)
        for key in self.keys:
            same = steps_follow(self.tensordict, key)
            if same is not None:
                follows = follows.to(same.device)
                follows[..., 1:] &= same
        return follows

    def first(self, rows: list[int]) -> list[bytes]:
        """Of the states in which the rows begin."""
        return self._digests(self.tensordict, rows, [0] * len(rows))

    def last(self, rows: list[int], steps: list[int]) -> list[bytes]:
        """Of the states after the given step of each row."""
        return self._digests(cast(TensorDictBase, self.tensordict.get("next")), rows, steps)

    def _digests(
        self, tensordict: TensorDictBase, rows: list[int], steps: list[int]
    ) -> list[bytes]:
        if not self.keys:
            return [b""] * len(rows)
        n_batch, n_steps = self.tensordict.batch_dims, self.tensordict.batch_size[-1]
        states = [b""] * len(rows)
        for key in self.keys:
            value = tensordict.get(key)
            value = value.reshape(-1, n_steps, *value.shape[n_batch:])[rows, steps]
            data = value.detach().cpu().reshape(len(rows), -1).contiguous()
            data = data.view(torch.uint8).numpy()
            states = [state + row.tobytes() for state, row in zip(states, data, strict=True)]
        return [hashlib.blake2b(state, digest_size=8).digest() for state in states]
