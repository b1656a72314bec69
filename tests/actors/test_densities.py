"""Distributions whose log-probs are not those of their density: which are refused or warned of."""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from tensordict.nn import (
    CompositeDistribution,
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    distributions,
)
from torch import distributions as D
from torch import nn
from torch.distributions import Categorical, Independent, Normal, OneHotCategorical
from torch.testing import assert_close
from torchrl import modules
from torchrl.modules import (
    Delta,
    IndependentNormal,
    MaskedCategorical,
    TanhDelta,
    TanhNormal,
    TruncatedNormal,
)

from tests.actors.kinds import RANDOM, act, observed
from tests.helpers import N_OBS, probabilistic_actor
from torchrl_kl import KLConstrainedTransform, KLPenaltyLoss
from torchrl_kl.actors.reading import distributions_of
from torchrl_kl.actors.references import as_reference

NETWORKS: dict[str, Any] = {
    "loc scale": lambda: nn.Sequential(nn.Linear(N_OBS, 4), nn.Tanh(), NormalParamExtractor()),
    "probs": lambda: nn.Sequential(nn.Linear(N_OBS, 4), nn.Softmax(-1)),
    "logits": lambda: nn.Linear(N_OBS, 4),
    "param": lambda: nn.Linear(N_OBS, 2),
}


def actor_of(kind: Any, names: str = "loc scale", **options: Any) -> Any:
    """An actor with one distribution, built with the entries that its network writes."""
    keys: Any = names.split()
    return probabilistic_actor(
        TensorDictModule(NETWORKS[names](), ["observation"], keys),
        in_keys=keys,
        distribution_class=kind,
        distribution_kwargs=options,
        **RANDOM,
    )


def part_of(kind: Any, names: str = "loc scale", **options: Any) -> Any:
    """The same as a part of a composite action."""
    keys: Any = [("params", "action", name) for name in names.split()]
    return probabilistic_actor(
        TensorDictModule(NETWORKS[names](), ["observation"], keys),
        in_keys=["params"],
        out_keys=["action"],
        distribution_class=CompositeDistribution,
        distribution_kwargs={
            "distribution_map": {"action": kind},
            "extra_kwargs": {"action": options},
        },
        **RANDOM,
    )


def hidden(kind: Any) -> Any:
    """A function, of which nobody knows what it makes."""
    return lambda **params: Independent(kind(**params), 0)


def score(policy: Any, reference: Any = None) -> torch.Tensor:
    batch = act(policy, observed(50).float())
    return as_reference(policy, reference).score(batch, timed=False).log_prob


each = pytest.mark.parametrize("make", [actor_of, part_of])


@pytest.mark.parametrize("kind", [Delta, TanhDelta, distributions.Delta])
@each
def test_a_distribution_without_a_density_is_refused(make, kind):
    text = f"must have densities, got {kind.__name__}, which has all of its probability in one"
    points, known = make(kind, "param"), make(IndependentNormal)
    for policy, reference in ((points, None), (known, points), (points, known)):
        for use in (KLConstrainedTransform, KLPenaltyLoss):
            with pytest.raises(ValueError, match=text):
                use(policy, 0.1, reference=reference)
    with pytest.raises(ValueError, match=f"must have densities, got {kind.__name__}, "):
        score(make(hidden(partial(kind)), "param"))


@pytest.mark.parametrize("composite", [False, True])
def test_what_is_drawn_before_the_action_is_no_part_of_it_unless_it_is_composite(composite):
    parts = [
        TensorDictModule(nn.Linear(N_OBS, 2), ["observation"], ["param"]),
        ProbabilisticTensorDictModule(["param"], ["latent"], distribution_class=Delta),
        TensorDictModule(nn.Linear(2, 4), ["latent"], ["logits"]),
        ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=Categorical),
    ]
    actor: Any = ProbabilisticTensorDictSequential(*parts, return_composite=composite)
    found = [kind for kind, _ in distributions_of(actor)]
    assert found == ([Delta, Categorical] if composite else [Categorical])


DOUBTED = {
    "truncated": (TruncatedNormal, "loc scale", "TruncatedNormal is wrong by 0.03 nats"),
    "of tensordict": (
        partial(distributions.TruncatedNormal, a=-1.0, b=1.0),  # type: ignore[arg-type]
        "loc scale",
        "TruncatedNormal is wrong",
    ),
    "categorical": (Categorical, "probs", "Categorical built with `probs` is at least -15.9"),
    "one-hot": (modules.OneHotCategorical, "probs", "OneHotCategorical built with `probs`"),
    "one-hot of torch": (OneHotCategorical, "probs", "Categorical built with `probs`"),
    "one-hot of tensordict": (
        distributions.OneHotCategorical,
        "probs",
        "OneHotCategorical built with `probs`",
    ),
    "bernoulli": (D.Bernoulli, "probs", "Bernoulli built with `probs`"),
}


@pytest.mark.parametrize("name", DOUBTED)
@pytest.mark.parametrize("wrap", [lambda kind: kind, hidden], ids=["class", "function"])
@each
def test_log_probs_that_are_wrong_somewhere_are_warned_of_once(make, wrap, name):
    kind, names, text = DOUBTED[name]
    policy = make(wrap(kind), names)
    batch = act(policy, observed(50).float())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        reference = as_reference(policy, None)
        at_once = len(said)
        for _ in range(2):
            reference.score(batch, timed=False)
            as_reference(policy, reference)  # of a loss that takes it from the stack
    (message,) = [str(each.message) for each in said]
    assert text in message
    # Of what it is built with, only an instance tells.
    assert at_once == (wrap is not hidden and names != "probs")


