"""The README's example runs as it is, and its commands are the ones that are checked."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


@pytest.mark.filterwarnings("ignore:Exploration type:UserWarning")
def test_the_example_runs_and_moves_its_controller(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.S)
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    lines = capsys.readouterr().out.splitlines()
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
