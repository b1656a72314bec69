"""One rollout on every data path: the same numbers up to rounding, and never a second penalty."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrl.collectors.utils import split_trajectories
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ReplayBuffer,
    SamplerWithoutReplacement,
)
from torchrl.envs.utils import ExplorationType, set_exploration_type

from tests.helpers import (
    SpyController,
    WalkEnv,
    assert_within,
    collect,
    make_actor,
    memory_of,
    moved,
    play,
    rounding,
    ulps,
    with_transforms,
    without_kl,
)
from torchrl_kl import AdaptiveKLController, KLConstrainedTransform, KLKeys, KLRewardTransform

KINDS = ("categorical", "normal", "tanh_normal", "lstm", "agents")
T, N = 14, 3
LONGEST = 4  # steps of a trajectory
STEP_WISE = ("ref_log_prob", "kl", "task_reward", "kl_coeff", "reward")
REWARD: dict[str, Any] = {"agents": ("agents", "reward")}


def actor_of(kind: str) -> Any:
    return make_actor(agents=True) if kind == "agents" else make_actor(kind)


def stack_of(kind: str, controller: Any = 0.3, **kwargs) -> KLConstrainedTransform:
    return KLConstrainedTransform(
        actor_of(kind), controller, keys=KLKeys(reward=REWARD.get(kind, "reward")), **kwargs
    )


def frozen(kind: str, **kwargs) -> KLConstrainedTransform:
    controller = AdaptiveKLController(0.3, target=0.1, horizon=100)
    return stack_of(kind, controller, update_every=1, **kwargs).freeze()


both = pytest.mark.parametrize("make", [stack_of, frozen], ids=["constant", "frozen"])
every_kind = pytest.mark.parametrize("kind", KINDS)


def env_of(kind: str, *transforms: Any) -> Any:
    env = WalkEnv(
        (N,),
        discrete=kind not in ("normal", "tanh_normal"),
        n_agents=2 if kind == "agents" else None,
    )
    memory = memory_of(actor_of(kind)) if kind == "lstm" else []
    return with_transforms(env, *memory, *transforms) if memory or transforms else env


def penalized_in_env(kind: str, make: Any = stack_of) -> Any:
    """A collector's batch (N, T), penalized step by step in the env; trajectories of 2 to 4."""
    (batch,) = collect(env_of(kind, make(kind)), moved(actor_of(kind)), frames=N * T, batches=1)
    return batch.detach()


def compare(
    kind: str,
    actual: Any,
    expected: Any,
    names: Any = (*STEP_WISE, "episode_kl"),
    steps: Any = slice(None),
) -> None:
    """The same numbers, up to the rounding of the reference's log-prob.

    Args:
        kind: of the actor.
        actual: the batch, or its `steps`.
        expected: the whole batch that was penalized in the env.
        names: the entries to compare.
        steps: which of the steps of `expected`: an index.
    """
    read = expected.copy()
    if kind == "lstm":  # the reference has its own memory
        read = read.set("h", read["ref_h"]).set("c", read["ref_c"])
    bound = rounding(actor_of(kind), read, steps=LONGEST if kind == "lstm" else 1)
    holder = expected["next"]["agents"] if kind == "agents" else expected["next"]
    sizes = {name: holder[name].reshape(*bound.shape) for name in names}
    terms = ulps(sizes["task_reward"], 0.3 * sizes["kl"])
    bounds = {name: torch.zeros_like(bound) for name in ("task_reward", "kl_coeff")}
    bounds |= {"ref_log_prob": bound, "kl": bound, "reward": 0.3 * bound + terms}
    if "episode_kl" in names:  # of this step and those before it in its trajectory
        before = torch.zeros_like(bound[:, :1]).expand(-1, LONGEST - 1, *bound.shape[2:])
        bounds["episode_kl"] = torch.cat([before, bound], 1).unfold(1, LONGEST, 1).sum(-1)
    for name in names:
        key: Any = ("agents", name) if kind == "agents" else name
        assert_within(actual["next"][key], expected["next"][key][steps], bounds[name][steps])
        assert (expected["next"][key] != 0).any()


def test_threads_may_extend_one_buffer():
    actor, controller = make_actor(), SpyController(per="step")
    stack = KLConstrainedTransform(actor, controller, reference=make_actor())
    stack.reference.actor.register_forward_hook(lambda *_: time.sleep(0.01))
    buffer = ReplayBuffer(storage=LazyTensorStorage(200), batch_size=8)
    buffer.append_transform(stack, invert=True)
    batches = [play(WalkEnv((12,)), moved(actor), 1, seed=seed) for seed in range(12)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(buffer.extend, [batch[:, 0] for batch in batches]))
    assert len(buffer) == sum(count for _, count in controller.calls) == 12 * 12
    assert not stack.training


def replayed(storage: Any, batch: Any, *transforms: Any) -> Any:
    """The rows of a flat batch out of a replay buffer, in their order."""
    buffer = ReplayBuffer(
        storage=storage,
        sampler=SamplerWithoutReplacement(shuffle=False),
        batch_size=batch.batch_size[0],
    )
    for transform in transforms:
        buffer.append_transform(transform)
    buffer.extend(batch)
    return buffer.sample()


def kept(kind: str, batch: Any) -> Any:
    """A batch without what the stack wrote, except the state of a recurrent reference."""
    bare = without_kl(batch)
    if kind == "lstm":
        for name in ("ref_h", "ref_c"):
            bare[name] = batch[name]
    return bare


