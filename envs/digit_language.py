"""A language of digits in which every probability is known exactly.

Shapes: `*B` is any batch shape, `T` the length of a context, `P` that of a prompt, `R` that of a
response and `L = P + 1 + R` that of a whole text.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True)
class DigitLanguage:
    r"""Texts of digits in which each response digit is a recent digit plus one.

    A text is a prompt of uniform digits, a separator, and a response. A response token is a digit,
    plus one, of W, the last `window` digits before it, drawn uniformly over positions:

        P(a | context) = |{i in W : (x_i + 1) mod vocab_size = a}| / |W|

    All probabilities are exact, in float64. The separator and most digits have probability 0, so
    that KL(policy || language) is infinite for a policy with full support.

    Args:
        vocab_size: number of digits; their token ids are 0..vocab_size - 1.
        prompt_length, response_length: P and R.
        window: number of recent digits from which a response digit is drawn.

    Raises:
        TypeError: a method gets ids that are not an int64 tensor.
        ValueError: a size is not an int of at least 1, or ids have a wrong shape or wrong values.

    Example:
        >>> import torch
        >>> from torchrl_kl.envs import DigitLanguage
        >>> language = DigitLanguage()
        >>> probs = language.next_token_probs(torch.tensor([0, 2, 8, 6, language.separator]))
        >>> probs.nonzero().flatten().tolist()
        [1, 3, 7, 9]
        >>> language.preference(torch.tensor([5, 7, 1, 5, 10, 6, 2, 7, 3]))
        tensor(1.)
    """

    vocab_size: int = 10
    prompt_length: int = 4
    response_length: int = 4
    window: int = 4

    def __post_init__(self):
        for field in fields(self):
            size = getattr(self, field.name)
            if type(size) is not int or size < 1:
                raise ValueError(f"`{field.name}` must be an int of at least 1, got {size!r}.")

    @property
    def separator(self) -> int:
        """Token id of the separator: the id after the digits."""
        return self.vocab_size

    @property
    def n_tokens(self) -> int:
        """Number of token ids: the digits and the separator."""
        return self.vocab_size + 1

    @property
    def context_length(self) -> int:
        """Tokens before the response: the prompt and the separator."""
        return self.prompt_length + 1

    @property
    def text_length(self) -> int:
        """Tokens in a whole text (L)."""
        return self.context_length + self.response_length

    def sample_prompts(
        self, shape: int | Sequence[int], *, generator: torch.Generator | None = None
    ) -> Tensor:
        """Draws prompts (*B, P), int64, of independent, uniform digits.

        `shape` is *B, or a number of prompts. They are on the device of `generator`.
        """
        batch_shape = (shape,) if isinstance(shape, int) else shape
        device = None if generator is None else generator.device
        size = (*batch_shape, self.prompt_length)
        return torch.randint(self.vocab_size, size, generator=generator, device=device)

    def sample(self, prompts: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """Draws a response to each prompt: digits (*B, P) -> whole texts (*B, L), int64.

        `generator` must be on the device of `prompts`; by default the global one is used.
        """
        check_ids("prompts", prompts, self.vocab_size, self.prompt_length)
        size = (*prompts.shape[:-1], 1)
        # (*B, P + R): without the separator, which is never drawn, the window is a slice.
        digits = torch.cat([prompts, prompts.new_empty(*size[:-1], self.response_length)], -1)
        for end in range(self.prompt_length, digits.shape[-1]):
            start = max(0, end - self.window)
            source = torch.randint(start, end, size, generator=generator, device=prompts.device)
            digits[..., end, None] = (digits.gather(-1, source) + 1) % self.vocab_size
        separator = prompts.new_full(size, self.separator)
        return torch.cat([prompts, separator, digits[..., self.prompt_length :]], -1)

    def next_token_probs(self, tokens: Tensor) -> Tensor:
        """Exact probabilities of the token after a context: (*B, T) -> (*B, n_tokens), float64.

        A context may be any tokens that include a digit.
        """
        check_ids("tokens", tokens, self.n_tokens)
        is_digit = tokens != self.separator
        if not is_digit.any(-1).all():
            raise ValueError(
                f"`tokens` must have a digit in each context, got shape {tuple(tokens.shape)} "
                "with a context of separators only: begin each context with its prompt."
            )
        # (*B, T): the last digit has rank 1.
        rank_from_end = is_digit.flip(-1).cumsum(-1).flip(-1)
        in_window = (is_digit & (rank_from_end <= self.window)).double()
        counts = in_window.new_zeros(*tokens.shape[:-1], self.n_tokens)
        counts.scatter_add_(-1, (tokens + 1) % self.vocab_size, in_window)
        return counts / counts.sum(-1, keepdim=True)

    def log_prob(self, tokens: Tensor) -> Tensor:
        """Log-probability of each response token given those before it: (*B, L) -> (*B, R), nats.

        It is -inf for an impossible token; later tokens are still scored given their own context.
        """
        self._check_texts(tokens)
        probs = [
            self.next_token_probs(tokens[..., :end]).gather(-1, tokens[..., end, None])
            for end in range(self.context_length, self.text_length)
        ]
        return torch.cat(probs, -1).log()

    def preferred_token(self, prompts: Tensor) -> Tensor:
        """Preferred first response digit, the last prompt digit plus one: (*B, P) -> (*B,)."""
        check_ids("prompts", prompts, self.vocab_size, self.prompt_length)
        return (prompts[..., -1] + 1) % self.vocab_size

    def preference(self, tokens: Tensor) -> Tensor:
        """Reward of whole texts, 1 if the first token is preferred, else 0: (*B, L) -> (*B,)."""
        self._check_texts(tokens)
        preferred = self.preferred_token(tokens[..., : self.prompt_length])
        return (tokens[..., self.context_length] == preferred).to(torch.float32)

    def _check_texts(self, tokens: Tensor) -> None:
        check_ids("tokens", tokens, self.n_tokens, self.text_length)
        is_separator = tokens[..., : self.context_length] == self.separator
        if is_separator[..., :-1].any() or not is_separator[..., -1].all():
            raise ValueError(
                f"`tokens` must begin with {self.prompt_length} digits and the separator "
                f"{self.separator}, got a text that does not: join prompt and response with it."
            )


def check_ids(name: str, ids: Tensor, n_ids: int, length: int | None = None) -> None:
    """Raises unless `ids` is int64 of shape (*B, length), any length if None, in [0, n_ids)."""
    if not isinstance(ids, Tensor) or ids.dtype != torch.int64:
        got = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise TypeError(f"`{name}` must be a tensor of torch.int64 token ids, got {got}.")
    if ids.ndim == 0 or length not in (None, ids.shape[-1]):
        wanted = f"(*B, {'T' if length is None else length})"
        raise ValueError(f"`{name}` must have shape {wanted}, got {tuple(ids.shape)}.")
    low, high = (int(one) for one in ids.aminmax()) if ids.numel() else (0, 0)
    if low < 0 or high >= n_ids:
        raise ValueError(
            f"`{name}` must be between 0 and {n_ids - 1}, got values between {low} and {high}: "
            "check the `vocab_size` of the language. Only its digits may be in a prompt."
        )
