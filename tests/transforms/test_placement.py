"""Where the stack may be placed, and uses that would change numbers silently."""

import copy
import gc
import pickle
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import Categorical
from torch.testing import assert_close
from torchrl.data import LazyTensorStorage, MultiStep, ReplayBuffer
from torchrl.envs import (
    CatTensors,
    DTypeCastTransform,
    EnvBase,
    MeanActionSelector,
    MultiStepTransform,
    ObservationNorm,
    RenameTransform,
    RewardScaling,
    RewardSum,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    VecNormV2,
    check_env_specs,
)

from tests.helpers import (
    N_ACTIONS,
    N_OBS,
    SpyController,
    WalkEnv,
    assert_same,
    collect,
    compose,
    make_actor,
    moved,
    play,
    policy,
    probabilistic_actor,
    spied,
    total,
    with_transforms,
)
from tests.laws.transform_laws import forks, parallel
from torchrl_kl import (
    AdaptiveKLController,
    KLConstrainedTransform,
    KLDivergenceTransform,
    KLRewardTransform,
    ReferenceModelLogProbTransform,
    RewardAdjustmentTransform,
)

# TorchRL calls VecNormV2 experimental in envs with a batch size; its numbers are not asked here.
pytestmark = pytest.mark.filterwarnings("ignore:Support of VecNormV2:UserWarning")
COEFF = 0.5


def stack(controller: Any = COEFF) -> Any:
    return KLConstrainedTransform(make_actor(), controller)


def preset() -> Any:
    return KLRewardTransform(make_actor(), COEFF)


def adaptive(per: Any = "trajectory") -> Any:
    return AdaptiveKLController(0.1, target=0.5, horizon=100, per=per)


def walk(*transforms: Any, steps: int = 4) -> Any:
    """A rollout through an env with these transforms; episodes do not end in it."""
    torch.manual_seed(1)
    return play(with_transforms(WalkEnv((2,), longest=30), *transforms), policy(), steps)


both = pytest.mark.parametrize("penalty", [stack, preset])
every = pytest.mark.parametrize(
    "make",
    [
        KLConstrainedTransform,
        KLRewardTransform,
        lambda actor, controller: compose(
            ReferenceModelLogProbTransform(actor),
            KLDivergenceTransform(),
            RewardAdjustmentTransform(controller),
        ),
    ],
    ids=["stack", "preset", "parts"],
)

# Orders that make sense.

NEUTRAL: dict[str, Callable[[], Any]] = {
    "RewardSum": RewardSum,
    "CatTensors": lambda: CatTensors(["observation", "left"], out_key="cat", del_keys=False),
    "StepCounter": StepCounter,
    "RewardScaling": lambda: RewardScaling(0.0, 2.0, in_keys=["reward"], out_keys=["scaled"]),
    "VecNormV2": lambda: VecNormV2(in_keys=["observation"], out_keys=["normal"]),
}


@both
@pytest.mark.parametrize("name", NEUTRAL)
def test_what_writes_elsewhere_changes_no_number(name, penalty):
    expected = walk(penalty())["next"]
    for order in ((NEUTRAL[name](), penalty()), (penalty(), NEUTRAL[name]())):
        actual = walk(*order)["next"]
        for key in expected.keys(True, True):
            assert_close(actual[key], expected[key], rtol=0, atol=0)
        assert set(actual.keys()) > set(expected.keys())


def test_transforms_before_it_see_the_task_and_those_after_it_what_is_trained_on():
    scaled = walk(RewardScaling(loc=1.0, scale=3.0), stack())["next"]
    assert_same(scaled["task_reward"], 3.0 * walk()["next", "reward"] + 1.0)
    before, after = walk(RewardSum(), stack())["next"], walk(stack(), RewardSum())["next"]
    assert_close(before["episode_reward"], before["task_reward"].cumsum(1))
    assert_close(after["episode_reward"], after["reward"].cumsum(1))
    cast = DTypeCastTransform(torch.float32, torch.float64, in_keys=["reward"], out_keys=["reward"])
    assert_same(walk(stack(), cast)["next", "reward"], walk(stack())["next", "reward"].double())


def test_a_step_counter_that_truncates_ends_the_sum():
    counting = stack(SpyController())
    for order in ((StepCounter(3), counting), (stack(), StepCounter(3))):
        batch = walk(*order, steps=9)["next"]
        assert batch["done"][:, 2::3].all()
        assert_same(batch["episode_kl"], batch["kl"].reshape(2, 3, 3, 1).cumsum(2).flatten(1, 2))
    assert int(counting.statistics.count) == 6
    walk(stack(adaptive("step")), StepCounter(3))  # it waits for no ends
    walk(stack(adaptive()), StepCounter())  # which only counts


