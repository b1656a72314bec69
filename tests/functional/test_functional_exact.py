"""kl_exact of logits and kl_top_k beyond the laws: precision, infinity, refusals."""

import math
import re
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributions import Categorical
from torch.testing import assert_close

from torchrl_kl import kl_exact, kl_k1, kl_top_k

INF = math.inf
assert_equal = partial(assert_close, rtol=0, atol=0)
assert_near = partial(assert_close, rtol=0, atol=1e-14)
logit = st.one_of(st.just(-INF), st.floats(-800, 800))


def log_probs_of(logits: list[float]) -> list[float]:
    """Subtracts the maximum first: rounding 500 + log(2) would change probabilities by 1e-13."""
    shifted = [x - max(logits) for x in logits]
    total = math.log(math.fsum(map(math.exp, shifted)))
    return [x - total for x in shifted]


def by_hand(policy: list[float], reference: list[float]) -> float:
    """KL(policy || reference) of one row of logits in Python's floats."""
    terms = []
    for log_prob, ref_log_prob in zip(log_probs_of(policy), log_probs_of(reference), strict=True):
        if log_prob > -INF:
            ratio = log_prob - ref_log_prob
            terms.append(math.exp(log_prob) * ratio if ref_log_prob > -INF else INF)
    return math.fsum(terms)


class TestExactOfLogits:
    @given(rows=st.lists(st.tuples(logit, logit), min_size=1, max_size=6))
    def test_any_logits(self, rows):
        policy, reference = ([pair[i] for pair in rows] for i in range(2))
        if max(policy) == -INF or max(reference) == -INF:
            return  # not a distribution
        inputs = [
            torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (policy, reference)
        ]
        value = kl_exact(*inputs)
        # The logits, of 800 at most, are rounded several times in each log-probability.
        expected = torch.tensor(by_hand(policy, reference), dtype=torch.float64)
        assert_close(value, expected, rtol=1e-14, atol=1e-11)
        for gradient in torch.autograd.grad(value, inputs):
            assert gradient.isfinite().all()

    def test_logits_are_normalised_and_log_probs_are_a_fixed_point(self):
        policy, reference = torch.randn(2, 9, 4, dtype=torch.float64)
        value = kl_exact(policy, reference)
        shift = torch.randn(9, 1, dtype=torch.float64)
        assert_near(kl_exact(policy + shift, reference - shift), value)
        assert_near(kl_exact(policy.log_softmax(-1), reference.log_softmax(-1)), value)

    def test_a_probability_too_small_for_the_dtype_is_not_zero(self):
        policy, reference = torch.tensor([0.0, 0.0]), torch.tensor([0.0, -300.0])
        assert_close(kl_exact(policy, reference), torch.tensor(150 - math.log(2)))
        assert_close(kl_exact(reference, policy), torch.tensor(math.log(2)))

    def test_rows_that_are_not_a_distribution_are_nan_and_the_others_are_not(self):
        policy = torch.tensor([[-INF, -INF], [0.0, math.nan], [0.0, 0.0]])
        value = kl_exact(policy, torch.zeros(3, 2))
        assert value.isnan().tolist() == [True, True, False]
        assert kl_exact(torch.zeros(3, 2), policy).isnan().tolist() == [True, True, False]

    def test_infinity_in_one_row_leaves_the_gradient_of_the_others(self):
        policy = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
        reference = torch.tensor([[0.0, -INF, 0.0], [0.0, 1.0, 0.0]], dtype=torch.float64)
        value = kl_exact(policy, reference)
        gradient = torch.autograd.grad(value.sum(), policy)[0]
        truth = torch.autograd.grad(kl_exact(policy[1], reference[1]), policy)[0]
        assert value[0] == INF
        assert truth[1].abs().min() > 1e-3
        assert_close(gradient, truth, rtol=0, atol=1e-15)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    def test_half_precision_is_rounded_once(self, dtype):
        # 4096 actions: each probability and each term is below the smallest numbers that float16
        # can tell apart.
        policy, reference = torch.randn(2, 3, 4096).to(dtype)
        value = kl_exact(policy, reference)
        truth = kl_exact(policy.double(), reference.double())
        assert value.dtype == dtype
        # Half a unit for the rounding at the end, and float32's own error, which is a thousandth of
        # that.
        assert_close(value.double(), truth, rtol=0.51 * torch.finfo(dtype).eps, atol=0)

    def test_two_dtypes_give_the_wider(self):
        half, single = torch.randn(3, 4).bfloat16(), torch.randn(3, 4)
        for pair in ((half, single), (single, half)):
            value = kl_exact(*pair)
            assert value.dtype == torch.float32
            assert_equal(value, kl_exact(*(x.float() for x in pair)))

    def test_a_mask_of_several_dimensions_hides_rows(self):
        logits, mask = torch.randn(2, 4, 3, 5), torch.rand(4, 3) < 0.5
        dirty = torch.where(mask.unsqueeze(-1), logits, math.nan)
        value = kl_exact(*dirty, mask=mask)
        assert_equal(value, torch.where(mask, kl_exact(*logits), 0.0))

    def test_vmap_and_compile(self):
        policy, reference = torch.randn(2, 5, 4)
        mask = torch.tensor([True, False, True, True, False])
        value = kl_exact(policy, reference, mask=mask)
        assert_close(
            torch.vmap(lambda p, q, m: kl_exact(p, q, mask=m))(policy, reference, mask), value
        )
        compiled = torch.compile(kl_exact, backend="eager", fullgraph=True)
        assert_close(compiled(policy, reference, mask=mask), value)


