"""Does a controller of the KL coefficient do better than a coefficient chosen beforehand?

PPO improves a language model of the digit language on the preference {0, 1} (is the first response
digit the last prompt digit plus one?), for several seeds, each in a process. The coefficient of
KL(policy || language model) is

- a constant: 0.1, 0.3, 1.0;
- a constant that `coeff_for_budget` computes from responses of the language model ("computed");
- that of a controller that steers to the target KL: planned, and adaptive, exponential, PID, each
  from two starts.

Every policy is then judged by enumeration over held-out prompts: its reward, its KL, how far it
lies below the exact frontier (the most reward that any policy can have at its KL), and what it has
kept of the language: perplexity is exp of the exact cross-entropy per token on the true language.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import digit_rlhf
import torch
from digit_exact import LANGUAGE, add_separator, next_token, true_next_token
from digit_rlhf import draw, split_prompts, train_language_model, train_policy
from figures import ADAPTIVE, AMBER, CONSTANT, GREY, SKY, draw_band, draw_goal, plt
from matplotlib.lines import Line2D
from running import JobOptions, Run, open_folder, read_options, workers, write_json
from torch import Tensor

from torchrl_kl import (
    AdaptiveKLController,
    ExponentialKLController,
    KLController,
    PIDKLController,
    PlannedKLController,
    coeff_for_budget,
)
from torchrl_kl.exact import Enumeration, PolicyValues, enumerate_kl
from torchrl_kl.language import GPT, CausalLMActor, sample_responses

Runs = dict[str, list[dict[str, Any]]]  # by name, one result for each seed
GROUPS = {"controllers from 0.05": AMBER, "controllers from 2": SKY}
GROUPS |= {"planned": ADAPTIVE, "computed": GREY, "a constant": CONSTANT}
CONSTANTS = (0.1, 0.3, 1.0)
STARTS = (0.05, 2)
# How the language model and the policies learn.
RECIPE = digit_rlhf.Args(lm_batch=256, lm_lr=2e-3, lm_beta2=0.999, lm_decay=0.01, ppo_minibatch=256)
QUICK = {"lm_iterations": 80, "ppo_batches": 4, "ppo_responses": 128, "eval_every": 2, "seeds": 1}
QUICK |= {"exact_prompts": 1, "budget_prompts": 20, "budget_responses": 16}


@dataclass(frozen=True)
class Args(JobOptions):
    """What can be set from the command line."""

    out: Path = Path("runs/adaptive_vs_static")  # Folder of the results, which must be new.
    seeds: int = 5  # How many seeds, from --seed on.
    lm_iterations: int = 1200  # Updates of the language model of each seed.
    ppo_batches: int = 120  # Batches of responses that each run collects.
    ppo_responses: int = 512  # Responses per batch.
    exact_prompts: int = 128  # Held-out prompts over which the exact values are taken.
    eval_every: int = 20  # Batches between two exact perplexities.
    budget_prompts: int = 200  # Prompts from which coeff_for_budget computes its coefficient.
    budget_responses: int = 64  # Responses of the language model to each of them.
    target_kl: float = 0.5  # KL that the study wants, nats per response.


# What steers to the target, by name: a rule is one line. Each is run from all of the STARTS.
RULES: dict[str, Callable[[float, float], KLController]] = {
    "adaptive": lambda coeff, kl: AdaptiveKLController(coeff, kl, horizon=8192, clip=1.0),
    "exponential": lambda coeff, kl: ExponentialKLController(coeff, kl, gain=1 / 16),
    "PID": lambda coeff, kl: PIDKLController(coeff, kl, kp=0.25, ki=0.06, smoothing=0.5),
}


def make_controllers(computed_coeff: float, target: float) -> dict[str, KLController | float]:
    """The runs of a seed by name: closed loops, then coefficients that never move."""
    runs = {f"{name} {c}": make(c, target) for c in STARTS for name, make in RULES.items()}
    runs |= {"planned": PlannedKLController(target), "computed": computed_coeff}
    return runs | {f"constant {coeff:g}": coeff for coeff in CONSTANTS}


def perplexity(model: Callable, contexts: Tensor) -> float:
    """The exponential of the cross-entropy per token on the true language, over all responses."""
    walk = {"prompts": contexts, "response_length": LANGUAGE.response_length}
    excess = enumerate_kl(true_next_token, model, **walk)
    # The entropy of the truth is log n_tokens - KL(truth || uniform).
    uniform = torch.zeros(LANGUAGE.n_tokens)
    knowledge = enumerate_kl(
        true_next_token, lambda tokens: uniform.expand(len(tokens), -1), **walk
    )
    return LANGUAGE.n_tokens * (excess - knowledge).mean().exp().item()


def frontier_reward(exact: Enumeration, kl: float) -> float:
    """The most reward that any policy can have at a KL."""
    limit = exact.optimum(0.0)  # the least KL at which the reward is the highest possible
    return limit.reward if kl >= limit.kl else exact.optimum(exact.solve_coeff(kl)).reward


def check_frontier(policy: PolicyValues, frontier: float) -> None:
    if policy.reward > frontier + 1e-9:  # the coefficient is solved to 1e-12, sums are in float64
        raise RuntimeError("A policy is above the frontier: the exact values are wrong.")


def sample_rewards(language_model: GPT, prompts: Tensor, args: Args) -> Tensor:
    """Preference of responses of the language model, (budget_prompts, budget_responses)."""
    contexts = add_separator(draw(prompts, args.budget_prompts))
    batch = sample_responses(
        CausalLMActor(language_model),
        contexts.repeat_interleave(args.budget_responses, 0),
        max_new_tokens=LANGUAGE.response_length,
        pad_token=LANGUAGE.separator,
        reward_fn=LANGUAGE.preference,
    )
    return batch["next", "reward"].sum((-2, -1)).view(args.budget_prompts, -1)


def run_seed(args: Args) -> dict:
    """The runs of a seed, and the truth that they are judged by."""
    torch.manual_seed(args.seed)
    sizes = {name: getattr(args, name) for name in ("out", "lm_iterations", "ppo_responses")}
    recipe = replace(RECIPE, **sizes, logger=args.logger)
    prompts, heldout = split_prompts(recipe.heldout_prompts)
    language_model = train_language_model(Run("language_model", recipe), prompts, recipe)
    contexts = add_separator(heldout[: args.exact_prompts])
    perplexed = contexts[:64]  # for perplexities
    reference, n_tokens = next_token(language_model), LANGUAGE.response_length
    exact = Enumeration(reference, LANGUAGE.preference, contexts, n_tokens)
    torch.manual_seed(args.seed)
    computed = coeff_for_budget(sample_rewards(language_model, prompts, args), args.target_kl)
    truth = {
        "coeff": exact.solve_coeff(args.target_kl),
        "perplexity": perplexity(reference, perplexed),
        "true_perplexity": perplexity(true_next_token, perplexed),
    }
    runs = {}
    for name, controller in make_controllers(computed, args.target_kl).items():
        torch.manual_seed(args.seed)  # a run does not depend on those before it
        run = Run(name.replace(" ", "_"), recipe)
        policy = GPT.from_pretrained(args.out / "language_model")

        def evaluate(n_batches: int, run: Run = run, policy: GPT = policy) -> None:
            if n_batches % args.eval_every == 0:
                run.log(n_batches, perplexity=perplexity(next_token(policy), perplexed))

        learn = partial(train_policy, run, policy, controller, LANGUAGE.preference)
        learn(args.ppo_batches, prompts, recipe, evaluate)
        values = exact.values(next_token(policy.eval()), coeff=0.0)
        check_frontier(values, best := frontier_reward(exact, values.kl))
        final = {"kl": values.kl, "reward": values.reward, "frontier": best}
        final["coeff"] = fmean(run.curves["coeff"][-max(args.ppo_batches // 4, 1) :])
        final["perplexity"] = perplexity(next_token(policy), perplexed)
        runs[name] = {"final": final, "curves": run.curves}
    write_json(args.out / "report.json", {"truth": truth, "runs": runs})
    return {"truth": truth, "runs": runs}


def group(run: str) -> str:
    """What a run is drawn with: the constants, one that is computed, or controllers by start."""
    rule, _, start = run.partition(" ")
    if rule == "constant":
        return "a constant"
    return f"controllers from {start}" if start else rule


def finals(results: list[dict], name: str) -> list[float]:
    return [result["final"][name] for result in results]


def gaps(results: list[dict]) -> list[float]:
    """How far the rewards lie below the frontier."""
    return [result["final"]["frontier"] - result["final"]["reward"] for result in results]


def spread(values: list[float], form: str) -> str:
    return f"{form} ({form} to {form})".format(fmean(values), min(values), max(values))


def print_study(runs: Runs, truths: list[dict], target: float) -> None:
    """The table, ready for a README: means over seeds, in brackets the least and the greatest."""
    print("\n| run | KL, nats | off the target | coefficient / exact | reward ", end="")
    print(f"| reward below the frontier | perplexity | highest on the way |\n|{'---|' * 8}")
    exact = [truth["coeff"] for truth in truths]
    for run, results in runs.items():
        off = [abs(kl / target - 1) for kl in finals(results, "kl")]
        coeffs = [c / e for c, e in zip(finals(results, "coeff"), exact, strict=True)]
        cells = [
            spread(finals(results, "kl"), "{:.3f}"),
            f"{fmean(off):.1%}, at most {max(off):.1%}",
            spread(coeffs, "{:.3f}"),
            f"{fmean(finals(results, 'reward')):.4f}",
            spread(gaps(results), "{:.4f}"),
            f"{fmean(finals(results, 'perplexity')):.3f}",
            f"{fmean(max(result['curves']['perplexity']) for result in results):.3f}",
        ]
        print(f"| {run} | {' | '.join(cells)} |")
    print(f"\nExact coefficient for {target:g} nats: {spread(exact, '{:.3f}')}.")
    of_model = fmean(truth["perplexity"] for truth in truths)
    of_truth = fmean(truth["true_perplexity"] for truth in truths)
    print(f"Perplexity: language model {of_model:.3f}, the true language to itself {of_truth:.3f}.")


def draw_study(runs: Runs, truths: list[dict], target: float, file: Path) -> None:
    """How the runs go, where they end, and what is possible there."""
    figure, ((kls, coeffs), (ends, missed)) = plt.subplots(2, 2, figsize=(11, 8.4))
    exact = fmean(truth["coeff"] for truth in truths)
    draw_curves(runs, "kl_reference", kls)
    draw_goal(kls, target, "target")
    kls.set(title=f"Controllers bring the KL to the target of {target:g} nats ...")
    kls.set(xlabel="batch of responses (means of 5)", ylabel="KL (nats per response)")
    draw_curves(runs, "coeff", coeffs)
    draw_goal(coeffs, exact, "exact")
    coeffs.set(title=f"... and find the exact coefficient, {exact:.2f}", yscale="log")
    coeffs.set(xlabel="batch of responses (means of 5)", ylabel="coefficient (reward per nat)")
    coeffs.set_yticks([0.05, *CONSTANTS, 2])
    coeffs.yaxis.set_major_formatter("{x:g}")
    coeffs.minorticks_off()
    ends.axvspan(0.9 * target, 1.1 * target, color="0.9", zorder=0)
    for row, (run, results) in enumerate(runs.items()):
        color, kl = GROUPS[group(run)], finals(results, "kl")
        ends.scatter(kl, [row] * len(kl), s=30, color=color, alpha=0.7)
        missed.scatter(gaps(results), [row] * len(kl), s=30, color=color, alpha=0.7)
    ends.set(title="Constants chosen beforehand miss it (grey: within 10 %)")
    ends.set(xlabel="final KL of each seed (nats per response)")
    gap = max(max(gaps(results)) for results in runs.values())
    missed.set(title=f"All end within {gap:.3f} of the best possible reward", xlim=(0, None))
    missed.set(xlabel="best possible reward at that KL, minus reward (0 to 1)")
    for panel in (ends, missed):
        panel.set_yticks(range(len(runs)), list(runs))
        panel.invert_yaxis()
    handles = [Line2D([], [], color=color, linewidth=4) for color in GROUPS.values()]
    figure.legend(handles, GROUPS, loc="outside lower center", ncols=len(GROUPS))
    figure.savefig(file)


def draw_curves(runs: Runs, name: str, axes: Any) -> None:
    """A metric, means of 5 batches: a line for each constant, a band for each group of others."""
    bands: dict[str, list[list[float]]] = {}
    for run, results in runs.items():
        key = run if run.startswith("constant") else group(run)
        for result in results:
            values = result["curves"][name]
            means = [fmean(values[max(i - 2, 0) : i + 3]) for i in range(len(values))]
            bands.setdefault(key, []).append(means)
    for key, curves in bands.items():
        draw_band(axes, curves, GROUPS.get(key, CONSTANT), linewidth=1.5)
        if key not in GROUPS:  # a constant, which is named at its end
            axes.text(len(curves[0]), curves[0][-1], key[9:], color=CONSTANT, va="center")


def main() -> None:
    args = read_options(Args, __doc__, quick=QUICK)
    out = open_folder(args)
    seeds = range(args.seed, args.seed + args.seeds)
    with workers(args) as pool:
        jobs = [replace(args, seed=seed, out=out / f"seed{seed}") for seed in seeds]
        results = list(pool.map(run_seed, jobs))
    truths = [result["truth"] for result in results]
    runs = {name: [result["runs"][name] for result in results] for name in results[0]["runs"]}
    draw_study(runs, truths, args.target_kl, out / "adaptive_vs_static.png")
    print_study(runs, truths, args.target_kl)


if __name__ == "__main__":
    main()
