"""`phalanx serve` of a fake policy in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PHALANX = Path(sys.executable).with_name("phalanx")
READY = re.compile(r"at grpc://(?P<grpc>[^\s,;]+)(, HTTP and openpi at (?P<http>http://[^\s;]+))?")


class ServeProcess:
    """`line` is what it said when it was ready."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self.process = process
        self.line = process.stdout.readline()
        found = READY.search(self.line)
        assert found is not None, (self.line, process.communicate())
        self.address, self.url = found["grpc"], found["http"]

    def ended(self, number: int) -> tuple[int, str]:
        """Send a signal; the exit status and what was on stderr."""
        self.process.send_signal(number)
        _, errors = self.process.communicate()
        return self.process.returncode, errors


@contextmanager
def started(
    installed: Path, *arguments: str, **environment: str
) -> Iterator[subprocess.Popen[str]]:
    """The process of `phalanx serve`, which may not be ready; killed on exit."""
    variables = {
        **os.environ,
        "PHALANX_DEVICE": "cpu",
        "PHALANX_NUM_THREADS": "1",
        "PYTHONPATH": str(installed),
        **environment,
    }
    with subprocess.Popen(
        [PHALANX, "serve", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=variables,
    ) as process:
        try:
            yield process
        finally:
            process.kill()
            process.communicate()


@contextmanager
def phalanx_serve(installed: Path, *arguments: str, **environment: str) -> Iterator[ServeProcess]:
    """Ready on entry, killed on exit."""
    with started(installed, *arguments, **environment) as process:
        yield ServeProcess(process)
