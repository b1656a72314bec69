"""What the controller is told, when, and who never moves it."""

import math
import warnings
from collections import defaultdict
from functools import partial

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import InteractionType
from torch.testing import assert_close
from torchrl.collectors import Collector
from torchrl.data import (
    Categorical,
    Composite,
    LazyTensorStorage,
    ReplayBuffer,
    TensorDictReplayBuffer,
)
from torchrl.envs import InitTracker, SerialEnv, check_env_specs
from torchrl.envs.utils import ExplorationType, set_exploration_type

from tests.helpers import (
    SpyController,
    WalkEnv,
    assert_same,
    collect,
    compose,
    make_actor,
    moved,
    play,
    policy,
    spied,
    step_of,
    total,
    with_transforms,
    without_kl,
)
from torchrl_kl import (
    AdaptiveKLController,
    ExponentialKLController,
    KLConstrainedTransform,
    KLKeys,
    RewardAdjustmentTransform,
)

# What the controller is told.


def by_trajectory(batches) -> dict[int, list[float]]:
    """The KL of each step by trajectory, over all batches."""
    kl = defaultdict(list)
    for batch in batches:
        for row in batch.unbind(0) if batch.ndim == 2 else [batch]:
            for step in row.unbind(0):
                kl[int(step["collector", "traj_ids"])].append(step["next", "kl"].item())
    return kl


@pytest.mark.parametrize(("per", "moves"), [("trajectory", [0, 0, 1, 1]), ("step", [0, 1, 2, 3])])
def test_penalize_first_then_update_in_the_env(per, moves):
    stack, _ = spied(per, step=1.0)
    after = play(with_transforms(WalkEnv((2,), longest=2), stack), policy(), 4)["next"]
    assert after["done"].flatten().tolist() == [False, True] * 4
    assert_close(after["kl_coeff"].squeeze(-1), 0.1 + torch.tensor([moves, moves]))
    assert_close(after["reward"], after["task_reward"] - after["kl_coeff"] * after["kl"])


@pytest.mark.parametrize("per", ["trajectory", "step"])
def test_penalize_first_then_update_on_a_batch(per):
    stack, controller = spied(per, step=1.0)
    batch = play(WalkEnv((2,)), policy())
    for n, coeff in enumerate([0.1, 1.1, 2.1]):
        assert len(controller.calls) == n
        after = stack(batch)["next"]
        assert_close(after["kl_coeff"], torch.full((2, 12, 1), coeff))
        assert_close(after["reward"], after["task_reward"] - coeff * after["kl"])


def test_every_step_records_its_coefficient_while_it_adapts():
    controller = ExponentialKLController(0.1, target=1e-3, gain=1.0)
    env = with_transforms(
        WalkEnv((2,)), KLConstrainedTransform(make_actor(), controller, update_every=2)
    )
    after = play(env, policy(), 30)["next"]
    assert after["kl_coeff"].unique().numel() > 3
    assert_close(after["reward"], after["task_reward"] - after["kl_coeff"] * after["kl"])
    assert (after["kl_coeff"][0] == after["kl_coeff"][1]).all()


@pytest.mark.parametrize("place", ["env", "batch"])
@pytest.mark.parametrize("update_every", [1, 3, 7])
def test_finished_trajectories_are_pooled_and_told_once(place, update_every):
    stack, controller = spied(update_every=update_every)
    if place == "env":
        after = play(with_transforms(WalkEnv((3,)), stack), policy(), 40)["next"]
    else:
        after = stack(play(WalkEnv((3,)), policy(), 40))["next"]
    # The same from the data alone, in the order in which the trajectories end.
    pool, expected, running = [], [], torch.zeros(3)
    for t in range(40):
        running = running + after["kl"][:, t, 0]
        ended = after["done"][:, t, 0]
        pool += running[ended].tolist()
        running = torch.where(ended, 0.0, running)
        if place == "env" and len(pool) >= update_every:
            expected.append((sum(pool) / len(pool), len(pool)))
            pool = []
    if place == "batch":
        expected, pool = [(sum(pool) / len(pool), len(pool))], []
    assert [n for _, n in controller.calls] == [n for _, n in expected]
    assert_close([kl for kl, _ in controller.calls], [kl for kl, _ in expected], atol=1e-5, rtol=0)
    assert int(stack.statistics.count) == len(pool)
    assert min(n for _, n in controller.calls) >= update_every


