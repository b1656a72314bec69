"""Sums over masks and along trajectories, against loops over the steps; refusals."""

import math

import pytest
import torch
from torch.testing import assert_close

from torchrl_kl.functional import masked_mean, masked_sum
from torchrl_kl.functional.sums import running_sum, sum_after, sum_before


class TestMaskedSumAndMean:
    values = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])
    mask = torch.tensor([[True, False, True], [False, True, False]])

    @pytest.mark.parametrize("hidden", [math.nan, math.inf], ids=str)
    def test_what_a_mask_hides_reaches_neither_value_nor_gradient(self, hidden):
        values = torch.where(self.mask, self.values, hidden).requires_grad_()
        for function, slope, rows in ((masked_sum, 1.0, [5, 16]), (masked_mean, 1 / 3, [2.5, 16])):
            value = function(values, self.mask)
            assert value.item() == 21 * slope
            assert function(values, self.mask, dim=-1).tolist() == rows
            assert function(values, self.mask, dim=0).tolist() == [1, 16, 4]
            assert_close(torch.autograd.grad(value, values)[0], self.mask * slope)

    def test_without_a_mask_everything_counts(self):
        for dim in (None, 0, (0, 1)):
            assert_close(masked_sum(self.values, None, dim=dim), self.values.sum(dim))
            assert_close(masked_mean(self.values, None, dim=dim), self.values.mean(dim))
        halves = torch.ones(4096, dtype=torch.bfloat16)
        assert masked_sum(halves, None).item() == 4096  # one at a time, bfloat16 stops at 256
        assert masked_sum(halves[:257], None).item() == 257  # which bfloat16 cannot hold
        assert masked_mean(halves, None).dtype == torch.float32
        assert masked_mean(100 * halves.half(), None).item() == 100  # of which the sum is inf

    def test_the_sum_of_nothing_is_zero_and_the_mean_an_error(self):
        nothing = torch.zeros(2, 3, dtype=torch.bool)
        assert masked_sum(self.values, nothing).item() == 0
        nothing[0] = True
        message = r"^`mask` must be True somewhere in each mean, got 1 of 2 means over `values` of"
        with pytest.raises(ValueError, match=message):
            masked_mean(self.values, nothing, dim=-1)


def loop(values: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Running sums step by step; (*B, T)."""
    sums, total = [], torch.zeros_like(values[..., 0])
    for value, end in zip(values.unbind(-1), ends.unbind(-1), strict=True):
        sums.append(total + value)
        total = torch.where(end, 0.0, sums[-1])
    return torch.stack(sums, -1)


def loop_before(values: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Each running sum up to the step before, or 0 where that ended."""
    shifted = torch.where(ends, 0.0, loop(values, ends)).roll(1, -1)
    shifted[..., 0] = 0.0
    return shifted


def loop_after(values: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    sums, total = [], torch.zeros_like(values[..., 0])
    for value, end in zip(values.flip(-1).unbind(-1), ends.flip(-1).unbind(-1), strict=True):
        total = torch.where(end, 0.0, total)
        sums.append(total)
        total = total + value
    return torch.stack(sums, -1).flip(-1)


PAIRS = [(running_sum, loop), (sum_before, loop_before), (sum_after, loop_after)]


def batch(*shape: int, share: float = 0.2, seed: int = 0):
    """Values of many magnitudes, so that the order of the additions shows, and ends."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(*shape, dtype=torch.float64, generator=generator)
    values = values * torch.exp(3 * torch.randn(shape, generator=generator))
    return values, torch.rand(shape, generator=generator) < share


@pytest.mark.parametrize(("function", "by_hand"), PAIRS)
class TestAlongTrajectories:
    @pytest.mark.parametrize("share", [0.0, 0.02, 0.2, 1.0])
    @pytest.mark.parametrize("shape", [(2, 1), (1, 300), (2, 3, 17)])
    def test_bit_for_bit(self, function, by_hand, share, shape):
        values, ends = batch(*shape, share=share)
        before = values.clone(), ends.clone()
        assert torch.equal(function(values, ends), by_hand(values, ends))
        expected = by_hand(values.float().double(), ends).float()
        assert torch.equal(function(values.float(), ends), expected)
        assert torch.equal(values, before[0])
        assert torch.equal(ends, before[1])
        columns, their_ends = values.unsqueeze(0).mT, ends.unsqueeze(0).mT  # strided
        assert torch.equal(function(columns, their_ends), by_hand(columns, their_ends))

    def test_one_long_trajectory_and_many_short_ones(self, function, by_hand):
        values, ends = batch(2, 300, share=1.0)
        ends[0, :-1] = False
        assert torch.equal(function(values, ends), by_hand(values, ends))

    def test_gradient(self, function, by_hand):
        values, ends = batch(5, 40)
        weights = torch.randn(5, 40, dtype=torch.float64)
        values.requires_grad_()
        gradient, expected = (
            torch.autograd.grad((f(values, ends) * weights).sum(), values)[0]
            for f in (function, by_hand)
        )
        # Sums of 40 weights of order 1, in another order.
        assert_close(gradient, expected, rtol=0, atol=1e-13)

    @pytest.mark.parametrize("bad", [math.inf, math.nan, 1e308], ids=str)
    def test_a_trajectory_leaves_the_others_alone(self, function, by_hand, bad):
        values, ends = batch(3, 50)
        ends[:, [9, 19]] = True
        spoiled = values.clone()
        spoiled[:, 10:20] = bad
        spoiled.requires_grad_()
        sums, others = function(spoiled, ends), torch.ones(50, dtype=torch.bool)
        others[10:20] = False
        assert torch.equal(sums[:, others], by_hand(values, ends)[:, others])
        assert_close(sums, by_hand(spoiled, ends), rtol=0, atol=0, equal_nan=True)
        gradient = torch.autograd.grad(sums[:, others].sum(), spoiled)[0]
        assert (gradient[:, 10:20] == 0).all()
        assert gradient.isfinite().all()

    @pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5), (2, 0, 4)], ids=str)
    def test_nothing_gives_nothing(self, function, by_hand, shape):
        values = torch.zeros(shape, requires_grad=True)
        sums = function(values, torch.zeros(shape, dtype=torch.bool))
        assert sums.shape == shape
        sums.sum().backward()
        assert values.grad is not None

    def test_half_precision_is_added_up_in_single(self, function, by_hand):
        values, ends = batch(2, 1500, share=0.003)
        values = values.clamp(-1, 1).bfloat16()
        sums = function(values, ends)
        assert sums.dtype == torch.float32
        # 1500 sums of at most 1500 in size, rounded with random signs; by chance below 1e-3.
        assert_close(sums.double(), by_hand(values.double(), ends), rtol=0, atol=1e-3)


@pytest.mark.parametrize("function", [masked_sum, *(f for f, _ in PAIRS)])
def test_refusals(function):
    values, flags = torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bool)
    message = r"must be boolean of the shape of `values`, \(2, 3\), got torch.bool of shape \(3,\)"
    with pytest.raises(ValueError, match=message):
        function(values, flags[0])
    with pytest.raises(ValueError, match=r"got torch.float32 of shape \(2, 3\): True marks the"):
        function(values, values)
    with pytest.raises(TypeError, match="^`values` must be floating point, got torch.int64: use"):
        function(values.long(), flags)
    with pytest.raises(TypeError, match="^`values` must be a tensor, got list"):
        function([0.0], flags)
    if function is not masked_sum:
        with pytest.raises(ValueError, match="^`values` must have time as its last dimension, got"):
            function(values.sum(), flags.any())
