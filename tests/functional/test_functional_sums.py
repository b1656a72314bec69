"""Sums and means over masks and trajectories: against loops in Python's floats; refusals."""

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from torchrl_kl import masked_mean, masked_sum, sum_over_trajectories

step = st.tuples(st.integers(-8, 8), st.booleans(), st.booleans())  # value, done, counts


def by_hand(rows: list[list[tuple[int, bool, bool]]]) -> tuple[list[float], list[bool]]:
    """Totals of all trajectories with a step that counts, and whether they are complete."""
    totals, complete = [], []
    for row in rows:
        current: list[int] = []
        for i, (value, done, counts) in enumerate(row):
            current += [value] if counts else []
            if done or i == len(row) - 1:
                if current:
                    totals.append(float(sum(current)))
                    complete.append(done)
                current = []
    return totals, complete


class TestMaskedSumAndMean:
    values = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])
    mask = torch.tensor([[True, False, True], [False, True, False]])

    def test_by_hand(self):
        assert masked_sum(self.values, self.mask).item() == 21
        assert masked_sum(self.values, self.mask, dim=-1).tolist() == [5, 16]
        assert masked_sum(self.values, self.mask, dim=0).tolist() == [1, 16, 4]
        assert masked_mean(self.values, self.mask).item() == 7
        assert masked_mean(self.values, self.mask, dim=-1).tolist() == [2.5, 16]
        assert masked_mean(self.values, self.mask, dim=0).tolist() == [1, 16, 4]

    def test_without_a_mask_everything_counts(self):
        for dim in (None, 0, 1, (0, 1)):
            assert_close(
                masked_sum(self.values, None, dim=dim), self.values.sum(dim), rtol=0, atol=0
            )
            assert_close(
                masked_mean(self.values, None, dim=dim), self.values.mean(dim), rtol=0, atol=0
            )

    def test_several_dimensions(self):
        values, mask = torch.randn(3, 4, 5), torch.rand(3, 4, 5) < 0.7
        total = torch.stack([row[keep].sum() for row, keep in zip(values, mask, strict=True)])
        number = torch.tensor([keep.sum() for keep in mask])
        assert_close(masked_sum(values, mask, dim=(1, 2)), total)
        assert_close(masked_mean(values, mask, dim=(1, 2)), total / number)

    @pytest.mark.parametrize("hidden", [math.nan, math.inf, -math.inf], ids=str)
    def test_what_a_mask_hides_reaches_neither_value_nor_gradient(self, hidden):
        values = torch.where(self.mask, self.values, hidden).requires_grad_()
        for function, slope in ((masked_sum, 1.0), (masked_mean, 1 / 3)):
            value = function(values, self.mask)
            assert_close(value, function(self.values, self.mask), rtol=0, atol=0)
            assert_close(torch.autograd.grad(value, values)[0], self.mask * slope)

    def test_the_sum_of_nothing_is_zero_and_the_mean_an_error(self):
        nothing = torch.zeros(2, 3, dtype=torch.bool)
        assert masked_sum(self.values, nothing).item() == 0
        assert masked_sum(self.values[:0], None).item() == 0
        message = re.escape(
            "`mask` must be True somewhere in each mean, got 1 of 1 means over `values` of shape "
            "(2, 3) with nothing that counts: leave such rows out, or use `masked_sum`."
        )
        with pytest.raises(ValueError, match=f"^{message}$"):
            masked_mean(self.values, nothing)
        nothing[0] = True
        with pytest.raises(ValueError, match=r"got 1 of 2 means over `values` of shape \(2, 3\)"):
            masked_mean(self.values, nothing, dim=-1)
        with pytest.raises(ValueError, match=r"got 1 of 1 means over `values` of shape \(0, 3\)"):
            masked_mean(self.values[:0], None)

    @pytest.mark.parametrize(
        "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
    )
    def test_dtypes_are_kept_and_half_precision_is_added_up_in_single(self, dtype):
        values = torch.full((1000,), 100.0, dtype=dtype)
        mean = masked_mean(values, values > 0)
        assert mean.dtype == dtype
        assert mean.item() == 100  # the sum, 100 000, is beyond float16
        assert masked_sum(values[:512], None).dtype == dtype
        assert masked_sum(values[:512], None).item() == 51200
        assert (
            masked_mean(torch.ones(70_000, dtype=dtype), None).item() == 1
        )  # so is how many there are

    def test_refusals(self):
        for function in (masked_sum, masked_mean):
            message = (
                r"^`mask` must be boolean of the shape of `values`, \(2, 3\), got torch.float32 "
                r"of shape \(2, 3\): T"
            )
            with pytest.raises(ValueError, match=message):
                function(self.values, self.values)
            with pytest.raises(
                ValueError,
                match=r"got torch.bool of shape \(3,\): True marks the steps that count.$",
            ):
                function(self.values, self.mask[0])
            message = r"^`values` must be floating point, got torch.int64: use `.float\(\)`.$"
            with pytest.raises(TypeError, match=message):
                function(self.values.long(), self.mask)


