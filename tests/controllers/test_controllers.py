"""The controllers do what their formulas say."""

import copy
import math
import random
import sys
from itertools import pairwise
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
    PlannedKLController,
    TargetKLController,
)
from torchrl_kl.controllers.rules import as_controller


class TestConstant(ControllerLaws):
    kind, settings = ConstantKLController, {"coeff": 0.1}
    n_steps = 10**9
    log_fall = log_rise = 0.0
    ranges = {"coeff": ("at least 0", [-0.1])}
    shown = "ConstantKLController(coeff=0.1, per='trajectory')"


class TestAdaptive(ClosedLoopLaws):
    kind, settings = AdaptiveKLController, {"init_coeff": 0.1, "target": 0.5, "horizon": 10}
    n_steps = 49  # an update by a factor of 0.02 or 1.98
    log_fall, log_rise = -math.log(0.02), math.log(1.98)
    ranges = ClosedLoopLaws.ranges | dict.fromkeys(("horizon", "clip"), ("above 0", [0.0, -0.5]))
    shown = "AdaptiveKLController(coeff=0.1, per='trajectory', target=0.5, horizon=10, clip=0.2)"

    def test_it_neither_vanishes_nor_overflows(self):
        for kl, limit in ((0.0, sys.float_info.min), (5.0, sys.float_info.max)):
            assert self.make(init_coeff=limit).update(kl, self.n_steps) == limit

    @pytest.mark.parametrize("kl", [0.0, 5.0])
    @pytest.mark.parametrize("n_steps", [50, 10**6])
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
        "ExponentialKLController(coeff=0.1, per='trajectory', target=0.5, min_coeff=0.0001, "
        "max_coeff=10, gain=0.1)"
    )

    def test_a_large_gain_goes_to_the_bound(self):
        assert self.make(gain=1e300).update(9.0, 1) == 10.0


def simulate(controller: KLController, *, lag: float = 10.0, updates: int = 120) -> list[float]:
    """The KL of a policy, step by step, that learns a reward of 0 or 1.

    The reference gets the reward with probability 0.3, which a controller that plans again is shown
    with 1000 samples. With each update the KL goes 1 / `lag` of
    its way to that of the optimum for the coefficient. It begins at 0.
    """
    kl, kls = 0.0, []
    for _ in range(updates):
        if isinstance(controller, PlannedKLController):
            controller.observe_rewards(torch.tensor([1.0] * 300 + [0.0] * 700))
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
        "PIDKLController(coeff=0.1, per='trajectory', target=0.5, min_coeff=0.0001, max_coeff=10, "
        "kp=0.7, ki=0.05, kd=0.4, smoothing=0.6)"
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
    @pytest.mark.parametrize("lag", [5.0, 20.0])
    def test_its_defaults_hold_a_slow_policy_at_the_target(self, init_coeff, lag):
        kls = simulate(PIDKLController(init_coeff, 0.5), lag=lag)
        assert settled(kls) <= 75
        if init_coeff == 2.0:  # from below the target: hardly beyond it
            assert max(kls) < 0.55
            alone = simulate(PIDKLController(init_coeff, 0.5, kp=0.0), lag=20.0)
            assert max(alone) > 0.6  # without its proportional part it swings

    def test_the_largest_gains_are_not_too_large_for_float64(self):
        # Changes of 100 + 100 + 100, then 100 + 200 + 300 down, then 100 + 200 + 400 up and down.
        controller = self.make(
            kp=100.0, ki=100.0, kd=100.0, smoothing=0.0, min_coeff=1e-300, max_coeff=1e300
        )
        values = [controller.update(kl, 1) for kl in (1e300, 0.0, 1e300, 0.0)]
        expected = [0.1 * math.exp(power) for power in (300, -300, 400, -300)]
        assert values == pytest.approx(expected, rel=1e-12, abs=0)


