"""Damaged and foreign files are refused in words, and no code in them is run."""

import copy
import fcntl
import json
import os
import random
import re
import zipfile
from collections import Counter
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tensordict import TensorDict
from torch import nn
from torch.testing import assert_close
from torchrl.checkpoint import (
    Checkpoint,
    CheckpointError,
    GlobalRNGState,
    StateDictCheckpointAdapter,
)
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from tests.trust import mutations
from tests.trust.runs import new_gpt, same_model
from torchrl_kl import GPT, ExponentialKLController, RunCheckpoint

resource = pytest.importorskip("resource")
N_MUTATIONS = 500
MEMORY = 64 * 2**20  # bytes; the files have less than 50,000


class Curve(list):
    """A list of another class."""


def peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def repair(folder: Path) -> None:
    """Both digests are made to fit, as an attacker would."""
    try:
        config = json.loads((folder / "config.json").read_text())
        weights = (folder / "model.safetensors").read_bytes()
        config["weights_sha256"] = sha256(weights).hexdigest()
        config.pop("config_sha256", None)
        text = json.dumps(config, sort_keys=True)
        config["config_sha256"] = sha256(text.encode()).hexdigest()
        (folder / "config.json").write_text(json.dumps(config))
    except (ValueError, TypeError, AttributeError):
        pass  # there is nothing to repair


@pytest.mark.timeout(300)
@pytest.mark.parametrize("repaired", [False, True])
def test_mutated_models(tmp_path, repaired):
    """500 each; if the digests are made to fit, another model of the same weights may load."""
    gpt, outcomes = new_gpt(), Counter[str]()
    gpt.save_pretrained(tmp_path)
    planted, first_peak = tmp_path / "planted", peak_memory()
    files = {name: (tmp_path / name).read_bytes() for name in ("config.json", "model.safetensors")}
    for seed in range(N_MUTATIONS):
        rng = random.Random(seed)
        for name, content in files.items():
            (tmp_path / name).write_bytes(content)
        name = rng.choice(sorted(files))
        if seed % 50 == 0:
            new = rng.choice(mutations.pickles(planted))
        elif rng.random() < 0.5:
            new = mutations.damage(files[name], rng)
        elif name == "config.json":
            new = mutations.edit_json(files[name].decode(), rng).encode()
        else:
            new = mutations.edit_header(files[name], rng)
        (tmp_path / name).write_bytes(new)
        if repaired:
            repair(tmp_path)
        try:
            loaded = GPT.from_pretrained(tmp_path)
        except ValueError as error:
            named = str(error).startswith(f"`folder` {tmp_path} does not contain a valid GPT: ")
            outcomes["refused" if named else "another error"] += 1
        else:
            outcomes["loaded"] += 1
            assert repaired or same_model(loaded, gpt), f"seed {seed}"
            loaded(torch.zeros(1, 1, dtype=torch.long))
    print(outcomes)
    assert not planted.exists()
    assert outcomes["another error"] == 0
    assert outcomes["refused"] > 0.9 * N_MUTATIONS or repaired
    assert peak_memory() - first_peak < MEMORY


class Parts:
    """Some components of a run."""

    def __init__(self, seed: int):
        self.model = new_gpt(seed)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1 + seed)
        self.model(torch.zeros(1, 3, dtype=torch.long)).sum().backward()
        self.optimizer.step()
        self.controller = ExponentialKLController(1.0 + seed, target=0.5)
        self.progress = {"step": seed, "curve": [0.5, float(seed)]}
        self.generator = torch.Generator().manual_seed(seed)

    def checkpoint(self) -> RunCheckpoint:
        return RunCheckpoint(**vars(self), random=GlobalRNGState())

    def state(self) -> Any:
        states = [getattr(self, name).state_dict() for name in ("model", "optimizer", "controller")]
        return copy.deepcopy([*states, self.progress, self.generator.get_state()])

    def is_at(self, state: Any) -> bool:
        try:
            assert_close(self.state(), state, rtol=0, atol=0)
        except AssertionError:
            return False
        return True


@pytest.mark.timeout(300)
@pytest.mark.parametrize("inside", [False, True])
def test_mutated_checkpoints(tmp_path, inside):
    """500 each; `inside` the archive, whose checksums are right, a file was edited."""
    path, planted, outcomes = tmp_path / "checkpoint", tmp_path / "planted", Counter[str]()
    saved = Parts(0)
    saved.checkpoint().save(path)
    content, expected, first_peak = path.read_bytes(), saved.state(), peak_memory()
    parts = Parts(1)
    before, checkpoint = parts.state(), parts.checkpoint()
    for seed in range(N_MUTATIONS):
        rng = random.Random(seed)
        if seed % 50 == 0:
            path.write_bytes(rng.choice(mutations.pickles(planted)))
        else:
            path.write_bytes((mutations.edit_member if inside else mutations.damage)(content, rng))
        try:
            checkpoint.load(path)
        except CheckpointError:
            outcomes["refused"] += 1
            assert inside or parts.is_at(before), f"seed {seed}"
        else:
            outcomes["loaded"] += 1
            assert inside or parts.is_at(expected), f"seed {seed}"
            parts = Parts(1)
            checkpoint = parts.checkpoint()
    print(outcomes)
    assert not planted.exists()
    assert outcomes["refused"] > (0.5 if inside else 0.8) * N_MUTATIONS
    assert peak_memory() - first_peak < MEMORY


