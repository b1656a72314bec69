"""KLControlHook in real runs of PPOTrainer: what it penalizes, logs, saves and refuses."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from tensordict import TensorDict, set_list_to_stack
from torch import nn
from torch.testing import assert_close
from torchrl.checkpoint import Checkpoint
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.modules import ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE
from torchrl.record.loggers import CSVLogger
from torchrl.trainers.algorithms import PPOTrainer

from tests.helpers import SpyController, WalkEnv, make_actor, moved, play, policy
from tests.scripts import load
from torchrl_kl import (
    AdaptiveKLController,
    KLConstrainedTransform,
    KLControlHook,
    KLPenaltyLoss,
    KLRewardTransform,
)
from torchrl_kl.language import ResponseKLTransform

# torchrl 0.14.1 calls PPOTrainer a prototype, and registers its own optimizer and replay buffer in
# a way it calls old.
pytestmark = [
    pytest.mark.filterwarnings("ignore:\\w+Trainer is an experimental:UserWarning"),
    pytest.mark.filterwarnings("ignore:The '(optimizer|post_loss)' hook stage:FutureWarning"),
]
N_BATCHES, FRAMES = 3, 24
IS_015 = hasattr(PPOTrainer, "from_env")
PENALIZED = "training/rewards/mean" if IS_015 else "r_training"


class FixedWalk(WalkEnv):
    """Every walk has the same start: a restarted collector goes on as if it had never stopped."""

    def _reset(self, tensordict=None, **kwargs):
        state = torch.get_rng_state()
        torch.manual_seed(0)
        out = super()._reset(tensordict, **kwargs)
        torch.set_rng_state(state)
        return out


def walk_critic() -> ValueOperator:
    torch.manual_seed(0)
    return ValueOperator(nn.Linear(3, 1), in_keys=["observation"])


def make_trainer(
    actor, *, batches: int = N_BATCHES, wrap: Callable[[Any], Any] = lambda loss: loss, **kwargs
) -> Any:
    loss = wrap(ClipPPOLoss(actor, critic := walk_critic()))
    collector = Collector(
        FixedWalk(longest=2),
        actor,
        frames_per_batch=FRAMES,
        total_frames=FRAMES * batches,
        auto_register_policy_transforms=False,
    )
    trainer: Any = PPOTrainer
    return trainer(
        collector=collector,
        total_frames=FRAMES * batches,
        frame_skip=1,
        # With minibatches one more than there are: the last call ends the epoch.
        optim_steps_per_batch=5,
        num_epochs=2,
        loss_module=loss,
        optimizer=torch.optim.Adam(loss.parameters(), lr=1e-2),
        progress_bar=False,
        log_interval=1,
        **{"gae": GAE(gamma=0.99, lmbda=0.95, value_network=critic)} | kwargs,
    )


def test_what_a_run_penalizes_feeds_and_logs(tmp_path):
    actor, controller = policy(), SpyController(per="step", step=0.05)
    stack, logger = (
        KLConstrainedTransform(make_actor(), controller),
        CSVLogger("log", str(tmp_path)),
    )
    gae, estimated = GAE(gamma=0.99, lmbda=0.95, value_network=walk_critic()), []

    def estimate(batch):
        estimated.append(batch["next", "reward"].clone())
        return gae(batch)

    sampler, storage = SamplerWithoutReplacement(), LazyTensorStorage(FRAMES)
    buffer = ReplayBuffer(storage=storage, sampler=sampler, batch_size=FRAMES // 4)
    trainer = make_trainer(actor, gae=estimate, logger=logger, replay_buffer=buffer)
    kl_approx: list[float] = []
    record = lambda *io: kl_approx.append(io[-1]["kl_approx"].item())  # noqa: E731
    trainer.loss_module.register_forward_hook(record)
    KLControlHook(stack).register(trainer)
    batches: list[Any] = []
    trainer.register_op("pre_steps_log", lambda batch: batches.append(batch.clone()))
    trainer.train()

    assert len(batches) == N_BATCHES
    coeffs = (0.1, 0.15, 0.2)
    for batch, coeff in zip(batches, coeffs, strict=True):
        step = batch["next"]
        assert_close(step["task_reward"], step["observation"].sum(-1, keepdim=True))
        ref_log_prob = make_actor().log_prob(batch.select("observation", "action")).detach()
        kl = (batch["action_log_prob"] - ref_log_prob).unsqueeze(-1)
        assert_close(step["reward"], step["task_reward"] - coeff * kl, atol=1e-5, rtol=0)
        assert kl.abs().max() > 0.1
    # Once per epoch, the advantage is that of the penalized reward.
    assert_close(estimated, [batch["next", "reward"] for batch in batches for _ in range(2)])
    measured = [batch["next", "kl"].mean().item() for batch in batches]
    assert controller.calls == [(pytest.approx(kl, abs=1e-6), FRAMES) for kl in measured]

    logged = {
        name: [value for _, value in scalars] for name, scalars in logger.experiment.scalars.items()
    }
    assert logged["kl_to_reference"] == pytest.approx(measured, abs=1e-6)
    assert logged["kl_coeff"] == pytest.approx(coeffs, abs=1e-6)
    for name, key in (("task_reward", "task_reward"), (PENALIZED, "reward")):
        means = [batch["next", key].mean().item() for batch in batches]
        assert logged[name] == pytest.approx(means, abs=1e-6)
    last_epochs = torch.tensor(kl_approx).reshape(N_BATCHES, 2, 4)[:, 1].mean(-1)
    assert_close(torch.tensor(logged["kl_to_old_policy"]), last_epochs, atol=1e-6, rtol=0)
    assert last_epochs.abs().min() > 1e-5


@pytest.mark.skipif(not IS_015, reason="TorchRL 0.15 has it")
def test_a_trainer_that_torchrl_builds_from_an_env(tmp_path):
    actor, logger = policy(), CSVLogger("log", str(tmp_path))
    options: Any = {"total_frames": 3 * FRAMES, "frames_per_batch": FRAMES, "minibatch_size": 50}
    trainer: Any = cast(Any, PPOTrainer).from_env(
        WalkEnv(),
        actor=actor,
        critic=walk_critic(),
        logger=logger,
        progress_bar=False,
        log_interval=1,
        **options,
    )
    hook = KLControlHook(KLConstrainedTransform(actor, 0.1, reference=make_actor()))
    hook.register(trainer)
    batches: list[Any] = []
    trainer.register_op("pre_steps_log", lambda batch: batches.append(batch["next"].clone()))
    trainer.train()
    logged = {name: [row[1] for row in rows] for name, rows in logger.experiment.scalars.items()}
    for name, key in ((PENALIZED, "reward"), ("task_reward",) * 2, ("kl_to_reference", "kl")):
        means = [batch[key].mean().item() for batch in batches]
        assert logged[name] == pytest.approx(means, abs=1e-6)


@pytest.mark.skipif(not IS_015, reason="TorchRL 0.15 has GRPOTrainer")
@pytest.mark.filterwarnings("ignore:size_average and reduce args:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@set_list_to_stack(True)
def test_a_grpo_trainer_whose_collector_penalizes_responses():
    pytest.importorskip("tokenizers")
    from torchrl.trainers.algorithms.grpo import GRPOTrainer

    chat = load("examples/grpo_chat.py")
    args, tokenizer = chat.Args(batches=2), chat.make_tokenizer()
    model, controller = chat.make_model(tokenizer), AdaptiveKLController(0.1, 2.0, 1000)
    collector = chat.make_collector(model, tokenizer, ResponseKLTransform(model, controller), args)
    reads = {"tokenizer": tokenizer, "input_mode": "tokens", "generate": False}
    scorer = chat.TransformersWrapper(model, pad_output=True, **reads)
    n = collector.dialog_turns_per_batch
    sampler = SamplerWithoutReplacement()
    buffer = ReplayBuffer(storage=chat.LazyStackStorage(n), sampler=sampler, batch_size=n)
    buffer.append_transform(chat.MCAdvantage(grpo_size=args.group))
    trainer: Any = GRPOTrainer(
        collector=collector,
        total_frames=2 * n,
        loss_module=chat.GRPOLoss(scorer, kl_to_ref_coeff=None, entropy_bonus=False),
        optimizer=torch.optim.Adam(model.parameters(), lr=args.lr),
        replay_buffer=buffer,
        progress_bar=False,
    )
    batches: list[Any] = []
    trainer.register_op("pre_steps_log", lambda batch: batches.append(batch["next"]))
    trainer.train()
    assert batches[-1]["kl"].abs().max() > 0.01  # the policy has moved
    for step, coeff in zip(batches, (0.1, 0.1 * (1 - 0.2 * n / 1000)), strict=True):
        assert_close(step["task_reward"] - step["reward"], coeff * step["kl"])
    assert controller.coeff.item() == pytest.approx(0.1 * (1 - 0.2 * n / 1000) ** 2)


def walk_trainer(actor, reference, **kwargs) -> tuple[Any, Any, list[Any]]:
    """A trainer, its stack with the `reference`, and a record of each batch."""
    controller = AdaptiveKLController(0.1, target=0.5, horizon=200)
    # A batch finishes 12 trajectories: every second one updates.
    stack = KLConstrainedTransform(reference, controller, update_every=13)
    trainer = make_trainer(actor, batches=5, checkpoint=Checkpoint(), **kwargs)
    KLControlHook(stack).register(trainer)
    history: list[Any] = []

    def remember():
        weights = torch.cat([p.detach().flatten() for p in actor.parameters()])
        pooled = int(stack.penalty.feed.statistics.count)
        history.append((controller.coeff.item(), pooled, weights, torch.get_rng_state()))

    trainer.register_op("post_steps", remember)
    return trainer, stack, history


def test_a_restored_run_goes_on_as_if_it_had_not_stopped(tmp_path):
    file = tmp_path / "trainer"
    whole, _, history = walk_trainer(policy(), make_actor(), save_trainer_file=file)

    def save():  # after the third batch, and no more
        if whole.collected_frames == 3 * FRAMES:
            whole.save_trainer(force_save=True)
            whole.save_trainer_file = None

    whole.register_op("post_steps", save)
    whole.train()
    coeff, pooled, _, rng_state = history[2]
    assert coeff != 0.1
    assert pooled == 12  # the pool is part of what must come back

    # A new process builds the stack from the actor that it has, by now a trained one: the reference
    # is in the checkpoint.
    restored, stack, after = walk_trainer(policy(), moved(make_actor(), seed=7))
    restored.load_from_file(file)
    assert stack.controller.coeff.item() == coeff
    assert_close(list(stack.reference.parameters()), list(make_actor().parameters()))
    restored.register_op("setup", lambda: torch.set_rng_state(rng_state))
    restored.train()
    assert_close([one[:3] for one in after], [one[:3] for one in history[3:]], rtol=0, atol=0)
    with pytest.warns(UserWarning, match=r"after \d+ frames: .* before `load_from_file`"):
        KLControlHook(stack).register(restored, "another")


def test_a_penalty_around_the_loss_is_a_loss_module():
    """The trainer makes its GAE from the critic of the loss, and sets the keys of its flags."""

    def weights(wrap: Callable[[Any, Any], Any]) -> torch.Tensor:
        actor = policy()
        make_trainer(actor, gae=None, batches=1, wrap=lambda loss: wrap(actor, loss)).train()
        return torch.cat([p.detach().flatten() for p in actor.parameters()])

    plain = weights(lambda actor, loss: loss)
    measured = weights(lambda actor, loss: KLPenaltyLoss(actor, 0.0, loss=loss))
    penalized = weights(lambda actor, loss: KLPenaltyLoss(actor, 5.0, loss=loss))
    assert_close(measured, plain, rtol=0, atol=0)
    assert (penalized - plain).abs().max() > 1e-4


def test_the_log_leaves_out_padding():
    batch = play(WalkEnv((2,)), policy(), 6).detach()
    batch["collector", "mask"] = torch.arange(6).expand(2, 6) < 4
    batch["next", "reward"][:, 4:] = 1000.0
    hook = KLControlHook(KLConstrainedTransform(make_actor(), 0.1, estimator="k3"))
    log = hook.log_batch(batch := hook(batch))
    counted: Any = batch["next"][:, :4]
    for name, key in (("kl_to_reference", "kl_estimate"), ("task_reward", "task_reward")):
        assert log[name] == pytest.approx(counted[key].mean().item(), abs=1e-6)
    assert hook.log_update(1, TensorDict(loss_objective=torch.zeros(()))) is None
    with pytest.raises(KeyError, match=r"\('next', 'task_reward'\).*let nothing drop it"):
        hook.log_batch(batch.exclude(("next", "task_reward")))


def test_refusals():
    with pytest.raises(TypeError, match="must be a KLConstrainedTransform, got KLRewardTransform"):
        KLControlHook(KLRewardTransform(make_actor()))
    hook = KLControlHook(KLConstrainedTransform(make_actor(), 0.1))
    with pytest.raises(RuntimeError, match="no batch to penalize: put the stack into the env"):
        hook.log_batch(None)
