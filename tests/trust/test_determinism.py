"""The same seed gives the same numbers, and two threads change them by rounding."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.gpt_helpers import sharp
from tests.helpers import assert_within, rounding
from tests.trust import runs
from torchrl_kl.envs import DigitLanguageEnv
from torchrl_kl.language import GPT, CausalLMActor


@pytest.fixture
def threads() -> Iterator[Any]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("kind", "n_threads"),
    [(runs.Postproc, 1), (runs.Responses, 2)],
)
def test_a_repeated_run_is_the_same_bit_for_bit(kind, n_threads, threads):
    threads(n_threads)
    first, second, other = kind(0), kind(0), kind(1)
    # One run after the other: each takes the global random numbers where its seed began.
    logged = []
    for run in (first, second, other):
        torch.manual_seed(run.optimizer is other.optimizer)
        logged.append(runs.go_on(run, 3))
    assert logged[0] == logged[1] != logged[2]
    for mine, same in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert mine.equal(same)


def test_two_threads_change_log_probs_by_rounding_at_most(threads):
    actor = CausalLMActor(sharp(GPT(11, 8, n_layer=2, n_head=2, n_embd=16)))
    batch = DigitLanguageEnv(batch_size=(16,)).rollout(4, actor).reshape(-1)
    found = []
    for n_threads in (1, 2):
        threads(n_threads)
        dist = actor.get_dist(batch.select("tokens", "position"))
        found.append(dist.log_prob(batch["action"]))
    threads(1)
    assert_within(found[0], found[1], rounding(actor, batch))
