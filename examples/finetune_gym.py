"""Fine-tune an imitated Pendulum controller on a reward that tempts it to let the pendulum hang.

1. A policy imitates a decent controller: pump energy until the pendulum is up, then hold it there.
2. PPO improves it on another reward: "the motor runs hot, save torque". The reward of a step is
   minus the square of the torque, the largest being 1. It does not say where the pendulum must be.
3. The same PPO runs without a penalty, with a constant and with an adaptive coefficient.

Metrics (in log/<run>_<seed>, one value per batch of episodes):
    true_return    reward of Pendulum-v1 in an episode: about -1200 where the pendulum hangs
    torque_reward  mean reward of a step, before the penalty
    kl_reference   KL(policy || imitated policy), nats per step: how far training has gone
    coeff          the coefficient that the batch was penalized with, reward per nat
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import torch
from figures import ADAPTIVE, CONSTANT, NO_PENALTY, draw_band, draw_goal, plt
from running import JobOptions, Run, open_folder, read_options, workers, write_json
from tensordict import TensorDictBase
from tensordict.nn import NormalParamExtractor, TensorDictModule
from torch import Tensor, nn
from torch.distributions import kl_divergence
from torch.optim.lr_scheduler import OneCycleLR
from torchrl.envs import EnvBase, GymWrapper
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import MLP, IndependentNormal, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from torchrl_kl import KLConstrainedTransform, PlannedKLController

EPISODE = 200  # steps of Pendulum-v1, which never ends early
RUNS = {"no_penalty": NO_PENALTY, "constant": CONSTANT, "adaptive": ADAPTIVE}
METRICS = {"true_return": "true_reward", "torque_reward": "task_reward"}  # of a step
METRICS |= {"kl_reference": "kl", "coeff": "kl_coeff"}
QUICK = {"seeds": 2, "envs": 4, "batches": 3, "epochs": 1, "imitation_updates": 50}


@dataclass(frozen=True)
class Args(JobOptions):
    """What can be set from the command line."""

    out: Path = Path("runs/finetune_gym")  # Folder of the results, which must be new or empty.
    seeds: int = 3  # How often every run is repeated, with the seeds from --seed on.
    envs: int = 32  # Pendulums in parallel; a batch is one episode of each.
    batches: int = 32  # Batches that PPO collects.
    epochs: int = 5  # How often each batch is used.
    minibatch: int = 640  # Steps per update of policy and critic.
    lr: float = 2e-3  # Learning rate of policy and critic.
    gamma: float = 0.97  # Discount factor.
    noise: float = 0.5  # Standard deviation of the torque around that of the controller, N m.
    imitation_updates: int = 2000  # Updates of the imitating policy.
    coeff: float = 0.1  # The constant coefficient, reward per nat.
    target: float = 0.3  # KL that the adaptive coefficient steers to, nats per step.


def make_env(n_envs: int, seed: int) -> EnvBase:
    pendulums = [lambda: gym.make("Pendulum-v1")] * n_envs
    off = gym.vector.AutoresetMode.DISABLED
    env = GymWrapper(gym.vector.SyncVectorEnv(pendulums, autoreset_mode=off))
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


def controller(observation: Tensor) -> Tensor:
    """The torque of a hand-written controller, N m: it pumps energy, then holds the pendulum up."""
    cos, sin, velocity = observation.split(1, -1)
    # Energy to the top, for a pendulum of Pendulum-v1's size.
    missing = 15 - (velocity.square() / 2 + 15 * cos)
    hold = -8 * torch.atan2(sin, cos) - 2 * velocity
    return torch.where(cos > 0.9, hold, missing * velocity).clamp(-2, 2)


def imitate(seed: int, args: Args) -> ProbabilisticActor:
    """A policy that has learned the controller's torques, with noise, by maximum likelihood."""
    torch.manual_seed(seed)
    pushes = TensorDictModule(
        lambda seen: torch.normal(controller(seen), args.noise), ["observation"], ["action"]
    )
    data: Any = make_env(args.envs, seed).rollout(2 * EPISODE, pushes, break_when_any_done=False)
    data, actor = data.select("observation").reshape(-1), make_actor()
    optimizer = torch.optim.Adam(actor.parameters(), lr=1e-2)
    schedule = OneCycleLR(optimizer, 1e-2, total_steps=args.imitation_updates)
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


