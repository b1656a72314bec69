"""KL values in, their count, mean and standard error out: what controllers are fed."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchrl_kl._scalars import Float64State

__all__ = ["KLStatistics"]


class KLStatistics(Float64State):
    """Pooled KL values as (count, sum, sum of squares), never as running means.

    You may rely on: merging the statistics of parts gives the statistics of the whole, however the whole was split
    (to float64 rounding).

    State: `count` (int64), `sum` and `sum_of_squares` (float64), 0-dim buffers, changed in place only.

    Example:
        >>> first, second = KLStatistics(), KLStatistics()
        >>> _ = first.add(torch.tensor([0.5, 1.5])), second.add(torch.tensor([4.0]))
        >>> pooled = first.merge(second)
        >>> pooled.mean, int(pooled.count)
        (2.0, 3)
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
            ValueError: if the mask does not fit, or a value that counts is NaN or infinite. Nothing is then added.
        """
        if mask is not None:
            if mask.dtype != torch.bool or mask.shape != values.shape:
                raise ValueError(
                    f"`mask` must be boolean of the shape of `values`, {tuple(values.shape)}, got {mask.dtype} of "
                    f"shape {tuple(mask.shape)}."
                )
            values = values[mask]
        values = values.detach().to(self.sum)
        total, squares = values.sum(), values.square().sum()
        if not math.isfinite(squares.item()):  # finite squares imply a finite sum
            raise ValueError(
                f"`values` must be finite, got a sum of squares of {squares.item()} over {values.numel()} values: look "
                "for -inf log-probabilities. The statistics are unchanged."
            )
        self.count.add_(values.numel())
        self.sum.add_(total)
        self.sum_of_squares.add_(squares)
        return self

    def merge(self, other: KLStatistics) -> KLStatistics:
        """Pools what another object holds (of another worker or micro-batch); returns this object."""
        for buffer, addend in zip(self.buffers(), other.buffers(), strict=True):
            buffer.add_(addend.to(buffer.device))
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
        centred = self.sum_of_squares - self.sum.square() / count
        return max(centred.item(), 0.0) / (count - 1)

    def extra_repr(self) -> str:
        """The count and the mean, for `repr`."""
        return f"count={self.count.item()}, mean={self.mean:.6g}"
