"""The whole RLHF job on a language of digits, where every true value is known.

1. A language model learns the language: each digit is one of the last four, plus one.
2. A reward model learns a preference from pairs: the first response digit should be the last
   prompt digit plus one.
3. PPO improves the language model on that reward with a KL penalty: (a) with a constant coefficient
   of 1, (b) without a penalty, (c) with an adaptive coefficient that steers to 0.5 nats per
   response, on the {0, 1} preference as reward.

Every policy is then compared with the best one possible, which is known exactly. Results go to
the folder `--out`. The three runs of PPO are trained in processes of one thread each. Ctrl-C saves
what was learned so far, and `--resume` continues with the same numbers as without a stop.

Glossary of the metrics of PPO (in log/<run>, one value per batch of responses):
    reward         mean task reward of a response, before the penalty
    kl_reference   mean of sum_t KL(pi || pi_ref) over a response, nats, the KL of each token being
                   that of the two distributions: how far the policy is from the reference
    kl_old_policy  mean of log pi_old - log pi per token at the last update on a batch, nats: how
                   far the policy moved
    coeff          the coefficient that the batch was penalized with, reward per nat
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from digit_job import (
    DigitJobOptions,
    add_separator,
    draw,
    last_outputs,
    next_token,
    split_prompts,
    train_language_model,
    train_policy,
    true_next_token,
)
from digit_rlhf_report import (
    describe,
    describe_coeff,
    draw_curves,
    draw_probabilities,
    draw_reward_model,
    print_checks,
    print_table,
)
from running import (
    Count,
    NonNegative,
    Positive,
    Run,
    Share,
    Workers,
    open_folder,
    part,
    read_options,
    stops_cleanly,
    write_json,
)
from torch.nn.functional import logsigmoid
from tqdm import tqdm

from torchrl_kl import (
    GPT,
    CausalLMRewardModel,
    ConstantKLController,
    Enumeration,
    KLController,
    PlannedKLController,
    exact_kl,
)
from torchrl_kl.envs import DigitLanguage

COEFFS = {"constant": 1.0, "no_penalty": 0.0}  # of the runs that learn from the reward model
RUNS = (*COEFFS, "adaptive")
# About what a text takes on the machine of the README, to say beforehand how long a stage takes.
SECONDS_PER_TEXT = {"language model": 1.1e-4, "reward model": 1.5e-4, "PPO": 5e-4}
QUICK = {
    "lm_iterations": 80,
    "rm_iterations": 30,
    "ppo_batches": 3,
    "adaptive_batches": 4,
    "heldout_prompts": 50,
    "rm_heldout_pairs": 1000,
    "exact_prompts": 1,
    "adaptive_prompts": 1,
}


@dataclass(frozen=True)
class Options(DigitJobOptions):
    """What can be set from the command line."""

    out: Path = Path("runs/digit_rlhf")
    """Folder of the results. A folder that is in use is refused, or continued with --resume."""
    processes: Count = 2
    """Processes that train the runs of PPO; 1: this one, run after run."""
    lm_iterations: Count = 960
    """Updates of the language model."""
    lm_batch: Count = 128
    """Texts per update of the language model."""
    lm_lr: Positive = 6e-3
    """Peak learning rate of the language model."""
    lm_beta2: Share = 0.99
    """AdamW's decay of squared gradients, language model."""
    lm_decay: NonNegative = 0.0
    """AdamW's weight decay, language model."""
    ppo_minibatch: Count = 128
    """Responses per update of policy and critic."""
    ppo_decay: Literal["linear", "cosine"] = "cosine"
    """How the learning rates decay to zero."""
    exact_prompts: Count = 8
    """Held-out prompts for exact values of the learned reward."""
    adaptive_prompts: Count = 64
    """Held-out prompts for exact values of the adaptive run."""
    rm_iterations: Count = 400
    """Updates of the reward model."""
    rm_batch: Count = 64
    """Pairs per update of the reward model."""
    rm_lr: Positive = 4e-3
    """Peak learning rate of the reward model."""
    rm_centring: NonNegative = 0.001
    """Weight of the squared sum of the two scores of a pair."""
    rm_heldout_pairs: Count = 10_000
    """Held-out pairs that test the reward model."""
    ppo_batches: Count = 27
    """Batches of responses that PPO collects with a constant coefficient and without a penalty."""
    adaptive_batches: Count = 75
    """Batches of responses that PPO collects with the adaptive coefficient."""
    target_kl: Positive = 0.5
    """KL that the adaptive coefficient steers to, nats per response."""


