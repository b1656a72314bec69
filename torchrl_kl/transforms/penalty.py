"""Subtracts the KL from the reward, and feeds the controller that adapts the coefficient."""

import math
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor, nn
from torchrl.data import Composite, TensorSpec
from typing_extensions import Self

from torchrl_kl.batches import counted, expand_right, find_ends, of_values
from torchrl_kl.controllers import KLController, KLStatistics, as_controller
from torchrl_kl.feeding import ControllerFeed, Reading
from torchrl_kl.functional.numbers import check_finite, widened, working_dtype
from torchrl_kl.keys import ResolvedKeys, get_required, sibling
from torchrl_kl.transforms.base import Leaf, Steps
from torchrl_kl.transforms.placement import refuse_sums
from torchrl_kl.transforms.scorer import Measured

NO_KL = "put KLDivergenceTransform before this transform, or name its entry with `KLKeys(kl=...)`."
_NO_REWARD = "name the reward to penalize: `KLKeys(reward=...)`, or KLRewardTransform's `in_keys`."
_NO_SUM = (
    "the running sum is carried from step to step. Reset the env first, and let no later transform "
    "drop or rename that entry."
)
_GROUP_IN_ENV = (
    "the controller has a `group`, but the envs of its ranks do not step together: one rank would "
    "wait for another. Pass the stack as the collector's `postproc`, as kl_collector does "
    'with `where="learner"`, or call freeze() first.'
)


