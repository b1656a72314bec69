"""What is known of a step, passed on from scoring to measuring to penalizing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tensordict import TensorDictBase
from torch import Tensor


class KLStep(NamedTuple):
    """What is known of a batch of steps (*B), nats; *A: the agents, if the actions are nested.

    Args:
        log_prob: of the action under the policy, (*B, *A); None where no policy ran.
        ref_log_prob: of the same action under the reference, (*B, *A).
        mask: True where a step counts, (*B); None where all do.
        counted: whether the step may move a controller: the policy drew its action; or a tensor
            that says so, the shape of `kl`.
        of_reference: what the estimator needs of the reference's pass.
        states: the next recurrent states of the reference.
        kl: k1, (*B, *A, 1), or (*B, 1) where agents are summed.
        estimate: another measurement of the same KL, or None.
    """

    log_prob: Tensor | None
    ref_log_prob: Tensor
    mask: Tensor | None = None
    counted: bool | Tensor = True
    of_reference: TensorDictBase | None = None
    states: Sequence[Tensor] = ()
    kl: Tensor | None = None
    estimate: Tensor | None = None

    @property
    def measured(self) -> Tensor:
        """What the controller is fed: the estimate, or else k1."""
        return self.kl if self.estimate is None else self.estimate  # type: ignore[return-value]