@pytest.mark.parametrize("place", ["env", "batch"])
def test_per_step_pools_steps(place):
    stack, controller = spied("step", update_every=5)
    if place == "env":
        after = play(with_transforms(WalkEnv((3,)), stack), policy(), 10)["next"]
        assert [n for _, n in controller.calls] == [6] * 5
        expected = after["kl"].reshape(3, 5, 2).mean((0, 2))
    else:
        after = stack(play(WalkEnv((3,)), policy(), 10))["next"]
        assert [n for _, n in controller.calls] == [30]
        expected = after["kl"].mean().reshape(1)
    assert_close(torch.tensor([kl for kl, _ in controller.calls]), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("per", ["trajectory", "step"])
def test_it_is_told_the_standard_error_of_what_was_pooled(per):
    stack, controller = spied(per, update_every=5)
    batch = play(WalkEnv((3,)), policy(), 10)
    after = stack(batch)["next"]
    pooled = after["kl"] if per == "step" else after["episode_kl"][after["done"]]
    ((_, n),) = controller.calls
    assert n == pooled.numel() > 5
    expected = (pooled.double().var() / n).sqrt().item()
    assert controller.standard_errors == pytest.approx([expected], rel=1e-6)


def test_a_single_value_has_no_standard_error():
    controller = SpyController()
    RewardAdjustmentTransform(controller, update_every=1)(
        step_of(reward=[1.0], kl=[0.5], done=[True])
    )
    assert math.isnan(controller.standard_errors[0])
    moving = AdaptiveKLController(0.1, 0.2, 100)
    RewardAdjustmentTransform(moving, update_every=1)(step_of(reward=[1.0], kl=[0.5], done=[True]))
    assert moving.coeff > 0.1  # without a deadband nobody asks


@pytest.mark.parametrize(("deadband", "moves"), [(1.9, True), (2.1, False)])
def test_a_deadband_leaves_the_coefficient_alone_within_the_noise(deadband, moves):
    # Four trajectories of mean 0.7 and variance 0.04 * 4 / 3: a standard error of 0.1155, and
    # 0.2309 from the target.
    batch = step_of(reward=[1.0] * 4, kl=[0.5, 0.9, 0.5, 0.9], done=[True] * 4)
    controller = AdaptiveKLController(0.1, 0.7 - 2 * math.sqrt(0.04 / 3), 100, deadband=deadband)
    RewardAdjustmentTransform(controller, update_every=4)(batch)
    assert (controller.coeff > 0.1) == moves


def test_a_deadband_on_single_values_is_refused():
    message = "`update_every` must be at least 2 for a controller with a deadband, got 1: a single"
    for make in (RewardAdjustmentTransform, partial(KLConstrainedTransform, make_actor())):
        with pytest.raises(ValueError, match=message):
            make(AdaptiveKLController(0.1, 0.5, 100, deadband=0.5), update_every=1)
        make(AdaptiveKLController(0.1, 0.5, 100, deadband=0.5), update_every=2)
        make(AdaptiveKLController(0.1, 0.5, 100), update_every=1)


@pytest.mark.parametrize("per", ["trajectory", "step"])
def test_how_a_batch_is_split_changes_nothing_in_the_pool(per):
    batch = play(WalkEnv((6,)), policy(), 40)
    batch["next", "kl"] = torch.randn(6, 40, 1)
    pools = []
    for sizes in ([6], [1] * 6, [2, 4], [4, 2]):
        transform = RewardAdjustmentTransform(SpyController(per=per), update_every=10**6)
        for part in batch.split(sizes):
            transform(part)
        pools.append(transform.statistics)
    for pool in pools:
        assert pool.count == pools[0].count > 50
        # Some hundred values of order 1, the same in every split, summed in another order: 1e2 *
        # 1e2 * 1e-16.
        assert_close(pool.sum, pools[0].sum, rtol=0, atol=1e-12)
        assert_close(pool.sum_of_squares, pools[0].sum_of_squares, rtol=0, atol=1e-12)


def test_padding_is_not_penalized_and_not_counted():
    batch = play(WalkEnv((2,)), policy())
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[0, 5:] = False
    batch["collector", "mask"] = mask
    batch["next", "done"] = torch.zeros(2, 12, 1, dtype=torch.bool)
    batch["next", "done"][:, 4] = True
    batch["next", "done"][:, 8] = True
    del batch["next", "observation"]  # which goes on and ends where the env's own flags said
    for per, n in (("step", 17), ("trajectory", 3)):
        stack, controller = spied(per)
        after = stack(batch)["next"]
        assert [n for _, n in controller.calls] == [n]
        assert_close(after["reward"][~mask], batch["next", "reward"][~mask], rtol=0, atol=0)
        assert (after["reward"][mask] != batch["next", "reward"][mask]).all()


def test_an_artificial_truncation_is_not_an_end():
    batches = collect(WalkEnv((2,), longest=9), policy(), frames=8, batches=12, set_truncated=True)
    assert all(batch["next", "truncated"][:, -1].any() for batch in batches)
    stack, controller = spied()
    after = [stack(batch) for batch in batches]
    kl = by_trajectory(after)
    ended = {
        int(i)
        for b in batches
        for i in b["collector", "traj_ids"][b["next", "terminated"].squeeze(-1)]
    }
    n, told = total(controller)
    assert n == len(ended) > 10
    assert_close(told, sum(sum(kl[i]) for i in ended), atol=1e-4, rtol=0)


@pytest.mark.parametrize("truncates", [False, True])
def test_trajectories_across_batches_are_those_of_the_env(truncates):
    inside, told_inside = spied()
    env = with_transforms(SerialEnv(2, lambda: WalkEnv(longest=9, truncates=truncates)), inside)
    batches = collect(env, policy(), frames=8, batches=12)
    outside, told_outside = spied()
    for batch in batches:
        after = outside(without_kl(batch))
        assert_same(after["next", "episode_kl"], batch["next", "episode_kl"])
    last = batches[-1]["next"]
    # A truncation in the last step of all could still turn out to be the collector's own.
    pending = last["truncated"][:, -1]
    n, kl = total(told_inside)
    n_outside, kl_outside = total(told_outside)
    assert n_outside == n - int(pending.sum())
    assert_close(
        kl_outside, kl - last["episode_kl"][:, -1][pending].sum().item(), atol=1e-4, rtol=0
    )


def test_replay_sampling_leaves_open_trajectories_alone():
    stack, _ = spied(time_dim=-1)
    env = with_transforms(
        SerialEnv(2, lambda: WalkEnv(longest=9)), KLConstrainedTransform(make_actor(), 0.1)
    )
    batches = collect(env, policy(), frames=8, batches=6)
    replay = ReplayBuffer(storage=LazyTensorStorage(2), batch_size=2, transform=stack)
    replay.extend(without_kl(batches[0]))
    for batch in batches:
        after = stack.train()(without_kl(batch))
        assert_same(after["next", "episode_kl"], batch["next", "episode_kl"])
        stack.eval()
        replay.sample()


def test_a_new_collector_with_the_same_ids_begins_anew():
    stack, controller = spied()
    for seed in range(2):
        env = with_transforms(WalkEnv((1,), longest=9), InitTracker())
        (batch,) = collect(env, policy(), frames=3, batches=1, seed=seed + 5)
        assert (batch["collector", "traj_ids"] == 0).all()
        after = stack(batch)["next"]
        assert_close(after["episode_kl"], after["kl"].cumsum(1))
    assert not controller.calls


def test_split_trajectories_are_those_of_the_contiguous_batch():
    told = []
    for split in (False, True):
        stack, controller = spied(time_dim=-1)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "split_trajs=True produces", UserWarning)
            batches = collect(
                WalkEnv((2,), longest=6, truncates=True),
                policy(),
                frames=16,
                batches=8,
                split_trajs=split,
            )
        for batch in batches:
            stack(batch)
        later = batches[0][
            :, :1
        ].clone()  # a batch of other trajectories, which settles what was open
        later["collector", "traj_ids"] += 1000
        stack(later)
        told.append(total(controller))
    assert told[0][0] == told[1][0] > 20
    assert_close(told[0][1], told[1][1], atol=1e-4, rtol=0)


