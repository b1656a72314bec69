"""Which rewards a plan compares: across batches, masks and stops; and what leaves it waiting."""

import copy
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from tests.controllers.planning import SAME, collect, controller, texts, totals
from tests.helpers import WalkEnv, make_actor, play, policy, with_transforms, without_kl
from torchrl_kl import (
    GPT,
    ExponentialKLController,
    KLConstrainedTransform,
    KLKeys,
    KLPenaltyLoss,
    ResponseKLTransform,
    RewardAdjustmentTransform,
    coeff_for_budget,
)
from torchrl_kl._feeding.rewards import EnvReturns, RewardFeed
from torchrl_kl.controllers.plan import RewardPlan

TIME: Any = [None, "time"]


def plan_of(transform: Any) -> RewardPlan:
    plan = transform.controller.plan
    assert plan is not None
    return plan


def block(number: int) -> TensorDict:
    """One row of 8 steps with zero KL, whose rewards are 50 above those of the block before."""
    generator = torch.Generator().manual_seed(number)
    reward = torch.randn(1, 8, 1, generator=generator) + 50 * number
    step = {"reward": reward, "kl": 0 * reward, "done": torch.zeros(1, 8, 1, dtype=torch.bool)}
    return TensorDict({"next": step}, batch_size=(1, 8), names=TIME)


def by_steps() -> RewardAdjustmentTransform:
    return RewardAdjustmentTransform(controller(5.0, per="step", max_coeff=1e4))


def expected_of(n_blocks: int) -> float:
    plan = RewardPlan(5.0)
    for number in range(n_blocks):
        rewards = block(number)["next", "reward"].flatten().double()
        plan.add(rewards, groups=torch.full((8,), float(number)))
    made = plan.solve()
    assert made is not None
    return made.coeff


def test_blocks_of_several_batches_are_not_compared():
    transform, n = by_steps(), 0
    while transform.controller.planning:
        transform(block(n))
        n += 1
    assert n > 1
    assert transform.controller.coeff.item() == pytest.approx(expected_of(n), **SAME)


def test_agents_are_not_compared_with_each_other():
    reward = torch.randn(40, 1, 2, 1, generator=torch.Generator().manual_seed(0))
    reward[..., 1, :] += 50  # which the policy cannot choose
    done, state = torch.ones(40, 1, 1, dtype=torch.bool), torch.ones(40, 1, 3)
    agents = TensorDict(reward=reward, kl=0 * reward, batch_size=(40, 1, 2))
    step = TensorDict(agents=agents, done=done, terminated=done, state=state, batch_size=(40, 1))
    batch = TensorDict({"next": step, "state": state}, batch_size=(40, 1), names=TIME)
    keys = KLKeys(kl=("agents", "kl"), reward=("agents", "reward"), done="done")
    transform = RewardAdjustmentTransform(controller(0.1), keys=keys)
    transform(batch)
    groups = torch.arange(80) % 2
    made = RewardPlan(0.1).add(reward.flatten().double(), groups=groups).solve()
    assert made is not None
    assert transform.controller.coeff.item() == pytest.approx(made.coeff, **SAME)
    assert made.coeff < 3


def test_blocks_before_and_after_a_stop_are_not_compared():
    first, second = by_steps(), by_steps()
    first(block(0))
    assert first.controller.planning
    second.load_state_dict(first.state_dict())
    second(block(1))
    assert second.controller.coeff.item() == pytest.approx(expected_of(2), **SAME)


def test_masked_rows_of_a_long_trajectory_go_on_from_batch_to_batch():
    transform = RewardAdjustmentTransform(controller(0.4, per="step"))
    for number in range(4):
        times = torch.arange(5).reshape(1, 5, 1) + 4 * number
        none = torch.zeros(1, 4, 1, dtype=torch.bool)
        step = {"reward": none.float(), "kl": none.float(), "done": none, "time": times[:, 1:]}
        collector = {"traj_ids": torch.zeros(1, 4, dtype=torch.long), "mask": ~none.squeeze(-1)}
        batch = {"next": step, "time": times[:, :4], "is_init": times[:, :4] == 0}
        transform(TensorDict({**batch, "collector": collector}, batch_size=(1, 4), names=TIME))
    assert len(plan_of(transform).samples) == 12  # from the second batch on it is planned by blocks


