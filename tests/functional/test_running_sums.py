"""Sums along trajectories, against a loop over the steps: values, gradients, speed, refusals."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from torchrl_kl.functional import running_sum, sum_after, sum_before

FUNCTIONS = [running_sum, sum_before, sum_after]


def loop(values: torch.Tensor, ends: torch.Tensor, initial: torch.Tensor | float = 0.0):
    """Running sums step by step; (*B, T)."""
    sums, total = [], torch.zeros_like(values[..., 0]) + initial
    for value, end in zip(values.unbind(-1), ends.unbind(-1), strict=True):
        sums.append(total + value)
        total = torch.where(end, 0.0, sums[-1])
    return torch.stack(sums, -1)


def loop_before(values: torch.Tensor, ends: torch.Tensor):
    sums, total = [], torch.zeros_like(values[..., 0])
    for value, end in zip(values.unbind(-1), ends.unbind(-1), strict=True):
        sums.append(total)
        total = torch.where(end, 0.0, total + value)
    return torch.stack(sums, -1)


def loop_after(values: torch.Tensor, ends: torch.Tensor):
    sums, total = [], torch.zeros_like(values[..., 0])
    for value, end in zip(values.flip(-1).unbind(-1), ends.flip(-1).unbind(-1), strict=True):
        total = torch.where(end, 0.0, total)
        sums.append(total)
        total = total + value
    return torch.stack(sums, -1).flip(-1)


PAIRS = list(zip(FUNCTIONS, [loop, loop_before, loop_after], strict=True))


def batch(*shape: int, share: float = 0.2, seed: int = 0):
    """Values of many magnitudes, so that the order of the additions shows, and ends."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(*shape, dtype=torch.float64, generator=generator)
    values = values * torch.exp(3 * torch.randn(shape, generator=generator))
    return values, torch.rand(shape, generator=generator) < share


@pytest.mark.parametrize(("function", "by_hand"), PAIRS)
class TestAgainstTheLoop:
    @given(
        share=st.sampled_from([0.0, 0.02, 0.2, 0.5, 0.9, 1.0]),
        shape=st.sampled_from([(1,), (70,), (1, 300), (4, 33), (2, 3, 17), (3, 1)]),
        seed=st.integers(0, 99),
    )
    def test_bit_for_bit(self, function, by_hand, share, shape, seed):
        values, ends = batch(*shape, share=share, seed=seed)
        assert torch.equal(function(values, ends), by_hand(values, ends))
        single = values.float()
        expected = by_hand(single.double(), ends).float()
        assert torch.equal(function(single, ends), expected)

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

    @pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, 1e308], ids=str)
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

    @pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5), (0, 0), (2, 0, 4)], ids=str)
    def test_nothing_gives_nothing(self, function, by_hand, shape):
        values = torch.zeros(shape, requires_grad=True)
        sums = function(values, torch.zeros(shape, dtype=torch.bool))
        assert sums.shape == shape
        sums.sum().backward()
        assert values.grad is not None
        assert values.grad.shape == shape

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    def test_half_precision_is_added_up_in_single(self, function, by_hand, dtype):
        values, ends = batch(2, 1500, share=0.003)
        values = values.clamp(-1, 1).to(dtype)  # one at a time, bfloat16 stops at 256
        sums = function(values, ends)
        assert sums.dtype == dtype
        expected = by_hand(values.double(), ends).to(dtype)
        assert_close(sums, expected, rtol=torch.finfo(dtype).eps, atol=1e-4)

    def test_its_arguments_are_left_alone_and_may_be_strided(self, function, by_hand):
        values, ends = batch(40, 6)
        before = values.clone(), ends.clone()
        assert torch.equal(function(values.T, ends.T), by_hand(values.T, ends.T))
        assert torch.equal(values, before[0])
        assert torch.equal(ends, before[1])

    def test_refusals(self, function, by_hand):
        values, ends = torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bool)
        message = (
            r"^`ends` must be boolean of the shape of `values`, \(2, 3\), got torch.bool of shape "
            r"\(2, 3, 1\): True marks the last step of a trajectory.$"
        )
        with pytest.raises(ValueError, match=message):
            function(values, ends.unsqueeze(-1))
        with pytest.raises(ValueError, match=r"^`ends` .* got torch.float32 of shape \(2, 3\)"):
            function(values, values)
        with pytest.raises(TypeError, match="^`values` must be floating point, got torch.int64: "):
            function(values.long(), ends)
        message = "^`values` must have time as its last dimension, got a 0-dim tensor"
        with pytest.raises(ValueError, match=message):
            function(values.sum(), ends.any())


class TestInitial:
    @pytest.mark.parametrize("shape", [(20,), (3, 20), (2, 3, 20), (3, 0)], ids=str)
    def test_it_is_added_to_the_first_trajectory_of_each_row(self, shape):
        values, ends = batch(*shape)
        initial = torch.randn(shape[:-1], dtype=torch.float64)
        sums = running_sum(values, ends, initial=initial)
        if shape[-1] > 0:
            assert torch.equal(sums, loop(values, ends, initial))
        assert sums.shape == shape

    def test_an_infinite_one_ends_with_its_trajectory(self):
        values, ends = torch.ones(1, 4), torch.tensor([[False, True, False, True]])
        sums = running_sum(values, ends, initial=torch.tensor([math.inf]))
        assert sums.tolist() == [[math.inf, math.inf, 1, 2]]

    def test_its_gradient(self):
        initial = torch.zeros(2, requires_grad=True)
        ends = torch.tensor([[False, True, False], [True, False, False]])
        sums = running_sum(torch.ones(2, 3), ends, initial=initial)
        gradient = torch.autograd.grad(sums.sum(), initial)[0]
        assert gradient.tolist() == [2, 1]

    def test_a_wider_one_does_not_widen_the_sums(self):
        ends = torch.zeros(2, 3, dtype=torch.bool)
        sums = running_sum(torch.ones(2, 3), ends, initial=torch.ones(2, dtype=torch.float64))
        assert sums.dtype == torch.float32
