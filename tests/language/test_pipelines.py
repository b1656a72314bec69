"""TorchRL's components with causal language models: collectors, envs in processes, losses."""

import functools
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from torchrl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs import TransformedEnv
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import set_recurrent_mode
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from tests.language.models import (
    KINDS,
    Passes,
    make_actor,
    make_critic,
    make_model,
    true_logits,
)
from torchrl_kl import (
    ConstantKLController,
    ExponentialKLController,
    FrozenActor,
    KLConstrainedTransform,
    KLMonitor,
    KLPenaltyLoss,
)
from torchrl_kl.envs import DigitLanguageEnv

every_kind = pytest.mark.parametrize("kind", KINDS)
N_ROWS, N_STEPS, PROMPT = 3, 4, 5  # texts, tokens of a response, and of a prompt with separator
OPTIONS: dict[str, Any] = {"auto_register_policy_transforms": False}


def make_env(**kwargs) -> DigitLanguageEnv:
    return DigitLanguageEnv(batch_size=[N_ROWS], seed=0, **kwargs)


def check_recorded(batch: Any, model: Any) -> None:
    """Log-probs of a batch are those of the bare model with its present weights."""
    logits = true_logits(model, batch["tokens"], batch["position"]).log_softmax(-1)
    expected = logits.gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)
    assert_close(batch["action_log_prob"], expected, atol=2e-5, rtol=0.0)


def move(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)


def is_stale(batch: Any, model: Any) -> bool:
    logits = true_logits(model, batch["tokens"], batch["position"]).log_softmax(-1)
    found = logits.gather(-1, batch["action"].unsqueeze(-1)).squeeze(-1)
    return not torch.allclose(batch["action_log_prob"], found, atol=1e-3)


class TestInOneProcess:
    @every_kind
    def test_a_collector_while_weights_move(self, kind):
        """Batches of six steps end inside of responses; one position is read per step."""
        actor = make_actor(kind)
        passes = Passes(actor)
        collector = Collector(
            make_env(), actor, frames_per_batch=6 * N_ROWS, total_frames=24 * N_ROWS, **OPTIONS
        )
        for n, batch in enumerate(collector):
            read = passes.take()
            if n > 1:  # weights are those of the batch before: new prompts alone are read in whole
                assert {width for _, width in read} == {1, PROMPT}
            check_recorded(batch, actor.reader.lm.model)
            passes.take()
            if n == 0:
                move(actor)
                assert is_stale(batch, actor.reader.lm.model)
                collector.update_policy_weights_()
        collector.shutdown()

    @every_kind
    @pytest.mark.parametrize("estimator", ["k1", pytest.param("exact", marks=pytest.mark.slow)])
    def test_an_env_with_the_stack(self, kind, estimator):
        actor, other = make_actor(kind), make_actor(kind, seed=1)
        stack = KLConstrainedTransform(actor, 0.1, reference=other, estimator=estimator)
        env = TransformedEnv(make_env(), stack)
        passes = Passes(stack)
        with set_exploration_type(ExplorationType.RANDOM), torch.no_grad():
            env.rollout(N_STEPS, actor)
            passes.take()
            inside = env.rollout(N_STEPS, actor)
        assert passes.take() == [(N_ROWS, PROMPT)] + [(N_ROWS, 1)] * (N_STEPS - 1)
        check_recorded(inside, actor.reader.lm.model)
        batch = inside.exclude(
            *(("next", key) for key in ("kl", "kl_coeff", "task_reward", "ref_log_prob")),
            *("kl", "kl_coeff", "task_reward", "ref_log_prob"),
        )
        batch["next", "reward"] = inside["next", "task_reward"]
        batch.names = [None, "time"]
        outside = KLConstrainedTransform(actor, 0.1, reference=other, estimator=estimator)(batch)
        for key in ("ref_log_prob", "kl", "reward"):
            assert_close(inside["next", key], outside["next", key], atol=5e-5, rtol=0.0)


class TestTraining:
    @pytest.mark.parametrize("kind", KINDS)
    def test_ppo_with_all_parts(self, kind):
        """Collector, stack, GAE, replay buffer, losses, controller and monitor, three batches."""
        actor, critic = make_actor(kind), make_critic(kind)
        controller = ExponentialKLController(0.1, target=0.5, per="trajectory")
        stack = KLConstrainedTransform(actor, controller)
        penalty = KLPenaltyLoss(actor, ConstantKLController(0.1), reference=FrozenActor(actor))
        monitor = KLMonitor(controller, window=1)
        loss = ClipPPOLoss(actor, critic)
        gae = GAE(gamma=1.0, lmbda=0.95, value_network=critic, deactivate_vmap=True)
        optimizer = torch.optim.Adam(loss.parameters(), lr=3e-3)
        buffer = ReplayBuffer(
            storage=LazyTensorStorage(8), sampler=SamplerWithoutReplacement(), batch_size=4
        )
        collector = Collector(
            DigitLanguageEnv(batch_size=[8], seed=0),
            actor,
            frames_per_batch=8 * N_STEPS,
            total_frames=3 * 8 * N_STEPS,
            postproc=stack,
            **OPTIONS,
        )
        kls = []
        for batch in collector:
            check_recorded(batch, actor.reader.lm.model)
            kls.append(batch["next", "kl"].sum((1, 2)).mean().item())
            monitor(batch)
            with torch.no_grad(), set_recurrent_mode(True):
                gae(batch)
            buffer.extend(batch)
            for _ in range(4):
                part: Any = buffer.sample()
                out = loss(part)
                raw = part.exclude(("next", "kl_coeff"), "kl_coeff")
                total = out["loss_objective"] + out["loss_critic"] + out["loss_entropy"]
                optimizer.zero_grad()
                (total + penalty(raw)["loss_kl"]).backward()
                optimizer.step()
            collector.update_policy_weights_()
        collector.shutdown()
        assert abs(kls[0]) < 1e-5
        assert abs(kls[2]) > 1e-3
        assert controller.coeff != 0.1


@pytest.mark.slow
@pytest.mark.timeout(600, method="thread")
@pytest.mark.parametrize("collector_class", [MultiSyncCollector, MultiAsyncCollector])
@pytest.mark.parametrize("kind", ["llama", "gpt"])
def test_collectors_in_processes(collector_class, kind):
    """The workers' caches follow weights that arrive in shared memory."""
    actor = make_actor(kind)
    models = [make_model(kind)]
    collector = collector_class(
        [functools.partial(DigitLanguageEnv, batch_size=(N_ROWS,), seed=seed) for seed in (0, 1)],
        actor,
        frames_per_batch=2 * N_ROWS * 6,
        total_frames=8 * 2 * N_ROWS * 6,
        **OPTIONS,
    )
    batch: Any = None
    try:
        for n, batch in enumerate(collector):
            if collector_class is MultiSyncCollector:  # others may be behind
                check_recorded(batch, models[-1])
            if n < 4:
                move(actor)
                models.append(make_model(kind))
                models[-1].load_state_dict(actor.reader.lm.model.state_dict())
                collector.update_policy_weights_()
        check_recorded(batch, models[-1])
    finally:
        collector.shutdown()