class TestTopK:
    def arguments(self, *shape: int, k: int = 2) -> list[torch.Tensor]:
        log_probs = -torch.rand(2, *shape, k, dtype=torch.float64) - k
        log_prob, ref_log_prob = -torch.rand(2, *shape, dtype=torch.float64) - 1
        return [*log_probs, log_prob, ref_log_prob, torch.rand(shape) < 0.5]

    def test_by_hand(self):
        top, ref_top = (
            torch.tensor([0.5, 0.25]).double().log(),
            torch.tensor([0.25, 0.5]).double().log(),
        )
        drawn, ref_drawn = torch.tensor(0.25).double().log(), torch.tensor(0.125).double().log()
        inside = kl_top_k(top, ref_top, drawn, ref_drawn, torch.tensor(True))
        outside = kl_top_k(top, ref_top, drawn, ref_drawn, torch.tensor(False))
        assert inside.item() == pytest.approx(0.25 * math.log(2), rel=1e-15)
        assert outside.item() == pytest.approx(1.25 * math.log(2), rel=1e-15)

    def test_the_tail_carries_the_score(self):
        *top, log_prob, ref_log_prob, _ = self.arguments(6)
        log_prob.requires_grad_()
        in_top_k = torch.tensor([True, False] * 3)
        value = kl_top_k(top[0], top[1], log_prob, ref_log_prob, in_top_k)
        gradient = torch.autograd.grad(value.sum(), log_prob)[0]
        truth = torch.where(in_top_k, 0.0, log_prob - ref_log_prob + 1).detach()
        assert_close(gradient, truth, rtol=0, atol=1e-15)

    def test_the_choice_of_the_k_is_free(self):
        policy, reference = torch.randn(2, 5, dtype=torch.float64).log_softmax(-1)
        top = torch.tensor([3, 0])
        values = [
            kl_top_k(
                policy[top], reference[top], policy[a], reference[a], torch.tensor(a in (0, 3))
            )
            for a in range(5)
        ]
        assert_near((policy.exp() * torch.stack(values)).sum(), kl_exact(policy, reference))

    def test_no_actions_is_k1_in_value_and_all_of_them_is_exact(self):
        policy, reference = torch.randn(2, 7, 5, dtype=torch.float64).log_softmax(-1)
        drawn = policy[:, 0], reference[:, 0]
        nothing = policy[:, :0], reference[:, :0]
        nowhere = torch.zeros(7, dtype=torch.bool)
        assert_equal(kl_top_k(*nothing, *drawn, nowhere), kl_k1(*drawn))
        assert_near(kl_top_k(policy, reference, *drawn, ~nowhere), kl_exact(policy, reference))

    def test_what_was_drawn_does_not_count_inside_the_top(self):
        top, ref_top, log_prob, ref_log_prob, _ = self.arguments(3)
        inside = torch.ones(3, dtype=torch.bool)
        value = kl_top_k(top, ref_top, log_prob, ref_log_prob, inside)
        for x in (math.nan, INF, -INF):
            odd = torch.full((3,), x, dtype=torch.float64)
            assert_equal(kl_top_k(top, ref_top, odd, ref_log_prob, inside), value)
            assert_equal(kl_top_k(top, ref_top, log_prob, odd, inside), value)

    @pytest.mark.parametrize("hidden", [math.nan, INF, -INF], ids=str)
    def test_what_a_mask_hides_reaches_neither_value_nor_gradient(self, hidden):
        *clean, in_top_k = self.arguments(4, 3)
        mask = torch.rand(4, 3) < 0.5
        dirty = [torch.where(mask.reshape(4, 3, *(1,) * (x.ndim - 2)), x, hidden) for x in clean]
        clean, dirty = ([x.requires_grad_() for x in xs] for xs in (clean, dirty))
        value, plain = kl_top_k(*dirty, in_top_k, mask=mask), kl_top_k(*clean, in_top_k)
        assert_equal(value, torch.where(mask, plain, 0.0))
        gradients = torch.autograd.grad(value.sum(), dirty)
        for gradient, truth in zip(
            gradients, torch.autograd.grad(plain[mask].sum(), clean), strict=True
        ):
            assert (truth[mask] != 0).any()
            assert_equal(gradient, truth)

    def test_infinity_in_the_top_and_in_the_tail(self):
        arguments = self.arguments(4)
        top, ref_top, log_prob, ref_log_prob, _ = arguments
        ref_top[0, 1] = -INF  # the reference cannot take one of the k
        ref_log_prob[1] = -INF  # nor the action drawn, which is in the tail
        ref_log_prob[2] = -INF  # and here in the top, so that it does not matter
        inputs = [x.requires_grad_() for x in arguments[:4]]
        value = kl_top_k(*inputs, in_top_k=torch.tensor([False, False, True, False]))
        assert value.isposinf().tolist() == [True, True, False, False]
        for gradient in torch.autograd.grad(value.sum(), inputs):
            assert gradient.isfinite().all()
            assert (gradient[:2] == 0).all()
        assert (
            kl_top_k(top, torch.full_like(top, -INF), log_prob, log_prob, torch.zeros(4).bool())
            .isposinf()
            .all()
        )

    def test_nan_is_not_repaired(self):
        for i in range(4):
            arguments = self.arguments(2)
            arguments[i][0] = math.nan
            value = kl_top_k(*arguments[:4], in_top_k=torch.zeros(2, dtype=torch.bool))
            assert value.isnan().tolist() == [True, False]
        nan = torch.tensor(math.nan)
        assert kl_k1(nan, torch.tensor(-INF)).isnan()

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    def test_a_single_term_of_half_precision_is_rounded_once(self, dtype):
        # In a sum of many the roundings of the probabilities would average out.
        policy, reference = torch.randn(2, 500, 4).log_softmax(-1)[..., :1].to(dtype)
        drawn, inside = torch.zeros(500, dtype=dtype), torch.ones(500, dtype=torch.bool)
        value = kl_top_k(policy, reference, drawn, drawn, inside)
        assert value.dtype == dtype
        truth = (policy.double().exp() * (policy.double() - reference.double())).squeeze(-1)
        smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        assert_close(value.double(), truth, rtol=0.51 * torch.finfo(dtype).eps, atol=smallest)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    def test_the_gradient_of_the_tail_is_rounded_once(self, dtype):
        log_prob, ref_log_prob = (-8 * torch.rand(2, 1000)).to(dtype)
        nothing = torch.zeros(1000, 0, dtype=dtype)
        outside = torch.zeros(1000, dtype=torch.bool)
        value = kl_top_k(nothing, nothing, log_prob.requires_grad_(), ref_log_prob, outside)
        gradient = torch.autograd.grad(value.sum(), log_prob)[0]
        ratio = log_prob.detach().double() - ref_log_prob.double()
        assert_equal(value.detach(), ratio.to(dtype))
        assert_equal(gradient, (ratio + 1).to(dtype))

    def test_vmap(self):
        arguments = self.arguments(6)
        mask = torch.rand(6) < 0.5
        value = torch.vmap(lambda mask, *x: kl_top_k(*x, mask=mask))(mask, *arguments)
        assert_close(value, kl_top_k(*arguments, mask=mask))


