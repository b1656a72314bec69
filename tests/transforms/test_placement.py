"""Where the stack may be placed: with TorchRL's other transforms in each order, around workers and
inside them.
"""

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
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import (
    ActionDiscretizer,
    ActionScaling,
    CatTensors,
    DeviceCastTransform,
    DoubleToFloat,
    DTypeCastTransform,
    EnvBase,
    FrameSkipTransform,
    GymEnv,
    MultiAction,
    ObservationNorm,
    RandomTruncationTransform,
    RewardClipping,
    RewardScaling,
    RewardSum,
    SerialEnv,
    StepCounter,
    TerminateTransform,
    TransformedEnv,
    VecNormV2,
    check_env_specs,
)

from tests.helpers import (
    N_OBS,
    WalkEnv,
    assert_same,
    compose,
    make_actor,
    moved,
    play,
    policy,
    probabilistic_actor,
    sharp,
    with_transforms,
    without_kl,
)
from tests.laws.transform_laws import forks, parallel
from torchrl_kl import (
    AdaptiveKLController,
    KLConstrainedTransform,
    KLDivergenceTransform,
    KLKeys,
    KLRewardTransform,
    ReferenceModelLogProbTransform,
)

# TorchRL calls VecNormV2 experimental in envs with a batch size; what it computes there is not
# asked here.
pytestmark = pytest.mark.filterwarnings("ignore:Support of VecNormV2:UserWarning")

KL_KEYS = ("kl", "kl_coeff", "episode_kl")
COEFF = 0.5


def stack() -> KLConstrainedTransform:
    return KLConstrainedTransform(make_actor(), COEFF)


def one_piece() -> KLRewardTransform:
    return KLRewardTransform(make_actor(), COEFF)


both = pytest.mark.parametrize("penalty", [stack, one_piece])


def adaptive(**kwargs) -> Any:
    return AdaptiveKLController(0.1, target=0.5, horizon=100, **kwargs)


def normalise() -> Any:
    return ObservationNorm(loc=0.5, scale=2.0, in_keys=["observation"])


def walk(*transforms: Any, steps: int = 4, **kwargs) -> Any:
    """A rollout through an env with these transforms; episodes do not end in it."""
    torch.manual_seed(1)
    return play(with_transforms(WalkEnv((2,), longest=30), *transforms), policy(), steps, **kwargs)


# Orders that make sense.

NEUTRAL: dict[str, Callable[[], Any]] = {
    "RewardSum": RewardSum,
    "CatTensors": lambda: CatTensors(["observation", "left"], out_key="cat", del_keys=False),
    "StepCounter": StepCounter,
    "ObservationNorm": lambda: ObservationNorm(
        loc=0.5, scale=2.0, in_keys=["observation"], out_keys=["normal"]
    ),
    "RewardScaling": lambda: RewardScaling(0.0, 2.0, in_keys=["reward"], out_keys=["scaled"]),
    "VecNormV2": lambda: VecNormV2(in_keys=["observation"], out_keys=["normal"]),
}


@both
@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize("name", NEUTRAL)
def test_what_writes_elsewhere_changes_no_number(name, place, penalty):
    other = NEUTRAL[name]()
    order = (other, penalty()) if place == "before" else (penalty(), other)
    check_env_specs(with_transforms(WalkEnv((2,)), *(transform.clone() for transform in order)))
    actual, expected = walk(*order)["next"], walk(penalty())["next"]
    for key in expected.keys(True, True):
        assert_close(actual[key], expected[key], rtol=0, atol=0)
    assert set(actual.keys()) > set(expected.keys())


@pytest.mark.parametrize(
    "make", [normalise, lambda: VecNormV2(in_keys=["observation"])], ids=["fixed", "running"]
)
@pytest.mark.parametrize("place", ["before", "after"])
def test_policy_and_reference_see_the_same_normalised_observation(make, place):
    order = (make(), stack()) if place == "before" else (stack(), make())
    batch = walk(*order)
    bare = walk()
    assert (batch["observation"] != bare["observation"]).any()
    with torch.no_grad():
        logits = make_actor()[0].module(batch["observation"])
    expected = Categorical(logits=logits).log_prob(batch["action"])
    assert_same(batch["next", "ref_log_prob"], expected)
    assert batch["next", "kl"].abs().max() > 1e-3


