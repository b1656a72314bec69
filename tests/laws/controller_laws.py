"""What every controller must obey. A test class per controller supplies the factory."""

import copy
import io
import math
import pickle
import random
import re
from typing import Any

import pytest
import torch
from torch import nn

from torchrl_kl import KLController

not_finite = pytest.mark.parametrize(
    "kl", [math.nan, math.inf, -math.inf, torch.tensor(math.nan)], ids=repr
)
casts = pytest.mark.parametrize(
    "cast",
    [
        lambda module: module.half(),
        lambda module: module.bfloat16(),
        lambda module: module.float(),
        lambda module: module.to(torch.float32),
        lambda module: module.to("cpu", torch.float16),
        lambda module: module.type(torch.float32),
        lambda module: nn.Sequential(nn.Linear(1, 1), module).half()[1],
    ],
    ids=["half", "bfloat16", "float", "to", "to_device_and_dtype", "type", "inside_a_module"],
)


def extreme_measurements(seed: int, n: int) -> list[float]:
    """Measurements from -1e300 to 1e300, zero and tiny ones among them."""
    rng = random.Random(seed)
    return [rng.choice([0.0, 1e-300, -1e-300, 1e300, -1e300, rng.uniform(-2, 2)]) for _ in range(n)]


class ControllerLaws:
    """Inherit, and say which class and settings `make` takes; other settings may be given to it.

    The first coefficient must not be a float32 number. `n_steps` is the largest number of
    trajectories that one update takes, for the tests that push; with it an update moves log(coeff)
    by at most `log_fall` or `log_rise`. `buffers` are the names of the state, `shown` is the `repr`
    of what `make` returns without arguments.
    """

    kind: type[KLController]
    settings: dict[str, Any]
    n_steps = 1
    log_fall: float
    log_rise: float
    buffers = ("coeff",)
    # What the error says of the range of each number that `make` takes, and numbers outside it.
    ranges: dict[str, tuple[str, list[float]]] = {}
    shown: str

    def make(self, **kwargs: Any) -> KLController:
        return self.kind(**self.settings | kwargs)

    def test_a_number_out_of_range_is_refused(self):
        for name, (wanted, values) in self.ranges.items():
            for value in (*values, math.inf, math.nan):
                message = rf"^`{name}` must be finite and {wanted}, got {value}\.$"
                with pytest.raises(ValueError, match=message):
                    self.make(**{name: value})

    def test_its_settings_are_shown(self):
        assert repr(self.make()) == self.shown

    @not_finite
    def test_a_kl_that_is_not_finite_is_refused_and_changes_nothing(self, kl):
        controller = self.make()
        controller.update(0.7, 3)
        before = copy.deepcopy(controller.state_dict())
        message = (
            rf"^`kl` must be finite, got {float(kl)}: look for -inf log-probabilities "
            r"\(masked actions, a reference without the action\)\. The coefficient stays "
            rf"{before['coeff'].item():.6g}\.$"
        )
        with pytest.raises(ValueError, match=message):
            controller.update(kl, 3)
        assert controller.state_dict() == before

    @pytest.mark.parametrize("n_steps", [0, -1])
    def test_n_steps_below_one_are_refused_and_change_nothing(self, n_steps):
        controller = self.make()
        before = controller.coeff.item()
        with pytest.raises(ValueError, match=f"`n_steps` must be at least 1, got {n_steps}"):
            controller.update(5.0, n_steps)
        assert controller.coeff.item() == before

    @pytest.mark.parametrize("n_steps", [True, 1.0, "1", None])
    def test_n_steps_that_are_no_int_are_refused_and_change_nothing(self, n_steps):
        controller = self.make()
        before = controller.coeff.item()
        with pytest.raises(
            TypeError, match=f"`n_steps` must be an int, got {type(n_steps).__name__}"
        ):
            controller.update(5.0, n_steps)
        assert controller.coeff.item() == before

    def test_the_new_coefficient_is_returned_as_a_float_and_kept(self):
        controller = self.make()
        for kl in (2.0, torch.tensor(0.1), torch.tensor([0.3], dtype=torch.float64)):
            value = controller.update(kl, 3)
            assert type(value) is float
            assert controller.coeff.item() == value

    def test_a_measurement_with_a_gradient_is_a_number_like_any_other(self):
        controller, other = self.make(), self.make()
        assert controller.update(torch.tensor(2.0, requires_grad=True), 3) == other.update(2.0, 3)
        with torch.inference_mode():
            assert controller.update(2.0, 3) == other.update(2.0, 3)
        assert not controller.coeff.requires_grad

    @pytest.mark.parametrize("seed", range(3))
    def test_the_coefficient_stays_positive_and_finite(self, seed):
        controller = self.make()
        for kl in extreme_measurements(seed, 2000):
            value = controller.update(kl, self.n_steps)
            assert 0 < value < math.inf

    @pytest.mark.parametrize("seed", range(5))
    def test_a_higher_kl_never_gives_a_lower_coefficient(self, seed):
        controller = self.make_used(seed)
        rng = random.Random(seed)
        kls = sorted(
            [-1e300, -1.0, 0.0, 0.5, 1.0, 1e300, *(rng.uniform(-0.5, 1.5) for _ in range(200))]
        )
        values = [copy.deepcopy(controller).update(kl, self.n_steps) for kl in kls]
        assert values == sorted(values)

    @pytest.mark.parametrize("seed", range(5))
    def test_one_update_is_bounded(self, seed):
        controller = self.make_used(seed)
        for kl in extreme_measurements(seed, 1000):
            before = controller.coeff.item()
            change = math.log(controller.update(kl, self.n_steps) / before)
            # The coefficient, the factor and its logarithm are each rounded once or twice.
            assert -self.log_fall - 1e-14 <= change <= self.log_rise + 1e-14

    def make_used(self, seed: int) -> KLController:
        """A controller after some updates, no two seeds in the same state."""
        controller, rng = self.make(), random.Random(seed)
        for _ in range(3 * seed):
            controller.update(rng.uniform(-0.5, 1.5), 1)
        return controller

    @pytest.mark.parametrize(
        "standard_error", [0.0, 0.3, math.nan, torch.tensor(0.3, requires_grad=True)], ids=repr
    )
    def test_without_a_deadband_a_standard_error_changes_nothing(self, standard_error):
        told, untold = self.make_used(1), self.make_used(1)
        assert told.update(0.6, 3, standard_error=standard_error) == untold.update(0.6, 3)
        assert told.state_dict() == untold.state_dict()

    @pytest.mark.parametrize(
        "standard_error", [-1e-9, math.inf, -math.inf, torch.tensor(-2.0)], ids=repr
    )
    def test_a_standard_error_out_of_range_is_refused_and_changes_nothing(self, standard_error):
        controller = self.make_used(1)
        before = copy.deepcopy(controller.state_dict())
        message = (
            rf"`standard_error` must be finite and at least 0, or NaN, got "
            rf"{float(standard_error)}\.$"
        )
        with pytest.raises(ValueError, match=message):
            controller.update(5.0, 3, standard_error=standard_error)
        assert controller.state_dict() == before

    def test_a_run_that_was_interrupted_continues_as_if_it_were_not(self):
        measurements = [random.Random(0).uniform(-1, 3) for _ in range(100)]
        uninterrupted, first = self.make(), self.make()
        expected = [uninterrupted.update(kl, 7) for kl in measurements]
        for kl in measurements[:50]:
            first.update(kl, 7)
        file = io.BytesIO()
        torch.save(first.state_dict(), file)
        file.seek(0)
        second = self.make()
        second.update(1.9, 40)  # what it did before is forgotten
        second.load_state_dict(torch.load(file, weights_only=True))
        assert [second.update(kl, 7) for kl in measurements[50:]] == expected[50:]

    def test_the_state_is_numbers_in_float64(self):
        state = self.make().state_dict()
        assert tuple(state) == self.buffers
        assert all(value.shape == () and value.dtype == torch.float64 for value in state.values())

    @casts
    def test_a_cast_leaves_the_state_as_it_is(self, cast):
        controller = self.make()
        controller.update(0.6, 3)
        buffers, values = dict(controller.named_buffers()), copy.deepcopy(controller.state_dict())
        # A cast there and back would show.
        assert values["coeff"].float().double() != values["coeff"]
        assert cast(controller) is controller
        assert all(buffer is buffers[name] for name, buffer in controller.named_buffers())
        assert all(buffer.dtype == torch.float64 for buffer in controller.buffers())
        assert controller.state_dict() == values

    def test_a_move_takes_the_state_along_but_casts_nothing(self):
        for buffer in self.make().to("meta", torch.float16).buffers():
            assert buffer.device == torch.device("meta")
            assert buffer.dtype == torch.float64

    def test_the_buffers_are_changed_in_place(self):
        controller, other = self.make(), self.make()
        other.update(3.0, 11)
        buffers = dict(controller.named_buffers())
        controller.update(0.01, 3)
        assert all(buffer is buffers[name] for name, buffer in controller.named_buffers())
        controller.load_state_dict(other.state_dict())
        assert all(buffer is buffers[name] for name, buffer in controller.named_buffers())
        assert controller.state_dict() == other.state_dict()

    @pytest.mark.parametrize(
        "copied", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))], ids=["copy", "pickle"]
    )
    def test_a_copy_goes_on_alike_and_on_its_own(self, copied):
        controller = self.make(per="step")
        controller.update(2.0, 3)
        twin = copied(controller)
        assert twin.per == "step"
        before = controller.coeff.item()
        values = [twin.update(kl, 5) for kl in (0.1, 3.0)]
        assert controller.coeff.item() == before
        assert [controller.update(kl, 5) for kl in (0.1, 3.0)] == values

    def test_it_can_be_shared_between_processes(self):
        controller = self.make().share_memory()
        assert controller.coeff.is_shared()
        reopened = controller.coeff.untyped_storage()._share_filename_cpu_()
        seen = torch.empty((), dtype=torch.float64)
        seen.set_(torch.UntypedStorage._new_shared_filename_cpu(*reopened))
        controller.update(3.0, 7)
        assert controller.coeff.is_shared()
        assert seen.item() == controller.coeff.item()

    @pytest.mark.parametrize("per", ["trajectory", "step"])
    def test_the_unit_is_declared_and_shown(self, per):
        controller = self.make(per=per)
        assert controller.per == per
        assert f"coeff={controller.coeff.item():.6g}, per={per!r}" in repr(controller)

    @pytest.mark.parametrize("per", ["token", "Step", None])
    def test_another_unit_is_refused(self, per):
        with pytest.raises(ValueError, match=f'`per` must be "trajectory" or "step", got {per!r}'):
            self.make(per=per)


