"""Reads the task rewards from which a controller plans its coefficient, and what tells them apart.

Axes: *B is the batch, *A are agents, R rows of T steps with F values each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor

from torchrl_kl import _tensordict as td
from torchrl_kl._feeding.sums import digests, state_keys, sum_trajectories
from torchrl_kl.controllers import KLController, TargetKLController
from torchrl_kl.controllers.plan import RewardPlan
from torchrl_kl.controllers.trajectories import OpenTrajectories
from torchrl_kl.functional.numbers import uncompiled

_BLOCK = 16  # neighbouring steps whose rewards a plan compares
_NATS_SHOWN = 2.0  # so much KL of whole trajectories a few hundred of them can show


class EnvReturns:
    """Rewards and log-ratios of the trajectories in the rows of one env, up to the present step.

    They are NaN in a row whose trajectory was not seen from its beginning, such as one of another
    rollout: it does not go on from what the last step has left. For a target per step, the numbers
    of the blocks of neighbouring steps in its rows.
    """

    def __init__(self):
        # Rewards, log-ratios, the running sum of the KL that the data have, and their last reward:
        # (4, *B, *A, 1), or (4) where all rows begin; None before the first reset.
        self.sums = cast(Tensor | None, None)
        self.block = cast(Tensor | None, None)  # its number in each row, (*B, *A, 1)
        self.n_in_block = 0  # steps of the present one

    def add(
        self,
        reward: Tensor,
        kl: Tensor,
        before: Sequence[Tensor | None],
        after: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Adds what a step has brought, (*B, *A, 1) each; returns both sums.

        `before`, `after`: the running sum of the KL and the last task reward in the data, which
        show whether a row goes on; the sum alone is 0 for as long as the policy is the reference.
        """
        step = torch.stack([reward, kl.to(reward)]).detach().double()
        sums = torch.full_like(step[:1], torch.nan).expand(4, *step.shape[1:])
        if self.sums is not None and self.sums.ndim == 1:
            sums = torch.zeros_like(sums)
        elif self.sums is not None and self.sums.shape == sums.shape:
            sums = self.sums.to(step)
        known = torch.ones_like(reward, dtype=torch.bool)
        for left, entry in zip(sums[2:], before, strict=True):
            if entry is not None:  # which a later transform may have cast
                known = known & (left.to(entry) == entry)
        totals = step + torch.where(known, sums[:2], torch.nan)
        self.sums = torch.cat([totals, torch.stack([each.detach().to(totals) for each in after])])
        return totals[0], totals[1]

    def number_block(self, plan: RewardPlan, like: Tensor) -> Tensor:
        """The numbers of the blocks of the next step in rows `like` (*B, *A, 1), float64."""
        if self.block is None or self.block.shape != like.shape or self.n_in_block == _BLOCK:
            n = like.numel()
            numbers = plan.new_groups(n) + torch.arange(n, dtype=torch.float64, device=like.device)
            self.block, self.n_in_block = numbers.view(like.shape), 0
        self.n_in_block += 1
        return self.block.to(like.device)

    def begin(self, reset: Tensor | None) -> None:
        """Sets the sums to 0 where the env is reset; None: everywhere."""
        if reset is None:
            self.sums = torch.zeros(4, dtype=torch.float64)
        if reset is None or self.sums is None or self.sums.ndim == 1:
            return
        over = td.expand_right(reset, self.sums.shape[1:])
        self.sums = self.sums.to(over.device).masked_fill(over, 0.0)


