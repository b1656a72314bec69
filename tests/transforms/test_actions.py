"""Every kind of action: what its log-prob is summed over, and which action is scored."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    CompositeDistribution,
    NormalParamExtractor,
    TensorDictModule,
    set_composite_lp_aggregate,
)
from torch import nn
from torch.distributions import Categorical, Independent, Normal
from torch.testing import assert_close
from torchrl.data import Binary, Bounded, Composite, MultiCategorical, OneHot, Unbounded
from torchrl.data import Categorical as Choice
from torchrl.envs import ActionDiscretizer, ActionScaling, GymEnv, check_env_specs
from torchrl.modules import MaskedCategorical, OneHotCategorical, TanhNormal

from tests.helpers import (
    N_ACTIONS,
    N_OBS,
    WalkEnv,
    assert_within,
    moved,
    play,
    probabilistic_actor,
    rounding,
    sharp,
    ulps,
    with_transforms,
    without_kl,
)
from torchrl_kl import (
    KLConstrainedTransform,
    KLDivergenceTransform,
    KLKeys,
    KLPenaltyLoss,
    KLRewardTransform,
    TopKActor,
    kl_exact,
)

module: Any = TensorDictModule  # annotated more narrowly than it takes its keys
CHOICES = (2, N_ACTIONS)  # of the two dimensions of a MultiDiscrete action
ALLOWED = torch.arange(N_ACTIONS) < torch.tensor(CHOICES).unsqueeze(-1)


class PlayedEnv(WalkEnv):
    """WalkEnv with another action, of `spec(batch_size)`; `move(td)` turns it into WalkEnv's."""

    def __init__(
        self, batch_size: tuple[int, ...] = (), *, spec, move, discrete=True, masked=False
    ):
        super().__init__(batch_size, discrete=discrete)
        self.move, self.masked = move, masked
        batch = torch.Size(batch_size)
        self.action_spec = Composite(action=spec(batch), shape=batch)
        if masked:
            self.observation_spec["action_mask"] = Binary(
                shape=torch.Size((*batch, N_ACTIONS)), dtype=torch.bool
            )

    def _step(self, tensordict):
        return self._mask(
            super()._step(tensordict.copy().set("action", self.move(tensordict["action"])))
        )

    def _reset(self, tensordict=None, **_):
        return self._mask(super()._reset(tensordict))

    def _mask(self, tensordict):
        if self.masked:  # forbids another action in each state
            forbidden = (
                tensordict["observation"].abs().sum(-1, keepdim=True) * 10
            ).long() % N_ACTIONS
            tensordict["action_mask"] = torch.arange(N_ACTIONS) != forbidden
        return tensordict


def multi_discrete(logits: torch.Tensor) -> Independent:
    """Two choices, of 2 and of 4, whose log-probs are one number."""
    return Independent(Categorical(logits=logits.masked_fill(~ALLOWED, -torch.inf)), 1)


def independent_normal(loc: torch.Tensor, scale: torch.Tensor) -> Independent:
    return Independent(Normal(loc, scale), 1)


class Parts(nn.Module):
    """The parameters of a composite policy, that picks one of 4 and moves in 2 dimensions."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(N_OBS, N_ACTIONS + 4)

    def forward(self, observation):
        logits, loc, scale = self.linear(observation).split([N_ACTIONS, 2, 2], -1)
        return logits, loc, nn.functional.softplus(scale) + 0.1


def log_softmax_of(logits: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(-1).gather(-1, action.unsqueeze(-1)).squeeze(-1)


def gaussian(loc: torch.Tensor, scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The log-density, without the constant, which drops out of a KL."""
    return (-(((x - loc) / scale) ** 2) / 2 - scale.log()).sum(-1)


