"""The whole RLHF job on a language of digits, where every true value is known.

1. A language model learns the language: each digit is one of the last four, plus one.
2. A reward model learns a preference from pairs: the first response digit should be the last
   prompt digit plus one.
3. PPO improves the language model on that reward with a KL penalty: (a) with beta 1, (b) with
   beta 0, without a penalty, (c) with an adaptive coefficient that steers to 0.5 nats per
   response, on the {0, 1} preference as reward.

Every policy is then compared with the best one possible, which is known exactly. Results go to
the folder `--out`.

Glossary of the metrics of PPO (rows of metrics.csv, named run/metric, one per batch of responses):
    reward         mean task reward of a response, before the penalty
    kl_reference   mean of sum_t log pi - log pi_ref over a response, nats: how far the policy is
                   from the reference
    kl_old_policy  mean of log pi_old - log pi per token at the last update on a batch, nats: how
                   far the policy moved
    coeff          the coefficient that the batch was penalized with, reward per nat
"""

from __future__ import annotations

import copy
import csv
import json
import shutil
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from digit_job import (
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
from digit_rlhf_report import (
    describe,
    draw_attention,
    draw_curves,
    draw_probabilities,
    draw_reward_model,
    print_checks,
    print_table,
)
from torch.nn.functional import logsigmoid
from torchrl.record.loggers import CSVLogger, Logger, TensorboardLogger
from tqdm import tqdm

from torchrl_kl import (
    GPT,
    AdaptiveKLController,
    CausalLMRewardModel,
    ConstantKLController,
    Enumeration,
    exact_kl,
)
from torchrl_kl.envs import DigitLanguage


@dataclass
class Args(JobArgs):
    """What can be set from the command line."""

    out: str = arg("runs/digit_rlhf", "Folder for models, metrics, pictures and the report.")
    logger: str = arg(
        "csv", "Where metrics go: CSV files alone, or TensorBoard too.", ["csv", "tensorboard"]
    )
    exact_prompts: int = arg(16, "Held-out prompts over which the exact values are taken.")
    rm_iterations: int = arg(450, "Updates of the reward model.")
    rm_batch: int = arg(128, "Pairs per update of the reward model.")
    rm_lr: float = arg(4e-3, "Peak learning rate of the reward model.")
    rm_centring: float = arg(0.001, "Weight of the squared sum of the two scores of a pair.")
    rm_heldout_pairs: int = arg(10_000, "Held-out pairs that test the reward model.")
    ppo_batches: int = arg(
        70, "Batches of responses that PPO collects with beta 1 and with beta 0."
    )
    adaptive_batches: int = arg(
        120, "Batches of responses that PPO collects with the adaptive coefficient."
    )
    target_kl: float = arg(0.5, "KL that the adaptive coefficient steers to, nats per response.")
    init_coeff: float = arg(0.05, "Where the adaptive coefficient starts, far from the answer.")
    horizon: float = arg(
        8192.0, "Responses in which the adaptive coefficient can grow by a factor of e."
    )
    clip: float = arg(
        1.0, "The largest relative error of the KL that the adaptive coefficient reacts to."
    )


def read_args() -> Args:
    args = parse_args(Args, __doc__)
    if args.quick:
        args.lm_iterations, args.rm_iterations, args.ppo_batches, args.adaptive_batches = (
            80,
            30,
            3,
            4,
        )
        args.heldout_prompts, args.exact_prompts, args.rm_heldout_pairs = 50, 1, 1000
    return args


class Metrics:
    """Writes to CSVLogger (one file per metric), to TensorBoard on request, and to one table."""

    def __init__(self, args: Args):
        # CSVLogger appends to the files of a former run in the same folder.
        shutil.rmtree(Path(args.out) / "metrics", ignore_errors=True)
        self.csv = CSVLogger("metrics", log_dir=args.out)
        self.loggers: list[Logger] = [self.csv]
        if args.logger == "tensorboard":
            self.loggers.append(TensorboardLogger("tensorboard", log_dir=args.out))

    def log(self, run: str, step: int, **values: float) -> None:
        for name, value in values.items():
            for logger in self.loggers:
                logger.log_scalar(f"{run}/{name}", value, step=step)

    def curve(self, run: str, name: str) -> list[tuple[int, float]]:
        return self.csv.experiment.scalars[f"{run}/{name}"]

    def write_table(self, file: Path) -> None:
        with file.open("w", newline="") as stream:
            table = csv.writer(stream)
            table.writerow(["metric", "step", "value"])
            for name, curve in self.csv.experiment.scalars.items():
                table.writerows([name, step, value] for step, value in curve)


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


def train_reward_model(
    language_model: GPT, language: DigitLanguage, prompts, args: Args, metrics: Metrics
) -> GPT:
    # The vocabulary and the text have one more token: the end token, at which the score is read.
    gpt = GPT(language.n_tokens + 1, language.text_length + 1, n_out=1)
    # It begins as the language model, which has learned about digits already.
    weights = dict(gpt.named_parameters())
    with torch.no_grad():
        for name, value in language_model.named_parameters():
            if name != "head.weight":
                weights[name][tuple(slice(n) for n in value.shape)] = value
    score = CausalLMRewardModel(gpt, end_token=language.n_tokens)
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=args.rm_lr, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, args.rm_lr, total_steps=args.rm_iterations
    )
    bar = tqdm(range(args.rm_iterations), desc="reward model")
    for step in bar:
        accepted, rejected = score(
            torch.stack(preference_pairs(language, draw(prompts, args.rm_batch)))
        )
        # The second term centres the scores (Eisenstein et al. 2023): differences alone leave the
        # mean of every pair free, and the policy would be rewarded for what the later digits add.
        loss = (
            -logsigmoid(accepted - rejected).mean()
            + args.rm_centring * (accepted + rejected).square().mean()
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)  # steadier: scores may jump without
        optimizer.step()
        schedule.step()
        values = {
            "accepted": accepted.mean().item(),
            "rejected": rejected.mean().item(),
            "loss": loss.item(),
        }
        metrics.log("reward_model", step, **values)
        bar.set_postfix_str(
            "score of accepted {accepted:.2f}, rejected {rejected:.2f}".format(**values)
        )
    return gpt.eval()


