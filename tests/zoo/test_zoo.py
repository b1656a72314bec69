"""A few families of models do what docs/models.md says; `python -m tests.zoo` runs all of them."""

from typing import Any

import pytest

from tests.zoo.checks import Checks
from tests.zoo.page import PAGE, row

NAMES: list[Any] = ["llama", "gemma3", "falcon_h1", "phi3@longrope"]
SLOW = """
    bert@encoder big_bird@sparse deepseek_v4 doge fuyu gpt_oss llama4 llama@dynamic mamba2 qwen3_5
    reformer xlm-roberta
"""
NAMES += [pytest.param(name, marks=pytest.mark.slow) for name in SLOW.split()]


# Models of transformers and PEFT warn of what is new in them.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_a_family_does_what_the_page_says(name):
    found = Checks(name).run()
    assert not found.faults
    assert row(vars(found)) in PAGE.read_text()