class TestRefused:
    def test_a_model_that_is_a_pickle(self, tmp_path):
        new_gpt().save_pretrained(tmp_path)
        for content in mutations.pickles(tmp_path / "planted")[1:]:
            (tmp_path / "model.safetensors").write_bytes(content)
            with pytest.raises(
                ValueError, match="is a pickle, which can run code when it is loaded"
            ):
                GPT.from_pretrained(tmp_path)

    @pytest.mark.parametrize("change", [{"n_head": 4}, {"dropout": 0.2}])
    def test_a_config_that_fits_the_weights_but_was_changed(self, tmp_path, change):
        new_gpt().save_pretrained(tmp_path)
        file = tmp_path / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
        with pytest.raises(ValueError, match="config.json was changed since it was saved"):
            GPT.from_pretrained(tmp_path)

    def test_blocks_that_lack_weights(self, tmp_path):
        new_gpt().save_pretrained(tmp_path)
        weights = load_file(tmp_path / "model.safetensors")
        del weights["blocks.1.mlp_norm.bias"]
        save_file(weights, tmp_path / "model.safetensors")
        repair(tmp_path)
        with pytest.raises(ValueError, match="must have the same weights"):
            GPT.from_pretrained(tmp_path)

    def test_checkpoints_that_are_pickles(self, tmp_path):
        path, planted = tmp_path / "run", tmp_path / "planted"
        for content in mutations.pickles(planted)[1:]:
            path.write_bytes(content)
            with pytest.raises(CheckpointError, match="is a pickle, which can run code"):
                RunCheckpoint(model=new_gpt()).load(path)
        assert not planted.exists()

    def test_checkpoints_of_torchrls_formats(self, tmp_path):
        Checkpoint(model=new_gpt()).save(tmp_path / "folder")
        with pytest.raises(CheckpointError, match="but a folder, which has no checksums"):
            RunCheckpoint(model=new_gpt()).load(tmp_path / "folder")
        other = Checkpoint(format="archive").register(
            "model", new_gpt(), adapter=StateDictCheckpointAdapter("torch")
        )
        other.save(tmp_path / "archive")
        with pytest.raises(CheckpointError, match="manifest adapter is 'torchrl.state_dict'"):
            RunCheckpoint(model=new_gpt()).load(tmp_path / "archive")

    def test_archives_that_expand(self, tmp_path):
        RunCheckpoint(model=new_gpt()).save(tmp_path / "run")
        members = mutations.read_zip((tmp_path / "run").read_bytes())
        small = mutations.write_zip(members, compression=zipfile.ZIP_DEFLATED)
        (tmp_path / "run").write_bytes(small)
        with pytest.raises(CheckpointError, match="it would expand when it is read"):
            RunCheckpoint(model=new_gpt()).load(tmp_path / "run")

    def test_an_empty_file(self, tmp_path):
        (tmp_path / "run").touch()
        with pytest.raises(CheckpointError, match="is not the file of a RunCheckpoint, or was cut"):
            RunCheckpoint(model=new_gpt()).load(tmp_path / "run")

    def test_a_component_of_another_structure(self, tmp_path):
        RunCheckpoint(model=new_gpt()).save(tmp_path / "run")
        with pytest.raises(CheckpointError, match="Failed to load checkpoint component 'model'"):
            RunCheckpoint(model=GPT(11, 8)).load(tmp_path / "run")
        with pytest.raises(CheckpointError, match=r"missing=\['policy'\]"):
            RunCheckpoint(policy=new_gpt()).load(tmp_path / "run")
        with pytest.raises(FileNotFoundError):
            RunCheckpoint(model=new_gpt()).load(tmp_path / "other")

    @pytest.mark.parametrize("coeff", [-0.1, float("nan"), float("inf")])
    def test_a_coefficient_that_no_controller_has(self, coeff):
        controller = ExponentialKLController(0.25, target=0.5)
        state = {"coeff": torch.tensor(coeff, dtype=torch.float64)}
        with pytest.raises(RuntimeError, match=r"`coeff` must (be one finite number|lie within)"):
            controller.load_state_dict(state)
        assert controller.coeff == 0.25

    def test_what_cannot_be_saved(self, tmp_path):
        class Dumped:
            def dump(self, path):
                """Files of any kind."""

        with pytest.raises(TypeError, match="`memory` must have `state_dict`.* got a Dumped"):
            RunCheckpoint(memory=Dumped())
        with pytest.raises(ValueError, match="`format` must be 'archive', .* got 'directory'"):
            RunCheckpoint().save(tmp_path / "run", format="directory")

        class WithSet(nn.Module):
            def get_extra_state(self):
                return {1, 2}

        with pytest.raises(TypeError, match="a state must consist of tensors, .* got a set"):
            RunCheckpoint(module=WithSet()).save(tmp_path / "run")
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize("option", [{"map_location": "meta"}, {"tensor_load_kwargs": {"a": 1}}])
    def test_options_without_a_use(self, tmp_path, option):
        RunCheckpoint(model=new_gpt()).save(tmp_path / "run")
        with pytest.raises(CheckpointError, match="left out: tensors are read on the CPU"):
            RunCheckpoint(model=new_gpt()).load(tmp_path / "run", **option)


