"""Properties of KLStatistics, against sums of fractions."""

import math
from fractions import Fraction
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from tests.trust.cases import Machine, run
from torchrl_kl import KLStatistics

EPS = 2.0**-53
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64]
numbers = st.floats(-1e4, 1e4, width=16, allow_nan=False)
POOLS = 3
pools = st.integers(0, POOLS - 1)


@st.composite
def tensors(draw: Any) -> torch.Tensor:
    """Values of any dtype and shape, also empty, 0-dim, strided or with a gradient."""
    values = torch.tensor(draw(st.lists(numbers, max_size=6)), dtype=torch.float64)
    values = values.to(draw(st.sampled_from(DTYPES)))
    shape = draw(st.sampled_from(["flat", "column", "first", "strided", "gradient"]))
    if shape == "first" and len(values):
        return values[0]
    if shape == "strided":
        return values[::2]
    if shape == "gradient" and values.is_floating_point():
        return values.requires_grad_()
    return values.unsqueeze(-1) if shape == "column" else values


def check(pool: KLStatistics, known: list[Fraction], n_merges: int = 0) -> None:
    """The statistics are those of the fractions, but for the rounding of each addition."""
    count, total, squares = (
        len(known),
        sum(known, Fraction()),
        sum((x * x for x in known), Fraction()),
    )
    n = count + n_merges + 1
    # Each of at most n additions rounds by EPS of a partial sum, each square by EPS of itself.
    bound = n * EPS * 1.01 * float(sum(map(abs, known), Fraction()))
    squares_bound = (n + 1) * EPS * 1.01 * float(squares)
    assert pool.count.item() == count
    assert abs(Fraction(pool.sum.item()) - total) <= Fraction(bound)
    assert abs(Fraction(pool.sum_of_squares.item()) - squares) <= Fraction(squares_bound)
    if not count:
        assert math.isnan(pool.mean)
        assert math.isnan(pool.variance)
        return
    mean = total / count
    assert abs(pool.mean - float(mean)) <= bound / count + 4 * EPS * abs(float(mean))
    if count < 2:
        assert math.isnan(pool.variance)
        assert math.isnan(pool.standard_error)
        return
    variance = float((squares - total * mean) / (count - 1))
    error = squares_bound + 2 * abs(float(mean)) * bound + 8 * EPS * float(squares)
    assert abs(pool.variance - variance) <= error / (count - 1) + 4 * EPS * variance
    assert pool.standard_error == math.sqrt(pool.variance / count)


class Pools(Machine):
    """Several pools that are filled, merged and reset in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.pools = [KLStatistics() for _ in range(POOLS)]
        self.known: list[list[Fraction]] = [[] for _ in range(POOLS)]
        self.n_merges = 0

    @rule(i=pools, values=tensors(), data=st.data())
    def add(self, i: int, values: torch.Tensor, data: Any) -> None:
        flat = values.detach().reshape(-1).tolist()
        kept = flat
        if data.draw(st.booleans()):
            n = len(flat)
            counts = data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
            hidden = data.draw(st.sampled_from([0.0, math.nan, math.inf]))
            kept = [value for value, counted in zip(flat, counts, strict=True) if counted]
            mask = torch.tensor(counts, dtype=torch.bool).reshape(values.shape)
            if values.is_floating_point():
                values = torch.where(mask, values, hidden)
            assert self.pools[i].add(values, mask=mask) is self.pools[i]
        else:
            self.pools[i].add(values)
        self.known[i] += map(Fraction, kept)

    @rule(i=pools, j=pools)
    def merge(self, i: int, j: int) -> None:
        if i == j:  # which is refused
            return
        self.pools[i].merge(self.pools[j])
        self.known[i] = self.known[i] + self.known[j]
        self.n_merges += 1
        if sum(map(len, self.known)) > 500:
            self.reset(j)

    @rule(i=pools)
    def reset(self, i: int) -> None:
        self.pools[i].reset()
        self.known[i] = []

    @invariant()
    def all_are_exact(self) -> None:
        for pool, known in zip(self.pools, self.known, strict=True):
            check(pool, known, self.n_merges)


def test_pools_in_any_order():
    run(Pools, 40)
