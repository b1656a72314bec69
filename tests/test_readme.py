"""What README.md and CONTRIBUTING.md say is true of the code."""

import ast
import re
from pathlib import Path

import pytest

import torchrl_kl
import torchrl_kl.envs
import torchrl_kl.exact
import torchrl_kl.functional
import torchrl_kl.language

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
LINE = r"^reward \d\.\d\d, KL (-?\d\.\d{3}), coefficient (\d\.\d{3}), goals (\d+)$"


@pytest.mark.parametrize("small", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_program_runs(small, capsys):
    (program,) = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    sizes = {"1000": "300", "30_000": "600", "range(300)": "range(3)"}
    for whole, size in sizes.items():
        assert whole in program
        program = program.replace(whole, size) if small else program
    exec(compile(program, "README.md", "exec"), {})
    printed = re.findall(LINE, capsys.readouterr().out, flags=re.M)
    kl, coeffs, goals = zip(*(map(float, row) for row in printed), strict=True)
    assert len(printed) == (2 if small else 30)
    assert kl[0] == 0.0
    assert min(coeffs) > 0.0
    if not small:  # without a penalty the KL is 2.5 nats, and there are no goals
        assert len(set(coeffs)) > 10
        assert 0.1 < sum(kl[-5:]) / 5 < 0.3
        assert sum(goals[-5:]) > 0


def test_the_two_commands_are_there():
    assert '    pip install -e ".[examples]" && python examples/digit_rlhf.py\n' in README
    assert '    pip install -e ".[test]" && pytest\n' in README
    assert README.count("&& pytest") == 1  # .ci/run takes the command from that line
    assert len(README.splitlines()) <= 200
    for file in ("setup.cfg", "CITATION.cff", "mkdocs.yml"):
        assert "://" not in (ROOT / file).read_text()  # no address is invented


def anchors_of(text: str) -> list[str]:
    """The anchors of the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", text, flags=re.M)
    return [re.sub(r"[^a-z0-9_ -]", "", heading.lower()).replace(" ", "-") for heading in headings]


PAGES = [*ROOT.glob("*.md"), *ROOT.glob("*/README.md"), *(ROOT / "docs").rglob("*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_its_links_and_pictures_are_files(page):
    prose = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.M | re.S)
    assert "torchrl-kl/" not in prose  # an address that does not exist
    for link in re.findall(r"\]\((?!https:)([^)\s]+)\)", prose):
        target, _, anchor = link.partition("#")
        file = page.parent / target if target else page
        assert file.exists(), link
        assert not anchor or anchor in anchors_of(file.read_text()), link


def test_the_home_page_begins_with_the_picture_that_readme_begins_with():
    first = [
        re.findall(r"!\[.*\]\((?:docs/)?(.+)\)", page)[0]
        for page in (README, (ROOT / "docs" / "index.md").read_text())
    ]
    assert first[0] == first[1]


def test_the_errors_that_pitfalls_quotes_are_raised():
    page = (ROOT / "docs" / "pitfalls.md").read_text()
    titles = re.findall(r'^\*\*(".+?)\*\*', page, flags=re.M)
    quoted = re.findall(r'"(?:\.\.\. )?([^"]+)"', " ".join(titles))
    trees = [ast.parse(path.read_text()) for path in (ROOT / "torchrl_kl").rglob("*.py")]
    strings = [
        node.value
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    assert len(quoted) == 4
    for words in quoted:
        pattern = re.sub(r"\d+", r"\\{\\d}", re.escape(words))
        assert any(re.search(pattern, string) for string in strings), words


def test_every_public_name_is_in_the_documentation():
    pages = "".join(path.read_text() for path in (ROOT / "docs" / "api").glob("*.md"))
    language, exact = torchrl_kl.language, torchrl_kl.exact
    for module in (torchrl_kl, torchrl_kl.envs, torchrl_kl.functional, language, exact):
        for name in module.__all__:
            assert pages.count(f"\n::: {module.__name__}.{name}\n") == 1, name


def test_the_house_and_its_way_are_those_of_the_code():
    package = ROOT / "torchrl_kl"
    house, way = re.findall(
        r"```\n((?:torchrl_kl/\n| *an env step ).*?)```", CONTRIBUTING, flags=re.S
    )
    rooms = {path.name for path in package.glob("*.py")} - {"__init__.py"}
    rooms |= {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}
    assert rooms <= set(re.findall(r"^ {0,2}(\w+(?:/|\.py))", house, flags=re.M))
    steps = re.findall(r"([\w/]+\.py) +(?:\w+\.)?(\w+)", way)
    assert len(steps) == 19
    for file, function in steps:
        assert f"def {function}(" in (package / file).read_text(), (file, function)
