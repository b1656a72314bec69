"""The benchmarks run from the command line at a small size, and their tables agree with themselves."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
ROUNDING = 0.5e-5  # of a figure with five decimals


def printed_by(script: str, folder: Path) -> str:
    command = [sys.executable, str(BENCHMARKS / script), "--quick", "--out", "out"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def rows_of(printed: str) -> dict[str, list[str]]:
    """Cells of all rows of all tables, by the first cell."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in printed.splitlines()
        if "|" in line
    ]
    return {row[0]: row[1:] for row in rows}


@pytest.fixture(scope="module")
def variance(tmp_path_factory):
    return printed_by("estimator_variance.py", tmp_path_factory.mktemp("estimator_variance"))


class TestEstimatorVariance:
    ESTIMATORS = ("k1", "k3", "top-1", "top-2", "top-3", "exact")

    def test_every_estimate_has_the_mean_of_the_exact_values(self, variance):
        kl = re.search(r"KL (\S+) nats", variance)
        assert kl
        assert float(kl[1]) > 0.01  # at the reference every estimate is zero
        for name in self.ESTIMATORS:
            assert float(rows_of(variance)[name][1]) == pytest.approx(
                float(kl[1]), abs=2 * ROUNDING
            )

    def test_samples_agree_with_the_enumeration(self, variance):
        for name in self.ESTIMATORS:
            mean_off, variance_off = map(float, rows_of(variance)[name][5].split(","))
            assert abs(mean_off) < 5
            assert abs(variance_off) < 5

    def test_the_tokens_add_up_to_the_variances(self, variance):
        rows = rows_of(variance)
        for name, column in (("k1", 4), ("exact", 5)):
            assert float(rows["all"][column]) == pytest.approx(
                float(rows[name][3]), abs=2 * ROUNDING
            )
            parts = [float(rows[str(token)][column]) for token in range(1, 5)]
            assert sum(parts) == pytest.approx(float(rows[name][3]), abs=6 * ROUNDING)

    def test_the_verdict_is_that_of_the_table(self, variance):
        rows = rows_of(variance)
        ratio = float(rows["exact"][3]) / float(rows["k1"][3])
        verdict = re.search(
            r"The variance of exact is (\S+) of k1's: (at most|more than) half", variance
        )
        assert verdict
        assert float(verdict[1]) == pytest.approx(ratio, abs=2e-4)
        assert verdict[2] == ("at most" if ratio <= 0.5 else "more than")


def test_reward_vs_loss(tmp_path):
    printed = printed_by("reward_vs_loss.py", tmp_path)
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in printed.splitlines()[2:]
    ]
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
