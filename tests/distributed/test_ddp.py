"""DistributedDataParallel around a loss and inside an actor: what the wrapped model would do."""

from typing import Any

import pytest
from torch.testing import assert_close

from tests.distributed import ddp_ranks as cases
from tests.distributed.ranks import on_ranks

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, list[Any]]:
    return on_ranks(cases.CASES, cases.N_RANKS, tmp_path_factory.mktemp("ddp"))


@pytest.mark.parametrize("gradient", cases.GRADIENTS)
@pytest.mark.parametrize("way", cases.WAYS)
def test_gradients_are_those_of_the_union(found, way, gradient):
    for rank in found["gradients"]:
        own, union = rank[way, gradient]
        assert max(grad.abs().max() for grad in union) > 0.01
        assert_close(own, union, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_sampling_reads_as_the_wrapped_model_would_and_waits_for_nobody(found, kind):
    rank = found["positions"][0]
    (n_plain, *plain), (n_wrapped, *wrapped) = rank[kind, False], rank[kind, True]
    assert n_wrapped == n_plain > 0
    assert_close(wrapped, plain, rtol=0, atol=0)


def test_limits_are_those_of_the_wrapped_model(found):
    for actor, length, token, eos in found["messages"]:
        assert actor.startswith("TypeError: `actor` must be a probabilistic actor")
        assert actor.endswith(
            "got DistributedDataParallel: wrap the network inside the actor, or the loss, in "
            "DistributedDataParallel."
        )
        assert "leave at most 20 tokens" in length
        assert "`pad_token` must lie in the model's vocabulary of 11 tokens" in token
        assert eos == (cases.EOS,)
