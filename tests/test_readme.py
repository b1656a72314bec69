"""What README.md and CONTRIBUTING.md say is true of the code."""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from torchrl.envs import TransformedEnv
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_kl import GPT, CausalLMActor, KLConstrainedTransform
from torchrl_kl.envs import DigitLanguageEnv

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()


REPOSITORY = "https://github.com/torchrl-kl/torchrl_kl/blob/main/"
RAW = "https://raw.githubusercontent.com/torchrl-kl/torchrl_kl/main/"
SITE = "https://torchrl-kl.github.io/torchrl_kl/"
LINE = r"reward \d\.\d\d, KL (-?\d\.\d{3}), coefficient (\d\.\d{3}), goals (\d+)"


def program() -> str:
    """The program of README.md."""
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    return code


@pytest.mark.parametrize(
    "batches", [3, pytest.param(20, marks=pytest.mark.slow)], ids=["smallest", "whole"]
)
def test_the_program_runs_and_moves_its_controller(batches, capsys):
    assert program().count(": 20_000") == 1
    names: dict = {}
    exec(compile(program().replace(": 20_000", f": {batches * 1000}"), "README.md", "exec"), names)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == batches
    matches = [re.fullmatch(LINE, line) for line in lines]
    # (batches, 3): KL, coefficient, goals
    rows = [[float(x) for x in match.groups()] for match in matches if match]
    assert len(rows) == batches
    (first_kl, planned, _), second, third = rows[:3]
    assert first_kl == 0.0
    # Planned from the first rewards, whose KL is left out; moved by the KL of the second batch.
    assert 0.0 < planned == second[1] != third[1]
    assert names["controller"].target == 0.2
    if batches == 20:
        last = rows[-5:]
        # Within half of the target; without a penalty it is 2.5 nats and there are no goals.
        assert 0.1 < sum(kl for kl, _, _ in last) / 5 < 0.3
        assert sum(goals for _, _, goals in last) > 0


def test_the_two_commands_are_there():
    assert '    pip install -e ".[examples]" && python examples/digit_rlhf.py\n' in README
    assert '    pip install -e ".[test]" && pytest\n' in README
    assert README.count("&& pytest") == 1  # .ci/run takes the command from that line


def test_it_is_short():
    assert len(README.splitlines()) <= 200


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)]+)\)", README))))
def test_what_it_links_to_is_there(link):
    """Links are absolute, so that they work on the package index too."""
    target, _, anchor = link.partition("#")
    if target.startswith((REPOSITORY, RAW)):
        assert (ROOT / target.removeprefix(REPOSITORY).removeprefix(RAW)).is_file()
    elif target.startswith(SITE):
        name = target.removeprefix(SITE).strip("/") or "index"
        pages = [ROOT / "docs" / f"{name}.md", ROOT / "docs" / name / "index.md"]
        (page,) = [page for page in pages if page.is_file()]
        assert anchor in ["", *anchors_of(page.read_text())]
    elif target:
        assert target.startswith("https://")
    else:
        assert anchor in anchors_of(README)


def anchors_of(text: str) -> list[str]:
    """The anchors of the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", text, flags=re.M)
    return [re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_every_public_name_is_in_the_documentation():
    import torchrl_kl
    import torchrl_kl.envs

    pages = [path.read_text() for path in (ROOT / "docs" / "api").glob("*.md")]
    for package in (torchrl_kl, torchrl_kl.envs):
        for name in package.__all__:
            entry = f"\n::: {package.__name__}.{name}\n"
            assert sum(page.count(entry) for page in pages) == 1, name


def way_in_the_figure(column: int) -> list[tuple[str, str]]:
    """Files and functions of the figure in CONTRIBUTING: for an env step (0) or a batch (-1)."""
    (figure,) = re.findall(r"```\n( *an env step .*?)```", CONTRIBUTING, flags=re.S)
    rows = [re.findall(r"([\w/]+\.py) +(?:\w+\.)?(\w+)", line) for line in figure.splitlines()]
    named = [row[column] for row in rows if row]
    # Nothing is to the right of `_step`: a batch goes on within `forward`.
    return named if column == 0 else [call for call in named if call[1] != "_step"]


def calls_of(function: Callable[[], object]) -> list[tuple[str, str]]:
    """Files and names of the functions of torchrl_kl that are called, in order."""
    calls, package = [], ROOT / "torchrl_kl"

    def note(frame, event, _):
        path = Path(frame.f_code.co_filename)
        if event == "call" and package in path.parents:
            calls.append((str(path.relative_to(package)), frame.f_code.co_name))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return calls


@pytest.mark.parametrize(("column", "length"), [(0, 10), (-1, 9)], ids=["env step", "batch"])
def test_the_figure_names_what_is_called_in_this_order(column, length):
    actor = CausalLMActor(GPT(vocab_size=11, block_size=8))
    stack = KLConstrainedTransform(actor, 0.1)
    with set_exploration_type(ExplorationType.RANDOM):
        if column == 0:
            env = TransformedEnv(DigitLanguageEnv(batch_size=(2,)), stack)
            step = actor(env.reset())
            calls = calls_of(lambda: env.step(step))
        else:
            batch = DigitLanguageEnv(batch_size=(2,)).rollout(4, actor)
            calls = calls_of(lambda: stack(batch))
    way = way_in_the_figure(column)
    assert len(way) == length
    assert len({file for file, _ in way}) == 7
    following = iter(calls)
    for call in way:
        assert call in following, f"{call} is not called where the figure says"


def test_the_house_names_every_room():
    (house,) = re.findall(r"```\n(torchrl_kl/\n.*?)```", CONTRIBUTING, flags=re.S)
    rooms = {path.name for path in (ROOT / "torchrl_kl").glob("_[a-z]*.py")}
    rooms |= {path.name for path in (ROOT / "torchrl_kl").glob("[a-z]*.py")}
    rooms |= {f"{path.parent.name}/" for path in (ROOT / "torchrl_kl").glob("*/__init__.py")}
    assert set(re.findall(r"^ {0,2}(\w+(?:/|\.py))", house, flags=re.M)) >= rooms
    files = [
        path
        for folder in ("torchrl_kl", "examples", "tests")
        for path in (ROOT / folder).rglob("*.py")
    ]
    for name in re.findall(r"[\w*]+\.py", house):
        assert any(path.match(name) for path in files), name


def test_the_table_of_private_names():
    source = (ROOT / "tests" / "test_torchrl_private.py").read_text()
    (names,) = re.findall(r"^NAMES = \((.*?)\)", source, flags=re.S | re.M)
    for name in re.findall(r'"(\w+)"', names):
        assert re.search(rf"[`.]{name}`", CONTRIBUTING), name
    for test in re.findall(r"`(test_\w+)`", CONTRIBUTING):
        assert f"def {test}(" in source, test
