"""A long run: what grows with the number of frames, and whether a batch takes longer at the end.

Two jobs are trained with PPO for 300,000 frames each, with an adaptive controller per trajectory
and a KLMonitor: the digit job, whose batches the stack penalizes when they arrive, and CartPole,
with the reference in the env. Batches end inside of trajectories. The process is measured after
every batch, and the means of the second and of the last quarter of the run are compared:

    memory       resident memory of the process, MiB
    batch        processor time per batch, collected and learned from, divided by that of a fixed
                 piece of work just before: other work on the machine slows both
    pickle       size of the pickled stack, kB
    open         trajectories whose KL is kept because they go on in a later batch
    descriptors, threads, children    of the process: files and sockets, threads, processes

The first quarter is left out, in which the memory of PyTorch reaches its size.
"""

from __future__ import annotations

import json
import os
import pickle
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import gymnasium
import psutil
import torch
from bench_report import arg, parse_args, quick_flag
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector
from torchrl.envs import EnvBase, GymWrapper
from torchrl.modules import MLP, ProbabilisticActor, ValueOperator, set_recurrent_mode
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from torchrl_kl import (
    GPT,
    AdaptiveKLController,
    CausalLMActor,
    CausalLMCritic,
    KLConstrainedTransform,
    KLMonitor,
    kl_collector,
)
from torchrl_kl.envs import DigitLanguage, DigitLanguageEnv

FLAT = {"memory": 0.02, "batch": 0.2, "pickle": 0.02}  # how much may be added; nothing to others


@dataclass
class Args:
    """What can be set from the command line."""

    frames: int = arg(300_000, "Frames of each job.", quick=6_000)
    digit_rows: int = arg(128, "Texts per batch of the digit job.", quick=16)
    digit_steps: int = arg(6, "Tokens per text and batch; responses have 4.")
    pole_rows: int = arg(16, "CartPoles that run at once.", quick=4)
    pole_steps: int = arg(50, "Steps of each CartPole per batch.")
    only: str = arg("", "One of the jobs; both by default.", choices=["", "digit job", "CartPole"])
    out: str = arg("runs/long_run", "Folder for long_run.json.")
    quick: bool = quick_flag()


@dataclass
class Job:
    """A policy in an env, with what PPO needs."""

    env: EnvBase
    actor: Any
    critic: Any
    where: Literal["learner", "workers"]
    rows: int
    steps: int

    @property
    def frames_per_batch(self) -> int:
        """Of all rows together."""
        return self.rows * self.steps


def digit_job(args: Args) -> Job:
    """A small GPT that writes digits."""
    language = DigitLanguage()
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16}
    actor = CausalLMActor(GPT(language.n_tokens, language.text_length - 1, **sizes))
    critic = CausalLMCritic(GPT(language.n_tokens, language.text_length, n_out=1, **sizes))
    env = DigitLanguageEnv(language, batch_size=(args.digit_rows,), seed=0)
    return Job(env, actor, critic, "learner", args.digit_rows, args.digit_steps)


