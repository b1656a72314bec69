"""Laws that every environment of the package must obey; a test class per env supplies a factory."""

import pickle
from abc import ABC, abstractmethod
from copy import deepcopy
from functools import partial
from itertools import pairwise

import pytest
import torch
from tensordict import TensorDictBase, assert_close
from torchrl.envs import (
    EnvBase,
    ParallelEnv,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    check_env_specs,
)

any_batch = pytest.mark.parametrize("batch_size", [(), (3,), (2, 3)], ids=str)
with_rows = pytest.mark.parametrize("batch_size", [(3,), (2, 3)], ids=str)


def random_rollout(env: EnvBase, steps: int = 12) -> TensorDictBase:
    """Steps with random actions, the same ones in each call, beyond the ends of episodes."""
    torch.manual_seed(0)
    return env.rollout(steps, break_when_any_done=False)


def check_specs(env: EnvBase) -> None:
    # One call per mode: given a seed, check_env_specs would drop the mode.
    check_env_specs(env, break_when_any_done=True)
    check_env_specs(env, break_when_any_done=False)


class EnvLaws(ABC):
    """Subclasses define `make_env`: an env with random resets and episodes of at most 3 steps.

    `check_env_specs` takes 3 steps, and the end of an episode must be one of them.
    """

    @staticmethod
    @abstractmethod
    def make_env(batch_size: tuple[int, ...]) -> EnvBase:
        """An env of a batch size, not reset yet."""

    @any_batch
    def test_specs_are_exact(self, batch_size):
        env = self.make_env(batch_size)
        assert env.batch_size == batch_size
        check_specs(env)
        check_specs(TransformedEnv(env, StepCounter()))

    @any_batch
    def test_everything_seen_is_in_the_specs(self, batch_size):
        env = self.make_env(batch_size)
        for td in random_rollout(env).unbind(-1):
            assert env.observation_spec.contains(td.select(*env.observation_keys))
            assert env.state_spec.contains(td.select(*env.state_keys))
            assert env.action_spec.contains(td[env.action_key])
            assert env.observation_spec.contains(td["next"].select(*env.observation_keys))
            assert env.full_reward_spec.contains(td["next"].select(*env.reward_keys))
            assert env.full_done_spec.contains(td["next"].select(*env.done_keys))

    @any_batch
    def test_a_seed_makes_rollouts_repeat(self, batch_size):
        env = self.make_env(batch_size)
        env.set_seed(3)
        first = random_rollout(env)
        second = random_rollout(env)
        env.set_seed(3)
        assert_close(random_rollout(env), first, rtol=0, atol=0)
        assert_close(random_rollout(env), second, rtol=0, atol=0)
        assert (first != second).any()

    @any_batch
    def test_the_global_rng_is_untouched(self, batch_size):
        env = self.make_env(batch_size)
        actions = random_rollout(env)["action"].unbind(len(batch_size))
        before = torch.get_rng_state()
        td = env.reset()
        for action in actions:
            _, td = env.step_and_maybe_reset(td.set("action", action))
        torch.testing.assert_close(torch.get_rng_state(), before, rtol=0, atol=0)

    @any_batch
    @pytest.mark.parametrize("copy", [deepcopy, lambda env: pickle.loads(pickle.dumps(env))])
    def test_a_copy_continues_as_the_original_does(self, batch_size, copy):
        env = self.make_env(batch_size)
        env.set_seed(3)
        env.reset()
        other = copy(env)
        expected = random_rollout(env)
        assert_close(random_rollout(other), expected, rtol=0, atol=0)

    @any_batch
    def test_done_means_terminated_or_truncated_and_no_step_begins_done(self, batch_size):
        env = self.make_env(batch_size)
        rollout = random_rollout(env)
        ended = rollout["next", "terminated"]
        if ("next", "truncated") in rollout.keys(include_nested=True):
            ended = ended | rollout["next", "truncated"]
        assert ended.any()
        assert (ended == rollout["next", "done"]).all()
        assert not rollout["done"].any()

    @any_batch
    def test_a_step_begins_where_the_last_one_ended_until_done(self, batch_size):
        env = self.make_env(batch_size)
        steps = random_rollout(env).unbind(-1)
        for step, following in pairwise(steps):
            going_on = ~step["next", "done"].squeeze(-1)
            for key in env.observation_keys:
                began, ended = following[key][going_on], step["next", key][going_on]
                torch.testing.assert_close(began, ended, rtol=0, atol=0)

    @any_batch
    def test_all_episodes_end(self, batch_size):
        env = self.make_env(batch_size)
        rollout = env.rollout(100, break_when_any_done=False, break_when_all_done=True)
        assert rollout.shape[-1] <= 3
        assert rollout["next", "done"][..., -1, :].all()

    @with_rows
    def test_a_partial_reset_leaves_the_other_rows_alone(self, batch_size):
        env = self.make_env(batch_size)
        env.set_seed(3)
        _, td = env.step_and_maybe_reset(env.rand_action(env.reset()))
        mask = torch.arange(env.numel()).reshape(batch_size) % 2 == 0
        action = env.action_spec.rand()
        undisturbed_env, undisturbed = deepcopy(env), td.clone()

        after = env.reset(td.clone().set("_reset", mask.unsqueeze(-1)))
        assert_close(after[~mask], undisturbed[~mask], rtol=0, atol=0)
        observed = list(env.observation_keys)
        assert (after[mask].select(*observed) != undisturbed[mask].select(*observed)).any()

        after = env.step(after.set("action", action))
        undisturbed = undisturbed_env.step(undisturbed.set("action", action))
        assert_close(after[~mask], undisturbed[~mask], rtol=0, atol=0)

    @with_rows
    def test_rows_excluded_from_a_step_keep_their_entries(self, batch_size):
        env = self.make_env(batch_size)
        td = env.rand_action(env.reset())
        mask = torch.arange(env.numel()).reshape(batch_size) % 2 == 0
        whole = env.step(td.clone())
        part = env.step(td.clone().set("_step", mask.unsqueeze(-1)))
        assert_close(part["next"][mask], whole["next"][mask], rtol=0, atol=0)
        for key in (*env.observation_keys, *env.done_keys):
            expected = td[key][~mask]
            torch.testing.assert_close(part["next", key][~mask], expected, rtol=0, atol=0)
        assert (part["next", "reward"][~mask] == 0).all()

    @any_batch
    def test_specs_are_exact_in_serial_env(self, batch_size):
        check_specs(SerialEnv(2, partial(self.make_env, batch_size)))

    @pytest.mark.slow
    def test_parallel_env_does_what_serial_env_does(self):
        factory = partial(self.make_env, (3,))
        serial = SerialEnv(2, factory)
        parallel = ParallelEnv(2, factory)
        try:
            check_specs(parallel)
            serial.set_seed(3)
            parallel.set_seed(3)
            expected = random_rollout(serial)
            assert_close(random_rollout(parallel), expected, rtol=0, atol=0)
        finally:
            parallel.close()
        first, second = expected.unbind(0)
        assert (first != second).any()
