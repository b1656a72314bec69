"""The estimators "exact" and "top_k": what is measured, stored and refused.

Actors and envs are in float64, where all paths agree to 1e-9.
"""

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    NormalParamExtractor,
    TensorDictModule,
)
from torch import nn
from torch.distributions import Categorical, Normal, kl_divergence
from torch.testing import assert_close
from torchrl.collectors.utils import split_trajectories
from torchrl.data import Binary, LazyTensorStorage, ReplayBuffer
from torchrl.envs import Transform, check_env_specs
from torchrl.modules import IndependentNormal, MaskedCategorical

from tests.helpers import (
    N_ACTIONS,
    N_OBS,
    WalkEnv,
    collect,
    compose,
    make_actor,
    memory_of,
    moved,
    play,
    policy,
    probabilistic_actor,
    sharp,
    with_transforms,
    without_kl,
)
from torchrl_kl import (
    KLConstrainedTransform,
    KLDivergenceTransform,
    KLKeys,
    ReferenceModelLogProbTransform,
    TopKActor,
)
from torchrl_kl.transforms.estimates import make_estimate

both = pytest.mark.parametrize("estimator", ["exact", "top_k"])
any_place = pytest.mark.parametrize("place", ["env", "batch"])


def stack(actor: Any, estimator: Any, **kwargs) -> Any:
    return KLConstrainedTransform(actor, 0.1, estimator=estimator, **kwargs)


def parts(actor: Any, estimator: Any, **kwargs) -> Any:
    keys = {name: kwargs[name] for name in kwargs if name == "keys"}
    return compose(
        ReferenceModelLogProbTransform(actor, estimator=estimator, **kwargs),
        KLDivergenceTransform(estimator=estimator, **keys),
    )


def as_policy(actor: Any, estimator: str, k: int = 2) -> Any:
    return TopKActor(actor, k) if estimator == "top_k" else actor


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    # In float32 a logit of order 1 is off by some 1e-6 after 9 steps of an LSTM.
    bound = 1e-9 if actual.dtype == torch.float64 else 1e-4
    assert_close(actual, expected, rtol=0, atol=bound)


class Forbids(Transform):
    """An env that forbids one action, another one in each state."""

    def _call(self, next_tensordict):
        seen = next_tensordict["observation"].abs().sum(-1, keepdim=True)
        return next_tensordict.set("mask", torch.arange(N_ACTIONS) != (seen * 10).long() % 4)

    def _reset(self, tensordict, tensordict_reset):
        return self._call(tensordict_reset)

    def transform_observation_spec(self, observation_spec: Any):
        shape = torch.Size((*observation_spec.shape, N_ACTIONS))
        observation_spec["mask"] = Binary(N_ACTIONS, shape=shape, dtype=torch.bool)
        return observation_spec


def categorical_actor(distribution: Any = Categorical, params: Any = ("logits",)) -> Any:
    net = TensorDictModule(nn.Linear(N_OBS, N_ACTIONS), ["observation"], ["logits"])
    options: Any = {"distribution_class": distribution, "return_log_prob": True}
    return sharp(probabilistic_actor(net, in_keys=params, **options), scale=0.7).double()


def make(kind: str) -> Any:
    if kind == "masked":
        return categorical_actor(MaskedCategorical, {"logits": "logits", "mask": "mask"})
    if kind == "lstm":  # TorchRL's primer of its state is float32
        return make_actor(kind)
    return make_actor(agents=True).double() if kind == "agents" else make_actor(kind).double()


def env_for(kind: str, *transforms: Any) -> Any:
    discrete, n_agents = not kind.endswith("normal"), 3 if kind == "agents" else None
    needs = {"lstm": lambda: memory_of(make(kind)), "masked": lambda: [Forbids()]}
    dtype = torch.float32 if kind == "lstm" else torch.float64
    env = WalkEnv((2,), discrete=discrete, n_agents=n_agents, dtype=dtype, longest=9)
    transforms = (*needs.get(kind, list)(), *transforms)
    return with_transforms(env, *transforms) if transforms else env


