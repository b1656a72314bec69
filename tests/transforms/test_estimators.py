"""The estimators "exact" and "top_k": measured from records, the same in every data path."""

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import Categorical, Normal, OneHotCategorical, kl_divergence
from torch.testing import assert_close
from torchrl.collectors import Collector
from torchrl.collectors.utils import split_trajectories
from torchrl.data import Binary, Composite, LazyTensorStorage, ReplayBuffer
from torchrl.data import Categorical as CategoricalSpec
from torchrl.envs import SerialEnv, Transform, check_env_specs
from torchrl.modules import MaskedCategorical
from torchrl.modules import OneHotCategorical as TorchRLOneHotCategorical

from tests.helpers import (
    N_ACTIONS,
    N_OBS,
    SpyController,
    WalkEnv,
    assert_within,
    collect,
    compose,
    make_actor,
    memory_of,
    moved,
    play,
    probabilistic_actor,
    rounding,
    sharp,
    total,
    ulps,
    with_transforms,
    without_kl,
)
from tests.laws.transform_laws import TransformLaws, WorkerLaws
from torchrl_kl import (
    KLConstrainedTransform,
    KLDivergenceTransform,
    KLKeys,
    ReferenceModelLogProbTransform,
    TopKActor,
)

SCRATCH = "_ref_log_prob_dist"
K = 2
both = pytest.mark.parametrize("estimator", ["exact", "top_k"])


class DistributionLaws(TransformLaws):
    estimator: Any

    def before(self):
        return [ReferenceModelLogProbTransform(self.reference(), estimator=self.estimator)]


class TestExactLaws(DistributionLaws, WorkerLaws):
    estimator, writes, drops = (
        "exact",
        frozenset({"kl", "kl_estimate"}),
        frozenset({"logits", SCRATCH}),
    )

    def make(self, seed=0):
        return KLDivergenceTransform(estimator="exact", actor=make_actor())


class TestTopKLaws(DistributionLaws):
    estimator, writes, drops = (
        "top_k",
        frozenset({"kl", "kl_estimate"}),
        frozenset({"top_k", SCRATCH}),
    )

    def policy(self):
        return TopKActor(super().policy(), K)

    def make(self, seed=0):
        return KLDivergenceTransform(estimator="top_k")


class StackLaws(TransformLaws):
    writes = frozenset(
        {"ref_log_prob", "kl", "kl_estimate", "task_reward", "kl_coeff", "episode_kl"}
    )
    penalizes = True
    estimator: Any

    def make(self, seed=0):
        return KLConstrainedTransform(self.reference(seed), 0.1 + seed, estimator=self.estimator)


class TestExactStackLaws(StackLaws, WorkerLaws):
    estimator, drops = "exact", frozenset({"logits"})


class TestTopKStackLaws(StackLaws):
    estimator, drops = "top_k", frozenset({"top_k"})

    def policy(self):
        return TopKActor(super().policy(), K)


# What is measured.


def as_policy(actor, estimator: str, k: int = K) -> Any:
    return TopKActor(actor, k) if estimator == "top_k" else actor


def stack(actor, estimator: Any, controller: Any = 0.1, **kwargs) -> Any:
    return KLConstrainedTransform(actor, controller, estimator=estimator, **kwargs)


