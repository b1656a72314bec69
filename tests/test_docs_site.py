"""The documentation site: its programs run as printed, its figures are drawn, its pages build."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.scripts import load

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
RECIPES = sorted(path.stem for path in (DOCS / "recipes").glob("*.py"))
OPTIONS = {"checkpoint_and_resume": ["run.pt", "20"]}
# How a program is started that is not run as `python FILE`.
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
START = {"several_learners": TORCHRUN}
FIGURES: dict[str, Any] = {
    **{name: {} for name in ("estimators", "diagram")},
    "penalty": {"n_updates": 50},
    "controllers": {"n_updates": 20},
    "plan": {"n_batches": 20},
    "two_divergences": {"n_updates": 5},
    "validation": {"samples": 20, "n_policies": 2},
    "finetune": {"seeds": 1, "batches": 2},
}
SMALL = {
    "your_own_agent": {"BATCHES = 15": "BATCHES = 2", "FRAMES = 1000": "FRAMES = 100"},
    "rlhf_by_hand": {"PRETRAINING = 300": "PRETRAINING = 5", "BATCHES = 60": "BATCHES = 2"},
}


def slow(test: Any) -> Any:  # its time limit only stops a hang
    return pytest.mark.slow(pytest.mark.timeout(900)(test))


def _included(path: str) -> str:
    folders = [DOCS, ROOT]  # in which the site looks for it
    return next(folder / path for folder in folders if (folder / path).exists()).read_text()


def parts_of(recipe: str) -> tuple[str, str]:
    """The program on a page, as the site includes it, and what the page says that it prints."""
    page = (DOCS / "recipes" / f"{recipe}.md").read_text()
    include = re.compile(r'^--8<-- "(.+)"$', flags=re.M)
    page = include.sub(lambda match: _included(match[1]).rstrip(), page)
    (program,) = re.findall(r"``` {.python}\n(.*?)\n```", page, flags=re.S)
    (printed,) = re.findall(r"```text\n(.*?)\n```", page, flags=re.S)
    return program, printed


def form(text: str) -> list[str]:
    """Lines without their numbers, and without what TorchRL logs."""
    lines = [line for line in text.splitlines() if line.strip() and "[torchrl]" not in line]
    return [re.sub(r"[-+]?\d+(\.\d+)?(e[-+]\d+)?", "#", " ".join(line.split())) for line in lines]


def run(program: str, folder: Path, *options: str, start: Sequence[str] = ()) -> str:
    """Runs a program as `python FILE` would, in a new process and a folder; what it printed."""
    (folder / "program.py").write_text(program)
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    result = subprocess.run(
        [sys.executable, *start, "program.py", *options],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,  # only stops a hang
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_all_recipes_are_short_and_listed():
    assert len(RECIPES) == 37
    pages = {path.stem for path in (DOCS / "recipes").glob("*.md")}
    assert pages == {*RECIPES, "index"}
    index, site = (DOCS / "recipes/index.md").read_text(), (ROOT / "mkdocs.yml").read_text()
    for recipe in RECIPES:
        assert f"]({recipe}.md)" in index
        assert f": recipes/{recipe}.md\n" in site
        assert f"\n[{recipe}.py]({recipe}.py):\n" in (DOCS / f"recipes/{recipe}.md").read_text()
        assert len(parts_of(recipe)[0].splitlines()) < 60


@slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_runs_as_printed(recipe, tmp_path):
    if recipe == "trl_beta":
        pytest.importorskip("trl")
    program, expected = parts_of(recipe)
    start = START.get(recipe, [])
    found = run(program, tmp_path, *OPTIONS.get(recipe, []), start=start)
    assert form(found) == form(expected)


@slow
@pytest.mark.parametrize("kind", ["one", "async --where workers", "ray"])
def test_each_collector(kind, tmp_path):
    printed = run(parts_of("many_workers")[0], tmp_path, "--kind", *kind.split())
    coefficients = [float(x) for x in re.findall(r"coefficient (\d\.\d+)", printed)]
    assert len(coefficients) == 5
    assert coefficients[0] == 0.5 > coefficients[-1]  # the policy is near its reference


def test_the_example_of_language_models_begins_at_its_reference(capsys):
    page = (DOCS / "getting_started.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, flags=re.S)
    exec(compile(program, "getting_started.md", "exec"), {})
    kl = re.findall(r"^KL ([+-]\d\.\d{3}) nats per response$", capsys.readouterr().out, flags=re.M)
    assert len(kl) == 5
    assert float(kl[0]) == 0.0
    assert float(kl[-1]) != 0.0


@slow
@pytest.mark.parametrize("name", SMALL)
def test_a_tutorial_runs_and_is_what_its_page_shows(name, tmp_path):
    pytest.importorskip("jupytext")
    render = load("docs/tutorials/render.py")
    page, source = ((DOCS / "tutorials" / f"{name}.{end}").read_text() for end in ("md", "py"))
    for _, text in render.cells_of(source):
        assert text.strip() in page
    for large, small in SMALL[name].items():
        assert large in source
        source = source.replace(large, small)
    assert render.render(name, source, tmp_path).count("```text\n") >= 4  # cells that print


@slow
@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_drawn(name, tmp_path):
    pytest.importorskip("matplotlib")
    assert {path.stem for path in (DOCS / "figures").glob("*.py")} == {"style", *FIGURES}
    picture = load(f"docs/figures/{name}.py").main(tmp_path, **FIGURES[name])
    assert picture == tmp_path / f"{name}.png"
    assert picture.stat().st_size > 10_000
    assert (DOCS / "images" / f"{name}.png").is_file()


@slow
def test_only_k1_leads_to_the_optimum():
    figure = load("docs/figures/penalty.py")
    ends = {name: figure.kl_while_training(name, 2000)[-1] for name in figure.COLORS}
    assert abs(ends["k1"] - figure.optimum()) < 1e-3  # after 2000 updates
    assert all(ends[name] > 1.3 for name in ("k2", "k3", "exact"))  # log 4 is 1.386


@slow
def test_known_faults_are_still_there(tmp_path):
    page = (DOCS / "known_faults_upstream.md").read_text()
    programs = [(DOCS / f"known_faults_{name}.py").read_text() for name in ("upstream", "llm")]
    shown = re.findall(r"^(\w+): ", "".join(run(p, tmp_path) for p in programs), flags=re.M)
    assert sorted(re.findall(r"\| `(\w+)` \|$", page, flags=re.M)) == sorted(shown)


@slow
@pytest.mark.skipif(
    not (ROOT / "torchrl_kl" / "envs").is_dir(),
    reason="sdists and some file systems lack the link by which the API of envs/ is found",
)
def test_the_site_builds_and_loads_nothing_from_elsewhere(tmp_path):
    for needed in ("mkdocs", "material", "mkdocstrings", "latex2mathml"):
        pytest.importorskip(needed)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir"]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    subprocess.run([*command, str(tmp_path)], cwd=ROOT, env=environment, check=True, timeout=600)
    pages = list(tmp_path.rglob("*.html"))
    assert "<math" in (tmp_path / "concepts" / "plan" / "index.html").read_text()
    assert len(pages) > 40
    tag = re.compile(r"<(?:script|img|iframe|source|link)[^>]* (?:src|href)=[^>]*>")
    for page in pages:
        loaded = [part for part in tag.findall(page.read_text()) if "canonical" not in part]
        assert not [part for part in loaded if re.search(r'(src|href)="?(https?:)?//', part)], page
