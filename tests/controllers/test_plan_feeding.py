"""How rewards reach a controller that plans: on batches, in env steps, in losses, for texts."""

import copy
import math
from typing import Any, cast

import pytest
import torch
from tensordict import TensorDict
from torchrl.envs import TransformedEnv
from torchrl.envs.utils import ExplorationType, set_exploration_type

from tests.controllers.planning import SAME, collect, controller, reward_of, texts, totals
from tests.helpers import WalkEnv, make_actor, moved, play, policy, with_transforms
from torchrl_kl import (
    GPT,
    ExponentialKLController,
    KLConstrainedTransform,
    KLKeys,
    KLPenaltyLoss,
    PlannedKLController,
    ResponseKLTransform,
    RewardAdjustmentTransform,
    coeff_for_budget,
)
from torchrl_kl._feeding.rewards import EnvReturns, RewardFeed
from torchrl_kl.controllers.plan import RewardPlan
from torchrl_kl.envs import DigitLanguageEnv
from torchrl_kl.transforms.estimates import KLStep


def kl_step(batch: TensorDict) -> KLStep:
    kl = batch["next", "kl"]
    return KLStep(None, kl, kl=kl)


def test_a_batch_is_penalized_with_the_coefficient_that_is_planned_from_it(actor):
    batch, stack = collect(actor, 200), KLConstrainedTransform(actor, controller())
    expected = coeff_for_budget(totals(batch), 0.3)
    out = stack(batch)
    assert stack.controller.coeff.item() == pytest.approx(expected, **SAME)
    assert (out["next", "kl_coeff"] == stack.controller.coeff.float()).all()
    # The KL of that batch is not a measurement of the plan; that of the next batch is.
    assert stack.statistics.count == 0
    stack(collect(actor, 200, seed=1))
    assert stack.controller.coeff.item() < 0.99 * expected


def test_responses_to_the_same_prompt_are_a_group(actor):
    prompts = torch.arange(30)[:, None].expand(-1, 4) % 10 + 0
    prompts = prompts.clone()
    prompts[:, 0] = torch.arange(30) // 10
    batch = collect(actor, 480, prompts.repeat_interleave(16, 0))
    batch["next", "reward"][:, -1] += torch.arange(30.0).repeat_interleave(16)[:, None]
    stack = KLConstrainedTransform(actor, controller())
    stack(batch)
    expected = coeff_for_budget(totals(batch).view(30, 16), 0.3)
    assert stack.controller.coeff.item() == pytest.approx(expected, **SAME)


def test_trajectories_that_come_in_pieces_give_the_same_plan(actor):
    batch = collect(actor, 200)
    batch["collector", "traj_ids"] = torch.arange(200)[:, None].expand(-1, 4).clone()
    whole, parts = (KLConstrainedTransform(actor, controller()) for _ in range(2))
    whole(batch)
    for piece in (batch[:, :1], batch[:, 1:]):
        assert parts.controller.planning
        parts(piece)
    assert parts.controller.coeff.item() == pytest.approx(whole.controller.coeff.item(), **SAME)


def test_batches_that_workers_penalized_give_the_same_plan(actor):
    batch = collect(actor, 200)
    penalized = KLConstrainedTransform(actor, 0.0)(batch)
    stack = KLConstrainedTransform(actor, controller())
    stack.observe(penalized)
    expected = coeff_for_budget(totals(batch), 0.3)
    assert stack.controller.coeff.item() == pytest.approx(expected, **SAME)


@pytest.mark.parametrize("kind", ["steps", "responses"])
def test_rewards_of_a_refused_batch_are_not_counted(actor, kind):
    """A batch with integers for rewards was refused after they had been given to the plan."""
    if kind == "steps":
        stack, batch = KLConstrainedTransform(actor, controller()), collect(actor, 200)
    else:
        model = GPT(vocab_size=11, block_size=8)
        stack, batch = ResponseKLTransform(model, controller(), pad_token=10), texts(40, 5)
    before = copy.deepcopy(stack.state_dict())
    batch["next", "reward"] = batch["next", "reward"].long()
    with pytest.raises(TypeError, match="'reward' must be floating point, got torch.int64"):
        stack(batch)
    after = stack.state_dict()
    assert all(before[key].equal(after[key]) for key in before)
    assert stack.controller.planning


