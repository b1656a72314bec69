"""Tiny training runs that can be saved after every step, made of the package's objects."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.checkpoint import CheckpointRotation, GlobalRNGState
from torchrl.collectors import Collector, MultiSyncCollector
from torchrl.envs import TransformedEnv
from torchrl.envs.utils import ExplorationType, set_exploration_type

from tests.gpt_helpers import sharp
from torchrl_kl import (
    GPT,
    AdaptiveKLController,
    CausalLMActor,
    ExponentialKLController,
    KLConstrainedTransform,
    KLMonitor,
    KLPenaltyLoss,
    PIDKLController,
    RunCheckpoint,
    kl_collector,
    sample_responses,
)
from torchrl_kl.envs import DigitLanguageEnv

SIZES: dict[str, Any] = {"n_layer": 1, "n_head": 1, "n_embd": 8}
FRAMES = 32  # 8 texts of 4 tokens


def new_gpt(seed: int = 0) -> GPT:
    return sharp(GPT(11, 8, n_layer=2, n_head=2, n_embd=8, dropout=0.1), seed)


def same_model(one: GPT, other: GPT) -> bool:
    state, others = one.state_dict(), other.state_dict()
    same = one.config == other.config and state.keys() == others.keys()
    return same and all(value.equal(others[name]) for name, value in state.items())


class Run(ABC):
    """A run; `parts` is all that changes in it. Two of the same seed begin alike."""

    def __init__(self, seed: int):
        torch.manual_seed(seed)
        self.model = sharp(GPT(11, 8, **SIZES), seed)
        self.policy = CausalLMActor(self.model)
        self.first = CausalLMActor(sharp(GPT(11, 8, **SIZES), seed + 1))  # the reference
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.9)
        self.parts: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "random": GlobalRNGState(),
        }
        self.steps_done = 0

    def learn(self, batch: TensorDictBase, extra: torch.Tensor | float = 0.0) -> None:
        log_prob = self.policy.get_dist(batch.select("tokens", "position")).log_prob(
            batch["action"]
        )
        loss = -(log_prob * batch["next", "reward"].squeeze(-1)).mean() + extra
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()

    @abstractmethod
    def step(self) -> list[float]:
        """One step of training; what it logs."""

    def log(self, batch: TensorDictBase, controller) -> list[float]:
        names = ("kl", "kl_coeff", "task_reward", "episode_kl")
        values = [batch.get(("next", name), torch.zeros(1)).double().sum() for name in names]
        return [*(value.item() for value in values), controller.coeff.item()]


class Postproc(Run):
    """The stack as a collector's `postproc`, with a monitor. Each batch begins new texts."""

    def __init__(self, seed: int):
        super().__init__(seed)
        controller = PIDKLController(0.2, target=0.5, deadband=0.1)
        self.stack = KLConstrainedTransform(
            self.policy, controller, reference=self.first, estimator="k3", update_every=12
        )
        self.monitor = KLMonitor(controller, actor=self.policy, window=2)
        self.env = DigitLanguageEnv(batch_size=(8,), seed=seed)
        self.collector = Collector(
            self.env,
            self.policy,
            frames_per_batch=FRAMES,
            total_frames=10**6,
            postproc=self.stack,
            reset_at_each_iter=True,
            auto_register_policy_transforms=False,
        )
        self.batches = iter(self.collector)
        self.parts |= {"stack": self.stack, "env": self.env, "monitor": self.monitor}

    def step(self) -> list[float]:
        batch = next(self.batches)
        told = len(self.monitor(batch))
        self.learn(batch)
        return [told, *self.log(batch, self.stack.controller)]


class InEnv(Run):
    """The stack in the env of a collector, with a reference that follows the policy."""

    def __init__(self, seed: int):
        super().__init__(seed)
        controller = ExponentialKLController(0.2, target=0.05, per="step")
        self.stack = KLConstrainedTransform(
            self.policy, controller, reference=self.first, update_every=50
        )
        base = DigitLanguageEnv(batch_size=(8,), seed=seed)
        self.collector = Collector(
            TransformedEnv(base, self.stack),
            self.policy,
            frames_per_batch=FRAMES,
            total_frames=10**6,
            reset_at_each_iter=True,
            auto_register_policy_transforms=False,
        )
        self.batches = iter(self.collector)
        self.parts |= {"stack": self.stack, "env": base}

    def step(self) -> list[float]:
        batch = next(self.batches)
        self.learn(batch)
        self.stack.update_reference(self.policy, tau=0.1)
        return self.log(batch, self.stack.controller)


class OwnLoop(Run):
    """A loop over steps of an env: what is being written is saved as a part, so texts go on."""

    follows = True  # whether the reference follows the policy

    def __init__(self, seed: int):
        super().__init__(seed)
        controller = AdaptiveKLController(0.2, target=0.5, horizon=100)
        # The average of a reference in half precision is kept in single precision.
        stack = KLConstrainedTransform(
            self.policy, controller, reference=self.first, update_every=5
        )
        self.stack: Any = stack.to(torch.bfloat16)
        base = DigitLanguageEnv(batch_size=(8,), seed=seed)
        self.env = TransformedEnv(base, self.stack)
        self.state = self.env.reset()
        self.parts |= {"stack": self.stack, "env": base, "state": self}

    def state_dict(self) -> dict[str, Any]:
        return self.state.to_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state.update(state)

    def step(self) -> list[float]:
        logged, done = [], self.state
        for _ in range(3):  # less than a text
            with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
                done, self.state = self.env.step_and_maybe_reset(self.policy(self.state))
            logged += self.log(done, self.stack.controller)
        self.learn(done)
        if self.follows:
            self.stack.update_reference(self.policy, tau=0.01)
        return logged


