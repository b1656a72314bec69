"""Runs the tutorials and writes them as pages, with what their cells print and draw.

    python docs/tutorials/render.py [name ...]

Each tutorial is a notebook kept as a script in jupytext's percent format; `jupytext --to ipynb`
makes a notebook of it.
"""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path

import jupytext
import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

FOLDER = Path(__file__).parent
NAMES = ("your_own_agent", "rlhf_by_hand")
plt.style.use(FOLDER.parents[1] / "examples" / "style.mplstyle")


def cells_of(source: str) -> list[tuple[str, str]]:
    """The cells of a script, (kind, text), kind "markdown" or "code"."""
    notebook = jupytext.reads(source, fmt="py:percent")
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def render(name: str, source: str, images: Path) -> str:
    """The page of a tutorial; runs its cells in one namespace."""
    parts, namespace, pictures = [], {"__name__": "__main__"}, 0
    for kind, text in cells_of(source):
        if kind == "markdown":
            parts.append(text)
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(text, f"{name}.py", "exec"), namespace)
        parts.append(f"```python\n{text.strip()}\n```")
        if printed.getvalue():
            parts.append(f"```text\n{printed.getvalue().rstrip()}\n```")
        for number in plt.get_fignums():
            pictures += 1
            file = images / f"tutorial_{name}_{pictures}.png"
            plt.figure(number).savefig(file, dpi=120, metadata={"Software": ""})
            parts.append(f"![What the cell above draws](../images/{file.name})")
        plt.close("all")
    parts.append(f"This page is [{name}.py]({name}.py), a notebook kept as a script.")
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Writes the pages of the named tutorials, or of all."""
    for name in sys.argv[1:] or NAMES:
        source = (FOLDER / f"{name}.py").read_text()
        (FOLDER / f"{name}.md").write_text(render(name, source, FOLDER.parent / "images"))
        print("wrote", FOLDER / f"{name}.md")


if __name__ == "__main__":
    main()
