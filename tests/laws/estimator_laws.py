"""What every estimator of KL(policy || reference) must obey, by enumeration of all actions.

A test class per estimator supplies the estimate, its mean, its gradient and its variance.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical, kl_divergence
from torch.testing import assert_close

V = 5
TOLERANCE = 1e-12


def random_logits(*shape: int) -> Tensor:
    return 2 * torch.randn(*shape, dtype=torch.float64)


def true_kl(policy: Tensor, reference: Tensor) -> Tensor:
    return kl_divergence(Categorical(logits=policy), Categorical(logits=reference))


def zero(policy: Tensor, reference: Tensor) -> Tensor:
    return 0 * policy.sum(-1)


def per_row(
    function: Callable[[list[float], list[float]], float], policy: Tensor, reference: Tensor
) -> Tensor:
    """A formula on the probabilities and log-ratios of each row of logits (B, V), without torch."""
    log_ratio = policy.log_softmax(-1) - reference.log_softmax(-1)
    rows = zip(policy.softmax(-1).tolist(), log_ratio.tolist(), strict=True)
    return torch.tensor([function(probs, ratios) for probs, ratios in rows], dtype=torch.float64)


def moment(probs: list[float], values: list[float], n: int) -> float:
    return math.fsum(p * x**n for p, x in zip(probs, values, strict=True))


def variance_of(probs: list[float], values: list[float]) -> float:
    return moment(probs, values, 2) - moment(probs, values, 1) ** 2


class EstimatorLaws(ABC):
    """Inherit, and define `estimate`, `bias`, `gradient_of` and `variance`.

    Each is exact and comes from another source than the code under test. The gradient of
    `gradient_of` is the expected gradient.
    """

    is_unbiased_on_part_of_the_support = (
        True  # where the reference has mass that the policy has not
    )
    is_masked_before_softmax = (
        False  # takes logits, so that a hidden row's own gradient is in its hands
    )

    @abstractmethod
    def estimate(
        self, policy: Tensor, reference: Tensor, action: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """Estimates (*B) after the actions (*B), given the logits (*B, V) of both."""

    def bias(self, policy: Tensor, reference: Tensor) -> Tensor:
        return zero(policy, reference)

    def gradient_of(self, policy: Tensor, reference: Tensor) -> Tensor:
        return true_kl(policy, reference)

    @abstractmethod
    def variance(self, policy: Tensor, reference: Tensor) -> Tensor:
        """Of the estimate (*B), over the actions of the policy, given the logits (*B, V)."""

    @staticmethod
    def random(*shape: int) -> tuple[Tensor, Tensor]:
        return random_logits(*shape, V), random_logits(*shape, V)

    def every_action(self, policy: Tensor, reference: Tensor, mask: Tensor | None = None) -> Tensor:
        """Estimates (*B, V): one after each action."""
        shape = (*policy.shape, V)
        actions = torch.arange(V).expand(policy.shape)
        mask = None if mask is None else mask.unsqueeze(-1).expand(policy.shape)
        rows = policy.unsqueeze(-2).expand(shape), reference.unsqueeze(-2).expand(shape)
        return self.estimate(*rows, actions, mask)

    def mean(self, policy: Tensor, reference: Tensor) -> Tensor:
        """Mean over the actions that the policy draws; the draw has no gradient, as in a sample."""
        return (policy.softmax(-1).detach() * self.every_action(policy, reference)).sum(-1)

    def test_its_mean_is_the_kl_plus_its_bias(self):
        policy, reference = self.random(30)
        # The direction shows.
        assert (true_kl(policy, reference) - true_kl(reference, policy)).abs().min() > 1e-3
        truth = true_kl(policy, reference) + self.bias(policy, reference)
        assert_close(self.mean(policy, reference), truth, rtol=0, atol=TOLERANCE)

    def test_its_variance(self):
        policy, reference = self.random(30)
        values = self.every_action(policy, reference)
        probs = policy.softmax(-1)
        spread = (probs * (values - (probs * values).sum(-1, keepdim=True)).square()).sum(-1)
        assert_close(spread, self.variance(policy, reference), rtol=0, atol=TOLERANCE)

    def test_its_expected_gradient(self):
        policy, reference = self.random(30)
        policy.requires_grad_()
        gradient = torch.autograd.grad(self.mean(policy, reference).sum(), policy)[0]
        truth = torch.autograd.grad(self.gradient_of(policy, reference).sum(), policy)[0]
        assert_close(gradient, truth, rtol=0, atol=TOLERANCE)

    def test_its_sum_over_steps_is_the_kl_of_the_sequence_plus_the_biases(self):
        # Contexts of 0, 1, 2 tokens; there are V ** 3 sequences (a, b, c).
        steps = [self.random(*(V,) * t) for t in range(3)]

        def of_sequences(per_step: list[Tensor]) -> Tensor:
            """Sum over the steps of what is given for the action of each, (V, V, V)."""
            wide = [
                x.reshape(x.shape + (1,) * (2 - t)).expand(V, V, V) for t, x in enumerate(per_step)
            ]
            return torch.stack(wide).sum(0)

        joint, ref_joint = (
            of_sequences([step[i].log_softmax(-1) for step in steps]) for i in range(2)
        )
        values = of_sequences([self.every_action(*step) for step in steps])
        biases = [self.bias(*(x.reshape(-1, V) for x in step)) for step in steps]
        biases = of_sequences(
            [x.reshape((V,) * t + (1,)).expand((V,) * (t + 1)) for t, x in enumerate(biases)]
        )
        truth = true_kl(joint.flatten(), ref_joint.flatten()) + (joint.exp() * biases).sum()
        assert_close((joint.exp() * values).sum(), truth, rtol=0, atol=TOLERANCE)

    @pytest.mark.parametrize("hidden", [math.nan, math.inf, -math.inf], ids=str)
    def test_what_a_mask_hides_reaches_neither_value_nor_gradient(self, hidden):
        clean = self.random(4)
        mask = torch.tensor([True, False, True, False])
        dirty = [torch.where(mask.unsqueeze(-1), x, hidden).requires_grad_() for x in clean]
        clean = [x.requires_grad_() for x in clean]
        value, plain = self.every_action(*dirty, mask=mask), self.every_action(*clean)
        assert_close(value, torch.where(mask.unsqueeze(-1), plain, 0.0), rtol=0, atol=0)
        for x, y in zip(dirty, clean, strict=True):
            gradient = torch.autograd.grad(value.sum(), x, retain_graph=True)[0]
            truth = torch.autograd.grad(plain[mask].sum(), y, retain_graph=True)[0]
            assert_close(gradient[mask], truth[mask], rtol=0, atol=0)
            if self.is_masked_before_softmax:
                assert (gradient[~mask] == 0).all()

    def test_any_leading_shape(self):
        policy, reference = self.random(6)
        rows = self.every_action(policy, reference)
        shaped = [x.reshape(2, 1, 3, V) for x in (policy, reference)]
        assert_close(self.every_action(*shaped), rows.reshape(2, 1, 3, V), rtol=0, atol=0)
        assert_close(self.every_action(policy[0], reference[0]), rows[0], rtol=0, atol=0)
        assert self.every_action(policy[:0], reference[:0]).shape == (0, V)

    @pytest.mark.parametrize(
        "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
    )
    def test_every_floating_point_dtype(self, dtype):
        policy, reference = (x.clamp(-3, 3).to(dtype) for x in self.random(30))
        values = self.every_action(policy, reference)
        assert values.dtype == torch.promote_types(dtype, torch.float32)
        # Two log-probabilities of at most 8 in size are rounded, 16 units in all; the slope of the
        # estimate in them is at most 1 + exp(|lr|).
        truth = self.every_action(policy.double(), reference.double())
        scale = 1 + (
            policy.double().log_softmax(-1) - reference.double().log_softmax(-1)
        ).abs().exp().amax(-1)
        error = (values.double() - truth).abs().amax(-1)
        assert (error <= 32 * torch.finfo(dtype).eps * scale).all()

    def test_actions_that_the_policy_cannot_draw_add_nothing(self):
        policy, reference = self.random(30)
        policy[:, 1] = -math.inf
        reference[:10, 1] = -math.inf
        kept = [0, 2, 3, 4]
        smaller = policy[:, kept].log_softmax(-1), reference.log_softmax(-1)[:, kept]
        truth = (smaller[0].exp() * (smaller[0] - smaller[1])).sum(-1)
        values = self.every_action(policy, reference)[:, kept]
        assert values.isfinite().all()
        if self.is_unbiased_on_part_of_the_support:
            mean = (smaller[0].exp() * values).sum(-1)
            assert_close(mean, truth, rtol=0, atol=TOLERANCE)
        left = self.every_action(policy, reference)[:, 1]
        assert_close(left, self.without_the_draw(*smaller), rtol=0, atol=TOLERANCE)
        policy.requires_grad_()
        gradient = torch.autograd.grad(self.mean(policy, reference).sum(), policy)[0]
        assert gradient.isfinite().all()
        assert (gradient[:, 1] == 0).all()

    def without_the_draw(self, policy: Tensor, reference: Tensor) -> Tensor:
        """The exact part, (*B): what is left when the policy cannot draw the action."""
        return torch.zeros(policy.shape[:-1], dtype=policy.dtype)

    def test_where_the_reference_cannot_go_it_is_infinite_and_flat(self):
        policy, reference = self.random(2)
        reference[0, 3] = -math.inf
        policy.requires_grad_()
        reference.requires_grad_()
        values = self.every_action(policy, reference)
        assert values[0, 3] == math.inf
        assert values[1].isfinite().all()
        assert not values.isnan().any()
        flat = torch.autograd.grad(values[0, 3], [policy, reference], retain_graph=True)
        assert all((gradient == 0).all() for gradient in flat)
        for x in torch.autograd.grad(values.sum(), [policy, reference]):
            assert x.isfinite().all()
            assert (x[1] != 0).any()
