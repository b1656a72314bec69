"""The transforms that measure: whose log-prob, of which action, in which shape, and when there is
none.
"""

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import Categorical, Normal, kl_divergence
from torch.testing import assert_close
from torchrl.envs import Compose, GymEnv, SerialEnv, check_env_specs
from torchrl.modules import recurrent_mode

from tests.helpers import (
    N_ACTIONS,
    N_OBS,
    WalkEnv,
    assert_same,
    compose,
    make_actor,
    memory_of,
    moved,
    play,
    probabilistic_actor,
    sharp,
    with_transforms,
    without_kl,
)
from tests.laws.transform_laws import TransformLaws
from torchrl_kl import (
    KLConstrainedTransform,
    KLDivergenceTransform,
    KLKeys,
    ReferenceModelLogProbTransform,
    kl_k2,
    kl_k3,
)

any_batch = pytest.mark.parametrize("batch_size", [(), (2,), (2, 3)], ids=str)


class TestReferenceModelLogProbTransformLaws(TransformLaws):
    writes = frozenset({"ref_log_prob"})

    def make(self, seed=0):
        return ReferenceModelLogProbTransform(self.reference(seed))


class KLDivergenceLaws(TransformLaws):
    estimator: Any

    def before(self):
        return [ReferenceModelLogProbTransform(self.reference())]

    def make(self, seed=0):
        return KLDivergenceTransform(estimator=self.estimator)


class TestK1Laws(KLDivergenceLaws):
    estimator, writes = "k1", frozenset({"kl"})


class TestK2Laws(KLDivergenceLaws):
    estimator, writes = "k2", frozenset({"kl", "kl_estimate"})


class TestK3Laws(KLDivergenceLaws):
    estimator, writes = "k3", frozenset({"kl", "kl_estimate"})


def measure(actor, **kwargs) -> Compose:
    return compose(ReferenceModelLogProbTransform(actor), KLDivergenceTransform(**kwargs))


# What is measured.


def test_kl_is_the_policy_first():
    reference, policy = make_actor(), moved(make_actor(), scale=1.0)
    batch = play(WalkEnv((500,)), policy, 20)
    kl = measure(reference)(batch)["next", "kl"].squeeze(-1).double()
    with torch.no_grad():
        of_policy, of_reference = (
            Categorical(logits=a[0].module(batch["observation"])) for a in (policy, reference)
        )
        exact = kl_divergence(of_policy, of_reference).double()
        reverse = kl_divergence(of_reference, of_policy).double()
    # Given the states, the deviations of k1 from the exact KL are independent with mean zero.
    standard_error = (kl - exact).std() / kl.numel() ** 0.5
    assert abs(kl.mean() - exact.mean()) < 5 * standard_error
    assert (
        abs(exact.mean() - reverse.mean()) > 20 * standard_error
    )  # the other direction would be seen
    expected = of_policy.log_prob(batch["action"]) - of_reference.log_prob(batch["action"])
    assert_close(kl, expected.double(), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("estimator", "function"), [("k2", kl_k2), ("k3", kl_k3)])
def test_another_estimate_is_next_to_k1(estimator: Any, function):
    batch = play(WalkEnv((2,)), moved(make_actor()))
    plain, other = measure(make_actor())(batch), measure(make_actor(), estimator=estimator)(batch)
    assert ("next", "kl_estimate") not in plain.keys(True)
    assert_close(other["next", "kl"], plain["next", "kl"], rtol=0, atol=0)
    expected = function(batch["action_log_prob"].detach(), plain["next", "ref_log_prob"]).unsqueeze(
        -1
    )
    assert_close(other["next", "kl_estimate"], expected, rtol=0, atol=0)


