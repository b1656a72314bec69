"""The controllers do what their formulas say."""

import math
import random
from typing import Any

import pytest
import torch
from torch import nn
from torchrl.data import AdaptiveKLController as TorchRLAdaptiveKLController

from tests.laws.controller_laws import BoundedLaws, ClosedLoopLaws, ControllerLaws
from torchrl_kl import (
    AdaptiveKLController,
    ConstantKLController,
    ExponentialKLController,
    KLController,
    KLStatistics,
    PIDKLController,
    TargetKLController,
)
from torchrl_kl.controllers.rules import as_controller


class TestConstant(ControllerLaws):
    kind, settings = ConstantKLController, {"coeff": 0.1}
    n_steps = 10**9
    log_fall = log_rise = 0.0
    ranges = {"coeff": ("at least 0", [-0.1])}
    shown = "ConstantKLController(coeff=0.1, per='trajectory')"

    def test_no_measurement_moves_it(self):
        controller = self.make()
        assert [controller.update(kl, 10**6) for kl in (-1e300, 0.0, 1e300)] == [0.1] * 3

    def test_zero_only_measures(self):
        assert ConstantKLController(0.0).update(3.0, 1) == 0.0


class TestAdaptive(ClosedLoopLaws):
    kind, settings = AdaptiveKLController, {"init_coeff": 0.1, "target": 0.5, "horizon": 10}
    n_steps = 49  # an update by a factor of 0.02 or 1.98
    log_fall, log_rise = -math.log(0.02), math.log(1.98)
    ranges = ClosedLoopLaws.ranges | dict.fromkeys(("horizon", "clip"), ("above 0", [0.0, -0.5]))
    shown = "AdaptiveKLController(coeff=0.1, per='trajectory', target=0.5, horizon=10, clip=0.2)"

    def test_it_is_the_published_rule_to_the_last_bit(self):
        rng = random.Random(0)
        controller = AdaptiveKLController(0.2, 6.0, 10_000, clip=0.2)
        coeff = 0.2
        for _ in range(1000):
            kl, n_steps = rng.uniform(-1.0, 13.0), rng.randint(1, 1024)
            error = kl / 6.0 - 1
            if error > 0.2:
                error = 0.2
            elif error < -0.2:
                error = -0.2
            coeff = coeff * (1 + error * n_steps / 10_000)
            assert controller.update(kl, n_steps) == coeff
        assert controller.coeff.item() == coeff

    def test_known_steps(self):
        # 10 % above the target: 1 + 0.1 * 500 / 10000. Then far below: 1 - 0.2 * 1000 / 10000.
        controller = AdaptiveKLController(1.0, 6.0, 10_000)
        assert controller.update(6.6, 500) == pytest.approx(1.005, rel=1e-15)
        assert controller.update(0.0, 1000) == pytest.approx(1.005 * 0.98, rel=1e-15)
        wide = AdaptiveKLController(1.0, 6.0, 10_000, clip=1.0)
        assert wide.update(60.0, 1000) == pytest.approx(1.1, rel=1e-15)

    @pytest.mark.parametrize("kl", [0.0, 0.5, 5.0])
    @pytest.mark.parametrize("n_steps", [50, 51, 10**6])
    def test_an_update_that_could_reach_zero_is_refused_and_changes_nothing(self, kl, n_steps):
        controller = self.make()
        message = (
            f"^`n_steps` must be less than horizon / clip = 50, got {n_steps}: one update could "
            f"bring the coefficient "
            r"to zero or below\. Raise `horizon`, lower `clip`, or update more often\.$"
        )
        with pytest.raises(ValueError, match=message):
            controller.update(kl, n_steps)
        assert controller.coeff.item() == 0.1
        assert controller.update(kl, 49) > 0

    # NumPy 2 warns in the other library, which clips a tensor with np.clip.
    @pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")
    def test_it_rises_where_the_class_of_this_name_in_torchrl_falls(self):
        def theirs():
            return TorchRLAdaptiveKLController(init_kl_coef=0.2, target=6.0, horizon=1000)

        def ours():
            return AdaptiveKLController(0.2, 6.0, 1000)

        # Given the KL itself, theirs always falls: above the target, at it and below it, and always
        # as far as it can.
        for kl in (3.0, 6.0, 7.0, 60.0):
            assert float(theirs().update([kl] * 50)) == pytest.approx(0.2 * (1 - 0.2 * 50 / 1000))
        assert ours().update(7.0, 50) > 0.2 == ours().update(6.0, 50) > ours().update(3.0, 50)
        # Given what it wants, the penalties -coeff * kl, it is the same rule (its numbers are in
        # float32).
        for kl in (3.0, 6.0, 6.5, 60.0):
            assert float(theirs().update([-0.2 * kl] * 50)) == pytest.approx(
                ours().update(kl, 50), rel=1e-6
            )