def parts(actor, estimator, **kwargs) -> Any:
    """The stack without the penalty, by hand."""
    return compose(
        ReferenceModelLogProbTransform(actor, estimator=estimator),
        KLDivergenceTransform(estimator=estimator, actor=actor, **kwargs),
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


# Every distribution and every data path.


class Forbids(Transform):
    """An env that forbids one action, another one in each state."""

    def _call(self, next_tensordict):
        forbidden = (
            next_tensordict["observation"].abs().sum(-1, keepdim=True) * 10
        ).long() % N_ACTIONS
        return next_tensordict.set("action_mask", torch.arange(N_ACTIONS) != forbidden)

    def _reset(self, tensordict, tensordict_reset):
        return self._call(tensordict_reset)

    def transform_observation_spec(self, observation_spec: Any):
        shape = torch.Size((*observation_spec.shape, N_ACTIONS))
        observation_spec["action_mask"] = Binary(N_ACTIONS, shape=shape, dtype=torch.bool)
        return observation_spec


def categorical_actor(distribution, params: Any = ("logits",)) -> Any:
    net = TensorDictModule(nn.Linear(N_OBS, N_ACTIONS), ["observation"], ["logits"])
    return sharp(
        probabilistic_actor(
            net, in_keys=params, distribution_class=distribution, return_log_prob=True
        ),
        scale=0.7,
    )


def make(kind: str) -> Any:
    if kind == "masked":
        return categorical_actor(MaskedCategorical, {"logits": "logits", "mask": "action_mask"})
    if kind == "agents":
        return make_actor(agents=True)
    return make_actor(kind)


def env_for(kind: str, actor, *transforms: Transform, **kwargs) -> Any:
    env = WalkEnv(
        (2,),
        discrete=kind not in ("normal", "tanh_normal"),
        n_agents=3 if kind == "agents" else None,
        **kwargs,
    )
    needs = memory_of(actor) if kind in ("lstm", "gru") else [Forbids()] if kind == "masked" else []
    return with_transforms(env, *needs, *transforms)


def params_of(kind: str, actor, batch) -> Any:
    """What the bare network says of every step."""
    observation = batch["agents", "observation"] if kind == "agents" else batch["observation"]
    with torch.no_grad():
        return actor[0].module(observation)


def recorded_params(kind: str, batch) -> Any:
    """What an actor wrote of every step: logits, or loc and scale."""
    if kind in ("normal", "tanh_normal"):
        return batch["loc"], batch["scale"]
    return batch["agents", "logits"] if kind == "agents" else batch["logits"]


def log_probs_in(kind: str, logits: torch.Tensor, batch) -> torch.Tensor:
    """Log-probs of all actions; exp(-60) of a forbidden one, which no sum notices."""
    if kind == "masked":
        logits = logits.masked_fill(~batch["action_mask"], -60.0)
    return logits.log_softmax(-1)


def kl_between(kind: str, p, q, batch) -> torch.Tensor:
    """The KL of each step from the parameters of both, trailing 1."""
    if kind in ("normal", "tanh_normal"):  # a bijection that both share changes no KL
        return kl_divergence(Normal(*p), Normal(*q)).sum(-1, keepdim=True)
    p, q = (log_probs_in(kind, logits, batch) for logits in (p, q))
    return (p.exp() * (p - q)).sum(-1, keepdim=True)


def top_k_from(kind: str, q, batch) -> torch.Tensor:
    """The estimate of each step from the policy's record and the reference's logits, trailing 1."""
    holder = batch["agents"] if kind == "agents" else batch
    top, q = holder["top_k"], log_probs_in(kind, q, batch)
    exact = (top["log_probs"].exp() * (top["log_probs"] - q.gather(-1, top["actions"]))).sum(-1)
    action = holder["action"]
    action = action.long().argmax(-1) if action.shape == q.shape else action
    drawn = holder["action_log_prob"] - q.gather(-1, action.unsqueeze(-1)).squeeze(-1)
    return (exact + torch.where(top["in_top_k"], 0.0, drawn)).unsqueeze(-1)


def rounding_of(
    kind: str, estimator: str, policy, reference, batch, *, whole: bool = True
) -> torch.Tensor:
    """The rounding of the estimate of each step, trailing 1.

    Args:
        kind: of the actors.
        estimator: "exact" or "top_k".
        policy, reference: the actors.
        batch: what was recorded.
        whole: whether the policy, too, is evaluated twice; else its record is read.
    """
    batch = batch.detach()
    steps, read = 1, batch
    for name in ("h", "c"):
        if f"ref_{name}" in batch.keys():
            steps, read = batch.shape[-1], read.copy().set(name, batch[f"ref_{name}"])

    def of_reference(known: Any) -> torch.Tensor:
        q = recorded_params(kind, known)
        if estimator == "top_k":
            return top_k_from(kind, q, batch)
        return kl_between(kind, recorded_params(kind, batch), q, batch)

    bound = rounding(reference, read, of_reference, steps=steps)
    if whole:
        q = params_of(kind, reference, batch)
        bound = bound + rounding(
            policy, batch, lambda p: kl_between(kind, recorded_params(kind, p), q, batch)
        )
    return bound


def expected_kl(kind: str, policy, reference, batch) -> torch.Tensor:
    """The KL of each step from the bare networks, trailing 1."""
    p, q = params_of(kind, policy, batch), params_of(kind, reference, batch)
    return kl_between(kind, p, q, batch)


EXACT = [("exact", kind) for kind in ("categorical", "normal", "tanh_normal", "masked", "agents")]
TOP_K = [("top_k", kind) for kind in ("categorical", "masked", "agents")]
RECURRENT = [(estimator, kind) for estimator in ("exact", "top_k") for kind in ("lstm", "gru")]


def entry(kind: str, batch, name: str) -> torch.Tensor:
    return batch["next", "agents", name] if kind == "agents" else batch["next", name]


def reward_key(kind: str) -> Any:
    return ("agents", "reward") if kind == "agents" else "reward"


@pytest.mark.parametrize(("estimator", "kind"), EXACT + TOP_K + RECURRENT)
def test_every_data_path_gives_the_same_numbers(estimator, kind):
    actor = make(kind)
    policy = moved(actor)
    arguments: dict[str, Any] = {"keys": KLKeys(reward=reward_key(kind))}
    env = env_for(kind, actor, stack(actor, estimator, **arguments), longest=9)
    check_env_specs(env)
    batches = collect(env, as_policy(policy, estimator), frames=24, batches=2)
    postproc = stack(actor, estimator, **arguments)
    for batch in batches:
        inside = entry(kind, batch, "kl_estimate")
        assert inside.min() > 0 if estimator == "exact" else inside.abs().min() > 0
        if (estimator, kind) in EXACT:
            bound = rounding_of(kind, estimator, policy, actor, batch)
            assert_within(inside, expected_kl(kind, policy, actor, batch), bound)
        bound = rounding_of(kind, estimator, policy, actor, batch, whole=False)
        bare = without_kl(batch)
        assert_within(entry(kind, postproc(bare), "kl_estimate"), inside, bound)
        # Flat and shuffled, as in a replay buffer: a recurrent reference reads the recorded states.
        flat = (
            batch.set("expected", inside)
            .set("bound", bound)
            .reshape(-1)[torch.randperm(batch.numel())]
        )
        for name in ("kl", "kl_estimate", "kl_coeff", "task_reward", "episode_kl", "ref_log_prob"):
            flat["next"].pop(("agents", name) if kind == "agents" else name)
        transform = stack(actor, estimator, **arguments)
        buffer = ReplayBuffer(
            storage=LazyTensorStorage(len(flat)), batch_size=16, transform=transform
        )
        buffer.extend(flat)
        sample: Any = buffer.sample()
        assert_within(entry(kind, sample, "kl_estimate"), sample["expected"], sample["bound"])


@pytest.mark.parametrize("distribution", [OneHotCategorical, TorchRLOneHotCategorical])
@both
def test_one_hot_actions_are_measured_as_numbers_are(distribution, estimator):
    actor, numbers = categorical_actor(distribution), categorical_actor(Categorical)
    batch = as_policy(moved(actor), estimator)(
        TensorDict(observation=torch.randn(64, N_OBS), batch_size=64)
    )
    batch["next"] = TensorDict(reward=torch.zeros(64, 1), batch_size=64)
    assert batch["action"].shape == (64, N_ACTIONS)
    after = stack(actor, estimator)(batch)
    batch["action"] = batch["action"].long().argmax(-1)
    expected = stack(numbers, estimator)(batch)
    bound = rounding_of("categorical", estimator, None, numbers, batch, whole=False)
    assert_within(after["next", "kl_estimate"], expected["next", "kl_estimate"], bound)


@both
def test_agents_that_share_a_reward_are_summed(estimator):
    actor = make("agents")
    env = WalkEnv((2,), n_agents=3, shared_reward=True)
    batch = play(env, as_policy(moved(actor), estimator))
    after = stack(actor, estimator, sum_agents=True)(batch)["next", "kl_estimate"]
    keys = KLKeys(log_prob=("agents", "action_log_prob"))
    each = parts(actor, estimator, keys=keys)(batch)["next", "agents", "kl_estimate"]
    assert after.shape == (2, 12, 1)
    assert_within(after, each.sum(-2), ulps(each.abs().sum(-2)))


@pytest.mark.parametrize(("estimator", "kind"), EXACT + TOP_K)
def test_padding_has_no_kl_and_needs_no_parameters(estimator, kind):
    # A padded scale is 0, a padded action mask allows nothing: neither is a distribution.
    actor = make(kind)
    transform = stack(actor, estimator, keys=KLKeys(reward=reward_key(kind)))
    (batch,) = collect(
        env_for(kind, actor), as_policy(moved(actor), estimator), frames=24, batches=1
    )
    padded = split_trajectories(batch)
    mask = padded["collector", "mask"]
    assert not mask.all()
    expected, after = (
        entry(kind, transform(batch), "kl_estimate"),
        entry(kind, transform(padded), "kl_estimate"),
    )
    bound = rounding_of(kind, estimator, None, actor, batch, whole=False).max()
    one, other = (x.flatten().sort().values for x in (after[mask], expected))
    assert_within(one, other, bound)
    assert (after[~mask] == 0).all()


def test_padding_is_no_distribution_even_where_torch_checks_its_parameters():
    actor = make_actor("normal", distribution_kwargs={"validate_args": True})
    (batch,) = collect(WalkEnv((2,), discrete=False), moved(actor), frames=24, batches=1)
    padded = split_trajectories(batch)
    mask = padded["collector", "mask"]
    assert (padded["scale"][~mask] == 0).all()
    with pytest.raises(ValueError, match="Expected parameter scale"):
        actor.build_dist_from_params(padded)
    after = stack(actor, "exact")(padded)["next", "kl_estimate"]
    expected = expected_kl("normal", moved(actor), actor, padded)[mask]
    bound = rounding_of("normal", "exact", moved(actor), actor, batch).max()
    assert_within(after[mask], expected, bound)
    assert (after[~mask] == 0).all()


@pytest.mark.parametrize(("estimator", "kind"), EXACT + TOP_K)
def test_fake_data_holds_no_parameters(estimator, kind):
    actor = make(kind)
    collector = Collector(
        env_for(kind, actor),
        as_policy(moved(actor), estimator),
        frames_per_batch=8,
        total_frames=8,
        auto_register_policy_transforms=False,
        postproc=stack(actor, estimator, keys=KLKeys(reward=reward_key(kind))),
    )
    try:
        fake: Any = collector.fake_tensordict()
        batch: Any = next(iter(collector))
    finally:
        collector.shutdown()
    assert set(fake["next"].keys(True, True)) == set(batch["next"].keys(True, True))
    assert (entry(kind, fake, "kl_estimate") == 0).all()
    assert (entry(kind, fake, "ref_log_prob") == 0).all()


@pytest.mark.parametrize("make", [stack, parts], ids=["stack", "parts"])
def test_fake_data_holds_no_parameters_even_where_torch_checks_them(make):
    actor = make_actor("normal", distribution_kwargs={"validate_args": True})
    fake = play(WalkEnv((2,), discrete=False), actor).detach().apply(torch.zeros_like)
    assert (make(actor, "exact")(fake)["next", "kl_estimate"] == 0).all()


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
    transform(play(WalkEnv((2,)), policy))
    assert witness.calls == 1
    play(with_transforms(WalkEnv((2,)), transform), policy, 7)
    assert witness.calls == 1 + 7


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


# What is missing.


def test_exact_needs_an_actor():
    with pytest.raises(ValueError, match=r'`estimator="exact"` needs `actor`.*pass the policy'):
        KLDivergenceTransform(estimator="exact")


@both
@pytest.mark.parametrize("place", ["env", "batch"])
def test_what_the_policy_did_not_record(estimator, place):
    actor = make_actor()
    policy = TopKActor(moved(actor), K) if estimator == "exact" else moved(actor)
    text = {
        "exact": r"logits.* is not in the data, got .*top_k.*Let the policy record .*TopKActor",
        "top_k": r"\('top_k', 'actions'\) is not in the data, got .*logits.*collect with TopKActor",
    }[estimator]
    transform, batch = stack(actor, estimator), play(WalkEnv((2,)), policy)
    env = with_transforms(WalkEnv((2,)), stack(actor, estimator))
    with pytest.raises(KeyError, match=text):
        play(env, policy) if place == "env" else transform(batch)


@both
def test_what_the_reference_did_not_keep(estimator):
    unlike = compose(
        ReferenceModelLogProbTransform(make_actor()),
        KLDivergenceTransform(estimator=estimator, actor=make_actor()),
    )
    text = f"'{SCRATCH}' is not in the data, got .*with the same `estimator` before this transform"
    with pytest.raises(KeyError, match=text):
        unlike(play(WalkEnv((2,)), as_policy(moved(make_actor()), estimator)))


class TwoDistributions(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = make_actor(), make_actor()


def test_exact_needs_one_distribution():
    with pytest.raises(
        ValueError, match="`actor` must have one ProbabilisticTensorDictModule, got 2 in TwoDistrib"
    ):
        KLDivergenceTransform(estimator="exact", actor=TwoDistributions())


def test_policy_and_reference_choose_among_the_same_actions():
    batch = play(WalkEnv((2,)), moved(make_actor()))
    batch["logits"] = torch.zeros(2, 12, N_ACTIONS + 1)
    with pytest.raises(
        ValueError,
        match=r"'logits' of policy and reference must .*got \(2, 12, 5\) and \(2, 12, 4\)",
    ):
        stack(make_actor(), "exact")(batch)


def test_policy_and_reference_name_their_parameters_alike():
    net = TensorDictModule(nn.Linear(N_OBS, N_ACTIONS), ["observation"], ["scores"])
    reference = probabilistic_actor(
        net, in_keys={"logits": "scores"}, distribution_class=Categorical
    )
    actor = make_actor()
    unlike = compose(
        ReferenceModelLogProbTransform(reference, estimator="exact"),
        KLDivergenceTransform(estimator="exact", actor=actor),
    )
    with pytest.raises(
        KeyError, match=r"logits.* is not in the data, got scores: policy and reference must name"
    ):
        unlike(play(WalkEnv((2,)), moved(actor)))


def test_top_k_of_a_reference_that_is_not_categorical():
    batch = play(WalkEnv((2,), discrete=False), moved(make_actor("normal")))
    with pytest.raises(
        TypeError, match=r"the top k need a Categorical, .*got Normal: use `estimator=\"exact\"`"
    ):
        stack(make_actor("normal"), "top_k")(batch)


def test_top_k_of_several_choices_per_step():
    model = nn.Sequential(nn.Linear(N_OBS, 6), nn.Unflatten(-1, (2, 3)))  # two choices among three
    actor = probabilistic_actor(
        TensorDictModule(model, ["observation"], ["logits"]),
        in_keys=["logits"],
        distribution_class=Categorical,
        return_log_prob=True,
    )
    batch = TopKActor(actor, K)(TensorDict(observation=torch.randn(5, N_OBS), batch_size=5))
    batch["next"] = TensorDict(batch_size=5)
    with pytest.raises(
        ValueError,
        match=r"one choice per step, got choices of shape \(5, 2\) .*\(5, 2\) .* shape \(5,\)",
    ):
        ReferenceModelLogProbTransform(actor, estimator="top_k")(batch)
