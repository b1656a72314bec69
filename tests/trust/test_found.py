"""What was found by attack, each with the smallest use that shows it."""

import pytest
import torch

from tests.helpers import WalkEnv, make_actor, play
from torchrl_kl import KLConstrainedTransform


@pytest.mark.parametrize("shape", [(0, 4), (0,)], ids=str)
def test_an_empty_batch_is_scored_in_chunks(shape):
    actor = make_actor()
    batch = play(WalkEnv((2,)), actor, 4)
    empty = batch[:0] if len(shape) == 2 else batch[:0, 0]
    stack = KLConstrainedTransform(actor, 0.1, chunk_size=1)
    assert stack(empty)["next", "kl"].shape == torch.Size((*shape, 1))
