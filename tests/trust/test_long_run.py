"""benchmarks/long_run.py at a small size: nothing grows, and what grows is told."""

import json

import pytest

from tests.scripts import lanes, load

script = load("benchmarks/long_run.py")
finished = lanes("benchmarks/long_run.py", "--frames 2400 --digit-rows 16 --pole-rows 4")
FIGURES = {"memory", "batch", "pickle", "open", "descriptors", "threads", "children"}


@pytest.mark.parametrize("job", ["digit job", "CartPole"])
def test_nothing_grows(finished, job):
    report = json.loads((finished.out / "long_run.json").read_text())
    rows = {row["name"]: row for row in report[job]["growth"]}
    assert rows.keys() == FIGURES
    assert finished.printed.count(f"| {job} |") == len(FIGURES)
    # Times depend on what else runs on the machine.
    assert {name for name, row in rows.items() if not row["flat"]} <= {"batch"}
    assert report[job]["batches"] >= 8


@pytest.mark.parametrize(
    ("name", "step", "flat"),
    [
        ("memory", 0.0, True),
        ("memory", 0.04, True),  # 1.6 MiB more after half of the run, of 100 MiB
        ("memory", 0.06, False),  # 2.4 MiB
        ("descriptors", 0.1, False),
        ("open", 0.1, False),
        ("open", -1.0, True),
    ],
)
def test_growth_is_told(name, step, flat):
    """`step`: what each of 80 batches adds."""
    start = {"memory": 100.0, "open": 4.0}.get(name, 6.0)
    measured = [{name: start + step * n} for n in range(80)]
    (growth,) = script.growth_of(measured, n_rows=4)
    assert growth.flat == flat
    # The means of batches 20 to 39 and 60 to 79.
    assert growth.last - growth.second == pytest.approx(40 * step)