def pole_job(args: Args) -> Job:
    """A small MLP that balances poles, many at once."""
    autoreset = {"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP}
    poles = gymnasium.make_vec(
        "CartPole-v1", args.pole_rows, vectorization_mode="sync", vector_kwargs=autoreset
    )
    env = GymWrapper(poles, categorical_action_encoding=True)
    net = TensorDictModule(MLP(4, 2, num_cells=[32]), ["observation"], ["logits"])
    actor = ProbabilisticActor(
        net,
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )
    critic = ValueOperator(MLP(4, 1, num_cells=[32]), ["observation"])
    return Job(env, actor, critic, "workers", args.pole_rows, args.pole_steps)


class Trainer:
    """PPO on the batches of a job, one pass over each."""

    def __init__(self, job: Job):
        self.gae = GAE(
            gamma=1.0, lmbda=0.95, value_network=job.critic, deactivate_vmap=True, shifted=False
        )
        self.loss = ClipPPOLoss(job.actor, job.critic, clip_epsilon=0.2, entropy_bonus=False)
        self.optimizer = torch.optim.Adam(self.loss.parameters(), lr=1e-3)

    def update(self, batch: TensorDictBase) -> None:
        """One step on a batch (N, T)."""
        with torch.no_grad(), set_recurrent_mode(True):
            self.gae(batch)
        losses = self.loss(batch)
        self.optimizer.zero_grad()
        (losses["loss_objective"] + losses["loss_critic"]).backward()
        self.optimizer.step()


def work() -> float:
    """Processor time of a fixed piece of work: small tensors, as in a step of an env."""
    start, values = time.process_time(), torch.linspace(0, 1, 64)
    for _ in range(500):
        values = (values * 1.01).clamp(0, 1).exp().log_softmax(0).add(1)
    return time.process_time() - start


def measure(args: Args, job: Job) -> Iterator[dict[str, float]]:
    """Trains a policy; what was measured after each batch."""
    controller = AdaptiveKLController(0.1, target=0.5, horizon=10_000)
    stack = KLConstrainedTransform(job.actor, controller)
    monitor = KLMonitor(controller, actor=job.actor)
    arguments = {"frames_per_batch": job.frames_per_batch, "total_frames": args.frames}
    collector = kl_collector(Collector, job.env, job.actor, stack, where=job.where, **arguments)
    trainer, process = Trainer(job), psutil.Process()
    start = time.process_time()
    yardstick = work()
    for batch in collector:
        monitor(batch)
        trainer.update(batch)
        now = time.process_time()
        yield {
            "memory": process.memory_info().rss / 2**20,
            "batch": (now - start - yardstick) / yardstick,
            "pickle": len(pickle.dumps(stack)) / 1e3,
            "open": len(vars(vars(collector)["_link"].stream)["_open"]),
            "descriptors": process.num_fds(),
            "threads": threading.active_count(),
            "children": len(process.children(recursive=True)),
        }
        start = time.process_time()
        yardstick = work()
    collector.shutdown()


@dataclass
class Growth:
    """The means of a figure over the second and the last quarter of a run."""

    name: str
    second: float
    last: float
    limit: float  # how large the last one may be

    @property
    def flat(self) -> bool:
        """Whether the figure has stayed within its limit."""
        return self.last <= self.limit


def growth_of(measured: list[dict[str, float]], n_rows: int) -> list[Growth]:
    """Compares the quarters of a run."""
    quarter, found = len(measured) // 4, []
    for name in measured[0]:
        values = [one[name] for one in measured]
        # Other work on the machine makes some batches slow: of their times, the median counts.
        mean = statistics.median if name == "batch" else statistics.mean
        second, last = mean(values[quarter : 2 * quarter]), mean(values[-quarter:])
        # Each row has at most one trajectory that goes on.
        limit = n_rows if name == "open" else second * (1 + FLAT.get(name, 0.0))
        found.append(Growth(name, second, last, limit))
    return found


def main() -> None:
    """Runs both jobs, prints their table, and writes it."""
    args = parse_args(Args, __doc__)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    report: dict[str, Any] = {"args": asdict(args)}
    print("| job | figure | second quarter | last quarter | at most | flat |")
    print("|---|---|---|---|---|---|")
    for name, make in {"digit job": digit_job, "CartPole": pole_job}.items():
        if args.only not in ("", name):
            continue
        start = time.process_time()
        job = make(args)
        measured = list(measure(args, job))
        rows = growth_of(measured, job.rows)
        for row in rows:
            cells = [f"{value:.2f}" for value in (row.second, row.last, row.limit)]
            print(f"| {name} | {row.name} | {' | '.join(cells)} | {row.flat} |", flush=True)
        report[name] = {
            "batches": len(measured),
            "seconds": time.process_time() - start,
            "growth": [asdict(row) | {"flat": row.flat} for row in rows],
        }
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    new = out / "long_run.json.new"
    new.write_text(json.dumps(report, indent=1))
    os.replace(new, out / "long_run.json")


if __name__ == "__main__":
    main()
