"""Running the scripts of examples/ and benchmarks/: in this process, or from the command line."""

import importlib
import io
import os
import subprocess
import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


def load(path: str) -> Any:
    """The module of a script, such as "examples/digit_rlhf.py"."""
    file = ROOT / path
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(file.parent))
        return importlib.import_module(file.stem)


def submit(fn: Any, *args: Any) -> Any:
    """Works when it is asked, as no executor does: a new process imports torch for seconds."""
    result = fn(*args)
    return SimpleNamespace(result=lambda: result)


def run_here(path: str, folder: Path, options: str) -> str:
    """Runs the `main` of a script in this process, in a folder; what it printed."""
    script, printed = load(path), io.StringIO()
    pool = SimpleNamespace(submit=submit, map=map)
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        patch.chdir(folder)
        patch.setattr(sys, "argv", [path, *options.split()])
        if hasattr(script, "workers"):
            patch.setattr(script, "workers", lambda _: nullcontext(pool))
        script.main()
    return printed.getvalue()


def run_command(path: str, folder: Path, options: str) -> str:
    """Runs a script from the command line, in a folder; what it printed."""
    result = subprocess.run(
        [sys.executable, str(ROOT / path), *options.split()],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,  # only stops a hang
    )
    assert result.returncode == 0, result.stderr
    return result.stdout
