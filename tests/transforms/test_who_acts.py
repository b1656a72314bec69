"""Who acts: agents that are done, wait for their turn, or are padded do not count, anywhere."""

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torch.testing import assert_close
from torchrl.data import Categorical, Composite
from torchrl.envs import GymEnv, check_env_specs
from torchrl.modules import ProbabilisticActor

from tests.helpers import (
    SpyController,
    WalkEnv,
    collect,
    make_actor,
    moved,
    play,
    sharp,
    total,
    with_transforms,
    without_kl,
)
from torchrl_kl import (
    AdaptiveKLController,
    ConstantKLController,
    KLConstrainedTransform,
    KLControlHook,
    KLKeys,
    KLMonitor,
    KLPenaltyLoss,
    PlannedKLController,
)
from torchrl_kl.batches import counted, flags
from torchrl_kl.functional import kl_exact

any_place = pytest.mark.parametrize("place", ["env", "batch"])
any_per = pytest.mark.parametrize("per", ["trajectory", "step"])


class LeavingEnv(WalkEnv):
    """Agent i has left with i steps to go, and its flag stays; the env resets when all are gone."""

    def __init__(self, n_agents: int = 2, **kwargs):
        super().__init__((2,), n_agents=n_agents, longest=5, **kwargs)
        flag = Categorical(2, dtype=torch.bool, shape=torch.Size((2, n_agents, 1)))
        flags = {"done": flag, "terminated": flag.clone()}
        self.full_done_spec["agents"] = Composite(flags, shape=(2, n_agents))

    def _gone(self, out: Any) -> torch.Tensor:
        return out["left"].unsqueeze(-1) <= torch.arange(self.agents[0]).unsqueeze(-1)

    def _mark(self, out: Any, gone: torch.Tensor) -> Any:
        out["agents", "done"], out["agents", "terminated"] = gone, gone.clone()
        return out

    def _step(self, tensordict):
        out = super()._step(tensordict)
        return self._mark(out, self._gone(out))

    def _reset(self, tensordict=None, **kwargs):
        out = super()._reset(tensordict, **kwargs)
        return self._mark(out, torch.zeros(2, self.agents[0], 1, dtype=torch.bool))


class OneForAll(LeavingEnv):
    """Only the first agent is ever done: the env resets all of them then."""

    def _gone(self, out: Any) -> torch.Tensor:
        return out["done"].unsqueeze(-2) & (torch.arange(self.agents[0]) == 0).unsqueeze(-1)


def agents_measured(
    place: str, env: WalkEnv, controller: Any = None, **options: Any
) -> tuple[Any, Any]:
    """A rollout of agents that a stack has penalized in the env, or as a batch."""
    actor = make_actor(agents=True)
    controller = SpyController() if controller is None else controller
    keys = KLKeys(reward="reward" if env.shared_reward else ("agents", "reward"))
    stack = KLConstrainedTransform(actor, controller, update_every=1, keys=keys, **options)
    if place == "env":
        return play(with_transforms(env, stack), moved(actor), 20), controller
    return stack(play(env, moved(actor), 20)), controller


@any_place
def test_an_agent_that_has_left_is_counted_once(place):
    batch, controller = agents_measured(place, LeavingEnv())
    left = batch["next", "agents", "done"] & ~batch["agents", "done"]
    assert left.sum() < batch["next", "agents", "done"].sum()
    assert total(controller)[0] == int(left.sum())


@any_place
def test_an_env_that_resets_all_agents_when_one_is_done_ends_all_of_their_trajectories(place):
    batch, controller = agents_measured(place, OneForAll())
    ended = batch["next", "done"].squeeze(-1)
    after = batch["next", "agents"]
    starts = torch.cat([torch.ones(2, 1, dtype=torch.bool), ended[:, :-1]], 1)
    assert_close(after["episode_kl"][starts], after["kl"][starts], atol=1e-6, rtol=0)
    assert total(controller)[0] == 2 * int(ended.sum())
    expected = after["episode_kl"][ended].double().sum().item()
    assert_close(total(controller)[1], expected, atol=1e-5, rtol=0)


