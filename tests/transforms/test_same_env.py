"""Evaluations in the env of the training, of which the data alone tell where they belong."""

from typing import Any

import pytest
import torch
from torchrl.collectors import Collector
from torchrl.envs import DTypeCastTransform
from torchrl.envs.utils import ExplorationType, set_exploration_type

from tests.helpers import WalkEnv, make_actor, moved, play, policy, spied, total, with_transforms
from torchrl_kl import KLConstrainedTransform, PlannedKLController


class Listening(PlannedKLController):
    """Remembers the rewards that it was given."""

    def __init__(self, target: float):
        super().__init__(target)
        self.heard: list[float] = []

    def observe_rewards(self, rewards, **about):
        self.heard += rewards.tolist()
        return super().observe_rewards(rewards, **about)


def finished(batch: Any, name: str) -> list[float]:
    """Sums of `name` over each trajectory that ends in a batch (R, T)."""
    found, ends = [], batch["next", "done"].squeeze(-1)
    for row, over in zip(batch["next", name].double().squeeze(-1), ends, strict=True):
        start = 0
        for end in over.nonzero().flatten().tolist():
            found.append(row[start : end + 1].sum().item())
            start = end + 1
    return found


def train(stack: Any, evaluate: Any, actor: Any = None) -> Any:
    """Batches of a collector, joined along time, with an evaluation after each of them."""
    torch.manual_seed(0)
    actor = actor or policy()
    env, batches = with_transforms(WalkEnv((4,), longest=9), stack), []
    collector = Collector(
        env,
        actor,
        frames_per_batch=20,
        total_frames=200,
        auto_register_policy_transforms=False,
    )
    for batch in collector:
        batches.append(batch.clone())
        evaluate(env)
    collector.shutdown()
    return torch.cat(batches, 1)


@pytest.mark.parametrize("to_the_end", [False, True])
@pytest.mark.parametrize("exploration", [ExplorationType.DETERMINISTIC, ExplorationType.MODE])
def test_an_evaluation_leaves_out_no_trajectory_of_the_training(exploration, to_the_end):
    """Those in progress passed for its own: of 36 trajectories 6 were told, the shortest."""
    stack, controller = spied()

    def evaluate(env):
        with set_exploration_type(exploration), torch.no_grad():
            env.rollout(7, policy(), break_when_any_done=to_the_end)

    batch = train(stack, evaluate)
    expected = finished(batch, "kl")
    n, told = total(controller)
    assert n == len(expected) > 25
    assert told == pytest.approx(sum(expected), abs=1e-4)


@pytest.mark.parametrize("learned", [True, False])
@pytest.mark.parametrize("how", ["rollout", "reset"])
def test_a_plan_gets_no_rewards_of_an_evaluation(how, learned):
    """They were added to those of the trajectories that went on afterwards.

    A policy that has not learned anything is the reference: all sums of its KL are 0.
    """
    controller = Listening(0.3)
    reference = spied()[0].reference.actor
    actor = policy() if learned else reference
    stack = KLConstrainedTransform(actor, controller, reference=reference, update_every=8)

    def evaluate(env):
        stack.freeze()
        with set_exploration_type(ExplorationType.RANDOM), torch.no_grad():
            _ = env.reset() if how == "reset" else env.rollout(7, actor)
        stack.unfreeze()

    # In an env a float32 reward is added up in float64, here too.
    returns = torch.tensor(
        finished(train(stack, evaluate, actor), "task_reward"), dtype=torch.float64
    )
    assert len(controller.heard) >= 3
    for one in controller.heard:
        assert (returns - one).abs().min() <= 1e-9


@pytest.mark.parametrize("dtypes", [(torch.float64, torch.float32), (torch.float32, torch.float16)])
def test_a_plan_gets_rewards_where_a_later_transform_casts_the_sums(dtypes):
    """A sum in float64 is not equal to what a cast to float32 has left of it."""
    actor, controller = make_actor().to(dtypes[0]), Listening(0.3)
    stack = KLConstrainedTransform(actor, controller, update_every=8)
    cast = DTypeCastTransform(*dtypes, in_keys=["episode_kl"])
    env = with_transforms(WalkEnv((4,), longest=9, dtype=dtypes[0]), stack, cast)
    batch = play(env, moved(actor), 40)
    assert batch["next", "episode_kl"].dtype == dtypes[1]
    returns = torch.tensor(finished(batch, "task_reward"), dtype=torch.float64)
    assert len(controller.heard) >= 8
    for one in controller.heard:
        assert (returns - one).abs().min() <= 1e-9