def test_policy_and_reference_read_the_same_concatenation():
    net = TensorDictModule(nn.Linear(N_OBS + 1, 4), ["cat"], ["logits"])
    actor = sharp(
        probabilistic_actor(
            net, in_keys=["logits"], distribution_class=Categorical, return_log_prob=True
        )
    )
    for order in ("before", "after"):
        # `left` is an integer: concatenated, it is promoted.
        cat = CatTensors(["observation", "left"], out_key="cat", del_keys=False)
        penalty = KLConstrainedTransform(actor, COEFF)
        env = with_transforms(
            WalkEnv((2,)), *((cat, penalty) if order == "before" else (penalty, cat))
        )
        check_env_specs(env)
        batch = play(env, moved(actor))
        with torch.no_grad():
            expected = Categorical(logits=actor[0].module(batch["cat"])).log_prob(batch["action"])
        assert_same(batch["next", "ref_log_prob"], expected)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: RewardScaling(loc=1.0, scale=3.0), lambda reward: 3.0 * reward + 1.0),
        (lambda: RewardClipping(-0.5, 0.5), lambda reward: reward.clamp(-0.5, 0.5)),
    ],
    ids=["RewardScaling", "RewardClipping"],
)
@both
def test_a_reward_that_is_rescaled_before_the_penalty_is_the_task(make, expected, penalty):
    batch = walk(
        ReferenceModelLogProbTransform(make_actor(), keys=KLKeys(ref_log_prob="r")),
        make(),
        penalty(),
    )
    bare = walk()
    kl = (batch["action_log_prob"].detach() - batch["next", "r"]).unsqueeze(-1)
    assert_same(batch["next", "reward"], expected(bare["next", "reward"]) - COEFF * kl)


def test_a_running_normalisation_of_the_reward_before_the_penalty():
    batch = walk(VecNormV2(in_keys=["reward"]), stack())["next"]
    alone = walk(VecNormV2(in_keys=["reward"]))["next"]
    assert_close(batch["task_reward"], alone["reward"], rtol=0, atol=0)
    assert_close(batch["reward"], alone["reward"] - COEFF * batch["kl"])


def test_a_sum_of_rewards_before_the_stack_is_of_the_task_and_after_it_of_what_is_trained_on():
    before, after = walk(RewardSum(), stack())["next"], walk(stack(), RewardSum())["next"]
    assert_close(before["episode_reward"], before["task_reward"].cumsum(1))
    assert_close(after["episode_reward"], after["reward"].cumsum(1))
    assert (before["episode_reward"] != after["episode_reward"]).all()


def test_a_step_counter_that_truncates_ends_the_sum():
    for order in ((StepCounter(3), stack()), (stack(), StepCounter(3))):
        batch = walk(*order, steps=9)["next"]
        assert batch["done"][:, 2::3].all()
        expected = batch["kl"].reshape(2, 3, 3, 1).cumsum(2).reshape(2, 9, 1)
        assert_same(batch["episode_kl"], expected)


def test_ends_that_come_before_the_stack_are_told_to_the_controller():
    penalty = KLConstrainedTransform(make_actor(), adaptive(), update_every=1000)
    walk(StepCounter(3), penalty, steps=9)
    assert int(penalty.statistics.count) == 6


def test_casts_after_the_stack_do_not_rescale():
    cast = DTypeCastTransform(torch.float32, torch.float64, in_keys=["reward"], out_keys=["reward"])
    batch = walk(stack(), cast)["next"]
    assert batch["reward"].dtype == torch.float64
    assert_same(batch["reward"], walk(stack())["next", "reward"].double())
    walk(stack(), DoubleToFloat())


# Orders that do not.

RESCALING: dict[str, Callable[[], Any]] = {
    "RewardScaling": lambda: RewardScaling(0.0, 2.0),
    "VecNormV2": lambda: VecNormV2(in_keys=["observation", "reward"]),
    "RewardClipping": lambda: RewardClipping(-1.0, 1.0),
}


def appended(penalty, other) -> EnvBase:
    env = with_transforms(WalkEnv((2,)), penalty)
    check_env_specs(env)  # right until now
    return env.append_transform(other)


ORDERS: dict[str, Callable[[Any, Any], EnvBase]] = {
    "one Compose": lambda penalty, other: with_transforms(WalkEnv((2,)), penalty, other),
    "appended": appended,
    "within": lambda penalty, other: with_transforms(
        WalkEnv((2,)), StepCounter(), compose(penalty), compose(other)
    ),
    "unwrapped": lambda penalty, other: TransformedEnv(
        TransformedEnv(WalkEnv((2,)), penalty, auto_unwrap=False), other, auto_unwrap=True
    ),
}


