"""Ranks that train one policy drift apart in their coefficients, unless they share them."""

import pytest

from tests.distributed import digits
from tests.distributed.ranks import on_ranks


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_coefficients_do_not_drift_apart(tmp_path):
    one, other = on_ranks([digits.drift], 2, tmp_path)["drift"]
    apart = [max(a / b, b / a) for a, b in zip(one["alone"], other["alone"], strict=True)]
    assert max(apart) > 1.2
    assert one["group"] == other["group"]
    assert len({*one["group"]}) == digits.N_BATCHES