def log_ratios(batch: Any) -> torch.Tensor:
    """k1 of each step and agent, (*B, A), whoever acts."""
    return batch["agents", "action_log_prob"] - batch["next", "agents", "ref_log_prob"]


@any_place
@any_per
@pytest.mark.parametrize("sum_agents", [False, True])
def test_an_agent_that_has_left_has_no_kl(place, per, sum_agents):
    env = LeavingEnv(shared_reward=sum_agents)
    batch, told = agents_measured(place, env, SpyController(per=per), sum_agents=sum_agents)
    acts = ~batch["agents", "done"].squeeze(-1)
    assert not acts.all()
    k1 = torch.where(acts, log_ratios(batch), 0.0)
    step = batch["next"]
    kl = step["kl" if sum_agents else ("agents", "kl")].squeeze(-1)
    assert_close(kl, k1.sum(-1) if sum_agents else k1)
    inner = step if sum_agents else step["agents"]
    penalized = inner["task_reward"] - inner["kl_coeff"] * kl.unsqueeze(-1)
    assert_close(inner["reward"], penalized)
    if per == "step":
        assert total(told)[0] == (acts.any(-1).sum() if sum_agents else acts.sum())
        assert_close(total(told)[1], k1.sum().item(), atol=1e-4, rtol=0)
    elif sum_agents:  # one trajectory of both, until the last one leaves
        ended = step["done"]
        assert total(told)[0] == int(ended.sum()) > 0
        expected = step["episode_kl"][ended].double().sum().item()
        assert_close(total(told)[1], expected, atol=1e-4, rtol=0)


@any_place
def test_a_plan_per_step_is_made_of_the_rewards_of_those_who_act(place):
    heard: list[torch.Tensor] = []

    class Listening(PlannedKLController):
        def observe_rewards(self, rewards, **_: Any):
            heard.append(rewards)
            return self.coeff.item()

    batch, _ = agents_measured(place, LeavingEnv(), Listening(0.3, per="step"))
    acts = ~batch["agents", "done"]
    rewards = batch["next", "agents", "task_reward"][acts]
    assert_close(torch.cat(heard).sort().values.float(), rewards.sort().values)


def turns(n_steps: int = 400, *, flag: Any = ("agents", "mask")) -> tuple[Any, Any]:
    """A game of two agents that act in turns, and whether they act, (T, 2)."""
    actor = make_actor(agents=True)
    acts = torch.arange(n_steps)[:, None] % 2 == torch.arange(2)
    observation = torch.randn(n_steps, 2, 3, generator=torch.Generator().manual_seed(0))
    agents = TensorDict(observation=observation, batch_size=(n_steps, 2))
    batch = moved(actor)(TensorDict(agents=agents, batch_size=n_steps))
    batch["agents", "action_log_prob"][~acts] = -torch.inf  # none of their actions is legal
    batch[flag] = acts
    rewards = torch.zeros(n_steps, 2, 1)
    done = (torch.arange(n_steps) % 4 == 3).unsqueeze(-1)
    after = TensorDict(reward=rewards, batch_size=(n_steps, 2))
    batch["next"] = TensorDict(agents=after, done=done, batch_size=n_steps)
    batch.names = ["time"]
    return batch, acts


@any_per
@pytest.mark.parametrize("flag", [("agents", "mask"), ("collector", "mask")])
def test_agents_that_wait_for_their_turn(per, flag):
    batch, acts = turns(flag=flag)
    controller, actor = SpyController(per=per), make_actor(agents=True)
    keys = KLKeys(reward=("agents", "reward"))
    after = KLConstrainedTransform(actor, controller, keys=keys)(batch)
    kl = after["next", "agents", "kl"].squeeze(-1)
    assert_close(kl, torch.where(acts, log_ratios(after), 0.0))
    # Both have a trajectory of two actions in each game of four steps.
    assert total(controller)[0] == (200 if per == "trajectory" else 400)
    assert_close(total(controller)[1], kl.sum().item(), atol=1e-3, rtol=0)


