"""The demo's folder is on the path, as it is for the demo."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

EXAMPLES = str(Path(__file__).parents[2] / "examples")
if EXAMPLES not in sys.path:
    sys.path.insert(0, EXAMPLES)


@pytest.fixture(scope="package")
def models(tmp_path_factory):
    """Random ones of two layers."""
    from rl.models import tiny_models

    return tiny_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="package")
def undisturbed(models, tmp_path_factory):
    """What a run of two steps is like in which nobody is killed."""
    from tests.examples_rl.undisturbed import run_undisturbed

    return run_undisturbed(models, tmp_path_factory.mktemp("undisturbed") / "loop")
