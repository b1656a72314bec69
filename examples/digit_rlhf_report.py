"""The figures, the table and the pictures of digit_rlhf.py; as a script, those of several seeds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import tyro
from figures import ADAPTIVE, CONSTANT, GREY, LIGHT_GREY, NO_PENALTY, draw_band, draw_goal, plt
from matplotlib.patches import Rectangle
from torch import Tensor

from torchrl_kl.envs import DigitLanguage
from torchrl_kl.exact import ExactValues
from torchrl_kl.language import GPT

Report = dict[str, dict[str, Any]]  # of one seed: by stage or run, its figures
COMPARED = {"constant": "coefficient 1", "no_penalty": "no penalty"}
COLORS = {"true language": LIGHT_GREY, "language_model": GREY, "constant": CONSTANT}
COLORS |= {"no_penalty": NO_PENALTY, "adaptive": ADAPTIVE}
ROWS = {
    "language model: excess, nats per token": "{language_model[excess]:.4f}",
    "reward model: held-out pairs in order": "{reward_model[accuracy]:.2%}",
    "coefficient 1: gain": "{constant[gain]:.2%}",
    "coefficient 1: regret, in reward": "{constant[regret]:.4f}",
    "coefficient 1: first digit right (best possible)": (
        "{constant[right]:.4f} ({constant[right_of_optimum]:.4f})"
    ),
    "coefficient 1: reward, KL per response": "{constant[reward]:.3f}, {constant[kl]:.3f}",
    "coefficient 1: KL per digit, nats": "{digits[constant]}",
    "no penalty: reward, KL per response": "{no_penalty[reward]:.3f}, {no_penalty[kl]:.3f}",
    "no penalty: KL per digit, nats": "{digits[no_penalty]}",
    "adaptive: KL per response": "{adaptive[kl]:.3f}",
    "adaptive: coefficient, mean of the last quarter (exact)": (
        "{adaptive[coeff_last_quarter]:.3f} ({adaptive[coeff]:.3f})"
    ),
    "adaptive: first batch within 20 % of the exact coefficient": "{adaptive[first_close]}",
    "seconds": "{seconds:.0f}",
}


def describe(
    values: ExactValues, preferred: Tensor, curves: dict[str, list[float]]
) -> dict[str, Any]:
    """The figures of a run: exact values, and the coefficients on the way; `preferred`: (P,)."""
    first, coeffs = preferred[: len(values.token_probs), None], curves["coeff"]
    margin = 0.2 * values.coeff
    close = [batch for batch, coeff in enumerate(coeffs) if abs(coeff - values.coeff) <= margin]
    return {
        "curves": curves,
        "coeff": values.coeff,
        "coeff_last_quarter": fmean(coeffs[-max(len(coeffs) // 4, 1) :]),
        "first_close": min(close, default=None),
        "reward": values.reward,
        "kl": values.kl,
        "kl_per_position": values.kl_per_position.tolist(),
        "gain": values.fraction_of_gain,
        "regret": values.regret,
        "right": values.token_probs[:, 0].gather(1, first).mean().item(),
        "right_of_optimum": values.optimum.token_probs[:, 0].gather(1, first).mean().item(),
    }


def print_table(reports: dict[str, Report]) -> None:
    """The table of several seeds, by name, ready for a README."""
    print(f"\n| | {' | '.join(reports)} |\n|{'---|' * (len(reports) + 1)}")
    for name, cell in ROWS.items():
        cells = []
        for report in reports.values():
            kls = {run: report[run]["kl_per_position"] for run in COMPARED}
            digits = {run: " ".join(f"{kl:.3f}" for kl in kls[run]) for run in COMPARED}
            cells.append(cell.format(**report, digits=digits))
        print(f"| {name} | {' | '.join(cells)} |")


def draw_curves(reports: list[Report], file: Path) -> None:
    """What the penalty keeps, and how the controller finds its coefficient."""
    figure, ((rewards, digits), (kls, coeffs)) = plt.subplots(2, 2, figsize=(10, 7))

    def mean(run: str, name: str) -> float:
        return fmean(report[run][name] for report in reports)

    def draw(axes: Any, run: str, name: str, **line: Any) -> None:
        draw_band(axes, [report[run]["curves"][name] for report in reports], COLORS[run], **line)

    for shift, (run, name) in zip((-0.2, 0.2), COMPARED.items(), strict=True):
        wide = {"linewidth": 5, "alpha": 0.5} if run == "no_penalty" else {"zorder": 3}
        draw(rewards, run, "reward", label=name, **wide)  # the two lines are nearly the same
        by_digit = list(zip(*(report[run]["kl_per_position"] for report in reports), strict=True))
        x = [digit + shift for digit in range(1, len(by_digit) + 1)]
        digits.bar(x, list(map(fmean, by_digit)), 0.38, color=COLORS[run], label=name)
        digits.vlines(x, list(map(min, by_digit)), list(map(max, by_digit)), "black", linewidth=1)
    rewards.legend(loc="lower right")
    rewards.set(title="The learned reward rises either way", ylabel="score of the reward model")
    rewards.set(xlabel="batch of responses")
    digits.set(title="Without a penalty the later digits drift", ylabel="KL (nats)")
    digits.set(xlabel="digit of the response (the first is rewarded)", xticks=range(1, 5))
    target, exact = reports[0]["adaptive"]["target"], mean("adaptive", "coeff")
    draw(kls, "adaptive", "kl_reference")
    draw_goal(kls, target, f"target\n{target:g} nats")
    kls.set(title=f"The controller brings the KL to {mean('adaptive', 'kl'):.2f} nats ...")
    kls.set(xlabel="batch of responses", ylabel="nats per response", ylim=(0, None))
    draw(coeffs, "adaptive", "coeff")
    draw_goal(coeffs, exact, f"exact\n{exact:.3f}")
    coeffs.set(title=f"... and the coefficient to {mean('adaptive', 'coeff_last_quarter'):.3f}")
    coeffs.set(xlabel="batch of responses", ylabel="reward per nat", ylim=(0, None))
    figure.savefig(file)


def draw_probabilities(models: dict[str, Callable[[Tensor], Tensor]], text: Tensor, file: Path):
    """Probabilities of the next digit by each model, at each position of a response in `text`."""
    language, width = DigitLanguage(), 0.8 / len(models)
    figure, axes = plt.subplots(2, 2, figsize=(10, 6.4), sharex=True, sharey=True)
    for position, panel in enumerate(axes.flat):
        context = text[None, : language.context_length + position]
        for index, (name, model) in enumerate(models.items()):
            probs = model(context)[0].detach().softmax(-1)[: language.vocab_size].tolist()
            x = [digit + (index - (len(models) - 1) / 2) * width for digit in range(len(probs))]
            panel.bar(x, probs, width, label=name.replace("_", " "), color=COLORS[name])
        panel.set(title=f"digit {position + 1}", xticks=range(language.vocab_size), ylim=(0, 1))
    digits = " ".join(map(str, text.tolist())).replace(str(language.separator), "→")
    figure.suptitle(f"Probability of each digit in {digits}: the first one is rewarded")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    figure.savefig(file)


def draw_attention(models: dict[str, GPT], text: Tensor, file: Path) -> None:
    """Which tokens each layer reads in `text`, a response included; one row per model.

    At the right: the share of attention that has moved to other tokens since the first model, where
    the first digit is predicted and where the later ones are, over 512 texts of the language.
    """
    language = DigitLanguage()
    texts = torch.cat([text[None], language.sample(language.sample_prompts(511))])[:, :-1]
    names = " ".join(map(str, texts[0].tolist())).replace(str(language.separator), "→").split()
    maps = [model.attention_maps(texts) for model in models.values()]  # (N, layer, head, T, T)
    figure, axes = plt.subplots(len(maps), 3, figsize=(10, 9.6), sharex=True, sharey=True)
    separator = language.prompt_length
    for row, model, values in zip(axes, models, maps, strict=True):
        for layer, panel in enumerate(row):
            panel.imshow(values[0, layer].mean(0).numpy(), cmap="Blues", vmin=0, vmax=1)
            panel.set_xticks(range(len(names)), names)
            panel.set_yticks(range(len(names)), names)
            panel.grid(False)
            axes[0, layer].set_title(f"layer {layer + 1}")
        row[0].set_ylabel(COMPARED.get(model, model.replace("_", " ")), fontweight="bold")
        corner = (separator - 1.5, separator - 0.5)  # of the last digit, read by the separator
        row[0].add_patch(Rectangle(corner, 1, 1, fill=False, color=NO_PENALTY, linewidth=2.5))
        moved = (values - maps[0]).abs().sum(-1).mean((0, 1, 2))[separator:] / 2
        shares = f"moved:\n{moved[0]:.0%} at →,\n{moved[1:].mean():.0%} later"
        if values is not maps[0]:
            row[-1].annotate(shares, (1.05, 0.5), xycoords="axes fraction", va="center")
    figure.suptitle(
        "After RL, layer 1 reads the last prompt digit at → (box), where the rewarded\n"
        "digit is predicted. Without a penalty, more of the later attention moves too."
    )
    figure.supxlabel(
        "token that is read by the token at the left, mean of three heads", fontsize=11
    )
    figure.savefig(file)


def main(folders: tyro.conf.Positional[tuple[Path, ...]], picture: Path = Path("curves.png")):
    """The table and the picture of several finished jobs, one for each seed."""
    reports = {folder.name: json.loads((folder / "report.json").read_text()) for folder in folders}
    draw_curves(list(reports.values()), picture)
    print_table(reports)


if __name__ == "__main__":
    tyro.cli(main)
