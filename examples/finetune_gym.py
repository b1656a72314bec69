"""Fine-tune an imitated Pendulum controller on a reward that tempts it to let the pendulum hang.

1. A policy imitates a decent controller: pump energy until the pendulum is up, then hold it there.
2. PPO improves it on another reward: "the motor runs hot, save torque". The reward of a step is
   minus the square of the torque, as a fraction of the largest: 0 for a motor at rest, -1 at full
   torque. The reward does not say that the pendulum must be up, and it is highest for a policy that
   does nothing at all. What is wanted is a policy that swings up and holds with less torque.
3. The same PPO runs three times: without a penalty, with a constant coefficient, and with an
   adaptive coefficient that steers to a KL.

Every run is repeated with each seed. Results go to the folder `--out`. Ctrl-C saves what was
learned so far, and `--resume` continues with the same numbers as without a stop.

Glossary of the metrics (in log/<run>_<seed>, one value per batch of episodes; report.json has the
first three of the final policies, measured anew):
    true_return    reward of Pendulum-v1 itself, summed over an episode of 200 steps: about -1200
                   where the pendulum hangs
    torque_reward  mean reward of a step, before the penalty: from -1, full torque, to 0, none
    kl_reference   KL(policy || imitated policy), nats per step: how far training has gone
    kl_old_policy  mean of log pi_old - log pi at the last update on a batch, nats per step: how far
                   one batch has gone
    coeff          the coefficient that the batch was penalized with, reward per nat
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import gymnasium as gym
import torch
from figures import BLUE, GREEN, ORANGE, draw_band, draw_goal, plt, save_figure
from running import (
    Count,
    JobOptions,
    NonNegative,
    Positive,
    Run,
    Share,
    Workers,
    open_folder,
    part,
    read_options,
    replacing,
    stops_cleanly,
    write_json,
)
from tensordict import TensorDictBase
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import nn
from torch.distributions import kl_divergence
from torchrl.envs import EnvBase, GymWrapper
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import MLP, IndependentNormal, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from torchrl_kl import (
    ConstantKLController,
    KLConstrainedTransform,
    KLController,
    PlannedKLController,
)

EPISODE = 200  # steps of Pendulum-v1, which never ends early
RUNS = {"no_penalty": ORANGE, "constant": BLUE, "adaptive": GREEN}  # and their colours
QUICK = {"seeds": 2, "envs": 4, "batches": 3, "epochs": 1, "imitation_updates": 50}


@dataclass(frozen=True)
class Options(JobOptions):
    """What can be set from the command line."""

    out: Path = Path("runs/finetune_gym")
    """Folder of the results. A folder that is in use is refused, or continued with --resume."""
    seeds: Count = 3
    """How often every run is repeated, with the seeds from --seed on."""
    processes: Count = 2
    """Runs at the same time."""
    envs: Count = 32
    """Pendulums in parallel; a batch is one episode of each."""
    batches: Count = 32
    """Batches that PPO collects."""
    epochs: Count = 5
    """How often each batch is used."""
    minibatch: Count = 640
    """Steps per update of policy and critic."""
    lr: Positive = 2e-3
    """Learning rate of policy and critic."""
    gamma: Share = 0.97
    """Discount factor."""
    noise: Positive = 0.5
    """Standard deviation of the torque around that of the controller, N m."""
    imitation_updates: Count = 2000
    """Updates of the imitating policy."""
    coeff: NonNegative = 0.1
    """The constant coefficient, reward per nat."""
    target: Positive = 0.3
    """KL that the adaptive coefficient steers to, nats per step."""


def make_env(options: Options, seed: int) -> EnvBase:
    pendulums = [lambda: gym.make("Pendulum-v1")] * options.envs
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


def imitate(seed: int, options: Options) -> dict:
    """A policy that has learned the controller's torques, with noise, by maximum likelihood."""
    torch.set_num_threads(options.threads)
    torch.manual_seed(seed)
    run = Run(f"imitated_{seed}", options)
    pushes = TensorDictModule(
        lambda observation: torch.normal(controller(observation), options.noise),
        ["observation"],
        ["action"],
    )
    data: Any = make_env(options, seed).rollout(2 * EPISODE, pushes, break_when_any_done=False)
    data, actor = data.select("observation").reshape(-1), make_actor()
    optimizer = torch.optim.Adam(actor.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 1e-2, total_steps=options.imitation_updates
    )
    for _ in range(options.imitation_updates):
        batch = pushes(data[torch.randint(len(data), (512,))])  # torques are drawn anew
        loss = -actor.log_prob(batch).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    save_policy(actor, run.folder)
    return {"figures": evaluate(actor, actor, options, seed + 1000)}


