"""Why the KL penalty in a reward is k1: a bandit with four actions, where expectations are sums.

A reward is not differentiated: a penalty c moves the policy along E[(r - beta c) grad log pi].
"""

import math

import pytest
import torch
from torch.testing import assert_close

from torchrl_kl.functional.estimators import kl_k1, kl_k2, kl_k3

BETA = 0.5
REWARD = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
REF_LOG_PROB = torch.full((4,), 0.25, dtype=torch.float64).log()
MAX_KL = math.log(4)  # of a policy that always takes one action


def exact_penalty(log_prob: torch.Tensor, ref_log_prob: torch.Tensor) -> torch.Tensor:
    """The exact KL, which is the same for every action."""
    return (log_prob.exp() * (log_prob - ref_log_prob)).sum().expand(4)


def kl(log_prob: torch.Tensor) -> float:
    return sum(
        math.exp(a) * (a - b) for a, b in zip(log_prob.tolist(), REF_LOG_PROB.tolist(), strict=True)
    )


def direction(logits: torch.Tensor, penalty) -> torch.Tensor:
    """The exact policy gradient with respect to the logits, of shape (4,)."""
    logits = logits.detach().requires_grad_()
    log_prob = logits.log_softmax(-1)
    advantage = (REWARD - BETA * penalty(log_prob, REF_LOG_PROB)).detach()
    return torch.autograd.grad((log_prob.exp().detach() * advantage * log_prob).sum(), logits)[0]


def train(penalty, n_updates: int) -> list[torch.Tensor]:
    """Log-probabilities after each step of gradient ascent that starts near the reference."""
    logits, log_probs = REF_LOG_PROB + 0.01 * torch.randn(4, dtype=torch.float64), []
    for _ in range(n_updates):
        logits = logits + direction(logits, penalty)
        log_probs.append(logits.log_softmax(-1))
    return log_probs


def optimum() -> torch.Tensor:
    """Log-probabilities of pi* ~ pi_ref exp(r / beta), which maximizes E[r] - beta KL; (4,)."""
    weights = [0.25 * math.exp(2.0), 0.25, 0.25, 0.25]
    return torch.tensor(
        [math.log(weight / sum(weights)) for weight in weights], dtype=torch.float64
    )


def test_the_optimum_is_better_than_all_policies_around_it_and_has_the_known_kl():
    def objective(log_prob):
        return math.exp(log_prob[0].item()) - BETA * kl(log_prob)

    best = objective(optimum())
    for _ in range(100):
        other = (optimum() + 0.1 * torch.randn(4, dtype=torch.float64)).log_softmax(-1)
        assert objective(other) < best
    assert kl(optimum()) == pytest.approx(0.468, abs=5e-4)


def test_k1_penalty_ends_at_the_optimum():
    assert_close(train(kl_k1, 500)[-1], optimum(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("penalty", [kl_k2, exact_penalty], ids=["k2", "exact"])
def test_k2_and_exact_penalties_do_not_limit_the_kl(penalty):
    policy = train(penalty, 3000)[-1]
    assert policy.exp()[0] > 0.999
    assert kl(policy) == pytest.approx(MAX_KL, abs=5e-3)


def test_k3_penalty_diverges():
    log_probs = train(kl_k3, 2000)
    lowest = [policy.min().item() for policy in log_probs]
    assert kl(log_probs[200]) == pytest.approx(MAX_KL, abs=1e-12)
    # It does not converge: pi * k3 tends to pi_ref, so per update the logit of a vanishing action
    # falls by beta * pi_ref = 1/8, and that of the winner rises by beta * (1 - pi_ref) = 3/8.
    assert lowest[400] - lowest[200] == pytest.approx(-200 * (1 / 8 + 3 / 8), rel=1e-6)
    # Finally exp(-log-ratio) overflows.
    assert math.isnan(lowest[-1])


def test_only_k1_is_at_rest_at_the_optimum():
    assert_close(
        direction(optimum(), kl_k1), torch.zeros(4, dtype=torch.float64), rtol=0, atol=1e-15
    )
    for penalty in (kl_k2, kl_k3, exact_penalty):
        assert direction(optimum(), penalty)[0] > 0.05
