"""A language model of film reviews is rewarded for praise, with and without KL control.

1. A small Llama learns to write film reviews (or `--model` names a pretrained model).
2. Two rewards are fitted to reviews with labels. The proxy knows which words are said in praise.
   The gold reward knows pairs of words, and also whether a text looks like one that a person
   wrote. It plays the part of the human judgement that the proxy is a model of.
3. PPO improves the language model on the proxy, never on the gold reward: (a) without a KL penalty,
   (b) with a constant coefficient, (c) with an adaptive coefficient that steers to a KL, (d) the
   same with the penalty in the loss instead of the reward.

All responses have the same length, so that no run can lower its KL by stopping early. Results go to
the folder `--out`; report.md has samples of the text of each run.

Glossary of the metrics (rows of metrics.csv, named run/metric, one per batch of responses):
    proxy, gold    mean rewards, in standard deviations above the mean of the language model
    kl             mean of sum_t log pi - log pi_ref over a response, nats
    coeff          the coefficient that the batch was penalized with, reward per nat
    perplexity     of the responses under the language model: exp of minus the mean log-prob
    distinct_2     different pairs of neighbouring tokens per pair, over all responses of the batch
    kl_old_policy  mean of log pi_old - log pi per token at the last update on a batch, nats
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from movie_reviews_options import Args, check_settings, parse_args
from movie_reviews_report import RUNS, write_report
from movie_reviews_rewards import LinearReward, accuracy, fit_gold, fit_proxy
from movie_reviews_text import (
    encode,
    find_reviews,
    make_language_model,
    read_reviews,
    split_reviews,
    train_language_model,
    train_tokenizer,
)
from peft import LoraConfig, get_peft_model
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.checkpoint import Checkpoint, GlobalRNGState
from torchrl.modules import set_recurrent_mode
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE
from torchrl.record.loggers import get_logger
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    AutoTokenizer,
)
from transformers.utils import logging

from torchrl_kl import (
    AdaptiveKLController,
    CausalLMActor,
    CausalLMCritic,
    ConstantKLController,
    KLConstrainedTransform,
    KLController,
    KLPenaltyLoss,
    sample_responses,
)

SHOWN = 6  # prompts in the report


class Base(NamedTuple):
    """What every run begins with."""

    folder: Path  # of the language model
    tokenizer: Any
    proxy: LinearReward
    gold: LinearReward
    prompts: Tensor  # (N, P)
    eval_prompts: Tensor  # (M, P)

    @classmethod
    def load(cls, folder: Path) -> Base:
        proxy, gold = (LinearReward.load(folder / f"{name}.pt") for name in ("proxy", "gold"))
        tokenizer = AutoTokenizer.from_pretrained(folder / "language_model")
        prompts, eval_prompts = torch.load(folder / "prompts.pt")
        return cls(folder / "language_model", tokenizer, proxy, gold, prompts, eval_prompts)

    def decode(self, ids: Tensor) -> list[str]:
        return self.tokenizer.batch_decode(ids, skip_special_tokens=True)

    def sample(self, actor: CausalLMActor, prompts: Tensor, length: int) -> TensorDictBase:
        """Responses with the proxy as reward; the padding is never used."""
        return sample_responses(
            actor,
            prompts,
            length,
            pad_token=0,
            reward_fn=lambda ids: self.proxy(self.decode(ids)),
        )

    def describe(self, batch: TensorDictBase) -> dict[str, float]:
        """The metrics of penalized responses (N, T)."""
        texts, action = batch["tokens"][:, 0], batch["action"]
        return {
            "proxy": batch["next", "task_reward"].sum(1).mean().item(),
            "gold": self.gold(self.decode(texts)).mean().item(),
            "kl": batch["next", "kl"].sum(1).mean().item(),
            "coeff": batch["next", "kl_coeff"].mean().item(),
            "perplexity": batch["next", "ref_log_prob"].mean().neg().exp().item(),
            "distinct_2": distinct_2(action),
        }


def distinct_2(ids: Tensor) -> float:
    """Different pairs of neighbouring tokens of responses (N, T), per pair (Li et al. 2016)."""
    pairs = torch.stack([ids[:, :-1].flatten(), ids[:, 1:].flatten()], -1)
    return len(pairs.unique(dim=0)) / len(pairs)


def make_base(args: Args, folder: Path) -> dict:
    """The language model, the rewards and the prompts, saved in a folder; their figures."""
    torch.manual_seed(args.seed)
    folder.mkdir(parents=True, exist_ok=True)
    parts = split_reviews(read_reviews(find_reviews(args.data)), args.heldout, args.seed)
    texts, heldout = (
        [text for text, _ in passages] for passages in (parts.proxy + parts.gold, parts.heldout)
    )
    length = args.prompt_tokens + args.response_tokens
    if args.model:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        model = AutoModelForCausalLM.from_pretrained(args.model).eval()
    else:
        tokenizer = train_tokenizer(texts[:: max(len(texts) // 30_000, 1)], args.vocab_size)
        model = make_language_model(len(tokenizer), args.layers, args.width, length).eval()
    report: dict = {"parameters": sum(p.numel() for p in model.parameters())}
    heldout_ids = encode(tokenizer, heldout, length)
    if args.lm_updates:
        # A passage is read about once, at most.
        needed = texts[:: max(len(texts) // (args.lm_updates * args.lm_batch), 1)]
        report["language_model"] = train_language_model(
            model,
            encode(tokenizer, needed, length),
            heldout_ids[:1000],
            args.lm_updates,
            args.lm_batch,
            args.lm_lr,
        )
    model.save_pretrained(folder / "language_model")
    tokenizer.save_pretrained(folder / "language_model")

    n = args.reward_passages
    proxy = fit_proxy(parts.proxy[:n], args.reward_epochs)
    gold = fit_gold(parts.gold[:n], args.reward_epochs, args.seed)
    for name, reward in (("proxy", proxy), ("gold", gold)):
        report[f"{name}_heldout_accuracy"] = accuracy(reward, parts.heldout)

    prompts = heldout_ids[:, : args.prompt_tokens].unique(dim=0)
    prompts = prompts[torch.randperm(len(prompts))]
    if len(prompts) <= args.eval_responses:
        raise SystemExit(
            f"--eval-responses must be less than the {len(prompts)} prompts that the held-out "
            f"reviews give, got {args.eval_responses}: raise --heldout."
        )
    eval_prompts, prompts = prompts[: args.eval_responses], prompts[args.eval_responses :]
    base = Base(folder / "language_model", tokenizer, proxy, gold, prompts, eval_prompts)
    actor = CausalLMActor(model, temperature=args.temperature)
    # The rewards of the language model get mean 0, standard deviation 1 (Ziegler et al. 2019).
    drawn = base.decode(
        base.sample(actor, draw(prompts, 512), args.response_tokens)["tokens"][:, 0]
    )
    for name, reward in (("proxy", proxy), ("gold", gold)):
        reward.normalise(drawn)
        reward.save(folder / f"{name}.pt")
    torch.save((prompts, eval_prompts), folder / "prompts.pt")
    return report | evaluate(base, actor, KLConstrainedTransform(actor, 0.0), args)


def draw(prompts: Tensor, n: int) -> Tensor:
    return prompts[torch.randint(len(prompts), (n,))]


def evaluate(
    base: Base, actor: CausalLMActor, measure: KLConstrainedTransform, args: Args
) -> dict[str, Any]:
    """The metrics of responses to held-out prompts, and the first of these texts."""
    torch.manual_seed(args.seed + 1)
    batch = measure(base.sample(actor, base.eval_prompts, args.response_tokens))
    texts = batch["tokens"][:SHOWN, 0]
    prompts, responses = texts[:, : args.prompt_tokens], texts[:, args.prompt_tokens :]
    samples = list(zip(base.decode(prompts), base.decode(responses), strict=True))
    return {"final": base.describe(batch), "samples": samples}


class PPO:
    """Improves a language model on the proxy; the KL to what it was is penalized.

    Args:
        base: the language model, the rewards and the prompts.
        controller: of the coefficient.
        in_loss: whether the KL is penalized in the loss, instead of the reward.
        args: learning rates and sizes.
    """

    def __init__(self, base: Base, controller: KLController, in_loss: bool, args: Args):
        self.base, self.controller, self.args = base, controller, args
        self.policy: Any = AutoModelForCausalLM.from_pretrained(base.folder)
        # The critic begins as the language model, but for its head.
        self.critic: Any = AutoModelForTokenClassification.from_pretrained(
            base.folder, num_labels=1
        )
        if args.lora:
            self.policy = with_adapters(self.policy, "CAUSAL_LM", args.lora_rank)
            self.critic = with_adapters(self.critic, "TOKEN_CLS", args.lora_rank)
        for model in (self.policy, self.critic):
            model.eval()  # without dropout
        self.actor = CausalLMActor(self.policy, temperature=args.temperature)
        value = CausalLMCritic(self.critic)
        self.stack = KLConstrainedTransform(
            self.actor,
            ConstantKLController(0.0) if in_loss else controller,  # 0 only measures
            reference=self.policy.disable_adapter if args.lora else None,
        )
        self.gae = GAE(
            gamma=1.0, lmbda=0.95, value_network=value, deactivate_vmap=True, shifted=False
        )
        self.loss = ClipPPOLoss(
            self.actor, value, entropy_bonus=False, loss_critic_type="l2", normalize_advantage=True
        )
        self.penalty = None
        if in_loss:
            self.penalty = self.loss = KLPenaltyLoss(
                self.actor,
                controller,
                gradient="sequence",
                weights="step",
                reference=self.stack.reference,
                loss=self.loss,
            )
        groups = ((self.policy, args.lr), (self.critic, args.critic_lr))
        self.optimizer = torch.optim.Adam(
            [
                {"params": [p for p in model.parameters() if p.requires_grad], "lr": lr}
                for model, lr in groups
            ],
            betas=(0.9, 0.95),
        )

    def collect(self) -> TensorDictBase:
        """A batch of responses (N, T), scored and penalized."""
        prompts = draw(self.base.prompts, self.args.responses)
        return self.stack(self.base.sample(self.actor, prompts, self.args.response_tokens))

    def update(self, batch: TensorDictBase) -> dict[str, float]:
        """Updates policy and critic with a batch; its metrics."""
        metrics = self.base.describe(batch)
        if self.penalty is not None:
            metrics["coeff"] = self.controller.coeff.item()
            self.penalty.update_controller(batch)
        with torch.no_grad(), set_recurrent_mode(True):  # a response in one pass of the critic
            self.gae(batch)
        losses = {}
        for _ in range(self.args.epochs):
            for rows in torch.randperm(len(batch)).split(self.args.minibatch):
                losses = self.loss(batch[rows])
                total = losses["loss_objective"] + losses["loss_critic"]
                if self.penalty is not None:
                    total = total + losses["loss_kl"]
                self.optimizer.zero_grad()
                total.backward()
                for group in self.optimizer.param_groups:
                    torch.nn.utils.clip_grad_norm_(group["params"], 1.0)
                self.optimizer.step()
        return metrics | {"kl_old_policy": losses["kl_approx"].mean().item()}


def with_adapters(model: Any, task: str, rank: int) -> Any:
    """The model with LoRA in all its layers but the output, which a critic learns anew."""
    config = LoraConfig(
        task_type=task,
        r=rank,
        lora_alpha=2 * rank,
        target_modules="all-linear",
        exclude_modules=["score", "classifier"] if task == "TOKEN_CLS" else None,
    )
    return get_peft_model(model, config)


def make_controller(run: str, args: Args) -> KLController:
    if run in ("no_kl", "constant"):
        return ConstantKLController(args.coeff if run == "constant" else 0.0)
    return AdaptiveKLController(args.init_coeff, args.target, args.horizon, clip=1.0)


def train(run: str, args: Args) -> dict:
    """One run of PPO, from its last checkpoint if there is one; its curves and figures."""
    prepare_process(args)
    torch.manual_seed(args.seed)
    out = Path(args.out)
    base, folder = Base.load(out / "base"), out / run
    ppo = PPO(base, make_controller(run, args), run == "in_loss", args)
    curves: dict[str, list[float]] = {}
    checkpoint = Checkpoint(
        policy=ppo.policy,
        critic=ppo.critic,
        optimizer=ppo.optimizer,
        controller=ppo.controller,
        curves=curves,
        random=GlobalRNGState(),
    )
    if (folder / "checkpoint").exists():
        checkpoint.load(folder / "checkpoint")
    logger = None
    if args.logger != "csv":
        logger = get_logger(args.logger, logger_name=str(out / "log"), experiment_name=run)
    first = len(curves.get("kl", []))
    position = list(RUNS).index(run) % args.processes
    bar = tqdm(
        range(first, args.batches),
        run,
        initial=first,
        total=args.batches,
        position=position,
        disable=None,
    )
    for step in bar:
        metrics = ppo.update(ppo.collect())
        for name, value in metrics.items():
            curves.setdefault(name, []).append(value)
            if logger is not None:
                logger.log_scalar(f"{run}/{name}", value, step=step)
        bar.set_postfix_str(
            "proxy {proxy:+.2f}, gold {gold:+.2f}, KL {kl:.2f} nats".format(**metrics)
        )
        if (step + 1) % args.checkpoint_every == 0:
            checkpoint.save(folder / "checkpoint")
    ppo.policy.save_pretrained(folder / "policy")
    measure = KLConstrainedTransform(ppo.actor, 0.0, reference=ppo.stack.reference)
    return {"curves": curves} | evaluate(base, ppo.actor, measure, args)


def prepare_process(args: Args) -> None:
    torch.set_num_threads(args.threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def once(file: Path, make: Callable[[], dict]) -> dict:
    """The result in a file, which is made if it is not there; with the seconds that this took."""
    if not file.exists():
        start, cpu = time.perf_counter(), time.process_time()
        result = make()
        result["seconds"] = time.perf_counter() - start
        result["cpu_seconds"] = time.process_time() - cpu
        file.write_text(json.dumps(result, indent=2) + "\n")
    return json.loads(file.read_text())


def run_once(run: str, args: Args) -> dict:
    folder = Path(args.out) / run
    folder.mkdir(exist_ok=True)
    return once(folder / "result.json", lambda: train(run, args))


def main() -> None:
    args = parse_args(__doc__)
    prepare_process(args)
    out = Path(args.out)
    if args.resume:
        check_settings(args, out / "config.json")
    else:
        for folder in ("base", "log", *RUNS):
            shutil.rmtree(out / folder, ignore_errors=True)
    (out / "base").mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(asdict(args), indent=2) + "\n")
    base = once(out / "base" / "result.json", lambda: make_base(args, out / "base"))
    with ProcessPoolExecutor(args.processes, mp_context=get_context("spawn")) as pool:
        jobs = {run: pool.submit(run_once, run, args) for run in RUNS}
        results = {run: job.result() for run, job in jobs.items()}
    write_report(base, results, args, out)


if __name__ == "__main__":
    main()
