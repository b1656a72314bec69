"""The parts of torchrl_kl that the benchmarks of language models use, in one place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.collectors import Collector
from torchrl.envs import Compose, EnvBase, Transform, TransformedEnv

from torchrl_kl import KLConstrainedTransform
from torchrl_kl.envs import DigitLanguage, DigitLanguageEnv
from torchrl_kl.language import GPT, CausalLMActor, sample_responses

COEFF = 0.1


def gpt_of(language: DigitLanguage, **sizes: int) -> GPT:
    """An untrained policy of the digit job, in eval mode."""
    return GPT(language.n_tokens, language.text_length - 1, **sizes).eval()


@dataclass
class Job:
    """N responses per batch in a digit language, by a policy that is penalized by a stack."""

    language: DigitLanguage
    policy: Any
    reference: Any
    n_texts: int

    def __post_init__(self):
        self.actor = CausalLMActor(self.policy)

    @classmethod
    def of_gpt(cls, n_texts: int, n_tokens: int) -> Job:
        """With two GPTs of 3 layers, 3 heads and width 48."""
        language = DigitLanguage(response_length=n_tokens)
        return cls(language, gpt_of(language), gpt_of(language), n_texts)

    @property
    def n_tokens(self) -> int:
        """Tokens per response."""
        return self.language.response_length

    def prompts(self) -> Tensor:
        """New prompts with their separators, (N, P)."""
        prompts = self.language.sample_prompts(self.n_texts)
        return torch.nn.functional.pad(prompts, (0, 1), value=self.language.separator)

    def stack(self) -> KLConstrainedTransform:
        """A stack with its own frozen copy of the reference."""
        return KLConstrainedTransform(self.actor, COEFF, reference=CausalLMActor(self.reference))

    def env(self, *transforms: Transform) -> EnvBase:
        """The token env with transforms."""
        return TransformedEnv(self.plain_env(), Compose(list(transforms)))

    def plain_env(self) -> DigitLanguageEnv:
        """The token env, which a stack as `postproc` leaves as it is."""
        return DigitLanguageEnv(self.language, batch_size=(self.n_texts,), seed=0)

    def collected(self, env: EnvBase | None = None, stack: Any = None) -> Iterator[TensorDictBase]:
        """Batches [N, T] of a Collector, without end, with the stack as its `postproc`."""
        return iter(
            Collector(
                self.plain_env() if env is None else env,
                self.actor,
                frames_per_batch=self.n_texts * self.n_tokens,
                total_frames=-1,
                postproc=stack,
                auto_register_policy_transforms=False,
            )
        )

    def sampled(self) -> TensorDictBase:
        """A batch [N, T] of `sample_responses`."""
        language = self.language
        return sample_responses(
            self.actor,
            self.prompts(),
            self.n_tokens,
            pad_token=language.separator,
            reward_fn=language.preference,
        )