def save_policy(actor: ProbabilisticActor, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    with replacing(folder / "policy.pt") as part:
        torch.save(actor.state_dict(), part)


def load_policy(folder: Path) -> ProbabilisticActor:
    actor = make_actor()
    actor.load_state_dict(torch.load(folder / "policy.pt"))
    return actor


def tempt(batch: TensorDictBase) -> TensorDictBase:
    """The batch with the torque reward in place of Pendulum's, which is kept for the record."""
    batch = batch.copy()  # shallow: a collector hands out the same buffer again
    batch["next", "true_reward"] = batch["next", "reward"]
    batch["next", "reward"] = -(batch["action"].clamp(-2, 2) / 2).square()
    return batch


def make_controller(name: str, options: Options) -> KLController:
    if name == "adaptive":
        return PlannedKLController(options.target, per="step")
    coeff = options.coeff if name == "constant" else 0.0  # 0 only measures
    return ConstantKLController(coeff, per="step")


def finetune(name: str, row: int, seed: int, options: Options) -> dict:
    """PPO on the torque reward minus the coefficient times the KL; its curves and final figures."""
    torch.set_num_threads(options.threads)
    imitated = load_policy(options.out / f"imitated_{seed}")
    torch.manual_seed(seed)
    actor, critic = (
        copy.deepcopy(imitated),
        ValueOperator(MLP(3, 1, num_cells=[64, 64]), in_keys=["observation"]),
    )
    run, stack = (
        Run(f"{name}_{seed}", options, row),
        KLConstrainedTransform(imitated, make_controller(name, options)),
    )
    gae = GAE(gamma=options.gamma, lmbda=0.95, value_network=critic)
    loss_module = ClipPPOLoss(
        actor, critic, clip_epsilon=0.2, entropy_bonus=False, normalize_advantage=True
    )
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=options.lr)
    env, losses = make_env(options, seed), {}
    parts = {"loss": loss_module, "optimizer": optimizer, "stack": stack}
    for step in run.steps(options.batches, lambda folder: save_policy(actor, folder), **parts):
        env.set_seed(seed + 10_000 * (step + 1))  # a run that is resumed has the same episodes
        with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
            batch = stack(tempt(env.rollout(EPISODE, actor)))
        gae(batch)
        steps = batch.reshape(-1)
        for _ in range(options.epochs):
            for minibatch in steps[torch.randperm(len(steps))].split(options.minibatch):
                losses = loss_module(minibatch)
                optimizer.zero_grad()
                (losses["loss_objective"] + losses["loss_critic"]).backward()
                torch.nn.utils.clip_grad_norm_(loss_module.parameters(), 1.0)
                optimizer.step()
        run.log(
            step,
            "return {true_return:.0f}, torque reward {torque_reward:.2f}, KL {kl_reference:.2f}",
            true_return=batch["next", "true_reward"].sum(1).mean().item(),
            torque_reward=steps["next", "task_reward"].mean().item(),
            kl_reference=steps["next", "kl"].mean().item(),
            kl_old_policy=losses["kl_approx"].mean().item(),
            coeff=steps["next", "kl_coeff"].mean().item(),
        )
    return {"curves": run.curves, "figures": evaluate(actor, imitated, options, seed + 1000)}