def kl_from(kind: str, estimator: str, batch: Any, q: Any) -> torch.Tensor:
    """The estimate of each step from what the policy recorded and the reference's parameters."""
    holder = batch["agents"] if kind == "agents" else batch
    if estimator == "k3":
        log_ratio = (holder["action_log_prob"] - q).unsqueeze(-1)
        return torch.expm1(-log_ratio) + log_ratio
    if kind.endswith("normal"):  # a bijection that both share changes no KL
        p = Normal(holder["loc"], holder["scale"])
        return kl_divergence(p, Normal(*q)).sum(-1, keepdim=True)
    allowed = batch.get("mask", torch.ones(N_ACTIONS).bool())
    q = q.masked_fill(~allowed, -60.0).log_softmax(-1)
    if estimator == "exact":
        p = holder["logits"].masked_fill(~allowed, -60.0).log_softmax(-1)
        return (p.exp() * (p - q)).sum(-1, keepdim=True)
    top, action = holder["top_k"], holder["action"].unsqueeze(-1)
    exact = (top["log_probs"].exp() * (top["log_probs"] - q.gather(-1, top["actions"]))).sum(-1)
    drawn = holder["action_log_prob"] - q.gather(-1, action).squeeze(-1)
    return (exact + torch.where(top["in_top_k"], 0.0, drawn)).unsqueeze(-1)


EXACT = [("exact", kind) for kind in ("categorical", "tanh_normal", "masked", "agents", "lstm")]
TOP_K = [("top_k", kind) for kind in ("categorical", "masked", "agents", "lstm")]
K3 = [("k3", kind) for kind in ("categorical", "tanh_normal", "agents", "lstm")]


@pytest.mark.parametrize(("estimator", "kind"), EXACT + TOP_K + K3)
def test_every_data_path_gives_the_same_numbers(estimator, kind):
    reward: Any = ("agents", "reward") if kind == "agents" else "reward"
    place = ("next", "agents") if kind == "agents" else ("next",)
    actor, options = make(kind), {"keys": KLKeys(reward=reward)}
    env = env_for(kind, stack(actor, estimator, **options))
    check_env_specs(env)
    behaviour = as_policy(moved(actor), estimator)
    (batch,) = collect(env, behaviour, frames=24, batches=1)
    inside = batch[(*place, "kl_estimate")]
    if kind != "lstm":
        with torch.no_grad():
            q = actor[0].module(batch[(*place[1:], "observation")])
            q = actor.log_prob(batch.clone()) if estimator == "k3" else q
        close(inside, kl_from(kind, estimator, batch, q))
    bare = without_kl(batch)
    close(stack(actor, estimator, **options)(bare)[(*place, "kl_estimate")], inside)
    # Flat and shuffled, as in a replay buffer: a recurrent reference reads the recorded states.
    flat = bare.set("expected", inside)
    flat.update({name: batch[name] for name in batch.keys() if name.startswith("ref_")})
    flat = flat.reshape(-1)[torch.randperm(24)]
    transform = stack(actor, estimator, **options)
    buffer = ReplayBuffer(storage=LazyTensorStorage(24), batch_size=16, transform=transform)
    buffer.extend(flat)
    sample: Any = buffer.sample()
    close(sample[(*place, "kl_estimate")], sample["expected"])
    # Padding: a padded scale is 0, a padded action mask allows nothing.
    padded = split_trajectories(without_kl(batch))
    counts = padded["collector", "mask"]
    after = stack(actor, estimator, time_dim=-1, **options)(padded)[(*place, "kl_estimate")]
    assert not counts.all()
    assert (after[~counts] == 0).all()
    close(after[counts].flatten().sort().values, inside.flatten().sort().values)


def test_padding_is_not_a_distribution_where_torch_checks_its_parameters():
    actor = make_actor("normal", distribution_kwargs={"validate_args": True}).double()
    (batch,) = collect(env_for("normal"), moved(actor), frames=24, batches=1)
    padded = split_trajectories(batch)
    counts = padded["collector", "mask"]
    with pytest.raises(ValueError, match="Expected parameter scale"):
        actor.build_dist_from_params(padded)
    assert (stack(actor, "exact")(padded)["next", "kl_estimate"][~counts] == 0).all()
    fake = play(env_for("normal"), actor).detach().apply(torch.zeros_like)
    for make_it in (stack, parts):
        assert (make_it(actor, "exact")(fake)["next", "kl_estimate"] == 0).all()


