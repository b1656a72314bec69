"""KL values in, their count, mean and standard error out: what controllers are fed."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from torchrl_kl.functional.numbers import Float64State

__all__ = ["KLStatistics"]


class KLStatistics(Float64State):
    """Pooled KL values as (count, sum, sum of squares), never as running means.

    You may rely on: merging the statistics of parts (micro-batches, workers) gives the statistics of the whole, however
    the whole was split or ordered, to float64 rounding. You may not rely on the variance of values that hardly vary:
    sums of squares lose about 1e-16 (mean / std)^2 of it, so half its digits are left at mean = 10,000 std.

    State: `count` (int64), `sum` and `sum_of_squares` (float64), 0-dim buffers, changed in place only.

    Example:
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
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("sum", torch.zeros((), dtype=torch.float64))
        self.register_buffer("sum_of_squares", torch.zeros((), dtype=torch.float64))

    def add(self, values: Tensor, *, mask: Tensor | None = None) -> KLStatistics:
        """Pools values, each with the weight 1.

        Args:
            values: KL, nats per trajectory or per step, any shape.
            mask: True where a value counts, boolean, the shape of `values`.

        Returns:
            This object.

        Raises:
            TypeError: if `values` is no tensor.
            ValueError: if the mask does not fit, or a value that counts is NaN or infinite. Nothing is then added.
        """
        if not isinstance(values, Tensor):
            raise TypeError(
                f"`values` must be a tensor, got {type(values).__name__}: pass `torch.tensor(values)`."
            )
        if mask is not None:
            if mask.dtype != torch.bool or mask.shape != values.shape:
                raise ValueError(
                    f"`mask` must be boolean of the shape of `values`, {tuple(values.shape)}, got {mask.dtype} of "
                    f"shape {tuple(mask.shape)}."
                )
            values = values[mask]
        values = values.detach().to(self.sum)
        total, squares = values.sum(), values.square().sum()
        if not (self.sum_of_squares + squares).isfinite():  # finite squares imply a finite sum
            raise ValueError(
                f"`values` must be finite, got a sum of squares of {squares.item()} over {values.numel()} values: look "
                "for -inf log-probabilities. The statistics are unchanged."
            )
        self.count.add_(values.numel())
        self.sum.add_(total)
        self.sum_of_squares.add_(squares)
        return self

    def merge(self, other: KLStatistics) -> KLStatistics:
        """Pools what another object holds (of another worker or micro-batch), on any device.

        `other` keeps what it holds: reset it before it pools anew, or its values are counted again with its next merge.

        Returns:
            This object.

        Raises:
            TypeError: if `other` is no KLStatistics.
            ValueError: if `other` is this object.
        """
        if not isinstance(other, KLStatistics):
            raise TypeError(
                f"`other` must be a KLStatistics, got {type(other).__name__}: `add` takes values."
            )
        if other is self:
            raise ValueError(
                "`other` must be another KLStatistics, got this object: every value would count twice."
            )
        for buffer, addend in zip(self.buffers(), other.buffers(), strict=True):
            buffer.add_(addend.to(buffer.device))
        return self

    def all_reduce(self, group: dist.ProcessGroup | None = None) -> KLStatistics:
        """Pools what the same object holds in every process of a group; all of them must call this.

        Afterwards each holds the pool of all: the mean that its controller is told is the mean over all values, not a
        mean of means. Call it once per pool and reset before pooling anew: a second call counts every value again.

        Args:
            group: the processes; by default all of them. Its backend must know the device of the buffers.

        Returns:
            This object.

        Raises:
            RuntimeError: if `torch.distributed` is not initialised.
        """
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                "`all_reduce` needs an initialised torch.distributed: call torch.distributed.init_process_group first, "
                "or `merge` objects of one process."
            )
        totals = torch.stack(
            [buffer.double() for buffer in self.buffers()]
        )  # counts are exact up to 2 ** 53
        dist.all_reduce(totals, group=group)
        for buffer, total in zip(self.buffers(), totals, strict=True):
            buffer.copy_(total)
        return self

    def reset(self) -> KLStatistics:
        """Forgets everything, in place; returns this object."""
        for buffer in self.buffers():
            buffer.zero_()
        return self

    @property
    def mean(self) -> float:
        """Mean of the pooled values, nats; NaN when there are none."""
        return (self.sum / self.count).item()

    @property
    def variance(self) -> float:
        """Unbiased variance of the pooled values, nats squared; NaN when there are fewer than two."""
        count = self.count.item()
        if count < 2:
            return math.nan
        centred = self.sum_of_squares - self.sum * (self.sum / count)  # sum.square() could overflow
        return max(centred.item(), 0.0) / (count - 1)

    @property
    def standard_error(self) -> float:
        """Standard error of the mean, sqrt(variance / count), nats; NaN when there are fewer than two values.

        It takes the values as independent. Steps of one trajectory are not: pooled per step, it is too small.
        """
        return (self.variance / self.count.double()).sqrt().item()

    def extra_repr(self) -> str:
        """The count and the mean, for `repr`."""
        return f"count={self.count.item()}, mean={self.mean:.6g}"
