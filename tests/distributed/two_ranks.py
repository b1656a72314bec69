"""Cases of two ranks: training, each way to feed a controller, state, and what is exchanged."""

import copy
import math
import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn.parallel import DistributedDataParallel
from torchrl.collectors import Collector
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from tests.distributed.ranks import n_collectives
from tests.helpers import (
    N_OBS,
    WalkEnv,
    collect,
    make_actor,
    moved,
    play,
    sharp,
    with_transforms,
)
from tests.language.test_truncation import make_gpt, responses_of, sampled
from torchrl_kl import (
    AdaptiveKLController,
    ConstantKLController,
    ExponentialKLController,
    KLConstrainedTransform,
    KLControlHook,
    KLPenaltyLoss,
    KLStatistics,
    PIDKLController,
    PlannedKLController,
    RewardAdjustmentTransform,
    TargetKLController,
    kl_collector,
)
from torchrl_kl.language import CausalLMActor, ResponseKLTransform, as_steps


class OwnController(TargetKLController):
    """A rule of a user, with state in a buffer."""

    mean: Tensor

    def __init__(self):
        super().__init__(1.0, target=0.5)
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))

    def next_coeff(self, kl: float, n_steps: int) -> float:
        self.mean += (kl - self.mean) / n_steps
        return self.coeff.item() * math.exp(0.1 * (self.mean.item() - self.target))


RULES: dict[str, Callable[[], Any]] = {
    "adaptive": lambda: AdaptiveKLController(1.0, 0.5, horizon=500),
    "exponential": lambda: ExponentialKLController(1.0, 0.5),
    "pid": lambda: PIDKLController("plan", 0.5),
    "planned": lambda: PlannedKLController(0.5),
    "planned per step": lambda: PlannedKLController(0.5, per="step"),
    "own": OwnController,
}


def shared(controller: Any) -> Any:
    controller.group = dist.group.WORLD
    return controller


def data(rank: int, n: int, policy: Any = None) -> Any:
    """A rollout, other on each rank: rank 1 has other rows, and longer trajectories."""
    env = WalkEnv((4,), longest=4 + 5 * rank)
    return play(env, policy or moved(make_actor()), seed=2 * n + rank)


def ppo(rank: int, folder: Path) -> Any:
    """The state of each controller, and its pool, after each batch."""
    found = {}
    for kind, make in RULES.items():
        actor = make_actor()
        stack = KLConstrainedTransform(actor, shared(make()), update_every=20)
        actor = moved(actor)
        critic = TensorDictModule(sharp(nn.Linear(N_OBS, 1)), ["observation"], ["state_value"])
        loss: Any = DistributedDataParallel(ClipPPOLoss(actor, critic))
        optimizer, states = torch.optim.SGD(loss.parameters(), lr=0.01), []
        for n in range(8):
            batch = stack(data(rank, n, actor).detach())
            states.append(state_of(stack))
            GAE(gamma=1.0, lmbda=0.95, value_network=critic)(batch)
            losses = loss(batch.reshape(-1))
            optimizer.zero_grad()
            (losses["loss_objective"] + losses["loss_critic"]).backward()
            optimizer.step()
        found[kind] = states
    return found


def state_of(stack: Any) -> list[Any]:
    """All numbers of a controller and of the pool that it is fed from."""
    parts = (stack.controller, stack.penalty.feed.statistics)
    values = [value for part in parts for value in part.state_dict().values()]
    return [value.item() if isinstance(value, Tensor) else value for value in values]


def measured(rank: int, n: int = 0) -> Any:
    """A rollout whose KL is measured."""
    batch = data(rank, n)
    generator = torch.Generator().manual_seed(10 * n + rank)
    batch["next", "kl"] = 0.1 + torch.randn(batch["next", "reward"].shape, generator=generator)
    return batch


