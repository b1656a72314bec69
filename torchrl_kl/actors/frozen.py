"""A frozen actor: the reference policy, with its own copy of everything and its own recurrent state."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, cast

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from tensordict.nn import ProbabilisticTensorDictSequential
from torch import Tensor, nn
from torch.distributions import Distribution
from torchrl.data import TensorSpec
from torchrl.envs.utils import ExplorationType, exploration_type
from torchrl.modules import set_recurrent_mode
from torchrl.modules.utils import get_primers_from_module

from torchrl_kl.actors.reading import (
    check_actor,
    find_log_prob_keys,
    log_prob_of_actions,
    read_keys,
    traces_of,
)
from torchrl_kl._tensordict import (
    MASK_KEY,
    TRAJECTORY_KEY,
    LogProbKeys,
    as_tuple,
    beside,
    existing_keys,
    is_fake,
)
from torchrl_kl.actors.moving import MasterWeights

__all__ = ["FrozenActor"]


class Score(NamedTuple):
    """What one pass of a reference gives.

    Args:
        log_prob: of the actions, nats, batch shape of the tensordict that holds the action.
        states: the next recurrent states, in the order of `own_state_keys`.
        outputs: all that the actor read and wrote in the pass, the parameters of its distribution among it.
    """

    log_prob: Tensor
    states: list[Tensor]
    outputs: TensorDictBase


class FrozenActor(nn.Module):
    """A deep copy of an actor in eval mode for ever, which only scores actions.

    You may rely on: no call on the policy (`train()`, an optimizer step, in-place edits of its weights) changes it, no
    gradient reaches it unless `requires_grad` asks for one, it moves with `.to(device)` and it is in `state_dict`. It
    moves when it is told to, by `update_reference`. With `.to(dtype)` its weights and state are cast, and observations
    as they are read: it may be kept in bfloat16 beside a policy in float32.

    A recurrent actor keeps its hidden state under keys of its own, `ref_<name>` beside the policy's `<name>`: on the
    policy's state the reference would score another policy's memory.

    State: the weights, under `actor`; those that are averaged in fp32 behind half-precision ones, under `master`.

    Args:
        actor: a probabilistic actor (`get_dist`, `log_prob`) whose weights are there (no lazy layers left).
        log_prob_key: where the policy records its log-prob, or a list of where it records those of the parts of its
            action, which are added up; by default all of `actor.log_prob_keys`.
        requires_grad: whether the copied weights receive gradients.
        policy: the actor whose actions are scored, if it is another one than `actor`; only its keys are read.

    Raises:
        TypeError: if the actor has no distribution.
        ValueError: if it has uninitialised weights, or other actions than `policy`.

    Example:
        >>> from tensordict import TensorDict
        >>> from torchrl_kl import GPT, GPTActor
        >>> actor = GPTActor(GPT(vocab_size=11, block_size=8))
        >>> reference = FrozenActor(actor)
        >>> state = TensorDict(tokens=torch.tensor([[0, 2, 8, 6, 10, 3]]), position=torch.tensor([6]), batch_size=[1])
        >>> step = actor(state)
        >>> log_prob = reference.step(reference.inputs(step)).log_prob
        >>> torch.equal(log_prob, step["action_log_prob"]), log_prob.requires_grad
        (True, False)
    """

    _own_dtype: torch.dtype | None = (
        None  # of the weights, found once; None where they are another's
    )

    def __init__(
        self,
        actor: nn.Module,
        *,
        log_prob_key: NestedKey | list[NestedKey] | None = None,
        requires_grad: bool = False,
        policy: nn.Module | None = None,
    ):
        super().__init__()
        check_actor(actor)
        self.requires_grad = requires_grad
        self._hold(actor)
        self.master = MasterWeights()
        self.action_keys = [unravel_key(key) for key in self.actor.dist_sample_keys]
        acting = self.actor if policy is None else self._check_policy(policy)
        self.recorded = LogProbKeys(log_prob_key or find_log_prob_keys(acting))
        self._interaction_type = getattr(acting, "default_interaction_type", None)
        self.state_keys = [
            key for key in self.actor.in_keys if unravel_key(("next", key)) in self.actor.out_keys
        ]
        self.own_state_keys = [beside(key, f"ref_{as_tuple(key)[-1]}") for key in self.state_keys]
        states = (*self.state_keys, *self.action_keys)
        self.in_keys = [key for key in read_keys(self.actor) if key not in states]
        self._init_key = next((key for key in self.in_keys if as_tuple(key)[-1] == "is_init"), None)
        self._read_keys = [*self.in_keys, *self.state_keys]
        self.trace_keys = traces_of(acting, self.recorded)
        self._last_states: dict[int, list[Tensor]] = {}
        self._last_observed: dict[int, TensorDictBase] = {}

    @property
    def log_prob_key(self) -> NestedKey | list[NestedKey]:
        """Where the policy records its log-prob: one key, or a list of those of the parts of its action."""
        return self.recorded.key

    @property
    def dtype(self) -> torch.dtype:
        """Of its weights, and of the log-probs that it gives."""
        floating = (p.dtype for p in self.actor.parameters() if p.is_floating_point())
        return next(floating, torch.get_default_dtype())

    def _hold(self, actor: nn.Module) -> None:
        """Takes what `actor` is to be: a copy."""
        self.actor: ProbabilisticTensorDictSequential = copy.deepcopy(actor)  # type: ignore[assignment]
        self.actor.requires_grad_(self.requires_grad)
        self.actor.eval()
        self._own_dtype = self.dtype

    def update_reference(self, source: nn.Module, tau: float = 1.0) -> None:
        """Moves the weights towards those of `source`: to (1 - tau) * reference + tau * source, in place.

        The average of half-precision weights is kept in fp32: in bfloat16 steps of a thousandth of the way would be
        rounded off. Buffers, such as running statistics, are copied. What was recorded under the old weights stays as
        it was, and a recurrent reference goes on in open trajectories from the state that the old weights left there.

        Args:
            source: an actor of the same structure, of any dtype and on any device; the policy, say.
            tau: share of the way, in (0, 1]; 1 copies.

        Raises:
            TypeError: if `source` is no module.
            ValueError: if `tau` is out of range, or `source` has other weights (by name or shape) or NaN among them;
                the reference is then left as it was.

        Example:
            >>> from torchrl_kl import GPT, GPTActor
            >>> policy = GPTActor(GPT(vocab_size=11, block_size=8)).bfloat16()
            >>> reference = FrozenActor(policy)
            >>> for weight in policy.parameters():
            ...     _ = weight.data.mul_(2.0)
            >>> for _ in range(100):  # each of these steps alone is less than bfloat16 can tell
            ...     reference.update_reference(policy, tau=1e-3)
            >>> own, other = next(reference.parameters()).norm(), next(policy.parameters()).norm()
            >>> round((own / other).item(), 2)  # from 1/2 on: 1 - 0.999**100 / 2
            0.55
        """
        self.master.move(self.actor, source, tau)

    def _apply(self, fn, recurse: bool = True):
        super()._apply(fn, recurse)
        if self._own_dtype is not None:
            self._own_dtype = self.dtype
        return self

    def train(self, mode: bool = True) -> FrozenActor:
        """Stays in eval mode: dropout noise in a reference would be measured as divergence."""
        return super().train(False)

    def samples(self) -> bool:
        """Whether the policy draws its actions now: k1 of an argmax is biased and must not steer a controller."""
        mode = exploration_type() or self._interaction_type
        return mode == ExplorationType.RANDOM

    def inputs(self, tensordict: TensorDictBase) -> TensorDictBase:
        """What the reference reads of a step (shallow copy, missing entries left out)."""
        keys = (*self.in_keys, *self.action_keys, *self.own_state_keys)
        return tensordict.select(*keys, strict=False)

    def step(self, inputs: TensorDictBase) -> Score:
        """Scores the actions step by step; no dimension is taken for time.

        Args:
            inputs: what `inputs` selected, batch shape (*B).

        Returns:
            Log-probs, next recurrent states, and what else the pass left.

        Raises:
            RuntimeError: if the actor is recurrent and its own state is not in the data.
        """
        self._require_states(inputs)
        self._trust_states(inputs)
        return self._score(inputs, recurrent=False)

    def trajectories(self, tensordict: TensorDictBase, *, zero_states: bool = False) -> Score:
        """Scores a batch whose last dimension is time, in one pass in TorchRL's recurrent mode.

        Args:
            tensordict: batch of shape (*B, T).
            zero_states: whether rows that begin inside a trajectory may begin from a zero state.

        Returns:
            As `step`.

        Raises:
            RuntimeError: if the actor is recurrent, a row begins inside a trajectory, its state is not in the data, the
                last call did not end in that trajectory, and `zero_states` is not set.
        """
        inputs = self.inputs(tensordict)
        if not self.state_keys:
            return self._score(inputs, recurrent=True)
        if all(key in inputs.keys(True, True) for key in self.own_state_keys):
            # Every step carries its own state: exact, also for a shuffled batch that kept the name "time".
            return self.step(inputs)
        self._check_consecutive(tensordict)
        self._set_first_states(tensordict, inputs, zero_states)
        score = self._score(inputs, recurrent=True)
        self._remember(tensordict, score.states)
        return score

    def get_dist(self, tensordict: TensorDictBase, *, timed: bool) -> Distribution:
        """The distribution over the actions of each step, without gradients unless `requires_grad` asks for them.

        A recurrent reference reads its own state where the data carry it; else the rows of a timed batch must begin
        with their trajectories (or where the last call of `trajectories` ended).

        Args:
            tensordict: batch of shape (*B).
            timed: whether the last dimension is time, which is then run through in one pass.

        Raises:
            RuntimeError: if the actor is recurrent and its own state is not known.
        """
        inputs = self.inputs(tensordict)
        carried = all(key in inputs.keys(True, True) for key in self.own_state_keys)
        if not carried and timed:
            self._check_consecutive(tensordict)
            self._set_first_states(tensordict, inputs, zero_states=False)
        self._require_states(inputs)
        if carried:
            self._trust_states(inputs)
        self._prepare(inputs)
        with self.scoring(timed and not (carried and self.state_keys)):
            return self.actor.get_dist(inputs)

    def state_specs(self) -> dict[NestedKey, TensorSpec]:
        """The specs of the reference's own state, by its keys, as the actor's `make_tensordict_primer` gives them."""
        if not self.state_keys:
            return {}
        primer = get_primers_from_module(self.actor, warn=False)
        primers = [] if primer is None else getattr(primer, "transforms", [primer])
        specs = {
            unravel_key(key): spec for one in primers for key, spec in one.primers.items(True, True)
        }
        if any(key not in specs for key in self.state_keys):
            raise ValueError(
                f"`actor` has the recurrent state {self.state_keys} but no `make_tensordict_primer` that describes it "
                f"(found {list(specs)}): give its recurrent module one, as TorchRL's LSTMModule has."
            )
        specs = {
            key: spec.to(self.dtype) if spec.dtype.is_floating_point else spec
            for key, spec in specs.items()
        }
        return {
            own: specs[key] for own, key in zip(self.own_state_keys, self.state_keys, strict=True)
        }

    def _require_states(self, inputs: TensorDictBase) -> None:
        missing = [key for key in self.own_state_keys if key not in inputs.keys(True, True)]
        if missing:
            raise RuntimeError(
                f"the reference is recurrent and its state {missing} is not in the data, got {existing_keys(inputs)}: "
                "put ReferenceModelLogProbTransform into the env, which records that state, or pass batches whose "
                'last dimension is time (named "time", or `time_dim=`).'
            )

    def _trust_states(self, inputs: TensorDictBase) -> None:
        """The state of each step is in the data, zero where a trajectory begins: `is_init` must not blank it.

        A SliceSampler sets `is_init` wherever a slice begins, in the middle of trajectories too.
        """
        if (
            self.state_keys
            and self._init_key is not None
            and inputs.get(self._init_key, None) is not None
        ):
            inputs.set(self._init_key, torch.zeros_like(inputs.get(self._init_key)))

    def _prepare(self, inputs: TensorDictBase) -> None:
        """Hands the actor its own state as if it were the policy's, and what it reads in the dtype of its weights."""
        for own, key in zip(self.own_state_keys, self.state_keys, strict=True):
            inputs.rename_key_(own, key)
        if self._own_dtype is None:
            return
        for key in self._read_keys:
            value = inputs.get(key, None)
            if (
                isinstance(value, Tensor)
                and value.is_floating_point()
                and value.dtype != self._own_dtype
            ):
                inputs.set(key, value.to(self._own_dtype))

    @contextmanager
    def scoring(self, recurrent: bool) -> Iterator[None]:
        """What surrounds every pass of `actor`; recurrent: whether the last dimension is time."""
        grad = self.requires_grad and torch.is_grad_enabled()
        with torch.set_grad_enabled(grad), set_recurrent_mode(recurrent):
            yield

    def _score(self, inputs: TensorDictBase, *, recurrent: bool) -> Score:
        self._prepare(inputs)
        with self.scoring(recurrent):
            log_prob = log_prob_of_actions(self.actor, inputs, self.action_keys, self.recorded)
        states = [inputs.get(("next", *as_tuple(key))) for key in self.state_keys]
        return Score(log_prob, states, inputs)

    def _set_first_states(
        self, tensordict: TensorDictBase, inputs: TensorDictBase, zero_states: bool
    ) -> None:
        """Gives every row its state at its first step; later starts of trajectories begin from zero."""
        shape = tensordict.batch_size
        zeros = [spec.zero() for spec in self.state_specs().values()]
        if self._init_key is None:
            known = torch.zeros(shape[:-1], dtype=torch.bool, device=tensordict.device)
        else:
            known = tensordict.get(self._init_key).reshape(shape)[..., 0]
        ids = tensordict.get(TRAJECTORY_KEY, None)
        first_ids = [-1] * known.numel() if ids is None else ids[..., 0].reshape(-1).tolist()
        firsts = tensordict.select(*self.in_keys, strict=False)[..., 0].reshape(-1)
        rows = []
        for starts, trajectory in zip(known.reshape(-1).tolist(), first_ids, strict=True):
            state = zeros if starts else self._state_before(firsts[len(rows)], trajectory)
            if state is None:
                if not (zero_states or is_fake(tensordict)):
                    raise RuntimeError(
                        "a row of the batch begins inside a trajectory and the state that the recurrent reference had "
                        "there is unknown: put ReferenceModelLogProbTransform into the env, which records it, or "
                        "accept the error of a zero state with `zero_states=True`."
                    )
                state = zeros
            rows.append(state)
        for index, (own, zero) in enumerate(zip(self.own_state_keys, zeros, strict=True)):
            value = torch.zeros(*shape, *zero.shape, dtype=zero.dtype, device=known.device)
            begin = torch.stack([row[index].to(value.device) for row in rows])
            value[(..., 0, *(slice(None),) * zero.ndim)] = begin.reshape(*shape[:-1], *zero.shape)
            inputs.set(own, value)

    def _remember(self, tensordict: TensorDictBase, states: list[Tensor]) -> None:
        """Keeps the state after the last valid step of each row, by trajectory, for the next call."""
        self._last_states, self._last_observed = {}, {}
        ids = tensordict.get(TRAJECTORY_KEY, None)
        if ids is None or is_fake(tensordict):
            return
        n_steps = tensordict.batch_size[-1]
        ids = ids.reshape(-1, n_steps)
        mask = tensordict.get(MASK_KEY, None)
        last = ids.new_full((len(ids),), n_steps - 1)
        if mask is not None:
            last = mask.reshape(-1, n_steps).sum(-1) - 1
        rows = torch.arange(len(ids), device=ids.device)
        batch_dims = tensordict.batch_dims
        ends = [
            state.reshape(-1, n_steps, *state.shape[batch_dims:])[rows, last] for state in states
        ]
        observed = (
            tensordict.get("next")
            .select(*self.in_keys, strict=False)
            .reshape(-1, n_steps)[rows, last]
            .clone()
        )
        for row, trajectory in enumerate(ids[rows, last].tolist()):
            self._last_states[trajectory] = [end[row].detach().clone() for end in ends]
            self._last_observed[trajectory] = observed[row]

    def _check_consecutive(self, tensordict: TensorDictBase) -> None:
        """Refuses a shuffled batch whose dimension kept the name "time": memory would run through it in that order."""
        missing = [key for key in self.in_keys if tensordict.get(key, None) is None]
        if missing:
            raise KeyError(
                f"{missing} of the actor's `in_keys` are not in the data, got {existing_keys(tensordict)}."
            )
        after = cast(TensorDictBase, tensordict[..., 1:])
        before = cast(TensorDictBase, tensordict.get("next")[..., :-1])
        may_differ = torch.zeros(after.batch_size, dtype=torch.bool, device=tensordict.device)
        if self._init_key is not None:
            may_differ = may_differ | after.get(self._init_key).reshape(after.batch_size)
        if after.get(MASK_KEY, None) is not None:
            may_differ = may_differ | ~after.get(MASK_KEY)
        for key in self.in_keys:
            if key != self._init_key and before.get(key, None) is not None:
                equal = (after.get(key) == before.get(key)).reshape(*may_differ.shape, -1).all(-1)
                if not bool((equal | may_differ).all()):
                    raise ValueError(
                        f"the steps of the batch do not follow one another: {key!r} is not what the step before has in "
                        '"next", nor does a trajectory begin there, and the reference is recurrent. Is it a shuffled '
                        'sample whose dimension kept the name "time"? Put ReferenceModelLogProbTransform into the env, '
                        "which records the state of each step."
                    )

    def _state_before(self, first: TensorDictBase, trajectory: int) -> list[Tensor] | None:
        """The state that the last call left in a trajectory, if that call ended where this row begins."""
        if trajectory not in self._last_states:
            return None
        last = self._last_observed[trajectory]
        follows = all(torch.equal(first.get(key), last.get(key)) for key in last.keys(True, True))
        return self._last_states[trajectory] if follows else None

    def _check_policy(self, policy: nn.Module) -> ProbabilisticTensorDictSequential:
        """The policy whose actions are scored, if its actions are those of the reference."""
        check_actor(policy)
        policy = cast(ProbabilisticTensorDictSequential, policy)
        actions = [unravel_key(key) for key in policy.dist_sample_keys]
        if actions != self.action_keys:
            raise ValueError(
                f"`reference` must have the actions of the policy, got {self.action_keys} for {actions}: build it with "
                "the same `out_keys`."
            )
        return policy
