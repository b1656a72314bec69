"""The digit language as a `gymnasium.Env`, for agents that are not TorchRL's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Dict, Discrete, MultiDiscrete
from torch import Tensor

from torchrl_kl.envs.digit_language import DigitLanguage, check_ids


class DigitLanguageGymEnv(gymnasium.Env[dict[str, Any], np.int64]):
    """Generation of digit text, one token per step; registered as "torchrl_kl/DigitLanguage-v0".

    It is DigitLanguageEnv for one text at a time, with the same observations, rewards and ends. In
    TorchRL, `GymEnv("torchrl_kl/DigitLanguage-v0", categorical_action_encoding=True)` has the keys
    that CausalLMActor reads. `import torchrl_kl.envs` registers the name.

    Observations:
        "tokens": (L,), the prompt, the separator, the response so far, then separators.
        "position": the number of tokens before the next one.

    Actions are token ids. The reward is that of the finished text, 0 before it. A text terminates
    when it is full. `reset(options={"prompt": digits})` begins with a given prompt.

    Args:
        language: by default that of DigitLanguage().
        reward_fn: maps whole texts (N, L), int64, to rewards (N,). Default: 1 if the first token
            of the response is the preferred one, else 0.
        render_mode: "ansi", or None. `render()` returns the text.

    Raises:
        ValueError: `render_mode`, a prompt or an action is none of the above.
        RuntimeError: `step` is called on a finished text.

    Example:
        >>> import gymnasium
        >>> import torchrl_kl.envs
        >>> env = gymnasium.make("torchrl_kl/DigitLanguage-v0", render_mode="ansi")
        >>> observation, _ = env.reset(options={"prompt": [0, 2, 8, 6]})
        >>> observation, reward, terminated, truncated, _ = env.step(7)
        >>> print(env.render())
        0286:7
    """

    metadata = {"render_modes": ["ansi"], "render_fps": 4}  # noqa: RUF012

    def __init__(
        self,
        language: DigitLanguage | None = None,
        *,
        reward_fn: Callable[[Tensor], Tensor] | None = None,
        render_mode: str | None = None,
    ):
        if render_mode not in (None, *self.metadata["render_modes"]):
            raise ValueError(f"`render_mode` must be 'ansi' or None, got {render_mode!r}.")
        self.language = language = DigitLanguage() if language is None else language
        self.reward_fn = language.preference if reward_fn is None else reward_fn
        self.render_mode = render_mode
        length, n_tokens = language.text_length, language.n_tokens
        self.observation_space = Dict(
            {"tokens": MultiDiscrete([n_tokens] * length), "position": Discrete(length + 1)}
        )
        self.action_space = Discrete(n_tokens)
        self._tokens = np.full(length, language.separator, dtype=np.int64)
        self._position = length  # nothing to step before the first reset

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """A prompt, drawn at random unless `options` has one, and an empty response."""
        super().reset(seed=seed)
        language, unknown = self.language, set(options or {}) - {"prompt"}
        if unknown:
            raise ValueError(f"`options` may have the entry 'prompt', got {sorted(unknown)}.")
        prompt = (options or {}).get("prompt")
        if prompt is None:
            prompt = self.np_random.integers(language.vocab_size, size=language.prompt_length)
        digits = torch.as_tensor(prompt)
        check_ids("prompt", digits, language.vocab_size, language.prompt_length)
        self._tokens[:] = language.separator
        self._tokens[: language.prompt_length] = digits.numpy()
        self._position = language.context_length
        return self._observation(), {}

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Appends a token to the text."""
        language = self.language
        if self._position == language.text_length:
            raise RuntimeError("cannot step a finished text: call `reset()` first.")
        if not self.action_space.contains(action):
            raise ValueError(
                f"`action` must be a token id from 0 to {language.n_tokens - 1}, got {action!r}."
            )
        self._tokens[self._position] = action
        self._position += 1
        terminated = self._position == language.text_length
        reward = float(self.reward_fn(torch.tensor(self._tokens)[None])) if terminated else 0.0
        return self._observation(), reward, terminated, False, {}

    def render(self) -> str | None:  # type: ignore[override]
        """The prompt, a colon, and the response so far; None without a render mode."""
        if self.render_mode is None:
            return None
        # Digits may have more than one character where the vocabulary is larger than ten.
        space = "" if self.language.vocab_size <= 10 else " "
        prompt = self._tokens[: self.language.prompt_length]
        response = self._tokens[self.language.context_length : self._position]
        shown = ["|" if token == self.language.separator else str(token) for token in response]
        return space.join(map(str, prompt)) + ":" + space.join(shown)

    def _observation(self) -> dict[str, Any]:
        return {"tokens": self._tokens.copy(), "position": np.int64(self._position)}