def finetune(name: str, seed: int, imitated: ProbabilisticActor, args: Args) -> dict:
    """PPO on the torque reward minus the coefficient times the KL; its curves and final figures."""
    torch.manual_seed(seed)
    actor = copy.deepcopy(imitated)
    critic = ValueOperator(MLP(3, 1, num_cells=[64, 64]), in_keys=["observation"])
    coeffs = {"no_penalty": 0.0, "constant": args.coeff}  # 0 only measures
    coeff = coeffs.get(name, PlannedKLController(args.target, per="step"))
    run, stack = Run(f"{name}_{seed}", args), KLConstrainedTransform(imitated, coeff)
    gae = GAE(gamma=args.gamma, lmbda=0.95, value_network=critic)
    loss = ClipPPOLoss(actor, critic, entropy_bonus=False, normalize_advantage=True)
    optimizer, env = torch.optim.Adam(loss.parameters(), lr=args.lr), make_env(args.envs, seed)
    for step in run.steps(args.batches):
        env.set_seed(seed + 10_000 * (step + 1))
        with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
            batch = stack(tempt(env.rollout(EPISODE, actor)))
        gae(batch)
        steps = batch.reshape(-1)
        for _ in range(args.epochs):
            for minibatch in steps[torch.randperm(len(steps))].split(args.minibatch):
                losses = loss(minibatch)
                optimizer.zero_grad()
                (losses["loss_objective"] + losses["loss_critic"]).backward()
                nn.utils.clip_grad_norm_(loss.parameters(), 1.0)
                optimizer.step()
        means = {name: steps["next", key].mean().item() for name, key in METRICS.items()}
        means["true_return"] *= EPISODE
        run.log(step, "return {true_return:.0f}, KL {kl_reference:.2f} nats per step", **means)
    return {"curves": run.curves, "figures": evaluate(actor, imitated, seed + 1000, args)}


@torch.no_grad()
def evaluate(actor: ProbabilisticActor, imitated: ProbabilisticActor, seed: int, args: Args):
    """One episode of each pendulum with sampled torques; the KL is exact at every state."""
    torch.manual_seed(seed)
    with set_exploration_type(ExplorationType.RANDOM):
        steps = tempt(make_env(args.envs, seed).rollout(EPISODE, actor))
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
        "true_return": ("Without a penalty the true return falls", "true return of an episode"),
        "torque_reward": ("All save torque, most without a penalty", "torque reward of a step"),
        "kl_reference": ("The controller ends near its target", "KL, nats per step"),
        "coeff": ("The controller moves the coefficient", "coefficient, reward per nat"),
    }
    for panel, (metric, (title, unit)) in zip(axes.flat, panels.items(), strict=True):
        for name, color in RUNS.items():
            values = [curve[metric] for curve in curves[name]]
            draw_band(panel, values, color, label=name.replace("_", " "))
        panel.set(title=title, ylabel=unit, xlabel="batch")
    axes[1, 0].set_ylim(0, 4 * target)  # without a penalty the KL rises further
    draw_goal(axes[1, 0], target, f"target\n{target:g}")
    figure.legend(*axes[1, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.savefig(file)


def print_table(figures: dict[str, list[dict[str, float]]]) -> None:
    """Means over the seeds, with standard deviations."""
    print(f"{'':<12}{'true return':>20}{'torque reward':>20}{'KL, nats per step':>20}")
    for name, rows in figures.items():
        values = torch.tensor([list(row.values()) for row in rows])  # (seeds, 3)
        cells = zip(values.mean(0).tolist(), values.std(0).tolist(), strict=True)
        print(f"{name:<12}" + "".join(f"{mean:>10.3f} ± {std:<7.3f}" for mean, std in cells))


def main() -> None:
    args = read_options(Args, __doc__, quick=QUICK)
    out, seeds = open_folder(args), range(args.seed, args.seed + args.seeds)
    torch.set_num_threads(args.threads)
    with workers(args) as pool:
        starts = {seed: pool.submit(imitate, seed, args) for seed in seeds}
        actors = {seed: start.result() for seed, start in starts.items()}
        jobs = [(name, seed) for seed in seeds for name in RUNS]
        runs = {job: pool.submit(finetune, *job, actors[job[1]], args) for job in jobs}
        results = {name: [runs[name, seed].result() for seed in seeds] for name in RUNS}
    figures = {"imitated": [evaluate(actors[s], actors[s], s + 1000, args) for s in seeds]}
    figures |= {name: [it["figures"] for it in results[name]] for name in RUNS}
    write_json(out / "report.json", figures)
    curves = {name: [it["curves"] for it in results[name]] for name in RUNS}
    draw(curves, args.target, out / "finetune_gym.png")
    print_table(figures)


if __name__ == "__main__":
    main()
