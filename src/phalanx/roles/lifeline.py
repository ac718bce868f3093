"""What keeps processes from outliving the one that started them: a program of the standard library
alone, which is run by its path, and the functions that find and end all processes of a session.

`lifeline.py run PARENT COMMAND...` becomes COMMAND, which the kernel kills with its parent.
`lifeline.py watch` reads `+SESSION` and `-SESSION` lines; at their end it kills what is left of the
sessions that it was told of. The end comes with the death of the writer, whatever kills it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
from collections.abc import Iterable
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_PAUSE_S = 0.01


def members(session: int) -> list[int]:
    """The processes of a session that run; not those that have ended and are not yet waited for."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdecimal():
            continue
        with contextlib.suppress(OSError):  # it has ended meanwhile
            with open(f"/proc/{entry}/stat", "rb") as file:
                # The name, in brackets, may hold anything.
                state, _, _, its_session = file.read().rpartition(b")")[2].split()[:4]
            if int(its_session) == session and not (state in (b"Z", b"X") and _over(int(entry))):
                found.append(int(entry))
    return found


def _over(process: int) -> bool:
    """Whether all threads of a process have ended whose first one has."""
    pidfd = os.pidfd_open(process)
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return bool(poll.poll(0))
    finally:
        os.close(pidfd)


def kill(session: int) -> bool:
    """Kill every process of a session; whether there was one.

    Its leader must not have been waited for by then, so that its number is nobody else's.
    """
    found = members(session)
    for process in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    return bool(found)


def main(arguments: list[str]) -> NoReturn:
    if arguments[0] == "run":
        _run(int(arguments[1]), arguments[2:])
    _watch(sys.stdin)


def _run(parent: int, command: list[str]) -> NoReturn:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before that
        sys.exit("the process that started this one is gone")
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"cannot run {command[0]}: {error.strerror}")


def _watch(lines: Iterable[str]) -> NoReturn:
    sessions: set[int] = set()
    for line in lines:
        number = int(line[1:])
        if line[0] == "+":
            sessions.add(number)
        else:
            sessions.discard(number)
    pause = threading.Event()  # never set
    while any([kill(session) for session in sessions]):
        pause.wait(_PAUSE_S)
    sys.exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
