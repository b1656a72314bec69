"""Equations solved by bisection, checks of numbers, and state that a cast leaves in float64."""

import math

import pytest
import torch

from torchrl_kl.functional.numbers import (
    Float64State,
    check_finite,
    check_integers,
    check_number,
    solve_decreasing,
)


class TestSolveDecreasing:
    @pytest.mark.parametrize("root", [1e-300, 0.3, 1e307])
    @pytest.mark.parametrize("factor", [1.0, 1.5, 1e9])
    def test_a_hyperbola(self, root, factor):
        high = min(root * factor, 1e308)
        x = solve_decreasing(lambda x: root / x, 1.0, high)
        assert x == pytest.approx(root, rel=2e-12, abs=0)

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


def test_a_cast_leaves_the_values_of_the_state():
    state = Float64State()
    state.register_buffer("exact", torch.tensor(0.1, dtype=torch.float64))
    state.register_buffer("nothing", None)
    assert state.half().get_buffer("exact").item() == 0.1
    assert state.nothing is None


class TestCheckFinite:
    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_the_entry_the_count_and_the_first_place_are_named(self, bad):
        values = torch.zeros(2, 3, 4)
        values[1, 2, [0, 3]] = bad
        message = (
            rf"^Stack needs finite numbers, but \('next', 'kl'\) has 2 of 24 that are not, the "
            rf"first {bad} at \(1, 2, 0\). A log-prob is -inf where"
        )
        mask = torch.ones(2, 3, dtype=torch.bool)
        for counts in (None, mask):
            with pytest.raises(ValueError, match=message):
                check_finite("Stack", {"fine": values[0], ("next", "kl"): values}, counts)
        mask[1, 2] = False
        check_finite("Stack", {"kl": values, "absent": None}, mask)

    def test_numbers_whose_sum_overflows_are_finite(self):
        check_finite("Stack", {"kl": torch.full((3,), 1e308, dtype=torch.float64)})


@pytest.mark.parametrize(
    ("tensor", "message"),
    [([1], "`x` must be a tensor, got list"), (torch.ones(1), "int64 or int32, got torch.float32")],
)
def test_check_integers(tensor, message):
    check_integers("x", torch.ones(1, dtype=torch.int32))
    with pytest.raises(TypeError, match=message):
        check_integers("x", tensor)
