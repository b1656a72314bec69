"""The benchmarks run at a small size, and their tables agree with themselves."""

import re

import pytest

from tests.scripts import lanes, run_here

ROUNDING = 0.5e-5  # of a figure with five decimals


def rows_of(printed: str) -> dict[str, list[str]]:
    """Cells of all rows of all tables, by the first cell."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in printed.splitlines()
        if "|" in line
    ]
    return {row[0]: row[1:] for row in rows}


SMALL = "--batches 2 --responses 16 --lm-updates 2 --prompts 1"
variance_run = lanes("benchmarks/estimator_variance.py", f"{SMALL} --samples 64")
losses_run = lanes("benchmarks/reward_vs_loss.py", f"{SMALL} --seeds 0")


class TestEstimatorVariance:
    ESTIMATORS = ("k1", "k3", "top-1", "top-2", "top-3", "exact")

    def test_every_estimate_has_the_mean_of_the_exact_values(self, variance_run):
        printed = variance_run.printed
        kl = re.search(r"KL (\S+) nats", printed)
        assert kl
        assert float(kl[1]) > 0.01  # at the reference every estimate is zero
        for name in self.ESTIMATORS:
            assert float(rows_of(printed)[name][1]) == pytest.approx(float(kl[1]), abs=2 * ROUNDING)

    def test_samples_agree_with_the_enumeration(self, variance_run):
        for name in self.ESTIMATORS:
            mean_off, variance_off = map(float, rows_of(variance_run.printed)[name][5].split(","))
            assert abs(mean_off) < 5
            assert abs(variance_off) < 5

    def test_the_tokens_add_up_to_the_variances(self, variance_run):
        rows = rows_of(variance_run.printed)
        for name, column in (("k1", 4), ("exact", 5)):
            assert float(rows["all"][column]) == pytest.approx(
                float(rows[name][3]), abs=2 * ROUNDING
            )
            parts = [float(rows[str(token)][column]) for token in range(1, 5)]
            assert sum(parts) == pytest.approx(float(rows[name][3]), abs=6 * ROUNDING)

    def test_the_verdict_is_that_of_the_table(self, variance_run):
        rows = rows_of(variance_run.printed)
        exact, k1 = float(rows["exact"][3]), float(rows["k1"][3])
        verdict = re.search(
            r"The variance of exact is (\S+) of k1's: (at most|more than) half",
            variance_run.printed,
        )
        assert verdict
        # Four decimals of the ratio, and the rounding of both variances.
        bound = 0.5e-4 + ROUNDING * (1 + exact / k1) / k1
        assert float(verdict[1]) == pytest.approx(exact / k1, abs=1.1 * bound)
        assert verdict[2] == ("at most" if exact / k1 <= 0.5 else "more than")


def test_reward_vs_loss(losses_run):
    lines = losses_run.printed.splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [row[2] for row in rows] == [
        "(the optimum)",
        "reward (k1)",
        "loss, sequence",
        "loss, sequence, step weights",
        "loss, step",
        "loss, k2",
    ]
    best = rows[0]
    for row in rows[1:]:
        objective, optimum = (float(r[3]) - 0.5 * float(r[5]) for r in (row, best))
        assert float(row[6]) >= 0
        assert float(row[6]) == pytest.approx(optimum - objective, abs=3e-4)


def test_step_overhead(tmp_path):
    options = "--blocks 1 --steps 2 --warmup 1 --batches 2 --frames 10"
    printed = run_here("benchmarks/step_overhead.py", tmp_path, options)
    times = re.search(r"plain step (\d+) us, bare call (\d+) us", printed)
    plain_rate = re.search(r"(\d+) frames per second without a stack", printed)
    assert times
    assert plain_rate
    plain, bare = map(int, times.groups())
    steps, frames = printed.split("frames per second")
    for name in ("constant", "adaptive, per trajectory", "adaptive, per step"):
        step, overhead, ratio = map(float, rows_of(steps)[name])
        assert overhead == pytest.approx(step - plain, abs=1.5)  # three rounded figures
        assert ratio == pytest.approx(overhead / bare, abs=0.01 + (0.5 + ratio) / bare)
        for cell in rows_of(frames)[name]:
            found = re.fullmatch(r"(\d+) \((\d+)%\)", cell)
            assert found
            share = int(found[1]) / int(plain_rate[1])
            assert int(found[2]) / 100 == pytest.approx(share, abs=0.005 + share / 10)