class ClosedLoopLaws(ControllerLaws):
    """The laws of a controller that holds a target; `make` gives it this one, in nats."""

    target = 0.5
    ranges = {
        "init_coeff": ("above 0", [0.0, -0.1]),
        "target": ("above 0", [0.0, -1.0]),
        "deadband": ("at least 0", [-1e-9]),
    }

    @pytest.mark.parametrize("factor", [1 + 1e-6, 1.1, 5.0, 1e6])
    def test_above_the_target_it_rises(self, factor):
        controller = self.make()
        before = controller.coeff.item()
        assert controller.update(self.target * factor, 3) > before

    @pytest.mark.parametrize("factor", [1 - 1e-6, 0.9, 0.0, -1.0, -1e6])
    def test_below_the_target_it_falls(self, factor):
        controller = self.make()
        before = controller.coeff.item()
        assert controller.update(self.target * factor, 3) < before

    def test_at_the_target_it_stays(self):
        controller = self.make()
        before = controller.coeff.item()
        assert controller.update(self.target, 3) == before

    @pytest.mark.parametrize("kl", [-1e300, 1e300])
    def test_it_comes_back_from_either_end(self, kl):
        controller = self.make()
        for _ in range(3000):
            controller.update(kl, self.n_steps)
        end = controller.coeff.item()
        back = controller.update(-kl, self.n_steps)
        assert (back - end) * kl < 0

    @pytest.mark.parametrize("init_coeff", ["0.1", None, True])
    def test_an_initial_coefficient_that_is_not_a_number_is_refused(self, init_coeff):
        message = f"`init_coeff` must be a number, got {type(init_coeff).__name__}"
        with pytest.raises(TypeError, match=message):
            self.make(init_coeff=init_coeff)

    def test_it_moves_as_far_as_its_bound_allows(self):
        for kl, step in ((1e300, self.log_rise), (-1e300, -self.log_fall)):
            controller = self.make()
            before = controller.coeff.item()
            assert math.log(controller.update(kl, self.n_steps) / before) == pytest.approx(
                step, rel=1e-12
            )

    # The deadband.

    def test_by_default_every_measurement_counts(self):
        controller: Any = self.make()
        assert controller.deadband == 0
        assert "deadband" not in repr(controller)

    @pytest.mark.parametrize("used", [0, 1])
    def test_within_the_deadband_a_measurement_counts_as_the_target(self, used):
        # Two standard errors of 1 / 8 around 1 / 2, without rounding; the edge belongs to the band.
        outside = (0.25 - 2**-50, 0.75 + 2**-50)
        for kl in (0.25, 0.3, 0.5, 0.7, 0.75, *outside):
            controller, free = self.make(deadband=2.0), self.make()
            for one in (controller, free):
                for _ in range(used):
                    one.update(1.0, 3, standard_error=0.0)
            value = controller.update(kl, 3, standard_error=0.125)
            assert value == free.update(kl if kl in outside else self.target, 3)
            assert controller.state_dict() == free.state_dict()

    def test_within_the_deadband_it_stays(self):
        controller = self.make(deadband=2.0)
        before = controller.coeff.item()
        for kl in (0.25, 0.4, 0.6, 0.75):
            assert controller.update(kl, 3, standard_error=torch.tensor(0.125)) == before
        assert controller.update(0.7500001, 3, standard_error=0.125) > before
        assert self.make(deadband=2.0).update(0.2499999, 3, standard_error=0.125) < before

    def test_with_a_deadband_a_higher_kl_never_gives_a_lower_coefficient(self):
        controller = self.make(deadband=1.5)
        for kl in (1.0, 1.0, 0.1):
            controller.update(kl, 3, standard_error=0.1)
        kls = [i / 100 for i in range(-50, 150)]
        values = [
            copy.deepcopy(controller).update(kl, self.n_steps, standard_error=0.1) for kl in kls
        ]
        assert values == sorted(values)

    def test_a_deadband_is_a_number_of_standard_errors(self):
        assert "target=0.5, deadband=0.5" in repr(self.make(deadband=0.5))
        for kl in (0.6, 0.7):
            narrow, wide = self.make(deadband=1.0), self.make(deadband=2.0)
            assert (narrow.update(kl, 3, standard_error=0.15) > 0.1) == (kl == 0.7)
            assert wide.update(kl, 3, standard_error=0.15) == 0.1

    def test_a_deadband_without_a_standard_error_is_an_error_and_changes_nothing(self):
        controller = self.make(deadband=2.5)
        before = copy.deepcopy(controller.state_dict())
        for unknown in (None, math.nan):
            message = re.escape(
                f"`standard_error` must be known where deadband=2.5, got {unknown}: pass that of "
                "the KLStatistics that pooled `kl`, which needs at least two values "
                "(`update_every`), or use deadband=0."
            )
            with pytest.raises(ValueError, match=f"^{message}$"):
                controller.update(5.0, 3, standard_error=unknown)
        assert controller.state_dict() == before


