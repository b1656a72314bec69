"""Names of the entries: the defaults, what is next to what, further stacks, and a log-prob in
parts.
"""

import dataclasses

import pytest
import torch
from torch.testing import assert_close

from tests.helpers import WalkEnv, compose, make_actor, play, policy, with_transforms
from torchrl_kl import KLConstrainedTransform, KLKeys

NAMES = (
    "ref_log_prob", "kl", "kl_estimate", "episode_kl", "reward", "task_reward", "kl_coeff", "done",
    "top_k",
)  # fmt: skip


def resolved(keys: KLKeys, *args, **kwargs) -> dict[str, object]:
    found = keys.resolve(*args, **kwargs)
    return {name: getattr(found, name) for name in NAMES}


def test_by_default_each_entry_has_its_own_name_at_the_root():
    assert resolved(KLKeys()) == {name: name for name in NAMES}
    assert KLKeys().resolve().log_prob == "action_log_prob"


def test_the_kl_is_next_to_the_log_prob_and_the_penalty_next_to_the_reward():
    keys = KLKeys(reward=("agents", "reward"))
    near_log_prob = {"ref_log_prob", "kl", "kl_estimate", "episode_kl", "top_k"}
    expected = {name: ("policy" if name in near_log_prob else "agents", name) for name in NAMES}
    assert resolved(keys, ("policy", "log_prob")) == expected
    assert resolved(dataclasses.replace(keys, log_prob=("policy", "log_prob"))) == expected


def test_agents_that_are_summed_have_one_kl_at_the_root():
    found = KLKeys().resolve(("agents", "action_log_prob"), sum_agents=True)
    assert (found.kl, found.kl_estimate, found.episode_kl) == ("kl", "kl_estimate", "episode_kl")
    assert found.ref_log_prob == ("agents", "ref_log_prob")


def test_estimate_and_sum_follow_the_kl():
    found = KLKeys(kl=("measured", "k1")).resolve()
    assert found.kl_estimate == ("measured", "kl_estimate")
    assert found.episode_kl == ("measured", "episode_kl")


@pytest.mark.parametrize("name", NAMES)
def test_each_can_be_named(name):
    keys = dataclasses.replace(KLKeys(), **{name: ("some", "where")})  # type: ignore[arg-type]
    assert getattr(keys.resolve(), name) == ("some", "where")
    others = {other for other in NAMES if getattr(keys.resolve(), other) != other}
    follow = {"kl": {"kl_estimate", "episode_kl"}, "reward": {"task_reward", "kl_coeff", "done"}}
    assert others == {name} | follow.get(name, set())


def test_whether_the_done_flag_was_named_is_known():
    assert not KLKeys().resolve().done_named
    assert KLKeys(done="done").resolve().done_named


def test_a_further_stack_has_a_prefix_for_what_it_writes():
    expected = {name: f"second_{name}" for name in NAMES} | {
        name: name for name in ("reward", "done", "top_k")
    }
    assert resolved(KLKeys.named("second")) == expected
    named = KLKeys.named("second", reward=("agents", "bonus"), kl="mine").resolve()
    assert named.kl == "mine"
    assert named.kl_coeff == ("agents", "second_kl_coeff")
    assert named.task_reward == ("agents", "second_task_reward")
    assert named.recorded.key == "action_log_prob"


def test_they_are_equal_by_value_and_cannot_be_changed():
    assert KLKeys(reward="wage") == KLKeys(reward="wage") != KLKeys()
    with pytest.raises(dataclasses.FrozenInstanceError):
        KLKeys().reward = "wage"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("parts", "holder"),
    [
        (["one_log_prob", "two_log_prob"], ()),
        ([("agents", "one_log_prob"), ("agents", "two_log_prob")], ("agents",)),
        ([("agents", "one", "log_prob"), ("agents", "two", "log_prob")], ("agents",)),
        ([("one", "log_prob"), ("two", "log_prob")], ()),
        (["log_prob"], ()),
    ],
    ids=str,
)
def test_a_log_prob_in_parts_is_measured_where_all_parts_are(parts, holder):
    found = KLKeys(log_prob=parts).resolve()
    kl = (*holder, "kl") if holder else "kl"
    assert found.kl == kl
    assert found.log_prob == (parts if len(parts) > 1 else parts[0])
    assert KLKeys().resolve(parts).kl == kl


def test_two_stacks_in_one_env_and_on_one_batch():
    """A second one, on the reward that the first has penalized from a copy."""

    def stacks(first, second):
        return (
            KLConstrainedTransform(make_actor(), first),
            KLConstrainedTransform(
                make_actor(seed=4), second, keys=KLKeys.named("second", reward="bonus")
            ),
        )

    batch = play(WalkEnv((2,)), policy())
    batch["next", "bonus"] = torch.ones(2, 12, 1)
    after = compose(*stacks(0.1, 0.5))(batch)["next"]
    assert_close(after["reward"], batch["next", "reward"] - 0.1 * after["kl"])
    assert_close(after["bonus"], 1 - 0.5 * after["second_kl"])
    assert (after["kl"] != after["second_kl"]).all()
    written = {name for name in after.keys() if name.startswith("second_")}
    assert written == {
        f"second_{n}" for n in ("ref_log_prob", "kl", "episode_kl", "task_reward", "kl_coeff")
    }


def test_a_stack_writes_where_its_keys_say():
    keys = KLKeys(
        ref_log_prob=("kl", "ref"), kl=("kl", "k1"), episode_kl=("kl", "sum"),
        kl_estimate=("kl", "k3"), task_reward=("kl", "task"), kl_coeff=("kl", "beta"),
    )  # fmt: skip
    stack = KLConstrainedTransform(make_actor(), 0.1, keys=keys, estimator="k3")
    env = with_transforms(WalkEnv((2,)), stack)
    inside = play(env, policy())["next"]
    outside = stack(play(WalkEnv((2,)), policy()))["next"]
    plain = KLConstrainedTransform(make_actor(), 0.1, estimator="k3")(play(WalkEnv((2,)), policy()))
    names = {
        "ref": "ref_log_prob",
        "k1": "kl",
        "sum": "episode_kl",
        "k3": "kl_estimate",
        "task": "task_reward",
        "beta": "kl_coeff",
    }
    for data in (inside, outside):
        assert set(data["kl"].keys()) == set(names)
        for name, default in names.items():
            assert_close(data["kl", name], plain["next", default], atol=1e-5, rtol=1e-5)
