"""Controllers with a state or a target that a user changes."""

import math
from typing import Any

import pytest
import torch

from tests.helpers import WalkEnv, make_actor, moved, play
from torchrl_kl import (
    AdaptiveKLController,
    ConstantKLController,
    ExponentialKLController,
    KLConstrainedTransform,
    KLController,
    KLStatistics,
    PIDKLController,
    PlannedKLController,
)


class Remembering(KLController):
    """It keeps the last KLs, and the lowest, in buffers that are not one finite number."""

    def __init__(self, init_coeff: float):
        super().__init__(init_coeff)
        self.register_buffer("last", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("lowest", torch.tensor(math.inf, dtype=torch.float64))

    def _next_coeff(self, kl: float, n_steps: int) -> float:
        last, lowest = self.get_buffer("last"), self.get_buffer("lowest")
        last.copy_(torch.tensor([*last[1:].tolist(), kl]))
        lowest.fill_(min(kl, lowest.item()))
        return max(last.mean().item() - lowest.item(), 0.0)


@pytest.mark.parametrize("n_updates", [0, 2])
def test_any_state_of_a_subclass_is_loaded(n_updates):
    first, second = Remembering(0.1), Remembering(0.2)
    for kl in range(n_updates):
        first.update(kl + 1.0, 1)
    second.load_state_dict(first.state_dict())
    assert second.coeff == first.coeff
    assert [one.update(3.0, 1) for one in (second, second)] == [
        one.update(3.0, 1) for one in (first, first)
    ]


def test_a_target_that_is_changed_is_followed():
    controller = AdaptiveKLController(0.1, target=0.5, horizon=100)
    controller.target = 2.0
    assert controller.update(1.0, 10) == 0.1 * (1 - 0.2 * 10 / 100)
    assert "target=2," in repr(controller)


@pytest.mark.parametrize("bad", [0.0, -0.1, math.nan, math.inf])
@pytest.mark.parametrize("kind", [AdaptiveKLController, PlannedKLController])
def test_a_target_that_is_changed_must_be_one(kind, bad):
    options: dict[str, Any] = {"horizon": 100} if kind is AdaptiveKLController else {}
    controller = kind(init_coeff=0.1, target=0.5, **options)
    with pytest.raises(ValueError, match=f"`target` must be finite and above 0, got {bad}"):
        controller.target = bad
    assert controller.target == 0.5


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("gain", -1.0, "finite and above 0"),
        ("deadband", -1.0, "finite and at least 0"),
        ("min_coeff", 20.0, "finite and above 0 and at most 10"),
        ("max_coeff", 1e-5, "finite and at least 0.0001"),
        ("coeff", torch.tensor(math.nan), "finite and at least 0"),
        ("coeff", torch.tensor([0.3, 0.4]), "a number, got list"),
        ("per", "step", "changed, got 'step' for 'trajectory'"),
    ],
)
def test_a_setting_that_is_changed_is_checked(name, value, wanted):
    controller = ExponentialKLController(1.0, 0.5)
    before = repr(controller)
    with pytest.raises((TypeError, ValueError), match=f"`{name}` (must be|cannot be) {wanted}"):
        setattr(controller, name, value)
    assert repr(controller) == before


def test_settings_that_are_changed_are_followed():
    controller = ExponentialKLController(1.0, 0.5)
    controller.gain, controller.max_coeff = 0.5, 1.25
    assert controller.update(9.0, 1) == 1.25
    controller.max_coeff = 10
    assert controller.update(9.0, 1) == 1.25 * math.exp(0.5)


@pytest.mark.parametrize("value", [0.25, torch.tensor(0.25)])
def test_a_coefficient_that_is_assigned_reaches_the_stack(value):
    stack = KLConstrainedTransform(make_actor(), ExponentialKLController(1.0, 0.5))
    shared = stack.controller.coeff
    stack.controller.coeff = value
    assert stack.controller.coeff is shared
    assert shared == 0.25
    assert shared.dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_a_state_that_is_assigned_keeps_the_tensors(dtype):
    saved = PIDKLController(1.0, 0.5)
    saved.update(0.7, 1)
    state = {name: value.to(dtype) for name, value in saved.state_dict().items()}
    loaded = PIDKLController(2.0, 0.5)
    before = list(loaded.buffers())
    loaded.load_state_dict(state, assign=True)
    assert all(one is other for one, other in zip(before, loaded.buffers(), strict=True))
    assert [one.item() for one in before] == [value.item() for value in state.values()]
    assert {one.dtype for one in loaded.buffers()} == {torch.float64}


class Trend(ExponentialKLController):
    """Its own buffer is set anew, not in place, and was registered as an integer."""

    def __init__(self):
        super().__init__(1.0, 0.5)
        self.register_buffer("mean", torch.tensor(0))

    def _next_coeff(self, kl, n_steps):
        before = self.mean
        self.mean = 0.5 * before + 0.5 * kl
        return self.coeff.item() + (self.mean - before).item()


def test_a_buffer_of_a_subclass_that_is_set_anew_leaves_the_former_one():
    assert Trend().update(0.7, 1) == pytest.approx(1.35)


def test_a_parameter_is_no_coefficient():
    with pytest.raises(TypeError, match="`coeff` must be a number, got Parameter"):
        ExponentialKLController(1.0, 0.5).coeff = torch.nn.Parameter(torch.ones(()))


def test_a_state_is_assigned_to_what_was_built_on_the_meta_device():
    with torch.device("meta"):
        pool = KLStatistics()
    pool.load_state_dict(KLStatistics().add(torch.tensor([1.0, 2.0])).state_dict(), assign=True)
    assert pool.mean == 1.5


def test_what_was_pooled_in_another_unit_is_not_loaded():
    stacks = [
        KLConstrainedTransform(
            make_actor(), ExponentialKLController(1.0, 0.5, per=per), update_every=999
        )
        for per in ("trajectory", "step")
    ]
    with pytest.raises(ValueError, match="of a controller with per='trajectory', got one with"):
        stacks[1].load_state_dict(stacks[0].state_dict())
    stacks[1].controller.load_state_dict(stacks[0].controller.state_dict())


class Schedule(ConstantKLController):
    """Its coefficient falls with each update."""

    def _next_coeff(self, kl: float, n_steps: int) -> float:
        return self.coeff.item() / 2


class ScheduleInUpdate(ConstantKLController):
    """The same, written in another place."""

    def update(self, kl: Any, n_steps: int, **_: Any) -> float:
        return self.coeff.mul_(0.5).item()


@pytest.mark.parametrize("kind", [Schedule, ScheduleInUpdate])
def test_a_schedule_is_not_constant(kind):
    """Where no trajectory can be told, its coefficient would never move."""
    reference = make_actor()
    batch = play(WalkEnv((4,), longest=3), moved(reference)).detach()
    stack = KLConstrainedTransform(reference, kind(0.8))
    assert (stack(batch)["next", "kl_coeff"] == 0.8).all()
    assert stack.controller.coeff == 0.4
    with pytest.raises(RuntimeError, match="trajectories cannot be told apart"):
        stack(batch.reshape(-1))
    assert stack.controller.coeff == 0.4
