"""The estimator "exact" where the reference has another distribution than the policy."""

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    CompositeDistribution,
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import nn
from torch.distributions import Categorical, Independent, Laplace, Normal, kl_divergence
from torch.testing import assert_close
from torchrl.modules import IndependentNormal, TanhNormal

from tests.helpers import (
    N_ACTIONS,
    N_OBS,
    WalkEnv,
    compose,
    make_actor,
    play,
    probabilistic_actor,
    sharp,
    with_transforms,
)
from tests.transforms.estimated import stack
from torchrl_kl import KLDivergenceTransform, ReferenceModelLogProbTransform, kl_exact


class Tempered(Categorical):
    """A categorical distribution with an option that its parameters do not show."""

    def __init__(self, logits: torch.Tensor, temperature: float = 1.0):
        super().__init__(logits=logits / temperature)


def actor_of(distribution: Any, seed: int = 0, **options: Any) -> Any:
    discrete = distribution is Tempered
    head = nn.Identity() if discrete else NormalParamExtractor()
    bound = nn.Tanh() if distribution is TanhNormal else nn.Identity()  # it would saturate
    names: Any = ["logits"] if discrete else ["loc", "scale"]
    layers = nn.Sequential(nn.Linear(N_OBS, N_ACTIONS), bound, head)
    net = TensorDictModule(layers, ["observation"], names)
    actor = probabilistic_actor(
        net,
        in_keys=names,
        distribution_class=distribution,
        distribution_kwargs=options,
        return_log_prob=True,
    )
    return sharp(actor, seed)


def params_of(actor: Any, batch: Any) -> Any:
    with torch.no_grad():
        return actor[0].module(batch["observation"])


PAIRS = {
    "temperature": (actor_of(Tempered, temperature=2.0), actor_of(Tempered, 1, temperature=0.5)),
    "laplace": (actor_of(Normal), actor_of(Laplace, 1)),
    "independent": (actor_of(IndependentNormal, tanh_loc=False), actor_of(Normal, 1)),
}


def expected_kl(kind: str, batch: Any) -> torch.Tensor:
    own, other = (params_of(actor, batch) for actor in PAIRS[kind])
    if kind == "temperature":
        p, q = (own / 2.0).log_softmax(-1), (other / 0.5).log_softmax(-1)
        return (p.exp() * (p - q)).sum(-1, keepdim=True)
    other_class = Laplace if kind == "laplace" else Normal
    return kl_divergence(Normal(*own), other_class(*other)).sum(-1, keepdim=True)


@pytest.mark.parametrize("place", ["env", "batch"])
@pytest.mark.parametrize("kind", PAIRS)
def test_each_distribution_is_built_by_its_own_actor(kind, place):
    policy, reference = PAIRS[kind]
    transform = stack(policy, "exact", reference=reference)
    env = WalkEnv((3,), discrete=kind == "temperature")
    if place == "env":
        batch = play(with_transforms(env, transform), policy)
    else:
        recorded = play(env, policy)
        recorded["collector", "mask"] = torch.arange(12).expand(3, 12) < 9
        batch = transform(recorded)[:, :9]  # without padding
    assert_close(batch["next", "kl_estimate"], expected_kl(kind, batch), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("policy", "reference", "unlike"),
    [
        (actor_of(Normal), actor_of(Laplace), "distribution_class"),
        (*PAIRS["temperature"], "temperature"),
        (actor_of(TanhNormal, low=torch.tensor(-1.0)), actor_of(TanhNormal, low=-2.0), "low"),
    ],
)
def test_separate_parts_know_one_kind_only(policy, reference, unlike):
    with pytest.raises(ValueError, match=f"`reference` must have .*, got another {unlike}: use KL"):
        ReferenceModelLogProbTransform(policy, reference=reference, estimator="exact")
    ReferenceModelLogProbTransform(policy, reference=reference, estimator="k3")


