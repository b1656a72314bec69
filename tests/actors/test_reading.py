"""The log-prob of actions for every kind of actor; what an actor must leave as it was."""

from typing import Any

import pytest
import torch
from tensordict.nn import (
    TensorDictModule,
    set_composite_lp_aggregate,
)
from torch import nn
from torch.distributions import Bernoulli, Categorical, Independent, Normal
from torch.distributions import OneHotCategorical as TorchOneHot
from torch.testing import assert_close
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import (
    IndependentNormal,
    OneHotCategorical,
    TanhNormal,
)

from tests.actors.kinds import (
    KINDS,
    RANDOM,
    Doubled,
    act,
    actor_of,
    by_hand,
    chain,
    choosing,
    composite,
    gaussian,
    linear,
    masked,
    observed,
)
from tests.helpers import N_ACTIONS, N_OBS, probabilistic_actor, sequence
from torchrl_kl.actors import FrozenActor, reading
from torchrl_kl.actors.log_probs import policy_log_prob, refuse_own_log_prob
from torchrl_kl.actors.references import as_reference

EPS = torch.finfo(torch.float64).eps
EXACT = {"rtol": 0, "atol": 1e4 * EPS}  # a few hundred operations; log-probs are below 100

every_kind = pytest.mark.parametrize("kind", KINDS)


def score(reference: FrozenActor, batch: Any) -> torch.Tensor:
    return reference.score(batch, timed=False).log_prob


@every_kind
@pytest.mark.parametrize(
    ("shape", "mode"), [((), ExplorationType.RANDOM), ((2, 3), None)], ids=["step", "batch"]
)
def test_the_reference_scores_the_actions_of_the_policy(kind, shape, mode):
    policy, other = actor_of(kind), actor_of(kind, seed=1)
    batch = act(policy, observed(*shape))
    before = batch.clone()
    with set_exploration_type(mode):
        own, others = (score(as_reference(policy, each), batch) for each in (policy, other))
        asked = policy_log_prob(policy, batch, False)[0]
    for actual, actor in ((own, policy), (others, other), (asked, policy)):
        expected = by_hand(kind, actor, batch).detach()
        assert actual.shape == expected.shape == (*shape, *(3,) * (kind == "agents"))
        assert_close(actual, expected, **EXACT)
        assert not actual.requires_grad
    if kind != "its own distribution":  # which it does not draw from
        assert_close(own, FrozenActor(policy).recorded.read(batch), **EXACT)
    assert (others - own).abs().max() > 1e-2
    assert_close(batch, before, rtol=0, atol=0)


# The policy is asked.


@pytest.mark.parametrize("layer", [nn.Dropout(), nn.BatchNorm1d(N_OBS)])
def test_the_policy_is_asked_in_eval_mode_and_left_as_it_was(layer):
    actor: Any = choosing()
    actor[0].module = nn.Sequential(layer, actor[0].module)
    batch = act(actor.eval(), observed(20).float())
    actor.train()
    actor[0].module[1].eval()  # one part in another mode
    modes = [part.training for part in actor.modules()]
    assert_close(
        policy_log_prob(actor, batch, False)[0], batch["action_log_prob"], rtol=0, atol=1e-6
    )
    assert [part.training for part in actor.modules()] == modes
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied|running_mean"):
        policy_log_prob(actor, batch.set("observation", torch.zeros(20, 2)), False)
    assert [part.training for part in actor.modules()] == modes


# Actions of another kind or number would be broadcast.


def spread(kind: Any) -> Any:
    """Two choices of two that are one action."""
    return choosing(lambda logits: Independent(kind(logits=logits.unflatten(-1, (2, 2))), 1))


UNLIKE = {
    "numbers for vectors": (lambda: choosing(OneHotCategorical), choosing),
    "vectors for numbers": (choosing, lambda: choosing(TorchOneHot)),
    "a part in another encoding": (
        lambda: composite(Categorical, Categorical),
        lambda: composite(Categorical, TorchOneHot),
    ),
    "numbers for independent vectors": (
        lambda: spread(OneHotCategorical),
        lambda: spread(Categorical),
    ),
} | {
    f"{kind.__name__} {sizes}": tuple(lambda size=size, make=make: make(size) for size in sizes)
    for sizes in ((1, 2), (2, 1))
    for kind, make in {
        Bernoulli: lambda n: choosing(Bernoulli, n),
        **{k: lambda n, k=k: gaussian(k, n) for k in (Normal, IndependentNormal, TanhNormal)},
    }.items()
}


