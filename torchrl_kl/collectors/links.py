"""How batches reach the stack, and how its coefficient and reference reach the workers.

There is one link for each `where`. `env_factory` makes what makes a worker's env; `send` tells the
workers what has changed, before they are asked for a batch; `receive` penalizes a batch if that is
still to be done, and moves the controller.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
import zlib
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_kl.actors.moving import entries_of
from torchrl_kl.actors.references import SwitchedActor
from torchrl_kl.collectors.workers import PenalizedEnvFactory, SharedFiles
from torchrl_kl.transforms import KLConstrainedTransform


class LearnerLink:
    """The stack penalizes the batches that arrive; the workers know nothing of it."""

    def __init__(self, stack: KLConstrainedTransform):
        # Trajectory ids begin at 0 in each collector, so each has its own open trajectories.
        self.stack, self.stream = stack, stack.new_stream()

    def env_factory(self, create_env_fn: Any, *, in_process: bool) -> Any:
        """The user's."""
        return create_env_fn

    def send(self, collector: Any) -> None:
        """Does nothing."""

    def receive(self, batch: TensorDictBase) -> TensorDictBase:
        """The batch with penalized rewards."""
        return self.stack(batch, self.stream)


class WorkerLink:
    """The workers penalize; what they measured moves the controller of the learner's stack.

    They learn what has changed from messages over Ray, or else from files of this machine.
    """

    def __init__(self, stack: KLConstrainedTransform, *, over_ray: bool):
        self.stack, self.stream = stack, stack.new_stream()
        self.files = None
        if not over_ray:
            folder = Path(tempfile.mkdtemp())
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            self.files = SharedFiles(folder, stack.controller.coeff)
        self._sent_coeff = stack.controller.coeff.item()
        self._sent_checksums = self._checksums()

    def env_factory(self, create_env_fn: Any, *, in_process: bool) -> PenalizedEnvFactory:
        """The user's, with a copy of the stack."""
        return PenalizedEnvFactory(create_env_fn, self.stack, self.files, in_process=in_process)

    def send(self, collector: Any) -> None:
        """Sends the coefficient and the weights of the reference where they have changed."""
        coeff, checksums = self.stack.controller.coeff.item(), self._checksums()
        weights = {}
        if checksums != self._sent_checksums:
            weights = {name: value.detach().cpu() for name, value in self._weights().items()}
        if self.files is not None:
            self.files.coeff.fill_(coeff)
            if weights:
                self.files.write(weights)
        else:
            # No answer is waited for: an actor treats its messages in order, between two batches.
            for actor in collector.remote_collectors:
                if coeff != self._sent_coeff:
                    actor.cascade_execute.remote("env.follow_coeff", coeff)
                if weights:
                    actor.cascade_execute.remote("env.follow_reference", weights)
        self._sent_coeff, self._sent_checksums = coeff, checksums

    def receive(self, batch: TensorDictBase) -> TensorDictBase:
        """The batch, penalized already, without the record that envs keep for the estimate."""
        self.stack.observe(batch, self.stream)
        self.stack.drop_record(batch)
        return batch

    def _weights(self) -> dict[str, Tensor]:
        # A policy that is its own reference has no separate weights to send.
        reference = self.stack.reference
        return {} if isinstance(reference, SwitchedActor) else entries_of(reference.actor)

    def _checksums(self) -> dict[str, int]:
        """Of the bytes, at 2 GB/s: PyTorch's version counters do not see writes through `.data`."""
        return {
            name: zlib.crc32(value.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
            for name, value in self._weights().items()
        }
