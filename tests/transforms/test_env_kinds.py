"""The stack in Gymnasium, batched and auto-resetting envs."""

from collections.abc import Callable
from typing import Any, cast

import gymnasium
import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import Categorical
from torch.testing import assert_close
from torchrl.envs import (
    ConditionalPolicySwitch,
    ConditionalSkip,
    EnvBase,
    GymEnv,
    GymWrapper,
    InitTracker,
    MultiAction,
    ParallelEnv,
    SerialEnv,
    StepCounter,
    Transform,
)
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import LSTMModule, OneHotCategorical, TanhNormal
from torchrl.testing.mocking_classes import (
    AutoResettingCountingEnv,
)

from tests.helpers import (
    SpyController,
    WalkEnv,
    assert_within,
    collect,
    make_actor,
    memory_of,
    moved,
    probabilistic_actor,
    rounding,
    sequence,
    sharp,
    ulps,
    with_transforms,
)
from tests.laws.transform_laws import forks, parallel
from tests.transforms.judging import (
    COEFF,
    actor_on,
    assert_sums_restart,
    binary,
    judge,
)
from torchrl_kl import (
    KLConstrainedTransform,
    KLDivergenceTransform,
    KLRewardTransform,
    PIDKLController,
    ReferenceModelLogProbTransform,
    RewardAdjustmentTransform,
)
from torchrl_kl.controllers.plan import RewardPlan

# Gymnasium.


def cartpole(**kwargs) -> EnvBase:
    return GymEnv("CartPole-v1", categorical_action_encoding=True, **kwargs)


@pytest.mark.parametrize("one_hot", [False, True])
def test_cartpole(one_hot):
    actor = actor_on(4, 2, distribution=OneHotCategorical if one_hot else Categorical)
    batch = judge(
        lambda: GymEnv("CartPole-v1", categorical_action_encoding=not one_hot), actor, steps=60
    )
    assert_sums_restart(batch)
    assert (batch["next", "task_reward"] == 1).all()


def test_pendulum():
    def make():
        return with_transforms(GymEnv("Pendulum-v1"), StepCounter(5))

    batch = judge(make, actor_on(3, 1, distribution=TanhNormal))
    assert_sums_restart(batch)


def sync_vector(name: str, mode: str) -> EnvBase:
    autoreset_mode = gymnasium.vector.AutoresetMode(mode)
    env = gymnasium.vector.SyncVectorEnv(
        [lambda: gymnasium.make(name)] * 2, autoreset_mode=autoreset_mode
    )
    return GymWrapper(env, categorical_action_encoding=True)


def in_processes(name: str) -> EnvBase:
    env = GymEnv(name, num_envs=2, categorical_action_encoding=True)
    env.set_seed(0)  # other processes do not have the seeds of `conftest.py`
    return env


VECTORS: dict[str, Callable[[str], EnvBase]] = {
    "processes": in_processes,
    "resets itself": lambda name: sync_vector(name, "SameStep"),
    "is reset": lambda name: sync_vector(name, "Disabled"),
}


@pytest.mark.parametrize("kind", VECTORS)
@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1"])
@pytest.mark.filterwarnings("ignore:.*in the step after its end")
@forks
def test_gymnasium_vector_envs(kind, name):
    actor = actor_on(4, 2) if name == "CartPole-v1" else actor_on(3, 1, distribution=TanhNormal)
    batch = judge(lambda: VECTORS[kind](name), actor, steps=40)
    assert batch["next", "kl"].shape == (2, 40, 1)
    if name == "CartPole-v1":
        assert_sums_restart(batch)


@pytest.mark.filterwarnings("ignore:Nested TransformedEnvs")
@forks
def test_a_vector_env_that_resets_in_the_next_step_is_warned_of():
    """TorchRL records a step after each end, with a reward of 0 and an action that nobody took."""
    actor = actor_on(4, 2)
    env = VECTORS["processes"]("CartPole-v1")
    with pytest.warns(UserWarning, match="resets an env in the step after its end"):
        with_transforms(env, KLConstrainedTransform(actor, COEFF)).reset()
    env.close()
    for kind in ("resets itself", "is reset"):
        with_transforms(VECTORS[kind]("CartPole-v1"), KLConstrainedTransform(actor, COEFF)).reset()


