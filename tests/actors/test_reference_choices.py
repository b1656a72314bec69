"""What the argument `reference` may be: an actor, a FrozenActor, a context; and what it may not."""

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    CompositeDistribution,
    InteractionType,
    NormalParamExtractor,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import nn
from torch.distributions import Bernoulli, Categorical, Independent, Normal
from torch.distributions import OneHotCategorical as OneHot
from torch.testing import assert_close
from torchrl.modules import IndependentNormal, OneHotCategorical, TanhNormal

from tests.adapters import adapted_actor
from tests.helpers import (
    N_ACTIONS,
    N_OBS,
    SpyController,
    WalkEnv,
    assert_same,
    collect,
    make_actor,
    play,
    probabilistic_actor,
    sequence,
    total,
    with_transforms,
)
from torchrl_kl import (
    AdaptiveKLController,
    FrozenActor,
    KLConstrainedTransform,
    KLKeys,
    KLPenaltyLoss,
    KLRewardTransform,
    ReferenceModelLogProbTransform,
)

# Another actor, or a reference that is there already.


def test_another_actor_is_copied_and_frozen():
    actor, other = make_actor(), make_actor(seed=7)
    batch = play(WalkEnv((2,)), actor)
    stack = KLConstrainedTransform(actor, 0.1, reference=other)
    expected = FrozenActor(other).step(batch.copy()).log_prob
    assert_same(stack(batch)["next", "ref_log_prob"], expected)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert_same(stack(batch)["next", "ref_log_prob"], expected)


def test_the_keys_are_those_of_the_policy():
    actor, other = make_actor(log_prob_keys=["logp"]), make_actor(seed=7, return_log_prob=False)
    batch = play(WalkEnv((2,)), actor)
    after = KLConstrainedTransform(actor, 0.1, reference=other)(batch)["next"]
    expected = batch["logp"] - other.log_prob(batch.select("observation", "action"))
    assert_same(after["kl"].squeeze(-1), expected.detach())


@pytest.mark.parametrize("kinds", [(OneHotCategorical, Categorical), (Categorical, OneHot)])
def test_a_reference_with_actions_of_another_encoding_is_refused(kinds):
    """In any batch shape, also where numbers and vectors would be broadcast."""
    policy, reference = (
        probabilistic_actor(
            TensorDictModule(nn.Linear(N_OBS, N_ACTIONS), ["observation"], ["logits"]),
            in_keys=["logits"],
            distribution_class=kind,
            return_log_prob=True,
        )
        for kind in kinds
    )
    for shape in [(), (1,), (N_ACTIONS,), (2, N_ACTIONS)]:
        batch = TensorDict(observation=torch.randn(*shape, N_OBS), batch_size=shape)
        batch = policy(batch).set("next", TensorDict(reward=torch.zeros(*shape, 1)))
        stack = KLConstrainedTransform(policy, 0.1, reference=reference)
        loss = KLPenaltyLoss(policy, 0.1, reference=reference, gradient="k2")
        controller = AdaptiveKLController("plan", 0.5, 1000, per="step")
        planned = KLPenaltyLoss(policy, controller, reference=reference)
        for score in (stack, loss, planned.update_controller):
            with pytest.raises(ValueError, match="policy and reference must have the same actions"):
                score(batch)
        KLPenaltyLoss(policy, 0.1, reference=reference)(batch)  # which reads no action


@pytest.mark.parametrize("kind", [IndependentNormal, TanhNormal, Normal, Bernoulli])
@pytest.mark.parametrize("sizes", [(1, 2), (2, 1)])
def test_a_reference_with_actions_of_another_size_is_refused(kind, sizes):
    """One number is broadcast to several, and the log-prob is that of other actions."""

    def actor(size: int) -> Any:
        keys = ["logits"] if kind is Bernoulli else ["loc", "scale"]
        parts = [] if kind is Bernoulli else [NormalParamExtractor()]
        net = nn.Sequential(nn.Linear(N_OBS, len(keys) * size), *parts)
        module = TensorDictModule(net, ["observation"], [*keys])
        options = {"distribution_class": kind, "return_log_prob": True}
        return probabilistic_actor(module, in_keys=keys, **options)

    policy, reference = map(actor, sizes)
    for shape in [(), (1,), (2, 3)]:
        batch = policy(TensorDict(observation=torch.randn(*shape, N_OBS), batch_size=shape))
        batch["next"] = TensorDict(reward=torch.zeros(*shape, 1))
        stack = KLConstrainedTransform(policy, 0.1, reference=reference)
        loss = KLPenaltyLoss(policy, 0.1, reference=reference, gradient="k2")
        for score in (stack, loss):
            with pytest.raises(ValueError, match="policy and reference must have the same actions"):
                score(batch)


