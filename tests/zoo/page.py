"""The page of models: one row for each family."""

from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.zoo.checks import LENGTH, NOT_ADAPTED, TOLERANCE
from tests.zoo.families import FAMILIES, LEFT_OUT, SETTINGS

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
_HEAD = "| {} | cached | prompts once | tiles | LoRA | remark |\n|---|---|---|---|---|---|"
_TEXT = """# Models

What works with the {n} families of causal language models that are built here, of those in
transformers: small and random ones, with windows and chunks of 4 and of 8 tokens, and texts of up
to {length} tokens. `python -m tests.zoo FOLDER` has written this page on {date}, with
{versions}.

For each family, log-probs that `sample_responses` and rollouts record, for prompts of equal and of
different lengths, the KL of a model with itself, and `KLPenaltyLoss` and its gradient on whole
logits and on tiles, are within {tolerance} of what a new model says of each prefix of each text
alone, unless the remark says otherwise.

- cached ({cached} families): a response of n tokens reads at most 1.1 n positions after the prompt.
  Other models read whole texts at each step; those without a remark take no `past_key_values`, or
  do not count pad tokens, but for those in a cache.
- prompts once ({once}): losses and scores read equal prompts once. Other models read whole rows.
- tiles ({tiles}): `head_chunk` works, see [Large vocabularies](concepts/large_vocabularies.md).
  Elsewhere, the logits of a batch are held in whole.
- LoRA ({lora}): an adapted model, whose reference is itself without adapters. These are on all
  linear layers but {not_adapted}, which PEFT refuses or breaks in
  some families.
- remark: what is refused with an error, and what is warned of.

Not built, since they need more than tokens or other packages: {left_out}.

"""


def row(found: dict[str, Any]) -> str:
    """The row of a family, from what `Checks` found."""
    works = [found[key] for key in ("cached", "once", "tiles", "lora")]
    marks = ["yes" if each else "no" for each in works] if found["read"] else ["-"] * 4
    remarks = [*found["remarks"], *(f"**{fault}**" for fault in dict.fromkeys(found["faults"]))]
    name = found["name"].replace("@", ": ")
    return f"| {' | '.join([name, *marks, '; '.join(remarks).replace('|', '/')])} |"


def write(results: dict[str, dict[str, Any]]) -> None:
    """Writes the page, from what was found of each name."""
    packages = ("torch", "torchrl", "tensordict", "transformers", "peft")
    versions = [f"{name} {version(name).split('+')[0]}" for name in packages]
    read = [results[name] for name in FAMILIES if results[name]["read"]]
    text = _TEXT.format(
        n=len(FAMILIES),
        length=LENGTH,
        date=date.today(),
        versions=", ".join(versions),
        tolerance=TOLERANCE,
        **{key: sum(found[key] for found in read) for key in ("cached", "once", "tiles", "lora")},
        not_adapted=", ".join(f"`{name}`" for name in NOT_ADAPTED),
        left_out=", ".join(LEFT_OUT),
    )
    for title, names in (("family", FAMILIES), ("other settings", SETTINGS)):
        text += "\n".join([_HEAD.format(title), *(row(results[name]) for name in names), "\n"])
    PAGE.write_text(text.rstrip() + "\n")
