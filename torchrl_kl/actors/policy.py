"""The policy in training: shared, never owned, and asked for log-probs that it did not record.

Also, how its steps are told from those of a random one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pickle import PicklingError
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential
from torch import Tensor, nn
from torchrl.envs.utils import ExplorationType, exploration_type
from torchrl.modules import set_recurrent_mode

from torchrl_kl._tensordict import LogProbKeys, expand_right
from torchrl_kl.actors.reading import (
    DIST_METHODS,
    check_actor,
    dist_module_of,
    log_prob_of_actions,
    own_methods,
    read_keys,
    trace_keys,
)

Held = TypeVar("Held")

_NOT_PICKLED = (
    "a transform with `recompute_log_prob` cannot be sent to another process, where it would not "
    "see the policy learn: record the log-prob (`return_log_prob=True`), or use it as `postproc`."
)


class Borrowed(Generic[Held]):
    """Holds a module that somebody else owns: it is not a submodule, and deep copies share it."""

    # `refusal` says why it must not be pickled; None if a copy in another process serves as well.
    # As a submodule of a transform the policy would be moved and put into eval mode with the env,
    # be in `state_dict` twice, and a deep copy of the transform would no longer see it learn.
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


class ActingPolicy(Borrowed[Any]):
    """The acting policy, whose present log-probs replace those that it did not record."""

    def __init__(self, policy: nn.Module, recorded: LogProbKeys):
        check_actor(policy)
        super().__init__(policy, refusal=_NOT_PICKLED)
        self.recorded = recorded

    def shares_weights(self, actor: nn.Module) -> bool:
        """Whether it has the weights of `actor`, which it may wrap."""
        pairs = zip(self.held.parameters(), actor.parameters(), strict=False)
        return all(own is other for own, other in pairs)

    def ran(self, tensordict: TensorDictBase, action_keys: Collection[NestedKey]) -> bool:
        """Whether it drew the action of an env step: it left entries other than env actions."""
        policy = self.held
        traces = [key for key in trace_keys(policy, self.recorded) if key not in action_keys]
        if not traces:
            raise ValueError(
                f"`actor` writes only {policy.out_keys}: with `recompute_log_prob` its actions in "
                "an env could not be told from random ones. Let it keep another of its out_keys."
            )
        return any(tensordict.get(key, None) is not None for key in traces)

    @torch.no_grad()
    def log_prob(self, tensordict: TensorDictBase, *, timed: bool) -> Tensor:
        """Its present log-prob of a batch (*B), nats; `timed`: the last dimension is time."""
        # Without its other outputs: parameters left in the batch would be taken for inputs.
        actions = self.held.dist_sample_keys
        inputs = tensordict.select(*read_keys(self.held), *actions, strict=False)
        with evaluating(self.held), set_recurrent_mode(timed):
            return log_prob_of_actions(self.held, inputs, actions, self.recorded)


class Acting(NamedTuple):
    """How the steps of a policy are told from those of a random one, and draws from an argmax."""

    trace_keys: Sequence[NestedKey]  # entries that only a forward pass leaves
    interaction_type: Any  # how it chooses by default
    # Builds the distribution from what the policy recorded, or None. It is the policy's, not a
    # copy: it may change, such as a temperature that is learned.
    dist_module: Borrowed[Any]

    @classmethod
    def of(cls, policy: Any, recorded: LogProbKeys) -> Acting:
        """That of a policy, whose log-probs are `recorded`."""
        by_default, module = getattr(policy, "default_interaction_type", None), None
        with suppress(ValueError):  # several distributions
            module = dist_module_of(policy)
        return cls(trace_keys(policy, recorded), by_default, Borrowed(module))

    @staticmethod
    def is_plain(policy: Any) -> bool:
        """Whether a policy draws and scores in TorchRL's way, not in one of its class."""
        plain = isinstance(getattr(policy, "_orig_mod", policy), ProbabilisticTensorDictSequential)
        return plain and not own_methods(policy, ("forward", "log_prob", *DIST_METHODS))

    def samples(self) -> bool:
        """Whether the policy draws its actions now: k1 of an argmax is biased."""
        return (exploration_type() or self.interaction_type) == ExplorationType.RANDOM

    def random_steps(
        self, tensordict: TensorDictBase, log_prob: Tensor, mask: Tensor | None
    ) -> Tensor | None:
        """True where a random policy acted, (*B); None if it did nowhere, or nothing tells.

        For its frames (`init_random_frames`) collectors fill what the policy writes with zeros.
        `log_prob`: as recorded, (*B, *A); `mask`: True where a step counts, (*B).
        """
        n_batch, batch_size = tensordict.batch_dims, tensordict.batch_size
        # A log-prob of 0 alone may be that of a policy that is certain.
        zero = (log_prob == 0).reshape(*batch_size, -1).all(-1) if log_prob.numel() else None
        if zero is None or not zero.any():
            return None
        if mask is not None:
            zero = zero & expand_right(mask, batch_size)
        seen = False
        for key in self.trace_keys:
            value = tensordict.get(key, None)
            if isinstance(value, Tensor) and value.ndim > n_batch:
                zero, seen = zero & ~value.detach().flatten(n_batch).bool().any(-1), True
        if not seen or not zero.any():
            return None
        # Where a mask leaves one action, parameters of 0 explain a log-prob of 0.
        certain, module = torch.zeros_like(zero), self.dist_module.held
        with suppress(Exception), torch.no_grad():  # not recorded, or no valid parameters
            action_key = module.dist_sample_keys[0]
            steps = tensordict.select(*module.in_keys, action_key).reshape(-1)[zero.flatten()]
            explained = module.get_dist(steps).log_prob(steps.get(action_key)) == 0
            certain[zero] = explained.reshape(len(steps), -1).all(-1)
        zero = zero & ~certain
        return zero if zero.any() else None
