"""Weights that an actor uses but does not own, and tensors that it keeps of its last pass."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictParams
from torch import Tensor, nn
from torch.distributions import Categorical, Normal

from tests.helpers import (
    N_ACTIONS,
    N_OBS,
    WalkEnv,
    assert_same,
    make_actor,
    play,
    probabilistic_actor,
    with_transforms,
)
from torchrl_kl import FrozenActor, KLConstrainedTransform, KLRewardTransform


def actor_of(network: Callable[..., Any], **kwargs: Any) -> Any:
    return probabilistic_actor(
        TensorDictModule(network, ["observation"], ["logits"]),
        in_keys=["logits"],
        distribution_class=Categorical,
        return_log_prob=True,
        **kwargs,
    )


class Head(nn.Module):
    """Calls itself through a function, which a deep copy shares with it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(N_OBS, N_ACTIONS)
        self.call = lambda observation: self.linear(observation)

    def act(self, observation: Tensor) -> Tensor:
        return self.linear(observation)

    def forward(self, observation: Tensor) -> Tensor:
        return self.call(observation)


def hooked() -> nn.Module:
    linear, scale = nn.Linear(N_OBS, N_ACTIONS), nn.Parameter(torch.ones(()))
    linear.register_forward_hook(lambda *args: args[-1] * scale)
    return linear


def scaled_normal() -> Any:
    log_scale = nn.Parameter(torch.zeros(2))
    return probabilistic_actor(
        TensorDictModule(nn.Linear(N_OBS, 2), ["observation"], ["loc"]),
        in_keys=["loc"],
        distribution_class=lambda loc: Normal(loc, log_scale.exp()),
        return_log_prob=True,
    )


NOT_OWNED = {
    "attribute": lambda: actor_of(Head()),
    "hook": lambda: actor_of(hooked()),
    "distribution": scaled_normal,
    "function": lambda: actor_of(partial(lambda head, x: head.act(x), Head())),
    "bound method": lambda: actor_of(Head().act),
}


@pytest.mark.parametrize("kind", NOT_OWNED)
@pytest.mark.parametrize("place", ["env", "batch"])
def test_weights_of_others_are_warned_of_once(kind, place):
    actor = NOT_OWNED[kind]()
    env, stack = WalkEnv((2,), discrete=kind != "distribution"), KLConstrainedTransform(actor, 0.1)
    batch = play(env, actor).detach()
    around = with_transforms(env, stack) if place == "env" else None
    with pytest.warns(UserWarning, match="uses weights that are not among its parameters") as seen:
        after = [play(around, actor) if around else stack(batch) for _ in range(2)]
    assert len(seen) == 1
    assert not after[0]["next", "ref_log_prob"].requires_grad


@pytest.mark.parametrize("kind", NOT_OWNED)
def test_a_distribution_for_a_loss_has_no_graph_to_them(kind):
    actor = NOT_OWNED[kind]()
    batch = play(WalkEnv((2,), discrete=kind != "distribution"), actor).detach()
    reference = FrozenActor(actor)
    with pytest.warns(UserWarning, match="uses weights that are not among its parameters"):
        dist = reference.get_dist(batch, timed=True)
    assert not dist.log_prob(batch["action"]).requires_grad


def frozen_head() -> Any:
    head = Head().requires_grad_(False)
    return actor_of(head.act)


class Functional(nn.Module):
    """Its parameters are in a TensorDictParams, and are put into a module in every pass."""

    def __init__(self):
        super().__init__()
        net = nn.Sequential(nn.Linear(N_OBS, 5), nn.Linear(5, N_ACTIONS))
        self.params = TensorDictParams(TensorDict.from_module(net))
        self.empty = [net.to("meta")]

    def forward(self, observation: Tensor) -> Tensor:
        with self.params.to_module(self.empty[0]):
            return self.empty[0](observation)


OWNED: dict[str, Callable[[], Any]] = {
    "registered": make_actor,
    "frozen": frozen_head,
    "compiled": lambda: actor_of(torch.compile(Head(), backend="eager")),
    "functional": lambda: actor_of(Functional()),
}


@pytest.mark.parametrize("make", OWNED.values(), ids=OWNED)
def test_its_own_and_frozen_weights_are_not_warned_of(make):
    actor = make()
    batch = play(WalkEnv((2,)), actor)
    # Data that carry a graph, as those of an env that can be differentiated, are not weights.
    batch["observation"] = batch["observation"].requires_grad_()
    assert not KLConstrainedTransform(actor, 0.1)(batch)["next", "kl"].requires_grad
    assert KLRewardTransform(actor, requires_grad=True)(batch) is not None


