"""The estimators "exact" and "top_k" measure the same in every data path."""

from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torch.distributions import Categorical, OneHotCategorical
from torch.testing import assert_close
from torchrl.collectors import Collector
from torchrl.collectors.utils import split_trajectories
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import check_env_specs
from torchrl.modules import OneHotCategorical as TorchRLOneHotCategorical

from tests.helpers import (
    N_ACTIONS,
    N_OBS,
    WalkEnv,
    assert_within,
    collect,
    make_actor,
    moved,
    play,
    ulps,
    without_kl,
)
from tests.transforms.estimated import (
    as_policy,
    both,
    categorical_actor,
    env_for,
    kl_between,
    make,
    params_of,
    parts,
    rounding_of,
    stack,
)
from torchrl_kl import (
    KLKeys,
)


def expected_kl(kind: str, policy, reference, batch) -> torch.Tensor:
    """The KL of each step from the bare networks, trailing 1."""
    p, q = params_of(kind, policy, batch), params_of(kind, reference, batch)
    return kl_between(kind, p, q, batch)


EXACT = [("exact", kind) for kind in ("categorical", "normal", "tanh_normal", "masked", "agents")]
TOP_K = [("top_k", kind) for kind in ("categorical", "masked", "agents")]
RECURRENT = [(estimator, kind) for estimator in ("exact", "top_k") for kind in ("lstm", "gru")]


def entry(kind: str, batch, name: str) -> torch.Tensor:
    return batch["next", "agents", name] if kind == "agents" else batch["next", name]


def reward_key(kind: str) -> Any:
    return ("agents", "reward") if kind == "agents" else "reward"


@pytest.mark.parametrize(("estimator", "kind"), EXACT + TOP_K + RECURRENT)
def test_every_data_path_gives_the_same_numbers(estimator, kind):
    actor = make(kind)
    policy = moved(actor)
    arguments: dict[str, Any] = {"keys": KLKeys(reward=reward_key(kind))}
    env = env_for(kind, actor, stack(actor, estimator, **arguments), longest=9)
    check_env_specs(env)
    batches = collect(env, as_policy(policy, estimator), frames=24, batches=2)
    postproc = stack(actor, estimator, **arguments)
    for batch in batches:
        inside = entry(kind, batch, "kl_estimate")
        assert inside.min() > 0 if estimator == "exact" else inside.abs().min() > 0
        if (estimator, kind) in EXACT:
            bound = rounding_of(kind, estimator, policy, actor, batch)
            assert_within(inside, expected_kl(kind, policy, actor, batch), bound)
        bound = rounding_of(kind, estimator, policy, actor, batch, whole=False)
        bare = without_kl(batch)
        assert_within(entry(kind, postproc(bare), "kl_estimate"), inside, bound)
        # Flat and shuffled, as in a replay buffer: a recurrent reference reads the recorded states.
        flat = (
            batch.set("expected", inside)
            .set("bound", bound)
            .reshape(-1)[torch.randperm(batch.numel())]
        )
        for name in ("kl", "kl_estimate", "kl_coeff", "task_reward", "episode_kl", "ref_log_prob"):
            flat["next"].pop(("agents", name) if kind == "agents" else name)
        transform = stack(actor, estimator, **arguments)
        buffer = ReplayBuffer(
            storage=LazyTensorStorage(len(flat)), batch_size=16, transform=transform
        )
        buffer.extend(flat)
        sample: Any = buffer.sample()
        assert_within(entry(kind, sample, "kl_estimate"), sample["expected"], sample["bound"])


@pytest.mark.parametrize("distribution", [OneHotCategorical, TorchRLOneHotCategorical])
@both
def test_one_hot_actions_are_measured_as_numbers_are(distribution, estimator):
    actor, numbers = categorical_actor(distribution), categorical_actor(Categorical)
    batch = as_policy(moved(actor), estimator)(
        TensorDict(observation=torch.randn(64, N_OBS), batch_size=64)
    )
    batch["next"] = TensorDict(reward=torch.zeros(64, 1), batch_size=64)
    assert batch["action"].shape == (64, N_ACTIONS)
    after = stack(actor, estimator)(batch)
    batch["action"] = batch["action"].long().argmax(-1)
    expected = stack(numbers, estimator)(batch)
    bound = rounding_of("categorical", estimator, None, numbers, batch, whole=False)
    assert_within(after["next", "kl_estimate"], expected["next", "kl_estimate"], bound)


