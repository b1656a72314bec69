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

not_finite = pytest.mark.parametrize("kl", [math.nan, math.inf, -math.inf, torch.tensor(math.nan)], ids=repr)
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
    """Inherit, and define `make`: a controller with a first coefficient that is no float32 number.

    `make` passes its keyword arguments on to the class. `n_steps` is the largest number of trajectories that one update
    takes, for the tests that push.
    """

    n_steps = 1

    @staticmethod
    def make(**kwargs: Any) -> KLController:
        raise NotImplementedError

    @not_finite
    def test_a_kl_that_is_not_finite_is_refused_and_changes_nothing(self, kl):
        controller = self.make()
        controller.update(0.7, 3)
        before = copy.deepcopy(controller.state_dict())
        with pytest.raises(ValueError, match=r"`kl` must be finite, got (nan|-?inf): the coefficient stays at 0\.\d+"):
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
        with pytest.raises(TypeError, match=f"`n_steps` must be an int, got {type(n_steps).__name__}"):
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

    def test_the_state_is_the_coefficient_in_float64(self):
        state = self.make().state_dict()
        assert list(state) == ["coeff"]
        assert state["coeff"].shape == ()
        assert state["coeff"].dtype == torch.float64

    @casts
    def test_a_cast_leaves_the_coefficient_as_it_is(self, cast):
        controller = self.make()
        buffer, value = controller.coeff, controller.coeff.item()
        assert torch.tensor(value, dtype=torch.float32).item() != value  # a cast there and back would show
        assert cast(controller) is controller
        assert controller.coeff is buffer
        assert controller.coeff.dtype == torch.float64
        assert controller.coeff.item() == value

    def test_a_move_takes_the_coefficient_along_but_casts_nothing(self):
        assert self.make().to("meta", torch.float16).coeff.device == torch.device("meta")
        assert self.make().to("meta", torch.float16).coeff.dtype == torch.float64

    def test_the_buffer_is_changed_in_place(self):
        controller, other = self.make(), self.make()
        other.update(3.0, 11)
        buffer = controller.coeff
        controller.update(0.01, 3)
        assert controller.coeff is buffer
        controller.load_state_dict(other.state_dict())
        assert controller.coeff is buffer
        assert buffer.item() == other.coeff.item()

    @pytest.mark.parametrize("copied", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))], ids=["copy", "pickle"])
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
    """Those of a controller that holds a target; `make` gives it this one, in nats."""

    target = 0.5

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

    @pytest.mark.parametrize("target", [0.0, -1.0, math.inf, math.nan])
    def test_a_target_out_of_range_is_refused(self, target):
        with pytest.raises(ValueError, match=f"`target` must be finite and above 0, got {target}"):
            self.make(target=target)

    @pytest.mark.parametrize("init_coeff", [0.0, -0.1, math.inf, math.nan])
    def test_an_initial_coefficient_out_of_range_is_refused(self, init_coeff):
        with pytest.raises(ValueError, match=f"`init_coeff` must be finite and above 0, got {init_coeff}"):
            self.make(init_coeff=init_coeff)