@any_batch
@pytest.mark.parametrize("kind", ["categorical", "normal", "tanh_normal", "lstm", "gru"])
def test_shapes(batch_size, kind):
    actor = make_actor(kind)
    memory = memory_of(actor) if kind in ("lstm", "gru") else []
    env = WalkEnv(batch_size, discrete=kind not in ("normal", "tanh_normal"))
    env = with_transforms(env, *memory, KLConstrainedTransform(actor, 0.1, estimator="k3"))
    check_env_specs(env)
    batch = play(env, moved(actor))["next"]
    assert batch["ref_log_prob"].shape == (*batch_size, 12)
    for name in ("kl", "kl_estimate", "episode_kl", "task_reward", "kl_coeff", "reward"):
        assert batch[name].shape == (*batch_size, 12, 1)
    assert batch["kl"].abs().max() > 1e-3


@any_batch
def test_agents_keep_their_own_kl_next_to_their_own_reward(batch_size):
    actor = make_actor(agents=True)
    env = WalkEnv(batch_size, n_agents=3)
    stack, stack_again = (
        KLConstrainedTransform(actor, 0.5, keys=KLKeys(reward=("agents", "reward")), estimator="k2")
        for _ in range(2)
    )
    env = with_transforms(env, stack)
    check_env_specs(env)
    batch = play(env, moved(actor))
    agents = batch["next", "agents"]
    assert agents["ref_log_prob"].shape == (*batch_size, 12, 3)
    for name in ("kl", "kl_estimate", "episode_kl", "task_reward", "kl_coeff"):
        assert agents[name].shape == (*batch_size, 12, 3, 1)
        assert name not in batch["next"].keys()
    with torch.no_grad():
        logits = actor[0].module(batch["agents", "observation"])
    expected = batch["agents", "action_log_prob"] - Categorical(logits=logits).log_prob(
        batch["agents", "action"]
    )
    assert_close(agents["kl"].squeeze(-1), expected.detach(), atol=1e-5, rtol=0)
    assert_close(agents["reward"], agents["task_reward"] - 0.5 * agents["kl"], atol=1e-6, rtol=0)
    after = stack_again(without_kl(batch))["next", "agents"]
    for name in ("kl", "kl_estimate", "episode_kl", "reward"):
        assert_same(after[name], agents[name])


def test_log_probs_of_action_dimensions_are_summed():
    actor, policy = make_actor("normal"), moved(make_actor("normal"))
    batch = play(WalkEnv((2,), discrete=False), policy)
    assert batch["action_log_prob"].shape == (2, 12, 2)
    after = measure(actor)(batch)["next"]
    with torch.no_grad():
        difference = [
            Normal(*a[0].module(batch["observation"]))
            .log_prob(batch["action"])
            .sum(-1, keepdim=True)
            for a in (policy, actor)
        ]
    assert_close(after["kl"], difference[0] - difference[1], atol=1e-4, rtol=1e-5)
    assert after["ref_log_prob"].shape == (2, 12)


def test_all_keys_can_be_named():
    batch = play(WalkEnv((2,)), moved(make_actor())).rename_key_(
        "action_log_prob", ("old", "log_prob")
    )
    keys = KLKeys(
        log_prob=("old", "log_prob"),
        ref_log_prob="anchor",
        kl=("measured", "k1"),
        kl_estimate=("measured", "k3"),
    )
    transform = compose(
        ReferenceModelLogProbTransform(make_actor(), keys=keys),
        KLDivergenceTransform(keys=keys, estimator="k3"),
    )
    after = transform(batch)["next"]
    renamed = batch.clone().rename_key_(("old", "log_prob"), "action_log_prob")
    expected = measure(make_actor(), estimator="k3")(renamed)["next"]
    assert_close(after["anchor"], expected["ref_log_prob"], rtol=0, atol=0)
    assert_close(after["measured", "k1"], expected["kl"], rtol=0, atol=0)
    assert_close(after["measured", "k3"], expected["kl_estimate"], rtol=0, atol=0)


def test_default_keys_are_next_to_the_log_prob():
    batch = play(WalkEnv((2,)), moved(make_actor())).rename_key_(
        "action_log_prob", ("old", "log_prob")
    )
    keys = KLKeys(log_prob=("old", "log_prob"))
    transform = compose(
        ReferenceModelLogProbTransform(make_actor(), keys=keys),
        KLDivergenceTransform(keys=keys),
    )
    assert set(transform(batch)["next", "old"].keys()) == {"ref_log_prob", "kl"}


