"""The table, the picture and the report of movie_reviews.py."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib
from movie_reviews_options import Args
from PIL import Image

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import LogLocator

# The runs, with their titles and colours.
RUNS = {
    "no_kl": ("no KL penalty", "tab:red"),
    "constant": ("constant coefficient", "tab:blue"),
    "adaptive": ("adaptive coefficient", "tab:green"),
    "in_loss": ("adaptive, in the loss", "tab:purple"),
}
COLUMNS = {
    "proxy": ("proxy reward", "{:+.2f}"),
    "gold": ("gold reward", "{:+.2f}"),
    "kl": ("KL, nats", "{:.2f}"),
    "perplexity": ("perplexity", "{:.0f}"),
    "distinct_2": ("distinct-2", "{:.2f}"),
}
Results = dict[str, dict[str, Any]]


def write_report(base: dict, results: Results, args: Args, out: Path) -> None:
    """Writes metrics.csv, report.json, report.md and the picture, and prints the table."""
    with (out / "metrics.csv").open("w", newline="") as stream:
        table = csv.writer(stream)
        table.writerow(["metric", "step", "value"])
        for run, result in results.items():
            for name, curve in result["curves"].items():
                table.writerows([f"{run}/{name}", step, v] for step, v in enumerate(curve))
    figures = {"base": {name: value for name, value in base.items() if name != "samples"}}
    for run, result in results.items():
        figures[run] = {name: result[name] for name in ("final", "seconds", "cpu_seconds")}
        for name in ("kl", "coeff"):
            figures[run][f"{name}_last_quarter"] = last_quarter(result["curves"][name])
        figures[run]["checks"] = check(base["final"], figures[run], args.target)
    (out / "report.json").write_text(json.dumps(figures, indent=2) + "\n")
    draw_curves(results, args.target, out / "movie_reviews.png")
    lines = make_table(base["final"], figures)
    text = [
        "# Film reviews: a proxy reward, with and without KL control\n",
        *lines,
        "\n![Rewards, KL, coefficient and perplexity](movie_reviews.png)\n",
        *make_samples(base, results),
    ]
    (out / "report.md").write_text("\n".join(text) + "\n")
    print("\n".join(lines))
    seconds = {run: figures[run]["seconds"] for run in figures}
    cpu = sum(figures[run]["cpu_seconds"] for run in figures)
    times = ", ".join(f"{run} {value:.0f}" for run, value in seconds.items())
    print(f"Seconds: {times}; of a processor, all together: {cpu:.0f}.")
    print(f"Text of each run: {out / 'report.md'}.")


def last_quarter(curve: list[float]) -> float:
    return fmean(curve[-max(len(curve) // 4, 1) :])


def check(before: dict[str, float], figures: dict[str, Any], target: float) -> dict[str, float]:
    """How a run compares with the language model, and its KL with the target."""
    final = figures["final"]
    return {
        "perplexity_ratio": final["perplexity"] / before["perplexity"],
        "distinct_2_ratio": final["distinct_2"] / before["distinct_2"],
        "kl_relative_to_target": figures["kl_last_quarter"] / target,
        "gold_minus_proxy": final["gold"] - final["proxy"],
    }


def make_table(before: dict[str, float], figures: Results) -> list[str]:
    """The lines of a Markdown table."""
    titles = ["", *(title for title, _ in COLUMNS.values())]
    titles += ["KL, last quarter of the batches", "coefficient, the same"]
    lines = [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    rows = {"language model": (before, ["", ""])}
    for run, (title, _) in RUNS.items():
        late = (figures[run]["kl_last_quarter"], figures[run]["coeff_last_quarter"])
        rows[title] = (figures[run]["final"], [f"{late[0]:.2f}", f"{late[1]:.3f}"])
    for title, (final, late) in rows.items():
        cells = [form.format(final[name]) for name, (_, form) in COLUMNS.items()]
        lines.append(f"| {' | '.join([title, *cells, *late])} |")
    return lines


def make_samples(base: dict, results: Results) -> list[str]:
    """What the language model and each run write after the same prompts, in Markdown."""
    lines = ["The prompt is in bold."]
    for i in range(len(base["samples"])):
        lines.append(f"\n## Prompt {i + 1}\n")
        texts = {"language model": base["samples"][i]}
        texts |= {title: results[run]["samples"][i] for run, (title, _) in RUNS.items()}
        for title, (prompt, response) in texts.items():
            lines.append(f"- *{title}*: **{escape(prompt).strip()}**{escape(response)}")
    return lines


def escape(text: str) -> str:
    """A text as Markdown shows it, on one line."""
    text = text.replace("\n", " ").replace("\ufffd", "")
    return "".join(f"\\{c}" if c in "\\`*_[]<>#|" else c for c in text).rstrip()


def smooth(values: list[float], width: int = 9) -> list[float]:
    """The mean of each value and its neighbours."""
    half = width // 2
    return [fmean(values[max(i - half, 0) : i + half + 1]) for i in range(len(values))]


def draw_curves(results: Results, target: float, file: Path) -> None:
    """Rewards against KL; KL, coefficient, perplexity and distinct-2 over the batches."""
    figure, axes = plt.subplots(2, 3, figsize=(14, 8), layout="constrained")
    rewards, near, kls, coeffs, perplexities, distinct = axes.flat
    draw_rewards(results, target, rewards, near)
    names = {"kl": kls, "coeff": coeffs, "perplexity": perplexities, "distinct_2": distinct}
    for run, (title, color) in RUNS.items():
        for name, panel in names.items():
            curve = smooth(results[run]["curves"][name])
            panel.plot(curve, color=color, label=title, linewidth=1.4)
    kls.axhline(target, color="0.4", linestyle=":", linewidth=1)
    kls.set(title=f"KL to the language model, target {target:g}", ylabel="nats per response")
    kls.set_yscale("symlog", linthresh=2)
    kls.set_ylim(bottom=0)
    kls.set_yticks([0, 1, 3, 10, 30, 100])
    coeffs.set(title="Coefficient", ylabel="reward per nat")
    perplexities.set(title="Perplexity under the language model", ylabel="per token", yscale="log")
    perplexities.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    distinct.set(title="Distinct-2", ylabel="different pairs of tokens per pair", ylim=(0, 1))
    for panel in (kls, perplexities):
        panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        panel.minorticks_off()
    for panel in names.values():
        panel.set_xlabel("batch of responses")
    handles, labels = kls.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(file, dpi=75)
    plt.close(figure)
    picture = Image.open(file).convert("RGB").quantize(64, dither=Image.Dither.NONE)
    picture.save(file, optimize=True)  # a third of the size


def draw_rewards(results: Results, target: float, everything: Any, near: Any) -> None:
    """Rewards against the root of the KL (Gao et al. 2022): all, and up to 4 times the target."""
    shown = [0.0]
    for run, (_, color) in RUNS.items():
        curves = {name: smooth(values) for name, values in results[run]["curves"].items()}
        roots = [max(kl, 0.0) ** 0.5 for kl in curves["kl"]]
        for name, line in (("proxy", "--"), ("gold", "-")):
            for panel in (everything, near):
                panel.plot(roots, curves[name], color=color, linestyle=line, linewidth=1.4)
            pairs = zip(curves["kl"], curves[name], strict=True)
            shown += [reward for kl, reward in pairs if kl < 4 * target]
    near.set(xlim=(0, (4 * target) ** 0.5), ylim=(min(shown) - 0.1, max(shown) + 0.1))
    near.axvline(target**0.5, color="0.4", linestyle=":", linewidth=1)
    near.set_title("The same, near the target")
    everything.plot([], [], color="0.3", linestyle="--", label="proxy, which is optimised")
    everything.plot([], [], color="0.3", label="gold, which is not")
    everything.legend(frameon=False, loc="upper left")
    everything.set_title("Over-optimisation: reward against KL")
    for panel in (everything, near):
        panel.axhline(0, color="0.8", linewidth=0.8, zorder=0)
        panel.set_xlabel("square root of KL (nats per response)")
        panel.set_ylabel("reward (standard deviations)")
