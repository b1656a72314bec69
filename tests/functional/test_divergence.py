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

from tests.functional_helpers import loc_and_scale, randn
from torchrl_kl import kl_exact
from torchrl_kl.functional.distributions import split_log_ratio

INF = math.inf
assert_equal = partial(assert_close, rtol=0, atol=0)
assert_near = partial(assert_close, rtol=0, atol=1e-12)


def normal_kl(policy, reference) -> torch.Tensor:
    """KL between normal distributions (loc, scale), from the two moments of the policy."""
    (loc, scale), (ref_loc, ref_scale) = policy, reference
    return (ref_scale / scale).log() + (scale**2 + (loc - ref_loc) ** 2) / (2 * ref_scale**2) - 0.5


def test_the_parts_of_a_log_ratio_are_zero_where_it_is_not_finite():
    log_prob = torch.tensor([-1.0, -2.0, -INF, -1.0])
    ref_log_prob = torch.tensor([-3.0, -INF, -1.0, -0.5])
    kept, ratio, infinite = split_log_ratio(
        log_prob, ref_log_prob, torch.tensor([True, True, True, False])
    )
    assert kept.tolist() == [-1, 0, 0, 0]
    assert ratio.tolist() == [2, 0, 0, 0]
    assert infinite.tolist() == [False, True, False, False]


@pytest.fixture
def logits():
    return randn(2, 6, 4).unbind(0)


class TestContinuous:
    def test_a_normal_gives_one_value_per_dimension(self, normals):
        assert_near(kl_exact(*(D.Normal(*x) for x in normals)), normal_kl(*normals))

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("masked", [False, True])
    def test_half_precision_is_computed_in_float32(self, masked, dtype):
        """Of nearly equal Normals: the eps of bfloat16 is 0.008, many times their KL."""
        loc, scale = (x.to(dtype) for x in loc_and_scale(50, 3))
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
            lambda x: D.Independent(D.Normal(*x), 1),
            lambda x: D.MultivariateNormal(x[0], scale_tril=x[1].diag_embed()),
            lambda x: TanhNormal(*x),
            lambda x: TanhNormal(*x, safe_tanh=False),
            lambda x: TanhNormal(*x, low=torch.tensor(-3.0), high=torch.tensor([1.0, 2.0, 5.0])),
            lambda x: D.TransformedDistribution(
                D.Independent(D.Normal(*x), 1), [D.TanhTransform(), D.ExpTransform()]
            ),
            lambda x: D.Independent(D.LogNormal(*x), 1),
        ],
        ids=[
            "independent_normal",
            "independent",
            "multivariate",
            "tanh",
            "tanh_unsafe",
            "bounds",
            "two",
            "log_normal",
        ],
    )
    def test_actions_of_several_dimensions(self, make, normals):
        kl = kl_exact(*(make(x) for x in normals))
        assert_near(kl, normal_kl(*normals).sum(-1))

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

    def test_independent_of_several_and_of_no_dimensions(self):
        first, second = loc_and_scale(2, 3, 4), loc_and_scale(2, 3, 4)
        truth = normal_kl(first, second)
        for n, expected in ((0, truth), (2, truth.sum((1, 2))), (3, truth.sum())):
            kl = kl_exact(*(D.Independent(D.Normal(*x), n) for x in (first, second)))
            assert_near(kl, expected)

    def test_the_gradient_is_that_of_the_closed_form(self, normals):
        loc = normals[0][0].requires_grad_()
        gradient = torch.autograd.grad(kl_exact(*(TanhNormal(*x) for x in normals)).sum(), loc)[0]
        truth = torch.autograd.grad(normal_kl(*normals).sum(), loc)[0]
        assert_near(gradient, truth)

    def test_a_transformed_pair_with_a_kl_of_its_own(self):
        policy, reference = (D.Gumbel(*loc_and_scale(4)) for _ in range(2))
        assert policy.transforms != reference.transforms
        assert_equal(kl_exact(policy, reference), D.kl_divergence(policy, reference))


