"""Does a controller of the KL coefficient do better than a coefficient chosen beforehand?

PPO improves a language model of the digit language on the preference {0, 1} (is the first response
digit the last prompt digit plus one?), for several seeds. The reward is penalized for
KL(policy || language model) with

- a constant coefficient: 0.1, 0.3, 1.0;
- a constant coefficient that `coeff_for_budget` computes from responses of the language model,
  before any training;
- the coefficient of a controller that steers to the target KL: adaptive, exponential, PID, each
  from two starts.

Every policy is then judged by enumeration over held-out prompts: its reward, its KL, how far it
lies below the exact frontier (the most reward that any policy can have at its KL), and what it has
kept of the language.

A run whose result is in the folder `--out` is not run again. With two cores, give each of them some
of the seeds, then collect:

    python examples/adaptive_vs_static.py --seed 0 --seeds 3 &
    python examples/adaptive_vs_static.py --seed 3 --seeds 2
    wait; python examples/adaptive_vs_static.py --seeds 5

Glossary of the results (seed*/run.json):
    curves/reward       mean preference of a batch of responses, before the penalty
    curves/kl           mean of sum_t log pi - log pi_ref over the responses of a batch, nats
    curves/coeff        the coefficient that the batch was penalized with, reward per nat
    curves/perplexity   exp of the exact cross-entropy per token of the policy on the true language;
                        [batch, value]
    final/...           exact values of the policy after the last batch
    final/frontier      the most reward that any policy can have at the KL of this one
    final/least_kl      the least KL at which any policy can have the reward of this one
    final/coeff         mean of the coefficient over the last quarter of the batches
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from adaptive_vs_static_report import draw_study, print_study
from digit_job import (
    DECAYS,
    JobArgs,
    arg,
    draw,
    next_token,
    parse_args,
    split_prompts,
    train_language_model,
    train_policy,
    true_next_token,
)
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_kl import (
    GPT,
    AdaptiveKLController,
    CausalLMActor,
    ConstantKLController,
    Enumeration,
    ExponentialKLController,
    KLController,
    PIDKLController,
    PolicyValues,
    coeff_for_budget,
    exact_kl,
)
from torchrl_kl.envs import DigitLanguage, DigitLanguageEnv

Model = Callable[[torch.Tensor], torch.Tensor]  # contexts to the logits of the next token
CONSTANTS = (0.1, 0.3, 1.0)
STARTS = (0.05, 2.0)


@dataclass
class Args(JobArgs):
    """What can be set from the command line."""

    out: str = arg(
        "runs/adaptive_vs_static",
        "Folder for language models, results, the picture and the report.",
    )
    seed: int = arg(0, "The first seed.")
    seeds: int = arg(5, "How many seeds.")
    threads: int = arg(1, "Threads that PyTorch may use.")
    ppo_batches: int = arg(120, "Batches of responses that each run collects.")
    ppo_decay: str = arg("cosine", "How the learning rates decay to zero.", list(DECAYS))
    exact_prompts: int = arg(64, "Held-out prompts over which the exact values are taken.")
    eval_every: int = arg(20, "Batches between two exact perplexities.")
    budget_prompts: int = arg(200, "Prompts from which coeff_for_budget computes its coefficient.")
    budget_responses: int = arg(64, "Responses of the language model to each of them.")
    target_kl: float = arg(0.5, "KL that the study wants, nats per response.")
    horizon: float = arg(
        8192.0, "Adaptive: responses in which the coefficient can grow by a factor of e."
    )
    clip: float = arg(1.0, "Adaptive: the largest relative error of the KL that it reacts to.")
    gain: float = arg(1 / 16, "Exponential: the largest change of log(coeff) per batch.")
    kp: float = arg(0.25, "PID: proportional gain.")
    ki: float = arg(0.06, "PID: integral gain per batch.")
    smoothing: float = arg(0.5, "PID: weight of the past in the filtered error.")


class Problem(NamedTuple):
    """What all runs of a seed share."""

    language: DigitLanguage
    language_model: GPT
    prompts: torch.Tensor
    contexts: torch.Tensor
    exact: Enumeration


def load_problem(folder: Path, args: Args) -> Problem:
    """The language model of a seed, trained unless it is there, and its exact values."""
    torch.manual_seed(args.seed)
    language = DigitLanguage()
    prompts, heldout = split_prompts(language, args)
    if not (folder / "language_model").exists():
        train_language_model(language, prompts, args, lambda *_, **__: None).save_pretrained(
            folder / "language_model"
        )
    language_model = GPT.from_pretrained(folder / "language_model").eval()
    contexts = add_separator(heldout[: args.exact_prompts], language)
    exact = Enumeration(
        next_token(language_model), language.preference, contexts, language.response_length
    )
    return Problem(language, language_model, prompts, contexts, exact)


def add_separator(prompts: torch.Tensor, language: DigitLanguage) -> torch.Tensor:
    return torch.cat([prompts, prompts.new_full((len(prompts), 1), language.separator)], 1)


def perplexity(model: Model, problem: Problem) -> float:
    """The exponential of the cross-entropy per token on the true language, over all responses."""
    language, truth = problem.language, true_next_token(problem.language)
    walk = {"prompts": problem.contexts, "response_length": language.response_length}
    excess = exact_kl(truth, model, **walk)
    # The cross-entropy is the excess plus the entropy of the truth, which is
    # log n_tokens - KL(truth || uniform).
    knowledge = exact_kl(truth, lambda tokens: torch.zeros(len(tokens), language.n_tokens), **walk)
    return language.n_tokens * (excess - knowledge).mean().exp().item()


def frontier_reward(exact: Enumeration, kl: float) -> float:
    """The most reward that any policy can have at a KL."""
    limit = exact.optimum(0.0)  # the least KL at which the reward is the highest possible
    return limit.reward if kl >= limit.kl else exact.optimum(exact.solve_coeff(kl)).reward


def least_kl(exact: Enumeration, reward: float) -> float:
    """The least KL at which any policy can have a reward."""
    low, high = 1e-3, 1e3  # coefficients
    while high / low > 1 + 1e-9:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if exact.optimum(middle).reward >= reward else (low, middle)
    return exact.optimum(low).kl


def place(policy: PolicyValues, exact: Enumeration) -> dict[str, float]:
    """Where a policy lies below the frontier; RuntimeError where it lies above, which none can."""
    best = frontier_reward(exact, policy.kl)
    if policy.reward > best + 1e-9:  # the coefficient is solved to 1e-12, the sums are in float64
        raise RuntimeError(
            f"A policy has reward {policy.reward:.12f} at {policy.kl:.6f} nats, above the "
            f"frontier's {best:.12f}: the exact values are wrong, or policy and reference were "
            "judged on different prompts."
        )
    share = (policy.reward - exact.reference_reward) / (best - exact.reference_reward)
    nats = {"kl": policy.kl, "least_kl": least_kl(exact, policy.reward)}
    return nats | {"reward": policy.reward, "frontier": best, "share_of_frontier_gain": share}


def sample_rewards(problem: Problem, args: Args) -> torch.Tensor:
    """Preference of responses of the language model, (budget_prompts, budget_responses)."""
    torch.manual_seed(args.seed)
    shape = (args.budget_prompts, args.budget_responses)
    prompts = draw(problem.prompts, args.budget_prompts)[:, None].expand(*shape, -1)
    env = DigitLanguageEnv(problem.language, batch_size=shape)
    with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
        responses = env.rollout(
            problem.language.response_length,
            CausalLMActor(problem.language_model),
            auto_reset=False,
            tensordict=env.reset(prompt=prompts),
        )
    return responses["next", "reward"].sum((-2, -1))


def make_controllers(budget_coeff: float, args: Args) -> dict[str, KLController]:
    """The runs of a seed by name: closed loops, then coefficients that never move."""
    runs: dict[str, KLController] = {}
    target = args.target_kl
    for start in STARTS:
        pid = PIDKLController(start, target, kp=args.kp, ki=args.ki, smoothing=args.smoothing)
        runs[f"adaptive {start:g}"] = AdaptiveKLController(
            start, target, args.horizon, clip=args.clip
        )
        runs[f"exponential {start:g}"] = ExponentialKLController(start, target, gain=args.gain)
        runs[f"PID {start:g}"] = pid
    runs["budget"] = ConstantKLController(budget_coeff)
    return runs | {f"constant {coeff:g}": ConstantKLController(coeff) for coeff in CONSTANTS}


def run_once(run: str, controller: KLController, problem: Problem, args: Args) -> dict:
    """Trains one policy and judges it."""
    began = time.perf_counter()
    torch.manual_seed(args.seed)  # a run does not depend on those before it
    policy = copy.deepcopy(problem.language_model)
    curves: dict[str, list] = {"reward": [], "kl": [], "coeff": [], "perplexity": []}

    def log(step: int, reward: float, kl_reference: float, coeff: float, **_: float) -> None:
        for name, value in (("reward", reward), ("kl", kl_reference), ("coeff", coeff)):
            curves[name].append(value)
        if (step + 1) % args.eval_every == 0:
            curves["perplexity"].append([step + 1, perplexity(next_token(policy), problem)])

    reward_fn, prompts = problem.language.preference, problem.prompts
    train_policy(
        run, policy, controller, reward_fn, args.ppo_batches, problem.language, prompts, args, log
    )
    values = problem.exact.values(next_token(policy.eval()), coeff=0.0)
    last_quarter = curves["coeff"][-max(args.ppo_batches // 4, 1) :]
    final = place(values, problem.exact) | {
        "kl_per_position": values.kl_per_position.tolist(),
        "coeff": sum(last_quarter) / len(last_quarter),
        "perplexity": perplexity(next_token(policy), problem),
    }
    return {
        "run": run,
        "seed": args.seed,
        "final": final,
        "curves": curves,
        "seconds": time.perf_counter() - began,
    }


def describe_problem(problem: Problem, args: Args) -> dict:
    """The truth that the runs of a seed are judged by."""
    optima = [
        problem.exact.optimum(0.05 * 100 ** (step / 59)) for step in range(60)
    ]  # coefficients from 0.05 to 5
    return {
        "coeff": problem.exact.solve_coeff(args.target_kl),
        "budget_coeff": coeff_for_budget(sample_rewards(problem, args), args.target_kl),
        "reference_reward": problem.exact.reference_reward,
        "perplexity": perplexity(next_token(problem.language_model), problem),
        "true_perplexity": perplexity(true_next_token(problem.language), problem),
        "frontier": [[optimum.coeff, optimum.kl, optimum.reward] for optimum in optima],
    }


def check_settings(out: Path, args: Args) -> None:
    """Results of other settings must not be taken for results of these."""
    settings = {
        name: value
        for name, value in asdict(args).items()
        if name not in ("out", "seed", "seeds", "threads")
    }
    file = out / "settings.json"
    former = json.loads(file.read_text()) if file.exists() else settings
    if former != settings:
        changed = sorted(
            name for name in settings | former if settings.get(name) != former.get(name)
        )
        raise SystemExit(
            f"{out} holds results of other settings ({', '.join(changed)}): choose another --out."
        )
    file.write_text(json.dumps(settings, indent=2) + "\n")


def run_seed(folder: Path, args: Args) -> None:
    """Runs what is missing of a seed: its language model, its exact values, its runs."""
    problem = None
    if not (folder / "exact.json").exists():
        problem = load_problem(folder, args)
        save(describe_problem(problem, args), folder / "exact.json")
    budget_coeff = json.loads((folder / "exact.json").read_text())["budget_coeff"]
    for run, controller in make_controllers(budget_coeff, args).items():
        file = run_file(folder, run)
        if not file.exists():
            problem = problem or load_problem(folder, args)
            save(run_once(run, controller, problem, args), file)


def run_file(folder: Path, run: str) -> Path:
    return folder / f"{run.replace(' ', '_')}.json"


def save(result: dict, file: Path) -> None:
    """Writes a whole file or none: an interrupted run leaves no result."""
    part = file.with_suffix(".part")
    part.write_text(json.dumps(result) + "\n")
    part.rename(file)


def main() -> None:
    args = parse_args(Args, __doc__)
    if args.quick:
        args.lm_iterations, args.ppo_batches, args.ppo_responses, args.eval_every, args.seeds = (
            80,
            4,
            128,
            2,
            1,
        )
        args.heldout_prompts, args.exact_prompts, args.budget_prompts, args.budget_responses = (
            50,
            1,
            20,
            16,
        )
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    check_settings(out, args)
    torch.set_num_threads(args.threads)
    folders = {seed: out / f"seed{seed}" for seed in range(args.seed, args.seed + args.seeds)}
    for seed, folder in folders.items():
        folder.mkdir(exist_ok=True)
        run_seed(folder, replace(args, seed=seed))
    truths = [json.loads((folder / "exact.json").read_text()) for folder in folders.values()]
    runs = {
        run: [json.loads(run_file(folder, run).read_text()) for folder in folders.values()]
        for run in make_controllers(1.0, args)
    }
    draw_study(runs, truths, args.target_kl, out / "adaptive_vs_static.png")
    print_study(runs, truths, args.target_kl)
    print(f"\nResults, language models and the picture are in {out}.")


if __name__ == "__main__":
    main()
