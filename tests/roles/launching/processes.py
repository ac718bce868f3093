"""Small programs to be started as children, and ways to see what became of processes."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from phalanx.roles.child_process import Command

PATH = {"PATH": os.environ["PATH"]}


def python(program: str, *arguments: object) -> Command:
    """A Python program; `say(text)` in it writes to the first argument, a FIFO or a file."""
    prelude = "import os, signal, subprocess, sys, time\n"
    prelude += "def say(text):\n    with open(sys.argv[1], 'w') as f: f.write(text)\n"
    words = map(str, arguments)
    return Command((sys.executable, "-I", "-S", "-c", prelude + program, *words), PATH)


FOREVER = "say(str(os.getpid())); signal.pause()"
DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN); say(str(os.getpid())); signal.pause()"
WITH_CHILD = """
child = subprocess.Popen([sys.executable, '-I', '-S', '-c', 'import signal; signal.pause()'])
say(f'{os.getpid()} {child.pid}'); signal.pause()
"""


class Fifo:
    """What a child says once, when it has come so far."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = path

    def read(self) -> str:
        return self.path.read_text()


@contextmanager
def watched(*pids: int) -> Iterator[list[int]]:
    """Descriptors that become readable when the processes have ended."""
    descriptors = [os.pidfd_open(pid) for pid in pids]
    try:
        yield descriptors
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def wait_for_end(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        assert poll.poll(60_000), "the process is still there after a minute"


def has_ended(descriptor: int) -> bool:
    return bool(select.select([descriptor], [], [], 0)[0])
