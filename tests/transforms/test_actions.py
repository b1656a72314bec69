"""Every kind of action: what its log-prob is summed over."""

from typing import Any

import pytest
import torch
from tensordict.nn import (
    NormalParamExtractor,
)
from torch import nn
from torch.distributions import Categorical, Independent, Normal
from torchrl.data import Bounded, MultiCategorical, OneHot, Unbounded
from torchrl.data import Categorical as Choice
from torchrl.envs import check_env_specs
from torchrl.modules import MaskedCategorical, OneHotCategorical, TanhNormal

from tests.helpers import (
    N_ACTIONS,
    N_OBS,
    assert_within,
    moved,
    play,
    rounding,
    ulps,
    with_transforms,
)
from tests.transforms.kinds import (
    Kind,
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
    KLRewardTransform,
)

CHOICES = (2, N_ACTIONS)  # of the two dimensions of a MultiDiscrete action
ALLOWED = torch.arange(N_ACTIONS) < torch.tensor(CHOICES).unsqueeze(-1)


def multi_discrete(logits: torch.Tensor) -> Independent:
    """Two choices, of 2 and of 4, whose log-probs are one number."""
    return Independent(Categorical(logits=logits.masked_fill(~ALLOWED, -torch.inf)), 1)


def independent_normal(loc: torch.Tensor, scale: torch.Tensor) -> Independent:
    return Independent(Normal(loc, scale), 1)


def linear(n: int = N_ACTIONS) -> nn.Module:
    return nn.Linear(N_OBS, n)


def gaussian_net() -> nn.Module:
    return nn.Sequential(nn.Linear(N_OBS, 4), NormalParamExtractor())


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
any_batch = pytest.mark.parametrize("batch_size", [(), (2, 3)], ids=str)


def expected_kl(kind: Kind, policy, reference, batch) -> torch.Tensor:
    """k1 from what the two bare networks say, trailing 1."""
    with torch.no_grad():
        said = [actor[0].module(batch["observation"]) for actor in (policy, reference)]
    log_prob, ref_log_prob = (
        kind.log_prob(batch, *(s if isinstance(s, tuple) else (s,))) for s in said
    )
    return (log_prob - ref_log_prob).unsqueeze(-1)


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
def test_identical_weights_have_no_kl_on_any_machine(kind, monkeypatch):
    """One whose products of a few rows round up, and those of many rows down.

    Each does so as far as any order of its sums may, which is more than a fixed bound allows.
    """
    linear = nn.functional.linear

    def rounded(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        products = linear(x.detach().abs(), weight.detach().abs())
        furthest = x.shape[-1] * products + bias.detach().abs()
        furthest = torch.finfo(x.dtype).eps / 2 * furthest
        return linear(x, weight, bias) + (furthest if len(x) == 2 else -furthest)

    monkeypatch.setattr(nn.functional, "linear", rounded)
    with mode(kind):
        actor = make(kind)
        stack, place = stack_of(kind, actor)
        batch = play(PlayedEnv((2,), **kind.env), make(kind)).reshape(-1)
        kl = stack(batch)["next", place]
        assert_within(kl, torch.zeros_like(kl), rounding(actor, batch, actions=True))
        fixed = 1e-5 if kind.distribution in (Normal, independent_normal) else 0.0
        assert kl.abs().max() > fixed


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