@pytest.mark.parametrize("rubbish", [float("nan"), float("inf"), -1e9])
def test_padding_has_no_kl_whatever_is_there(rubbish):
    batch = play(WalkEnv((2,)), moved(make_actor()))
    expected = measure(make_actor(), estimator="k3")(batch)["next"]
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[0, 5:] = False
    batch["collector", "mask"] = mask
    batch["action_log_prob"] = torch.where(mask, batch["action_log_prob"], rubbish)
    after = measure(make_actor(), estimator="k3")(batch)["next"]
    for name in ("kl", "kl_estimate"):
        assert (after[name][~mask] == 0).all()
        assert_close(after[name][mask], expected[name][mask], rtol=0, atol=0)


# When there is no log-prob.


def test_a_policy_that_ran_without_recording_its_log_prob_is_an_error():
    env = with_transforms(WalkEnv((2,)), ReferenceModelLogProbTransform(make_actor()))
    with pytest.raises(
        KeyError, match=r"the policy ran \(its \['logits'\] are there\).*return_log_prob=True"
    ):
        play(env, make_actor(return_log_prob=False), 2)


@pytest.mark.parametrize(
    "make_env", [lambda: WalkEnv((2,)), lambda: SerialEnv(2, WalkEnv)], ids=["plain", "serial"]
)
def test_a_random_policy_gives_zeros(make_env):
    reference, divergence = (
        ReferenceModelLogProbTransform(make_actor()),
        KLDivergenceTransform(estimator="k3"),
    )
    env = with_transforms(make_env(), reference, divergence)
    batch = play(env)["next"]
    for name in ("ref_log_prob", "kl", "kl_estimate"):
        assert (batch[name] == 0).all()


def test_on_a_batch_an_absent_log_prob_is_an_error():
    batch = play(WalkEnv((2,)))
    with pytest.raises(
        KeyError, match=r"'action_log_prob' is not in the data, got .*action.*return_log_prob=True"
    ):
        ReferenceModelLogProbTransform(make_actor())(batch)
    batch["next", "ref_log_prob"] = torch.zeros(2, 12)
    with pytest.raises(
        KeyError, match=r"'action_log_prob' is not in the data, got .*action.*return_log_prob=True"
    ):
        KLDivergenceTransform()(batch)


def test_a_divergence_without_a_reference_is_an_error():
    with pytest.raises(
        KeyError,
        match=r"'ref_log_prob' is not in the observation spec, got .*before this transform",
    ):
        with_transforms(WalkEnv((2,)), KLDivergenceTransform()).reset()
    with pytest.raises(
        KeyError, match=r"'ref_log_prob' is not in the data, got .*before this transform"
    ):
        KLDivergenceTransform()(play(WalkEnv((2,)), make_actor()))


def test_an_unknown_estimator_is_an_error():
    with pytest.raises(
        ValueError,
        match=r"`estimator` must be one of \['k1', 'k2', 'k3', 'exact', 'top_k'\], got 'k4'",
    ):
        KLDivergenceTransform(estimator="k4")  # type: ignore[arg-type]


def test_log_probs_of_different_shapes_are_an_error():
    batch = TensorDict(
        action_log_prob=torch.zeros(2),
        next=TensorDict(ref_log_prob=torch.zeros(2, 1), batch_size=2),
    )
    with pytest.raises(ValueError, match=r"must have the same shape, got \(2,\) and \(2, 1\)"):
        KLDivergenceTransform()(batch.auto_batch_size_(1))


# Which dimension is time.


class Witness(nn.Linear):
    """A linear layer that notes the shape of each call, and whether it came in recurrent mode."""

    calls: list[tuple[tuple[int, ...], bool]] = []

    def forward(self, input):
        self.calls.append((tuple(input.shape), bool(recurrent_mode())))
        return super().forward(input)