@both
def test_agents_that_share_a_reward_are_summed(estimator):
    actor = make("agents")
    env = WalkEnv((2,), n_agents=3, shared_reward=True)
    batch = play(env, as_policy(moved(actor), estimator))
    after = stack(actor, estimator, sum_agents=True)(batch)["next", "kl_estimate"]
    keys = KLKeys(log_prob=("agents", "action_log_prob"))
    each = parts(actor, estimator, keys=keys)(batch)["next", "agents", "kl_estimate"]
    assert after.shape == (2, 12, 1)
    assert_within(after, each.sum(-2), ulps(each.abs().sum(-2)))


@pytest.mark.parametrize(("estimator", "kind"), EXACT + TOP_K)
def test_padding_has_no_kl_and_needs_no_parameters(estimator, kind):
    # A padded scale is 0, a padded action mask allows nothing: neither is a distribution.
    actor = make(kind)
    transform = stack(actor, estimator, keys=KLKeys(reward=reward_key(kind)))
    (batch,) = collect(
        env_for(kind, actor), as_policy(moved(actor), estimator), frames=24, batches=1
    )
    padded = split_trajectories(batch)
    mask = padded["collector", "mask"]
    assert not mask.all()
    expected, after = (
        entry(kind, transform(batch), "kl_estimate"),
        entry(kind, transform(padded), "kl_estimate"),
    )
    bound = rounding_of(kind, estimator, None, actor, batch, whole=False).max()
    one, other = (x.flatten().sort().values for x in (after[mask], expected))
    assert_within(one, other, bound)
    assert (after[~mask] == 0).all()


def test_padding_is_no_distribution_even_where_torch_checks_its_parameters():
    actor = make_actor("normal", distribution_kwargs={"validate_args": True})
    (batch,) = collect(WalkEnv((2,), discrete=False), moved(actor), frames=24, batches=1)
    padded = split_trajectories(batch)
    mask = padded["collector", "mask"]
    assert (padded["scale"][~mask] == 0).all()
    with pytest.raises(ValueError, match="Expected parameter scale"):
        actor.build_dist_from_params(padded)
    after = stack(actor, "exact")(padded)["next", "kl_estimate"]
    expected = expected_kl("normal", moved(actor), actor, padded)[mask]
    bound = rounding_of("normal", "exact", moved(actor), actor, batch).max()
    assert_within(after[mask], expected, bound)
    assert (after[~mask] == 0).all()


@pytest.mark.parametrize("dim", [0, 1])
def test_padding_of_a_lazy_stack_is_that_of_the_dense_batch(dim):
    # As many rows, steps and actions: a mask would fit the parameters of a part of the stack, too.
    actor = make("categorical")
    batch = play(WalkEnv((N_ACTIONS,)), moved(actor), N_ACTIONS)
    batch["collector", "mask"] = torch.arange(N_ACTIONS).unsqueeze(-1) >= torch.arange(N_ACTIONS)
    transform = stack(actor, "exact", time_dim=-1)
    expected = transform(batch)["next", "kl_estimate"]
    lazy = lazy_stack([*batch.unbind(dim)], dim)
    assert_close(transform(lazy)["next", "kl_estimate"], expected, rtol=0, atol=0)


@pytest.mark.parametrize(("estimator", "kind"), EXACT + TOP_K)
def test_fake_data_holds_no_parameters(estimator, kind):
    actor = make(kind)
    collector = Collector(
        env_for(kind, actor),
        as_policy(moved(actor), estimator),
        frames_per_batch=8,
        total_frames=8,
        auto_register_policy_transforms=False,
        postproc=stack(actor, estimator, keys=KLKeys(reward=reward_key(kind))),
    )
    try:
        fake: Any = collector.fake_tensordict()
        batch: Any = next(iter(collector))
    finally:
        collector.shutdown()
    assert set(fake["next"].keys(True, True)) == set(batch["next"].keys(True, True))
    assert (entry(kind, fake, "kl_estimate") == 0).all()
    assert (entry(kind, fake, "ref_log_prob") == 0).all()


@pytest.mark.parametrize("make", [stack, parts], ids=["stack", "parts"])
def test_fake_data_holds_no_parameters_even_where_torch_checks_them(make):
    actor = make_actor("normal", distribution_kwargs={"validate_args": True})
    fake = play(WalkEnv((2,), discrete=False), actor).detach().apply(torch.zeros_like)
    assert (make(actor, "exact")(fake)["next", "kl_estimate"] == 0).all()
