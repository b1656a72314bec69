"""The whole RLHF job on a language of digits, where every true value is known.

1. A language model learns the language: each digit is one of the last four, plus one.
2. A reward model learns a preference from pairs: the first response digit should be the last
   prompt digit plus one.
3. PPO improves the language model on that reward with a KL penalty: (a) with beta 1, (b) with
   beta 0, without a penalty, (c) with an adaptive coefficient that steers to 0.5 nats per
   response, on the {0, 1} preference as reward.

Every policy is then compared with the best one possible, which is known exactly. Results go to
the folder `--out`. The three runs of PPO are trained in processes of one thread each.

Glossary of the metrics of PPO (rows of metrics.csv, named run/metric, one per batch of responses):
    reward         mean task reward of a response, before the penalty
    kl_reference   mean of sum_t log pi - log pi_ref over a response, nats: how far the policy is
                   from the reference
    kl_old_policy  mean of log pi_old - log pi per token at the last update on a batch, nats: how
                   far the policy moved
    coeff          the coefficient that the batch was penalized with, reward per nat
"""

from __future__ import annotations

import json
import signal
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import active_children, get_context
from pathlib import Path

import torch
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
from digit_rlhf_report import (
    Metrics,
    describe,
    describe_coeff,
    draw_attention,
    draw_curves,
    draw_probabilities,
    draw_reward_model,
    print_checks,
    print_table,
)
from torch.nn.functional import logsigmoid
from tqdm import tqdm

from torchrl_kl import (
    GPT,
    AdaptiveKLController,
    CausalLMRewardModel,
    ConstantKLController,
    Enumeration,
    KLController,
    exact_kl,
)
from torchrl_kl.envs import DigitLanguage

COEFFS = {"beta1": 1.0, "beta0": 0.0}  # of the runs with a constant coefficient
# About what a text takes on the machine of the README, to say beforehand how long a stage takes.
SECONDS_PER_TEXT = {"language_model": 1.1e-4, "reward_model": 1.5e-4, "ppo": 5e-4}


@dataclass
class Args(JobArgs):
    """What can be set from the command line."""

    out: str = arg("runs/digit_rlhf", "Folder for models, metrics, pictures and the report.")
    logger: str = arg(
        "csv", "Where metrics go: CSV files alone, or TensorBoard too.", ["csv", "tensorboard"]
    )
    processes: int = arg(2, "Processes that train the runs of PPO; 1: this one, run after run.")
    lm_iterations: int = arg(1100, "Updates of the language model.")
    lm_batch: int = arg(128, "Texts per update of the language model.")
    lm_lr: float = arg(6e-3, "Peak learning rate of the language model.")
    lm_beta2: float = arg(0.99, "AdamW's decay of squared gradients, language model.")
    lm_decay: float = arg(0.0, "AdamW's weight decay, language model.")
    ppo_minibatch: int = arg(128, "Responses per update of policy and critic.")
    ppo_decay: str = arg("cosine", "How the learning rates decay to zero.", list(DECAYS))
    exact_prompts: int = arg(16, "Held-out prompts for exact values of the learned reward.")
    adaptive_prompts: int = arg(64, "Held-out prompts for exact values of the adaptive run.")
    rm_iterations: int = arg(450, "Updates of the reward model.")
    rm_batch: int = arg(64, "Pairs per update of the reward model.")
    rm_lr: float = arg(4e-3, "Peak learning rate of the reward model.")
    rm_centring: float = arg(0.001, "Weight of the squared sum of the two scores of a pair.")
    rm_heldout_pairs: int = arg(10_000, "Held-out pairs that test the reward model.")
    ppo_batches: int = arg(
        40, "Batches of responses that PPO collects with beta 1 and with beta 0."
    )
    adaptive_batches: int = arg(
        90, "Batches of responses that PPO collects with the adaptive coefficient."
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
        args.lm_iterations, args.rm_iterations = 80, 30
        args.ppo_batches, args.adaptive_batches = 3, 4
        args.heldout_prompts, args.rm_heldout_pairs = 50, 1000
        args.exact_prompts, args.adaptive_prompts = 1, 1
    return args


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


def announce(what: str, seconds: float) -> None:
    tqdm.write(f"{what}: about {seconds:.0f} s where the cores are idle")


class Job:
    """What the stages share. They hand models to each other through the folder `args.out`."""

    def __init__(self, args: Args):
        self.args, self.out, self.language = args, Path(args.out), DigitLanguage()
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / "config.json").write_text(json.dumps(asdict(args), indent=2) + "\n")
        self.metrics, self.seconds = Metrics(args.out, args.logger), {}
        self.report: dict = {"seconds": self.seconds}
        torch.set_num_threads(args.threads)
        torch.manual_seed(args.seed)
        self.prompts, self.heldout = split_prompts(self.language, args)
        separators = torch.full((len(self.heldout), 1), self.language.separator)
        self.contexts = torch.cat([self.heldout, separators], 1)

    def load(self, name: str) -> GPT:
        return GPT.from_pretrained(self.out / name)

    def load_score(self) -> CausalLMRewardModel:
        gpt = self.load("reward_model")
        return CausalLMRewardModel(gpt, end_token=self.language.n_tokens).requires_grad_(False)

    @contextmanager
    def stage(self, name: str, texts: int = 0):
        """Measures the seconds of a part of the job, and says how long it may take."""
        if texts:
            announce(name.replace("_", " "), texts * SECONDS_PER_TEXT[name])
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def make_language_model(job: Job) -> None:
    args, language = job.args, job.language
    with job.stage("language_model", args.lm_iterations * args.lm_batch):
        log = partial(job.metrics.log, "language_model")
        gpt = train_language_model(language, job.prompts, args, log)
        gpt.save_pretrained(job.out / "language_model")
    with job.stage("exact_values"):
        problem = (job.contexts[:256], language.response_length)
        excess = exact_kl(true_next_token(language), next_token(gpt), *problem).mean().item()
    job.report["language_model"] = {"excess_nats_per_token": excess}
    tqdm.write(f"language model: {excess:.4f} nats per token above the true language")