@pytest.mark.parametrize("kind", [KLConstrainedTransform, KLPenaltyLoss])
def test_a_target_that_cannot_be_spent_is_lowered_and_the_batch_comes_again(actor, kind):
    """Its rewards counted twice, and trajectories had lost their beginnings."""
    batch = collect(actor, 200)
    batch["collector", "traj_ids"] = torch.arange(200)[:, None].expand(-1, 4).clone()
    reward = torch.zeros(200, 4, 1)
    reward[:, 0, 0] = torch.arange(200) % 2  # in the first piece
    reward[:, 3, 0] = torch.arange(200) % 2
    batch["next", "reward"] = reward

    def feed(one, piece):
        return one.update_controller(piece) if kind is KLPenaltyLoss else one(piece)

    expected, one = kind(actor, controller(0.1)), kind(actor, controller(1.2))
    for piece in (batch[:, :1], batch[:, 1:]):
        feed(expected, piece)
    feed(one, batch[:, :1])
    with pytest.raises(RuntimeError, match="`target` asks for 1.2 nats"):
        feed(one, batch[:, 1:])
    one.controller.target = 0.1
    feed(one, batch[:, 1:])
    assert not one.controller.planning
    assert one.controller.coeff.equal(expected.controller.coeff)


def test_in_an_env_a_target_that_cannot_be_spent_may_be_lowered():
    """The rewards that were waiting were lost, or counted twice."""
    feed, one = RewardFeed(), controller(1.2)
    reward, ended = torch.arange(200.0)[:, None] % 2, torch.ones(200, 1, dtype=torch.bool)
    for n, target in ((150, 1.2), (200, 1.2), (200, 0.1)):
        one.target = target
        given = (one, reward[:n], torch.zeros(n, 1), ended[:n])
        if n == 200 and target == 1.2:
            with pytest.raises(RuntimeError, match="`target` asks for 1.2 nats"):
                feed.add_env_step(*given, needed=300)
        else:
            feed.add_env_step(*given, needed=300)
    assert one.coeff.item() == pytest.approx(
        coeff_for_budget(reward.double().flatten(), 0.1), **SAME
    )


@pytest.mark.parametrize("stop", [lambda stack: stack.freeze(), lambda stack: stack.eval()])
def test_frozen_or_in_eval_mode_nothing_is_planned(actor, stop):
    stack = stop(KLConstrainedTransform(actor, controller()))
    out = stack(collect(actor, 200))
    assert stack.controller.planning
    assert (out["next", "reward"] == out["next", "task_reward"]).all()


def rewards_of_agents(rewards: torch.Tensor, **entries: torch.Tensor) -> TensorDict:
    """A batch (R, T) of rewards (R, T, A), time last, without any KL."""
    agents = {"reward": rewards[..., None], "kl": torch.zeros(*rewards.shape, 1), **entries}
    size, names = rewards.shape[:2], cast(Any, [None, "time"])
    step = TensorDict({"agents": TensorDict(agents, batch_size=rewards.shape)}, batch_size=size)
    return TensorDict({"next": step}, batch_size=size, names=names)


def for_agents(**kwargs) -> tuple[RewardAdjustmentTransform, RewardPlan]:
    keys = KLKeys(reward=("agents", "reward"), log_prob=("agents", "action_log_prob"))
    transform = RewardAdjustmentTransform(controller(0.2, **kwargs), keys=keys)
    return transform, cast(RewardPlan, transform.controller.plan)