# Orders that do not; others are in test_behind.py.


@pytest.mark.parametrize(
    ("later", "key"),
    [
        (RenameTransform([], [], ["action"], ["move"]), "move"),
        (RenameTransform([], [], ["action"], [("action", "mean")]), ("action", "mean")),
        (MeanActionSelector(), ("action", "mean")),
    ],
    ids=["renamed", "nested", "mean"],
)
def test_what_makes_the_action_of_an_entry_of_the_policy_is_refused_after_it(later, key):
    """The advice was to sum the KL over agents, where there are none."""
    options: Any = {"in_keys": ["logits"], "out_keys": [key], "distribution_class": Categorical}
    net: Any = TensorDictModule(nn.Linear(N_OBS, N_ACTIONS), ["observation"], ["logits"])
    penalty = KLConstrainedTransform(probabilistic_actor(net, **options, return_log_prob=True), 0.1)
    with pytest.raises(RuntimeError, match=rf"changes .*{re.escape(repr(key))} on the way into"):
        with_transforms(WalkEnv((2,)), penalty, later.clone()).reset()


@pytest.mark.parametrize("key", ["reward", "ref_log_prob", "kl", "task_reward", "episode_kl"])
def test_the_record_is_not_to_be_rewritten(key):
    text = rf"ObservationNorm comes after \w+ and rewrites '{key}'"
    batch = play(WalkEnv((2,)), policy())
    for name in (key, ("next", key)):
        transform = compose(stack(), ObservationNorm(loc=0.0, scale=2.0, in_keys=[name]))
        with pytest.raises(RuntimeError, match=text):
            transform(batch)
    buffer = ReplayBuffer(storage=LazyTensorStorage(24), batch_size=4, transform=transform)
    buffer.extend(batch.reshape(-1))
    with pytest.raises(RuntimeError, match=text):
        buffer.sample()


# In envs: around it, in two of them, in workers.


def test_transforms_around_it_leave_it_usable():
    transform, controller = spied()
    env: Any = TransformedEnv(WalkEnv((2,)), transform)
    assert env.append_transform(StepCounter()) is env
    env.insert_transform(0, RewardSum())
    assert transform.controller is controller
    transform.freeze().unfreeze()
    check_env_specs(env)
    assert play(env, policy())["next", "step_count"].max() > 1
    assert total(controller)[0] > 0
    assert env.transform[1] is transform


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_one_stack_in_two_envs_is_refused(depth):
    """TorchRL lets a Compose move to another env while the first still has it."""
    transform = stack()
    for _ in range(depth):
        transform = compose(StepCounter(), transform)
    env = TransformedEnv(WalkEnv((2,)), transform)
    error: Any = (AttributeError, "already set") if depth == 0 else (RuntimeError, "another env")
    with pytest.raises(error[0], match=error[1]):
        TransformedEnv(WalkEnv((3,)), transform)
    if depth:
        del env
        gc.collect()
        moved_on = TransformedEnv(WalkEnv((3,)), transform)
        assert play(moved_on, policy())["next", "kl_coeff"].shape == (3, 12, 1)


def penalized_env(penalty: Any = stack) -> EnvBase:
    return with_transforms(WalkEnv(), penalty())


def hidden_env() -> EnvBase:
    """TorchRL asks only the outermost transforms whether they may be placed in a worker."""
    return TransformedEnv(penalized_env(), StepCounter(), auto_unwrap=False)


@forks
@pytest.mark.parametrize("make", [hidden_env, partial(SerialEnv, 2, penalized_env)])
def test_inside_the_workers_of_a_parallel_env_it_is_refused(make, capfd):
    env = parallel(make)
    try:
        env.reset()
        with pytest.raises(RuntimeError, match=r"At least one process failed|worker \d dead"):
            play(env, policy())
    finally:
        with suppress(RuntimeError):  # TorchRL ends what is left of the workers, and says so again
            env.close(raise_if_closed=False)
    inside = r"inside the workers of a ParallelEnv.*TransformedEnv\(ParallelEnv\(\.\.\.\), stack\)"
    assert re.search(inside, capfd.readouterr().err)


# Sums of rewards that were computed before the penalty.


