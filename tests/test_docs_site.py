"""The documentation site: its programs run as printed, its figures are drawn, its pages build."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
RECIPES = sorted(path.stem for path in (DOCS / "recipes").glob("*.md") if path.stem != "index")
STARTS_PROCESSES = ("many_workers", "vectorised")
OPTIONS = {"checkpoint_and_resume": ["run"]}
FIGURES = {
    "penalty": {"n_updates": 50},
    "estimators": {},
    "controllers": {"n_updates": 20},
    "plan": {"n_batches": 20},
    "two_divergences": {"n_updates": 5},
    "diagram": {},
    "validation": {"samples": 20, "n_policies": 2},
    "finetune": {"seeds": 1, "batches": 2},
}
SMALL = {
    "your_own_agent": {"BATCHES = 15": "BATCHES = 2", "FRAMES = 1000": "FRAMES = 100"},
    "rlhf_by_hand": {"PRETRAINING = 300": "PRETRAINING = 5", "BATCHES = 60": "BATCHES = 2"},
}

# What TorchRL 0.14.1 and transformers 5.23 say of themselves.
pytestmark = [
    pytest.mark.filterwarnings("ignore:PPOTrainer is an experimental:UserWarning"),
    pytest.mark.filterwarnings("ignore:The '(optimizer|post_loss)' hook stage:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:size_average and reduce args:UserWarning"),
]


def page_of(recipe: str) -> str:
    """The text of a page, with the scripts that it includes, as the site shows it."""
    text = (DOCS / "recipes" / f"{recipe}.md").read_text()
    return re.sub(
        r'^--8<-- "(.+)"$', lambda m: (DOCS / m[1]).read_text().rstrip(), text, flags=re.M
    )


def parts_of(recipe: str) -> tuple[str, str]:
    """The program on a page, and what the page says that it prints."""
    page = page_of(recipe)
    (program,) = re.findall(r"``` {.python}\n(.*?)\n```", page, flags=re.S)
    (printed,) = re.findall(r"```text\n(.*?)\n```", page, flags=re.S)
    return program, printed


def form(text: str) -> list[str]:
    """Lines without their numbers, and without what TorchRL logs."""
    lines = [line for line in text.splitlines() if line.strip() and "[torchrl]" not in line]
    return [re.sub(r"[-+]?\d+(\.\d+)?(e[-+]\d+)?", "#", " ".join(line.split())) for line in lines]


def run_as_main(program: str, folder: Path, monkeypatch: Any, *options: str) -> None:
    """Runs a program as `python FILE` would, in a folder."""
    file = folder / "program.py"
    file.write_text(program)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [str(file), *options])
    exec(compile(program, str(file), "exec"), {"__name__": "__main__"})


def run_process(program: str, folder: Path, *options: str) -> str:
    """The same in a new process, which can start others; what it printed."""
    file = folder / "program.py"
    file.write_text(program)
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    result = subprocess.run(
        [sys.executable, str(file), *options],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,  # only stops a hang
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


class TestRecipes:
    def test_there_are_twenty(self):
        assert len(RECIPES) == 20
        assert sorted(path.stem for path in (DOCS / "recipes").glob("*.py")) == RECIPES

    @pytest.mark.parametrize("recipe", RECIPES)
    def test_it_is_two_clicks_away(self, recipe):
        readme, index = (ROOT / "README.md").read_text(), (DOCS / "recipes/index.md").read_text()
        assert "https://torchrl-kl.github.io/torchrl_kl/recipes/" in readme
        assert f"]({recipe}.md)" in index
        assert f": recipes/{recipe}.md\n" in (ROOT / "mkdocs.yml").read_text()

    @pytest.mark.parametrize("recipe", RECIPES)
    def test_it_is_short(self, recipe):
        assert len(parts_of(recipe)[0].splitlines()) < 60

    @pytest.mark.slow
    @pytest.mark.timeout(900)
    @pytest.mark.parametrize("recipe", RECIPES)
    def test_it_runs_as_printed(self, recipe, tmp_path, monkeypatch, capsys):
        program, expected = parts_of(recipe)
        if recipe in STARTS_PROCESSES:
            printed = run_process(program, tmp_path)
        else:
            run_as_main(program, tmp_path, monkeypatch, *OPTIONS.get(recipe, []))
            printed = capsys.readouterr().out
        assert form(printed) == form(expected)

    @pytest.mark.slow
    @pytest.mark.timeout(900)
    @pytest.mark.parametrize(
        "options", ["--kind one", "--kind async --where workers", "--kind ray --where workers"]
    )
    def test_each_collector(self, options, tmp_path):
        printed = run_process(parts_of("many_workers")[0], tmp_path, *options.split())
        coefficients = [float(x) for x in re.findall(r"coefficient (\d\.\d+)", printed)]
        assert len(coefficients) == 5
        assert coefficients[0] == 0.5
        assert coefficients[-1] < 0.5  # the policy is near its reference, below the target

    @pytest.mark.slow
    @pytest.mark.timeout(900)
    @pytest.mark.parametrize(
        ("logger", "files"), [("tensorboard", "events.out.tfevents*"), ("wandb", "*.wandb")]
    )
    def test_each_logger(self, logger, files, tmp_path):
        pytest.importorskip(logger)
        program = parts_of("logging_metrics")[0]
        printed = run_process(program, tmp_path, "--logger", logger, "--out", str(tmp_path / "o"))
        assert "logged 5 batches" in printed
        assert list(tmp_path.rglob(files))


def test_the_example_of_language_models_begins_at_its_reference(capsys):
    page = (DOCS / "getting_started.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, flags=re.S)
    exec(compile(program, "getting_started.md", "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    matches = [re.fullmatch(r"KL ([+-]\d\.\d{3}) nats per response", line) for line in lines]
    kl = [float(match[1]) for match in matches if match]
    assert len(kl) == 5
    assert kl[0] == 0.0
    assert kl[-1] != 0.0


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda path: path.stem)
def test_the_files_that_it_links_to_are_there(page):
    """Links within the site are checked when it is built; these are links to the repository."""
    links = re.findall(r"github\.com/torchrl-kl/torchrl_kl/blob/main/([^)#\s]+)", page.read_text())
    assert [link for link in links if not (ROOT / link).is_file()] == []


def load(path: Path, monkeypatch: Any) -> Any:
    """The module of a script of docs/, under a name that no other module has."""
    monkeypatch.syspath_prepend(str(path.parent))
    name = f"docs_{path.parent.name}_{path.stem}"
    spec: Any = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
class TestFigures:
    def test_all_are_drawn_here(self):
        scripts = {path.stem for path in (DOCS / "figures").glob("*.py")} - {"style"}
        assert scripts == set(FIGURES)

    @pytest.mark.parametrize("name", FIGURES)
    def test_it_is_drawn(self, name, tmp_path, monkeypatch):
        pytest.importorskip("matplotlib")
        picture = load(DOCS / "figures" / f"{name}.py", monkeypatch).main(tmp_path, **FIGURES[name])
        assert picture == tmp_path / f"{name}.png"
        assert picture.stat().st_size > 10_000
        assert (DOCS / "images" / f"{name}.png").is_file()

    def test_only_k1_leads_to_the_optimum(self, monkeypatch):
        figure = load(DOCS / "figures" / "penalty.py", monkeypatch)
        ends = {name: figure.kl_while_training(name, 2000)[-1] for name in figure.COLORS}
        assert abs(ends["k1"] - figure.optimum()) < 1e-3  # after 2000 updates
        assert all(ends[name] > 1.3 for name in ("k2", "k3", "exact"))  # log 4 is 1.386


class TestTutorials:
    @pytest.mark.timeout(900)
    @pytest.mark.parametrize("name", SMALL)
    def test_it_runs_at_a_small_size(self, name, tmp_path, monkeypatch):
        pytest.importorskip("jupytext")
        module = load(DOCS / "tutorials" / "render.py", monkeypatch)
        source = (DOCS / "tutorials" / f"{name}.py").read_text()
        for large, small in SMALL[name].items():
            assert large in source
            source = source.replace(large, small)
        page = module.render(name, source, tmp_path)
        assert page.count("```text\n") >= 4  # cells that print
        assert sorted(file.name for file in tmp_path.iterdir()) == re.findall(
            r"images/(.*?)\)", page
        )

    @pytest.mark.parametrize("name", SMALL)
    def test_the_page_is_that_of_the_script(self, name, monkeypatch):
        pytest.importorskip("jupytext")
        module = load(DOCS / "tutorials" / "render.py", monkeypatch)
        page = (DOCS / "tutorials" / f"{name}.md").read_text()
        for _, text in module.cells_of((DOCS / "tutorials" / f"{name}.py").read_text()):
            assert text.strip() in page


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The built site; an unknown link or a page outside the navigation is an error."""
    for needed in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(needed)
    folder = tmp_path_factory.mktemp("site")
    result = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=600,  # only stops a hang
    )
    assert result.returncode == 0, result.stderr
    return folder


@pytest.mark.skipif(
    not (ROOT / "torchrl_kl" / "envs").is_dir(),
    reason="sdists and some file systems lack the link by which the API of envs/ is found",
)
class TestSite:
    @pytest.mark.timeout(900)
    def test_it_loads_nothing_from_elsewhere(self, site):
        pages = list(site.rglob("*.html"))
        assert len(pages) > 40
        for page in pages:
            text = page.read_text()
            loaded = re.findall(r'<(?:script|img|iframe|source)[^>]* src="?([^" >]+)', text)
            loaded += re.findall(r'<link[^>]* href="?([^" >]+)"?[^>]* rel="?stylesheet', text)
            loaded += re.findall(r'rel="?(?:stylesheet|preconnect)"? href="?([^" >]+)', text)
            assert not [link for link in loaded if link.startswith(("http", "//"))], page

    @pytest.mark.timeout(900)
    def test_every_public_name_has_its_entry(self, site):
        import torchrl_kl
        import torchrl_kl.envs

        text = "".join(page.read_text() for page in (site / "api").rglob("*.html"))
        for package in (torchrl_kl, torchrl_kl.envs):
            for name in package.__all__:
                assert f'id="{package.__name__}.{name}"' in text, name