@both
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", RESCALING)
def test_what_rescales_the_penalized_reward_is_refused(name, order, penalty):
    text = (
        rf"{name} comes after KL(Constrained|Reward)Transform and rewrites 'reward'"
        r".*Put it before the KL transforms"
    )
    with pytest.raises(RuntimeError, match=text):
        ORDERS[order](penalty(), RESCALING[name]()).reset()


@both
@pytest.mark.parametrize("key", ["reward", ("next", "reward")])
def test_it_is_refused_in_a_postproc_and_in_a_replay_buffer_too(key, penalty):
    batch = play(WalkEnv((2,)), policy())
    text = "RewardScaling comes after .* and rewrites 'reward'"
    with pytest.raises(RuntimeError, match=text):
        compose(penalty(), RewardScaling(0.0, 2.0, in_keys=[key]))(batch)
    buffer = ReplayBuffer(storage=LazyTensorStorage(24), batch_size=4)
    buffer.append_transform(penalty())
    buffer.append_transform(RewardScaling(0.0, 2.0, in_keys=[key]))
    buffer.extend(batch.reshape(-1))
    with pytest.raises(RuntimeError, match=text):
        buffer.sample()


def test_a_second_penalty_is_called_by_its_name():
    with pytest.raises(
        RuntimeError, match="the batch has 'kl_coeff': 'reward' was penalized for its KL before"
    ):
        compose(stack(), one_piece())(play(WalkEnv((2,)), policy()))


@pytest.mark.parametrize("key", ["ref_log_prob", "kl", "task_reward", "kl_coeff", "episode_kl"])
def test_the_record_is_not_to_be_rewritten(key):
    def rescale() -> ObservationNorm:
        return ObservationNorm(loc=0.0, scale=2.0, in_keys=[key])

    text = rf"ObservationNorm comes after \w+ and rewrites '{key}'"
    with pytest.raises(RuntimeError, match=text):
        with_transforms(WalkEnv((2,)), stack(), rescale()).reset()
    with pytest.raises(RuntimeError, match=text):
        compose(stack(), rescale())(play(WalkEnv((2,)), policy()))
    nested = ObservationNorm(loc=0.0, scale=2.0, in_keys=[("next", key)])
    with pytest.raises(RuntimeError, match=text):
        compose(stack(), nested)(play(WalkEnv((2,)), policy()))


def test_a_batch_may_be_moved_to_another_device():
    moved = DeviceCastTransform("cpu", in_keys=[("next", "reward")])
    batch = compose(stack(), moved)(play(WalkEnv((2,)), policy()))
    assert batch["next", "reward"].device.type == "cpu"


def test_what_writes_other_entries_of_a_batch_is_not_refused():
    scaled = RewardScaling(0.0, 2.0, [("next", "reward")], [("next", "scaled")])
    batch = compose(stack(), scaled)(play(WalkEnv((2,)), policy()))
    assert_close(batch["next", "scaled"], 2 * batch["next", "reward"])


def test_the_kl_is_not_an_observation_unless_it_is_named():
    with pytest.raises(
        RuntimeError,
        match=r"CatTensors comes after \w+ and would make .*'kl'.* part of .*name its `in_keys`",
    ):
        with_transforms(WalkEnv(), stack(), CatTensors(out_key="cat", del_keys=False)).reset()
    named = CatTensors(["observation", "kl_coeff"], out_key="cat", del_keys=False)
    batch = walk(stack(), named)["next"]
    assert_close(batch["cat"], torch.cat([batch["kl_coeff"], batch["observation"]], -1))


ENDS: dict[str, Callable[[], Any]] = {
    "StepCounter": lambda: StepCounter(3),
    "TerminateTransform": lambda: TerminateTransform(stop=lambda _: torch.zeros(2, 1).bool()),
    "RandomTruncationTransform": lambda: compose(StepCounter(), RandomTruncationTransform(1, 3)),
}


@pytest.mark.parametrize("name", ENDS)
def test_ends_that_come_after_the_stack_are_refused_where_a_controller_waits_for_them(name):
    with pytest.raises(
        RuntimeError, match=f"{name} comes after KLConstrainedTransform and ends trajectories"
    ):
        walk(KLConstrainedTransform(make_actor(), adaptive()), ENDS[name]())


def test_a_controller_that_waits_for_no_ends_does_not_miss_them():
    walk(KLConstrainedTransform(make_actor(), adaptive(per="step")), StepCounter(3))
    walk(KLConstrainedTransform(make_actor(), adaptive()), StepCounter())  # which only counts


