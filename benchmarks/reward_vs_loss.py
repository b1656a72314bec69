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

import argparse
import time
from pathlib import Path

import torch
from digit_ppo import count_even, language_model, next_token, train

from torchrl_kl import Enumeration
from torchrl_kl.envs import DigitLanguage

# Where the penalty is: None is the reward, else the arguments of KLPenaltyLoss.
VARIANTS: dict[str, dict | None] = {
    "reward (k1)": None,
    "loss, sequence": {"gradient": "sequence"},
    "loss, sequence, step weights": {"gradient": "sequence", "weights": "step"},
    "loss, step": {"gradient": "step"},
    "loss, k2": {"gradient": "k2"},
}


def main() -> None:
    """Prints one row per run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/reward_vs_loss"),
        help="Folder of the language model.",
    )
    parser.add_argument(
        "--reward", choices=["first", "even"], default="first", help="What is rewarded."
    )
    parser.add_argument(
        "--coeffs", type=float, nargs="+", default=[0.5], help="Coefficients, reward per nat."
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0, 1], help="One run of each variant per seed."
    )
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=VARIANTS,
        default=list(VARIANTS),
        help="Where the penalty is.",
    )
    parser.add_argument("--batches", type=int, default=70, help="Batches of responses per run.")
    parser.add_argument("--responses", type=int, default=512, help="Responses per batch.")
    parser.add_argument(
        "--lm-updates", type=int, default=1200, help="Updates of the language model."
    )
    parser.add_argument(
        "--prompts", type=int, default=16, help="Prompts over which the exact values are taken."
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="Run at a small size, in seconds; the results are poor.",
    )
    args = parser.parse_args()
    if args.quick:
        args.batches, args.responses, args.lm_updates, args.prompts, args.seeds = (
            2,
            32,
            20,
            1,
            args.seeds[:1],
        )
    torch.set_num_threads(1)
    language = DigitLanguage()
    reference = language_model(language, args.out / "language_model", args.lm_updates)
    prompts = language.sample_prompts(args.prompts, generator=torch.Generator().manual_seed(0))
    contexts = torch.cat([prompts, torch.full((args.prompts, 1), language.separator)], 1)
    reward_fn = language.preference if args.reward == "first" else count_even
    exact = Enumeration(next_token(reference), reward_fn, contexts, language.response_length)
    print(
        "| coeff | seed | the penalty is in | E[reward] | KL, nats per position | KL | regret "
        "| gain | seconds |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for coeff in args.coeffs:
        best = exact.optimum(coeff)
        print(
            f"| {coeff} | | (the optimum) | {best.reward:.4f} | {positions(best)} | {best.kl:.4f} "
            "| 0 | 100 % | |"
        )
        for seed in args.seeds:
            for name in args.variants:
                torch.manual_seed(seed)
                start = time.perf_counter()
                policy = train(
                    reference,
                    language,
                    reward_fn,
                    coeff,
                    batches=args.batches,
                    responses=args.responses,
                    loss_args=VARIANTS[name],
                )
                seconds = time.perf_counter() - start
                own = exact.values(next_token(policy), coeff)
                print(
                    f"| {coeff} | {seed} | {name} | {own.reward:.4f} | {positions(own)} "
                    f"| {own.kl:.4f} | {own.regret:.4f} | {own.fraction_of_gain:.2%} "
                    f"| {seconds:.0f} |",
                    flush=True,
                )


def positions(values) -> str:
    """The KL at each response position, nats."""
    return " ".join(f"{kl:.4f}" for kl in values.kl_per_position.tolist())


if __name__ == "__main__":
    main()
