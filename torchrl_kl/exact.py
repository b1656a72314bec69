"""True values of small autoregressive problems, computed by enumeration of all responses.

Axes: P prompts, T0 tokens in a prompt, R tokens in a response, V tokens in the vocabulary, N texts.

A *model* (the policy, the reference) is any callable that maps contexts (N, T) of token ids to the
logits or log-probs (N, V) of the next token, -inf for an impossible one, such as the last position
of a Hugging Face model's `.logits`. They are normalized in float64. Call `eval()` on a network with
dropout first.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from torchrl_kl.functional.numbers import check_count, check_number, check_tensor, solve_decreasing

__all__ = ["Enumeration", "ExactValues", "PolicyValues", "enumerate_kl"]

Model = Callable[[Tensor], Tensor]
RewardFn = Callable[[Tensor], Tensor]
_FEWER = "use fewer prompts (and average over parts), a shorter response or a larger `max_texts`"


@dataclass(frozen=True, eq=False)
class PolicyValues:
    """Reward, KL and token probabilities of a policy, averaged over the prompts.

    Attributes:
        coeff: the coefficient of the KL, reward per nat.
        reward: E[reward] of a response.
        kl_per_position: KL(policy || reference) at each response position, (R,), nats.
        token_probs: the probability of each token at each response position, (P, R, V).

    Example:
        >>> import torch
        >>> from torchrl_kl.exact import PolicyValues
        >>> kl, probs = torch.tensor([0.25, 0.5]), torch.full((1, 2, 2), 0.5)
        >>> PolicyValues(0.5, 1.5, kl, probs).objective
        1.125
    """

    coeff: float
    reward: float
    kl_per_position: Tensor
    token_probs: Tensor

    @property
    def kl(self) -> float:
        """KL(policy || reference) in nats per response."""
        return self.kl_per_position.sum().item()

    @property
    def objective(self) -> float:
        """Reward - coeff * kl; -inf where the KL is inf, also for coeff 0."""
        return self.reward - self.coeff * self.kl if self.kl < math.inf else -math.inf


@dataclass(frozen=True, eq=False)
class ExactValues(PolicyValues):
    """Values of a policy and of the optimum for the same coefficient.

    Attributes:
        optimum: the values of the policy that maximizes the objective, J* = `optimum.objective`.
        reference_reward: E[reward] of the reference, which equals its objective J_ref.

    Example:
        >>> import torch
        >>> from torchrl_kl.exact import Enumeration
        >>> coin = lambda tokens: torch.zeros(len(tokens), 2)
        >>> responses = Enumeration(coin, lambda texts: texts.sum(1), torch.tensor([[0]]), 2)
        >>> round(responses.values(coin, coeff=1.0).regret, 4)  # the policy is the reference
        0.2402
    """

    optimum: PolicyValues
    reference_reward: float

    @property
    def regret(self) -> float:
        """J* - objective, which equals coeff * KL(policy || optimum) and is never negative."""
        return self.optimum.objective - self.objective

    @property
    def fraction_of_gain(self) -> float:
        """(objective - J_ref) / (J* - J_ref), 1 at the optimum; NaN if no policy can gain."""
        gain = self.optimum.objective - self.reference_reward
        # J* has the rounding errors of E[reward] and of coeff * kl: allow about 1e4 ulp of each.
        if gain <= 1e-12 * (abs(self.reference_reward) + self.coeff):
            return math.nan
        return (self.objective - self.reference_reward) / gain


class Enumeration:
    """All responses to the prompts, with their rewards and their probabilities.

    The optimum of `E[r] - beta * KL(policy || reference)` is, for each prompt:

        pi*(y) proportional to pi_ref(y) exp(r(y) / beta)
        J* = beta log E_ref exp(r / beta)

    Prompts weigh 1/P each.

    Args:
        reference: the model in the second argument of the KL.
        reward_fn: maps whole texts (N, T0 + R) to finite rewards (N,).
        prompts: (P, T0) token ids: all that precedes the response, including a separator.
        response_length: R.
        chunk_size: maximum number of texts in one call of a model or of `reward_fn`.
        max_texts: maximum number of texts, P * V**R; each needs about 100 bytes.

    Attributes:
        vocab_size, reference_reward: V and E[reward] of the reference.
        log_probs, rewards: (P, V**R), of the responses in lexicographic order; under the reference.

    Raises:
        TypeError: prompts or outputs are not tensors.
        ValueError: too many texts, or a wrong size, shape, dtype or value.

    Example:
        >>> import torch
        >>> from torchrl_kl.exact import Enumeration
        >>> coin = lambda tokens: torch.zeros(len(tokens), 2)
        >>> responses = Enumeration(coin, lambda texts: texts[:, -1], torch.tensor([[0]]), 1)
        >>> round(responses.values(coin, coeff=1.0).optimum.objective, 4)  # J*
        0.6201
        >>> round(responses.solve_coeff(target=0.1), 4)  # its optimum has a KL of 0.1 nats
        1.0599
    """

    @torch.no_grad()
    def __init__(
        self,
        reference: Model,
        reward_fn: RewardFn,
        prompts: Tensor,
        response_length: int,
        *,
        chunk_size: int = 1024,
        max_texts: int = 2**22,
    ):
        _check_sizes(prompts, response_length, chunk_size)
        self.vocab_size = _next_log_probs(reference, "reference", prompts[:1]).shape[-1]
        texts = len(prompts) * self.vocab_size**response_length
        if texts > max_texts:
            raise ValueError(
                f"`prompts` and `response_length` require {len(prompts)} * {self.vocab_size}**"
                f"{response_length} texts, `max_texts` allows {max_texts}: {_FEWER}."
            )
        self._prompts, self._response_length = prompts.clone(), response_length
        self._chunk_size = chunk_size
        self._reference = self._model_log_probs(reference, "reference")
        rewards = self._map(partial(_score, reward_fn), response_length)
        if n_bad := int((~rewards.isfinite()).sum()):
            raise ValueError(
                f"`reward_fn` must return finite rewards, got {n_bad} infinite or NaN ones on "
                f"{len(rewards)} texts: also impossible texts need one."
            )
        self.rewards = rewards.view(len(prompts), -1)
        log_probs = self._reference[0].new_zeros(len(prompts))
        for next_token in self._reference:
            # (N,) of the contexts -> (N * V,) of the contexts with one more token.
            log_probs = (log_probs.unsqueeze(1) + next_token).flatten()
        self.log_probs = log_probs.view(len(prompts), -1)
        self.reference_reward = self._values(self._reference, 0.0, "reference").reward

    @torch.no_grad()
    def values(self, policy: Model, coeff: float | Tensor) -> ExactValues:
        """Values of `policy` and of the optimum for E[reward] - coeff * KL(policy || reference).

        `coeff` may be the tensor of a controller, whose value is read now.
        """
        optimum = self.optimum(coeff)
        own = self._values(self._model_log_probs(policy, "policy"), optimum.coeff, "policy")
        return ExactValues(**vars(own), optimum=optimum, reference_reward=self.reference_reward)

    def optimum(self, coeff: float | Tensor) -> PolicyValues:
        """Values of the best policy for a coefficient (reward per nat), which must be at least 0.

        For 0 it is the limit: the reference restricted to its texts of maximal reward.
        """
        if isinstance(coeff, Tensor) and coeff.numel() == 1:
            coeff = coeff.item()
        coeff = check_number("coeff", coeff, at_least=0)
        return self._values(self._optimal_log_probs(coeff), coeff, "optimum")

    def solve_coeff(self, target: float) -> float:
        """The coefficient for which KL(optimum || reference) is `target`, nats per response."""
        # The larger the coefficient, the smaller the KL of its optimum: for 0 it is the largest.
        limit = self.optimum(0.0).kl
        if not 0 < target < limit:
            raise ValueError(
                f"`target` must be above 0 and below {limit:.6g} nats per response, the KL of the "
                f"optimum without a penalty, got {target}."
            )
        gaps = self._gaps()
        spread = -gaps[gaps.isfinite()].min().item()
        # The tilted variance is at most spread^2 / 4, hence KL <= spread^2 / (8 coeff^2).
        high = spread / math.sqrt(8 * target)
        return solve_decreasing(lambda coeff: self.optimum(coeff).kl, target, high)

    def _values(self, log_probs: Sequence[Tensor], coeff: float, name: str) -> PolicyValues:
        prompts = len(self._prompts)
        probs = self.rewards.new_full((prompts,), 1 / prompts)
        kls, token_probs = [], []
        # At position t there are N = P * V**t contexts: `own` and `joint` are (N, V).
        for own, reference in zip(log_probs, self._reference, strict=True):
            joint, kl = _extend(probs, own, reference, name)
            kls.append(kl)
            # (P, V): given the prompt, so without its weight 1 / P.
            token_probs.append(joint.view(prompts, -1, self.vocab_size).sum(1) * prompts)
            probs = joint.flatten()
        reward = (probs @ self.rewards.flatten()).item()
        return PolicyValues(coeff, reward, torch.stack(kls), torch.stack(token_probs, 1))

    def _optimal_log_probs(self, coeff: float) -> list[Tensor]:
        # From the last token on: the soft value log E_ref[exp(gap / coeff) | context], (N,).
        gaps = self._gaps()
        values = gaps / coeff if coeff > 0 else gaps.masked_fill(gaps < 0, -math.inf)
        optimal = []
        for reference in reversed(self._reference):
            # (N, V) at this position; its normalizer (N, 1) is the value of the context before.
            joint = reference + values.view_as(reference)
            values = joint.logsumexp(-1, keepdim=True)
            # A context that the optimum never reaches has value -inf and no distribution.
            optimal.append((joint - values).masked_fill(values.isinf(), -math.inf))
        return optimal[::-1]

    def _gaps(self) -> Tensor:
        # (P, V**R), each reward minus the best of its prompt (<= 0); -inf for impossible texts.
        rewards = self.rewards.masked_fill(self.log_probs.isinf(), -math.inf)
        return rewards - rewards.amax(1, keepdim=True)

    def _model_log_probs(self, model: Model, name: str) -> list[Tensor]:
        # (P * V**t, V) at each response position t = 0 .. R - 1.
        next_log_probs = partial(_next_log_probs, model, name, size=self.vocab_size)
        return [self._map(next_log_probs, position) for position in range(self._response_length)]

    def _map(self, fn: Callable[[Tensor], Tensor], length: int) -> Tensor:
        """Calls `fn` on the prompts followed by each of the V**length continuations, in chunks."""
        base, n_texts = self.vocab_size, self.vocab_size**length
        powers = base ** torch.arange(length - 1, -1, -1, device=self._prompts.device)
        rows = torch.arange(len(self._prompts) * n_texts, device=self._prompts.device)
        outputs = []
        for r in rows.split(self._chunk_size):
            # The tokens are the digits of r in base V, the digits above them select the prompt.
            texts = torch.cat([self._prompts[r // n_texts], r[:, None] // powers % base], 1)
            outputs.append(fn(texts))
        return torch.cat(outputs)


@torch.no_grad()
def enumerate_kl(
    policy: Model,
    reference: Model,
    prompts: Tensor,
    response_length: int,
    *,
    chunk_size: int = 1024,
    max_texts: int = 2**22,
) -> Tensor:
    """KL(policy || reference) at each response position, averaged over the prompts.

    sum_c policy(c) sum_v policy(v | c) (log policy(v | c) - log reference(v | c)), over the
    contexts c that the policy can write, of one length at most `max_texts`. The other arguments and
    errors are those of `Enumeration`. The sum over positions is the KL per response.

    Returns:
        (R,) float64, nats; inf where the policy can write a token that the reference cannot.

    Example:
        >>> import torch
        >>> from torchrl_kl.exact import enumerate_kl
        >>> fair = lambda tokens: torch.zeros(len(tokens), 2)
        >>> sure = lambda tokens: fair(tokens).index_fill(1, torch.tensor(1), -torch.inf)
        >>> enumerate_kl(sure, fair, torch.tensor([[0]]), response_length=2)
        tensor([0.6931, 0.6931], dtype=torch.float64)
    """
    _check_sizes(prompts, response_length, chunk_size)
    contexts, kls = prompts, []
    probs = torch.full((len(prompts),), 1 / len(prompts), dtype=torch.float64).to(prompts.device)
    for position in range(response_length):
        if len(contexts) > max_texts:
            raise ValueError(
                f"`policy` can write {len(contexts)} contexts up to position {position} of "
                f"{response_length}, `max_texts` allows {max_texts}: {_FEWER}."
            )
        chunks = contexts.split(chunk_size)
        # (N, V) of the N contexts that the policy can write up to this position.
        own = torch.cat([_next_log_probs(policy, "policy", c) for c in chunks])
        size = own.shape[-1]
        other = torch.cat([_next_log_probs(reference, "reference", c, size) for c in chunks])
        joint, kl = _extend(probs, own, other, "policy")
        kls.append(kl)
        parents, tokens = joint.nonzero(as_tuple=True)
        contexts = torch.cat([contexts[parents], tokens[:, None]], 1)
        probs = joint[parents, tokens]
    return torch.stack(kls)


def _extend(probs: Tensor, own: Tensor, other: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Probabilities (N, V) of the contexts (N,) plus one token, and the KL of that token."""
    impossible = own.isinf().all(-1) & (probs > 0)
    if impossible.any():
        raise ValueError(
            f"`{name}` must allow some token after every text that it can write, got -inf for "
            f"every token after {int(impossible.sum())} of them: end short texts with padding."
        )
    joint = probs.unsqueeze(-1) * own.exp()
    # 0 log 0 is 0, but the product 0 * (inf - inf) is NaN.
    return joint, torch.where(joint > 0, joint * (own - other), 0.0).sum()


