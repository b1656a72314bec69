"""TorchRL's collectors in real processes: what reaches the workers, and what arrives from them.

Each collects seven batches. After the second one the policy moves; after the fourth the reference
becomes that policy.
"""

import faulthandler
import socket
from collections import defaultdict
from functools import partial
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from torchrl.collectors import MultiAsyncCollector, MultiSyncCollector
from torchrl.collectors.distributed import DistributedCollector, RayCollector

from tests.helpers import SpyController, WalkEnv, make_actor, moved, total
from torchrl_kl import KLConstrainedTransform, kl_collector

N_BATCHES, N_WORKERS, FRAMES = 7, 2, 24
POLICY_MOVES, REFERENCE_MOVES = 1, 3
SECONDS = 600  # for one collector, only against hangs

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "multi-sync": (MultiSyncCollector, {}),
    "multi-sync-joined": (MultiSyncCollector, {"cat_results": 0, "rows": ()}),
    "multi-async": (MultiAsyncCollector, {}),
    "gloo-sync": (DistributedCollector, {"sync": True}),
    "gloo-async": (DistributedCollector, {}),
    "ray-sync": (RayCollector, {"sync": True}),
    "ray-async": (RayCollector, {}),
}
SLOW = [
    ("multi-sync", "learner"),
    ("multi-sync-joined", "learner"),
    ("multi-sync", "workers"),
    ("multi-async", "learner"),
    ("multi-async", "workers"),
    *[(f"{kind}-{how}", "learner") for kind in ("gloo", "ray") for how in ("sync", "async")],
]
CASES: list[Any] = [("multi-sync-joined", "workers")]
CASES += [pytest.param(*case, marks=pytest.mark.slow, id="-".join(case)) for case in SLOW]


def score(actor: Any, batch: Any) -> torch.Tensor:
    with torch.no_grad():
        return actor.log_prob(batch.select("observation", "action"))


@pytest.mark.parametrize(("kind", "where"), CASES)
def test_what_arrives_from_workers(kind, where, request):
    if kind.startswith("ray"):
        request.getfixturevalue("ray_runtime")
    faulthandler.dump_traceback_later(SECONDS, exit=True)  # a hang must fail, not block
    collector_class, arguments = KINDS[kind]
    rows = arguments.get("rows", (2,))
    arguments = {name: value for name, value in arguments.items() if name != "rows"}
    if kind.startswith("gloo"):
        with socket.create_server(("localhost", 0)) as server:  # TorchRL's port may be taken
            arguments["tcp_port"] = server.getsockname()[1]
    reference = make_actor()
    actor, new = make_actor(), moved(reference)
    controller = SpyController(0.5, step=1.0)
    stack = KLConstrainedTransform(reference, controller)
    collector = kl_collector(
        collector_class,
        partial(WalkEnv, rows, longest=7),
        actor,
        stack,
        where=where,
        num_workers=N_WORKERS,
        frames_per_batch=FRAMES,
        total_frames=N_BATCHES * FRAMES,
        **arguments,
    )
    batches, coeffs = [], []
    try:
        assert type(collector) is collector_class
        for n, batch in enumerate(collector):
            batches.append(batch.clone())
            coeffs.append(controller.coeff.item())
            if n == POLICY_MOVES:
                actor.load_state_dict(new.state_dict())
                collector.update_policy_weights_()
            elif n == REFERENCE_MOVES:
                stack.update_reference(actor)
    finally:
        collector.shutdown(**({"shutdown_ray": False} if kind.startswith("ray") else {}))
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        faulthandler.cancel_dump_traceback_later()
    assert len(batches) == N_BATCHES
    check_penalties(batches, coeffs, behind="async" in kind and where == "workers")
    # Workers read the reference that was known when the batch before arrived.
    certain = REFERENCE_MOVES + (0 if where == "learner" else 1)
    check_scores(batches, reference, new, certain, behind="async" in kind)
    check_sums(batches, controller)


def check_penalties(batches: list[Any], coeffs: list[float], *, behind: bool) -> None:
    known = [0.5, *coeffs]
    for n, batch in enumerate(batches):
        step = batch["next"]
        assert batch.names[-1] == "time"
        assert_close(step["reward"], step["task_reward"] - step["kl_coeff"] * step["kl"])
        used = set(step["kl_coeff"].flatten().tolist())
        assert used <= set(known[: n + 1]) if behind else used == {known[n]}
    assert len(set(coeffs)) >= 5  # it moves with each batch in which a trajectory ends


def check_scores(batches: list[Any], old: Any, new: Any, certain: int, *, behind: bool) -> None:
    for n, batch in enumerate(batches):
        scored = batch["next", "ref_log_prob"]
        is_old, is_new = ((scored - score(one, batch)).abs() <= 1e-5 for one in (old, new))
        if n <= REFERENCE_MOVES:
            assert is_old.all()
        elif n > certain and not behind:
            assert is_new.all()
        else:
            assert (is_old | is_new).all()
    kl = [batch["next", "kl"].abs().max().item() for batch in batches]
    assert max(kl[: POLICY_MOVES + 1]) <= 1e-5
    assert max(kl) > 0.1  # the policy moved, and the reference did not with it


def check_sums(batches: list[Any], controller: SpyController) -> None:
    """Of each trajectory, in plain Python, also if it goes on in a later batch."""
    sums: dict[int, float] = defaultdict(float)
    finished = []
    for batch in batches:
        for step in batch.reshape(-1).unbind(0):
            number = int(step["collector", "traj_ids"])
            sums[number] += step["next", "kl"].double().item()
            if step["next", "done"]:
                finished.append(sums.pop(number))
    assert len(finished) > 20
    count, kl = total(controller)
    assert count == len(finished)
    assert kl == pytest.approx(sum(finished), abs=1e-5)
