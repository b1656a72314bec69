import warnings

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from torchrl.envs import GymEnv, TransformedEnv, check_env_specs
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_kl import GPT, CausalLMActor, KLConstrainedTransform
from torchrl_kl.envs import DigitLanguage, DigitLanguageEnv, DigitLanguageGymEnv

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

    def test_other_languages_by_make(self):
        language = DigitLanguage(vocab_size=3, prompt_length=2, response_length=5)
        env = gymnasium.make(NAME, language=language).unwrapped
        check_env(env)
        assert env.observation_space["tokens"].nvec.tolist() == [4] * 8  # type: ignore[index]

    def test_it_is_the_torchrl_env(self):
        """The same prompts and actions: the same observations, rewards and ends."""
        language = DigitLanguage(vocab_size=3, prompt_length=2, response_length=3)
        generator = torch.Generator().manual_seed(0)
        prompts = language.sample_prompts(20, generator=generator)
        actions = torch.randint(language.n_tokens, (20, 3), generator=generator)
        env = DigitLanguageEnv(language, batch_size=(20,))
        state, gym_env = env.reset(prompt=prompts), DigitLanguageGymEnv(language)
        played = [
            play(gym_env, p, a) for p, a in zip(prompts.tolist(), actions.tolist(), strict=True)
        ]
        for t in range(4):
            for row, steps in enumerate(played):
                observation, reward, terminated = steps[t]
                assert observation["tokens"].tolist() == state["tokens"][row].tolist()
                assert observation["position"] == state["position"][row]
                if t:
                    assert reward == state["reward"][row]
                    assert terminated == state["terminated"][row]
            if t < 3:
                state = env.step(state.set("action", actions[:, t]))["next"]

    def test_the_seed_decides_the_prompts(self):
        env = DigitLanguageGymEnv()
        first = [env.reset(seed=3)[0]["tokens"], env.reset()[0]["tokens"]]
        again = [env.reset(seed=3)[0]["tokens"], env.reset()[0]["tokens"]]
        assert np.array_equal(first, again)
        assert not np.array_equal(first[0], first[1])

    def test_reward_fn_and_rendering(self):
        env = DigitLanguageGymEnv(reward_fn=lambda texts: texts[:, -1] * 2.0, render_mode="ansi")
        steps = play(env, [0, 2, 8, 6], [7, 3, 10, 4])
        assert [reward for _, reward, _ in steps] == [None, 0, 0, 0, 8.0]
        assert env.render() == "0286:73|4"
        assert DigitLanguageGymEnv().render() is None
        wide = DigitLanguageGymEnv(DigitLanguage(vocab_size=12), render_mode="ansi")
        play(wide, [0, 11, 8, 6], [10, 12])
        assert wide.render() == "0 11 8 6:10 |"


class TestErrors:
    def test_arguments(self):
        with pytest.raises(ValueError, match="`render_mode` must be 'ansi' or None, got 'human'"):
            DigitLanguageGymEnv(render_mode="human")
        env = DigitLanguageGymEnv()
        with pytest.raises(ValueError, match=r"`options` may have the entry 'prompt', got \['p'\]"):
            env.reset(options={"p": 1})
        with pytest.raises(ValueError, match="`prompt` must be between 0 and 9"):
            env.reset(options={"prompt": [0, 1, 2, 10]})
        with pytest.raises(ValueError, match=r"`prompt` must have shape \(\*B, 4\), got \(3,\)"):
            env.reset(options={"prompt": [0, 1, 2]})

    def test_steps(self):
        env = DigitLanguageGymEnv()
        with pytest.raises(RuntimeError, match=r"cannot step .* call `reset\(\)` first"):
            env.step(1)
        env.reset(seed=0)
        with pytest.raises(ValueError, match="`action` must be a token id from 0 to 10, got 11"):
            env.step(11)
        with pytest.raises(ValueError, match=r"`action` must be a token id from 0 to 10, got 1\.5"):
            env.step(1.5)
        for _ in range(4):
            env.step(1)
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


@pytest.mark.slow
class TestStableBaselines:
    def test_ppo_learns_the_preference(self):
        """A uniform policy earns 1/4. After 20,000 tokens PPO earns more than half."""
        sb3 = pytest.importorskip("stable_baselines3")
        agent = sb3.PPO(
            "MultiInputPolicy",
            gymnasium.make(NAME, language=DigitLanguage(vocab_size=3)),
            n_steps=512,
            ent_coef=0.01,
            seed=0,
            device="cpu",
        )
        agent.learn(20_000)
        env, rewards = gymnasium.make(NAME, language=DigitLanguage(vocab_size=3)), []
        observation, _ = env.reset(seed=1)
        while len(rewards) < 400:
            action, _ = agent.predict(observation)
            observation, reward, terminated, _, _ = env.step(int(action))
            if terminated:
                rewards.append(reward)
                observation, _ = env.reset()
        # Four standard errors of a mean of 400 zeros and ones are at most 0.1.
        assert np.mean(rewards) - 0.1 > 0.5, np.mean(rewards)
