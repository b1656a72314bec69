"""What a controller is fed, in an env and on batches: which trajectories, once each."""

import copy
import math
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch.testing import assert_close
from torchrl.envs import SerialEnv, check_env_specs

from tests.helpers import (
    SpyController,
    WalkEnv,
    assert_same,
    collect,
    make_actor,
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
    PlannedKLController,
    RewardAdjustmentTransform,
    TargetKLController,
)
from torchrl_kl.feeding import ControllerFeed

any_place = pytest.mark.parametrize("place", ["env", "batch"])
any_per = pytest.mark.parametrize("per", ["trajectory", "step"])


def measured(place: str, stack: Any, env: Any, actor: Any, steps: int = 20, **kwargs) -> Any:
    """A rollout that the stack has penalized in the env, or as a batch."""
    if place == "env":
        return play(with_transforms(env, stack), actor, steps, **kwargs)
    return stack(play(env, actor, steps, **kwargs))


def adder(**kwargs) -> Any:
    return RewardAdjustmentTransform(SpyController(), update_every=1, **kwargs)


# Penalize first, then update.


@pytest.mark.parametrize(("per", "moves"), [("trajectory", [0, 0, 1, 1]), ("step", [0, 1, 2, 3])])
def test_penalize_first_then_update(per, moves):
    stack, _ = spied(per, step=1.0)
    after = play(with_transforms(WalkEnv((2,), longest=2), stack), policy(), 4)["next"]
    assert after["done"].flatten().tolist() == [False, True] * 4
    assert_close(after["kl_coeff"].squeeze(-1), 0.1 + torch.tensor([moves, moves]))
    assert_close(after["reward"], after["task_reward"] - after["kl_coeff"] * after["kl"])
    outside, _ = spied(per, step=1.0)
    for coeff in (0.1, 1.1):
        after = outside(play(WalkEnv((2,)), policy()))["next"]
        assert_close(after["kl_coeff"], torch.full((2, 12, 1), coeff))


# Pools.


@any_place
@pytest.mark.parametrize("estimator", ["k1", "k3"])
@pytest.mark.parametrize("update_every", [1, 7])
def test_finished_trajectories_are_pooled_and_told_once(place, update_every, estimator):
    stack, controller = spied(update_every=update_every, estimator=estimator)
    after = measured(place, stack, WalkEnv((3,)), policy(), 40)["next"]
    # The same from the data alone, in the order in which the trajectories end.
    fed = after["kl" if estimator == "k1" else "kl_estimate"]
    pool, expected, running = [], [], torch.zeros(3)
    for t in range(40):
        running = running + fed[:, t, 0]
        assert_close(after["episode_kl"][:, t, 0], running)
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
    assert_close(after["reward"], after["task_reward"] - after["kl_coeff"] * after["kl"])


@any_per
@pytest.mark.parametrize("padded", [False, True])
def test_observing_a_penalized_batch_tells_what_penalizing_it_would_have_told(per, padded):
    (penalizing, one), (observing, other) = spied(per), spied(per)
    for seed in range(3):
        batch = play(WalkEnv((3,)), policy(), 7, seed=seed)
        if padded:
            batch["collector", "mask"] = torch.arange(7).expand(3, 7) < 5
        penalized = penalizing(batch)
        if padded:
            penalized["next", "kl"][:, 5:] = 9.0
        before = penalized.clone()
        assert observing.observe(penalized) is None
        assert (penalized == before).all()
    assert one.calls == other.calls != []
    batch = play(WalkEnv((3,)), policy(), 7)
    with pytest.raises(KeyError, match="'kl' is not in the data.*put KLDivergenceTransform before"):
        observing.observe(batch)


# Trajectories that go on from batch to batch; tests/trust has their properties.


