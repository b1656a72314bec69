"""The policy in training: shared, never owned, and asked for log-probs that it did not record."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pickle import PicklingError
from typing import Any, Generic, TypeVar

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor, nn
from torchrl.modules import set_recurrent_mode

from torchrl_kl._tensordict import LogProbKeys
from torchrl_kl.actors.reading import check_actor, log_prob_of_actions, read_keys, trace_keys

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