def test_blocks_of_each_agent_and_row_are_kept_apart_and_frozen_none_are_given():
    """Rows of 20 steps at 0.2 nats per step; equal rewards in a block, so that no plan is made."""
    blocks = torch.tensor([0.0, 10.0])[:, None, None] + torch.arange(2.0) * 2
    batch = rewards_of_agents(blocks + (torch.arange(20.0) // 16)[:, None])
    batch["next", "done"] = torch.zeros(2, 20, 1, dtype=torch.bool)
    transform, plan = for_agents(per="step")
    for n, frozen in ((1, False), (1, True), (2, False)):
        transform.frozen = frozen
        transform(batch)
        groups = [plan.samples[plan.samples[:, 3] == one, 0] for one in plan.samples[:, 3].unique()]
        assert sorted(map(len, groups)) == [4] * 4 * n + [16] * 4 * n
        assert all(len(rewards.unique()) == 1 for rewards in groups)
        assert not batch["next", "done"].any()
    # Nor do short rows that come later change what is compared: a plan has samples of one kind.
    transform(batch[:, :2])
    assert sorted(plan.samples[:, 3].unique(return_counts=True)[1].tolist())[:4] == [2] * 4


def test_rows_of_another_batch_size_are_in_other_trajectories():
    returns = EnvReturns()
    returns.begin(None)
    for n, expected in ((2, 1.0), (2, 2.0), (3, math.nan), (3, math.nan)):
        ones = torch.ones(n, 1)
        sums = returns.add(ones, 0 * ones, (None, None), (ones, ones))
        assert torch.equal(sums[0].isnan(), torch.full((n, 1), math.isnan(expected)))
        assert math.isnan(expected) or (sums[0] == expected).all()


def test_agents_whose_trajectories_begin_at_different_steps():
    """Both rows begin in the same state; in each one the first agent begins anew at step 2."""
    rewards = torch.tensor([[[1.0, 2.0], [4.0, 8.0], [16.0, 32.0], [64.0, 128.0]]])
    done = torch.tensor([[False, False], [True, False], [False, False], [True, True]])
    done = done[None, :, :, None].expand(2, 4, 2, 1)
    batch = rewards_of_agents(torch.cat([rewards, 256 * rewards]), done=done, terminated=done)
    states = torch.arange(10.0).view(2, 5, 1)
    states[:, 0] = 0.0
    batch["observation"], batch["next", "observation"] = states[:, :-1], states[:, 1:]
    transform, plan = for_agents()
    transform(batch)
    samples = {reward: group for reward, _, _, group in plan.samples.tolist()}
    assert samples.keys() == {5.0, 80.0, 170.0, 5 * 256.0, 80 * 256.0, 170 * 256.0}
    assert samples[5.0] == samples[5 * 256.0]
    assert samples[170.0] == samples[170 * 256.0]
    assert len({samples[name] for name in (5.0, 170.0, 80.0, 80 * 256.0)}) == 4


@pytest.mark.parametrize("resumed", [False, True])
def test_what_a_saved_state_left_truncated_is_planned_from_once(resumed):
    """By the collector itself if it goes on in this process, or else by the state."""

    def batch(number: int) -> TensorDict:
        reward = torch.tensor([[1.0, 2.0], [4.0, 8.0]])[:, :, None] * (1 + 15 * number)
        step = TensorDict(reward=reward, kl=0 * reward, batch_size=(2, 2))
        step["truncated"] = step["done"] = torch.tensor([[[False], [True]]]).expand(2, 2, 1)
        data = TensorDict({"next": step}, batch_size=(2, 2), names=cast(Any, [None, "time"]))
        data["collector", "traj_ids"] = torch.tensor([[0, 0], [1, 1]]) + 2 * number
        return data

    first = RewardAdjustmentTransform(controller())
    stream = first.new_stream()
    first.adjust_batch(batch(0), kl_step(batch(0)), stream, True)
    second = RewardAdjustmentTransform(controller()) if resumed else first
    second.load_state_dict(first.state_dict())
    stream = second.new_stream() if resumed else stream
    second.adjust_batch(batch(1), kl_step(batch(1)), stream, True)
    # Of the second batch nothing is known to be over.
    plan = cast(RewardPlan, second.controller.plan)
    assert sorted(plan.samples[:, 0].tolist()) == [3.0, 12.0]


def test_padded_steps_do_not_count(actor):
    batch, stack = collect(actor, 200), KLConstrainedTransform(actor, controller())
    expected = coeff_for_budget(totals(batch), 0.3)
    padded = cast(TensorDict, torch.cat([batch, batch[:, -1:]], 1))
    padded["next", "reward"][:, -1] = 100.0
    padded["collector", "mask"] = torch.tensor([True] * 4 + [False]).expand(200, -1)
    padded["collector", "traj_ids"] = torch.arange(200)[:, None].expand(-1, 5).clone()
    padded.names = [None, "time"]
    stack(padded)
    assert stack.controller.coeff.item() == pytest.approx(expected, **SAME)


def test_a_policy_that_has_moved_is_weighted_by_its_log_ratio(actor):
    moved = copy.deepcopy(actor)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in moved.parameters():
            weight += 0.05 * torch.randn(weight.shape, generator=generator)
    batch, stack = collect(moved, 400), KLConstrainedTransform(actor, controller())
    out = stack(batch)
    ratios = out["next", "kl"].sum((1, 2)).double()
    assert ratios.abs().max() > 0.05
    plan = RewardPlan(0.3).add(totals(batch), log_ratios=ratios).solve()
    assert plan is not None
    assert stack.controller.coeff.item() == pytest.approx(plan.coeff, **SAME)
    assert plan.coeff != pytest.approx(coeff_for_budget(totals(batch), 0.3), rel=1e-4)


def test_in_an_env_it_plans_from_finished_trajectories(actor):
    torch.manual_seed(0)
    env = DigitLanguageEnv(reward_fn=reward_of, batch_size=(40,), seed=0)
    stack = KLConstrainedTransform(actor, controller())
    env = TransformedEnv(env, stack)
    with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
        rewards = [env.rollout(4, actor)["next", "task_reward"].sum((1, 2)) for _ in range(1)]
        plan = RewardPlan(0.3)
        while (made := plan.add(rewards[-1].double()).solve()) is None:
            assert stack.controller.planning
            assert stack.controller.coeff.item() == pytest.approx(plan.cautious_coeff, rel=1e-6)
            rewards.append(env.rollout(4, actor)["next", "task_reward"].sum((1, 2)))
    # In an env a float32 sum is added up step by step.
    assert stack.controller.coeff.item() == pytest.approx(made.coeff, rel=1e-5)


def test_in_an_env_a_plan_per_step_compares_neighbouring_steps():
    """16 steps of a row, through the ends of episodes; 256 steps are given at once."""
    stack = KLConstrainedTransform(make_actor(), controller(0.5, per="step"))
    batch = play(with_transforms(WalkEnv((4,), longest=40), stack), policy(), 64)["next"]
    assert batch["done"].any()
    rewards, kl = (batch[name].double().flatten() for name in ("task_reward", "kl"))
    assert kl.abs().max() > 0.5
    made = RewardPlan(0.5).add(rewards, log_ratios=kl, groups=torch.arange(256) // 16).solve()
    assert made is not None
    assert stack.controller.coeff.item() == pytest.approx(made.coeff, **SAME)
    before_the_plan = batch["kl_coeff"][:, :-1]
    assert (before_the_plan == 0).all()


def test_rewards_that_depend_on_the_policy_are_kept_without_their_graph():
    """An env that is differentiated through; the stack can still be copied in each step."""
    actor = make_actor("normal")
    stack = KLConstrainedTransform(actor, PlannedKLController(0.3))
    env = with_transforms(WalkEnv((3,), discrete=False), stack)
    assert play(env, moved(actor), 5)["next", "reward"].requires_grad
    copied = copy.deepcopy(stack)
    sums = [cast(torch.Tensor, each.feed.rewards.returns.sums) for each in (copied, stack)]
    assert sums[0].equal(sums[1])


def test_random_and_deterministic_steps_in_an_env_plan_nothing(actor):
    stack = KLConstrainedTransform(actor, controller())
    env = TransformedEnv(DigitLanguageEnv(reward_fn=reward_of, batch_size=(60,), seed=0), stack)
    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        env.rollout(4, actor)
    env.rollout(4)
    plan = stack.controller.plan
    assert plan is not None
    assert not len(plan.samples)


def test_the_loss_plans_from_the_rewards_of_a_batch(actor):
    batch, loss = collect(actor, 200), KLPenaltyLoss(actor, controller())
    expected = coeff_for_budget(totals(batch), 0.3)
    assert loss.update_controller(batch) == pytest.approx(expected, **SAME)
    padded: Any = torch.cat([batch, batch[:9]])  # a new one
    padded["next", "reward"][200:] = torch.nan
    padded["collector", "mask"] = torch.arange(209)[:, None].expand(209, 4) < 200
    planned = KLPenaltyLoss(actor, controller()).update_controller(padded)
    assert planned == pytest.approx(expected, **SAME)
    other = KLPenaltyLoss(actor, controller())
    other.set_keys(reward="other")
    with pytest.raises(KeyError, match="'other' is not in the data.*name it with"):
        other.update_controller(batch)
    batch["next", "reward"] = batch["next", "reward"].expand(-1, -1, 2)
    with pytest.raises(ValueError, match=r"the reward must have the shape \(200, 4, 1\)"):
        KLPenaltyLoss(actor, controller()).update_controller(batch)


def test_whole_rows_are_no_padded_ones_for_a_loss_either(actor):
    """Texts of a collector may begin in the states in which others, with other ids, were left."""
    batch, ids = collect(actor, 200), torch.arange(200)[:, None].expand(-1, 2)
    loss, stack = KLPenaltyLoss(actor, controller()), KLConstrainedTransform(actor, controller())
    for number, piece in enumerate(batch.split(2, dim=1)):
        piece["collector", "traj_ids"] = ids + 200 * number
        loss.update_controller(piece)
        stack(piece)
        assert loss.controller.coeff == stack.controller.coeff


def test_the_loss_plans_with_the_log_probs_of_the_policy_that_drew_the_actions(actor):
    batch, later = collect(moved(actor, scale=0.05), 200), moved(actor, seed=2, scale=0.2)
    stack = KLConstrainedTransform(later, controller(), reference=actor)
    stack(batch)
    loss = KLPenaltyLoss(later, controller(), reference=actor)
    expected = pytest.approx(stack.controller.coeff.item(), **SAME)
    assert loss.update_controller(batch) == expected
    # Where it is not recorded, that of the present policy is the only one that is known.
    unrecorded = KLPenaltyLoss(later, controller(), reference=actor)
    assert unrecorded.update_controller(batch.exclude("action_log_prob")) != expected


def test_short_trajectories_are_planned_whole_for_a_target_per_step(actor):
    batch, stack = collect(actor, 200), KLConstrainedTransform(actor, controller(0.1, per="step"))
    stack(batch)
    # 0.1 nats for each of four steps.
    expected = coeff_for_budget(totals(batch), 0.4)
    assert stack.controller.coeff.item() == pytest.approx(expected, **SAME)


def dense(n_rows: int, n_steps: int) -> TensorDict:
    """Steps whose reward is the action plus a slow trend, with zero KL, (n_rows, n_steps)."""
    generator = torch.Generator().manual_seed(0)
    trend = torch.linspace(0, 30, n_steps)[None, :, None]
    reward = torch.randn(n_rows, n_steps, 1, generator=generator) + trend
    done = torch.zeros(n_rows, n_steps, 1, dtype=torch.bool)
    done[:, -1] = True
    step = {"reward": reward, "kl": 0 * reward, "done": done, "terminated": done}
    names = [None, "time"]
    return TensorDict({"next": step}, batch_size=(n_rows, n_steps), names=names)


def test_long_trajectories_are_planned_by_blocks_of_steps():
    from torchrl_kl import RewardAdjustmentTransform

    batch = dense(10, 320)
    transform = RewardAdjustmentTransform(controller(0.2, per="step"))
    transform(batch)
    blocks = batch["next", "reward"].reshape(-1, 16).double()
    expected = coeff_for_budget(blocks, 0.2)
    assert transform.controller.coeff.item() == pytest.approx(expected, **SAME)
    # 1 / sqrt(2 * 0.2) for normal rewards of variance 1; the trend of 30 is not counted.
    assert expected == pytest.approx(1 / math.sqrt(0.4), rel=0.3)


def test_without_time_steps_are_pooled():
    from torchrl_kl import RewardAdjustmentTransform

    batch = dense(10, 320).reshape(-1)
    transform = RewardAdjustmentTransform(controller(0.2, per="step", max_coeff=100.0))
    transform(batch)
    expected = coeff_for_budget(batch["next", "reward"].flatten().double(), 0.2)
    assert transform.controller.coeff.item() == pytest.approx(expected, **SAME)


# Responses of TorchRL's LLM API.


@pytest.mark.parametrize(("per", "budget"), [("trajectory", 0.3), ("step", 0.3 / 4)])
def test_rewards_of_responses_are_compared_by_prompt(actor, per, budget):
    batch = texts(20, 16)
    model = GPT(vocab_size=11, block_size=8)
    transform = ResponseKLTransform(model, controller(budget, per=per), pad_token=10)
    transform(batch)
    expected = coeff_for_budget(batch["next", "reward"].double().view(-1, 16), 0.3)
    assert transform.controller.coeff.item() == pytest.approx(expected, **SAME)
    assert transform.statistics.count == 0
    transform(batch)
    assert transform.controller.coeff.item() < expected


def test_batches_of_responses_with_few_each_are_pooled_until_there_are_enough():
    model = GPT(vocab_size=11, block_size=8)
    transform = ResponseKLTransform(model, controller(), pad_token=10)
    batch, plan = texts(30, 4), RewardPlan(0.3)
    rewards = batch["next", "reward"].double().flatten()
    n = 0
    for n, rows in enumerate(torch.arange(len(batch)).split(4)):
        transform(batch[rows])
        plan.add(rewards[rows], groups=torch.full((4,), float(n)))
        if not transform.controller.planning:
            break
    made = plan.solve()
    assert made is not None
    assert transform.controller.coeff.item() == pytest.approx(made.coeff, **SAME)
    assert n > 2


@pytest.mark.parametrize(("per", "target"), [("trajectory", 0.5), ("step", 0.1)])
def test_rewards_of_an_env_that_wait_to_be_given_are_saved(per, target):
    """A loop that was resumed gave parts of returns, and waited for rewards that it had had."""

    def make() -> KLConstrainedTransform:
        planned = ExponentialKLController("plan", target, per=per, max_coeff=1e6)
        return KLConstrainedTransform(make_actor(), planned)

    def coeffs(resume: bool) -> list[float]:
        stack, policy, found = make(), moved(make_actor(), scale=0.05), []
        env = with_transforms(WalkEnv((8,)), stack)
        torch.manual_seed(0)
        with set_exploration_type(ExplorationType.RANDOM):
            td = env.reset()
            for t in range(60):
                if resume and t % 7 == 3:
                    state, drawn = copy.deepcopy(stack.state_dict()), torch.get_rng_state()
                    stack = make()
                    env = with_transforms(WalkEnv((8,)), stack)
                    env.reset()
                    stack.load_state_dict(state)
                    torch.set_rng_state(drawn)
                _, td = env.step_and_maybe_reset(policy(td))
                found.append(stack.controller.coeff.item())
        assert not stack.controller.planning
        return found

    assert coeffs(resume=True) == coeffs(resume=False)
