"""The statistics that feed the controllers pool exactly; tests/trust has pools in any order."""

import copy
import math
import pickle

import pytest
import torch

from torchrl_kl import KLStatistics


def tensor(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def state(pool: KLStatistics) -> tuple[float, ...]:
    return pool.count.item(), pool.sum.item(), pool.sum_of_squares.item()


class TestKLStatistics:
    def test_what_large_and_equal_values_lose(self):
        values = 1e6 + torch.randn(1000, dtype=torch.float64)
        relative_error = KLStatistics().add(values).variance / values.var().item() - 1
        # Pairwise sums of 1000 terms: some 10 roundings of the squares, of the sum (counted twice),
        # and of the rest.
        assert abs(relative_error) < 40 * 2.0**-53 * 1e12
        units = tensor([1.0, -1.0] * 4 + [2.0] * 4)
        large = KLStatistics().add(1e153 * units)  # no overflow on the way
        assert large.variance == pytest.approx(units.var().item() * 1e306, rel=1e-14)
        equal = KLStatistics().add(tensor([0.1] * 3))
        # Rounding alone would make it negative.
        assert equal.sum_of_squares.item() < equal.sum.item() ** 2 / 3
        assert equal.variance == 0

    @pytest.mark.parametrize(
        "bad", [[math.nan], [-math.inf], [math.inf, -math.inf], [1.0, math.nan], [1e200]], ids=str
    )
    @pytest.mark.parametrize("masked", [False, True])
    def test_a_value_that_is_not_finite_is_refused_and_adds_nothing(self, bad, masked):
        values = tensor([1.0, math.nan, 2.0])
        pool = KLStatistics().add(values, mask=~values.isnan())
        message = (
            rf"^`values` must be finite, got {len(bad)} values with a sum of squares of "
            r"(nan|inf): look for -inf log-probabilities\. Nothing was added\.$"
        )
        with pytest.raises(ValueError, match=message):
            pool.add(tensor(bad), mask=torch.ones(len(bad), dtype=torch.bool) if masked else None)
        assert state(pool) == (2, 3, 5)

    def test_a_sum_that_would_overflow_is_refused(self):
        full = KLStatistics().add(tensor([1.2e154]))
        before = state(full)
        with pytest.raises(ValueError, match="`values` must be finite"):
            full.add(tensor([1.2e154]))  # the square is finite, the sum of both is not
        assert state(full) == before

    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (lambda pool: pool.add([1.0]), "`values` must be a tensor, got list"),
            (lambda pool: pool.add(torch.ones(1) + 1j), "`values` must be real numbers, got torch"),
            (
                lambda pool: pool.add(torch.zeros(3), mask=torch.ones(3, 1).bool()),
                r"`mask` .* of the shape of `values`, \(3,\), got torch.bool of shape \(3, 1\)",
            ),
            (lambda pool: pool.merge(1.0), "`other` must be a KLStatistics, got float: `add` "),
            (lambda pool: pool.merge(pool), "`other` must be another KLStatistics, got this obj"),
        ],
    )
    def test_refusals(self, call, message):
        pool = KLStatistics().add(tensor([1.0, 2.0]))
        with pytest.raises((TypeError, ValueError, RuntimeError), match=message):
            call(pool)
        assert state(pool) == (2, 3, 5)

    def test_reset_forgets_in_place_and_the_state_survives_a_restart(self):
        pool, other = KLStatistics().add(tensor([1.0, 2.0]).requires_grad_()), KLStatistics()
        assert not pool.sum.requires_grad
        buffers = dict(pool.named_buffers())
        other.load_state_dict(pool.state_dict())
        assert pool.reset() is pool
        assert state(pool) == (0, 0, 0)
        pool.add(tensor([5.0])).merge(other)
        pool.load_state_dict(copy.deepcopy(pool.state_dict()))
        assert all(buffer is buffers[name] for name, buffer in pool.named_buffers())
        assert state(pickle.loads(pickle.dumps(pool))) == state(pool) == (3, 8, 30)
        assert state(other) == (2, 3, 5)
        assert other.half().sum.dtype == torch.float64
        with torch.device("meta"):
            assigned = KLStatistics()
        assigned.load_state_dict(other.state_dict(), assign=True)
        assert assigned.mean == 1.5
