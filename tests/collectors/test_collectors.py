"""What `kl_collector` promises and one process shows; test_workers.py starts processes."""

import gc
import pickle
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch.testing import assert_close
from torchrl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from torchrl.collectors.distributed import DistributedCollector, RayCollector
from torchrl.envs.utils import ExplorationType

from tests.adapters import adapted_actor, base_of
from tests.helpers import (
    SpyController,
    WalkEnv,
    assert_same,
    make_actor,
    moved,
    policy,
    spied,
    total,
    with_transforms,
)
from torchrl_kl import (
    KLConstrainedTransform,
    PlannedKLController,
    RewardAdjustmentTransform,
    TopKActor,
    kl_collector,
)
from torchrl_kl.collectors import _number, _PenalizedEnv, _Receiver, _SharedStack

WHERE = pytest.mark.parametrize("where", ["learner", "workers"])


def walk() -> WalkEnv:
    return WalkEnv((3,))


def collector_of(stack, where, *, batches=4, make_env: Any = walk, actor=None, **kwargs) -> Any:
    """A Collector of batches of 15 frames, in which trajectories go on in the next one."""
    torch.manual_seed(0)
    arguments: Any = {"where": where, "frames_per_batch": 15, "total_frames": 15 * batches}
    actor = policy() if actor is None else actor
    return kl_collector(Collector, make_env, actor, stack, **arguments, **kwargs)


def collect(*args, **kwargs) -> list[Any]:
    return [batch.clone() for batch in collector_of(*args, **kwargs)]


def score(actor: Any, batch: Any) -> torch.Tensor:
    with torch.no_grad():
        return actor.log_prob(batch.select("observation", "action"))


class TestPenalty:
    def test_both_places_penalize_the_same(self):
        stacks = [KLConstrainedTransform(make_actor(), 0.3) for _ in range(2)]
        learner, workers = collect(stacks[0], "learner"), collect(stacks[1], "workers")
        for one, other in zip(learner, workers, strict=True):
            assert one["next", "kl"].abs().max() > 0.1
            assert one.names == other.names == [None, "time"]
            for key in ("reward", "task_reward", "kl", "kl_coeff", "episode_kl", "ref_log_prob"):
                assert_same(one["next", key], other["next", key])

    @WHERE
    @pytest.mark.parametrize("per", ["trajectory", "step"])
    def test_the_controller_moves_once_per_batch_in_the_learner(self, where, per):
        stack, controller = spied(per, step=1.0)
        batches = collect(stack, where)
        for n, batch in enumerate(batches):
            assert_close(batch["next", "kl_coeff"], torch.full((3, 5, 1), 0.1 + n))
        n_ended = sum(batch["next", "done"].sum().item() for batch in batches)
        assert total(controller)[0] == (n_ended if per == "trajectory" else 60)
        assert len(controller.calls) == 4

    @WHERE
    @pytest.mark.parametrize(("estimator", "record"), [("exact", "logits"), ("top_k", "top_k")])
    def test_the_controller_is_fed_the_estimate_and_the_penalty_is_k1(
        self, where, estimator, record
    ):
        stack, controller = spied("step", estimator=estimator)
        actor = TopKActor(policy(), 2) if estimator == "top_k" else policy()
        batches = collect(stack, where, actor=actor)
        for batch, (kl, n_steps) in zip(batches, controller.calls, strict=True):
            step = batch["next"]
            estimate = step["kl_estimate"].double()
            assert (estimate - step["kl"]).abs().max() > 0.1
            assert (kl, n_steps) == (pytest.approx(estimate.mean().item(), abs=1e-6), 15)
            assert_close(step["reward"], step["task_reward"] - 0.1 * step["kl"])
            assert record not in batch.keys()  # what only the estimate has needed

    def test_a_coefficient_that_is_planned_from_rewards_reaches_the_workers(self):
        controller = PlannedKLController(0.1)
        stack = KLConstrainedTransform(make_actor(), controller)
        actor, make_env = moved(make_actor(), scale=0.1), partial(WalkEnv, (128,))
        frames: Any = {"frames_per_batch": 640, "total_frames": 6 * 640, "where": "workers"}
        coeffs = [0.0]
        for batch in kl_collector(Collector, make_env, actor, stack, **frames):
            assert (batch["next", "kl_coeff"] == torch.tensor(coeffs[-1])).all()
            coeffs.append(controller.coeff.item())
        assert not controller.planning
        assert coeffs[-2] > 0

    @WHERE
    def test_a_frozen_stack_does_not_move(self, where):
        stack, controller = spied(step=1.0)
        batches = collect(stack.freeze(), where, exploration_type=ExplorationType.DETERMINISTIC)
        assert controller.calls == []
        assert torch.cat([batch["next", "kl_coeff"] for batch in batches]).unique().numel() == 1

    @WHERE
    @pytest.mark.parametrize("make_env", [walk, walk()])
    def test_a_postproc_runs_before_the_stack(self, where, make_env):
        stack, _ = spied(step=1.0)
        postproc = lambda batch: batch.copy().set("seen", batch["next", "reward"])  # noqa: E731
        for batch in collect(stack, where, make_env=make_env, postproc=postproc):
            key = "task_reward" if where == "learner" else "reward"
            assert_close(batch["seen"], batch["next", key])

    @WHERE
    def test_trajectories_are_split_after_they_are_penalized(self, where):
        (stack, controller), (whole_stack, whole_controller) = spied(step=1.0), spied(step=1.0)
        split, whole = collect(stack, where, split_trajs=True), collect(whole_stack, where)
        assert controller.calls == whole_controller.calls
        for rows, batch in zip(split, whole, strict=True):
            mask = rows["collector", "mask"]
            assert mask.sum() == 15
            assert_close(rows["next", "reward"][mask].sum(), batch["next", "reward"].sum())

    @WHERE
    def test_a_trajectory_that_goes_on_is_summed_over_batches(self, where):
        stack, controller = spied()
        sums: dict[int, float] = defaultdict(float)
        finished = []
        for batch in collect(stack, where, batches=8):
            for step in batch.reshape(-1):
                number = int(step["collector", "traj_ids"])
                sums[number] += step["next", "kl"].item()
                running = step["next", "episode_kl"].item()
                assert running == pytest.approx(sums[number], abs=1e-5)
                finished += [running] * int(step["next", "done"])
        assert total(controller) == (len(finished), pytest.approx(sum(finished), abs=1e-4))

    def test_the_learner_needs_no_next_observations(self):
        one, other = (
            collect(KLConstrainedTransform(make_actor(), 0.3), "learner", compact_obs=compact)
            for compact in (False, True)
        )
        assert ("next", "observation") not in other[0].keys(True)
        for batch, compact in zip(one, other, strict=True):
            assert_close(compact["next", "reward"], batch["next", "reward"])


