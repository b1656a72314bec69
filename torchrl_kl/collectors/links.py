"""How batches reach the stack, and how its coefficient and reference reach the workers.

There is one link for each `where`. `send` tells the workers what has changed, before they are asked
for a batch; `receive` penalizes a batch if that is still to be done, and moves the controller.
"""

from __future__ import annotations

import copy
import shutil
import tempfile
import weakref
import zlib
from collections.abc import Callable
from functools import partial
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any, cast

import cloudpickle
import torch
from tensordict import MemoryMappedTensor, TensorDictBase
from torch import Tensor
from torchrl.envs import Compose, EnvBase, TransformedEnv

from torchrl_kl._tensordict import TRAJECTORY_KEY
from torchrl_kl.actors.moving import entries_of
from torchrl_kl.actors.references import SwitchedActor
from torchrl_kl.controllers import ConstantKLController
from torchrl_kl.transforms import KLConstrainedTransform

UNIQUE_TRAJECTORY_KEY = ("collector", "unique_traj_ids")


class SharedFiles:
    """The learner's coefficient and moved reference in a folder, for all processes of a machine."""

    def __init__(self, folder: Path, coeff: float):
        # The coefficient, and how many versions of the reference there have been.
        numbers = torch.tensor([coeff, 0.0], dtype=torch.float64)
        self.numbers = MemoryMappedTensor.from_tensor(numbers, filename=folder / "numbers")
        self.path = folder / "reference"
        self.stack = folder / "stack"

    def write(self, coeff: float, weights: dict[str, Tensor]) -> None:
        """Publishes the coefficient, and a version of the reference unless `weights` is empty."""
        self.numbers[0] = coeff
        if weights:
            # The file is replaced as a whole: no worker reads half of an update.
            new = self.path.with_suffix(".new")
            torch.save(weights, new)
            new.replace(self.path)
            self.numbers[1] += 1

    def read(self) -> dict[str, Tensor]:
        """The latest version of the reference."""
        return torch.load(self.path, map_location="cpu", weights_only=True)


class PenalizedEnv(TransformedEnv):
    """An env with a copy of the stack as its last transform, which follows the learner's.

    It reads `files` at each step where they are given; else the learner's collector calls `follow`.
    """

    files: SharedFiles | None = None
    _count = 0.0  # the version of the reference that it has

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        if self.files is not None:
            known = self._count
            # The count is read before the file: a version that comes meanwhile is read again.
            coeff, self._count = self.files.numbers.tolist()
            self.follow(coeff, self.files.read() if self._count != known else {})
        return super()._step(tensordict)

    @torch.no_grad()
    def follow(self, coeff: float, weights: dict[str, Tensor]) -> None:
        """Sets the coefficient, and weights of the reference, from the next step on."""
        transforms = cast(Compose, self.transform)
        stack = next(t for t in transforms if isinstance(t, KLConstrainedTransform))
        stack.controller.coeff.fill_(coeff)
        # In place: the reference may be on another device, or of another dtype.
        own = entries_of(stack.reference.actor) if weights else {}
        for name, value in weights.items():
            own[name].copy_(value)


def penalized_env(
    create_env_fn: Callable[..., EnvBase] | EnvBase,
    stack: KLConstrainedTransform | None,
    files: SharedFiles | None,
    **kwargs: Any,
) -> PenalizedEnv:
    """A worker's env: the user's, with a copy of `stack`, which is in `files` if those are given.

    It follows `files`, or else messages.
    """
    stack = copy.deepcopy(stack) if files is None else cloudpickle.loads(files.stack.read_bytes())
    env = create_env_fn if isinstance(create_env_fn, EnvBase) else create_env_fn(**kwargs)
    env = PenalizedEnv(env, Compose(stack))  # type: ignore[arg-type]
    env.files = files
    return env


class LearnerLink:
    """The stack penalizes the batches that arrive; the workers know nothing of it."""

    def __init__(self, stack: KLConstrainedTransform):
        # Trajectory ids begin at 0 in each collector, so each has its own open trajectories.
        self.stack, self.stream = stack, stack.new_stream()

    def send(self, collector: Any) -> None:
        """Does nothing."""

    def receive(self, batch: TensorDictBase) -> TensorDictBase:
        """The batch with penalized rewards."""
        return self.stack(batch, self.stream)


