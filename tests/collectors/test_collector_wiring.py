"""What `kl_collector` promises and one process shows; the rest is in test_collectors.py."""

import pickle
from collections import defaultdict
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch.testing import assert_close
from torchrl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from torchrl.collectors.distributed import DistributedCollector, RayCollector
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs.utils import ExplorationType

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
    ConstantKLController,
    KLConstrainedTransform,
    KLRewardTransform,
    RewardAdjustmentTransform,
    TopKActor,
    kl_collector,
)
from torchrl_kl.actors.moving import entries_of
from torchrl_kl.collectors.links import (
    WorkerLink,
    number_trajectories,
    restore_trajectories,
)
from torchrl_kl.collectors.watched import WatchedCollector, WatchedRay

WHERE = pytest.mark.parametrize("where", ["learner", "workers"])


def walk() -> WalkEnv:
    return WalkEnv((3,))


class Corridor(WalkEnv):
    """It looks the same everywhere."""

    def _reset(self, tensordict=None, **kwargs):
        out = super()._reset(tensordict, **kwargs)
        self.moves.zero_()
        out["observation"].zero_()
        return out


def corridor() -> WalkEnv:
    return Corridor((3,))


def collect(stack, where, *, batches=4, make_env=walk, actor=None, **kwargs):
    """Clones of the batches of a Collector, of 15 frames: trajectories go on in the next one."""
    torch.manual_seed(0)
    arguments = {"where": where, "frames_per_batch": 15, "total_frames": 15 * batches}
    actor = policy() if actor is None else actor
    return [
        batch.clone()
        for batch in kl_collector(Collector, make_env, actor, stack, **arguments, **kwargs)
    ]


