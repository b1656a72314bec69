"""What every transform must obey; a test class per transform supplies the factories."""

import io
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict
from tensordict import assert_close as assert_close_td
from torch import nn
from torch.testing import assert_close
from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs import EnvBase, ParallelEnv, SerialEnv, Transform, TransformedEnv, check_env_specs
from torchrl.envs.utils import step_mdp

from tests.helpers import (
    WalkEnv,
    assert_within,
    compose,
    make_actor,
    moved,
    play,
    rounding,
    ulps,
    with_transforms,
    without_kl,
)
from torchrl_kl import KLConstrainedTransform, RewardAdjustmentTransform

any_batch = pytest.mark.parametrize("batch_size", [(), (2,), (2, 3)], ids=str)
# Python 3.12 warns of a fork of a process with threads; these workers run none of the parent's.
forks = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
LONGEST = 4  # steps of a trajectory
parallel = partial(ParallelEnv, 2, mp_start_method="fork")
KINDS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda batch: batch,
    "locked": lambda batch: batch.lock_(),
    "lazily stacked": lambda batch: LazyStackedTensorDict(*batch.unbind(0), stack_dim=0),
}


def check_specs(env: EnvBase) -> None:
    # One call per mode: given a seed, check_env_specs would drop the mode.
    check_env_specs(env, break_when_any_done=True)
    check_env_specs(env, break_when_any_done=False)


def names(tensordict: Any) -> set[str]:
    """The leaves at the root of a tensordict, scratch entries included."""
    return set(tensordict.keys()) - {"next"}


