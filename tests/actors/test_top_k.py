"""The actor that records its top k: the same policy, other records."""

import copy
from collections import OrderedDict
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import nn
from torch.distributions import Categorical, OneHotCategorical
from torch.testing import assert_close
from torchrl.envs import SerialEnv
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import MaskedCategorical, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from tests.helpers import (
    N_ACTIONS,
    N_OBS,
    WalkEnv,
    collect,
    make_actor,
    memory_of,
    moved,
    play,
    probabilistic_actor,
    sharp,
    with_transforms,
)
from torchrl_kl import GPT, CausalLMActor, FrozenActor, KLConstrainedTransform, TopKActor
from torchrl_kl.envs import DigitLanguageEnv

assert_equal = partial(assert_close, rtol=0, atol=0)
NAMES = ("log_probs", "actions", "in_top_k")


def states(n: int = 64) -> Any:
    return TensorDict(
        observation=torch.randn(n, N_OBS, generator=torch.Generator().manual_seed(0)), batch_size=n
    )


def act(actor, td) -> Any:
    torch.manual_seed(0)
    with set_exploration_type(ExplorationType.RANDOM):
        return actor(td.clone())


def net(n_out: int = N_ACTIONS) -> Any:
    return TensorDictModule(nn.Linear(N_OBS, n_out), ["observation"], ["logits"])


# The same policy.


def test_it_acts_as_the_actor_does():
    actor = make_actor()
    plain, recorded = act(actor, states()), act(TopKActor(actor, 2), states())
    for name in ("action", "action_log_prob"):
        assert_equal(recorded[name], plain[name])
    dist: Any = TopKActor(actor, 2).get_dist(states())
    assert_equal(dist.logits, actor.get_dist(states()).logits)
    assert_equal(TopKActor(actor, 2).log_prob(recorded), plain["action_log_prob"])


def test_it_has_the_keys_of_the_actor_without_the_parameters():
    actor = make_actor()
    wrapped = TopKActor(actor, 2)
    for name in (
        "in_keys",
        "dist_sample_keys",
        "log_prob_keys",
        "dist_params_keys",
        "default_interaction_type",
    ):
        assert getattr(wrapped, name) == getattr(actor, name)
    assert wrapped.out_keys == ["action", "action_log_prob", *(("top_k", name) for name in NAMES)]
    written = set(act(wrapped, states()).keys(True, True)) - {"observation"}
    assert written == set(wrapped.out_keys)


def test_it_shares_the_weights_under_the_same_names():
    actor = make_actor()
    wrapped = TopKActor(actor, 2)
    assert wrapped.state_dict().keys() == actor.state_dict().keys()
    with torch.no_grad():
        for parameter in actor.parameters():
            parameter.mul_(2)
    assert [*wrapped.parameters()] == [*actor.parameters()]
    assert_equal(act(wrapped, states())["action_log_prob"], act(actor, states())["action_log_prob"])


def test_a_deepcopy_is_on_its_own():
    wrapped = TopKActor(make_actor(), 2)
    before = act(wrapped, states())
    copied = copy.deepcopy(wrapped)
    with torch.no_grad():
        for parameter in wrapped.parameters():
            parameter.mul_(2)
    after = act(copied, states())
    for key in wrapped.out_keys:
        assert_equal(after[key], before[key])


def test_a_reference_may_be_made_of_it():
    actor = make_actor()
    batch = play(WalkEnv((2,)), TopKActor(actor, 2))
    reference = FrozenActor(TopKActor(actor, 2))
    assert_close(
        reference.step(reference.inputs(batch)).log_prob,
        batch["action_log_prob"].detach(),
        atol=1e-6,
        rtol=0,
    )
    after = KLConstrainedTransform(TopKActor(actor, 2), 0.1, estimator="top_k")(batch)
    assert after["next", "kl_estimate"].abs().max() < 1e-6


