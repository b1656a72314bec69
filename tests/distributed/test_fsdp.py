"""Models of `fully_shard`: what one process would compute, and messages with the fix."""

from typing import Any

import pytest
from torch.testing import assert_close

from tests.distributed import fsdp_ranks as cases
from tests.distributed.ranks import on_ranks
from tests.language.models import make_model
from torchrl_kl import FrozenActor
from torchrl_kl.language import CausalLMActor

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, list[Any]]:
    return on_ranks(cases.CASES, cases.N_RANKS, tmp_path_factory.mktemp("fsdp"))


def close(actual: Any, expected: Any) -> None:
    assert_close(actual, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("which", ["sampled", "free", "stack", "again"])
def test_batches_are_those_of_one_process(found, which):
    for rank in found["learners"]:
        own, plain = rank[which]
        own, plain = own.flatten_keys("."), plain.flatten_keys(".")
        assert {*own.keys()} == {*plain.keys()}
        close(own.to_dict(), plain.to_dict())


def test_steps_of_a_penalized_loss_are_those_of_one_process(found):
    start = dict(CausalLMActor(make_model("llama")).named_parameters())
    for rank in found["learners"]:
        close(*rank["coeff"])
        own, plain = rank["weights"]
        assert all((plain[name] - start[name]).abs().max() > 1e-3 for name in start)
        close(own, plain)
        assert rank["names"] >= len(start)


def test_references_move_between_sharded_and_plain(found):
    expected = FrozenActor(CausalLMActor(make_model("llama", 1)))
    for _ in range(2):
        expected.update_reference(CausalLMActor(make_model("llama")), tau=0.5)
    for rank in found["references"]:
        assert len(rank) == 4
        for own in rank.values():
            close(own, dict(expected.actor.named_parameters()))


def test_adapters_are_switched_off_in_a_sharded_model(found):
    for own, plain in found["adapters"]:
        assert own[1] == plain[1]  # names of weights that have gradients
        assert plain[0].abs().max() > 0.01
        assert max(grad.abs().max() for grad in plain[2]) > 0.01
        close(own[::2], plain[::2])


def test_what_was_saved_is_loaded(found):
    for saved, loaded in found["checkpoints"]:
        assert saved[2].item() != 1.0
        assert_close(loaded, saved, rtol=0, atol=0)


def test_a_reference_need_never_be_whole_on_a_rank(found):
    for own, plain, share in found["meta"]:
        close(own, plain)
        assert share < 0.7


def test_messages_name_the_fix(found):
    for copied, functional, (tiles,), own, plain in found["messages"]:
        assert "build FrozenActor(actor) before you shard its model" in copied
        assert "`functional` must be False for a model of `fully_shard`" in functional
        assert "its weights are sharded" in tiles
        close(own, plain)
