"""The estimators beyond their laws: values, precision, masks, and infinity."""

import math
from functools import partial

import pytest
import torch
from torch.distributions import Categorical, kl_divergence
from torch.testing import assert_close

from torchrl_kl.functional.estimators import ESTIMATORS, kl_k1, kl_k2, kl_k3

assert_equal = partial(assert_close, rtol=0, atol=0)
EPS32 = torch.finfo(torch.float32).eps

each = pytest.mark.parametrize(
    "estimator", [kl_k1, kl_k2, kl_k3], ids=lambda estimator: estimator.__name__
)


def random_logits(*shape: int) -> torch.Tensor:
    return 2 * torch.randn(*shape, dtype=torch.float64)


def expected(estimator, policy: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Mean of an estimator over all actions, drawn from the policy, given both logits (*B, V)."""
    log_prob, ref_log_prob = policy.log_softmax(-1), reference.log_softmax(-1)
    return (log_prob.exp().detach() * estimator(log_prob, ref_log_prob)).sum(-1)


def true_kl(policy: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    return kl_divergence(Categorical(logits=policy), Categorical(logits=reference))


class TestValues:
    def test_k3_misses_the_references_mass_outside_the_policys_support(self):
        policy, reference = random_logits(50, 7), random_logits(50, 7)
        policy[:, :2] = -torch.inf
        outside = reference.softmax(-1)[:, :2].sum(-1)
        assert outside.min() > 1e-3
        log_prob, ref_log_prob = policy.log_softmax(-1)[:, 2:], reference.log_softmax(-1)[:, 2:]
        kl = (log_prob.exp() * (log_prob - ref_log_prob)).sum(-1)
        assert_close(expected(kl_k1, policy, reference), kl, rtol=1e-12, atol=1e-12)
        assert_close(expected(kl_k3, policy, reference), kl - outside, rtol=1e-12, atol=1e-12)

    def test_the_mean_of_k2_is_another_number(self):
        # pi = (1/2, 1/2), ref = (1/4, 3/4): log-ratios log 2 and log 2/3, KL = log(4/3) / 2.
        policy, reference = (
            torch.tensor([0.5, 0.5]).double().log(),
            torch.tensor([0.25, 0.75]).double().log(),
        )
        mean = (math.log(2) ** 2 + math.log(2 / 3) ** 2) / 4
        assert_close(expected(kl_k2, policy, reference), torch.tensor(mean, dtype=torch.float64))
        assert_close(
            true_kl(policy, reference), torch.tensor(math.log(4 / 3) / 2, dtype=torch.float64)
        )
        policy, reference = random_logits(50, 7), random_logits(50, 7)
        assert (
            expected(kl_k2, policy, reference) / true_kl(policy, reference) - 1
        ).abs().min() > 1e-3

    def test_the_mean_of_k2_is_the_kl_to_second_order_around_the_reference(self):
        reference, direction = random_logits(50, 7), random_logits(50, 7)
        far, near = (
            (expected(kl_k2, logits, reference) / true_kl(logits, reference) - 1).abs().max()
            for logits in (reference + 1e-2 * direction, reference + 1e-3 * direction)
        )
        # The relative error is of first order: ten times nearer, ten times smaller.
        assert 0 < near < far / 9 < 0.1

    def test_k2_and_k3_are_never_negative_and_k1_is_so_about_half_of_the_time(self):
        log_ratio = torch.randn(1_000_000) * 10 ** (-8 * torch.rand(1_000_000))
        zeros = torch.zeros_like(log_ratio)
        assert (kl_k2(log_ratio, zeros) >= 0).all()
        assert (kl_k3(log_ratio, zeros) >= 0).all()
        # A fair coin thrown a million times: five standard errors are 0.0025.
        assert abs((kl_k1(log_ratio, zeros) < 0).float().mean().item() - 0.5) < 0.0025

    def test_k3_keeps_its_digits_near_the_reference(self):
        log_ratio = torch.cat([sign * torch.logspace(-4, -2, 1000) for sign in (1, -1)])
        x = log_ratio.double()
        series = x**2 / 2 - x**3 / 6 + x**4 / 24 - x**5 / 120
        value = kl_k3(log_ratio, torch.zeros_like(log_ratio))
        # One rounding of expm1 and one of the sum, each of |x| * eps at most; exp(x) - 1 would lose
        # eps, not |x| * eps.
        assert ((value.double() - series).abs() <= 2 * EPS32 * x.abs()).all()

    def test_equal_log_probs_give_zero(self):
        log_prob = random_logits(5).log_softmax(-1)
        for estimator in ESTIMATORS.values():
            assert_equal(estimator(log_prob, log_prob.clone()), torch.zeros(5, dtype=torch.float64))

    def test_they_are_found_by_name(self):
        assert {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3} == ESTIMATORS


class TestMasks:
    @each
    @pytest.mark.parametrize("hidden", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("where", ["log_prob", "ref_log_prob", "both"])
    def test_what_a_mask_hides_reaches_neither_value_nor_gradient(self, estimator, hidden, where):
        mask = torch.tensor([[True, False, True], [False, True, True]])
        clean = [random_logits(2, 3).log_softmax(-1) for _ in range(2)]
        dirty = [tensor.clone() for tensor in clean]
        for tensor in dirty[: 1 if where == "log_prob" else 2][
            1 if where == "ref_log_prob" else 0 :
        ]:
            tensor[~mask] = hidden
        clean, dirty = ([tensor.requires_grad_() for tensor in pair] for pair in (clean, dirty))
        value, plain = estimator(*dirty, mask=mask), estimator(*clean)
        assert_equal(value, torch.where(mask, plain, 0.0))
        gradients = torch.autograd.grad(value.sum(), dirty)
        for gradient, truth in zip(
            gradients, torch.autograd.grad(plain[mask].sum(), clean), strict=True
        ):
            assert truth[mask].any()
            assert_equal(gradient, truth)

    @each
    def test_what_a_mask_shows_is_not_repaired(self, estimator):
        log_prob, mask = torch.tensor([math.nan, -1.0]), torch.tensor([True, False])
        assert estimator(log_prob, torch.zeros(2), mask=mask)[0].isnan()
        assert estimator(log_prob, torch.zeros(2))[0].isnan()
        assert estimator(torch.zeros(2), log_prob)[0].isnan()

    @each
    def test_a_mask_of_true_changes_nothing_and_one_of_false_gives_zero(self, estimator):
        log_prob, ref_log_prob = random_logits(2, 4, 3)
        value = estimator(log_prob, ref_log_prob)
        everything = torch.ones(4, 3, dtype=torch.bool)
        assert_equal(estimator(log_prob, ref_log_prob, mask=everything), value)
        assert_equal(estimator(log_prob, ref_log_prob, mask=~everything), torch.zeros_like(value))

    @each
    @pytest.mark.parametrize(
        ("mask", "got"),
        [
            (torch.ones(4, 3), r"torch.float32 of shape \(4, 3\)"),
            (torch.ones(4, 3, dtype=torch.int64), r"torch.int64 of shape \(4, 3\)"),
            (torch.ones(4, dtype=torch.bool), r"torch.bool of shape \(4,\)"),
            (torch.ones(4, 3, 1, dtype=torch.bool), r"torch.bool of shape \(4, 3, 1\)"),
        ],
        ids=["float", "int", "too_short", "too_long"],
    )
    def test_a_mask_that_does_not_fit_is_refused(self, estimator, mask, got):
        with pytest.raises(
            ValueError,
            match=rf"`mask` must be boolean of the shape of `log_prob`, \(4, 3\), got {got}",
        ):
            estimator(torch.zeros(4, 3), torch.zeros(4, 3), mask=mask)


class TestInfinity:
    @each
    @pytest.mark.parametrize("ref_log_prob", [-1.0, -math.inf])
    def test_an_action_that_the_policy_cannot_draw_adds_neither_value_nor_gradient(
        self, estimator, ref_log_prob
    ):
        log_prob = torch.tensor([-math.inf, -0.5], requires_grad=True)
        reference = torch.tensor([ref_log_prob, -1.0], requires_grad=True)
        value = estimator(log_prob, reference)
        assert value[0] == 0
        for gradient in torch.autograd.grad(value.sum(), [log_prob, reference]):
            assert gradient[0] == 0
            assert gradient[1] != 0


class TestShapesAndTypes:
    @each
    @pytest.mark.parametrize("shape", [(4, 7, 1), (7,), (1, 7), (4, 1), ()], ids=str)
    def test_shapes_are_not_broadcast(self, estimator, shape):
        got = str(tuple(shape)).replace("(", r"\(").replace(")", r"\)")
        message = (
            rf"`log_prob` and `ref_log_prob` must have the same shape, got \(4, 7\) and {got}: .* "
            rf"squeeze"
        )
        with pytest.raises(ValueError, match=message):
            estimator(torch.zeros(4, 7), torch.zeros(shape))

    @each
    @pytest.mark.parametrize(
        "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
    )
    @pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3, 4)], ids=str)
    def test_shape_and_dtype_are_kept(self, estimator, dtype, shape):
        log_prob, ref_log_prob = torch.randn(2, *shape).to(dtype)
        for mask in (None, torch.ones(shape, dtype=torch.bool)):
            value = estimator(log_prob, ref_log_prob, mask=mask)
            assert value.dtype == dtype
            assert value.shape == shape

    @each
    def test_inputs_are_not_written_to(self, estimator):
        log_prob, ref_log_prob = torch.tensor([-1.0, -math.inf]), torch.tensor([-math.inf, -2.0])
        before = log_prob.clone(), ref_log_prob.clone()
        estimator(log_prob, ref_log_prob, mask=torch.tensor([True, False]))
        assert_equal((log_prob, ref_log_prob), before)