# The paths.


@both
@every_kind
def test_postproc_of_a_collector(kind, make):
    policy = moved(actor_of(kind))
    (batch,) = collect(env_of(kind), policy, frames=N * T, batches=1, postproc=make(kind))
    compare(kind, batch.detach(), penalized_in_env(kind, make))


@both
@every_kind
def test_plain_module_call(kind, make):
    expected = penalized_in_env(kind, make)
    compare(kind, nn.Sequential(make(kind))(without_kl(expected)), expected)


@both
@every_kind
def test_flat_shuffled_samples(kind, make):
    expected = penalized_in_env(kind, make).reshape(-1)
    order = torch.randperm(N * T, generator=torch.Generator().manual_seed(0))
    stack = make(kind).freeze()
    compare(kind, stack(kept(kind, expected[order])), expected[order], STEP_WISE)


@both
@every_kind
@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyMemmapStorage])
def test_replay_buffer(kind, make, storage):
    expected = penalized_in_env(kind, make).reshape(-1)
    compare(kind, replayed(storage(N * T), kept(kind, expected), make(kind)), expected, STEP_WISE)


@both
@every_kind
def test_replay_buffer_of_whole_rows(kind, make):
    expected = penalized_in_env(kind, make)
    compare(
        kind,
        replayed(LazyTensorStorage(N), without_kl(expected), make(kind, time_dim=-1)),
        expected,
    )


@both
@every_kind
def test_padded_trajectories(kind, make):
    expected = split_trajectories(penalized_in_env(kind, make))
    mask = expected["collector", "mask"]
    assert not mask.all()
    actual = make(kind, time_dim=-1)(split_trajectories(without_kl(penalized_in_env(kind, make))))
    compare(kind, actual[mask], expected, steps=mask)
    padding: Any = actual["next"][("agents", "kl") if kind == "agents" else "kl"][~mask]
    assert (padding == 0).all()


@both
@every_kind
@pytest.mark.parametrize("loaded", [False, True], ids=["written", "loaded"])
def test_offline_batches_from_disk(kind, make, loaded, tmp_path):
    expected = penalized_in_env(kind, make)
    bare = without_kl(expected)
    batch: Any = bare.memmap(tmp_path)
    assert batch.is_memmap()
    if loaded:
        batch = TensorDict.load_memmap(tmp_path).lock_()
    assert batch.is_locked
    # The disk does not keep the name of time.
    compare(kind, make(kind, time_dim=-1)(batch), expected)
    again: Any = TensorDict.load_memmap(tmp_path)
    assert (again == bare).all()
    assert set(again.keys(True, True)) == set(bare.keys(True, True))


# A controller that is not frozen moves wherever data come once, and never where they come again.


@pytest.mark.parametrize("rows", [False, True], ids=["flat", "rows"])
def test_sampling_from_a_buffer_never_moves_the_controller(rows):
    controller = AdaptiveKLController(0.3, target=1e-3, horizon=100)
    stack = stack_of("categorical", controller, update_every=1)
    batch = without_kl(penalized_in_env("categorical"))
    sample = replayed(LazyTensorStorage(N * T), batch if rows else batch.reshape(-1), stack)
    assert (sample["next", "kl"] != 0).any()
    assert controller.coeff == 0.3
    assert not stack.training  # so a buffer tells a transform that its batches are not new
    stack.train()(batch)
    assert controller.coeff > 0.3


# Penalizing twice.

PATHS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "module": lambda again, batch, _: again(batch),
    "flat": lambda again, batch, _: again(batch.reshape(-1)),
    "replay": lambda again, batch, _: replayed(LazyTensorStorage(N * T), batch.reshape(-1), again),
    "padded": lambda again, batch, _: again(split_trajectories(batch)),
    "disk": lambda again, batch, folder: again(batch.memmap(folder)),
    "postproc": lambda again, *_: collect_penalized(postproc=again),
}


def collect_penalized(**kwargs) -> Any:
    kind = "categorical"
    return collect(
        env_of(kind, stack_of(kind)), moved(actor_of(kind)), frames=N * T, batches=1, **kwargs
    )


@pytest.mark.parametrize("first", ["env", "batch"])
@pytest.mark.parametrize(
    "second", [stack_of, lambda kind: KLRewardTransform(actor_of(kind))], ids=["stack", "one"]
)
@pytest.mark.parametrize("path", PATHS)
def test_penalizing_twice_is_an_error_on_every_path(path, second, first, tmp_path):
    batch = penalized_in_env("categorical")
    if first == "batch":
        batch = stack_of("categorical")(without_kl(batch))
    with pytest.raises(
        RuntimeError, match="the batch has 'kl_coeff': 'reward' was penalized for its KL before"
    ):
        PATHS[path](second("categorical"), batch, tmp_path)


# What a batch cannot say.


def test_a_log_prob_of_the_step_before_counts_for_a_random_action():
    """TorchRL's step_mdp keeps what the policy wrote: say so by leaving it out."""
    env = env_of("categorical", stack_of("categorical"))
    with set_exploration_type(ExplorationType.RANDOM):
        td = env.step_mdp(env.step(moved(actor_of("categorical"))(env.reset())))
    assert "action_log_prob" in td.keys()
    stale = env.step(env.rand_action(td.clone()))["next"]
    fresh = env.step(env.rand_action(td.exclude("action_log_prob", "logits")))["next"]
    assert (stale["kl"] != 0).any()
    assert (fresh["kl"] == 0).all()