class Exact(Categorical):
    """One that is right."""

    def log_prob(self, value: torch.Tensor) -> torch.Tensor:
        return self.probs.log().gather(-1, value.unsqueeze(-1)).squeeze(-1)


class Looked(Categorical):
    """One of logits whose probabilities were read, and are held since then."""

    def __init__(self, logits: torch.Tensor):
        super().__init__(logits=logits)
        assert (self.probs >= 0).all()


RIGHT = {
    "probabilities that were read": (Looked, "logits", {}),
    "Normal": (Normal, "loc scale", {}),
    "bounds": (TanhNormal, "loc scale", {"low": torch.tensor([-0.1, -3.0]), "high": 0.3}),
    "logits": (Categorical, "logits", {}),
    "one-hot": (modules.OneHotCategorical, "logits", {}),
    "masked": (partial(MaskedCategorical, mask=torch.ones(50, 4).bool()), "probs", {}),
    "its own log-prob": (Exact, "probs", {}),
}


@pytest.mark.parametrize("name", RIGHT)
@each
def test_what_is_right_is_left_alone(make, name):
    kind, names, options = RIGHT[name]
    actor = make(kind, names, **options)
    batch = act(actor, observed(50).float())
    recorded = batch["action_log_prob"].unsqueeze(-1).flatten(1).sum(-1)
    found = as_reference(actor, None).score(batch, timed=False).log_prob
    assert_close(found, recorded, rtol=0, atol=1e-3)


# A TanhNormal has a finite log-prob outside its bounds.

NARROW = {"low": -0.5, "high": torch.tensor([2.0, 0.5])}


@pytest.mark.parametrize("kind", [TanhNormal, partial(TanhNormal)])
@each
def test_a_reference_with_narrower_bounds_is_refused(make, kind):
    policy = make(kind)
    batch = act(policy, observed(500).float())
    batch["next"] = batch.select().set("reward", torch.zeros(500, 1))
    with pytest.raises(ValueError, match="'ref_log_prob' has .* the bounds .* of a TanhNormal"):
        KLConstrainedTransform(policy, 0.1, reference=make(kind, **NARROW))(batch)
    assert score(policy, make(kind, low=-2, high=2)).isfinite().all()
    # The same numbers in another precision are the same bounds.
    bounds = [{"low": each(-0.1), "high": 1.1} for each in (float, torch.tensor)]
    bounds[1]["low"] = torch.tensor(-0.1, dtype=torch.float64)
    assert score(*(make(kind, **each) for each in bounds)).isfinite().all()


@each
def test_outside_its_bounds_a_tanh_normal_has_no_density(make):
    def narrow(**params: Any) -> Any:
        return TanhNormal(**params, **NARROW)

    for kind in (hidden(narrow), lambda **params: TanhNormal(**params, **NARROW, event_dims=0)):
        policy, reference = make(IndependentNormal), make(kind)
        batch = act(policy, observed(500).float())
        log_prob = as_reference(policy, reference).score(batch, timed=False).log_prob
        low, high = torch.tensor([-0.5, -0.5]), torch.tensor([2.0, 0.5])
        slack = 0.01 * (high - low)
        above, below = batch["action"] - high, low - batch["action"]
        outside = ((above > slack) | (below > slack)).any(-1)
        inside = ((above < 0) & (below < 0)).all(-1)
        assert 0 < inside.sum() < outside.sum()
        assert (log_prob[outside] == -torch.inf).all()
        assert log_prob[inside].isfinite().all()
        batch["next"] = batch.select().set("reward", torch.zeros(500, 1))
        with pytest.raises(ValueError, match="'ref_log_prob' has .* the reference cannot take"):
            KLConstrainedTransform(policy, 0.1, reference=reference)(batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_action_that_is_rounded_to_a_bound_is_inside(dtype):
    actor = actor_of(TanhNormal, low=-0.3, high=0.3).to(dtype)
    with torch.no_grad():
        actor[0].module[0].bias[:2] = torch.tensor([3.0, -3.0])
        actor[0].module[0].weight.zero_()
    batch = act(actor, observed(100).to(dtype))
    batch["action"] = torch.tensor([0.3, -0.3], dtype=dtype).expand(100, 2)
    assert (batch["action"].double().abs() > 0.3).all()  # 0.30078125 in bfloat16
    assert as_reference(actor, None).score(batch, timed=False).log_prob.isfinite().all()


def test_bounds_that_each_step_has_are_not_compared():
    keys: Any = {"loc": "loc", "scale": "scale", "low": "low"}
    module = TensorDictModule(NETWORKS["loc scale"](), ["observation"], ["loc", "scale"])
    actor = probabilistic_actor(module, in_keys=keys, distribution_class=TanhNormal, **RANDOM)
    data = observed(5).float().set("low", torch.full((5, 2), -3.0))
    reference = as_reference(actor, None)
    assert reference.score(act(actor, data), timed=False).log_prob.isfinite().all()
