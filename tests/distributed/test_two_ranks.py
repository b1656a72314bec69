"""Two ranks train one policy with one controller, whose state is the same on both of them."""

from typing import Any

import pytest
from torch.testing import assert_close

from tests.distributed import two_ranks as cases
from tests.distributed.ranks import on_ranks

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, list[Any]]:
    return on_ranks(cases.CASES, 2, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("kind", cases.RULES)
def test_controllers_are_equal_after_each_batch(found, kind):
    one, other = (rank[kind] for rank in found["ppo"])
    assert one == other  # bit for bit
    assert len({state[0] for state in one}) > 3  # coefficients


@pytest.mark.parametrize("way", ["adjustment", "stack", "hook", "responses", "loss"])
@pytest.mark.parametrize("kind", ["exponential", "planned", "planned per step"])
def test_each_feed_gives_what_one_process_would(found, kind, way):
    (one, expected), (other, _) = (rank[kind, way] for rank in found["feeds"])
    assert one == other
    assert one == pytest.approx(expected, rel=1e-12)
    assert one not in (0.0, 1.0)  # it has moved


def test_collectives_are_reached_by_configuration_alone(found):
    for rank in found["collectives"]:
        assert rank.pop("statistics") == (True, 3, 2.0, 2.0)
        assert rank == {
            "plans": 3,
            "planned": 1,
            "trained": 1,
            **dict.fromkeys(("evaluated", "frozen", "constant", "alone", "loss"), 0),
        }


@pytest.mark.parametrize("gradient", ["step", "sequence", "k2"])
def test_a_wrapped_loss_changes_no_state_and_has_the_gradients_of_the_union(found, gradient):
    (same, n_open, grads), (other_same, other_n_open, other_grads) = (
        rank[gradient] for rank in found["wrapped_losses"]
    )
    assert same
    assert other_same
    assert 0 < n_open != other_n_open
    for own, union in (grads, other_grads):
        assert_close(own, union, rtol=0, atol=1e-6)


def test_a_sum_over_unequal_ranks_is_divided_by_the_steps_of_all(found):
    for summed, union, mean in found["unequal_losses"]:
        assert_close(summed, union, rtol=0, atol=1e-6)
        assert (mean[0] - union[0]).abs().max() > 1e-3  # it is a mean of means


@pytest.mark.parametrize("how", ["dcp", "torch"])
def test_a_waiting_plan_is_saved_once_and_loaded_everywhere(found, how):
    for waits, planning, states in found["checkpoints"]:
        assert 0 < waits < 16
        assert not planning
        assert states[how] == states["whole"]
        assert states["whole"] == found["checkpoints"][0][2]["whole"]


def test_copies_have_no_group(found):
    assert found["copies"] == [([True, True], True, 2)] * 2  # one for each batch


def test_what_is_said_without_a_group_and_in_an_env(found):
    for said in found["refusals"]:
        (message,) = said.pop("alone")
        assert message.startswith("each of 2 ranks feeds a KL controller alone")
        assert "`controller.group = torch.distributed.group.WORLD`" in message
        (message,) = said.pop("in an env")
        assert "Pass the stack as the collector's `postproc`" in message
        assert said == {"group": [], "constant": [], "not by torchrun": []}
