"""The env of the digit language: episodes, rewards, prompts, seeds and errors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, assert_close
from torchrl.envs import SerialEnv, StepCounter, TransformedEnv, step_mdp

from tests.conftest import set_env_seed
from tests.laws.env_laws import EnvLaws
from torchrl_kl.envs import DigitLanguage, DigitLanguageEnv

cuda = torch.cuda.is_available()
PROMPT = torch.tensor([5, 7, 1, 5])
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

    def test_terminated_exactly_once_and_never_truncated(self):
        env = DigitLanguageEnv(batch_size=(2, 3))
        rollout = env.rollout(12, break_when_any_done=False)
        expected = torch.tensor([False, False, False, True]).repeat(3).expand(2, 3, -1)
        torch.testing.assert_close(rollout["next", "terminated"].squeeze(-1), expected)
        assert "truncated" not in rollout["next"]

    def test_a_step_leaves_its_input_as_it_was(self):
        env = DigitLanguageEnv(batch_size=(3,))
        td = env.rand_action(env.reset())
        before = td.clone()
        env.step(td)
        assert_close(td.exclude("next"), before, rtol=0, atol=0)

    def test_any_unfinished_text_can_be_stepped(self):
        # No reset before: the state is in the tensordict and nowhere else.
        env = DigitLanguageEnv()
        assert env.state_spec == env.observation_spec
        tokens = torch.tensor([5, 7, 1, 5, 10, 6, 3, 9, 10])
        td = TensorDict(tokens=tokens, position=torch.tensor(8), action=torch.tensor(4))
        after = env.step(td)["next"]
        torch.testing.assert_close(after["tokens"], torch.tensor([5, 7, 1, 5, 10, 6, 3, 9, 4]))
        torch.testing.assert_close(after["reward"], torch.tensor([1.0]))
        assert after["done"].all()

    def test_rows_end_each_at_its_own_time(self):
        env = DigitLanguageEnv(batch_size=(3,))
        rollout = env.rollout(
            10, tensordict=staggered(env), auto_reset=False, break_when_any_done=False
        )
        ends = [row.nonzero().flatten().tolist() for row in rollout["next", "done"].squeeze(-1)]
        assert ends == [[2, 6], [1, 5, 9], [0, 4, 8]]

    def test_finished_rows_wait_for_the_others(self):
        env = DigitLanguageEnv(batch_size=(3,))
        rollout = env.rollout(
            10,
            tensordict=staggered(env),
            auto_reset=False,
            break_when_any_done=False,
            break_when_all_done=True,
        )
        expected = torch.tensor([[0, 0, 1], [0, 1, 1], [1, 1, 1]], dtype=torch.bool)
        torch.testing.assert_close(rollout["next", "done"].squeeze(-1), expected)
        tokens = rollout["next", "tokens"]
        torch.testing.assert_close(tokens[2, 2], tokens[2, 0], rtol=0, atol=0)

    def test_a_finished_row_left_out_of_a_step_stays_finished_without_reward(self):
        reward_fn = Recorder()
        env = DigitLanguageEnv(reward_fn=reward_fn, batch_size=(3,))
        td = step(env, staggered(env), 7)
        assert len(reward_fn.calls) == 1
        assert td["done"].squeeze(-1).tolist() == [False, False, True]
        mask, action = torch.tensor([True, False, False]), torch.tensor([3, 3, 99])
        after = env.step(td.clone().set("_step", mask).set("action", action))["next"]
        torch.testing.assert_close(after["tokens"][1:], td["tokens"][1:])
        assert after["position"].tolist() == [8, 8, 9]
        assert after["done"].squeeze(-1).tolist() == [False, False, True]
        assert (after["reward"] == 0).all()
        assert len(reward_fn.calls) == 1


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

    @pytest.mark.parametrize("batch_size", [(), (2,), (2, 3)], ids=str)
    def test_reward_fn_sees_finished_texts_only(self, batch_size):
        reward_fn = Recorder()
        env = DigitLanguageEnv(reward_fn=reward_fn, batch_size=batch_size)
        td = env.reset()
        for action in (1, 2, 3):
            td = step(env, td, action)
        assert reward_fn.calls == []
        last = torch.arange(env.numel()).reshape(batch_size)
        after = env.step(td.set("action", last))["next"]
        (texts,) = reward_fn.calls
        torch.testing.assert_close(texts, after["tokens"].reshape(-1, 9))
        torch.testing.assert_close(after["reward"], last.unsqueeze(-1).float())

    def test_reward_fn_sees_the_finished_rows_of_a_batch(self):
        reward_fn = Recorder(lambda texts: texts.sum(-1))
        env = DigitLanguageEnv(reward_fn=reward_fn, batch_size=(3,))
        td = staggered(env)
        after = env.step(td.set("action", torch.tensor([4, 4, 4])))["next"]
        (texts,) = reward_fn.calls
        torch.testing.assert_close(texts, after["tokens"][2:])
        expected = torch.tensor([[0.0], [0.0], [float(after["tokens"][2].sum())]])
        torch.testing.assert_close(after["reward"], expected)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool, torch.float16])
    def test_rewards_are_cast_to_float32(self, dtype):
        reward_fn = Recorder(lambda texts: torch.ones(len(texts), dtype=dtype))
        rollout = DigitLanguageEnv(reward_fn=reward_fn, batch_size=(2,)).rollout(4)
        expected = torch.tensor([0.0, 0.0, 0.0, 1.0]).expand(2, -1)
        torch.testing.assert_close(rollout["next", "reward"].squeeze(-1), expected)

    def test_rewards_of_a_model_carry_no_gradient_and_the_model_is_left_alone(self):
        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.scale = torch.nn.Parameter(torch.tensor(2.0))

            def forward(self, texts):
                return self.scale * texts[:, -1]

        model = Model().eval()
        env = DigitLanguageEnv(reward_fn=model)
        env.train()
        assert not model.training
        assert env.reward_fn is model
        assert list(env.parameters()) == []
        assert not env.rollout(4)["next", "reward"].requires_grad

    def test_wrong_reward_functions_are_refused(self):
        with pytest.raises(TypeError, match="`reward_fn` must be callable, got float"):
            DigitLanguageEnv(reward_fn=1.0)  # pyright: ignore[reportArgumentType]
        env = DigitLanguageEnv(reward_fn=Recorder(lambda texts: texts[:, :1]), batch_size=(3,))
        with pytest.raises(ValueError, match=r"one reward per text, shape \(3,\) .* got \(3, 1\)"):
            env.rollout(4)
        env = DigitLanguageEnv(reward_fn=Recorder(lambda texts: 1.0))
        with pytest.raises(TypeError, match="`reward_fn` must return a tensor, got float"):
            env.rollout(4)


class TestPrompt:
    def given(self) -> torch.Tensor:
        return torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8], [9, 0, 1, 2]])

    @wrapped
    def test_given_prompts_are_used(self, wrap):
        env = wrap(DigitLanguageEnv(batch_size=(3,)))
        torch.testing.assert_close(env.reset(prompt=self.given())["tokens"][:, :4], self.given())
        one_for_all = env.reset(prompt=PROMPT)["tokens"][:, :4]
        torch.testing.assert_close(one_for_all, PROMPT.expand(3, -1))

    @wrapped
    def test_given_prompts_go_to_the_masked_rows(self, wrap):
        env = wrap(DigitLanguageEnv(batch_size=(3,)))
        td = step_mdp(env.rand_step(env.reset()))
        before = td["tokens"].clone()
        mask = torch.tensor([[True], [False], [True]])
        after = env.reset(td.set("_reset", mask), prompt=self.given())
        torch.testing.assert_close(after["tokens"][[0, 2], :4], self.given()[[0, 2]])
        torch.testing.assert_close(after["tokens"][1], before[1])
        assert after["position"].tolist() == [5, 6, 5]

    def test_each_worker_takes_its_own(self):
        env = SerialEnv(3, DigitLanguageEnv)
        prompts = [{"prompt": prompt} for prompt in self.given()]
        torch.testing.assert_close(env.reset(list_of_kwargs=prompts)["tokens"][:, :4], self.given())

    @wrapped
    def test_later_resets_draw_again(self, wrap):
        env = wrap(DigitLanguageEnv(batch_size=(3,), seed=0))
        begin = env.reset(prompt=self.given())
        rollout = env.rollout(8, tensordict=begin, auto_reset=False, break_when_any_done=False)
        torch.testing.assert_close(rollout["tokens"][:, 3, :4], self.given())
        # A given prompt draws nothing, so the next prompts are the first ones of the seed.
        first_draw = DigitLanguageEnv(batch_size=(3,), seed=0).reset()["tokens"][:, :4]
        torch.testing.assert_close(rollout["tokens"][:, 4, :4], first_draw)

    def test_prompts_are_copied(self):
        prompt = PROMPT.clone()
        env = DigitLanguageEnv()
        td = env.reset(prompt=prompt)
        td["tokens"].zero_()
        torch.testing.assert_close(prompt, PROMPT)

    def test_wrong_prompts_are_refused(self):
        env = DigitLanguageEnv(batch_size=(3,))
        with pytest.raises(
            TypeError, match=r"`prompt` must be .* torch.int64 .* got torch.float32"
        ):
            env.reset(prompt=PROMPT.float())
        with pytest.raises(ValueError, match=r"`prompt` must have shape \(\*B, 4\), got \(5,\)"):
            env.reset(prompt=torch.zeros(5, dtype=torch.int64))
        with pytest.raises(
            ValueError, match=r"must have shape \(3, 4\), or \(4,\) .* got \(2, 4\)"
        ):
            env.reset(prompt=self.given()[:2])
        with pytest.raises(ValueError, match=r"`prompt` must be between 0 and 9, got .* 1 and 10"):
            env.reset(prompt=torch.tensor([1, 2, 3, 10]))
        with pytest.raises(TypeError, match=r"takes `prompt` and no other .* got \['prompts'\]"):
            env.reset(prompts=PROMPT)

    def test_reset_starts_again_from_any_text(self):
        env = DigitLanguageEnv(batch_size=(3,))
        td = step(env, env.reset(), 1)
        assert env.reset(td)["position"].tolist() == [5, 5, 5]
        # TorchRL's own refusal, of all envs that do not declare such resets.
        with pytest.raises(NotImplementedError, match="does not support deterministic resets"):
            env.reset(td, set_state=True)


class TestSeeds:
    @pytest.fixture(autouse=True)
    def without_seeds_of_the_tests(self, monkeypatch):
        monkeypatch.setattr(DigitLanguageEnv, "_set_seed", set_env_seed)

    @pytest.fixture
    def reset(self):
        return lambda **kwargs: DigitLanguageEnv(batch_size=(8,), **kwargs).reset()["tokens"]

    def test_a_seed_fixes_the_prompts_and_another_changes_them(self, reset):
        torch.testing.assert_close(reset(seed=1), reset(seed=1), rtol=0, atol=0)
        assert (reset(seed=1) != reset(seed=2)).any()

    def test_the_seed_argument_is_set_seed(self, reset):
        env = DigitLanguageEnv(batch_size=(8,))
        env.set_seed(1)
        torch.testing.assert_close(env.reset()["tokens"], reset(seed=1), rtol=0, atol=0)

    def test_the_global_seed_has_no_effect(self, reset):
        torch.manual_seed(0)
        first = reset()
        torch.manual_seed(0)
        assert (reset() != first).any()

    def test_set_seed_none_forgets_the_seed(self, reset):
        env = DigitLanguageEnv(batch_size=(8,), seed=1)
        env.set_seed(None)
        assert (env.reset()["tokens"] != reset(seed=1)).any()

    def test_making_an_env_leaves_the_global_rng_alone(self):
        before = torch.get_rng_state()
        DigitLanguageEnv()
        DigitLanguageEnv(seed=1)
        torch.testing.assert_close(torch.get_rng_state(), before, rtol=0, atol=0)


class TestErrors:
    @pytest.mark.parametrize("language", [DigitLanguage, 10, "digits"])
    def test_other_types_of_language_are_refused(self, language):
        with pytest.raises(TypeError, match="`language` must be a DigitLanguage or None, got"):
            DigitLanguageEnv(language)

    @pytest.mark.parametrize("batch_size", [(0,), (2, 0), (-1,)])
    def test_empty_batch_sizes_are_refused(self, batch_size):
        with pytest.raises(ValueError, match=r"`batch_size` must have dimensions of at least 1, g"):
            DigitLanguageEnv(batch_size=batch_size)

    @pytest.mark.parametrize("action", [-1, 11])
    def test_actions_outside_the_vocabulary_are_refused(self, action):
        env = DigitLanguageEnv(batch_size=(2,))
        td = env.reset().set("action", torch.tensor([3, action]))
        with pytest.raises(ValueError, match="`action` must be between 0 and 10, got values betw"):
            env.step(td)

    @pytest.mark.parametrize(
        "action", [torch.zeros(2, 11, dtype=torch.int64), torch.zeros(2, 1).long(), torch.ones(2)]
    )
    def test_actions_of_another_shape_or_dtype_are_refused(self, action):
        env = DigitLanguageEnv(batch_size=(2,))
        with pytest.raises(ValueError, match=r"`action` must have shape \(2,\) and dtype torch.in"):
            env.step(env.reset().set("action", action))

    @pytest.mark.parametrize("position", [4, 10])
    def test_impossible_positions_are_refused(self, position):
        env = DigitLanguageEnv()
        td = env.reset().set("position", torch.tensor(position))
        with pytest.raises(ValueError, match="`position` must be between 5 and 9, got values betw"):
            step(env, td, 1)

    def test_finished_texts_are_refused(self):
        env = DigitLanguageEnv(DigitLanguage(response_length=1), batch_size=(2,))
        td = step(env, env.reset(), 1)
        with pytest.raises(
            RuntimeError, match="cannot step a finished text, got 2 with `position` 6"
        ):
            step(env, td, 1)


class TestElsewhere:
    def test_collector_goes_from_text_to_text(self):
        # Imported here: the workers of ParallelEnv import this module and need no collector.
        from torchrl.collectors import Collector

        collector = Collector(
            DigitLanguageEnv(batch_size=(2,), seed=0),
            frames_per_batch=2 * 6,
            total_frames=2 * 12,
            auto_register_policy_transforms=False,
        )
        batches: list[TensorDictBase] = [batch.clone() for batch in collector]
        collector.shutdown()
        data = torch.cat(batches, -1)  # pyright: ignore[reportCallIssue, reportArgumentType]
        assert isinstance(data, TensorDictBase)
        expected = (5 + torch.arange(12) % 4).expand(2, -1)
        torch.testing.assert_close(data["position"], expected)
        torch.testing.assert_close(data["next", "done"].squeeze(-1), expected == 8)
        fresh = DigitLanguageEnv(batch_size=(2,), seed=0)
        prompts = torch.stack([fresh.reset()["tokens"][:, :4] for _ in range(3)], 1)
        torch.testing.assert_close(data["tokens"][:, ::4, :4], prompts)

    @pytest.mark.parametrize(
        "device",
        ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not cuda, reason="no CUDA device"))],
    )
    def test_to_moves_the_texts_and_keeps_the_seed(self, device):
        here = DigitLanguageEnv(batch_size=(3,), seed=0)
        moved = DigitLanguageEnv(batch_size=(3,), seed=0).to(device)
        made = DigitLanguageEnv(batch_size=(3,), device=device, seed=0)
        assert here.device is None
        expected = here.reset()["tokens"].to(device)
        for env in (moved, made):
            td = env.rollout(4, break_when_any_done=False)
            assert td.device == env.device == torch.empty(0, device=device).device
            torch.testing.assert_close(td["tokens"][:, 0], expected, rtol=0, atol=0)

    def test_other_languages(self):
        language = DigitLanguage(1000, 512, 3, 512)
        env = DigitLanguageEnv(language, batch_size=(2,))
        rollout = env.rollout(10)
        assert rollout.shape == (2, 3)
        assert rollout["next", "tokens"].shape == (2, 3, language.text_length)
        assert env.full_action_spec["action"].cardinality() == 1001


class TestPromptSet:
    def test_draws_only_and_all_of_the_given_prompts(self):
        prompts = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8], [9, 9, 9, 9]])
        env = DigitLanguageEnv(prompts=prompts, batch_size=(200,), seed=0)
        drawn = env.reset()["tokens"][:, :4]
        assert {tuple(row) for row in drawn.tolist()} == {tuple(row) for row in prompts.tolist()}

    def test_they_may_be_edited_later(self):
        prompts = torch.tensor([[1, 2, 3, 4]])
        env = DigitLanguageEnv(prompts=prompts, batch_size=(2,))
        prompts.fill_(99)
        assert env.reset()["tokens"][:, :4].tolist() == [[1, 2, 3, 4]] * 2

    def test_seed_repeats_the_draw(self):
        prompts = torch.arange(80).reshape(20, 4) % 10
        first, second = (
            DigitLanguageEnv(prompts=prompts, batch_size=(50,), seed=3).reset() for _ in range(2)
        )
        assert torch.equal(first["tokens"], second["tokens"])

    @pytest.mark.parametrize(
        "prompts", [torch.zeros(4, dtype=torch.int64), torch.zeros(0, 4, dtype=torch.int64)]
    )
    def test_refuses_a_wrong_shape(self, prompts):
        with pytest.raises(ValueError, match=r"`prompts` must have shape \(N, 4\) with N >= 1"):
            DigitLanguageEnv(prompts=prompts)

    def test_refuses_ids_that_are_not_digits(self):
        with pytest.raises(
            ValueError, match="`prompts` must be between 0 and 9, got values between 10"
        ):
            DigitLanguageEnv(prompts=torch.full((2, 4), 10))
