"""Prints how many cases of the properties have been tried."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.trust import cases


@pytest.fixture(autouse=True)
def count_cases(record_property: Callable[[str, object], None]) -> Iterator[None]:
    before = cases.completed
    yield
    record_property("cases", cases.completed - before)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    # From the reports, which pytest-xdist sends from its processes to this one.
    reports = [r for name in ("", "passed", "failed") for r in terminalreporter.stats.get(name, [])]
    tried = {
        report.nodeid: dict(report.user_properties)["cases"]
        for report in reports
        if getattr(report, "when", None) == "teardown" and "cases" in dict(report.user_properties)
    }
    tried = {name: number for name, number in tried.items() if number}
    if not tried:
        return
    terminalreporter.section("cases of properties")
    for name, number in sorted(tried.items()):
        terminalreporter.write_line(f"{number:8,}  {name.split('/')[-1]}")
    terminalreporter.write_line(f"{sum(tried.values()):8,}  in all")
