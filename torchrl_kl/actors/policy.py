"""The policy in training: shared, never owned; and how its steps differ from random ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pickle import PicklingError
from typing import Any, Generic, NamedTuple, TypeVar

from tensordict import NestedKey, TensorDictBase, unravel_key
from torch import Tensor, nn
from torchrl.envs.utils import ExplorationType, exploration_type

from torchrl_kl.actors.protocol import as_kl_actor
from torchrl_kl.keys import LogProbKeys, as_tuple

Held = TypeVar("Held")


class Borrowed(Generic[Held]):
    """Holds a module that somebody else owns: it is not a submodule, and deep copies share it."""

    # A submodule would be moved and put into eval mode with the env, and a deep copy would not see
    # it learn. `refusal`: why it must not be pickled, if so.
    def __init__(self, held: Held, *, refusal: str | None = None):
        self.held, self.refusal = held, refusal

    def __deepcopy__(self, memo: dict) -> Borrowed[Held]:
        return self

    def __getstate__(self) -> dict:
        if self.refusal is not None:
            raise PicklingError(self.refusal)
        return self.__dict__


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Eval mode for the time of a pass; afterwards each part of the module has its former mode."""
    training = [part for part in module.modules() if part.training]
    for part in training:
        # Not by `eval()`, at which some modules merge their adapters.
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True


class Acting(NamedTuple):
    """What separates the steps of a policy from those of a random one, and draws from an argmax."""

    trace_keys: Sequence[NestedKey]  # entries that only a forward pass of the policy writes
    interaction_type: Any  # how it chooses by default

    @classmethod
    def of(cls, policy: Any, recorded: LogProbKeys) -> Acting:
        """That of a policy, whose log-probs are `recorded`."""
        drawn = (*policy.dist_sample_keys, *as_kl_actor(policy).replayed_keys)  # may be all zeros
        known = {*map(unravel_key, (*policy.in_keys, *drawn)), *recorded.keys}
        written = [key for key in map(unravel_key, policy.out_keys) if as_tuple(key)[0] != "next"]
        traces = [key for key in written if key not in known]
        return cls(traces, getattr(policy, "default_interaction_type", None))

    def samples(self) -> bool:
        """Whether the policy draws its actions now: k1 of an argmax is biased."""
        return (exploration_type() or self.interaction_type) == ExplorationType.RANDOM

    def refuse_random_steps(
        self, tensordict: TensorDictBase, log_prob: Tensor, mask: Tensor | None
    ) -> None:
        """RuntimeError if a random policy acted in a step of a batch that counts, as far as seen.

        For random frames collectors fill what the policy writes with zeros: the log-prob and all
        traces. A log-prob of 0 alone may be that of a policy that is certain.
        """
        n_batch = tensordict.batch_dims
        traces = [tensordict.get(key, None) for key in self.trace_keys]
        traces = [each for each in traces if isinstance(each, Tensor) and each.ndim > n_batch]
        zero = (log_prob == 0).unsqueeze(-1).flatten(n_batch).all(-1)
        if mask is not None:
            zero = zero & mask.reshape(*zero.shape, -1).any(-1)
        for each in traces if zero.any() else ():
            zero = zero & ~each.detach().bool().flatten(n_batch).any(-1)
        if traces and zero.any():
            raise RuntimeError(
                f"in {int(zero.sum())} of {zero.numel()} steps the log-prob and all that the "
                "policy writes is 0, as in the frames of a random policy (`init_random_frames`), "
                "of which the KL is not known: put the KL transforms into the env, which tells "
                "them apart."
            )
