"""The recurrent state of a reference at the first step of each row of a batch."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.data import TensorSpec

from torchrl_kl._tensordict import (
    MASK_KEY,
    TRAJECTORY_KEY,
    existing_keys,
    expand_right,
    get_required,
    require_order,
)

_CALLS = 4  # that may wait to be followed: of training batches, and of others in between


class UnknownStateError(RuntimeError):
    """The state of a recurrent reference is not known where it would have to begin."""


class _Left(NamedTuple):
    """Where a batch left a trajectory: the reference's states there, and what was observed next."""

    states: list[Tensor]
    observed: TensorDictBase  # with the policy's own state, if it is recorded


class RecurrentMemory:
    """The states in which batches left their trajectories, by `("collector", "traj_ids")`.

    Those of a batch are kept until another goes on with them, past evaluations in between, and then
    until one more goes on: it may be the same batch again, which was refused, and repaired.
    """

    def __init__(
        self,
        in_keys: list[NestedKey],
        init_key: NestedKey | None,
        state_keys: list[NestedKey],
        own_state_keys: list[NestedKey],
    ):
        self.in_keys, self.init_key = in_keys, init_key
        self.state_keys, self.own_state_keys = state_keys, own_state_keys
        # One of each batch, the latest one last; and those that the latest batch went on with.
        self._left: list[dict[int | None, _Left]] = []
        self._followed: list[dict[int | None, _Left]] = []

    def keep_states(self, inputs: TensorDictBase) -> None:
        """Sets `is_init` only where a trajectory begins; RuntimeError if a state is missing."""
        missing = [key for key in self.own_state_keys if inputs.get(key, None) is None]
        if missing:
            raise UnknownStateError(
                f"the reference is recurrent and its state {missing} is not in the data, got "
                f"{existing_keys(inputs)}: put KLConstrainedTransform or "
                "ReferenceModelLogProbTransform into the env, and give its `reference` to a loss, "
                'or pass batches whose last dimension is time (named "time", or `time_dim=`).'
            )
        # States are zero where a trajectory begins, where an actor may insert a learned one. A
        # SliceSampler sets `is_init` elsewhere too, where the state must not be replaced.
        is_init = None if self.init_key is None else inputs.get(self.init_key, None)
        if is_init is not None and self.init_key is not None:
            for key in self.own_state_keys:
                inside = _remembers(inputs.get(key), inputs.batch_dims)
                is_init = is_init & ~expand_right(inside, is_init.shape)
            inputs.set(self.init_key, is_init)

    def first_states(
        self, tensordict: TensorDictBase, specs: list[TensorSpec], zero_states: bool, carry: bool
    ) -> list[Tensor]:
        """States (*R, T, ...), set at the first step of each row; later trajectories start at 0."""
        shape = tensordict.batch_size
        if not shape[-1]:
            raise ValueError(
                f"a batch for a recurrent reference must have steps, got the shape {tuple(shape)} "
                "with an empty time dimension: leave such batches out."
            )
        self._check_order(tensordict)
        begins = torch.zeros(shape[:-1], dtype=torch.bool, device=tensordict.device)
        if self.init_key is not None:
            is_init = tensordict.get(self.init_key).reshape(shape)
            begins = is_init[..., 0]
            if not zero_states:
                self._check_marks(tensordict, is_init)
        again = self._followed
        if carry:
            self._followed = []
        # One id and one observation for each row: (R,), R = begins.numel().
        ids = tensordict.get(TRAJECTORY_KEY, None)
        first_ids = [None] * begins.numel() if ids is None else ids[..., 0].reshape(-1).tolist()
        read = tensordict.select(*self.in_keys, *self.state_keys, strict=False)
        observed = read[..., 0].reshape(-1)
        # (R, T, ...), zero where nothing is filled in below.
        size, device = (begins.numel(), shape[-1]), begins.device
        states = [torch.zeros(*size, *s.shape, dtype=s.dtype, device=device) for s in specs]
        for row in (~begins).reshape(-1).nonzero().flatten().tolist():
            known = self._state_before(first_ids[row], observed[row], again) if carry else None
            if known is None and not zero_states:
                raise UnknownStateError("a row of the batch begins inside a trajectory" + _UNKNOWN)
            for state, first in zip(states, known or (), strict=False):
                state[row, 0] = first
        self._followed = self._followed or again  # past evaluations, too
        return [state.reshape(*shape, *state.shape[2:]) for state in states]

    def remember(self, tensordict: TensorDictBase, states: list[Tensor]) -> None:
        """Keeps the state after the last valid step of each row, for a later call."""
        ids = tensordict.get(TRAJECTORY_KEY, None)
        if ids is None:
            return
        waiting = [left for left in self._left if all(left is not one for one in self._followed)]
        self._left = [*waiting[1 - _CALLS :], {}]
        n_steps, n_batch = tensordict.batch_size[-1], tensordict.batch_dims
        last = _last_valid(
            tensordict.get(MASK_KEY, torch.ones_like(ids, dtype=torch.bool)), n_steps
        )
        rows = torch.arange(len(last), device=ids.device)
        # (R, ...), from (*R, T, ...).
        ends = [state.reshape(-1, n_steps, *state.shape[n_batch:])[rows, last] for state in states]
        step = tensordict.get("next").select(*self.in_keys, *self.state_keys, strict=False)
        observed = step.reshape(-1, n_steps)[rows, last].clone()
        for row, trajectory in enumerate(ids.reshape(-1, n_steps)[rows, last].tolist()):
            states_of_row = [end[row].detach().clone() for end in ends]
            self._left[-1][trajectory] = _Left(states_of_row, observed[row])

    def end_before_padding(self, tensordict: TensorDictBase, inputs: TensorDictBase) -> None:
        """Sets `is_init` in `inputs` where the padding of a row begins.

        TorchRL's modules leave a state only where a trajectory ends, which padding would hide.
        """
        mask = tensordict.get(MASK_KEY, None)
        if mask is None or self.init_key is None:
            return
        n_steps, is_init = tensordict.batch_size[-1], inputs.get(self.init_key)
        steps = torch.arange(n_steps, device=mask.device)
        padded = (steps == _last_valid(mask, n_steps).unsqueeze(-1) + 1) & (steps > 0)  # (R, T)
        inputs.set(self.init_key, is_init | padded.view(is_init.shape))

    def _state_before(
        self, trajectory: int | None, first: TensorDictBase, again: list[dict[int | None, _Left]]
    ) -> list[Tensor] | None:
        # The state where a call left the trajectory, if this row begins there. The id alone would
        # not do: the batch may be a slice of it from elsewhere. `again`: what the latest batch has
        # followed, if this one is the same.
        for call in [*reversed(self._left), *again]:
            left = call.get(trajectory)
            if left is None:
                continue
            keys = set(left.observed.keys(True, True)) & set(first.keys(True, True))
            if all(torch.equal(first.get(key), left.observed.get(key)) for key in keys):
                self._followed.append(call)
                return left.states
        return None

    def _check_marks(self, tensordict: TensorDictBase, is_init: Tensor) -> None:
        counted = is_init & tensordict.get(MASK_KEY, is_init)  # (*R, T)
        for state in tensordict.select(*self.state_keys, strict=False).values(True, True):
            if bool((counted & _remembers(state, counted.ndim)).any()):
                raise UnknownStateError(_MARKED + _UNKNOWN)

    def _check_order(self, tensordict: TensorDictBase) -> None:
        # Memory would run through a shuffled batch in that order.
        for key in self.in_keys:
            get_required(tensordict, key, "the recurrent reference reads it.")
        after = cast(TensorDictBase, tensordict[..., 1:])
        counted = torch.ones(after.batch_size, dtype=torch.bool, device=tensordict.device)
        # (*R, T - 1): padding, and the first step of a trajectory, continue nothing.
        may_differ = ~after.get(MASK_KEY, counted)
        if self.init_key is not None:
            may_differ = may_differ | after.get(self.init_key).reshape(after.batch_size)
        keys = [key for key in self.in_keys if key != self.init_key]
        fix = (
            "The reference is recurrent: put KLConstrainedTransform or "
            "ReferenceModelLogProbTransform into the env, which records the state of each step."
        )
        require_order(tensordict, keys, may_differ, fix)


def _last_valid(mask: Tensor, n_steps: int) -> Tensor:
    """The last valid step of each row, -1 if there is none, (R,); padding is behind it."""
    steps = torch.arange(n_steps, device=mask.device)
    return torch.where(mask.reshape(-1, n_steps), steps, -1).amax(-1)


def _remembers(state: Tensor, n_batch: int) -> Tensor:
    """Where a recorded state (*B, ...) is not zero: no trajectory begins there, (*B)."""
    return state.bool().unsqueeze(-1).flatten(n_batch).any(-1)


_MARKED = (
    "the batch has `is_init` True where the recorded state of the policy is not zero: a "
    "SliceSampler marks each slice so (not with `init_key=None`), and a primer with another "
    "`default_value` each trajectory. Neither need begin from zeros,"
)
_UNKNOWN = (
    " and the state of the recurrent reference is unknown there: put KLConstrainedTransform or "
    "ReferenceModelLogProbTransform into the env, and give its `reference` to a loss, or accept "
    "the error of a zero state: `reference=FrozenActor(actor, zero_states=True)`."
)
