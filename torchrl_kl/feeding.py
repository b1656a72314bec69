"""Feeds a controller: measured KL, and the rewards that it plans from."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, cast

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor, nn

from torchrl_kl import batches
from torchrl_kl.batches import Trajectories, TrajectorySums, expand_right
from torchrl_kl.controllers import KLController, KLStatistics, TargetKLController

_IN_ENV = {"trajectory": 16, "step": 256}  # an update in an env waits for so many by default
_PATIENCE = {"batches": 10, "env steps": 10_000}  # without an update, before the user is warned


class Reading(NamedTuple):
    """What a batch tells a controller."""

    running: Tensor | None  # the measured KL up to each step, (*B, *A, 1); None: time is not known
    values: Tensor | None  # KL of finished trajectories, or of steps, (N,); None: may not move it
    rewards: Tensor | None = None  # of what a controller plans from, (N,); None: it does not plan
    log_ratios: Tensor | None = None  # log pi - log pi_ref of each, (N,)
    groups: Tensor | None = None  # a number for each, equal if they began alike, (N,)
    opened: dict[str, Tensor] | None = None  # the trajectories that are open after the batch


class ControllerFeed(nn.Module):
    """Pools measured KL, and updates a controller with the mean and the count of the pool.

    State: the pool since the last update, and the sums of the trajectories that batches left open.
    """

    def __init__(self, update_every: int | None = None):
        super().__init__()
        if update_every is not None and (type(update_every) is not int or update_every < 1):
            got = repr(update_every)
            raise ValueError(f"`update_every` must be None or an int of at least 1, got {got}.")
        self.update_every = update_every
        self.statistics, self.trajectories = KLStatistics(), Trajectories()
        self.frozen = False
        self._idle = dict.fromkeys(_PATIENCE, 0)  # batches and env steps since the last update
        self._warned = False

    def read(
        self,
        controller: KLController,
        tensordict: TensorDictBase,
        measured: Tensor,
        mask: Tensor | None,
        *,
        done_key: NestedKey,
        time_dim: int | None = None,
        observed: Iterable[NestedKey] | None = None,
        state_lengths: Mapping[NestedKey, NestedKey] | None = None,
        reward: Tensor | None = None,
        log_ratio: Tensor | None = None,
        trace: bool = True,
    ) -> Reading:
        """Reads a batch (*B) and its KL, (*B, *A, 1).

        `observed`: keys of the states; `state_lengths`: of some, where their lengths are, see
        `batches.read_states`; `trace`: whether it may change any state.
        """
        moves = trace and not self.frozen
        by_trajectory = controller.per == "trajectory"
        plans = moves and controller.reads_rewards and reward is not None
        needed = moves and by_trajectory and controller.moves
        counts = slice(None) if mask is None else expand_right(mask, measured.shape)
        steps = measured[counts].flatten() if moves and not by_trajectory else None
        rewards = log_ratios = None
        if plans and not by_trajectory:
            # The KL of a batch that a controller plans from says nothing about what it plans.
            steps = measured.new_zeros(0) if controller.planning else steps
            rewards = cast(Tensor, reward)[counts].flatten()
            log_ratios = cast(Tensor, log_ratio)[counts].flatten()
        if batches.find_time_dim(tensordict, time_dim) is None:
            if needed:
                raise RuntimeError(_NO_TIME.format(tuple(tensordict.batch_size)))
            return Reading(None, steps, rewards, log_ratios)
        zeros = torch.zeros_like(measured)
        columns = [zeros if each is None else each for each in (measured, log_ratio, reward)]
        sums = (self.trajectories if trace else Trajectories()).add(
            tensordict,
            torch.cat([column.detach().double() for column in columns], -1),
            mask,
            done_key,
            observed=observed,
            check_order=needed or plans,
        )
        dtype = torch.promote_types(measured.dtype, torch.float32)
        running, opened = sums.running[..., :1].to(dtype), sums.opened if trace else None
        if not by_trajectory:
            return Reading(running, steps, rewards, log_ratios, opened=opened)
        if not plans:
            return Reading(running, sums.finished[:, 0] if moves else None, opened=opened)
        _, log_ratios, rewards, _ = sums.finished.unbind(-1)
        groups = _groups(tensordict, sums, observed, state_lengths or {})
        values = rewards[:0] if controller.planning else sums.finished[:, 0]
        return Reading(running, values, rewards, log_ratios, groups, opened)

    def plan(self, controller: KLController, reading: Reading) -> None:
        """Lets a controller plan its coefficient from what has finished; it may raise."""
        rewards, ratios = reading.rewards, reading.log_ratios
        if rewards is not None:
            self.plan_from(controller, rewards, groups=reading.groups, log_ratios=ratios)

    def plan_from(
        self,
        controller: KLController,
        rewards: Tensor,
        *,
        groups: Tensor | None = None,
        log_ratios: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> None:
        """Gives samples (N,) to a controller that plans; see `TargetKLController`."""
        if controller.reads_rewards and not self.frozen and rewards.numel():
            cast(TargetKLController, controller).observe_rewards(
                rewards,
                groups=groups,
                log_ratios=log_ratios,
                lengths=lengths if controller.per == "step" else None,
            )

    def learn(self, controller: KLController, reading: Reading) -> None:
        """Updates a controller with a batch, and keeps what is open after it."""
        if reading.values is not None:
            self.pool(controller, reading.values)
        if reading.opened is not None:
            self.trajectories.keep(reading.opened)

    def pool(self, controller: KLController, values: Tensor, *, in_env: bool = False) -> None:
        """Adds values (N,), nats per trajectory or step, of a batch; may update the controller."""
        if controller.planning:
            values = values[:0]
        if values.numel() and controller.coeff.item() == 0:  # an infinite KL is only measured
            values = values[values.isfinite()]
        if values.numel():
            if int(self.statistics.count) + values.numel() < self.needed(controller, in_env):
                self.statistics.add(values)
            else:
                pool = KLStatistics().to(values.device).merge(self.statistics).add(values)
                # One for each trajectory would, with a controller's clip, steer the median.
                controller.update(pool.mean, int(pool.count))
                self.statistics.reset()
                self._idle = dict.fromkeys(_PATIENCE, 0)
        self._count_idle(controller, "env steps" if in_env else "batches")

    def needed(self, controller: KLController, in_env: bool) -> int:
        """How many values an update waits for."""
        return self.update_every or (_IN_ENV[controller.per] if in_env else 1)

    def _count_idle(self, controller: KLController, what: str) -> None:
        """Warns once where updates fail to come."""
        self._idle[what] += 1
        if self._warned or self._idle[what] < _PATIENCE[what] or not controller.moves:
            return
        self._warned = True
        unit = "steps" if controller.per == "step" else "finished trajectories"
        needed, count = self.needed(controller, what == "env steps"), int(self.statistics.count)
        waits = f"an update waits for {needed} {unit}, and {count} came"
        if controller.planning:
            reason = cast(Any, controller.plan).reason
            waits = f"it plans its coefficient from the rewards of {unit}, but {reason}"
        warnings.warn(_IDLE.format(_PATIENCE[what], what, waits), stacklevel=2)


def _groups(
    tensordict: TensorDictBase,
    sums: TrajectorySums,
    observed: Iterable[NestedKey] | None,
    lengths: Mapping[NestedKey, NestedKey],
) -> Tensor | None:
    """A number for each finished trajectory, (N,): equal for one agent that began in one state."""
    keys, known = batches.state_keys(tensordict, observed), sums.began >= 0
    groups = torch.full_like(sums.finished[:, 0], torch.nan)  # of those that began before
    if not keys or not known.any():
        return groups
    began, n_places = sums.began[known], tensordict.batch_size.numel()
    states = batches.read_states(tensordict, keys, began % n_places, lengths)
    parts = [began.div(n_places, rounding_mode="floor")]  # the agent
    for state in states:
        parts.append(state.reshape(len(began), -1).unique(dim=0, return_inverse=True)[1])
    groups[known] = torch.stack(parts, -1).unique(dim=0, return_inverse=True)[1].to(groups)
    return groups


_IDLE = (
    "the KL controller has not been updated for {:,} {}: {}. Lower `update_every`, collect longer "
    'batches, use a controller with per="step", or pass a number as `init_coeff`.'
)
_NO_TIME = (
    "the controller is fed nats per trajectory, and in a batch of shape {} without a time dimension"
    ' trajectories cannot be told apart: name the last dimension "time" or pass `time_dim`, call '
    "freeze() first, or use a controller with per='step'."
)