def make_reward_model(job: Job) -> None:
    args, language = job.args, job.language
    torch.manual_seed(args.seed)
    with job.stage("reward_model", 2 * args.rm_iterations * args.rm_batch):
        gpt = train_reward_model(
            job.load("language_model"), language, job.prompts, args, job.metrics
        )
        gpt.save_pretrained(job.out / "reward_model")
        pairs = preference_pairs(language, draw(job.heldout, args.rm_heldout_pairs))
        accepted, rejected = job.load_score()(torch.stack(pairs))
        job.report["reward_model"] = {
            "heldout_accuracy": (accepted > rejected).double().mean().item(),
            "heldout_margin": (accepted - rejected).mean().item(),
        }
    with job.stage("pictures"):
        draw_reward_model(job.metrics.curve, job.out / "reward_model.png")
    tqdm.write(f"reward model: see {job.out / 'reward_model.png'}")


def train_run(run: str, args: Args, row: int | None = None) -> tuple[list[tuple[int, dict]], float]:
    """PPO, from the models in the folder `args.out` to a policy there; metrics and seconds.

    The numbers are the same in every process, as they follow from files, seed and threads.
    """
    start, out, language = time.perf_counter(), Path(args.out), DigitLanguage()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    prompts, _ = split_prompts(language, args)
    policy = GPT.from_pretrained(out / "language_model")
    if run == "adaptive":
        controller: KLController = AdaptiveKLController(
            args.init_coeff, args.target_kl, args.horizon, clip=args.clip
        )
        reward_fn, n_batches = language.preference, args.adaptive_batches
    else:
        controller, n_batches = ConstantKLController(COEFFS[run]), args.ppo_batches
        gpt = GPT.from_pretrained(out / "reward_model")
        reward_fn = CausalLMRewardModel(gpt, end_token=language.n_tokens).requires_grad_(False)
    rows: list[tuple[int, dict]] = []

    def log(step: int, **values: float) -> None:
        rows.append((step, values))

    train_policy(run, policy, controller, reward_fn, n_batches, language, prompts, args, log, row)
    policy.save_pretrained(out / f"policy_{run}")
    return rows, time.perf_counter() - start


def prepare_worker(lock) -> None:
    tqdm.set_lock(lock)  # progress bars of several processes share the screen
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a worker without a traceback