class TestExponential(BoundedLaws):
    kind, settings = ExponentialKLController, {"init_coeff": 0.1, "target": 0.5}
    log_fall = log_rise = 0.1
    ranges = BoundedLaws.ranges | {"gain": ("above 0", [0.0, -0.5])}
    shown = (
        "ExponentialKLController(coeff=0.1, per='trajectory', target=0.5, gain=0.1, "
        "bounds=[0.0001, 10])"
    )

    def test_known_steps(self):
        # Errors of 0.5, -0.4, and 9 and -3 (each clipped to 1), at a gain of log 2.
        controller = ExponentialKLController(1.0, 2.0, gain=math.log(2))
        assert controller.update(3.0, 1) == pytest.approx(math.sqrt(2), rel=1e-14)
        assert controller.update(1.2, 1) == pytest.approx(2**0.1, rel=1e-14)
        assert controller.update(20.0, 1) == pytest.approx(2**1.1, rel=1e-14)
        assert controller.update(-4.0, 1) == pytest.approx(2**0.1, rel=1e-14)

    @pytest.mark.parametrize(("kl", "bound"), [(1e300, 10.0), (-1e300, 1e-4)])
    def test_a_large_gain_goes_to_the_bound(self, kl, bound):
        assert self.make(gain=1000.0).update(kl, 1) == bound


def simulate(controller: KLController, *, lag: float = 10.0, updates: int = 120) -> list[float]:
    """The KL of a policy, step by step, that learns a reward of 0 or 1.

    The reference gets the reward with probability 0.3. With each update the KL goes 1 / `lag` of
    its way to that of the optimum for the coefficient. It begins at 0.
    """
    kl, kls = 0.0, []
    for _ in range(updates):
        gained = 0.3 * math.exp(1 / controller.coeff.item())
        p = gained / (gained + 0.7)
        optimum = p * math.log(p / 0.3) + ((1 - p) * math.log((1 - p) / 0.7) if p < 1 else 0.0)
        kl += (optimum - kl) / lag
        kls.append(kl)
        controller.update(kl, 512)
    return kls


def settled(kls: list[float]) -> int:
    """The number of updates until the KL stays within 10 % of 0.5."""
    return max((t + 1 for t, kl in enumerate(kls) if abs(kl - 0.5) > 0.05), default=0)


