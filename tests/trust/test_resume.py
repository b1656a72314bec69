"""A run that is stopped after any step and resumed is the uninterrupted one, bit for bit."""

import copy
import os
import random
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from tests.helpers import WalkEnv, make_actor, moved, play
from tests.trust import runs
from tests.trust.worlds import World, make_batch
from torchrl_kl import AdaptiveKLController, KLConstrainedTransform, KLMonitor, PlannedKLController

N_STEPS = 4
KINDS = [runs.Postproc, runs.InEnv, runs.OwnLoop, runs.Loss, runs.Responses]
RECIPE = Path(__file__).parents[2] / "docs" / "recipes" / "checkpoint_and_resume.py"


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


def whole_state(run: runs.Run) -> dict[str, Any]:
    """All but open trajectories: the ids of a collector that is built anew begin at 0 again."""
    states = {name: part.state_dict() for name, part in run.parts.items() if name != "generator"}
    if isinstance(run, runs.Postproc):
        stack = states["stack"].items()
        states["stack"] = {name: value for name, value in stack if "feed._extra" not in name}
        del states["monitor"]["trajectories"]
    return states


@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_on_bit_for_bit_after_any_step(kind, tmp_path):
    run, logged = kind(seed=0), []
    for step in range(1, N_STEPS + 1):
        logged += runs.go_on(run, step)
        runs.save(run, tmp_path / str(step))
    assert len({row[-1] for row in logged}) > 1  # something changes
    for stopped in range(1, N_STEPS):
        resumed = kind(seed=10)  # other weights, another reference and other random numbers
        runs.load(resumed, tmp_path / str(stopped))
        assert runs.go_on(resumed, N_STEPS) == logged[stopped:]
        check_equal(whole_state(resumed), whole_state(run))


def worlds(n_batches: int, *, is_init: bool) -> list[Any]:
    """Batches of envs whose trajectories go on from one to the next."""
    world, rng = World(0, 3, 1), random.Random(0)
    rows = [world.play(rng, rng.randint(1, 6), 0.3, 1.0, cut=False) for _ in range(n_batches)]
    batches = [make_batch(each, is_init=is_init, masked=False, per_agent=False) for each in rows]
    for batch in batches:
        batch["next", "kl"] = batch.pop("value") * 2.0**-30
    return batches


@pytest.mark.parametrize("is_init", [False, True])
def test_a_monitor_goes_on_with_open_trajectories(is_init):
    batches = worlds(10, is_init=is_init)
    whole, states = KLMonitor(AdaptiveKLController(1.0, target=0.5, horizon=100)), []
    for batch in batches:
        states.append(copy.deepcopy(whole.state_dict()))
        whole(batch)
    for first, state in enumerate(states):
        resumed = KLMonitor(whole.controller)
        resumed.load_state_dict(state)
        for batch in batches[first:]:
            resumed(batch)
        check_equal(resumed.state_dict(), whole.state_dict())
        assert resumed.counts == whole.counts


@pytest.mark.filterwarnings("ignore:the KL controller has not been updated:UserWarning")
@pytest.mark.parametrize(("per", "target"), [("trajectory", 0.3), ("step", 0.1)])
def test_a_plan_goes_on_where_the_batches_go_on(per, target):
    """Pieces of trajectories are not taken for whole ones."""
    rows = play(WalkEnv((6,), longest=6), moved(make_actor(), scale=0.05), 60)
    ids = rows["next", "done"].squeeze(-1).long().cumsum(1).roll(1, 1)
    ids[:, 0] = 0
    rows["collector", "traj_ids"] = ids + 100 * torch.arange(6)[:, None]

    def planning(before: KLConstrainedTransform | None) -> KLConstrainedTransform:
        with torch.random.fork_rng():
            controller = PlannedKLController(target, per=per)
            stack = KLConstrainedTransform(make_actor(), controller, update_every=4)
        if before is not None:
            stack.load_state_dict(copy.deepcopy(before.state_dict()))
        return stack

    stack, resumed, waited = planning(None), planning(None), 0
    for batch in rows.split(3, 1):
        batch.names = [None, "time"]
        resumed = planning(resumed)
        check_equal(resumed(batch)["next", "reward"], stack(batch)["next", "reward"])
        check_equal(dict(resumed.state_dict()), dict(stack.state_dict()))
        waited += stack.controller.planning
    assert waited
    assert not stack.controller.planning


def test_the_recipe_goes_on_bit_for_bit(tmp_path):
    train = runpy.run_path(str(RECIPE))["train"]
    whole = train(str(tmp_path / "whole"), 4)
    assert len(set(whole)) == 4
    assert train(str(tmp_path / "stopped"), 2) == whole[:2]
    assert train(str(tmp_path / "stopped"), 4) == whole
    assert len(RECIPE.read_text().splitlines()) < 60


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_recipe_goes_on_bit_for_bit_after_sigkill(tmp_path):
    """At random moments of steps and of saves."""
    rng, file, killed = random.Random(0), tmp_path / "killed", 0
    code = f"import runpy; train = runpy.run_path({str(RECIPE)!r})['train']; "
    environment = os.environ | {"OMP_NUM_THREADS": "1"}

    def start(path: Path) -> subprocess.Popen:
        command = [sys.executable, "-W", "ignore", "-c", code + f"print(train({str(path)!r}, 40))"]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    def saved() -> int:
        return file.stat().st_mtime_ns if file.exists() else 0

    for _ in range(6):
        process, before = start(file), saved()
        while process.poll() is None and saved() == before:
            time.sleep(0.01)
        time.sleep(rng.random() * 0.1)
        process.send_signal(signal.SIGKILL)
        process.communicate()  # waits, and closes the pipe
        killed += process.returncode == -signal.SIGKILL
    assert killed > 2
    assert start(file).communicate()[0] == start(tmp_path / "whole").communicate()[0]
