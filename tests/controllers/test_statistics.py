"""The statistics that feed the controllers pool exactly, however what they pool is split."""

import copy
import itertools
import math
import pickle
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from tests.laws.controller_laws import casts
from torchrl_kl import KLStatistics

# Multiples of 1 / 1024 below 2 ** 10: all sums of some dozens of them and of their squares are
# exact in float64.
exact_values = st.lists(st.integers(-(2**20), 2**20).map(lambda i: i / 1024), max_size=40)


def tensor(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def state(pool: KLStatistics) -> tuple[float, ...]:
    return pool.count.item(), pool.sum.item(), pool.sum_of_squares.item()


class TestKLStatistics:
    @given(values=exact_values, cuts=st.lists(st.integers(0, 40), max_size=5))
    def test_no_split_changes_what_is_pooled(self, values, cuts):
        whole = KLStatistics().add(tensor(values))
        assert state(whole) == (len(values), sum(values), sum(value * value for value in values))
        edges = [0, *sorted(min(cut, len(values)) for cut in cuts), len(values)]
        parts = [tensor(values[start:end]) for start, end in itertools.pairwise(edges)]
        added, merged = KLStatistics(), KLStatistics()
        for part in parts:
            assert added.add(part) is added
            assert merged.merge(KLStatistics().add(part)) is merged
        assert state(added) == state(merged) == state(whole)

    @given(values=st.lists(st.floats(-50, 50), min_size=1, max_size=30), seed=st.integers(0, 100))
    def test_order_and_split_change_nothing_but_the_rounding(self, values, seed):
        order = torch.randperm(len(values), generator=torch.Generator().manual_seed(seed))
        whole, other = KLStatistics().add(tensor(values)), KLStatistics()
        for part in tensor(values)[order].chunk(1 + seed % 5):
            other = KLStatistics().add(part).merge(other)  # from left or right, it is the same sum
        assert other.count == whole.count == len(values)
        # Two sums of n terms, in whatever order, are each within n epsilon / 2 of the true one.
        tolerance = len(values) * 2.0**-52
        assert abs(other.sum.item() - whole.sum.item()) <= tolerance * sum(map(abs, values))
        assert (
            abs(other.sum_of_squares.item() - whole.sum_of_squares.item())
            <= tolerance * whole.sum_of_squares.item()
        )

    def test_merging_leaves_the_other_alone(self):
        pool, other = KLStatistics().add(tensor([1.0, 2.0])), KLStatistics().add(tensor([4.0]))
        assert state(pool.merge(other)) == (3, 7, 21)
        assert state(other) == (1, 4, 16)

    def test_merging_itself_is_refused(self):
        pool = KLStatistics().add(tensor([1.0, 2.0]))
        message = "^`other` must be another KLStatistics, got this object.$"
        with pytest.raises(ValueError, match=message):
            pool.merge(pool)
        assert state(pool) == (2, 3, 5)

    @pytest.mark.parametrize("other", [tensor([1.0]), None, 1.0])
    def test_merging_something_else_is_refused(self, other):
        pool = KLStatistics().add(tensor([1.0, 2.0]))
        with pytest.raises(
            TypeError, match=f"`other` must be a KLStatistics, got {type(other).__name__}: `add`"
        ):
            pool.merge(other)
        assert state(pool) == (2, 3, 5)

    @given(values=exact_values, seed=st.integers(0, 100))
    def test_a_mask_selects(self, values, seed):
        mask = torch.rand(len(values), generator=torch.Generator().manual_seed(seed)) < 0.5
        dirty = torch.where(mask, tensor(values), math.nan)
        kept = [value for value, keep in zip(values, mask.tolist(), strict=True) if keep]
        assert state(KLStatistics().add(dirty, mask=mask)) == state(
            KLStatistics().add(tensor(kept))
        )

    @given(values=exact_values.filter(lambda values: len(values) >= 2))
    def test_mean_and_variance_are_those_of_the_standard_library(self, values):
        pool = KLStatistics().add(tensor(values))
        assert pool.mean == pytest.approx(statistics.fmean(values), rel=1e-15, abs=1e-15)
        # The sums are exact; squaring one, the quotient and the difference each round by at most
        # half an epsilon.
        tolerance = 4 * 2.0**-53 * pool.sum_of_squares.item() / (len(values) - 1)
        assert pool.variance == pytest.approx(statistics.variance(values), rel=1e-14, abs=tolerance)
        assert pool.variance >= 0

    def test_standard_error_is_that_of_the_mean(self):
        # Variance 1 of 25 values: 12 above, 12 below and one at the mean, scaled.
        values = tensor([1.0, -1.0] * 12 + [0.0])
        pool = KLStatistics().add(3 + values)
        assert pool.variance == pytest.approx(1.0, rel=1e-14)
        assert pool.standard_error == pytest.approx(0.2, rel=1e-14)
        assert pool.merge(KLStatistics().add(3 + values)).standard_error == pytest.approx(
            math.sqrt(48 / 49 / 50), rel=1e-14
        )

    def test_standard_error_counts_how_far_a_mean_is_from_the_truth(self):
        generator = torch.Generator().manual_seed(0)
        means, errors = [], []
        for _ in range(400):
            pool = KLStatistics().add(0.5 + 2 * torch.randn(64, generator=generator))
            means.append(pool.mean)
            errors.append(pool.standard_error)
        # The spread of 400 means is known to 1 / sqrt(800), each standard error to 1 / sqrt(128): 5
        # of the first.
        assert statistics.fmean(errors) == pytest.approx(
            0.25, rel=5 / math.sqrt(128 * 400) + 1 / 256
        )
        assert statistics.stdev(means) == pytest.approx(0.25, rel=5 / math.sqrt(800))

    @pytest.mark.parametrize("mean", [1e2, 1e4, 1e6])
    def test_sums_of_squares_lose_digits_as_documented(self, mean):
        values = mean + torch.randn(
            1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
        )
        relative_error = KLStatistics().add(values).variance / values.var().item() - 1
        # Pairwise sums of 1000 terms: some 10 roundings of the squares, of the sum (counted twice),
        # and of the rest.
        assert abs(relative_error) < 40 * 2.0**-53 * mean**2

    def test_large_values_do_not_overflow(self):
        pool = KLStatistics().add(tensor([1e153, -1e153] * 4 + [2e153] * 4))
        assert pool.variance == pytest.approx(
            tensor([1.0, -1.0] * 4 + [2.0] * 4).var().item() * 1e306, rel=1e-14
        )

    def test_variance_is_the_one_of_torch(self):
        values = torch.randn(7, 11, dtype=torch.float64) + 3
        pool = KLStatistics().add(values)
        assert_close(tensor(pool.variance), values.var(), rtol=1e-13, atol=0)
        assert_close(tensor(pool.mean), values.mean(), rtol=1e-14, atol=0)

    def test_the_variance_of_equal_values_is_not_negative(self):
        pool = KLStatistics().add(tensor([0.1] * 3))
        assert (
            pool.sum_of_squares.item() < pool.sum.item() ** 2 / 3
        )  # rounding alone would make it so
        assert pool.variance == 0

    def test_what_is_not_there_is_nan(self):
        pool = KLStatistics()
        assert math.isnan(pool.mean)
        assert math.isnan(pool.variance)
        assert math.isnan(pool.standard_error)
        pool.add(tensor([2.0]))
        assert pool.mean == 2.0
        assert math.isnan(pool.variance)
        assert math.isnan(pool.standard_error)
        pool.add(tensor([2.0]))
        assert pool.variance == pool.standard_error == 0
        assert state(KLStatistics().add(torch.empty(0, 3))) == (0, 0, 0)

    @pytest.mark.parametrize(
        "bad",
        [[math.nan], [math.inf], [-math.inf], [math.inf, -math.inf], [1.0, math.nan, 2.0]],
        ids=str,
    )
    def test_a_value_that_is_not_finite_is_refused_and_adds_nothing(self, bad):
        pool = KLStatistics().add(tensor([1.0, 2.0]))
        message = (
            rf"^`values` must be finite, got {len(bad)} values with a sum of squares of "
            r"(nan|inf): look for -inf log-probabilities\. Nothing was added\.$"
        )
        with pytest.raises(ValueError, match=message):
            pool.add(tensor(bad))
        assert state(pool) == (2, 3, 5)
        with pytest.raises(ValueError, match="`values` must be finite"):
            pool.add(tensor(bad), mask=torch.ones(len(bad), dtype=torch.bool))
        assert state(pool) == (2, 3, 5)

    def test_a_value_whose_square_is_not_finite_does_not_spoil_the_variance_for_ever(self):
        pool = KLStatistics().add(tensor([1.0, 2.0]))
        with pytest.raises(ValueError, match="`values` must be finite"):
            pool.add(tensor([1e200]))
        assert state(pool) == (2, 3, 5)
        full = KLStatistics().add(tensor([1.2e154]))
        before = state(full)
        with pytest.raises(ValueError, match="`values` must be finite"):
            full.add(tensor([1.2e154]))  # the square is finite, the sum of both is not
        assert state(full) == before

    @pytest.mark.parametrize(
        ("mask", "got"),
        [
            (torch.ones(3), r"torch.float32 of shape \(3,\)"),
            (torch.ones(3, 1).bool(), r"torch.bool of shape \(3, 1\)"),
        ],
        ids=["dtype", "shape"],
    )
    def test_a_mask_that_does_not_fit_is_refused(self, mask, got):
        with pytest.raises(
            ValueError, match=rf"`mask` must be boolean of the shape of `values`, \(3,\), got {got}"
        ):
            KLStatistics().add(torch.zeros(3), mask=mask)

    @pytest.mark.parametrize(
        "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int64], ids=str
    )
    def test_values_of_any_dtype_are_summed_in_float64(self, dtype):
        pool = KLStatistics().add(torch.full((70_000,), 3, dtype=dtype))
        assert state(pool) == (70_000, 210_000, 630_000)

    def test_gradients_do_not_reach_the_sums(self):
        pool = KLStatistics().add(torch.ones(2, requires_grad=True))
        assert not pool.sum.requires_grad
        assert not pool.sum_of_squares.requires_grad

    def test_reset_forgets_in_place_and_the_state_survives_a_restart(self):
        pool = KLStatistics().add(tensor([1.0, 2.0]))
        buffers = dict(pool.named_buffers())
        other = KLStatistics()
        other.load_state_dict(pool.state_dict())
        assert pool.reset() is pool
        assert state(pool) == (0, 0, 0)
        pool.add(tensor([5.0])).merge(other)
        pool.load_state_dict(copy.deepcopy(pool.state_dict()))
        assert all(buffer is buffers[name] for name, buffer in pool.named_buffers())
        assert state(pickle.loads(pickle.dumps(pool))) == state(pool) == (3, 8, 30)
        assert state(other) == (2, 3, 5)

    @casts
    def test_a_cast_leaves_the_sums_as_they_are(self, cast):
        pool = KLStatistics().add(tensor([0.1] * 5000))
        before, dtypes = state(pool), [buffer.dtype for buffer in pool.buffers()]
        cast(pool)
        assert (
            [buffer.dtype for buffer in pool.buffers()]
            == dtypes
            == [torch.int64, torch.float64, torch.float64]
        )
        assert state(pool) == before

    def test_count_and_mean_are_shown(self):
        assert repr(KLStatistics().add(tensor([1.0, 2.0]))) == "KLStatistics(count=2, mean=1.5)"


# What one of two processes runs. A stub of the package keeps out its __init__, which imports
# TorchRL.
WORKER = """
import sys, types
import torch, torch.distributed as dist
package = types.ModuleType("torchrl_kl")
package.__path__ = [sys.argv[1]]
sys.modules["torchrl_kl"] = package
from torchrl_kl.controllers.statistics import KLStatistics
rank = int(sys.argv[3])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
pool = KLStatistics().add(torch.tensor([[1.0, 2.0], [4.0]][rank]))
buffers = list(pool.buffers())
assert pool.all_reduce() is pool
assert all(a is b for a, b in zip(pool.buffers(), buffers))
print(pool.count.item(), pool.sum.item(), pool.sum_of_squares.item(), pool.count.dtype)
dist.destroy_process_group()
"""


class TestAllReduce:
    def test_two_processes_end_with_the_pool_of_both(self, tmp_path):
        package = str(Path(__file__).parents[2] / "torchrl_kl")
        workers = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-W",
                    "error",
                    "-c",
                    WORKER,
                    package,
                    str(tmp_path / "meeting"),
                    str(rank),
                ],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            outputs = [worker.communicate(timeout=600) for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
        assert [worker.returncode for worker in workers] == [0, 0], outputs
        assert [out for out, _ in outputs] == ["3 7.0 21.0 torch.int64\n"] * 2

    def test_the_group_is_used(self, tmp_path, monkeypatch):
        seen = []
        dist.init_process_group(
            "gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1
        )
        try:
            group: Any = dist.new_group([0])
            all_reduce = dist.all_reduce
            monkeypatch.setattr(
                dist,
                "all_reduce",
                lambda t, group: (seen.append(group), all_reduce(t, group=group)),
            )
            pool = KLStatistics().add(tensor([1.0, 2.0]))
            assert state(pool.all_reduce(group)) == state(pool.all_reduce()) == (2, 3, 5)
        finally:
            dist.destroy_process_group()
        assert seen == [group, None]

    def test_without_a_group_it_says_what_to_do(self):
        pool = KLStatistics().add(tensor([1.0, 2.0]))
        message = (
            "^`all_reduce` needs an initialized torch.distributed: call "
            "torch.distributed.init_process_group first, or "
            "`merge` objects of one process.$"
        )
        with pytest.raises(RuntimeError, match=message):
            pool.all_reduce()
        assert state(pool) == (2, 3, 5)


def test_values_that_are_no_tensor_are_refused():
    with pytest.raises(
        TypeError, match=r"^`values` must be a tensor, got list: pass `torch\.tensor\(values\)`\.$"
    ):
        KLStatistics().add([1.0, 2.0])  # type: ignore[arg-type]
