"""Fine-tune an imitated Pendulum controller on a reward that tempts it to let the pendulum hang.

1. A policy imitates a decent controller: pump energy until the pendulum is up, then hold it there.
2. PPO improves it on another reward: "the motor runs hot, save torque". The reward of a step is
   minus the square of the torque, as a fraction of the largest: 0 for a motor at rest, -1 at full
   torque. The reward does not say that the pendulum must be up, and it is highest for a policy that
   does nothing at all. What is wanted is a policy that swings up and holds with less torque.
3. The same PPO runs three times: without a penalty, with a constant coefficient, and with an
   adaptive coefficient that steers to a KL.

Every run is repeated with each seed. Results go to the folder `--out`.

Glossary of the metrics (run/seed/name, one per batch of episodes; figures.csv has the first three
of the final policies, measured anew):
    true_return    reward of Pendulum-v1 itself, summed over an episode of 200 steps: about -1200
                   where the pendulum hangs
    torque_reward  mean reward of a step, before the penalty: from -1, full torque, to 0, none
    kl_reference   KL(policy || imitated policy), nats per step: how far training has gone
    kl_old_policy  mean of log pi_old - log pi at the last update on a batch, nats per step: how far
                   one batch has gone
    coeff          the coefficient that the batch was penalized with, reward per nat
"""

from __future__ import annotations

import argparse
import copy
import csv
import json
import shutil
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, stdev

import gymnasium as gym
import matplotlib
import torch
from tensordict import TensorDictBase
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torch.distributions import kl_divergence
from torchrl.collectors import Collector
from torchrl.envs import EnvBase, GymWrapper
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import MLP, IndependentNormal, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE
from torchrl.record.loggers import CSVLogger

from torchrl_kl import (
    ConstantKLController,
    ExponentialKLController,
    KLConstrainedTransform,
    KLController,
)

matplotlib.use("agg")
import matplotlib.pyplot as plt

EPISODE = 200  # steps of Pendulum-v1, which never ends early
RUNS = {"no penalty": "#c44e52", "constant": "#4c72b0", "adaptive": "#55a868"}  # and their colours
METRICS = {
    "true_return": "true return of an episode",
    "torque_reward": "torque reward (0: no torque)",
    "kl_reference": "KL to the imitated policy (nats per step)",
    "coeff": "coefficient (reward per nat)",
}


def arg(default, help):
    return field(default=default, metadata={"help": help})


@dataclass
class Args:
    """What can be set from the command line."""

    out: str = arg("runs/finetune_gym", "Folder for metrics, figures and the picture.")
    seeds: int = arg(3, "How often every run is repeated.")
    processes: int = arg(2, "Runs at the same time, one thread each.")
    quick: bool = arg(
        False, "Run everything at a small size, in seconds; the results are then poor."
    )
    envs: int = arg(32, "Pendulums in parallel; a batch is one episode of each.")
    batches: int = arg(32, "Batches that PPO collects.")
    epochs: int = arg(5, "How often each batch is used.")
    minibatch: int = arg(640, "Steps per update of policy and critic.")
    lr: float = arg(2e-3, "Learning rate of policy and critic.")
    gamma: float = arg(0.97, "Discount factor.")
    noise: float = arg(0.5, "Standard deviation of the torque around that of the controller, N m.")
    imitation_updates: int = arg(2000, "Updates of the imitating policy.")
    coeff: float = arg(0.1, "The constant coefficient, reward per nat.")
    target: float = arg(0.3, "KL that the adaptive coefficient steers to, nats per step.")
    init_coeff: float = arg(0.05, "Where the adaptive coefficient starts.")
    gain: float = arg(
        0.3, "The largest change of the logarithm of the adaptive coefficient, per batch."
    )


def parse_args() -> Args:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for f in fields(Args):
        flag = "--" + f.name.replace("_", "-")
        if isinstance(f.default, bool):
            parser.add_argument(flag, action="store_true", help=f.metadata["help"])
        else:
            text = f"{f.metadata['help']} (default: {f.default})"
            parser.add_argument(flag, type=type(f.default), default=f.default, help=text)
    args = Args(**vars(parser.parse_args()))
    if args.quick:
        args.seeds, args.envs, args.batches, args.epochs, args.imitation_updates = 2, 4, 3, 1, 50
    return args


