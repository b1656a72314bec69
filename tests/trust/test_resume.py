"""A run that is stopped after any step and resumed is the uninterrupted one, bit for bit."""

import copy
import random
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from torchrl.envs import SerialEnv
from torchrl.envs.utils import ExplorationType, set_exploration_type

from tests.helpers import WalkEnv, make_actor, moved, play, spied, with_transforms
from tests.streams import Step, cut, make_batch, make_streams, values_of
from tests.trust import runs
from torchrl_kl import (
    AdaptiveKLController,
    KLConstrainedTransform,
    KLMonitor,
    PlannedKLController,
)
from torchrl_kl._feeding import ControllerFeed
from torchrl_kl.controllers.trajectories import OpenTrajectories
from torchrl_kl.envs import DigitLanguageEnv

N_STEPS = 5
KINDS = [
    runs.Postproc,
    runs.InEnv,
    runs.OwnLoop,
    runs.FixedReference,
    runs.Loss,
    runs.Responses,
    runs.InProcess,
]


def whole_state(run: runs.Run) -> dict[str, Any]:
    return {name: part.state_dict() for name, part in run.parts.items() if name != "generator"}


def check_equal(one: Any, other: Any) -> None:
    """Exactly: numbers, tensors and what is nested around them."""
    if isinstance(one, torch.Tensor):
        assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            check_equal(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            check_equal(a, b)
    else:
        assert one == other or one != one


def go_on(run: runs.Run, folder: Path | None) -> list[list[float]]:
    """What each step logs; the run is saved to a folder, if one is given, after each step."""
    logged = []
    while run.steps_done < N_STEPS:
        logged += runs.go_on(run, run.steps_done + 1)
        if folder is not None:
            runs.save(run, folder / str(run.steps_done))
    return logged


@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_on_bit_for_bit_after_any_step(kind, tmp_path):
    run = kind(seed=0)
    logged = go_on(run, tmp_path)
    assert len({row[-1] for row in logged}) > 1  # something changes
    # Texts that a fixed reference goes on with are read anew after each save, which rounds.
    folder = tmp_path if kind is runs.FixedReference else None
    for stopped in range(1, N_STEPS):
        resumed = kind(seed=10)  # other weights, another reference and other random numbers
        runs.load(resumed, tmp_path / str(stopped))
        assert go_on(resumed, folder) == logged[stopped:]
        check_equal(whole_state(resumed), whole_state(run))


@pytest.mark.slow
def test_it_goes_on_bit_for_bit_with_coefficients_of_a_worker(tmp_path):
    run = runs.Workers(seed=0)
    try:
        logged = runs.go_on(run, 2)
        runs.save(run, tmp_path / "two")
        logged += runs.go_on(run, 4)
    finally:
        run.close()
    resumed = runs.Workers(seed=10)
    try:
        runs.load(resumed, tmp_path / "two")
        assert runs.go_on(resumed, 4) == logged[2:]
        check_equal(whole_state(resumed), whole_state(run))
    finally:
        resumed.close()
    # One worker, in another process, is the same as none.
    alone = runs.InProcess(seed=0)
    assert runs.go_on(alone, 4) == logged
    check_equal(whole_state(alone), whole_state(run))


def new_feed() -> ControllerFeed:
    """Its controller counts what it is told, and moves with it."""
    return ControllerFeed(spied(step=0.125)[1], update_every=3)


def told_by(feed: ControllerFeed) -> list[tuple[float, int]]:
    controller: Any = feed.controller
    return controller.calls


def add(feed: ControllerFeed, rows: Any, stream: OpenTrajectories | None = None, **flags) -> Any:
    batch = make_batch(rows, states=True, is_init=False, **flags)
    batch.names = [None, "time"]
    return feed.add_batch(batch, values_of(rows), None, done_key="done", stream=stream)


@pytest.mark.parametrize("seed", range(20))
def test_sums_go_on_where_the_data_go_on(seed):
    """Trajectories cut anywhere, with truncations at the end of a batch."""
    rng = random.Random(seed)
    batches = cut(make_streams(rng, 3, 40), rng)
    feed, states, running = new_feed(), [], []
    for rows in batches:
        states.append((copy.deepcopy(feed.state_dict()), len(told_by(feed))))
        running.append(add(feed, rows))
    for first, (state, n_told) in enumerate(states):
        resumed = new_feed()
        resumed.load_state_dict(state)
        for rows, expected in zip(batches[first:], running[first:], strict=True):
            assert_close(add(resumed, rows), expected, rtol=0, atol=0)
        assert told_by(resumed) == told_by(feed)[n_told:]
        check_equal(dict(resumed.state_dict()), dict(feed.state_dict()))


TARGETS = [("trajectory", 0.3), ("step", 0.1), ("step", 2.0)]  # the last one plans by blocks


def planning(per: Any, target: float, before: Any = None) -> KLConstrainedTransform:
    """A stack that waits for rewards, or that goes on from the state of another one."""
    controller = PlannedKLController(target, per=per)
    with torch.random.fork_rng():
        stack = KLConstrainedTransform(make_actor(), controller, update_every=4)
    if before is not None:
        stack.load_state_dict(copy.deepcopy(before.state_dict()))
    return stack


@pytest.mark.parametrize(("per", "target"), TARGETS)
@pytest.mark.parametrize("n_steps", [3, 5])
def test_a_plan_goes_on_where_the_batches_go_on(per, target, n_steps):
    """Pieces of trajectories were taken for whole ones: a plan was too low by a factor of 2."""
    actor = moved(make_actor(), scale=0.05)
    rows = play(WalkEnv((6,), longest=6), actor, 60)
    ids = rows["next", "done"].squeeze(-1).long().cumsum(1).roll(1, 1)
    ids[:, 0] = 0
    rows["collector", "traj_ids"] = ids + 100 * torch.arange(6)[:, None]
    stack = planning(per, target)
    resumed = planning(per, target)
    waited = 0
    for batch in rows.split(n_steps, 1):
        batch.names = [None, "time"]
        resumed = planning(per, target, before=resumed)
        check_equal(resumed(batch)["next", "reward"], stack(batch)["next", "reward"])
        check_equal(whole_plan(resumed), whole_plan(stack))
        waited += stack.controller.planning
    assert waited or target == 2.0
    assert not stack.controller.planning


@pytest.mark.parametrize(("per", "target"), TARGETS)
def test_a_plan_goes_on_where_an_env_goes_on(per, target):
    actor = moved(make_actor(), scale=0.05)
    logged = []
    for stops in (False, True):
        torch.manual_seed(0)
        stack = planning(per, target)
        env = with_transforms(WalkEnv((4,), longest=6), stack)
        found = []
        with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
            td = env.reset()
            for _ in range(80):
                done, td = env.step_and_maybe_reset(actor(td))
                found.append((done["next", "reward"], whole_plan(stack)))
                if stops:
                    stack = planning(per, target, before=stack)
                    env = with_transforms(WalkEnv((4,), longest=6), stack)
        assert not stack.controller.planning
        logged.append(found)
    check_equal(*logged)


def whole_plan(stack: KLConstrainedTransform) -> tuple[float, torch.Tensor]:
    plan = stack.controller.plan
    assert plan is not None
    return stack.controller.coeff.item(), plan.samples


def episodes(n: int, *, first_id: int) -> list[list[Step]]:
    """Rows of one episode each, all ended by their time limit; others for each `n`."""
    rng, rows = random.Random(n), []
    for row in range(4):
        values = [rng.randint(-40, 40) / 8 for _ in range(3)]
        flags = [[False], [False], [True]]
        rows.append(
            [
                Step(first_id + row, [value], t == 0, [False], flags[t], 100 * n + 10 * row + t)
                for t, value in enumerate(values)
            ]
        )
    return rows


@pytest.mark.parametrize("of_collector", [False, True])
@pytest.mark.parametrize("saved", [1, 2])
def test_what_a_batch_truncates_counts_once_a_collector_begins_anew(of_collector, saved):
    """It is known of each batch's episodes only from the next batch that they are over."""
    n_batches, last = 6, 5

    def new_stream() -> OpenTrajectories | None:
        return OpenTrajectories() if of_collector else None

    whole, stream = new_feed(), new_stream()
    states = []
    for n in range(n_batches):
        states.append((copy.deepcopy(whole.state_dict()), len(told_by(whole))))
        add(whole, episodes(n, first_id=4 * n), stream)
    assert sum(n for _, n in told_by(whole)) == 4 * last
    for first, (state, n_told) in enumerate(states):
        for _ in range(saved - 1):  # it is saved again before the first batch
            between = new_feed()
            between.load_state_dict(state)
            state = copy.deepcopy(between.state_dict())
        resumed, stream = new_feed(), new_stream()
        resumed.load_state_dict(state)
        for n in range(first, n_batches):
            # The ids of the resumed run begin at 0.
            add(resumed, episodes(n, first_id=4 * (n - first)), stream)
        assert told_by(resumed) == told_by(whole)[n_told:]
        check_equal(resumed.statistics.state_dict(), whole.statistics.state_dict())


@pytest.mark.parametrize("of_collector", [False, True])
def test_what_a_batch_truncates_counts_once_where_a_state_is_loaded_in_between(of_collector):
    runs = []
    for loads in (False, True):
        feed, stream = new_feed(), OpenTrajectories() if of_collector else None
        for n in range(5):
            add(feed, episodes(n, first_id=4 * n), stream)
            if loads:
                feed.load_state_dict(copy.deepcopy(feed.state_dict()))
        runs.append(told_by(feed))
    assert runs[0] == runs[1]
    assert sum(n for _, n in runs[0]) == 4 * 4


def test_a_refused_batch_keeps_what_the_last_run_truncated():
    run, resumed = new_feed(), new_feed()
    add(run, episodes(0, first_id=0), OpenTrajectories())
    resumed.load_state_dict(run.state_dict())
    bad, stream = episodes(1, first_id=0), OpenTrajectories()
    bad[0][0].value, bad[0][-1].terminated = [float("nan")], [True]
    with pytest.raises(ValueError, match="must be finite"):
        add(resumed, bad, stream)
    assert not told_by(resumed)
    add(resumed, episodes(1, first_id=0), stream)
    assert [n for _, n in told_by(resumed)] == [4]


RECIPE = Path(__file__).parents[2] / "docs" / "recipes" / "checkpoint_and_resume.py"


def test_the_recipe_goes_on_bit_for_bit(tmp_path):
    train = runpy.run_path(str(RECIPE))["train"]
    whole = train(str(tmp_path / "whole"), 4)
    assert len(set(whole)) == 4
    assert train(str(tmp_path / "stopped"), 2) == whole[:2]
    assert train(str(tmp_path / "stopped"), 4) == whole
    assert len(RECIPE.read_text().splitlines()) < 60


def test_a_monitor_goes_on_with_open_trajectories():
    rng, batches = random.Random(0), []
    for rows in cut(make_streams(rng, 3, 40), rng):
        batch = make_batch(rows, states=True, is_init=False)
        batch.names = [None, "time"]
        batch["next", "kl"] = values_of(rows)
        batches.append(batch)
    whole, states = KLMonitor(AdaptiveKLController(1.0, target=0.5, horizon=100)), []
    for batch in batches:
        states.append(copy.deepcopy(whole.state_dict()))
        whole(batch)
    for first, state in enumerate(states):
        resumed = KLMonitor(whole.controller)
        resumed.load_state_dict(state)
        for batch in batches[first:]:
            resumed(batch)
        # What is open is kept under other numbers of calls.
        check_equal(resumed.state_dict()["pools"], whole.state_dict()["pools"])
        check_equal(resumed.counts, whole.counts)


def test_the_generator_of_an_env_goes_on():
    for make in (DigitLanguageEnv, lambda: SerialEnv(2, DigitLanguageEnv)):
        env: Any = make()
        resumed: Any = make()
        env.reset()
        resumed.reset()
        state = copy.deepcopy(env.state_dict())
        expected = env.reset()["tokens"].clone()
        resumed.load_state_dict(state)
        assert resumed.reset()["tokens"].equal(expected)
    # TorchRL's collectors save nothing of an env without transforms.
    DigitLanguageEnv().load_state_dict({})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        DigitLanguageEnv().load_state_dict({"other": torch.zeros(1)})
