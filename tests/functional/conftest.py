"""What the tests of divergences share."""

import pytest

from tests.functional_helpers import loc_and_scale


@pytest.fixture
def normals():
    return loc_and_scale(4, 3), loc_and_scale(4, 3)