class TestOneProcess:
    def test_both_places_penalize_the_same(self):
        stacks = [KLConstrainedTransform(make_actor(), 0.3) for _ in range(2)]
        learner, workers = collect(stacks[0], "learner"), collect(stacks[1], "workers")
        for one, other in zip(learner, workers, strict=True):
            assert one["next", "kl"].abs().max() > 0.1
            for key in ("reward", "task_reward", "kl", "kl_coeff", "episode_kl", "ref_log_prob"):
                assert_same(one["next", key], other["next", key])

    @WHERE
    @pytest.mark.parametrize("per", ["trajectory", "step"])
    def test_the_controller_moves_once_per_batch_in_the_learner(self, where, per):
        stack, controller = spied(per, step=1.0)
        batches = collect(stack, where)
        for n, batch in enumerate(batches):
            assert_close(batch["next", "kl_coeff"], torch.full((3, 5, 1), 0.1 + n))
        told = (
            sum(batch["next", "done"].sum().item() for batch in batches)
            if per == "trajectory"
            else 60
        )
        assert total(controller)[0] == told
        assert len(controller.calls) == 4

    @WHERE
    def test_a_change_by_hand_reaches_the_first_batch_too(self, where):
        stack, controller = spied()
        arguments: Any = {"where": where, "frames_per_batch": 15, "total_frames": 15}
        collector = kl_collector(Collector, walk, policy(), stack, **arguments)
        controller.coeff.fill_(0.7)
        (batch,) = collector
        assert_close(batch["next", "kl_coeff"], torch.full((3, 5, 1), 0.7))

    @WHERE
    @pytest.mark.parametrize("estimator", ["exact", "top_k"])
    def test_the_controller_is_told_the_estimate_and_the_penalty_is_k1(self, where, estimator):
        stack, controller = spied("step", estimator=estimator)
        actor = TopKActor(policy(), 2) if estimator == "top_k" else policy()
        batches = collect(stack, where, actor=actor)
        for batch, (kl, n_steps), error in zip(
            batches, controller.calls, controller.standard_errors, strict=True
        ):
            step = batch["next"]
            estimate = step["kl_estimate"].double()
            assert (estimate - step["kl"]).abs().max() > 0.1
            assert (kl, n_steps) == (pytest.approx(estimate.mean().item(), abs=1e-6), 15)
            assert error == pytest.approx(estimate.std().item() / 15**0.5, rel=1e-5)
            assert_close(step["reward"], step["task_reward"] - 0.1 * step["kl"])

    @WHERE
    @pytest.mark.parametrize(("estimator", "record"), [("exact", "logits"), ("top_k", "top_k")])
    def test_what_the_estimate_has_used_up_is_dropped(self, where, estimator, record):
        stack, _ = spied("step", estimator=estimator)
        actor = TopKActor(policy(), 2) if estimator == "top_k" else policy()
        for batch in collect(stack, where, batches=2, actor=actor):
            assert record not in batch.keys()

    @WHERE
    def test_a_frozen_stack_does_not_move(self, where):
        stack, controller = spied(step=1.0)
        batches = collect(stack.freeze(), where, exploration_type=ExplorationType.DETERMINISTIC)
        assert controller.calls == []
        assert torch.cat([batch["next", "kl_coeff"] for batch in batches]).unique().numel() == 1

    @WHERE
    def test_a_constant_coefficient_has_nothing_that_deterministic_actions_could_bias(self, where):
        stack = KLConstrainedTransform(make_actor(), 0.1)
        batches = collect(stack, where, exploration_type=ExplorationType.DETERMINISTIC)
        assert torch.equal(batches[0]["action"], batches[0]["logits"].argmax(-1))

    @WHERE
    def test_a_second_collector_begins_new_sums(self, where):
        stack, controller = spied()
        torch.manual_seed(0)
        # The first one ends after two steps, inside of trajectories with the ids that the next one
        # gives.
        arguments: Any = {"where": where, "frames_per_batch": 6, "total_frames": 6}
        (first,) = kl_collector(Collector, walk, policy(), stack, **arguments)
        assert not first["next", "done"][:, 1].all()
        told = len(controller.calls)
        second, _ = collect(stack, where, batches=2)
        assert_close(second["next", "episode_kl"][:, 0], second["next", "kl"][:, 0])
        alone, expected = spied()
        collect(alone, where, batches=2)
        assert controller.calls[told:] == expected.calls

    @WHERE
    @pytest.mark.parametrize("make_env", [walk, corridor])
    def test_a_stack_may_serve_two_collectors_in_turn(self, where, make_env):
        stack, controller = spied()
        finished = []
        arguments: Any = {"where": where, "frames_per_batch": 15, "total_frames": 60}
        collectors = [
            kl_collector(Collector, make_env, policy(), stack, **arguments) for _ in range(2)
        ]
        for batches in zip(*collectors, strict=True):
            for collector, batch in zip(collectors, batches, strict=True):
                sums = vars(collector).setdefault("sums", defaultdict(float))
                for step in batch.reshape(-1):
                    trajectory = int(step["collector", "traj_ids"])
                    sums[trajectory] += step["next", "kl"].item()
                    running = step["next", "episode_kl"].item()
                    assert running == pytest.approx(sums[trajectory], abs=1e-5)
                    if step["next", "done"]:
                        finished.append(running)
        assert sum(n for _, n in controller.calls) == len(finished)
        told = sum(kl * n for kl, n in controller.calls)
        assert told == pytest.approx(sum(finished), abs=1e-4)

    def test_two_plain_collectors_need_a_stream_each(self):
        """Ids and states of the two are equal: without streams, nothing would tell them apart."""
        stack, _ = spied()
        arguments: Any = {"frames_per_batch": 15, "total_frames": 60}
        collectors = [
            Collector(
                corridor,  # type: ignore[arg-type]
                policy(),
                postproc=partial(stack, stream=stack.new_stream()),
                auto_register_policy_transforms=False,
                **arguments,
            )
            for _ in range(2)
        ]
        sums = [defaultdict(float) for _ in collectors]
        for batches in zip(*collectors, strict=True):
            for known, batch in zip(sums, batches, strict=True):
                for step in batch.reshape(-1):
                    trajectory = int(step["collector", "traj_ids"])
                    known[trajectory] += step["next", "kl"].item()
                    running = step["next", "episode_kl"].item()
                    assert running == pytest.approx(known[trajectory], abs=1e-5)

    def test_the_learner_needs_no_next_observations(self):
        one, other = (
            collect(KLConstrainedTransform(make_actor(), 0.3), "learner", compact_obs=compact)
            for compact in (False, True)
        )
        assert ("next", "observation") not in other[0].keys(True)
        for batch, compact in zip(one, other, strict=True):
            assert_close(compact["next", "reward"], batch["next", "reward"])

    @WHERE
    def test_the_env_itself_will_do(self, where):
        stack, _ = spied()
        assert len(collect(stack, where, make_env=walk())) == 4

    @WHERE
    def test_a_postproc_runs_before_the_stack(self, where):
        stack, _ = spied(step=1.0)
        postproc = lambda batch: batch.copy().set("seen", batch["next", "reward"])  # noqa: E731
        for batch in collect(stack, where, postproc=postproc):
            assert_close(
                batch["seen"], batch["next", "task_reward" if where == "learner" else "reward"]
            )

    @WHERE
    def test_trajectories_are_split_after_they_are_penalized(self, where):
        stack, controller = spied(step=1.0)
        whole_stack, whole_controller = spied(step=1.0)
        split, whole = collect(stack, where, split_trajs=True), collect(whole_stack, where)
        assert controller.calls == whole_controller.calls
        for rows, batch in zip(split, whole, strict=True):
            mask = rows["collector", "mask"]
            assert mask.sum() == 15
            assert_close(rows["next", "reward"][mask].sum(), batch["next", "reward"].sum())

    def test_weights_can_be_given_as_a_module(self):
        actor = policy()
        arguments: Any = {"frames_per_batch": 15, "total_frames": 30}
        collector = kl_collector(
            Collector, walk, actor, KLConstrainedTransform(make_actor(), 0.1), **arguments
        )
        other = moved(actor)
        collector.update_policy_weights_(other)
        for mine, given in zip(actor.parameters(), other.parameters(), strict=True):
            assert_close(mine, given, atol=0, rtol=0)
        collector.shutdown()

    def test_an_error_that_is_no_death_comes_as_it_is_and_at_once(self, monkeypatch):
        wait = "torchrl_kl.collectors.watched.connection.wait"
        monkeypatch.setattr(wait, lambda *_, **__: pytest.fail("there is no worker to wait for"))
        penalized = lambda: with_transforms(walk(), KLConstrainedTransform(make_actor(), 0.1))  # noqa: E731
        with pytest.raises(RuntimeError, match="was penalized for its KL before"):
            collect(KLConstrainedTransform(make_actor(), 0.1), "learner", make_env=penalized)


