"""The table and the picture of examples/adaptive_vs_static.py: means over several seeds."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from figures import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    draw_band,
    draw_goal,
    label,
    plt,
    save_figure,
    set_log_ticks,
)
from matplotlib.lines import Line2D

Runs = dict[str, list[dict]]  # by name, one result for each seed
STARTS = (BLUE, ORANGE)  # colours of the controllers' starts


def group(run: str) -> str:
    """What a run is drawn with: a constant, one that is computed, or controllers from a start."""
    rule, _, start = run.partition(" ")
    return run if rule in ("constant", "computed", "planned") else f"controllers from {start}"


def group_colors(runs: Runs) -> dict[str, str]:
    """A colour for each group: grey for all constants."""
    names = dict.fromkeys(map(group, runs))
    colors = {name: GREY for name in names if name.startswith("constant")}
    colors |= {"computed": GREEN, "planned": PURPLE}
    return colors | dict(zip([name for name in names if name not in colors], STARTS, strict=False))


def finals(results: list[dict], name: str) -> list[float]:
    return [result["final"][name] for result in results]


def differences(results: list[dict], name: str, other: str) -> list[float]:
    return [result["final"][name] - result["final"][other] for result in results]


def smooth(values: list[float]) -> list[float]:
    """The mean of each value and its four neighbours."""
    return [fmean(values[max(i - 2, 0) : i + 3]) for i in range(len(values))]


def spread(values: list[float], form: str) -> str:
    return f"{form} ({form} to {form})".format(fmean(values), min(values), max(values))


def print_study(runs: Runs, truths: list[dict], target: float) -> None:
    """The table, ready for a README: means over seeds, in brackets the least and the greatest."""
    columns = ["run", "KL, nats", "off the target", "coefficient / exact", "reward"]
    columns += ["reward below the frontier", "excess KL, nats"]
    columns += ["perplexity", "highest on the way"]
    print(f"\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for run, results in runs.items():
        off = [abs(kl / target - 1) for kl in finals(results, "kl")]
        coeffs = [
            coeff / truth["coeff"]
            for coeff, truth in zip(finals(results, "coeff"), truths, strict=True)
        ]
        cells = [
            spread(finals(results, "kl"), "{:.3f}"),
            f"{fmean(off):.1%}, at most {max(off):.1%}",
            spread(coeffs, "{:.3f}"),
            f"{fmean(finals(results, 'reward')):.4f}",
            spread(differences(results, "frontier", "reward"), "{:.4f}"),
            spread(differences(results, "kl", "least_kl"), "{:.3f}"),
            f"{fmean(finals(results, 'perplexity')):.3f}",
            f"{fmean(max(p for _, p in r['curves']['perplexity']) for r in results):.3f}",
        ]
        print(f"| {run} | {' | '.join(cells)} |")
    exact = spread([truth["coeff"] for truth in truths], "{:.3f}")
    best = max(
        share for results in runs.values() for share in finals(results, "share_of_frontier_gain")
    )
    seconds = fmean(result["cpu_seconds"] for results in runs.values() for result in results)
    of_model = fmean(truth["perplexity"] for truth in truths)
    of_truth = fmean(truth["true_perplexity"] for truth in truths)
    print(
        f"\nExact coefficient for {target:g} nats: {exact}. Perplexity of the language model: "
        f"{of_model:.3f}, of the true language to itself: {of_truth:.3f}.\n"
        f"Nearest to the frontier: {best:.2%} of the gain that is possible at its KL. "
        f"Processor seconds per run: {seconds:.0f}."
    )


def draw_study(runs: Runs, truths: list[dict], target: float, file: Path) -> None:
    """How the runs go, where they end, and what is possible there."""
    figure, ((kls, coeffs), (ends, plane)) = plt.subplots(2, 2, figsize=(11, 8.4))
    draw_curves(runs, "kl_reference", kls)
    draw_curves(runs, "coeff", coeffs)
    n_batches = len(next(iter(runs.values()))[0]["curves"]["coeff"])
    exact = fmean(truth["coeff"] for truth in truths)
    draw_goal(kls, target, "target", 1.02 * n_batches)
    draw_goal(coeffs, exact, "exact", 1.02 * n_batches)
    kls.set(
        title=f"Controllers bring the KL to the target of {target:g} nats ...",
        ylabel="KL to the language model (nats per response)",
        xlim=(0, 1.25 * n_batches),
    )
    coeffs.set(
        title=f"... and find the exact coefficient, {exact:.2f}",
        ylabel="coefficient (reward per nat), log scale",
        yscale="log",
        xlim=(0, 1.25 * n_batches),
    )
    set_log_ticks(coeffs.yaxis, (0.05, 0.1, 0.2, 0.5, 1.0, 2.0))
    draw_ends(runs, target, ends)
    draw_plane(runs, truths, plane)
    handles = {
        "a constant" if color == GREY else who: Line2D([], [], color=color, linewidth=4)
        for who, color in group_colors(runs).items()
    }
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=len(handles))
    save_figure(figure, file)


def draw_curves(runs: Runs, name: str, axes) -> None:
    """A metric over the batches, one band per group of runs, over its rules and seeds."""
    ends: dict[str, float] = {}
    steps: list[float] = []
    for who, color in group_colors(runs).items():
        results = [r for run in runs if group(run) == who for r in runs[run]]
        steps = [step for step, _ in results[0]["curves"][name]]
        curves = [smooth([value for _, value in r["curves"][name]]) for r in results]
        draw_band(axes, steps, curves, color, linewidth=1.5)
        ends[who] = fmean(curve[-1] for curve in curves)
    axes.set_xlabel("batch of responses (means of 5)")
    for who, end in ends.items():
        # Those that end at the target would cover each other: the legend names them.
        if who.startswith("constant"):
            label(axes, steps[-1], end, who, GREY)


def draw_ends(runs: Runs, target: float, axes) -> None:
    """Final KL of every policy."""
    colors = group_colors(runs)
    axes.axvspan(0.9 * target, 1.1 * target, color="0.9", zorder=0)
    axes.axvline(target, color=BLACK, linestyle=":", linewidth=1.3)
    for row, (run, results) in enumerate(runs.items()):
        color, rows = colors[group(run)], [row] * len(results)
        axes.scatter(finals(results, "kl"), rows, s=30, color=color, alpha=0.7, linewidth=0)
    axes.set(
        title="Constants chosen beforehand miss it (grey: 10 %)",
        xlabel="final KL of each seed (nats per response), log scale",
        xscale="log",
    )
    set_log_ticks(axes.xaxis, (0.1, 0.2, 0.5, 1.0))
    axes.set_yticks(range(len(runs)), list(runs))
    for tick, run in zip(axes.get_yticklabels(), runs, strict=True):
        tick.set_color(colors[group(run)])
    axes.invert_yaxis()


def draw_plane(runs: Runs, truths: list[dict], axes) -> None:
    """Where each run ends, against the best possible: both are means over the seeds.

    The mean of points below the frontier of each seed lies below the frontier of all seeds' prompts
    together, whose optimum for a coefficient consists of the optima of the seeds for it.
    """
    optima = [
        tuple(map(fmean, zip(*seeds, strict=True)))
        for seeds in zip(*(t["frontier"] for t in truths), strict=True)
    ]
    axes.plot([kl for _, kl, _ in optima], [reward for _, _, reward in optima], color=BLACK)
    _, kl, reward = optima[len(optima) // 3]
    label(axes, kl, reward, "best possible", BLACK, offset=(-8, 8), ha="right")
    colors = group_colors(runs)
    for run, results in runs.items():
        x, y = fmean(finals(results, "kl")), fmean(finals(results, "reward"))
        axes.scatter(x, y, s=45, color=colors[group(run)], zorder=3)
        if run.startswith("constant"):
            label(axes, x, y, run, GREY, offset=(8, -8))
    gap = max(max(differences(results, "frontier", "reward")) for results in runs.values())
    axes.margins(x=0.15)
    axes.set(
        title=f"All end within {gap:.3f} of the best possible reward",
        xlabel="final KL (nats per response)",
        ylabel="first digit right (0 to 1)",
    )