class RoundsOtherwise(nn.Linear):
    """With gradients it gives other numbers, as PyTorch's LSTM does in the last digits."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 0.1 * torch.is_grad_enabled() * input[..., :1].expand(
            *input.shape[:-1], N_ACTIONS
        ) * torch.arange(N_ACTIONS)


def test_the_first_pass_is_like_all_others():
    """A resumed run begins with it, in the middle of the uninterrupted one."""
    actor = actor_of(RoundsOtherwise(N_OBS, N_ACTIONS))
    batch = play(WalkEnv((2,)), actor).detach()
    stack = KLConstrainedTransform(actor, 0.1)
    first, second = stack(batch), stack(batch)
    assert first["next", "ref_log_prob"].equal(second["next", "ref_log_prob"])


class Remembers(nn.Module):
    """Keeps the features of its last pass, with their graph."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(N_OBS, 5), nn.Linear(5, N_ACTIONS)

    def forward(self, observation: Tensor) -> Tensor:
        self.features = self.body(observation)
        return self.head(self.features)


class RemembersMore(Remembers):
    """Keeps them in a tuple, a list and a distribution."""

    def forward(self, observation: Tensor) -> Tensor:
        logits = super().forward(observation)
        self.kept = (self.features, [logits], Categorical(logits=logits))
        return logits


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize(
    "make",
    [Remembers, RemembersMore, lambda: nn.utils.weight_norm(nn.Linear(N_OBS, N_ACTIONS))],
)
def test_an_actor_that_was_trained_before_is_copied(make):
    actor = actor_of(make())
    step = actor(WalkEnv((2,)).reset())
    step["action_log_prob"].sum().backward()
    reference = FrozenActor(actor)
    assert all(parameter.grad is None for parameter in reference.parameters())
    assert all(parameter.grad is not None for parameter in actor.parameters())
    with torch.no_grad():
        for parameter in actor.parameters():
            parameter.add_(1.0)
    assert_same(reference.step(reference.inputs(step)).log_prob, step["action_log_prob"].detach())


@pytest.mark.filterwarnings("ignore:.*torch.jit.*")  # deprecated, of either kind
def test_an_actor_in_torchscript_is_copied():
    traced: Any = torch.jit.trace(nn.Linear(N_OBS, N_ACTIONS), torch.zeros(2, N_OBS))
    actor = actor_of(traced)
    step = actor(WalkEnv((2,)).reset())
    for requires_grad in (False, True):
        reference = FrozenActor(actor, requires_grad=requires_grad)
        assert all(weight.requires_grad is requires_grad for weight in reference.parameters())
        score = reference.step(reference.inputs(step)).log_prob
        assert_same(score.detach(), step["action_log_prob"].detach())
    assert all(weight.requires_grad for weight in actor.parameters())


class Normalized(nn.Module):
    """Subtracts the mean of the last observations: while it trains, or always."""

    def __init__(self, always: bool):
        super().__init__()
        self.always, self.linear = always, nn.Linear(N_OBS, N_ACTIONS)
        self.register_buffer("mean", torch.zeros(N_OBS))
        self.register_buffer("unknown", torch.full((), torch.nan))
        self.register_buffer("short", torch.ones(2, 3, dtype=torch.float8_e4m3fn).mT)

    def forward(self, observation: Tensor) -> Tensor:
        if self.training or self.always:
            self.mean = 0.5 * self.mean + 0.5 * observation.reshape(-1, N_OBS).mean(0)
        return self.linear(observation - self.mean)


class Counting(nn.Linear):
    """Saves how often it was called without a buffer."""

    def __init__(self):
        super().__init__(N_OBS, N_ACTIONS)
        self.calls = torch.zeros(1)

    def get_extra_state(self) -> Tensor:
        return self.calls

    def set_extra_state(self, state: Tensor) -> None:
        self.calls = state

    def forward(self, input: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return super().forward(input)


def test_a_reference_whose_other_state_changes_is_warned_of():
    reference, step = FrozenActor(actor_of(Counting())), WalkEnv((2,)).reset()
    with pytest.warns(UserWarning, match="is not frozen: '.*_extra_state' changes"):
        reference.step(reference.inputs(step.set("action", torch.zeros(2, dtype=torch.int64))))


@pytest.mark.parametrize("place", ["env", "batch"])
@pytest.mark.parametrize("always", [True, False])
def test_a_reference_that_changes_whenever_it_scores_is_warned_of_once(always, place, recwarn):
    actor = actor_of(Normalized(always))
    env, stack = WalkEnv((2,)), KLConstrainedTransform(actor, 0.0)
    batch = play(env, actor).detach()
    around = with_transforms(env, stack) if place == "env" else None
    for _ in range(2):
        play(around, actor) if around else stack(batch)
    seen = [str(one.message) for one in recwarn if "is not frozen" in str(one.message)]
    assert len(seen) == always
    assert all("mean' changes" in message for message in seen)
