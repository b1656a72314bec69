import warnings

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from torchrl.envs import GymEnv, TransformedEnv, check_env_specs
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_kl import KLConstrainedTransform
from torchrl_kl.envs import DigitLanguage, DigitLanguageGymEnv
from torchrl_kl.language import GPT, CausalLMActor

NAME = "torchrl_kl/DigitLanguage-v0"


def play(env, prompt, actions):
    """All observations, rewards and ends of one text."""
    observation, _ = env.reset(options={"prompt": prompt})
    steps = [(observation, None, None)]
    for action in actions:
        observation, reward, terminated, truncated, info = env.step(action)
        assert not truncated
        assert info == {}
        steps.append((observation, reward, terminated))
    return steps


class TestGymnasium:
    @pytest.mark.parametrize("render_mode", [None, "ansi"])
    def test_its_own_check_has_no_warnings(self, render_mode):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            check_env(gymnasium.make(NAME, render_mode=render_mode).unwrapped)

    def test_the_seed_decides_the_prompts(self):
        env = DigitLanguageGymEnv()
        first = [env.reset(seed=3)[0]["tokens"], env.reset()[0]["tokens"]]
        again = [env.reset(seed=3)[0]["tokens"], env.reset()[0]["tokens"]]
        assert np.array_equal(first, again)
        assert not np.array_equal(first[0], first[1])

    def test_reward_fn_and_rendering(self):
        env = DigitLanguageGymEnv(reward_fn=lambda texts: texts[:, -1] * 2.0, render_mode="ansi")
        steps = play(env, [0, 2, 8, 6], [7, 3, 10, 4])
        assert [reward for _, reward, _ in steps[1:]] == [0, 0, 0, 8.0]
        assert [terminated for _, _, terminated in steps[1:]] == [False, False, False, True]
        assert [int(observation["position"]) for observation, _, _ in steps] == [5, 6, 7, 8, 9]
        assert steps[2][0]["tokens"].tolist() == [0, 2, 8, 6, 10, 7, 3, 10, 10]
        assert env.render() == "0286:73|4"
        assert DigitLanguageGymEnv().render() is None
        wide = DigitLanguageGymEnv(DigitLanguage(vocab_size=12), render_mode="ansi")
        play(wide, [0, 11, 8, 6], [10, 12])
        assert wide.render() == "0 11 8 6:10 |"

    def test_an_action_is_an_integer_and_a_finished_text_is_not_stepped(self):
        env = DigitLanguageGymEnv()
        with pytest.raises(TypeError, match="'float' object cannot be interpreted as an integer"):
            env.step(1.5)
        for _ in range(4):
            env.step(np.int32(1))
        with pytest.raises(RuntimeError, match="cannot step a finished text"):
            env.step(1)


class TestTorchRL:
    def test_the_stack_over_gym_env(self):
        language = DigitLanguage()
        actor, reference = (
            CausalLMActor(GPT(language.n_tokens, language.text_length - 1)) for _ in range(2)
        )
        stack = KLConstrainedTransform(actor, 0.5, reference=reference)
        env = TransformedEnv(GymEnv(NAME, categorical_action_encoding=True), stack)
        check_env_specs(env)
        with set_exploration_type(ExplorationType.RANDOM):
            data = env.rollout(12, actor, break_when_any_done=False)
        assert data["next", "done"].flatten().tolist() == [False, False, False, True] * 3
        tokens, position = data["tokens"], data["position"]
        with torch.no_grad():
            log_probs = [
                model(tokens=tokens, position=position)[0]
                .log_softmax(-1)
                .gather(-1, data["action"].unsqueeze(-1))
                for model in (actor, reference)
            ]
        kl = log_probs[0] - log_probs[1]
        # Each log-prob is rounded a few times in float32, at a magnitude of up to 5 nats.
        torch.testing.assert_close(data["next", "kl"], kl, atol=1e-5, rtol=0)
        task_reward = data["next", "reward"] + 0.5 * data["next", "kl"]
        expected = torch.zeros(12, 1)
        texts = data["next", "tokens"][3::4]
        expected[3::4, 0] = language.preference(texts)
        torch.testing.assert_close(task_reward, expected, atol=1e-6, rtol=0)
