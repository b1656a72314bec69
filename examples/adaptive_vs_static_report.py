"""The table and the picture of examples/adaptive_vs_static.py: means over several seeds."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import matplotlib
from PIL import Image

matplotlib.use("Agg")
from matplotlib import pyplot as plt

Runs = dict[str, list[dict]]  # by name, one result for each seed
COLORS = {
    "constant 0.1": "#9ecae1",
    "constant 0.3": "#4292c6",
    "constant 1": "#08519c",
    "budget": "black",
    "adaptive": "tab:green",
    "exponential": "tab:orange",
    "PID": "tab:red",
}


def style(run: str) -> dict:
    """Closed loops: a colour for each controller, dashed from the second start."""
    controller, _, start = run.partition(" ")
    return {
        "color": COLORS.get(run) or COLORS[controller],
        "linestyle": "--" if start == "2" else "-",
    }


def finals(results: list[dict], name: str) -> list[float]:
    return [result["final"][name] for result in results]


def differences(results: list[dict], name: str, other: str) -> list[float]:
    return [result["final"][name] - result["final"][other] for result in results]


def smooth(values: list[float]) -> list[float]:
    """The mean of each value and its four neighbours."""
    return [fmean(values[max(i - 2, 0) : i + 3]) for i in range(len(values))]


def print_study(runs: Runs, truths: list[dict], target: float) -> None:
    """The table, ready for a README: means over seeds, in brackets the least and the greatest."""
    columns = [
        "run",
        "KL, nats",
        "off the target",
        "coefficient / exact",
        "reward",
        "reward below the frontier",
    ]
    columns += ["excess KL, nats", "perplexity"]
    print(f"\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for run, results in runs.items():
        off = [abs(kl / target - 1) for kl in finals(results, "kl")]
        coeffs = [
            coeff / truth["coeff"]
            for coeff, truth in zip(finals(results, "coeff"), truths, strict=True)
        ]
        gaps = differences(results, "frontier", "reward")
        cells = [
            spread(finals(results, "kl"), "{:.3f}"),
            f"{fmean(off):.1%}, at most {max(off):.1%}",
            spread(coeffs, "{:.3f}"),
            f"{fmean(finals(results, 'reward')):.4f}",
            spread(gaps, "{:.4f}"),
            spread(differences(results, "kl", "least_kl"), "{:.3f}"),
            f"{fmean(finals(results, 'perplexity')):.3f}",
        ]
        print(f"| {run} | {' | '.join(cells)} |")
    exact = spread([truth["coeff"] for truth in truths], "{:.3f}")
    best = max(
        share for results in runs.values() for share in finals(results, "share_of_frontier_gain")
    )
    seconds = [result["seconds"] for results in runs.values() for result in results]
    print(
        f"\nExact coefficient for {target:g} nats: {exact}. Perplexity of the language model: ",
        end="",
    )
    print(
        f"{fmean(truth['perplexity'] for truth in truths):.3f}, of the true language to itself: ",
        end="",
    )
    print(f"{fmean(truth['true_perplexity'] for truth in truths):.3f}.")
    print(
        f"Nearest to the frontier: {best:.2%} of the gain that is possible at its KL. "
        f"Seconds per run: {fmean(seconds):.0f}."
    )


def spread(values: list[float], form: str) -> str:
    return f"{form} ({form} to {form})".format(fmean(values), min(values), max(values))


def draw_study(runs: Runs, truths: list[dict], target: float, file: Path) -> None:
    figure, axes = plt.subplots(2, 3, figsize=(15, 8), layout="constrained")
    draw_curves(runs, truths, target, [axes[0, 0], axes[0, 1], axes[0, 2], axes[1, 0]])
    draw_plane(runs, truths, target, axes[1, 1])
    draw_ends(runs, target, axes[1, 2])
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(file, dpi=80)
    plt.close(figure)
    Image.open(file).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(
        file, optimize=True
    )  # half the size


def draw_curves(runs: Runs, truths: list[dict], target: float, panels: list) -> None:
    """Reward, KL, coefficient and perplexity over the batches, means over the seeds."""
    for panel, name in zip(panels, ("reward", "kl", "coeff"), strict=False):
        for run, results in runs.items():
            curves = zip(*(result["curves"][name] for result in results), strict=True)
            panel.plot(
                smooth([fmean(values) for values in curves]), linewidth=1.1, label=run, **style(run)
            )
    base = fmean(truth["perplexity"] for truth in truths)
    for run, results in runs.items():
        points = [list(zip(*result["curves"]["perplexity"], strict=True)) for result in results]
        means = [base, *map(fmean, zip(*(values for _, values in points), strict=True))]
        panels[3].plot([0, *points[0][0]], means, linewidth=1.1, **style(run))
    panels[0].set(
        title="Reward, means of 5 batches and all seeds", ylabel="first digit right (0 to 1)"
    )
    panels[1].axhline(target, color="0.4", linestyle=":", linewidth=1)
    panels[1].set(title=f"KL to the language model, target {target:g}", ylabel="nats per response")
    exact = fmean(truth["coeff"] for truth in truths)
    panels[2].axhline(exact, color="0.4", linestyle=":", linewidth=1)
    panels[2].set(
        title=f"Coefficient, {exact:.3f} is exact for the target",
        ylabel="reward per nat",
        yscale="log",
    )
    panels[3].set(title="Perplexity on the true language", ylabel="per token", yscale="log")
    for panel, ticks in (
        (panels[2], (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)),
        (panels[3], (3, 4, 6, 8, 10)),
    ):
        panel.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        panel.minorticks_off()
    for panel in panels:
        panel.set_xlabel("batch of responses")


def draw_plane(runs: Runs, truths: list[dict], target: float, panel) -> None:
    """Where each run ends, against the best possible: both are means over the seeds.

    The mean of points below the frontier of each seed lies below the frontier of all seeds' prompts
    together, whose optimum for a coefficient consists of the optima of the seeds for it.
    """
    optima = [
        tuple(map(fmean, zip(*seeds, strict=True)))
        for seeds in zip(*(t["frontier"] for t in truths), strict=True)
    ]
    zoom = panel.inset_axes((0.5, 0.08, 0.47, 0.47))
    for axes in (panel, zoom):
        axes.plot(
            [kl**0.5 for _, kl, _ in optima],
            [reward for _, _, reward in optima],
            color="0.6",
            zorder=1,
        )
        axes.axvline(target**0.5, color="0.4", linestyle=":", linewidth=1, zorder=0)
        for run, results in runs.items():
            x, y = fmean(finals(results, "kl")) ** 0.5, fmean(finals(results, "reward"))
            marker = "x" if style(run)["linestyle"] == "--" else "o"
            axes.scatter(x, y, s=28, color=style(run)["color"], marker=marker, zorder=2)
    closed = [results for run, results in runs.items() if run.split()[0] != "constant"]
    kls = [fmean(finals(results, "kl")) ** 0.5 for results in closed]
    rewards = [fmean(finals(results, "reward")) for results in closed]
    zoom.set_xlim(min(kls) - 0.01, max(kls) + 0.01)
    zoom.set_ylim(min(rewards) - 0.01, max(rewards) + 0.015)
    zoom.tick_params(labelsize=7)
    panel.indicate_inset_zoom(zoom, edgecolor="0.5")
    panel.set(
        title="Where they end, and the exact frontier", xlabel="square root of KL", ylabel="reward"
    )


def draw_ends(runs: Runs, target: float, panel) -> None:
    """Final KL of every policy."""
    panel.axvspan(0.9 * target, 1.1 * target, color="0.92", zorder=0)
    panel.axvline(target, color="0.4", linestyle=":", linewidth=1, zorder=0)
    for row, (run, results) in enumerate(runs.items()):
        marker = "x" if style(run)["linestyle"] == "--" else "o"
        panel.scatter(
            finals(results, "kl"),
            [row] * len(results),
            s=24,
            color=style(run)["color"],
            marker=marker,
        )
    panel.set(
        title="Final KL of every seed (grey: within 10 %)", xlabel="nats per response", xscale="log"
    )
    ticks = (0.1, 0.2, 0.5, 1.0)
    panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    panel.minorticks_off()
    panel.set_yticks(range(len(runs)), list(runs))
    panel.invert_yaxis()