def main() -> None:
    args = read_args()
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(asdict(args), indent=2) + "\n")
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    metrics, language, seconds = Metrics(args), DigitLanguage(), {}
    prompts, heldout = split_prompts(language, args)
    contexts = torch.cat([heldout, torch.full((len(heldout), 1), language.separator)], 1)
    report: dict = {"seconds": seconds}

    @contextmanager
    def stage(name: str):
        start = time.perf_counter()
        yield
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start

    with stage("language_model"):
        language_model = train_language_model(
            language, prompts, args, partial(metrics.log, "language_model")
        )
    with stage("exact_values"):
        truth = true_next_token(language)
        excess = (
            exact_kl(truth, next_token(language_model), contexts[:256], language.response_length)
            .mean()
            .item()
        )
        report["language_model"] = {"excess_nats_per_token": excess}

    with stage("reward_model"):
        reward_model = train_reward_model(language_model, language, prompts, args, metrics)
        score = CausalLMRewardModel(reward_model, end_token=language.n_tokens).requires_grad_(False)
        accepted, rejected = score(
            torch.stack(preference_pairs(language, draw(heldout, args.rm_heldout_pairs)))
        )
        right = (accepted > rejected).double().mean().item()
        report["reward_model"] = {
            "heldout_accuracy": right,
            "heldout_margin": (accepted - rejected).mean().item(),
        }

    with stage("exact_values"):
        problem = (contexts[: args.exact_prompts], language.response_length)
        learned = Enumeration(next_token(language_model), score, *problem)
        preference = Enumeration(next_token(language_model), language.preference, *problem)
        target_coeff = preference.solve_coeff(args.target_kl)

    adaptive = AdaptiveKLController(args.init_coeff, args.target_kl, args.horizon, clip=args.clip)
    runs = {  # controller, reward, batches; the exact problem and coefficient of the comparison
        "beta1": (ConstantKLController(1.0), score, args.ppo_batches, learned, 1.0),
        "beta0": (ConstantKLController(0.0), score, args.ppo_batches, learned, 0.0),
        "adaptive": (
            adaptive,
            language.preference,
            args.adaptive_batches,
            preference,
            target_coeff,
        ),
    }
    policies = {}
    for run, (controller, reward_fn, n_batches, exact, coeff) in runs.items():
        with stage(run):
            policy, log = copy.deepcopy(language_model), partial(metrics.log, run)
            train_policy(
                run, policy, controller, reward_fn, n_batches, language, prompts, args, log
            )
            policies[run] = policy.eval()
        with stage("exact_values"):
            preferred = language.preferred_token(heldout[: args.exact_prompts])
            report[run] = describe(exact.values(next_token(policy), coeff), preferred)
    coeffs = [coeff for _, coeff in metrics.curve("adaptive", "coeff")]
    last_quarter = coeffs[-max(len(coeffs) // 4, 1) :]
    close = [batch for batch, coeff in enumerate(coeffs) if abs(coeff / target_coeff - 1) <= 0.2]
    report["adaptive"]["target"] = args.target_kl
    report["adaptive"]["batches"] = len(coeffs)
    report["adaptive"]["coeff_first_within_20_percent"] = close[0] if close else None
    report["adaptive"]["coeff_exact"] = target_coeff
    report["adaptive"]["coeff_mean_last_quarter"] = sum(last_quarter) / len(last_quarter)

    with stage("pictures"):
        draw_reward_model(metrics.curve, out / "reward_model.png")
        draw_curves(metrics.curve, args.target_kl, target_coeff, out / "curves.png")
        models = {"base": language_model, "beta 1": policies["beta1"], "beta 0": policies["beta0"]}
        text = torch.tensor([5, 7, 1, 5, language.separator, 6, 2, 7, 3])
        predictors = {"true language": truth} | {
            name: next_token(gpt) for name, gpt in models.items()
        }
        draw_probabilities(predictors, text, language, out / "probabilities.png")
        draw_attention(models, text, language, out / "attention.png")

    language_model.save_pretrained(out / "language_model")
    reward_model.save_pretrained(out / "reward_model")
    for run, policy in policies.items():
        policy.save_pretrained(out / f"policy_{run}")
    metrics.write_table(out / "metrics.csv")
    (out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    print_checks(language, next_token(language_model), score)
    print_table(report)
    print(f"Models, metrics, pictures and the report are in {out}.")


if __name__ == "__main__":
    main()
