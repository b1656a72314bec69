"""Checkpoints of whole runs, on TorchRL's `Checkpoint`, in files that run no code when loaded."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
import uuid
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor
from torchrl.checkpoint import Checkpoint, CheckpointAdapter, CheckpointError, CheckpointLoadResult

from torchrl_kl._torchrl import DELETED

_STATE = "state.safetensors"
_PART = re.compile(r"\.[0-9a-f]{32}\.part")  # a folder of what is not finished yet
_NEW = 10.0  # seconds within which the process of such a folder has locked it
_PLAIN = (MutableMapping, list, tuple, Tensor, bool, int, float, str, type(None))


def write_durably(path: Path, content: bytes) -> None:
    """Writes a file that is on the disk, and not only in the system's memory, when this returns."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def looks_pickled(content: bytes) -> bool:
    """Whether a file is a pickle, or a zip file, as `torch.save` writes it with pickles."""
    return content.startswith((b"PK\3\4", b"\x80\2", b"\x80\3", b"\x80\4", b"\x80\5"))


class RunCheckpoint(Checkpoint):
    """TorchRL's `Checkpoint` in one file with checksums, from which no code can be run.

    Use it, with TorchRL's `CheckpointRotation`, for all that changes in a run: modules, optimizers,
    schedulers, TorchRL's `GlobalRNGState()`, the stack, `torch.Generator`s, envs with a state,
    replay buffers, and tensors, dictionaries and lists, which are updated in place: their keys and
    values, which may be tensors, tuples and plain values too, come back as they were, but as new
    objects. TorchRL's own formats check no checksums and may read pickles, or turn keys into
    strings and tensors into lists.

    You may rely on: whenever the process is killed, even while it saves, and wherever the disk is
    full, the file has the older checkpoint or the new one, as a whole. A file that was changed or
    cut off is refused before any component changes, without reading more than its size. Several
    processes may save to one folder; under the same name, the last one's file stays. What a killed
    one left there is removed by a `save` at least ten seconds later, if the file system has locks.
    You may not rely on the components after another error of `load`: build them anew.

    Args:
        components: objects with `state_dict` and `load_state_dict`, generators, tensors,
            dictionaries and lists; a plain value is not restored but returned by `load`, in
            `values`.

    Raises:
        TypeError: if a component, or what is in its state, is of another type.
        OSError: in `save`, if the file cannot be written; in `load`, if it is not there.
        CheckpointError: in `load`, if the file is damaged, does not have the components, or one
            of them refuses its state.

    Example:
        >>> import tempfile, torch
        >>> from torchrl.checkpoint import CheckpointRotation
        >>> from torchrl_kl import RunCheckpoint
        >>> policy, progress = torch.nn.Linear(2, 1), {"step": 3}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     rotation = CheckpointRotation(folder, keep_last=2)
        ...     _ = rotation.save(RunCheckpoint(policy=policy, progress=progress), step=3)
        ...     resumed, found = torch.nn.Linear(2, 1), {}
        ...     _ = rotation.load_latest(RunCheckpoint(policy=resumed, progress=found))
        >>> resumed.weight.equal(policy.weight), found
        (True, {'step': 3})
    """

    def __init__(self, **components: Any):
        super().__init__(format="archive", **components)

    def register(self, name: str, component: Any) -> RunCheckpoint:
        """Adds a component under a name."""
        known = _has_state(component) or isinstance(component, _PLAIN)
        adapter = _StateFile() if known else None
        if adapter is None and hasattr(component, "dump"):
            raise TypeError(
                f"`{name}` must have `state_dict` and `load_state_dict`, got a "
                f"{type(component).__name__} with `dump`, whose files could be of any kind."
            )
        super().register(name, component, adapter=adapter)
        return self

    def save(self, path: str | Path, *, format: str | None = None, **options: Any) -> Path:
        """Saves all components to a file; the other arguments are those of TorchRL's `save`."""
        if format not in (None, "archive"):
            raise ValueError(f"`format` must be 'archive', which has checksums, got {format!r}.")
        path = Path(path).expanduser().absolute()
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_left(path.parent)
        with _new_folder(path.parent) as folder:
            part = folder / path.name
            super().save(part, **options)
            _sync(part)
            os.replace(part, path)
        _sync(path.parent)
        return path

    def load(self, path: str | Path, **options: Any) -> CheckpointLoadResult:
        """Restores all components from a file; the other arguments are those of TorchRL's."""
        path = Path(path).expanduser()
        try:
            _check_archive(path)
            return super().load(path, **options)
        except (CheckpointError, FileNotFoundError, PermissionError):
            raise
        except Exception as error:  # whatever the damage of a file leads to
            raise CheckpointError(
                f"`path` {path} is damaged ({type(error).__name__}: {error}): remove it, to resume "
                "from the checkpoint before it."
            ) from error