def test_agents_of_one_env_are_each_a_trajectory():
    actor = make_actor(agents=True)
    controller = SpyController()
    stack = KLConstrainedTransform(
        actor, controller, update_every=1, keys=KLKeys(reward=("agents", "reward"))
    )
    after = play(with_transforms(WalkEnv((2,), n_agents=3), stack), moved(actor), 20)["next"]
    ended = after["done"].squeeze(-1)
    n, kl = total(controller)
    assert n == 3 * int(ended.sum())
    assert_close(kl, after["agents", "episode_kl"][ended].double().sum().item(), atol=1e-5, rtol=0)


class LeavingEnv(WalkEnv):
    """Agent i has left with i steps to go, and its flag stays; the env resets when all are gone."""

    def __init__(self, n_agents: int, **kwargs):
        super().__init__((2,), n_agents=n_agents, **kwargs)
        flag = Categorical(2, dtype=torch.bool, shape=torch.Size((2, n_agents, 1)))
        self.full_done_spec["agents"] = Composite(
            done=flag, terminated=flag.clone(), shape=(2, n_agents)
        )

    def _leave(self, out):
        gone = out["left"].unsqueeze(-1) <= torch.arange(self.agents[0]).unsqueeze(-1)
        out["agents", "done"], out["agents", "terminated"] = gone, gone.clone()
        return out

    def _step(self, tensordict):
        return self._leave(super()._step(tensordict))

    def _reset(self, tensordict=None, **kwargs):
        out = super()._reset(tensordict, **kwargs)
        out["agents", "done"] = torch.zeros(2, self.agents[0], 1, dtype=torch.bool)
        out["agents", "terminated"] = out["agents", "done"].clone()
        return out


