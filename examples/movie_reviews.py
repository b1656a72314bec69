"""A language model of film reviews is rewarded for praise, with and without KL control.

1. A small Llama learns to write film reviews (or `--model` names a pretrained model).
2. Two rewards are fitted to reviews with labels. The proxy knows which words are said in praise.
   The gold reward knows pairs of words, and also whether a text looks like one that a person
   wrote. It plays the part of the human judgement that the proxy is a model of.
3. PPO improves the language model on the proxy, never on the gold reward: (a) without a KL penalty,
   (b) with a constant coefficient, (c) with an adaptive coefficient that steers to a KL, (d) the
   same with the penalty in the loss instead of the reward.

All responses have the same length, so that no run can lower its KL by stopping early. Metrics:
    proxy, gold    mean rewards, in standard deviations above the mean of the language model
    kl             mean of sum_t KL(pi || pi_ref) of the next token over a response, nats
    coeff          the coefficient that the batch was penalized with, reward per nat
    perplexity     of the responses under the language model at the temperature of the policy
    distinct_2     different pairs of neighbouring tokens per pair, in all responses of the batch
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import movie_reviews_text as reviews
import torch
from figures import ADAPTIVE, CONSTANT, IN_LOSS, LIGHT_GREY, NO_PENALTY, draw_goal, plt
from movie_reviews_text import LinearReward as Reward
from peft import LoraConfig, get_peft_model
from running import JobOptions, Run, open_folder, read_options, workers, write_json
from tensordict import TensorDictBase
from torch import Tensor, nn
from torchrl.modules import set_recurrent_mode
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer
from transformers.utils import logging

from torchrl_kl import KLConstrainedTransform, KLPenaltyLoss, PlannedKLController
from torchrl_kl.language import CausalLMActor, CausalLMCritic, minibatches, sample_responses

logging.set_verbosity_error()
logging.disable_progress_bar()
RUNS = {  # with their titles and colours
    "no_kl": ("no KL penalty", NO_PENALTY),
    "constant": ("constant coefficient", CONSTANT),
    "adaptive": ("adaptive coefficient", ADAPTIVE),
    "in_loss": ("adaptive, in the loss", IN_LOSS),
}
COLUMNS = {
    "proxy": ("proxy reward", "{:+.2f}"),
    "gold": ("gold reward", "{:+.2f}"),
    "kl": ("KL, nats", "{:.2f}"),
    "perplexity": ("perplexity", "{:.0f}"),
    "distinct_2": ("distinct-2", "{:.2f}"),
    "kl_last_quarter": ("KL, last quarter of the batches", "{:.2f}"),
    "coeff_last_quarter": ("coefficient, the same", "{:.3f}"),
}
PANELS = {  # metrics with titles and units, in the order of the picture
    "proxy": ("Without KL control, the proxy reward rises ...", "proxy reward, std of its start"),
    "gold": ("... while the gold reward falls below its start", "gold reward, std of its start"),
    "kl": ("Controllers bring the KL to its target ...", "KL, nats per response"),
    "coeff": ("... by a coefficient that they find", "coefficient, reward per nat"),
    "perplexity": ("Without KL control, texts end up unlikely ...", "perplexity per token"),
    "distinct_2": ("... and phrases repeat", "distinct-2 of a batch"),
}
QUICK = {"vocab_size": 512, "layers": 1, "width": 32, "lm_updates": 30, "reward_passages": 3000}
QUICK |= {"reward_epochs": 1, "eval_responses": 64, "batches": 8}
PRETRAINED = {"lm_updates": 0, "lm_lr": 5e-5, "lr": 2e-5, "critic_lr": 1e-4}
LORA = {"lr": 1e-3, "critic_lr": 2e-3}


@dataclass(frozen=True)
class Args(JobOptions):
    """What can be set from the command line."""

    out: Path = Path("runs/movie_reviews")  # Folder of the results, which must be new or empty.
    data: str = ""  # CSV file with the columns text and label; default: that of movie-reviews.
    model: str = ""  # A causal language model of Hugging Face, name or folder; else one is trained.
    lora: bool = False  # Train LoRA adapters; the model without them is the reference.
    vocab_size: int = 2048  # Tokens of the tokenizer that is trained.
    layers: int = 4  # Layers of the language model that is trained.
    width: int = 128  # Its width; heads are 32 wide.
    lm_updates: int = 1200  # Updates of the language model.
    lm_batch: int = 32  # Passages per update of the language model.
    lm_lr: float = 5e-3  # Peak learning rate of the embeddings; the layers learn 4 times as fast.
    heldout: float = 0.1  # Share of the reviews that give prompts and are not trained on.
    reward_passages: int = 100_000  # Most passages that each of the two rewards is fitted to.
    reward_epochs: int = 3  # How often each of them is used.
    prompt_tokens: int = 6  # Tokens of a prompt, the beginning of a passage.
    response_tokens: int = 24  # Tokens of a response; all have the same length.
    temperature: float = 0.7  # Of the policy and of its reference.
    eval_responses: int = 512  # Responses by which each final policy is measured.
    batches: int = 120  # Batches of responses per run.
    responses: int = 64  # Responses per batch.
    minibatch: int = 32  # Responses per update of policy and critic.
    lr: float = 3e-4  # Learning rate of the policy.
    critic_lr: float = 1e-3  # Learning rate of the critic.
    coeff: float = 0.2  # The constant coefficient, reward per nat.
    target: float = 3.0  # KL that the adaptive coefficients steer to, nats per response.


def prepare_language_model(args: Args) -> Path:
    """The language model and its tokenizer, saved in a folder."""
    torch.manual_seed(args.seed)
    run = Run("language_model", args)
    for_proxy, for_gold, _ = reviews.split_reviews(args.data, args.heldout, args.seed)
    texts = [text for text, _ in for_proxy + for_gold]
    length = args.prompt_tokens + args.response_tokens
    if args.model:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        # Small updates of weights in half precision, in which it may be saved, are rounded away.
        model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    else:
        tokenizer = reviews.train_tokenizer(texts, args.vocab_size)
        model = reviews.make_language_model(len(tokenizer), args.layers, args.width, length)
    if args.lm_updates:
        needed = texts[:: max(len(texts) // (args.lm_updates * args.lm_batch), 1)]
        ids = reviews.encode(tokenizer, needed, length)
        reviews.train_language_model(run, model, ids, args.lm_updates, args.lm_batch, args.lm_lr)
    model.eval().save_pretrained(run.folder)
    tokenizer.save_pretrained(run.folder)
    return run.folder


def fit_rewards(args: Args) -> tuple[Reward, Reward]:
    """The proxy and the gold reward, not yet normalised."""
    torch.manual_seed(args.seed)
    for_proxy, for_gold, heldout = reviews.split_reviews(args.data, args.heldout, args.seed)
    proxy = reviews.fit_proxy(for_proxy[: args.reward_passages], args.reward_epochs)
    gold = reviews.fit_gold(for_gold[: args.reward_passages], args.reward_epochs, args.seed)
    rights = [f"{reviews.accuracy(reward, heldout):.0%}" for reward in (proxy, gold)]
    print("Labels of held-out passages that are right: proxy {}, gold {}".format(*rights))
    return proxy, gold


class Base:
    """What every run begins with: a language model, the prompts, and rewards in its units."""

    def __init__(self, folder: Path, proxy: Reward, gold: Reward, args: Args):
        torch.manual_seed(args.seed)
        self.folder, self.args = folder, args
        self.proxy, self.gold = proxy, gold
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        length = args.prompt_tokens + args.response_tokens
        _, _, heldout = reviews.split_reviews(args.data, args.heldout, args.seed)
        ids = reviews.encode(self.tokenizer, [text for text, _ in heldout], length)
        prompts = ids[:, : args.prompt_tokens].unique(dim=0)
        prompts = prompts[torch.randperm(len(prompts))]
        self.eval_prompts = prompts[: args.eval_responses]
        self.prompts = prompts[args.eval_responses :]
        actor = CausalLMActor(model, temperature=args.temperature)
        # The rewards of the language model get mean 0, standard deviation 1 (Ziegler et al. 2019).
        drawn = self.decode(self.sample(actor, self.draw(512))["tokens"][:, 0])
        for reward in (proxy, gold):
            reward.normalise(drawn)
        self.result = self.evaluate(actor, KLConstrainedTransform(actor, 0.0))

    def decode(self, ids: Tensor) -> list[str]:
        return self.tokenizer.batch_decode(ids, skip_special_tokens=True)

    def draw(self, n: int) -> Tensor:
        return self.prompts[torch.randint(len(self.prompts), (n,))]

    def sample(self, actor: CausalLMActor, prompts: Tensor, **options: Any) -> TensorDictBase:
        """Responses with the proxy as reward; the padding is never used."""
        length = self.args.response_tokens
        options = {"pad_token": 0, "reward_fn": lambda ids: self.proxy(self.decode(ids))} | options
        return sample_responses(actor, prompts, length, **options)

    def describe(self, batch: TensorDictBase) -> dict[str, float]:
        """The metrics of penalized responses (N, T)."""
        step = batch.get("next")
        return {
            "proxy": step["task_reward"].sum(1).mean().item(),
            "gold": self.gold(self.decode(batch["tokens"][:, 0])).mean().item(),
            "kl": step.get("kl_estimate", step.get("kl")).sum(1).mean().item(),
            "coeff": step["kl_coeff"].mean().item(),
            "perplexity": step["ref_log_prob"].mean().neg().exp().item(),
            "distinct_2": distinct_2(batch["action"]),
        }

    def evaluate(self, actor: CausalLMActor, measure: KLConstrainedTransform) -> dict[str, Any]:
        """The metrics of responses to held-out prompts, and the first of these texts."""
        torch.manual_seed(self.args.seed + 1)
        batch = measure(self.sample(actor, self.eval_prompts))
        return self.describe(batch) | {"texts": self.decode(batch["tokens"][:6, 0])}


def distinct_2(ids: Tensor) -> float:
    """Different pairs of neighbouring tokens of responses (N, T), per pair (Li et al. 2016)."""
    pairs = torch.stack([ids[:, :-1].flatten(), ids[:, 1:].flatten()], -1)
    return len(pairs.unique(dim=0)) / len(pairs)


def with_adapters(model: Any, task: str) -> Any:
    """The model with LoRA in all its layers but the output, which a critic learns anew."""
    others = ["score", "classifier"] if task == "TOKEN_CLS" else None
    layers = {"target_modules": "all-linear", "exclude_modules": others}
    return get_peft_model(model, LoraConfig(task_type=task, r=8, lora_alpha=16, **layers))


def train(name: str, row: int, base: Base, args: Args) -> dict[str, Any]:
    """PPO on the proxy; the KL to the language model is penalized. Its figures and curves."""
    torch.manual_seed(args.seed)
    run, in_loss = Run(name, args, row), name == "in_loss"
    policy: Any = AutoModelForCausalLM.from_pretrained(base.folder)
    # The critic begins as the language model, but for its head.
    critic: Any = AutoModelForTokenClassification.from_pretrained(base.folder, num_labels=1)
    if args.lora:
        policy = with_adapters(policy, "CAUSAL_LM")
        critic = with_adapters(critic, "TOKEN_CLS")
    actor = CausalLMActor(policy.eval(), temperature=args.temperature)  # without dropout
    value = CausalLMCritic(critic.eval())
    coeffs = {"no_kl": 0.0, "constant": args.coeff}
    controller: Any = coeffs.get(name, PlannedKLController(args.target))
    stack = KLConstrainedTransform(
        actor,
        0.0 if in_loss else controller,  # 0 only measures
        estimator="exact",
        reference=policy.disable_adapter if args.lora else None,
    )
    gae = GAE(gamma=1.0, lmbda=0.95, value_network=value, deactivate_vmap=True, shifted=False)
    kind = {"entropy_bonus": False, "loss_critic_type": "l2", "normalize_advantage": True}
    loss: Any = ClipPPOLoss(actor, value, **kind)
    if in_loss:
        kind = {"gradient": "sequence", "weights": "step", "reference": stack.reference}
        loss = KLPenaltyLoss(actor, controller, **kind, loss=loss)
    groups = []
    for model, lr in ((policy, args.lr), (critic, args.critic_lr)):
        groups.append({"params": [p for p in model.parameters() if p.requires_grad], "lr": lr})
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.95))
    for step in run.steps(args.batches):
        batch = stack(base.sample(actor, base.draw(args.responses), return_logits=True))
        metrics = base.describe(batch)
        if in_loss:
            metrics["coeff"] = loss.update_controller(batch)
        with torch.no_grad(), set_recurrent_mode(True):  # a response in one pass of the critic
            gae(batch)
        for part in minibatches(batch, args.minibatch * batch["tokens"].shape[-1]):
            losses = loss(part)
            optimizer.zero_grad()
            parts = [losses[key] for key in losses.keys() if key.startswith("loss_")]
            torch.stack(parts).sum().backward()
            for group in groups:
                nn.utils.clip_grad_norm_(group["params"], 1.0)
            optimizer.step()
        run.log(step, "proxy {proxy:+.2f}, gold {gold:+.2f}, KL {kl:.2f} nats", **metrics)
    policy.save_pretrained(run.folder / "policy")
    measure = KLConstrainedTransform(actor, 0.0, reference=stack.reference)
    result = base.evaluate(actor, measure) | {"curves": run.curves}
    for metric in ("kl", "coeff"):
        result[f"{metric}_last_quarter"] = fmean(run.curves[metric][-max(args.batches // 4, 1) :])
    return result


def make_table(results: dict[str, dict[str, Any]]) -> str:
    """The table, in Markdown."""
    rows = [["", *(title for title, _ in COLUMNS.values())], ["---"] * (1 + len(COLUMNS))]
    for name, result in results.items():
        cells = [f.format(result[c]) if c in result else "" for c, (_, f) in COLUMNS.items()]
        rows.append([RUNS[name][0] if name in RUNS else "language model", *cells])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def draw_curves(results: dict[str, dict[str, Any]], target: float, file: Path) -> None:
    """Rewards against KL (Gao et al. 2022); the other metrics over the batches; means of 9."""
    figure, axes = plt.subplots(3, 2, figsize=(10, 10.4))
    for run, (title, color) in RUNS.items():
        curves = {}
        for name, values in results[run]["curves"].items():
            curves[name] = [fmean(values[max(i - 4, 0) : i + 5]) for i in range(len(values))]
        for panel, metric in zip(axes.flat, PANELS, strict=True):
            against = [curves["kl"]] if metric in ("proxy", "gold") else []
            panel.plot(*against, curves[metric], color=color, label=title)
            if against:  # where the run ends
                panel.plot(curves["kl"][-1], curves[metric][-1], "o", color=color)
    for panel, (title, unit) in zip(axes.flat, PANELS.values(), strict=True):
        panel.set(title=title, xlabel="batch", ylabel=unit)
    for panel in axes[0]:
        panel.set(xlabel="KL, nats per response (dots: the end)", xscale="log")
        panel.xaxis.set_major_formatter("{x:g}")
        panel.axhline(0, color=LIGHT_GREY, linewidth=1, zorder=0)
    draw_goal(axes[1, 0], target, f"target\n{target:g}")
    axes[1, 0].set(ylim=(0, 5 * target))
    axes[2, 1].set(ylim=(0, 1))
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(file)


def main() -> None:
    args = read_options(Args, __doc__, quick=QUICK, model=PRETRAINED, lora=LORA)
    out = open_folder(args)
    torch.set_num_threads(args.threads)
    with workers(args) as pool:
        rewards = pool.submit(fit_rewards, args)
        base = Base(prepare_language_model(args), *rewards.result(), args)
        # The one that takes longest is the first to start.
        rows = {name: row for row, name in enumerate(reversed(RUNS))}
        jobs = {name: pool.submit(train, name, row, base, args) for name, row in rows.items()}
        results = {"language_model": base.result} | {name: jobs[name].result() for name in RUNS}
    write_json(out / "report.json", results)
    draw_curves(results, args.target, out / "movie_reviews.png")
    table = make_table(results)
    report = [table, "\n![Curves](movie_reviews.png)"]
    for name, result in results.items():
        report += [f"\n## {name}\n\n```", *result["texts"], "```"]
    (out / "report.md").write_text("\n".join(report))
    print(f"{table}\nText of each run: {out / 'report.md'}.")


if __name__ == "__main__":
    main()
