"""Feeds a controller: measured KL, and the rewards that it plans from."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from tensordict import NestedKey, TensorDictBase
from torch import Tensor, nn

from torchrl_kl import batches
from torchrl_kl.batches import expand_right
from torchrl_kl.controllers import KLController, KLStatistics
from torchrl_kl.functional.numbers import working_dtype
from torchrl_kl.keys import ResolvedKeys
from torchrl_kl.trajectories import Trajectories, rows_at

_IN_ENV = {"trajectory": 16, "step": 256}  # an update in an env waits for so many by default
_PATIENCE = {"batches": 10, "env steps": 10_000}  # without an update, before the user is warned


class Reading(NamedTuple):
    """What a batch tells a controller."""

    running: Tensor | None  # the measured KL up to each step, (*B, *A, 1); None: time is not known
    values: Tensor | None  # KL of finished trajectories, or of steps, (N,); None: not to be used
    opened: dict[str, Tensor] | None  # the trajectories that are open after the batch
    moves: bool  # whether it may move the controller
    planning: bool  # whether the KL says nothing about the coefficient, which is planned from it


class ControllerFeed(nn.Module):
    """Pools measured KL, and updates a controller with the mean and the count of the pool.

    If the controller has a group, each batch that may move it is all-reduced over the ranks, also
    one without values, so that the pool and the controller are equal on all of them.

    State: the pool since the last update, and the sums of the trajectories that batches left open,
    which are of this rank.
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
        self._warned = self._warned_alone = False

    def read(
        self,
        controller: KLController,
        tensordict: TensorDictBase,
        measured: Tensor,
        mask: Tensor | None,
        *,
        keys: ResolvedKeys,
        time_dim: int | None = None,
        observed: Iterable[NestedKey] | None = None,
        state_lengths: Mapping[NestedKey, NestedKey] | None = None,
        reward: Tensor | None = None,
        log_ratio: Tensor | None = None,
        trace: bool = True,
    ) -> Reading:
        """Reads a batch (*B) and its KL, (*B, *A, 1); first, the coefficient is planned from it.

        `observed`: keys of the states; `state_lengths`: of some entries (*B, L), where their
        lengths are, (*B); what is behind that, as a text's tokens after its position, is of later
        states. `trace`: whether any state may change. An error has changed nothing.
        """
        moves = trace and not self.frozen
        by_trajectory, planning = controller.per == "trajectory", controller.planning
        plans = moves and controller.reads_rewards and reward is not None
        needed = moves and by_trajectory and controller.moves
        timed = batches.find_time_dim(tensordict, time_dim) is not None
        if needed and not timed:
            raise RuntimeError(_NO_TIME.format(tuple(tensordict.batch_size)))
        columns = [torch.zeros_like(measured) if x is None else x for x in (log_ratio, reward)]
        columns = torch.cat([x.detach().double() for x in (measured, *columns)], -1)
        samples = columns[:0].reshape(-1, 3)
        running = opened = groups = None
        if timed:
            flags = batches.flags(tensordict, keys, measured.shape, mask)
            states = batches.read_states(tensordict, observed)
            if needed or plans:
                batches.require_order(states, flags.may_differ)
            table = self.trajectories if trace else Trajectories()
            sums = table.add(flags, states.values(), columns)
            running = sums.running[..., :1].to(working_dtype(measured.dtype))
            samples, opened = sums.finished, sums.opened if trace else None
            if plans and by_trajectory:
                groups = _groups(tensordict, states, state_lengths or {}, sums.began)
        if not by_trajectory:
            counts = slice(None) if mask is None else expand_right(mask, measured.shape)[..., 0]
            samples = columns[counts].reshape(-1, 3)
        values, log_ratios, rewards = samples.unbind(-1)
        if plans:
            self.plan_from(controller, rewards=rewards, groups=groups, log_ratios=log_ratios)
        return Reading(running, values, opened, moves, planning)

    def plan_from(self, controller: KLController, **samples: Tensor | None) -> None:
        """Gives samples (N,) to a controller that plans; see `TargetKLController`.

        A rank without samples calls it too, since others of its group may have some.
        """
        if not controller.reads_rewards or self.frozen:
            return
        if controller.per != "step":
            samples["lengths"] = None
        if (group := self._group(controller)) is not None:
            samples = _of_all_ranks(group, samples)
        rewards = samples.get("rewards")
        if rewards is not None and len(rewards):
            cast(Any, controller).observe_rewards(**samples)

    def learn(self, controller: KLController, reading: Reading) -> None:
        """Updates a controller with a batch, and keeps what is open after it."""
        values = reading.values
        if values is not None and reading.planning:
            values = values[:0]
        if reading.moves:
            self.pool(controller, values)
        if reading.opened is not None:
            self.trajectories.keep(reading.opened)

    def pool(
        self, controller: KLController, values: Tensor | None, *, in_env: bool = False
    ) -> None:
        """Adds values (N,), nats per trajectory or step, of a batch; may update the controller.

        None: the batch says nothing about the KL, but those of other ranks may.
        """
        group, idle = self._group(controller), values is not None
        if values is None or controller.planning:
            values = self.statistics.sum.new_zeros(0)
        if values.numel() and controller.coeff.item() == 0:  # an infinite KL is only measured
            values = values[values.isfinite()]
        if values.numel() or group is not None:  # whose other ranks may have values
            self._add(controller, values, group, self.needed(controller, in_env))
        if idle:
            self._count_idle(controller, "env steps" if in_env else "batches")

    def _add(
        self, controller: KLController, values: Tensor, group: dist.ProcessGroup | None, needed: int
    ) -> None:
        """Adds the values of all ranks to the pool; updates the controller if they are enough."""
        before = int(self.statistics.count)
        if group is None and before + values.numel() < needed:  # as in most env steps
            self.statistics.add(values)
            return
        batch = KLStatistics().to(values.device).add(values)
        batch = batch if group is None else batch.all_reduce(group)
        if not batch.count or before + int(batch.count) < needed:
            self.statistics.merge(batch)
            return
        pool = batch.merge(self.statistics)
        # One for each trajectory would, with a controller's clip, steer the median.
        controller.update(pool.mean, int(pool.count))
        self.statistics.reset()
        self._idle = dict.fromkeys(_PATIENCE, 0)

    def _group(self, controller: KLController) -> dist.ProcessGroup | None:
        """The ranks with which it feeds a controller: by configuration, never by what data hold."""
        if not controller.moves:
            return None
        alone = controller.group is None and dist.is_available() and dist.is_initialized()
        if alone and not self._warned_alone and dist.is_torchelastic_launched():
            self._warned_alone, size = True, dist.get_world_size()
            if size > 1:
                warnings.warn(_ALONE.format(size), stacklevel=2)
        return controller.group

    def get_extra_state(self) -> bytes:
        """The open trajectories, for `state_dict`."""
        return self.trajectories.pack()

    def set_extra_state(self, state: bytes) -> None:
        """Takes over the open trajectories of a `state_dict`."""
        self.trajectories.unpack(state)

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