def test_long_trajectories_in_short_rows_are_planned_by_blocks():
    """0.2 nats per step: rows of 8 steps may be whole trajectories, those of 16 steps are not."""
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(10, 320, 1, generator=generator) + torch.arange(320.0)[:, None]
    done = torch.zeros(10, 320, 1, dtype=torch.bool)
    done[:, -1] = True
    steps = TensorDict(reward=rewards, kl=0 * rewards, done=done, batch_size=(10, 320))
    batch = TensorDict({"next": steps}, batch_size=(10, 320), names=TIME)
    batch["collector", "traj_ids"] = torch.arange(10)[:, None].expand(10, 320)
    transform = RewardAdjustmentTransform(controller(0.2, per="step"))
    transform(batch[:, :8])
    assert transform.controller.planning
    transform(batch[:, 8:16])
    groups = torch.arange(10.0).repeat_interleave(8)
    made = RewardPlan(0.2).add(rewards[:, 8:16].flatten(), groups=groups).solve()
    assert made is not None
    assert transform.controller.coeff.item() == pytest.approx(made.coeff, **SAME)


def test_pieces_of_trajectories_are_grouped_by_where_they_began(actor):
    prompts = torch.randint(10, (30, 4), generator=torch.Generator().manual_seed(0))
    batch = collect(actor, 480, prompts.repeat_interleave(16, 0))
    batch["next", "reward"][:, -1] += 5 * batch["tokens"][:, 0, :1]
    batch["collector", "traj_ids"] = torch.arange(480)[:, None].expand(-1, 4).clone()
    whole, parts = (KLConstrainedTransform(actor, controller()) for _ in range(2))
    whole(batch)
    expected = coeff_for_budget(totals(batch).view(30, 16), 0.3)
    assert whole.controller.coeff.item() == pytest.approx(expected, **SAME)
    for piece in (batch[:, :1], batch[:, 1:3], batch[:, 3:]):
        assert parts.controller.planning
        parts(piece)
    assert parts.controller.coeff.item() == pytest.approx(expected, **SAME)


def test_short_trajectories_in_pieces_are_planned_whole(actor):
    batch, parts = collect(actor, 200), KLConstrainedTransform(actor, controller(0.1, per="step"))
    batch["collector", "traj_ids"] = torch.arange(200)[:, None].expand(-1, 4).clone()
    for piece in (batch[:, :1], batch[:, 1:]):
        assert parts.controller.planning
        parts(piece)
    expected = coeff_for_budget(totals(batch), 0.4)
    assert parts.controller.coeff.item() == pytest.approx(expected, **SAME)


def test_env_steps_before_and_after_a_stop_are_not_compared():
    learner, ones = controller(0.2, per="step"), torch.ones(4, 1)
    plan = learner.plan
    assert plan is not None
    for _ in range(2):
        feed = RewardFeed()  # of another env, or of a run that did not load its state
        for _ in range(20):
            blocks = feed.returns.number_block(plan, ones)
            feed.add_env_step(learner, ones, 0 * ones, None, blocks=blocks, needed=80)
    # Four envs; blocks of 16 steps and of the 4 steps that are left, twice.
    sizes = plan.samples[:, 3].unique(return_counts=True)[1]
    assert sorted(sizes.tolist()) == [4] * 8 + [16] * 8


@pytest.mark.parametrize("feeds", [1, 2])
def test_env_steps_of_several_envs_are_not_compared(feeds):
    """Of clones, which share a feed, or of two stacks with one controller."""
    learner, ones = controller(0.2, per="step"), torch.ones(1, 1)
    plan = learner.plan
    assert plan is not None
    envs = [EnvReturns(), EnvReturns()]
    own = [RewardFeed()] * 2 if feeds == 1 else [RewardFeed(), RewardFeed()]
    for _ in range(64):
        for number, (feed, env) in enumerate(zip(own, envs, strict=True)):
            blocks = env.number_block(plan, ones)
            feed.add_env_step(learner, number * ones, 0 * ones, None, blocks=blocks, needed=1)
    blocks = [plan.samples[plan.samples[:, 3] == group] for group in plan.samples[:, 3].unique()]
    assert [len(steps) for steps in blocks] == [16] * 8
    assert all(len(steps[:, 0].unique()) == 1 for steps in blocks)