@pytest.mark.filterwarnings("ignore:the coefficient is .* and the KL:UserWarning")
class TestPlanned(ClosedLoopLaws):
    kind, settings = PlannedKLController, {"init_coeff": 0.1, "target": 0.5}
    buffers = (
        *("coeff", "last", "average", "recent", "speed", "n_updates"),
        *("plan.made", "plan._extra_state"),
    )
    # The error of a KL of 4 targets, the power of x, and what the power is going to add.
    log_rise = 3 / 12 + 1.5 * math.log(2 / 0.7)
    log_fall = 1 / 12 + 1.5 * math.log(2 / 0.7) + 1.5 * math.log(1 / 0.7) / 12
    shown = (
        "PlannedKLController(\n  coeff=0.1, per='trajectory', target=0.5\n  (plan): RewardPlan()\n)"
    )

    def test_above_the_target_it_rises_and_below_it_falls(self):
        for factor in (0.9, 1.1):
            controller = self.make()
            for _ in range(50):
                controller.update(0.5, 1)
            before = controller.coeff.item()
            assert (controller.update(0.5 * factor, 1) - before) * (factor - 1) > 0

    @pytest.mark.parametrize(
        ("kl", "factor"),
        [(0.125, math.exp(-1 / 12)), (2.0, math.exp(3 / 12)), (1e9, math.exp(3 / 12))],
    )
    def test_it_moves_as_far_as_its_bound_allows(self, kl, factor):
        """A KL at rest moves it by one factor with each update, up to a bound that is never passed.

        By exp(2 * (x - 1) / 12) at a quarter of the target, by exp((x ** 2 - 1) / 12) from 4 of it.
        """
        controller, x = self.used(speed=1.0, average=2.0, last=2.0), min(kl / 0.5, 4.0) ** 0.5
        controller.last.fill_(x)
        values = [0.1]
        for _ in range(400):
            controller.average.fill_(x)
            values.append(controller.update(kl, 1))
        moves = [later / before for before, later in pairwise(values)]
        assert moves[:2] == pytest.approx([factor] * 2, rel=1e-12)
        bound = 0.1 * (1e4 if kl > 0.5 else 1e-4)
        assert values[-1] == bound == (max if kl > 0.5 else min)(values)

    def used(self, **state: float) -> Any:
        """A controller beyond its first updates, in a state."""
        controller: Any = self.make()
        for name, value in ({"n_updates": 12, "recent": 1.0} | state).items():
            getattr(controller, name).fill_(value)
        return controller

    @pytest.mark.parametrize(
        ("speed", "before", "kl", "factor"),
        [
            (0.35, 0.8, 0.5, 1 / 0.8),  # a power of 1: as x
            (0.4, 0.6, 0.5, (1 / 0.7) ** 0.75),  # what is below 0.7 does not count
            (0.2, 0.9, 0.5, (1 / 0.9) ** 1.5),  # the power is at most 1.5
            (0.7, 0.5, 0.5, 1.0),  # too fast to be damped
            (1.0, 0.5, 0.405, math.exp(-0.2 / 12 * 0.6)),  # x is 0.9: it waits for a rise of 0.4
        ],
    )
    def test_it_damps_slow_policies_and_waits_for_those_on_their_way(
        self, speed, before, kl, factor
    ):
        controller = self.used(speed=speed, last=before, average=0.5 if speed == 1.0 else 1.0)
        assert controller.update(kl, 1) == pytest.approx(0.1 * factor, rel=1e-12)

    def test_near_the_target_it_falls_as_fast_as_it_rises(self):
        moves = []
        for x in (0.999, 1.001):
            controller = self.used(speed=1.0, last=x, average=x)
            moves.append(math.log(controller.update(0.5 * x**2, 1) / 0.1))
        assert moves[0] == pytest.approx(-moves[1], rel=1e-3)

    def test_a_rise_is_above_the_mean_of_12_updates(self):
        """Six of them at the target leave (11 / 12) ** 6 of the mean's distance of 0.5."""
        controller = self.used(speed=1.0, last=1.0, average=0.5)
        for _ in range(6):
            assert controller.update(0.5, 1) == 0.1
        rise = 0.5 * (11 / 12) ** 6 - 0.1
        expected = 0.1 * math.exp(-0.2 / 12 * (1 - rise))
        assert controller.update(0.405, 1) == pytest.approx(expected, rel=1e-12)

    def test_a_policy_is_as_fast_as_x_rises_in_6_updates(self):
        """From 0.4 to 1 by way of 0.8: (1 - 0.4) * 5 / 6 is a speed of 0.5, and 0.4 the power."""
        controller = self.used(speed=0.1, last=0.8, average=1.0, recent=0.4)
        assert controller.update(0.5, 1) == pytest.approx(0.1 * 1.25**0.4, rel=1e-12)

    @pytest.mark.parametrize("seed", range(3))
    def test_a_higher_kl_never_gives_a_lower_coefficient(self, seed):
        """Where it is not the fastest change so far, which also says how fast the policy is."""
        controller = self.used(speed=0.3, last=0.8 + 0.1 * seed, average=0.8 + 0.1 * seed)
        kls = [0.5 * (controller.last.item() + 0.01 * part) ** 2 for part in range(-25, 26)]
        values = [copy.deepcopy(controller).update(kl, self.n_steps) for kl in sorted(kls)]
        assert values == sorted(values)
        assert values[0] < values[-1]

    def test_it_waits_for_a_policy_at_full_speed(self):
        """Only what the power 1.5 is going to add at the target is taken back, in 12 updates."""
        controller: Any = self.make()
        values = [controller.update(0.5 * (0.04 * n) ** 2, 1) for n in range(1, 8)]
        left = [0.1 * 0.7 ** (1.5 * n / 12) for n in range(1, 8)]
        assert values == pytest.approx(left, rel=1e-12)
        for _ in range(12):  # it rests
            controller.update(0.5 * 0.28**2, 1)
        before = controller.coeff.item()
        assert controller.update(0.5 * 0.28**2, 1) < 0.96 * before

    def test_it_starts_above_its_plan(self):
        controller: Any = PlannedKLController(0.1)
        values = [controller.observe_rewards(torch.tensor([0.0, 1.0] * 50))]
        values += [controller.update(0.1, 1) for _ in range(14)]
        made, left = controller.plan.made.item(), [max(1 - n / 12, 0) for n in range(15)]
        assert values == pytest.approx([made * 0.7 ** (-part / 2) for part in left], rel=1e-12)

    @pytest.mark.parametrize("scale", [1e-3, 7.0])
    def test_k_times_the_rewards_give_k_times_the_coefficient(self, scale):
        one, other = PlannedKLController(0.5), PlannedKLController(0.5)
        generator, rng = torch.Generator().manual_seed(0), random.Random(0)
        for n in range(80):
            rewards = torch.randn(20, generator=generator, dtype=torch.float64) * (1 + n)
            kl = rng.uniform(-0.5, 4.0)
            values = []
            for controller, factor in ((one, 1.0), (other, scale)):
                controller.observe_rewards(factor * rewards)
                values.append(controller.update(kl, 20) / factor)
            assert values[1] == pytest.approx(values[0], rel=1e-9)

    @pytest.mark.parametrize(("kl", "times"), [(0.75, 2 / 1.5**0.5), (2.0, 1.0), (9.0, 1.0)])
    def test_its_bound_is_twice_the_largest_plan_and_falls_as_the_kl_rises(self, kl, times):
        """As 2 / sqrt(kl / target), until the KL is four times the target."""
        controller, plans = PlannedKLController(0.5), []
        for size in (1.0, 5.0, 0.2):  # rewards grow, and shrink
            rewards = size * torch.tensor([0.0, 1.0] * 50)
            controller.observe_rewards(rewards)
            plans.append(PlannedKLController(0.5).observe_rewards(rewards) / 0.7**-0.5)
            highest = max(controller.update(kl, 64) for _ in range(60))
            assert highest == pytest.approx(times * max(plans), rel=1e-12)

    def test_near_the_target_its_bound_is_twice_the_plan(self):
        controller = self.used(speed=1.0, last=0.7, average=1.0)
        controller.plan.made.fill_(0.1)
        controller.coeff.fill_(0.3)
        assert controller.update(0.45, 64) == 0.2

    def test_a_run_with_rewards_goes_on_where_it_was(self):
        def step(controller: PlannedKLController, n: int) -> float:
            generator = torch.Generator().manual_seed(n)
            controller.observe_rewards(torch.randn(12, generator=generator) * (1 + n))
            return 0.0 if controller.planning else controller.update(4.0, 12)

        whole, parts = PlannedKLController(0.5), PlannedKLController(0.5)
        for n in range(40):  # of 16 samples, in which a plan is made, 12 or 4 are kept
            resumed = PlannedKLController(0.5)
            resumed.load_state_dict(parts.state_dict())
            parts = resumed
            assert step(parts, n) == step(whole, n)
        assert whole.coeff > 10 * whole.coeff.new_tensor(1.0)

    @pytest.mark.parametrize("lag", [1.0, 5.0, 20.0])
    @pytest.mark.parametrize("off", [0.1, 1.0, 10.0])
    def test_it_holds_the_target_when_the_plan_is_off(self, lag, off):
        exact = 0.5 * 0.95  # of `simulate`, to 10 %
        controller = PlannedKLController(0.5, init_coeff=off * exact)
        assert settled(simulate(controller, lag=lag, updates=200)) < 150

    @pytest.mark.parametrize(
        ("kl", "wanted"),
        [
            (
                0.3,
                "is 0.0001 and the KL 0.3 nats per trajectory: almost without .* Lower `target`",
            ),
            (
                9.0,
                "is 1e\\+04 and the KL 9 .*: at its upper bound .* Lower the learning rate",
            ),
            (
                9.1,
                "is 1.48 and the KL 9.1 .*: at its upper bound .* Lower the learning rate",
            ),
        ],
    )
    def test_a_target_out_of_reach_is_named_once(self, kl, wanted):
        controller: Any = PlannedKLController(5.0, init_coeff=1.0)
        if kl == 9.1:
            controller.plan.made.fill_(1.0)
        with pytest.warns(UserWarning, match=f"{wanted}") as warned:
            _ = [controller.update(kl, 64) for _ in range(200)]
        assert len(warned) == 1

    @pytest.mark.filterwarnings("error:the coefficient is")
    def test_a_bound_that_noise_reaches_is_not_named(self):
        """The KL is above the target now, but not on average."""
        controller = self.used(speed=1.0, last=0.9, average=0.7)
        controller.plan.made.fill_(0.1)
        controller.coeff.fill_(0.149)
        assert controller.update(0.9, 64) == pytest.approx(0.2 / 1.8**0.5, rel=1e-12)


