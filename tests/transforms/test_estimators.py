"""The estimators "exact" and "top_k": what is measured, stored and fed."""

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import Categorical
from torch.testing import assert_close
from torchrl.data import Categorical as CategoricalSpec
from torchrl.data import Composite
from torchrl.envs import SerialEnv

from tests.helpers import (
    N_ACTIONS,
    N_OBS,
    SpyController,
    WalkEnv,
    assert_within,
    collect,
    make_actor,
    moved,
    play,
    probabilistic_actor,
    rounding,
    sharp,
    total,
    ulps,
    with_transforms,
)
from tests.transforms.estimated import (
    K,
    as_policy,
    both,
    env_for,
    make,
    parts,
    rounding_of,
    stack,
)
from torchrl_kl import (
    KLKeys,
    TopKActor,
)


def log_probs_of(actor, observation) -> torch.Tensor:
    """Log-probs of all actions, from the bare network."""
    with torch.no_grad():
        return actor[0].module(observation).log_softmax(-1)


def enumerated_kl(policy, reference, observation) -> torch.Tensor:
    p, q = (log_probs_of(actor, observation) for actor in (policy, reference))
    return (p.exp() * (p - q)).sum(-1, keepdim=True)


def test_exact_is_the_enumerated_kl_of_every_state():
    reference, policy = make_actor(), moved(make_actor())
    batch = play(with_transforms(WalkEnv((20,)), stack(reference, "exact")), policy)
    expected = enumerated_kl(policy, reference, batch["observation"])
    bound = rounding_of("categorical", "exact", policy, reference, batch)
    assert_within(batch["next", "kl_estimate"], expected, bound)
    assert batch["next", "kl_estimate"].min() > 0
    assert (batch["next", "kl"] - expected).abs().max() > 0.1


def every_action(policy, observation: torch.Tensor, k: int) -> Any:
    """A batch (n_states, n_actions) as a TopKActor records it: each state with each action."""
    log_probs = log_probs_of(policy, observation)[:, None].expand(-1, N_ACTIONS, -1)
    action = torch.arange(N_ACTIONS).expand(log_probs.shape[:2])
    order = log_probs.argsort(-1, descending=True)[..., :k]
    top = TensorDict(
        log_probs=log_probs.gather(-1, order),
        actions=order,
        in_top_k=(order == action[..., None]).any(-1),
    )
    return TensorDict(
        observation=observation[:, None].expand(-1, N_ACTIONS, -1),
        action=action,
        action_log_prob=log_probs.gather(-1, action[..., None]).squeeze(-1),
        top_k=top,
        next=TensorDict(),
    ).auto_batch_size_(2)


@pytest.mark.parametrize("k", range(1, N_ACTIONS + 1))
def test_top_k_has_the_exact_mean_in_every_state_and_less_variance_than_k1(k):
    reference, policy = make_actor(), moved(make_actor())
    observation = torch.randn(50, N_OBS, generator=torch.Generator().manual_seed(0))
    batch = every_action(policy, observation, k)
    after = parts(reference, "top_k")(batch)["next"]
    probs = batch["action_log_prob"].exp()
    exact = enumerated_kl(policy, reference, observation).squeeze(-1)
    # A mean over the actions of log-ratios: every log-prob is rounded, and so is every weight,
    # whose share is multiplied by a ratio. All weights add up to 2 at most: top and tail.
    rounded = rounding(policy, batch) + rounding(reference, batch)
    ratio = after["kl"].abs().squeeze(-1)
    bound = 2 * (rounded.amax(-1) * (1 + ratio.amax(-1)))
    variance = {}
    for name in ("kl", "kl_estimate"):
        estimate = after[name].squeeze(-1)
        assert_within((probs * estimate).sum(-1), exact, bound)
        variance[name] = (probs * (estimate - exact[:, None]).square()).sum(-1)
    assert variance["kl_estimate"].mean() < variance["kl"].mean()
    if k == N_ACTIONS:
        each = after["kl_estimate"].squeeze(-1)
        assert_within(each, exact[:, None].expand(-1, N_ACTIONS), bound)