@pytest.mark.parametrize("k", [1, 3, N_ACTIONS])
def test_top_k_has_the_exact_mean_in_every_state_and_less_variance_than_k1(k):
    """Each state with each action, as a TopKActor records it."""
    reference, behaviour = make("categorical"), moved(make("categorical"))
    observation = torch.randn(50, 1, N_OBS, dtype=torch.float64).expand(-1, N_ACTIONS, -1)
    with torch.no_grad():
        p, q = (each[0].module(observation).log_softmax(-1) for each in (behaviour, reference))
    action, order = torch.arange(N_ACTIONS).expand(50, -1), p.argsort(-1, descending=True)[..., :k]
    log_prob = p.gather(-1, action[..., None]).squeeze(-1)
    entries = {"observation": observation, "action": action, "action_log_prob": log_prob}
    batch = TensorDict(entries, batch_size=(50, N_ACTIONS))
    top: Any = {"log_probs": p.gather(-1, order), "actions": order}
    top["in_top_k"] = (order == action[..., None]).any(-1)
    batch["top_k"], batch["next"] = top, TensorDict(batch_size=(50, N_ACTIONS))
    after, exact = parts(reference, "top_k")(batch)["next"], (p.exp() * (p - q)).sum(-1)
    variance = {}
    for name in ("kl", "kl_estimate"):
        estimate = after[name].squeeze(-1)
        close((log_prob.exp() * estimate).sum(-1), exact[:, 0])
        variance[name] = (log_prob.exp() * (estimate - exact).square()).sum(-1).mean()
    assert variance["kl_estimate"] < variance["kl"]
    if k == N_ACTIONS:
        close(after["kl_estimate"].squeeze(-1), exact)


# What it costs.


@both
def test_the_reference_is_evaluated_once(estimator):
    transform, calls = stack(categorical_actor(), estimator), []
    transform.reference.actor[0].module.register_forward_hook(lambda *_: calls.append(1))
    behaviour = as_policy(moved(categorical_actor()), estimator)
    batch = play(env_for("categorical"), behaviour)
    transform(batch)  # the first time, it looks at the weights in a pass of its own
    calls.clear()
    transform(batch)
    assert len(calls) == 1
    play(env_for("categorical", transform), behaviour, 7)
    assert len(calls) == 1 + 7


@pytest.mark.parametrize("make_it", [stack, parts], ids=["stack", "parts"])
@both
def test_a_batch_drops_what_is_no_longer_needed(estimator, make_it):
    actor = make("masked")
    raw = play(env_for("masked"), as_policy(moved(actor), estimator))
    batch = make_it(actor, estimator)(raw)
    second = parts(actor, estimator, keys=KLKeys.named("second"))
    with pytest.raises(KeyError, match="it dropped them: put both into one Compose"):
        second(batch)
    both_of = compose(make_it(actor, estimator), second)(raw)
    assert set(both_of.keys()) == set(batch.keys())  # the last one drops them
    close(both_of["next", "second_kl_estimate"], batch["next", "kl_estimate"])
    assert set(raw.keys()) - set(batch.keys()) == {"logits" if estimator == "exact" else "top_k"}
    assert not any(name.startswith("_") for name in (*batch.keys(), *batch["next"].keys()))
    assert not any(value.requires_grad for value in batch["next"].values(True, True))


# A reference with another distribution than the policy.


class Tempered(Categorical):
    """A categorical distribution with an option that its parameters do not show."""

    def __init__(self, logits: torch.Tensor, temperature: float = 1.0):
        super().__init__(logits=logits / temperature)


def actor_of(distribution: Any, seed: int = 0, **options: Any) -> Any:
    discrete = distribution is Tempered
    names: Any = ["logits"] if discrete else ["loc", "scale"]
    head = nn.Identity() if discrete else NormalParamExtractor()
    net = TensorDictModule(nn.Sequential(nn.Linear(N_OBS, 4), head), ["observation"], names)
    kinds: Any = {"distribution_class": distribution, "distribution_kwargs": options}
    actor = probabilistic_actor(net, in_keys=names, return_log_prob=True, **kinds)
    return sharp(actor, seed).double()


PAIRS: Any = {
    "temperature": (actor_of(Tempered, temperature=2.0), actor_of(Tempered, 1, temperature=0.5)),
    "independent": (actor_of(IndependentNormal, tanh_loc=False), actor_of(Normal, 1)),
}


