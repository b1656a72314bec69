"""The whole RLHF job on a language of digits, where every true value is known.

1. A language model learns the language: each digit is one of the last four, plus one.
2. A reward model learns a preference from pairs: the first response digit should be the last prompt digit plus one.
3. PPO improves the language model on that reward under a KL leash: (a) with beta 1, (b) without (beta 0), (c) with an
   adaptive coefficient that steers to 0.5 nats per response, on the {0, 1} preference as reward.

Every policy is then compared with the best one possible, which is known exactly. Results go to the folder `--out`.

Glossary of the metrics of PPO (rows of metrics.csv, named run/metric, one per batch of responses):
    reward        mean task reward of a response, before any penalty
    kl_reference  mean of sum_t log pi - log pi_ref over a response, nats: how far the policy is from where it began
    kl_old_policy mean of log pi_old - log pi per token at the last update on a batch, nats: how far the policy moved
    coeff         the price of a nat, in reward, that the batch was charged with
"""

from __future__ import annotations

import argparse
import copy
import csv
import json
import shutil
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import torch
from digit_rlhf_report import (
    describe,
    draw_attention,
    draw_curves,
    draw_probabilities,
    draw_reward_model,
    print_checks,
    print_table,
)
from torch.nn.functional import cross_entropy, logsigmoid
from torchrl.collectors import Collector
from torchrl.modules import set_recurrent_mode
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE
from torchrl.record.loggers import CSVLogger, Logger, TensorboardLogger
from tqdm import tqdm

from torchrl_kl import (
    GPT,
    AdaptiveKLController,
    ConstantKLController,
    Enumeration,
    GPTActor,
    GPTCritic,
    GPTRewardModel,
    KLConstrainedTransform,
    exact_kl,
)
from torchrl_kl.envs import DigitLanguage, DigitLanguageEnv


def arg(default, help, choices=None):
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass
class Args:
    """What can be set from the command line."""

    out: str = arg("runs/digit_rlhf", "Folder for models, metrics, pictures and the report.")
    seed: int = arg(0, "Seed of the initial weights, the data and the sampled responses.")
    logger: str = arg("csv", "Where metrics go: CSV files alone, or TensorBoard too.", ["csv", "tensorboard"])
    quick: bool = arg(False, "Run everything at a small size, in seconds; the results are then poor.")
    threads: int = arg(2, "Threads that PyTorch may use.")
    heldout_prompts: int = arg(1000, "Prompts that no stage trains on.")
    exact_prompts: int = arg(16, "Held-out prompts over which the exact values are taken.")
    lm_iterations: int = arg(1200, "Updates of the language model.")
    lm_batch: int = arg(256, "Texts per update of the language model.")
    lm_lr: float = arg(2e-3, "Peak learning rate of the language model.")
    rm_iterations: int = arg(450, "Updates of the reward model.")
    rm_batch: int = arg(128, "Pairs per update of the reward model.")
    rm_lr: float = arg(4e-3, "Peak learning rate of the reward model.")
    rm_centring: float = arg(0.001, "Weight of the squared sum of the two scores of a pair.")
    rm_heldout_pairs: int = arg(10_000, "Held-out pairs that test the reward model.")
    ppo_batches: int = arg(70, "Batches of responses that PPO collects with beta 1 and with beta 0.")
    adaptive_batches: int = arg(120, "Batches of responses that PPO collects with the adaptive coefficient.")
    ppo_responses: int = arg(512, "Responses per batch.")
    ppo_minibatch: int = arg(256, "Responses per update of policy and critic.")
    ppo_epochs: int = arg(2, "How often each batch is used.")
    ppo_lr: float = arg(1e-3, "Initial learning rate of the policy; it decays to zero.")
    critic_lr: float = arg(3e-3, "Initial learning rate of the critic; it decays to zero.")
    target_kl: float = arg(0.5, "KL that the adaptive coefficient steers to, nats per response.")
    init_coeff: float = arg(0.05, "Where the adaptive coefficient starts, far from the answer.")
    horizon: float = arg(8192.0, "Responses in which the adaptive coefficient can grow by a factor of e.")
    clip: float = arg(1.0, "The largest relative error of the KL that the adaptive coefficient reacts to.")


def parse_args() -> Args:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for f in fields(Args):
        flag = "--" + f.name.replace("_", "-")
        if isinstance(f.default, bool):
            parser.add_argument(flag, action="store_true", help=f.metadata["help"])
        else:
            text = f"{f.metadata['help']} (default: {f.default})"
            choices = f.metadata["choices"]
            parser.add_argument(flag, type=type(f.default), default=f.default, choices=choices, help=text)
    args = Args(**vars(parser.parse_args()))
    if args.quick:
        args.lm_iterations, args.rm_iterations, args.ppo_batches, args.adaptive_batches = 80, 30, 3, 4
        args.heldout_prompts, args.exact_prompts, args.rm_heldout_pairs = 50, 1, 1000
    return args


