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


def run_example(number: int, capsys) -> tuple[dict, list[str]]:
    """The names and the printed lines of an example of README.md."""
    code = re.findall(r"```python\n(.*?)```", README, flags=re.S)[number]
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    return names, capsys.readouterr().out.splitlines()


def test_the_example_of_language_models_begins_at_its_reference(capsys):
    _, lines = run_example(1, capsys)
    matches = [re.fullmatch(r"KL ([+-]\d\.\d{3}) nats per response", line) for line in lines]
    kl = [float(match[1]) for match in matches if match]
    assert len(kl) == 5
    assert kl[0] == 0.0
    assert kl[-1] != 0.0


@pytest.mark.filterwarnings("ignore:Exploration type:UserWarning")
def test_the_example_runs_and_moves_its_controller(capsys):
    names, lines = run_example(0, capsys)
    assert len(lines) == 4
    assert all(
        re.fullmatch(r"KL [+-]\d\.\d{4} nats per step, coefficient \d\.\d{3}", line)
        for line in lines
    )
    assert names["controller"].coeff.item() != 0.1


def test_the_two_commands_are_there():
    assert '    pip install -e ".[examples]" && python examples/digit_rlhf.py\n' in README
    assert '    pip install -e ".[test]" && pytest\n' in README
    assert README.count("&& pytest") == 1  # .ci/run takes the command from that line


@pytest.mark.parametrize("link", re.findall(r"\]\(((?!http)[^)]+)\)", README))
def test_what_it_links_to_is_there(link):
    assert (ROOT / link.split("#")[0]).exists()


def test_it_names_every_public_part():
    import torchrl_kl
    import torchrl_kl.envs

    for name in [*torchrl_kl.__all__, *torchrl_kl.envs.__all__]:
        assert f"`{name}" in README or f"{name}`" in README or f".{name}`" in README, name


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
