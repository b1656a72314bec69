"""Pools measured KL, and updates a controller with it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable
from typing import Any, cast

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor, nn

from torchrl_kl import _tensordict as td
from torchrl_kl._feeding.rewards import RewardFeed
from torchrl_kl._feeding.sums import sum_trajectories
from torchrl_kl.controllers import (
    KLController,
    KLStatistics,
    TargetKLController,
    is_constant,
)
from torchrl_kl.controllers.plan import RewardPlan
from torchrl_kl.controllers.trajectories import OpenTrajectories

_ENV_TRAJECTORIES, _ENV_STEPS = 16, 256  # an update in an env waits for so many by default
_CHOSEN = {"coeff", "estimator", "on_invalid", "update_every"}  # arguments that stay as they were
_PATIENCE = {"batches": 10, "env steps": 10_000}  # without an update, before the user is warned


class ControllerFeed(nn.Module):
    """Pools measured KL and updates a controller with the mean and the count of the pool.

    State: the controller's and the pool's; as extra state what `stream` has open, the truncated
    trajectories of the collector that moved the controller last (a resumed collector begins new
    ones), and what the controller has still to plan from.
    """

    def __init__(self, controller: KLController, update_every: int | None = None):
        super().__init__()
        self.controller, self.statistics = controller, KLStatistics()
        self.update_every = update_every
        if update_every is not None:
            self._check_update_every(update_every)
        # The open trajectories of batches that come without those of their collector.
        self.stream = OpenTrajectories()
        self._latest = self.stream  # which moved the controller last
        self._truncated: list[float] = []  # totals that the collector of a resumed run had left
        self._idle = dict.fromkeys(_PATIENCE, 0)  # batches and env steps since the last update
        self._warned = False
        self.rewards = RewardFeed()  # which it is given for as long as it plans

    @property
    def adaptive(self) -> bool:
        """Whether the coefficient can change."""
        return not is_constant(self.controller)

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
            finished = torch.cat([finished.new_tensor(self._truncated), finished])
            pooled = (values, mask) if self.controller.per == "step" else (finished,)
            try:
                self.pool(*pooled)
                self._truncated, self._latest = [], stream
            except BaseException:  # also of the user's own controller, or Ctrl-C
                # The user may repair the batch and pass it again.
                stream.restore(before)
                raise
        return running

    def pool(
        self, values: Tensor | None, mask: Tensor | None = None, *, in_env: bool = False
    ) -> None:
        """Adds the values in the mask, nats per trajectory or step; may update the controller."""
        if self.rewards.take_withheld():
            # A KL at which the plan was made says nothing about it.
            self._idle, self._warned = dict.fromkeys(_PATIENCE, 0), False
            return
        if self.controller.planning:
            values = None
        if values is not None and mask is not None:
            values = values[td.expand_right(mask, values.shape)]
        if values is not None and values.numel():
            controller, pool = self.controller, self.statistics
            # A coefficient of 0 only measures: an infinite KL must not stop the training.
            if controller.coeff.item() == 0:
                values = values[values.isfinite()]
            count = int(pool.add(values).count.item())
            if count >= self.needed(in_env):
                mean, standard_error = pool.mean, pool.standard_error
                # Before the update: values that the controller refuses must not come back.
                pool.reset()
                # One update with the mean. With one for each trajectory, the clip of a controller
                # would make it steer the median.
                controller.update(mean, count, standard_error=standard_error)
                self._idle = dict.fromkeys(_PATIENCE, 0)
        if self.adaptive and not self._warned:
            self._count_idle("env steps" if in_env else "batches")

    def get_extra_state(self) -> Tensor:
        """JSON as bytes, (N,) uint8, since some containers of states hold tensors only."""
        truncated = [] if self._latest is self.stream else self._latest.truncated()
        state = {"idle": self._idle, "warned": self._warned, "stream": self.stream.state_dict()}
        state |= {"truncated": self._truncated + truncated, "per": self.controller.per}
        rewards = self.rewards.state_dict(self.stream, self._latest)
        state["rewards"] = rewards if self.controller.planning else None
        return torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """Goes on from what `get_extra_state` returned."""
        found = json.loads(bytes(state.tolist()))
        if (per := found.get("per", self.controller.per)) != self.controller.per:
            raise ValueError(
                f"the state is of a controller with per={per!r}, got one with per="
                f"{self.controller.per!r}: what was pooled is in that unit. Build it with "
                f"per={per!r}, or load only the state of the controller."
            )
        self._idle, self._warned = dict(found["idle"]), bool(found["warned"])
        # A collector that goes on in this process still has its own, and tells them itself.
        alive = self._latest is not self.stream
        self._truncated = [] if alive else list(found["truncated"])
        stream = OpenTrajectories()
        stream.load_state_dict(found["stream"])
        self.stream.restore(stream)
        if found["rewards"] is not None:
            self.rewards.load_state_dict(found["rewards"], self.stream, alive=alive)

    def needed(self, in_env: bool) -> int:
        """How many values an update waits for."""
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
        if self.controller.planning:
            plan = cast(RewardPlan, self.controller.plan)
            warnings.warn(
                f"the KL controller has planned no coefficient for {_PATIENCE[what]:,} {what}: it "
                f"plans from the rewards of {unit}, {len(plan.samples)} came, and {plan.reason}. "
                f"The coefficient stays {self.controller.coeff.item():.4g}. Collect longer batches,"
                ' use a controller with per="step", or pass a number as `init_coeff`.',
                stacklevel=2,
            )
            return
        count, needed = int(self.statistics.count), self.needed(what == "env steps")
        warnings.warn(
            f"the KL controller has not been updated for {_PATIENCE[what]:,} {what}: an update "
            f"waits for {needed} {unit}, {count} came, {needed - count} are missing. Lower "
            '`update_every`, collect longer batches, or use a controller with per="step".',
            stacklevel=2,
        )


class Fed(nn.Module):
    """Base of what feeds a controller; the controller is chosen once, since the feed holds it."""

    feed: ControllerFeed

    @property
    def controller(self) -> KLController:
        """The controller, which holds the coefficient."""
        return self.feed.controller

    @property
    def statistics(self) -> KLStatistics:
        """The KL values pooled since the controller's last update."""
        return self.feed.statistics

    def __setattr__(self, name: str, value: Any) -> None:
        # `nn.Module` would keep another controller as a submodule, which nobody asks.
        if name in ("controller", "statistics"):
            raise AttributeError(
                f"`{name}` of {type(self).__name__} cannot be replaced, got a "
                f"{type(value).__name__}: build the {type(self).__name__} with the controller that "
                "it is to have, or change the state of the present one."
            )
        # No attribute holds these: it would change nothing. A user's class may have its own.
        if name in _CHOSEN and type(self).__module__.startswith("torchrl_kl."):
            fix = "build another one, with the same `controller` and `reference`"
            fix = "change `controller.coeff` in place, with `fill_`" if name == "coeff" else fix
            raise AttributeError(
                f"`{name}` of {type(self).__name__} stays as it was built, got {value!r}: {fix}."
            )
        super().__setattr__(name, value)


_NO_TIME = (
    "the controller is fed nats per trajectory, and in a batch of shape {} without a time dimension"
    ' trajectories cannot be told apart: name the last dimension "time" or pass `time_dim`, call '
    "freeze() first, or use a controller with per='step'."
)
