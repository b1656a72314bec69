"""What the examples share: options, the folder of results, training loops and their logs."""

import json
import re
import sys
from dataclasses import fields, replace

import pytest

from tests.scripts import load

SCRIPTS = ["adaptive_vs_static", "collectors", "digit_rlhf", "finetune_gym", "grpo_chat"]
SCRIPTS += ["movie_reviews", "chat_model"]


@pytest.fixture(scope="module")
def running():
    return load("examples/running.py")


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_explains_every_option(running, monkeypatch, capsys, name):
    for needed in ("transformers", "peft", "tokenizers"):
        pytest.importorskip(needed)
    if name == "chat_model":
        pytest.importorskip("vaderSentiment")
        pytest.importorskip("afinn")
    script = load(f"examples/{name}.py")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as stop:
        running.read_options(script.Args, script.__doc__, quick=script.QUICK)
    assert stop.value.code == 0
    shown = re.sub(r"[│\s]+", " ", capsys.readouterr().out)
    for field in fields(script.Args):
        flag = re.escape("--" + field.name.replace("_", "-"))
        assert re.search(flag + r"\b.{0,80}? [A-Z][\w'-]* [a-z]", shown), field.name


def test_quick_changes_defaults_only(running, monkeypatch):
    script = load("examples/digit_rlhf.py")

    def read(options):
        monkeypatch.setattr(sys, "argv", ["digit_rlhf.py", *options.split()])
        return running.read_options(script.Args, None, quick=script.QUICK)

    usual = read("")
    quick = read("--quick")
    assert quick == replace(usual, quick=True, **script.QUICK)
    given = read(f"--quick --ppo-batches {usual.ppo_batches} --seed 3")
    assert given == replace(quick, ppo_batches=usual.ppo_batches, seed=3)


def test_a_used_folder_is_refused(running, tmp_path):
    options = running.JobOptions(out=tmp_path / "job", seed=1)
    assert running.open_folder(options) == options.out
    assert json.loads((options.out / "config.json").read_text())["seed"] == 1
    with pytest.raises(SystemExit, match="job is in use: choose another folder, or remove it"):
        running.open_folder(options)


def test_without_a_bar_a_line_says_where_a_run_is(running, tmp_path, capsys):
    run = running.Run("a_part", running.JobOptions(out=tmp_path), every=2)
    for step in run.steps(5):
        run.log(step, "loss {loss:.1f}", loss=step / 2)
    assert capsys.readouterr().err == "a part 2/5: loss 0.5\na part 4/5: loss 1.5\n"


@pytest.mark.parametrize(("logger", "files"), [("csv", "**/loss.csv"), ("tensorboard", "events.*")])
def test_a_run_logs_and_keeps_its_curves(running, tmp_path, logger, files):
    run = running.Run("part", running.JobOptions(out=tmp_path, logger=logger))
    for step in run.steps(3):
        run.log(step, "loss {loss:.1f}", loss=step / 2)
    assert run.curves == {"loss": [0.0, 0.5, 1.0]}
    (file,) = (tmp_path / "log" / "part").glob(files)
    if logger == "csv":
        assert [float(row.split(",")[1]) for row in file.read_text().split()] == [0.0, 0.5, 1.0]
