"""What the controller is told, and when."""

import copy
import math
from functools import partial
from typing import cast

import pytest
import torch
from tensordict import TensorDict
from torch.testing import assert_close

from tests.helpers import (
    SpyController,
    WalkEnv,
    collect,
    make_actor,
    play,
    policy,
    spied,
    step_of,
    with_transforms,
)
from torchrl_kl import (
    GPT,
    AdaptiveKLController,
    ExponentialKLController,
    KLConstrainedTransform,
    KLPenaltyLoss,
    KLRewardTransform,
    KLStatistics,
    ResponseKLTransform,
    RewardAdjustmentTransform,
    TargetKLController,
)


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


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_a_batch_at_which_a_controller_has_failed_can_be_passed_again(error):
    """The sums of its trajectories had been added, after any error but a ValueError."""

    class Failing(TargetKLController):
        fails = False

        def _next_coeff(self, kl: float, n_steps: int) -> float:
            if self.fails:
                raise error
            return self.coeff.item()

    alone, again = (KLConstrainedTransform(make_actor(), Failing(0.1, 1.0)) for _ in range(2))
    for batch in collect(WalkEnv((4,), longest=8), policy(), frames=24, batches=4):
        cast(Failing, again.controller).fails = True
        with pytest.raises(error):
            again(batch)
        cast(Failing, again.controller).fails = False
        sums = [stack(batch)["next", "episode_kl"] for stack in (alone, again)]
        assert sums[1].equal(sums[0])


def test_a_deadband_on_single_values_is_refused():
    message = "`update_every` must be at least 2 for a controller with a deadband, got 1: a single"
    for make in (RewardAdjustmentTransform, partial(KLConstrainedTransform, make_actor())):
        with pytest.raises(ValueError, match=message):
            make(AdaptiveKLController(0.1, 0.5, 100, deadband=0.5), update_every=1)
        make(AdaptiveKLController(0.1, 0.5, 100, deadband=0.5), update_every=2)
        make(AdaptiveKLController(0.1, 0.5, 100), update_every=1)


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


@pytest.mark.parametrize("per", ["trajectory", "step"])
def test_observing_leaves_out_what_was_masked(per):
    batch = play(WalkEnv((3,), longest=3), policy(), 7)
    done = batch["next", "done"].squeeze(-1)
    first = int(done[2].int().argmax()) + 1  # steps of the first trajectory of that row
    batch["action_log_prob"][2, :first] = -math.inf
    batch["action_log_prob"][0, 3] = math.nan
    batch["next", "reward"][1, 4] = math.inf
    penalizing, observing = (
        KLConstrainedTransform(
            policy(), SpyController(per=per), reference=make_actor(seed=1), on_invalid="mask"
        )
        for _ in range(2)
    )
    with pytest.warns(UserWarning, match="got invalid numbers: 'action_log_prob' has"):
        penalized = penalizing(batch)
    observing.observe(penalized)
    ((kl, count),) = cast(SpyController, penalizing.controller).calls
    assert cast(SpyController, observing.controller).calls == [(kl, count)]
    assert count == (21 - first - 2 if per == "step" else int(done.sum()) - 1)


def test_observing_what_was_not_measured_is_an_error():
    stack, _ = spied()
    with pytest.raises(
        KeyError, match="'kl' is not in the data.*put KLDivergenceTransform before this transform"
    ):
        stack.observe(play(WalkEnv((3,)), policy(), 7))


feeding = pytest.mark.parametrize(
    "make",
    [
        KLConstrainedTransform,
        KLRewardTransform,
        lambda _, coeff: RewardAdjustmentTransform(coeff),
        KLPenaltyLoss,
        lambda _, coeff: ResponseKLTransform(GPT(vocab_size=11, block_size=9), coeff),
    ],
)


@feeding
@pytest.mark.parametrize(
    ("name", "value"),
    [("update_every", 4), ("on_invalid", "mask"), ("estimator", "k3"), ("coeff", 0.2)],
)
def test_settings_that_would_change_nothing_are_refused(make, name, value):
    """They became attributes that nobody reads."""
    fed = make(make_actor(), 0.1)
    with pytest.raises(AttributeError, match=f"`{name}` of {type(fed).__name__} stays as it was"):
        setattr(fed, name, value)


def test_a_class_of_the_user_may_have_entries_of_its_own():
    class Mine(KLConstrainedTransform):
        coeff = property(
            lambda self: self.controller.coeff,
            lambda self, value: self.controller.coeff.fill_(value),
        )

    mine = Mine(make_actor(), 0.1)
    mine.coeff, mine.estimator = 0.2, "mine"
    assert mine.controller.coeff == 0.2


def test_the_temperature_of_a_transform_stays():
    """It became that of the next reference only."""
    transform = ResponseKLTransform(GPT(vocab_size=11, block_size=9), 0.1, temperature=0.7)
    with pytest.raises(AttributeError, match="temperature"):
        setattr(transform, "temperature", 1.0)  # noqa: B010
    assert transform.temperature == 0.7


@feeding
@pytest.mark.parametrize("name", ["controller", "statistics"])
def test_another_controller_is_refused(make, name):
    """It became a submodule, and the coefficient stayed that of the first one."""
    fed = make(make_actor(), 0.1)
    others = {"controller": ExponentialKLController(0.7, target=1.0), "statistics": KLStatistics()}
    with pytest.raises(
        AttributeError, match=f"`{name}` of {type(fed).__name__} cannot be replaced"
    ):
        setattr(fed, name, others[name])
    assert fed.controller.coeff.item() == 0.1
    assert fed.statistics is fed.feed.statistics


@pytest.mark.slow
def test_a_compiled_stack_moves_and_plans_as_one_that_is_not():
    def stack() -> KLConstrainedTransform:
        controller = AdaptiveKLController("plan", 0.5, 1000, per="step")
        return KLConstrainedTransform(make_actor(), controller, time_dim=-1)

    plain = stack()
    compiled = copy.deepcopy(plain)
    call = torch.compile(compiled, backend="aot_eager")
    for _ in range(3):
        batch = play(WalkEnv((8,)), policy()).detach()
        assert_close(call(batch.clone())["next", "reward"], plain(batch)["next", "reward"])
        assert_close(compiled.controller.coeff, plain.controller.coeff)
    assert not plain.controller.planning