class RewardFeed:
    """Collects rewards of trajectories or of steps, and gives them to a controller that plans.

    For a target per trajectory, trajectories of one agent that begin in the same state are a group.
    So they are for a target per step, if the target times their length is at most 2 nats. Longer
    ones cannot show their KL: there a step's reward is compared with those of its block of 16
    neighbouring steps, as if the policy could choose only that. Their mean length is that of those
    that end in a batch or are left open by it, as far as they have come.
    """

    def __init__(self):
        self.returns = EnvReturns()
        # Samples, four numbers each, that the collector of a resumed run had left truncated.
        self._truncated: list[float] = []
        self._by_blocks: bool | None = None  # for a target per step; None: not known yet
        self._samples: list[Tensor] = []  # of env steps, (3, N) each, not given yet
        self.withheld = False  # whether the plan was made since `take_withheld`

    def take_withheld(self) -> bool:
        """Whether the KL that comes next belongs to the rewards that have just made the plan."""
        withheld, self.withheld = self.withheld, False
        return withheld

    def give(self, controller: KLController, rewards: Tensor, **about: Tensor | None) -> None:
        """Gives samples (N,); see `TargetKLController.observe_rewards`."""
        if controller.planning and rewards.numel():
            cast(TargetKLController, controller).observe_rewards(rewards, **about)
            self.withheld = not controller.planning

    @uncompiled
    def add_batch(
        self,
        controller: KLController,
        tensordict: TensorDictBase,
        rewards: Tensor,
        log_ratios: Tensor,
        mask: Tensor | None,
        *,
        stream: OpenTrajectories,
        done_key: NestedKey,
        done_named: bool = True,
        time_dim: int | None = None,
        observed: Iterable[NestedKey] | None = None,
        move: bool = True,
    ) -> None:
        """Gives the task rewards of a batch (*B), and log pi - log pi_ref, both (*B, *A, 1).

        The rest is as for `ControllerFeed.add_batch`. If the controller may not `move`, only the
        sums of open trajectories are continued. Without a time dimension there is nothing to
        compare: steps are pooled, and trajectories cannot be told apart.
        """
        if not (controller.planning and rewards.numel()):
            return
        per_step = controller.per == "step"
        rewards, log_ratios = rewards.detach().double(), log_ratios.detach().double()
        counts = torch.ones_like(rewards, dtype=torch.bool)
        counts = counts if mask is None else td.expand_right(mask, rewards.shape)
        if td.find_time_dim(tensordict, time_dim) is None:
            if per_step and move:
                self.give(controller, rewards[counts], log_ratios=log_ratios[counts])
            return
        step = cast(TensorDictBase, tensordict.get("next"))
        done = td.find_done(step, done_key, named=done_named)
        # (*B, *A, 4): what is added up along a trajectory; the third one tells where it began.
        zeros, ones = torch.zeros_like(rewards), torch.ones_like(rewards)
        values = torch.cat([rewards, log_ratios, zeros, ones], -1)
        trial = stream.rewards.copy()
        options: dict[str, Any] = {"observed": observed, "judge": move}
        sums = sum_trajectories(tensordict, values, mask, done, trial, check_order=move, **options)
        n_counted = sums.running[..., 3:]  # of the trajectory of each step, up to it
        if per_step and self._by_blocks is None and move:
            last = cast(Tensor, td.find_ends(step, done, rewards.shape)).clone()
            last.select(tensordict.batch_dims - 1, -1).fill_(True)
            lengths = n_counted[last & (n_counted > 0)]
            self._by_blocks = controller.target * lengths.mean().item() > _NATS_SHOWN or None
        if per_step and self._by_blocks:
            if move:
                blocks = _number_blocks(n_counted, counts, tensordict.batch_size)
                first = cast(RewardPlan, controller.plan).new_groups(blocks.numel() + 1)
                about = {"log_ratios": log_ratios[counts], "groups": blocks[counts] + first}
                self.give(controller, rewards[counts], **about)
            stream.rewards.restore(trial)
            return
        values[..., 2:3] = _number_states(tensordict, counts & (n_counted == 1), observed)
        after = stream.rewards.copy()
        sums = sum_trajectories(tensordict, values, mask, done, after, check_order=False, **options)
        if move:
            self._give_finished(controller, sums.finished)
        # Not before: where an error is raised, the batch may be repaired, or the target lowered.
        stream.rewards.restore(after)

    def _give_finished(self, controller: KLController, finished: Tensor) -> None:
        """Gives the totals of trajectories, four numbers each; see `add_batch`."""
        finished = torch.cat([finished.new_tensor(self._truncated), finished])
        reward, log_ratio, group, length = finished.reshape(-1, 4).unbind(-1)
        lengths = length if controller.per == "step" else None
        self.give(controller, reward, log_ratios=log_ratio, groups=group, lengths=lengths)
        self._truncated = []
        if len(reward):
            self._by_blocks = False  # a plan is made of samples of one kind

    def add_env_step(
        self,
        controller: KLController,
        reward: Tensor,
        log_ratio: Tensor,
        counts: Tensor | None,
        *,
        blocks: Tensor | None = None,
        told: bool = True,
        needed: int,
    ) -> None:
        """Gives the rewards of env steps, (*B, *A, 1), in portions of `needed` samples.

        For a target per trajectory, reward and log-ratio are the sums of `EnvReturns`, and all
        trajectories are pooled; for one per step, `blocks` are its numbers. `counts`: True where a
        trajectory has finished, or a step counts; None: everywhere. NaN is left out. `told`:
        whether any step counts.
        """
        values = torch.stack([reward, log_ratio.to(reward)]).detach().double()
        groups = torch.full_like(values[0], torch.nan) if blocks is None else blocks
        if told:
            known = ~values[0].isnan()
            counts = known if counts is None else known & td.expand_right(counts, reward.shape)
            self._samples.append(torch.cat([values, groups[None]])[:, counts])  # (3, N)
        if sum(one.shape[1] for one in self._samples) >= needed:
            samples = [one.to(reward.device) for one in self._samples]
            rewards, log_ratios, groups = torch.cat(samples, 1)
            self.give(controller, rewards, log_ratios=log_ratios, groups=groups)
            self._samples = []

    def state_dict(self, stream: OpenTrajectories, latest: OpenTrajectories) -> dict[str, Any]:
        """What is open and what was not given yet, as plain values; for streams see there."""
        truncated = [] if latest is stream else latest.rewards.truncated()
        return {
            "stream": stream.rewards.state_dict(),
            "truncated": self._truncated + truncated,
            "returns": _to_list(self.returns.sums),
            "block": _to_list(self.returns.block),
            "n_in_block": self.returns.n_in_block,
            "by_blocks": self._by_blocks,
            "samples": [one.tolist() for one in self._samples],
        }

    def load_state_dict(
        self, state: Mapping[str, Any], stream: OpenTrajectories, *, alive: bool
    ) -> None:
        """Goes on from what `state_dict` returned; `alive`: whether the collector goes on too."""
        opened = OpenTrajectories()
        opened.load_state_dict(state["stream"])
        stream.rewards.restore(opened)
        self._truncated = [] if alive else list(state["truncated"])
        # In place: the transform in the env has this object, too.
        self.returns.sums = _to_tensor(state["returns"])
        self.returns.block = _to_tensor(state["block"])
        self.returns.n_in_block = state["n_in_block"]
        self._by_blocks = state["by_blocks"]
        self._samples = [torch.tensor(one, dtype=torch.float64) for one in state["samples"]]


