"""Every small model passes the check of nodes, and its settings make a difference."""

from __future__ import annotations

import pytest

from phalanx.testing import check_submodule
from tests.testing.models import CASES

SLOW = {"decoder", "guided flow"}


@pytest.mark.parametrize("name", [name for name in CASES if name not in SLOW])
def test_a_small_model_passes_the_check(name):
    check_submodule(CASES[name])


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(SLOW))
def test_a_larger_one_does_too(name):
    check_submodule(CASES[name])