@pytest.mark.parametrize("name", UNLIKE)
@pytest.mark.parametrize("shape", [(), (1,), (N_ACTIONS,), (2, N_ACTIONS)], ids=str)
def test_actions_of_another_kind_or_number_are_refused(name, shape):
    policy, reference = (make() for make in UNLIKE[name])
    batch = act(policy, observed(*shape).float())
    assert score(FrozenActor(policy), batch).shape == shape
    with pytest.raises(ValueError, match="policy and reference must have the same actions, got"):
        score(as_reference(policy, reference), batch)


# What an actor must leave as it was.


def reading_actor(*modules: Any) -> Any:
    return probabilistic_actor(
        sequence(*modules), in_keys=["logits"], distribution_class=Categorical, **RANDOM
    )


def overwriting() -> Any:
    scale = TensorDictModule(lambda x: 3 * x - 1, ["observation"], ["observation"])
    return reading_actor(scale, linear())


def test_a_policy_that_overwrites_what_it_reads_is_refused():
    for reference in (None, FrozenActor(overwriting())):
        with pytest.raises(ValueError, match="must leave what it reads .* writes .'observation'."):
            as_reference(overwriting(), reference)
    policy = choosing()
    batch = act(policy, observed(5).float())
    reference: Any = as_reference(policy, overwriting())  # which alone does so
    logits = reference.actor.module[0].module[1].module(3 * batch["observation"] - 1)
    expected = logits.log_softmax(-1).gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)
    assert_close(score(reference, batch), expected.detach(), rtol=0, atol=1e-6)


def test_parameters_that_its_own_modules_write_are_not_read():
    assert reading.read_keys(composite()) == ["observation"]
    assert reading.written_params(choosing()) == ["logits"]
    assert reading.read_keys(masked()) == ["observation", "action_mask"]
    assert reading.written_params(masked()) == ["logits"]


# One row per error.


class HasDistOnly(nn.Module):
    def get_dist(self, tensordict):
        return Categorical(tensordict["logits"])


def without(key: str) -> Any:
    batch = act(choosing(), observed(5).float()).exclude(key)
    return lambda: score(FrozenActor(choosing()), batch)


def lazy(layer: nn.Module) -> Any:
    return reading_actor(TensorDictModule(layer, ["observation"], ["logits"]))


def sharing() -> Any:
    with set_composite_lp_aggregate(True):
        return FrozenActor(chain())


NO_DIST = r"`actor` must be a probabilistic actor .*, got \w+: .*ProbabilisticActor.*CausalLMActor"
ERRORS: dict[str, tuple[Any, Any, str]] = {
    "module": (lambda: FrozenActor(nn.Linear(3, 2)), TypeError, NO_DIST),
    "no log-prob": (lambda: FrozenActor(HasDistOnly()), TypeError, NO_DIST),
    "lazy weights": (
        lambda: FrozenActor(lazy(nn.LazyBatchNorm1d(affine=False))),
        ValueError,
        r"uninitialised weights \(module.*run it once on data first",
    ),
    "weights on the meta device": (
        lambda: as_reference(lazy(nn.Linear(3, 2, device="meta")), None),
        ValueError,
        r"`actor` has weights on the meta device.*build FrozenActor\(actor\), load its weights",
    ),
    "log-probs that share a key": (
        sharing,
        ValueError,
        r"under another key, got \['sample_log_prob', 'sample_log_prob'\]",
    ),
    "no action": (without("action"), KeyError, "'action' is not in the data"),
    "no observation": (without("observation"), KeyError, "observation"),
    "own log-prob": (
        lambda: refuse_own_log_prob(Doubled(*gaussian().module)),
        ValueError,
        "got Doubled with its own `log_prob`, which losses",
    ),
    "several distributions": (
        lambda: reading.dist_module_of(chain()),
        ValueError,
        "must have one ProbabilisticTensorDictModule, got 2",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    call, error, message = ERRORS[name]
    with pytest.raises(error, match=message):
        call()
