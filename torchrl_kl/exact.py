"""True values of small autoregressive problems: every response is enumerated, nothing is sampled.

Axes: P prompts, T0 tokens in a prompt, R tokens in a response, V words in the vocabulary, N texts.

A *model* (the policy, the reference) is any callable that takes contexts (N, T) of token ids and
returns the logits or log-probabilities (N, V) of the next token; -inf marks an impossible token.
They are normalised in float64. Call `eval()` on a network with dropout first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Model = Callable[[Tensor], Tensor]
RewardFn = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class PolicyValues:
    """What a policy is worth, averaged over the prompts.

    Attributes:
        coeff: the price of a nat of KL, in reward.
        reward: E[reward] of a response.
        kl_per_position: (R,), KL(policy || reference) split by the chain rule: nats at each
            response position; inf where the policy can write a token that the reference cannot.
        token_probs: (P, R, V), the probability of each token at each position of the response.

    Example:
        >>> coin = lambda tokens: torch.zeros(len(tokens), 2)
        >>> ones = lambda texts: texts[:, 1:].double().sum(1)
        >>> responses = Enumeration(coin, ones, torch.tensor([[0]]), response_length=2)
        >>> best = responses.optimum(coeff=1.0)
        >>> f"{best.reward:.4f} for {best.kl:.4f} nats, objective {best.objective:.4f}"
        '1.4621 for 0.2219 nats, objective 1.2402'
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
        """Reward - coeff * kl; -inf where the KL is inf, for coeff 0 too, as it is a limit."""
        return self.reward - self.coeff * self.kl if self.kl < math.inf else -math.inf


@dataclass(frozen=True, eq=False)
class ExactValues(PolicyValues):
    """What a policy is worth, and what the best policy for the same coefficient is worth.

    Attributes:
        optimum: the values of the policy that maximises the objective; J* is `optimum.objective`.
        reference_reward: E[reward] of the reference, which is its objective too.

    Example:
        >>> coin = lambda tokens: torch.zeros(len(tokens), 2)
        >>> ones = lambda texts: texts[:, 1:].double().sum(1)
        >>> responses = Enumeration(coin, ones, torch.tensor([[0]]), response_length=2)
        >>> values = responses.values(coin, coeff=1.0)  # the reference itself: nothing gained, nothing paid
        >>> f"regret {values.regret:.4f}, {values.fraction_of_gain:.0%} of the gain"
        'regret 0.2402, 0% of the gain'
    """

    optimum: PolicyValues
    reference_reward: float

    @property
    def regret(self) -> float:
        """J* - objective: equals coeff * KL(policy || optimum), hence never negative."""
        return self.optimum.objective - self.objective

    @property
    def fraction_of_gain(self) -> float:
        """(objective - J_ref) / (J* - J_ref): 0 at the reference, 1 at the optimum.

        NaN where J* - J_ref is lost in the rounding, as it is for a constant reward.
        """
        gain = self.optimum.objective - self.reference_reward
        # J* carries the rounding of E[reward] and of coeff * kl: some 1e4 ulp of each is noise.
        if gain <= 1e-12 * (abs(self.reference_reward) + self.coeff):
            return math.nan
        return (self.objective - self.reference_reward) / gain


