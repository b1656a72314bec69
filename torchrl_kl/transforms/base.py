"""What the transforms share: zeros at reset, placement, and specs."""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDictBase
from torch import Tensor, nn
from torchrl.data import Binary, Composite, Unbounded
from torchrl.envs import EnvBase, GymWrapper, TransformedEnv
from torchrl.envs.transforms import Transform
from typing_extensions import Self

from torchrl_kl._torchrl import container_of
from torchrl_kl.batches import AUTORESET_KEY, counted, expand_right
from torchrl_kl.keys import (
    MissingKeyError,
    ResolvedKeys,
    as_tuple,
    existing_keys,
    get_stored,
    sibling,
)
from torchrl_kl.transforms.placement import later_siblings, refuse_wrong_order

Leaf = tuple[Sequence[int], torch.dtype]  # of a spec: unbounded, or a flag


# The env in which a transform is; copies are in none.
_HOMES: Any = weakref.WeakKeyDictionary()


class Steps(NamedTuple):
    """What a transform works on: the steps (*B) of a batch, or an env step."""

    data: TensorDictBase
    following: TensorDictBase  # their "next", into which it writes
    mask: Tensor | None  # True where they count, (*B, *A); None: everywhere
    moves: bool | None = None  # whether a batch moves the controller; None: an env step


