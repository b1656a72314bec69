"""What examples/digit_rlhf.py shows: its figures, its table and its pictures.

As a script it makes the table and the picture of several seeds:

    python examples/digit_rlhf_report.py runs/seed0 runs/seed1 --picture curves.png
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
import tyro
from figures import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    LIGHT_GREY,
    ORANGE,
    draw_band,
    draw_goal,
    label,
    plt,
    save_figure,
)

from torchrl_kl import CausalLMRewardModel, ExactValues, PolicyValues
from torchrl_kl.envs import DigitLanguage

Curves = dict[str, list[list[float]]]  # by name, pairs of a step and a value
COMPARED = ("constant", "no_penalty")
RUNS = {"constant": "coefficient 1", "no_penalty": "no penalty", "adaptive": "adaptive"}
MODELS = {"true language": "true language", "language_model": "language model"}
MODELS |= {run: f"PPO, {name}" for run, name in RUNS.items()}
COLORS = {"true language": LIGHT_GREY, "language_model": GREY}
COLORS |= {"constant": BLUE, "no_penalty": ORANGE, "adaptive": GREEN}


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
        for who, v, gain in (
            (f"PPO, {name}", row, f"{row['fraction_of_gain']:.2%}"),
            ("  best possible", row["optimum"], "100%"),
        ):
            positions = " / ".join(f"{max(kl, 0.0):.3f}" for kl in v["kl_per_position"])
            numbers = f"{row['coeff']:>8.3f}{v['reward']:>9.3f}{v['kl']:>8.3f}  {positions:<27}"
            print(f"{who:<22}{numbers}{v['first_digit_right']:>11.4f}{gain:>9}")
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


def print_seeds(names: list[str], reports: list[dict]) -> None:
    """The table of several seeds, ready for a README."""
    rows: dict[str, Callable[[dict], str]] = {
        "language model: excess, nats per token": lambda r: (
            f"{r['language_model']['excess_nats_per_token']:.4f}"
        ),
        "reward model: held-out pairs in order": lambda r: (
            f"{r['reward_model']['heldout_accuracy']:.2%}"
        ),
        "reward model: mean margin": lambda r: f"{r['reward_model']['heldout_margin']:.1f}",
        "coefficient 1: gain": lambda r: f"{r['constant']['fraction_of_gain']:.2%}",
        "coefficient 1: regret, in reward": lambda r: f"{r['constant']['regret']:.4f}",
        "coefficient 1: first digit right (best possible)": lambda r: (
            f"{r['constant']['first_digit_right']:.4f} "
            f"({r['constant']['optimum']['first_digit_right']:.4f})"
        ),
        "coefficient 1: largest difference of KL to the best possible, nats": lambda r: (
            f"{_largest_difference(r['constant']):.4f}"
        ),
        "adaptive: KL per response": lambda r: f"{r['adaptive']['kl']:.3f}",
        "adaptive: coefficient, mean of the last quarter (exact)": lambda r: (
            f"{r['adaptive']['coeff_mean_last_quarter']:.3f} ({r['adaptive']['coeff_exact']:.3f})"
        ),
        "adaptive: first batch with the coefficient within 20 % of the exact one": lambda r: (
            f"{r['adaptive']['coeff_first_within_20_percent']} of {r['adaptive']['batches']}"
        ),
    }
    for run in COMPARED:
        rows[f"{RUNS[run]}: reward, KL per response"] = lambda r, run=run: (
            f"{r[run]['reward']:.3f}, {r[run]['kl']:.3f}"
        )
        rows[f"{RUNS[run]}: KL per digit, nats"] = lambda r, run=run: " ".join(
            f"{kl:.3f}" for kl in r[run]["kl_per_position"]
        )
    print(f"\n| | {' | '.join(names)} |\n|{'---|' * (len(names) + 1)}")
    for name in sorted(rows, key=lambda name: name.split(":")[0] == "adaptive"):
        print(f"| {name} | {' | '.join(map(rows[name], reports))} |")
    seconds = ", ".join(f"{report['seconds']['all']:.0f}" for report in reports)
    print(f"\nSeconds: {seconds}.")


def _largest_difference(row: dict) -> float:
    kls = zip(row["kl_per_position"], row["optimum"]["kl_per_position"], strict=True)
    return max(abs(kl - best) for kl, best in kls)


def draw_reward_model(curves: Curves, accuracy: float, file: Path) -> None:
    """Scores of accepted and rejected responses while the reward model learns."""
    figure, axes = plt.subplots(figsize=(7.5, 4))
    for name, color in (("accepted", BLUE), ("rejected", ORANGE)):
        steps, scores = zip(*curves[name], strict=True)
        axes.plot(steps, scores, color=color, linewidth=1.5)
        label(axes, steps[-1], scores[-1], name, color)
    axes.set(
        title=f"The reward model puts {accuracy:.1%} of held-out pairs in the right order",
        xlabel="update",
        ylabel="mean score of a batch (log-odds)",
    )
    save_figure(figure, file)


def draw_curves(
    runs: dict[str, list[Curves]], figures: dict[str, list[dict]], target: float, file: Path
) -> None:
    """What the penalty keeps, and how the controller finds its coefficient.

    `runs` and `figures` have the curves and the exact figures of each run, one for each seed.
    """
    figure, ((rewards, digits), (kls, coeffs)) = plt.subplots(2, 2, figsize=(10, 7))
    for run in reversed(COMPARED):
        line = {"linewidth": 5, "alpha": 0.6} if run == "no_penalty" else {"linewidth": 1.8}
        _draw(rewards, runs[run], "reward", COLORS[run], label=RUNS[run], **line)
    rewards.legend(loc="lower right")
    rewards.set(
        title="Learned reward: {:.2f} with, {:.2f} without a penalty".format(
            *(fmean(row["reward"] for row in figures[run]) for run in COMPARED)
        ),
        xlabel="batch of responses",
        ylabel="score of the reward model",
    )
    _draw_digits(digits, figures)
    adaptive, exact = runs["adaptive"], fmean(f["coeff_exact"] for f in figures["adaptive"])
    left = 0.12 * len(adaptive[0]["kl_reference"])
    for axes, name, goal, text in (
        (kls, "kl_reference", target, f"target: {target:g} nats"),
        (coeffs, "coeff", exact, f"exact for the target: {exact:.3f}"),
    ):
        _draw(axes, adaptive, name, COLORS["adaptive"])
        draw_goal(axes, goal, text, left)
        axes.set(xlabel="batch of responses", ylim=(0, None))
    kl = fmean(row["kl"] for row in figures["adaptive"])
    coeff = fmean(row["coeff_mean_last_quarter"] for row in figures["adaptive"])
    kls.set(title=f"The controller brings the KL to {kl:.2f} nats ...", ylabel="nats per response")
    coeffs.set(title=f"... and the coefficient to {coeff:.3f}", ylabel="reward per nat")
    save_figure(figure, file)


def _draw(axes, seeds: list[Curves], name: str, color: str, **line) -> None:
    steps = [step for step, _ in seeds[0][name]]
    draw_band(
        axes, steps, [[value for _, value in curves[name]] for curves in seeds], color, **line
    )


def _draw_digits(axes, figures: dict[str, list[dict]]) -> None:
    """The KL at each digit of a response, exact, with and without a penalty."""
    n_digits = len(figures["constant"][0]["kl_per_position"])
    for shift, run in zip((-0.2, 0.2), COMPARED, strict=True):
        kls = list(zip(*(row["kl_per_position"] for row in figures[run]), strict=True))
        means = [fmean(values) for values in kls]
        # From the smallest to the largest value over the seeds.
        spread = [[m - min(v) for m, v in zip(means, kls, strict=True)]]
        spread += [[max(v) - m for m, v in zip(means, kls, strict=True)]]
        x = [digit + shift for digit in range(1, n_digits + 1)]
        axes.bar(x, means, 0.38, color=COLORS[run], label=RUNS[run])
        axes.errorbar(x, means, spread, fmt="none", ecolor=BLACK, elinewidth=1, capsize=2)
    axes.legend(loc="upper right")
    later = [fmean(sum(row["kl_per_position"][1:]) for row in figures[run]) for run in COMPARED]
    axes.set(
        title="KL of digits 2 to {}: {:.2f} with, {:.2f} without a penalty".format(
            n_digits, *later
        ),
        xlabel="digit of the response (the reward asks about the first)",
        ylabel="KL to the language model (nats)",
        xticks=range(1, n_digits + 1),
    )


def draw_probabilities(
    models: dict[str, Callable],
    figures: dict[str, dict],
    text: torch.Tensor,
    language: DigitLanguage,
    file: Path,
) -> None:
    """Probabilities of the next digit by each model, at each position of one response."""
    start, n_digits = language.context_length, language.vocab_size
    figure, axes = plt.subplots(2, 2, figsize=(10, 6.4), sharex=True, sharey=True)
    width = 0.8 / len(models)
    for position, panel in enumerate(axes.flat):
        context = text[None, : start + position]
        for index, (name, model) in enumerate(models.items()):
            with torch.no_grad():
                probs = model(context)[0].softmax(-1)[:n_digits].tolist()
            shift = (index - (len(models) - 1) / 2) * width
            x = [digit + shift for digit in range(n_digits)]
            panel.bar(x, probs, width, label=MODELS[name], color=COLORS[name])
        digits = " ".join(map(str, text[start : start + position].tolist()))
        panel.set_title(f"digit {position + 1}" + (f", after {digits}" if digits else ""))
        panel.set(xticks=range(n_digits), ylim=(0, 1))
        panel.grid(axis="x", visible=False)
    for panel in axes[:, 0]:
        panel.set_ylabel("probability")
    for panel in axes[1]:
        panel.set_xlabel("next digit")
    prompt = " ".join(map(str, text[: language.prompt_length].tolist()))
    right = int(language.preferred_token(text[None, : language.prompt_length]))
    axes[0, 0].set_title(f"digit 1, after the prompt {prompt}: a {right} is rewarded")
    later = [sum(figures[run]["kl_per_position"][1:]) for run in COMPARED]
    title = "Digits 2 to {} move {:.2f} nats away with the penalty, {:.2f} without it"
    figure.suptitle(title.format(language.response_length, *later), x=0.01, ha="left")
    handles, names = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(models))
    save_figure(figure, file)


@dataclass(frozen=True)
class ReportOptions:
    """The table and the picture of several finished jobs, one for each seed."""

    folders: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of finished jobs."""
    picture: Path = Path("curves.png")
    """File of the picture."""


def main() -> None:
    options = tyro.cli(ReportOptions)
    reports = [json.loads((folder / "report.json").read_text()) for folder in options.folders]
    curves = {
        run: [json.loads((f / run / "result.json").read_text())["curves"] for f in options.folders]
        for run in RUNS
    }
    figures = {run: [report[run] for report in reports] for run in RUNS}
    draw_curves(curves, figures, reports[0]["adaptive"]["target"], options.picture)
    print_seeds([folder.name for folder in options.folders], reports)


if __name__ == "__main__":
    main()