class TransformLaws(ABC):
    """Inherit, and define `make`, `before` and `writes`.

    Everything that has numbers has other numbers with another `seed`.
    """

    writes: frozenset[str]  # what it adds to "next", and in an env to the root
    in_env: frozenset[str] = frozenset()  # what it adds only in an env
    drops: frozenset[str] = frozenset()  # the entries that it takes from a batch
    penalizes = False  # whether it changes the reward
    actor: Any = None  # the reference, where it is not the default one

    @abstractmethod
    def make(self, seed: int = 0) -> Transform:
        """The transform under test; it never moves a coefficient."""

    def reference(self, seed: int = 0) -> Any:
        return make_actor(seed=seed) if self.actor is None else self.actor

    def before(self) -> list[Transform]:
        """The transforms it needs before itself."""
        return []

    def env(self, batch_size: tuple[int, ...] = (2,), **kwargs) -> TransformedEnv:
        return with_transforms(WalkEnv(batch_size, **kwargs), *self.before(), self.make())

    def policy(self) -> Any:
        return moved(self.reference())

    def batch(self, batch_size: tuple[int, ...] = (2,)) -> Any:
        """What the transform gets from the transforms before it, outside an env."""
        batch = play(WalkEnv(batch_size), self.policy())
        return compose(*self.before())(batch) if self.before() else batch

    def outside(self, inside: Any) -> Any:
        """The rollout of an env, transformed again without the env."""
        return compose(*self.before(), self.make())(without_kl(inside))

    def compare(self, actual: Any, expected: Any) -> None:
        """The same results, up to the reference's rounding; coefficients are at most 1."""
        step, own = expected["next"], rounding(self.reference(), expected).unsqueeze(-1)
        bounds = {"ref_log_prob": own.squeeze(-1), "kl": own, "task_reward": 0.0, "kl_coeff": 0.0}
        if "kl_estimate" in self.writes:
            # Slopes in the log-ratio: at most |lr| for k2, 1 + exp(|lr|) for k3, 2 for all actions.
            measured = own * (1 + step["kl"].abs().exp()) + 2 * own.max()
            bounds |= {"kl_estimate": measured}
            own = torch.maximum(own, measured)
        bounds["episode_kl"] = LONGEST * own.max()
        for name in (*self.writes, "reward"):
            bound = bounds[name] if name in bounds else own + ulps(step["reward"], step[name])
            assert_within(actual["next", name], step[name], bound)

    # The eleven demands of TorchRL.

    @any_batch
    def test_single_env_specs(self, batch_size):
        check_specs(self.env(batch_size))

    def test_lone_in_a_transformed_env(self):
        inner = with_transforms(WalkEnv((2,)), *self.before()) if self.before() else WalkEnv((2,))
        env = TransformedEnv(inner, self.make(), auto_unwrap=False)
        check_specs(env)
        self.compare(play(env, self.policy()), play(self.env(), self.policy()))

    def test_specs_in_serial_env(self):
        env = SerialEnv(2, partial(self.env, ()))
        check_specs(env)
        inside = play(env, self.policy())
        around = with_transforms(SerialEnv(2, WalkEnv), *self.before(), self.make())
        self.compare(inside, play(around, self.policy()))
        self.compare(self.outside(inside), inside)

    def test_specs_around_serial_env(self):
        env = with_transforms(SerialEnv(2, WalkEnv), *self.before(), self.make())
        check_specs(env)
        inside = play(env, self.policy())
        self.compare(self.outside(inside), inside)
        if "kl" in self.writes:
            assert (inside["next", "kl"] != 0).any()

    def test_without_an_env(self):
        batch = self.batch()
        after = self.make()(batch)
        assert names(after["next"]) == names(batch["next"]) - self.drops | self.writes
        assert names(after) == names(batch) - self.drops
        kept = names(batch["next"]) - self.drops
        changed = {name for name in kept if (after["next", name] != batch["next", name]).any()}
        assert changed == ({"reward"} if self.penalizes else set())

    def test_composed_and_as_a_module(self):
        batch = self.batch()
        for around in (compose(compose(self.make())), nn.Sequential(self.make().train())):
            self.compare(around(batch), self.make()(batch))

    def test_reset_and_step_in_env(self):
        earlier = with_transforms(WalkEnv((2,)), *self.before()) if self.before() else WalkEnv((2,))
        env = self.env()
        start = env.reset()
        written = self.writes | self.in_env
        assert names(start) == names(earlier.reset()) | written
        for name in written:
            assert (start[name] == 0).all()
        step = env.step(self.policy()(start))
        before = earlier.step(self.policy()(earlier.reset()))
        assert names(step) == names(before) | written
        assert names(step["next"]) == names(before["next"]) - self.drops | written

    @pytest.mark.parametrize("appended", [False, True])
    def test_in_a_replay_buffer(self, appended):
        batch = self.batch().reshape(-1)
        buffer = ReplayBuffer(
            storage=LazyTensorStorage(len(batch)),
            sampler=SamplerWithoutReplacement(shuffle=False),
            batch_size=len(batch),
            transform=None if appended else self.make(),
        )
        if appended:
            buffer.append_transform(self.make())
        buffer.extend(batch)
        expected = self.make()(batch)["next"]
        for _ in range(2):  # the second sample meets nothing that the first left behind
            sample = buffer.sample()["next"]
            assert names(sample) == names(batch["next"]) - self.drops | self.writes - {"episode_kl"}
            assert_close_td(sample.select(*expected.keys()), expected, rtol=0, atol=0)

    def test_inverse_leaves_everything_as_it_is(self):
        batch = self.batch()
        assert_close_td(self.make().inv(batch.clone()), batch, rtol=0, atol=0)

    # What this package demands in addition.

    @any_batch
    def test_env_postproc_and_module_give_the_same_numbers(self, batch_size):
        inside = play(self.env(batch_size), self.policy())
        bare = without_kl(inside)
        self.compare(self.outside(inside), inside)
        assert (inside["next", "reward"] == bare["next", "reward"]).all() != self.penalizes

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_everything_seen_is_in_the_specs(self, dtype):
        self.actor = make_actor().to(dtype)
        env = self.env(dtype=dtype)
        for step in play(env, self.policy()).unbind(-1):
            for spec, data in (
                (env.observation_spec, step.select(*env.observation_keys)),
                (env.observation_spec, step["next"].select(*env.observation_keys)),
                (env.full_reward_spec, step["next"].select(*env.reward_keys)),
            ):
                assert spec.contains(data)

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_batch_call_never_writes_into_its_input(self, kind):
        batch = self.batch()
        before = batch.clone()
        given = KINDS[kind](batch)
        after = self.make()(given)
        assert names(given) == names(before)
        assert names(given["next"]) == names(before["next"])
        assert (batch == before).all()
        expected = self.make()(before)["next"]
        for name in expected.keys():
            assert_close(after["next", name], expected[name], rtol=0, atol=0)

    def test_a_call_while_attached_is_a_call_on_a_batch(self):
        batch = self.batch()
        transform = self.make()
        env = with_transforms(WalkEnv((2,)), *self.before(), transform)
        env.reset()
        after = transform(batch)
        assert names(after) == names(batch) - self.drops
        self.compare(after, self.make()(batch))

    @pytest.mark.parametrize("how", ["clone", "deepcopy", "pickle"])
    def test_copies_do_the_same(self, how):
        copies: dict[str, Callable[[Any], Any]] = {
            "clone": lambda x: x.clone(),
            "deepcopy": deepcopy,
            "pickle": lambda x: pickle.loads(pickle.dumps(x)),
        }
        transform, batch = self.make(), self.batch()
        self.compare(copies[how](transform)(batch), transform(batch))
        if how != "clone":
            copied = copies[how](transform).state_dict()
            for name, value in transform.state_dict().items():
                if isinstance(value, torch.Tensor) and value.numel():
                    assert value.data_ptr() != copied[name].data_ptr()

    @pytest.mark.parametrize(
        "how", [deepcopy, lambda env: pickle.loads(pickle.dumps(env))], ids=["deepcopy", "pickle"]
    )
    def test_a_copied_env_does_the_same(self, how):
        env = self.env()
        self.compare(play(how(env), self.policy()), play(env, self.policy()))

    def test_state_dict_round_trip(self):
        batch, one, other = self.batch(), self.make(), self.make(seed=1)
        expected = one(batch)
        if not one.state_dict():
            return self.compare(other(batch), expected)
        with pytest.raises(AssertionError):
            self.compare(other(batch), expected)
        file = io.BytesIO()
        torch.save(compose(one).state_dict(), file)
        file.seek(0)
        compose(other).load_state_dict(torch.load(file, weights_only=True))
        self.compare(other(batch), expected)

    def test_a_partial_reset_leaves_the_other_rows_alone(self):
        env, mask = self.env((3,), longest=9), torch.tensor([[False], [True], [False]])
        td = env.reset()
        for _ in range(2):
            td = step_mdp(env.step(self.policy()(td)))
        after = env.reset(td.clone().set("_reset", mask))
        for name in self.writes:
            assert_close(
                after[name][~mask.squeeze(-1)], td[name][~mask.squeeze(-1)], rtol=0, atol=0
            )
            assert (after[name][1] == 0).all()
            assert (td[name] != 0).any()

    def test_its_step_compiles_without_a_graph_break(self):
        env: Any = with_transforms(WalkEnv((2,)), *self.before(), self.make())
        *before, last = env.transform.transforms
        if isinstance(last, (KLConstrainedTransform, RewardAdjustmentTransform)):
            last.freeze()

        def step(given: Any, following: Any) -> Any:
            return last._step(last._inv_call(given), following)

        with torch.no_grad():
            given = env.transform.inv(self.policy()(env.reset()))
            following = env.base_env._step(given)
            for transform in before:
                following = transform._step(given, following)
            torch.compiler.reset()  # other classes compile the same functions; few results are kept
            compiled = torch.compile(step, fullgraph=True, backend="eager")
            actual, expected = (f(given.clone(), following.clone()) for f in (compiled, step))
        assert names(actual) == names(expected) >= self.writes | self.in_env
        assert_close_td(actual, expected, atol=1e-6, rtol=1e-5)

    def test_a_batch_without_next_is_refused(self):
        with pytest.raises(KeyError, match=r'^the batch has no "next": outside .*observation'):
            self.make()(self.batch().exclude("next"))


class WorkerLaws(TransformLaws):
    """The same, and what holds in and around the processes of a ParallelEnv."""

    @forks
    def test_specs_in_parallel_env(self):
        # Only without buffers does ParallelEnv send its workers the log-prob.
        env = parallel(partial(self.env, ()), use_buffers=False)
        try:
            check_specs(env)
            inside = play(env, self.policy())
        finally:
            env.close()
        self.compare(self.outside(inside), inside)

    @forks
    def test_specs_around_parallel_env(self):
        workers = parallel(WalkEnv)
        env = with_transforms(workers, *self.before(), self.make())
        try:
            workers.set_seed(0)
            check_specs(env)
            inside = play(env, self.policy())
        finally:
            env.close()
        self.compare(self.outside(inside), inside)
        if "kl" in self.writes:
            assert (inside["next", "kl"] != 0).any()