@torch.no_grad()
def evaluate(
    actor: ProbabilisticActor, imitated: ProbabilisticActor, options: Options, seed: int
) -> dict[str, float]:
    """One episode of each pendulum with sampled torques; the KL is exact at every state."""
    torch.manual_seed(seed)
    with set_exploration_type(ExplorationType.RANDOM):
        steps = tempt(make_env(options, seed).rollout(EPISODE, actor))
    states = steps.select("observation")
    kl = kl_divergence(actor.get_dist(states.copy()), imitated.get_dist(states.copy()))
    return {
        "true_return": steps["next", "true_reward"].sum(1).mean().item(),
        "torque_reward": steps["next", "reward"].mean().item(),
        "kl_reference": kl.mean().item(),
    }


def draw(curves: dict[str, list[dict[str, list]]], target: float, file: Path) -> None:
    """The curves of each run; bands are the range of the seeds."""
    figure, axes = plt.subplots(2, 2, figsize=(9, 6.8))
    panels = {
        "true_return": ("Without a penalty the pendulum hangs", "true return of an episode"),
        "torque_reward": ("A motor at rest is rewarded best", "torque reward of a step"),
        "kl_reference": ("The controller holds the KL target", "KL, nats per step"),
        "coeff": ("It adapts the coefficient", "coefficient, reward per nat"),
    }
    for panel, (metric, (title, unit)) in zip(axes.flat, panels.items(), strict=True):
        for name, color in RUNS.items():
            values = [[value for _, value in curve[metric]] for curve in curves[name]]
            draw_band(panel, range(len(values[0])), values, color, label=name.replace("_", " "))
        panel.set(title=title, ylabel=unit, xlabel="batch")
    kl = axes[1, 0]
    kl.set_yscale("symlog", linthresh=1.0)  # linear up to 1 nat, logarithmic above
    kl.set_yticks([0, 0.5, 1, 2, 4], ["0", "0.5", "1", "2", "4"])
    kl.minorticks_off()
    kl.set_ylim(bottom=0)
    draw_goal(kl, target, f"target {target:g}", 0)
    handles, labels = kl.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    save_figure(figure, file)


def print_table(figures: dict[str, list[dict[str, float]]]) -> None:
    print(f"{'':<12}{'true return':>16}{'torque reward':>18}{'KL, nats per step':>22}")
    for name, rows in figures.items():
        cells = []
        for metric, digits in (("true_return", 0), ("torque_reward", 3), ("kl_reference", 4)):
            values = [row[metric] for row in rows]
            spread = stdev(values) if len(values) > 1 else 0
            cells.append(f"{mean(values):.{digits}f} ± {spread:.{digits}f}")
        title = name.replace("_", " ")
        print(f"{title:<12}{cells[0]:>16}{cells[1]:>18}{cells[2]:>22}")


def do_all(options: Options) -> dict[str, list[dict]]:
    """The results of all runs, one for each seed."""
    seeds = range(options.seed, options.seed + options.seeds)
    with Workers(options.processes) as workers:
        jobs = {s: workers.start(part, f"imitated_{s}", imitate, s, options) for s in seeds}
        results = {"imitated": [job() for job in jobs.values()]}
        runs = [(name, seed) for seed in seeds for name in RUNS]
        jobs = {
            (name, seed): workers.start(
                *(part, f"{name}_{seed}", finetune),
                *(name, row % options.processes, seed, options),
            )
            for row, (name, seed) in enumerate(runs)
        }
        for name in RUNS:
            results[name] = [jobs[name, seed]() for seed in seeds]
    return results


def main() -> None:
    options = read_options(Options, __doc__, {"quick": QUICK})
    out = open_folder(options)
    with stops_cleanly(out):
        results = do_all(options)
        figures = {name: [it["figures"] for it in results[name]] for name in results}
        write_json(out / "report.json", figures)
        curves = {name: [it["curves"] for it in results[name]] for name in RUNS}
        draw(curves, options.target, out / "finetune_gym.png")
        print_table(figures)
        seconds = sum(it["cpu_seconds"] for rows in results.values() for it in rows)
        print(f"Metrics, figures and the picture are in {out}; {seconds:.0f} s of a processor.")


if __name__ == "__main__":
    main()