@dataclass
class Kind:
    """One kind of action.

    Args:
        net: makes the network.
        params: what it writes.
        distribution: of the action.
        log_prob: of an action from what the network says, up to what policy and reference share.
        env: arguments of PlayedEnv.
        out_keys: of the actor.
        written: where the network writes them, if not there.
        options: others of the actor.
        aggregate: the mode of composite log-probs.
        scale: of its weights.
    """

    net: Callable[[], Any]
    params: Any
    distribution: Any
    log_prob: Callable[..., torch.Tensor]
    env: dict[str, Any]
    out_keys: tuple[Any, ...] = ("action",)
    written: Any = None
    options: dict[str, Any] | None = None
    aggregate: bool | None = None
    scale: float = 0.5


def linear(n: int = N_ACTIONS) -> nn.Module:
    return nn.Linear(N_OBS, n)


def gaussian_net() -> nn.Module:
    return nn.Sequential(nn.Linear(N_OBS, 4), NormalParamExtractor())


def composite_spec(batch: torch.Size) -> Composite:
    return Composite(
        pick=Choice(N_ACTIONS, shape=batch), move=Unbounded(torch.Size((*batch, 2))), shape=batch
    )


def one_number(log_prob):
    """For the distributions over 4 actions."""
    return lambda batch, logits: log_prob(logits, batch["action"])


def numbers_env(batch: torch.Size) -> Any:
    return Choice(N_ACTIONS, shape=batch)