@pytest.mark.parametrize("place", ["env", "batch"])
def test_an_agent_that_has_left_is_counted_once(place):
    actor, controller = make_actor(agents=True), SpyController()
    env = LeavingEnv(2, longest=5)
    stack = KLConstrainedTransform(
        actor, controller, update_every=1, keys=KLKeys(reward=("agents", "reward"))
    )
    if place == "env":
        batch = play(with_transforms(env, stack), moved(actor), 20)
    else:
        batch = stack(play(env, moved(actor), 20))
    left = batch["next", "agents", "done"] & ~batch["agents", "done"]
    assert left.sum() < batch["next", "agents", "done"].sum()
    assert total(controller)[0] == int(left.sum())


def test_rows_that_are_skipped_are_not_counted():
    for per in ("trajectory", "step"):
        stack, controller = spied(per)
        env = with_transforms(SerialEnv(4, WalkEnv), stack)
        batch = play(env, policy(), 20, break_when_any_done=False, break_when_all_done=True)
        length = batch["next", "done"].squeeze(-1).int().argmax(-1) + 1
        assert length.min() < length.max() == batch.shape[-1]
        n, kl = total(controller)
        assert n == (4 if per == "trajectory" else int(length.sum()))
        ran = torch.arange(batch.shape[-1]) < length[:, None]
        assert_close(
            kl, batch["next", "kl"].squeeze(-1)[ran].double().sum().item(), atol=1e-5, rtol=0
        )
        last = torch.stack(
            [row["next", "episode_kl"][i - 1] for row, i in zip(batch, length, strict=True)]
        )
        assert_close(batch["next", "episode_kl"][:, -1], last, atol=1e-6, rtol=0)


