"""The estimators "exact" and "top_k" say what they cannot measure."""

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import Categorical

from tests.helpers import (
    N_ACTIONS,
    N_OBS,
    WalkEnv,
    compose,
    make_actor,
    moved,
    play,
    probabilistic_actor,
    with_transforms,
)
from tests.transforms.estimated import SCRATCH, K, as_policy, both, stack
from torchrl_kl import (
    KLConstrainedTransform,
    KLDivergenceTransform,
    KLKeys,
    ReferenceModelLogProbTransform,
    TopKActor,
)


def test_exact_needs_an_actor():
    with pytest.raises(ValueError, match=r'`estimator="exact"` needs `actor`.*pass the policy'):
        KLDivergenceTransform(estimator="exact")


@both
@pytest.mark.parametrize("place", ["env", "batch"])
def test_what_the_policy_did_not_record(estimator, place):
    actor = make_actor()
    policy = TopKActor(moved(actor), K) if estimator == "exact" else moved(actor)
    text = {
        "exact": r"logits.* is not in the data, got .*top_k.*Let the policy record .*TopKActor",
        "top_k": r"\('top_k', 'actions'\) is not in the data, got .*logits.*collect with TopKActor",
    }[estimator]
    transform, batch = stack(actor, estimator), play(WalkEnv((2,)), policy)
    env = with_transforms(WalkEnv((2,)), stack(actor, estimator))
    with pytest.raises(KeyError, match=text):
        play(env, policy) if place == "env" else transform(batch)


@both
def test_a_second_stack_is_called_on_the_collected_batch(estimator):
    actor = make_actor()
    batch = play(WalkEnv((2,)), as_policy(moved(actor), estimator))
    first = KLConstrainedTransform(actor, 0.1, estimator=estimator)
    second = KLConstrainedTransform(actor, 0.0, estimator=estimator, keys=KLKeys.named("second"))
    with pytest.raises(KeyError, match="it dropped them: call both on the collected batch"):
        second(first(batch))
    measured = second(batch)["next", "second_kl_estimate"]
    assert measured.equal(first(batch)["next", "kl_estimate"])


@both
def test_what_the_reference_did_not_keep(estimator):
    unlike = compose(
        ReferenceModelLogProbTransform(make_actor()),
        KLDivergenceTransform(estimator=estimator, actor=make_actor()),
    )
    text = f"'{SCRATCH}' is not in the data, got .*with the same `estimator` before this transform"
    with pytest.raises(KeyError, match=text):
        unlike(play(WalkEnv((2,)), as_policy(moved(make_actor()), estimator)))


class TwoDistributions(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = make_actor(), make_actor()


def test_exact_needs_one_distribution():
    with pytest.raises(
        ValueError, match="`actor` must have one ProbabilisticTensorDictModule, got 2 in TwoDistrib"
    ):
        KLDivergenceTransform(estimator="exact", actor=TwoDistributions())


def test_policy_and_reference_choose_among_the_same_actions():
    batch = play(WalkEnv((2,)), moved(make_actor()))
    batch["logits"] = torch.zeros(2, 12, N_ACTIONS + 1)
    with pytest.raises(
        ValueError,
        match=r"'logits' of policy and reference must .*got \(2, 12, 5\) and \(2, 12, 4\)",
    ):
        stack(make_actor(), "exact")(batch)


def test_policy_and_reference_name_their_parameters_alike():
    net = TensorDictModule(nn.Linear(N_OBS, N_ACTIONS), ["observation"], ["scores"])
    reference = probabilistic_actor(
        net, in_keys={"logits": "scores"}, distribution_class=Categorical
    )
    actor = make_actor()
    unlike = compose(
        ReferenceModelLogProbTransform(reference, estimator="exact"),
        KLDivergenceTransform(estimator="exact", actor=actor),
    )
    with pytest.raises(
        KeyError, match=r"logits.* is not in the data, got scores: policy and reference must name"
    ):
        unlike(play(WalkEnv((2,)), moved(actor)))


def test_top_k_of_a_reference_that_is_not_categorical():
    batch = play(WalkEnv((2,), discrete=False), moved(make_actor("normal")))
    with pytest.raises(
        TypeError, match=r"the top k need a Categorical, .*got Normal: use `estimator=\"exact\"`"
    ):
        stack(make_actor("normal"), "top_k")(batch)


def test_top_k_of_several_choices_per_step():
    model = nn.Sequential(nn.Linear(N_OBS, 6), nn.Unflatten(-1, (2, 3)))  # two choices among three
    actor = probabilistic_actor(
        TensorDictModule(model, ["observation"], ["logits"]),
        in_keys=["logits"],
        distribution_class=Categorical,
        return_log_prob=True,
    )
    batch = TopKActor(actor, K)(TensorDict(observation=torch.randn(5, N_OBS), batch_size=5))
    batch["next"] = TensorDict(batch_size=5)
    with pytest.raises(
        ValueError,
        match=r"one choice per step, got choices of shape \(5, 2\) .*\(5, 2\) .* shape \(5,\)",
    ):
        ReferenceModelLogProbTransform(actor, estimator="top_k")(batch)