@any_place
@pytest.mark.parametrize("make_it", [stack, parts], ids=["stack", "parts"])
@pytest.mark.parametrize("kind", PAIRS)
def test_each_distribution_is_built_by_its_own_actor(kind, make_it, place):
    actor, reference = PAIRS[kind]
    transform = make_it(actor, "exact", reference=reference)
    env = WalkEnv((3,), discrete=kind == "temperature", dtype=torch.float64)
    if place == "env":
        batch = play(with_transforms(env, transform), actor)
    else:
        batch = transform(play(env, actor))
    with torch.no_grad():
        own, other = (each[0].module(batch["observation"]) for each in (actor, reference))
    if kind == "temperature":
        expected = kl_divergence(Tempered(own, 2.0), Tempered(other, 0.5)).unsqueeze(-1)
    else:
        expected = kl_divergence(Normal(*own), Normal(*other)).sum(-1, keepdim=True)
    close(batch["next", "kl_estimate"], expected)


# What it cannot measure.


@pytest.mark.parametrize(
    ("estimator", "text"),
    [
        ("exact", r"logits.* is not in the data: let the policy record .*TopKActor"),
        ("top_k", r"\('top_k', 'actions'\) is not in the data: collect with TopKActor"),
    ],
)
@any_place
def test_what_the_policy_did_not_record(estimator, place, text):
    behaviour = TopKActor(policy(), 2) if estimator == "exact" else policy()
    transform = stack(make_actor(), estimator)
    batch = play(WalkEnv((2,)), behaviour)
    env = with_transforms(WalkEnv((2,)), stack(make_actor(), estimator))
    with pytest.raises(KeyError, match=text):
        play(env, behaviour) if place == "env" else transform(batch)


@both
def test_what_the_reference_did_not_keep(estimator):
    unlike = compose(
        ReferenceModelLogProbTransform(make_actor()),
        KLDivergenceTransform(estimator=estimator),
    )
    with pytest.raises(KeyError, match="'_estimate' is not in the data: .*same `estimator`"):
        unlike(play(WalkEnv((2,)), as_policy(policy(), estimator)))


class TwoDistributions(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = make_actor(), make_actor()


def test_what_exact_cannot_compare():
    with pytest.raises(ValueError, match="`estimator` must be one of .*, got 'k9'"):
        stack(make_actor(), "k9")
    with pytest.raises(ValueError, match="`estimator` must be one of .*, got 'k9'"):
        KLDivergenceTransform(estimator="k9")  # type: ignore[arg-type]
    text = "`actor` must have one ProbabilisticTensorDictModule, got 2 in TwoDistrib"
    with pytest.raises(ValueError, match=text):
        make_estimate("exact", TwoDistributions(), KLKeys().resolve())
    batch = play(WalkEnv((2,)), policy())
    batch["logits"] = torch.zeros(2, 12, N_ACTIONS + 1)
    with pytest.raises(ValueError, match=r"'logits' of .* must .*\(2, 12, 5\) and \(2, 12, 4\)"):
        stack(make_actor(), "exact")(batch)
    net = TensorDictModule(nn.Linear(N_OBS, N_ACTIONS), ["observation"], ["scores"])
    names: Any = {"logits": "scores"}
    other = probabilistic_actor(
        net, in_keys=names, distribution_class=Categorical, return_log_prob=True
    )
    unlike = stack(make_actor(), "exact", reference=other)
    with pytest.raises(KeyError, match="policy and reference must name.* have scores"):
        unlike(play(WalkEnv((2,)), policy()))


def test_what_top_k_cannot_compare():
    model = nn.Sequential(nn.Linear(N_OBS, 6), nn.Unflatten(-1, (2, 3)))  # two choices among three
    net, options = TensorDictModule(model, ["observation"], ["logits"]), {"in_keys": ["logits"]}
    actor = probabilistic_actor(
        net, distribution_class=Categorical, return_log_prob=True, **options
    )
    batch = TopKActor(actor, 2)(TensorDict(observation=torch.randn(5, N_OBS), batch_size=5))
    batch["next"] = TensorDict(batch_size=5)
    with pytest.raises(ValueError, match=r"one choice per step, got .*\(5, 2\) .*\(5, 2\) .*\(5,"):
        ReferenceModelLogProbTransform(actor, estimator="top_k")(batch)