class TestRefusals:
    @pytest.mark.parametrize("shape", [(4, 3, 1), (3,), (1, 3), (4, 1), ()], ids=str)
    def test_shapes_are_not_broadcast(self, shape):
        message = re.escape(
            f"`policy` and `reference` must have the same shape, got (4, 3) and {shape}: "
            "broadcasting would pair log-probabilities of different actions; sum over action "
            "dimensions or squeeze a trailing dimension."
        )
        with pytest.raises(ValueError, match=f"^{message}$"):
            kl_exact(torch.zeros(4, 3), torch.zeros(shape))

    def test_logits_need_a_dimension_of_actions(self):
        message = re.escape(
            "`policy` and `reference` must have their actions in the last dimension, got tensors "
            "without dimensions: for the log-probability of one action use `kl_k1`."
        )
        with pytest.raises(ValueError, match=f"^{message}$"):
            kl_exact(torch.zeros(()), torch.zeros(()))

    def test_logits_against_a_distribution(self):
        logits = torch.zeros(4, 3)
        message = (
            "^`policy` and `reference` must both be tensors of logits or both "
            "torch.distributions, got {} and {}.$"
        )
        with pytest.raises(TypeError, match=message.format("Tensor", "Categorical")):
            kl_exact(logits, Categorical(logits=logits))
        with pytest.raises(TypeError, match=message.format("Categorical", "Tensor")):
            kl_exact(Categorical(logits=logits), logits)
        with pytest.raises(TypeError, match=message.format("list", "Tensor")):
            kl_exact([0.0], logits)  # type: ignore[arg-type]

    @pytest.mark.parametrize("which", [0, 1])
    def test_actions_are_no_log_probs(self, which):
        pair = [torch.zeros(4), torch.zeros(4)]
        pair[which] = pair[which].long()
        dtypes = " and ".join(str(x.dtype) for x in pair)
        for estimator, names in (
            (kl_exact, "`policy` and `reference`"),
            (kl_k1, "`log_prob` and `ref_log_prob`"),
        ):
            message = (
                f"^{names} must be floating point, got {dtypes}: log-probabilities, not actions.$"
            )
            with pytest.raises(TypeError, match=message):
                estimator(*pair)

    @pytest.mark.parametrize(
        "mask", [torch.ones(4), torch.ones(4, 3).bool(), torch.ones(()).bool()], ids=str
    )
    def test_a_mask_that_does_not_fit_logits(self, mask):
        message = re.escape(
            "`mask` must be boolean of the shape of `policy` without its last dimension, (4,), "
            f"got {mask.dtype} of shape {tuple(mask.shape)}: True marks the steps that count."
        )
        with pytest.raises(ValueError, match=f"^{message}$"):
            kl_exact(torch.zeros(4, 3), torch.zeros(4, 3), mask=mask)

    @pytest.mark.parametrize(
        ("index", "shape", "message"),
        [
            (
                0,
                (4, 3),
                "`top_log_probs` and `top_ref_log_probs` must have the same shape, got (4, 3) and "
                "(4, 2): ",
            ),
            (
                1,
                (4, 1),
                "`top_log_probs` and `top_ref_log_probs` must have the same shape, got (4, 2) and "
                "(4, 1): ",
            ),
            (
                2,
                (4, 1),
                "`log_prob` and `ref_log_prob` must have the same shape, got (4, 1) and (4,): ",
            ),
            (
                3,
                (1,),
                "`log_prob` and `ref_log_prob` must have the same shape, got (4,) and (1,): ",
            ),
            (
                4,
                (4, 2),
                "`in_top_k` must be boolean of the shape of `log_prob`, (4,), got torch.bool of "
                "shape (4, 2): ",
            ),
        ],
    )
    def test_shapes_of_top_k_that_do_not_fit(self, index, shape, message):
        arguments = [
            torch.zeros(4, 2),
            torch.zeros(4, 2),
            torch.zeros(4),
            torch.zeros(4),
            torch.zeros(4).bool(),
        ]
        arguments[index] = torch.zeros(shape, dtype=arguments[index].dtype)
        with pytest.raises(ValueError, match="^" + re.escape(message)):
            kl_top_k(*arguments)

    @pytest.mark.parametrize(
        ("top", "drawn"), [((4, 2), (2,)), ((4,), (4,)), ((), ()), ((1, 4, 2), (4,))], ids=str
    )
    def test_the_k_stand_in_one_more_dimension(self, top, drawn):
        message = re.escape(
            "`top_log_probs` must have the shape of `log_prob` and one more dimension, of size k, "
            f"got {top} and {drawn}."
        )
        arguments = torch.zeros(top), torch.zeros(top), torch.zeros(drawn), torch.zeros(drawn)
        with pytest.raises(ValueError, match=f"^{message}$"):
            kl_top_k(*arguments, torch.zeros(drawn, dtype=torch.bool))

    def test_types_of_top_k_that_do_not_fit(self):
        top, drawn, inside = torch.zeros(4, 2), torch.zeros(4), torch.zeros(4, dtype=torch.bool)
        with pytest.raises(
            TypeError,
            match="^`top_log_probs` and `top_ref_log_probs` must be floating point, got torch.",
        ):
            kl_top_k(top.long(), top, drawn, drawn, inside)
        with pytest.raises(
            TypeError,
            match="^`log_prob` and `ref_log_prob` must be floating point, got torch.float32 an",
        ):
            kl_top_k(top, top, drawn, drawn.long(), inside)
        message = (
            r"^`in_top_k` .* \(4,\), got torch.float32 of shape \(4,\): True marks draws from the "
            r"top k.$"
        )
        with pytest.raises(ValueError, match=message):
            kl_top_k(top, top, drawn, drawn, drawn)
        message = (
            r"^`mask` .* `log_prob`, \(4,\), got torch.bool of shape \(4, 2\): True marks the "
            r"steps that count.$"
        )
        with pytest.raises(ValueError, match=message):
            kl_top_k(top, top, drawn, drawn, inside, mask=top.bool())
