"""The RLHF job on the digit language, at a small size."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.scripts import lanes, load, run_command, run_here
from torchrl_kl import GPT
from torchrl_kl.envs import DigitLanguage

RUNS = ("constant", "no_penalty", "adaptive")
TINY = (
    "--threads 1 --lm-iterations 2 --lm-batch 16 --heldout-prompts 2 --exact-prompts 1 "
    "--ppo-responses 16 --ppo-minibatch 16 --rm-iterations 2 --rm-batch 16 --rm-heldout-pairs 20 "
    "--ppo-batches 1 --adaptive-batches 2 --adaptive-prompts 1"
)

digit_run = lanes(
    "examples/digit_rlhf.py",
    f"{TINY} --processes 1 --logger tensorboard",
    "--processes 2 --logger tensorboard",
)


@pytest.fixture
def script():
    return load("examples/digit_rlhf.py")


class TestDigitRLHF:
    def test_models_can_be_loaded(self, digit_run):
        for name in ("language_model", "reward_model", *RUNS):
            assert isinstance(GPT.from_pretrained(digit_run.out / name), GPT)

    def test_report_has_its_figures(self, digit_run):
        report = json.loads((digit_run.out / "report.json").read_text())
        for unit in ("seconds", "cpu_seconds"):
            assert {"language_model", "reward_model", *RUNS} <= report[unit].keys()
        assert report["language_model"]["excess_nats_per_token"] > 0
        assert 0 <= report["reward_model"]["heldout_accuracy"] <= 1
        figures = {"reward", "kl", "kl_per_position", "objective", "optimum", "regret"}
        for run in RUNS:
            assert figures | {"fraction_of_gain", "first_digit_right"} <= report[run].keys()
            assert report[run]["regret"] >= -1e-9
            assert sum(report[run]["kl_per_position"]) == pytest.approx(report[run]["kl"])
        adaptive = {"coeff_mean_last_quarter", "coeff_exact", "coeff_first_within_20_percent"}
        assert adaptive | {"batches", "target"} <= report["adaptive"].keys()

    def test_curves_logs_and_pictures(self, digit_run):
        config = json.loads((digit_run.out / "config.json").read_text())
        sizes = {"constant": config["ppo_batches"], "adaptive": config["adaptive_batches"]}
        for run, n_batches in sizes.items():
            curves = json.loads((digit_run.out / run / "result.json").read_text())["curves"]
            assert curves.keys() == {"reward", "kl_reference", "kl_old_policy", "coeff"}
            for curve in curves.values():
                assert [step for step, _ in curve] == list(range(n_batches))
            assert list((digit_run.out / "log" / run).glob("events.*"))
            assert not (digit_run.out / run / "checkpoints").exists()
        for name in ("reward_model", "curves", "probabilities"):
            assert (digit_run.out / f"{name}.png").read_bytes().startswith(b"\x89PNG")

    def test_the_last_thing_printed_is_the_table(self, digit_run):
        printed = digit_run.printed
        parts = ("likely first digits", "for each first digit", "policy  ")
        assert sorted(parts, key=printed.index) == list(parts)

    def test_a_stage_says_beforehand_how_long_it_takes_and_then_what_came_out(self, digit_run):
        printed = digit_run.printed
        parts = ("language model: about ", "nats per token above", "reward model: about ", "PPO")
        assert sorted(parts, key=printed.index) == list(parts)

    def test_table_and_picture_of_several_seeds(self, digit_run, tmp_path):
        out = digit_run.out
        printed = run_here("examples/digit_rlhf_report.py", tmp_path, f"{out} {out}")
        assert printed.count(f"| {out.name} | {out.name} |") == 1
        kl = json.loads((out / "report.json").read_text())["adaptive"]["kl"]
        assert f"| adaptive: KL per response | {kl:.3f} | {kl:.3f} |" in printed
        assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")

    def test_a_job_stopped_after_any_step_and_resumed_is_the_uninterrupted_one(
        self, script, tmp_path, monkeypatch, capsys
    ):
        options = f"{TINY} --processes 1 --rm-iterations 2 --adaptive-batches 3"
        run_here("examples/digit_rlhf.py", tmp_path, f"{options} --out whole")
        log = script.Run.log

        def log_and_stop(run, *args, **values):
            log(run, *args, **values)
            os.kill(os.getpid(), signal.SIGINT)

        monkeypatch.setattr(script.Run, "log", log_and_stop)
        resume = f"{options} --out parts --resume"
        for _ in range(8):  # the language model logs only the first of its 2 steps
            with pytest.raises(SystemExit) as stop:
                run_here("examples/digit_rlhf.py", tmp_path, resume)
            assert stop.value.code == 130
        assert capsys.readouterr().err.count("--out parts --resume to continue.") == 8
        run_here("examples/digit_rlhf.py", tmp_path, resume)
        whole, parts = results(tmp_path / "whole"), results(tmp_path / "parts")
        assert len(whole) == 5 + 16 + 5  # weights, logs and reports
        assert whole == parts

    @pytest.mark.slow
    def test_the_numbers_do_not_depend_on_the_number_of_processes(self, tmp_path):
        for processes in (1, 2):
            options = f"{TINY} --processes {processes} --out out{processes}"
            run_command("examples/digit_rlhf.py", tmp_path, options)
        assert results(tmp_path / "out1") == results(tmp_path / "out2")

    @pytest.mark.slow
    @pytest.mark.parametrize("processes", [1, 2])
    def test_an_error_in_a_run_ends_the_job(self, tmp_path, processes):
        # The exact coefficient of a target beyond what any policy can reach.
        options = f"{TINY} --processes {processes} --target-kl 1000"
        with pytest.raises(AssertionError, match="must be above 0 and below"):
            run_command("examples/digit_rlhf.py", tmp_path, options)


def results(out: Path) -> dict[str, Any]:
    """What a job has computed: weights, logs and figures, without the seconds."""
    files = [*out.glob("*/model.safetensors"), *out.glob("log/**/*.csv")]
    found: dict[str, Any] = {str(file.relative_to(out)): file.read_bytes() for file in files}
    report = json.loads((out / "report.json").read_text())
    return found | {k: v for k, v in report.items() if not k.endswith("seconds")}


@pytest.mark.parametrize("after", [(), (11,)])
def test_shared_prefixes_give_the_outputs_of_whole_texts(script, after):
    gpt = GPT(12, 10, n_layer=2).double()
    texts = DigitLanguage().sample(torch.randint(10, (4, 4))).repeat_interleave(3, 0)
    texts[:, -1] = torch.arange(12) % 11
    whole = torch.cat([texts, torch.full((12, len(after)), 11)], 1)
    outputs = script.last_outputs(gpt, texts, *after)
    # Sums of some hundred products of numbers of about 1, in float64.
    torch.testing.assert_close(outputs, gpt(whole)[:, -1], rtol=0, atol=1e-12)


def test_no_stage_trains_on_a_heldout_prompt(script):
    train, heldout = script.split_prompts(DigitLanguage(), script.Options(heldout_prompts=100))
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
        script.split_prompts(DigitLanguage(), script.Options(heldout_prompts=heldout_prompts))


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
