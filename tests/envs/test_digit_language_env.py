"""The env of the digit language: episodes, rewards, prompts, seeds and errors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from torchrl.envs import StepCounter, TransformedEnv, step_mdp

from tests.conftest import set_env_seed
from tests.laws.env_laws import EnvLaws
from torchrl_kl.envs import DigitLanguage, DigitLanguageEnv

PROMPT = torch.tensor([5, 7, 1, 5])
GIVEN = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8], [9, 0, 1, 2]])
wrapped = pytest.mark.parametrize(
    "wrap", [lambda env: env, lambda env: TransformedEnv(env, StepCounter())]
)


def step(env: DigitLanguageEnv, td: TensorDictBase, action) -> TensorDictBase:
    """The tensordict after a step with one action for every row, ready for the next one."""
    td = env.step(td.set("action", torch.as_tensor(action).expand(env.batch_size).clone()))
    return step_mdp(td).exclude("action", "_step")


def staggered(env: DigitLanguageEnv) -> TensorDictBase:
    """Three rows before their second, their third and their last token."""
    td = step(env, env.reset(), 1)
    td = step(env, td.set("_step", torch.tensor([False, True, True])), 2)
    return step(env, td.set("_step", torch.tensor([False, False, True])), 3)


class Recorder:
    """A reward function that keeps what it was called with."""

    def __init__(self, result: Callable[[torch.Tensor], Any] = lambda texts: texts[:, -1]):
        self.calls: list[torch.Tensor] = []
        self.result = result

    def __call__(self, texts: torch.Tensor) -> Any:
        assert not torch.is_grad_enabled()
        self.calls.append(texts)
        return self.result(texts)


class TestDigitLanguageEnvLaws(EnvLaws):
    @staticmethod
    def make_env(batch_size):
        return DigitLanguageEnv(DigitLanguage(response_length=2), batch_size=batch_size)


class TestEpisode:
    @pytest.mark.parametrize("batch_size", [(), (2,), (2, 3)], ids=str)
    def test_the_actions_are_written_behind_the_separator(self, batch_size):
        env = DigitLanguageEnv(batch_size=batch_size)
        td = env.reset(prompt=PROMPT)
        text = [5, 7, 1, 5, 10, 10, 10, 10, 10]
        for position, action in enumerate([6, 2, 10, 0], start=5):
            expected = torch.tensor(text).expand(*batch_size, 9)
            torch.testing.assert_close(td["tokens"], expected)
            torch.testing.assert_close(td["position"], torch.full(batch_size, position))
            assert not td["done"].any()
            td = step(env, td, action)
            text[position] = action
        torch.testing.assert_close(td["tokens"], torch.tensor(text).expand(*batch_size, 9))
        torch.testing.assert_close(td["position"], torch.full(batch_size, 9))
        assert td["terminated"].all()
        assert td["done"].all()

    def test_rows_end_each_at_its_own_time(self):
        env = DigitLanguageEnv(batch_size=(3,))
        rollout = env.rollout(
            10, tensordict=staggered(env), auto_reset=False, break_when_any_done=False
        )
        ends = [row.nonzero().flatten().tolist() for row in rollout["next", "done"].squeeze(-1)]
        assert ends == [[2, 6], [1, 5, 9], [0, 4, 8]]


class TestReward:
    def test_default_is_the_preference_at_the_last_token(self):
        env = DigitLanguageEnv(batch_size=(3,))
        td = env.reset(prompt=PROMPT)
        rewards = []
        for action in torch.tensor([[6, 5, 10], [1, 6, 6], [1, 6, 6], [1, 6, 6]]):
            td = env.step(td.set("action", action))["next"]
            rewards.append(td["reward"].squeeze(-1))
        expected = torch.zeros(4, 3)
        expected[3, 0] = 1.0
        torch.testing.assert_close(torch.stack(rewards), expected)

    def test_reward_fn_sees_the_finished_rows_of_a_batch(self):
        reward_fn = Recorder(lambda texts: texts.sum(-1))
        env = DigitLanguageEnv(reward_fn=reward_fn, batch_size=(3,))
        td = staggered(env)
        after = env.step(td.set("action", torch.tensor([4, 4, 4])))["next"]
        (texts,) = reward_fn.calls
        torch.testing.assert_close(texts, after["tokens"][2:])
        expected = torch.tensor([[0.0], [0.0], [float(after["tokens"][2].sum())]])
        torch.testing.assert_close(after["reward"], expected)

    def test_a_reward_function_of_another_shape_is_refused(self):
        env = DigitLanguageEnv(reward_fn=Recorder(lambda texts: texts[:, :1]), batch_size=(3,))
        with pytest.raises(ValueError, match=r"one reward per text, shape \(3,\) .* got \(3, 1\)"):
            env.rollout(4)


class TestPrompt:
    @wrapped
    def test_given_prompts_are_used(self, wrap):
        env = wrap(DigitLanguageEnv(batch_size=(3,)))
        torch.testing.assert_close(env.reset(prompt=GIVEN)["tokens"][:, :4], GIVEN)
        one_for_all = env.reset(prompt=PROMPT)["tokens"][:, :4]
        torch.testing.assert_close(one_for_all, PROMPT.expand(3, -1))

    @wrapped
    def test_given_prompts_go_to_the_masked_rows(self, wrap):
        env = wrap(DigitLanguageEnv(batch_size=(3,)))
        td = step_mdp(env.rand_step(env.reset()))
        before = td["tokens"].clone()
        mask = torch.tensor([[True], [False], [True]])
        after = env.reset(td.set("_reset", mask), prompt=GIVEN)
        torch.testing.assert_close(after["tokens"][[0, 2], :4], GIVEN[[0, 2]])
        torch.testing.assert_close(after["tokens"][1], before[1])
        assert after["position"].tolist() == [5, 6, 5]

    @pytest.mark.parametrize(
        ("prompt", "error", "match"),
        [
            (PROMPT.float(), TypeError, r"`prompt` must be .* torch.int64 .* got torch.float32"),
            (GIVEN[:, :2], ValueError, r"`prompt` must have shape \(\*B, 4\), got \(3, 2\)"),
            (GIVEN[:2], ValueError, r"shape \(3, 4\), or \(4,\) .* got \(2, 4\)"),
            (PROMPT + 3, ValueError, r"`prompt` must be between 0 and 9, got .* 4 and 10"),
        ],
    )
    def test_wrong_prompts_are_refused(self, prompt, error, match):
        with pytest.raises(error, match=match):
            DigitLanguageEnv(batch_size=(3,)).reset(prompt=prompt)


def test_only_a_seed_of_the_env_fixes_the_prompts(monkeypatch):
    monkeypatch.setattr(DigitLanguageEnv, "_set_seed", set_env_seed)

    def tokens(seed: int | None) -> torch.Tensor:
        torch.manual_seed(0)
        env = DigitLanguageEnv(batch_size=(8,), seed=5)
        env.set_seed(seed)
        return env.reset()["tokens"]

    torch.testing.assert_close(tokens(1), tokens(1), rtol=0, atol=0)
    assert (tokens(1) != tokens(2)).any()
    assert (tokens(None) != tokens(None)).any()


class TestErrors:
    @pytest.mark.parametrize(
        ("action", "match"),
        [
            (torch.tensor([3, -1]), "`action` must be between 0 and 10, got values between -1"),
            (torch.tensor([3, 11]), "`action` must be between 0 and 10, got values between 3 and"),
            (torch.zeros(2, 1).long(), r"`action` must have shape \(2,\) and dtype torch.int64"),
            (torch.ones(2), r"`action` must have shape \(2,\) and dtype torch.int64"),
        ],
    )
    def test_wrong_actions_are_refused(self, action, match):
        env = DigitLanguageEnv(batch_size=(2,))
        with pytest.raises(ValueError, match=match):
            env.step(env.reset().set("action", action))

    def test_finished_texts_are_refused(self):
        env = DigitLanguageEnv(DigitLanguage(response_length=1), batch_size=(2,))
        td = step(env, env.reset(), 1)
        with pytest.raises(RuntimeError, match="a finished text, got 2 with `position` 6"):
            step(env, td, 1)


class TestPromptSet:
    def test_draws_only_and_all_of_the_given_prompts(self):
        prompts = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8], [9, 9, 9, 9]])
        env = DigitLanguageEnv(prompts=prompts, batch_size=(200,), seed=0)
        drawn = env.reset()["tokens"][:, :4]
        assert {tuple(row) for row in drawn.tolist()} == {tuple(row) for row in prompts.tolist()}

    def test_a_set_may_be_one_prompt_and_has_digits_only(self):
        env = DigitLanguageEnv(prompts=PROMPT, batch_size=(3,))
        assert (env.reset()["tokens"][:, :4] == PROMPT).all()
        with pytest.raises(ValueError, match="`prompts` must be between 0 and 9, got .* 1 and 10"):
            DigitLanguageEnv(prompts=GIVEN + 1)
