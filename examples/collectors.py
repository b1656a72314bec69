"""PPO on the digit language with each of TorchRL's collectors, and what changes with them.

A language model is improved towards {0, 1} for its first digit, with a coefficient that steers the
KL to 0.5 nats per response. `--collector` says who writes the responses: this process, or workers
that wait for the learner or do not, as processes of this machine, over torch.distributed (gloo), or
as actors of Ray. `--where` says who evaluates the reference: the learner on the batches that
arrive, or worker processes at each step.
"""

from __future__ import annotations

import copy
import os
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import digit_rlhf
import torch
from digit_exact import LANGUAGE, add_separator, next_token
from digit_rlhf import PPO, split_prompts, train_language_model
from running import JobOptions, Run, open_folder, read_options
from torchrl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from torchrl.collectors.distributed import DistributedCollector, RayCollector

from torchrl_kl import AdaptiveKLController, KLConstrainedTransform, kl_collector
from torchrl_kl.envs import DigitLanguageEnv
from torchrl_kl.exact import Enumeration
from torchrl_kl.language import GPT

COLLECTORS = {
    "sync": Collector,
    "multi-sync": MultiSyncCollector,
    "multi-async": MultiAsyncCollector,
    "ray": RayCollector,
    "gloo": DistributedCollector,
}
RECIPE = digit_rlhf.Args(ppo_minibatch=256, ppo_decay="linear")
QUICK = {"lm_iterations": 40, "batches": 4, "responses": 64, "exact_prompts": 1}


@dataclass(frozen=True)
class Args(JobOptions):
    """What can be set from the command line."""

    out: Path = Path("runs/collectors")  # Folder of the log, which must be new or empty.
    collector: Literal["sync", "multi-sync", "multi-async", "ray", "gloo"] = "sync"  # The writer.
    where: Literal["learner", "workers"] = "learner"  # Who evaluates the reference.
    batches: int = 120  # Batches of responses.
    responses: int = 512  # Responses per batch.
    reference: str = ""  # Folder of a language model to begin with; one is trained if it is empty.
    lm_iterations: int = 960  # Updates of the language model that is trained.
    target_kl: float = 0.5  # KL that the coefficient steers to, nats per response.
    init_coeff: float = 0.05  # Where the coefficient starts, far from the answer.
    exact_prompts: int = 16  # Held-out prompts over which the exact values are taken.


def make_collector(ppo: PPO, stack: KLConstrainedTransform, prompts: torch.Tensor, args: Args):
    # A batch of asynchronous workers comes from one of them; the others share it.
    n_workers = 1 if args.collector == "sync" else args.processes
    responses = args.responses // (n_workers if args.collector == "multi-sync" else 1)
    make_env = partial(DigitLanguageEnv, LANGUAGE, prompts=prompts, batch_size=(responses,))
    make_envs = [partial(make_env, seed=args.seed + worker) for worker in range(n_workers)]
    # At Ray's niceness of 15 a learner that uses all cores would starve the workers.
    os.environ.setdefault("RAY_worker_niceness", "0")
    ray = {"num_cpus": n_workers, "include_dashboard": False, "log_to_driver": False}
    options: dict[str, Any] = {"ray_init_config": ray} if args.collector == "ray" else {}
    frames = args.responses * LANGUAGE.response_length
    return kl_collector(
        COLLECTORS[args.collector],
        make_envs,
        ppo.actor,
        stack,
        where=args.where,
        num_workers=n_workers,
        frames_per_batch=frames,
        total_frames=frames * args.batches,
        **options,
    )


def main() -> None:
    args = read_options(Args, __doc__, quick=QUICK)
    open_folder(args)
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    recipe = replace(RECIPE, lm_iterations=args.lm_iterations)
    prompts, heldout = split_prompts(recipe.heldout_prompts)
    if args.reference:
        language_model = GPT.from_pretrained(args.reference)
    else:
        language_model = train_language_model(Run("language_model", args), prompts, recipe)
    policy = copy.deepcopy(language_model)
    ppo = PPO(policy, args.batches, recipe)
    controller = AdaptiveKLController(args.init_coeff, args.target_kl, horizon=8192, clip=1.0)
    stack = KLConstrainedTransform(ppo.actor, controller)
    collector = make_collector(ppo, stack, prompts, args)
    run, seen = Run("ppo", args), []
    batches, start = iter(collector), time.perf_counter()
    try:
        for step in run.steps(args.batches):
            batch = next(batches)
            seen.append(batch["next", "kl_coeff"].flatten())
            # (worker, response, token) of several workers
            values = ppo.update(batch.flatten(0, 1) if batch.ndim == 3 else batch)
            collector.update_policy_weights_()
            run.log(step, "reward {reward:.2f}, KL {kl_reference:.2f}, coeff {coeff:.3f}", **values)
    finally:
        collector.shutdown()
    seconds, frames = time.perf_counter() - start, sum(coeffs.numel() for coeffs in seen)
    contexts = add_separator(heldout[: args.exact_prompts])
    reference, n_tokens = next_token(language_model), LANGUAGE.response_length
    exact = Enumeration(reference, LANGUAGE.preference, contexts, n_tokens)
    target_coeff = exact.solve_coeff(args.target_kl)
    final = exact.values(next_token(policy.eval()), target_coeff)
    mixed = sum(len(coeffs.unique()) > 1 for coeffs in seen)
    print(f"{args.collector}, reference with the {args.where}")
    print(f"frames per second  {frames / seconds:.0f}")
    print(f"coefficients       {seen[0][0]:.3f} ... {seen[-1][-1]:.3f}; several in {mixed} batches")
    print(f"KL                 {final.kl:.3f} (target {args.target_kl:g})")
    print(f"exact regret       {final.regret:.4f} at coefficient {target_coeff:.3f}")


if __name__ == "__main__":
    main()
