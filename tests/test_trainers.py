"""KLControlHook in real runs of PPOTrainer: what it penalizes, logs, saves and refuses."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torch.testing import assert_close
from torchrl.checkpoint import Checkpoint
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs import GymEnv
from torchrl.modules import MLP, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE
from torchrl.record.loggers import CSVLogger
from torchrl.trainers.algorithms import PPOTrainer

from tests.helpers import WalkEnv, make_actor, moved, policy, probabilistic_actor, spied
from torchrl_kl import (
    AdaptiveKLController,
    KLConstrainedTransform,
    KLControlHook,
    KLPenaltyLoss,
    KLRewardTransform,
    RunCheckpoint,
)

# torchrl 0.14.1 calls PPOTrainer a prototype, and registers its own optimizer and replay buffer in
# a way it calls old.
pytestmark = [
    pytest.mark.filterwarnings("ignore:PPOTrainer is an experimental:UserWarning"),
    pytest.mark.filterwarnings("ignore:The '(optimizer|post_loss)' hook stage:FutureWarning"),
]
N_BATCHES, FRAMES = 3, 64


def make_trainer(
    env,
    actor,
    critic,
    *,
    frames: int = FRAMES,
    batches: int = N_BATCHES,
    wrap: Callable[[Any], Any] = lambda loss: loss,
    **kwargs,
) -> Any:
    loss = wrap(ClipPPOLoss(actor, critic))
    collector = Collector(
        env,
        actor,
        frames_per_batch=frames,
        total_frames=frames * batches,
        auto_register_policy_transforms=False,
    )
    trainer: Any = PPOTrainer
    return trainer(
        collector=collector,
        total_frames=frames * batches,
        frame_skip=1,
        # With minibatches one more than there are: the last call ends the epoch.
        optim_steps_per_batch=5,
        num_epochs=2,
        loss_module=loss,
        optimizer=torch.optim.Adam(loss.parameters(), lr=1e-2),
        progress_bar=False,
        log_interval=1,
        **kwargs,
    )


def walk_critic() -> ValueOperator:
    torch.manual_seed(0)
    return ValueOperator(nn.Linear(3, 1), in_keys=["observation"])


def cartpole_actor() -> Any:
    torch.manual_seed(0)
    net = TensorDictModule(MLP(4, 2, num_cells=[16]), ["observation"], ["logits"])
    return probabilistic_actor(
        net,
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )


class Run:
    """Three batches of CartPole with minibatches, and everything that was seen on the way."""

    def __init__(self, folder):
        self.origin = cartpole_actor()
        self.actor = moved(self.origin)
        self.first_weights = copy.deepcopy(self.actor.state_dict())
        _, self.controller = spied("step", step=0.05)
        self.stack = KLConstrainedTransform(self.origin, self.controller, update_every=10)
        critic = ValueOperator(MLP(4, 1, num_cells=[16]), in_keys=["observation"])
        gae = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
        self.estimated: list[torch.Tensor] = []  # the rewards that the advantage was computed from

        def estimate(batch):
            self.estimated.append(batch["next", "reward"].clone())
            return gae(batch)

        self.logger = CSVLogger("log", log_dir=str(folder))
        env = GymEnv("CartPole-v1", categorical_action_encoding=True)
        env.set_seed(0)
        trainer = make_trainer(
            env,
            self.actor,
            critic,
            gae=estimate,
            logger=self.logger,
            replay_buffer=ReplayBuffer(
                storage=LazyTensorStorage(FRAMES),
                sampler=SamplerWithoutReplacement(),
                batch_size=FRAMES // 4,
            ),
        )
        self.kl_approx: list[float] = []
        trainer.loss_module.register_forward_hook(
            lambda *io: self.kl_approx.append(io[-1]["kl_approx"].item())
        )
        KLControlHook(self.stack).register(trainer)
        self.batches: list[Any] = []
        trainer.register_op("pre_steps_log", lambda batch: self.batches.append(batch.clone()))
        trainer.train()

    def logged(self, name: str) -> list[float]:
        return [value for _, value in self.logger.experiment.scalars[name]]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    torch.manual_seed(0)
    return Run(tmp_path_factory.mktemp("trainer"))


class TestARun:
    def test_the_reward_is_penalized(self, run):
        assert len(run.batches) == N_BATCHES
        for batch in run.batches:
            step = batch["next"]
            assert (step["task_reward"] == 1).all()  # CartPole's own
            log_prob = batch["action_log_prob"] - run.origin.log_prob(
                batch.select("observation", "action")
            )
            assert_close(
                step["reward"],
                1 - step["kl_coeff"] * log_prob.detach().unsqueeze(-1),
                atol=1e-5,
                rtol=0,
            )
            assert step["kl"].abs().max() > 0.1

    def test_the_advantage_is_that_of_the_penalized_reward(self, run):
        rewards = [
            batch["next", "reward"] for batch in run.batches for _ in range(2)
        ]  # once per epoch
        assert_close(run.estimated, rewards)

    def test_the_controller_moves_once_per_batch(self, run):
        assert [n for _, n in run.controller.calls] == [FRAMES] * N_BATCHES
        measured = [batch["next", "kl"].mean().item() for batch in run.batches]
        assert_close([kl for kl, _ in run.controller.calls], measured, atol=1e-6, rtol=0)
        for batch, coeff in zip(run.batches, (0.1, 0.15, 0.2), strict=True):
            assert_close(batch["next", "kl_coeff"], torch.full((FRAMES, 1), coeff))

    def test_the_policy_moves_and_the_reference_does_not(self, run):
        reference = run.stack.reference.actor.state_dict()
        for name, value in run.origin.state_dict().items():
            assert torch.equal(reference[name], value)
            assert not torch.equal(run.actor.state_dict()[name], run.first_weights[name])

    def test_the_log_keeps_the_two_divergences_apart(self, run):
        means = {
            name: [batch["next", name].mean().item() for batch in run.batches]
            for name in ("kl", "kl_coeff")
        }
        assert_close(run.logged("kl_to_reference"), means["kl"])
        assert_close(run.logged("kl_coeff"), means["kl_coeff"])
        assert run.logged("task_reward") == [1.0] * N_BATCHES
        last_epochs = torch.tensor(run.kl_approx).reshape(N_BATCHES, 2, 4)[:, 1].mean(-1)
        assert_close(torch.tensor(run.logged("kl_to_old_policy")), last_epochs, atol=1e-6, rtol=0)
        assert last_epochs.abs().min() > 1e-5
        penalized = [batch["next", "reward"].mean().item() for batch in run.batches]
        assert_close(run.logged("r_training"), penalized, atol=1e-6, rtol=0)


class FixedWalk(WalkEnv):
    """Two steps from the same start: a restarted collector goes on as if it had never stopped."""

    def _reset(self, tensordict=None, **kwargs):
        state = torch.get_rng_state()
        torch.manual_seed(0)
        out = super()._reset(tensordict, **kwargs)
        torch.set_rng_state(state)
        return out


def walk_trainer(reference, *, batches: int = 5, **kwargs):
    """A trainer, its stack with the `reference`, and what `remember` saves of each batch."""
    actor = policy()
    controller = AdaptiveKLController(0.1, target=0.5, horizon=200)
    stack = KLConstrainedTransform(
        reference, controller, update_every=12
    )  # a batch has 10: every second one updates
    trainer = make_trainer(
        FixedWalk(longest=2), actor, walk_critic(), frames=20, batches=batches, **kwargs
    )
    KLControlHook(stack).register(trainer)
    history: list[tuple[float, int, torch.Tensor, torch.Tensor]] = []

    def remember():
        weights = torch.cat([p.detach().flatten() for p in actor.parameters()])
        coeff, pooled = controller.coeff.item(), int(stack.statistics.count)
        history.append((coeff, pooled, weights, torch.get_rng_state()))

    trainer.register_op("post_steps", remember)
    return trainer, stack, history


@pytest.mark.parametrize("kind", [Checkpoint, RunCheckpoint, lambda: None])
@pytest.mark.filterwarnings("ignore:The default Trainer checkpoint format:FutureWarning")
@pytest.mark.filterwarnings("ignore:The legacy CKPT_BACKEND:DeprecationWarning")
def test_a_restored_run_goes_on_as_if_it_had_not_stopped(tmp_path, kind):
    torch.manual_seed(0)
    file = tmp_path / "trainer"
    whole, _, history = walk_trainer(make_actor(), save_trainer_file=file, checkpoint=kind())

    def save():  # after the third batch, and no more
        if whole.collected_frames == 60:
            whole.save_trainer(force_save=True)
            whole.save_trainer_file = None

    whole.register_op("post_steps", save)
    whole.train()
    coeff, pooled, _, rng_state = history[2]
    assert coeff != 0.1
    assert pooled == 10  # the pool is part of what must come back

    # A new process builds the stack from the actor that it has, by now a trained one: the reference
    # is in the checkpoint.
    restored, stack, after = walk_trainer(moved(make_actor(), seed=7), checkpoint=kind())
    restored.load_from_file(file)
    assert stack.controller.coeff.item() == coeff
    for mine, original in zip(stack.reference.parameters(), make_actor().parameters(), strict=True):
        assert torch.equal(mine, original)
    restored.register_op("setup", lambda: torch.set_rng_state(rng_state))
    restored.train()
    assert [entry[:2] for entry in after] == [entry[:2] for entry in history[3:]]
    assert len(after) == 2
    for entry, expected in zip(after, history[3:], strict=True):
        assert torch.equal(entry[2], expected[2])


def test_a_hook_that_comes_after_the_checkpoint_is_warned_of(tmp_path):
    """Nothing was restored: the reference was the resumed policy, the coefficient the first one."""
    file = tmp_path / "trainer"
    trainer, _, _ = walk_trainer(
        make_actor(), batches=2, save_trainer_file=file, checkpoint=Checkpoint()
    )
    trainer.register_op("post_steps", lambda: trainer.save_trainer(force_save=True))
    trainer.train()
    actor = make_actor()
    restored = make_trainer(FixedWalk(), actor, walk_critic())
    restored.load_from_file(file)
    with pytest.warns(UserWarning, match=r"after \d+ frames.* before `load_from_file`"):
        KLControlHook(KLConstrainedTransform(actor, 0.1)).register(restored)


def weights_trained_with(wrap: Callable[[Any, Any], Any]) -> list[torch.Tensor]:
    """Of a policy and its critic, after a trainer whose loss is wrapped, given the policy."""
    actor, critic = policy(), walk_critic()
    torch.manual_seed(0)
    make_trainer(WalkEnv(), actor, critic, wrap=lambda loss: wrap(actor, loss)).train()
    return [p.detach() for module in (actor, critic) for p in module.parameters()]


def test_a_penalty_around_the_loss_is_a_loss_module():
    """The trainer makes its GAE from the critic of the loss, and sets the keys of its flags."""
    plain = weights_trained_with(lambda actor, loss: loss)
    measured = weights_trained_with(lambda actor, loss: KLPenaltyLoss(actor, 0.0, loss=loss))
    penalized = weights_trained_with(lambda actor, loss: KLPenaltyLoss(actor, 5.0, loss=loss))
    assert_close(measured, plain, rtol=0, atol=0)
    assert not torch.equal(penalized[0], plain[0])
    with pytest.raises(AttributeError, match="'KLPenaltyLoss' object has no attribute"):
        _ = KLPenaltyLoss(policy(), 0.1).critic_network


def padded_batch() -> Any:
    """Two trajectories of 3 and 1 steps, padded with numbers that must not be looked at."""
    observation = torch.randn(2, 3, 3)
    done = torch.tensor([[False, False, True], [True, True, True]]).unsqueeze(-1)
    following = observation.roll(-1, 1)
    step = TensorDict(
        reward=torch.full((2, 3, 1), 2.0), done=done, observation=following, batch_size=(2, 3)
    )
    batch = policy()(TensorDict(observation=observation, next=step, batch_size=(2, 3)))
    batch["collector", "mask"] = torch.tensor([[True, True, True], [True, False, False]])
    batch["next", "reward"][1, 1:] = 1000.0
    batch.names = [None, "time"]
    return batch.detach()


class TestTheLog:
    def test_padding_is_in_no_mean(self):
        hook = KLControlHook(KLConstrainedTransform(make_actor(), 0.1))
        batch = hook(padded_batch())
        log = hook.log_batch(batch)
        valid: Any = batch[batch["collector", "mask"]]
        assert log["task_reward"] == 2.0
        expected = (
            valid["action_log_prob"] - make_actor().log_prob(valid.select("observation", "action"))
        ).mean()
        assert log["kl_to_reference"] == pytest.approx(expected.item(), abs=1e-6)
        assert log["kl_coeff"] == pytest.approx(0.1)

    def test_a_step_that_was_left_out_is_not_in_the_mean_of_the_kl(self):
        hook = KLControlHook(KLConstrainedTransform(make_actor(), 0.1, on_invalid="mask"))
        batch = padded_batch()
        batch["action_log_prob"][0, :2] = math.nan
        with pytest.warns(UserWarning, match="got invalid numbers"):
            batch = hook(batch)
        kl = [batch["next", "kl"][0, 2].item(), batch["next", "kl"][1, 0].item()]
        assert hook.log_batch(batch)["kl_to_reference"] == pytest.approx(sum(kl) / 2)

    def test_it_shows_the_better_measurement(self):
        hook = KLControlHook(KLConstrainedTransform(make_actor(), 0.1, estimator="k3"))
        batch = hook(padded_batch())
        valid: Any = batch["next"][batch["collector", "mask"]]
        assert hook.log_batch(batch)["kl_to_reference"] == pytest.approx(
            valid["kl_estimate"].mean().item()
        )
        assert valid["kl_estimate"].mean() != valid["kl"].mean()

    def test_a_loss_without_a_divergence_of_its_own_logs_none(self):
        hook = KLControlHook(KLConstrainedTransform(make_actor(), 0.1))
        assert hook.log_update(1, TensorDict(loss_objective=torch.zeros(()))) is None
        assert hook.log_update(1, None) is None

    def test_a_key_that_was_dropped_is_named(self):
        hook = KLControlHook(KLConstrainedTransform(make_actor(), 0.1))
        batch = hook(padded_batch())
        del batch["next", "kl"]
        with pytest.raises(
            KeyError, match=r"\('next', 'kl'\).*is not in the data.*let nothing drop it"
        ):
            hook.log_batch(batch)


class TestRefusals:
    def test_it_wants_a_stack(self):
        with pytest.raises(
            TypeError, match="`stack` must be a KLConstrainedTransform, got KLRewardTransform"
        ):
            KLControlHook(KLRewardTransform(make_actor()))  # type: ignore[arg-type]

    def test_an_advantage_of_rewards_without_the_penalty(self):
        trainer = make_trainer(WalkEnv(), policy(), walk_critic(), add_gae=False)
        trainer.register_op("batch_process", GAE(gamma=1.0, lmbda=1.0, value_network=walk_critic()))
        KLControlHook(KLConstrainedTransform(make_actor(), 0.1)).register(trainer)
        with pytest.raises(
            RuntimeError,
            match="has an 'advantage' already, computed from rewards without the penalty",
        ):
            trainer.train()

    def test_a_collector_that_hands_out_no_batches(self):
        hook = KLControlHook(KLConstrainedTransform(make_actor(), 0.1))
        with pytest.raises(
            RuntimeError,
            match="writes its batches into a replay buffer .* put the stack into the env",
        ):
            hook.log_batch(None)

    def test_a_second_penalty(self):
        trainer = make_trainer(WalkEnv(), policy(), walk_critic())
        KLControlHook(KLConstrainedTransform(make_actor(), 0.1)).register(trainer, "first")
        KLControlHook(KLConstrainedTransform(make_actor(), 0.1)).register(trainer, "second")
        with pytest.raises(RuntimeError, match="was penalized for its KL before"):
            trainer.train()
