"""Ray is loaded by who asks for it, and missed with words."""

from __future__ import annotations

import subprocess
import sys

WITHOUT = """
import sys
sys.modules["ray"] = None
from phalanx.errors import ConfigurationError
try:
    import phalanx.roles.ray_cluster.job
except ConfigurationError as error:
    print(error)
"""
LOADED = """
import sys
import phalanx.cli.up_run, phalanx.cli.up_machinery, phalanx.roles.ray_cluster
print("ray" in sys.modules)
"""


def said(program: str) -> str:
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_a_missing_ray_is_said_with_the_command_that_installs_it():
    assert "launcher: ray needs Ray" in said(WITHOUT)
    assert "pip install phalanx[ray]" in said(WITHOUT)


def test_a_local_job_does_not_load_ray():
    assert said(LOADED) == "False\n"
