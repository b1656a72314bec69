"""What the examples share: options, folders, runs that are stopped and resumed, loggers."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import fields, replace

import pytest
import torch
from torch import nn

from tests.scripts import ROOT, load

DIGITS = "examples/digit_rlhf.py"
TINY = (
    "--lm-iterations 2 --lm-batch 16 --heldout-prompts 2 --exact-prompts 1 --adaptive-prompts 1 "
    "--ppo-responses 16 --ppo-minibatch 16 --rm-iterations 2 --rm-batch 16 --rm-heldout-pairs 20 "
    "--ppo-batches 1"
)


class Killed(Exception):
    pass


@pytest.fixture
def running():
    return load("examples/running.py")


@pytest.fixture
def script():
    return load(DIGITS)


def read(script, monkeypatch, options):
    monkeypatch.setattr(sys, "argv", ["digit_rlhf.py", *options.split()])
    return script.read_options(script.Options, script.__doc__, {"quick": script.QUICK})


class TestOptions:
    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ("--ppo-lr -1", "--ppo-lr must be above 0 and finite, got -1.0."),
            ("--ppo-lr nan", "--ppo-lr must be above 0 and finite, got nan."),
            ("--target-kl inf", "--target-kl must be above 0 and finite, got inf."),
            ("--rm-centring -0.1", "--rm-centring must be at least 0 and finite, got -0.1."),
            ("--lm-beta2 1", "--lm-beta2 must be at least 0 and below 1, got 1.0."),
            ("--ppo-batches 0", "--ppo-batches must be at least 1, got 0."),
            ("--quick --ppo-batches 0", "--ppo-batches must be at least 1, got 0."),
            ("--seed -1", "--seed must be at least 0, got -1."),
            ("--ppo-batches 1.5", "invalid literal for int"),
            ("--logger printer", "invalid choice 'printer' for argument '--logger'"),
            ("--batches 3", "--batches"),
        ],
    )
    def test_what_cannot_be_meant_is_refused(self, script, monkeypatch, capsys, given, message):
        with pytest.raises(SystemExit) as stop:
            read(script, monkeypatch, given)
        assert stop.value.code == 2
        shown = re.sub(r"[│\s]+", " ", capsys.readouterr().err)  # without the frame around it
        assert message in shown

    def test_quick_changes_defaults_only(self, script, monkeypatch):
        usual = read(script, monkeypatch, "")
        assert usual == script.Options()
        quick = read(script, monkeypatch, "--quick")
        assert quick == replace(usual, quick=True, **script.QUICK)
        given = read(script, monkeypatch, f"--quick --ppo-batches {usual.ppo_batches} --seed 3")
        assert given == replace(quick, ppo_batches=usual.ppo_batches, seed=3)

    def test_every_option_has_its_help(self, script, monkeypatch, capsys):
        monkeypatch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as stop:
            read(script, monkeypatch, "--help")
        assert stop.value.code == 0
        shown = re.sub(r"[│\s]+", " ", capsys.readouterr().out)
        for name in (field.name for field in fields(script.Options)):
            assert f"--{name.replace('_', '-')}" in shown
        assert "Initial learning rate of the policy; it decays to zero. (default: 0.001)" in shown


class TestFolder:
    def options(self, running, out, **changes):
        return running.JobOptions(out=out / "job", **changes)

    def test_a_used_folder_is_refused_or_resumed(self, running, tmp_path):
        options = self.options(running, tmp_path, seed=1)
        assert running.open_folder(options) == options.out
        assert json.loads((options.out / "config.json").read_text())["seed"] == 1
        with pytest.raises(SystemExit, match=r"job is in use: .* or continue with --resume"):
            running.open_folder(options)
        running.open_folder(replace(options, resume=True, threads=2, logger="tensorboard"))
        with pytest.raises(SystemExit, match=r"results of other settings \(--quick, --seed\)"):
            running.open_folder(replace(options, resume=True, seed=2, quick=True))

    def test_a_folder_of_something_else_is_never_touched(self, running, tmp_path):
        options = self.options(running, tmp_path, resume=True)
        options.out.mkdir()
        (options.out / "thesis.tex").write_text("mine")
        with pytest.raises(SystemExit, match="has no config.json to resume"):
            running.open_folder(options)
        assert [file.name for file in options.out.iterdir()] == ["thesis.tex"]

    def test_a_failed_write_leaves_the_former_file(self, running, tmp_path):
        file = tmp_path / "table.json"
        running.write_json(file, [1])
        with pytest.raises(TypeError, match="not JSON serializable"):
            running.write_json(file, object())

        def write_half() -> None:
            with running.replacing(file) as part:
                part.write_text("half a ta")
                raise Killed

        with pytest.raises(Killed):
            write_half()
        assert json.loads(file.read_text()) == [1]
        assert list(tmp_path.iterdir()) == [file]

    def test_a_result_is_made_once(self, running, tmp_path):
        file, made = tmp_path / "part" / "result.json", []

        def make():
            made.append(1)
            (file.parent / "checkpoints").mkdir(parents=True)
            return {"value": 2.5}

        first = running.once(file, make)
        assert first["value"] == 2.5
        assert first["seconds"] >= 0 <= first["cpu_seconds"]
        assert running.once(file, make) == first
        assert made == [1]
        assert [path.name for path in file.parent.iterdir()] == ["result.json"]


class Training:
    """A small training whose result depends on weights, moments, schedule and random numbers."""

    def __init__(self, running, out, **options):
        torch.manual_seed(0)
        options = running.JobOptions(out=out, checkpoint_every=options.pop("every", 0), **options)
        self.run = running.Run("part", options)
        self.model = nn.Linear(3, 1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.1, total_steps=6)
        self.saved: list[int] = []

    def train(self, stop=lambda step: None, total=6):
        steps = self.run.steps(
            total,
            lambda folder: self.saved.append(len(self.run.curves["loss"])),
            model=self.model,
            optimizer=self.optimizer,
            schedule=self.schedule,
        )
        for step in steps:
            loss = self.model(torch.randn(4, 3)).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            self.run.log(step, "loss {loss:.3f}", loss=loss.item())
            stop(step)
        return self

    def result(self):
        return {k: v.tolist() for k, v in self.model.state_dict().items()}, self.run.curves


def kill(step):
    raise Killed


def interrupt(step):
    os.kill(os.getpid(), signal.SIGINT)


class TestRun:
    @pytest.fixture
    def whole(self, running, tmp_path):
        return Training(running, tmp_path / "whole").train().result()

    @pytest.mark.parametrize("last", range(5))
    def test_killed_after_any_step_it_goes_on_with_the_same_numbers(
        self, running, tmp_path, whole, last
    ):
        with pytest.raises(Killed):  # a step later, before that step is saved
            Training(running, tmp_path).train(lambda step: kill(step) if step > last else None)
        resumed = Training(running, tmp_path)
        assert resumed.train().result() == whole
        assert resumed.saved == [6]
        rows = (tmp_path / "log" / "part" / "scalars" / "loss.csv").read_text().split()
        assert [int(row.split(",")[0]) for row in rows] == list(range(6))

    def test_killed_before_the_model_is_saved_it_is_saved_later(self, running, tmp_path, whole):
        first = Training(running, tmp_path)
        first.saved = None  # type: ignore[assignment]  # as if killed in the call of `save`
        with pytest.raises(AttributeError):
            first.train()
        resumed = Training(running, tmp_path)
        assert resumed.train().result() == whole
        assert resumed.saved == [6]

    def test_ctrl_c_ends_after_the_step_and_saves(self, running, tmp_path, whole):
        former = signal.getsignal(signal.SIGINT)
        first = Training(running, tmp_path, every=1e6)
        with pytest.raises(running.Stopped, match="part after 3 of 6 steps"):
            first.train(lambda step: interrupt(step) if step == 2 else None)
        assert first.saved == [3]
        assert signal.getsignal(signal.SIGINT) is former
        assert Training(running, tmp_path, every=1e6).train().result() == whole

    def test_a_second_ctrl_c_does_not_wait_for_the_step(self, running, tmp_path):
        def twice(step):
            interrupt(step)
            interrupt(step)

        with pytest.raises(KeyboardInterrupt) as stop:
            Training(running, tmp_path).train(twice)
        assert not isinstance(stop.value, running.Stopped)

    def test_ctrl_c_leaves_one_line_instead_of_a_traceback(self, running, tmp_path, capsys):
        with pytest.raises(SystemExit) as stop, running.stops_cleanly(tmp_path):
            Training(running, tmp_path).train(interrupt)
        assert stop.value.code == 130
        expected = f"\nStopped part after 1 of 6 steps. Give --out {tmp_path} --resume to continue."
        assert capsys.readouterr().err == expected + "\n"  # no progress bar: it is no terminal

    def test_checkpoints_are_saved_as_often_as_asked_for(self, running, tmp_path, monkeypatch):
        clock = iter(range(0, 1000, 10))
        monkeypatch.setattr(running.time, "monotonic", lambda: next(clock))
        with pytest.raises(Killed):
            Training(running, tmp_path, every=25).train(lambda s: kill(s) if s == 5 else None)
        files = sorted((tmp_path / "part" / "checkpoints").iterdir())
        assert [int(file.stem.split("-")[1]) for file in files] == [3]

    @pytest.mark.parametrize("damage", ["empty", "cut", "changed", "other"])
    def test_a_damaged_checkpoint_is_not_used(self, running, tmp_path, capsys, whole, damage):
        with pytest.raises(Killed):
            Training(running, tmp_path).train(lambda step: kill(step) if step == 4 else None)
        _, last = sorted((tmp_path / "part" / "checkpoints").iterdir())
        self.damage(last, damage)
        resumed = Training(running, tmp_path)
        assert resumed.train().result() == whole
        assert "000000000004.torchrl cannot be read (" in capsys.readouterr().err

    def test_without_an_intact_checkpoint_it_does_not_start(self, running, tmp_path):
        with pytest.raises(Killed):
            Training(running, tmp_path).train(lambda step: kill(step) if step == 4 else None)
        for file in (tmp_path / "part" / "checkpoints").iterdir():
            self.damage(file, "changed")
        with pytest.raises(SystemExit, match="No checkpoint in .* can be read: remove that folder"):
            Training(running, tmp_path).train()

    def damage(self, file, how):
        content = bytearray(file.read_bytes())
        middle = len(content) // 2
        content[middle] ^= 1
        changed = {"changed": bytes(content), "cut": file.read_bytes()[:-100], "empty": b""}
        file.write_bytes(changed.get(how, b"this is not an archive" * 100))

    def test_tensorboard(self, running, tmp_path):
        Training(running, tmp_path, logger="tensorboard").train()
        assert list((tmp_path / "log" / "part").glob("events.*"))

    @pytest.mark.slow
    def test_wandb_offline(self, running, tmp_path, monkeypatch):
        monkeypatch.setenv("WANDB_MODE", "offline")
        Training(running, tmp_path, logger="wandb").train()
        (folder,) = (tmp_path / "log" / "wandb").glob("offline-run-*")
        assert list(folder.glob("run-*.wandb"))


class TestWorkers:
    def test_one_process_is_this_one_and_works_when_asked(self, running):
        calls = []
        with running.Workers(1) as workers:
            finish = workers.start(calls.append, 3)
            assert calls == []
            finish()
        assert calls == [3]

    @pytest.mark.slow
    def test_an_error_ends_the_others(self, running, monkeypatch):
        monkeypatch.syspath_prepend(ROOT / "examples")  # for the workers
        began = time.monotonic()

        def work() -> None:
            with running.Workers(2) as workers:
                workers.start(time.sleep, 600)
                workers.start(math.sqrt, -1)()

        with pytest.raises(ValueError, match="math domain|nonnegative"):
            work()
        assert time.monotonic() - began < 300  # only shows a hang


@pytest.mark.slow
def test_ctrl_c_from_the_keyboard_with_two_processes(tmp_path):
    """The signal reaches all processes of the group, as that of a terminal does."""
    options = f"{TINY} --adaptive-batches 100000 --processes 2 --checkpoint-every 1e6 --out out"
    command = [sys.executable, str(ROOT / DIGITS), *options.split()]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    job = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    rows, deadline = tmp_path / "out" / "log" / "adaptive" / "scalars" / "coeff.csv", 600
    while not (rows.exists() and rows.read_text()) and deadline:
        time.sleep(1)
        deadline -= 1
    os.killpg(job.pid, signal.SIGINT)
    _, errors = job.communicate(timeout=300)
    assert job.returncode == 130, errors
    assert "Traceback" not in errors
    assert "it/s" not in errors  # progress bars are for terminals
    assert errors.endswith("Give --out out --resume to continue.\n")
    assert list((tmp_path / "out" / "adaptive" / "checkpoints").iterdir())
    assert (tmp_path / "out" / "adaptive" / "model.safetensors").exists()
