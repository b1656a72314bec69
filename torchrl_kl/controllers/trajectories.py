"""Sums over trajectories that come in pieces: within a batch, across batches, on padded rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from torchrl_kl._tensordict import MASK_KEY, TRAJECTORY_KEY, as_tuple, beside, expand_right, is_fake

__all__ = ["OpenTrajectories", "TrajectorySums", "find_done", "sum_after", "sum_before"]


class TrajectorySums(NamedTuple):
    """What `OpenTrajectories.add` gives.

    `running`: sum of each trajectory up to and with each step, the shape of the values. `finished`: the totals of the
    trajectories that are now known to have ended, float64, shape (N,).
    """

    running: Tensor
    finished: Tensor


class OpenTrajectories:
    """Running sums of the trajectories that the last batch left unfinished, by `("collector", "traj_ids")`.

    A trajectory ends where the ids change, or at done where there are none. A collector may write an artificial
    truncation into a batch's last step (`set_truncated=True`) while the id goes on, so a truncation there is judged at
    the next call: it was an end unless the id comes back. A termination is an end at once.
    """

    def __init__(self):
        self._sums: dict[int, Tensor] = {}
        self._ended_unless_back: set[int] = set()

    def add(
        self, tensordict: TensorDictBase, values: Tensor, done_key: NestedKey
    ) -> TrajectorySums:
        """Adds a batch whose last dimension is time.

        Args:
            tensordict: the batch, shape (*B, T), with ("next", done_key).
            values: what is summed, 0 on padding, shape (*B, T, *F).
            done_key: the done flag that ends these trajectories; "terminated" is looked for beside it.

        Returns:
            The running sums and the totals of the finished trajectories.
        """
        n_steps, feature_shape = tensordict.batch_size[-1], values.shape[tensordict.batch_dims :]
        flat = values.detach().double().reshape(-1, n_steps, feature_shape.numel())
        done, terminated = (
            expand_right(flag, values.shape).reshape(flat.shape)
            for flag in _done_flags(tensordict, done_key)
        )
        mask = tensordict.get(MASK_KEY, None)
        mask = (
            torch.ones(flat.shape[:2], dtype=torch.bool)
            if mask is None
            else mask.reshape(-1, n_steps)
        )
        mask = mask.to(flat.device)
        ids = tensordict.get(TRAJECTORY_KEY, None)
        ids = None if ids is None else ids.reshape(-1, n_steps)
        cuts = done if ids is None else _changes(ids, mask).unsqueeze(-1).expand_as(done)
        followed = None if is_fake(tensordict) else ids
        carried, finished = flat.new_zeros(flat.shape[0], flat.shape[2]), []
        if followed is not None:
            finished = self._resume(followed, tensordict.get("is_init", None), carried)
        running = _segment_cumsum(flat, cuts, carried)
        counted = cuts & mask.unsqueeze(-1)
        before = tensordict.get(done_key, None)
        if (
            ids is None and before is not None
        ):  # an agent that has left while others go on was counted when it left
            counted = counted & ~expand_right(before, values.shape).reshape(flat.shape)
        finished.append(running[counted])
        if followed is not None:
            last = (
                torch.arange(len(flat), device=flat.device),
                mask.sum(-1) - 1,
            )  # padding follows the valid steps
            finished.append(
                self._suspend(followed[last], running[last], done[last], terminated[last])
            )
        return TrajectorySums(running.reshape(values.shape).to(values.dtype), torch.cat(finished))

    def _resume(self, ids: Tensor, is_init: Tensor | None, carried: Tensor) -> list[Tensor]:
        """Gives each row the sum that it goes on from; returns the totals that are now known to have ended."""
        begins = (
            torch.zeros_like(ids[:, 0]) if is_init is None else is_init.reshape(ids.shape)[:, 0]
        )
        for row, (trajectory, new) in enumerate(
            zip(ids[:, 0].tolist(), begins.tolist(), strict=True)
        ):
            # An id that begins anew belongs to another collector: ids restart with each.
            if trajectory in self._sums and not new:
                carried[row] = self._sums.pop(trajectory).to(carried.device)
        ended = [
            self._sums.pop(trajectory)
            for trajectory in self._ended_unless_back
            if trajectory in self._sums
        ]
        self._ended_unless_back.clear()
        return [total.to(carried.device) for total in ended]

    def _suspend(self, ids: Tensor, totals: Tensor, done: Tensor, terminated: Tensor) -> Tensor:
        """Keeps what the rows leave open; returns the totals that have ended. (R,), then (R, F) each.

        A collector begins a new id as soon as any agent is done: they all end with their id.
        """
        ended, maybe = terminated.any(-1), done.any(-1)
        for trajectory, total, ends, perhaps in zip(
            ids.tolist(), totals, ended.tolist(), maybe.tolist(), strict=True
        ):
            if not ends:
                self._sums[trajectory] = total
                if perhaps:
                    self._ended_unless_back.add(trajectory)
        return totals[ended].flatten()


def _changes(ids: Tensor, mask: Tensor) -> Tensor:
    """The last steps of the trajectories after which the row goes on with another one, (R, T)."""
    changes = torch.zeros_like(mask)
    changes[:, :-1] = (ids[:, 1:] != ids[:, :-1]) & mask[:, 1:]
    return changes


def find_done(
    tensordict: TensorDictBase, reward_key: NestedKey, done_key: NestedKey | None = None
) -> NestedKey:
    """The done flag of a reward: the one named, or else the one beside it, or else the one at the root of the step."""
    near = done_key or beside(reward_key, "done")
    if tensordict.get(near, None) is not None:
        return near
    if done_key is None and tensordict.get("done", None) is not None:
        return "done"
    raise KeyError(
        f"there is no {near!r} and no 'done' in the step, got {sorted(map(str, tensordict.keys(True, True)))}: "
        "trajectories end at done; name it with `done_key`."
    )


def _done_flags(tensordict: TensorDictBase, done_key: NestedKey) -> tuple[Tensor, Tensor]:
    """done, and the part of it that no collector writes by itself."""
    done = tensordict.get(("next", *as_tuple(done_key)))
    terminated = tensordict.get(("next", *as_tuple(beside(done_key, "terminated"))), None)
    return done, torch.zeros_like(done) if terminated is None else terminated


def _segment_cumsum(values: Tensor, cuts: Tensor, carried: Tensor) -> Tensor:
    """Cumulative sums along dimension 1 that restart after each cut; the first segment begins at `carried`.

    `values`, `cuts`: (R, T, F); `carried`: (R, F); all sums in the dtype of `values`. Step by step: the difference of
    two sums over the row would let a large or infinite trajectory spoil the ones after it.
    """
    running, total = [], carried
    for value, cut in zip(values.unbind(1), cuts.unbind(1), strict=True):
        running.append(total + value)
        total = torch.where(cut, 0.0, running[-1])
    return torch.stack(running, 1)


def sum_before(values: Tensor, ends: Tensor) -> Tensor:
    """At each step the sum over the earlier steps of its trajectory; all (*R, T), `ends` True at last steps."""
    sums, total = [], torch.zeros_like(values[..., 0])
    for value, end in zip(values.unbind(-1), ends.unbind(-1), strict=True):
        sums.append(total)
        total = torch.where(end, 0.0, total + value)
    return torch.stack(sums, -1)


def sum_after(values: Tensor, ends: Tensor) -> Tensor:
    """At each step the sum over the later steps of its trajectory; all (*R, T), `ends` True at last steps."""
    sums, total = [], torch.zeros_like(values[..., 0])
    for value, end in zip(values.flip(-1).unbind(-1), ends.flip(-1).unbind(-1), strict=True):
        total = torch.where(end, 0.0, total)
        sums.append(total)
        total = total + value
    return torch.stack(sums, -1).flip(-1)
