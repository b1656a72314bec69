"""The actor that records its top k: the same policy, other records."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributions import OneHotCategorical
from torch.testing import assert_close
from torchrl.modules import MaskedCategorical

from tests.actors.kinds import (
    act,
    agents,
    choosing,
    gaussian,
    linear,
    masked,
    observed,
)
from tests.helpers import (
    N_ACTIONS,
    make_actor,
    probabilistic_actor,
    sharp,
)
from torchrl_kl import FrozenActor, TopKActor

assert_equal = partial(assert_close, rtol=0, atol=0)
NAMES = ("log_probs", "actions", "in_top_k")
NEW_KEYS = [("top_k", name) for name in NAMES]


def data(n: int = 64) -> Any:
    return observed(n).float()


def test_it_is_the_same_policy_with_other_records():
    actor = make_actor()
    wrapped: Any = TopKActor(actor, 2)
    batch = data()
    plain, recorded = act(actor, batch), act(wrapped, batch)
    for name in ("action", "action_log_prob"):
        assert_equal(recorded[name], plain[name])
    assert_equal(wrapped.get_dist(batch.clone()).logits, actor.get_dist(batch.clone()).logits)
    assert_equal(wrapped.log_prob(recorded.clone()).detach(), plain["action_log_prob"])
    for name in ("in_keys", "dist_sample_keys", "log_prob_keys", "default_interaction_type"):
        assert getattr(wrapped, name) == getattr(actor, name)
    assert wrapped.out_keys == ["action", "action_log_prob", *NEW_KEYS]
    assert set(recorded.keys(True, True)) - set(batch.keys(True, True)) == set(wrapped.out_keys)
    # The same weights, under the same names; a copy has its own, and may be a reference.
    assert list(wrapped.state_dict()) == list(actor.state_dict())
    assert [*wrapped.parameters()] == [*actor.parameters()]
    copied, reference = copy.deepcopy(wrapped), FrozenActor(wrapped)
    with torch.no_grad():
        for parameter in actor.parameters():
            parameter.mul_(2)
    assert_equal(act(wrapped, batch)["action_log_prob"], act(actor, batch)["action_log_prob"])
    assert_equal(act(copied, batch).select(*NEW_KEYS), recorded.select(*NEW_KEYS))
    score = reference.score(recorded, timed=False).log_prob
    assert_close(score, recorded["action_log_prob"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("k", range(1, N_ACTIONS + 1))
@pytest.mark.parametrize("kind", [None, OneHotCategorical])
def test_what_it_records(k, kind):
    actor, batch = sharp(choosing() if kind is None else choosing(kind)), data()
    step = act(TopKActor(actor, k), batch)
    log_probs = actor[0].module(batch["observation"]).detach().log_softmax(-1)
    ranks = log_probs.argsort(-1, descending=True)
    drawn = step["action"] if kind is None else step["action"].argmax(-1)
    assert_close(step["top_k", "actions"], ranks[:, :k])
    assert_close(step["top_k", "log_probs"], log_probs.sort(-1, descending=True).values[:, :k])
    expected = [a in row[:k] for a, row in zip(drawn.tolist(), ranks.tolist(), strict=True)]
    assert step["top_k", "in_top_k"].tolist() == expected
    assert any(expected)
    assert all(expected) == (k == N_ACTIONS)


def test_its_records_are_next_to_the_log_prob_and_other_entries_stay():
    step = act(TopKActor(agents(), 2), data(5))
    assert step["agents", "top_k", "actions"].shape == (5, 3, 2)
    assert step["agents", "top_k", "in_top_k"].shape == (5, 3)
    assert "top_k" not in step.keys()
    assert "logits" not in step["agents"].keys()
    allowed = torch.tensor([True, False, True, False]).expand(64, 4)
    step = act(TopKActor(masked(), 3), data().set("action_mask", allowed))
    assert "action_mask" in step.keys()
    assert (step["top_k", "log_probs"][:, 2] == -torch.inf).all()
    assert (step["top_k", "actions"][:, :2] % 2 == 0).all()


def indexed() -> Any:
    keys = {"logits": "logits", "indices": "allowed"}
    kind: Any = {"in_keys": keys, "distribution_class": MaskedCategorical}
    actor = probabilistic_actor(linear(), return_log_prob=True, **kind)
    return act(TopKActor(actor, 2), data().set("allowed", torch.tensor([0, 2, 1, 3]).expand(64, 4)))


NO_K: Any = (0, -1, 2.0, True)
ERRORS: dict[str, tuple[Any, Any, str]] = {
    "module": (lambda: TopKActor(linear(), 2), TypeError, "got TensorDictModule"),
    "not recorded": (
        lambda: TopKActor(make_actor(return_log_prob=False), 2),
        ValueError,
        r"must record its log-prob, got the out_keys .*return_log_prob=True",
    ),
    "too many": (lambda: act(TopKActor(choosing(), 5), data()), ValueError, "actions, 4, got 5"),
    "real": (lambda: act(TopKActor(gaussian(), 2), data()), TypeError, "a Categorical.*got Normal"),
    "indices": (indexed, TypeError, "with a mask, not with indices"),
} | {
    f"k={k}": (lambda k=k: TopKActor(choosing(), k), ValueError, f"an int of at least 1, got {k}")
    for k in NO_K
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_it_cannot_wrap(name):
    call, error, message = ERRORS[name]
    with pytest.raises(error, match=message):
        call()
