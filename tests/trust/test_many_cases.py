"""The same properties with many more cases, in another process of pytest."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CASES = 100_000


@pytest.mark.long
@pytest.mark.timeout(4 * 3600)
def test_a_hundred_thousand_cases():
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
    result = subprocess.run(
        [*command, *sorted(map(str, (ROOT / "tests" / "trust").glob("test_properties_*.py")))],
        cwd=ROOT,
        env=os.environ | {"PROPERTY_CASES": str(CASES)},
        capture_output=True,
        text=True,
    )
    print(result.stdout[-4000:])
    assert result.returncode == 0, result.stdout[-4000:]
    tried = re.search(r"^ *([\d,]+)  in all$", result.stdout, re.MULTILINE)
    assert tried
    assert int(tried[1].replace(",", "")) >= CASES
