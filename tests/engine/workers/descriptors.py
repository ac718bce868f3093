"""What this process holds open, and a limit on it."""

from __future__ import annotations

import contextlib
import os
import resource


def num_memory_files(pid: int | str = "self") -> int:
    """Open descriptors of a process that lead to files of ours in memory."""
    folder = f"/proc/{pid}/fd"
    count = 0
    for name in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):
            count += os.readlink(f"{folder}/{name}").startswith("/memfd:phalanx")
    return count


@contextlib.contextmanager
def few_descriptors(num_free: int):
    """Let this process open no more than `num_free` further files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    probes = [os.dup(0) for _ in range(num_free + 1)]
    for probe in probes:
        os.close(probe)
    resource.setrlimit(resource.RLIMIT_NOFILE, (probes[-1], hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