@pytest.mark.parametrize("kinds", [(OneHotCategorical, Categorical), (Categorical, OneHot)])
def test_a_part_of_an_action_in_another_encoding_is_refused(kinds):
    def actor(kind: type) -> Any:
        heads = [
            TensorDictModule(
                nn.Linear(N_OBS, N_ACTIONS), ["observation"], [("params", name, "logits")]
            )
            for name in "ab"
        ]
        return probabilistic_actor(
            sequence(*heads),
            in_keys=["params"],
            out_keys=["a", "b"],
            distribution_class=CompositeDistribution,
            distribution_kwargs={"distribution_map": {"a": Categorical, "b": kind}},
            return_log_prob=True,
        )

    policy, reference = map(actor, kinds)
    for shape in [(), (1,), (N_ACTIONS, N_ACTIONS)]:
        batch = policy(TensorDict(observation=torch.randn(*shape, N_OBS), batch_size=shape))
        batch["next"] = TensorDict(reward=torch.zeros(*shape, 1))
        KLConstrainedTransform(policy, 0.1)(batch)
        with pytest.raises(ValueError, match="policy and reference must have the same actions"):
            KLConstrainedTransform(policy, 0.1, reference=reference)(batch)


def test_one_hot_vectors_that_are_one_action_are_scored():
    """TorchRL's OneHotCategorical has no `event_shape`, and then `Independent` has none of it."""

    def actor(base: Any) -> Any:
        layers = nn.Sequential(nn.Linear(N_OBS, 2 * 3), nn.Unflatten(-1, (2, 3)))
        net = TensorDictModule(layers, ["observation"], ["logits"])
        return probabilistic_actor(
            net,
            in_keys=["logits"],
            distribution_class=lambda logits: Independent(base(logits=logits), 1),
            default_interaction_type=InteractionType.RANDOM,
            return_log_prob=True,
        )

    policy, reference = actor(OneHotCategorical), actor(OneHotCategorical)
    for shape in [(), (1,), (2, 3)]:
        batch = policy(TensorDict(observation=torch.randn(*shape, N_OBS), batch_size=shape))
        batch["next"] = TensorDict(reward=torch.zeros(*shape, 1))
        scored = KLConstrainedTransform(policy, 0.1, reference=reference)(batch.clone())
        of_reference = reference[0](batch.clone())["logits"].log_softmax(-1)
        log_prob = of_reference[batch["action"].bool()].unflatten(0, (*shape, 2)).sum(-1)
        assert_close(scored["next", "ref_log_prob"].view(shape), log_prob)
        with pytest.raises(ValueError, match="policy and reference must have the same actions"):
            KLConstrainedTransform(policy, 0.1, reference=actor(Categorical))(batch)


class Prior(ProbabilisticTensorDictSequential):
    """A reference that is the same in all states."""

    def get_dist(self, *args: Any, **kwargs: Any) -> Any:
        return Normal(torch.zeros(2), torch.ones(2))


def test_a_reference_may_be_the_same_in_all_states():
    net = nn.Sequential(nn.Linear(N_OBS, 4), NormalParamExtractor())
    module = TensorDictModule(net, ["observation"], ["loc", "scale"])
    options = {"distribution_class": Normal, "return_log_prob": True}
    policy = probabilistic_actor(module, in_keys=["loc", "scale"], **options)
    for shape in [(), (1,), (3, 5)]:
        batch = policy(TensorDict(observation=torch.randn(*shape, N_OBS), batch_size=shape))
        batch["next"] = TensorDict(reward=torch.zeros(*shape, 1))
        scored = KLConstrainedTransform(policy, 0.1, reference=Prior(*policy))(batch)
        log_prob = -0.5 * (batch["action"] ** 2 + math.log(2 * math.pi)).sum(-1)
        assert_close(scored["next", "ref_log_prob"].view(shape), log_prob)


def scoring_actor() -> Any:
    """An actor that leaves "scores" instead of "logits"."""
    net = TensorDictModule(nn.Linear(N_OBS, N_ACTIONS), ["observation"], ["scores"])
    return probabilistic_actor(
        net, in_keys={"logits": "scores"}, distribution_class=Categorical, return_log_prob=True
    )


# A FrozenActor that is given had its own traces and its own way to choose, not those of the policy.
given = pytest.mark.parametrize("give", [lambda actor: actor, FrozenActor], ids=["actor", "frozen"])


