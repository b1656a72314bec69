"""What examples/digit_rlhf.py shows: its figures, its table and its pictures."""

from __future__ import annotations

import csv
import shutil
from collections.abc import Callable
from pathlib import Path

import matplotlib
import torch
from torchrl.record.loggers import CSVLogger, Logger, TensorboardLogger

from torchrl_kl import GPT, CausalLMRewardModel, ExactValues, PolicyValues
from torchrl_kl.envs import DigitLanguage

matplotlib.use("Agg")
from matplotlib import pyplot as plt

Curve = Callable[[str, str], list[tuple[int, float]]]
RUNS = {"beta1": "beta 1", "beta0": "beta 0", "adaptive": "adaptive"}
COLORS = {
    "base": "0.45",
    "true language": "0.8",
    "beta 1": "tab:blue",
    "beta 0": "tab:red",
    "adaptive": "tab:green",
}


class Metrics:
    """Writes to CSVLogger (one file per metric), to TensorBoard on request, and to one table."""

    def __init__(self, folder: str, logger: str):
        # CSVLogger appends to the files of a former run in the same folder.
        shutil.rmtree(Path(folder) / "metrics", ignore_errors=True)
        self.csv = CSVLogger("metrics", log_dir=folder)
        self.loggers: list[Logger] = [self.csv]
        if logger == "tensorboard":
            self.loggers.append(TensorboardLogger("tensorboard", log_dir=folder))

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


def describe(values: ExactValues, right: torch.Tensor) -> dict:
    """The figures of one policy, with those of the best possible one for the same coefficient."""

    def first_digit_right(policy: PolicyValues) -> float:
        return policy.token_probs[torch.arange(len(right)), 0, right].mean().item()

    return {
        "coeff": values.coeff,
        "reward": values.reward,
        "kl": values.kl,
        "kl_per_position": values.kl_per_position.tolist(),
        "objective": values.objective,
        "optimum": {
            "objective": values.optimum.objective,
            "reward": values.optimum.reward,
            "kl": values.optimum.kl,
            "kl_per_position": values.optimum.kl_per_position.tolist(),
            "first_digit_right": first_digit_right(values.optimum),
        },
        "regret": values.regret,
        "fraction_of_gain": values.fraction_of_gain,
        "first_digit_right": first_digit_right(values),
    }