def test_responses_before_and_after_a_stop_are_not_compared():
    batch, plan, model = texts(30, 4), RewardPlan(0.3), GPT(vocab_size=11, block_size=8)
    transform = ResponseKLTransform(model, controller(), pad_token=10)
    for n, rows in enumerate(torch.arange(len(batch)).split(4)):
        state = transform.state_dict()
        transform = ResponseKLTransform(model, controller(), pad_token=10)
        transform.load_state_dict(state)
        transform(batch[rows])
        rewards = batch["next", "reward"][rows].double().flatten()
        plan.add(rewards, groups=torch.full((4,), float(n)))
        if not transform.controller.planning:
            break
    made = plan.solve()
    assert made is not None
    assert transform.controller.coeff.item() == pytest.approx(made.coeff, **SAME)


def test_a_trajectory_begins_where_it_counts(actor):
    """Masked first tokens are part of the prompt."""
    prompts = torch.randint(10, (3, 4), generator=torch.Generator().manual_seed(0))
    batch = collect(actor, 480, prompts.repeat_interleave(160, 0))
    batch["next", "reward"][:, -1] += 5 * batch["tokens"][:, 0, :1]
    batch["collector", "mask"] = torch.tensor([False, True, True, True]).expand(480, -1)
    transform = KLConstrainedTransform(actor, controller())
    transform(batch)
    groups = batch["tokens"][:, 1].unique(dim=0, return_inverse=True)[1]
    rewards = batch["next", "reward"][:, 1:].sum((1, 2)).double()
    made, pooled = RewardPlan(0.3).add(rewards, groups=groups).solve(), RewardPlan(0.3)
    assert made is not None
    assert transform.controller.coeff.item() == pytest.approx(made.coeff, **SAME)
    together = pooled.add(rewards).solve()
    assert together is not None
    assert together.coeff > 3 * made.coeff  # what differs between prompts would count


