"""The exact KL between distributions: torch's, TorchRL's, and masks."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import CompositeDistribution
from torch import distributions as D
from torch.testing import assert_close
from torchrl.modules import (
    IndependentNormal,
    MaskedCategorical,
    MaskedOneHotCategorical,
    OneHotCategorical,
    TanhNormal,
)

from torchrl_kl.functional import kl_exact

INF = math.inf
assert_equal = partial(assert_close, rtol=0, atol=0)
assert_near = partial(assert_close, rtol=0, atol=1e-12)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def loc_and_scale(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    return randn(*shape), 0.5 + torch.rand(*shape, dtype=torch.float64)


@pytest.fixture
def normals():
    return loc_and_scale(4, 3), loc_and_scale(4, 3)


def normal_kl(policy, reference) -> torch.Tensor:
    """KL between normal distributions (loc, scale), from the two moments of the policy."""
    (loc, scale), (ref_loc, ref_scale) = policy, reference
    return (ref_scale / scale).log() + (scale**2 + (loc - ref_loc) ** 2) / (2 * ref_scale**2) - 0.5


@pytest.fixture
def logits():
    return randn(2, 6, 4).unbind(0)


class TestContinuous:
    @pytest.mark.parametrize("masked", [False, True])
    def test_half_precision_is_computed_in_float32(self, masked):
        """Of nearly equal Normals: the eps of bfloat16 is 0.008, many times their KL."""
        loc, scale = (x.bfloat16() for x in loc_and_scale(50, 3))
        policy, reference = (loc, scale), (loc * 1.02, scale * 1.02)
        mask = torch.ones(50, dtype=torch.bool) if masked else None
        pair = (D.Independent(D.Normal(*x), 1) for x in (policy, reference))
        kl = kl_exact(*pair, mask=mask)
        expected = normal_kl(*([x.double() for x in one] for one in (policy, reference))).sum(-1)
        assert kl.dtype == torch.float32
        # 3 sums of terms below 4, each rounded a few times.
        assert_close(kl.double(), expected, rtol=0, atol=3 * 4 * 8 * 2**-24)
        tanh = [TanhNormal(*one, event_dims=1) for one in (policy, reference)]
        assert_close(kl_exact(*tanh, mask=mask), kl, rtol=0, atol=0)

    @pytest.mark.parametrize(
        "make",
        [
            lambda x: IndependentNormal(*x),
            lambda x: D.MultivariateNormal(x[0], scale_tril=x[1].diag_embed()),
            lambda x: TanhNormal(*x),
            lambda x: TanhNormal(*x, low=torch.tensor(-3.0), high=torch.tensor([1.0, 2.0, 5.0])),
            lambda x: D.TransformedDistribution(
                D.Independent(D.Normal(*x), 1), [D.TanhTransform(), D.ExpTransform()]
            ),
            lambda x: D.Independent(D.LogNormal(*x), 1),
        ],
        ids=["independent_normal", "multivariate", "tanh", "bounds", "two", "log_normal"],
    )
    def test_actions_of_several_dimensions(self, make, normals):
        """And a mask, which must leave bounds of the action, without batch dimensions, alone."""
        policy, reference = (make(x) for x in normals)
        kl, mask = normal_kl(*normals).sum(-1), torch.tensor([True, False, True, False])
        assert_near(kl_exact(policy, reference), kl)
        assert_near(kl_exact(policy, reference, mask=mask), torch.where(mask, kl, 0.0))

    def test_the_parts_of_a_composite_are_summed(self, normals):
        def make(loc, scale):
            params = TensorDict(head=TensorDict(loc=loc[0], scale=scale[0]), batch_size=[])
            params["arm"] = TensorDict(loc=loc[1:], scale=scale[1:])
            return CompositeDistribution(params, {"head": D.Normal, "arm": D.Normal})

        value = kl_exact(*(make(*params) for params in normals))
        assert_near(value, normal_kl(*normals).sum())

    def test_tanh_normal_agrees_with_its_own_log_prob(self):
        # By quadrature over the action: 4000 midpoints of an integrand that vanishes at both ends.
        policy, reference = (
            TanhNormal(randn(1) / 2, 0.3 + torch.rand(1).double() / 5, low=torch.tensor(-2.0))
            for _ in range(2)
        )
        actions = (3 * (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000 - 2).unsqueeze(-1)
        log_prob, ref_log_prob = policy.log_prob(actions), reference.log_prob(actions)
        integral = (log_prob.exp() * (log_prob - ref_log_prob)).sum() * 3 / 4000
        assert_close(kl_exact(policy, reference), integral, rtol=1e-5, atol=0)

    def test_tanh_normal_per_dimension_and_after_an_update(self, normals):
        policy, reference = (TanhNormal(*x, event_dims=0) for x in normals)
        assert_near(kl_exact(policy, reference), normal_kl(*normals))
        policy.update(*loc_and_scale(4, 3))
        assert_close(kl_exact(policy, reference), normal_kl((policy.loc, policy.scale), normals[1]))


class TestCategorical:
    def truth(self, policy: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
        return D.kl_divergence(D.Categorical(logits=policy), D.Categorical(logits=reference))

    @pytest.mark.parametrize("kind", [D.Categorical, D.OneHotCategorical, OneHotCategorical])
    def test_from_logits_and_from_probabilities(self, kind, logits):
        truth = self.truth(*logits)
        assert_near(kl_exact(*(kind(logits=x) for x in logits)), truth)
        assert_near(kl_exact(*(kind(probs=x.softmax(-1)) for x in logits)), truth)

    @pytest.mark.parametrize("kind", [MaskedCategorical, MaskedOneHotCategorical])
    def test_masked_actions(self, kind, logits):
        possible = torch.tensor([True, True, False, True])
        policy, reference = (x.clone().requires_grad_() for x in logits)
        kl = kl_exact(kind(logits=policy, mask=possible), kind(logits=reference, mask=possible))
        assert_near(kl, self.truth(policy[:, possible], reference[:, possible]))
        # NaN with the registered KL.
        for gradient in torch.autograd.grad(kl.sum(), [policy, reference]):
            assert gradient.isfinite().all()
            assert (gradient[:, possible] != 0).all()
            assert (gradient[:, ~possible] == 0).all()

    def test_probabilities_of_zero_are_zero(self):
        some, full = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.25, 0.25, 0.5])
        policy, reference = some.clone().requires_grad_(), full.clone().requires_grad_()
        kl = kl_exact(D.Categorical(probs=policy), D.Categorical(probs=reference))
        assert_close(kl, torch.tensor(math.log(2)))
        for gradient in torch.autograd.grad(kl, [policy, reference]):
            assert gradient.isfinite().all()
        reference = D.Categorical(probs=some)
        assert reference.logits.isfinite().all()  # clamped by torch
        assert kl_exact(D.Categorical(probs=full), reference) == INF

    def test_small_probabilities_are_not_clamped(self):
        rare = torch.tensor([1 - 1e-12, 1e-12])
        kl = kl_exact(D.Categorical(logits=torch.zeros(2)), D.Categorical(probs=rare))
        assert_close(kl, torch.tensor(0.5 * -math.log(1e-12) - math.log(2)))
        # Zero as a float32 probability, and inf with the registered KL.
        rare = torch.tensor([0.0, -200.0])
        kl = kl_exact(D.Categorical(logits=torch.zeros(2)), D.Categorical(logits=rare))
        assert_close(kl, torch.tensor(100 - math.log(2)))

    def test_bernoullis_are_categoricals_of_two_actions(self):
        # A logit of 0.659 is its own probability; from 17 on, the registered KL is inf in float32.
        logits = torch.tensor([-90.0, -2.0, 0.0, 0.6590461, 5.0, 40.0])
        policy, reference = torch.cartesian_prod(logits, logits).T.clone().requires_grad_()
        truth = self.truth(*(torch.stack([x, 0 * x], -1).double() for x in (policy, reference)))
        kl = kl_exact(D.Bernoulli(logits=policy), D.Bernoulli(logits=reference))
        assert_close(kl, truth.float())
        pairs = [torch.autograd.grad(x.sum(), [policy, reference]) for x in (kl, truth)]
        for gradient, wanted in zip(*pairs, strict=True):
            assert_close(gradient, wanted, atol=1e-4, rtol=1e-4)
        # Once both kinds of parameters were read; a logit that is its own probability.
        for dtype, fixed in ((torch.float32, 0.6590459942817688), (torch.bfloat16, 0.66015625)):
            logit = torch.tensor([fixed, 1.0], dtype=dtype, requires_grad=True)
            drawn = D.Bernoulli(logits=logit)
            drawn.sample()
            kl_exact(drawn, D.Bernoulli(logits=torch.zeros(2, dtype=dtype))).sum().backward()
            chance = logit.detach().float().sigmoid()
            expected = (chance * (1 - chance) * logit.detach().float()).to(dtype)
            assert_close(logit.grad, expected)
        drawn = D.Bernoulli(logits=torch.tensor([math.nan, 1.0]), validate_args=False)
        assert drawn.probs[0].isnan()  # of which the other step must not be taken for one
        kl = kl_exact(drawn, D.Bernoulli(logits=torch.zeros(2)))[1]
        assert_close(kl, self.truth(torch.tensor([1.0, 0.0]), torch.zeros(2)))
        probs = torch.tensor([0.0, 0.6590461, 1.0])
        kl = kl_exact(D.Bernoulli(probs=probs), D.Bernoulli(probs=probs.flip(0)))
        assert_equal(kl, torch.tensor([INF, 0.0, INF]))


@pytest.mark.parametrize("hidden", [math.nan, -INF], ids=str)
class TestMasks:
    mask = torch.tensor([True, False, True, False])

    @pytest.mark.parametrize(
        "make",
        [
            lambda x: D.Independent(D.Normal(*x, validate_args=False), 1, validate_args=False),
            lambda x: D.TransformedDistribution(
                D.Independent(D.Normal(*x, validate_args=False), 1),
                D.TanhTransform(),
                validate_args=False,
            ),
            lambda x: D.Independent(
                D.Beta(x[0].exp(), x[1], validate_args=False), 1, validate_args=False
            ),
            lambda x: D.Independent(
                D.Bernoulli(logits=x[0] * x[1], validate_args=False), 1, validate_args=False
            ),
        ],
        ids=["independent", "transformed", "beta", "bernoulli"],
    )
    def test_hidden_parameters_reach_neither_value_nor_gradient(self, make, hidden, normals):
        clean = [x.requires_grad_() for pair in normals for x in pair]
        rows = self.mask.unsqueeze(-1)
        dirty = [torch.where(rows, x.detach(), hidden).requires_grad_() for x in clean]
        plain = kl_exact(make(clean[:2]), make(clean[2:]))
        value = kl_exact(make(dirty[:2]), make(dirty[2:]), mask=self.mask)
        assert_close(value, torch.where(self.mask, plain, 0.0), rtol=0, atol=1e-15)
        gradients = torch.autograd.grad(value.sum(), dirty)
        for gradient, truth in zip(
            gradients, torch.autograd.grad(plain[self.mask].sum(), clean), strict=True
        ):
            assert (truth[self.mask] != 0).any()
            assert_close(gradient[self.mask], truth[self.mask], rtol=0, atol=1e-15)

    def test_a_pair_of_two_kinds(self, hidden):
        policy = D.Laplace(torch.where(self.mask, randn(4), hidden), 1.0, validate_args=False)
        reference = D.Normal(torch.zeros(4).double(), 1.0)
        value = kl_exact(policy, reference, mask=self.mask)
        plain = D.kl_divergence(policy, reference)
        assert_equal(value, torch.where(self.mask, plain, 0.0))

    def test_a_mask_reaches_all_parts_of_a_composite(self, hidden):
        def make(loc, logits):
            params = TensorDict(
                steer=TensorDict(loc=loc, scale=torch.ones(4, 2).double()),
                gear=TensorDict(logits=logits),
                batch_size=[4],
            )
            kinds = {"steer": D.Normal, "gear": D.Categorical}
            extra = {name: {"validate_args": False} for name in kinds}
            return CompositeDistribution(params, kinds, extra_kwargs=extra)

        clean = [randn(4, 2), randn(4, 3)]
        rows = self.mask.unsqueeze(-1)
        dirty = [torch.where(rows, x, hidden).requires_grad_() for x in clean]
        reference = make(randn(4, 2), randn(4, 3))
        value = kl_exact(make(*dirty), reference, mask=self.mask)
        plain = kl_exact(make(*clean), reference)
        assert_close(value, torch.where(self.mask, plain, 0.0), rtol=0, atol=1e-15)
        gradient = torch.autograd.grad(value.sum(), dirty[0])[0]  # Categorical normalizes logits
        assert (gradient[~self.mask] == 0).all()
        assert (gradient[self.mask] != 0).all()


@pytest.mark.parametrize(
    "make",
    [
        lambda loc, factor: D.MultivariateNormal(loc, factor @ factor.mT),
        lambda loc, factor: D.LowRankMultivariateNormal(loc, factor, torch.ones(3).double()),
    ],
    ids=["full", "low_rank"],
)
def test_a_mask_leaves_a_covariance_shared_by_all_steps_alone(make):
    # Three steps of three dimensions: rows of the one matrix must not be taken for steps.
    factors = torch.eye(3).double() + torch.rand(2, 3, 3).double().tril()
    policy, reference = (make(randn(3, 3), factor) for factor in factors)
    mask = torch.tensor([True, False, True])
    expected = torch.where(mask, kl_exact(policy, reference), 0.0)
    assert_close(kl_exact(policy, reference, mask=mask), expected, rtol=1e-12, atol=0)
    assert (expected[mask] > 0).all()


def composite(**kinds: Any) -> CompositeDistribution:
    params = TensorDict({name: TensorDict(loc=0.0, scale=1.0) for name in kinds})
    return CompositeDistribution(params, kinds)


def masked_categorical(*columns: int) -> MaskedCategorical:
    return MaskedCategorical(logits=torch.zeros(1, 3), indices=torch.tensor([columns]))


class TestRefusals:
    normal, zeros, ones = D.Normal(0.0, 1.0), torch.zeros(3), torch.ones(3)

    @pytest.mark.parametrize(
        ("policy", "reference", "names"),
        [
            (normal, D.Cauchy(0.0, 1.0), "Normal and Cauchy"),
            (D.Categorical(ones), normal, "Categorical and Normal"),
            (
                TanhNormal(zeros, ones),
                IndependentNormal(zeros, ones),
                r"Tanh.*Normal\)\) and In",
            ),
            (
                D.Independent(D.Normal(zeros, ones), 1),
                D.Independent(D.MultivariateNormal(zeros, torch.eye(3)), 0),
                r"Independent\(Normal\) and Independent\(MultivariateNormal\)",
            ),
            (composite(head=D.Normal), normal, "CompositeDistribution and Normal"),
        ],
    )
    def test_a_pair_without_a_kl_is_named(self, policy, reference, names):
        with pytest.raises(TypeError, match=f"registered KL divergence, got {names}.*: register"):
            kl_exact(policy, reference)

    @pytest.mark.parametrize(
        ("policy", "reference", "message"),
        [
            (composite(head=D.Normal), composite(head=D.Normal, arm=D.Normal), "the same parts, g"),
            (
                TanhNormal(zeros, ones),
                TanhNormal(zeros, ones, high=torch.tensor(2.0)),
                "must share one bijection",
            ),
            (
                D.TransformedDistribution(
                    D.Normal(-1.0, 1.0), fold := [D.TanhTransform(), D.AbsTransform()]
                ),
                D.TransformedDistribution(D.Normal(1.0, 1.0), fold),
                r"must share a bijection, got TransformedDistribution\(Normal\), which maps sev",
            ),
            (D.Normal(zeros, ones), normal, r"same batch_shape, got \(3,\) of Normal and \(\) of"),
            (
                D.MultivariateNormal(zeros, torch.eye(3)),
                D.MultivariateNormal(zeros[:1], torch.eye(1)),
                r"the same event_shape, got \(3,\) of MultivariateNormal and \(1,\) of Multi",
            ),
            (
                D.Categorical(torch.ones(3)),
                OneHotCategorical(logits=torch.zeros(2)),
                "same number of actions, got 3 of Categorical and 2 of OneHotCategorical: broadc",
            ),
            (masked_categorical(0, 1), masked_categorical(0, 2), "over the same actions, got Mas"),
            (D.Categorical(torch.ones(1, 2)), masked_categorical(0, 1), "got Categorical and Mas"),
        ],
    )
    def test_pairs_that_do_not_fit(self, policy, reference, message):
        with pytest.raises(ValueError, match=message):
            kl_exact(policy, reference)

    def test_a_mask_that_does_not_fit(self, normals):
        message = r"`mask` .* of the batch shape of `policy`, \(4,\), got torch.float32 of shape"
        with pytest.raises(ValueError, match=message):
            kl_exact(*(IndependentNormal(*x) for x in normals), mask=torch.ones(4))
