"""How a reward is charged, and what a reward that was charged before is known by."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from torch import Tensor
from torchrl.data import Composite, TensorSpec

from torchrl_kl._tensordict import add_spec, beside
from torchrl_kl.transforms.base import get_required


@dataclass(frozen=True)
class Charge:
    """Charges one reward; `kl_coeff_key` beside it is the sign that it was done.

    Args:
        reward_key: the reward before.
        out_key: the reward after; the same key, or another.
        kl_coeff_key: the coefficient that each entry was charged with.
    """

    reward_key: NestedKey
    out_key: NestedKey
    kl_coeff_key: NestedKey

    def __call__(self, next_tensordict: TensorDictBase, kl: Tensor, coeff: Tensor) -> None:
        """Writes `reward - coeff * kl` and the coefficient; a coefficient of 0 charges nothing, not even infinity."""
        reward = get_required(
            next_tensordict, self.reward_key, "name the key of the reward to charge."
        )
        self.check_shape(kl.shape, reward.shape)
        if not reward.is_floating_point():
            raise TypeError(
                f"{self.reward_key!r} must be floating point, got {reward.dtype}: the coefficient would be rounded to "
                "an integer. Cast the reward before the charge."
            )
        charged_with = torch.empty_like(reward).copy_(coeff)
        charged = torch.addcmul(reward, charged_with, kl.to(reward.dtype), value=-1)
        next_tensordict.set(self.out_key, torch.where(charged_with == 0, reward, charged))
        next_tensordict.set(self.kl_coeff_key, charged_with)

    def check_shape(self, kl: torch.Size, reward: torch.Size) -> None:
        """ValueError unless KL and reward have the same shape."""
        if kl != reward:
            raise ValueError(
                f"the KL and {self.reward_key!r} must have the same shape, got {tuple(kl)} and {tuple(reward)}: "
                "broadcasting would charge the same KL several times. The KL has the batch shape of the tensordict "
                "that holds the action, plus 1; sum it over agents for a shared reward (with `reduce`), and reduce "
                "a reward of several trailing dimensions to one."
            )

    def refuse_charged(self, keys: Iterable[NestedKey], where: str) -> None:
        """RuntimeError if the coefficient is among the keys: the reward was charged before."""
        signs = {self.kl_coeff_key}
        if (
            self.out_key != self.reward_key
        ):  # what the result starts from must not have been charged either
            signs.add(beside(self.reward_key, "kl_coeff"))
        found = signs & {unravel_key(key) for key in keys}
        if found:
            raise RuntimeError(
                f"{where} has {min(map(str, found))!r}: {self.reward_key!r} was charged for its KL before, and a "
                "second charge would count it twice. Use one stack, in the env or on the batch; for another reward, "
                "give this transform a `kl_coeff_key` of its own."
            )

    def unbounded_reward_spec(self, reward_spec: Composite) -> Composite:
        """The reward spec with the bounds of a reward that is charged in place taken away."""
        if self.out_key == self.reward_key:
            leaf = reward_spec[self.reward_key]
            add_spec(reward_spec, self.reward_key, leaf.shape, leaf.dtype, reward_spec.shape)
        return reward_spec


def add_reward_like(spec: Composite, key: NestedKey, reward: TensorSpec) -> None:
    """Adds an unbounded leaf of the reward's shape and dtype."""
    add_spec(spec, key, reward.shape, reward.dtype, reward.shape[:-1])