@pytest.mark.parametrize("place", ["env", "postproc"])
def test_it_trains_with_ppo(place):
    actor = make_actor()
    policy = TopKActor(actor, 2)
    stack = KLConstrainedTransform(actor, 0.1, estimator="top_k")
    env = with_transforms(SerialEnv(2, WalkEnv), stack) if place == "env" else SerialEnv(2, WalkEnv)
    postproc = stack if place == "postproc" else None
    (batch,) = collect(env, policy, frames=32, batches=1, postproc=postproc)
    critic = ValueOperator(sharp(nn.Linear(N_OBS, 1)), in_keys=["observation"])
    GAE(gamma=1.0, lmbda=0.95, value_network=critic)(batch)
    torch.manual_seed(0)
    terms = ClipPPOLoss(policy, critic)(batch.reshape(-1))
    torch.manual_seed(0)
    expected = ClipPPOLoss(actor, critic)(batch.reshape(-1))
    for name in ("loss_objective", "loss_critic", "loss_entropy"):
        assert_equal(terms[name], expected[name])
    terms["loss_objective"].backward()
    assert all((p.grad != 0).any() for p in actor.parameters())


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_it_remembers(kind):
    actor = make_actor(kind)
    env = with_transforms(SerialEnv(2, WalkEnv), *memory_of(actor))
    plain, recorded = (play(env, policy) for policy in (actor, TopKActor(actor, 2)))
    for key in ("action", "action_log_prob", "h", ("next", "h")):
        assert_equal(recorded[key], plain[key])


def test_a_gpt_records_its_top_k():
    actor = CausalLMActor(GPT(11, 8))
    batch = play(DigitLanguageEnv(batch_size=(4,), seed=0), TopKActor(actor, 3), 10)
    stack = KLConstrainedTransform(actor, 0.1, estimator="top_k")
    policy = TopKActor(moved(actor, scale=0.2), 11)
    assert stack(batch)["next", "kl_estimate"].abs().max() < 1e-6
    all_of_them = play(DigitLanguageEnv(batch_size=(4,), seed=0), policy, 10)
    exact = KLConstrainedTransform(actor, 0.1, estimator="exact")
    plain = play(DigitLanguageEnv(batch_size=(4,), seed=0), moved(actor, scale=0.2), 10)
    measured = stack(all_of_them)["next", "kl_estimate"]
    assert_close(measured, exact(plain)["next", "kl_estimate"], atol=1e-5, rtol=1e-5)
    assert measured.min() > 1e-3


# What it records.


@pytest.mark.parametrize("k", range(1, N_ACTIONS + 1))
@pytest.mark.parametrize("one_hot", [False, True])
def test_what_it_records(k, one_hot):
    actor = sharp(
        probabilistic_actor(
            net(),
            in_keys=["logits"],
            distribution_class=OneHotCategorical if one_hot else Categorical,
            return_log_prob=True,
        )
    )
    step = act(TopKActor(actor, k), states())
    with torch.no_grad():
        log_probs = actor[0].module(states()["observation"]).log_softmax(-1)
    ranks = log_probs.argsort(-1, descending=True)
    drawn = step["action"].argmax(-1) if one_hot else step["action"]
    assert_close(step["top_k", "actions"], ranks[:, :k])
    assert_close(
        step["top_k", "log_probs"].detach(), log_probs.sort(-1, descending=True).values[:, :k]
    )
    expected = torch.tensor(
        [a in row[:k] for a, row in zip(drawn.tolist(), ranks.tolist(), strict=True)]
    )
    assert (step["top_k", "in_top_k"] == expected).all()
    assert expected.any()
    assert expected.all() == (k == N_ACTIONS)


def test_agents_record_next_to_their_log_prob():
    actor = make_actor(agents=True)
    batch = play(WalkEnv((2,), n_agents=3), TopKActor(actor, 2))
    assert batch["agents", "top_k", "actions"].shape == (2, 12, 3, 2)
    assert batch["agents", "top_k", "in_top_k"].shape == (2, 12, 3)
    assert "top_k" not in batch.keys()
    assert "logits" not in batch["agents"].keys()


def test_a_mask_of_actions_is_an_input_and_stays():
    actor = sharp(
        probabilistic_actor(
            net(),
            in_keys={"logits": "logits", "mask": "action_mask"},
            distribution_class=MaskedCategorical,
            return_log_prob=True,
        )
    )
    td = states().set("action_mask", torch.tensor([True, False, True, False]).expand(64, 4))
    step = act(TopKActor(actor, 3), td)
    assert "action_mask" in step.keys()
    assert (step["top_k", "log_probs"][:, 2] == -torch.inf).all()
    assert (step["top_k", "actions"][:, :2] % 2 == 0).all()


