"""The count, mean and standard error of pooled KL values, which controllers are fed."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from torchrl_kl.functional.numbers import Float64State, check_mask, check_tensor, uncompiled


class KLStatistics(Float64State):
    """Pooled KL values as (count, sum, sum of squares).

    You may rely on: merging the statistics of parts (micro-batches, workers) gives those of the
    whole, in any split and order, to float64 rounding. You may not rely on the variance of values
    that hardly vary: it has lost half its digits if the mean is 10,000 standard deviations.

    State: `count` (int64), `sum` and `sum_of_squares` (float64), 0-dim, changed in place only.

    Example:
        >>> import torch
        >>> from torchrl_kl import KLStatistics
        >>> first, second = KLStatistics(), KLStatistics()
        >>> _ = first.add(torch.tensor([0.5, 1.5])), second.add(torch.tensor([4.0]))
        >>> pooled = first.merge(second)
        >>> f"{pooled.mean} +- {pooled.standard_error:.3f} nats, of {pooled.count} values"
        '2.0 +- 1.041 nats, of 3 values'
    """

    count: Tensor
    sum: Tensor
    sum_of_squares: Tensor

    def __init__(self):
        super().__init__()
        # Sums, not running means: sums of parts can be added without weights.
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        for name in ("sum", "sum_of_squares"):
            self.register_buffer(name, torch.zeros((), dtype=torch.float64))

    @uncompiled
    def add(self, values: Tensor, *, mask: Tensor | None = None) -> KLStatistics:
        """Pools values in float64; returns this object.

        Args:
            values: KL, nats per trajectory or per step, any shape.
            mask: True where a value counts, boolean, the shape of `values`.

        Raises:
            TypeError: if `values` is not a tensor of real numbers.
            ValueError: if the mask does not fit, or a value is not finite. Nothing is then added.
        """
        check_tensor("values", values)
        if values.is_complex():
            raise TypeError(f"`values` must be real numbers, got {values.dtype}.")
        check_mask(mask, values.shape, "`values`", means="the values that count")
        total, of_squares = self.sum, self.sum_of_squares
        values = (values if mask is None else values[mask]).detach().to(total)
        squares = values.square().sum()
        # If the sum of squares is finite, so is the sum: one check before anything changes.
        if not math.isfinite(of_squares.item() + squares.item()):
            raise ValueError(
                f"`values` must be finite, got {values.numel()} values with a sum of squares of "
                f"{squares.item()}: look for -inf log-probabilities. Nothing was added."
            )
        self.count.add_(values.numel())
        total.add_(values.sum())
        of_squares.add_(squares)
        return self

    @uncompiled
    def merge(self, other: KLStatistics) -> KLStatistics:
        """Adds the values of another object (of a worker, on any device); returns this object.

        Reset `other` before it pools again, or its values count twice with the next merge.
        TypeError if it is not a KLStatistics, ValueError if it is this object.
        """
        if not isinstance(other, KLStatistics):
            got = type(other).__name__
            raise TypeError(f"`other` must be a KLStatistics, got {got}: `add` takes values.")
        if other is self:
            raise ValueError("`other` must be another KLStatistics, got this object.")
        for buffer, addend in zip(self.buffers(), other.buffers(), strict=True):
            buffer.add_(addend.to(buffer.device))
        return self

    @uncompiled
    def all_reduce(self, group: dist.ProcessGroup | None = None) -> KLStatistics:
        """Adds the values of all ranks of a process group, on each of them; returns this object.

        A collective of three float64 numbers: each rank must call it, also one without values.
        Reduce the statistics of one batch, then merge them: what is reduced twice counts twice.

        Args:
            group: as in `torch.distributed`; None: the default group.

        Example:
            >>> import torch
            >>> import torch.distributed as dist
            >>> from torchrl_kl import KLStatistics
            >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            >>> KLStatistics().add(torch.tensor([0.5, 1.5])).all_reduce().mean
            1.0
            >>> dist.destroy_process_group()
        """
        backends = dist.get_backend_config(group)  # such as "cpu:gloo,cuda:nccl"
        device = "cpu" if "cpu:" in backends else backends.partition(":")[0]
        numbers = [buffer.double() for buffer in self.buffers()]
        totals = torch.stack(numbers).to(device)
        dist.all_reduce(totals, group=group)
        for buffer, total in zip(self.buffers(), totals, strict=True):
            buffer.copy_(total)
        return self

    @uncompiled
    def reset(self) -> KLStatistics:
        """Forgets everything, in place; returns this object."""
        for buffer in self.buffers():
            buffer.zero_()
        return self

    @property
    def mean(self) -> float:
        """Mean of the pooled values, nats; NaN when there are none."""
        count = self.count.item()
        return self.sum.item() / count if count else math.nan

    @property
    def variance(self) -> float:
        """Unbiased variance of the pooled values, nats squared; NaN with fewer than two."""
        count, total = self.count.item(), self.sum.item()
        if count < 2:
            return math.nan
        # Not `total ** 2 / count`, which could overflow; rounding may leave less than 0.
        centred = self.sum_of_squares.item() - total * (total / count)
        return max(centred, 0.0) / (count - 1)

    @property
    def standard_error(self) -> float:
        """Standard error of the mean of independent values (trajectories), nats; NaN under two."""
        return math.sqrt(self.variance / max(self.count.item(), 1))