class Switch(KLController):
    """The smallest controller that a user could write: two coefficients."""

    def next_coeff(self, kl: float, n_steps: int) -> float:
        return 0.3 if kl > 1 else 0.1


class TestOneOfAUser(ControllerLaws):
    kind, settings = Switch, {"init_coeff": 0.1}
    log_fall = log_rise = math.log(3)
    ranges = {"init_coeff": ("at least 0", [-1])}
    shown = "Switch(coeff=0.1, per='trajectory')"

    def test_the_base_is_abstract(self):
        with pytest.raises(TypeError, match="abstract"):
            KLController(0.1)  # type: ignore[abstract]


class Doubling(TargetKLController):
    """The smallest closed loop that a user could write: up, down, or neither."""

    def next_coeff(self, kl: float, n_steps: int) -> float:
        factor = 2.0 ** ((kl > self.target) - (kl < self.target))
        return min(max(self.coeff.item() * factor, 1e-300), 1e300)


class TestClosedLoopOfAUser(ClosedLoopLaws):
    kind, settings = Doubling, {"init_coeff": 0.1, "target": 0.5}
    log_fall = log_rise = math.log(2)
    shown = "Doubling(coeff=0.1, per='trajectory', target=0.5)"


class TestInsideAModule:
    """The state keeps its dtype; all else is as in any module."""

    def test_casts_and_moves(self):
        controller = Switch(0.1)
        controller.net = nn.Linear(1, 1)
        controller.half()
        assert [p.dtype for p in controller.parameters()] == [torch.float16] * 2
        assert controller.coeff.dtype == torch.float64
        controller._apply(lambda t: t + 1)  # what keeps the dtype is applied
        assert controller.coeff.item() == 1.1
        controller.to_empty(device="meta", recurse=False)
        assert [p.device.type for p in controller.parameters()] == ["cpu"] * 2
        assert controller.coeff.device.type == "meta"

    @pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
    def test_a_state_that_is_assigned_keeps_the_tensors(self, dtype):
        saved, loaded = PIDKLController(1.0, 0.5), PIDKLController(2.0, 0.5)
        saved.update(0.7, 1)
        state = {name: value.to(dtype) for name, value in saved.state_dict().items()}
        before = list(loaded.buffers())
        loaded.load_state_dict(state, assign=True)
        assert all(one is other for one, other in zip(before, loaded.buffers(), strict=True))
        assert [one.item() for one in before] == [value.item() for value in state.values()]
        assert {one.dtype for one in loaded.buffers()} == {torch.float64}

    @pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
    def test_coefficients_that_no_update_gives_are_not_loaded(self, value):
        controller = PIDKLController(1.0, 0.5)
        before = copy.deepcopy(controller.state_dict())
        with pytest.raises(RuntimeError, match=f"`coeff` must be finite .*, got {value}"):
            controller.load_state_dict(before | {"coeff": torch.tensor(value).double()})
        assert controller.state_dict() == before


