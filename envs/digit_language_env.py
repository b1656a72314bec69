"""The digit language as a TorchRL environment that writes one response token per step."""

from collections.abc import Callable, Sequence

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Bounded, Categorical, Composite, Unbounded
from torchrl.envs import EnvBase

from torchrl_kl.envs.digit_language import DigitLanguage, check_ids


class DigitLanguageEnv(EnvBase):
    """Writes a response to a random prompt, one token per step, and rewards the finished text.

    The action is the next token; the separator is allowed. A text ends after
    `language.response_length` actions, with `terminated`, `done` and the reward, which is 0 before.

    A step depends only on the tensordict. Rows that a `_step` mask excludes keep their text and
    `terminated`, and have reward 0. A finished row must be reset before it is stepped.

    Only reset is random. A seed gives the same prompts on every device. A copy continues from the
    same state: seed copies differently, as `set_seed` of `SerialEnv` and `ParallelEnv` does.

    State: `generator`, the state of the random generator, (N,) uint8.

    `reset(prompt=prompts)` starts from the given int64 digits (*B, P), or (P,) for all rows; with
    `SerialEnv` and `ParallelEnv` it is `reset(list_of_kwargs=[{"prompt": ...}, ...])`.

    Keys (L is `language.text_length`):
        `tokens`: (*B, L) int64: prompt, separator, response so far, then separators as padding.
        `position`: (*B,) int64: number of tokens before the padding, the index of the next action.
        `action`: (*B,) int64: the next token.
        `reward`: (*B, 1) float32.

    Args:
        language: the language of the prompts. Default: `DigitLanguage()`.
        prompts: (*N, P) int64 digits, drawn with equal probability. Default: all prompts.
        reward_fn: maps finished texts (N, L) int64 to rewards (N,), without gradients. The env does
            not move a model or set it to eval mode. Default: `language.preference`.
        batch_size: shape `*B` of the texts.
        device: device of the texts.
        seed: seed of the generator; by default system entropy.

    Raises:
        ValueError: a prompt, an action, a position or a reward has a wrong shape or value.
        RuntimeError: a finished row is stepped.

    Example:
        >>> import torch
        >>> from torchrl_kl.envs import DigitLanguageEnv
        >>> env = DigitLanguageEnv(batch_size=(2,), seed=0)
        >>> env.rollout(10)["next", "terminated"].squeeze(-1).tolist()
        [[False, False, False, True], [False, False, False, True]]
        >>> env.reset(prompt=torch.tensor([5, 7, 1, 5]))["tokens"][0].tolist()
        [5, 7, 1, 5, 10, 10, 10, 10, 10]
    """

    reward_fn: Callable[[Tensor], Tensor]

    def __init__(
        self,
        language: DigitLanguage | None = None,
        *,
        prompts: Tensor | None = None,
        reward_fn: Callable[[Tensor], Tensor] | None = None,
        batch_size: Sequence[int] = (),
        device: torch.device | str | int | None = None,
        seed: int | None = None,
    ):
        language = DigitLanguage() if language is None else language
        if prompts is not None:
            check_ids("prompts", prompts, language.vocab_size, language.prompt_length)
            prompts = prompts.reshape(-1, language.prompt_length).clone()
        super().__init__(device=device, batch_size=torch.Size(batch_size))
        self.language = language
        self.prompts = prompts
        # Not a submodule, so the env's train(), to() and state_dict() do not affect a user's model.
        object.__setattr__(self, "reward_fn", reward_fn or language.preference)
        self._generator = torch.Generator(device="cpu")  # whatever the device of the env
        self._set_seed(seed)
        first, last = language.context_length, language.text_length
        batch_size, device = self.batch_size, self.device
        texts, rewards = (torch.Size((*batch_size, size)) for size in (last, 1))
        self.observation_spec = Composite(
            tokens=Categorical(language.n_tokens, shape=texts, device=device),
            position=Bounded(first, last, shape=batch_size, dtype=torch.int64, device=device),
            shape=batch_size,
            device=device,
        )
        self.state_spec = self.observation_spec.clone()
        self.action_spec = Categorical(language.n_tokens, shape=batch_size, device=device)
        self.reward_spec = Unbounded(rewards, dtype=torch.float32, device=device)

    def _set_seed(self, seed: int | None) -> None:
        self._generator.manual_seed(torch.Generator().seed() if seed is None else seed)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}generator"] = self._generator.get_state()

    def _load_from_state_dict(self, state_dict, prefix, *args):
        # It may be missing: TorchRL's collectors do not save the state of an env without transform.
        state = state_dict.get(f"{prefix}generator")
        if state is not None:
            self._generator.set_state(state.cpu())
        others = {name: state_dict[name] for name in state_dict if name != f"{prefix}generator"}
        super()._load_from_state_dict(others, prefix, *args)

    def _reset(  # type: ignore[override]
        self, tensordict: TensorDictBase | None, *, prompt: Tensor | None = None
    ) -> TensorDictBase:
        language, batch_size, generator = self.language, self.batch_size, self._generator
        length = language.prompt_length
        if prompt is not None:
            check_ids("prompt", prompt, language.vocab_size, length)
            if prompt.shape not in ((length,), (*batch_size, length)):
                raise ValueError(
                    f"`prompt` must have shape {(*batch_size, length)}, or {(length,)} for all "
                    f"rows, got {tuple(prompt.shape)}: rows outside a `_reset` mask need one too."
                )
        elif self.prompts is None:
            prompt = language.sample_prompts(batch_size, generator=generator)
        else:
            index = torch.randint(len(self.prompts), batch_size, generator=generator)
            prompt = self.prompts[index.to(self.prompts.device)]
        # All rows are reset here: EnvBase.reset restores those that a `_reset` mask excludes.
        size = (*batch_size, language.text_length)
        tokens = torch.full(size, language.separator, device=self.device)
        tokens[..., :length] = prompt
        position = torch.full(batch_size, language.context_length, device=self.device)
        return self._output(tokens, position)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        tokens, position, action = (tensordict[key] for key in ("tokens", "position", "action"))
        every = torch.ones_like(position, dtype=torch.bool)
        stepped = tensordict.get("_step", every).reshape(self.batch_size)  # from (*B) or (*B, 1)
        self._check_step(position, action, stepped)
        # Excluded rows may be finished, without a slot to write to, or have any action.
        slot = position.clamp(max=self.language.text_length - 1).unsqueeze(-1)
        written = tokens.scatter(-1, slot, action.unsqueeze(-1))
        tokens = torch.where(stepped.unsqueeze(-1), written, tokens)
        output = self._output(tokens, position + stepped)
        finished = output["terminated"].squeeze(-1) & stepped
        return output.set("reward", self._reward(tokens, finished).unsqueeze(-1))

    def _output(self, tokens: Tensor, position: Tensor) -> TensorDict:
        terminated = (position == self.language.text_length).unsqueeze(-1)
        return TensorDict(
            tokens=tokens,
            position=position,
            terminated=terminated,
            done=terminated.clone(),
            batch_size=self.batch_size,
            device=self.device,
        )

    def _reward(self, tokens: Tensor, finished: Tensor) -> Tensor:
        # (*B,): from `reward_fn` where finished, else 0.
        reward = torch.zeros_like(finished, dtype=torch.float32)
        if not finished.any():
            return reward
        texts = tokens[finished]  # (N, L)
        with torch.no_grad():
            values = self.reward_fn(texts)
        if values.shape != texts.shape[:1]:
            raise ValueError(
                f"`reward_fn` must return one reward per text, shape {tuple(texts.shape[:1])} for "
                f"{tuple(texts.shape)}, got {tuple(values.shape)}: squeeze a trailing dimension."
            )
        reward[finished] = values.to(reward)
        return reward

    def _check_step(self, position: Tensor, action: Tensor, stepped: Tensor) -> None:
        language = self.language
        if action.shape != self.batch_size or action.dtype != torch.int64:
            raise ValueError(
                f"`action` must have shape {tuple(self.batch_size)} and dtype torch.int64, got "
                f"{tuple(action.shape)} and {action.dtype}: use `argmax(-1)` of one-hot actions."
            )
        check_ids("action", action[stepped], language.n_tokens)
        if n_finished := int((position[stepped] >= language.text_length).sum()):
            raise RuntimeError(
                f"cannot step a finished text, got {n_finished} with `position` "
                f"{language.text_length}: reset these rows (see `step_and_maybe_reset`) or exclude "
                "them by a `_step` mask."
            )
