"""The examples run from the command line at a small size and leave behind what they promise."""

import csv
import importlib
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from torchrl_kl import GPT, Enumeration
from torchrl_kl.envs import DigitLanguage

EXAMPLES = Path(__file__).parents[1] / "examples"


def run_example(name, folder, *options):
    """Runs an example at a small size into folder/out; what it printed."""
    command = [
        sys.executable,
        str(EXAMPLES / name),
        "--quick",
        "--threads",
        "1",
        "--out",
        "out",
        *options,
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("digit_rlhf")
    return folder / "out", run_example("digit_rlhf.py", folder, "--logger", "tensorboard")


def test_models_can_be_loaded(run):
    out, _ = run
    for name in (
        "language_model",
        "reward_model",
        "policy_beta1",
        "policy_beta0",
        "policy_adaptive",
    ):
        assert isinstance(GPT.from_pretrained(out / name), GPT)


def test_report_has_its_figures(run):
    report = json.loads((run[0] / "report.json").read_text())
    assert {"language_model", "reward_model", "beta1", "beta0", "adaptive"} <= report[
        "seconds"
    ].keys()
    assert report["language_model"]["excess_nats_per_token"] > 0
    assert 0 <= report["reward_model"]["heldout_accuracy"] <= 1
    figures = {
        "reward",
        "kl",
        "kl_per_position",
        "objective",
        "optimum",
        "regret",
        "fraction_of_gain",
    }
    for policy in ("beta1", "beta0", "adaptive"):
        assert figures | {"first_digit_right"} <= report[policy].keys()
        assert report[policy]["regret"] >= -1e-9
        assert sum(report[policy]["kl_per_position"]) == pytest.approx(report[policy]["kl"])
    adaptive = {
        "coeff_mean_last_quarter",
        "coeff_exact",
        "coeff_first_within_20_percent",
        "batches",
        "target",
    }
    assert adaptive <= report["adaptive"].keys()


def test_metrics_and_pictures(run):
    out, _ = run
    with (out / "metrics.csv").open() as stream:
        metrics = {row["metric"] for row in csv.DictReader(stream)}
    for policy in ("beta1", "beta0", "adaptive"):
        assert {
            f"{policy}/{name}" for name in ("reward", "kl_reference", "kl_old_policy", "coeff")
        } <= metrics
    for name in ("reward_model", "curves", "probabilities", "attention"):
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert list((out / "tensorboard").glob("**/events.*"))
    assert json.loads((out / "config.json").read_text())["quick"] is True


def test_the_last_thing_printed_is_the_table(run):
    printed = run[1]
    assert (
        printed.index("likely first digits")
        < printed.index("for each first digit")
        < printed.index("policy  ")
    )


@pytest.fixture(scope="module")
def finetuned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finetune_gym")
    command = [
        sys.executable,
        str(EXAMPLES / "finetune_gym.py"),
        "--quick",
        "--processes",
        "1",
        "--out",
        "out",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    return folder / "out", result.stdout


class TestFinetuneGym:
    def test_every_run_and_seed_has_its_figures(self, finetuned):
        with (finetuned[0] / "figures.csv").open() as stream:
            rows = {(row["run"], row["seed"]): row for row in csv.DictReader(stream)}
        assert rows.keys() == {
            (run, s) for run in ("imitated", "no leash", "constant", "adaptive") for s in "01"
        }
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
        batch: Any = TensorDict(
            action=torch.tensor([[0.0], [1.0], [-9.0]]), next=step, batch_size=3
        )
        tempted = gym_script.tempt(batch)["next"]
        assert tempted["reward"].flatten().tolist() == [0.0, -0.25, -1.0]
        assert tempted["true_reward"].flatten().tolist() == [-5.0] * 3
        assert set(batch["next"].keys()) == {"reward"}
        assert (batch["next", "reward"] == -5).all()

    def test_what_is_imitated_swings_up(self, gym_script):
        policy = TensorDictModule(gym_script.controller, ["observation"], ["action"])
        steps = gym_script.make_env(gym_script.Args(envs=4), seed=0).rollout(200, policy)
        assert (
            steps["next", "observation"][:, -50:, 0] > 0.95
        ).all()  # cosine of the angle: up, and held there
        assert steps["next", "reward"].sum(1).mean() > -400  # hanging costs about 1200


@pytest.fixture
def gym_script(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("finetune_gym")


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("digit_rlhf")


@pytest.fixture
def study(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("adaptive_vs_static")


def test_no_stage_trains_on_a_heldout_prompt(script):
    train, heldout = script.split_prompts(DigitLanguage(), script.Args(heldout_prompts=100))
    assert len(train) == 9900
    assert len(heldout) == 100
    assert len(torch.cat([train, heldout]).unique(dim=0)) == 10_000
    assert heldout[:2].tolist() == [
        [5, 7, 1, 5],
        [0, 2, 8, 6],
    ]  # those that the pictures and checks show


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


@pytest.fixture(scope="module")
def study_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adaptive_vs_static")
    return folder, run_example("adaptive_vs_static.py", folder)


STUDY_RUNS = [
    *(
        "constant 0.1",
        "constant 0.3",
        "constant 1",
        "budget",
        "adaptive 0.05",
        "exponential 0.05",
        "PID 0.05",
    ),
    *("adaptive 2", "exponential 2", "PID 2"),
]


def test_the_study_leaves_a_result_for_each_run(study_run):
    folder, printed = study_run
    for name in STUDY_RUNS:
        result = json.loads(
            (folder / "out" / "seed0" / f"{name.replace(' ', '_')}.json").read_text()
        )
        curves, final = result["curves"], result["final"]
        assert [len(curves[name]) for name in ("reward", "kl", "coeff")] == [4, 4, 4]
        assert [batch for batch, _ in curves["perplexity"]] == [2, 4]
        assert curves["perplexity"][-1][1] == final["perplexity"]
        assert sum(final["kl_per_position"]) == pytest.approx(final["kl"])
        assert final["reward"] <= final["frontier"] + 1e-9
        if name.startswith("constant"):
            assert curves["coeff"] == pytest.approx(
                [float(name.split()[1])] * 4, rel=1e-6
            )  # float32, as the reward
        assert f"| {name} |" in printed
    assert (folder / "out" / "adaptive_vs_static.png").read_bytes().startswith(b"\x89PNG")


def test_the_study_does_not_repeat_what_is_there(study_run):
    folder, printed = study_run
    file = folder / "out" / "seed0" / "PID_2.json"
    lost = file.read_text()
    others = {path: path.stat().st_mtime_ns for path in file.parent.rglob("*.*") if path != file}
    file.unlink()
    again = run_example("adaptive_vs_static.py", folder)
    assert {path: path.stat().st_mtime_ns for path in others} == others
    before, after = json.loads(lost), json.loads(file.read_text())
    assert before | {"seconds": 0} == after | {
        "seconds": 0
    }  # whatever ran before it in the process
    assert again.splitlines()[:13] == printed.splitlines()[:13]


def test_the_study_refuses_results_of_other_settings(study, tmp_path):
    study.check_settings(tmp_path, study.Args())
    study.check_settings(tmp_path, study.Args(seed=3, seeds=2, threads=2))
    with pytest.raises(
        SystemExit, match=r"holds results of other settings \(gain, horizon\): choose another --out"
    ):
        study.check_settings(tmp_path, study.Args(gain=0.2, horizon=1e5))


def test_perplexity_of_the_language_to_itself(study):
    language = DigitLanguage()
    contexts = study.add_separator(language.sample_prompts(20), language)
    problem = study.Problem(language, None, None, contexts, None)
    # The next digits are spread like the window's: average the entropy over all that the language can write.
    entropies, texts, probs = [], contexts, torch.full((20,), 1 / 20, dtype=torch.float64)
    for _ in range(language.response_length):
        entropies.append((probs * language.entropy(texts)).sum())
        joint = probs[:, None] * language.next_token_probs(texts)
        rows, tokens = joint.nonzero(as_tuple=True)
        texts, probs = torch.cat([texts[rows], tokens[:, None]], 1), joint[rows, tokens]
    expected = torch.stack(entropies).mean().exp().item()
    assert study.perplexity(study.true_next_token(language), problem) == pytest.approx(
        expected, rel=1e-12
    )
    uniform = study.perplexity(lambda tokens: torch.zeros(len(tokens), language.n_tokens), problem)
    assert uniform == pytest.approx(language.n_tokens, rel=1e-12)


class TestFrontier:
    """Every policy lies on or below the exact frontier, and the optima lie on it."""

    V, R = 3, 2
    PROMPTS = torch.tensor([[0], [1]])

    def table(self, seed, sharpness=1.0):
        """A model with random logits for each context."""
        logits = torch.randn(
            2,
            1 + self.V,
            self.V,
            generator=torch.Generator().manual_seed(seed),
            dtype=torch.float64,
        )
        return lambda texts: (
            sharpness * logits[texts[:, 0], 0 if texts.shape[1] == 1 else 1 + texts[:, 1]]
        )

    def problem(self, seed, fine=True):
        generator = torch.Generator().manual_seed(seed)
        rewards = torch.rand(2, self.V, self.V, generator=generator, dtype=torch.float64)
        rewards = rewards if fine else rewards.round()
        return Enumeration(
            self.table(seed + 1000),
            lambda t: rewards[t[:, 0], t[:, 1], t[:, 2]],
            self.PROMPTS,
            self.R,
        )

    @pytest.mark.parametrize("fine", [True, False], ids=["fine rewards", "rewards 0 or 1"])
    def test_no_policy_lies_above(self, study, fine):
        gaps = []
        for seed in range(40):
            exact = self.problem(seed, fine)
            for sharpness in (0.3, 1.0, 4.0):
                policy = exact.values(self.table(seed + 2000, sharpness), coeff=0.0)
                placed = study.place(policy, exact)
                gaps.append(placed["frontier"] - placed["reward"])
                assert placed["share_of_frontier_gain"] <= 1 + 1e-9
                assert placed["least_kl"] <= placed["kl"] + 1e-6
        assert min(gaps) > -1e-9
        assert (
            max(gaps) > 0.1
        )  # they are no optima: a frontier that follows the policy would not be one

    @pytest.mark.parametrize("coeff", [0.02, 0.1, 0.5, 3.0])
    def test_optima_lie_on_it(self, study, coeff):
        exact = self.problem(7)
        placed = study.place(exact.optimum(coeff), exact)
        assert placed["reward"] == pytest.approx(placed["frontier"], abs=1e-9)
        assert placed["least_kl"] == pytest.approx(placed["kl"], rel=1e-6)
        assert placed["share_of_frontier_gain"] == pytest.approx(1, abs=1e-8)

    def test_beyond_the_limit_more_divergence_buys_nothing(self, study):
        exact = self.problem(7)
        limit = exact.optimum(0.0)
        assert (
            study.frontier_reward(exact, limit.kl + 1)
            == limit.reward
            == pytest.approx(exact.rewards.amax(1).mean())
        )

    def test_a_policy_above_it_is_an_error(self, study):
        exact = self.problem(7)
        optimum = exact.optimum(0.5)
        impossible = replace(optimum, reward=optimum.reward + 1e-6)
        with pytest.raises(
            RuntimeError, match=r"above the frontier's 0\.\d{12}: the exact values are wrong"
        ):
            study.place(impossible, exact)


@pytest.mark.parametrize("options", [("sync", "learner"), ("multi-async", "workers")], ids="-".join)
def test_the_collectors_tell_what_they_did(tmp_path, options):
    collector, where = options
    command = [sys.executable, str(EXAMPLES / "collectors.py"), "--quick", "--threads", "1"]
    command += ["--collector", collector, "--where", where]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    expected = rf"""{collector}, reference with the {where}
frames per second  [0-9]+
coefficients       0\.050 \.\.\. 0\.0[45][0-9]; several in [0-4] of 4 batches
KL                 ([0-9.]+) \(target 0\.5\)
exact regret       ([0-9.]+) at coefficient 0\.[0-9]+
"""
    found = re.fullmatch(expected, result.stdout)
    assert found, result.stdout
    assert float(found[1]) > 0  # the policy has moved
    assert 0 <= float(found[2]) < 1
    assert list(tmp_path.iterdir()) == []


def test_the_collectors_begin_with_a_language_model_that_is_there(tmp_path):
    torch.manual_seed(0)
    language = DigitLanguage()
    GPT(language.n_tokens, language.text_length - 1).save_pretrained(tmp_path / "model")
    command = [
        sys.executable,
        str(EXAMPLES / "collectors.py"),
        "--quick",
        "--threads",
        "1",
        "--reference",
        "model",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert "language model" not in result.stderr  # none was trained
