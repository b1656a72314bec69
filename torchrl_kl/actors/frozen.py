"""A frozen actor: the reference, with a copy of everything and its own recurrent state."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from tensordict import NestedKey, TensorDictBase, unravel_key
from tensordict.nn import ProbabilisticTensorDictSequential
from torch import Tensor, nn
from torch.distributions import Distribution
from torchrl.data import TensorSpec
from torchrl.modules import set_recurrent_mode
from torchrl.modules.utils import get_primers_from_module

from torchrl_kl.actors import reading
from torchrl_kl.actors.densities import check_density
from torchrl_kl.actors.log_probs import log_prob_of_actions
from torchrl_kl.actors.moving import MasterWeights
from torchrl_kl.actors.parallel import sharded_parts
from torchrl_kl.actors.protocol import as_kl_actor
from torchrl_kl.batches import MASK_KEY, expand_right, read_states, require_order
from torchrl_kl.functional.numbers import is_floating, widened, working_dtype
from torchrl_kl.keys import LogProbKeys, as_tuple, sibling


class Score(NamedTuple):
    """What one pass of a reference gives."""

    log_prob: Tensor  # (*B, *A): batch shape of the tensordict that holds the action; >= float32
    states: list[Tensor]  # after each step, (*B, ...), in the order of `own_state_keys`
    outputs: TensorDictBase  # all that the actor read and wrote
    dist: Distribution | None  # of a single action


class FrozenActor(nn.Module):
    """A deep copy of an actor, always in eval mode, which only scores actions.

    You may rely on: only `update_reference` and `load_state_dict` change its weights, and raise
    `version`; no gradient reaches it. The reference of a policy in float32 may be in bfloat16. A
    recurrent reference has its own state, `ref_<name>` next to `<name>`, or `second_ref_<name>` for
    a stack that writes `second_ref_log_prob`; the first stack that uses it decides. Not frozen:
    weights captured by a plain function, and statistics that a module updates even in eval mode.

    State: the weights, under `actor`; the fp32 averages behind half-precision ones, under `master`.

    Args:
        actor: a probabilistic actor (`get_dist`, `log_prob`) with initialised weights.
        log_prob_key: where the policy records its log-prob, or a list for the parts of its action,
            which are added up; by default all of `actor.log_prob_keys`.
        chunk_size: how many rows of a batch are scored at a time, to save memory; None: all.

    Raises:
        TypeError: if the actor has no distribution.
        ValueError: if it has uninitialised or sharded weights; if `chunk_size` is less than 1, or
            given for a recurrent actor; of a call, if its distribution has no density.

    Example:
        >>> import torch
        >>> from torchrl_kl import FrozenActor
        >>> from torchrl_kl.language import GPT, CausalLMActor
        >>> from torchrl_kl.envs import DigitLanguageEnv
        >>> actor = CausalLMActor(GPT(vocab_size=11, block_size=8))
        >>> reference = FrozenActor(actor)
        >>> step = actor(DigitLanguageEnv(batch_size=(5,)).reset())
        >>> torch.allclose(reference.score(step, timed=False).log_prob, step["action_log_prob"])
        True
        >>> reference.update_reference(actor, tau=0.1)  # a tenth of the way
    """

    def __init__(
        self,
        actor: nn.Module,
        *,
        log_prob_key: NestedKey | list[NestedKey] | None = None,
        chunk_size: int | None = None,
    ):
        super().__init__()
        reading.check_actor(actor)
        self.requires_grad = False  # KLRewardTransform may set it
        self.chunk_size = chunk_size
        self._hold(actor)
        self.master = MasterWeights()
        self.version = 0  # raised whenever the weights change
        self.moved = False  # since it last scored a batch, whose log-probs are then of old weights
        self.action_keys = [unravel_key(key) for key in self.actor.dist_sample_keys]
        self._policy_dtypes = {reading.weight_dtype(actor)}
        self.recorded = LogProbKeys(log_prob_key or reading.find_log_prob_keys(actor))
        self.log_prob_key = self.recorded.key
        self._known: set[str] = set()  # names of distributions, and faults warned of
        self.ref_log_prob_key: NestedKey | None = None  # where its first stack records, in "next"
        self._find_keys("ref")
        fits = type(chunk_size) is int and chunk_size >= 1 and not self.state_keys
        if chunk_size is not None and not fits:
            raise ValueError(
                "`chunk_size` must be an int of at least 1, or None for a recurrent actor, got "
                f"{chunk_size!r} and the recurrent state {self.state_keys}."
            )

    def _hold(self, actor: nn.Module) -> None:
        if sharded_parts(actor):
            raise ValueError(
                "`actor` must have whole weights, or weights on the meta device, to be copied, got "
                "a model of `fully_shard`: build FrozenActor(actor) before you shard its model, "
                "shard that of the FrozenActor in the same way, and pass it as `reference`."
            )
        with torch.no_grad():  # or TorchScript's weights would be a part of a graph
            copied = copy.deepcopy(as_kl_actor(actor).whole())
        self.actor: ProbabilisticTensorDictSequential = copied
        self.actor.requires_grad_(False).eval()

    def read_for(self, policy: Any) -> None:
        """Prepares for the actions of a policy; ValueError if it cannot be the reference of it."""
        actions = [unravel_key(key) for key in policy.dist_sample_keys]
        if actions != self.action_keys:
            raise ValueError(
                f"`reference` must have the actions of the policy, got {self.action_keys} for "
                f"{actions}: build it with the same `out_keys`."
            )
        reading.check_left_inputs(policy, self.actor)
        for pair in (*reading.distributions_of(policy), *reading.distributions_of(self.actor)):
            check_density(dict(enumerate(pair)), self._known)
        own, other = (as_kl_actor(each).temperature for each in (self.actor, policy))
        if None not in (own, other) and own != other:
            warnings.warn(
                f"`reference` has the temperature {own:g} and the policy {other:g}, so that equal "
                f"weights have a KL: build it with `temperature={other:g}`, unless you mean this.",
                stacklevel=4,
            )
        self._policy_dtypes.add(reading.weight_dtype(policy))

    def name_states(self, ref_log_prob_key: NestedKey) -> None:
        """Names its states after the entry that the first stack writes: two stacks share none."""
        if self.ref_log_prob_key is None:
            self._find_keys(as_tuple(ref_log_prob_key)[-1].removesuffix("_log_prob"))
            self.ref_log_prob_key = ref_log_prob_key

    def _find_keys(self, prefix: str) -> None:
        # The policy's state is the memory of another network.
        self.state_keys = reading.recurrent_keys(self.actor)
        names = {key: f"{prefix}_{as_tuple(key)[-1]}" for key in self.state_keys}
        self.own_state_keys = [sibling(key, name) for key, name in names.items()]
        others = (*self.state_keys, *self.action_keys)
        self.in_keys = [key for key in reading.read_keys(self.actor) if key not in others]
        marks = (key for key in self.in_keys if as_tuple(key)[-1] == "is_init")
        self._init_key = next(marks, "is_init")
        self._input_keys = [*self.in_keys, *self.action_keys, *self.own_state_keys]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of its log-probs: that of its weights, and at least float32."""
        return working_dtype(reading.weight_dtype(self.actor))

    def update_reference(self, source: nn.Module, tau: float = 1.0) -> None:
        """Moves the weights in place, to (1 - tau) * reference + tau * source.

        The average of half-precision weights is in fp32. Buffers are copied. What is neither does
        not change, such as a temperature in `distribution_kwargs`.

        Args:
            source: an actor of the same structure, such as the policy; any dtype and device.
            tau: share of the way, in (0, 1]; 1 copies.

        Raises:
            TypeError: if `source` is not a module, or `tau` not a number.
            ValueError: if `tau` is out of range, or `source` has other weights (by name or shape)
                or NaN among them; the reference is then unchanged.
        """
        self.master.move(self.actor, source, tau)
        self._count_move()

    def _count_move(self) -> None:
        self.version += 1
        self.moved = True

    def _load_from_state_dict(self, *args):
        self._count_move()
        super()._load_from_state_dict(*args)

    def train(self, mode: bool = True) -> FrozenActor:
        """Keeps eval mode: dropout noise in a reference would be measured as divergence."""
        return super().train(False)

    def score(self, tensordict: TensorDictBase, *, timed: bool, fake: bool = False) -> Score:
        """Scores the actions of a batch (*B), in one pass along its last dimension if `timed`.

        RuntimeError if the state of a recurrent actor is not known. A row must have recorded
        states, or begin with a trajectory, in order; `fake` data need neither.
        """
        inputs, timed = self._inputs(tensordict, timed=timed, fake=fake)
        with self.scoring(timed):
            found = log_prob_of_actions(self.actor, inputs, self.action_keys, self.recorded)
        self.moved = False
        states = [inputs.get(("next", *as_tuple(key))) for key in self.state_keys]
        # The difference of two log-probs would be mostly rounding in half precision.
        return Score(widened(found[0]), states, inputs, self._scored(found[1], timed))

    def get_dist(self, tensordict: TensorDictBase, *, timed: bool) -> Distribution:
        """The distribution over the actions of a batch (*B), in one pass along time if `timed`."""
        inputs, timed = self._inputs(tensordict, timed=timed)
        with self.scoring(timed):
            return self._scored(self.actor.get_dist(inputs), timed)

    def _scored(self, dist: Any, timed: bool) -> Any:
        """The distribution, which is checked when its class is new."""
        if not torch.compiler.is_compiling() and (name := type(dist).__name__) not in self._known:
            self._known.add(name)
            check_density(dist, self._known)
        return dist

    def state_specs(self) -> dict[NestedKey, TensorSpec]:
        """The specs of its own state by key, from the actor's `make_tensordict_primer`."""
        primer = get_primers_from_module(self.actor, warn=False)
        primers = [] if primer is None else getattr(primer, "transforms", [primer])
        entries = (entry for one in primers for entry in one.primers.items(True, True))
        specs = {unravel_key(key): spec for key, spec in entries}
        if any(key not in specs for key in self.state_keys):
            raise ValueError(
                f"`actor` has the recurrent state {self.state_keys} but no "
                f"`make_tensordict_primer` of it, got one of {list(specs)}: give its module one."
            )
        own = zip(self.own_state_keys, [specs[key] for key in self.state_keys], strict=True)
        dtype = reading.weight_dtype(self.actor)
        return {key: spec.to(dtype) if spec.dtype.is_floating_point else spec for key, spec in own}

    def _inputs(
        self, tensordict: TensorDictBase, *, timed: bool, fake: bool = False
    ) -> tuple[TensorDictBase, bool]:
        """What the actor reads of a batch (*B); whether one pass runs along time."""
        # A shallow copy: the data keep their keys and dtypes.
        inputs = tensordict.select(*self._input_keys, strict=False)
        if self.state_keys:
            timed = self._add_states(inputs, tensordict, timed=timed, fake=fake)
            for own, key in zip(self.own_state_keys, self.state_keys, strict=True):
                inputs.rename_key_(own, key)
        own_dtype = reading.weight_dtype(self.actor)
        # For weights of the policy's dtype, a cast of what both read would only round.
        if self._policy_dtypes != {own_dtype}:
            for key in (*self.in_keys, *self.state_keys):
                if is_floating(value := inputs.get(key, None)):
                    inputs.set(key, value.to(own_dtype))
        return inputs, timed

    def _add_states(
        self, inputs: TensorDictBase, tensordict: TensorDictBase, *, timed: bool, fake: bool
    ) -> bool:
        """Sets the states that a pass needs; whether one pass runs along time."""
        for key in self.state_keys:
            written = tensordict.get(unravel_key(("next", key)), None)
            if written is not None and tensordict.get(key, None) is None:
                raise RuntimeError(
                    f"the policy writes ('next', {key!r}) and does not get it back as {key!r}: it "
                    "forgets its state at each step. Put `module.make_tensordict_primer()` into "
                    "the env, before the stack."
                )
        missing = [key for key in self.own_state_keys if inputs.get(key, None) is None]
        # Recorded states are exact, even for a shuffled batch that kept the name "time".
        if not missing:
            self._mark(inputs, inputs.select(*self.own_state_keys))
            return False
        if not timed:
            raise RuntimeError(
                f"the reference is recurrent and its state {missing} is not in the data: {_FIX} Or "
                "pass rows that begin with a trajectory and whose last dimension is time (named "
                '"time", or `time_dim=`).'
            )
        if not fake:
            self._require_rows(inputs, tensordict)
        for key, spec in self.state_specs().items():
            shape = (*tensordict.batch_size, *spec.shape)
            inputs.set(key, torch.zeros(shape, dtype=spec.dtype, device=tensordict.device))
        return True

    def _require_rows(self, inputs: TensorDictBase, tensordict: TensorDictBase) -> None:
        """Marks where trajectories begin in a batch (*R, T), which each row must begin with."""
        begins = self._mark(inputs, tensordict.select(*self.state_keys, strict=False))
        mask = tensordict.get(MASK_KEY, torch.ones_like(begins))
        if bool((mask & (begins.cumsum(-1) == 0)).any()):
            raise RuntimeError(
                "a row of the batch begins inside a trajectory, where the state of the recurrent "
                "reference is not known (`is_init` is False there, or the policy's recorded state "
                f"is not 0, as where a SliceSampler begins a slice): {_FIX}"
            )
        keys = [key for key in self.in_keys if key != self._init_key]
        states, may_differ = read_states(tensordict, keys), (~mask | begins).roll(-1, -1)
        require_order(states, may_differ, f"The reference is recurrent: {_FIX}")

    def _mark(self, inputs: TensorDictBase, states: TensorDictBase) -> Tensor:
        """Where trajectories begin, (*B): at `is_init`, which is set to it, if `states` are 0."""
        # A SliceSampler also sets `is_init` where a slice begins inside a trajectory.
        begins = inputs.get(self._init_key, None)
        if begins is None:
            return torch.zeros(inputs.batch_size, dtype=torch.bool, device=inputs.device)
        for state in states.values(True, True):
            inside = state.bool().unsqueeze(-1).flatten(inputs.batch_dims).any(-1)
            begins = begins & ~expand_right(inside, begins.shape)
        inputs.set(self._init_key, begins)
        return begins.reshape(inputs.batch_size)

    @contextmanager
    def scoring(self, timed: bool) -> Iterator[None]:
        """The context of each pass of `actor`; `timed`: whether the last dimension is time."""
        grad = self.requires_grad and torch.is_grad_enabled()
        with torch.set_grad_enabled(grad), set_recurrent_mode(timed):
            yield


_FIX = (
    "put KLConstrainedTransform or ReferenceModelLogProbTransform into the env, which records the "
    "state of each step, and give its `reference` to a loss."
)