@pytest.mark.parametrize("truncates", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_trajectories_across_batches_are_those_of_the_env(truncates, frozen):
    (inside, told_inside), (outside, told_outside) = spied(), spied()
    for stack in (inside, outside) if frozen else ():
        stack.freeze()
    env = with_transforms(SerialEnv(2, lambda: WalkEnv(longest=9, truncates=truncates)), inside)
    for batch in collect(env, policy(), frames=8, batches=12):
        after = outside(without_kl(batch))
        assert_same(after["next", "episode_kl"], batch["next", "episode_kl"])
    assert total(told_outside)[0] == total(told_inside)[0]
    assert_close(total(told_outside)[1], total(told_inside)[1], atol=1e-4, rtol=0)
    assert (total(told_inside)[0] > 10) != frozen


def steps_of(kl: list[float], ids: list[int], states: list[int], init: list[int]) -> Any:
    """Steps of numbered states; a trajectory ends after the state 22."""
    ends = [state == 22 for state in states]
    data = step_of(reward=[0.0] * len(kl), kl=kl, done=ends)
    data["is_init"] = torch.tensor(init).bool()[None, :, None]
    data["collector", "traj_ids"] = torch.tensor([ids])
    data["observation"] = torch.tensor([[[state, 7.0] for state in states]])  # one that stays
    data["next", "observation"] = data["observation"] + torch.tensor([1.0, 0.0])
    # A collector may truncate at the end of a batch; it is no state.
    data["truncated"] = torch.zeros(1, len(kl), 1, dtype=torch.bool)
    data["next", "truncated"] = torch.arange(len(kl))[None, :, None] == len(kl) - 1
    return data


def test_a_reset_before_the_end_of_a_trajectory_begins_another():
    batch = steps_of([1.0] * 6, [0, 0, 0, 0, 1, 1], [20, 21, 21, 22, 10, 11], [1, 0, 1, 0, 1, 0])
    # An observation may be NaN: the steps follow one another all the same.
    batch["observation"][0, 1] = batch["next", "observation"][0, 0] = math.nan
    # What a critic that learns writes is no state.
    batch["state_value"], batch["next", "state_value"] = torch.rand(2, 1, 6, 1)
    adding = adder()
    running = adding(batch)["next", "episode_kl"].flatten()
    assert running.tolist() == [1.0, 2.0, 1.0, 2.0, 1.0, 2.0]
    assert adding.controller.calls == [(2.0, 1)]


def test_an_id_that_changes_where_others_are_done_ends_nothing():
    batch = step_of(reward=[0.0] * 4, kl=[1.0, 2.0, 4.0, 8.0], done=[False, False, False, True])
    batch["next", "others", "done"] = torch.tensor([False, True, False, False])[None, :, None]
    batch["collector", "traj_ids"] = torch.tensor([[0, 0, 1, 1]])
    adding = adder()
    assert adding(batch)["next", "episode_kl"].flatten().tolist() == [1.0, 3.0, 7.0, 15.0]
    assert adding.controller.calls == [(15.0, 1)]


def test_ids_restart_in_each_collector_and_frozen_evaluations_come_in_between():
    adding = adder()
    batches = [
        steps_of([1.0], [0], [20], [1]),
        steps_of([2.0], [0], [50], [1]),  # of another collector
        steps_of([4.0], [0], [22], [1]),  # of an evaluation: its end is not told
        steps_of([8.0], [0], [21], [0]),
        steps_of([16.0, 32.0], [0, 1], [22, 30], [0, 1]),
        steps_of([64.0], [0], [51], [0]),
        steps_of([128.0], [0], [51], [0]),  # nothing is open there any more
    ]
    sums = []
    for number, batch in enumerate(batches):
        adding.penalty.feed.frozen = number == 2
        sums += adding(batch)["next", "episode_kl"].flatten().tolist()
    assert sums == [1.0, 2.0, 4.0, 9.0, 25.0, 32.0, 66.0, 128.0]
    assert adding.controller.calls == [(25.0, 1)]


def test_an_id_whose_trajectory_has_ended_may_begin_again():
    adding = adder()
    for kl in (1.0, 4.0):  # of two collectors
        batch = steps_of([kl, 2 * kl], [0, 0], [21, 22], [0, 0])
        adding(batch.exclude("is_init"))
    assert adding.controller.calls == [(3.0, 1), (12.0, 1)]


def test_behind_an_end_another_trajectory_begins_whatever_the_ids_say():
    adding = adder()
    adding(steps_of([1.0, 2.0, 4.0], [0, 0, 0], [22, 21, 22], [1, 0, 0]))
    assert adding.controller.calls == [(3.5, 2)]


def test_without_ids_each_row_begins_a_trajectory():
    adding, batch = adder(), steps_of([1.0, 2.0], [0, 0], [21, 22], [0, 0])
    adding(batch.exclude(("collector", "traj_ids")))
    assert adding.controller.calls == [(3.0, 1)]


def test_padding_may_hold_anything():
    adding, batch = adder(), steps_of([1.0, 2.0, 4.0], [0, 0, 0], [22, 5, 9], [1, 0, 0])
    batch["collector", "mask"] = torch.tensor([[True, False, False]])
    adding(batch)
    assert adding.controller.calls == [(1.0, 1)]
    hole = steps_of([1.0, 2.0, 4.0], [1, 1, 1], [20, 21, 22], [1, 0, 0])
    hole["collector", "mask"] = torch.tensor([[True, False, True]])
    hole["observation"][0, 1] = hole["next", "observation"][0, 1] = -1.0
    adding(hole)
    assert adding.controller.calls == [(1.0, 1), (5.0, 1)]


def test_a_shuffled_batch_that_kept_the_name_time_is_refused():
    controller = AdaptiveKLController(0.1, target=0.1, horizon=100)
    stack = KLConstrainedTransform(make_actor(), controller)
    batch = play(WalkEnv((2,), longest=9), policy(), 30)
    shuffled = batch[:, torch.randperm(30)]
    shuffled.names = [None, "time"]
    before = copy.deepcopy(stack.state_dict())
    text = "steps of the batch do not follow one another.*shuffle after the stack"
    with pytest.raises(RuntimeError, match=text):
        stack(shuffled)
    assert_close(stack.state_dict(), before, rtol=0, atol=0)
    for other in (0.1, AdaptiveKLController(0.1, target=0.1, horizon=100, per="step")):
        KLConstrainedTransform(make_actor(), other)(shuffled)  # nobody asks for trajectories


def test_a_flat_batch_cannot_feed_a_controller_of_trajectories():
    batch = play(WalkEnv((2,)), policy()).reshape(-1)
    stack, _ = spied()
    with pytest.raises(RuntimeError, match=r"nats per trajectory.*shape \(24,\).*`time_dim`"):
        stack(batch)
    assert "episode_kl" not in stack.freeze()(batch)["next"].keys()
    KLConstrainedTransform(make_actor(), 0.1)(batch)
    per_step, controller = spied("step")
    per_step(batch)
    assert total(controller)[0] == 24


# A call that raises has changed nothing.


class Refusing(TargetKLController):
    """May refuse an update."""

    refuses = False

    def next_coeff(self, kl: float, n_steps: int) -> float:
        if self.refuses:
            raise ValueError("not now")
        return self.coeff.item() + 1.0


@pytest.mark.parametrize(
    ("key", "error"),
    [
        ("action_log_prob", r"the KL penalty .*'action_log_prob'.* has 1 of 24"),
        (("next", "reward"), "'reward'.* has 1 of 24"),
        ("advantage", "'advantage' already"),
        (None, "not now"),
    ],
)
def test_a_call_that_raises_has_changed_nothing(key, error):
    """Neither the pool, nor the table of open trajectories, nor the coefficient, nor its input."""
    controller = Refusing(0.1, 1.0)
    stack = KLConstrainedTransform(make_actor(), controller, update_every=2)
    first, second = collect(WalkEnv((4,), longest=8), policy(), frames=24, batches=2)
    stack(first)
    before, wrong = copy.deepcopy(stack.state_dict()), second.clone()
    if key is not None:
        spoiled = wrong.get(key, torch.zeros(4, 6)).clone()
        spoiled[1, 3] = math.nan
        wrong.set(key, spoiled)
    given, controller.refuses = wrong.clone(), key is None
    with pytest.raises((ValueError, RuntimeError), match=error):
        stack(wrong)
    assert_close(stack.state_dict(), before, rtol=0, atol=0)
    assert set(wrong.keys(True, True)) == set(given.keys(True, True))
    controller.refuses, alone = False, KLConstrainedTransform(make_actor(), 0.1)
    expected = [alone(each)["next", "episode_kl"] for each in (first, second)][1]
    assert stack(second)["next", "episode_kl"].equal(expected)


# Plans.


def test_a_controller_that_plans_gets_the_same_rewards_in_an_env_and_on_a_batch():
    heard = []

    class Listening(AdaptiveKLController):
        def observe_rewards(self, rewards, *, groups=None, log_ratios: Any = None, lengths=None):
            heard[-1] += zip(rewards.tolist(), log_ratios.tolist(), strict=True)
            assert (lengths is None) == (self.per == "trajectory")
            return self.coeff.item()

    for place in ("env", "batch"):
        heard.append([])
        stack = KLConstrainedTransform(make_actor(), Listening("plan", 0.3, 100))
        batch = measured(place, stack, WalkEnv((3,), longest=6), policy(), 30)
        assert (stack.controller.planning, int(stack.statistics.count)) == (True, 0)
    step, returns = batch["next"], []
    for row in step.unbind(0):
        ends = row["done"].flatten().nonzero().flatten() + 1
        parts = (row[name].tensor_split(ends)[:-1] for name in ("task_reward", "kl"))
        returns += [(one.sum().item(), two.sum().item()) for one, two in zip(*parts, strict=True)]
    assert len(returns) > 15
    for each in heard:
        assert_close(torch.tensor(sorted(each)), torch.tensor(sorted(returns)), atol=1e-4, rtol=0)


def test_before_the_plan_no_kl_is_pooled_and_it_gets_the_lengths():
    feed = ControllerFeed()
    controller: Any = PlannedKLController(0.3, per="step")
    feed.pool(controller, torch.ones(2))
    feed.plan_from(controller, rewards=torch.ones(2), lengths=torch.tensor([3, 4]))
    assert controller.plan.samples[:, 2].tolist() == [3, 4]
    assert (controller.planning, int(feed.statistics.count)) == (True, 0)


def test_trajectories_that_begin_alike_are_a_group_of_the_plan():
    controller: Any = PlannedKLController(0.3)
    batch = steps_of([0.0] * 5, [0, 0, 1, 2, 2], [21, 22, 22, 21, 22], [1, 0, 1, 1, 0])
    RewardAdjustmentTransform(controller)(batch)
    one, other, third = controller.plan.samples[:, 3].tolist()
    assert one == third != other


def test_a_trajectory_whose_first_step_is_in_an_earlier_batch_is_in_no_group():
    """But steps that do not count are no beginning."""
    for seen in (True, False):
        controller: Any = PlannedKLController(0.3)
        adding = RewardAdjustmentTransform(controller)
        first = steps_of([0.0, 0.0], [7, 8], [10, 20], [1, 1])
        first["collector", "mask"] = torch.tensor([[True, seen]])
        adding(first)
        batch = steps_of([0.0] * 4, [8, 8, 9, 9], [21, 22, 21, 22], [0, 0, 1, 0])
        adding(batch)
        one, other = controller.plan.samples[:, 3].tolist()
        assert (one == other) != seen


def test_a_batch_is_penalized_with_the_coefficient_that_is_planned_from_it():
    coin, controller = [0.0, 1.0] * 100, PlannedKLController(0.3)
    batch = step_of(reward=coin, kl=[0.0] * 200, done=[True] * 200)
    after = RewardAdjustmentTransform(controller)(batch)["next"]
    coeff = PlannedKLController(0.3).observe_rewards(torch.tensor(coin))
    assert controller.coeff.item() == pytest.approx(coeff)  # their KL does not move it
    assert_close(after["kl_coeff"], torch.full_like(after["kl_coeff"], coeff))


@any_place
@any_per
def test_one_that_plans_again_reads_all_rewards_and_is_updated(place, per):
    controller: Any = PlannedKLController(0.3, init_coeff=0.01, per=per)
    stack = KLConstrainedTransform(make_actor(), controller)
    batch = measured(place, stack, WalkEnv((16,), longest=6), policy(), 20)
    assert controller.n_updates > 0
    # A target of 0.3 nats for rewards of about 1, of a step or of six.
    assert 0.1 < controller.plan.made < 100
    assert len(batch["next", "kl_coeff"].unique()) > (place == "env")


def test_the_sums_of_a_plan_are_entries_of_the_env():
    stack = KLConstrainedTransform(make_actor(), ExponentialKLController("plan", 0.3))
    env = with_transforms(WalkEnv((2,)), stack)
    check_env_specs(env)
    batch = play(env, policy())
    step = batch["next"]
    expected = torch.cat([step["task_reward"], step["kl"]], -1)
    starts = batch["next", "done"].roll(1, 1).squeeze(-1)
    starts[:, 0] = True
    assert (batch["episode_sums"][starts] == 0).all()
    assert_close(step["episode_sums"], batch["episode_sums"] + expected)


# Rows that are skipped, flags.


@any_per
def test_rows_that_are_skipped_are_not_counted(per):
    stack, controller = spied(per)
    env = with_transforms(SerialEnv(4, WalkEnv), stack)
    batch = play(env, policy(), 20, break_when_any_done=False, break_when_all_done=True)
    length = batch["next", "done"].squeeze(-1).int().argmax(-1) + 1
    assert length.min() < length.max() == batch.shape[-1]
    n, kl = total(controller)
    assert n == (4 if per == "trajectory" else int(length.sum()))
    ran = torch.arange(batch.shape[-1]) < length[:, None]
    expected = batch["next", "kl"].squeeze(-1)[ran].double().sum().item()
    assert_close(kl, expected, atol=1e-5, rtol=0)


def test_the_done_flag_can_be_named():
    ends, never = [False, True, False, True], [False] * 4
    batch = step_of(reward=[1.0] * 4, kl=[1.0, 2.0, 4.0, 8.0], done=never, my_end=ends)
    adding = adder(keys=KLKeys(done="my_end"))
    after = adding(batch)["next", "episode_kl"]
    assert after.flatten().tolist() == [1.0, 3.0, 4.0, 12.0]
    assert adding.controller.calls == [(7.5, 2)]


def test_a_done_flag_that_is_not_there_is_an_error():
    batch = step_of(reward=[1.0], kl=[1.0])
    with pytest.raises(KeyError, match=r"there is no 'done'.*`KLKeys\(done=\.\.\.\)`. .*has kl,"):
        RewardAdjustmentTransform(0.1)(batch)
    batch["next", "done"] = torch.ones(1, 1, 1, dtype=torch.bool)
    with pytest.raises(KeyError, match="nope"):
        RewardAdjustmentTransform(0.1, keys=KLKeys(done="nope"))(batch)
    with pytest.raises(KeyError, match="nope"):
        play(with_transforms(WalkEnv(), spied(keys=KLKeys(done="nope"))[0]), policy())


def test_a_batch_whose_root_is_all_zeros_is_not_fake():
    """A collapsed policy: observation 0, action 0, log-prob 0."""
    numbers = {"reward": torch.ones(2, 1), "kl": torch.ones(2, 1), "done": torch.ones(2, 1).bool()}
    batch = TensorDict(action=torch.zeros(2), next=TensorDict(numbers, batch_size=2), batch_size=2)
    adding = adder(time_dim=-1)
    adding(batch)
    assert adding.controller.calls == [(1.0, 2)]


def test_a_row_goes_on_with_the_newest_entry_of_its_id_and_state():
    adding = adder()
    for kl in (1.0, 2.0):  # of two collectors, of which the first has ended inside a trajectory
        adding(steps_of([kl], [0], [20], [1]))
    adding(steps_of([4.0, 8.0], [0, 0], [21, 22], [0, 0]))
    assert adding.controller.calls == [(14.0, 1)]


def test_two_rows_do_not_go_on_with_one_entry():
    adding = adder()
    adding(steps_of([1.0], [0], [20], [1]))
    batch: Any = torch.cat([steps_of([kl, kl], [0, 0], [21, 22], [0, 0]) for kl in (2.0, 4.0)])  # type: ignore[arg-type]
    batch.names = [None, "time"]
    adding(batch)
    assert adding.controller.calls == [(5.0, 1)]  # the other one's beginning is not known


def test_a_part_of_a_trajectory_behind_another_one_is_not_a_whole_one():
    adding = adder()
    batch = steps_of([1.0, 2.0, 4.0, 8.0], [0, 1, 0, 2], [20, 50, 22, 22], [1, 1, 0, 1])
    adding(batch.exclude("is_init"))
    assert adding.controller.calls == [(8.0, 1)]


def test_a_plan_compares_first_steps_that_count():
    controller: Any = PlannedKLController(0.3)
    batch = steps_of([0.0] * 6, [0, 0, 1, 1, 2, 2], [20, 21, 20, 21, 21, 22], [1, 0, 1, 0, 1, 0])
    batch["next", "done"][:, [1, 3]] = True
    batch["observation"][0, [0, 2], 0] = torch.tensor([8.0, 9.0])  # that an env may have left
    batch["collector", "mask"] = torch.tensor([[False, True, False, True, True, True]])
    RewardAdjustmentTransform(controller)(batch)
    one, other, third = controller.plan.samples[:, 3].tolist()
    assert one == other == third


def test_running_sums_go_on_from_batch_to_batch_for_a_controller_of_steps():
    adding = RewardAdjustmentTransform(SpyController(per="step"))
    batches = [steps_of([1.0], [0], [20], [1]), steps_of([2.0, 4.0], [0, 0], [21, 22], [0, 0])]
    sums = [adding(batch)["next", "episode_kl"].flatten().tolist() for batch in batches]
    assert sums == [[1.0], [3.0, 7.0]]


def test_a_plan_of_a_flat_batch_is_told_how_far_the_policy_has_moved():
    heard = []

    class Listening(PlannedKLController):
        def observe_rewards(self, rewards, *, log_ratios: Any = None, **_: Any):
            heard.append((rewards.tolist(), log_ratios.tolist()))
            return self.coeff.item()

    entries = {"reward": torch.tensor([[1.0], [2.0]]), "kl": torch.tensor([[0.5], [0.25]])}
    step = TensorDict(entries | {"done": torch.ones(2, 1).bool()}, batch_size=2)
    adding = RewardAdjustmentTransform(Listening(0.3, per="step"))
    adding(TensorDict(next=step, batch_size=2))
    adding.freeze()(TensorDict(next=step, batch_size=2))
    adding.penalty.feed.plan_from(adding.controller, rewards=torch.ones(1))
    assert heard == [([1.0, 2.0], [0.5, 0.25])]