def test_separate_parts_take_a_reference_of_the_same_kind():
    bounds: Any = {"distribution_kwargs": {"low": -2.0}}
    policy, reference = (make_actor("tanh_normal", seed=seed, **bounds) for seed in (0, 1))
    parts = compose(
        ReferenceModelLogProbTransform(policy, reference=reference, estimator="exact"),
        KLDivergenceTransform(actor=policy, estimator="exact"),
    )
    recorded = play(WalkEnv((3,), discrete=False), policy)
    expected = stack(policy, "exact", reference=reference)(recorded)["next", "kl_estimate"]
    assert_close(parts(recorded)["next", "kl_estimate"], expected)


class Learned(ProbabilisticTensorDictModule):
    """A part with a temperature that is learned."""

    def __init__(self):
        super().__init__(
            ["logits"], ["action"], distribution_class=Categorical, return_log_prob=True
        )
        self.temperature = nn.Parameter(torch.ones(()))

    def get_dist(self, tensordict):
        return Categorical(logits=tensordict["logits"] / self.temperature)


def learning() -> Any:
    linear = sharp(nn.Linear(N_OBS, N_ACTIONS))
    network = TensorDictModule(linear, ["observation"], ["logits"])
    return ProbabilisticTensorDictSequential(*[network, Learned()])


@pytest.mark.parametrize("place", ["env", "batch"])
@pytest.mark.parametrize("moves", ["policy", "reference"])
def test_a_temperature_that_changes(place, moves):
    actor = learning()
    transform = stack(actor, "exact", reference=learning())
    env = WalkEnv((3,))
    around = with_transforms(env, transform)
    temperatures = {"policy": 1.0, "reference": 1.0, moves: 2.0}
    with torch.no_grad():
        actor.module[1].temperature.fill_(2.0)
        if moves == "reference":
            transform.update_reference(actor)
            actor.module[1].temperature.fill_(1.0)
    batch = play(around, actor) if place == "env" else transform(play(env, actor).detach())
    logits = params_of(actor.module, batch)
    p, q = ((logits / temperatures[of]).log_softmax(-1) for of in ("policy", "reference"))
    expected = (p.exp() * (p - q)).sum(-1, keepdim=True)
    assert_close(batch["next", "kl_estimate"], expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="got another temperature: use KLConstrainedTransform"):
        ReferenceModelLogProbTransform(actor, estimator="exact")


class Sharper(ProbabilisticTensorDictSequential):
    """Chooses from sharper distributions than its parts do."""

    def build_dist_from_params(self, tensordict):
        return Categorical(logits=2 * tensordict["logits"])


@pytest.mark.parametrize("estimator", ["exact", "top_k"])
@pytest.mark.parametrize("which", ["policy", "reference"])
def test_an_actor_that_builds_its_distribution_itself_is_refused(estimator, which):
    plain = make_actor()
    sharper = Sharper(*make_actor().module)
    actors = (sharper, plain) if which == "policy" else (plain, sharper)
    with pytest.raises(TypeError, match="got Sharper with its own build_dist_from_params, which"):
        stack(actors[0], estimator, reference=actors[1])
    stack(actors[0], "k3", reference=actors[1])


def test_a_part_of_a_composite_may_be_independent_or_not():
    torch.manual_seed(0)
    loc, scale, logits = torch.randn(2, 4, 3), 0.5 + torch.rand(2, 4, 3), torch.randn(2, 4, 5)

    def composite(i: int, steer: Any) -> CompositeDistribution:
        params = TensorDict(
            steer=TensorDict(loc=loc[i], scale=scale[i]), gear=TensorDict(logits=logits[i])
        ).auto_batch_size_(1)
        return CompositeDistribution(params, {"steer": steer, "gear": Categorical})

    def joint_normal(loc: torch.Tensor, scale: torch.Tensor) -> Independent:
        return Independent(Normal(loc, scale), 1)

    steer = kl_divergence(Normal(loc[0], scale[0]), Normal(loc[1], scale[1])).sum(-1)
    gear = kl_divergence(Categorical(logits=logits[0]), Categorical(logits=logits[1]))
    for kinds in ((Normal, joint_normal), (joint_normal, Normal), (Normal, Normal)):
        kl = kl_exact(composite(0, kinds[0]), composite(1, kinds[1]))
        assert_close(kl, steer + gear)
