"""Environments with exactly known probabilities, imported as `torchrl_kl.envs`."""

if __name__ != "torchrl_kl.envs":
    raise ImportError(
        f"this package was imported as `{__name__}`: "
        "import it as `torchrl_kl.envs`, never as `envs`."
    )

from torchrl_kl.envs.digit_language import DigitLanguage
from torchrl_kl.envs.digit_language_env import DigitLanguageEnv

__all__ = ["DigitLanguage", "DigitLanguageEnv"]
