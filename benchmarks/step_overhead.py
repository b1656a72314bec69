"""What the stack costs: microseconds per step of an env, and frames per second of a collector.

CartPole-v1, an MLP of 2 x 64, one thread. The first table times one call at a time:

    plain     a step of TransformedEnv(CartPole, Compose())
    bare      reference.get_dist(observation).log_prob(action): scoring one action by hand
    step      the same step with KLConstrainedTransform
    overhead  step - plain
    / bare    overhead / bare

The second table collects batches with a Collector: without a stack, with the stack in the env, and
with the stack as the collector's `postproc`, which scores a whole batch at once.

All kinds are timed in turn, in one run, so that other work on the machine slows all of them. Such
work only adds time: each time is the smallest of the medians of many short blocks, and each rate is
that of the fastest batch.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from bench_report import Result, arg, parse_args, quick_flag
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector
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


@dataclass
class Args:
    """What can be set from the command line."""

    blocks: int = arg(60, "Short blocks, over whose medians the smallest is taken.", quick=2)
    steps: int = arg(50, "Steps per block, each of every kind in turn.", quick=10)
    warmup: int = arg(200, "Steps of every kind before the first block.", quick=5)
    batches: int = arg(15, "Batches of each collector.", quick=3)
    frames: int = arg(1000, "Frames per batch.", quick=100)
    quick: bool = quick_flag()


def make_actor() -> ProbabilisticActor:
    """The policy: an MLP of 2 x 64 that records its log-prob."""
    net = TensorDictModule(MLP(4, 2, num_cells=[64, 64]), ["observation"], ["logits"])
    return ProbabilisticActor(
        net,
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )


def make_env(*transforms: Transform) -> EnvBase:
    """CartPole with transforms."""
    env = GymEnv("CartPole-v1", categorical_action_encoding=True)
    return TransformedEnv(env, Compose(list(transforms)))


class Walk:
    """A policy that walks through an env; only the step of the env is timed."""

    def __init__(self, actor: ProbabilisticActor, *transforms: Transform):
        self.actor, self.env = actor, make_env(*transforms)
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


def measure_steps(args: Args) -> dict[str, float]:
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


def collect(args: Args, env: EnvBase, postproc: Transform | None = None) -> Iterator:
    """The batches of a collector, without end."""
    return iter(
        Collector(
            env,
            make_actor(),
            frames_per_batch=args.frames,
            total_frames=-1,
            postproc=postproc,
            auto_register_policy_transforms=False,
        )
    )


def measure_frames(args: Args) -> tuple[float, dict[str, list[float]]]:
    """Frames per second without a stack; by controller, with it in the env and as `postproc`."""

    def stack(make: Callable[[], KLController]) -> KLConstrainedTransform:
        return KLConstrainedTransform(make_actor(), make())

    kinds = [collect(args, make_env())]
    for make in CONTROLLERS.values():
        kinds += [collect(args, make_env(stack(make))), collect(args, make_env(), stack(make))]
    best = [0.0] * len(kinds)
    for batch in range(args.batches):
        for index, batches in enumerate(kinds):
            start = time.perf_counter()
            next(batches)
            rate = args.frames / (time.perf_counter() - start)
            if batch > 0:  # the first one includes the start
                best[index] = max(best[index], rate)
    pairs = zip(best[1::2], best[2::2], strict=True)
    return best[0], {name: list(pair) for name, pair in zip(CONTROLLERS, pairs, strict=True)}


def results(args: Args) -> list[Result]:
    """Measures, prints the tables, and returns what they say."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    times = measure_steps(args)
    found = []
    print(f"plain step {times['plain']:.0f} us, bare call {times['bare']:.0f} us\n")
    print("| controller | step, us | overhead, us | overhead / bare |\n|---|---|---|---|")
    for name in CONTROLLERS:
        overhead = times[name] - times["plain"]
        question = f"CartPole, stack ({name}): time per step, against a bare reference call"
        found.append(Result.cost(question, overhead, times["bare"], unit="us"))
        print(f"| {name} | {times[name]:.0f} | {overhead:.0f} | {found[-1].ratio:.2f} |")
    plain_rate, rates = measure_frames(args)
    print(f"\n{plain_rate:.0f} frames per second without a stack\n")
    print(
        "| controller | frames/s, stack in the env | frames/s, stack as postproc |\n|---|---|---|"
    )
    for name, pair in rates.items():
        cells = [f"{rate:.0f} ({rate / plain_rate:.0%})" for rate in pair]
        print(f"| {name} | {' | '.join(cells)} |")
        for place, rate in zip(("in the env", "as postproc"), pair, strict=True):
            question = f"CartPole, Collector with the stack ({name}) {place}, against none"
            shares = (rate, plain_rate, rate / plain_rate)
            found.append(Result(question, *shares, unit="frames/s"))
    return found


def main() -> None:
    """Measures and prints the tables."""
    results(parse_args(Args, __doc__))


if __name__ == "__main__":
    main()
