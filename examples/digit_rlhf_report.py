"""What examples/digit_rlhf.py shows: its figures, its table and its pictures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import matplotlib
import torch
from running import replacing

from torchrl_kl import CausalLMRewardModel, ExactValues, PolicyValues
from torchrl_kl.envs import DigitLanguage

matplotlib.use("Agg")
from matplotlib import pyplot as plt

Curves = dict[str, list[list[float]]]  # by name, pairs of a step and a value
RUNS = {"constant": "coefficient 1", "no_penalty": "no penalty", "adaptive": "adaptive"}
COLORS = {
    "language_model": "0.45",
    "true language": "0.8",
    "constant": "tab:blue",
    "no_penalty": "tab:red",
    "adaptive": "tab:green",
}


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
    for run, name in RUNS.items():
        row = report[run]
        for label, v, gain in (
            (f"PPO, {name}", row, f"{row['fraction_of_gain']:.2%}"),
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


def draw_reward_model(curves: Curves, file: Path) -> None:
    """Scores of accepted and rejected responses while the reward model learns."""
    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    for name, color in (("accepted", "tab:green"), ("rejected", "tab:red")):
        axes.plot(*zip(*curves[name], strict=True), color=color, label=name)
    axes.axhline(0, color="0.8", linewidth=0.8, zorder=0)
    axes.set(
        title="The reward model learns the preference",
        xlabel="update",
        ylabel="mean score of a batch (log-odds)",
    )
    axes.legend(frameon=False)
    _save(figure, file)


def draw_curves(curves: dict[str, Curves], target: float, coeff: float, file: Path) -> None:
    """Reward, KL to the reference and coefficient of all runs."""
    figure, axes = plt.subplots(1, 4, figsize=(14, 3.4), layout="constrained")
    for run, name in RUNS.items():
        # The adaptive run has another reward, in other units: the first digit right or not.
        panel = axes[1] if run == "adaptive" else axes[0]
        panel.plot(*zip(*curves[run]["reward"], strict=True), color=COLORS[run], label=name)
        axes[2].plot(*zip(*curves[run]["kl_reference"], strict=True), color=COLORS[run], label=name)
        axes[3].plot(*zip(*curves[run]["coeff"], strict=True), color=COLORS[run], label=name)
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


def _save(figure, file: Path) -> None:
    with replacing(file) as part:
        figure.savefig(part, dpi=110, format="png")
    plt.close(figure)
