"""Properties of the controllers, against rules that remember every measurement."""

import math
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from tests.trust.cases import Machine, run
from torchrl_kl import (
    AdaptiveKLController,
    ConstantKLController,
    ExponentialKLController,
    KLController,
    PIDKLController,
)

EPS = 2.0**-52
kls = st.one_of(
    st.floats(-3, 6),
    st.sampled_from([0.0, -0.0, 5e-324, 1e-300, -1e-300, 1e300, -1e300, 1.7e308]),
)
# Numbers of ordinary size: the rules must hold for any, the rounding is counted for these.
positive = st.floats(1e-3, 10.0)


@st.composite
def settings_of(draw: Any) -> tuple[type[KLController], dict[str, Any]]:
    """A class and its settings."""
    kind = draw(
        st.sampled_from(
            [ConstantKLController, AdaptiveKLController, ExponentialKLController, PIDKLController]
        )
    )
    per = draw(st.sampled_from(["trajectory", "step"]))
    if kind is ConstantKLController:
        return kind, {"coeff": draw(st.one_of(st.just(0.0), positive)), "per": per}
    options: dict[str, Any] = {"init_coeff": draw(positive), "target": draw(positive), "per": per}
    if kind is AdaptiveKLController:
        return kind, options | {
            "horizon": draw(st.floats(50, 1e4)),
            "clip": draw(st.floats(0.01, 2)),
        }
    options["min_coeff"] = draw(st.floats(1e-4, 1.0)) * options["init_coeff"]
    options["max_coeff"] = draw(st.floats(1.0, 100.0)) * options["init_coeff"]
    if kind is ExponentialKLController:
        return kind, options | {"gain": draw(st.floats(1e-3, 2.0))}
    gains = {
        "kp": draw(st.floats(0, 2)),
        "ki": draw(st.floats(1e-3, 1)),
        "kd": draw(st.floats(0, 1)),
    }
    return kind, options | gains | {"smoothing": draw(st.sampled_from([0.0, 0.3, 0.7, 0.99]))}


class Remembered:
    """The same rules, from the list of all errors since the beginning; coefficients as logs."""

    def __init__(self, kind: type[KLController], options: dict[str, Any]):
        self.kind, self.options = kind, options
        self.errors: list[float] = []
        first = options.get("coeff", options.get("init_coeff"))
        self.log = math.log(first) if first else -math.inf
        self.bound = 0.0  # of the rounding of log(coeff), of which a clamp does not know more

    def error(self, kl: float) -> float:
        target, clip = self.options["target"], self.options.get("clip", 1.0)
        return sorted((-clip, (kl - target) / target, clip))[1]

    def filtered(self, upto: int) -> float:
        """The filter unrolled: the weight of an error falls with its age."""
        s = self.options["smoothing"]
        known = self.errors[: max(upto, 0)]
        return math.fsum((1 - s) * s ** (len(known) - 1 - i) * e for i, e in enumerate(known))

    def update(self, kl: float, n_steps: int) -> None:
        if self.kind is ConstantKLController:
            return
        self.errors.append(self.error(kl))
        o, n = self.options, len(self.errors)
        if self.kind is AdaptiveKLController:
            move = math.log1p(self.errors[-1] * n_steps / o["horizon"])
            self.bound += 16 * EPS / max(1 - o["clip"] * n_steps / o["horizon"], 1e-6)
        elif self.kind is ExponentialKLController:
            move = o["gain"] * self.errors[-1]
            self.bound += 16 * EPS * (1 + o["gain"] + abs(kl / o["target"] if abs(kl) < 1e3 else 0))
        else:
            now, before, earlier = (self.filtered(n - i) for i in range(3))
            change, change_before = now - before, before - earlier
            move = o["ki"] * self.errors[-1] + o["kp"] * change + o["kd"] * (change - change_before)
            gains = 1 + o["ki"] + 2 * o["kp"] + 4 * o["kd"]
            self.bound += 16 * (n + 4) * EPS * gains
        self.log += move
        if "min_coeff" in o:
            self.log = min(max(self.log, math.log(o["min_coeff"])), math.log(o["max_coeff"]))


class Controllers(Machine):
    """Updates with any numbers in any order."""

    controller: KLController

    @initialize(made=settings_of())
    def make(self, made: tuple[type[KLController], dict[str, Any]]) -> None:
        self.kind, self.options = made
        self.controller = self.kind(**self.options)
        self.oracle = Remembered(*made)

    @rule(kl=kls, n_steps=st.integers(1, 20), as_tensor=st.booleans())
    def update(self, kl: float, n_steps: int, as_tensor: bool) -> None:
        controller, before = self.controller, self.controller.coeff.item()
        if self.options.get("clip", 0.0) * n_steps >= self.options.get("horizon", math.inf):
            with pytest.raises(ValueError, match="`n_steps` must be less than horizon / clip"):
                controller.update(kl, n_steps)
            assert controller.coeff.item() == before
            return
        given = torch.tensor(kl, dtype=torch.float64) if as_tensor else kl
        value = controller.update(given, n_steps)
        self.oracle.update(kl, n_steps)
        assert value == controller.coeff.item()

    @invariant()
    def the_coefficient_is_that_of_the_rule(self) -> None:
        coeff = self.controller.coeff
        assert coeff.dtype == torch.float64
        assert self.controller.min_coeff <= coeff.item() <= self.controller.max_coeff
        expected = math.exp(self.oracle.log)
        assert abs(coeff.item() - expected) <= (self.oracle.bound + 16 * EPS) * expected


def test_controllers_in_any_order():
    run(Controllers, 80, steps=25)