class Enumeration:
    r"""Every response to the prompts, with its reward and its probability under the reference.

    Built once, it gives the values of any policy and of the optimum for any coefficient. The
    optimum of :math:`E_\pi[r] - \beta KL(\pi \| \pi_{ref})` over all policies is

    .. math:: \pi^*(y) \propto \pi_{ref}(y) \exp(r(y) / \beta), \quad
        J^* = \beta \log E_{ref} \exp(r / \beta)

    for each prompt, and the regret of a policy is exactly :math:`\beta KL(\pi \| \pi^*) \ge 0`.
    Each prompt weighs 1/P.

    Args:
        reference: the model that the KL is measured against.
        reward_fn: whole texts (N, T0 + R) to finite rewards (N,).
        prompts: (P, T0) token ids, all that comes before the response (a separator too).
        response_length: R.
        chunk_size: the most texts in one call of a model or of `reward_fn`.
        max_texts: the most texts, P * V**R, to enumerate; each takes about 100 bytes.

    Attributes:
        vocab_size: V, as the reference has it.
        log_probs: (P, V**R) log-probability of each response under the reference, in nats; the
            responses stand in lexicographic order.
        rewards: (P, V**R) reward of each response.
        reference_reward: E[reward] of the reference.

    Raises:
        ValueError: if there are too many texts, or if `prompts`, the output of `reference` or the
            output of `reward_fn` has the wrong shape, dtype or values.

    Example:
        >>> prompts = torch.tensor([[0]])
        >>> coin = lambda tokens: torch.zeros(len(tokens), 2)
        >>> heads = lambda texts: texts[:, -1].float()
        >>> responses = Enumeration(coin, heads, prompts, response_length=1)
        >>> values = responses.values(coin, coeff=1.0)
        >>> f"E[r] {values.reward:.4f}, J* {values.optimum.objective:.4f}"
        'E[r] 0.5000, J* 0.6201'
        >>> f"{responses.solve_coeff(target=0.1):.4f} buys 0.1 nats"
        '1.0599 buys 0.1 nats'
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
        self.vocab_size = _next_log_probs(reference, prompts[:1], "reference").shape[-1]
        texts = len(prompts) * self.vocab_size**response_length
        if texts > max_texts:
            raise ValueError(
                f"`prompts` and `response_length` ask for {len(prompts)} * {self.vocab_size}**"
                f"{response_length} texts, `max_texts` allows {max_texts}: use fewer "
                "prompts (the values of equal parts average), a shorter response, or raise "
                "`max_texts` (each text takes about 100 bytes)."
            )
        self._prompts = prompts
        self._response_length = response_length
        self._chunk_size = chunk_size
        self._reference = self._model_log_probs(reference, "reference")
        self.rewards = self._score(reward_fn)
        self.log_probs = self._sum_over_positions(self._reference)
        self.reference_reward = self._values(self._reference, 0.0, "reference").reward

    @torch.no_grad()
    def values(self, policy: Model, coeff: float) -> ExactValues:
        """Values of a policy, and of the optimum, of E[reward] - coeff * KL(policy || reference).

        Args:
            policy: the model to judge.
            coeff: reward per nat, >= 0.

        Raises:
            ValueError: if `coeff` is negative or not finite, or if the output of `policy` has
                another shape than the reference's or is no distribution.
        """
        optimum = self.optimum(coeff)
        own = self._values(self._model_log_probs(policy, "policy"), coeff, "policy")
        return ExactValues(**vars(own), optimum=optimum, reference_reward=self.reference_reward)

    def optimum(self, coeff: float) -> PolicyValues:
        """Values of the best policy for a coefficient; its KL falls as the coefficient rises.

        For coeff 0 it is the limit: the reference restricted to its texts of maximal reward.

        Args:
            coeff: reward per nat, >= 0.

        Raises:
            ValueError: if `coeff` is negative or not finite.
        """
        if not 0 <= coeff < math.inf:
            raise ValueError(f"`coeff` must be finite and at least 0, got {coeff}.")
        return self._values(self._optimal_log_probs(coeff), coeff, "optimum")

    def solve_coeff(self, target: float) -> float:
        """The coefficient whose optimum has KL(optimum || reference) = target.

        Args:
            target: nats per response, above 0 and below the KL of the optimum for coeff 0.

        Raises:
            ValueError: if no coefficient has this KL.
        """
        limit = self.optimum(0.0).kl
        if not 0 < target < limit:
            raise ValueError(
                f"`target` must be above 0 and below {limit:.6g} nats per response, the KL that "
                f"the optimum approaches as the coefficient goes to 0, got {target}: no "
                "coefficient buys more divergence with this reward, and none buys exactly 0."
            )
        # The tilted variance is at most spread^2 / 4, hence KL <= spread^2 / (8 coeff^2).
        gaps = self._gaps()
        spread = -gaps[gaps.isfinite()].min().item()
        high = spread / math.sqrt(8 * target)
        low = high / 2
        while self.optimum(low).kl < target:
            high, low = low, low / 2
        while high / low > 1 + 1e-12:
            middle = math.sqrt(high * low)
            low, high = (middle, high) if self.optimum(middle).kl >= target else (low, middle)
        return low

    def _values(self, log_probs: Sequence[Tensor], coeff: float, name: str) -> PolicyValues:
        """Goes down the tree with the probability of each text under the policy."""
        prompts = len(self._prompts)
        probs = self.rewards.new_full((prompts,), 1 / prompts)
        kls, token_probs = [], []
        for own, reference in zip(log_probs, self._reference, strict=True):
            joint, kl = _extend(probs, own, reference, name)
            kls.append(kl)
            token_probs.append(joint.view(prompts, -1, self.vocab_size).sum(1) * prompts)
            probs = joint.flatten()
        reward = (probs @ self.rewards.flatten()).item()
        return PolicyValues(coeff, reward, torch.stack(kls), torch.stack(token_probs, 1))

    def _optimal_log_probs(self, coeff: float) -> list[Tensor]:
        """Goes up the tree with the soft value log E_ref[exp(gap / coeff) | context]."""
        gaps = self._gaps()
        values = gaps / coeff if coeff > 0 else gaps.masked_fill(gaps < 0, -math.inf)
        optimal = []
        for reference in reversed(self._reference):
            joint = reference + values.view_as(reference)
            values = joint.logsumexp(-1, keepdim=True)
            # Contexts that the optimum never reaches have value -inf and no distribution.
            optimal.append((joint - values).masked_fill(values.isinf(), -math.inf))
        return optimal[::-1]

    def _gaps(self) -> Tensor:
        """How far each reward is below the prompt's best (<= 0); -inf for impossible texts."""
        rewards = self.rewards.masked_fill(self.log_probs.isinf(), -math.inf)
        return rewards - rewards.amax(1, keepdim=True)

    def _model_log_probs(self, model: Model, name: str) -> list[Tensor]:
        """The model's log-probs (P * V**t, V) after each context of position t = 0 .. R - 1."""

        def next_log_probs(contexts: Tensor) -> Tensor:
            return _next_log_probs(model, contexts, name, self.vocab_size)

        return [self._map(next_log_probs, position) for position in range(self._response_length)]

    def _sum_over_positions(self, log_probs: Sequence[Tensor]) -> Tensor:
        total = log_probs[0].new_zeros(len(self._prompts))
        for level in log_probs:
            total = (total.unsqueeze(1) + level).flatten()
        return total.view(len(self._prompts), -1)

    def _score(self, reward_fn: RewardFn) -> Tensor:
        def score(texts: Tensor) -> Tensor:
            rewards = reward_fn(texts)
            if rewards.shape != texts.shape[:1]:
                raise ValueError(
                    f"`reward_fn` must return one reward per text, shape {(len(texts),)}, got "
                    f"{tuple(rewards.shape)}: squeeze a trailing dimension of 1."
                )
            return rewards.double()

        rewards = self._map(score, self._response_length)
        if not rewards.isfinite().all():
            raise ValueError(
                f"`reward_fn` must return finite rewards, got {int((~rewards.isfinite()).sum())} "
                f"infinite or NaN ones on {len(rewards)} texts: an impossible text needs no "
                "reward of -inf, the reference's probability of 0 excludes it."
            )
        return rewards.view(len(self._prompts), -1)

    def _map(self, fn: Callable[[Tensor], Tensor], length: int) -> Tensor:
        """Calls `fn` on the prompts followed by each of the V**length continuations, in chunks."""
        base = self.vocab_size
        powers = base ** torch.arange(length - 1, -1, -1, device=self._prompts.device)
        rows = torch.arange(len(self._prompts) * base**length, device=self._prompts.device)
        # A row is its prompt followed by its tokens, read as digits of one number in base V.
        return torch.cat(
            [
                fn(torch.cat([self._prompts[r // base**length], r[:, None] // powers % base], 1))
                for r in rows.split(self._chunk_size)
            ]
        )


@torch.no_grad()
def exact_kl(
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
    contexts c that the policy can write, and no others: where its support is small, this walk is
    small for vocabularies and prompt sets that :class:`Enumeration` refuses. The sum over
    positions is the KL per response; with the true source as the policy, the mean over positions
    is the excess of the reference's cross-entropy, in nats per token.

    Args:
        policy: the model whose texts are enumerated.
        reference: the model that they are compared with.
        prompts: (P, T0) token ids, all that comes before the response (a separator too).
        response_length: R.
        chunk_size: the most contexts in one call of a model.
        max_texts: the most contexts of one length to hold.

    Returns:
        (R,) float64, nats; inf where the policy can write a token that the reference cannot.

    Raises:
        ValueError: if there are too many contexts, or if `prompts` or the output of a model has the
            wrong shape, dtype or values.

    Example:
        >>> fair = lambda tokens: torch.zeros(len(tokens), 2)
        >>> sure = lambda tokens: torch.tensor([[0.0, -torch.inf]]).expand(len(tokens), 2)
        >>> exact_kl(sure, fair, torch.tensor([[0]]), response_length=2)
        tensor([0.6931, 0.6931], dtype=torch.float64)
    """
    _check_sizes(prompts, response_length, chunk_size)
    contexts = prompts
    probs = torch.full((len(prompts),), 1 / len(prompts), dtype=torch.float64).to(prompts.device)
    kls = []
    for position in range(response_length):
        if len(contexts) > max_texts:
            raise ValueError(
                f"`policy` can write {len(contexts)} contexts up to position {position} of "
                f"{response_length}, `max_texts` allows {max_texts}: use fewer prompts (the values "
                "of equal parts average), a shorter response, or raise `max_texts`."
            )
        chunks = contexts.split(chunk_size)
        own = torch.cat([_next_log_probs(policy, c, "policy") for c in chunks])
        size = own.shape[-1]
        other = torch.cat([_next_log_probs(reference, c, "reference", size) for c in chunks])
        joint, kl = _extend(probs, own, other, "policy")
        kls.append(kl)
        parents, tokens = joint.nonzero(as_tuple=True)
        contexts = torch.cat([contexts[parents], tokens[:, None]], 1)
        probs = joint[parents, tokens]
    return torch.stack(kls)


def _extend(probs: Tensor, own: Tensor, other: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Probabilities (N, V) of the contexts (N,) with one more token, and the KL of that token."""
    impossible = own.isinf().all(-1) & (probs > 0)
    if impossible.any():
        raise ValueError(
            f"`{name}` must allow some token after every text that it can write, got -inf for "
            f"every token after {int(impossible.sum())} of them: a text ends by its length, give "
            "it a padding token with probability 1."
        )
    joint = probs.unsqueeze(-1) * own.exp()
    # A choice and not a product: 0 * (inf - inf) is NaN, where 0 log 0 is 0.
    kl = torch.where(joint > 0, joint * (own - other), 0.0).sum()
    return joint, kl


def _next_log_probs(
    model: Model, contexts: Tensor, name: str, vocab_size: int | None = None
) -> Tensor:
    """The model's checked log-probs of the next token, (N, V) in float64."""
    logits = model(contexts)
    expected = (len(contexts), vocab_size or logits.shape[-1])
    if logits.shape != expected:
        raise ValueError(
            f"`{name}` must map contexts {tuple(contexts.shape)} to logits {expected} of the next "
            f"token, got {tuple(logits.shape)}: take the last position of a sequence model "
            "(`gpt(tokens)[:, -1]`), and the same vocabulary for the policy and the reference."
        )
    if logits.isnan().any() or logits.isposinf().any():
        raise ValueError(
            f"`{name}` must return logits below inf (-inf for an impossible token), got NaN or inf "
            f"after contexts of {contexts.shape[1]} tokens: probabilities need their log, and a "
            "network may have diverged."
        )
    log_probs = logits.double().log_softmax(-1)
    # A row of -inf, after a context that the model never reaches, is no distribution.
    return log_probs.masked_fill(log_probs.isnan(), -math.inf)


def _check_sizes(prompts: Tensor, response_length: int, chunk_size: int) -> None:
    if prompts.ndim != 2 or prompts.dtype != torch.int64 or len(prompts) == 0:
        raise ValueError(
            "`prompts` must be token ids of shape (P, T0) and dtype torch.int64 with P >= 1, got "
            f"{tuple(prompts.shape)} of {prompts.dtype}: one prompt needs a leading dimension of 1."
        )
    if response_length < 1:
        raise ValueError(f"`response_length` must be at least 1, got {response_length}.")
    if chunk_size < 1:
        raise ValueError(f"`chunk_size` must be at least 1, got {chunk_size}.")
