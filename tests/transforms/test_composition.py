"""Transforms own a scorer and a penalty: what a class must define, and what it may not inherit."""

from typing import Any

import pytest
import torch
from torch.testing import assert_close
from torchrl.envs import Compose, TransformedEnv, check_env_specs

from tests.helpers import WalkEnv, compose, make_actor, play, policy, with_transforms
from torchrl_kl import (
    ConstantKLController,
    FrozenActor,
    KLConstrainedTransform,
    KLDivergenceTransform,
    KLKeys,
    ReferenceModelLogProbTransform,
    RewardAdjustmentTransform,
    TopKActor,
)
from torchrl_kl.language import GPT, ResponseKLTransform
from torchrl_kl.transforms.base import KLTransform
from torchrl_kl.transforms.scorer import ScoringTransform

ABSTRACT = [KLTransform, ScoringTransform]


@pytest.mark.parametrize("base", ABSTRACT, ids=lambda base: base.__name__)
def test_a_class_that_lacks_a_method_cannot_be_built(base):
    with pytest.raises(TypeError, match=f"Can't instantiate abstract class {base.__name__}"):
        base([], [])
    for missing in base.__abstractmethods__:
        methods: Any = dict.fromkeys(base.__abstractmethods__ - {missing}, lambda *_: None)
        with pytest.raises(TypeError, match=f"abstract method '?{missing}"):
            type("Partial", (base,), methods)([], [])
    every: Any = dict.fromkeys(base.__abstractmethods__, lambda *_: None)
    type("Whole", (base,), every)([], [])


def test_a_subclass_of_a_concrete_one_is_concrete():
    class Mine(KLDivergenceTransform):
        pass

    assert Mine().out_keys == ["kl"]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_first_transform_of_nested_composes_finds_its_env(depth):
    stack: Any = KLConstrainedTransform(make_actor(), 0.1)
    for _ in range(depth):
        stack = Compose(stack)
    env = TransformedEnv(WalkEnv((2,)), stack)
    torch.manual_seed(0)
    inside = play(env, policy())["next", "kl"]
    torch.manual_seed(0)
    batch = KLConstrainedTransform(make_actor(), 0.1)(play(WalkEnv((2,)), policy()))
    # Log-probs of up to 8 nats, of which the passes round the last digit.
    assert_close(inside, batch["next", "kl"], rtol=0, atol=8 * 2 * torch.finfo().eps)


def test_a_part_that_is_read_from_elsewhere_is_not_replaced():
    stack = KLConstrainedTransform(make_actor(), 0.1)
    scored = ReferenceModelLogProbTransform(make_actor())
    of_texts = ResponseKLTransform(GPT(vocab_size=11, block_size=8), 0.1)
    parts = {
        "controller": (
            ConstantKLController(5.0),
            [stack, RewardAdjustmentTransform(0.1), of_texts],
        ),
        "reference": (FrozenActor(make_actor()), [stack, scored, of_texts]),
    }
    for name, (part, owners) in parts.items():
        for owner in owners:
            before = getattr(owner, name)
            with pytest.raises(AttributeError, match=f"`{name}` of .* is given when it is built"):
                setattr(owner, name, part)
            assert getattr(owner, name) is before


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "exact", "top_k"])
def test_parts_leave_no_hidden_entry_and_no_graph(estimator):
    behaviour: Any = TopKActor(policy(), 2) if estimator == "top_k" else policy()
    actor = TopKActor(make_actor(), 2) if estimator == "top_k" else make_actor()
    pair = [
        ReferenceModelLogProbTransform(actor, estimator=estimator),
        KLDivergenceTransform(estimator=estimator),
    ]
    env = with_transforms(WalkEnv((2,)), *pair)
    check_env_specs(env)
    inside = env.rollout(4, behaviour)
    pair = [
        ReferenceModelLogProbTransform(actor, estimator=estimator),
        KLDivergenceTransform(estimator=estimator),
    ]
    batch = compose(*pair)(WalkEnv((2,)).rollout(4, behaviour))
    for data in (inside, batch):
        assert not any(name.startswith("_") for name in data["next"].keys())
        assert not any(value.requires_grad for value in data["next"].values(True, True))


def test_parts_of_other_estimators_do_not_fit():
    batch = play(WalkEnv((2,)), policy())
    for own, other in (("k2", "exact"), ("exact", "top_k")):
        parts = compose(
            ReferenceModelLogProbTransform(make_actor(), estimator=own),  # type: ignore[arg-type]
            KLDivergenceTransform(estimator=other),  # type: ignore[arg-type]
        )
        with pytest.raises(KeyError, match="with the same `estimator`"):
            parts(batch.clone())


def test_parts_are_attached_in_any_order():
    env = TransformedEnv(WalkEnv((2,)))
    env.append_transform(RewardAdjustmentTransform(0.1))
    env.insert_transform(0, KLDivergenceTransform())
    env.insert_transform(0, ReferenceModelLogProbTransform(make_actor()))
    batch = play(env, policy())["next"]
    assert_close(batch["reward"], batch["task_reward"] - 0.1 * batch["kl"])


def test_a_log_prob_of_another_name_is_not_that_of_a_random_policy():
    actor = make_actor(log_prob_key="lp")
    keys = KLKeys(ref_log_prob="ref_log_prob")
    env = with_transforms(
        WalkEnv((2,)), ReferenceModelLogProbTransform(actor), KLDivergenceTransform(keys=keys)
    )
    with pytest.raises(KeyError, match="'action_log_prob' is not in the data"):
        play(env, make_actor(log_prob_key="lp"))
