"""Pairs of distributions, masks and shapes that the exact KL refuses."""

import re

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import CompositeDistribution
from torch import distributions as D
from torchrl.modules import (
    IndependentNormal,
    OneHotCategorical,
    TanhDelta,
    TanhNormal,
    TruncatedNormal,
)

from tests.functional_helpers import loc_and_scale
from torchrl_kl import kl_exact


class TestRefusals:
    def message(self, text: str) -> str:
        return f"^{re.escape(text)}$"

    @pytest.mark.parametrize(
        ("policy", "reference", "names"),
        [
            (D.Normal(0.0, 1.0), D.Cauchy(0.0, 1.0), ("Normal", "Cauchy")),
            (D.Categorical(torch.ones(3)), D.Normal(0.0, 1.0), ("Categorical", "Normal")),
            (
                *(TruncatedNormal(torch.zeros(2), torch.ones(2)) for _ in range(2)),
                ("TruncatedNormal(TruncatedNormal)",) * 2,
            ),
            (*(TanhDelta(torch.zeros(2)) for _ in range(2)), ("TanhDelta(Delta)",) * 2),
            (
                TanhNormal(torch.zeros(2), torch.ones(2)),
                IndependentNormal(torch.zeros(2), torch.ones(2)),
                ("TanhNormal(Independent(Normal))", "IndependentNormal(Normal)"),
            ),
            (
                D.Independent(D.Normal(torch.zeros(3), torch.ones(3)), 1),
                D.Independent(D.MultivariateNormal(torch.zeros(3), torch.eye(3)), 0),
                ("Independent(Normal)", "Independent(MultivariateNormal)"),
            ),
            (
                CompositeDistribution(
                    TensorDict(head=TensorDict(loc=0.0, scale=1.0)), {"head": D.Normal}
                ),
                D.Normal(0.0, 1.0),
                ("CompositeDistribution", "Normal"),
            ),
        ],
        ids=[
            *(
                "no_formula",
                "discrete_and_continuous",
                "truncated",
                "delta",
                "tanh_and_normal",
                "event_dimensions",
            ),
            "several_parts_and_one",
        ],
    )
    def test_a_pair_without_a_kl_is_named(self, policy, reference, names):
        message = self.message(
            "`policy` and `reference` must be a pair of distributions with a registered KL "
            f"divergence, got {names[0]} and {names[1]}: register one with "
            "`torch.distributions.register_kl`, or estimate it from samples with `kl_k1`."
        )
        with pytest.raises(TypeError, match=message):
            kl_exact(policy, reference)

    def test_other_parts(self):
        policy, reference = (
            CompositeDistribution(
                TensorDict({name: TensorDict(loc=0.0, scale=1.0) for name in names}),
                dict.fromkeys(names, D.Normal),
            )
            for names in (["head"], ["head", "arm"])
        )
        with pytest.raises(ValueError, match="must have the same parts, got"):
            kl_exact(policy, reference)

    @pytest.mark.parametrize(
        ("kwargs", "ref_kwargs"),
        [({}, {"high": 2.0}), ({"low": -3.0, "high": 2.0}, {"high": 2.0})],
        ids=["with_and_without_bounds", "other_bounds"],
    )
    def test_two_bijections(self, kwargs, ref_kwargs, normals):
        message = self.message(
            "`policy` and `reference` must share one bijection, got "
            "TanhNormal(Independent(Normal)) and TanhNormal(Independent(Normal)) with different "
            "transforms: give both the same parameters."
        )
        with pytest.raises(ValueError, match=message):
            kl_exact(TanhNormal(*normals[0], **kwargs), TanhNormal(*normals[1], **ref_kwargs))

    @pytest.mark.parametrize(
        "transforms", [[D.AbsTransform()], [D.TanhTransform(), D.AbsTransform()]], ids=len
    )
    def test_a_transform_that_is_not_a_bijection(self, transforms):
        folded = [D.TransformedDistribution(D.Normal(loc, 1.0), transforms) for loc in (-1.0, 1.0)]
        message = self.message(
            "`policy` and `reference` must share a bijection, got TransformedDistribution(Normal), "
            "which maps several points to one: the KL of the bases is then only an upper bound."
        )
        # Both are the same distribution: the KL is 0, not 2.
        with pytest.raises(ValueError, match=message):
            kl_exact(*folded)

    def test_batch_shapes_event_shapes_and_numbers_of_actions_are_not_broadcast(self):
        text = "broadcasting would pair different steps or actions."
        message = (
            "`policy` and `reference` must have the same batch_shape, got (4, 3) of Normal and "
            "(3,) of Normal: "
        )
        with pytest.raises(ValueError, match=self.message(message + text)):
            kl_exact(D.Normal(*loc_and_scale(4, 3)), D.Normal(*loc_and_scale(3)))
        message = (
            "`policy` and `reference` must have the same event_shape, got (2,) of "
            "MultivariateNormal and (1,) of MultivariateNormal: "
        )
        with pytest.raises(ValueError, match=self.message(message + text)):
            kl_exact(*(D.MultivariateNormal(torch.zeros(3, n), torch.eye(n)) for n in (2, 1)))
        message = (
            "`policy` and `reference` must have the same number of actions, got 4 of Categorical "
            "and 2 of OneHotCategorical: "
        )
        with pytest.raises(ValueError, match=self.message(message + text)):
            kl_exact(
                D.Categorical(logits=torch.zeros(3, 4)), OneHotCategorical(logits=torch.zeros(3, 2))
            )

    @pytest.mark.parametrize(
        "mask", [torch.ones(4), torch.ones(4, 3).bool(), torch.ones(1).bool()], ids=str
    )
    def test_a_mask_that_does_not_fit(self, mask, normals):
        message = self.message(
            "`mask` must be boolean of the shape of the batch shape of `policy`, (4,), got "
            f"{mask.dtype} of shape {tuple(mask.shape)}: True marks the steps that count."
        )
        with pytest.raises(ValueError, match=message):
            kl_exact(*(IndependentNormal(*x) for x in normals), mask=mask)