def test_a_recurrent_reference_in_a_vector_env_begins_each_episode_from_zero():
    core = LSTMModule(
        input_size=4,
        hidden_size=8,
        in_keys=["observation", "h", "c"],
        out_keys=["f", ("next", "h"), ("next", "c")],
    )
    net = sequence(core, TensorDictModule(nn.Linear(8, 2), ["f"], ["logits"]))
    actor = sharp(
        probabilistic_actor(
            net, in_keys=["logits"], distribution_class=Categorical, return_log_prob=True
        ),
        scale=1.0,
    )
    batch = judge(
        lambda: VECTORS["resets itself"]("CartPole-v1"),
        actor,
        memory=lambda: memory_of(actor),
        steps=30,
    )
    assert_sums_restart(batch)
    starts = batch["is_init"].squeeze(-1)
    assert starts[:, 1:].any()
    assert (batch["ref_h"][starts] == 0).all()
    assert (batch["ref_h"][~starts] != 0).flatten(1).any(-1).all()


# Batched envs.


@pytest.mark.parametrize("kind", ["serial", "parallel"])
@forks
def test_around_a_batched_env(kind):
    made: list[EnvBase] = []

    def make():
        made.append(SerialEnv(2, cartpole) if kind == "serial" else parallel(cartpole))
        return made[-1]

    try:
        assert_sums_restart(judge(make, actor_on(4, 2), steps=40))
    finally:
        for env in made:
            if isinstance(env, ParallelEnv):
                env.close(raise_if_closed=False)


# Envs that reset themselves.


def test_an_auto_resetting_env():
    def make():
        return AutoResettingCountingEnv(4, auto_reset=True)  # type: ignore[call-arg]

    batch = judge(make, binary(), steps=30)
    assert_sums_restart(batch)
    ends = batch["next", "done"].squeeze(-1)
    # The last action of an episode was chosen before the reset: it is scored where it was chosen.
    with torch.no_grad():
        logits = binary()[0].module(batch["observation"][ends])
    expected = Categorical(logits=logits).log_prob(batch["action"][ends])[..., 0]
    bound = rounding(binary(), batch)[ends]
    assert_within(batch["next", "ref_log_prob"][ends], expected, bound)
    assert (batch["kl"][1:][ends[:-1]] == 0).all()


class NativeWalk(WalkEnv):
    """A walk that begins anew inside `step`, as simulators on a GPU do."""

    def _step(self, tensordict):
        out, new = super()._step(tensordict), self._reset()
        for name in ("observation", "left"):
            out[name] = torch.where(out["done"], new[name], out[name])
        return out


def collect_native(transform: Transform) -> Any:
    env = with_transforms(NativeWalk((3,)), transform)
    env._torchrl_native_autoreset = True  # what GymEnv(..., native_autoreset=True) sets
    (batch,) = collect(env, moved(make_actor()), frames=36, batches=1)
    return batch


def test_an_env_that_resets_rows_natively():
    batch = collect_native(KLConstrainedTransform(make_actor(), COEFF))
    step, ends = batch["next"], batch["next", "done"]
    with torch.no_grad():
        reference, policy = (
            Categorical(logits=actor[0].module(batch["observation"])).log_prob(batch["action"])
            for actor in (make_actor(), moved(make_actor()))
        )
    kl = (policy - reference).unsqueeze(-1)
    bound = (rounding(make_actor(), batch) + rounding(moved(make_actor()), batch)).unsqueeze(-1)
    # TorchRL blanks what a natively reset env observed at its ends, the record of the KL included.
    assert step["kl"][ends].isnan().all()
    assert_within(step["kl"][~ends], kl[~ends], bound[~ends])
    sums, off = torch.zeros(3, 1), torch.zeros(3, 1, dtype=torch.float64)
    for t in range(kl.shape[1]):  # rows that go on keep their sum when others begin anew
        assert_within(batch["episode_kl"][:, t], sums, off)
        off = torch.where(ends[:, t], 0.0, off + bound[:, t] + ulps(sums, kl[:, t]))
        sums = torch.where(ends[:, t], 0.0, sums + kl[:, t])
    # Of the reward nothing is lost.
    task = collect_native(InitTracker())
    assert_close(batch["action"], task["action"], rtol=0, atol=0)
    task_reward = task["next", "reward"]
    off = COEFF * bound + ulps(task_reward, COEFF * kl)
    assert_within(step["reward"], task_reward - COEFF * kl, off)


def test_a_plan_in_an_env_that_resets_rows_natively():
    """Its samples are the rewards of all trajectories, and nothing is planned from so few."""
    learner = PIDKLController("plan", 0.3)
    batch = collect_native(KLConstrainedTransform(make_actor(), learner, update_every=1))
    task, totals = collect_native(InitTracker()), []
    assert_close(batch["action"], task["action"], rtol=0, atol=0)
    for row in task["next"].unbind(0):
        ends = row["done"].flatten().nonzero().flatten() + 1
        totals += [part.sum().item() for part in row["reward"].tensor_split(ends)[:-1]]
    assert learner.planning
    assert 8 < len(totals) < 16
    samples = cast(RewardPlan, learner.plan).samples[:, 0]
    expected = torch.tensor(totals, dtype=torch.float64)
    assert_close(samples.sort()[0], expected.sort()[0], rtol=0, atol=1e-5)  # of four numbers


