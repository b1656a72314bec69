"""Equations solved by bisection, bounds of numbers, and state that a cast leaves in float64."""

import math

import pytest
import torch

from torchrl_kl.functional.numbers import (
    Float64State,
    check_number,
    solve_decreasing,
    working_dtype,
)


class TestSolveDecreasing:
    @pytest.mark.parametrize("root", [1e-300, 1e-9, 0.3, 1.0, 7e5, 1e307])
    @pytest.mark.parametrize("factor", [1.0, 1.5, 2.0, 1e9])
    def test_a_hyperbola(self, root, factor):
        high = min(root * factor, 1e308)
        x = solve_decreasing(lambda x: root / x, 1.0, high)
        assert x == pytest.approx(root, rel=2e-12, abs=0)

    def test_an_exponential(self):
        x = solve_decreasing(lambda x: math.exp(-x), 0.25, 50.0)
        assert x == pytest.approx(math.log(4), rel=2e-12, abs=0)

    def test_where_the_function_jumps(self):
        x = solve_decreasing(lambda x: float(x < 0.7), 0.5, 3.0)
        assert x == pytest.approx(0.7, rel=2e-12, abs=0)


class TestCheckNumber:
    @pytest.mark.parametrize("value", [1, 2.5, 3])
    def test_within_its_bounds_it_is_a_float(self, value):
        number = check_number("x", value, at_least=1.0, at_most=3.0)
        assert type(number) is float
        assert number == value

    @pytest.mark.parametrize("value", [1.0, 3.0, -math.inf, math.inf, math.nan])
    def test_outside_it_is_refused(self, value):
        message = f"^`x` must be finite and above 1 and below 3, got {value}.$"
        with pytest.raises(ValueError, match=message):
            check_number("x", value, above=1.0, below=3.0)

    @pytest.mark.parametrize("value", [True, "1", None, torch.tensor(1.0)], ids=repr)
    def test_anything_else_is_refused(self, value):
        message = f"^`x` must be a number, got {type(value).__name__}.$"
        with pytest.raises(TypeError, match=message):
            check_number("x", value)


def test_half_precision_is_computed_in_single():
    assert working_dtype(torch.bfloat16) == working_dtype(torch.float16) == torch.float32
    assert working_dtype(torch.float32) == torch.float32
    assert working_dtype(torch.float64) == torch.float64


def test_a_cast_leaves_the_values_of_the_state():
    state = Float64State()
    state.register_buffer("exact", torch.tensor(0.1, dtype=torch.float64))
    state.register_buffer("nothing", None)
    assert state.half().get_buffer("exact").item() == 0.1
    assert state.nothing is None
