"""ResponseKLTransform with LLMCollector that fills a replay buffer, and with RayLLMCollector."""

import functools
from typing import Any

import pytest
import torch
from tensordict import TensorDict, set_list_to_stack
from torch.testing import assert_close
from torch.utils.data import DataLoader
from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs import Compose, InitTracker, StepCounter
from torchrl.envs.llm import ChatEnv

from tests.language.chats import DEPRECATED, QUESTIONS, make_model, make_tokenizer, make_wrapper
from torchrl_kl import AdaptiveKLController, ResponseKLTransform

pytestmark = DEPRECATED


def collate(items: list[str]) -> TensorDict:
    with set_list_to_stack(True):
        return TensorDict(query=list(items), batch_size=(len(items),))


def make_env(n: int = 3) -> Any:
    with set_list_to_stack(True):
        loader = DataLoader(QUESTIONS * 10, batch_size=n, collate_fn=collate)  # type: ignore[arg-type]
        env = ChatEnv.from_dataloader(
            loader, tokenizer=make_tokenizer(), input_mode="text", batch_size=(n,), repeats=1
        )
        return env.append_transform(Compose(InitTracker(), StepCounter(max_steps=1)))  # type: ignore[call-arg]


def make_policy() -> Any:
    tokenizer = make_tokenizer()
    return make_wrapper(make_model("llama", tokenizer), tokenizer, "text")


def add_reward(batch: Any) -> Any:
    batch["next", "reward"] = torch.ones(*batch.batch_size, 1, 1)
    return batch


OPTIONS: dict[str, Any] = {"dialog_turns_per_batch": 6, "total_dialog_turns": 12}


@pytest.mark.parametrize("place", ["postproc", "buffer"])
def test_a_collector_that_fills_a_replay_buffer(place):
    """The transform in the buffer, or in the `postproc` of a collector that extends it."""
    tokenizer = make_tokenizer()
    model, reference = (make_model("llama", tokenizer, seed) for seed in (0, 1))
    controller = AdaptiveKLController(0.3, target=1.0, horizon=100)
    transform = ResponseKLTransform(model, controller, reference=reference)
    buffer = ReplayBuffer(storage=LazyStackStorage(12), batch_size=4)
    if place == "buffer":
        buffer.append_transform(transform, invert=True)
    collector = LLMCollector(
        make_env(),
        policy=make_wrapper(model, tokenizer, "text"),
        replay_buffer=buffer,
        postproc=add_reward if place == "buffer" else lambda it: transform(add_reward(it)),
        **OPTIONS,
    )
    with set_list_to_stack(True):
        assert list(collector) == [None, None]
    assert len(buffer) == 12
    coeff = controller.coeff.item()
    assert coeff != 0.3
    stored = buffer[:]["next"]
    assert_close(stored["reward"], stored["task_reward"] - stored["kl_coeff"] * stored["kl"])
    assert stored["kl"].abs().min() > 1e-3
    assert len(stored["kl_coeff"].unique()) == 2  # of the two batches
    buffer.sample()
    assert controller.coeff == coeff  # what is stored is not scored again


@pytest.mark.slow
@pytest.mark.timeout(600, method="thread")
def test_a_collector_of_ray():
    """Its worker has its own policy and hands batches to a buffer; the learner scores them."""
    ray = pytest.importorskip("ray")
    from torchrl.collectors.llm import RayLLMCollector

    started = not ray.is_initialized()  # by the tests of collectors, in the same process
    if started:
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    tokenizer = make_tokenizer()
    model, reference = (make_model("llama", tokenizer, seed) for seed in (0, 1))
    transform = ResponseKLTransform(model, 0.3, reference=reference)
    held = ray.remote(num_cpus=0)(Held).remote()
    make = functools.partial(
        RayLLMCollector,
        make_env,
        policy_factory=make_policy,
        replay_buffer=Outbox(held),
        remote_config={"num_cpus": 1},
        **OPTIONS,
    )
    try:
        with pytest.raises(Exception, match="cannot be sent to another process"):
            make(postproc=transform)
        with set_list_to_stack(True):
            collector = make(postproc=add_reward)
            assert [collector.next() for _ in range(2)] == [None, None]
            batches = ray.get(held.take.remote())
            results = [transform(batch)["next"] for batch in batches]
        assert sum(len(result) for result in results) == 12
        for result in results:
            assert_close(result["reward"], result["task_reward"] - 0.3 * result["kl"])
            assert result["kl"].abs().min() > 1e-3
    finally:
        if started:
            ray.shutdown()


class Held:
    """What a collector in another process has written: an actor of Ray."""

    def __init__(self) -> None:
        self.batches: list[Any] = []

    def extend(self, batch: Any) -> None:
        self.batches.append(batch)

    def take(self) -> list[Any]:
        return self.batches


class Outbox:
    """A buffer that a collector can fill from another process, as RayReplayBuffer cannot here.

    2026-11: TorchRL 0.14.1 fails to pickle that one (`_futures_lock`).
    """

    def __init__(self, held: Any):
        self.held = held

    def extend(self, batch: Any) -> None:
        import ray

        ray.get(self.held.extend.remote(batch))