def test_what_a_policy_records_of_its_top_k_gives_an_unbiased_estimate():
    reference, policy = make_actor(), moved(make_actor())
    batch = play(
        with_transforms(WalkEnv((300,)), stack(reference, "top_k")), TopKActor(policy, K), 20
    )
    exact = enumerated_kl(policy, reference, batch["observation"])
    deviation = (batch["next", "kl_estimate"] - exact).double()
    of_k1 = (batch["next", "kl"] - exact).double()
    assert abs(deviation.mean()) < 5 * deviation.std() / deviation.numel() ** 0.5
    assert 0 < deviation.var() < of_k1.var()
    expected = every_action(policy, batch["observation"].flatten(0, 1), K)
    expected = expected[torch.arange(len(expected)), batch["action"].flatten()]["top_k"]
    for name in ("actions", "in_top_k"):
        assert_close(batch["top_k", name].flatten(0, 1), expected[name], rtol=0, atol=0)
    bounds = [
        rounding(policy, few, lambda known: known["logits"].log_softmax(-1).topk(K).values)
        for few in batch.split(10)
    ]
    recorded = batch["top_k", "log_probs"].flatten(0, 1)
    assert_within(recorded, expected["log_probs"], torch.cat(bounds).flatten(0, 1))
    assert 0 < expected["in_top_k"].float().mean() < 1


# What it costs.


class Witness(nn.Linear):
    """Counts its calls; each copy on its own."""

    calls = 0

    def forward(self, input):
        self.calls += 1
        return super().forward(input)


def witness_actor() -> Any:
    net = TensorDictModule(Witness(N_OBS, N_ACTIONS), ["observation"], ["logits"])
    return sharp(
        probabilistic_actor(
            net, in_keys=["logits"], distribution_class=Categorical, return_log_prob=True
        )
    )


@both
def test_the_reference_is_evaluated_once(estimator):
    transform = stack(witness_actor(), estimator)
    witness = transform.reference.actor[0].module
    policy = as_policy(moved(make_actor()), estimator)
    batch = play(WalkEnv((2,)), policy)
    transform(batch)  # the first time, it looks at the weights in a pass of its own
    assert witness.calls == 2
    transform(batch)
    assert witness.calls == 2 + 1
    play(with_transforms(WalkEnv((2,)), transform), policy, 7)
    assert witness.calls == 2 + 1 + 7


N_TOKENS = 500


def token_actor() -> Any:
    net = TensorDictModule(nn.Linear(N_OBS, N_TOKENS), ["observation"], ["logits"])
    return sharp(
        probabilistic_actor(
            net, in_keys=["logits"], distribution_class=Categorical, return_log_prob=True
        )
    )


class TokenEnv(WalkEnv):
    """Many actions; which of four moves an action makes is its number modulo 4."""

    def __init__(self, batch_size=()):
        super().__init__(batch_size)
        self.action_spec = Composite(
            action=CategoricalSpec(N_TOKENS, shape=batch_size), shape=batch_size
        )

    def _step(self, tensordict):
        return super()._step(tensordict.copy().set("action", tensordict["action"] % N_ACTIONS))


def widest(batch) -> int:
    """Numbers per step of the largest entry."""
    return max(value.numel() for value in batch.values(True, True)) // batch.numel()


@pytest.mark.parametrize("place", ["env", "postproc"])
def test_storage_is_of_the_order_of_k(place):
    actor = token_actor()
    transform = stack(actor, "top_k")
    env = with_transforms(TokenEnv((2,)), transform) if place == "env" else TokenEnv((2,))
    policy = TopKActor(moved(actor, scale=0.1), 8)
    stored: list[int] = []

    def postproc(batch):
        stored.append(widest(batch))
        return transform(batch) if place == "postproc" else batch

    (batch,) = collect(env, policy, frames=8, batches=1, postproc=postproc)
    assert set(stored) == {8}
    assert widest(batch) == (8 if place == "env" else N_OBS)
    assert (batch["next", "kl_estimate"] != 0).all()