def feeds(rank: int, folder: Path) -> Any:
    """The coefficient of a group, by each way to feed it; and of one process with all rows.

    For responses and the loss a sampler is too far off on rank 1.
    """

    def adjustment(group: Any, ranks: Any) -> float:
        transform = RewardAdjustmentTransform(of(group))
        transform(torch.cat([measured(each) for each in ranks]))
        return transform.controller.coeff.item()

    def union_of(ranks: Any) -> Any:
        return torch.cat([data(each, 0) for each in ranks])

    def stack(group: Any, ranks: Any) -> float:
        transform = KLConstrainedTransform(make_actor(), of(group))
        transform(union_of(ranks))
        return transform.controller.coeff.item()

    def hook(group: Any, ranks: Any) -> float:
        transform = KLConstrainedTransform(make_actor(), of(group))
        KLControlHook(transform)(union_of(ranks))
        return transform.controller.coeff.item()

    def steps_of(far: bool) -> Any:
        steps = sampled(CausalLMActor(make_gpt()), 50)
        noise = 3 * torch.randn(50, 8, dtype=torch.float64)
        if far:
            steps["action_log_prob"] = steps["action_log_prob"] - noise
        batch = responses_of(steps)
        batch["next", "reward"] += batch["tokens", "full"][:, -1:] % 3
        return batch

    def responses(group: Any, ranks: Any) -> float:
        transform = ResponseKLTransform(
            make_gpt(), of(group), reference=make_gpt(1), sampler_weights="truncated"
        )
        transform(steps_of(far=ranks == [1]))
        return transform.controller.coeff.item()

    def loss(group: Any, ranks: Any) -> float:
        gpt = make_gpt()
        batch = ResponseKLTransform(gpt, 0.0)(steps_of(far=ranks == [1]))
        batch = as_steps(batch.exclude(("next", "kl_coeff")), pad_token=None)
        reference = CausalLMActor(make_gpt(1))
        actor, weights = CausalLMActor(gpt), "truncated"
        penalty = KLPenaltyLoss(actor, of(group), reference=reference, sampler_weights=weights)
        return penalty.update_controller(batch)

    found = {}
    for kind in ("exponential", "planned", "planned per step"):

        def of(group: Any, kind: str = kind) -> Any:
            controller = RULES[kind]()
            controller.group = group
            return controller

        for way in (adjustment, stack, hook, responses, loss):
            useful = [0] if way in (responses, loss) else [0, 1]
            found[kind, way.__name__] = way(dist.group.WORLD, [rank]), way(None, useful)
    return found


def collectives(rank: int, folder: Path) -> Any:
    """How many each call on a batch begins."""
    plans = RewardAdjustmentTransform(shared(PlannedKLController(0.5)))
    planned = RewardAdjustmentTransform(shared(ExponentialKLController("plan", 0.5)))
    while planned.controller.planning:
        planned(measured(rank))
    trained = RewardAdjustmentTransform(shared(ExponentialKLController(1.0, 0.5)))
    evaluated = RewardAdjustmentTransform(shared(ExponentialKLController(1.0, 0.5))).eval()
    frozen = RewardAdjustmentTransform(shared(ExponentialKLController(1.0, 0.5))).freeze()
    constant = RewardAdjustmentTransform(shared(ConstantKLController(1.0)))
    alone = RewardAdjustmentTransform(ExponentialKLController(1.0, 0.5))
    found = {}
    for name, transform in (
        ("plans", plans),
        ("planned", planned),
        ("trained", trained),
        ("evaluated", evaluated),
        ("frozen", frozen),
        ("constant", constant),
        ("alone", alone),
    ):
        before = n_collectives()
        transform(measured(rank))
        found[name] = n_collectives() - before
    loss = KLPenaltyLoss(make_actor(), shared(ExponentialKLController(1.0, 0.5)))
    before = n_collectives()
    loss(data(rank, 0))
    found["loss"] = n_collectives() - before
    statistics = KLStatistics().add(torch.full((rank + 1,), float(rank)))
    total = statistics.all_reduce()
    found["statistics"] = total is statistics, *(each.item() for each in total.buffers())
    return found


def wrapped_losses(rank: int, folder: Path) -> Any:
    """Gradients of DDP(KLPenaltyLoss), those of the union, and the state around the forward."""
    found = {}
    for gradient in ("step", "sequence", "k2"):

        def make(controller: Any, gradient: Any = gradient) -> Any:
            reference = make_actor()
            actor = moved(reference)
            return KLPenaltyLoss(actor, controller, gradient=gradient, reference=reference)

        loss = make(shared(PIDKLController(0.5, 0.5)))
        wrapped = DistributedDataParallel(loss)
        # More trajectories stay open on rank 1.
        env, frames = WalkEnv((2 + rank,), longest=9), 5 * (2 + rank)
        for batch in collect(env, moved(make_actor()), frames=frames, batches=2, seed=rank):
            loss.update_controller(batch)
        before = copy.deepcopy((loss.controller.state_dict(), loss.feed.state_dict()))
        wrapped(play(WalkEnv((4,)), moved(make_actor()), seed=rank))["loss_kl"].backward()
        after = loss.controller.state_dict(), loss.feed.state_dict()
        n_open = len(loss.feed.trajectories.table["ids"])
        union = make(loss.controller.coeff.item())
        rows = [play(WalkEnv((4,)), moved(make_actor()), seed=each) for each in (0, 1)]
        union(torch.cat(rows))["loss_kl"].backward()
        grads = [[p.grad for p in one.parameters()] for one in (loss, union)]
        found[gradient] = before == after, n_open, grads
    return found