# Rows that are skipped.


def skip(data: Any) -> torch.Tensor:
    return data["left"].squeeze(-1) % 2 == 0


@pytest.mark.parametrize("parts", [False, True], ids=["stack", "parts"])
@pytest.mark.parametrize("first", [False, True], ids=["stack first", "skip first"])
def test_a_row_that_is_skipped_has_no_kl(first, parts):
    """Where the transform that skips came first, the action was scored before it had decided."""
    actor, controller = make_actor(), SpyController()
    adjustment = RewardAdjustmentTransform(controller, update_every=1)
    kl: list[Transform] = [KLConstrainedTransform(actor, controller, update_every=1)]
    if parts:
        kl = [ReferenceModelLogProbTransform(actor), KLDivergenceTransform(), adjustment]
    skipping = ConditionalSkip(skip)

    def env(*transforms: Transform) -> EnvBase:
        made: Any = SerialEnv(3, lambda: WalkEnv(longest=9))
        return with_transforms(made, *transforms)

    batch = step_by_step(env(skipping, *kl) if first else env(*kl, skipping), moved(actor))
    bare = step_by_step(env(skipping), moved(actor))
    skipped = skip(batch)
    assert skipped.any()
    assert not skipped.all()
    step, k1 = batch["next"], (batch["action_log_prob"] - batch["next", "ref_log_prob"])
    expected = torch.where(skipped, 0.0, k1).unsqueeze(-1)
    assert_close(step["kl"], expected, rtol=0, atol=0)
    task = bare["next", "reward"]
    assert_close(step["reward"][skipped], task[skipped], rtol=0, atol=0)
    assert_close(step["reward"], task - 0.1 * expected, rtol=0, atol=1e-5)


def step_by_step(env: EnvBase, policy: Any) -> Any:
    """First steps of fresh episodes."""
    torch.manual_seed(0)
    with set_exploration_type(ExplorationType.RANDOM):
        return torch.stack([env.step(policy(env.reset())) for _ in range(8)])


# Chunks of actions, and another policy in the env.


def test_an_episode_that_ends_inside_a_chunk_is_warned_of():
    actor = make_actor()
    chunked = MultiAction(dim=1, stack_rewards=False)
    with pytest.warns(UserWarning, match="MultiAction comes before KLConstrainedTransform: where"):
        with_transforms(WalkEnv(), chunked, KLConstrainedTransform(actor, 0.1)).reset()


@pytest.mark.parametrize("make", [KLConstrainedTransform, KLRewardTransform])
def test_another_policy_that_steps_the_env_is_refused_after_the_stack(make):
    """Its KL was recorded as that of the policy; before the stack it is a part of the env."""

    def switch() -> Transform:
        return ConditionalPolicySwitch(
            policy=moved(make_actor(), seed=9),
            condition=lambda data: bool(data["left"] % 2 == 0),
        )

    with pytest.raises(RuntimeError, match="ConditionalPolicySwitch comes after .* another policy"):
        with_transforms(WalkEnv(), make(make_actor(), 0.1), switch()).reset()
    env = with_transforms(WalkEnv(longest=9), switch(), make(make_actor(), 0.1))
    torch.manual_seed(0)
    with set_exploration_type(ExplorationType.RANDOM):
        steps = [env.step(moved(make_actor())(env.reset())) for _ in range(8)]
    batch: Any = torch.stack(steps)
    penalty = batch["next", "observation"].sum(-1, keepdim=True) - batch["next", "reward"]
    with torch.no_grad():
        policy, reference = (
            Categorical(logits=actor[0].module(batch["observation"])).log_prob(batch["action"])
            for actor in (moved(make_actor()), make_actor())
        )
    assert_close(penalty, 0.1 * (policy - reference).unsqueeze(-1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["categorical", "lstm"])
def test_what_the_env_reads_itself_stays_in_its_spec(kind):
    actor = make_actor(kind)
    memory = memory_of(actor) if kind == "lstm" else []
    env = with_transforms(WalkEnv((2,)), *memory, KLConstrainedTransform(actor, 0.1))
    before = with_transforms(WalkEnv((2,)), *memory_of(actor)) if memory else WalkEnv((2,))
    own = before.state_spec
    assert "observation" in own.keys()
    for key, spec in own.items(True, True):
        assert env.state_spec[key] == spec