class Runs:
    """Runs of PPO in `--processes` workers; if that is 1, in this process when asked for."""

    def __init__(self, args: Args):
        self.args, self.futures, self.pool = args, {}, None
        if args.processes > 1:
            context = get_context("spawn")
            lock = context.RLock()
            tqdm.set_lock(lock)
            self.pool = ProcessPoolExecutor(
                args.processes, context, initializer=prepare_worker, initargs=(lock,)
            )
            for _ in range(args.processes):  # starts the workers, which import torch for seconds
                self.pool.submit(int)

    def __enter__(self) -> Runs:
        return self

    def __exit__(self, error, *_) -> None:
        if self.pool:
            if error:  # an error here or there, or Ctrl-C: the other runs are of no use
                for worker in active_children():
                    worker.terminate()
            self.pool.shutdown(cancel_futures=True)

    def start(self, *runs: str) -> None:
        """Hands runs to the workers."""
        if self.pool:
            # Progress bars go below that of this process, one row each.
            for row, run in enumerate(runs, 1 + len(self.futures)):
                self.futures[run] = self.pool.submit(train_run, run, self.args, row)

    def finish(self, run: str) -> tuple[list[tuple[int, dict]], float]:
        """Waits for a run; its metrics and seconds."""
        return self.futures[run].result() if self.pool else train_run(run, self.args)


def compare_policies(job: Job, runs: Runs) -> None:
    """Exact values of each policy, as soon as it is there, and of the best possible one."""
    args, language = job.args, job.language
    reference = next_token(job.load("language_model"))
    with job.stage("exact_values"):
        n_tokens = language.response_length
        contexts = job.contexts[: args.exact_prompts]
        learned = Enumeration(reference, job.load_score(), contexts, n_tokens)
        # The KL that a controller steers to is a mean over all prompts, which differ much in it.
        contexts = job.contexts[: args.adaptive_prompts]
        preference = Enumeration(reference, language.preference, contexts, n_tokens)
        coeffs = COEFFS | {"adaptive": preference.solve_coeff(args.target_kl)}
    for run, coeff in coeffs.items():
        rows, job.seconds[run] = runs.finish(run)
        for step, values in rows:
            job.metrics.log(run, step, **values)
        with job.stage("exact_values"):
            exact = preference if run == "adaptive" else learned
            values = exact.values(next_token(job.load(f"policy_{run}")), coeff)
            n_prompts = len(values.token_probs)
            preferred = language.preferred_token(job.heldout[:n_prompts])
            job.report[run] = describe(values, preferred)
    curve = [coeff for _, coeff in job.metrics.curve("adaptive", "coeff")]
    job.report["adaptive"] |= describe_coeff(curve, coeffs["adaptive"], args.target_kl)


def draw_pictures(job: Job) -> None:
    out, language = job.out, job.language
    target, coeff = job.args.target_kl, job.report["adaptive"]["coeff_exact"]
    models = {"base": job.load("language_model")}
    models |= {"beta 1": job.load("policy_beta1"), "beta 0": job.load("policy_beta0")}
    text = torch.tensor([5, 7, 1, 5, language.separator, 6, 2, 7, 3])
    predictors = {"true language": true_next_token(language)}
    predictors |= {name: next_token(gpt) for name, gpt in models.items()}
    with job.stage("pictures"):
        draw_curves(job.metrics.curve, target, coeff, out / "curves.png")
        draw_probabilities(predictors, text, language, out / "probabilities.png")
        draw_attention(models, text, language, out / "attention.png")


def main() -> None:
    start, args = time.perf_counter(), read_args()
    job = Job(args)
    with Runs(args) as runs:
        make_language_model(job)
        runs.start("adaptive")  # its reward is the preference itself, not the reward model
        make_reward_model(job)
        runs.start("beta1", "beta0")
        n_texts = args.ppo_responses * (2 * args.ppo_batches + args.adaptive_batches)
        announce("PPO, three runs", n_texts * SECONDS_PER_TEXT["ppo"] / args.processes)
        compare_policies(job, runs)
    draw_pictures(job)
    job.metrics.write_table(job.out / "metrics.csv")
    job.seconds["all"] = time.perf_counter() - start
    (job.out / "report.json").write_text(json.dumps(job.report, indent=2) + "\n")
    print_checks(job.language, next_token(job.load("language_model")), job.load_score())
    print_table(job.report)
    print(f"Models, metrics, pictures and the report are in {job.out}.")


if __name__ == "__main__":
    main()