def unequal_losses(rank: int, folder: Path) -> Any:
    """Gradients of a sum over unequal ranks, divided by the steps of all; and of the union."""
    rows = [play(WalkEnv((3 + 4 * n,)), moved(make_actor()), seed=n) for n in (0, 1)]
    reference = make_actor()

    def make(reduction: Any) -> Any:
        return KLPenaltyLoss(moved(reference), 0.5, reference=reference, reduction=reduction)

    summed, union, mean = map(make, ("sum", "mean", "mean"))
    wrapped, wrapped_mean = map(DistributedDataParallel, (summed, mean))
    n_steps = torch.tensor(float(rows[rank].numel()))
    dist.all_reduce(n_steps)
    (wrapped(rows[rank])["loss_kl"] * dist.get_world_size() / n_steps).backward()
    wrapped_mean(rows[rank])["loss_kl"].backward()
    union(torch.cat(rows))["loss_kl"].backward()
    return [[p.grad for p in each.parameters()] for each in (summed, union, mean)]


def checkpoints(rank: int, folder: Path) -> Any:
    """A waiting plan and a pool, saved and loaded, go on as if nothing had been."""

    def make(seed: int) -> Any:
        controller = shared(PlannedKLController(0.5))
        return KLConstrainedTransform(make_actor(seed=seed), controller, update_every=100)

    whole, states = make(0), {}
    for n in range(2):
        whole(data(rank, n)[:1])
    waits = len(whole.controller.plan.samples)
    save({"stack": whole.state_dict()}, checkpoint_id=folder / "dcp")
    if rank == 0:
        torch.save(whole.state_dict(), folder / "stack.pt")
    dist.barrier()
    for how in ("dcp", "torch"):
        resumed = make(1)
        if how == "dcp":
            state = {"stack": resumed.state_dict()}
            load(state, checkpoint_id=folder / "dcp")
            resumed.load_state_dict(state["stack"])
        else:
            resumed.load_state_dict(torch.load(folder / "stack.pt", weights_only=True))
        states[how] = [state_of(resumed)]
        for n in range(2, 20):
            resumed(data(rank, n)[:1])
            states[how].append(state_of(resumed))
    states["whole"] = [state_of(whole)]
    for n in range(2, 20):
        whole(data(rank, n)[:1])
        states["whole"].append(state_of(whole))
    return waits, whole.controller.planning, states


def copies(rank: int, folder: Path) -> Any:
    """The groups of copies, and of what was copied; a collector whose workers have copies."""
    controller = shared(ExponentialKLController(1.0, 0.5))
    stack = KLConstrainedTransform(make_actor(), controller)
    made = [copy.deepcopy(stack), pickle.loads(pickle.dumps(stack))]
    options: Any = {"where": "workers", "frames_per_batch": 16, "total_frames": 32}
    before = n_collectives()
    for _ in kl_collector(Collector, WalkEnv, moved(make_actor()), stack, **options):
        pass
    groups = [each.controller.group is None for each in made]
    return groups, controller.group is dist.group.WORLD, n_collectives() - before


def refusals(rank: int, folder: Path) -> Any:
    """What is said without a group, and in an env with one."""
    os.environ["TORCHELASTIC_RUN_ID"] = "1"  # as torchrun does

    def heard(controller: Any) -> list[str]:
        transform = RewardAdjustmentTransform(controller)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for n in range(2):
                transform(measured(rank, n))
        return [str(each.message) for each in caught]

    found = {
        "alone": heard(ExponentialKLController(1.0, 0.5)),
        "group": heard(shared(ExponentialKLController(1.0, 0.5))),
        "constant": heard(ConstantKLController(1.0)),
    }
    del os.environ["TORCHELASTIC_RUN_ID"]
    found["not by torchrun"] = heard(ExponentialKLController(1.0, 0.5))
    stack = KLConstrainedTransform(make_actor(), shared(ExponentialKLController(1.0, 0.5)))
    env = with_transforms(WalkEnv((2,)), stack)
    try:
        play(env, moved(make_actor()))
    except RuntimeError as error:
        found["in an env"] = [str(error)]
    stack.freeze()
    play(env, moved(make_actor()), 2)
    return found


CASES = [ppo, feeds, collectives, wrapped_losses, unequal_losses, checkpoints, copies, refusals]
