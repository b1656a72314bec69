"""What is measured, in which shape, and under which names."""

import copy
import dataclasses
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import Categorical
from torch.testing import assert_close
from torchrl.envs import RenameTransform, SerialEnv, check_env_specs
from torchrl.modules import recurrent_mode

from tests.helpers import (
    N_ACTIONS,
    N_OBS,
    WalkEnv,
    compose,
    make_actor,
    moved,
    play,
    policy,
    probabilistic_actor,
    with_transforms,
)
from torchrl_kl import (
    KLConstrainedTransform,
    KLDivergenceTransform,
    KLKeys,
    KLRewardTransform,
    ReferenceModelLogProbTransform,
)


def test_a_policy_that_ran_without_recording_its_log_prob_is_an_error():
    env = with_transforms(WalkEnv((2,)), ReferenceModelLogProbTransform(make_actor()))
    with pytest.raises(KeyError, match=r"the policy ran \(its \['logits'\] are.*return_log_prob="):
        play(env, make_actor(return_log_prob=False), 2)


@pytest.mark.parametrize("kind", [ReferenceModelLogProbTransform, KLRewardTransform])
def test_an_actor_that_does_not_record_is_refused_when_it_is_built(kind):
    actor = make_actor(return_log_prob=False)
    with pytest.raises(ValueError, match="`actor` must record .* or name the entry that it rec"):
        kind(actor)
    keys = KLKeys(log_prob="of_another_sampler")
    ReferenceModelLogProbTransform(actor, keys=keys)


def test_a_random_policy_gives_zeros():
    parts = ReferenceModelLogProbTransform(make_actor()), KLDivergenceTransform(estimator="k3")
    batch = play(with_transforms(SerialEnv(2, WalkEnv), *parts))["next"]
    for name in ("ref_log_prob", "kl", "kl_estimate"):
        assert (batch[name] == 0).all()


# What is missing or does not fit.


@pytest.mark.parametrize(
    ("entries", "error", "text"),
    [
        ({}, KeyError, "^'action_log_prob' is not in the data: .*return_log_prob=True"),
        ({"log_prob": 2}, KeyError, "'ref_log_prob' is not in the data: .*have nothing"),
        ({"log_prob": 2, "ref": (2, 1)}, ValueError, r"the same shape, got \(2,\) and \(2, 1\)"),
    ],
    ids=["policy", "reference", "shapes"],
)
def test_a_log_prob_that_is_missing_or_does_not_fit(entries, error, text):
    batch = TensorDict(action=torch.zeros(2), next=TensorDict(batch_size=2), batch_size=2)
    if "log_prob" in entries:
        batch["action_log_prob"] = torch.zeros(entries["log_prob"])
    if "ref" in entries:
        batch["next", "ref_log_prob"] = torch.zeros(entries["ref"])
    with pytest.raises(error, match=text):
        KLDivergenceTransform()(batch)


def test_a_reference_must_be_in_the_env_and_an_estimator_known():
    with pytest.raises(KeyError, match="'ref_log_prob' is not in the observation spec"):
        with_transforms(WalkEnv((2,)), KLDivergenceTransform()).reset()
    with pytest.raises(ValueError, match=r"must be one of \['k1', .*'top_k'\], got 'k4'"):
        KLDivergenceTransform(estimator="k4")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="`sum_agents` must be True or False, got 'sum'"):
        KLDivergenceTransform(sum_agents="sum")  # type: ignore[arg-type]


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
    transform = ReferenceModelLogProbTransform(witness_actor(), **kwargs)
    transform(batch)  # the first time, it looks at the weights in a pass of its own
    Witness.calls.clear()
    transform(batch)
    assert Witness.calls == [((*shape, N_OBS), recurrent)]


@pytest.mark.parametrize("time_dim", [0, -2, 2])
def test_time_must_be_the_last_dimension(time_dim):
    batch = play(WalkEnv((2,)), make_actor())
    with pytest.raises(ValueError, match=rf"must be the last .*, got {time_dim} for .*: transpose"):
        ReferenceModelLogProbTransform(make_actor(), time_dim=time_dim)(batch)