class TestStates:
    def test_every_kind_of_value_comes_back(self, tmp_path):
        class Holder:
            state: Any

            def state_dict(self) -> Any:
                return self.state

            def load_state_dict(self, state: Any) -> None:
                self.state = state

        one, other, shared = Holder(), Holder(), torch.arange(4)
        one.state = {
            "numbers": [0.1, float("inf"), -(2**70), True, None, "text"],
            ("a", 1): (torch.tensor(3), torch.zeros(0, 2), shared[::2], shared.view(2, 2).t()),
            2: torch.tensor([1 + 2j, 0]),
            "half": torch.tensor([0.1], dtype=torch.bfloat16),
            "empty": {},
        }
        RunCheckpoint(holder=one).save(tmp_path / "run")
        RunCheckpoint(holder=other).load(tmp_path / "run")
        assert other.state["numbers"] == one.state["numbers"]
        assert list(other.state) == list(one.state)
        assert_close(
            [*other.state[("a", 1)], other.state[2], other.state["half"]],
            [*one.state[("a", 1)], one.state[2], one.state["half"]],
            rtol=0,
            atol=0,
        )

    def test_the_versions_of_module_states_come_back(self, tmp_path):
        class Newer(nn.Linear):
            _version, found = 3, None

            def _load_from_state_dict(self, state, prefix, metadata, *args):
                self.found = metadata.get("version")
                super()._load_from_state_dict(state, prefix, metadata, *args)

        RunCheckpoint(part=Newer(1, 1)).save(tmp_path / "run")
        loaded = Newer(1, 1)
        RunCheckpoint(part=loaded).load(tmp_path / "run")
        assert loaded.found == 3

    def test_plain_values_are_updated_in_place(self, tmp_path):
        saved, found, curve = {"step": 3, "best": 0.1}, {"step": 0, "other": 1}, [1.0]
        RunCheckpoint(progress=saved, curve=[0.5, 0.25]).save(tmp_path / "run")
        result = RunCheckpoint(progress=found, curve=curve).load(tmp_path / "run")
        assert (found, curve) == (saved, [0.5, 0.25])
        assert result.loaded == {"progress", "curve"}

    def test_keys_and_values_of_plain_components_come_back(self, tmp_path):
        saved = {1: (0.5, [2]), "1": None, ("a", 0): torch.tensor([0.1], dtype=torch.bfloat16)}
        best, curve = torch.tensor([1.0, 2.0]), [torch.arange(2), np.float32(0.5), np.bool_(True)]
        RunCheckpoint(counts=saved, best=best, curve=curve, step=3).save(tmp_path / "run")
        found: dict[Any, Any] = {7: 7}
        other, values = torch.zeros(2), []
        checkpoint = RunCheckpoint(counts=found, best=other, curve=values, step=0)
        result = checkpoint.load(tmp_path / "run")
        assert list(found) == list(saved)
        assert list(found.values())[:2] == [(0.5, [2]), None]
        assert_close([found["a", 0], other], [saved["a", 0], best], rtol=0, atol=0)
        assert values[0].equal(curve[0])
        assert values[1:] == [0.5, True]
        assert result.values == {"step": 3}

    @pytest.mark.parametrize("value", [torch.device("cuda", 1), torch.bfloat16], ids=str)
    def test_devices_and_dtypes_come_back(self, tmp_path, value):
        found: dict[str, Any] = {}
        RunCheckpoint(settings={"of": value}).save(tmp_path / "run")
        RunCheckpoint(settings=found).load(tmp_path / "run")
        assert found == {"of": value}

    def test_replay_buffers_come_back(self, tmp_path):
        buffers = [TensorDictReplayBuffer(storage=LazyTensorStorage(5)) for _ in range(2)]
        buffers[0].extend(TensorDict(reward=torch.randn(7, 1), batch_size=7, device="cpu"))
        RunCheckpoint(buffer=buffers[0]).save(tmp_path / "run")
        RunCheckpoint(buffer=buffers[1]).load(tmp_path / "run")
        assert len(buffers[1]) == 5
        assert_close(buffers[1][:].to_dict(), buffers[0][:].to_dict(), rtol=0, atol=0)
        for buffer in buffers:  # which go on at the same place
            buffer.extend(TensorDict(reward=torch.ones(2, 1), batch_size=2, device="cpu"))
        assert buffers[1]["reward"].equal(buffers[0]["reward"])

    def test_a_dtype_that_torch_does_not_have(self, tmp_path):
        RunCheckpoint(settings={"of": torch.float32}).save(tmp_path / "run")
        members = mutations.read_zip((tmp_path / "run").read_bytes())
        for name, content in members.items():
            members[name] = content.replace(b"float32", b"argsort")
        (tmp_path / "run").write_bytes(mutations.write_zip(members))
        with pytest.raises(CheckpointError, match="'argsort' is not a dtype of torch"):
            RunCheckpoint(settings={}).load(tmp_path / "run")

    @pytest.mark.parametrize(("kind", "value"), [(Curve, [0.5, 0.25]), (Counter, {"a": 2})])
    def test_components_of_subclasses_are_updated(self, tmp_path, kind, value):
        component = kind()
        RunCheckpoint(one=kind(value)).save(tmp_path / "run")
        RunCheckpoint(one=component).load(tmp_path / "run")
        assert component == kind(value)

    @pytest.mark.parametrize(
        ("component", "got"),
        [
            ([1.0], "a tensor (1,) of torch.float32, got a list"),
            ({"a": 1}, "got a dict"),
            (torch.zeros(3), "got a tensor (3,) of torch.float32: begin with"),
            (torch.zeros(1, dtype=torch.float64), "got a tensor (1,) of torch.float64"),
        ],
    )
    def test_plain_components_of_another_kind_are_refused(self, tmp_path, component, got):
        RunCheckpoint(total=torch.ones(1)).save(tmp_path / "run")
        before = repr(component)
        with pytest.raises(CheckpointError, match=re.escape(got)):
            RunCheckpoint(total=component).load(tmp_path / "run")
        assert repr(component) == before

    @pytest.mark.parametrize(
        ("tensor", "got"),
        [
            (torch.zeros(1, dtype=torch.complex128), "torch.strided and torch.complex128 on cpu"),
            (torch.eye(2).to_sparse(), "torch.sparse_coo and torch.float32 on cpu"),
            (torch.zeros(1, device="meta"), "torch.strided and torch.float32 on meta"),
        ],
    )
    def test_tensors_that_cannot_be_saved(self, tmp_path, tensor, got):
        with pytest.raises(TypeError, match=f"must be dense, have values .* got one of {got}"):
            RunCheckpoint(state={"a": tensor}).save(tmp_path / "run")

    def test_left_files_of_killed_processes_are_removed(self, tmp_path):
        """Those of a process that goes on, which holds a lock or is about to, are not."""
        numbers = [32 * digit for digit in "0123"]
        for number in numbers[:2]:
            (tmp_path / f".{number}.part" / "components").mkdir(parents=True)
            os.utime(tmp_path / f".{number}.part", (0, 0))
        (tmp_path / f".{numbers[3]}.part").mkdir()
        (tmp_path / f".checkpoint-1.torchrl.delete-{numbers[2]}").touch()
        (tmp_path / ".other").touch()
        lock = os.open(tmp_path / f".{numbers[0]}.part", os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        RunCheckpoint(model=new_gpt()).save(tmp_path / "run")
        left = sorted(file.name for file in tmp_path.iterdir())
        assert left == [f".{numbers[0]}.part", f".{numbers[3]}.part", ".other", "run"]
        os.close(lock)
        RunCheckpoint(model=new_gpt()).save(tmp_path / "run")
        left = sorted(file.name for file in tmp_path.iterdir())
        assert left == [f".{numbers[3]}.part", ".other", "run"]

    def test_without_locks_nothing_that_was_left_is_removed(self, tmp_path, monkeypatch):
        """As on some network file systems."""
        (tmp_path / f".{32 * '0'}.part").mkdir()
        os.utime(tmp_path / f".{32 * '0'}.part", (0, 0))
        monkeypatch.setattr(fcntl, "flock", lambda *args: os.truncate("", 0))  # an OSError
        RunCheckpoint(model=new_gpt()).save(tmp_path / "run")
        assert sorted(file.name for file in tmp_path.iterdir()) == [f".{32 * '0'}.part", "run"]