def describe_coeff(coeffs: list[float], exact: float, target: float) -> dict:
    """The coefficients of the adaptive run, one per batch, and the exact one for its target."""
    last_quarter = coeffs[-max(len(coeffs) // 4, 1) :]
    close = [batch for batch, coeff in enumerate(coeffs) if abs(coeff / exact - 1) <= 0.2]
    return {
        "target": target,
        "batches": len(coeffs),
        "coeff_first_within_20_percent": close[0] if close else None,
        "coeff_exact": exact,
        "coeff_mean_last_quarter": sum(last_quarter) / len(last_quarter),
    }


def print_checks(
    language: DigitLanguage, language_model: Callable, score: CausalLMRewardModel
) -> None:
    """Two checks by eye: the likely first digits, and the scores of each possible first digit."""
    prompt = torch.tensor([0, 2, 8, 6])
    separator = torch.tensor([language.separator])
    probs = language_model(torch.cat([prompt, separator])[None])[0].softmax(-1)
    likely = [
        f"{digit} ({probs[digit]:.2f})" for digit in range(language.n_tokens) if probs[digit] > 0.05
    ]
    print(
        f"\nPrompt 0 2 8 6: the language model's likely first digits are {', '.join(likely)}; "
        "the true ones 1 3 7 9."
    )
    texts = torch.cat([prompt, separator, torch.tensor([0, 3, 9, 7])]).repeat(
        language.vocab_size, 1
    )
    texts[:, language.context_length] = torch.arange(language.vocab_size)
    scores = "  ".join(
        f"{digit}: {value:+.1f}" for digit, value in enumerate(score(texts).tolist())
    )
    print(
        "Its response ? 3 9 7, scored by the reward model for each first digit (7 is right): "
        f"{scores}"
    )


def print_table(report: dict) -> None:
    print(
        "\nExact values over held-out prompts. KL: how far the policy is from the language model, "
        "nats per response."
    )
    print(
        "Best possible: of all policies, for the same coefficient. Gain: share of the best "
        "possible gain.\n"
    )
    print(
        f"{'policy':<22}{'coeff':>8}{'reward':>9}{'KL':>8}  "
        f"{'KL at digit 1 / 2 / 3 / 4':<27}{'1st right':>11}{'gain':>9}"
    )
    names = {"beta1": "PPO, beta 1", "beta0": "PPO, beta 0", "adaptive": "PPO, adaptive"}
    for run, name in names.items():
        row = report[run]
        for label, v, gain in (
            (name, row, f"{row['fraction_of_gain']:.2%}"),
            ("  best possible", row["optimum"], "100%"),
        ):
            positions = " / ".join(f"{max(kl, 0.0):.3f}" for kl in v["kl_per_position"])
            numbers = f"{row['coeff']:>8.3f}{v['reward']:>9.3f}{v['kl']:>8.3f}  {positions:<27}"
            print(f"{label:<22}{numbers}{v['first_digit_right']:>11.4f}{gain:>9}")
    adaptive, lm, rm = report["adaptive"], report["language_model"], report["reward_model"]
    print(
        f"\nLanguage model: {lm['excess_nats_per_token']:.4f} nats per token above the true "
        "language."
    )
    print(
        f"Reward model: {rm['heldout_accuracy']:.2%} of held-out pairs in order, "
        f"margin {rm['heldout_margin']:.1f}."
    )
    print(
        f"Adaptive: coefficient {adaptive['coeff_mean_last_quarter']:.3f} (mean of the last "
        f"quarter), exact {adaptive['coeff_exact']:.3f}; KL {adaptive['kl']:.3f}, target "
        f"{adaptive['target']:.3f} nats."
    )
    seconds = ", ".join(f"{stage} {time:.0f}" for stage, time in report["seconds"].items())
    print(f"Seconds: {seconds}.")


def draw_reward_model(curve: Curve, file: Path) -> None:
    """Scores of accepted and rejected responses while the reward model learns."""
    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    for name, color in (("accepted", "tab:green"), ("rejected", "tab:red")):
        axes.plot(*zip(*curve("reward_model", name), strict=True), color=color, label=name)
    axes.axhline(0, color="0.8", linewidth=0.8, zorder=0)
    axes.set(
        title="The reward model learns the preference",
        xlabel="update",
        ylabel="mean score of a batch (log-odds)",
    )
    axes.legend(frameon=False)
    _save(figure, file)


def draw_curves(curve: Curve, target: float, coeff: float, file: Path) -> None:
    """Reward, KL to the reference and coefficient of all runs."""
    figure, axes = plt.subplots(1, 4, figsize=(14, 3.4), layout="constrained")
    for run, name in RUNS.items():
        # The adaptive run has another reward, in other units: the first digit right or not.
        panel = axes[1] if run == "adaptive" else axes[0]
        panel.plot(*zip(*curve(run, "reward"), strict=True), color=COLORS[name], label=name)
        axes[2].plot(*zip(*curve(run, "kl_reference"), strict=True), color=COLORS[name], label=name)
        axes[3].plot(*zip(*curve(run, "coeff"), strict=True), color=COLORS[name], label=name)
    axes[2].axhline(target, color=COLORS["adaptive"], linestyle=":", label=f"target {target:g}")
    axes[3].axhline(
        coeff, color=COLORS["adaptive"], linestyle=":", label=f"exact for the target, {coeff:.3f}"
    )
    axes[0].set(title="Learned reward", ylabel="score of the reward model")
    axes[1].set(title="Preference reward", ylabel="first digit right (0 to 1)")
    axes[2].set(title="KL to the reference", ylabel="nats per response")
    axes[3].set(title="Coefficient", ylabel="reward per nat")
    bottom, top = axes[3].get_ylim()
    axes[3].set_ylim(bottom, top + 0.5 * (top - bottom))  # room for the legend
    for panel in axes:
        panel.set_xlabel("batch of responses")
        panel.legend(frameon=False, fontsize=8)
    _save(figure, file)


def draw_probabilities(
    models: dict, text: torch.Tensor, language: DigitLanguage, file: Path
) -> None:
    """Next-token probabilities of each model at each position of one response."""
    start, n_tokens = language.context_length, language.n_tokens
    figure, axes = plt.subplots(
        language.response_length, 1, figsize=(9, 9), sharex=True, layout="constrained"
    )
    width = 0.8 / len(models)
    for position, panel in enumerate(axes):
        for index, (name, model) in enumerate(models.items()):
            with torch.no_grad():
                logits = model(text[None, : start + position])[0]
            offsets = torch.arange(n_tokens) + (index - (len(models) - 1) / 2) * width
            panel.bar(
                offsets.tolist(), logits.softmax(-1).tolist(), width, label=name, color=COLORS[name]
            )
        before = " ".join(map(str, text[start : start + position].tolist()))
        after = f", after {before}" if before else ""
        panel.set(
            title=f"response digit {position + 1}{after}", ylabel="probability", ylim=(0, 1.02)
        )
    axes[0].legend(
        frameon=False, ncols=len(models), loc="upper right", bbox_to_anchor=(1, 1.38), fontsize=8
    )
    axes[-1].set(xlabel="next token", xticks=range(n_tokens))
    axes[-1].set_xticklabels([*map(str, range(language.vocab_size)), "sep"])
    prompt = " ".join(map(str, text[: language.prompt_length].tolist()))
    figure.suptitle(f"What follows the prompt {prompt}", x=0.01, ha="left")
    _save(figure, file)


def draw_attention(
    models: dict[str, GPT], text: torch.Tensor, language: DigitLanguage, file: Path
) -> None:
    """Attention maps of all heads of all models on one text."""
    tokens = text[:-1]
    labels = ["sep" if t == language.separator else str(t) for t in tokens.tolist()]
    maps = {name: gpt.attention_maps(tokens[None])[0].flatten(0, 1) for name, gpt in models.items()}
    n_head = models["base"].config["n_head"]
    n_maps = len(maps["base"])
    figure, axes = plt.subplots(
        len(models), n_maps, figsize=(1.55 * n_maps, 1.75 * len(models)), layout="constrained"
    )
    for row, (name, heads) in zip(axes, maps.items(), strict=True):
        for index, (panel, weights) in enumerate(zip(row, heads, strict=True)):
            panel.imshow(weights.numpy(), vmin=0, vmax=1, cmap="Blues")
            panel.set_xticks(range(len(labels)), labels, fontsize=6)
            panel.set_yticks(range(len(labels)), labels, fontsize=6)
            if name == "base":
                panel.set_title(
                    f"layer {index // n_head + 1}, head {index % n_head + 1}", fontsize=8
                )
            if name == list(maps)[-1]:
                panel.set_xlabel("attended token", fontsize=7)
        row[0].set_ylabel(f"{name}\nattending token", fontsize=8)
    figure.colorbar(axes[0, 0].images[0], ax=axes, label="attention weight", shrink=0.6)
    prompt = " ".join(map(str, text[: language.prompt_length].tolist()))
    figure.suptitle(f"Attention on the prompt {prompt} and its response")
    _save(figure, file)


def _save(figure, file: Path) -> None:
    figure.savefig(file, dpi=110)
    plt.close(figure)