def test_a_batch_without_dimensions_has_no_time():
    step = play(WalkEnv(()), make_actor())[0]
    with pytest.raises(ValueError, match=r"must be the last .*, got -1 for a batch of shape \(\)"):
        ReferenceModelLogProbTransform(make_actor(), time_dim=-1)(step)
    after = ReferenceModelLogProbTransform(make_actor())(step)["next", "ref_log_prob"]
    assert_close(after, step["action_log_prob"].detach(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("flat", [False, True])
def test_rows_scored_a_few_at_a_time_give_the_same(flat):
    batch = play(WalkEnv((7,)), moved(make_actor()), 4)
    batch, sizes = batch.reshape(-1) if flat else batch, []
    whole, parts = (
        KLConstrainedTransform(make_actor(), 0.1, estimator="exact", chunk_size=size)
        for size in (None, 3)
    )
    expected = whole(batch)["next"]
    net: Any = parts.reference.actor[0].module
    net.register_forward_hook(lambda _, x, y: sizes.append(len(y)))
    actual = parts(batch)["next"]
    for key in ("kl", "ref_log_prob", "reward", "kl_estimate"):
        assert_close(actual[key], expected[key], atol=1e-6, rtol=0.0)
    assert sizes == ([3] * 9 + [1] if flat else [3, 3, 1])


# Names of the entries.


NAMES = [
    field.name
    for field in dataclasses.fields(KLKeys)
    if field.name not in ("log_prob", "penalized", "prefix")
]
OF_KL = {"ref_log_prob", "kl", "kl_estimate", "episode_kl", "top_k"}


def resolved(keys: KLKeys, *args, **kwargs) -> dict[str, object]:
    found = keys.resolve(*args, **kwargs)
    return {name: getattr(found, name) for name in NAMES}


def test_the_kl_is_next_to_the_log_prob_and_the_penalty_next_to_the_reward():
    assert resolved(KLKeys()) == {name: name for name in NAMES}
    keys = KLKeys(reward=("agents", "reward"))
    expected = {name: ("policy" if name in OF_KL else "agents", name) for name in NAMES}
    assert resolved(keys, ("policy", "log_prob")) == expected
    assert resolved(dataclasses.replace(keys, log_prob=("policy", "log_prob"))) == expected
    summed = resolved(keys, ("agents", "action_log_prob"), sum_agents=True)
    assert [summed[name] for name in ("kl", "kl_estimate")] == ["kl", "kl_estimate"]
    assert summed["ref_log_prob"] == ("agents", "ref_log_prob")


def test_a_further_stack_has_a_prefix_for_what_it_writes():
    unchanged = {"reward", "done", "top_k"}
    expected = {name: name if name in unchanged else f"second_{name}" for name in NAMES}
    assert resolved(KLKeys.named("second")) == expected
    named = KLKeys.named("second", reward=("agents", "bonus"), kl="mine").resolve()
    assert (named.kl, named.kl_coeff) == ("mine", ("agents", "second_kl_coeff"))
    assert named.recorded.key == "action_log_prob"


def test_two_stacks_on_two_rewards():
    batch = play(WalkEnv((2,)), policy())
    batch["next", "bonus"] = torch.ones(2, 12, 1)
    first = KLConstrainedTransform(make_actor(), 0.1)
    keys = KLKeys.named("second", reward="bonus")
    after = compose(first, KLConstrainedTransform(make_actor(seed=4), 0.5, keys=keys))(batch)[
        "next"
    ]
    assert_close(after["reward"], batch["next", "reward"] - 0.1 * after["kl"])
    assert_close(after["bonus"], 1 - 0.5 * after["second_kl"])
    assert (after["kl"] != after["second_kl"]).all()
    other: Any = KLRewardTransform(make_actor(), 0.5, out_keys=[("other", "reward")])
    env = with_transforms(WalkEnv((2,)), other, KLConstrainedTransform(make_actor(), 0.1))
    check_env_specs(env)
    after = play(env, policy())["next"]
    assert_close(after["other", "reward"], after["task_reward"] - 0.5 * after["kl"])
    assert_close(after["reward"], after["task_reward"] - 0.1 * after["kl"])


def test_the_penalized_reward_may_go_elsewhere():
    keys = KLKeys(penalized=("other", "reward"))
    stack = KLConstrainedTransform(make_actor(), 0.1, keys=keys)
    env = with_transforms(WalkEnv((2,)), copy.deepcopy(stack))
    check_env_specs(env)
    batch = play(WalkEnv((2,)), policy())
    for after in (play(env, policy())["next"], stack(batch)["next"]):
        assert_close(after["other", "reward"], after["reward"] - 0.1 * after["kl"])
        assert_close(after["reward"], batch["next", "reward"])
        assert (after["other", "kl_coeff"] == 0.1).all()


@pytest.mark.parametrize(
    ("keys", "error", "text"),
    [
        (KLKeys(kl_coeff="b", task_reward="t"), RuntimeError, r"would overwrite \['ref_log_prob'"),
        (KLKeys(kl="x", episode_kl="x"), ValueError, "must name different entries, got x for"),
        ("kl", TypeError, "`keys` must be KLKeys, got str"),
    ],
)
def test_keys_that_cannot_be(keys, error, text):
    env = with_transforms(WalkEnv((2,)), KLConstrainedTransform(make_actor(), 0.1))
    with pytest.raises(error, match=text):
        env.append_transform(KLConstrainedTransform(make_actor(), 0.1, keys=keys)).reset()


def test_a_stack_writes_where_its_keys_say():
    """Also where the reward is in another branch than the KL."""
    reward = ("task", "inner", "reward")
    named: Any = {name: ("of", name) for name in OF_KL - {"top_k"}}
    keys = KLKeys(**named, reward=reward)
    renamed = RenameTransform(["reward"], [reward])
    stack = KLConstrainedTransform(make_actor(), 0.1, keys=keys, estimator="k3")
    env = with_transforms(WalkEnv((2,)), renamed, stack)
    check_env_specs(env)
    inside, bare = play(env, policy())["next"], play(WalkEnv((2,)), policy())
    plain = KLConstrainedTransform(make_actor(), 0.1, estimator="k3")(bare)["next"]
    outside = stack(play(with_transforms(WalkEnv((2,)), renamed.clone()), policy()))["next"]
    for data in (inside, outside):
        assert set(data["of"].keys()) == set(named)
        for name in named:
            assert_close(data["of", name], plain[name], atol=1e-5, rtol=1e-5)
        for name in ("reward", "task_reward", "kl_coeff"):
            assert_close(data["task", "inner", name], plain[name], atol=1e-5, rtol=1e-5)
