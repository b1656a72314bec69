"""A coefficient that is planned from rewards of a collector's workers is right and reaches them."""

import math
from collections import defaultdict
from typing import Any

import pytest
import torch
from torchrl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector

from tests.helpers import WalkEnv, make_actor, moved
from torchrl_kl import (
    AdaptiveKLController,
    KLConstrainedTransform,
    PlannedKLController,
    kl_collector,
)

# Only against hangs. By a thread: waits in C++ do not listen to signals.
pytestmark = pytest.mark.timeout(300, method="thread")

TARGET, FRAMES = 0.1, 640
STEPS_TARGET = 0.03  # nats per step; a trajectory has 2 to 4 steps
CONTROLLERS: dict[str, Any] = {
    "planned": lambda: PlannedKLController(TARGET),
    "planned-steps": lambda: PlannedKLController(STEPS_TARGET, per="step"),
    "adaptive": lambda: AdaptiveKLController("plan", TARGET, horizon=1000),
}
KINDS: dict[str, tuple[Any, int]] = {
    "single": (Collector, 1),
    "multi-sync": (MultiSyncCollector, 2),
    "multi-async": (MultiAsyncCollector, 2),
}


def make_env() -> WalkEnv:
    return WalkEnv((8,))


class Seen:
    """What the batches show of trajectories, by id."""

    def __init__(self, reference: Any):
        self.weight, self.bias = (p.detach().double() for p in reference.parameters())
        self.steps: dict[int, list[tuple[float, float]]] = defaultdict(list)
        self.ended: list[int] = []

    def add(self, batch: Any) -> None:
        # log pi - log pi_ref of each step, from the weights of the reference.
        logits = batch["observation"].double() @ self.weight.T + self.bias
        ref_log_prob = logits.log_softmax(-1).gather(-1, batch["action"].unsqueeze(-1))
        ratios = batch["action_log_prob"].double() - ref_log_prob.squeeze(-1)
        rewards = batch["next", "observation"].double().sum(-1)
        entries = (batch["collector", "traj_ids"], rewards, ratios, batch["next", "done"])
        columns = [entry.flatten().tolist() for entry in entries]
        for number, reward, ratio, done in zip(*columns, strict=True):
            self.steps[number].append((reward, ratio))
            if done:
                self.ended.append(number)

    def coeff(self, per: str) -> float:
        """The coefficient whose optimum spends the target, by bisection in plain Python."""
        whole = [self.steps[number] for number in self.ended]
        rewards = [sum(reward for reward, _ in steps) for steps in whole]
        ratios = [sum(ratio for _, ratio in steps) for steps in whole]
        weights = [math.exp(-ratio) for ratio in ratios]
        weights = [weight / sum(weights) for weight in weights]  # of the reference
        budget = TARGET
        if per == "step":
            lengths = zip(weights, whole, strict=True)
            budget = STEPS_TARGET * sum(weight * len(steps) for weight, steps in lengths)
        best, low, high = max(rewards), 1e-3, 1e3

        def kl(coeff: float) -> float:
            gains = [math.exp((reward - best) / coeff) for reward in rewards]
            mean = sum(w * g for w, g in zip(weights, gains, strict=True))
            new = [w * g / mean for w, g in zip(weights, gains, strict=True)]
            return sum(n * math.log(n / w) for n, w in zip(new, weights, strict=True) if n)

        while high / low > 1 + 1e-12:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if kl(middle) > budget else (low, middle)
        return low


CASES = [("single", name) for name in CONTROLLERS]
CASES += [
    pytest.param(kind, name, marks=pytest.mark.slow)
    for kind, name in (("multi-sync", "planned-steps"), ("multi-async", "planned"))
]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_it_is_right_and_reaches_the_workers(kind, name):
    torch.manual_seed(0)
    reference, controller = make_actor(), CONTROLLERS[name]()
    collector_class, n_workers = KINDS[kind]
    collector = kl_collector(
        collector_class,
        make_env,
        moved(reference, scale=0.1),
        KLConstrainedTransform(reference, controller),
        where="workers",
        num_workers=n_workers,
        frames_per_batch=FRAMES,
        total_frames=6 * FRAMES,
    )
    seen, had, used = Seen(reference), [0.0], []
    expected = math.nan
    try:
        for batch in collector:
            used.append(set(batch["next", "kl_coeff"].flatten().tolist()))
            if math.isnan(expected):
                seen.add(batch)
                expected = math.nan if controller.planning else seen.coeff(controller.per)
                if not math.isnan(expected):
                    factor = 1 if name == "adaptive" else 1.5  # to begin with
                    # Log-probs of workers are rounded to float32: 1e-5 of a sum of a few nats.
                    assert controller.coeff.item() == pytest.approx(factor * expected, rel=1e-4)
            had.append(controller.coeff.item())
    finally:
        collector.shutdown()
    assert not controller.planning
    assert had[0] == 0 < had[-1]
    for n, coeffs in enumerate(used):
        # An asynchronous worker may be some updates behind.
        known = torch.tensor(had[: n + 1] if kind == "multi-async" else [had[n]])
        assert coeffs <= set(known.tolist())
    assert min(used[-1]) > 0  # which every worker has
