"""Running the scripts of examples/ and benchmarks/: in this process, or from the command line."""

import importlib
import io
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[1]


def load(path: str) -> Any:
    """The module of a script, such as "examples/digit_rlhf.py"."""
    file = ROOT / path
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(file.parent))
        return importlib.import_module(file.stem)


class Run(NamedTuple):
    """A finished run: the folder that it wrote to, what it printed, and how to repeat it."""

    out: Path
    printed: str
    repeat: Callable[..., str]  # called with further options


def lanes(path: str, smallest: str, quick: str = "") -> Any:
    """A fixture with a Run of a script, one for each lane of the tests.

    In the default lane it runs in this process with the options `smallest`, in the slow lane from
    the command line with `--quick` and the options `quick`.
    """

    @pytest.fixture(
        scope="module", params=["smallest", pytest.param("quick", marks=pytest.mark.slow)]
    )
    def finished(request, tmp_path_factory) -> Run:
        folder = tmp_path_factory.mktemp(Path(path).stem)

        def run(more: str = "") -> str:
            if request.param == "quick":
                return run_command(path, folder, f"--out out --quick {quick} {more}")
            return run_here(path, folder, f"--out out {smallest} {more}")

        return Run(folder / "out", run(), run)

    return finished


def run_here(path: str, folder: Path, options: str) -> str:
    """Runs the `main` of a script in this process, in a folder; what it printed."""
    script, printed = load(path), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        patch.chdir(folder)
        patch.setattr(sys, "argv", [path, *options.split()])
        # A new process imports torch for seconds.
        for module in (script, sys.modules.get("running")):
            if hasattr(module, "ProcessPoolExecutor"):
                patch.setattr(module, "ProcessPoolExecutor", lambda *_, **__: ThreadPoolExecutor(1))
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