def test_what_changes_the_action_before_the_reference_sees_it_is_refused():
    net = nn.Sequential(nn.Linear(3, 5), nn.Unflatten(-1, (1, 5)))
    net = TensorDictModule(net, ["observation"], ["logits"])
    actor = probabilistic_actor(
        net, in_keys=["logits"], distribution_class=Categorical, return_log_prob=True
    )
    env = with_transforms(
        GymEnv("Pendulum-v1"),
        KLConstrainedTransform(actor, 0.1),
        ActionDiscretizer(5, categorical=True),
    )
    with pytest.raises(
        RuntimeError, match="ActionDiscretizer comes after .* and turns 'action' into the env's"
    ):
        env.reset()
    env = with_transforms(GymEnv("Pendulum-v1"), one_piece(), ActionScaling())
    with pytest.raises(
        RuntimeError, match="ActionScaling comes after KLRewardTransform and turns 'action'"
    ):
        env.reset()


SEVERAL: dict[str, Callable[[], Any]] = {
    "FrameSkipTransform": lambda: FrameSkipTransform(4),
    "MultiAction": lambda: MultiAction(dim=-1),
}


@both
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", SEVERAL)
def test_what_steps_the_env_several_times_is_refused_after_it(name, order, penalty):
    text = f"{name} comes after KL(Constrained|Reward)Transform and steps the env several times"
    with pytest.raises(RuntimeError, match=text):
        ORDERS[order](penalty(), SEVERAL[name]()).reset()


def test_a_frame_skip_before_the_stack_is_one_step_of_it():
    batch = walk(FrameSkipTransform(4), stack())["next"]
    assert_close(batch["reward"], batch["task_reward"] - COEFF * batch["kl"])
    one = walk(stack())["next", "task_reward"]
    assert_close(
        batch["task_reward"][:, 0], 4 * one[:, 0]
    )  # of an env that has no state of its own


# Around workers and inside them.


def penalized_env(penalty: Any = stack) -> EnvBase:
    return with_transforms(WalkEnv(), penalty())


def measured_env() -> EnvBase:
    parts = ReferenceModelLogProbTransform(make_actor()), KLDivergenceTransform()
    return with_transforms(WalkEnv(), *parts)


def hidden_env() -> EnvBase:
    """TorchRL asks only the outermost transforms whether they may be placed in a worker."""
    return TransformedEnv(penalized_env(), StepCounter(), auto_unwrap=False)


INSIDE = (
    r"KL transforms are inside the workers of a ParallelEnv"
    r".*TransformedEnv\(ParallelEnv\(\.\.\.\), stack\), or .*=False"
)
WORKERS: dict[str, Callable[[Any], Any]] = {
    "creator": lambda penalty: partial(penalized_env, penalty),
    "creators": lambda penalty: [partial(penalized_env, penalty), partial(penalized_env, penalty)],
    "serial": lambda penalty: partial(SerialEnv, 2, partial(penalized_env, penalty)),
    "hidden": lambda penalty: hidden_env,
    "parts": lambda penalty: measured_env,
}


@forks
@pytest.mark.parametrize(
    ("make", "penalty"),
    [("creator", stack), ("creator", one_piece), *((name, stack) for name in list(WORKERS)[1:])],
)
def test_inside_the_workers_of_a_parallel_env_it_is_refused(make, penalty, capfd):
    env = parallel(WORKERS[make](penalty))
    try:
        env.reset()
        with pytest.raises(RuntimeError, match=r"At least one process failed|worker \d dead"):
            play(env, policy())
    finally:
        with suppress(RuntimeError):  # TorchRL ends what is left of the workers, and says so again
            env.close(raise_if_closed=False)
    assert re.search(INSIDE, capfd.readouterr().err)


@pytest.mark.parametrize("use_buffers", [False, True])
def test_inside_the_workers_of_a_serial_env_it_works(use_buffers):
    batch = play(SerialEnv(2, penalized_env, use_buffers=use_buffers), policy())
    assert batch["next", "kl"].abs().max() > 1e-3
    after = stack()(without_kl(batch))["next"]
    for name in (*KL_KEYS, "reward"):
        assert_same(after[name], batch["next", name])


@forks
def test_without_buffers_the_workers_get_the_log_prob():
    env = parallel(hidden_env, use_buffers=False)
    try:
        batch = play(env, policy())
    finally:
        env.close()
    assert batch["next", "kl"].abs().max() > 1e-3
    after = stack()(without_kl(batch))["next"]
    for name in (*KL_KEYS, "reward"):
        assert_same(after[name], batch["next", name])