class TestCategorical:
    def truth(self, policy: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
        return D.kl_divergence(D.Categorical(logits=policy), D.Categorical(logits=reference))

    @pytest.mark.parametrize("kind", [D.Categorical, D.OneHotCategorical, OneHotCategorical])
    def test_from_logits_and_from_probabilities(self, kind, logits):
        truth = self.truth(*logits)
        assert_near(kl_exact(*(kind(logits=x) for x in logits)), truth)
        assert_near(kl_exact(*(kind(probs=x.softmax(-1)) for x in logits)), truth)

    def test_one_hot_or_not_the_actions_are_the_same(self, logits):
        kl = kl_exact(OneHotCategorical(logits=logits[0]), D.OneHotCategorical(logits=logits[1]))
        assert_near(kl, self.truth(*logits))

    def test_independent_categoricals_are_summed(self):
        logits = randn(2, 5, 3, 4).unbind(0)
        kl = kl_exact(*(D.Independent(D.Categorical(logits=x), 1) for x in logits))
        assert_near(kl, self.truth(*logits).sum(-1))

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

    def test_a_masked_policy_of_a_free_reference_and_the_other_way_round(self, logits):
        masked = MaskedCategorical(logits=logits[0], mask=torch.tensor([True, True, False, True]))
        free = D.Categorical(logits=logits[1])
        kl = kl_exact(masked, free)
        assert_near(kl, D.kl_divergence(masked, free))
        assert kl_exact(free, masked).isposinf().all()

    def test_indices_must_be_the_same(self, logits):
        indices, others = torch.tensor([[0, 1]] * 6), torch.tensor([[0, 2]] * 6)
        policy = MaskedCategorical(logits=logits[0], indices=indices)
        kl = kl_exact(policy, MaskedCategorical(logits=logits[1], indices=indices.clone()))
        assert_near(kl, self.truth(logits[0][:, :2], logits[1][:, :2]))
        message = (
            "^`policy` and `reference` must be over the same actions, got MaskedCategorical and "
            "{} with different `indices`: give both the same `indices`, or a mask.$"
        )
        with pytest.raises(ValueError, match=message.format("MaskedCategorical")):
            kl_exact(policy, MaskedCategorical(logits=logits[1], indices=others))
        with pytest.raises(ValueError, match=message.format("Categorical")):
            kl_exact(policy, D.Categorical(logits=logits[1][:, :2]))
        with pytest.raises(
            ValueError, match="got Categorical and MaskedCategorical with different `indices`"
        ):
            kl_exact(D.Categorical(logits=logits[1][:, :2]), policy)

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
        probs = torch.tensor([0.0, 0.6590461, 1.0])
        kl = kl_exact(D.Bernoulli(probs=probs), D.Bernoulli(probs=probs.flip(0)))
        assert_equal(kl, torch.tensor([INF, 0.0, INF]))

    def test_one_action(self):
        single = [D.Categorical(logits=randn(3, 1)), D.Categorical(probs=torch.ones(3, 1).double())]
        for policy in single:
            for reference in single:
                assert_equal(kl_exact(policy, reference), torch.zeros(3).double())


@pytest.mark.parametrize("hidden", [math.nan, INF, -INF], ids=str)
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

    def test_hidden_normals_have_no_gradient_of_their_own(self, hidden, normals):
        parameters = [
            torch.where(self.mask.unsqueeze(-1), x, hidden).requires_grad_() for x in normals[0]
        ]
        policy = D.Independent(D.Normal(*parameters, validate_args=False), 1, validate_args=False)
        value = kl_exact(policy, IndependentNormal(*normals[1]), mask=self.mask)
        for gradient in torch.autograd.grad(value.sum(), parameters):
            assert (gradient[~self.mask] == 0).all()
            assert (gradient[self.mask] != 0).all()
        # The policy itself is not written to.
        assert (policy.base_dist.loc.isfinite().all(-1) == self.mask).all()

    def test_a_pair_of_two_kinds(self, hidden):
        loc = torch.where(self.mask, randn(4), hidden)
        policy, reference = (
            D.Laplace(loc, torch.ones(4), validate_args=False),
            D.Normal(torch.zeros(4), torch.ones(4)),
        )
        value = kl_exact(policy, reference, mask=self.mask)
        assert_equal(value[self.mask], D.kl_divergence(policy, reference)[self.mask])
        assert value[~self.mask].tolist() == [0, 0]

    @pytest.mark.parametrize(
        "make",
        [
            lambda loc: D.Gumbel(loc, torch.arange(1.0, 5.0), validate_args=False),
            lambda loc: D.Independent(
                D.Normal(loc, torch.ones(4), validate_args=False), 0, validate_args=False
            ),
        ],
        ids=["gumbel", "independent_of_no_dimensions"],
    )
    def test_the_mask_is_handed_on(self, make, hidden):
        loc = torch.where(self.mask, randn(4).float(), hidden)
        value = kl_exact(make(loc), make(torch.zeros(4)), mask=self.mask)
        assert (value[self.mask] > 0).all()
        assert value[~self.mask].tolist() == [0, 0]

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

    def test_hidden_categoricals(self, hidden):
        logits = randn(2, 4, 3, 5)
        truth = [D.Independent(D.Categorical(logits=x), 1) for x in logits]
        hidden_logits = torch.where(self.mask.reshape(4, 1, 1), logits, hidden)
        dists = [
            D.Independent(D.Categorical(logits=x, validate_args=False), 1) for x in hidden_logits
        ]
        value = kl_exact(*dists, mask=self.mask)
        assert_equal(value, torch.where(self.mask, kl_exact(*truth), 0.0))

    def test_hidden_probabilities(self, hidden):
        # The probabilities are set unchanged: Categorical would have normalized them.
        dists = [D.Categorical(probs=torch.rand(4, 5)) for _ in range(2)]
        plain = kl_exact(*dists)
        params = [
            torch.where(self.mask.unsqueeze(-1), dist.probs, hidden).requires_grad_()
            for dist in dists
        ]
        for dist, param in zip(dists, params, strict=True):
            vars(dist).update(probs=param, _param=param)
        value = kl_exact(*dists, mask=self.mask)
        assert_equal(value, torch.where(self.mask, plain, 0.0))
        for gradient in torch.autograd.grad(value.sum(), params):
            assert (gradient[~self.mask] == 0).all()
            assert (gradient[self.mask] != 0).all()


@pytest.mark.parametrize("name", ["scale_tril", "covariance_matrix", "precision_matrix"])
def test_a_mask_leaves_a_covariance_shared_by_all_steps_alone(name):
    # Three steps of three dimensions: rows of the one matrix must not be taken for steps.
    scale_tril = torch.eye(3).double() + torch.rand(3, 3).double().tril()
    known: Any = {name: scale_tril if name == "scale_tril" else scale_tril @ scale_tril.T}
    policy, reference = (D.MultivariateNormal(randn(3, 3), **known) for _ in range(2))
    mask = torch.tensor([True, False, True])
    masked = kl_exact(policy, reference, mask=mask)
    expected = torch.where(mask, kl_exact(policy, reference), 0.0)
    # The condition of the matrix, below 100, times the roundings of a triangular solve of three.
    assert_close(masked, expected, rtol=1e-13, atol=0)
    assert (expected[mask] > 0).all()


def test_a_mask_leaves_a_low_rank_covariance_shared_by_all_steps_alone():
    factors, diagonal = randn(2, 4, 3), torch.rand(4).double() + 0.5  # rank 3, as many as steps
    locs = randn(2, 3, 4)
    pair = [D.LowRankMultivariateNormal(*x, diagonal) for x in zip(locs, factors, strict=True)]
    mask = torch.tensor([True, False, True])
    expected = torch.where(mask, kl_exact(*pair), 0.0)
    assert_close(kl_exact(*pair, mask=mask), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
def test_invalid_scales_on_padding_reach_neither_value_nor_gradient(value):
    clean, other = loc_and_scale(2, 3), loc_and_scale(2, 3)
    rows = torch.tensor([[True], [False]])
    loc, scale = clean[0].requires_grad_(), torch.where(rows, clean[1], value).requires_grad_()
    normal = D.Normal(loc, scale, validate_args=False)
    policy = D.Independent(normal, 1, validate_args=False)
    kl = kl_exact(policy, IndependentNormal(*other), mask=rows.squeeze(-1))
    truth = normal_kl(clean, other).sum(-1)
    assert_near(kl, torch.where(rows.squeeze(-1), truth, 0.0))
    for gradient in torch.autograd.grad(kl.sum(), [loc, scale]):
        assert (gradient[0] != 0).all()
        assert (gradient[1] == 0).all()


def test_a_mask_leaves_bounds_of_the_action_alone(normals):
    # They have no batch dimension.
    bounds = {"low": torch.tensor([-1.0, -2.0, -5.0]), "high": torch.ones(3)}
    mask = torch.tensor([True, False, True, False])
    value = kl_exact(*(TanhNormal(*pair, **bounds) for pair in normals), mask=mask)
    assert_near(value, torch.where(mask, normal_kl(*normals).sum(-1), 0.0))