class TestRefusals:
    def refused(self, collector_class: Any = Collector, /, stack=None, **kwargs):
        stack = KLConstrainedTransform(make_actor(), SpyController()) if stack is None else stack
        arguments: Any = {"policy": policy(), "stack": stack} | kwargs
        kl_collector(collector_class, walk, frames_per_batch=15, total_frames=15, **arguments)

    def test_another_class(self):
        with pytest.raises(
            TypeError, match="must be one of Collector, MultiSync.*RayCollector, got <class 'dict'>"
        ):
            self.refused(dict)

    def test_another_stack(self):
        with pytest.raises(
            TypeError,
            match="`stack` must be a KLConstrainedTransform, got RewardAdjustmentTransform",
        ):
            self.refused(stack=RewardAdjustmentTransform(0.1))

    def test_a_transform_that_records_no_kl(self):
        with pytest.raises(TypeError, match="KLConstrainedTransform, got KLRewardTransform"):
            self.refused(stack=KLRewardTransform(make_actor()))

    def test_a_stack_in_an_env(self):
        stack = KLConstrainedTransform(make_actor(), 0.1)
        env: Any = with_transforms(walk(), stack)
        with pytest.raises(ValueError, match="`stack` must not be in an env"):
            self.refused(stack=stack)
        assert env.transform[0] is stack

    @pytest.mark.parametrize(
        ("kind", "kwargs", "message"),
        [
            (Collector, {"where": "env"}, '`where` must be "learner" or "workers", got \'env\''),
            (
                Collector,
                {"num_workers": 2},
                "1 for a Collector, got 2: for several workers use MultiSyncCollector",
            ),
            (MultiSyncCollector, {"num_workers": 0}, "at least 1.*got 0"),
            (Collector, {"policy": None, "where": "workers"}, "`policy` must be the actor"),
            (
                Collector,
                {"replay_buffer": ReplayBuffer(storage=LazyTensorStorage(10))},
                "`replay_buffer` must be left",
            ),
            (
                RayCollector,
                {"collector_kwargs": {"replay_buffer": "any"}},
                "`replay_buffer` must be left out",
            ),
            (Collector, {"init_random_frames": 100}, "`init_random_frames` must be left out"),
            (Collector, {"track_traj_ids": False}, "`track_traj_ids` must be left True"),
            (
                DistributedCollector,
                {"collector_kwargs": {"track_traj_ids": False}},
                "`track_traj_ids` must be left True",
            ),
            (
                Collector,
                {"where": "workers", "compact_obs": True},
                "`compact_obs` must be left out.*it would drop the KL",
            ),
            (
                Collector,
                {"exploration_type": ExplorationType.MODE},
                "must be RANDOM while the controller adapts.*Freeze",
            ),
            (MultiAsyncCollector, {"set_truncated": True}, "`set_truncated` must be left out"),
            (
                DistributedCollector,
                {"collector_kwargs": [{"set_truncated": True}]},
                "`set_truncated` must be left out",
            ),
            (
                MultiSyncCollector,
                {"set_truncated": True, "use_buffers": True},
                "`use_buffers` must not be True with `set_truncated=True`",
            ),
            (
                DistributedCollector,
                {"collector_class": "async", "sync": True}
                | {"collector_kwargs": {"set_truncated": True}},
                "`set_truncated` must be left out",
            ),
            (
                DistributedCollector,
                {"collector_class": "sync", "sync": True}
                | {"collector_kwargs": {"set_truncated": True, "use_buffers": True}},
                "`use_buffers` must not be True with `set_truncated=True`",
            ),
            (
                DistributedCollector,
                {"collector_class": MultiSyncCollector, "num_workers_per_collector": 2},
                "`num_workers_per_collector` must be 1 .* got 2",
            ),
            (MultiSyncCollector, {"cat_results": -1}, "`cat_results` must not be -1"),
            (
                RayCollector,
                {"collector_class": "sync", "collector_kwargs": [{"cat_results": -1}]},
                "`cat_results` must not be -1",
            ),
            (
                DistributedCollector,
                {"where": "workers", "launcher": "submitit"},
                "`launcher` must.*got 'submitit'",
            ),
            (
                RayCollector,
                {"where": "workers", "collector_class": "sync"},
                '`collector_class`.*where="workers"',
            ),
        ],
    )
    def test_arguments_with_which_the_kl_would_be_wrong(self, kind, kwargs, message):
        with pytest.raises(ValueError, match=message):
            self.refused(kind, **kwargs)

    def test_as_many_envs_as_workers(self):
        stack, _ = spied()
        arguments: Any = {"num_workers": 3, "frames_per_batch": 15, "total_frames": 15}
        with pytest.raises(ValueError, match="one callable or one per worker, got 2 for 3"):
            kl_collector(MultiSyncCollector, [walk] * 2, policy(), stack, **arguments)

    @pytest.mark.parametrize(
        ("n_stacked", "shape"), [(WatchedCollector._n_stacked, (4,)), (1, (1, 4))]
    )
    def test_rows_joined_along_time(self, n_stacked, shape):
        collector: Any = SimpleNamespace(_cat_results=0, _n_stacked=n_stacked)
        batch = TensorDict(
            observation=torch.ones(*shape, 3), next=TensorDict(batch_size=shape), batch_size=shape
        )
        with pytest.raises(
            RuntimeError, match="`cat_results` = 0 joined the rows of several workers along time"
        ):
            WatchedCollector._receive(collector, batch)