class TestReference:
    @WHERE
    def test_a_moved_reference_scores_the_batches_that_follow(self, where):
        """Workers read the one that was known when the batch before arrived."""
        actor = make_actor()
        stack, new = KLConstrainedTransform(actor, 0.1), policy()
        collector = collector_of(stack, where)
        for index, batch in enumerate(collector):
            is_new = index > (0 if where == "learner" else 1)
            assert_same(batch["next", "ref_log_prob"], score(new if is_new else actor, batch))
            if index == 0:
                stack.update_reference(new)

    @pytest.mark.filterwarnings("ignore:.*weights have changed")
    def test_a_state_that_is_loaded_before_reaches_the_workers(self):
        stack, other = (KLConstrainedTransform(make_actor(seed=n), 0.1) for n in (0, 8))
        other.controller.coeff.fill_(0.7)
        stack.load_state_dict(other.state_dict())
        (batch,) = collect(stack, "workers", batches=1)
        assert_same(batch["next", "ref_log_prob"], score(make_actor(seed=8), batch))
        assert_close(batch["next", "kl_coeff"], torch.full((3, 5, 1), 0.7))

    @WHERE
    @pytest.mark.parametrize("closure", [False, True])
    def test_the_policy_itself_is_the_reference(self, where, closure):
        actor, layer = adapted_actor()
        base = base_of(actor, layer)
        switch = (lambda: layer.disable_adapter()) if closure else layer.disable_adapter
        stack = KLConstrainedTransform(actor, 0.1, reference=switch)
        for batch in collector_of(stack, where, actor=actor):
            assert_same(batch["next", "ref_log_prob"], score(base, batch))
            assert_same(batch["action_log_prob"], score(actor, batch))
            assert batch["next", "kl"].abs().max() > 0.1
            with torch.no_grad():
                layer.up.weight.mul_(-1.2)

    def test_files_are_written_where_something_moved_and_go_with_their_object(self):
        stack, controller = spied()
        shared = _SharedStack(stack)
        env: Any = pickle.loads(pickle.dumps(partial(_PenalizedEnv, walk, shared)))()
        folder = Path(shared.path).parent
        shared.publish(stack)
        assert [path.name for path in folder.iterdir()] == ["numbers"]
        controller.coeff.fill_(0.3)
        stack.update_reference(policy())
        shared.publish(stack)
        batch = env.rollout(3, policy())
        assert (batch["next", "kl_coeff"] == torch.tensor(0.3)).all()
        assert batch["next", "kl"].abs().max() <= 1e-6
        assert controller.calls == []
        assert (stack.frozen, stack.env, env.transform[0].frozen) == (False, None, True)
        assert sorted(path.name for path in folder.iterdir()) == ["numbers", "reference.pt"]
        del shared
        gc.collect()
        assert not folder.exists()


