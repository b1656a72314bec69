"""The distribution of the next token."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution

_LOWEST = -1e9  # for a log-prob of -inf, times a probability of 0, whose gradient is then 0


class NextToken(Categorical):
    """A Categorical of logits (*B, V) that does little more than a rollout needs.

    ValueError when it is sampled, if logits of a row are NaN or all of them infinite.
    """

    def __init__(self, logits: Tensor):
        self.logits = self._param = logits.log_softmax(-1)  # type: ignore[assignment]
        self._num_events = logits.shape[-1]
        # Ids are checked where they are read, and logits where they are sampled.
        Distribution.__init__(self, logits.shape[:-1], validate_args=False)

    def sample(self, sample_shape: torch.Size = torch.Size()) -> Tensor:  # noqa: B008
        """Token ids, (*sample_shape, *B)."""
        shape = torch.Size((*sample_shape, *self.logits.shape[:-1]))
        log_probs = self.logits.expand(*shape, -1) if sample_shape else self.logits
        return draw(log_probs.reshape(-1, log_probs.shape[-1])).view(shape)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-probs of token ids (*B), nats."""
        return self.logits.gather(-1, value.unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> Tensor:
        """Nats, (*B)."""
        log_probs = self.logits.clamp(min=_LOWEST)
        return -(log_probs.exp() * log_probs).sum(-1)

    @property
    def deterministic_sample(self) -> Tensor:
        """The most likely tokens, (*B)."""
        return self.logits.argmax(-1)

    def expand(self, batch_shape, _instance=None) -> NextToken:
        """The same rows in a larger batch."""
        return NextToken(self.logits.expand(*batch_shape, self._num_events))


def draw(log_probs: Tensor, threshold: Tensor | None = None) -> Tensor:
    """One token per row of log-probs (N, V): (N, 1), by inverting the cumulative distribution.

    `threshold`: uniform numbers (N, 1), in float64; else they are drawn, too.

    It needs one random number per row, where `torch.multinomial` needs V. In float64, in which the
    sum of the probabilities before a rare token leaves room for it.
    """
    cumulative = log_probs.to(torch.float64, copy=True).exp_().cumsum_(-1)
    total = cumulative[:, -1:]
    # One number first: each total is about 1, and a look at all of them takes longer.
    if not total.prod().item() > 0 and (bad := ~(total > 0)).any():
        rows = bad.flatten().nonzero().flatten().tolist()
        raise ValueError(
            f"the logits must be numbers, got NaN, or infinity for all tokens, in rows {rows[:5]} "
            f"({len(rows)} of {len(total)}): the model's weights may have diverged."
        )
    if threshold is None:
        threshold = torch.rand(total.shape, dtype=torch.float64, device=log_probs.device)
    # Scaled by the total, which rounding keeps from being 1.
    drawn = torch.searchsorted(cumulative, threshold * total, right=True)
    return drawn.clamp_(max=log_probs.shape[-1] - 1)