def make_env(args: Args, seed: int) -> EnvBase:
    pendulums = [lambda: gym.make("Pendulum-v1")] * args.envs
    env = GymWrapper(
        gym.vector.SyncVectorEnv(pendulums, autoreset_mode=gym.vector.AutoresetMode.DISABLED)
    )
    env.set_seed(seed)
    return env


def make_actor() -> ProbabilisticActor:
    net = nn.Sequential(MLP(3, 2, num_cells=[64, 64]), NormalParamExtractor())
    return ProbabilisticActor(
        TensorDictModule(net, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=IndependentNormal,  # the env clips the torque
        return_log_prob=True,
    )


def controller(observation: torch.Tensor) -> torch.Tensor:
    """The torque of a hand-written controller, N m: it pumps energy, then holds the pendulum up."""
    cos, sin, velocity = observation.split(1, -1)
    # Energy to the top, for a pendulum of Pendulum-v1's size.
    missing = 15 - (velocity.square() / 2 + 15 * cos)
    hold = -8 * torch.atan2(sin, cos) - 2 * velocity
    return torch.where(cos > 0.9, hold, missing * velocity).clamp(-2, 2)


def imitate(args: Args, seed: int) -> ProbabilisticActor:
    """A policy that has learned the controller's torques, with noise, by maximum likelihood."""
    torch.manual_seed(seed)
    pushes = TensorDictModule(
        lambda observation: torch.normal(controller(observation), args.noise),
        ["observation"],
        ["action"],
    )
    data = (
        make_env(args, seed)
        .rollout(2 * EPISODE, pushes, break_when_any_done=False)
        .select("observation")
    )
    data, actor = data.reshape(-1), make_actor()
    optimizer = torch.optim.Adam(actor.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 1e-2, total_steps=args.imitation_updates
    )
    for _ in range(args.imitation_updates):
        batch = pushes(data[torch.randint(len(data), (512,))])  # torques are drawn anew
        loss = -actor.log_prob(batch).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return actor


def tempt(batch: TensorDictBase) -> TensorDictBase:
    """The batch with the torque reward in place of Pendulum's, which is kept for the record."""
    batch = batch.copy()  # shallow: a collector hands out the same buffer again
    batch["next", "true_reward"] = batch["next", "reward"]
    batch["next", "reward"] = -(batch["action"].clamp(-2, 2) / 2).square()
    return batch


def make_controller(run: str, args: Args) -> KLController:
    if run == "adaptive":
        return ExponentialKLController(args.init_coeff, args.target, gain=args.gain, per="step")
    return ConstantKLController(
        args.coeff if run == "constant" else 0.0, per="step"
    )  # 0 only measures


def finetune(
    run: str, imitated: ProbabilisticActor, args: Args, seed: int
) -> tuple[list[dict[str, float]], dict]:
    """PPO on the torque reward minus the coefficient times the KL.

    Returns:
        The metrics of every batch, and the final figures.
    """
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    actor, critic = (
        copy.deepcopy(imitated),
        ValueOperator(MLP(3, 1, num_cells=[64, 64]), in_keys=["observation"]),
    )
    frames = args.envs * EPISODE
    stack = KLConstrainedTransform(imitated, make_controller(run, args))
    collector = Collector(
        make_env(args, seed),
        actor,
        frames_per_batch=frames,
        total_frames=frames * args.batches,
        postproc=lambda batch: stack(tempt(batch)),
        auto_register_policy_transforms=False,
    )
    gae = GAE(gamma=args.gamma, lmbda=0.95, value_network=critic)
    loss_module = ClipPPOLoss(
        actor, critic, clip_epsilon=0.2, entropy_bonus=False, normalize_advantage=True
    )
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=args.lr)
    curves, losses = [], {}
    for batch in collector:
        gae(batch)
        steps = batch.reshape(-1)
        for _ in range(args.epochs):
            for minibatch in steps[torch.randperm(frames)].split(args.minibatch):
                losses = loss_module(minibatch)
                optimizer.zero_grad()
                (losses["loss_objective"] + losses["loss_critic"]).backward()
                torch.nn.utils.clip_grad_norm_(loss_module.parameters(), 1.0)
                optimizer.step()
        curves.append(
            {
                "true_return": batch["next", "true_reward"].sum(1).mean().item(),
                "torque_reward": steps["next", "task_reward"].mean().item(),
                "kl_reference": steps["next", "kl"].mean().item(),
                "kl_old_policy": losses["kl_approx"].mean().item(),
                "coeff": steps["next", "kl_coeff"].mean().item(),
            }
        )
    collector.shutdown()
    return curves, evaluate(actor, imitated, args, seed + 1000)