class Penalty(nn.Module):
    """Subtracts `coeff * kl` from rewards, and feeds the controller; see RewardAdjustmentTransform.

    `records`: whether it writes more than the result and the coefficient; `reading`: options of
    `ControllerFeed.read`.
    """

    def __init__(
        self,
        controller: KLController | float,
        keys: ResolvedKeys,
        *,
        update_every: int | None = None,
        records: bool = True,
        **reading: Any,
    ):
        super().__init__()
        self.controller, self.feed = as_controller(controller), ControllerFeed(update_every)
        self.keys, self.records, self._reading = keys, records, reading
        self.writes = [keys.penalized, keys.kl_coeff]
        if records:
            self.writes += [keys.task_reward, keys.episode_kl]
            # In an env, the sums of a trajectory from which a coefficient is planned, too.
            if self.controller.reads_rewards and self.controller.per == "trajectory":
                self.writes.append(keys.episode_sums)

    @property
    def measures_only(self) -> bool:
        """Whether the coefficient is, and stays in this call, 0: nothing is subtracted."""
        return self.controller.coeff.item() == 0 and not self.controller.planning

    def check(self, measured: Measured, reward: Tensor) -> None:
        """Refuses wrong shapes and invalid numbers, before anything changes."""
        kl, fed, mask, log_probs = measured
        check_reward(kl.shape, reward, self.keys.reward)
        # At first all at once, in a few microseconds.
        total = kl.detach().sum() + reward.detach().sum()
        total = total if fed is kl else total + fed.detach().sum()
        if torch.compiler.is_compiling() or math.isfinite(total.item()):
            return
        entries = log_probs | {self.keys.kl: kl, self.keys.kl_estimate: fed}
        if self.measures_only:  # an infinite KL is subtracted from nothing
            entries = {key: value.masked_fill(value.isinf(), 0.0) for key, value in entries.items()}
        check_finite("the KL penalty", entries | {self.keys.reward: reward}, mask)

    def apply(self, next_tensordict: TensorDictBase, kl: Tensor, reward: Tensor) -> None:
        """Writes the penalized reward and the coefficient, of the reward's shape, (*B, *A, 1)."""
        # In half precision the reward would swallow a penalty of less than its last digit.
        reward = widened(reward)
        # `coeff` is 0-dim float64; the product is taken in the reward's dtype.
        applied = torch.empty_like(reward).copy_(self.controller.coeff)
        penalized = torch.addcmul(reward, applied, kl.to(reward.dtype), value=-1)
        # A coefficient of 0 subtracts nothing: 0 * inf would be NaN.
        penalized = torch.where(applied.bool(), penalized, reward)
        next_tensordict.set(self.keys.penalized, penalized)
        next_tensordict.set(self.keys.kl_coeff, applied)
        if self.records:
            next_tensordict.set(self.keys.task_reward, reward)

    def adjust(self, steps: Steps, measured: Measured) -> None:
        """Penalizes steps, adds up their trajectories, and feeds the controller."""
        next_tensordict, in_batch = steps.following, steps.moves is not None
        if in_batch:
            self.refuse_sums(steps.data)
        elif self.controller.moves and self.controller.group is not None and not self.feed.frozen:
            raise RuntimeError(_GROUP_IN_ENV)
        reward = get_required(next_tensordict, self.keys.reward, _NO_REWARD)
        self.check(measured, reward)
        reading = None
        if in_batch and self.records:
            # First, so that the batch is penalized with what is planned from it.
            reading = self._read(steps, measured, reward)
        # Before an update of the controller changes the coefficient.
        self.apply(next_tensordict, measured.kl, reward)
        if reading is not None:
            if reading.running is not None:
                next_tensordict.set(self.keys.episode_kl, reading.running)
            self.feed.learn(self.controller, reading)
        elif self.records:
            self._add(steps, measured, reward)

    def _add(self, steps: Steps, measured: Measured, reward: Tensor) -> None:
        """Adds an env step to the sums of its trajectory, and feeds the controller."""
        # The sums are entries of the data, so that TorchRL sets them to zero in partial resets.
        fed = widened(measured.fed.detach())
        episode_kl = get_required(steps.data, self.keys.episode_kl, _NO_SUM) + fed
        steps.following.set(self.keys.episode_kl, episode_kl)
        sums = torch.cat([reward.detach().to(fed), measured.kl.detach().to(fed)], -1)
        if self.keys.episode_sums in self.writes:  # (*B, *A, 2)
            sums = sums + get_required(steps.data, self.keys.episode_sums, _NO_SUM)
            steps.following.set(self.keys.episode_sums, sums)
        if self.feed.frozen or not self.controller.moves:
            return
        taken = self._taken(steps._replace(mask=measured.mask), fed)
        values = (fed if self.controller.per == "step" else episode_kl)[taken]
        planning = self.controller.planning
        if self.controller.reads_rewards and len(values):
            rewards, log_ratios = sums[taken.squeeze(-1)].double().unbind(-1)
            self.feed.plan_from(self.controller, rewards=rewards, log_ratios=log_ratios)
        # That from which a coefficient is planned says nothing about it.
        self.feed.pool(self.controller, values[: 0 if planning else None], in_env=True)

    def _taken(self, steps: Steps, fed: Tensor) -> Tensor:
        """True where an env step tells the controller something, shape of `fed`."""
        taken, shape = torch.ones_like(fed, dtype=torch.bool), fed.shape
        if self.controller.per == "trajectory":
            # An agent whose trajectory ends need not act in that step.
            ends, _ = find_ends(steps.data, steps.following, self.keys, shape)
            taken, steps = ends.unsqueeze(-1), steps._replace(mask=None)
        if not taken.any():  # as in most steps
            return taken
        mask = of_values(without_random(steps, self.keys), shape)
        return taken if mask is None else taken & expand_right(mask, shape)

    def refuse_sums(self, tensordict: TensorDictBase) -> None:
        """RuntimeError if rewards of a batch that is penalized were added up already."""
        if not self.measures_only:
            refuse_sums(tensordict)

    def observe(self, tensordict: TensorDictBase) -> None:
        """Feeds the controller with a batch (*B) that the workers of a collector penalized."""
        following = tensordict.get("next")
        steps = Steps(tensordict, following, counted(tensordict, self.keys), True)
        measured = self.read(steps)
        reward = get_required(following, self.keys.task_reward, _NO_REWARD)
        self.feed.learn(self.controller, self._read(steps, measured, reward))

    def read(self, steps: Steps) -> Measured:
        """The KL and the estimate that were measured, 0 where steps do not count."""
        kl = get_required(steps.following, self.keys.kl, NO_KL)  # (*B, *A, 1)
        fed = steps.following.get(self.keys.kl_estimate, kl)
        mask = of_values(steps.mask, kl.shape)
        if mask is not None:
            counts = expand_right(mask, kl.shape)
            kl, fed = torch.where(counts, kl, 0.0), torch.where(counts, fed, 0.0)
        return Measured(kl, fed, mask, {})

    def _read(self, steps: Steps, measured: Measured, reward: Tensor) -> Reading:
        return self.feed.read(
            self.controller,
            steps.data,
            measured.fed.detach(),
            measured.mask,
            keys=self.keys,
            **self._reading,
            reward=reward.detach(),
            log_ratio=measured.kl.detach(),
            trace=bool(steps.moves),
        )

    def refuse_penalized(self, entries: Composite | TensorDictBase, where: str) -> None:
        """RuntimeError if the coefficient is among the entries: the reward was penalized before."""
        signs = {self.keys.kl_coeff}
        if self.keys.penalized != self.keys.reward:  # which must not be penalized either
            signs.add(sibling(self.keys.reward, "kl_coeff"))
        if found := signs & set(entries.keys(True, True)):
            raise RuntimeError(
                f"{where} has {min(map(str, found))!r}: {self.keys.reward!r} was penalized for its "
                "KL before, and a second penalty would count it twice. Use one stack; for a second "
                'reference or another reward use other keys: `keys=KLKeys.named("second")`.'
            )

    def leaves(
        self, rewards: Composite, kl_shape: torch.Size, dtype: torch.dtype
    ) -> dict[NestedKey, Leaf]:
        """What it adds to an observation spec; ValueError if KL and reward differ in shape."""
        reward = get_required(rewards, self.keys.reward, _NO_REWARD, "reward spec")
        check_reward(kl_shape, reward, self.keys.reward, in_env=True)
        # In the observation spec, not in the reward spec, where a RewardSum would sum them too.
        dtype, n_sums = working_dtype(dtype), (*kl_shape[:-1], 2)
        sums = {self.keys.episode_kl: (kl_shape, dtype), self.keys.episode_sums: (n_sums, dtype)}
        written = (key for key in self.writes if key != self.keys.reward)
        return {key: sums.get(key, (reward.shape, reward.dtype)) for key in written}


