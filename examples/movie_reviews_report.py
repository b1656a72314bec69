"""The table, the picture and the report of movie_reviews.py."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

from figures import (
    BLUE,
    GREEN,
    LIGHT_GREY,
    ORANGE,
    PURPLE,
    draw_goal,
    label,
    plt,
    save_figure,
    set_log_ticks,
)
from running import replacing, write_json

# The runs, with their titles and colours; the last takes longest.
RUNS = {
    "no_kl": ("no KL penalty", ORANGE),
    "constant": ("constant coefficient", BLUE),
    "adaptive": ("adaptive coefficient", GREEN),
    "in_loss": ("adaptive, in the loss", PURPLE),
}
COLUMNS = {
    "proxy": ("proxy reward", "{:+.2f}"),
    "gold": ("gold reward", "{:+.2f}"),
    "kl": ("KL, nats", "{:.2f}"),
    "perplexity": ("perplexity", "{:.0f}"),
    "distinct_2": ("distinct-2", "{:.2f}"),
}
Results = dict[str, dict[str, Any]]


def write_report(before: Results, runs: Results, target: float, out: Path) -> None:
    """Writes report.json, report.md and the picture, and prints the table.

    `before`: the results of the stages before PPO; that of "base" is the language model's.
    """
    base, figures = before["base"], {}
    curves = {
        run: {name: [value for _, value in pairs] for name, pairs in result["curves"].items()}
        for run, result in runs.items()
    }
    for run, result in runs.items():
        figures[run] = {name: result[name] for name in ("final", "seconds", "cpu_seconds")}
        for name in ("kl", "coeff"):
            figures[run][f"{name}_last_quarter"] = last_quarter(curves[run][name])
        figures[run]["checks"] = check(base["final"], figures[run], target)
    stages = {
        stage: {name: value for name, value in result.items() if name not in ("samples", "curves")}
        for stage, result in before.items()
    }
    write_json(out / "report.json", stages | figures)
    draw_curves(curves, base["final"], target, out / "movie_reviews.png")
    lines = make_table(base["final"], figures)
    text = [
        "# Film reviews: a proxy reward, with and without KL control\n",
        *lines,
        "\n![Rewards, KL, coefficient and perplexity](movie_reviews.png)\n",
        *make_samples(base, runs),
    ]
    with replacing(out / "report.md") as part:
        part.write_text("\n".join(text) + "\n")
    print("\n".join(lines))
    times = {name: result["seconds"] for name, result in (before | runs).items()}
    cpu = sum(result["cpu_seconds"] for result in (before | runs).values())
    print(f"Seconds: {', '.join(f'{name} {value:.0f}' for name, value in times.items())};")
    print(f"of a processor, all together: {cpu:.0f}.")
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


def draw_curves(
    curves: dict[str, dict[str, list[float]]], before: dict[str, float], target: float, file: Path
) -> None:
    """Rewards against KL; KL, perplexity and distinct-2 over the batches."""
    figure, axes = plt.subplots(2, 2, figsize=(10, 7.6))
    rewards, kls, perplexities, distinct = axes.flat
    draw_rewards(curves, rewards)
    names = {"kl": kls, "perplexity": perplexities, "distinct_2": distinct}
    for run, (title, color) in RUNS.items():
        for name, panel in names.items():
            panel.plot(smooth(curves[run][name]), color=color, label=title)
    middle = len(curves["no_kl"]["kl"]) / 2
    kls.set_yscale("symlog", linthresh=2)
    kls.set_ylim(bottom=0)
    kls.set_yticks(ticks := [0, 1, 3, 10, 30, 100], [f"{tick:g}" for tick in ticks], minor=False)
    kls.minorticks_off()
    draw_goal(kls, target, f"target {target:g}", middle)
    kls.set(title="Controllers hold their KL target", ylabel="KL, nats per response")
    perplexities.set_yscale("log")
    set_log_ticks(perplexities.yaxis, [5, 10, 20, 50, 100, 200, 500])
    perplexities.set(title="Without KL control, perplexity rises", ylabel="perplexity per token")
    draw_goal(perplexities, before["perplexity"], "language model", middle)
    distinct.set(title="Without KL control, phrases repeat", ylim=(0, 1))
    distinct.set_ylabel("different pairs of tokens, per pair")
    for panel in names.values():
        panel.set_xlabel("batch of responses")
    handles, labels = kls.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    save_figure(figure, file)


def draw_rewards(curves: dict[str, dict[str, list[float]]], axes: Any) -> None:
    """Rewards against the root of the KL (Gao et al. 2022)."""
    for run, (_, color) in RUNS.items():
        shown = {name: smooth(values) for name, values in curves[run].items()}
        roots = [max(kl, 0.0) ** 0.5 for kl in shown["kl"]]
        axes.plot(roots, shown["proxy"], color=color, linestyle=(0, (4, 1.5)))
        axes.plot(roots, shown["gold"], color=color)
        if run == "no_kl":
            where = {"color": color, "ha": "right"}
            label(
                axes, roots[-1], shown["proxy"][-1], "proxy (trained on)", offset=(-10, 0), **where
            )
            label(axes, roots[-1], shown["gold"][-1], "gold (not seen)", offset=(-16, 0), **where)
    axes.axhline(0, color=LIGHT_GREY, linewidth=1, zorder=0)
    axes.set(title="Without KL control, the gold reward falls")
    axes.set(xlabel="square root of the KL, nats", ylabel="reward, standard deviations")
