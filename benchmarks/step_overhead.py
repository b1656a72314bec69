"""What the stack adds to a step of an env, beside what scoring an action under a reference costs at all.

CartPole-v1, an MLP of 2 x 64, one thread. Three kinds of calls are timed in turn, in one run, so that what else the
machine does meets all of them alike:

    plain   a step of TransformedEnv(CartPole, Compose())
    stack   the same with KLConstrainedTransform
    bare    reference.get_dist(observation).log_prob(action), where one would call it by hand: after a plain step

    overhead = stack - plain
    bar      = 1.3 * bare + 150 microseconds
    ratio    = overhead / bar, at most 1

Each time is the smallest of the medians of many short blocks: other work on the machine only ever adds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torchrl.envs import Compose, EnvBase, GymEnv, Transform, TransformedEnv, step_mdp
from torchrl.envs.utils import ExplorationType, set_exploration_type
from torchrl.modules import MLP, ProbabilisticActor

from torchrl_kl import (
    AdaptiveKLController,
    ConstantKLController,
    KLConstrainedTransform,
    KLController,
)

CONTROLLERS: dict[str, Callable[[], KLController]] = {
    "constant": lambda: ConstantKLController(0.1),
    "adaptive, per trajectory": lambda: AdaptiveKLController(0.1, target=0.5, horizon=10_000),
    "adaptive, per step": lambda: AdaptiveKLController(
        0.1, target=0.01, horizon=10_000, per="step"
    ),
}


def arg(default, help):
    """A field of Args with its sentence for `--help`."""
    return field(default=default, metadata={"help": help})


@dataclass
class Args:
    """What can be set from the command line."""

    blocks: int = arg(60, "Short blocks, over whose medians the smallest is taken.")
    steps: int = arg(50, "Steps per block, each of every kind in turn.")
    warmup: int = arg(200, "Steps of every kind before the first block.")


def parse_args() -> Args:
    """Args from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, f in Args.__dataclass_fields__.items():
        parser.add_argument(
            f"--{name}", type=int, default=f.default, help=f"{f.metadata['help']} ({f.default})"
        )
    return Args(**vars(parser.parse_args()))


def make_actor() -> ProbabilisticActor:
    """The policy: an MLP of 2 x 64 that records its log-prob."""
    net = TensorDictModule(MLP(4, 2, num_cells=[64, 64]), ["observation"], ["logits"])
    return ProbabilisticActor(
        net,
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )


class Walk:
    """A policy that walks through an env; only what the clock is put around is timed."""

    def __init__(self, actor: ProbabilisticActor, *transforms: Transform):
        self.actor = actor
        env = GymEnv("CartPole-v1", categorical_action_encoding=True)
        self.env: EnvBase = TransformedEnv(env, Compose(list(transforms)))
        self.state = self.env.reset()

    def step(self) -> tuple[float, TensorDictBase]:
        """Microseconds of one step of the env, and the step."""
        step = self.actor(self.state)
        start = time.perf_counter()
        step = self.env.step(step)
        elapsed = time.perf_counter() - start
        self.state = self.env.reset() if step["next", "done"].item() else step_mdp(step)
        return 1e6 * elapsed, step


def time_bare(reference: ProbabilisticActor, walk: Walk) -> float:
    """Microseconds of one bare call, after a plain step."""
    _, step = walk.step()
    observation, action = step.select("observation"), step["action"]
    start = time.perf_counter()
    reference.get_dist(observation).log_prob(action)
    return 1e6 * (time.perf_counter() - start)


def measure(args: Args) -> dict[str, float]:
    """The smallest median of each kind of call, microseconds."""
    actor, reference = make_actor(), make_actor().requires_grad_(False).eval()
    by_hand = Walk(actor)
    kinds = {"plain": Walk(actor)} | {
        name: Walk(actor, KLConstrainedTransform(actor, make()))
        for name, make in CONTROLLERS.items()
    }
    calls: dict[str, Callable[[], float]] = {
        name: lambda walk=walk: walk.step()[0] for name, walk in kinds.items()
    }
    calls["bare"] = lambda: time_bare(reference, by_hand)
    with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
        for _ in range(args.warmup):
            for call in calls.values():
                call()
        medians: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(args.blocks):
            times = [[call() for call in calls.values()] for _ in range(args.steps)]
            for name, column in zip(calls, zip(*times, strict=True), strict=True):
                medians[name].append(statistics.median(column))
    return {name: min(values) for name, values in medians.items()}


def main() -> None:
    """Measures and prints the table."""
    args = parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    times = measure(args)
    bar = 1.3 * times["bare"] + 150
    print(f"plain step {times['plain']:.0f} us, bare call {times['bare']:.0f} us, bar {bar:.0f} us")
    print(f"{'controller':<26}{'step, us':>10}{'overhead, us':>14}{'ratio':>8}")
    for name in CONTROLLERS:
        overhead = times[name] - times["plain"]
        print(f"{name:<26}{times[name]:>10.0f}{overhead:>14.0f}{overhead / bar:>8.2f}")


if __name__ == "__main__":
    main()
