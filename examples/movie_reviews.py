"""A language model of film reviews is rewarded for praise, with and without KL control.

1. A small Llama learns to write film reviews (or `--model` names a pretrained model).
2. Two rewards are fitted to reviews with labels. The proxy knows which words are said in praise.
   The gold reward knows pairs of words, and also whether a text looks like one that a person
   wrote. It plays the part of the human judgement that the proxy is a model of.
3. PPO improves the language model on the proxy, never on the gold reward: (a) without a KL penalty,
   (b) with a constant coefficient, (c) with an adaptive coefficient that steers to a KL, (d) the
   same with the penalty in the loss instead of the reward.

All responses have the same length, so that no run can lower its KL by stopping early. Results go to
the folder `--out`; report.md has samples of the text of each run. Ctrl-C saves what was learned so
far, and `--resume` continues with the same numbers as without a stop.

Glossary of the metrics (in log/<run>, one value per batch of responses):
    proxy, gold    mean rewards, in standard deviations above the mean of the language model
    kl             mean of sum_t KL(pi || pi_ref) of the next token over a response, nats
    coeff          the coefficient that the batch was penalized with, reward per nat
    perplexity     of the responses under the language model at the temperature of the policy:
                   exp of minus the mean log-prob
    distinct_2     different pairs of neighbouring tokens per pair, over all responses of the batch
    kl_old_policy  mean of log pi_old - log pi per token at the last update on a batch, nats
"""

from __future__ import annotations

from typing import Any

import torch
from movie_reviews_ppo import PPO, Base, Options, draw, evaluate
from movie_reviews_report import RUNS, write_report
from movie_reviews_rewards import LinearReward, accuracy, fit_gold, fit_proxy
from movie_reviews_text import (
    Parts,
    encode,
    find_reviews,
    make_language_model,
    make_tokenizer,
    read_reviews,
    split_reviews,
    train_language_model,
)
from running import Run, Workers, open_folder, part, read_options, replacing, stops_cleanly
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from torchrl_kl import (
    CausalLMActor,
    ConstantKLController,
    KLConstrainedTransform,
    KLController,
    PlannedKLController,
)

REWARDS = ("proxy", "gold")
QUICK = {
    "vocab_size": 512,
    "layers": 1,
    "width": 32,
    "lm_updates": 30,
    "reward_passages": 3000,
    "reward_epochs": 1,
    "eval_responses": 64,
    "batches": 8,
    "processes": 1,
}
PRETRAINED = {"lm_updates": 0, "lm_lr": 5e-5, "lr": 2e-5, "critic_lr": 1e-4}
LORA = {"lr": 1e-3, "critic_lr": 2e-3}


def prepare_process(options: Options) -> None:
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def read_parts(options: Options) -> Parts:
    return split_reviews(read_reviews(find_reviews(options.data)), options.heldout, options.seed)


