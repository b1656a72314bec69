"""A frozen actor: the reference, with a copy of everything and its own recurrent state."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple, TypeVar, cast

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from tensordict.nn import ProbabilisticTensorDictSequential
from torch import Tensor, nn
from torch.distributions import Distribution
from torchrl.data import TensorSpec
from torchrl.modules import recurrent_mode, set_recurrent_mode
from torchrl.modules.utils import get_primers_from_module

from torchrl_kl._tensordict import (
    LogProbKeys,
    as_tuple,
    is_fake,
    sibling,
)
from torchrl_kl.actors import reading
from torchrl_kl.actors.identity import Identified
from torchrl_kl.actors.moving import MasterWeights
from torchrl_kl.actors.policy import ActingPolicy
from torchrl_kl.actors.recurrent import RecurrentMemory
from torchrl_kl.functional.numbers import working_dtype

Read = TypeVar("Read")


class Score(NamedTuple):
    """What one pass of a reference gives."""

    log_prob: Tensor  # (*B, *A): batch shape of the tensordict that holds the action; >= float32
    states: list[Tensor]  # after each step, (*B, ...), in the order of `own_state_keys`
    outputs: TensorDictBase  # all that the actor read and wrote


class FrozenActor(Identified):
    """A deep copy of an actor, always in eval mode, which only scores actions.

    You may rely on: only `update_reference` changes its weights; no gradient reaches it without
    `requires_grad`. `.to(dtype)` casts its weights and state, and observations when they are read:
    the reference of a policy in float32 may be in bfloat16. The hidden state of a recurrent
    reference is under its own keys: `ref_<name>` next to `<name>`, or for a stack that writes
    `second_ref_log_prob`, `second_ref_<name>`; the first stack that uses it decides. You may not
    rely on two references that have the same names on one batch: each reads what is recorded.

    State: the weights, under `actor`; the fp32 averages behind half-precision ones, under `master`;
    `fingerprint`, a hash of the weights and of the classes of the modules. It is checked when a
    state is loaded, which restores the weights whatever `actor` was. A state without them, if they
    are kept in a file of their own, is loaded with `strict=False`; the actor that was given is then
    checked before it scores.

    Args:
        actor: a probabilistic actor (`get_dist`, `log_prob`) with initialised weights.
        log_prob_key: where the policy records its log-prob, or a list for the parts of its action,
            which are added up; by default all of `actor.log_prob_keys`.
        requires_grad: whether the copied weights receive gradients.
        policy: the actor whose actions are scored, if it is not `actor`.
        zero_states: whether a recurrent reference may begin inside a trajectory from a zero state,
            which is inaccurate, instead of raising an error.
        recompute_log_prob: whether the policy itself is asked for the present log-prob of an action
            if it recorded none; not possible in another process. In an env, another entry that it
            writes tells its actions from random ones.
        chunk_size: how many rows of a batch are scored at a time, to save memory; None: all.

    Raises:
        TypeError: if the actor has no distribution.
        ValueError: if it has uninitialised weights, or other actions than `policy`; if the policy
            writes what it reads; if `chunk_size` is less than 1, or given for a recurrent actor.
        RuntimeError: in `load_state_dict` or when it scores, if it is not the saved reference.

    Example:
        >>> from torchrl_kl import GPT, FrozenActor, CausalLMActor
        >>> from torchrl_kl.envs import DigitLanguageEnv
        >>> actor = CausalLMActor(GPT(vocab_size=11, block_size=8))
        >>> reference = FrozenActor(actor)
        >>> step = actor(DigitLanguageEnv(batch_size=(5,)).reset())
        >>> log_prob = reference.step(reference.inputs(step)).log_prob
        >>> log_prob.equal(step["action_log_prob"]), log_prob.requires_grad
        (True, False)
        >>> reference.update_reference(actor, tau=0.1)  # a tenth of the way
    """

    _own_dtype: torch.dtype | None = None  # of the weights, found once; None for another's weights
    # Of the policies that it reads for; None for one that may read its inputs in another way.
    _policy_dtypes: frozenset[torch.dtype | None] = frozenset()
    _plain: Sequence[bool] = ()  # see `plain_parts`; not of another's actor, which may change
    _looked = False  # whether it was looked for weights that it uses but does not own
    _prefix: str | None = None  # of its states, once a stack uses it

    def __init__(
        self,
        actor: nn.Module,
        *,
        log_prob_key: NestedKey | list[NestedKey] | None = None,
        requires_grad: bool = False,
        policy: nn.Module | None = None,
        zero_states: bool = False,
        recompute_log_prob: bool = False,
        chunk_size: int | None = None,
    ):
        super().__init__()
        reading.check_actor(actor)
        # The weights are those of `actor`; the actions and log-probs are those of `acting`.
        self.requires_grad, self.zero_states = requires_grad, zero_states
        self._hold(actor)
        self.master = MasterWeights()
        self.action_keys = [unravel_key(key) for key in self.actor.dist_sample_keys]
        acting = actor if policy is None else policy
        self.read_for(acting)
        self.recorded = LogProbKeys(log_prob_key or reading.find_log_prob_keys(acting))
        self.log_prob_key = self.recorded.key
        self._policy = ActingPolicy(acting, self.recorded) if recompute_log_prob else None
        self._find_keys()
        if chunk_size is not None and type(chunk_size) is not int:
            got = type(chunk_size).__name__
            raise TypeError(f"`chunk_size` must be an int or None, got {got}.")
        if chunk_size is not None and (chunk_size < 1 or self.state_keys):
            raise ValueError(
                "`chunk_size` must be at least 1, or None for a recurrent actor, got "
                f"{chunk_size} and the recurrent state {self.state_keys}."
            )
        self.chunk_size = chunk_size

    def read_for(self, policy: nn.Module) -> None:
        """Will score the actions of a policy; ValueError if it has others, or overwrites inputs."""
        reading.check_actor(policy)
        actions = [unravel_key(key) for key in policy.dist_sample_keys]  # type: ignore[union-attr]
        if actions != self.action_keys:
            raise ValueError(
                f"`reference` must have the actions of the policy, got {self.action_keys} for "
                f"{actions}: build it with the same `out_keys`."
            )
        reading.check_kept_inputs(policy, self.actor)
        # A copy of the policy casts where the policy does; a cast before that would round.
        alike = reading.read_alike(policy, self.actor)
        self._policy_dtypes = self._policy_dtypes | {weight_dtype(policy) if alike else None}

    def name_states(self, ref_log_prob: NestedKey) -> None:
        """Names its states after what it writes, so that no two of them on a batch are shared."""
        if self._prefix is None:
            self._prefix = as_tuple(ref_log_prob)[-1].removesuffix("_log_prob")
            self._find_keys()

    def _hold(self, actor: nn.Module) -> None:
        """Takes a copy of `actor` as its weights."""
        self.actor: ProbabilisticTensorDictSequential = reading.copy_actor(actor)  # type: ignore[assignment]
        self.actor.requires_grad_(self.requires_grad)
        self.actor.eval()
        self._plain = reading.plain_parts(self.actor)
        self._own_dtype = weight_dtype(self.actor)

    def _find_keys(self) -> None:
        actor_in, actor_out = self.actor.in_keys, self.actor.out_keys
        # A state is what the actor reads, and writes into "next" for its next step. On the policy's
        # state the reference would score with the memory of another network.
        self.state_keys = [key for key in actor_in if unravel_key(("next", key)) in actor_out]
        own = f"{self._prefix or 'ref'}_"
        self.own_state_keys = [sibling(key, own + as_tuple(key)[-1]) for key in self.state_keys]
        states = (*self.state_keys, *self.action_keys)
        self.in_keys = [key for key in reading.read_keys(self.actor) if key not in states]
        self._init_key = next((key for key in self.in_keys if as_tuple(key)[-1] == "is_init"), None)
        self._cast_keys = [*self.in_keys, *self.state_keys]
        self._input_keys = [*self.in_keys, *self.action_keys, *self.own_state_keys]
        states = self.state_keys, self.own_state_keys
        self._memory = RecurrentMemory(self.in_keys, self._init_key, *states)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of its log-probs: that of its weights, and at least float32."""
        return working_dtype(self._own_dtype or weight_dtype(self.actor))

    def update_reference(self, source: nn.Module, tau: float = 1.0) -> None:
        """Moves the weights in place, to (1 - tau) * reference + tau * source.

        The average of half-precision weights is kept in fp32. Buffers, such as running statistics,
        are copied. What is neither, such as a temperature in `distribution_kwargs`, stays as it was
        when the reference was made. Recorded entries stay, and a recurrent reference goes on in
        open trajectories from the state that the old weights left there.

        Args:
            source: an actor of the same structure, such as the policy; any dtype and device.
            tau: share of the way, in (0, 1]; 1 copies.

        Raises:
            TypeError: if `source` is not a module.
            ValueError: if `tau` is out of range, or `source` has other weights (by name or shape)
                or NaN among them; the reference is then unchanged.
        """
        self.check_identity()
        self.master.move(self.actor, source, tau)

    def _apply(self, fn, recurse: bool = True):
        super()._apply(fn, recurse)
        if self._own_dtype is not None:
            self._own_dtype = weight_dtype(self.actor)
        return self

    def train(self, mode: bool = True) -> FrozenActor:
        """Stays in eval mode: dropout noise in a reference would be measured as divergence."""
        return super().train(False)

    def asks(self, actor: nn.Module) -> bool:
        """Whether the policy that it may ask for log-probs, if any, has the weights of `actor`."""
        return self._policy is None or self._policy.shares_weights(actor)

    def present_log_prob(
        self,
        tensordict: TensorDictBase,
        *,
        timed: bool = False,
        env_actions: Collection[NestedKey] | None = None,
    ) -> Tensor | None:
        """The policy's present log-prob, nats; None if it may not be asked or did not run."""
        # `env_actions`: in an env, the keys of all that a random policy writes.
        policy = self._policy
        if policy is None or not (env_actions is None or policy.ran(tensordict, env_actions)):
            return None
        return policy.log_prob(tensordict, timed=timed)

    def inputs(self, tensordict: TensorDictBase) -> TensorDictBase:
        """The entries that the reference reads (a shallow copy, without missing ones)."""
        return tensordict.select(*self._input_keys, strict=False)

    def step(self, inputs: TensorDictBase) -> Score:
        """Scores actions (*B) step by step; RuntimeError without the state of a recurrent actor."""
        if self.state_keys:
            self._memory.keep_states(inputs)
        return self._score(inputs, recurrent=False)

    def trajectories(self, tensordict: TensorDictBase) -> Score:
        """Scores a batch (*R, T) whose last dimension is time, in one pass.

        For a recurrent actor, RuntimeError if a row begins inside a trajectory where its state is
        unknown, unless `zero_states`, and ValueError if steps do not follow one another.
        """
        inputs = self.inputs(tensordict)
        if not self.state_keys:
            return self._score(inputs, recurrent=True)
        # Recorded states are exact, even for a shuffled batch that kept the name "time".
        if self._carries_states(inputs):
            return self.step(inputs)
        fake = is_fake(tensordict)
        self._set_first_states(tensordict, inputs, self.zero_states or fake, carry=True)
        score = self._score(inputs, recurrent=True)
        if not fake:
            self._memory.remember(tensordict, score.states)
        return score

    def get_dist(self, tensordict: TensorDictBase, *, timed: bool) -> Distribution:
        """The distribution over the actions of a batch (*B), in one pass along time if `timed`."""
        # Without `carry`: the last call of `trajectories` may have left this batch at its end.
        inputs = self.inputs(tensordict)
        timed = timed and not (self.state_keys and self._carries_states(inputs))
        if self.state_keys and timed:
            self._set_first_states(tensordict, inputs, self.zero_states, carry=False)
        elif self.state_keys:
            self._memory.keep_states(inputs)
        self._prepare(inputs)
        with self.scoring(timed):
            return self._look(self.actor.get_dist, inputs)

    def state_specs(self) -> dict[NestedKey, TensorSpec]:
        """The specs of its own state by key, from the actor's `make_tensordict_primer`."""
        if not self.state_keys:
            return {}
        primer = get_primers_from_module(self.actor, warn=False)
        primers = [] if primer is None else getattr(primer, "transforms", [primer])
        entries = (entry for one in primers for entry in one.primers.items(True, True))
        specs = {unravel_key(key): spec for key, spec in entries}
        if any(key not in specs for key in self.state_keys):
            raise ValueError(
                f"`actor` has the recurrent state {self.state_keys} but no "
                f"`make_tensordict_primer` of it, got one of {list(specs)}: give its module one."
            )
        dtype = self._own_dtype or weight_dtype(self.actor)
        own = zip(self.own_state_keys, [specs[key] for key in self.state_keys], strict=True)
        return {key: spec.to(dtype) if spec.dtype.is_floating_point else spec for key, spec in own}

    def _carries_states(self, inputs: TensorDictBase) -> bool:
        return all(inputs.get(key, None) is not None for key in self.own_state_keys)

    def _set_first_states(
        self, tensordict: TensorDictBase, inputs: TensorDictBase, zero_states: bool, carry: bool
    ) -> None:
        specs = list(self.state_specs().values())
        states = self._memory.first_states(tensordict, specs, zero_states, carry)
        inputs.update(dict(zip(self.own_state_keys, states, strict=True)))
        self._memory.end_before_padding(tensordict, inputs)

    def _prepare(self, inputs: TensorDictBase) -> None:
        # `inputs` is a shallow copy: the data keep their keys and dtypes.
        for own, key in zip(self.own_state_keys, self.state_keys, strict=True):
            inputs.rename_key_(own, key)
        own_dtype = self._own_dtype
        if own_dtype is None:
            return
        for key in self._cast_keys:
            value = inputs.get(key, None)
            if not (isinstance(value, Tensor) and value.is_floating_point()):
                continue
            rounds = torch.promote_types(value.dtype, own_dtype) != own_dtype
            if value.dtype != own_dtype and not (rounds and self._policy_dtypes == {own_dtype}):
                inputs.set(key, value.to(own_dtype))

    def scoring(self, recurrent: bool) -> AbstractContextManager[None]:
        """The context of every pass of `actor`; `recurrent`: whether the last dimension is time."""
        self.check_identity()
        grad, mode = self.requires_grad and torch.is_grad_enabled(), recurrent_mode()
        if mode is None and not self.state_keys:
            mode = False
        # As in the steps of most rollouts: entering contexts takes time.
        if grad == torch.is_grad_enabled() and mode == recurrent:
            return nullcontext()
        return scoring_mode(grad, recurrent)

    def _score(self, inputs: TensorDictBase, *, recurrent: bool) -> Score:
        self._prepare(inputs)
        with self.scoring(recurrent):
            return self._read(inputs) if self._looked else self._look(self._read, inputs)

    def _read(self, inputs: TensorDictBase) -> Score:
        keys, recorded = self.action_keys, self.recorded
        log_prob = reading.log_prob_of_actions(self.actor, inputs, keys, recorded, self._plain)
        # The difference of two log-probs would be mostly rounding in half precision.
        log_prob = log_prob.to(working_dtype(log_prob.dtype))
        states = [cast(Tensor, inputs.get(("next", *as_tuple(key)))) for key in self.state_keys]
        return Score(log_prob, states, inputs)

    def _look(self, read: Callable[[TensorDictBase], Read], inputs: TensorDictBase) -> Read:
        """What a pass reads; the first time, warnings if the reference may move."""
        compiling = torch.compiler.is_compiling()
        if self._looked or compiling or torch.is_inference_mode_enabled():
            return read(inputs)
        self._looked = True
        before = {name: value.clone() for name, value in self._statistics().items()}
        # Compiled parts would be compiled once more.
        if not (self.requires_grad or reading.has_compiled_parts(self.actor)):
            with torch.enable_grad():
                differentiable = reading.requires_grad(read(inputs.detach()))
            # Where none of its own weights requires a gradient, what does has it from others.
            if differentiable and not reading.learns(self.actor):
                warnings.warn(_OTHER_WEIGHTS, stacklevel=2)
        # Again, as later passes: with gradients an LSTM of PyTorch rounds otherwise.
        result, after = read(inputs), self._statistics()
        changed = [name for name in before.keys() & after if not after[name].equal(before[name])]
        if changed:
            warnings.warn(_CHANGES.format(min(changed)), stacklevel=2)
        return result

    def _statistics(self) -> dict[str, Tensor]:
        """Bytes, since NaN equals nothing, of what the actor saves besides its parameters."""
        saved: dict[str, object] = {}
        for name, module in self.actor.named_modules():  # `state_dict` would drop caches
            module._save_to_state_dict(saved, name and f"{name}.", False)
        names = saved.keys() - dict(self.actor.named_parameters(remove_duplicate=False)).keys()
        held = {k: v for k in names if isinstance(v := saved[k], Tensor) and v.is_floating_point()}
        return {name: value.detach().flatten().view(torch.uint8) for name, value in held.items()}


_CHANGES = (
    "the reference is not frozen: {!r} changes when it scores, although it is in eval mode. Let "
    "the module update such statistics only `if self.training`."
)
_OTHER_WEIGHTS = (
    "the reference uses weights that are not among its parameters, such as those of a function, a "
    "hook or a distribution class that refers to a network: they are not frozen, saved, cast or "
    "put into eval mode, and if the policy trains them, the reference may move with it. Make them "
    "parameters of a module in `actor`, as TensorDictModule(network, ...) does; with "
    '`method="name"` it calls one of its methods.'
)


def weight_dtype(actor: nn.Module) -> torch.dtype:
    """Dtype of the first weights of an actor, of those of several bytes if any, or the default."""
    floating = [p.dtype for p in actor.parameters() if p.is_floating_point()]  # one byte: stored
    return min(floating, key=lambda one: one.itemsize == 1, default=torch.get_default_dtype())


@contextmanager
def scoring_mode(grad: bool, recurrent: bool) -> Iterator[None]:
    """With or without gradients, in or out of TorchRL's recurrent mode."""
    with torch.set_grad_enabled(grad), set_recurrent_mode(recurrent):
        yield
