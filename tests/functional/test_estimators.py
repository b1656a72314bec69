"""The estimators: their laws, exact KL of logits, top k, precision, infinity, refusals."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Categorical
from torch.testing import assert_close

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
from torchrl_kl.functional import kl_exact, kl_k1, kl_k2, kl_k3, kl_top_k
from torchrl_kl.functional.estimators import ESTIMATORS

INF = math.inf
assert_equal = partial(assert_close, rtol=0, atol=0)
assert_near = partial(assert_close, rtol=0, atol=1e-14)
each = pytest.mark.parametrize("estimator", list(ESTIMATORS.values()), ids=list(ESTIMATORS))
halves = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


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

    def test_it_misses_the_references_mass_outside_the_policys_support(self):
        policy, reference = random_logits(50, V), random_logits(50, V)
        policy[:, :2] = -INF
        outside = reference.softmax(-1)[:, :2].sum(-1)
        expected = TestK1().mean(policy, reference) - outside
        assert_close(self.mean(policy, reference), expected, rtol=1e-12, atol=1e-12)

    def test_it_keeps_its_digits_near_the_reference(self):
        log_ratio = torch.cat([sign * torch.logspace(-4, -2, 1000) for sign in (1, -1)])
        x = log_ratio.double()
        series = x**2 / 2 - x**3 / 6 + x**4 / 24 - x**5 / 120
        value = kl_k3(log_ratio, torch.zeros_like(log_ratio))
        # One rounding of expm1 and one of the sum, each of |x| * eps at most, where exp(x) - 1
        # would lose eps.
        assert ((value.double() - series).abs() <= 2 * torch.finfo().eps * x.abs()).all()
        assert (value >= 0).all()


class TestExact(EstimatorLaws):
    is_masked_before_softmax = True

    def estimate(self, policy, reference, action, mask=None):
        return kl_exact(policy, reference, mask=mask)

    def variance(self, policy, reference):
        return zero(policy, reference)

    def without_the_draw(self, policy, reference):
        return (policy.exp() * (policy - reference)).sum(-1)


@pytest.mark.parametrize("k", [0, 2, V], scope="class")
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


class TestExactOfLogits:
    @given(
        rows=st.lists(
            st.tuples(*[st.one_of(st.just(-INF), st.floats(-800, 800))] * 2),
            min_size=1,
            max_size=6,
        )
    )
    def test_any_logits(self, rows):
        policy, reference = ([pair[i] for pair in rows] for i in range(2))
        if max(policy) == -INF or max(reference) == -INF:
            return  # not a distribution
        inputs = [
            torch.tensor(x, dtype=torch.float64).requires_grad_() for x in (policy, reference)
        ]
        value = kl_exact(*inputs)
        # Python's floats; without the maximum, rounding would change probabilities by 1e-13.
        logs = []
        for logits in (policy, reference):
            shifted = [x - max(logits) for x in logits]
            total = math.log(math.fsum(map(math.exp, shifted)))
            logs.append([x - total for x in shifted])
        drawn = [(a, b) for a, b in zip(*logs, strict=True) if a > -INF]
        expected = math.fsum(math.exp(a) * (a - b) if b > -INF else INF for a, b in drawn)
        # The logits, of 800 at most, are rounded several times in each log-probability.
        assert_close(value, torch.tensor(expected, dtype=torch.float64), rtol=1e-14, atol=1e-11)
        for gradient in torch.autograd.grad(value, inputs):
            assert gradient.isfinite().all()

    def test_rows_that_are_not_a_distribution_are_nan_and_the_others_are_not(self):
        policy = torch.tensor([[-INF, -INF], [0.0, math.nan], [0.0, 0.0]])
        assert kl_exact(policy, torch.zeros(3, 2)).isnan().tolist() == [True, True, False]
        assert kl_exact(torch.zeros(3, 2), policy).isnan().tolist() == [True, True, False]

    @halves
    def test_half_precision_is_computed_in_float32(self, dtype):
        # 4096 actions: each term is below the smallest numbers that float16 can tell apart.
        policy, reference = torch.randn(2, 3, 4096).to(dtype)
        value, truth = kl_exact(policy, reference), kl_exact(policy.double(), reference.double())
        assert value.dtype == torch.float32
        # Log-probs of at most 16 in size are rounded at 1e-6; the KL is about 1.
        assert_close(value.double(), truth, rtol=1e-5, atol=0)
        wider = kl_exact(policy, reference.float())
        assert_equal(wider, kl_exact(policy.float(), reference.float()))

    def test_vmap_and_compile(self):
        policy, reference = torch.randn(2, 5, 4)
        mask = torch.tensor([True, False, True, True, False])
        value = kl_exact(policy, reference, mask=mask)
        mapped = torch.vmap(lambda p, q, m: kl_exact(p, q, mask=m))(policy, reference, mask)
        assert_close(mapped, value)
        compiled = torch.compile(kl_exact, backend="eager", fullgraph=True)
        assert_close(compiled(policy, reference, mask=mask), value)


class TestTopKBeyondItsLaws:
    def arguments(self, *shape: int, k: int = 2) -> Any:
        log_probs = -torch.rand(2, *shape, k, dtype=torch.float64) - k
        log_prob, ref_log_prob = -torch.rand(2, *shape, dtype=torch.float64) - 1
        return [*log_probs, log_prob, ref_log_prob, torch.rand(shape) < 0.5]

    def test_no_actions_is_k1_in_value_and_all_of_them_is_exact(self):
        policy, reference = torch.randn(2, 7, 5, dtype=torch.float64).log_softmax(-1)
        drawn, nowhere = (policy[:, 0], reference[:, 0]), torch.zeros(7, dtype=torch.bool)
        assert_equal(kl_top_k(policy[:, :0], reference[:, :0], *drawn, nowhere), kl_k1(*drawn))
        assert_near(kl_top_k(policy, reference, *drawn, ~nowhere), kl_exact(policy, reference))
        call = partial(torch.vmap(kl_top_k), policy[:, :2], reference[:, :2], *drawn)
        assert_near(call(nowhere), kl_top_k(policy[:, :2], reference[:, :2], *drawn, nowhere))

    def test_what_was_drawn_does_not_count_inside_the_top(self):
        policy, reference, log_prob, ref_log_prob, _ = self.arguments(3)
        top = (policy, reference)
        inside = torch.ones(3, dtype=torch.bool)
        value = kl_top_k(*top, log_prob, ref_log_prob, inside)
        odd = torch.tensor([math.nan, INF, -INF], dtype=torch.float64)
        assert_equal(kl_top_k(*top, odd, ref_log_prob, inside), value)
        assert_equal(kl_top_k(*top, log_prob, odd, inside), value)

    def test_infinity_in_the_top_and_in_the_tail(self):
        arguments = self.arguments(4)
        _, ref_top, _, ref_log_prob, _ = arguments
        ref_top[0, 1] = -INF  # the reference cannot take one of the k
        ref_log_prob[1] = -INF  # nor the action drawn, which is in the tail
        ref_log_prob[2] = -INF  # and here in the top, so that it does not matter
        inputs = [x.requires_grad_() for x in arguments[:4]]
        value = kl_top_k(*inputs, in_top_k=torch.tensor([False, False, True, False]))
        assert value.isposinf().tolist() == [True, True, False, False]
        for gradient in torch.autograd.grad(value.sum(), inputs):
            assert gradient.isfinite().all()
            assert (gradient[:2] == 0).all()


class TestK1K2K3:
    @each
    def test_nan_is_not_repaired_where_it_counts(self, estimator):
        log_prob, mask = torch.tensor([math.nan, -1.0]), torch.tensor([True, False])
        assert estimator(log_prob, torch.zeros(2), mask=mask)[0].isnan()
        assert estimator(torch.tensor([0.0, -INF]), log_prob)[0].isnan()
        assert estimator(log_prob, torch.full((2,), -INF))[0].isnan()

    @pytest.mark.parametrize(
        ("estimator", "values", "slopes"),
        [
            (kl_k1, [-12.0, 127.5], [1.0, 1.0]),
            (kl_k2, [72.0, 8128.125], [-12.0, 127.5]),
            (kl_k3, [math.exp(12) - 13, 126.5], [-math.exp(12), 1.0]),
        ],
    )
    @halves
    def test_numbers_that_half_precision_cannot_hold(self, estimator, values, slopes, dtype):
        """exp(12) is more than the largest number of float16; 127.5 has 8 binary digits."""
        log_prob = torch.tensor([-13.0, -0.5], dtype=dtype, requires_grad=True)
        value = estimator(log_prob, torch.tensor([-1.0, -128.0], dtype=dtype))
        assert_close(value, torch.tensor(values), rtol=1e-6, atol=0)
        limit = torch.finfo(dtype).max
        slope = torch.tensor(slopes).clamp(-limit, limit)
        gradient = torch.autograd.grad(value.sum(), log_prob)[0]
        assert_close(gradient.float(), slope, rtol=torch.finfo(dtype).eps, atol=0)

    @each
    @pytest.mark.parametrize("ref_log_prob", [-1.0, -INF])
    def test_an_action_that_the_policy_cannot_draw_adds_nothing(self, estimator, ref_log_prob):
        log_prob = torch.tensor([-INF, -0.5], requires_grad=True)
        reference = torch.tensor([ref_log_prob, -1.0], requires_grad=True)
        before = log_prob.detach().clone(), reference.detach().clone()
        value = estimator(log_prob, reference)
        assert value[0] == 0
        for gradient in torch.autograd.grad(value.sum(), [log_prob, reference]):
            assert gradient[0] == 0
            assert gradient[1] != 0
        assert_equal((log_prob.detach(), reference.detach()), before)


flat, wide, inside = torch.zeros(4), torch.zeros(4, 3), torch.zeros(4, dtype=torch.bool)


@pytest.mark.parametrize(
    ("function", "arguments", "error", "message"),
    [
        (kl_k1, (wide, wide[..., None]), ValueError, r"same shape, got \(4, 3\) and \(4, 3, 1\): "),
        (kl_k2, (wide, flat[:3]), ValueError, "`log_prob` and `ref_log_prob` must have the same"),
        (kl_k3, (flat, flat.long()), TypeError, "floating point, got torch.float32 and torch.int"),
        (kl_k1, (0.5, flat), TypeError, "`log_prob` and `ref_log_prob` must be tensors, got float"),
        (
            partial(kl_k1, mask=flat),
            (flat, flat),
            ValueError,
            "`mask` must be boolean of the shape",
        ),
        (partial(kl_k1, mask=inside), (wide, wide), ValueError, r"`log_prob`, \(4, 3\), got torch"),
        (kl_exact, (wide, wide[:1]), ValueError, r"`policy` and `reference` .* \(1, 3\): broad"),
        (kl_exact, (flat[0], flat[0]), ValueError, "their actions in the last dimension, got"),
        (kl_exact, (wide.long(), wide), TypeError, "`policy` and `reference` must be floating"),
        (kl_exact, (wide, Categorical(wide + 1)), TypeError, "got Tensor and Categorical"),
        (
            partial(kl_exact, mask=wide > 0),
            (wide, wide),
            ValueError,
            r"last dimension, \(4,\), got",
        ),
        (kl_top_k, (wide, wide[:, :2], flat, flat, inside), ValueError, "`top_log_probs` and `top"),
        (kl_top_k, (wide, wide, flat, wide, inside), ValueError, "`log_prob` and `ref_log_prob`"),
        (kl_top_k, (wide, wide, flat, flat, wide > 0), ValueError, "`in_top_k` must be boolean of"),
        (kl_top_k, (wide, wide, flat, flat, flat), ValueError, "True marks draws from the top k"),
        (kl_top_k, (flat, flat, flat, flat, inside), ValueError, "and one more dimension, of size"),
        (kl_top_k, (wide.long(), wide, flat, flat, inside), TypeError, "`top_log_probs` .* float"),
        (partial(kl_top_k, mask=wide > 0), (wide, wide, flat, flat, inside), ValueError, "`mask`"),
    ],
)
def test_refusals(function, arguments, error, message):
    with pytest.raises(error, match=message):
        function(*arguments)