class FixedReference(OwnLoop):
    """The keys and values that the reference has cached are those of texts that go on."""

    follows = False


class Loss(Run):
    """The KL as a term of the loss, with rows that end within a text."""

    def __init__(self, seed: int):
        super().__init__(seed)
        controller = AdaptiveKLController(0.2, target=0.5, horizon=100)
        self.loss = KLPenaltyLoss(self.policy, controller, reference=self.first)
        self.env = DigitLanguageEnv(batch_size=(8,), seed=seed)
        self.state = self.env.reset().select("tokens", "position")
        self.ids = torch.arange(8)
        self.parts |= {"loss": self.loss, "env": self.env, "state": self}

    def state_dict(self) -> dict[str, Any]:
        return {"text": self.state.to_dict(), "ids": self.ids}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state.update(state["text"])
        self.ids = state["ids"]

    def step(self) -> list[float]:
        steps = []
        for _ in range(6):  # one text and a half
            with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
                done, self.state = self.env.step_and_maybe_reset(self.policy(self.state))
            steps.append(done.set(("collector", "traj_ids"), self.ids.clone()))
            ended = done["next", "done"].squeeze(-1)
            self.ids = torch.where(ended, self.ids.max() + 1 + torch.arange(8), self.ids)
            self.state = self.state.select("tokens", "position")
        batch: Any = torch.stack(steps, -1)
        batch.names = [None, "time"]
        coeff = self.loss.update_controller(batch)
        out = self.loss(batch)
        self.learn(batch, out["loss_kl"])
        return [coeff, out["kl"].item(), out["loss_kl"].item()]


class Responses(Run):
    """Whole responses, with a generator of their own."""

    def __init__(self, seed: int):
        super().__init__(seed)
        controller = ExponentialKLController(0.2, target=0.5)
        self.stack = KLConstrainedTransform(
            self.policy, controller, reference=self.first, update_every=12
        )
        self.generator = torch.Generator().manual_seed(seed)
        self.parts |= {"stack": self.stack, "generator": self.generator}

    def step(self) -> list[float]:
        prompts = torch.randint(10, (8, 3), generator=self.generator)
        batch = sample_responses(
            self.policy,
            prompts,
            4,
            pad_token=10,
            reward_fn=lambda texts: (texts[:, -1] % 2).float(),
            generator=self.generator,
        )
        batch = self.stack(batch)
        self.learn(batch)
        return self.log(batch, self.stack.controller)


class Workers(Run):
    """Copies of the stack in the workers of `kl_collector`, which are seeded before each batch."""

    kind: Any = MultiSyncCollector

    def __init__(self, seed: int):
        super().__init__(seed)
        controller = AdaptiveKLController(0.2, target=0.5, horizon=100)
        self.stack = KLConstrainedTransform(self.policy, controller, reference=self.first)
        # Seeded, since a collector reads texts as soon as it is built, and they are cached.
        make_env: Callable[[], Any] = partial(DigitLanguageEnv, batch_size=(8,), seed=seed)
        arguments: dict[str, Any] = {"frames_per_batch": FRAMES, "total_frames": 10**6}
        self.collector = kl_collector(
            self.kind, make_env, self.policy, self.stack, where="workers", **arguments
        )
        self.batches = iter(self.collector)
        self.parts |= {"stack": self.stack}

    def step(self) -> list[float]:
        self.collector.update_policy_weights_()
        torch.manual_seed(self.steps_done)
        self.collector.set_seed(self.steps_done)
        if self.kind is Collector:  # the others begin new texts by themselves
            self.collector.reset()
        batch = next(self.batches)
        self.learn(batch)
        return self.log(batch, self.stack.controller)

    def close(self) -> None:
        """Stops processes."""
        self.collector.shutdown()


class InProcess(Workers):
    """The same in one process."""

    kind = Collector


def save(run: Run, path: Any) -> None:
    progress = {"steps_done": run.steps_done}
    RunCheckpoint(**run.parts, progress=progress).save(path)


def load(run: Run, path: Any) -> None:
    progress: dict[str, int] = {}
    RunCheckpoint(**run.parts, progress=progress).load(path)
    run.steps_done = progress["steps_done"]


def go_on(run: Run, until: int) -> list[list[float]]:
    """What each step up to a number of them logs."""
    logged = []
    while run.steps_done < until:
        logged.append(run.step())
        run.steps_done += 1
    return logged


def train(folder: Path, until: int) -> None:
    """Resumes the run in a folder, and saves it, its model and what it logged after each step."""
    run, curve = Responses(0), []
    checkpoint = RunCheckpoint(**run.parts, curve=curve)
    rotation = CheckpointRotation(folder / "checkpoints", keep_last=2)
    if rotation.latest() is not None:
        rotation.load_latest(checkpoint)
        if len(curve) > 1:  # else it was killed before it saved its first model
            GPT.from_pretrained(folder / "model")
    run.steps_done = len(curve)
    with (folder / "journal").open("a", buffering=1) as journal:
        print("resumed", run.steps_done, file=journal)
        while run.steps_done < until:
            curve += go_on(run, run.steps_done + 1)
            rotation.save(checkpoint, step=run.steps_done)
            print("saved", run.steps_done, file=journal)
            run.model.save_pretrained(folder / "model")