def preference_pairs(
    language: DigitLanguage, prompts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accepted and rejected texts: the same response but for its first digit."""
    original = language.sample(prompts)
    first, right = language.context_length, language.preferred_token(prompts)
    accepted, rejected = original.clone(), original.clone()
    accepted[:, first] = right
    # Where the original response was right already, a random wrong digit is rejected instead.
    wrong = (right + torch.randint(1, language.vocab_size, right.shape)) % language.vocab_size
    rejected[:, first] = torch.where(original[:, first] == right, wrong, original[:, first])
    return accepted, rejected


def reward_model_from(language_model: GPT, language: DigitLanguage) -> GPT:
    """A reward model that begins as the language model, which has learned about digits already."""
    # The vocabulary and the text have one more token: the end token, at which the score is read.
    gpt = GPT(language.n_tokens + 1, language.text_length + 1, n_out=1)
    weights = dict(gpt.named_parameters())
    with torch.no_grad():
        for name, value in language_model.named_parameters():
            if name != "head.weight":
                weights[name][tuple(slice(n) for n in value.shape)] = value
    return gpt


def train_reward_model(run: Run, gpt: GPT, language: DigitLanguage, prompts, options: Options):
    """Trains a reward model in place, on pairs of responses."""
    score = CausalLMRewardModel(gpt, end_token=language.n_tokens)
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=options.rm_lr, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, options.rm_lr, total_steps=options.rm_iterations
    )
    parts = {"gpt": gpt, "optimizer": optimizer, "schedule": schedule}
    for step in run.steps(options.rm_iterations, gpt.save_pretrained, **parts):
        pairs = preference_pairs(language, draw(prompts, options.rm_batch))
        accepted, rejected = score(torch.stack(pairs))
        # The second term centres the scores (Eisenstein et al. 2023): differences alone leave the
        # mean of every pair free, and the policy would be rewarded for what the later digits add.
        centring = options.rm_centring * (accepted + rejected).square().mean()
        loss = centring - logsigmoid(accepted - rejected).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)  # steadier: scores may jump without
        optimizer.step()
        schedule.step()
        run.log(
            step,
            "score of accepted {accepted:.2f}, rejected {rejected:.2f}",
            accepted=accepted.mean().item(),
            rejected=rejected.mean().item(),
            loss=loss.item(),
        )


class Job:
    """What the parts share, in whatever process: it follows from the options and the files."""

    def __init__(self, options: Options):
        self.options, self.out, self.language = options, options.out, DigitLanguage()
        torch.set_num_threads(options.threads)
        torch.manual_seed(options.seed)
        self.prompts, self.heldout = split_prompts(self.language, options)
        self.contexts = add_separator(self.heldout, self.language)

    def load(self, name: str) -> GPT:
        return GPT.from_pretrained(self.out / name)

    def load_score(self) -> CausalLMRewardModel:
        gpt = self.load("reward_model")
        return CausalLMRewardModel(gpt, end_token=self.language.n_tokens).requires_grad_(False)


def make_language_model(options: Options) -> dict:
    job = Job(options)
    language, run = job.language, Run("language_model", options)
    gpt = train_language_model(run, language, job.prompts, options)
    problem = (job.contexts[:256], language.response_length)
    excess = exact_kl(true_next_token(language), next_token(gpt), *problem).mean().item()
    return {"curves": run.curves, "figures": {"excess_nats_per_token": excess}}


@torch.no_grad()
def test_reward_model(job: Job) -> dict:
    pairs = preference_pairs(job.language, draw(job.heldout, job.options.rm_heldout_pairs))
    accepted, rejected = job.load_score()(torch.stack(pairs))
    accuracy = (accepted > rejected).double().mean().item()
    return {
        "heldout_accuracy": accuracy,
        "heldout_margin": (accepted - rejected).mean().item(),
    }


def make_reward_model(options: Options) -> dict:
    job = Job(options)
    run, gpt = (
        Run("reward_model", options),
        reward_model_from(job.load("language_model"), job.language),
    )
    train_reward_model(run, gpt, job.language, job.prompts, options)
    return {"curves": run.curves, "figures": test_reward_model(job)}


def train(name: str, rows: dict[str, int], options: Options) -> dict:
    """PPO from the models in the folder `out` to a policy there; its curves."""
    job = Job(options)
    language, n_batches = job.language, options.ppo_batches
    if name == "adaptive":  # its reward is the preference itself, not the reward model
        n_batches = options.adaptive_batches
        reward_fn: Callable = language.preference
        controller: KLController = PlannedKLController(options.target_kl)
    else:
        reward_fn, controller = job.load_score(), ConstantKLController(COEFFS[name])
    policy, run = job.load("language_model"), Run(name, options, rows[name])
    train_policy(run, policy, controller, reward_fn, n_batches, language, job.prompts, options)
    return {"curves": run.curves}


def announce(options: Options, what: str, texts: int, *parts: str, processes: int = 1) -> None:
    """Says how long parts of the job will take, unless they are done."""
    if not all((options.out / name / "result.json").exists() for name in parts):
        seconds = texts * SECONDS_PER_TEXT[what] / processes
        tqdm.write(f"{what}: about {seconds:.0f} s where the cores are idle")


class Judge:
    """Exact values of the policies and of the best possible ones, over held-out prompts."""

    def __init__(self, job: Job):
        options, language = job.options, job.language
        self.job, reference = job, next_token(job.load("language_model"))
        reward_model, end_token = job.load("reward_model"), language.n_tokens

        def score(texts: torch.Tensor) -> torch.Tensor:
            return last_outputs(reward_model, texts, end_token)[:, 0]

        contexts, n_tokens = job.contexts[: options.exact_prompts], language.response_length
        self.learned = Enumeration(reference, score, contexts, n_tokens)
        # The KL that a controller steers to is a mean over all prompts, which differ much in it.
        contexts = job.contexts[: options.adaptive_prompts]
        self.preference = Enumeration(reference, language.preference, contexts, n_tokens)
        self.coeffs = COEFFS | {"adaptive": self.preference.solve_coeff(options.target_kl)}

    def __call__(self, run: str, curves: dict) -> dict:
        """The figures of a run."""
        job = self.job
        exact = self.preference if run == "adaptive" else self.learned
        values = exact.values(next_token(job.load(run)), self.coeffs[run])
        right = job.language.preferred_token(job.heldout[: len(values.token_probs)])
        if run != "adaptive":
            return describe(values, right)
        coeffs = [coeff for _, coeff in curves["coeff"]]
        return describe(values, right) | describe_coeff(
            coeffs, self.coeffs[run], job.options.target_kl
        )


def do_all(options: Options) -> tuple[dict[str, dict], dict[str, dict]]:
    """The results of all parts of the job, and the exact figures of the runs of PPO."""
    results, figures = {}, {}
    with Workers(options.processes) as workers:
        n_texts = options.lm_iterations * options.lm_batch
        announce(options, "language model", n_texts, "language_model")
        results["language_model"] = part("language_model", make_language_model, options)
        excess = results["language_model"]["figures"]["excess_nats_per_token"]
        tqdm.write(f"language model: {excess:.4f} nats per token above the true language")
        rows = dict(zip(("adaptive", *COEFFS), range(1, 4), strict=True))  # of the progress bars
        runs = {"adaptive": workers.start(part, "adaptive", train, "adaptive", rows, options)}
        n_texts = 2 * options.rm_iterations * options.rm_batch
        announce(options, "reward model", n_texts, "reward_model")
        results["reward_model"] = part("reward_model", make_reward_model, options)
        accuracy = results["reward_model"]["figures"]["heldout_accuracy"]
        picture = options.out / "reward_model.png"
        draw_reward_model(results["reward_model"]["curves"], accuracy, picture)
        tqdm.write(f"reward model: {accuracy:.1%} of held-out pairs in order, see {picture}")
        runs |= {run: workers.start(part, run, train, run, rows, options) for run in COEFFS}
        n_texts = (2 * options.ppo_batches + options.adaptive_batches) * options.ppo_responses
        announce(options, "PPO", n_texts, *RUNS, processes=options.processes)
        judge = Judge(Job(options))
        for run in RUNS:
            results[run] = runs[run]()
            figures[run] = judge(run, results[run]["curves"])
    return results, figures


def draw_pictures(job: Job, results: dict[str, dict], figures: dict[str, dict]) -> None:
    out, language = job.out, job.language
    text = torch.tensor([5, 7, 1, 5, language.separator, 6, 2, 7, 3])
    models = {"true language": true_next_token(language)}
    models |= {name: next_token(job.load(name)) for name in ("language_model", *COEFFS)}
    curves = {run: [results[run]["curves"]] for run in RUNS}
    seeds = {run: [figures[run]] for run in RUNS}
    draw_curves(curves, seeds, job.options.target_kl, out / "curves.png")
    draw_probabilities(models, figures, text, language, out / "probabilities.png")


def main() -> None:
    start, options = time.perf_counter(), read_options(Options, __doc__, {"quick": QUICK})
    with stops_cleanly(options.out):
        open_folder(options)
        results, figures = do_all(options)
        job = Job(options)
        draw_pictures(job, results, figures)
    report = {n: results[n]["figures"] for n in ("language_model", "reward_model")} | figures
    for unit in ("seconds", "cpu_seconds"):
        report[unit] = {name: result[unit] for name, result in results.items()}
    report["seconds"]["all"] = time.perf_counter() - start
    write_json(options.out / "report.json", report)
    print_checks(job.language, next_token(job.load("language_model")), job.load_score())
    print_table(report)
    print(f"Models, metrics, pictures and the report are in {options.out}.")


if __name__ == "__main__":
    main()