class Touchy(torch.nn.Module):
    """A network that is NaN in some states."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, observation):
        return torch.where(observation[..., :1] > 1.0, torch.nan, self.net(observation))


@pytest.mark.filterwarnings("ignore:KLConstrainedTransform got invalid numbers:UserWarning")
@pytest.mark.parametrize("case", ["a step is masked", "frozen for a step"])
def test_a_trajectory_has_the_same_reward_in_an_env_and_in_a_batch(case):
    def stack() -> KLConstrainedTransform:
        reference = make_actor(seed=1)
        if case == "a step is masked":
            reference[0].module = Touchy(reference[0].module)
        options: Any = {"reference": reference, "on_invalid": "mask", "update_every": 1}
        return KLConstrainedTransform(policy(), controller(), **options)

    in_env, on_batch = stack(), stack()
    frozen = case == "frozen for a step"  # the first one, with which no trajectory ends
    env = with_transforms(WalkEnv((3,)), in_env.freeze() if frozen else in_env)
    batch = play(env, policy(), 9, callback=lambda *_: in_env.unfreeze())
    assert (batch["next", "kl"] == 0).any() == (case == "a step is masked")
    on_batch(without_kl(batch))
    sums = [plan_of(one).samples[:, :2] for one in (in_env, on_batch)]
    assert len(sums[0]) > 3
    first, second = (one[one[:, 0].argsort()] for one in sums)
    torch.testing.assert_close(first, second, rtol=0, atol=1e-5)  # sums of four float32 numbers


def test_a_shuffled_batch_plans_nothing(actor):
    batch = collect(actor, 200)
    batch["collector", "traj_ids"] = torch.arange(200)[:, None].expand(-1, 4).clone()
    order = torch.randperm(800, generator=torch.Generator().manual_seed(0))
    shuffled = batch.reshape(-1)[order].reshape(200, 4)
    shuffled.names = [None, "time"]
    transform = KLConstrainedTransform(actor, controller())
    with pytest.raises(ValueError, match="the steps of the batch do not follow one another"):
        transform(shuffled)
    assert transform.controller.planning
    assert transform.controller.coeff == 0
    assert not len(plan_of(transform).samples)


def test_it_says_that_no_trajectory_ends(actor):
    transform = KLConstrainedTransform(actor, controller())

    def half(number: int) -> Any:
        batch = collect(actor, 4)[:, :2]
        batch["collector", "traj_ids"] = torch.arange(4)[:, None].expand(-1, 2) + 4 * number
        batch["next", "done"] = torch.zeros(4, 2, 1, dtype=torch.bool)
        batch.names = [None, "time"]
        return batch

    for number in range(9):
        transform(half(number))
    wanted = (
        "has planned no coefficient for 10 batches: it plans from the rewards of finished "
        "trajectories, 0 came, and .* The coefficient stays 0"
    )
    with pytest.warns(UserWarning, match=wanted):
        transform(half(9))
    transform(half(10))  # once


class TestState:
    """Of a controller with bounds 1e-4 and 10, before and after it has a plan."""

    def waiting(self, rewards) -> ExponentialKLController:
        one = ExponentialKLController("plan", 0.01)
        one.observe_rewards(torch.tensor(rewards))
        assert one.planning
        return one

    def test_a_cautious_coefficient_may_be_out_of_the_bounds(self):
        first, second = self.waiting([0.0, 100.0]), ExponentialKLController("plan", 0.01)
        assert first.coeff > first.max_coeff
        second.load_state_dict(first.state_dict())
        assert second.coeff == first.coeff
        assert second.planning

    def test_a_run_may_go_back_to_before_its_plan(self):
        one = self.waiting([1.0, 1.0])
        before = copy.deepcopy(one.state_dict())
        generator = torch.Generator().manual_seed(0)
        one.observe_rewards(torch.randn(200, generator=generator))
        assert not one.planning
        one.load_state_dict(before)
        assert one.planning
        assert one.coeff == 0

    def test_a_planned_coefficient_is_within_the_bounds(self):
        state = self.waiting([1.0, 1.0]).state_dict()
        state["plan.made"] = torch.ones((), dtype=torch.float64)
        with pytest.raises(RuntimeError, match=r"`coeff` must lie within \[0.0001, 10\], got 0"):
            ExponentialKLController("plan", 0.01).load_state_dict(state)


class TestLoss:
    def batch(self, kind: str) -> Any:
        """Two rows of 30 steps with random rewards; the policy is its reference."""
        torch.manual_seed(0)
        states = torch.randn(2, 31, 3)
        batch = TensorDict(observation=states[:, :-1], batch_size=(2, 30), names=TIME)
        with torch.no_grad():
            batch = make_actor(kind)(batch)
        done = torch.zeros(2, 30, 1, dtype=torch.bool)
        following = {"observation": states[:, 1:], "reward": torch.randn(2, 30, 1), "done": done}
        return batch.set("next", TensorDict(following, batch_size=(2, 30)))

    def plans(self, kind: str, batch: Any, **options: Any) -> float:
        learner = controller(0.5, per="step", max_coeff=1e4)
        return KLPenaltyLoss(make_actor(kind), learner, **options).update_controller(batch)

    def expected(self, batch: Any, counts: torch.Tensor) -> float:
        rewards = batch["next", "reward"].squeeze(-1)
        blocks = 2 * torch.arange(2)[:, None] + (counts.long().cumsum(1) - 1) // 16
        plan = RewardPlan(0.5).add(rewards[counts], groups=blocks[counts]).solve()
        assert plan is not None
        return plan.coeff

    def test_an_action_of_several_dimensions(self):
        batch = self.batch("normal")
        assert batch["action_log_prob"].shape == (2, 30, 2)
        expected = self.expected(batch, torch.ones(2, 30, dtype=torch.bool))
        assert self.plans("normal", batch) == pytest.approx(expected, **SAME)

    def test_invalid_steps_are_left_out(self):
        batch, counts = self.batch("categorical"), torch.ones(2, 30, dtype=torch.bool)
        batch["observation"][1, 4] = torch.nan
        with pytest.raises(ValueError, match="KLPenaltyLoss got invalid numbers: 'observation'"):
            self.plans("categorical", batch)
        counts[1, 4] = False
        with pytest.warns(UserWarning, match="KLPenaltyLoss got invalid numbers: 'observation'"):
            coeff = self.plans("categorical", batch, on_invalid="mask")
        assert coeff == pytest.approx(self.expected(batch, counts), **SAME)