def test_the_done_flag_can_be_named():
    batch = step_of(
        reward=[1.0] * 4,
        kl=[1.0, 2.0, 4.0, 8.0],
        done=[False] * 4,
        my_end=[False, True, False, True],
    )
    controller = SpyController()
    after = RewardAdjustmentTransform(controller, update_every=1, keys=KLKeys(done="my_end"))(batch)
    assert_close(after["next", "episode_kl"].flatten(), torch.tensor([1.0, 3.0, 4.0, 12.0]))
    assert controller.calls == [(7.5, 2)]


def test_a_done_flag_that_is_not_there_is_an_error():
    batch = step_of(reward=[1.0], kl=[1.0])
    with pytest.raises(
        KeyError, match=r"there is no 'done'.*got kl,.*reward.*: .*`KLKeys\(done=\.\.\.\)`"
    ):
        RewardAdjustmentTransform(0.1)(batch)
    batch["next", "done"] = torch.ones(1, 1, 1, dtype=torch.bool)
    with pytest.raises(KeyError, match="nope"):
        RewardAdjustmentTransform(0.1, keys=KLKeys(done="nope"))(batch)
    with pytest.raises(KeyError, match="nope"):
        play(with_transforms(WalkEnv(), spied(keys=KLKeys(done="nope"))[0]), policy())


# Who moves it, and who never does.


@pytest.mark.parametrize(
    "exploration",
    [
        None,
        ExplorationType.RANDOM,
        ExplorationType.MODE,
        ExplorationType.MEAN,
        ExplorationType.DETERMINISTIC,
    ],
)
def test_only_steps_with_sampled_actions_move_it(exploration):
    actor, controller = make_actor("normal"), SpyController(per="step")
    stack = KLConstrainedTransform(actor, controller, update_every=1)
    env = with_transforms(WalkEnv((2,), discrete=False), stack)
    with set_exploration_type(exploration):
        env.rollout(3, moved(actor), break_when_any_done=False)
    assert bool(controller.calls) == (exploration == ExplorationType.RANDOM)


def test_a_policy_that_samples_by_default_moves_it():
    actor = make_actor(default_interaction_type=InteractionType.RANDOM)
    controller = SpyController(per="step")
    env = with_transforms(WalkEnv((2,)), KLConstrainedTransform(actor, controller, update_every=1))
    env.rollout(3, moved(actor), break_when_any_done=False)
    assert len(controller.calls) == 3


def test_collectors_move_it():
    stack, controller = spied("step")
    collect(with_transforms(WalkEnv((2,)), stack), policy(), frames=8, batches=2)
    assert total(controller)[0] == 16


@pytest.mark.parametrize("per", ["step", "trajectory"])
def test_nothing_moves_it_while_frozen(per):
    stack, controller = spied(per)
    assert stack.freeze() is stack
    env = with_transforms(WalkEnv((2,)), stack)
    play(env, policy())
    stack_outside, controller_outside = spied(per)
    stack_outside.freeze()(play(WalkEnv((2,)), policy()))
    assert not controller.calls + controller_outside.calls
    assert int(stack.statistics.count) == int(stack_outside.statistics.count) == 0
    assert stack.unfreeze() is stack
    play(env, policy())
    stack_outside.unfreeze()(play(WalkEnv((2,)), policy()))
    assert controller.calls
    assert controller_outside.calls


@pytest.mark.parametrize("per", ["step", "trajectory"])
def test_batches_do_not_move_it_after_eval_and_do_again_after_train(per):
    stack, controller = spied(per)
    batch = play(WalkEnv((2,)), policy())
    after = stack.eval()(batch)["next"]
    assert_close(after["reward"], after["task_reward"] - 0.1 * after["kl"])
    assert not controller.calls
    assert int(stack.statistics.count) == 0
    stack.train()(batch)
    assert len(controller.calls) == 1


