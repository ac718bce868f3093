"""Building the native operators, in processes of their own and with compilers of our choosing."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.device.operators.native_build import load_native_module

CREATE = """
import logging, sys, torch
from phalanx.device.operators import create_operators
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stdout)
for choice in sys.argv[1:]:
    try:
        print("operators", create_operators(choice, "cpu", torch.bfloat16).name)
    except Exception as error:
        print(type(error).__name__, error)
"""


def start(cache: Path, compiler: str, *choices: str) -> subprocess.Popen[str]:
    env = {**os.environ, "PHALANX_CACHE_DIR": str(cache), "CXX": compiler, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", CREATE, *choices], env=env, stdout=subprocess.PIPE, text=True
    )


def run(cache: Path, compiler: str, *choices: str) -> str:
    process = start(cache, compiler, *choices)
    return process.communicate()[0]


@pytest.fixture
def copying_compiler(tmp_path):
    """A compiler that takes the library which this test run already uses; `calls` counts links."""
    library = load_native_module().__file__
    script, calls = tmp_path / "cxx", tmp_path / "calls"
    script.write_text(
        "#!/bin/sh\n"
        'for last in "$@"; do [ "$previous" = -o ] && target="$last"; previous="$last"; done\n'
        f'case "$*" in *-shared*) echo link >> {calls}; cp {library} "$target";;'
        ' *) touch "$target";; esac\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script, calls


def test_without_a_compiler_torch_serves_and_one_line_says_so(tmp_path):
    out = run(tmp_path, "/nowhere/c++", "auto", "required")
    assert "operators torch" in out
    told = [line for line in out.splitlines() if line.startswith("INFO")]
    assert len(told) == 1 and "/nowhere/c++" in told[0] and "plain torch serves" in told[0]
    assert "MissingDependencyError" in out and "native_operators='off'" in out


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing_behind(tmp_path):
    failing = tmp_path / "cxx"
    failing.write_text("#!/bin/sh\necho fatal: no such header >&2\nexit 1\n")
    failing.chmod(0o755)
    out = run(tmp_path / "cache", str(failing), "required")
    assert "MissingDependencyError" in out and "fatal: no such header" in out
    assert list((tmp_path / "cache" / "operators").iterdir()) == []


@pytest.mark.long
def test_what_was_built_is_used_again(tmp_path, copying_compiler):
    compiler, calls = copying_compiler
    for _ in range(2):
        assert "operators native" in run(tmp_path / "cache", str(compiler), "required")
    assert calls.read_text().split() == ["link"]


@pytest.mark.long
def test_processes_may_build_at_the_same_time(tmp_path, copying_compiler):
    compiler, _ = copying_compiler
    processes = [start(tmp_path / "cache", str(compiler), "required") for _ in range(3)]
    assert all("operators native" in process.communicate()[0] for process in processes)
    assert len(list((tmp_path / "cache" / "operators").iterdir())) == 1
