"""Does a controller of the KL coefficient do better than a coefficient chosen beforehand?

PPO improves a language model of the digit language on the preference {0, 1} (is the first response
digit the last prompt digit plus one?), for several seeds. The reward is penalized for
KL(policy || language model) with

- a constant coefficient: 0.1, 0.3, 1.0;
- a constant coefficient that `coeff_for_budget` computes from responses of the language model,
  before any training ("computed");
- the coefficient of a controller that steers to the target KL: adaptive, exponential, PID, each
  from two starts.

Every policy is then judged by enumeration over held-out prompts: its reward, its KL, how far it
lies below the exact frontier (the most reward that any policy can have at its KL), and what it has
kept of the language.

Ctrl-C saves what was learned so far, and `--resume` continues: a run whose result is in the folder
`--out` is not run again. With two cores, give each of them some of the seeds, then collect:

    python examples/adaptive_vs_static.py --resume --seed 0 --seeds 3 &
    python examples/adaptive_vs_static.py --resume --seed 3 --seeds 2
    wait; python examples/adaptive_vs_static.py --resume --seeds 5

Glossary of the results (seed*/<run>/result.json):
    curves/reward       mean preference of a batch of responses, before the penalty
    curves/kl_reference mean of sum_t KL(pi || pi_ref) over the responses of a batch, nats, the KL
                        of each token being that of the two distributions
    curves/coeff        the coefficient that the batch was penalized with, reward per nat
    curves/perplexity   exp of the exact cross-entropy per token of the policy on the true language;
                        [batch, value]
    final/...           exact values of the policy after the last batch
    final/frontier      the most reward that any policy can have at the KL of this one
    final/least_kl      the least KL at which any policy can have the reward of this one
    final/coeff         mean of the coefficient over the last quarter of the batches
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

import torch
from adaptive_vs_static_report import draw_study, print_study
from digit_job import (
    DigitJobOptions,
    add_separator,
    draw,
    next_token,
    split_prompts,
    train_language_model,
    train_policy,
    true_next_token,
)
from running import (
    Count,
    JobOptions,
    Positive,
    Run,
    Share,
    once,
    open_folder,
    read_options,
    stops_cleanly,
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
    PlannedKLController,
    PolicyValues,
    coeff_for_budget,
    exact_kl,
)
from torchrl_kl.envs import DigitLanguage, DigitLanguageEnv

Model = Callable[[torch.Tensor], torch.Tensor]  # contexts to the logits of the next token
CONSTANTS = (0.1, 0.3, 1.0)
STARTS = (0.05, 2)
PERPLEXITY_PROMPTS = 64  # of the exact prompts


QUICK = {
    "lm_iterations": 80,
    "ppo_batches": 4,
    "ppo_responses": 128,
    "eval_every": 2,
    "seeds": 1,
    "heldout_prompts": 50,
    "exact_prompts": 1,
    "budget_prompts": 20,
    "budget_responses": 16,
}


@dataclass(frozen=True)
class Options(DigitJobOptions):
    """What can be set from the command line."""

    # Several seeds share a folder, also where they are run one by one.
    FREE: ClassVar[frozenset[str]] = JobOptions.FREE | {"seed", "seeds"}

    out: Path = Path("runs/adaptive_vs_static")
    """Folder of the results. A folder that is in use is refused, or continued with --resume."""
    seeds: Count = 5
    """How many seeds, from --seed on."""
    ppo_batches: Count = 120
    """Batches of responses that each run collects."""
    ppo_decay: Literal["linear", "cosine"] = "cosine"
    """How the learning rates decay to zero."""
    exact_prompts: Count = 128
    """Held-out prompts over which the exact values are taken."""
    eval_every: Count = 20
    """Batches between two exact perplexities."""
    budget_prompts: Count = 200
    """Prompts from which coeff_for_budget computes its coefficient."""
    budget_responses: Count = 64
    """Responses of the language model to each of them."""
    target_kl: Positive = 0.5
    """KL that the study wants, nats per response."""
    horizon: Positive = 8192.0
    """Adaptive: responses in which the coefficient can grow by a factor of e."""
    clip: Positive = 1.0
    """Adaptive: the largest relative error of the KL that it reacts to."""
    gain: Positive = 1 / 16
    """Exponential: the largest change of log(coeff) per batch."""
    kp: Positive = 0.25
    """PID: proportional gain."""
    ki: Positive = 0.06
    """PID: integral gain per batch."""
    smoothing: Share = 0.5
    """PID: weight of the past in the filtered error."""


# What steers to the target, by name: a rule is one line. Each is run from all of the STARTS.
RULES: dict[str, Callable[[float, Options], KLController]] = {
    "adaptive": lambda c, o: AdaptiveKLController(c, o.target_kl, o.horizon, clip=o.clip),
    "exponential": lambda c, o: ExponentialKLController(c, o.target_kl, gain=o.gain),
    "PID": lambda c, o: PIDKLController(c, o.target_kl, kp=o.kp, ki=o.ki, smoothing=o.smoothing),
}


class Problem(NamedTuple):
    """What all runs of a seed share."""

    language: DigitLanguage
    language_model: GPT
    prompts: torch.Tensor
    contexts: torch.Tensor
    exact: Enumeration


@lru_cache(maxsize=1)  # the enumeration of a seed is large
def load_problem(options: Options) -> Problem:
    """The language model of a seed, trained unless it is there, and its exact values."""
    torch.manual_seed(options.seed)
    language, run = DigitLanguage(), Run("language_model", options)
    prompts, heldout = split_prompts(language, options)

    def train() -> dict:
        train_language_model(run, language, prompts, options)
        return {"curves": run.curves}

    once(run.folder / "result.json", train)
    language_model = GPT.from_pretrained(run.folder)
    contexts = add_separator(heldout[: options.exact_prompts], language)
    exact = Enumeration(
        next_token(language_model), language.preference, contexts, language.response_length
    )
    return Problem(language, language_model, prompts, contexts, exact)


def perplexity(model: Model, problem: Problem) -> float:
    """The exponential of the cross-entropy per token on the true language, over all responses."""
    language, truth = problem.language, true_next_token(problem.language)
    contexts = problem.contexts[:PERPLEXITY_PROMPTS]
    walk = {"prompts": contexts, "response_length": language.response_length}
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


def sample_rewards(problem: Problem, options: Options) -> torch.Tensor:
    """Preference of responses of the language model, (budget_prompts, budget_responses)."""
    torch.manual_seed(options.seed)
    shape = (options.budget_prompts, options.budget_responses)
    prompts = draw(problem.prompts, options.budget_prompts)[:, None].expand(*shape, -1)
    env = DigitLanguageEnv(problem.language, batch_size=shape)
    with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
        responses = env.rollout(
            problem.language.response_length,
            CausalLMActor(problem.language_model),
            auto_reset=False,
            tensordict=env.reset(prompt=prompts),
        )
    return responses["next", "reward"].sum((-2, -1))


def make_controllers(computed_coeff: float, options: Options) -> dict[str, KLController]:
    """The runs of a seed by name: closed loops, then coefficients that never move."""
    runs = {f"{name} {c}": make(c, options) for c in STARTS for name, make in RULES.items()}
    runs["planned"] = PlannedKLController(options.target_kl)
    runs["computed"] = ConstantKLController(computed_coeff)
    return runs | {f"constant {coeff:g}": ConstantKLController(coeff) for coeff in CONSTANTS}


def train_and_judge(name: str, controller: KLController, options: Options) -> dict:
    """Trains one policy and judges it."""
    problem = load_problem(options)
    torch.manual_seed(options.seed)  # a run does not depend on those before it
    run = Run(folder_name(name), options)
    policy = GPT.from_pretrained(options.out / "language_model")
    language, reward_fn = problem.language, problem.language.preference

    def evaluate(n_batches: int) -> None:
        if n_batches % options.eval_every == 0:
            run.log(n_batches, perplexity=perplexity(next_token(policy), problem))

    train_policy(
        run,
        policy,
        controller,
        reward_fn,
        options.ppo_batches,
        language,
        problem.prompts,
        options,
        evaluate,
    )
    values = problem.exact.values(next_token(policy.eval()), coeff=0.0)
    coeffs = [coeff for _, coeff in run.curves["coeff"]]
    last_quarter = coeffs[-max(len(coeffs) // 4, 1) :]
    final = place(values, problem.exact) | {
        "kl_per_position": values.kl_per_position.tolist(),
        "coeff": sum(last_quarter) / len(last_quarter),
        "perplexity": perplexity(next_token(policy), problem),
    }
    return {"run": name, "seed": options.seed, "final": final, "curves": run.curves}


def describe_problem(options: Options) -> dict:
    """The truth that the runs of a seed are judged by."""
    problem = load_problem(options)
    optima = [
        problem.exact.optimum(0.05 * 100 ** (step / 59)) for step in range(60)
    ]  # coefficients from 0.05 to 5
    return {
        "coeff": problem.exact.solve_coeff(options.target_kl),
        "computed_coeff": coeff_for_budget(sample_rewards(problem, options), options.target_kl),
        "reference_reward": problem.exact.reference_reward,
        "perplexity": perplexity(next_token(problem.language_model), problem),
        "true_perplexity": perplexity(true_next_token(problem.language), problem),
        "frontier": [[optimum.coeff, optimum.kl, optimum.reward] for optimum in optima],
    }


def run_seed(options: Options) -> None:
    """Runs what is missing of a seed: its language model, its exact values, its runs."""
    exact = once(options.out / "exact.json", partial(describe_problem, options))
    for run, controller in make_controllers(exact["computed_coeff"], options).items():
        once(result_file(options.out, run), partial(train_and_judge, run, controller, options))


def folder_name(run: str) -> str:
    return run.replace(" ", "_")


def result_file(folder: Path, run: str) -> Path:
    return folder / folder_name(run) / "result.json"


def main() -> None:
    options = read_options(Options, __doc__, {"quick": QUICK})
    torch.set_num_threads(options.threads)
    with stops_cleanly(options.out):
        out = open_folder(options)
        folders = [out / f"seed{options.seed + i}" for i in range(options.seeds)]
        for i, folder in enumerate(folders):
            run_seed(replace(options, seed=options.seed + i, out=folder))
    truths = [json.loads((folder / "exact.json").read_text()) for folder in folders]
    runs = {
        run: [json.loads(result_file(folder, run).read_text()) for folder in folders]
        for run in make_controllers(1.0, options)
    }
    draw_study(runs, truths, options.target_kl, out / "adaptive_vs_static.png")
    print_study(runs, truths, options.target_kl)
    print(f"\nResults, language models and the picture are in {out}.")


if __name__ == "__main__":
    main()
