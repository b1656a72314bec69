"""The laws that each estimator obeys, and what is true of their variances."""

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tests.laws.estimator_laws import (
    EstimatorLaws,
    V,
    moment,
    per_row,
    random_logits,
    true_kl,
    variance_of,
    zero,
)
from torchrl_kl import kl_exact, kl_k1, kl_k2, kl_k3, kl_top_k


def score(policy: Tensor, reference: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    log_prob, ref_log_prob = (
        x.log_softmax(-1).gather(-1, action.unsqueeze(-1)) for x in (policy, reference)
    )
    return log_prob.squeeze(-1), ref_log_prob.squeeze(-1)


class TestK1(EstimatorLaws):
    def estimate(self, policy, reference, action, mask=None):
        return kl_k1(*score(policy, reference, action), mask=mask)

    def gradient_of(self, policy, reference):
        return zero(policy, reference)

    def variance(self, policy, reference):
        return per_row(variance_of, policy, reference)


class TestK2(EstimatorLaws):
    is_unbiased_on_part_of_the_support = False

    def estimate(self, policy, reference, action, mask=None):
        return kl_k2(*score(policy, reference, action), mask=mask)

    def bias(self, policy, reference):
        return per_row(
            lambda probs, lr: moment(probs, lr, 2) / 2 - moment(probs, lr, 1), policy, reference
        )

    def variance(self, policy, reference):
        return per_row(
            lambda probs, lr: variance_of(probs, [x**2 / 2 for x in lr]), policy, reference
        )


class TestK3(EstimatorLaws):
    is_unbiased_on_part_of_the_support = False

    def estimate(self, policy, reference, action, mask=None):
        return kl_k3(*score(policy, reference, action), mask=mask)

    def gradient_of(self, policy, reference):
        return true_kl(reference, policy)

    def variance(self, policy, reference):
        return per_row(
            lambda probs, lr: variance_of(probs, [math.exp(-x) - 1 + x for x in lr]),
            policy,
            reference,
        )


class TestExact(EstimatorLaws):
    is_masked_before_softmax = True

    def estimate(self, policy, reference, action, mask=None):
        return kl_exact(policy, reference, mask=mask)

    def variance(self, policy, reference):
        return zero(policy, reference)

    def without_the_draw(self, policy, reference):
        return (policy.exp() * (policy - reference)).sum(-1)


class TestExactOfLogProbs(TestExact):
    is_masked_before_softmax = False

    def estimate(self, policy, reference, action, mask=None):
        return kl_exact(policy.log_softmax(-1), reference.log_softmax(-1), mask=mask)


@pytest.mark.parametrize("k", range(V + 1), scope="class")
class TestTopK(EstimatorLaws):
    @pytest.fixture(autouse=True)
    def choose(self, k):
        self.k = k

    def estimate(self, policy, reference, action, mask=None):
        top = policy.topk(self.k, -1).indices
        log_probs, ref_log_probs = (x.log_softmax(-1).gather(-1, top) for x in (policy, reference))
        in_top_k = (top == action.unsqueeze(-1)).any(-1)
        return kl_top_k(
            log_probs, ref_log_probs, *score(policy, reference, action), in_top_k, mask=mask
        )

    def tail(self, probs: list[float], lr: list[float]) -> list[float]:
        """The sampled term after each action."""
        top = sorted(range(V), key=lambda action: probs[action])[V - self.k :]
        return [0.0 if action in top else x for action, x in enumerate(lr)]

    def variance(self, policy, reference):
        return per_row(
            lambda probs, lr: variance_of(probs, self.tail(probs, lr)), policy, reference
        )

    def without_the_draw(self, policy, reference):
        top = policy.topk(min(self.k, V - 1), -1).indices
        log_probs, ref_log_probs = policy.gather(-1, top), reference.gather(-1, top)
        return (log_probs.exp() * (log_probs - ref_log_probs)).sum(-1)


class TestWhichVariesLess:
    def spread(self, values: Tensor, policy: Tensor) -> Tensor:
        probs = policy.softmax(-1)
        return (probs * (values - (probs * values).sum(-1, keepdim=True)).square()).sum(-1)

    def top_k(self, k: int) -> EstimatorLaws:
        laws = TestTopK()
        laws.k = k
        return laws

    def test_the_exact_value_varies_less_than_any_other_given_the_state(self):
        policy, reference = random_logits(30, V), random_logits(30, V)
        exact = self.spread(TestExact().every_action(policy, reference), policy)
        for laws in (TestK1(), TestK2(), TestK3(), *(self.top_k(k) for k in range(V))):
            assert (self.spread(laws.every_action(policy, reference), policy) > exact + 1e-3).any()
            assert (self.spread(laws.every_action(policy, reference), policy) >= exact).all()

    def test_the_mean_square_of_the_sampled_term_falls_as_k_grows(self):
        policy, reference = random_logits(30, V), random_logits(30, V)
        squares = []
        for k in range(V + 1):
            laws = self.top_k(k)
            exact_part = laws.without_the_draw(policy.log_softmax(-1), reference.log_softmax(-1))
            if k == V:  # without_the_draw leaves out the least likely action, for the laws' sake
                exact_part = true_kl(policy, reference)
            sampled = laws.every_action(policy, reference) - exact_part.unsqueeze(-1)
            squares.append((policy.softmax(-1) * sampled.square()).sum(-1))
        for larger, smaller in pairwise(squares):
            assert (smaller <= larger + 1e-12).all()
            assert (smaller < larger - 1e-6).any()

    def test_top_k_may_vary_more_than_k1(self):
        # The log-ratio is the same for all actions that the policy draws: k1 is then exact, and the
        # tail is not.
        policy = torch.tensor([[0.25, 0.25, 0.25, 0.25, 0.0]], dtype=torch.float64).log()
        reference = torch.tensor([[0.1, 0.1, 0.1, 0.1, 0.6]], dtype=torch.float64).log()
        k1 = self.spread(TestK1().every_action(policy, reference), policy)
        top = self.spread(self.top_k(2).every_action(policy, reference), policy)
        assert k1.item() < 1e-12
        # Half of the draws are in the tail.
        assert top.item() == pytest.approx(math.log(2.5) ** 2 / 4)