class WorkerLink:
    """The workers penalize; what they measured moves the controller of the learner's stack.

    They learn what has changed from messages over Ray, or from files of this machine; in one
    process, the env is told. In another process than the learner's, a reference that is the policy
    itself becomes a copy of the policy as it is now, since TorchRL sends policies without their
    weights.
    """

    def __init__(self, stack: KLConstrainedTransform, *, over_ray: bool, in_process: bool):
        self.stack, self.stream = stack, stack.new_stream()
        self.files = None
        if not (over_ray or in_process):
            # In the folder that workers remove if the learner was killed.
            folder = Path(tempfile.mkdtemp(dir=get_temp_dir()))
            # The folder lasts as long as the link, and no longer if the collector cannot be built.
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            self.files = SharedFiles(folder, stack.controller.coeff.item())
        self._sent = self._state_to_send()
        # What the workers copy. Its coefficient is set from outside; the controller stays here.
        frozen = copy.deepcopy(stack).freeze()
        frozen.feed.controller = ConstantKLController(stack.controller.coeff.item())
        if over_ray and isinstance(stack.reference, SwitchedActor):
            # By pickle and not by deepcopy: a switch that is a closure must act on the copy.
            frozen = cloudpickle.loads(cloudpickle.dumps(frozen))
        self._frozen: KLConstrainedTransform | None = frozen
        if self.files is not None:
            # Python sends a process what it starts with through a pipe. If that is more than the
            # pipe holds, and the process dies before it reads, the learner waits for ever.
            self.files.stack.write_bytes(cloudpickle.dumps(frozen))
            self._frozen = None

    def env_factory(self, create_env_fn: Any) -> Callable[..., PenalizedEnv]:
        """The user's, with a copy of the stack."""
        return partial(penalized_env, create_env_fn, self._frozen, self.files)

    def send(self, collector: Any) -> None:
        """Sends the coefficient and the weights of the reference where they have changed."""
        coeff, checksums = version = self._state_to_send()
        if version == self._sent:
            return
        # A large reference is sent only when it has moved.
        weights = {}
        if checksums != self._sent[1]:
            weights = {name: value.detach().cpu() for name, value in self._weights().items()}
        if self.files is not None:
            self.files.write(coeff, weights)
        else:
            collector.follow(coeff, weights)
        self._sent = version

    def receive(self, batch: TensorDictBase) -> TensorDictBase:
        """The batch, penalized already, without the record that envs keep for the estimate."""
        # The workers' copies are frozen, so that only this moves the controller.
        self.stack.observe(batch, self.stream)
        self.stack.drop_record(batch)
        return batch

    def _weights(self) -> dict[str, Tensor]:
        # A policy that is its own reference has no separate weights to send.
        reference = self.stack.reference
        return {} if isinstance(reference, SwitchedActor) else entries_of(reference.actor)

    def _state_to_send(self) -> tuple[float, dict[str, int]]:
        """The coefficient, and checksums of the weights' bytes, at 2 GB/s."""
        # PyTorch's version counters do not see writes through `.data`.
        return self.stack.controller.coeff.item(), {
            name: zlib.crc32(value.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
            for name, value in self._weights().items()
        }


def number_trajectories(
    batch: TensorDictBase, *, worker: int, num_workers: int, postproc: Any
) -> TensorDictBase:
    """A `postproc` that writes trajectory ids which no other worker uses, after the user's.

    The workers of Ray and of torch.distributed number their trajectories separately, each from 0.
    """
    batch = batch if postproc is None else postproc(batch)
    # Shape (*B). Of two workers, one has the even ids and the other the odd ones.
    ids = batch.get(TRAJECTORY_KEY) * num_workers + worker
    # To another key, because the collector renumbers those under its own.
    return batch.copy().set(UNIQUE_TRAJECTORY_KEY, ids)


def restore_trajectories(batch: TensorDictBase) -> TensorDictBase:
    """A shallow copy of the batch, with the unique ids under TorchRL's key if there are any."""
    batch = batch.copy()
    ids = batch.pop(UNIQUE_TRAJECTORY_KEY, None)
    return batch if ids is None else batch.set(TRAJECTORY_KEY, ids)