class TestPID(BoundedLaws):
    kind = PIDKLController
    gains = {"kp": 0.7, "ki": 0.05, "kd": 0.4, "smoothing": 0.6}
    settings = {"init_coeff": 0.1, "target": 0.5, **gains}
    buffers = ("coeff", "filtered_error", "filtered_change")
    # The filtered error moves by at most 0.4 * 2, its change by twice that.
    log_fall = log_rise = 0.05 + 0.7 * 0.8 + 0.4 * 1.6
    ranges = BoundedLaws.ranges | {
        "kp": ("at least 0 and at most 100", [-0.1, 100.001]),
        "ki": ("above 0 and at most 100", [-0.1, 100.001, 0.0]),
        "kd": ("at least 0 and at most 100", [-0.1, 100.001]),
        "smoothing": ("at least 0 and below 1", [-0.1, 1.0]),
    }
    shown = (
        "PIDKLController(coeff=0.1, per='trajectory', target=0.5, kp=0.7, ki=0.05, kd=0.4, "
        "smoothing=0.6, bounds=[0.0001, 10])"
    )

    def test_it_moves_as_far_as_its_bound_allows(self):
        # Unfiltered, from one end to the other and back: ki + 2 kp + 4 kd.
        for sign in (1, -1):
            controller = self.make(smoothing=0.0, max_coeff=1e9, min_coeff=1e-9)
            for kl in (1e300, -1e300):
                controller.update(sign * kl, 1)
            before = controller.coeff.item()
            step = sign * (0.05 + 2 * 0.7 + 4 * 0.4)
            assert math.log(controller.update(sign * 1e300, 1) / before) == pytest.approx(
                step, rel=1e-12
            )

    @pytest.mark.parametrize("seed", range(3))
    def test_it_is_the_sum_of_three_parts(self, seed):
        # The position form: gains times the sum of the errors, the average that forgets, and the
        # average's last change.
        rng = random.Random(seed)
        controller = self.make(max_coeff=1e6, min_coeff=1e-6)
        errors: list[float] = []
        averages = [0.0]
        for t in range(50):
            kl = rng.uniform(-0.2, 1.5)
            errors.append(min(max(kl / 0.5 - 1, -1), 1))
            averages.append(sum(0.4 * 0.6 ** (t - i) * error for i, error in enumerate(errors)))
            log_coeff = (
                0.05 * sum(errors) + 0.7 * averages[-1] + 0.4 * (averages[-1] - averages[-2])
            )
            assert math.log(controller.update(kl, 1) / 0.1) == pytest.approx(log_coeff, abs=1e-12)

    def test_with_its_integral_alone_it_is_the_exponential_controller(self):
        rng = random.Random(0)
        pid, exponential = (
            self.make(kp=0.0, kd=0.0, ki=0.1),
            ExponentialKLController(0.1, 0.5, gain=0.1),
        )
        for _ in range(200):
            kl = rng.uniform(-0.5, 2.0)
            assert pid.update(kl, 1) == exponential.update(kl, 1)

    def test_known_steps(self):
        # Errors of 1 (clipped), then 0.5, unfiltered, from 1: 1 + 2 * 1 + 4 * 1, then 0.5 - 2 * 0.5
        # + 4 * (-0.5 - 1).
        controller = PIDKLController(1.0, 2.0, kp=2.0, ki=1.0, kd=4.0, smoothing=0.0, max_coeff=1e9)
        assert controller.update(7.0, 1) == pytest.approx(math.exp(7.0), rel=1e-14)
        assert controller.update(3.0, 1) == pytest.approx(math.exp(7.0 - 6.5), rel=1e-14)
        assert (controller.filtered_error.item(), controller.filtered_change.item()) == (0.5, -0.5)

    @pytest.mark.parametrize(("push", "back", "bound"), [(9.0, 0.49, 10.0), (0.0, 0.51, 1e-4)])
    def test_time_on_a_bound_is_not_remembered(self, push, back, bound):
        values = []
        for updates in (400, 5000):  # the filter has settled to the last bit long before
            controller = self.make()
            pushed = [controller.update(push, 1) for _ in range(updates)]
            assert pushed[-100:] == [bound] * 100
            values.append([controller.update(back, 1) for _ in range(5)])
        assert values[0] == values[1]
        assert (values[0][0] - bound) * (0.5 - back) < 0  # at once

    @pytest.mark.parametrize("init_coeff", [0.05, 2.0])
    @pytest.mark.parametrize("lag", [5.0, 10.0, 20.0])
    def test_its_defaults_hold_a_slow_policy_at_the_target(self, init_coeff, lag):
        kls = simulate(PIDKLController(init_coeff, 0.5), lag=lag)
        assert settled(kls) <= 75
        if init_coeff == 2.0:  # from below the target: hardly beyond it
            assert max(kls) < 0.55

    @pytest.mark.parametrize("kind", ["sum", "exponential"])
    def test_its_proportional_part_damps(self, kind):
        damped = simulate(PIDKLController(2.0, 0.5), lag=20.0)
        alone = (
            PIDKLController(2.0, 0.5, kp=0.0)
            if kind == "sum"
            else ExponentialKLController(2.0, 0.5)
        )
        undamped = simulate(alone, lag=20.0)
        assert max(undamped) > 0.6 > 0.55 > max(damped)
        assert settled(undamped) > settled(damped)

    def test_the_largest_gains_are_not_too_large_for_float64(self):
        # Changes of 100 + 100 + 100, then 100 + 200 + 300 down, then 100 + 200 + 400 up and down.
        controller = self.make(
            kp=100.0, ki=100.0, kd=100.0, smoothing=0.0, min_coeff=1e-300, max_coeff=1e300
        )
        values = [controller.update(kl, 1) for kl in (1e300, 0.0, 1e300, 0.0)]
        expected = [0.1 * math.exp(power) for power in (300, -300, 400, -300)]
        assert values == pytest.approx(expected, rel=1e-12, abs=0)

    def test_its_defaults_are_shown(self):
        defaults = "kp=0.6, ki=0.08, kd=0, smoothing=0.7, bounds=[0.0001, 10])"
        assert repr(PIDKLController(0.1, 0.5)).endswith(defaults)


class Switch(KLController):
    """The smallest controller that a user could write: two coefficients."""

    def _next_coeff(self, kl: float, n_steps: int) -> float:
        return 0.3 if kl > 1 else 0.1


class TestOneOfAUser(ControllerLaws):
    kind, settings = Switch, {"init_coeff": 0.1}
    log_fall = log_rise = math.log(3)
    ranges = {"init_coeff": ("at least 0", [-1])}
    shown = "Switch(coeff=0.1, per='trajectory')"

    def test_the_base_is_abstract(self):
        with pytest.raises(TypeError, match="abstract"):
            KLController(0.1)  # type: ignore[abstract]


