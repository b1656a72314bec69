"""The private names of TorchRL that torchrl_kl/_torchrl.py uses, and what they mean.

They are those of torchrl 0.14.1. A failure names the version that has changed one.
"""

import inspect
import re
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
import torchrl
from torchrl.checkpoint import CheckpointRotation
from torchrl.collectors.distributed import DistributedCollector, generic
from torchrl.envs import Compose, TransformedEnv
from torchrl.envs.transforms import ObservationNorm, RewardScaling
from torchrl.modules import MaskedCategorical

from tests.helpers import WalkEnv
from torchrl_kl import _torchrl

ROOT = Path(__file__).parents[1]
CHANGED = f"torchrl {torchrl.__version__} has renamed or changed it: adapt torchrl_kl/_torchrl.py"


def test_the_container_of_a_transform():
    transform: Any = RewardScaling(0.0, 1.0)
    assert _torchrl.container_of(transform) is None, CHANGED
    compose = Compose(transform)
    assert "_container" in vars(transform), CHANGED
    assert _torchrl.container_of(transform) is compose, CHANGED
    env: Any = TransformedEnv(WalkEnv(), compose)
    assert _torchrl.container_of(env.transform) is env, CHANGED


def test_the_declared_keys_of_a_transform():
    transform = ObservationNorm(0.0, 1.0, ["a"], ["b"], in_keys_inv=["c"], out_keys_inv=["d"])
    assert _torchrl.declared_keys(transform) == ({"b"}, {"c"}, {"d"}), CHANGED


def test_a_masked_categorical_of_indices():
    logits, indices = torch.zeros(4), torch.tensor([3, 1])
    found = _torchrl.indices_of(MaskedCategorical(logits=logits, indices=indices))
    assert found is not None, CHANGED
    assert found.tolist() == [3, 1], CHANGED
    mask = torch.tensor([True, False, True, True])
    assert _torchrl.indices_of(MaskedCategorical(logits=logits, mask=mask)) is None, CHANGED
    assert _torchrl.indices_of(torch.distributions.Categorical(logits=logits)) is None


def test_the_store_of_a_distributed_collector():
    source = inspect.getsource(DistributedCollector)
    assert 'self._store.get(f"NODE_{rank}_status")' in source, CHANGED
    assert 'b"busy"' in inspect.getsource(generic), CHANGED


def test_the_names_of_checkpoints_that_are_removed():
    source = inspect.getsource(CheckpointRotation)
    assert 'f".{path.name}.delete-{uuid.uuid4().hex}"' in source, CHANGED
    assert _torchrl.DELETED.fullmatch(f".checkpoint-1.torchrl.delete-{uuid.uuid4().hex}")


class Store:
    """One that has an answer the third time that it is asked whether it has one."""

    def __init__(self, answer: bytes):
        self.left, self.answer, self.other = 2, answer, "an attribute"

    def check(self, keys: list[str]) -> bool:
        self.left -= 1
        return self.left < 0

    def get(self, key: str) -> bytes:
        assert self.left < 0
        return self.answer


@pytest.mark.parametrize(("answer", "checks"), [(b"done", 2), (b"busy", 3)])
def test_a_store_is_watched_while_it_waits(answer, checks):
    seen: list[int] = []
    collector: Any = type("Collector", (), {})()
    collector._store = Store(answer)
    _torchrl.watch_store(collector, lambda: seen.append(1))
    assert collector._store.get("key") == answer
    assert len(seen) == checks
    assert collector._store.other == "an attribute"


def test_what_the_check_raises_ends_the_wait():
    collector: Any = type("Collector", (), {})()
    collector._store = Store(b"done")

    def refuse() -> None:
        raise RuntimeError("a worker died")

    _torchrl.watch_store(collector, refuse)
    with pytest.raises(RuntimeError, match="a worker died"):
        collector._store.get("key")


NAMES = ("_container", "_out_keys", "_in_keys_inv", "_out_keys_inv", "_sparse_mask", "_store")


@pytest.mark.parametrize("name", [*NAMES, "_getframe"])
def test_no_other_module_uses_it(name):
    users = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "torchrl_kl").rglob("*.py"))
        if re.search(rf"\b{name}\b", path.read_text())
    ]
    assert users == (["torchrl_kl/_torchrl.py"] if name in NAMES else [])