class Metrics:
    """Writes to CSVLogger (one file per metric), to TensorBoard on request, and to one table at the end."""

    def __init__(self, args: Args):
        # CSVLogger appends to what a former run into the same folder has left.
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


def next_token(gpt: GPT):
    """A GPT as torchrl_kl's exact values want a model: contexts to the logits of the next token."""
    return lambda tokens: gpt.head(gpt.hidden_states(tokens)[:, -1])


def true_next_token(language: DigitLanguage):
    """The language itself as such a model."""
    return lambda tokens: language.next_token_probs(tokens).log()


def split_prompts(language: DigitLanguage, args: Args) -> tuple[torch.Tensor, torch.Tensor]:
    """Training prompts, and held-out ones that begin with the two that the pictures and checks use."""
    prompts = torch.cartesian_prod(*[torch.arange(language.vocab_size)] * language.prompt_length)
    shown = torch.tensor([[5, 7, 1, 5], [0, 2, 8, 6]])
    if not len(shown) <= args.heldout_prompts < len(prompts):
        raise SystemExit(
            f"--heldout-prompts must be from {len(shown)} to {len(prompts) - 1}, got {args.heldout_prompts}."
        )
    is_shown = (prompts[:, None] == shown).all(-1).any(-1)
    rest = prompts[~is_shown]
    rest = rest[torch.randperm(len(rest))]
    n_rest = args.heldout_prompts - len(shown)
    return rest[n_rest:], torch.cat([shown, rest[:n_rest]])


def draw(prompts: torch.Tensor, n: int) -> torch.Tensor:
    return prompts[torch.randint(len(prompts), (n,))]


