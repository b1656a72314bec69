"""Sums over trajectories that come in pieces: within a batch, across batches, on padded rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from torchrl_kl._keys import MASK_KEY, TRAJECTORY_KEY, as_tuple, beside, expand_right, is_fake

__all__ = ["OpenTrajectories", "TrajectorySums", "find_done"]


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
        self._ended_unless_back: dict[int, Tensor] = {}

    def add(self, tensordict: TensorDictBase, values: Tensor, done_key: NestedKey) -> TrajectorySums:
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
            expand_right(flag, values.shape).reshape(flat.shape) for flag in _done_flags(tensordict, done_key)
        )
        ids = tensordict.get(TRAJECTORY_KEY, None)
        if ids is not None:
            ids = ids.reshape(-1, n_steps)
        mask = tensordict.get(MASK_KEY, None)
        mask = torch.ones(flat.shape[:2], dtype=torch.bool) if mask is None else mask.reshape(-1, n_steps)
        mask = mask.to(flat.device)
        last = mask.sum(-1) - 1  # padding follows the valid steps
        cuts = self._cuts(ids, done, mask)
        carried = self._carried_in(ids, flat, tensordict)
        running = _segment_cumsum(flat, cuts, carried)
        finished = [running[cuts & mask.unsqueeze(-1)]]
        if ids is not None and not is_fake(tensordict):
            finished += self._settle(ids, last, running, done, terminated)
        return TrajectorySums(running.reshape(values.shape).to(values.dtype), torch.cat(finished))

    def _cuts(self, ids: Tensor | None, done: Tensor, mask: Tensor) -> Tensor:
        """Where a trajectory is known to end from this batch alone, (R, T, F)."""
        if ids is None:
            return done
        changes = torch.zeros_like(mask)
        changes[:, :-1] = (ids[:, 1:] != ids[:, :-1]) & mask[:, 1:]
        return changes.unsqueeze(-1).expand_as(done)

    def _carried_in(self, ids: Tensor | None, flat: Tensor, tensordict: TensorDictBase) -> Tensor:
        """The sums with which the rows begin, (R, F)."""
        carried = flat.new_zeros(flat.shape[0], flat.shape[2])
        if ids is None or not self._sums:
            return carried
        starts = tensordict.get("is_init", None)
        starts = torch.zeros_like(ids) if starts is None else starts.reshape(ids.shape)
        for row, (trajectory, new) in enumerate(zip(ids[:, 0].tolist(), starts[:, 0].tolist(), strict=True)):
            # An id that begins anew belongs to another collector: ids restart with each.
            if trajectory in self._sums and not new:
                carried[row] = self._sums[trajectory].to(carried.device)
        return carried

    def _settle(self, ids: Tensor, last: Tensor, running: Tensor, done: Tensor, terminated: Tensor) -> list[Tensor]:
        """Judges what the batch before left open, then keeps what this one leaves open; returns finished totals."""
        rows = torch.arange(len(ids), device=ids.device)
        present = set(ids.reshape(-1).tolist())
        finished = [
            self._sums.pop(trajectory)[ended].to(running.device)
            for trajectory, ended in self._ended_unless_back.items()
            if trajectory not in present
        ]
        for trajectory in present:
            self._sums.pop(trajectory, None)
        self._ended_unless_back = {}
        totals, ended, maybe = running[rows, last], terminated[rows, last], done[rows, last]
        finished.append(totals[ended])
        for row, trajectory in enumerate(ids[rows, last].tolist()):
            if not bool(ended[row].all()):
                # Agents that terminated are counted: what they would add later begins at zero.
                self._sums[trajectory] = torch.where(ended[row], 0.0, totals[row])
                if bool(maybe[row].any()):
                    self._ended_unless_back[trajectory] = maybe[row] & ~ended[row]
        return finished


def find_done(tensordict: TensorDictBase, reward_key: NestedKey) -> NestedKey:
    """The done flag of a reward: the one beside it, or else the one at the root of the step."""
    near = beside(reward_key, "done")
    if tensordict.get(near, None) is not None:
        return near
    if tensordict.get("done", None) is not None:
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

    `values`, `cuts`: (R, T, F); `carried`: (R, F); all sums in the dtype of `values`.
    """
    total = values.cumsum(1)
    before = torch.cat([torch.zeros_like(total[:, :1]), total[:, :-1]], 1)  # sum before each step
    starts = torch.zeros_like(cuts)
    starts[:, 1:] = cuts[:, :-1]
    n_steps = values.shape[1]
    steps = torch.arange(n_steps, device=values.device).view(1, -1, 1)
    start_index = torch.where(starts, steps, 0).cummax(1).values
    offset = before.gather(1, start_index)
    first = start_index == 0
    return total - offset + torch.where(first, carried.unsqueeze(1), 0.0)