class TestWorkers:
    def test_the_env_follows_the_files_and_moves_nothing(self):
        stack, controller = spied(step=1.0)
        link = WorkerLink(stack, over_ray=False, in_process=False)
        make_env: Any = pickle.loads(pickle.dumps(link.env_factory(walk)))
        envs = make_env(), make_env()
        for coeff in (0.5, 2.0):
            controller.coeff.fill_(coeff)
            link.send(None)
            for env in envs:
                batch = env.rollout(6, policy(), break_when_any_done=False)
                assert (batch["next", "kl_coeff"] == coeff).all()
        assert controller.calls == []
        assert all(env.transform[0].statistics.count == 0 for env in envs)
        assert not stack.in_env
        assert not stack.frozen

    def test_the_env_follows_on_another_dtype(self):
        stack, controller = spied()
        link = WorkerLink(stack, over_ray=False, in_process=True)
        env: Any = link.env_factory(walk)()
        env.transform.half()
        controller.coeff.fill_(0.3)  # which float16 does not have
        link.send(env)
        batch = env.rollout(2, policy())
        assert (batch["next", "kl_coeff"] == torch.tensor(0.3)).all()

    def test_the_env_follows_messages(self):
        stack, _ = spied()
        env: Any = WorkerLink(stack, over_ray=True, in_process=False).env_factory(walk)()
        assert (env.rollout(2, policy())["next", "kl_coeff"] == torch.tensor(0.1)).all()
        env.follow(3.0, {})
        assert (env.rollout(2, policy())["next", "kl_coeff"] == 3.0).all()
        env.follow(3.0, entries_of(policy()))
        assert env.rollout(2, policy())["next", "kl"].abs().max() <= 1e-6
        assert stack.controller.coeff == 0.1
        for mine, given in zip(
            stack.reference.parameters(), make_actor().parameters(), strict=True
        ):
            assert torch.equal(mine, given)  # the learner's is untouched

    def test_over_ray_only_what_has_changed_is_sent(self):
        stack, controller = spied()
        link = WorkerLink(stack, over_ray=True, in_process=False)
        sent: list[Any] = []
        execute = SimpleNamespace(remote=lambda *args: sent.append(args))
        collector: Any = SimpleNamespace(
            remote_collectors=[SimpleNamespace(cascade_execute=execute)]
        )
        collector.follow = partial(WatchedRay.follow, collector)
        link.send(collector)
        assert sent == []
        controller.coeff.fill_(2.0)
        link.send(collector)
        assert sent == [("env.follow", 2.0, {})]
        stack.update_reference(policy())
        link.send(collector)
        link.send(collector)
        assert len(sent) == 2
        _, coeff, weights = sent[1]
        assert coeff == 2.0
        for name, value in entries_of(policy()).items():
            assert torch.equal(weights[name], value)

    def test_the_learners_controller_stays_at_home(self):
        stack, controller = spied()
        object.__setattr__(controller, "cannot_travel", lambda: None)  # a lambda cannot be pickled
        link = WorkerLink(stack, over_ray=True, in_process=False)
        env: Any = pickle.loads(pickle.dumps(link.env_factory(walk)))()
        assert isinstance(env.transform[0].controller, ConstantKLController)

    def test_ids_of_two_workers_never_meet(self):
        ids = torch.tensor([0, 0, 1, 2])
        batches = [
            TensorDict(
                collector=TensorDict(traj_ids=ids, batch_size=4), x=torch.ones(4), batch_size=4
            )
            for _ in range(2)
        ]
        double = lambda batch: batch.copy().set("x", 2 * batch["x"])  # noqa: E731
        sent = [
            number_trajectories(batches[0], worker=0, num_workers=2, postproc=None),
            number_trajectories(batches[1], worker=1, num_workers=2, postproc=double),
        ]
        got = [restore_trajectories(batch) for batch in sent]
        assert got[0]["collector", "traj_ids"].tolist() == [0, 0, 2, 4]
        assert got[1]["collector", "traj_ids"].tolist() == [1, 1, 3, 5]
        assert got[1]["x"].tolist() == [2] * 4
        assert set(got[0].keys(True, True)) == set(batches[0].keys(True, True))
        assert batches[0]["collector", "traj_ids"].tolist() == ids.tolist()
        assert restore_trajectories(batches[0])["collector", "traj_ids"].tolist() == ids.tolist()
