"""What all transforms of this package share: copies of batches, zeros at reset, where they are attached."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import cast

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor
from torchrl.data import Composite, ReplayBuffer
from torchrl.envs import EnvBase
from torchrl.envs.transforms import Transform

from torchrl_kl._tensordict import as_tuple, beside, existing_keys, expand_right
from torchrl_kl.transforms.placement import later_transforms, refuse_parallel_worker, refuse_spoiler

RECORD_LOG_PROB = (
    "build the policy with ProbabilisticActor(..., return_log_prob=True), or name the key it records "
    "with `log_prob_key`."
)


class KLTransform(Transform):
    """Base of the transforms: in an env they work in `_step`, on a batch in `forward`, never on their input."""

    action_keys: Sequence[NestedKey] = ()  # the actions that must reach it as the policy wrote them

    @property
    def parent_env(self) -> EnvBase:
        """The env with all transforms before this one; only there while a spec is made or an env steps."""
        return cast(EnvBase, self.parent)

    @property
    def in_env(self) -> bool:
        """Whether the transform is attached to an env."""
        try:
            return self.container is not None
        except ValueError:  # TorchRL's answer inside a Compose that is in no env
            return False

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        """Writes zeros for the declared entries; partial resets mask them as they do observations."""
        env = cast(EnvBase, self.container)
        leading = tensordict_reset.batch_size[: tensordict_reset.batch_dims - len(env.batch_size)]
        spec = env.full_observation_spec
        for key in self.out_keys:
            if key in spec.keys(True, True):
                tensordict_reset.set(key, spec[key].zero(leading))
        return tensordict_reset

    def _reset_on_native_autoreset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        """Writes zeros in the rows that an env has reset by itself; here TorchRL masks nothing."""
        for key in self.out_keys:
            value = tensordict_reset.get(key, None)
            if value is not None:
                reset = tensordict.get(beside(key, "_reset"), tensordict.get("_reset", None))
                tensordict_reset.set(key, torch.where(expand_right(reset, value.shape), 0.0, value))
        return tensordict_reset

    def transform_output_spec(self, output_spec: Composite) -> Composite:
        """Refuses an env whose later transforms undo this one, each time its specs are made."""
        self.refuse_wrong_order()
        return super().transform_output_spec(output_spec)

    def refuse_wrong_order(self) -> None:
        """RuntimeError if a transform after this one undoes its work."""
        for later in later_transforms(self):
            if not isinstance(later, KLTransform):
                refuse_spoiler(self, later, self.out_keys, self.action_keys)

    def _check_batched_worker_compat(self) -> None:
        refuse_parallel_worker(type(self).__name__)

    def claim(self, observation_spec: Composite, keys: Iterable[NestedKey]) -> None:
        """RuntimeError if the env has one of the keys that this transform is going to declare."""
        taken = [key for key in keys if key in observation_spec.keys(True, True)]
        if taken:
            raise RuntimeError(
                f"{type(self).__name__} would overwrite {taken}, which the env has already (of another stack, or of "
                "its own): give this transform keys of its own, such as `kl_key=`."
            )


def sampled_from_replay() -> bool:
    """Whether the call comes from a replay buffer's `sample`, which must not move a controller.

    A transform in a replay buffer has the same surroundings as one in a lone Compose (a `postproc`, say); only the
    callers tell them apart.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in ("sample", "_sample", "__getitem__") and isinstance(
            frame.f_locals.get("self"), ReplayBuffer
        ):
            return True
        frame = frame.f_back
    return False


def counted_key(key: NestedKey) -> NestedKey:
    """Scratch entry of one env step, beside `key`: True where the step was drawn by the policy and may be counted."""
    return beside(key, f"_{as_tuple(key)[-1]}_counted")


def copy_batch(tensordict: TensorDictBase) -> TensorDictBase:
    """A shallow copy of a batch and its branches: collectors hand the same buffer out again for the next batch."""
    if tensordict.get("next", None) is None:
        raise KeyError(
            f'the batch has no "next", got {existing_keys(tensordict)}: outside an env the transforms work on the '
            "batches of a collector, a rollout or a replay buffer."
        )
    return tensordict.copy()


def get_required(tensordict: TensorDictBase, key: NestedKey, fix: str) -> Tensor:
    """The entry `key`; KeyError with the keys that are there and the fix otherwise."""
    value = tensordict.get(key, None)
    if value is None:
        raise KeyError(f"{key!r} is not in the data, got {existing_keys(tensordict)}: {fix}")
    return value