def witness_actor():
    net = TensorDictModule(Witness(N_OBS, N_ACTIONS), ["observation"], ["logits"])
    return probabilistic_actor(
        net, in_keys=["logits"], distribution_class=Categorical, return_log_prob=True
    )


def unnamed(batch):
    batch = batch.clone()
    batch.names = [None] * batch.ndim
    return batch


@pytest.mark.parametrize(
    ("kwargs", "prepare", "shape", "recurrent"),
    [
        ({}, lambda batch: batch, (2, 12), True),
        ({}, lambda batch: batch[0], (12,), True),
        ({}, lambda batch: batch.reshape(-1), (24,), False),
        ({}, unnamed, (2, 12), False),
        ({"time_dim": -1}, unnamed, (2, 12), True),
        ({"time_dim": 1}, unnamed, (2, 12), True),
        ({"time_dim": 0}, lambda batch: batch.reshape(-1), (24,), True),
    ],
    ids=["named", "one row", "flat", "unnamed", "last", "given", "flat given"],
)
def test_the_reference_is_evaluated_once_in_the_mode_of_the_batch(
    kwargs, prepare, shape, recurrent
):
    batch = prepare(play(WalkEnv((2,)), make_actor()))
    Witness.calls.clear()
    ReferenceModelLogProbTransform(witness_actor(), **kwargs)(batch)
    assert Witness.calls == [((*shape, N_OBS), recurrent)]


@pytest.mark.parametrize("time_dim", [0, -2, 2])
def test_time_must_be_the_last_dimension(time_dim):
    batch = play(WalkEnv((2,)), make_actor())
    with pytest.raises(
        ValueError,
        match=rf"`time_dim` must be the last .*, got {time_dim} for .* \(2, 12\): transpose",
    ):
        ReferenceModelLogProbTransform(make_actor(), time_dim=time_dim)(batch)


def test_a_transposed_batch_is_an_error():
    batch = play(WalkEnv((2,)), make_actor()).transpose(0, 1)
    with pytest.raises(
        ValueError, match=r"`time_dim` must be the last .*, got 0 for a batch of shape \(12, 2\)"
    ):
        ReferenceModelLogProbTransform(make_actor())(batch)


def test_a_batch_without_dimensions_has_no_time():
    step = play(WalkEnv(()), make_actor())[0]
    with pytest.raises(
        ValueError, match=r"`time_dim` must be the last .*, got -1 for a batch of shape \(\)"
    ):
        ReferenceModelLogProbTransform(make_actor(), time_dim=-1)(step)
    after = ReferenceModelLogProbTransform(make_actor())(step)["next", "ref_log_prob"]
    assert_close(after, step["action_log_prob"].detach(), atol=1e-6, rtol=0)


# Envs that come from elsewhere.


@pytest.mark.filterwarnings("ignore:.*in the step after its end")
def test_an_env_that_resets_itself():
    actor = sharp(
        probabilistic_actor(
            TensorDictModule(nn.Linear(4, 2), ["observation"], ["logits"]),
            in_keys=["logits"],
            distribution_class=Categorical,
            return_log_prob=True,
        )
    )
    env = GymEnv("CartPole-v1", num_envs=2, categorical_action_encoding=True)
    env.append_transform(KLConstrainedTransform(actor, 0.1))
    check_env_specs(env)
    batch = play(env, moved(actor), 60)
    assert batch["next", "done"].any()
    bare = batch.exclude(
        *(("next", n) for n in ("kl", "ref_log_prob", "kl_coeff", "episode_kl", "task_reward"))
    )
    bare["next", "reward"] = batch["next", "task_reward"]
    after = KLConstrainedTransform(actor, 0.1)(bare)
    for name in ("kl", "reward", "episode_kl"):
        assert_same(after["next", name], batch["next", name])
    starts = batch["next", "done"][:, :-1]
    assert_same(batch["next", "episode_kl"][:, 1:][starts], batch["next", "kl"][:, 1:][starts])
