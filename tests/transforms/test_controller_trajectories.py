"""Which steps of which trajectories the controller is told of."""

import warnings
from collections import defaultdict

import pytest
import torch
from tensordict import TensorDict
from torch.testing import assert_close
from torchrl.data import (
    Categorical,
    Composite,
    LazyTensorStorage,
    ReplayBuffer,
)
from torchrl.envs import InitTracker, SerialEnv

from tests.helpers import (
    SpyController,
    WalkEnv,
    assert_same,
    collect,
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
    KLConstrainedTransform,
    KLKeys,
    RewardAdjustmentTransform,
)


def by_trajectory(batches) -> dict[int, list[float]]:
    """The KL of each step by trajectory, over all batches."""
    kl = defaultdict(list)
    for batch in batches:
        for row in batch.unbind(0) if batch.ndim == 2 else [batch]:
            for step in row.unbind(0):
                kl[int(step["collector", "traj_ids"])].append(step["next", "kl"].item())
    return kl


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


@pytest.mark.parametrize("n_envs", [(), (3,)], ids=["one_env", "three_envs"])
@pytest.mark.parametrize("init", [False, True], ids=["", "init_tracker"])
@pytest.mark.parametrize("join", [torch.cat, torch.stack, lambda x: torch.stack(x, -2)])
@pytest.mark.parametrize("longest", [3, 9])
@pytest.mark.parametrize("set_truncated", [False, True])
def test_batches_that_are_joined_along_their_rows_go_on_with_each_other(
    join, init, n_envs, longest, set_truncated
):
    """A row that begins inside a trajectory goes on with the row in which it was left."""
    env = WalkEnv(n_envs, longest=longest)
    batches = collect(
        with_transforms(env, InitTracker()) if init else env,
        policy(),
        frames=12,
        batches=6,
        set_truncated=set_truncated,
    )
    (one_by_one, expected), (together, told) = spied(time_dim=-1), spied(time_dim=-1)
    running = [one_by_one(batch)["next", "episode_kl"].squeeze(-1) for batch in batches]
    for part in (slice(0, 3), slice(3, 6)):
        sums = together(join(batches[part]))["next", "episode_kl"].squeeze(-1)
        assert_same(sums, join(running[part]))
    assert total(told)[0] == total(expected)[0] > 5
    assert_same(total(told)[1], total(expected)[1])


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


def test_a_shared_trajectory_goes_on_where_one_of_its_agents_has_left():
    """Collectors give it another id then, as where an agent of another group is done."""
    actor = make_actor(agents=True)
    env = LeavingEnv(2, longest=5, shared_reward=True)
    numbers, told = [], []
    for place in ("env", "batch"):
        controller = SpyController()
        stack = KLConstrainedTransform(actor, controller, update_every=1, sum_agents=True)
        inside = place == "env"
        played = with_transforms(env, stack) if inside else env
        batches = collect(played, moved(actor), frames=14, batches=6)
        batches = batches if inside else [stack(batch) for batch in batches]
        numbers.append(torch.cat([batch["next", "episode_kl"].flatten() for batch in batches]))
        told.append(total(controller))
        ends = sum(int(batch["next", "done"].sum()) for batch in batches)
        assert told[-1][0] == ends > 10
    assert_same(*numbers)
    assert_same(told[0][1], told[1][1])


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


def test_a_trajectory_that_a_saved_state_left_open_goes_on():
    batch = step_of(reward=[1.0] * 4, kl=[1.0, 2.0, 4.0, 8.0], done=[False, False, False, True])
    batch["next", "terminated"] = batch["next", "done"]
    batch["collector", "traj_ids"] = torch.zeros(1, 4, dtype=torch.int64)
    first, second = (RewardAdjustmentTransform(SpyController(), update_every=1) for _ in range(2))
    first(batch[:, :3])
    second.load_state_dict(first.state_dict())
    assert second(batch[:, 3:])["next", "episode_kl"].item() == 15.0
    assert second.controller.calls == [(15.0, 1)]