class TestShapes:
    @pytest.mark.parametrize("rows", [(), (4,), (2, 4)])
    def test_the_last_dimension_is_named_time(self, rows):
        stack, _ = spied()
        batch = TensorDict(next=TensorDict(batch_size=(*rows, 5)), batch_size=(*rows, 5))
        seen = []
        receiver = _Receiver(stack, None, False)
        receiver.stack = lambda batch: seen.append(batch.names)  # type: ignore[assignment]
        receiver(batch)
        assert seen == [[*[None] * len(rows), "time"]]
        assert not hasattr(receiver, "to")  # TorchRL would copy it for asynchronous workers

    def test_ids_of_two_workers_never_meet(self):
        stack, _ = spied()
        ids, postprocs = torch.tensor([0, 0, 1, 2]), (None, lambda batch: batch.set("x", ids))
        receiver, got = _Receiver(stack, None, False), []
        receiver.stack = lambda batch: batch  # type: ignore[assignment]
        for worker, postproc in enumerate(postprocs):
            batch = TensorDict(x=-ids, batch_size=4).set(("collector", "traj_ids"), ids)
            got.append(receiver(_number(postproc, worker, 2, batch)))
        assert got[0]["collector", "traj_ids"].tolist() == [0, 0, 2, 4]
        assert got[1]["collector", "traj_ids"].tolist() == [1, 1, 3, 5]
        assert got[1]["x"].tolist() == ids.tolist()
        assert set(got[0]["collector"].keys()) == {"traj_ids"}


@pytest.mark.parametrize(
    ("kind", "kwargs", "error", "message"),
    [
        (dict, {}, TypeError, "must be one of Collector, MultiSync.*, got <class 'dict'>"),
        ("Collector", {}, TypeError, "must be one of Collector, .*, got 'Collector'"),
        (
            Collector,
            {"stack": RewardAdjustmentTransform(0.1)},
            TypeError,
            "`stack` must be a KLConstrainedTransform, got RewardAdjustmentTransform",
        ),
        (Collector, {"where": "env"}, ValueError, "`where` must be in .*, got 'env'"),
        (RayCollector, {"where": "workers"}, ValueError, "must be in \\('learner',\\)"),
        (DistributedCollector, {"where": "workers"}, ValueError, "`where` must be "),
        (Collector, {"num_workers": 2}, ValueError, "for a Collector 1, got 2 for 2"),
        (MultiSyncCollector, {"num_workers": 0}, ValueError, "at least 1.*got 0 for 0"),
        (MultiAsyncCollector, {"create_env_fn": [walk] * 2}, ValueError, "got 1 for 2"),
        (Collector, {"replay_buffer": "any"}, ValueError, "`replay_buffer` must be left out"),
        (Collector, {"init_random_frames": 100}, ValueError, "`init_random_frames` must be left"),
        (Collector, {"track_traj_ids": False}, ValueError, "`track_traj_ids` must be left True"),
        (
            Collector,
            {"exploration_type": ExplorationType.MODE},
            ValueError,
            "must be RANDOM unless the stack is frozen",
        ),
    ],
)
def test_arguments_with_which_the_kl_would_be_wrong(kind, kwargs, error, message):
    stack = KLConstrainedTransform(make_actor(), SpyController())
    arguments: Any = {"create_env_fn": walk, "policy": policy(), "stack": stack}
    arguments |= {"frames_per_batch": 15, "total_frames": 15} | kwargs
    with pytest.raises(error, match=message):
        kl_collector(kind, **arguments)


def test_a_stack_in_an_env_is_refused():
    stack = KLConstrainedTransform(make_actor(), 0.1)
    env = with_transforms(walk(), stack)
    with pytest.raises(ValueError, match="`stack` must not be in an env"):
        collect(stack, "learner")
    assert env.transform[0] is stack  # type: ignore[index]
