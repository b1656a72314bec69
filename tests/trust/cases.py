"""How many cases Hypothesis tries of each property, and how many it has tried.

`PROPERTY_CASES` is the number of cases of all properties together, each of which takes its share.
"""

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

ALL_SHARES = 2_000
ALL_CASES = int(os.environ.get("PROPERTY_CASES", 800))
# A slow case is a slow machine's, and none of the properties draws large data.
UNCHECKED = [HealthCheck.too_slow, HealthCheck.data_too_large]

completed = 0  # cases of this process whose property held


def _settings(share: int, **options: Any) -> settings:
    """`share`: cases out of ALL_SHARES."""
    number = max(ALL_CASES * share // ALL_SHARES, 1)
    return settings(max_examples=number, suppress_health_check=UNCHECKED, deadline=None, **options)


def cases(share: int, **strategies: Any) -> Callable[[Callable[..., None]], Any]:
    """A property of what the strategies draw, of which `share` cases are tried by default."""

    def decorate(test: Callable[..., None]) -> Any:
        @functools.wraps(test)
        def counted(*args: Any, **kwargs: Any) -> None:
            global completed
            test(*args, **kwargs)
            completed += 1

        return _settings(share)(given(**strategies)(counted))

    return decorate


class Machine(RuleBasedStateMachine):
    """Calls in any order; each sequence of calls is a case."""

    def teardown(self) -> None:
        global completed
        if sys.exc_info()[0] is None:  # neither failed nor given up by Hypothesis
            completed += 1


def run(machine: type[Machine], share: int, steps: int = 20) -> None:
    """Tries `share` sequences, by default, of up to `steps` calls."""
    run_state_machine_as_test(machine, settings=_settings(share, stateful_step_count=steps))