def test_settings_that_are_changed_are_followed():
    controller = ExponentialKLController(1.0, 0.5)
    controller.gain, controller.max_coeff = 0.5, 1.25
    assert controller.update(9.0, 1) == 1.25
    controller.max_coeff, controller.target = 10, 9.0
    assert controller.update(13.5, 1) == 1.25 * math.exp(0.25)
    assert "target=9, min_coeff=0.0001, max_coeff=10, gain=0.5" in repr(controller)
    shared = controller.coeff
    controller.coeff = torch.tensor(0.25)
    assert controller.coeff is shared
    assert (shared.item(), shared.dtype) == (0.25, torch.float64)
    for wrong, error in ((-0.5, ValueError), (float("inf"), ValueError), ("much", TypeError)):
        with pytest.raises(error, match="`coeff` must be"):
            controller.coeff = wrong  # type: ignore[assignment]
    assert shared.item() == 0.25


class TestHelpers:
    def test_as_controller(self):
        for number in (0, 0.3):
            controller = as_controller(number)
            assert type(controller) is ConstantKLController
            assert controller.coeff.item() == number
        controller = Switch(0.1, per="step")
        assert as_controller(controller) is controller
        for other in ("0.1", None, True, [0.1], torch.tensor(0.1), Switch):
            message = (
                f"^`controller` must be a KLController or a number, got {type(other).__name__}"
            )
            with pytest.raises(TypeError, match=message):
                as_controller(other)  # type: ignore[arg-type]

    def test_only_a_constant_coefficient_does_not_move(self):
        assert not ConstantKLController(0.1).moves
        assert Switch(0.1).moves


@pytest.mark.parametrize("gives", [math.nan, math.inf, -0.1, torch.tensor(0.5)])
def test_what_a_rule_gives_is_checked(gives):
    class Rule(KLController):
        def next_coeff(self, kl: float, n_steps: int) -> float:
            return gives

    controller = Rule(0.1)
    if isinstance(gives, torch.Tensor):
        assert type(value := controller.update(1.0, 1)) is float
        assert value == 0.5
        return
    with pytest.raises(ValueError, match=rf"`Rule.next_coeff` must be .*, got {gives}"):
        controller.update(1.0, 1)
    assert controller.coeff.item() == 0.1


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