@torch.no_grad()
def evaluate(
    actor: ProbabilisticActor, imitated: ProbabilisticActor, args: Args, seed: int
) -> dict[str, float]:
    """One episode of each pendulum with sampled torques; the KL is exact at every state."""
    torch.manual_seed(seed)
    with set_exploration_type(ExplorationType.RANDOM):
        steps = tempt(make_env(args, seed).rollout(EPISODE, actor))
    states = steps.select("observation")
    kl = kl_divergence(actor.get_dist(states.copy()), imitated.get_dist(states.copy()))
    return {
        "true_return": steps["next", "true_reward"].sum(1).mean().item(),
        "torque_reward": steps["next", "reward"].mean().item(),
        "kl_reference": kl.mean().item(),
    }


def draw(curves: dict[tuple[str, int], list[dict[str, float]]], args: Args, file: Path) -> None:
    figure, panels = plt.subplots(1, len(METRICS), figsize=(14, 3.2), layout="constrained")
    for panel, (metric, title) in zip(panels, METRICS.items(), strict=True):
        for (run, seed), curve in curves.items():
            values = [batch[metric] for batch in curve]
            panel.plot(values, color=RUNS[run], lw=1.2, alpha=0.8, label=run if seed == 0 else None)
        panel.set(title=title, xlabel="batch")
        panel.title.set_fontsize(10)
    panels[2].axhline(args.target, color="k", lw=0.8, ls=":", label="target")
    panels[2].set_yscale("symlog", linthresh=1.0)  # linear up to 1 nat, logarithmic above
    panels[2].set_yticks([0, 0.5, 1, 2, 4], ["0", "0.5", "1", "2", "4"])
    panels[2].minorticks_off()
    panels[2].set_ylim(bottom=0)
    panels[2].legend(frameon=False)
    panels[0].legend(frameon=False)
    figure.savefig(file, dpi=72)
    plt.close(figure)


def print_table(figures: dict[str, list[dict[str, float]]]) -> None:
    print(f"{'':<12}{'true return':>16}{'torque reward':>18}{'KL, nats per step':>22}")
    for name, rows in figures.items():
        cells = []
        for metric, digits in (("true_return", 0), ("torque_reward", 3), ("kl_reference", 4)):
            values = [row[metric] for row in rows]
            cells.append(
                f"{mean(values):.{digits}f} ± {stdev(values) if len(values) > 1 else 0:.{digits}f}"
            )
        print(f"{name:<12}{cells[0]:>16}{cells[1]:>18}{cells[2]:>22}")


def main() -> None:
    args, start = parse_args(), time.perf_counter()
    out = Path(args.out)
    # CSVLogger appends to the files of a former run in the same folder.
    shutil.rmtree(out / "metrics", ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(asdict(args), indent=2) + "\n")
    torch.set_num_threads(1)
    with ProcessPoolExecutor(args.processes, mp_context=get_context("spawn")) as pool:
        seeds = range(args.seeds)
        imitated = list(pool.map(imitate, [args] * args.seeds, seeds))
        jobs = {
            (run, seed): pool.submit(finetune, run, imitated[seed], args, seed)
            for seed in seeds
            for run in RUNS
        }
        results = {job: future.result() for job, future in jobs.items()}
    curves = {job: curve for job, (curve, _) in results.items()}
    figures = {
        "imitated": [evaluate(imitated[seed], imitated[seed], args, seed + 1000) for seed in seeds]
    }
    figures |= {run: [results[run, seed][1] for seed in seeds] for run in RUNS}
    logger = CSVLogger("metrics", log_dir=args.out)
    for (run, seed), curve in curves.items():
        for step, batch in enumerate(curve):
            for name, value in batch.items():
                logger.log_scalar(f"{run}/{seed}/{name}", value, step=step)
    with (out / "figures.csv").open("w", newline="") as stream:
        table = csv.DictWriter(
            stream, ["run", "seed", "true_return", "torque_reward", "kl_reference"]
        )
        table.writeheader()
        table.writerows(
            {"run": run, "seed": seed, **row}
            for run, rows in figures.items()
            for seed, row in enumerate(rows)
        )
    draw(curves, args, out / "finetune_gym.png")
    print_table(figures)
    print(
        f"Metrics, figures and the picture are in {out}, after {time.perf_counter() - start:.0f} s."
    )


if __name__ == "__main__":
    main()