class Penalizing:
    """What a transform that owns a `Penalty` shows of it."""

    penalty: Penalty

    @property
    def controller(self) -> KLController:
        """The controller, whose coefficient is subtracted."""
        return self.penalty.controller

    @property
    def needs_ends(self) -> bool:
        """Whether its controller is fed finished trajectories."""
        return self.controller.per == "trajectory" and self.controller.moves

    def refuse_penalized(self, entries: Composite | TensorDictBase, where: str) -> None:
        """RuntimeError if the rewards were penalized before; see `Penalty`."""
        self.penalty.refuse_penalized(entries, where)

    @property
    def statistics(self) -> KLStatistics:
        """The KL values pooled since the controller's last update."""
        return self.penalty.feed.statistics

    @property
    def frozen(self) -> bool:
        """Whether the controller is stopped, also in all clones."""
        return self.penalty.feed.frozen

    def freeze(self) -> Self:
        """Stops the controller; rewards are penalized with its present coefficient."""
        self.penalty.feed.frozen = True
        return self

    def unfreeze(self) -> Self:
        """Lets the controller be updated again."""
        self.penalty.feed.frozen = False
        return self


def check_reward(
    kl: torch.Size, reward: Tensor | TensorSpec, key: NestedKey, *, in_env: bool = False
) -> None:
    """ValueError or TypeError for a reward that no KL of shape `kl` can be subtracted from."""
    shape = reward.shape
    if kl != shape:
        n, fix = len(shape) - 1, ""
        if shape[n:] == (1,) and kl[:n] == shape[:n] and kl.numel() > shape.numel():
            fix = "sum it over agents for a shared reward (`sum_agents=True`), and "
        raise ValueError(
            f"the KL and {key!r} must have the same shape, got {tuple(kl)} and {tuple(shape)}: the "
            f"KL would be broadcast; {fix}give the reward of an action one trailing dimension, of "
            "size 1 (the sum, before the KL transforms, if the action takes several steps of the "
            "env)."
        )
    # A batch's reward becomes float32; the spec of an env says what it is.
    dtype: torch.dtype = reward.dtype  # type: ignore[assignment]
    if not dtype.is_floating_point or (in_env and working_dtype(dtype) != dtype):
        raise TypeError(
            f"{key!r} must be floating point, in an env float32 or float64, got {dtype}: the "
            "penalty would be rounded away. Cast the reward before the penalty, in an env with "
            f"DTypeCastTransform({dtype}, torch.float32, in_keys=[{key!r}])."
        )


def without_random(steps: Steps, keys: ResolvedKeys) -> Tensor | None:
    """The mask (*B, *A) without steps whose actions were not drawn, if a part says so."""
    mask, not_drawn = steps.mask, steps.following.get(keys.not_drawn, None)  # (*B, *A, 1)
    if not_drawn is None or not not_drawn.any():
        return mask
    drawn = ~not_drawn.flatten(steps.data.batch_dims).any(-1)
    return drawn if mask is None else mask & expand_right(drawn, mask.shape)
