"""Full disks, read-only folders, killed processes, several at once: the last good file is kept."""

import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torchrl.checkpoint import CheckpointRotation

from tests.trust import runs
from tests.trust.runs import new_gpt, same_model
from torchrl_kl import GPT, RunCheckpoint, checkpoint


def save_bytes(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture
def full_disk(tmp_path) -> Iterator[Path]:
    """A folder on a disk of 100 kB, if this process may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", folder]
    mounted = subprocess.run(mount, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"this process may not mount a file system: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def large() -> GPT:
    return GPT(11, 8, n_embd=96, n_layer=1)  # 460 kB


class TestFullDisk:
    def test_a_model_that_does_not_fit(self, full_disk):
        new_gpt().save_pretrained(full_disk)
        before = save_bytes(full_disk)
        with pytest.raises(OSError, match="No space left on device"):
            large().save_pretrained(full_disk)
        assert save_bytes(full_disk) == before

    def test_a_checkpoint_that_does_not_fit(self, full_disk):
        rotation, progress = CheckpointRotation(full_disk, keep_last=2), {"step": 1}
        rotation.save(RunCheckpoint(model=new_gpt(), progress=progress), step=1)
        before = save_bytes(full_disk)
        with pytest.raises(OSError, match="No space left on device"):
            rotation.save(RunCheckpoint(model=large(), progress={"step": 2}), step=2)
        assert save_bytes(full_disk) == before
        progress.clear()
        rotation.load_latest(RunCheckpoint(model=new_gpt(1), progress=progress))
        assert progress == {"step": 1}

    def test_a_folder_that_is_read_only(self, full_disk):
        new_gpt().save_pretrained(full_disk)
        RunCheckpoint(model=new_gpt()).save(full_disk / "run")
        before = save_bytes(full_disk)
        subprocess.run(["mount", "-o", "remount,ro", full_disk], check=True)
        with pytest.raises(OSError, match="Read-only file system"):
            new_gpt(1).save_pretrained(full_disk)
        with pytest.raises(OSError, match="Read-only file system"):
            RunCheckpoint(model=new_gpt(1)).save(full_disk / "run")
        assert save_bytes(full_disk) == before
        GPT.from_pretrained(full_disk)
        RunCheckpoint(model=new_gpt(1)).load(full_disk / "run")


class Killed(BaseException):
    """In place of SIGKILL: nothing is cleaned up."""


class TestKilledSave:
    @pytest.mark.parametrize("saves", [1, 2])
    def test_a_model_between_its_two_files(self, tmp_path, monkeypatch, saves):
        """At each call that changes a file, in a first save and in one over an older model."""
        killed_at = 0
        for killed_at in range(20):
            folder = tmp_path / str(killed_at)
            if saves == 2:
                new_gpt(0).save_pretrained(folder)
            if not killed_in(
                monkeypatch, killed_at, lambda to=folder: new_gpt(1).save_pretrained(to)
            ):
                break
            # Killed once more, at every place.
            for again in range(killed_at + 1):
                killed_in(monkeypatch, again, lambda to=folder: new_gpt(2).save_pretrained(to))
                try:
                    loaded = GPT.from_pretrained(folder)
                except FileNotFoundError:
                    assert saves == 1
                else:
                    assert any(same_model(loaded, new_gpt(seed)) for seed in range(3))
            new_gpt(3).save_pretrained(folder)
            assert same_model(GPT.from_pretrained(folder), new_gpt(3))
            assert sorted(save_bytes(folder)) == ["config.json", "model.safetensors"]
        assert killed_at > 4

    def test_a_checkpoint(self, tmp_path, monkeypatch):
        """At each call that changes a file, over a file of the same name."""
        monkeypatch.setattr(checkpoint, "_NEW", -1.0)  # what is left is removed at once
        path = tmp_path / "run"
        killed_at = 0
        for killed_at in range(40):
            RunCheckpoint(model=new_gpt(0)).save(path)
            if not killed_in(monkeypatch, killed_at, RunCheckpoint(model=new_gpt(1)).save, path):
                break
            found = new_gpt(2)
            RunCheckpoint(model=found).load(path)
            assert same_model(found, new_gpt(0)) or same_model(found, new_gpt(1))
        assert killed_at > 8
        assert [file.name for file in tmp_path.iterdir()] == ["run"]

    @pytest.mark.parametrize("other", ["seed-0", "seed-1"])
    def test_two_runs_save_to_one_folder_at_the_same_time(self, tmp_path, other):
        class Slow(nn.Module):
            def state_dict(self, *args, **kwargs):  # meanwhile another process saves
                RunCheckpoint(model=new_gpt(1)).save(tmp_path / other)
                return super().state_dict(*args, **kwargs)

        RunCheckpoint(model=new_gpt(0), slow=Slow()).save(tmp_path / "seed-0")
        RunCheckpoint(model=(found := new_gpt(2)), slow=nn.Module()).load(tmp_path / "seed-0")
        assert same_model(found, new_gpt(0))
        assert {file.name for file in tmp_path.iterdir()} == {"seed-0", other}


def killed_in(monkeypatch, n_calls: int, function: Any, *args: Any) -> bool:
    """Runs a function until the call of that number which changes a file; whether it came to it."""
    count = 0

    def counted(call: Any) -> Any:
        def counting(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            if count >= n_calls:  # a killed process does nothing more
                raise Killed
            count += 1
            return call(*args, **kwargs)

        return counting

    with monkeypatch.context() as patch:
        for name in ("replace", "fsync", "unlink", "mkdir"):
            patch.setattr(os, name, counted(getattr(os, name)))
        for name in ("unlink", "mkdir", "open"):
            patch.setattr(Path, name, counted(getattr(Path, name)))
        patch.setattr(shutil, "rmtree", counted(shutil.rmtree))
        try:
            function(*args)
        except Killed:
            return True
    return False


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("n_kills", "seed"), [(4, 0), pytest.param(20, 1, marks=pytest.mark.slow)])
def test_a_run_that_is_killed_again_and_again(tmp_path, monkeypatch, n_kills, seed):
    """By SIGKILL, at random moments of steps and of saves."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.trust.runs"])
    rng, journal, in_save, saved = random.Random(seed), tmp_path / "journal", 0, 0
    left: set[str] = set()
    for n in range(n_kills + 1):
        last = n == n_kills
        until = saved + 3 if last else 10**6
        process = context.Process(target=runs.train, args=(tmp_path, until))
        process.start()
        while process.is_alive() and resumptions(journal) <= n:
            time.sleep(0.01)
        if not last:
            time.sleep(rng.uniform(0, 1))
            process.kill()
        process.join()
        assert process.exitcode == (0 if last else -signal.SIGKILL)
        lines = [line.split() for line in journal.read_text().splitlines()]
        resumed = [int(step) for word, step in lines if word == "resumed"]
        # The kill may come after the file is in place, and before the journal says so.
        assert resumed[-1] in (saved, saved + 1)
        saved = int(lines[-1][1])
        former, left = left, {file.name for file in (tmp_path / "checkpoints").glob(".*")}
        in_save += bool(left - former)
    print(f"{n_kills} kills, {in_save} of them during a save, {saved} steps")
    assert resumptions(journal) == n_kills + 1
    assert in_save or n_kills < 20
    uninterrupted, curve = runs.Responses(0), []
    CheckpointRotation(tmp_path / "checkpoints", keep_last=2).load_latest(
        RunCheckpoint(curve=curve)
    )
    assert curve == runs.go_on(uninterrupted, saved)
    assert same_model(GPT.from_pretrained(tmp_path / "model"), uninterrupted.model)


def resumptions(journal: Path) -> int:
    return journal.read_text().count("resumed") if journal.exists() else 0