@every
@pytest.mark.parametrize("key", ["value_target", ("agents", "advantage")])
def test_advantages_that_were_computed_before_are_refused(make, key):
    batch = play(WalkEnv((2,)), policy(), 6).set(key, torch.zeros(2, 6, 1))
    with pytest.raises(RuntimeError, match=r"'(advantage|value_target)'.* already, computed"):
        make(make_actor(), 0.1)(batch)
    make(make_actor(), 0.1)(batch.exclude(key))


@every
def test_rewards_of_several_steps_are_refused(make):
    (batch,) = collect(WalkEnv((2,)), policy(), frames=16, batches=1)
    penalty, text = make(make_actor(), 0.1), "'steps_to_next_obs' above 1: .* Use MultiStep after"
    with pytest.raises(RuntimeError, match=text):
        penalty(MultiStep(0.9, 3)(batch.clone()))
    one_step = penalty(MultiStep(0.9, 1)(batch.clone()))
    assert_close(one_step["next", "reward"], penalty(batch)["next", "reward"])
    buffer = ReplayBuffer(storage=LazyTensorStorage(16, ndim=2), batch_size=16)
    buffer.append_transform(MultiStepTransform(3, 0.9))
    buffer.append_transform(make(make_actor(), 0.1), invert=True)
    buffer.extend(batch.clone())
    expected = MultiStep(0.9, 3)(penalty(batch))["next", "reward"]
    # The last steps wait for the rewards that follow them.
    assert_close(buffer[:]["next", "reward"], expected[:, : buffer[:].shape[1]])


# Steps that no policy made, and weights that are loaded late.


@pytest.mark.parametrize("make", [KLConstrainedTransform, ReferenceModelLogProbTransform])
def test_frames_of_a_random_policy_are_refused_on_a_batch(make):
    """As those of `init_random_frames`, for which a collector records zeros."""
    batch, controller = play(WalkEnv((2,)), policy(), 6), SpyController(per="step")
    for key in ("action_log_prob", "logits"):
        batch[key][0, 2] = 0
    arguments = (make_actor(), controller)[: 2 if make is KLConstrainedTransform else 1]
    with pytest.raises(RuntimeError, match="in 1 of 12 steps.*init_random_frames.*into the env"):
        make(*arguments)(batch)
    assert not controller.calls
    batch["collector", "mask"] = torch.ones(2, 6, dtype=torch.bool)
    batch["collector", "mask"][0, 2] = False  # of padding nobody asks
    make(*arguments)(batch)
    batch["collector", "mask"][0, 2] = True
    batch["logits"][0, 2, 0] = 1e-3  # a policy that is certain
    make(*arguments)(batch)


LOADED = r"the first \d+ steps have a KL of .* the policy's weights have changed"


def loaded_late(make: Any = KLConstrainedTransform) -> tuple[Any, Any]:
    actor = make_actor()
    transform = make(actor, 0.1)
    actor.load_state_dict(moved(actor, scale=1.0).state_dict())
    return transform, actor


@every
@pytest.mark.parametrize("place", ["env", "batch"])
def test_weights_that_were_loaded_after_the_copy_are_warned_of_once(make, place):
    transform, actor = loaded_late(make)
    env: Any = WalkEnv((8,))
    batch = play(env, actor, 40)
    around = TransformedEnv(env, transform) if place == "env" else None
    text = "the first 32 steps have" if place == "env" else LOADED  # of 8 envs
    with pytest.warns(UserWarning, match=text) as caught:
        transform(batch) if around is None else play(around, actor, 40)
    assert len(caught) == 1
    transform(batch)  # warnings are errors


def test_weights_that_changed_for_a_reason_are_not_warned_of():
    actor, given_actor = make_actor(), make_actor()
    used = KLConstrainedTransform(actor, 0.1)
    used(play(WalkEnv((2,)), actor))  # it is trained later
    given = KLConstrainedTransform(given_actor, 0.1, reference=make_actor())
    for each in (actor, given_actor):
        each.load_state_dict(moved(each, scale=1.0).state_dict())
    (resumed, one), (restored, two), (late, three) = (loaded_late() for _ in range(3))
    resumed.load_state_dict(resumed.state_dict())
    restored.update_reference(make_actor())
    elsewhere = pickle.loads(pickle.dumps(late))  # where nobody knows the policy
    batch = play(WalkEnv((8,)), three, 40)
    for transform in (used, resumed, restored, given, elsewhere):
        transform(batch)
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), two.parameters(), strict=True))
    with pytest.warns(UserWarning, match=LOADED):
        copy.deepcopy(late)(batch)  # as MultiAsyncCollector copies its postproc
