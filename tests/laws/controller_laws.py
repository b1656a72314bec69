"""What every controller must obey. A test class per controller supplies the factory."""

import copy
import io
import math
import pickle
import random
from typing import Any

import pytest
import torch
from torch import nn

from torchrl_kl import KLController

casts = pytest.mark.parametrize(
    "cast",
    [
        lambda module: module.half(),
        lambda module: module.to("cpu", torch.float16),
        lambda module: module.type(torch.float32),
        lambda module: nn.Sequential(nn.Linear(1, 1), module).half()[1],
    ],
    ids=["half", "to_device_and_dtype", "type", "inside_a_module"],
)


def extreme_measurements(seed: int, n: int) -> list[float]:
    """Measurements from -1e300 to 1e300, zero and tiny ones among them."""
    rng = random.Random(seed)
    return [rng.choice([0.0, 1e-300, -1e-300, 1e300, -1e300, rng.uniform(-2, 2)]) for _ in range(n)]


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return tuple(one) == tuple(other) and all(one[key] == other[key] for key in one)


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

    @pytest.mark.parametrize(
        ("kl", "n_steps", "message"),
        [
            (math.nan, 3, r"`kl` must be finite, got nan: look .* The coefficient stays \d"),
            (torch.tensor(-math.inf), 3, "`kl` must be finite, got -inf: look for -inf log-"),
            (5.0, 0, "`n_steps` must be an int of at least 1, got 0"),
            (5.0, True, "`n_steps` must be an int of at least 1, got True"),
            (5.0, 1.0, "`n_steps` must be an int of at least 1, got 1.0"),
            (True, 1, "`kl` must be a number, got bool"),
            ("5", 1, "`kl` must be a number, got str"),
            (torch.ones(2), 1, r"`kl` must be one number, got shape \(2,\): pass the mean"),
        ],
    )
    def test_other_arguments_are_refused_and_change_nothing(self, kl, n_steps, message):
        controller = self.make_used(1)
        before = copy.deepcopy(controller.state_dict())
        with pytest.raises((TypeError, ValueError), match=message):
            controller.update(kl, n_steps)
        assert equal(controller.state_dict(), before)

    def test_the_new_coefficient_is_returned_as_a_float_and_kept(self):
        controller = self.make()
        for kl in (2.0, torch.tensor([0.3]), torch.tensor(0.1, requires_grad=True)):
            with torch.inference_mode(isinstance(kl, float)):
                value = controller.update(kl, 3)
            assert type(value) is float
            assert controller.coeff.item() == value
        assert not controller.coeff.requires_grad

    @pytest.mark.parametrize("seed", range(3))
    def test_a_higher_kl_never_gives_a_lower_coefficient(self, seed):
        controller = self.make_used(seed)
        rng = random.Random(seed)
        kls = sorted(
            [-1e300, -1.0, 0.0, 0.5, 1.0, 1e300, *(rng.uniform(-0.5, 1.5) for _ in range(60))]
        )
        values = [copy.deepcopy(controller).update(kl, self.n_steps) for kl in kls]
        assert values == sorted(values)

    @pytest.mark.parametrize("seed", range(3))
    def test_one_update_is_bounded(self, seed):
        controller = self.make_used(seed)
        for kl in extreme_measurements(seed, 200):
            before = controller.coeff.item()
            change = math.log(controller.update(kl, self.n_steps) / before)  # of a number > 0
            # The coefficient, the factor and its logarithm are each rounded once or twice.
            assert -self.log_fall - 1e-14 <= change <= self.log_rise + 1e-14

    def make_used(self, seed: int) -> KLController:
        """A controller after some updates, no two seeds in the same state."""
        controller, rng = self.make(), random.Random(seed)
        for _ in range(3 * seed):
            controller.update(rng.uniform(-0.5, 1.5), 1)
        return controller

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

    @casts
    def test_a_cast_leaves_the_state_as_it_is(self, cast):
        controller = self.make()
        controller.update(0.6, 3)
        buffers, values = dict(controller.named_buffers()), copy.deepcopy(controller.state_dict())
        # A cast there and back would show.
        assert values["coeff"].float().double() != values["coeff"]
        assert tuple(values) == self.buffers
        assert cast(controller) is controller
        assert all(buffer is buffers[name] for name, buffer in controller.named_buffers())
        assert all(buffer.dtype == torch.float64 for buffer in controller.buffers())
        assert equal(controller.state_dict(), values)

    def test_the_buffers_are_changed_in_place(self):
        controller, other = self.make(), self.make()
        other.update(3.0, 11)
        buffers = dict(controller.named_buffers())
        controller.update(0.01, 3)
        assert all(buffer is buffers[name] for name, buffer in controller.named_buffers())
        controller.load_state_dict(other.state_dict())
        assert all(buffer is buffers[name] for name, buffer in controller.named_buffers())
        assert equal(controller.state_dict(), other.state_dict())

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

    def test_the_unit_is_declared_and_shown(self):
        controller = self.make(per="step")
        assert controller.per == "step"
        assert f"coeff={controller.coeff.item():.6g}, per='step'" in repr(controller)
        with pytest.raises(ValueError, match='`per` must be "trajectory" or "step", got None'):
            self.make(per=None)


class ClosedLoopLaws(ControllerLaws):
    """The laws of a controller that holds a target; `make` gives it this one, in nats."""

    target = 0.5
    ranges = {
        "init_coeff": ("above 0", [0.0, -0.1]),
        "target": ("above 0", [0.0, -1.0]),
    }

    @pytest.mark.parametrize("factor", [1 + 1e-6, 1.1, 1e6, 1, 1 - 1e-6, 0.9, 0.0, -1e6])
    def test_above_the_target_it_rises_and_below_it_falls(self, factor):
        controller = self.make()
        before = controller.coeff.item()
        moved = controller.update(self.target * factor, 3) - before
        assert (moved > 0, moved < 0) == (factor > 1, factor < 1)

    def test_it_moves_as_far_as_its_bound_allows(self):
        for kl, step in ((1e300, self.log_rise), (-1e300, -self.log_fall)):
            controller = self.make()
            before = controller.coeff.item()
            assert math.log(controller.update(kl, self.n_steps) / before) == pytest.approx(
                step, rel=1e-12
            )


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
        controller.load_state_dict(controller.state_dict())  # a bound itself is no wrong state

    @pytest.mark.parametrize("init_coeff", [0.06, 11.0])
    def test_an_initial_coefficient_outside_the_bounds_is_refused(self, init_coeff):
        message = (
            rf"`init_coeff` must lie within \[min_coeff, max_coeff\] = \[0.07, 10\], got "
            rf"{init_coeff:g}: move"
        )
        with pytest.raises(ValueError, match=message):
            self.make(init_coeff=init_coeff, min_coeff=0.07)
