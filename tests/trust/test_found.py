"""What was found by attack, each with the smallest use that shows it."""

from typing import Any

import pytest
import torch
from torch.testing import assert_close
from torchrl.envs import ExcludeTransform, RenameTransform, SelectTransform, Transform
from torchrl.envs.utils import step_mdp

from tests.helpers import WalkEnv, make_actor, moved, play, spied, with_transforms
from torchrl_kl import KLConstrainedTransform, KLKeys


@pytest.mark.parametrize("shape", [(0, 4), (0,)], ids=str)
def test_an_empty_batch_is_scored_in_chunks(shape):
    actor = make_actor()
    batch = play(WalkEnv((2,)), actor, 4)
    empty = batch[:0] if len(shape) == 2 else batch[:0, 0]
    stack = KLConstrainedTransform(actor, 0.1, chunk_size=1)
    assert stack(empty)["next", "kl"].shape == torch.Size((*shape, 1))


@pytest.mark.parametrize("per", ["trajectory", "step"])
def test_a_batch_without_steps_tells_the_controller_nothing(per):
    """PyTorch could not reshape its tensors of 0 elements."""
    stack, controller = spied(per)
    batch = play(WalkEnv((2,)), moved(make_actor()), 8)
    after = stack(batch[:, :0])["next"]
    assert after["kl"].shape == after["episode_kl"].shape == after["reward"].shape == (2, 0, 1)
    assert not controller.calls
    stack(batch)
    assert controller.calls


@pytest.mark.parametrize("n_dims", [1, 2])
def test_rows_that_are_whole_trajectories_are_added_up_as_others_are(n_dims):
    batch = play(WalkEnv((2,)), moved(make_actor()), 8)[:, :3].clone()
    batch["next", "done"][:] = torch.tensor([False, True, False])[:, None]
    batch["collector", "mask"] = torch.tensor([True, True, False]).expand(2, 3)
    batch = batch.exclude(("collector", "traj_ids"), "done")
    batch = batch[0] if n_dims == 1 else batch
    batch.names = [*[None] * (n_dims - 1), "time"]
    stack, controller = spied()
    step = stack(batch)["next"]
    wanted = step["kl"].cumsum(-2) * batch["collector", "mask"].unsqueeze(-1)
    assert_close(step["episode_kl"], wanted)
    assert controller.calls


class TestTheRunningSumOfAnEnv:
    """Where a step had none it began anew, and the controller was told of the last step alone."""

    @pytest.mark.parametrize(
        "later",
        [
            ExcludeTransform("episode_kl"),
            SelectTransform("observation", "left"),
            RenameTransform(["episode_kl"], ["other"]),
        ],
        ids=lambda later: type(later).__name__,
    )
    def test_no_later_transform_may_drop_it(self, later: Transform):
        stack, controller = spied()
        with pytest.raises(KeyError, match="'episode_kl' is not in the data.*drop or rename"):
            play(with_transforms(WalkEnv((2,)), stack, later.clone()), moved(make_actor()))
        assert not controller.calls

    def test_a_loop_by_hand_may_not_drop_it(self):
        env, policy = with_transforms(WalkEnv((2,)), spied()[0]), moved(make_actor())
        td = step_mdp(env.step(policy(env.reset())))
        with pytest.raises(KeyError, match=r"'episode_kl' is not in the data.*Reset the env first"):
            env.step(policy(td.exclude("episode_kl")))


class TestKeys:
    @pytest.mark.parametrize(
        "keys",
        [
            {"kl": "reward"},
            {"task_reward": "reward"},
            {"kl_coeff": "kl"},
            {"ref_log_prob": "kl"},
            {"kl": "kl", "episode_kl": "kl"},
        ],
        ids=str,
    )
    def test_two_entries_may_not_have_one_name(self, keys: Any):
        """With `task_reward="reward"`, the penalized reward was overwritten by the task's."""
        with pytest.raises(ValueError, match="`keys` must name different entries"):
            KLConstrainedTransform(make_actor(), 0.1, keys=KLKeys(**keys))

    def test_two_entries_may_have_one_name_in_two_places(self):
        keys = KLKeys(kl=("a", "kl"), task_reward=("b", "kl"), episode_kl=("b", "reward"))
        env = with_transforms(WalkEnv((2,)), KLConstrainedTransform(make_actor(), 0.1, keys=keys))
        step = play(env, moved(make_actor()))["next"]
        assert_close(step["reward"], step["b", "kl"] - 0.1 * step["a", "kl"])


class TestFlags:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8])
    @pytest.mark.parametrize(
        "key", ["is_init", "done", ("next", "done"), ("next", "terminated")], ids=str
    )
    def test_they_may_have_any_dtype(self, key, dtype):
        """Bitwise operators refused floats, with the words of PyTorch."""
        batch = play(WalkEnv((2,)), moved(make_actor()), 8)
        batch["is_init"] = torch.zeros(2, 8, 1, dtype=torch.bool)
        results, told = [], []
        for flag in (batch[key], batch[key].to(dtype)):
            stack, controller = spied()
            results.append(stack(batch.clone().set(key, flag))["next", "episode_kl"])
            told.append(controller.calls)
        assert results[0].equal(results[1])
        assert told[0] == told[1] != []
