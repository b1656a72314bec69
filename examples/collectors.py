"""PPO on the digit language with each of TorchRL's collectors, and what changes with them.

A language model is improved towards {0, 1} for its first digit, with a coefficient that steers the
KL to 0.5 nats per response. `--collector` says who writes the responses: this process, or workers
that wait for the learner or do not, as processes of this machine, over torch.distributed (gloo), or
as actors of Ray. `--where` says who evaluates the reference: the learner on the batches that
arrive, or the workers at each step.

Printed at the end:
    frames per second  tokens written and learnt from, per second since the first was asked for
    coefficients       of the first step and of the last, and how many batches mix coefficients
    KL                 of the final policy, exact, nats per response
    exact regret       how much more the best policy gains, at the coefficient whose optimum has a
                       KL of 0.5 nats; in reward
"""

from __future__ import annotations

import copy
import os
import time
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from digit_job import PPO, JobArgs, arg, next_token, parse_args, split_prompts, train_language_model
from torchrl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from torchrl.collectors.distributed import DistributedCollector, RayCollector
from tqdm import tqdm

from torchrl_kl import GPT, AdaptiveKLController, Enumeration, KLConstrainedTransform, kl_collector
from torchrl_kl.envs import DigitLanguage, DigitLanguageEnv

COLLECTORS = {
    "sync": Collector,
    "multi-sync": MultiSyncCollector,
    "multi-async": MultiAsyncCollector,
    "ray": RayCollector,
    "gloo": DistributedCollector,
}


@dataclass
class Args(JobArgs):
    """What can be set from the command line."""

    collector: str = arg("sync", "Who writes the responses.", list(COLLECTORS))
    where: Literal["learner", "workers"] = arg(
        "learner", "Who evaluates the reference.", ["learner", "workers"]
    )
    workers: int = arg(2, "Workers of all collectors but sync.")
    batches: int = arg(120, "Batches of responses.")
    ray_address: str = arg(
        "", "Address of a Ray cluster, auto on its machines; a local Ray is started if it is empty."
    )
    reference: str = arg(
        "", "Folder of a language model to begin with; one is trained if it is empty."
    )
    target_kl: float = arg(0.5, "KL that the coefficient steers to, nats per response.")
    init_coeff: float = arg(0.05, "Where the coefficient starts, far from the answer.")
    horizon: float = arg(8192.0, "Responses in which the coefficient can grow by a factor of e.")
    exact_prompts: int = arg(16, "Held-out prompts over which the exact values are taken.")


def make_collector(
    ppo: PPO,
    stack: KLConstrainedTransform,
    language: DigitLanguage,
    prompts: torch.Tensor,
    args: Args,
):
    # A batch of asynchronous workers comes from one of them; the others share it.
    n_workers = 1 if args.collector == "sync" else args.workers
    responses = args.ppo_responses // (n_workers if args.collector == "multi-sync" else 1)
    make_envs = [
        partial(
            DigitLanguageEnv,
            language,
            prompts=prompts,
            batch_size=(responses,),
            seed=args.seed + worker,
        )
        for worker in range(n_workers)
    ]
    os.environ.setdefault(
        "RAY_worker_niceness", "0"
    )  # at Ray's 15 a learner that uses all cores would starve them
    local = {"num_cpus": n_workers, "include_dashboard": False, "log_to_driver": False}
    cluster = {"address": args.ray_address, "log_to_driver": False}
    ray = {"ray_init_config": cluster if args.ray_address else local}
    frames = args.ppo_responses * language.response_length
    return kl_collector(
        COLLECTORS[args.collector],
        make_envs,
        ppo.actor,
        stack,
        where=args.where,
        num_workers=n_workers,
        frames_per_batch=frames,
        total_frames=frames * args.batches,
        **(ray if args.collector == "ray" else {}),
    )


def main() -> None:
    args = parse_args(Args, __doc__)
    if args.quick:
        args.lm_iterations, args.batches, args.ppo_responses, args.exact_prompts = 40, 4, 64, 1
        args.heldout_prompts = 50
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    language = DigitLanguage()
    prompts, heldout = split_prompts(language, args)
    if args.reference:
        language_model = GPT.from_pretrained(args.reference)
    else:
        language_model = train_language_model(language, prompts, args, lambda *_, **__: None)

    policy = copy.deepcopy(language_model)
    ppo = PPO(policy, language, args.batches, args)
    controller = AdaptiveKLController(args.init_coeff, args.target_kl, args.horizon, clip=1.0)
    collector = make_collector(
        ppo, KLConstrainedTransform(ppo.actor, controller), language, prompts, args
    )
    seen, frames, start = [], 0, time.perf_counter()
    try:
        bar = tqdm(collector, desc=f"PPO, {args.collector}", total=args.batches)
        for batch in bar:
            coeffs = batch["next", "kl_coeff"].flatten()
            seen.append((coeffs[0].item(), coeffs[-1].item(), coeffs.unique().numel()))
            frames += batch.numel()
            if batch.ndim == 3:  # (worker, response, token)
                batch = batch.flatten(0, 1)
            values = ppo.update(batch)
            collector.update_policy_weights_()
            bar.set_postfix_str(
                "reward {reward:.2f}, KL {kl_reference:.2f} nats, coeff {coeff:.3f}".format(
                    **values
                )
            )
        seconds = time.perf_counter() - start
    finally:
        collector.shutdown()

    contexts = torch.cat([heldout, torch.full((len(heldout), 1), language.separator)], 1)[
        : args.exact_prompts
    ]
    exact = Enumeration(
        next_token(language_model), language.preference, contexts, language.response_length
    )
    target_coeff = exact.solve_coeff(args.target_kl)
    final = exact.values(next_token(policy.eval()), target_coeff)
    print(f"{args.collector}, reference with the {args.where}")
    print(f"frames per second  {frames / seconds:.0f}")
    mixed = f"{sum(count > 1 for *_, count in seen)} of {len(seen)} batches"
    print(f"coefficients       {seen[0][0]:.3f} ... {seen[-1][1]:.3f}; several in {mixed}")
    print(f"KL                 {final.kl:.3f} (target {args.target_kl:g})")
    print(f"exact regret       {final.regret:.4f} at coefficient {target_coeff:.3f}")


if __name__ == "__main__":
    main()
