"""Policies that did not record their log-prob: an error, or on request their log-prob of today."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs import SerialEnv, check_env_specs
from torchrl.modules import Actor

from tests.helpers import (
    N_OBS,
    SpyController,
    WalkEnv,
    assert_same,
    collect,
    make_actor,
    memory_of,
    moved,
    play,
    sharp,
    total,
    with_transforms,
    without_kl,
)
from torchrl_kl import (
    FrozenActor,
    KLConstrainedTransform,
    KLRewardTransform,
    ReferenceModelLogProbTransform,
)

every_kind = pytest.mark.parametrize(
    "kind", ["categorical", "normal", "tanh_normal", "lstm", "gru"]
)


def pair(kind: str = "categorical") -> tuple[Any, Any, Any]:
    """The reference, a policy that records its log-prob, and the same one that does not."""
    # The nearer a squashed action is to its bound, the more of its atanh is rounded away.
    reference = sharp(make_actor(kind), scale=0.1 if kind == "tanh_normal" else 0.5)
    loud = moved(reference, scale=0.1)
    quiet = make_actor(kind, return_log_prob=False)
    quiet.load_state_dict(loud.state_dict())
    return reference, loud, quiet


def asking(
    policy, reference, coeff: Any = 0.5, *, make: Any = KLConstrainedTransform, **kwargs
) -> Any:
    """A transform that asks the policy for what it did not record."""
    frozen = FrozenActor(reference, policy=policy, recompute_log_prob=True)
    return make(policy, coeff, reference=frozen, **kwargs)


def env_of(kind: str, actor, *transforms) -> Any:
    memory = memory_of(actor) if kind in ("lstm", "gru") else []
    discrete = kind not in ("normal", "tanh_normal")
    return with_transforms(SerialEnv(2, lambda: WalkEnv(discrete=discrete)), *memory, *transforms)


def written(batch) -> Any:
    return without_kl(batch).exclude("ref_h", "ref_c", ("next", "ref_h"), ("next", "ref_c"))


@every_kind
def test_the_policy_is_asked_in_env_and_batch(kind):
    reference, loud, quiet = pair(kind)
    near = 1e-3 if kind == "tanh_normal" else 1e-5
    expected = collect(
        env_of(kind, loud, KLConstrainedTransform(reference, 0.5)), loud, frames=24, batches=1
    )[0]
    assert expected["next", "kl"].abs().max() > 1e-2
    asked = asking(quiet, reference)
    env = env_of(kind, loud, asked)
    check_env_specs(env)
    inside = collect(env, quiet, frames=24, batches=1)[0]
    assert "action_log_prob" not in inside.keys()
    outside = asking(quiet, reference)(written(inside))
    one_piece = asking(quiet, reference, make=KLRewardTransform)(written(inside))["next", "reward"]
    for name in ("kl", "reward", "episode_kl"):
        assert_close(inside["next", name], expected["next", name], atol=near, rtol=near)
        assert_close(outside["next", name], expected["next", name], atol=near, rtol=near)
    assert_close(one_piece.detach(), expected["next", "reward"], atol=near, rtol=near)
    for batch in (inside, outside):
        assert not [key for key in (*batch.keys(), *batch["next"].keys()) if key.startswith("_")]


def test_what_was_recorded_is_what_counts():
    reference, loud, _ = pair()
    batch = play(WalkEnv((2,)), loud)
    expected = KLConstrainedTransform(reference, 0.5)(batch)["next", "kl"]
    after = asking(moved(loud, seed=7), reference)
    assert_close(after(batch)["next", "kl"], expected, rtol=0, atol=0)
    inside = play(with_transforms(WalkEnv((2,)), after), loud)
    assert_close(inside["next", "kl"], expected, atol=1e-6, rtol=0)


def test_it_is_the_log_prob_of_today():
    reference, loud, quiet = pair()
    batch = play(WalkEnv((2,)), quiet)
    stack = asking(quiet, reference)
    stack(batch)
    quiet.load_state_dict(moved(loud, seed=7).state_dict())  # the policy learns
    with torch.no_grad():
        log_probs = [a[0].module(batch["observation"]).log_softmax(-1) for a in (quiet, reference)]
    log_prob, ref_log_prob = (x.gather(-1, batch["action"].unsqueeze(-1)) for x in log_probs)
    assert_close(stack(batch)["next", "kl"], log_prob - ref_log_prob, atol=1e-5, rtol=0)


def test_without_another_reference_the_policy_is_held_to_what_it_was():
    _, loud, quiet = pair()
    before = copy.deepcopy(quiet)
    frozen = FrozenActor(quiet, recompute_log_prob=True)
    stack = KLConstrainedTransform(quiet, 0.5, reference=frozen)
    batch = play(WalkEnv((2,)), quiet)
    assert stack(batch)["next", "kl"].abs().max() <= 1e-6
    quiet.load_state_dict(moved(loud, seed=7).state_dict())
    assert_same(stack(batch)["next", "kl"], asking(quiet, before)(batch)["next", "kl"])
    assert stack(batch)["next", "kl"].abs().max() > 1e-2


def test_the_policy_is_left_as_it_is():
    reference, _, quiet = pair()
    quiet.train()
    stack: Any = asking(quiet, reference)
    names = set(KLConstrainedTransform(reference, 0.5).state_dict())
    assert set(stack.state_dict()) == names
    env = with_transforms(WalkEnv((2,)), stack)
    play(env, quiet)
    stack.to(torch.float64)
    assert quiet.training
    assert all(
        p.dtype == torch.float32 and p.requires_grad and p.grad is None for p in quiet.parameters()
    )
    assert not stack(play(WalkEnv((2,)), quiet))["next", "kl"].requires_grad


@pytest.mark.parametrize("layer", [nn.Dropout(), nn.BatchNorm1d(N_OBS)])
def test_the_policy_is_asked_in_eval_mode(layer):
    # Noise of dropout would be measured as divergence; a measurement must not move statistics.
    actor = make_actor(return_log_prob=False)
    actor[0].module = nn.Sequential(layer, actor[0].module)
    stack: Any = asking(actor.eval(), actor)
    batch = play(WalkEnv((2,)), actor).reshape(-1)
    before = copy.deepcopy(actor.train().state_dict())
    assert stack(batch)["next", "kl"].abs().max() <= 1e-6
    assert all(part.training for part in actor.modules())
    assert_close(actor.state_dict(), before, rtol=0, atol=0)


def test_random_actions_are_told_from_the_policys():
    reference, _, quiet = pair()
    controller = SpyController()
    env = with_transforms(
        WalkEnv((2,)),
        asking(quiet, reference, controller, update_every=1),
    )
    check_env_specs(env)
    batch = play(env)
    assert (batch["next", "kl"] == 0).all()
    assert controller.calls == []
    batch = play(env, quiet)
    assert total(controller)[0] == batch["next", "done"].sum()
    hidden = make_actor(return_log_prob=False)
    hidden.select_out_keys("action")
    env = with_transforms(WalkEnv((2,)), asking(hidden, reference))
    with pytest.raises(
        ValueError, match=r"`actor` writes only \['action'\]: .* could not be told from random ones"
    ):
        play(env, hidden)


def test_copies_ask_the_same_policy_and_no_other_process_does():
    reference, loud, quiet = pair()
    stack = asking(quiet, reference)
    copies: list[Any] = [copy.deepcopy(stack), stack.clone()]
    batch = play(WalkEnv((2,)), quiet)
    quiet.load_state_dict(moved(loud, seed=7).state_dict())
    for copied in copies:
        assert_close(copied(batch)["next", "kl"], stack(batch)["next", "kl"], rtol=0, atol=0)
    with pytest.raises(
        pickle.PicklingError, match="`recompute_log_prob` cannot be sent to another process"
    ):
        pickle.dumps(stack)


def test_in_a_replay_buffer_samples_are_scored_with_the_policy_of_today():
    reference, loud, quiet = pair()
    batch = play(WalkEnv((2,)), quiet).reshape(-1)
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(len(batch)),
        sampler=SamplerWithoutReplacement(shuffle=False),
        batch_size=len(batch),
        transform=asking(quiet, reference),
    )
    buffer.extend(batch)
    kls = []
    for seed in (0, 7):
        quiet.load_state_dict(moved(loud, seed=seed).state_dict())
        kls.append(buffer.sample()["next", "kl"])
        assert_same(
            kls[-1],
            asking(quiet, reference)(batch)["next", "kl"],
        )
    assert (kls[0] - kls[1]).abs().max() > 1e-2


def test_agents_that_share_a_reward():
    reference, quiet = (
        make_actor(agents=True),
        moved(make_actor(agents=True, return_log_prob=False)),
    )
    env = WalkEnv((2,), n_agents=3, shared_reward=True)
    stack = asking(quiet, reference, 0.5, sum_agents=True)
    batch = play(with_transforms(env, stack), quiet)
    with torch.no_grad():
        logits = [
            a[0].module(batch["agents", "observation"]).log_softmax(-1) for a in (quiet, reference)
        ]
    log_prob, ref_log_prob = (
        x.gather(-1, batch["agents", "action"].unsqueeze(-1)).sum((-1, -2)) for x in logits
    )
    assert_close(batch["next", "kl"].squeeze(-1), log_prob - ref_log_prob, atol=1e-5, rtol=0)


def test_actor_must_have_a_distribution_with_a_reference_too():
    with pytest.raises(
        TypeError, match=r"`actor` must be a probabilistic actor .*ProbabilisticActor"
    ):
        FrozenActor(make_actor(), policy=Actor(nn.Linear(N_OBS, 2)), recompute_log_prob=True)


@pytest.mark.parametrize("option", ["recompute_log_prob", "zero_states"])
def test_options_of_a_frozen_actor_are_given_to_it(option):
    options: Any = {option: True}
    with pytest.raises(
        ValueError,
        match=rf"`{option}` must be given to the FrozenActor.*FrozenActor\(actor, {option}",
    ):
        ReferenceModelLogProbTransform(make_actor(), reference=FrozenActor(make_actor()), **options)


def test_a_reference_that_would_ask_another_policy_is_refused():
    reference = FrozenActor(make_actor(), recompute_log_prob=True)
    with pytest.raises(ValueError, match=r"asks another policy than `actor`.*policy=actor"):
        KLConstrainedTransform(make_actor(return_log_prob=False), 0.5, reference=reference)