def test_an_agent_is_done_at_the_named_flag_at_done_next_to_it_and_at_that_of_the_root():
    keys = KLKeys(reward=("agents", "reward"), done=("agents", "my_end"))
    named, own, root = torch.zeros(3, 4, 2).bool()
    named[0, 0] = own[1, 1] = root[2] = True
    agents = TensorDict(my_end=named.unsqueeze(-1), done=own.unsqueeze(-1), batch_size=(4, 2))
    step = TensorDict(agents=agents, done=root[:, :1], batch_size=4)
    batch = TensorDict(next=step, batch_size=4)
    found = flags(batch, keys.resolve(("agents", "action_log_prob")), (4, 2, 1))
    assert found.ends.tolist() == (named | own | root).tolist()


def test_a_mask_of_actions_is_not_one_of_agents():
    batch, _ = turns()
    batch["agents", "mask"] = torch.zeros(400, 2, 4, dtype=torch.bool)
    assert counted(batch, KLKeys().resolve(("agents", "action_log_prob"))) is None
    batch["agents", "mask"] = torch.ones(400, 2)
    assert counted(batch, KLKeys().resolve(("agents", "action_log_prob"))) is None


def test_the_loss_is_the_mean_over_those_who_act():
    batch, acts = turns()
    batch["agents", "action_log_prob"][~acts] = -9.0
    reference, policy = make_actor(agents=True), moved(make_actor(agents=True))
    logits, ref_logits = (
        actor(batch.select(("agents", "observation")))["agents", "logits"]
        for actor in (policy, reference)
    )
    kl = kl_exact(logits, ref_logits)[acts].detach()
    controller = SpyController(per="step")
    loss = KLPenaltyLoss(policy, controller, reference=reference)
    out = loss(batch)
    assert_close(out["kl"], kl.mean())
    assert_close(out["loss_kl"], 0.1 * kl.mean())
    summed = KLPenaltyLoss(policy, 1.0, reference=reference, reduction="sum")(batch)
    assert_close(summed["loss_kl"], kl.sum() / 2)  # of two agents
    out["loss_kl"].backward()
    given = [p.grad.clone() for p in policy.parameters()]
    for p in policy.parameters():
        p.grad = None
    (0.1 * kl_exact(logits, ref_logits.detach())[acts].mean()).backward()
    assert_close(given, [p.grad for p in policy.parameters()])
    loss.update_controller(batch)
    assert total(controller)[0] == 400
    assert_close(total(controller)[1], kl.sum().item(), atol=1e-3, rtol=0)
    # An action that nobody took has no ratio: its log-prob may be anything.
    for gradient in ("k2", "sequence"):
        one, other = (KLPenaltyLoss(policy, 1.0, gradient=gradient) for _ in range(2))
        changed = batch.clone()
        changed["agents", "action_log_prob"][~acts] = 5.0
        assert_close(one(batch)["loss_kl"], other(changed)["loss_kl"])


def test_a_planned_controller_is_fed_the_mean_over_those_who_act():
    """Also from batches whose rewards make its plan again."""
    batch, acts = turns()
    batch["agents", "action_log_prob"][~acts] = -9.0
    batch["next", "reward"] = torch.randn(400, 1)
    fed = []

    class Told(PlannedKLController):
        def next_coeff(self, kl: float, n_steps: int) -> float:
            fed.append((kl, n_steps))
            return self.coeff.item()

    policy = moved(make_actor(agents=True))
    controller = Told(0.1, per="step")
    loss = KLPenaltyLoss(policy, controller, reference=make_actor(agents=True))
    for _ in range(2):  # the first one makes the plan
        loss.update_controller(batch)
    assert fed == [(pytest.approx(loss(batch)["kl"].item(), rel=1e-5), 400)]


def test_the_monitor_and_the_log_of_a_trainer_are_of_those_who_act():
    batch, acts = turns()
    keys, controller = KLKeys(reward=("agents", "reward")), AdaptiveKLController(0.1, 1e-3, 1e6)
    stack = KLConstrainedTransform(make_actor(agents=True), controller, keys=keys)
    after = stack(batch)
    k1 = log_ratios(after)[acts].double()
    monitor = KLMonitor(
        AdaptiveKLController(0.1, 1e-3, 1e6, per="step"), keys=stack_keys(stack), window=1
    )
    messages = monitor(after)  # of the batch, and of the window
    assert [said.figures["count"] for said in messages] == [400, 400]
    assert messages[0].figures["kl"] == pytest.approx(k1.mean().item(), abs=1e-6)
    found = KLControlHook(stack).log_batch(after)
    assert found["kl_to_reference"] == pytest.approx(k1.mean().item(), abs=1e-6)


