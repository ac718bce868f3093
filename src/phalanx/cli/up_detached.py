"""Starts a job in a session of its own, and returns when it is up."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from phalanx.roles.gateway_process import PROGRAM
from phalanx.roles.run_file import NoJobError, RunDirectory


def up_detached(config: Path, name: str, assigned: Sequence[str]) -> int:
    """The exit status. What the job prints while it starts is printed here; Ctrl-C stops it."""
    command = [*PROGRAM[:-1], "up", str(config), "--name", name, "--detached"]
    for pair in assigned:
        command += ["--set", pair]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    with process.stdout as said:
        while True:
            try:
                # It closes its output once it is up, or by its end.
                for line in said:
                    sys.stdout.buffer.write(line)
                    sys.stdout.flush()
                break
            except KeyboardInterrupt:
                process.send_signal(signal.SIGINT)
    # Where the name is another job's, that one runs, and this one has ended.
    try:
        is_up = RunDirectory().find(name).pid == process.pid
    except NoJobError:
        is_up = False
    return 0 if is_up else process.wait()