def prepare_language_model(options: Options) -> dict:
    """The language model and its tokenizer, in a folder; its losses."""
    prepare_process(options)
    run, parts = Run("language_model", options, row=0), read_parts(options)
    texts = [text for text, _ in parts.proxy + parts.gold]
    length = options.prompt_tokens + options.response_tokens
    if options.model:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        # Small updates of weights in half precision, in which it may be saved, are rounded away.
        model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    else:
        tokenizer = make_tokenizer(options.out / "tokenizer", texts, options.vocab_size)
        model = make_language_model(len(tokenizer), options.layers, options.width, length)
    heldout = encode(tokenizer, [text for text, _ in parts.heldout], length)
    report = {"parameters": sum(p.numel() for p in model.parameters())}
    if options.lm_updates:
        # A passage is read about once, at most.
        needed = texts[:: max(len(texts) // (options.lm_updates * options.lm_batch), 1)]
        ids = encode(tokenizer, needed, length)
        report |= train_language_model(
            *(run, model, ids, heldout[:1000]),
            *(options.lm_updates, options.lm_batch, options.lm_lr),
        )
    model.eval().save_pretrained(run.folder)
    tokenizer.save_pretrained(run.folder)
    return {"figures": report, "curves": run.curves}


def prepare_rewards(options: Options) -> dict:
    """Both rewards, in a folder, not yet normalised; their accuracy."""
    prepare_process(options)
    parts, folder, n = read_parts(options), options.out / "rewards", options.reward_passages
    folder.mkdir(exist_ok=True)
    rewards = {
        "proxy": fit_proxy(parts.proxy[:n], options.reward_epochs),
        "gold": fit_gold(parts.gold[:n], options.reward_epochs, options.seed),
    }
    for name, reward in rewards.items():
        reward.save(folder / f"{name}.pt")
    return {f"{name}_accuracy": accuracy(it, parts.heldout) for name, it in rewards.items()}


def prepare_base(options: Options) -> dict:
    """Prompts, and rewards in units of the language model; how that writes."""
    prepare_process(options)
    folder, model_folder = options.out / "base", options.out / "language_model"
    folder.mkdir(exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained(model_folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    length = options.prompt_tokens + options.response_tokens
    texts = [text for text, _ in read_parts(options).heldout]
    prompts = encode(tokenizer, texts, length)[:, : options.prompt_tokens].unique(dim=0)
    prompts = prompts[torch.randperm(len(prompts))]
    if len(prompts) <= options.eval_responses:
        raise SystemExit(
            f"--eval-responses must be less than the {len(prompts)} prompts that the held-out "
            f"reviews give, got {options.eval_responses}: raise --heldout."
        )
    eval_prompts, prompts = prompts[: options.eval_responses], prompts[options.eval_responses :]
    with replacing(folder / "prompts.pt") as part:
        torch.save((prompts, eval_prompts), part)
    proxy, gold = (LinearReward.load(options.out / f"rewards/{name}.pt") for name in REWARDS)
    base = Base(model_folder, tokenizer, proxy, gold, prompts, eval_prompts)
    actor = CausalLMActor(model, temperature=options.temperature)
    # The rewards of the language model get mean 0, standard deviation 1 (Ziegler et al. 2019).
    drawn = base.sample(actor, draw(prompts, 512), options.response_tokens)["tokens"][:, 0]
    for name, reward in zip(REWARDS, (proxy, gold), strict=True):
        reward.normalise(base.decode(drawn))
        reward.save(folder / f"{name}.pt")
    return evaluate(base, actor, KLConstrainedTransform(actor, 0.0), options)


def make_controller(run: str, options: Options) -> KLController:
    if run in ("no_kl", "constant"):
        return ConstantKLController(options.coeff if run == "constant" else 0.0)
    return PlannedKLController(options.target)


def train(name: str, row: int, options: Options) -> dict:
    """One run of PPO; its curves and figures."""
    prepare_process(options)
    base, run = Base.load(options.out), Run(name, options, row)
    ppo = PPO(base, make_controller(name, options), name == "in_loss", options)
    parts = {"policy": ppo.policy, "critic": ppo.critic, "optimizer": ppo.optimizer}
    # The stack has the reference; its controller is another one where the KL is in the loss.
    parts |= {"stack": ppo.stack, "controller": ppo.controller}
    for step in run.steps(options.batches, ppo.save, **parts):
        metrics = ppo.update(ppo.collect())
        run.log(step, "proxy {proxy:+.2f}, gold {gold:+.2f}, KL {kl:.2f} nats", **metrics)
    measure = KLConstrainedTransform(ppo.actor, 0.0, reference=ppo.stack.reference)
    return {"curves": run.curves} | evaluate(base, ppo.actor, measure, options)


def do_all(options: Options) -> tuple[dict[str, dict], dict[str, dict]]:
    """The results of the stages before PPO, and those of the runs of PPO."""
    stages = {"language_model": prepare_language_model, "rewards": prepare_rewards}
    with Workers(options.processes) as workers:
        jobs = {name: workers.start(part, name, make, options) for name, make in stages.items()}
        before = {name: job() for name, job in jobs.items()}
        before["base"] = part("base", prepare_base, options)
        # The one that takes longest is the first to start.
        rows = {run: row for row, run in enumerate(reversed(RUNS))}
        jobs = {
            run: workers.start(part, run, train, run, row, options) for run, row in rows.items()
        }
        return before, {run: jobs[run]() for run in RUNS}


def main() -> None:
    changes = {"quick": QUICK, "model": PRETRAINED, "lora": LORA}
    options = read_options(Options, __doc__, changes)
    out = open_folder(options)
    with stops_cleanly(out):
        before, runs = do_all(options)
        write_report(before, runs, options.target, out)


if __name__ == "__main__":
    main()