def test_another_output_may_be_chosen():
    wrapped: Any = TopKActor(make_actor(), 2, top_k_key=("best", "two")).select_out_keys(
        "action", ("best", "two", "actions")
    )
    step = act(wrapped, states())
    assert set(step.keys(True, True)) == {"observation", "action", ("best", "two", "actions")}
    out = TensorDict(batch_size=64)
    given = states()
    assert wrapped(given, tensordict_out=out) is out
    assert set(given.keys()) == {"observation"}
    assert "action" in out.keys()


def test_the_actors_own_choice_of_outputs_is_kept():
    hidden = make_actor().select_out_keys("action", "action_log_prob")
    wrapped = TopKActor(hidden, 2)
    assert wrapped.out_keys == ["action", "action_log_prob", *(("top_k", name) for name in NAMES)]
    assert act(wrapped, states())["top_k", "actions"].shape == (64, 2)


def test_named_modules_keep_their_names():
    sample = ProbabilisticTensorDictModule(
        ["logits"], ["action"], distribution_class=Categorical, return_log_prob=True
    )
    actor: Any = ProbabilisticTensorDictSequential(OrderedDict(net=net(), sample=sample))
    wrapped = TopKActor(actor, 2)
    assert (
        list(wrapped.state_dict())
        == list(actor.state_dict())
        == ["module.net.module.weight", "module.net.module.bias"]
    )
    assert_close(act(wrapped, states())["action"], act(actor, states())["action"])


def test_tensors_are_dispatched():
    actor = TopKActor(make_actor(), 2)
    action, _, log_probs, actions, in_top_k = actor(states()["observation"])
    assert action.shape == in_top_k.shape == (64,)
    assert log_probs.shape == actions.shape == (64, 2)


# What it cannot wrap.


@pytest.mark.parametrize("actor", [nn.Linear(3, 2), net()], ids=["module", "deterministic"])
def test_what_has_no_distribution(actor):
    with pytest.raises(
        TypeError, match=r"`actor` must be a ProbabilisticTensorDictSequential, got \w+"
    ):
        TopKActor(actor, 2)


class Sharper(ProbabilisticTensorDictSequential):
    """Chooses from sharper distributions than its parts do."""

    def build_dist_from_params(self, tensordict):
        return Categorical(logits=2 * tensordict["logits"])


def test_what_chooses_in_its_own_way():
    with pytest.raises(
        TypeError, match="got Sharper with its own build_dist_from_params, which would not be call"
    ):
        TopKActor(Sharper(*make_actor().module), 2)

    class Named(Sharper):
        """Inherits it."""

    with pytest.raises(TypeError, match="got Named with its own build_dist_from_params, which"):
        TopKActor(Named(*make_actor().module), 2)


@pytest.mark.parametrize("k", [0, -1, 2.0, True])
def test_k_is_a_positive_int(k):
    with pytest.raises(ValueError, match=rf"`k` must be an int of at least 1, got {k}"):
        TopKActor(make_actor(), k)


def test_k_is_at_most_the_number_of_actions():
    with pytest.raises(ValueError, match="`k` must be at most the number of actions, 4, got 5"):
        act(TopKActor(make_actor(), 5), states())


def test_the_log_prob_must_be_recorded():
    with pytest.raises(
        ValueError,
        match=r"`actor` must record its log-prob, got the out_keys .*return_log_prob=True",
    ):
        TopKActor(make_actor(return_log_prob=False), 2)


def test_a_continuous_action_has_no_top_k():
    with pytest.raises(TypeError, match=r"the top k need a Categorical, .*, got TanhNormal"):
        act(TopKActor(make_actor("tanh_normal"), 2), states())


def test_indices_have_no_slot_per_action():
    actor = probabilistic_actor(
        net(),
        in_keys={"logits": "logits", "indices": "allowed"},
        distribution_class=MaskedCategorical,
        return_log_prob=True,
    )
    td = states().set("allowed", torch.tensor([0, 2]).expand(64, 2))
    with pytest.raises(TypeError, match="with a mask, not with indices"):
        act(TopKActor(actor, 2), td)
