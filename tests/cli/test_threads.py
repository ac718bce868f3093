"""Commands let idle OpenMP threads sleep, before torch is there to be told otherwise."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CODE = """
import os, sys
from phalanx.cli.main import main
try:
    main(["version"])
except SystemExit:
    pass
print(os.environ.get("GOMP_SPINCOUNT"), "torch" in sys.modules)
"""


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "5000"),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "active"}, "None"),
    ],
)
def test_threads_spin_shortly_unless_the_user_chose(given, expected):
    unset = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}
    base = {name: value for name, value in os.environ.items() if name not in unset}
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env={**base, **given},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == f"{expected} False"
