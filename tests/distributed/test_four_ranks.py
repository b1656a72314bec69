"""Four ranks feed one controller: it is that of one process with the batches of all."""

from typing import Any

import pytest
import torch

from tests.distributed import four_ranks as cases
from tests.distributed.ranks import on_ranks
from torchrl_kl import PlannedKLController

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, list[Any]]:
    folder = tmp_path_factory.mktemp("four")
    return on_ranks([cases.pools, cases.plans], cases.N_RANKS, folder)


@pytest.mark.parametrize("update_every", [None, 10])
@pytest.mark.parametrize("kind", cases.RULES)
def test_a_pool_of_all_ranks_is_that_of_their_union(found, kind, update_every):
    unions = [torch.cat(cases.values(n)) for n in range(cases.N_BATCHES)]
    assert not len(unions[4])
    states, calls = cases.feed(None, unions, kind, update_every)
    ranks = [each[kind, update_every] for each in found["pools"]]
    assert all(rank == ranks[0] for rank in ranks)  # bit for bit
    for state, expected in zip(ranks[0][0], states, strict=True):
        assert state == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert [n for _, n in ranks[0][1]] == [n for _, n in calls]
    assert len({state[0] for state in states}) > 3  # it moves


@pytest.mark.parametrize("per", ["trajectory", "step"])
def test_a_plan_is_that_of_the_concatenation(found, per):
    columns = [cases.plan_samples(rank) for rank in range(cases.N_RANKS)]
    reward, log_ratio, start = map(torch.cat, zip(*columns, strict=True))
    owner = torch.arange(cases.N_RANKS).repeat_interleave(torch.tensor(cases.PLAN_SIZES))

    def planned(groups: torch.Tensor | None) -> float:
        controller = PlannedKLController(0.1, per=per)
        for _ in range(cases.PLAN_BATCHES[per]):
            controller.observe_rewards(reward, log_ratios=log_ratio, groups=groups)
        return controller.plan.made.item()

    expected = planned(start + 10 * owner if per == "trajectory" else None)
    ranks = found["plans"]
    assert all(rank == ranks[0] for rank in ranks)
    assert expected > 0
    assert ranks[0][per]["plan.made"] == pytest.approx(expected, rel=1e-12)
    if per == "trajectory":  # where ranks have other rewards, mixed groups give another plan
        assert planned(start) != pytest.approx(expected, rel=1e-2)