def _score(reward_fn: RewardFn, texts: Tensor) -> Tensor:
    # (N, T0 + R) -> (N,) in float64.
    rewards = reward_fn(texts)
    check_tensor("reward_fn(texts)", rewards)
    if rewards.shape != texts.shape[:1]:
        raise ValueError(
            f"`reward_fn` must return one reward per text, shape {(len(texts),)}, got "
            f"{tuple(rewards.shape)}: squeeze a trailing dimension of 1."
        )
    return rewards.double()


def _next_log_probs(model: Model, name: str, contexts: Tensor, size: int | None = None) -> Tensor:
    """The model's checked log-probs of the next token, (N, V) in float64."""
    logits = model(contexts)
    check_tensor(f"{name}(contexts)", logits)
    expected = (len(contexts), size or logits.shape[-1])
    if logits.shape != expected:
        raise ValueError(
            f"`{name}` must map contexts {tuple(contexts.shape)} to logits {expected} of the next "
            f"token, got {tuple(logits.shape)}: take the last position of a sequence model "
            "(`gpt(tokens)[:, -1]`), and the same vocabulary for the policy and the reference."
        )
    if logits.isnan().any() or logits.isposinf().any():
        raise ValueError(
            f"`{name}` must return logits below inf (-inf for an impossible token), got NaN or inf "
            f"after contexts of {contexts.shape[1]} tokens: has the network diverged?"
        )
    log_probs = logits.double().log_softmax(-1)
    # A row of -inf (a context that the model never reaches) normalizes to NaN.
    return log_probs.masked_fill(log_probs.isnan(), -math.inf)


def _check_sizes(prompts: Tensor, response_length: int, chunk_size: int) -> None:
    check_tensor("prompts", prompts)
    if prompts.ndim != 2 or prompts.dtype != torch.int64 or len(prompts) == 0:
        raise ValueError(
            "`prompts` must be token ids of shape (P, T0) and dtype torch.int64 with P >= 1, got "
            f"{tuple(prompts.shape)} of {prompts.dtype}: one prompt needs a leading dimension of 1."
        )
    check_count("response_length", response_length)
    check_count("chunk_size", chunk_size)
