"""Processes that are started here, each the leader of a session of its own with a log file.

None outlives this process, however this one ends, and when a leader ends the rest of its session is
killed. Everything belongs to the event loop in which it is made, and to its thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from phalanx.errors import ConfigurationError
from phalanx.roles import lifeline

TAIL_LINES = 20
_TAIL_BYTES = 16384
_PAUSE_S = 0.01
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_SECRETS = ("api-key", "api_key", "admin-key", "roles-key", "token", "password", "secret")
_PROGRAM = (sys.executable, "-I", "-S", lifeline.__file__)


@dataclass(frozen=True)
class Command:
    """What to run, in which environment."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]

    def shown(self) -> str:
        """The arguments for a log: without secrets."""
        words = list(self.arguments)
        for at, word in enumerate(words[1:], 1):
            before = words[at - 1].lower()
            if before.startswith("--") and before.endswith(_SECRETS):
                words[at] = "(set)"
            elif any(f"{secret}=" in word.lower() for secret in _SECRETS):
                words[at] = word.partition("=")[0] + "=(set)"
        return shlex.join(words)


class ChildProcess:
    """One of them. It belongs to whoever started it, who stops it."""

    def __init__(
        self, process: subprocess.Popen[bytes], log_file: Path, log_start: int = 0
    ) -> None:
        """`log_start` is how long the log was before."""
        self.pid = process.pid
        self.log_file = log_file
        self._log_start = log_start
        self._process = process
        self._pidfd = os.pidfd_open(process.pid)
        self._stopping = False
        loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = loop.create_future()
        self._gone = asyncio.create_task(self._watch())
        loop.add_reader(self._pidfd, self._on_end)

    async def exited(self) -> str:
        """Wait until it ends by itself: how, and the end of its log. Never returns once it is stopped."""
        status = await asyncio.shield(self._ended)
        if self._stopping:
            await asyncio.get_running_loop().create_future()
        return f"it {_how(status)}; {self.tail()}"

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, `grace_s` of patience, SIGKILL; returns when its session is empty.

        Any number of times, also at once.
        """
        if not self._ended.done():
            self._stopping = True
            signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await asyncio.shield(self._ended)
        if not self._ended.done():
            await asyncio.to_thread(lifeline.kill, self.pid)
        await self.gone()

    async def gone(self) -> None:
        """Wait until its session is empty."""
        await asyncio.shield(self._gone)

    def tail(self) -> str:
        """The last lines of its log, in a sentence."""
        lines = last_lines(self.log_file, self._log_start)
        if not lines:
            return f"its log {self.log_file} is empty"
        return f"its log {self.log_file} ends with:\n" + "\n".join(f"  {line}" for line in lines)

    def _on_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        result = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOWAIT)
        assert result is not None
        killed = result.si_code != os.CLD_EXITED
        self._ended.set_result(-result.si_status if killed else result.si_status)

    async def _watch(self) -> None:
        """When the leader has ended, end the rest, and only then let go of its number."""
        await asyncio.shield(self._ended)
        # To look through all processes takes a while on a machine with many; and nobody tells of a
        # session's end.
        while await asyncio.to_thread(lifeline.kill, self.pid):  # noqa: ASYNC110
            await asyncio.sleep(_PAUSE_S)
        self._process.wait()
        os.close(self._pidfd)


class ProcessHost:
    """Starts processes, and has them killed should this one die before it has stopped them.

    `living` is a file that stays open, also after this one has died, until that is done.
    """

    def __init__(self, living: int | None = None) -> None:
        self._living = () if living is None else (living,)
        self._guard: subprocess.Popen[bytes] | None = None
        self._children: set[ChildProcess] = set()
        self._forgetting: set[asyncio.Task[None]] = set()

    def start(
        self, command: Command, log_file: Path, holds: contextlib.ExitStack | None = None
    ) -> ChildProcess:
        """Start `command`, with its environment and nothing else of ours; what it writes goes to
        the end of `log_file`, whose directory is made. `holds` is closed when it is gone.

        Raises `ConfigurationError` where there is no such program, or the log cannot be written.
        """
        program = command.arguments[0]
        if shutil.which(program, path=command.environment.get("PATH")) is None:
            raise ConfigurationError(
                f"there is no program {program!r} that could be run; give the path of one"
            )
        guard = self._running_guard()
        with _opened(log_file) as log:
            log.write(f"{command.shown()}\n".encode())
            log.flush()
            log_start = log.tell()
            process = subprocess.Popen(
                [*_PROGRAM, "run", str(os.getpid()), *command.arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(command.environment),
                start_new_session=True,
            )
        _tell(guard, "+", process.pid)
        child = ChildProcess(process, log_file, log_start)
        self._children.add(child)
        task = asyncio.create_task(self._forget(child, holds or contextlib.ExitStack()))
        self._forgetting.add(task)
        task.add_done_callback(self._forgetting.discard)
        return child

    async def close(self, grace_s: float) -> None:
        """Stop all that still run. Any number of times."""
        await asyncio.gather(*(child.stop(grace_s) for child in tuple(self._children)))
        await asyncio.gather(*self._forgetting)
        if self._guard is not None:
            guard, self._guard = self._guard, None
            guard.kill()  # nothing is left for it to do
            _forget(guard)

    async def _forget(self, child: ChildProcess, holds: contextlib.ExitStack) -> None:
        with holds:
            await child.gone()
        self._children.discard(child)
        if self._guard is not None:
            _tell(self._guard, "-", child.pid)

    def _running_guard(self) -> subprocess.Popen[bytes]:
        if self._guard is not None and self._guard.poll() is not None:
            _forget(self._guard)  # somebody killed it
            self._guard = None
        if self._guard is None:
            self._guard = subprocess.Popen(
                [*_PROGRAM, "watch"],
                stdin=subprocess.PIPE,
                # Whoever reads what this process prints would wait for its end too.
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=self._living,
                start_new_session=True,
                cwd="/",
            )
            for child in self._children:
                _tell(self._guard, "+", child.pid)
        return self._guard


def _opened(log_file: Path) -> BinaryIO:
    try:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        return log_file.open("ab")
    except OSError as error:
        raise ConfigurationError(
            f"cannot write the log {log_file}: {error.strerror}; choose another directory"
        ) from None


def _tell(guard: subprocess.Popen[bytes], sign: str, session: int) -> None:
    assert guard.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # the next start makes another one
        guard.stdin.write(f"{sign}{session}\n".encode())
        guard.stdin.flush()


def _forget(guard: subprocess.Popen[bytes]) -> None:
    assert guard.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        guard.stdin.close()
    guard.wait()


def _how(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


def last_lines(file: Path, start: int = 0, count: int = TAIL_LINES) -> list[str]:
    """The last lines of a text file from byte `start` on, without colours; none of one that cannot
    be read.
    """
    try:
        with file.open("rb") as opened:
            opened.seek(max(start, opened.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = opened.read().decode("utf-8", "replace")
    except OSError:
        return []
    lines = _COLOUR.sub("", text).splitlines()
    return list(deque((line for line in lines if line.strip()), maxlen=count))