def stack_keys(stack: Any) -> KLKeys:
    return KLKeys(log_prob=stack.keys.log_prob, reward=stack.keys.reward)


# Vectorized envs of Gymnasium, which ignore the action of the step after an end.


def check_ignored(env: Any, stack: Any, actor: Any, frames: int) -> None:
    """What the stack writes and feeds, against a loop over the rows of an env with it."""
    before = torch.zeros(env.batch_size, dtype=torch.bool)
    running, ends, steps, n_ignored = torch.zeros(env.batch_size), [], [], 0
    for batch in collect(env, actor, frames=frames, batches=3):
        step = batch["next"]
        for t in range(batch.shape[-1]):
            # Where all rows end together, they are reset at once.
            ignored = before & ~before.all()
            row, after = batch[:, t], step[:, t]
            k1 = torch.where(ignored, 0.0, row["action_log_prob"] - after["ref_log_prob"])
            assert_close(after["kl"].squeeze(-1), k1)
            assert_close(after["reward"], after["task_reward"] - 0.1 * k1.unsqueeze(-1))
            steps += k1[~ignored].tolist()
            running, n_ignored = running + k1, n_ignored + int(ignored.sum())
            before = after["done"].squeeze(-1)
            ends += running[before].tolist()
            running = torch.where(before, 0.0, running)
        again = KLConstrainedTransform(actor, 0.1, reference=stack.reference)(without_kl(batch))
        assert_close(again["next", "kl"], step["kl"])  # the mark is in the data
        monitor = KLMonitor(ConstantKLController(0.1, per="step"), actor=actor, window=1)
        assert monitor(batch) == [] or monitor.counts["sampler_disagrees"].batches == 0
    assert n_ignored > 5
    expected = ends if stack.controller.per == "trajectory" else steps
    assert total(stack.controller)[0] == len(expected)
    assert_close(total(stack.controller)[1], sum(expected), atol=1e-3, rtol=0)


@any_per
def test_steps_that_only_reset_a_row_do_not_count(per, monkeypatch):
    monkeypatch.setattr("torchrl_kl.transforms.base.ignores_after_end", lambda env: True)
    actor = make_actor()
    stack = KLConstrainedTransform(actor, SpyController(per=per), update_every=1)
    env = with_transforms(WalkEnv((3,)), stack)
    check_env_specs(env)
    check_ignored(env, stack, moved(actor), 60)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:Nested TransformedEnvs:UserWarning")
@any_per
def test_gymnasium_s_vector_env(per):
    def make() -> Any:
        module = TensorDictModule(nn.Linear(4, 2), ["observation"], ["logits"])
        return sharp(
            ProbabilisticActor(
                module,
                ["logits"],
                distribution_class=torch.distributions.Categorical,
                return_log_prob=True,
            )
        )

    actor = make()
    stack = KLConstrainedTransform(actor, SpyController(per=per), update_every=1)

    def vector() -> Any:
        return GymEnv("CartPole-v1", num_envs=4, categorical_action_encoding=True)

    check_ignored(with_transforms(vector(), stack), stack, moved(actor), 400)
    env = with_transforms(vector(), KLConstrainedTransform(actor, 0.1))
    batch = play(env, actor, 200, break_when_any_done=False)
    marked = batch["autoreset"].squeeze(-1)
    # What they do is not their action's: the reward is 0, and the next state that of a reset.
    assert (batch["next", "reward"][marked] == 0).all()
    assert (batch["next", "observation"][marked].abs() <= 0.05).all()
    single = GymEnv("CartPole-v1", categorical_action_encoding=True)
    for row in batch.unbind(0):
        for step in row:
            if not step["autoreset"]:  # all others are those of a plain env
                single.reset()
                single.unwrapped.state = step["observation"].double().tolist()
                after = single.step(step.select("action"))["next"]
                assert after["done"] == step["next", "done"]
                if not step["next", "done"]:
                    assert_close(after["observation"], step["next", "observation"])
    env.close()
