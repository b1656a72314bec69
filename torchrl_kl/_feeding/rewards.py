"""Reads the task rewards from which a controller plans its coefficient, and what tells them apart.

Axes: *B is the batch, *A are agents, R rows of T steps with F values each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import cast

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from torchrl_kl import _tensordict as td
from torchrl_kl._feeding.sums import digests, state_keys, sum_trajectories
from torchrl_kl.controllers import KLController, TargetKLController
from torchrl_kl.controllers.plan import RewardPlan
from torchrl_kl.controllers.trajectories import OpenTrajectories

_BLOCK = 16  # neighbouring steps whose rewards a plan compares
_NATS_SHOWN = 2.0  # so much KL of whole trajectories a few hundred of them can show


class RewardFeed:
    """Collects rewards of trajectories or of steps, and gives them to a controller that plans.

    For a target per trajectory, trajectories that begin in the same state are a group. So they are
    for a target per step, if the target times their length is at most 2 nats. Longer trajectories
    cannot show their KL: there a step's reward is compared with those of its block of 16
    neighbouring steps, as if the policy could choose only that. Their mean length is taken over
    those that have ended and, by what has come of them, those that are open.
    """

    def __init__(self):
        # Of the trajectories that batches left open, and of those of an env, (2, *B, *A, 1).
        self._stream, self._returns = OpenTrajectories(), cast(Tensor | None, None)
        self._by_blocks: bool | None = None  # for a target per step; None: not known yet
        self._n_steps, self._n_ended = 0, 0  # in the batches by which it is decided
        self._samples: list[Tensor] = []  # of env steps, (3, N) each, not given yet
        self._env_steps, self._first_block = 0, 0.0
        self.withheld = False  # whether the plan was made since `take_withheld`

    def take_withheld(self) -> bool:
        """Whether the KL that comes next belongs to the rewards that have just made the plan."""
        withheld, self.withheld = self.withheld, False
        return withheld

    @staticmethod
    def first_new_group(controller: KLController) -> float:
        """The least number that is above those of all groups of the controller's plan."""
        known = cast(RewardPlan, controller.plan).samples[:, 3].nan_to_num(-1.0)
        return known.max().item() + 1 if len(known) else 0.0

    def give(self, controller: KLController, rewards: Tensor, **about: Tensor | None) -> None:
        """Gives samples (N,); see `TargetKLController.observe_rewards`."""
        if controller.planning and rewards.numel():
            cast(TargetKLController, controller).observe_rewards(rewards, **about)
            self.withheld = not controller.planning

    def add_batch(
        self,
        controller: KLController,
        tensordict: TensorDictBase,
        rewards: Tensor,
        log_ratios: Tensor,
        mask: Tensor | None,
        *,
        done_key: NestedKey,
        done_named: bool = True,
        time_dim: int | None = None,
        observed: Iterable[NestedKey] | None = None,
    ) -> None:
        """Gives the task rewards of a batch (*B), and log pi - log pi_ref, both (*B, *A, 1).

        The rest is as for `ControllerFeed.add_batch`. Without a time dimension there is nothing to
        compare: steps are pooled, and trajectories cannot be told.
        """
        if not controller.planning:
            return
        per_step = controller.per == "step"
        rewards, log_ratios = rewards.detach().double(), log_ratios.detach().double()
        counts = torch.ones_like(rewards, dtype=torch.bool)
        counts = counts if mask is None else td.expand_right(mask, rewards.shape)
        if td.find_time_dim(tensordict, time_dim) is None:
            if per_step:
                self.give(controller, rewards[counts], log_ratios=log_ratios[counts])
            return
        step = cast(TensorDictBase, tensordict.get("next"))
        done = td.find_done(step, done_key, named=done_named)
        ends = cast(Tensor, td.find_ends(step, done, rewards.shape))
        begins = _find_begins(tensordict, ends, counts)  # (R, T, F)
        if per_step and self._by_blocks is None:
            self._n_steps += int(counts.sum())
            n_ended = int((ends & counts).sum())
            self._n_ended += n_ended
            n_open = max(int(begins.sum()) - n_ended, 0)
            length = self._n_steps / max(self._n_ended + n_open, 1)
            if controller.target * length > _NATS_SHOWN:
                self._by_blocks = True
        if per_step and self._by_blocks:
            blocks = _number_blocks(begins).reshape(rewards.shape)
            groups = blocks[counts] + self.first_new_group(controller)
            self.give(controller, rewards[counts], log_ratios=log_ratios[counts], groups=groups)
            return
        numbers = _number_states(tensordict, begins, observed).reshape(rewards.shape)
        # (*B, *A, 4): what is added up along a trajectory.
        values = torch.cat([rewards, log_ratios, numbers, torch.ones_like(rewards)], -1)
        sums = sum_trajectories(tensordict, values, mask, done, self._stream, observed=observed)
        reward, log_ratio, group, length = sums.finished.reshape(-1, 4).unbind(-1)
        if len(reward):
            self._by_blocks = False  # a plan is made of samples of one kind
        lengths = length if per_step else None
        self.give(controller, reward, log_ratios=log_ratio, groups=group, lengths=lengths)

    def add_env_step(
        self,
        controller: KLController,
        reward: Tensor,
        log_ratio: Tensor,
        counts: Tensor | None,
        *,
        told: bool = True,
        needed: int,
    ) -> None:
        """Gives the rewards of env steps, (*B, *A, 1), in portions of `needed` samples.

        `counts`: True where a trajectory has finished; where a step counts, for a target per step;
        None: everywhere. `told`: whether any does. In an env all trajectories are pooled, and steps
        are compared in blocks.
        """
        sums = torch.stack([reward, log_ratio.to(reward)]).detach().double()
        number = torch.full_like(sums[:1], torch.nan)
        if controller.per == "step":
            if not self._env_steps:
                self._first_block = self.first_new_group(controller)
            values = self._first_block + torch.arange(reward.numel(), device=reward.device).view(
                number.shape
            )
            number = (values + self._env_steps // _BLOCK * reward.numel()).double()
            self._env_steps += 1
        else:
            if self._returns is not None and self._returns.shape == sums.shape:
                sums = sums + self._returns
            self._returns = sums
        if told:
            everywhere = torch.ones_like(reward, dtype=torch.bool)
            counts = everywhere if counts is None else td.expand_right(counts, reward.shape)
            self._samples.append(torch.cat([sums, number])[:, counts])  # (3, N)
        if sum(one.shape[1] for one in self._samples) >= needed:
            rewards, log_ratios, groups = torch.cat(self._samples, 1)
            self._samples = []
            self.give(controller, rewards, log_ratios=log_ratios, groups=groups)

    def begin_trajectories(self, reset: Tensor | None) -> None:
        """Sets the sums of an env's trajectories to 0 where it is reset; None: everywhere."""
        if reset is None or self._returns is None:
            self._returns = None
            return
        over = td.expand_right(reset, self._returns.shape[1:])
        self._returns = self._returns.masked_fill(over, 0.0)


def _find_begins(tensordict: TensorDictBase, ends: Tensor, counts: Tensor) -> Tensor:
    """True at the first step that counts of each row, and behind each end in it, (R, T, F)."""
    n_steps, n_rows = tensordict.batch_size[-1], tensordict.batch_size[:-1].numel()
    ends = ends.reshape(n_rows, n_steps, -1)
    begins = torch.ones_like(ends)
    begins[:, 1:] = ends[:, :-1]
    ids = tensordict.get(td.TRAJECTORY_KEY, None)
    if ids is not None:
        ids = ids.reshape(n_rows, n_steps, 1).to(ends.device)
        begins[:, 1:] |= ids[:, 1:] != ids[:, :-1]
    counts = counts.reshape(begins.shape)
    n_counted = counts.long().cumsum(1)
    # How many steps of the row have counted before the trajectory of each step.
    n_before = torch.where(begins, n_counted - counts.long(), -1).cummax(1).values
    return counts & (n_counted == n_before + 1)


def _number_blocks(begins: Tensor) -> Tensor:
    """A number for each block of neighbouring steps of one trajectory, (R, T, F)."""
    starts = begins.transpose(1, 2).clone()  # (R, F, T)
    starts[..., ::_BLOCK] = True
    return starts.flatten().cumsum(0).view(starts.shape).transpose(1, 2).double()


def _number_states(
    tensordict: TensorDictBase, begins: Tensor, observed: Iterable[NestedKey] | None
) -> Tensor:
    """Numbers of the states at first steps, 0 elsewhere, so that a sum tells them, (R, T, F)."""
    n_rows, n_steps, _ = begins.shape
    numbers = torch.zeros(n_rows * n_steps, dtype=torch.float64)
    places = begins.any(-1).reshape(-1).nonzero().squeeze(-1).cpu()
    states = digests(tensordict, state_keys(tensordict, observed), tensordict.batch_dims, places)
    for place, state in zip(places.tolist(), states, strict=True):
        # 48 bits, so that the sum of a few is exact in float64. Steps without any state differ.
        number = hashlib.blake2b(state or str(place).encode(), digest_size=6).digest()
        numbers[place] = int.from_bytes(number, "big")
    return numbers.view(n_rows, n_steps, 1).to(begins.device) * begins