@contextmanager
def _new_folder(parent: Path) -> Iterator[Path]:
    """A folder for unfinished files, which is locked until it is removed in the end."""
    folder = parent / f".{uuid.uuid4().hex}.part"
    folder.mkdir()
    with _locked(folder):
        try:
            yield folder
        finally:
            shutil.rmtree(folder)


def _remove_left(folder: Path) -> None:
    """Removes what killed processes left in a folder, and nothing that a living one needs."""
    for left in folder.glob(".*"):
        with suppress(OSError):  # another process removes it, too
            if DELETED.fullmatch(left.name):
                left.unlink()
            elif _PART.fullmatch(left.name) and time.time() - left.stat().st_mtime > _NEW:
                with _locked(left) as locked:
                    if locked:
                        shutil.rmtree(left)


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Locks a folder; False if another process has, or where the system has no locks.

    The lock goes with the process, however it ends.
    """
    descriptor, locked = os.open(folder, os.O_RDONLY), False
    try:
        with suppress(ImportError, OSError):
            import fcntl  # which Windows lacks

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            locked = True
        yield locked
    finally:
        os.close(descriptor)


def _check_archive(path: Path) -> None:
    """CheckpointError unless it is a zip file with a manifest, which does not expand."""
    refused = "is not the file of a RunCheckpoint"
    if path.is_dir():
        raise CheckpointError(f"`path` {path} {refused} but a folder, which has no checksums.")
    with path.open("rb") as file:
        pickled = looks_pickled(file.read(4))
    if not zipfile.is_zipfile(path):
        hint = ": it is a pickle, which can run code when it is loaded" if pickled else ""
        raise CheckpointError(f"`path` {path} {refused}{hint}, or was cut off.")
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    if "manifest.json" not in (member.filename for member in members):
        raise CheckpointError(
            f"`path` {path} {refused}: it has no manifest. A file of `torch.save` is a pickle, "
            "which can run code when it is loaded."
        )
    compressed = any(member.compress_type != zipfile.ZIP_STORED for member in members)
    if compressed or sum(member.file_size for member in members) > path.stat().st_size:
        raise CheckpointError(f"`path` {path} is damaged: it would expand when it is read.")


def _sync(path: Path) -> None:
    """Returns when a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _has_state(component: Any) -> bool:
    names = ("state_dict", "load_state_dict")
    return isinstance(component, torch.Generator) or all(hasattr(component, n) for n in names)