@pytest.mark.parametrize("buffer", [ReplayBuffer, TensorDictReplayBuffer])
@pytest.mark.parametrize("prefetch", [None, 2])
@pytest.mark.parametrize("appended", [False, True])
@pytest.mark.parametrize("composed", [False, True])
def test_replay_sampling_never_moves_it(buffer, prefetch, appended, composed):
    stack, controller = spied("step")
    data = play(WalkEnv((2,)), policy()).reshape(-1)
    transform = compose(stack) if composed else stack
    kwargs = {} if appended else {"transform": transform}
    replay = buffer(storage=LazyTensorStorage(len(data)), batch_size=8, prefetch=prefetch, **kwargs)
    if appended:
        replay.append_transform(transform)
    replay.extend(data)
    for _ in range(5):
        assert (replay.sample()["next", "kl"] != 0).any()
    assert not controller.calls
    assert int(stack.statistics.count) == 0


def test_reading_a_replay_buffer_by_index_never_moves_it():
    stack, controller = spied("step")
    data = play(WalkEnv((2,)), policy()).reshape(-1)
    replay = ReplayBuffer(storage=LazyTensorStorage(len(data)), batch_size=8, transform=stack)
    replay.extend(data)
    assert (replay[:4]["next", "kl"] != 0).any()
    assert not controller.calls


@pytest.mark.parametrize("per", ["step", "trajectory"])
def test_spec_checks_and_fake_data_never_move_it(per):
    stack, controller = spied(per)
    env = with_transforms(WalkEnv((2,), longest=2), stack)
    with set_exploration_type(ExplorationType.RANDOM):
        check_env_specs(env)
        check_env_specs(env, break_when_any_done=False)
    stack_outside, controller_outside = spied(per)
    collector = Collector(
        WalkEnv((2,)),
        policy(),
        frames_per_batch=8,
        total_frames=8,
        auto_register_policy_transforms=False,
    )
    fake = collector.fake_tensordict()
    collector.shutdown()
    assert fake.names[-1] == "time"
    stack_outside(fake)
    assert not controller.calls + controller_outside.calls
    assert int(stack.statistics.count) == int(stack_outside.statistics.count) == 0


def test_random_actions_never_move_it():
    stack, controller = spied("step")
    after = play(with_transforms(WalkEnv((2,)), stack))["next"]
    assert not controller.calls
    assert_close(after["reward"], after["task_reward"], rtol=0, atol=0)


def test_random_warm_up_frames_are_scored_zero_in_the_env_and_not_counted():
    stack, controller = spied("step")
    batches = collect(
        with_transforms(WalkEnv((2,)), stack), policy(), frames=8, batches=3, init_random_frames=16
    )
    kl = torch.stack([batch["next", "kl"] for batch in batches])
    assert (kl[:2] == 0).all()
    assert (kl[2] != 0).all()
    assert total(controller)[0] == 8


# Batches that were penalized elsewhere.


@pytest.mark.parametrize("per", ["trajectory", "step"])
@pytest.mark.parametrize("padded", [False, True])
def test_observing_a_penalized_batch_tells_what_penalizing_it_would_have_told(per, padded):
    (penalizing, one), (observing, other) = spied(per), spied(per)
    for seed in range(3):
        batch = play(WalkEnv((3,)), policy(), 7, seed=seed)
        if padded:
            batch["collector"] = TensorDict(
                mask=torch.arange(7).expand(3, 7) < 5, batch_size=(3, 7)
            )
        penalized = penalizing(batch)
        if padded:
            penalized["next", "kl"] = torch.where(
                penalized["collector", "mask"][..., None], penalized["next", "kl"], 9.0
            )
        before = penalized.clone()
        assert observing.observe(penalized) is None
        assert (penalized == before).all()
    assert one.calls == other.calls != []


def test_observing_what_was_not_measured_is_an_error():
    stack, _ = spied()
    with pytest.raises(
        KeyError, match="'kl' is not in the data.*put KLDivergenceTransform before this transform"
    ):
        stack.observe(play(WalkEnv((3,)), policy(), 7))
