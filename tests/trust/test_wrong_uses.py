"""Wrong uses, each of which is refused with an error that names what is wrong."""

import math
import pickle
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import Collector, MultiSyncCollector
from torchrl.envs import Compose, RewardSum, TransformedEnv
from torchrl.envs import transforms as tr

import torchrl_kl
import torchrl_kl.envs
from tests.helpers import WalkEnv, make_actor, moved, play, probabilistic_actor
from tests.trust import uses_numbers, uses_runs, uses_transforms
from torchrl_kl import GPT, CausalLMActor, ExponentialKLController, KLConstrainedTransform

ACTOR, NORMAL, LSTM = make_actor(), make_actor("normal"), make_actor("lstm")
MODEL = GPT(vocab_size=11, block_size=9)


def read_uses(text: str) -> list[tuple[str, str, str]]:
    """Each expression with the name of its error and a part of what that says."""
    lines = text.strip().splitlines()
    uses = []
    for use, error in zip(lines[::2], lines[1::2], strict=True):
        kind, _, says = error.strip().partition(": ")
        uses.append((use, kind, says))
    return uses


USES = [
    use for module in (uses_numbers, uses_transforms, uses_runs) for use in read_uses(module.USES)
]


def controller(**kwargs: Any) -> ExponentialKLController:
    return ExponentialKLController(0.1, target=0.5, **kwargs)


def stack(coeff: Any = 0.1, **kwargs: Any) -> KLConstrainedTransform:
    return KLConstrainedTransform(ACTOR, coeff, **kwargs)


@cache
def batch() -> Any:
    return play(WalkEnv((3,)), moved(ACTOR), 5)


@cache
def normal_batch() -> Any:
    return play(WalkEnv((3,), discrete=False), moved(NORMAL), 5)


def env(*transforms: Any, **kwargs: Any) -> TransformedEnv:
    return TransformedEnv(WalkEnv((3,), **kwargs), Compose(*transforms))


def without(data: Any, *keys: Any) -> Any:
    return data.exclude(*keys)


def with_(data: Any, key: Any, value: Any) -> Any:
    return data.clone().set(key, value)


def unnamed(data: Any) -> Any:
    data = data.clone()
    data.names = None
    return data


def text_actor(**kwargs: Any) -> CausalLMActor:
    return CausalLMActor(MODEL, **kwargs)


def dialog() -> TensorDict:
    tokens = TensorDict(full=torch.tensor([[5, 6, 7, 8]]), prompt=torch.tensor([[5, 6]]))
    return TensorDict(tokens=tokens, next={"reward": torch.ones(1, 1)}, batch_size=1)


NAMES: dict[str, Any] = {
    **{name: getattr(torchrl_kl, name) for name in torchrl_kl.__all__},
    **{name: getattr(torchrl_kl.envs, name) for name in torchrl_kl.envs.__all__},
    **{name: getattr(tr, name) for name in tr.__all__},
    **globals(),
    **{"nan": math.nan, "inf": math.inf, "tensor": torch.tensor},
    **{"nn": nn, "pickle": pickle, "nullcontext": nullcontext, "RewardSum": RewardSum},
    **{"Collector": Collector, "MultiSyncCollector": MultiSyncCollector},
    **{"TensorDictModule": TensorDictModule, "probabilistic_actor": probabilistic_actor},
}


KINDS = (ValueError, TypeError, KeyError, RuntimeError)


# Of TorchRL and PyTorch, about what is then refused.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("use", "error", "text"), USES, ids=[use for use, _, _ in USES])
def test_it_is_refused(use, error, text):
    with pytest.raises((*KINDS, pickle.PicklingError)) as caught:
        eval(use, dict(NAMES))
    assert type(caught.value).__name__ == error
    # The text of a KeyError is shown with quotes around it.
    assert text in str(caught.value.args[0])


def test_their_number():
    assert len({use for use, _, _ in USES}) == len(USES) == 373