class TestInsideAModule:
    """The state keeps its dtype; all else is as in any module."""

    def make(self) -> Switch:
        controller = Switch(0.1)
        controller.net = nn.Linear(1, 1)
        return controller

    def test_a_cast_reaches_the_modules_that_a_controller_holds(self):
        controller = self.make().half()
        assert [p.dtype for p in controller.parameters()] == [torch.float16] * 2
        assert controller.coeff.dtype == torch.float64

    def test_a_move_stays_outside_them_if_told_so(self):
        controller = self.make().to_empty(device="meta", recurse=False)
        assert [p.device.type for p in controller.parameters()] == ["cpu"] * 2
        assert controller.coeff.device.type == "meta"

    def test_what_keeps_the_dtype_is_applied(self):
        controller = self.make()
        controller._apply(lambda t: t + 1)
        assert controller.coeff.item() == 1.1


class Doubling(TargetKLController):
    """The smallest closed loop that a user could write: up, down, or neither."""

    def _next_coeff(self, kl: float, n_steps: int) -> float:
        factor = 2.0 ** ((kl > self.target) - (kl < self.target))
        return min(max(self.coeff.item() * factor, 1e-300), 1e300)


class TestClosedLoopOfAUser(ClosedLoopLaws):
    kind, settings = Doubling, {"init_coeff": 0.1, "target": 0.5}
    log_fall = log_rise = math.log(2)
    shown = "Doubling(coeff=0.1, per='trajectory', target=0.5)"

    def test_the_base_is_abstract(self):
        with pytest.raises(TypeError, match="abstract"):
            TargetKLController(0.1, 0.5)  # type: ignore[abstract]

    def test_its_deadband_is_shown(self):
        assert repr(self.make(deadband=2)).endswith("target=0.5, deadband=2)")


class TestSettingsByKeywordAndByPosition:
    @pytest.mark.parametrize(
        "kind", [Doubling, AdaptiveKLController, ExponentialKLController, PIDKLController]
    )
    def test_both_are_the_same(self, kind):
        settings: dict[str, Any] = {"init_coeff": 0.2, "target": 6.0}
        if kind is AdaptiveKLController:
            settings["horizon"] = 500.0
        named, placed = kind(**settings), kind(*settings.values())
        assert repr(named) == repr(placed)
        assert named.target == 6.0
        assert named.update(9.0, 64) == placed.update(9.0, 64) != 0.2


class TestAsController:
    @pytest.mark.parametrize("number", [0, 0.3])
    def test_a_number_is_a_constant_coefficient(self, number):
        controller = as_controller(number)
        assert type(controller) is ConstantKLController
        assert controller.coeff.item() == number
        assert controller.per == "trajectory"

    def test_a_controller_is_itself(self):
        controller = Switch(0.1, per="step")
        assert as_controller(controller) is controller

    @pytest.mark.parametrize("other", ["0.1", None, True, [0.1]])
    def test_anything_else_is_refused(self, other):
        message = (
            rf"^`controller` must be a KLController or a number, got {type(other).__name__}\.$"
        )
        with pytest.raises(TypeError, match=message):
            as_controller(other)


class TestRulesOfSubclasses:
    """What a rule gives is checked: NaN became NaN rewards, and a tensor was returned."""

    def make(self, gives: Any) -> KLController:
        class Rule(KLController):
            def _next_coeff(self, kl: float, n_steps: int) -> float:
                return gives

        return Rule(0.1)

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -0.1])
    def test_a_number_that_is_no_coefficient_is_refused(self, bad):
        controller = self.make(bad)
        with pytest.raises(ValueError, match=rf"`Rule._next_coeff` must return .*, got {bad}"):
            controller.update(1.0, 1)
        assert controller.coeff.item() == 0.1

    def test_a_tensor_is_made_a_number(self):
        value = self.make(torch.tensor(0.5)).update(1.0, 1)
        assert type(value) is float
        assert value == 0.5


def test_compiled_callers_move_it():
    """PyTorch 2.13 drops edits of 0-dim float64 tensors from the code that it compiles."""
    controller, pool = AdaptiveKLController(0.3, 0.5, 10), KLStatistics()

    @torch.compile(backend="aot_eager")
    def measure(values: torch.Tensor) -> torch.Tensor:
        pool.reset().add(values)
        controller.update(pool.mean, 2)
        return values + 1

    for expected in (0.312, 0.32448):
        measure(torch.tensor([0.8, 1.0]))
        assert pool.sum.item() == pytest.approx(1.8)
        assert controller.coeff.item() == pytest.approx(expected)