@pytest.mark.parametrize("resumed", [False, True])
def test_what_a_saved_state_left_truncated_is_told_once(resumed):
    """By the collector itself if it goes on in this process, or else by the state."""

    def batch(number: int):
        data = step_of(reward=[1.0, 1.0], kl=[1.0 + number, 2.0], done=[False, True])
        data["next", "truncated"] = data["next", "done"]
        data["collector", "traj_ids"] = torch.full((1, 2), number)
        return data

    first = RewardAdjustmentTransform(SpyController(), update_every=1)
    stream = first.new_stream()
    first.observe(batch(0), stream)
    with pytest.raises(KeyError, match="done"):  # of another collector, which is then not the last
        first.observe(batch(0).exclude(("next", "done")), first.new_stream())
    second = RewardAdjustmentTransform(SpyController(), update_every=1) if resumed else first
    second.load_state_dict(first.state_dict())
    second.observe(batch(1), second.new_stream() if resumed else stream)
    assert second.controller.calls == [(3.0, 1)]
    second.observe(batch(2), stream if not resumed else second.new_stream())
    assert second.controller.calls == ([(3.0, 1)] if resumed else [(3.0, 1), (4.0, 1)])


def test_flags_and_values_of_agents_are_no_states():
    """A collector may truncate a batch, and the value is that of a network that has learned."""

    def agents(**entries) -> TensorDict:
        entries = {name: value.expand(1, 4, 2, 1) for name, value in entries.items()}
        return TensorDict(agents=TensorDict(entries, batch_size=(1, 4, 2)), batch_size=(1, 4))

    cut = torch.tensor([False, True, False, False])[None, :, None, None]
    states, kl = torch.arange(5.0)[None, :, None, None], torch.tensor([1.0, 2.0, 4.0, 8.0])
    flags = {"done": cut, "truncated": cut, "terminated": torch.zeros_like(cut)}
    none = {name: torch.zeros_like(cut) for name in flags}
    values = torch.randn(2, 1, 4, 2, 1)
    batch = agents(observation=states[:, :4], state_value=values[0], **none)
    numbers = {"kl": kl[None, :, None, None], "reward": torch.zeros(())[None, None, None, None]}
    step = agents(observation=states[:, 1:], state_value=values[1], **flags, **numbers)
    batch["next"] = step
    batch["collector", "traj_ids"] = torch.zeros(1, 4, dtype=torch.int64)
    batch.names = [None, "time"]
    keys = KLKeys(reward=("agents", "reward"), log_prob=("agents", "action_log_prob"))
    transform = RewardAdjustmentTransform(SpyController(), keys=keys)
    sums = [transform(half)["next", "agents", "episode_kl"] for half in batch.split(2, 1)]
    for agent in torch.cat(sums, 1)[0, :, :, 0].unbind(1):
        assert agent.tolist() == [1.0, 3.0, 7.0, 15.0]
    with pytest.raises(ValueError, match="do not follow one another"):  # as the observations show
        transform(batch[:, [3, 2]])


@pytest.mark.parametrize("on_invalid", ["raise", "mask"])
def test_observing_needs_no_log_probs(on_invalid):
    batch = step_of(reward=[1.0, 1.0], kl=[1.0, 2.0], done=[False, True])
    batch["next", "terminated"] = batch["next", "done"]
    transform = RewardAdjustmentTransform(SpyController(), update_every=1, on_invalid=on_invalid)
    transform.observe(batch)
    assert transform.controller.calls == [(3.0, 1)]


def test_a_truncation_ends_a_trajectory_whose_flag_of_another_name_says_nothing():
    """Its id changes, since the flag "done" of the same agents is set."""
    stack, controller = spied(keys=KLKeys(done="terminated"))
    (batch,) = collect(WalkEnv((3,), truncates=True), policy(), frames=30, batches=1)
    stack(batch)
    assert total(controller)[0] == int(batch["next", "done"][:, :-1].sum()) > 5


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
