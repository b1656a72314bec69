"""The digit language as a `gymnasium.Env`, for agents that are not TorchRL's."""

import operator
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Dict, Discrete, MultiDiscrete
from torch import Tensor

from torchrl_kl.envs.digit_language import DigitLanguage
from torchrl_kl.envs.digit_language_env import DigitLanguageEnv


class DigitLanguageGymEnv(gymnasium.Env[dict[str, Any], np.int64]):
    """Generation of digit text, one token per step; registered as "torchrl_kl/DigitLanguage-v0".

    It is a DigitLanguageEnv with one text at a time. `import torchrl_kl.envs` registers the name;
    TorchRL's `GymEnv(name, categorical_action_encoding=True)` has the keys of CausalLMActor.

    Observations ("tokens" and "position"), actions, rewards and ends are those of that env.
    `reset(options={"prompt": digits})` begins with a given prompt.

    Args:
        language, reward_fn: as for DigitLanguageEnv.
        render_mode: "ansi", or None. `render()` returns the text.

    Raises:
        ValueError: a prompt or an action has a wrong value. RuntimeError: the text is finished.

    Example:
        >>> import gymnasium
        >>> import torchrl_kl.envs
        >>> env = gymnasium.make("torchrl_kl/DigitLanguage-v0", render_mode="ansi")
        >>> observation, _ = env.reset(options={"prompt": [0, 2, 8, 6]})
        >>> observation, reward, terminated, truncated, _ = env.step(7)
        >>> print(env.render())
        0 2 8 6 | 7
    """

    metadata = {"render_modes": ["ansi"], "render_fps": 4}  # noqa: RUF012

    def __init__(
        self,
        language: DigitLanguage | None = None,
        *,
        reward_fn: Callable[[Tensor], Tensor] | None = None,
        render_mode: str | None = None,
    ):
        self.render_mode = render_mode
        self._env = DigitLanguageEnv(language, reward_fn=reward_fn)
        self.language = language = self._env.language
        length, n_tokens = language.text_length, language.n_tokens
        self.observation_space = Dict(
            {"tokens": MultiDiscrete([n_tokens] * length), "position": Discrete(length + 1)}
        )
        self.action_space = Discrete(n_tokens)
        self._state = self._env.reset()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """A prompt, drawn at random unless `options` has one, and an empty response."""
        super().reset(seed=seed)
        language, prompt = self.language, (options or {}).get("prompt")
        if prompt is None:
            prompt = self.np_random.integers(language.vocab_size, size=language.prompt_length)
        self._state = self._env.reset(prompt=torch.as_tensor(prompt))
        return self._observation(), {}

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Appends a token to the text."""
        self._state["action"] = torch.tensor(operator.index(action))
        self._state = self._env.step(self._state)["next"]
        reward, terminated = (self._state[key].item() for key in ("reward", "terminated"))
        return self._observation(), float(reward), bool(terminated), False, {}

    def render(self) -> str | None:  # type: ignore[override]
        """The text so far, with "|" for separators; None without a render mode."""
        if self.render_mode is None:
            return None
        tokens = self._state["tokens"][: int(self._state["position"])].tolist()
        return " ".join("|" if one == self.language.separator else str(one) for one in tokens)

    def _observation(self) -> dict[str, Any]:
        tokens, position = self._state["tokens"], self._state["position"]
        return {"tokens": tokens.numpy().copy(), "position": np.int64(position.item())}
