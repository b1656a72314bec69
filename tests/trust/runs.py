"""Tiny training runs that can be saved after every step, made of the package's objects."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.collectors import Collector
from torchrl.envs import TransformedEnv
from torchrl.envs.utils import ExplorationType, set_exploration_type

from tests.gpt_helpers import sharp
from torchrl_kl import (
    AdaptiveKLController,
    ExponentialKLController,
    KLConstrainedTransform,
    KLMonitor,
    KLPenaltyLoss,
    PIDKLController,
)
from torchrl_kl.envs import DigitLanguageEnv
from torchrl_kl.language import GPT, CausalLMActor, sample_responses

SIZES: dict[str, Any] = {"n_layer": 1, "n_head": 1, "n_embd": 8}
FRAMES = 32  # 8 texts of 4 tokens


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
        controller = PIDKLController(0.2, target=0.5)
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
        self.stack.update_reference(self.policy, tau=0.01)
        return logged


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


def save(run: Run, path: Path) -> None:
    """As PyTorch does."""
    parts = {name: part.state_dict() for name, part in run.parts.items() if name != "generator"}
    if "generator" in run.parts:
        parts["generator"] = run.parts["generator"].get_state()
    state = {"parts": parts, "random": torch.get_rng_state(), "steps_done": run.steps_done}
    torch.save(state, path)


def load(run: Run, path: Path) -> None:
    """Into a run of any seed."""
    state = torch.load(path, weights_only=True)
    for name, part in state["parts"].items():
        if name == "generator":
            run.parts[name].set_state(part)
        else:
            run.parts[name].load_state_dict(part)
    torch.set_rng_state(state["random"])
    run.steps_done = state["steps_done"]


def go_on(run: Run, until: int) -> list[list[float]]:
    """What each step up to a number of them logs."""
    logged = []
    while run.steps_done < until:
        logged.append(run.step())
        run.steps_done += 1
    return logged
