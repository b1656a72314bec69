"""The examples run from the command line at a small size and leave behind what they promise."""

import csv
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from torchrl_kl import GPT
from torchrl_kl.envs import DigitLanguage

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("digit_rlhf")
    command = [sys.executable, str(EXAMPLES / "digit_rlhf.py"), "--quick", "--threads", "1", "--out", "out"]
    command += ["--logger", "tensorboard"]
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
    adaptive = {"coeff_mean_last_quarter", "coeff_exact", "coeff_first_within_20_percent", "batches", "target"}
    assert adaptive <= report["adaptive"].keys()


def test_metrics_and_pictures(run):
    out, _ = run
    with (out / "metrics.csv").open() as stream:
        metrics = {row["metric"] for row in csv.DictReader(stream)}
    for policy in ("beta1", "beta0", "adaptive"):
        assert {f"{policy}/{name}" for name in ("reward", "kl_reference", "kl_old_policy", "coeff")} <= metrics
    for name in ("reward_model", "curves", "probabilities", "attention"):
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert list((out / "tensorboard").glob("**/events.*"))
    assert json.loads((out / "config.json").read_text())["quick"] is True


def test_the_last_thing_printed_is_the_table(run):
    printed = run[1]
    assert printed.index("likely first digits") < printed.index("for each first digit") < printed.index("policy  ")


@pytest.fixture(scope="module")
def finetuned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finetune_gym")
    command = [sys.executable, str(EXAMPLES / "finetune_gym.py"), "--quick", "--processes", "1", "--out", "out"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return folder / "out", result.stdout


class TestFinetuneGym:
    def test_every_run_and_seed_has_its_figures(self, finetuned):
        with (finetuned[0] / "figures.csv").open() as stream:
            rows = {(row["run"], row["seed"]): row for row in csv.DictReader(stream)}
        assert rows.keys() == {(run, s) for run in ("imitated", "no leash", "constant", "adaptive") for s in "01"}
        for (run, _), row in rows.items():
            assert -2000 < float(row["true_return"]) < 0
            assert -1 < float(row["paid"]) < 0
            assert (float(row["kl_reference"]) > 0) == (run != "imitated")

    def test_curves_and_picture(self, finetuned):
        out, _ = finetuned

        def curve(name):
            (file,) = out.glob(f"metrics/**/{name}.csv")
            return [float(line.split(",")[1]) for line in file.read_text().split()]

        for name in ("true_return", "paid", "kl_reference", "kl_old_policy"):
            assert len(curve(f"constant/1/{name}")) == 3
        assert curve("no leash/0/coeff") == [0.0] * 3
        assert curve("constant/0/coeff") == pytest.approx([0.1] * 3)
        adaptive = curve("adaptive/0/coeff")
        assert adaptive[0] == pytest.approx(0.05)
        assert adaptive[1] != adaptive[0]
        assert (out / "finetune_gym.png").read_bytes().startswith(b"\x89PNG")
        assert json.loads((out / "config.json").read_text())["quick"] is True

    def test_the_last_thing_printed_is_the_table(self, finetuned):
        printed = finetuned[1]
        assert (
            printed.index("true return")
            < printed.index("imitated")
            < printed.index("adaptive")
            < printed.index("after")
        )

    def test_the_temptation_pays_for_rest_and_keeps_the_task(self, gym_script):
        step = TensorDict(reward=torch.full((3, 1), -5.0), batch_size=3)
        batch: Any = TensorDict(action=torch.tensor([[0.0], [1.0], [-9.0]]), next=step, batch_size=3)
        tempted = gym_script.tempt(batch)["next"]
        assert tempted["reward"].flatten().tolist() == [0.0, -0.25, -1.0]
        assert tempted["true_reward"].flatten().tolist() == [-5.0] * 3
        assert set(batch["next"].keys()) == {"reward"}
        assert (batch["next", "reward"] == -5).all()

    def test_what_is_imitated_swings_up(self, gym_script):
        policy = TensorDictModule(gym_script.controller, ["observation"], ["action"])
        steps = gym_script.make_env(gym_script.Args(envs=4), seed=0).rollout(200, policy)
        assert (steps["next", "observation"][:, -50:, 0] > 0.95).all()  # cosine of the angle: up, and held there
        assert steps["next", "reward"].sum(1).mean() > -400  # hanging costs about 1200


@pytest.fixture
def gym_script(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("finetune_gym")


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("digit_rlhf")


def test_no_stage_trains_on_a_heldout_prompt(script):
    train, heldout = script.split_prompts(DigitLanguage(), script.Args(heldout_prompts=100))
    assert len(train) == 9900
    assert len(heldout) == 100
    assert len(torch.cat([train, heldout]).unique(dim=0)) == 10_000
    assert heldout[:2].tolist() == [[5, 7, 1, 5], [0, 2, 8, 6]]  # those that the pictures and checks show


@pytest.mark.parametrize("heldout_prompts", [1, 10_000])
def test_a_split_without_prompts_on_both_sides_is_refused(script, heldout_prompts):
    with pytest.raises(SystemExit, match="--heldout-prompts must be from 2 to 9999"):
        script.split_prompts(DigitLanguage(), script.Args(heldout_prompts=heldout_prompts))


def test_pairs_differ_in_the_first_digit_alone(script):
    language = DigitLanguage()
    prompts = language.sample_prompts(2000)
    accepted, rejected = script.preference_pairs(language, prompts)
    first = language.context_length
    assert (accepted[:, first] == language.preferred_token(prompts)).all()
    assert (rejected[:, first] != accepted[:, first]).all()
    assert ((rejected[:, first] >= 0) & (rejected[:, first] < language.vocab_size)).all()
    others = [i for i in range(language.text_length) if i != first]
    assert torch.equal(accepted[:, others], rejected[:, others])
