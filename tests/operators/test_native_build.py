"""Building the native operators, in processes of their own and with compilers of our choosing."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.device.operators.native_build import SOURCES, load_native_module
from tests.forked import run_forked

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


def variables(cache: Path, compiler: str) -> dict[str, str]:
    return {"PHALANX_CACHE_DIR": str(cache), "CXX": compiler, "OMP_NUM_THREADS": "1"}


def start(cache: Path, compiler: str, *choices: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CREATE, *choices],
        env={**os.environ, **variables(cache, compiler)},
        stdout=subprocess.PIPE,
        text=True,
    )


def run(cache: Path, compiler: str, *choices: str) -> str:
    return run_forked(CREATE, choices, variables(cache, compiler)).stdout


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
    compiler, calls = copying_compiler
    processes = [start(tmp_path / "cache", str(compiler), "required") for _ in range(3)]
    assert all("operators native" in process.communicate()[0] for process in processes)
    assert len(list((tmp_path / "cache" / "operators").iterdir())) == 1
    assert calls.read_text().split() == ["link"]


@pytest.mark.long
def test_a_process_waits_for_the_one_that_builds_and_uses_its_file(tmp_path, copying_compiler):
    compiler, calls = copying_compiler
    library = Path(load_native_module().__file__ or "")
    cache = tmp_path / "cache"
    (cache / "operators").mkdir(parents=True)
    lock = os.open(cache / "operators.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    process = start(cache, str(compiler), "required")
    assert process.stdout is not None
    assert "waiting for another process" in process.stdout.readline()
    shutil.copytree(library.parent, cache / "operators" / library.parent.name)
    os.close(lock)
    assert "operators native" in process.communicate()[0]
    assert not calls.exists()


@pytest.mark.long
def test_a_builder_that_is_killed_does_not_block_the_next(tmp_path, copying_compiler):
    compiler, _ = copying_compiler
    begun, never = tmp_path / "begun", tmp_path / "never"
    os.mkfifo(begun)
    os.mkfifo(never)
    told, held = os.open(begun, os.O_RDWR), os.open(never, os.O_RDWR)
    stuck = tmp_path / "stuck"
    stuck.write_text(f"#!/bin/sh\nexec < {never}\necho > {begun}\nread line\n")
    stuck.chmod(0o755)
    killed = start(tmp_path / "cache", str(stuck), "required")
    for _ in SOURCES.glob("*.cpp"):
        os.read(told, 1)  # that compiler has begun
    killed.kill()
    killed.communicate()
    # Its compilers still run, and hold nothing.
    assert "operators native" in run(tmp_path / "cache", str(compiler), "required")
    os.close(held)  # which ends them
    os.close(told)
