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
from digit_job import (
    PPO,
    DigitOptions,
    LanguageModelTraining,
    add_separator,
    next_token,
    split_prompts,
)
from running import Count, Positive, read_options
from torchrl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from torchrl.collectors.distributed import DistributedCollector, RayCollector
from tqdm import tqdm

from torchrl_kl import (
    GPT,
    AdaptiveKLController,
    Enumeration,
    KLConstrainedTransform,
    KLController,
    kl_collector,
)
from torchrl_kl.envs import DigitLanguage, DigitLanguageEnv

COLLECTORS = {
    "sync": Collector,
    "multi-sync": MultiSyncCollector,
    "multi-async": MultiAsyncCollector,
    "ray": RayCollector,
    "gloo": DistributedCollector,
}


QUICK = {
    "lm_iterations": 40,
    "batches": 4,
    "ppo_responses": 64,
    "exact_prompts": 1,
    "heldout_prompts": 50,
}


@dataclass(frozen=True)
class Options(DigitOptions):
    """What can be set from the command line."""

    collector: Literal["sync", "multi-sync", "multi-async", "ray", "gloo"] = "sync"
    """Who writes the responses."""
    where: Literal["learner", "workers"] = "learner"
    """Who evaluates the reference."""
    workers: Count = 2
    """Workers of all collectors but sync."""
    batches: Count = 120
    """Batches of responses."""
    ray_address: str = ""
    """Address of a Ray cluster, auto on its machines; a local Ray is started if it is empty."""
    reference: str = ""
    """Folder of a language model to begin with; one is trained if it is empty."""
    target_kl: Positive = 0.5
    """KL that the coefficient steers to, nats per response."""
    init_coeff: Positive = 0.05
    """Where the coefficient starts, far from the answer."""
    horizon: Positive = 8192.0
    """Responses in which the coefficient can grow by a factor of e."""
    exact_prompts: Count = 16
    """Held-out prompts over which the exact values are taken."""


def load_language_model(language: DigitLanguage, prompts: torch.Tensor, options: Options) -> GPT:
    if options.reference:
        return GPT.from_pretrained(options.reference)
    training = LanguageModelTraining(language, prompts, options)
    bar = tqdm(range(options.lm_iterations), desc="language model", disable=None)
    for step in bar:
        loss = training.update()
        if step % 10 == 0:
            bar.set_postfix_str(f"loss {loss:.3f} nats per token")
    return training.gpt.eval()


def make_controller(options: Options) -> KLController:
    init_coeff, target, horizon = options.init_coeff, options.target_kl, options.horizon
    return AdaptiveKLController(init_coeff, target, horizon, clip=1.0)


def make_collector(
    ppo: PPO,
    stack: KLConstrainedTransform,
    language: DigitLanguage,
    prompts: torch.Tensor,
    options: Options,
):
    # A batch of asynchronous workers comes from one of them; the others share it.
    n_workers = 1 if options.collector == "sync" else options.workers
    responses = options.ppo_responses // (n_workers if options.collector == "multi-sync" else 1)
    make_envs = [
        partial(
            DigitLanguageEnv,
            language,
            prompts=prompts,
            batch_size=(responses,),
            seed=options.seed + worker,
        )
        for worker in range(n_workers)
    ]
    os.environ.setdefault(
        "RAY_worker_niceness", "0"
    )  # at Ray's 15 a learner that uses all cores would starve them
    local = {"num_cpus": n_workers, "include_dashboard": False, "log_to_driver": False}
    cluster = {"address": options.ray_address, "log_to_driver": False}
    ray = {"ray_init_config": cluster if options.ray_address else local}
    frames = options.ppo_responses * language.response_length
    return kl_collector(
        COLLECTORS[options.collector],
        make_envs,
        ppo.actor,
        stack,
        where=options.where,
        num_workers=n_workers,
        frames_per_batch=frames,
        total_frames=frames * options.batches,
        **(ray if options.collector == "ray" else {}),
    )


def main() -> None:
    options = read_options(Options, __doc__, {"quick": QUICK})
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    language = DigitLanguage()
    prompts, heldout = split_prompts(language, options)
    language_model = load_language_model(language, prompts, options)
    policy = copy.deepcopy(language_model)
    ppo = PPO(policy, language, options.batches, options)
    stack = KLConstrainedTransform(ppo.actor, make_controller(options))
    collector = make_collector(ppo, stack, language, prompts, options)
    seen, frames, start = [], 0, time.perf_counter()
    bar = tqdm(collector, desc=f"PPO, {options.collector}", total=options.batches, disable=None)
    try:
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
    except KeyboardInterrupt:
        raise SystemExit(f"Stopped after {len(seen)} of {options.batches} batches.") from None
    finally:
        collector.shutdown()
    seconds = time.perf_counter() - start

    contexts = add_separator(heldout, language)[: options.exact_prompts]
    exact = Enumeration(
        next_token(language_model), language.preference, contexts, language.response_length
    )
    target_coeff = exact.solve_coeff(options.target_kl)
    final = exact.values(next_token(policy.eval()), target_coeff)
    print(f"{options.collector}, reference with the {options.where}")
    print(f"frames per second  {frames / seconds:.0f}")
    mixed = f"{sum(count > 1 for *_, count in seen)} of {len(seen)} batches"
    print(f"coefficients       {seen[0][0]:.3f} ... {seen[-1][1]:.3f}; several in {mixed}")
    print(f"KL                 {final.kl:.3f} (target {options.target_kl:g})")
    print(f"exact regret       {final.regret:.4f} at coefficient {target_coeff:.3f}")


if __name__ == "__main__":
    main()
