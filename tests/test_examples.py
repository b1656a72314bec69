"""The examples run from the command line at a small size and leave behind what they promise."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchrl_kl import GPT

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("digit_rlhf")
    command = [sys.executable, str(EXAMPLES / "digit_rlhf.py"), "--quick", "--threads", "1", "--out", "out"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return folder / "out", result.stdout


def test_models_can_be_loaded(run):
    out, _ = run
    for name in ("language_model", "reward_model", "policy_beta1", "policy_beta0", "policy_adaptive"):
        assert isinstance(GPT.from_pretrained(out / name), GPT)


def test_report_has_its_figures(run):
    report = json.loads((run[0] / "report.json").read_text())
    assert {"language_model", "reward_model", "beta1", "beta0", "adaptive"} <= report["seconds"].keys()
    assert report["language_model"]["excess_nats_per_token"] > 0
    assert 0 <= report["reward_model"]["heldout_accuracy"] <= 1
    figures = {"reward", "kl", "kl_per_position", "objective", "optimum", "regret", "fraction_of_gain"}
    for policy in ("beta1", "beta0", "adaptive"):
        assert figures | {"first_digit_right"} <= report[policy].keys()
        assert report[policy]["regret"] >= -1e-9
        assert sum(report[policy]["kl_per_position"]) == pytest.approx(report[policy]["kl"])
    assert {"coeff_mean_last_quarter", "coeff_exact"} <= report["adaptive"].keys()


def test_metrics_and_pictures(run):
    out, _ = run
    with (out / "metrics.csv").open() as stream:
        metrics = {row["metric"] for row in csv.DictReader(stream)}
    for policy in ("beta1", "beta0", "adaptive"):
        assert {f"{policy}/{name}" for name in ("reward", "kl_reference", "kl_old_policy", "coeff")} <= metrics
    for name in ("reward_model", "curves", "probabilities", "attention"):
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((out / "config.json").read_text())["quick"] is True


def test_the_last_thing_printed_is_the_table(run):
    printed = run[1]
    assert printed.index("likely first digits") < printed.index("for each first digit") < printed.index("policy  ")