class KLTransform(Transform, ABC):
    """What TorchRL sees of a transform: it works in `_step` or on a batch, and copies its input."""

    keys: ResolvedKeys
    recorded_keys: Sequence[NestedKey] = ()  # what its estimate reads that the policy recorded
    needs_ends = False  # whether it has to see where trajectories end
    resets_late = False  # whether its env ignores the action of the step after an end
    _was_reset = False  # and has not been stepped since
    _passing: Sequence[NestedKey] = ()  # in its env: entries that do not go on from step to step

    def __init__(self, in_keys: Sequence[NestedKey], out_keys: Sequence[NestedKey]):
        if twice := sorted({str(key) for key in out_keys if out_keys.count(key) > 1}):
            raise ValueError(
                f"`keys` must name different entries, got {', '.join(twice)} for several of them: "
                "each would overwrite another."
            )
        super().__init__(in_keys=[*in_keys], out_keys=[*out_keys])

    def refuse_penalized(self, entries: Composite | TensorDictBase, where: str) -> None:
        """Raises if it would penalize rewards twice; most transforms do not penalize any."""

    @abstractmethod
    def work(self, steps: Steps) -> None:
        """Does its work on steps, which are a copy."""

    @abstractmethod
    def leaves(self, spec: Composite) -> dict[NestedKey, Leaf]:
        """What it adds to the observation spec `spec` of its env; raises where it cannot work."""

    @property
    def parent_env(self) -> EnvBase:
        """The env up to this transform; available while a spec is made or the env steps."""
        try:
            return cast(EnvBase, self.parent)
        except IndexError:  # the first transform of a Compose that begins another one
            return cast(TransformedEnv, self.env).base_env

    @property
    def env(self) -> EnvBase | None:
        """The env that the transform is attached to, if any."""
        return env_of(self)

    def set_container(self, container: Transform | EnvBase) -> None:
        """Refuses a second env, even inside a Compose, and an env with penalized rewards."""
        super().set_container(container)
        if (env := self.env) is None:
            return
        home = _HOMES.get(self, lambda: None)()
        # A TransformedEnv around a TransformedEnv takes over its transforms: same `base_env`.
        others = [] if home is None or home.base_env is env.base_env else home.transform.modules()
        if any(one is self for one in others):
            raise RuntimeError(
                f"{type(self).__name__} is in another env already, whose running sums it would mix "
                "with those of this one: build one for each env, with the same `controller` if "
                "they share it."
            )
        _HOMES[self] = weakref.ref(env)
        self.training = True  # `append_transform` has called `eval()`; see `train`
        self.resets_late = ignores_after_end(env)
        self._passing = [key for key in self.out_keys if key not in self.carried()]
        self.refuse_penalized(self.parent_env.full_observation_spec, "the env")

    def __setattr__(self, name: str, value: Any) -> None:
        refuse_replaced(self, name)
        super().__setattr__(name, value)

    def train(self, mode: bool = True) -> Self:
        """Sets the mode, which says whether batches move the controller; not by an env's `eval`."""
        super().train(mode)
        outermost, container = self, container_of(self)
        while isinstance(container, Transform):
            outermost, container = container, container_of(container)
        if isinstance(container, TransformedEnv) and container.transform is not outermost:
            self.training = True
        return self

    def _process(self, tensordict: TensorDictBase, *, moves: bool) -> TensorDictBase:
        """A processed shallow copy of a batch (*B), which `moves` the controller or not."""
        refuse_wrong_order(self, KLTransform)
        batch, fake = open_batch(tensordict)
        following: Any = batch.get("next")
        self.refuse_penalized(following, "the batch")
        if fake:  # none of its steps counts
            mask = torch.zeros(batch.batch_size, dtype=torch.bool, device=batch.device)
        else:
            mask = counted(batch, self.keys)
        self.work(Steps(batch, following, mask, moves))
        self.drop_record(batch)
        return batch

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Processes a batch (*B) that has "next"; returns a shallow copy."""
        # TorchRL puts the transforms of a replay buffer, but not a `postproc`, into eval mode.
        return self._process(tensordict, moves=self.training)

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        """A whole batch that a replay buffer is extended with (`append_transform(invert=True)`)."""
        return self._process(next_tensordict, moves=True)

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        self.work(Steps(tensordict, next_tensordict, counted(tensordict, self.keys)))
        return next_tensordict

    def carried(self) -> list[NestedKey]:
        """The entries that go on from step to step."""
        own = (self.keys.not_drawn, self.keys.episode_kl, self.keys.episode_sums)
        return [key for key in own if key in self.out_keys]

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        if (env := self.env) is not None:  # a replay buffer calls this too
            self.begin_step(tensordict, env)
        return tensordict

    def begin_step(self, tensordict: TensorDictBase, env: EnvBase) -> None:
        """Writes zeros over what steps before this one of the env recorded."""
        # TorchRL records what is here for a skipped step (`ConditionalSkip`): no penalty.
        keys = self._passing
        if self._was_reset:
            self._was_reset = False
            # Random steps of a reset (`NoopResetEnv`) also leave entries, which are cleared.
            if (random := tensordict.get(self.keys.not_drawn, None)) is not None and random.any():
                keys = self.out_keys
        for key in keys:
            value = tensordict.get(key, None)
            if value is not None:
                tensordict.set(key, torch.zeros_like(value))

    def _reset(self, tensordict, tensordict_reset):
        """Writes zeros for the declared entries; TorchRL masks them in partial resets."""
        env = cast(EnvBase, self.env)
        # Data of an env that is not batch-locked may have more leading dimensions than its specs.
        leading = tensordict_reset.batch_size[: tensordict_reset.batch_dims - len(env.batch_size)]
        spec = env.full_observation_spec
        for key in self.out_keys:
            if key in spec.keys(True, True):
                tensordict_reset.set(key, spec[key].zero(leading))
        rows = (mask for key, mask in tensordict.items(True, True) if as_tuple(key)[-1] == "_reset")
        self._was_reset = all(mask.all() for mask in rows)
        return tensordict_reset

    def _reset_on_native_autoreset(self, tensordict, tensordict_reset):
        """Writes zeros in the rows that an env has reset by itself; TorchRL masks nothing there."""
        for key in self.out_keys:
            value = tensordict_reset.get(key, None)
            if value is not None:
                # The mask lies next to the entry, or at the root for all agents.
                reset = tensordict.get(sibling(key, "_reset"), tensordict.get("_reset", None))
                zeroed = value.masked_fill(expand_right(reset, value.shape), 0)
                tensordict_reset.set(key, zeroed)
        return tensordict_reset

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Adds all entries but the reward; RuntimeError if the env has one of them already."""
        self.refuse_penalized(observation_spec, "the env")
        leaves = self.leaves(observation_spec)
        shared = (self.keys.not_drawn, AUTORESET_KEY)  # by all stacks
        there = observation_spec.keys(True, True)
        if taken := [key for key in leaves if key not in shared and key in there]:
            raise RuntimeError(
                f"{type(self).__name__} would overwrite {taken}, which the env has already: give "
                'this transform other keys, such as `keys=KLKeys.named("second")`, and a recurrent '
                "reference of its own."
            )
        for key, leaf in leaves.items():
            self._add_spec(observation_spec, key, leaf)
        return observation_spec

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        """A penalized reward has no bounds."""
        key = self.keys.penalized
        if key in self.out_keys and key == self.keys.reward:
            self._add_spec(reward_spec, key, (reward_spec[key].shape, reward_spec[key].dtype))
        return reward_spec

    def transform_input_spec(self, input_spec: Composite) -> Composite:
        """Adds the entries that go on from step to step to the state spec."""
        # Batched envs carry only actions and what is in the state spec to their workers.
        leaves = self.leaves(self.parent_env.full_observation_spec)
        if input_spec["full_state_spec"] is None:
            empty = Composite(shape=input_spec.shape, device=input_spec.device)  # type: ignore[arg-type]
            input_spec["full_state_spec"] = empty
        for key in self.carried():
            self._add_spec(input_spec["full_state_spec"], key, leaves[key])
        return input_spec

    def _add_spec(self, spec: Composite, key: NestedKey, leaf: Leaf) -> None:
        """Adds a leaf to a spec; missing nested ones have the shape that the env gives them."""
        env, (shape, dtype) = self.parent_env, leaf
        for path in (as_tuple(key)[:depth] for depth in range(1, len(as_tuple(key)))):
            if path not in spec.keys(True):
                known = (env.full_action_spec.get(path), env.full_reward_spec.get(path), spec)
                holder = next(one for one in known if isinstance(one, Composite))
                spec[path] = Composite(shape=holder.shape, device=spec.device)  # type: ignore[arg-type]
        kind = Binary if dtype == torch.bool else Unbounded
        spec[key] = kind(shape=torch.Size(shape), dtype=dtype, device=spec.device)

    def transform_output_spec(self, output_spec: Composite) -> Composite:
        """Refuses an env in which later transforms undo this one."""
        # Here and not in `__init__` alone: transforms can be appended at any time.
        refuse_wrong_order(self, KLTransform)
        return super().transform_output_spec(output_spec)

    def drop_record(self, tensordict: TensorDictBase) -> None:
        """Drops from a measured batch what the policy recorded for this estimate alone."""
        # Logits (*B, V) would fill a replay buffer. The last transform that reads them drops them.
        later = [each for each in later_siblings(self) if isinstance(each, KLTransform)]
        for key in {*self.recorded_keys}.difference(*(each.recorded_keys for each in later)):
            tensordict.pop(key, None)

    def log_prob_shape(self) -> torch.Size:
        """The batch shape, in the env, of the tensordict that holds the action."""
        path = self.keys.recorded.branch
        holder = self.parent_env.full_action_spec.get(path) if path else None  # or an action
        return holder.shape if isinstance(holder, Composite) else self.parent_env.batch_size