@given
@pytest.mark.parametrize("make", [ReferenceModelLogProbTransform, KLRewardTransform])
def test_a_policy_that_ran_unrecorded_is_noticed_by_its_own_traces(give, make):
    transform = make(make_actor(), reference=give(scoring_actor()))
    with pytest.raises(
        KeyError, match=r"the policy ran \(its \['logits'\] are there\) but left no"
    ):
        play(with_transforms(WalkEnv((2,)), transform), make_actor(return_log_prob=False))


def test_whether_it_samples_is_asked_of_the_policy():
    drawn = make_actor(default_interaction_type=InteractionType.RANDOM)
    for policy, other, samples in ((drawn, make_actor(), True), (make_actor(), drawn, False)):
        for reference in (FrozenActor(other), FrozenActor(other, policy=policy), other):
            stack = KLConstrainedTransform(policy, 0.1, reference=reference)
            assert stack.acting.samples() is samples


@given
@pytest.mark.parametrize("draws", [False, True])
def test_the_controller_is_told_of_what_the_policy_draws_by_default(give, draws):
    kinds = InteractionType.DETERMINISTIC, InteractionType.RANDOM
    policy, other = (
        make_actor(default_interaction_type=kinds[is_it]) for is_it in (draws, not draws)
    )
    controller = SpyController()
    stack = KLConstrainedTransform(policy, controller, reference=give(other), update_every=1)
    env = with_transforms(WalkEnv((2,)), stack)
    batch = env.rollout(12, policy, break_when_any_done=False)
    assert total(controller)[0] == (batch["next", "done"].sum() if draws else 0)


@given
def test_random_frames_are_told_by_the_traces_of_the_policy(give):
    policy, controller = make_actor(), SpyController(per="step")
    stack = KLConstrainedTransform(policy, controller, reference=give(scoring_actor()))
    batches = collect(WalkEnv((2,)), policy, frames=10, batches=2, init_random_frames=10)
    with pytest.warns(UserWarning, match="in 10 of 10 steps the log-prob and all that the policy"):
        stack(batches[0])
    stack(batches[1])
    assert total(controller)[0] == 10


def test_a_frozen_actor_is_used_as_it_is():
    actor = make_actor()
    first = KLConstrainedTransform(actor, 0.1)
    second = KLConstrainedTransform(
        actor, 0.1, reference=first.reference, keys=KLKeys(reward="bonus")
    )
    assert second.reference is first.reference
    assert KLRewardTransform(actor, reference=first.reference).reference is first.reference
    with pytest.raises(
        ValueError,
        match="`KLKeys.log_prob` must be that of the FrozenActor, 'action_log_prob', got 'logp'",
    ):
        KLConstrainedTransform(actor, 0.1, reference=first.reference, keys=KLKeys(log_prob="logp"))


# What cannot be.


@pytest.mark.parametrize("make", [ReferenceModelLogProbTransform, KLRewardTransform])
def test_neither_an_actor_nor_a_callable(make):
    actor, layer = adapted_actor()
    with pytest.raises(
        TypeError,
        match=r"got _GeneratorContextManager: pass `model.disable_adapter`, not .*only once",
    ):
        make(actor, reference=layer.disable_adapter())
    with pytest.raises(TypeError, match="`reference` must be an actor or a callable .*, got str"):
        make(actor, reference="base")
    with pytest.raises(TypeError, match="`actor` must be a probabilistic actor .*, got Linear"):
        make(actor, reference=nn.Linear(2, 2))


def test_a_callable_that_returns_no_context():
    actor = make_actor()
    batch = play(WalkEnv((2,)), actor)
    with pytest.raises(
        TypeError, match="must return a context manager when called, got NoneType.*disable_adapter"
    ):
        ReferenceModelLogProbTransform(actor, reference=lambda: None)(batch)  # type: ignore[arg-type]
    assert_same(
        ReferenceModelLogProbTransform(actor, reference=nullcontext)(batch)["next", "ref_log_prob"],
        batch["action_log_prob"].detach(),
    )


def test_gradients_of_what_is_not_a_copy():
    actor, layer = adapted_actor()
    for reference in (layer.disable_adapter, FrozenActor(actor)):
        with pytest.raises(
            ValueError, match=r"`requires_grad` needs a reference that is a copy made here, got \w+"
        ):
            KLRewardTransform(actor, requires_grad=True, reference=reference)


@given
def test_a_reference_with_other_actions(give):
    with pytest.raises(
        ValueError, match=r"must have the actions of the policy, got \['action'\] for .*'agents'"
    ):
        KLConstrainedTransform(make_actor(agents=True), 0.1, reference=give(make_actor()))
    with pytest.raises(TypeError, match="`actor` must be a probabilistic actor .*, got Linear"):
        FrozenActor(make_actor(), policy=nn.Linear(2, 2))
