"""Runs a job in this process until a signal, or somebody who asks for it, ends it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Self

from rich.console import Console

from phalanx import log, settings
from phalanx.cli.up import INTERRUPTED
from phalanx.cli.up_machinery import machinery
from phalanx.cli.up_screen import UpScreen
from phalanx.clock import SystemClock
from phalanx.errors import ConfigurationError
from phalanx.roles.config import JobConfig
from phalanx.roles.control_process import ControlProcess, JobPlace
from phalanx.roles.run_file import RunDirectory

CONTROL_LOG = "control.log"
_WAIT_S = 60.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_job(job: JobConfig, config: str, name: str, *, detached: bool) -> int:
    """Run it, and give the exit status. `detached`: nobody reads what is said once it is up.

    Raises what kept it from starting, after all that was started has been stopped.
    """
    runs = RunDirectory()
    with runs.claim(name, config) as file:
        given = job.log.directory
        directory = runs.fresh_log_directory(name) if given is None else Path(given)
        _log_to(directory / CONTROL_LOG, job.log.level)
        place = JobPlace(name, file, config, directory)
        return asyncio.run(_run(job, place, detached=detached))


async def _run(job: JobConfig, place: JobPlace, *, detached: bool) -> int:
    clock = SystemClock()
    screen = UpScreen(Console(), clock)
    with _Signals() as signals:
        screen.say(f"starting {place.name}: {', '.join(role.role for role in job.roles)}")
        async with contextlib.AsyncExitStack() as ending:
            try:
                made = await ending.enter_async_context(machinery(job, place))
            except asyncio.CancelledError:  # by a signal: nothing has been started yet
                was_up = False
            else:
                process = ControlProcess(job, place, made, clock)
                signals.act = process.interrupt
                was_up = await _shown(process, screen, place, detached=detached)
        screen.say(f"{place.name} is down")
    return 0 if was_up else INTERRUPTED


async def _shown(
    process: ControlProcess, screen: UpScreen, place: JobPlace, *, detached: bool
) -> bool:
    """Run it to its end, and show what happens; whether it was up before that came."""
    showing = asyncio.create_task(_show(process, screen))
    try:
        return await _until_stopped(process, screen, detached=detached, logs=place.log_directory)
    finally:
        await process.close()
        showing.cancel()
        await asyncio.gather(showing, return_exceptions=True)
        screen.show(process.describe(), process.events.after(screen.last_event))


async def _until_stopped(
    process: ControlProcess, screen: UpScreen, *, detached: bool, logs: Path
) -> bool:
    """Start, and wait for the end; whether it was up before that came."""
    starting = asyncio.create_task(process.start())
    stopped = asyncio.create_task(process.wait())
    try:
        await asyncio.wait((starting, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            return False
        starting.result()
        screen.ready(process.describe())
        if detached:
            _let_go_of_the_terminal(logs / CONTROL_LOG)
        await stopped
    finally:
        starting.cancel()
        stopped.cancel()
        await asyncio.gather(starting, stopped, return_exceptions=True)
    return True


async def _show(process: ControlProcess, screen: UpScreen) -> None:
    """Show what happens, as it happens."""
    while True:
        events = await process.events.wait(screen.last_event, screen.refresh_s or _WAIT_S)
        screen.show(process.describe(), events)


class _Signals:
    """Calls `act` at each signal while it is open; at first that cancels the task that opened it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        self.act: Callable[[], object] = task.cancel

    def __enter__(self) -> Self:
        for number in _SIGNALS:
            self._loop.add_signal_handler(number, lambda: self.act())
        return self

    def __exit__(self, *error: object) -> None:
        for number in _SIGNALS:
            self._loop.remove_signal_handler(number)


def _log_to(file: Path, level: str | None) -> None:
    try:
        log.configure(level or settings.log_level() or "INFO", file=file)
    except OSError as error:
        raise ConfigurationError(f"cannot write the log {file}: {error.strerror}") from None


def _let_go_of_the_terminal(file: Path) -> None:
    """What is printed from now on goes to a file, and whoever read it has read all."""
    sys.stdout.flush()
    with file.open("ab") as opened:
        for number in (1, 2):
            os.dup2(opened.fileno(), number)