def refuse_replaced(owner: nn.Module, name: str) -> None:
    """AttributeError for what scorer and penalty hold: PyTorch would keep another one, unused."""
    if name in ("controller", "reference"):
        kind = type(owner).__name__
        raise AttributeError(f"`{name}` of {kind} is given when it is built: build another one.")


def env_of(transform: Transform) -> EnvBase | None:
    """The env that a transform is attached to, also within a Compose."""
    # A container is an env or a Compose; TorchRL's `container` raises in a replay buffer.
    container = container_of(transform)
    while container is not None and not isinstance(container, EnvBase):
        container = container_of(cast(Transform, container))
    return container


def ignores_after_end(env: Any) -> bool:
    """Whether it is a vectorized Gymnasium env that ignores the action of the step after an end."""
    base = env.base_env
    mode = getattr(base, "autoreset_mode", None) if isinstance(base, GymWrapper) else None
    return getattr(mode, "name", None) == "NEXT_STEP"


def check_batch(batch: TensorDictBase) -> None:
    """Raises unless it is a TensorDict of which entries can be asked for."""
    if not isinstance(batch, TensorDictBase):
        got = type(batch).__name__
        raise TypeError(f"the batch must be a TensorDict, got {got}: pass what a collector gives.")
    if isinstance(batch, LazyStackedTensorDict) and not batch.tensordicts:
        raise ValueError("the batch must have entries, got a lazy stack of no elements: skip it.")


def _is_fake(tensordict: TensorDictBase) -> bool:
    """Whether all data are zeros, as in the batch by which a collector learns the entries."""
    for key in tensordict.keys(True, True):
        # A collector may set the artificial end of a batch; hidden entries are of a transform.
        path = as_tuple(key)
        if path[-1] in ("done", "truncated") or any(name.startswith("_") for name in path):
            continue
        value = get_stored(tensordict, key)
        parts = value if isinstance(value, list) else [value]
        if any(isinstance(part, Tensor) and bool(part.any()) for part in parts):
            return False
    return True


def open_batch(tensordict: TensorDictBase) -> tuple[TensorDictBase, bool]:
    """A shallow copy of a batch, nested tensordicts included, and whether all data are zeros."""
    check_batch(tensordict)
    # A collector hands out the same buffer again: entries written into it would come back.
    if tensordict.get("next", None) is None:
        raise MissingKeyError(
            'the batch has no "next": outside an env the transforms work on the batches of a '
            f"collector, a rollout or a replay buffer. It has {existing_keys(tensordict)}."
        )
    return tensordict.copy(), _is_fake(tensordict)
