"""Actions of several parts, and which action an env step is scored for."""

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    CompositeDistribution,
    NormalParamExtractor,
    TensorDictModule,
)
from torch import nn
from torch.distributions import Categorical
from torch.testing import assert_close
from torchrl.envs import ActionDiscretizer, ActionScaling, GymEnv
from torchrl.modules import TanhNormal

from tests.helpers import (
    assert_within,
    moved,
    play,
    probabilistic_actor,
    rounding,
    sharp,
    ulps,
    with_transforms,
)
from tests.transforms.kinds import (
    IN_PARTS,
    PlayedEnv,
    bare,
    composite,
    gaussian,
    log_softmax_of,
    make,
    mode,
    stack_of,
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
composites = pytest.mark.parametrize(
    "kind", [composite(False), composite(True)], ids=["parts", "aggregated"]
)


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
