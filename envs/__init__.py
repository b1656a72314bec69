"""Environments with exactly known probabilities, imported as `torchrl_kl.envs`."""

if __name__ != "torchrl_kl.envs":
    raise ImportError(
        f"this package was imported as `{__name__}`: "
        "import it as `torchrl_kl.envs`, never as `envs`."
    )

import gymnasium

from torchrl_kl.envs.digit_language import DigitLanguage
from torchrl_kl.envs.digit_language_env import DigitLanguageEnv
from torchrl_kl.envs.digit_language_gym import DigitLanguageGymEnv

__all__ = ["DigitLanguage", "DigitLanguageEnv", "DigitLanguageGymEnv"]

gymnasium.register("torchrl_kl/DigitLanguage-v0", entry_point="torchrl_kl.envs:DigitLanguageGymEnv")