class BoundedLaws(ClosedLoopLaws):
    """The laws of a controller with bounds of its coefficient, by default 1e-4 and 10."""

    ranges = ClosedLoopLaws.ranges | {
        "min_coeff": ("above 0", [0.0, -0.5]),
        "max_coeff": ("at least 0.0001", [0.00005]),
    }

    def test_the_number_of_trajectories_changes_nothing(self):
        assert self.make().update(0.7, 1) == self.make().update(0.7, 10**9)

    def test_it_stays_within_its_bounds_and_reaches_them(self):
        controller = self.make(min_coeff=0.07, max_coeff=0.3)
        assert max(controller.update(9.0, 1) for _ in range(100)) == 0.3
        assert min(controller.update(0.0, 1) for _ in range(100)) == 0.07

    @pytest.mark.parametrize(("kl", "bound"), [(9.0, 10.0), (0.0, 1e-4)])
    def test_its_default_bounds(self, kl, bound):
        controller = self.make()
        values = [controller.update(kl, 1) for _ in range(300)]
        assert values[-1] == bound

    def test_an_upper_bound_below_the_lower_one_is_refused(self):
        message = "`max_coeff` must be finite and at least 0.06, got 0.05"
        with pytest.raises(ValueError, match=message):
            self.make(min_coeff=0.06, max_coeff=0.05)

    @pytest.mark.parametrize("init_coeff", [0.06, 11.0])
    def test_an_initial_coefficient_outside_the_bounds_is_refused(self, init_coeff):
        message = (
            rf"`init_coeff` must lie within \[min_coeff, max_coeff\] = \[0.07, 10\], got "
            rf"{init_coeff:g}: move"
        )
        with pytest.raises(ValueError, match=message):
            self.make(init_coeff=init_coeff, min_coeff=0.07)

    @pytest.mark.parametrize("bounds", [(0.1, 10.0), (0.01, 0.1), (0.1, 0.1)])
    def test_it_may_start_on_a_bound(self, bounds):
        assert self.make(min_coeff=bounds[0], max_coeff=bounds[1]).update(0.5, 1) == 0.1

    @pytest.mark.parametrize(("kl", "bound"), [(1e300, 1e300), (-1e300, 1e-300)])
    def test_at_the_ends_of_float64_its_bounds_hold(self, kl, bound):
        controller = self.make(min_coeff=1e-300, max_coeff=1e300)
        controller.coeff.fill_(bound ** (299 / 300))
        assert [controller.update(kl, 1) for _ in range(100)][-1] == bound
