"""Runs every family of causal language models of transformers, and writes docs/models.md.

    python -m tests.zoo FOLDER [NAME ...]

Results go to FOLDER, one file for each name; those that are there are not made again, so that
several processes may share a folder; an empty one is of a run that was stopped, to be removed. The
page is written when all of them are there. It takes from ten to forty minutes.
"""

import json
import logging
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.zoo.checks import Checks
from tests.zoo.families import FAMILIES, SETTINGS
from tests.zoo.page import write

LIMIT = 300  # seconds for one family


def run(folder: Path, names: list[str]) -> None:
    def stop(*_: Any) -> None:
        raise TimeoutError(f"more than {LIMIT} seconds")

    signal.signal(signal.SIGALRM, stop)
    for name in names:
        try:
            file = (folder / f"{name}.json").open("x")
        except FileExistsError:
            continue
        start = time.time()
        signal.alarm(LIMIT)
        found = vars(Checks(name).run())
        signal.alarm(0)
        with file:
            json.dump(found, file)
        print(f"{name}: {time.time() - start:.0f} s {found['faults'] or ''}", flush=True)


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    run(folder, sys.argv[2:] or [*FAMILIES, *SETTINGS])
    results = {path.stem: json.loads(path.read_text() or "{}") for path in folder.glob("*.json")}
    if all(results.get(name) for name in [*FAMILIES, *SETTINGS]):
        write(results)