class TestSumOverTrajectories:
    @given(
        rows=st.integers(0, 5).flatmap(
            lambda n: st.lists(st.lists(step, min_size=n, max_size=n), min_size=1, max_size=4)
        )
    )
    def test_any_rows(self, rows):
        columns = torch.tensor(rows, dtype=torch.float64).reshape(len(rows), -1, 3)
        values, done, mask = columns[..., 0], columns[..., 1].bool(), columns[..., 2].bool()
        totals, complete = sum_over_trajectories(values, done, mask=mask)
        assert (totals.tolist(), complete.tolist()) == by_hand(rows)
        everything = [[(value, end, True) for value, end, _ in row] for row in rows]
        totals, complete = sum_over_trajectories(values, done)
        assert (totals.tolist(), complete.tolist()) == by_hand(everything)

    def test_any_leading_shape_row_by_row(self):
        values, done = torch.randn(2, 3, 4), torch.rand(2, 3, 4) < 0.4
        expected = sum_over_trajectories(values.reshape(6, 4), done.reshape(6, 4))
        assert_close(sum_over_trajectories(values, done), expected, rtol=0, atol=0)
        one_by_one = [
            sum_over_trajectories(v, d)
            for v, d in zip(values.reshape(6, 4), done.reshape(6, 4), strict=True)
        ]
        assert_close(
            tuple(torch.cat(x) for x in zip(*one_by_one, strict=True)), expected, rtol=0, atol=1e-6
        )

    def test_padding_after_the_end_is_not_a_trajectory(self):
        values = torch.tensor([[1.0, 2.0, math.nan, math.nan]])
        mask = torch.tensor([[True, True, False, False]])
        for padded_done in (False, True):
            done = torch.tensor([[False, True, padded_done, padded_done]])
            totals, complete = sum_over_trajectories(values, done, mask=mask)
            assert totals.tolist() == [3]
            assert complete.tolist() == [True]

    def test_a_trajectory_ends_where_the_mask_hides_its_last_step(self):
        values, done = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([False, True, False])
        totals, complete = sum_over_trajectories(
            values, done, mask=torch.tensor([True, False, True])
        )
        assert totals.tolist() == [1, 4]
        assert complete.tolist() == [True, False]

    @pytest.mark.parametrize("hidden", [math.nan, math.inf, -math.inf], ids=str)
    def test_each_total_carries_the_gradient_of_its_steps(self, hidden):
        values = torch.tensor([[1.0, hidden, 3.0], [4.0, 5.0, 6.0]], requires_grad=True)
        done = torch.tensor([[False, False, True], [True, False, False]])
        mask = torch.tensor([[True, False, True], [True, True, True]])
        totals, _ = sum_over_trajectories(values, done, mask=mask)
        assert totals.tolist() == [4, 4, 11]
        gradient = torch.autograd.grad((totals * torch.tensor([2.0, 3.0, 5.0])).sum(), values)[0]
        assert gradient.tolist() == [[2, 0, 2], [3, 5, 5]]

    def test_half_precision_is_added_up_in_single_and_done_is_not_written_to(self):
        values = torch.ones(4096, dtype=torch.bfloat16)
        done = torch.zeros(4096, dtype=torch.bool)
        totals, complete = sum_over_trajectories(values, done)
        assert totals.dtype == torch.bfloat16
        assert totals.tolist() == [4096]  # one at a time, bfloat16 stops at 256
        assert complete.tolist() == [False]
        assert not done.any()

    def test_a_long_trajectory_is_rounded_once(self):
        values = torch.full((100_000,), 0.1)
        totals, _ = sum_over_trajectories(values, torch.zeros(100_000, dtype=torch.bool))
        assert totals.tolist() == [(100_000 * values[0].double()).float().item()]

    def test_refusals(self):
        values, done = torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bool)
        message = (
            r"^`done` must be boolean of the shape of `values`, \(2, 3\), got torch.bool of shape "
            r"\(2, 3, 1\): "
            "True marks the last step of a trajectory.$"
        )
        with pytest.raises(ValueError, match=message):
            sum_over_trajectories(values, done.unsqueeze(-1))
        with pytest.raises(ValueError, match=r"^`done` .* got torch.float32 of shape \(2, 3\)"):
            sum_over_trajectories(values, values)
        with pytest.raises(
            ValueError,
            match=r"^`mask` .* `values`, \(2, 3\), got torch.bool of shape \(3,\): .* count.$",
        ):
            sum_over_trajectories(values, done, mask=done[0])
        with pytest.raises(TypeError, match="^`values` must be floating point, got torch.int64: "):
            sum_over_trajectories(values.long(), done)
        message = "^`values` must have time as its last dimension, got a 0-dim tensor.$"
        with pytest.raises(ValueError, match=message):
            sum_over_trajectories(values.sum(), done.any())
