"""The short way through the plain parts of an actor gives bit for bit what `get_dist` gives."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule, TensorDictSequential
from torch import nn
from torch.distributions import Categorical, Normal
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import MLP, NormalParamExtractor

from tests.helpers import assert_same, probabilistic_actor
from torchrl_kl import FrozenActor, KLPenaltyLoss
from torchrl_kl.actors.reading import plain_parts

NORMAL = ["loc", "scale"]


class InWords(nn.Module):
    """Reads an input by its name and returns a dict."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, seen):
        return {"logits": self.linear(seen), "other": seen}


def part(net: Any, out_keys: Any = ("logits",), in_keys: Any = ("observation",)) -> Any:
    return TensorDictModule(
        net, in_keys if isinstance(in_keys, dict) else list(in_keys), list(out_keys)
    )


class WithInput(nn.Sequential):
    """Returns its input, too."""

    def forward(self, seen):
        return *super().forward(seen), seen


def of_normal(*more: str) -> Any:
    kind = WithInput if more else nn.Sequential
    return part(kind(nn.Linear(4, 4), NormalParamExtractor()), [*NORMAL, *more])


def hooked() -> Any:
    module = part(MLP(4, 3, num_cells=[8]))
    module.register_forward_hook(lambda _, args, out: out.set("logits", 3 * out["logits"]))
    return module


NETS: dict[str, tuple[Callable[[], Any], bool]] = {
    "one output": (lambda: part(MLP(4, 3, num_cells=[8])), True),
    "two outputs": (of_normal, True),
    "a dict": (lambda: part(InWords()), True),
    "a function": (lambda: part(lambda seen: seen[..., :3]), True),
    "an input by name": (lambda: part(InWords(), in_keys={"seen": "observation"}), False),
    "an output that is dropped": (lambda: of_normal("_"), False),
    "a hook": (hooked, False),
    "a sequence": (lambda: TensorDictSequential(part(nn.Linear(4, 3))), False),
}


def actor_of(*nets: Any, **kwargs) -> Any:
    normal = "loc" in nets[-1].out_keys
    return probabilistic_actor(
        nets[0] if len(nets) == 1 else TensorDictSequential(*nets),
        in_keys=NORMAL if normal else ["logits"],
        distribution_class=Normal if normal else Categorical,
        return_log_prob=True,
        **kwargs,
    )


def steps(actor: Any) -> Any:
    with torch.no_grad():
        observation = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
        return actor(TensorDict(observation=observation, batch_size=5))


@pytest.mark.parametrize(("make", "plain"), NETS.values(), ids=NETS)
@pytest.mark.parametrize("mode", [ExplorationType.RANDOM, None], ids=str)
def test_a_score_is_that_of_get_dist(make, plain, mode):
    actor = actor_of(make())
    assert plain_parts(actor) == [plain]
    data, reference = steps(actor), FrozenActor(actor)
    expected = data.select("observation")
    with torch.no_grad(), set_exploration_type(mode):
        score = reference.step(reference.inputs(data))
        log_prob = copy.deepcopy(actor).get_dist(expected).log_prob(data["action"])
    assert torch.equal(
        score.log_prob, log_prob.flatten(1).sum(-1) if log_prob.ndim > 1 else log_prob
    )
    assert_same(score.outputs.exclude("action"), expected)


def test_a_part_that_is_not_plain_is_called_between_plain_ones():
    parts = part(nn.Linear(4, 4), ["hidden"]), part(nn.Tanh(), ["act"], ["hidden"])
    last = part(nn.Linear(4, 3), in_keys={"input": "act"})
    draw = actor_of(part(nn.Linear(4, 3))).module[-1]
    make: Any = ProbabilisticTensorDictSequential
    actor = make(*parts, last, draw)
    assert plain_parts(actor) == [True, True, False]
    data, reference = steps(actor), FrozenActor(actor)
    with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
        score = reference.step(reference.inputs(data))
    assert torch.equal(score.log_prob, data["action_log_prob"])


class Sharper(ProbabilisticTensorDictSequential):
    """An actor that builds its distribution itself."""

    def build_dist_from_params(self, tensordict):
        return Categorical(logits=2 * tensordict["logits"])


def test_an_actor_with_its_own_way_to_a_distribution_is_asked_for_it():
    parts = actor_of(part(nn.Linear(4, 3))).module
    actor = Sharper(*parts)
    assert plain_parts(actor) == []
    data, reference = steps(actor), FrozenActor(actor)
    with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
        score = reference.step(reference.inputs(data))
    expected = Categorical(logits=2 * data["logits"]).log_prob(data["action"])
    assert torch.equal(score.log_prob, expected)


class Doubled(ProbabilisticTensorDictSequential):
    """An actor that plays twice what it draws, and knows the density of that."""

    def forward(self, tensordict, *args, **kwargs):  # type: ignore[override]
        out = super().forward(tensordict, *args, **kwargs)
        out["action"] = 2 * out["action"]
        out["action_log_prob"] = out["action_log_prob"] - math.log(2)
        return out

    def log_prob(self, tensordict):
        return self.get_dist(tensordict).log_prob(tensordict["action"] / 2) - math.log(2)


def test_an_actor_with_its_own_log_prob_is_asked_for_it():
    actor = Doubled(*actor_of(of_normal()).module)
    data, reference = steps(actor), FrozenActor(actor)
    with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
        score = reference.step(reference.inputs(data))
    assert torch.equal(score.log_prob, data["action_log_prob"].sum(-1))
    assert_same(score.outputs["loc"], data["loc"])


def test_a_loss_from_actions_needs_the_log_prob_of_the_distribution():
    actor = Doubled(*actor_of(of_normal()).module)
    data = steps(actor)
    assert KLPenaltyLoss(actor, 0.1)(data)["kl"] == 0
    with pytest.raises(ValueError, match="got Doubled with its own `log_prob`, which losses"):
        KLPenaltyLoss(actor, 0.1, gradient="k2")(data)


def test_what_a_plain_network_reads_must_be_there():
    reference = FrozenActor(actor_of(part(nn.Linear(4, 3))))
    with set_exploration_type(ExplorationType.RANDOM), pytest.raises(KeyError, match="observation"):
        reference.step(TensorDict(action=torch.zeros(5, dtype=torch.int64), batch_size=5))