IN_NUMBERS = {"spec": numbers_env, "move": lambda action: action}
IN_REALS = {
    "spec": lambda batch: Unbounded(torch.Size((*batch, 2))),
    "move": lambda action: action,
    "discrete": False,
}
IN_TWO_CHOICES = {
    "spec": lambda batch: MultiCategorical(CHOICES, shape=torch.Size((*batch, 2))),
    "move": lambda action: action[..., 0] + 2 * (action[..., 1] // 2),
}
IN_PARTS = {
    "spec": composite_spec,
    "move": lambda action: action["move"] + action["pick"].unsqueeze(-1),
    "discrete": False,
}


def composite(aggregate: bool) -> Kind:
    return Kind(
        net=Parts,
        params=["params"],
        written=[
            ("params", "pick", "logits"),
            ("params", "move", "loc"),
            ("params", "move", "scale"),
        ],
        distribution=CompositeDistribution,
        log_prob=lambda batch, logits, loc, scale: (
            log_softmax_of(logits, batch["action", "pick"])
            + gaussian(loc, scale, batch["action", "move"])
        ),
        env=IN_PARTS,
        out_keys=(("action", "pick"), ("action", "move")),
        options={
            "distribution_kwargs": {
                "distribution_map": {"pick": Categorical, "move": Normal},
                "name_map": {"pick": ("action", "pick"), "move": ("action", "move")},
            }
        },
        aggregate=aggregate,
    )


KINDS = {
    "categorical": Kind(linear, ["logits"], Categorical, one_number(log_softmax_of), IN_NUMBERS),
    "one_hot": Kind(
        linear,
        ["logits"],
        OneHotCategorical,
        one_number(lambda logits, action: log_softmax_of(logits, action.long().argmax(-1))),
        {
            "spec": lambda batch: OneHot(N_ACTIONS, shape=torch.Size((*batch, N_ACTIONS))),
            "move": lambda action: action.long().argmax(-1),
        },
    ),
    "masked": Kind(
        linear,
        {"logits": "logits", "mask": "action_mask"},
        MaskedCategorical,
        lambda batch, logits: log_softmax_of(
            logits.masked_fill(~batch["action_mask"], -torch.inf), batch["action"]
        ),
        {**IN_NUMBERS, "masked": True},
    ),
    "multi_discrete": Kind(
        lambda: nn.Sequential(linear(2 * N_ACTIONS), nn.Unflatten(-1, (2, N_ACTIONS))),
        ["logits"],
        multi_discrete,
        lambda batch, logits: log_softmax_of(
            logits.masked_fill(~ALLOWED, -torch.inf), batch["action"]
        ).sum(-1),
        IN_TWO_CHOICES,
    ),
    "categorical per dimension": Kind(
        lambda: nn.Sequential(linear(4), nn.Unflatten(-1, (2, 2))),
        ["logits"],
        Categorical,
        lambda batch, logits: log_softmax_of(logits, batch["action"]).sum(-1),
        {
            **IN_TWO_CHOICES,
            "spec": lambda batch: MultiCategorical((2, 2), shape=torch.Size((*batch, 2))),
        },
    ),
    "tanh_normal": Kind(
        gaussian_net,
        ["loc", "scale"],
        TanhNormal,
        lambda batch, loc, scale: gaussian(
            loc, scale, batch["action"].atanh()
        ),  # policy and reference share tanh
        {**IN_REALS, "spec": lambda batch: Bounded(-1.0, 1.0, shape=torch.Size((*batch, 2)))},
        scale=0.1,
    ),
    "normal": Kind(
        gaussian_net,
        ["loc", "scale"],
        Normal,
        lambda batch, loc, scale: gaussian(loc, scale, batch["action"]),
        IN_REALS,
    ),
    "independent": Kind(
        gaussian_net,
        ["loc", "scale"],
        independent_normal,
        lambda batch, loc, scale: gaussian(loc, scale, batch["action"]),
        IN_REALS,
    ),
    "composite": composite(False),
    "composite, aggregated": composite(True),
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
composites = pytest.mark.parametrize(
    "kind", [composite(False), composite(True)], ids=["parts", "aggregated"]
)
any_batch = pytest.mark.parametrize("batch_size", [(), (2, 3)], ids=str)


def mode(kind: Kind):
    """What a script with such an actor sets, from building it to the end."""
    return nullcontext() if kind.aggregate is None else set_composite_lp_aggregate(kind.aggregate)


def make(kind: Kind) -> Any:
    params = list(kind.params.values())[:1] if isinstance(kind.params, dict) else kind.params
    return sharp(
        probabilistic_actor(
            TensorDictModule(kind.net(), ["observation"], kind.written or params),
            in_keys=kind.params,
            out_keys=list(kind.out_keys),
            distribution_class=kind.distribution,
            return_log_prob=True,
            **(kind.options or {}),
        ),
        scale=kind.scale,
    )


def expected_kl(kind: Kind, policy, reference, batch) -> torch.Tensor:
    """k1 from what the two bare networks say, trailing 1."""
    with torch.no_grad():
        said = [actor[0].module(batch["observation"]) for actor in (policy, reference)]
    log_prob, ref_log_prob = (
        kind.log_prob(batch, *(s if isinstance(s, tuple) else (s,))) for s in said
    )
    return (log_prob - ref_log_prob).unsqueeze(-1)


def stack_of(kind: Kind, actor, **kwargs) -> Any:
    place = ("action", "kl") if kind.aggregate is False else "kl"  # next to the log-prob
    return KLConstrainedTransform(actor, 0.5, **kwargs), place


def bare(batch, place) -> Any:
    """As the env without the stack would have returned it."""
    batch = without_kl(batch)
    if place != "kl":
        batch = batch.exclude(
            *((*step, "action", name) for step in ((), ("next",)) for name in ADDED)
        )
    return batch


ADDED = ("ref_log_prob", "kl", "kl_estimate", "episode_kl")


@every_kind
@any_batch
def test_the_kl_of_the_step_is_that_of_the_whole_action(kind, batch_size):
    with mode(kind):
        actor = make(kind)
        policy = moved(actor, scale=0.1)
        stack, place = stack_of(kind, actor)
        env = with_transforms(PlayedEnv(batch_size, **kind.env), stack)
        check_env_specs(env)
        batch = play(env, policy)
        following = batch["next"]
        kl = following[place]
        assert kl.shape == following["reward"].shape == (*batch_size, 12, 1)
        bound = sum(rounding(a, batch, actions=True) for a in (policy, actor))
        assert_within(kl, expected_kl(kind, policy, actor, batch), bound)
        assert kl.abs().min() > 0
        terms = ulps(following["task_reward"], 0.5 * kl)
        assert_within(following["reward"], following["task_reward"] - 0.5 * kl, terms)
        after = stack_of(kind, actor)[0](bare(batch, place))["next"]
        bound = rounding(actor, batch).unsqueeze(-1)
        assert_within(after[place], kl, bound)
        assert_within(after["reward"], following["reward"], 0.5 * bound + terms)


@every_kind
def test_identical_weights_have_no_kl(kind):
    with mode(kind):
        actor = make(kind)
        stack, place = stack_of(kind, actor)
        batch = play(with_transforms(PlayedEnv((2,), **kind.env), stack), make(kind))
        bound = rounding(actor, batch, actions=True)
        for step in (batch, stack_of(kind, actor)[0](bare(batch, place))):
            kl = step["next", place]
            assert_within(kl, torch.zeros_like(kl), bound)


@every_kind
def test_the_preset_penalizes_the_same(kind):
    with mode(kind):
        actor = make(kind)
        policy = moved(actor)
        batch = play(
            with_transforms(PlayedEnv((2,), **kind.env), KLRewardTransform(actor, 0.5)), policy
        )
        after, place = stack_of(kind, actor)
        after = after(play(PlayedEnv((2,), **kind.env), policy))["next"]
        bound = 0.5 * rounding(actor, batch).unsqueeze(-1)
        bound = bound + ulps(after["task_reward"], 0.5 * after[place])
        assert_within(batch["next", "reward"], after["reward"], bound)


# The parts of a composite action.


def parts_in(known: Any) -> tuple[torch.Tensor, ...]:
    """The parameters of both parts among what a network has written."""
    return tuple(known[key] for key in composite(False).written)


def kl_of_parts(p: Any, q: Any) -> torch.Tensor:
    """The KL of two pairs of distributions, from their (logits, loc, scale)."""
    picked = (p[0].softmax(-1) * (p[0].log_softmax(-1) - q[0].log_softmax(-1))).sum(-1)
    (m, s), (n, t) = p[1:], q[1:]
    went = ((t / s).log() + (s**2 + (m - n) ** 2) / (2 * t**2) - 0.5).sum(-1)
    return picked + went


@composites
def test_exact_is_the_sum_over_the_parts(kind):
    with mode(kind):
        actor = make(kind)
        policy = moved(actor)
        stack, place = stack_of(kind, actor, estimator="exact")
        batch = play(with_transforms(PlayedEnv((2,), **kind.env), stack), policy)
        with torch.no_grad():
            p, q = (a[0].module(batch["observation"]) for a in (policy, actor))
        key = ("action", "kl_estimate") if place != "kl" else "kl_estimate"
        of_reference = rounding(actor, batch, lambda known: kl_of_parts(p, parts_in(known)))
        of_policy = rounding(policy, batch, lambda known: kl_of_parts(parts_in(known), q))
        inside = batch["next", key].squeeze(-1)
        assert_within(inside, kl_of_parts(p, q), of_policy + of_reference)
        recorded = bare(batch, place)
        recorded["collector", "mask"] = torch.arange(12).expand(2, 12) < 7
        before = recorded.clone()
        after = stack_of(kind, actor, estimator="exact")[0](recorded)["next", key].squeeze(-1)
        assert_within(after[:, :7], inside[:, :7], of_reference[:, :7])
        assert (after[:, 7:] == 0).all()
        assert (recorded == before).all()  # the policy's parameters, too, are as they were


def test_exact_of_composite_distributions_with_other_parts():
    params = TensorDict(pick=TensorDict(logits=torch.zeros(2, 4), batch_size=2), batch_size=2)
    make_dist: Any = CompositeDistribution
    one = make_dist(params, {"pick": Categorical})
    other = make_dist(params, {"pick": Categorical}, name_map={"pick": "choose"})
    assert_close(kl_exact(one, one), torch.zeros(2))
    with pytest.raises(
        ValueError, match=r"must have the same parts, got \['pick'\] .* and \['choose'\]"
    ):
        kl_exact(one, other)


@pytest.mark.parametrize(
    ("keys", "branch", "shape"),
    [
        ([("agents", "pick"), ("agents", "move")], ("agents",), (5, 3)),
        ([("agents", "pick"), "root"], (), (5,)),
        ([("agents", "deep", "far"), ("agents", "move")], ("agents",), (5, 3)),
    ],
    ids=["one branch", "the root and a branch", "a branch and one inside"],
)
def test_parts_in_several_branches_are_added_where_all_of_them_are_held(keys, branch, shape):
    torch.manual_seed(0)
    agents = TensorDict(pick=torch.randn(5, 3), move=torch.randn(5, 3, 2), batch_size=(5, 3))
    agents["deep"] = TensorDict(far=torch.randn(5, 3, 4, 2), batch_size=(5, 3, 4))
    batch = TensorDict(agents=agents, root=torch.randn(5, 2), batch_size=5)
    ref_log_prob = torch.randn(shape)
    batch["next"] = TensorDict(agents=TensorDict(batch_size=(5, 3)), batch_size=5)
    batch["next", (*branch, "ref_log_prob")] = ref_log_prob
    after = KLDivergenceTransform(keys=KLKeys(log_prob=keys))(batch)["next"]
    whole = sum(batch[key].reshape(*shape, -1).sum(-1) for key in keys)
    assert_close(after[(*branch, "kl")], (whole - ref_log_prob).unsqueeze(-1))


def test_a_part_that_was_not_recorded_is_an_error():
    kind = composite(False)
    actor = make(kind)
    stack = stack_of(kind, actor)[0]
    batch = play(PlayedEnv((2,), **kind.env), actor).exclude(("action", "move_log_prob"))
    with pytest.raises(
        KeyError,
        match=r"\('action', 'move_log_prob'\) is not in the data, got .*return_log_prob=True",
    ):
        stack(batch)
    env = with_transforms(PlayedEnv((2,), **kind.env), stack)
    step = actor(env.reset()).exclude(("action", "move_log_prob"), "params")
    with pytest.raises(
        KeyError, match=r"pick_log_prob'\)\] are there\) but left no \('action', 'move_log_prob'\)"
    ):
        env.step(step)


def test_one_part_alone_can_be_measured():
    kind = composite(False)
    actor = make(kind)
    policy = moved(actor)
    stack = KLConstrainedTransform(actor, 0.5, keys=KLKeys(log_prob=("action", "pick_log_prob")))
    batch = play(with_transforms(PlayedEnv((2,), **kind.env), stack), policy)
    with torch.no_grad():
        p, q = (a[0].module(batch["observation"])[0] for a in (policy, actor))
    picked = batch["action", "pick"]
    expected = log_softmax_of(p, picked) - log_softmax_of(q, picked)
    bound = sum(
        rounding(a, batch, lambda known: log_softmax_of(known["params", "pick", "logits"], picked))
        for a in (policy, actor)
    )
    assert_within(batch["next", "action", "kl"].squeeze(-1), expected, bound)


def test_one_part_is_not_compared_with_the_whole():
    kind, key = composite(True), ("action", "pick_log_prob")
    with mode(kind):
        actor = make(kind)
        batch = play(PlayedEnv((2,), **kind.env), moved(actor))
        batch[key] = batch[actor.log_prob_keys[0]].clone()
        with pytest.raises(
            ValueError,
            match="must not be that of one part.*pick_log_prob.*set_composite_lp_aggregate",
        ):
            KLConstrainedTransform(actor, 0.5, keys=KLKeys(log_prob=key))(batch)


def test_the_parts_may_have_been_summed_under_another_key():
    kind = composite(False)
    actor = make(kind)
    batch = play(PlayedEnv((2,), **kind.env), moved(actor))
    expected = stack_of(kind, actor)[0](batch)["next", "action", "kl"]
    whole = batch.exclude(("action", "pick_log_prob"), ("action", "move_log_prob"))
    whole["summed"] = batch["action", "pick_log_prob"] + batch["action", "move_log_prob"].sum(-1)
    after = KLConstrainedTransform(actor, 0.5, keys=KLKeys(log_prob="summed"))(whole)
    terms = [batch["action", f"{name}_log_prob"] for name in ("pick", "move")]
    bound = ulps(terms[0], terms[1].abs().sum(-1), after["next", "ref_log_prob"])
    assert_within(after["next", "kl"], expected, bound)


def test_what_takes_one_action_only_says_so():
    actor = make(composite(False))
    with pytest.raises(ValueError, match=r"`actor` must have one action, got .*'pick'.*'move'"):
        KLPenaltyLoss(actor, 0.1)
    batch = play(PlayedEnv((2,), **IN_PARTS), actor)
    with pytest.raises(TypeError, match=r'got CompositeDistribution: use `estimator="exact"`'):
        TopKActor(actor, 2)(batch)


# Which action.


def pendulum_actor(kind: str) -> Any:
    if kind == "discrete":  # one choice of 5 for the one action dimension
        net: Any = nn.Sequential(nn.Linear(3, 5), nn.Unflatten(-1, (1, 5)))
        params, distribution = ["logits"], Categorical
    else:
        net = nn.Sequential(nn.Linear(3, 2), NormalParamExtractor())
        params, distribution = ["loc", "scale"], TanhNormal
    net = module(net, ["observation"], params)
    actor = probabilistic_actor(
        net, in_keys=params, distribution_class=distribution, return_log_prob=True
    )
    return sharp(actor, scale=0.1)


def actions_of_env(env) -> list[torch.Tensor]:
    """A list that fills with what the env itself is given."""
    seen, step = [], env._step

    def watched(tensordict):
        seen.append(tensordict["action"].clone())
        return step(tensordict)

    env._step = watched
    return seen


@pytest.mark.parametrize("preset", [False, True], ids=["stack", "preset"])
@pytest.mark.parametrize(
    ("kind", "transform"),
    [
        ("discrete", lambda: ActionDiscretizer(num_intervals=5, categorical=True)),
        ("scaled", ActionScaling),
    ],
    ids=["discretizer", "scaling"],
)
def test_the_action_scored_is_the_one_of_the_policy(kind, transform, preset):
    actor = pendulum_actor(kind)
    policy = moved(actor, scale=0.1)

    def stack() -> Any:
        return (
            KLRewardTransform(actor, 0.5, out_keys="penalized")
            if preset
            else KLConstrainedTransform(actor, 0.5)
        )

    before, after = ("reward", "penalized") if preset else ("task_reward", "reward")
    base = GymEnv("Pendulum-v1")
    env = with_transforms(base, transform(), stack())
    env.reset()
    seen = actions_of_env(base)
    batch = play(env, policy, 10)
    with torch.no_grad():
        said = [a[0].module(batch["observation"]) for a in (policy, actor)]
    if kind == "discrete":
        assert batch["action"].dtype == torch.int64
        log_prob, ref_log_prob = (log_softmax_of(logits, batch["action"]) for logits in said)
    else:
        assert_close(torch.stack(seen), 2 * batch["action"])  # torques go from -2 to 2
        log_prob, ref_log_prob = (
            gaussian(loc, scale, batch["action"].atanh()).unsqueeze(-1) for loc, scale in said
        )
    kl = log_prob - ref_log_prob
    assert kl.abs().max() > 1e-2
    bounds = [0.5 * rounding(a, batch, actions=True).unsqueeze(-1) for a in (policy, actor)]
    terms = ulps(batch["next", before], 0.5 * kl)
    penalized = batch["next", before] - 0.5 * kl
    assert_within(batch["next", after], penalized, sum(bounds) + terms)
    written = ("ref_log_prob", "kl", "episode_kl", "kl_coeff", "penalized", "task_reward")
    plain = batch.exclude(*written, *(("next", name) for name in written))
    plain["next", "reward"] = batch["next", before]
    assert_within(stack()(plain)["next", after], batch["next", after], bounds[1] + terms)
