"""Every built-in resource passes the check that a plugin author runs on their own."""

from __future__ import annotations

import pytest

from phalanx.testing.resource_conformance import check_resource
from tests.step.resources.cases import CASES


@pytest.mark.parametrize("name", CASES)
def test_a_built_in_resource_passes_the_check(name):
    check_resource(*CASES[name])
