"""What the transforms share: zeros at reset, placement, specs, and a reference."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from tensordict import NestedKey, TensorDictBase
from torchrl.data import Composite, TensorSpec
from torchrl.envs import EnvBase, TransformedEnv
from torchrl.envs.transforms import Transform
from typing_extensions import Self

from torchrl_kl import _tensordict as td
from torchrl_kl._tensordict import ResolvedKeys
from torchrl_kl._torchrl import container_of
from torchrl_kl.actors.frozen import FrozenActor
from torchrl_kl.transforms.placement import (
    refuse_wrong_order,
    warn_of_chunks,
    warn_of_late_resets,
)

# The env of each transform. An attribute would be copied, or pickled, together with the transform.
_homes: weakref.WeakKeyDictionary[Transform, Callable[[], Any]] = weakref.WeakKeyDictionary()
# What each clone was cloned from.
_originals: weakref.WeakKeyDictionary[Transform, Callable[[], Any]] = weakref.WeakKeyDictionary()
# Held while a buffer is extended; a lock of each transform could be neither copied nor pickled.
_extending = threading.RLock()


class KLTransform(Transform):
    """Base of the transforms: they work in `_step` or `forward` and leave their input unchanged."""

    keys: ResolvedKeys
    action_keys: Sequence[NestedKey] = ()  # actions that must reach it as the policy wrote them
    needs_ends = False  # whether it has to see where trajectories end

    @property
    def parent_env(self) -> EnvBase:
        """The env up to this transform; available while a spec is made or the env steps."""
        return cast(EnvBase, self.parent)

    @property
    def env(self) -> EnvBase | None:
        """The env that the transform is attached to, if any."""
        # A container is an env or a Compose; TorchRL's `container` raises in a replay buffer.
        container = container_of(self)
        while container is not None and not isinstance(container, EnvBase):
            container = container_of(cast(Transform, container))
        return container

    @property
    def in_env(self) -> bool:
        """Whether the transform is attached to an env."""
        return self.env is not None

    def clone(self) -> Self:
        """A transform for another env."""
        other = super().clone()
        _originals[other] = weakref.ref(self)
        return other

    @property
    def taken_over(self) -> Self | None:
        """The transform whose place in an env this clone has taken, if any.

        TorchRL puts clones into a TransformedEnv around another, and where transforms are inserted
        before one that was alone.
        """
        original = cast(Self | None, _originals.get(self, lambda: None)())
        home = None if original is None else _homes.get(original, lambda: None)()
        env = self.env
        return original if home and env and home.base_env is env.base_env else None

    def set_container(self, container: Transform | EnvBase) -> None:
        """Refuses a second env, even inside a Compose, where TorchRL would allow it."""
        super().set_container(container)
        env, home = self.env, _homes.get(self, lambda: None)()
        if env is None:
            return
        # A TransformedEnv around a TransformedEnv takes over its transforms: same `base_env`.
        elsewhere = (
            [] if home is None or home.base_env is env.base_env else home.transform.modules()
        )
        if any(one is self for one in elsewhere):
            raise RuntimeError(
                f"{type(self).__name__} is in another env already, whose running sums it would mix "
                "with those of this one: build one for each env, with the same `controller` if "
                "they share it."
            )
        _homes[self] = weakref.ref(env)
        self.training = True  # `append_transform` has called `eval()`; see `train`

    def train(self, mode: bool = True) -> Self:
        """Sets the mode, which says whether batches move the controller.

        An env calls `eval()` on each transform that it takes; on this one it has no effect.
        """
        super().train(mode)
        outermost, container = self, container_of(self)
        while isinstance(container, Transform):
            outermost, container = container, container_of(container)
        if isinstance(container, TransformedEnv) and container.transform is not outermost:
            self.training = True
        return self

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        """A whole batch that a replay buffer is extended with (`append_transform(invert=True)`)."""
        # Several threads may extend one buffer.
        with _extending:
            # Buffers put their transforms into eval mode, which stops the controller in samples.
            training, self.training = self.training, True
            try:
                return self.forward(next_tensordict)
            finally:
                self.training = training

    def _reset(self, tensordict, tensordict_reset):
        """Writes zeros for the declared entries; TorchRL masks them in partial resets."""
        env = cast(EnvBase, self.env)
        # Data of an env that is not batch-locked may have more leading dimensions than its specs.
        leading = tensordict_reset.batch_size[: tensordict_reset.batch_dims - len(env.batch_size)]
        spec = env.full_observation_spec
        for key in self.out_keys:
            if key in spec.keys(True, True):
                tensordict_reset.set(key, spec[key].zero(leading))
        return tensordict_reset

    def _reset_on_native_autoreset(self, tensordict, tensordict_reset):
        """Writes zeros in the rows that an env has reset by itself; TorchRL masks nothing there."""
        for key in self.out_keys:
            value = tensordict_reset.get(key, None)
            if value is not None:
                # The mask lies next to the entry, or at the root for all agents.
                reset = tensordict.get(td.sibling(key, "_reset"), tensordict.get("_reset", None))
                reset = td.expand_right(reset, value.shape)
                tensordict_reset.set(key, torch.where(reset, 0.0, value))
        return tensordict_reset

    def transform_output_spec(self, output_spec: Composite) -> Composite:
        """Refuses an env in which later transforms undo this one."""
        # Here and not in `__init__` alone: transforms can be appended at any time.
        self.refuse_wrong_order()
        warn_of_chunks(self)
        warn_of_late_resets(self)
        return super().transform_output_spec(output_spec)

    def refuse_wrong_order(self) -> None:
        """RuntimeError if a transform after this one undoes its work."""
        refuse_wrong_order(self, KLTransform)

    def claim(self, spec: Composite, keys: Iterable[NestedKey]) -> None:
        """RuntimeError if the env already has one of the keys that this transform declares."""
        taken = [key for key in keys if key in spec.keys(True, True)]
        if taken:
            raise RuntimeError(
                f"{type(self).__name__} would overwrite {taken}, which the env has already: give "
                'this transform other keys, such as `keys=KLKeys.named("second")`, and a recurrent '
                "reference of its own."
            )

    def declare_states(self, spec: Composite, reference: FrozenActor) -> None:
        """Adds the recurrent state of a reference to an observation or state spec."""
        batch_size = self.parent_env.batch_size
        for key, leaf in reference.state_specs().items():
            td.add_spec(spec, key, (*batch_size, *leaf.shape), leaf.dtype, batch_size)

    def declare_reference(self, spec: Composite, reference: FrozenActor) -> None:
        """Adds that state to the observation spec; RuntimeError if it is there already."""
        self.claim(spec, reference.own_state_keys)
        self.declare_states(spec, reference)

    def log_prob_shape(self) -> torch.Size:
        """The batch shape, in the env, of the tensordict that holds the action."""
        path, spec = self.keys.recorded.branch, self.parent_env.full_action_spec
        return spec[path].shape if path and path in spec.keys(True) else self.parent_env.batch_size


def require_spec(
    spec: Composite, key: NestedKey, fix: str, name: str = "observation"
) -> TensorSpec:
    """The spec of `key`; KeyError with the fix if it is missing. `name`: which spec it is."""
    if key not in spec.keys(True, True):
        keys = td.existing_keys(spec)
        raise KeyError(f"{key!r} is not in the {name} spec, got {keys}: {fix}")
    return spec[key]