def _to_list(values: Tensor | None) -> Any:
    return None if values is None else values.tolist()


def _to_tensor(values: Any) -> Tensor | None:
    return None if values is None else torch.tensor(values, dtype=torch.float64)


def _number_blocks(n_counted: Tensor, counts: Tensor, batch_size: torch.Size) -> Tensor:
    """A number for each block of neighbouring steps of one trajectory, (*B, *A, 1)."""
    starts = (counts & ((n_counted - 1) % _BLOCK == 0)).reshape(*_rows(batch_size), -1)
    starts[:, 0] = True
    # Row by row: (R, T, F) -> (R, F, T).
    numbers = starts.transpose(1, 2).flatten().cumsum(0).view(starts.transpose(1, 2).shape)
    return numbers.transpose(1, 2).reshape(counts.shape).double()


def _rows(batch_size: torch.Size) -> tuple[int, int]:
    """Rows R and steps T of a batch (*B) whose last dimension is time."""
    return batch_size[:-1].numel(), batch_size[-1]


def _number_states(
    tensordict: TensorDictBase, begins: Tensor, observed: Iterable[NestedKey] | None
) -> Tensor:
    """Numbers of the states where trajectories begin, 0 elsewhere, so that a sum tells them.

    Those of agents, whose rewards may be of different sizes, differ.
    """
    # `begins` and the result: (*B, *A, 1).
    n_rows, n_steps = _rows(tensordict.batch_size)
    numbers = torch.zeros(n_rows * n_steps, dtype=torch.float64)
    places = begins.reshape(n_rows * n_steps, -1).any(-1).nonzero().squeeze(-1).cpu()
    states = digests(tensordict, state_keys(tensordict, observed), tensordict.batch_dims, places)
    for place, state in zip(places.tolist(), states, strict=True):
        # 48 bits, which float64 holds exactly. Steps without any state differ.
        number = hashlib.blake2b(state or str(place).encode(), digest_size=6).digest()
        numbers[place] = int.from_bytes(number, "big")
    agents = begins.shape[tensordict.batch_dims :]
    agent = torch.arange(agents.numel(), device=begins.device).reshape(agents)
    numbers = numbers.to(begins.device).view(tensordict.batch_size)
    return (td.expand_right(numbers, begins.shape) + agent) * begins