@pytest.mark.parametrize(
    ("make", "keeps"),
    [
        (stack, False),
        (parts, False),
        (lambda *given: parts(*given, keep_dist_params=True), True),
    ],
    ids=["stack", "parts", "parts that keep it"],
)
@both
def test_postproc_drops_what_is_no_longer_needed(estimator, make, keeps):
    actor = make_actor()
    policy = as_policy(moved(actor), estimator)
    (raw,) = collect(WalkEnv((2,)), policy, frames=8, batches=1)
    transform = make(actor, estimator)
    (batch,) = collect(WalkEnv((2,)), policy, frames=8, batches=1, postproc=transform)
    used = {"logits"} if estimator == "exact" else {"top_k"}
    assert set(raw.keys()) - set(batch.keys()) == (set() if keeps else used)
    assert used <= set(raw.keys())
    assert not any(name.startswith("_") for name in (*batch.keys(), *batch["next"].keys()))
    if keeps:
        key = "logits" if estimator == "exact" else ("top_k", "log_probs")
        assert_close(batch[key], raw[key], rtol=0, atol=0)


def test_what_the_env_says_of_actions_is_not_dropped():
    actor = make("masked")
    after = stack(actor, "exact")(play(env_for("masked", actor), moved(actor)))
    assert "action_mask" in after.keys()
    assert "logits" not in after.keys()


# What is done with it.


@both
def test_the_controller_is_fed_the_estimate_and_the_reward_is_penalized_with_k1(estimator):
    controller = SpyController(0.3)
    actor = make_actor()
    transform = stack(actor, estimator, controller, update_every=1)
    env = with_transforms(WalkEnv((8,)), transform)
    batch = play(env, as_policy(moved(actor), estimator), 20)["next"]
    ended = batch["done"]
    task_reward, penalty = batch["task_reward"], 0.3 * batch["kl"]
    assert_within(batch["reward"], task_reward - penalty, ulps(task_reward, penalty))
    n, told = total(controller)
    assert n == ended.sum()
    sums = batch["episode_kl"][ended]
    # Each mean that it is told of is rounded in proportion to the sums that it pools.
    assert_within(torch.tensor(told), sums.double().sum(), ulps(sums).sum())
    one, two = batch["kl_estimate"][:, 0], batch["kl_estimate"][:, 1]
    longer = ~ended[:, 0]
    assert_within(batch["episode_kl"][:, 1][longer], (one + two)[longer], ulps(one, two)[longer])
    assert (batch["kl_estimate"] - batch["kl"]).abs().max() > 0.1


@both
def test_a_random_policy_gives_zeros_and_is_not_counted(estimator):
    controller = SpyController()
    env = with_transforms(
        SerialEnv(2, WalkEnv), stack(make_actor(), estimator, controller, update_every=1)
    )
    batch = play(env)["next"]
    assert batch["done"].any()
    assert (batch["kl_estimate"] == 0).all()
    assert controller.calls == []


@both
def test_no_gradient_is_measured(estimator):
    batch = play(WalkEnv((2,)), as_policy(moved(make_actor()), estimator))
    assert batch["action_log_prob"].requires_grad
    after = stack(make_actor(), estimator)(batch)["next"]
    assert not any(after[name].requires_grad for name in ("kl", "kl_estimate", "reward"))


@both
def test_keys_can_be_named(estimator):
    actor = make_actor()
    policy = (
        TopKActor(moved(actor), K, top_k_key=("best", "few"))
        if estimator == "top_k"
        else moved(actor)
    )
    named = stack(
        actor,
        estimator,
        keys=KLKeys(top_k=("best", "few"), ref_log_prob=("anchor", "lp"), kl_estimate="measured"),
    )
    batch = play(WalkEnv((2,)), policy)
    after = named(batch)
    plain = batch.copy()
    if estimator == "top_k":
        plain["top_k"] = plain.pop("best")["few"]
    expected = stack(actor, estimator)(plain)
    assert_close(after["next", "measured"], expected["next", "kl_estimate"], rtol=0, atol=0)
    assert set(after["next", "anchor"].keys()) == {"lp"}