def _of_all_ranks(group: dist.ProcessGroup, samples: dict[str, Tensor | None]) -> dict[str, Any]:
    """The samples of all ranks, in their order; no group has those of two ranks."""
    own = {name: values.cpu() for name, values in samples.items() if values is not None}
    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, own, group)
    parts, before = [part for part in parts if part], 0
    for part in parts:
        if "groups" in part:
            part["groups"] = part["groups"].unique(return_inverse=True)[1] + before
            before += len(part["groups"])
    names = parts[0] if parts else ()
    return {name: torch.cat([part[name] for part in parts]) for name in names}


def _groups(
    tensordict: TensorDictBase,
    states: Mapping[NestedKey, tuple[Tensor, Tensor]],
    lengths: Mapping[NestedKey, NestedKey],
    began: Tensor,
) -> Tensor:
    """A number for each finished trajectory, (N,): equal for one agent that began in one state."""
    known, n_places = began >= 0, tensordict.batch_size.numel()
    groups = torch.full_like(began, torch.nan, dtype=torch.float64)  # of those that began before
    if not states or not known.any():
        return groups
    place = began[known] % n_places
    parts = [began[known] // n_places]  # the agent
    for key, (entry, _) in states.items():
        state = rows_at(entry, place)
        length = tensordict.get(lengths[key], None) if key in lengths else None
        if length is not None:
            length = rows_at(length.flatten(0, tensordict.batch_dims - 1), place).unsqueeze(-1)
            column = torch.arange(state.shape[-1], device=place.device)
            state = torch.where(column < length, state, -1)
        parts.append(state.reshape(len(place), -1).unique(dim=0, return_inverse=True)[1])
    groups[known] = torch.stack(parts, -1).unique(dim=0, return_inverse=True)[1].to(groups)
    return groups


_IDLE = (
    "the KL controller has not been updated for {:,} {}: {}. Lower `update_every`, collect longer "
    'batches, use a controller with per="step", or pass a number as `init_coeff`.'
)
_ALONE = (
    "each of {} ranks feeds a KL controller alone, so that their coefficients will differ. Set "
    "`controller.group = torch.distributed.group.WORLD` on all ranks that train one policy."
)
_NO_TIME = (
    "the controller is fed nats per trajectory, and in a batch of shape {} without a time dimension"
    ' trajectories cannot be told apart: name the last dimension "time" or pass `time_dim`, call '
    "freeze() first, or use a controller with per='step'."
)
