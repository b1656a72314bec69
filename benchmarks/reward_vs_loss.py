"""The same KL penalty in the reward and in the loss: do both end at the same policy?

PPO on the digit language with a constant coefficient of the KL to the language model. The penalty
is either subtracted from the reward (`KLConstrainedTransform`) or a term of the loss
(`KLPenaltyLoss` around ClipPPOLoss; the transform then only measures). Every policy is judged by
its exact regret, the distance of its objective E[reward] - coeff * KL to that of the best policy,
by enumerating all responses.

    python benchmarks/reward_vs_loss.py
    python benchmarks/reward_vs_loss.py --reward even

The first reward (1 where the response begins with the last prompt digit plus one) does not depend
on the later digits: at the optimum they have no KL, so that an action causes only the KL of that
step. The second (the number of even digits) spreads the KL over all positions. A language model is
trained first and kept in the folder `--out`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bench_report import Result, arg, parse_args, quick_flag
from digit_ppo import count_even, language_model, next_token, train

from torchrl_kl.envs import DigitLanguage
from torchrl_kl.exact import Enumeration

# Where the penalty is: None is the reward, else the arguments of KLPenaltyLoss.
VARIANTS: dict[str, dict | None] = {
    "reward (k1)": None,
    "loss, sequence": {"gradient": "sequence"},
    "loss, sequence, step weights": {"gradient": "sequence", "weights": "step"},
    "loss, step": {"gradient": "step"},
    "loss, k2": {"gradient": "k2"},
}


@dataclass
class Args:
    """What can be set from the command line."""

    out: str = arg("runs/reward_vs_loss", "Folder of the language model.")
    reward: str = arg("first", "What is rewarded.", choices=["first", "even"])
    coeffs: tuple[float, ...] = arg((0.5,), "Coefficients, reward per nat.")
    seeds: tuple[int, ...] = arg((0, 1), "One run of each variant per seed.", quick=(0,))
    variants: tuple[str, ...] = arg(
        tuple(VARIANTS), "Where the penalty is.", choices=tuple(VARIANTS)
    )
    batches: int = arg(70, "Batches of responses per run.", quick=2)
    responses: int = arg(512, "Responses per batch.", quick=32)
    lm_updates: int = arg(1200, "Updates of the language model.", quick=20)
    prompts: int = arg(16, "Prompts over which the exact values are taken.", quick=1)
    quick: bool = quick_flag()


def results(args: Args) -> list[Result]:
    """Prints one row per run, and returns the regrets."""
    torch.set_num_threads(1)
    language = DigitLanguage()
    reference = language_model(language, Path(args.out) / "language_model", args.lm_updates)
    prompts = language.sample_prompts(args.prompts, generator=torch.Generator().manual_seed(0))
    contexts = torch.cat([prompts, torch.full((args.prompts, 1), language.separator)], 1)
    reward_fn = language.preference if args.reward == "first" else count_even
    exact = Enumeration(next_token(reference), reward_fn, contexts, language.response_length)
    print(
        "| coeff | seed | the penalty is in | E[reward] | KL, nats per position | KL | regret "
        "| gain | seconds |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    found = []
    for coeff in args.coeffs:
        best = exact.optimum(coeff)
        print(
            f"| {coeff} | | (the optimum) | {best.reward:.4f} | {positions(best)} | {best.kl:.4f} "
            "| 0 | 100 % | |"
        )
        for seed in args.seeds:
            regrets: dict[str, float] = {}
            for name in args.variants:
                torch.manual_seed(seed)
                start = time.perf_counter()
                plan: Any = {"batches": args.batches, "responses": args.responses}
                loss_args = VARIANTS[name]
                policy = train(reference, language, reward_fn, coeff, loss_args=loss_args, **plan)
                seconds = time.perf_counter() - start
                own = exact.values(next_token(policy), coeff)
                regrets[name] = own.regret
                print(
                    f"| {coeff} | {seed} | {name} | {own.reward:.4f} | {positions(own)} "
                    f"| {own.kl:.4f} | {own.regret:.4f} | {own.fraction_of_gain:.2%} "
                    f"| {seconds:.0f} |",
                    flush=True,
                )
            found += compare(regrets, f"coeff {coeff}, seed {seed}")
    return found


def compare(regrets: dict[str, float], setting: str) -> list[Result]:
    """The regret of each variant, compared with that of the penalty in the reward."""
    in_reward = regrets.get("reward (k1)")
    found = []
    for name, regret in regrets.items():
        question = f"regret of PPO, penalty in {name}, {setting}"
        if name == "reward (k1)" or in_reward is None:
            found.append(Result(question, regret, unit="reward"))
        else:
            found.append(Result.cost(question, regret, in_reward, unit="reward"))
    return found


def positions(values) -> str:
    """The KL at each response position, nats."""
    return " ".join(f"{kl:.4f}" for kl in values.kl_per_position.tolist())


def main() -> None:
    """Prints one row per run."""
    results(parse_args(Args, __doc__))


if __name__ == "__main__":
    main()
