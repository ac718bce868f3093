"""What the command line shows of a job that runs in another process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import msgspec
from rich.console import Console
from rich.text import Text

from phalanx.cli.control_client import ControlClient
from phalanx.cli.frames import frames
from phalanx.cli.phase_view import phase_lines
from phalanx.cli.roles_table import event_line, job_table
from phalanx.cli.words import duration, on_one_line
from phalanx.clock import SystemClock
from phalanx.roles.control_messages import Job
from phalanx.roles.run_file import NoJobError
from phalanx.wire.discovery import InternalDocument, InternalModelEntry
from phalanx.wire.phases import PhasesDocument

_WAIT_S = 5.0
_WHOLE_LINES = 10_000


def print_job(job: Job, *, as_json: bool) -> None:
    """As a table, or as JSON for programs."""
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(job), indent=2).decode())
    else:
        _console().print(job_table(job, SystemClock().wall_s()))


def watch_job(client: ControlClient) -> None:
    """Show the job anew with each change, until Ctrl-C or its end."""
    clock, console, job = SystemClock(), _console(), client.job()
    shown: Job | None = None
    try:
        with frames(console) as show:
            while True:
                # A picture is kept up to date; of lines, the same ones again say nothing.
                if console.is_terminal or job != shown:
                    show(job_table(job, clock.wall_s()))
                shown = job
                client.events(job.last_event, _WAIT_S)
                job = client.job()
    except KeyboardInterrupt:
        return
    except NoJobError:
        print("the job has ended")


def print_phases(document: PhasesDocument, *, as_json: bool) -> None:
    """Where a job is, in lines, or as JSON for programs."""
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())
    else:
        for line in phase_lines(document, SystemClock().wall_s()):
            print(line)


def watch_phases(client: ControlClient) -> None:
    """Show anew where the job is with each change, until Ctrl-C or its end."""
    clock, console, document = SystemClock(), _console(), client.phases()
    shown: PhasesDocument | None = None
    try:
        with frames(console) as show:
            while True:
                if console.is_terminal or document != shown:
                    show(Text("\n".join(phase_lines(document, clock.wall_s()))))
                shown = document
                document = client.phases(document.number, _WAIT_S)
    except KeyboardInterrupt:
        return
    except NoJobError:
        print("the job has ended")


def _console() -> Console:
    """Where nobody looks, whoever reads it wants whole lines."""
    console = Console()
    return console if console.is_terminal else Console(width=_WHOLE_LINES)


def follow_to_the_end(client: ControlClient, job: Job) -> None:
    """Print what happens in a job until its control process has gone."""
    last = job.last_event
    while True:
        try:
            events = client.events(last, _WAIT_S)
        except NoJobError:
            return
        for event in events:
            last = event.number
            if (line := event_line(event)) is not None:
                print(line, flush=True)


def _why_none(role: str, name: str, model: InternalModelEntry) -> str:
    """That a model has no replica, and what gives it some."""
    return (
        f"{model.state}, has no replicas: `phalanx wake {role}` without --tags starts what was never"
        f" started, `phalanx scale {role}/{name} N` adds some"
    )


def role_lines(document: InternalDocument, seconds: float) -> Iterator[str]:
    """A role after an operation that took so long: a line a model."""
    for name, model in document.models.items():
        states = Counter(engine.state for engine in model.engines)
        counted = ", ".join(f"{num} {state}" for state, num in states.items()) or _why_none(
            document.role, name, model
        )
        version = f", weights {model.weight_version}" if model.weight_version else ""
        yield (
            f"{document.role}/{name}: {counted}{version}"
            f" (revision {document.topology_revision}, {duration(seconds)})"
        )
        for engine in model.engines:
            if isinstance(engine.detail, str) and engine.detail:
                yield f"  {engine.engine_id}: {on_one_line(engine.detail)}"