class _StateFile(CheckpointAdapter):
    """A state dict as one safetensors file, with its structure as JSON among the metadata."""

    adapter_id = "torchrl_kl.safetensors"

    def save(
        self, component: Any, path: Path, *, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        state: Any = component
        if isinstance(component, torch.Generator):
            state = component.get_state()
        elif _has_state(component):
            state = component.state_dict(*args, **kwargs)
        tensors: dict[str, Tensor] = {}
        structure = json.dumps(_encode(state, tensors))
        path.mkdir(parents=True)
        # No memory map: a full disk would end the process there.
        write_durably(path / _STATE, save(tensors, {"state": structure}))

    def load(
        self,
        component: Any,
        path: Path,
        *,
        map_location: Any,
        tensor_load_kwargs: Mapping[str, Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        # What TorchRL's trainers pass: it is so anyway.
        if map_location not in (None, "cpu", torch.device("cpu")) or (
            tensor_load_kwargs.keys() - {"weights_only", "mmap"}
        ):
            raise ValueError(
                "`map_location` must be left out or 'cpu', and `tensor_load_kwargs` left out: "
                "tensors are read on the CPU, and components move them to where they are."
            )
        content = (path / _STATE).read_bytes()
        tensors = load(content)  # which has checked sizes and offsets
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size])
        state = _decode(json.loads(header["__metadata__"]["state"]), tensors)
        if isinstance(component, torch.Generator):
            return component.set_state(state)
        if _has_state(component):
            component.load_state_dict(state, *args, **kwargs)
            return None
        return _update(component, state)


def _update(component: Any, state: Any) -> Any:
    """Gives a component what was saved of it; of one that cannot be updated, returns that."""
    if not isinstance(component, (MutableMapping, list, Tensor)):
        return state
    if _layout(state) != _layout(component):
        raise ValueError(
            f"a component must be like the one that was saved, {_layout(state)}, got "
            f"{_layout(component)}: begin with one of that type, shape and dtype."
        )
    if isinstance(component, Tensor):
        with torch.no_grad():
            component.copy_(state)
    elif isinstance(component, list):
        component[:] = state
    else:
        component.clear()
        component.update(state)
    return None


def _layout(value: Any) -> str:
    """What a tensor must have in common with one that it is copied to; else the type."""
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)} of {value.dtype}"
    kinds = {Mapping: "dict", list: "list"}  # also of their subclasses, which are saved as such
    name = next((name for kind, name in kinds.items() if isinstance(value, kind)), None)
    return f"a {name or type(value).__name__}"


def _encode(value: Any, tensors: dict[str, Tensor]) -> Any:
    """A state as plain JSON; its tensors are collected by number."""
    if isinstance(value, Tensor):
        _check_tensor(value)
        name = str(len(tensors))
        # A copy: safetensors refuses tensors that share memory.
        tensors[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        return {"tensor": name}
    if isinstance(value, Mapping):
        items = [[_encode(key, tensors), _encode(item, tensors)] for key, item in value.items()]
        # Of modules: the versions of their states.
        metadata = _encode(getattr(value, "_metadata", None), tensors)
        return {"dict": items, "metadata": metadata}
    if isinstance(value, tuple):
        return {"tuple": [_encode(item, tensors) for item in value]}
    if isinstance(value, list):
        return [_encode(item, tensors) for item in value]
    if isinstance(value, (torch.device, torch.dtype)):  # as replay buffers have
        return {type(value).__name__: str(value).removeprefix("torch.")}
    if getattr(value, "ndim", None) == 0:  # a number of NumPy's
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(
        f"a state must consist of tensors, dicts, lists, tuples and plain values, got a "
        f"{type(value).__name__}, which could be saved as a pickle only."
    )


def _check_tensor(tensor: Tensor) -> None:
    """TypeError unless a safetensors file can have it."""
    if tensor.layout != torch.strided or tensor.is_meta or tensor.dtype == torch.complex128:
        raise TypeError(
            "a tensor of a state must be dense, have values and not be of torch.complex128, got "
            f"one of {tensor.layout} and {tensor.dtype} on {tensor.device}."
        )


def _decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The state that `_encode` was given."""
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[value["tensor"]]
    if "tuple" in value:
        return tuple(_decode(item, tensors) for item in value["tuple"])
    if "device" in value:
        return torch.device(value["device"])
    if "dtype" in value:
        dtype = getattr(torch, value["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{value['dtype']!r} is not a dtype of torch")
        return dtype
    state = {_decode(key, tensors): _decode(item, tensors) for key, item in value["dict"]}
    if value["metadata"] is not None:
        state = OrderedDict(state)
        state._metadata = _decode(value["metadata"], tensors)  # type: ignore[attr-defined]
    return state