def train_language_model(language: DigitLanguage, prompts: torch.Tensor, args: Args, metrics: Metrics) -> GPT:
    # The last token of a text is predicted, never read: the block is one shorter than the text.
    gpt = GPT(language.n_tokens, language.text_length - 1)
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=args.lm_lr, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lm_lr, total_steps=args.lm_iterations)
    bar = tqdm(range(args.lm_iterations), desc="language model")
    for step in bar:
        texts = language.sample(draw(prompts, args.lm_batch))
        logits = gpt(texts[:, :-1])[:, language.prompt_length :]
        loss = cross_entropy(logits.flatten(0, 1), texts[:, language.context_length :].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 10 == 0:
            metrics.log("language_model", step, loss=loss.item())
            bar.set_postfix_str(f"loss {loss.item():.3f} nats per token")
    return gpt.eval()


def preference_pairs(language: DigitLanguage, prompts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Accepted and rejected texts: the same response but for its first digit."""
    original = language.sample(prompts)
    first, right = language.context_length, language.preferred_token(prompts)
    accepted, rejected = original.clone(), original.clone()
    accepted[:, first] = right
    # Where the language's own response was right already, a random wrong digit is rejected instead.
    wrong = (right + torch.randint(1, language.vocab_size, right.shape)) % language.vocab_size
    rejected[:, first] = torch.where(original[:, first] == right, wrong, original[:, first])
    return accepted, rejected


def train_reward_model(language_model: GPT, language: DigitLanguage, prompts, args: Args, metrics: Metrics) -> GPT:
    # One more token in the vocabulary, the end token at which the score is read, and one more place for it.
    gpt = GPT(language.n_tokens + 1, language.text_length + 1, n_out=1)
    # It begins as the language model: what that has learned about digits need not be learned again.
    weights = dict(gpt.named_parameters())
    with torch.no_grad():
        for name, value in language_model.named_parameters():
            if name != "head.weight":
                weights[name][tuple(slice(n) for n in value.shape)] = value
    score = GPTRewardModel(gpt)
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=args.rm_lr, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.rm_lr, total_steps=args.rm_iterations)
    bar = tqdm(range(args.rm_iterations), desc="reward model")
    for step in bar:
        accepted, rejected = score(torch.stack(preference_pairs(language, draw(prompts, args.rm_batch))))
        # The second term centres the scores (Eisenstein et al. 2023): differences alone leave every pair's mean free,
        # and the policy would be rewarded for what the later digits happen to add to it.
        loss = -logsigmoid(accepted - rejected).mean() + args.rm_centring * (accepted + rejected).square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)  # steadier: scores may jump without
        optimizer.step()
        schedule.step()
        values = {"accepted": accepted.mean().item(), "rejected": rejected.mean().item(), "loss": loss.item()}
        metrics.log("reward_model", step, **values)
        bar.set_postfix_str("score of accepted {accepted:.2f}, rejected {rejected:.2f}".format(**values))
    return gpt.eval()


def train_policy(run, language_model, controller, reward_fn, n_batches, language, prompts, args, metrics) -> GPT:
    """PPO on the task reward minus the controller's coefficient times the KL to the language model."""
    policy = copy.deepcopy(language_model)
    # A critic and not a mean over responses: it knows after the first digit whether that was right, so that the later
    # digits are not blamed for it. One layer is enough, and it reads one token more: the last one, in the final state.
    critic = GPT(language.n_tokens, language.text_length, n_layer=1, n_out=1)
    actor, value = GPTActor(policy), GPTCritic(critic)
    stack = KLConstrainedTransform(actor, controller)
    env = DigitLanguageEnv(
        language, prompts=prompts, reward_fn=reward_fn, batch_size=(args.ppo_responses,), seed=args.seed
    )
    frames = args.ppo_responses * language.response_length
    collector = Collector(
        env,
        actor,
        frames_per_batch=frames,
        total_frames=frames * n_batches,
        postproc=stack,
        auto_register_policy_transforms=False,
    )
    # gamma = lambda = 1: an earlier token is charged for all of the KL that it brings about later.
    gae = GAE(gamma=1.0, lmbda=1.0, value_network=value, deactivate_vmap=True, shifted=False)
    loss_module = ClipPPOLoss(
        actor, value, clip_epsilon=0.2, entropy_bonus=False, critic_coeff=1.0, loss_critic_type="l2"
    )
    optimizer = torch.optim.Adam(
        [{"params": policy.parameters(), "lr": args.ppo_lr}, {"params": critic.parameters(), "lr": args.critic_lr}],
        betas=(0.9, 0.95),
        fused=True,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda batch: 1 - batch / n_batches)
    losses = {}
    bar = tqdm(collector, desc=f"PPO, {run}", total=n_batches)
    for step, batch in enumerate(bar):
        with torch.no_grad(), set_recurrent_mode(True):  # a trajectory in one pass of the critic
            gae(batch)
        for _ in range(args.ppo_epochs):
            for minibatch in batch[torch.randperm(len(batch))].split(args.ppo_minibatch):
                losses = loss_module(minibatch)
                optimizer.zero_grad()
                (losses["loss_objective"] + losses["loss_critic"]).backward()
                optimizer.step()
        schedule.step()
        values = {
            "reward": batch["next", "task_reward"].sum(1).mean().item(),
            "kl_reference": batch["next", "kl"].sum(1).mean().item(),
            "kl_old_policy": losses["kl_approx"].mean().item(),
            "coeff": batch["next", "kl_coeff"].mean().item(),
        }
        metrics.log(run, step, **values)
        bar.set_postfix_str("reward {reward:.2f}, KL {kl_reference:.2f} nats, coeff {coeff:.3f}".format(**values))
    collector.shutdown()
    return policy.eval()


def main() -> None:
    args = parse_args()
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
        language_model = train_language_model(language, prompts, args, metrics)
    with stage("exact_values"):
        truth = true_next_token(language)
        excess = exact_kl(truth, next_token(language_model), contexts[:256], language.response_length).mean().item()
        report["language_model"] = {"excess_nats_per_token": excess}

    with stage("reward_model"):
        reward_model = train_reward_model(language_model, language, prompts, args, metrics)
        score = GPTRewardModel(reward_model).requires_grad_(False)
        accepted, rejected = score(torch.stack(preference_pairs(language, draw(heldout, args.rm_heldout_pairs))))
        right = (accepted > rejected).double().mean().item()
        report["reward_model"] = {"heldout_accuracy": right, "heldout_margin": (accepted - rejected).mean().item()}

    with stage("exact_values"):
        problem = (contexts[: args.exact_prompts], language.response_length)
        learned = Enumeration(next_token(language_model), score, *problem)
        preference = Enumeration(next_token(language_model), language.preference, *problem)
        target_coeff = preference.solve_coeff(args.target_kl)

    adaptive = AdaptiveKLController(args.init_coeff, args.target_kl, args.horizon, clip=args.clip)
    runs = {  # controller, reward, batches; and the exact problem that the result is judged by
        "beta1": (ConstantKLController(1.0), score, args.ppo_batches, learned, 1.0),
        "beta0": (ConstantKLController(0.0), score, args.ppo_batches, learned, 0.0),
        "adaptive": (adaptive, language.preference, args.adaptive_batches, preference, target_coeff),
    }
    policies = {}
    for run, (controller, reward_fn, n_batches, exact, coeff) in runs.items():
        with stage(run):
            policy = train_policy(
                run, language_model, controller, reward_fn, n_batches, language, prompts, args, metrics
            )
            policies[run] = policy
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
        predictors = {"true language": truth} | {name: next_token(gpt) for name, gpt in models.items()}
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
