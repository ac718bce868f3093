"""A job as a table: its roles, models and replicas, with their states."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from rich.console import Group, RenderableType
from rich.text import Text

from phalanx.cli.device_lines import device_lines
from phalanx.cli.phase_view import phase_lines
from phalanx.cli.words import duration, on_one_line
from phalanx.roles.control_messages import Job, JobStage, RoleStatus
from phalanx.roles.events import EventKind, RoleEvent
from phalanx.wire.discovery import InternalEngineEntry

STYLES = {
    "ready": "green",
    "dead": "bold red",
    "starting": "yellow",
    "onloading": "yellow",
    "draining": "magenta",
    "sleeping": "blue",
}
_COLUMNS = ("role", "replica", "state", "starts", "weights", "in memory", "address")
_GAP = "  "
_LOGGED = re.compile(r"\S+Z +[A-Z]+ +\S+ (.*)")
_SHORT = {"weights": "weights", "kv_cache": "KV", "cuda_graph": "graphs"}


def job_table(job: Job, wall_s: float) -> RenderableType:
    """The job as it is at `wall_s`: its phase where roles take turns, a line a replica, and its
    detail on one below.
    """
    phases = [Text(line) for line in _phases(job, wall_s)]
    rows = [row for status in job.roles for row in _rows(status, wall_s, with_phase=not phases)]
    cells = [Text.styled(name, "bold") for name in _COLUMNS]
    widths = [
        max(len(name), *(len(row.cells[at]) for row in rows)) if rows else len(name)
        for at, name in enumerate(_COLUMNS)
    ]
    lines = [Text(_title(job, wall_s), style="bold"), *phases, _line(cells, widths)]
    for row in rows:
        lines.append(_line(row.cells, widths))
        if row.detail:
            lines.append(Text(f"{' ' * (widths[0] + len(_GAP))}{_GAP}{row.detail}"))
    return Group(*lines, *device_lines(job.devices))


@dataclass(frozen=True)
class _Row:
    """A cell a column, and what is told below them."""

    cells: tuple[Text, ...]
    detail: str = ""


def _row(*cells: str | Text, detail: str = "") -> _Row:
    """Columns at the end may be left out."""
    made = [Text(cell) if isinstance(cell, str) else cell for cell in cells]
    made += [Text()] * (len(_COLUMNS) - len(made))
    return _Row(tuple(made), detail)


def _line(cells: Sequence[Text], widths: Sequence[int]) -> Text:
    line = Text()
    for cell, width in zip(cells, widths, strict=True):
        line.append_text(cell).append(" " * (width - len(cell)) + _GAP)
    line.rstrip()
    return line


def _title(job: Job, wall_s: float) -> str:
    gateway = job.gateway_url if job.gateway_up else f"{job.gateway_url} (not there)"
    stage = "" if job.stage is JobStage.RUNNING else f", {job.stage}"
    return f"{job.name}{stage}: {gateway}, up {duration(wall_s - job.started_wall_s)}"


def _phases(job: Job, wall_s: float) -> Iterator[str]:
    """Nothing of a job that has no phases to speak of."""
    phases = job.phases
    if phases is not None and (phases.leases or phases.batch is not None):
        yield from phase_lines(phases, wall_s)


def _rows(status: RoleStatus, wall_s: float, *, with_phase: bool) -> Iterator[_Row]:
    """Only the first of them has the role's name, and the phase that callers are told."""
    document = status.document
    phase = f" ({document.phase})" if with_phase and document.phase else ""
    names = iter([document.role + phase])
    coming = {replica.model for replica in status.unpublished}
    for name, model in document.models.items():
        if model.router_url is not None:
            where = f"router at {model.router_url}"
            yield _row(next(names, ""), name, _state(model.state), "", "", "", where)
        for engine in model.engines:
            yield _engine(next(names, ""), engine, status)
        if not model.engines and model.router_url is None and name not in coming:
            yield _row(next(names, ""), name, _state(model.state), detail="no replica")
    for replica in status.unpublished:
        since = duration(wall_s - replica.since_wall_s)
        note = f"{since}: {_message(on_one_line(replica.detail))}".removesuffix(": ")
        yield _row(next(names, ""), replica.engine_id, _state(replica.state), detail=note)


def _engine(role: str, engine: InternalEngineEntry, status: RoleStatus) -> _Row:
    held = status.residency.get(engine.engine_id, ())
    if engine.blocked or held is None:
        memory = "unknown"
    else:
        parts = [name for tag, name in _SHORT.items() if tag in held]
        memory = "all" if len(parts) == len(_SHORT) else ", ".join(parts) or "nothing"
    return _row(
        role,
        engine.engine_id,
        _state("blocked" if engine.blocked else engine.state),
        str(engine.generation),
        engine.weight_version or "",
        memory,
        (engine.base_url or "").removeprefix("http://"),
        detail=on_one_line(engine.detail) if isinstance(engine.detail, str) else "",
    )


def _state(state: str) -> Text:
    return Text(state, style=STYLES.get(state, "bold red" if state == "blocked" else ""))


_PLAIN = (EventKind.STATE, EventKind.OPERATION, EventKind.LEASE)
"""What these say is a whole phrase."""


def event_line(event: RoleEvent) -> str | None:
    """An event on one line; None for one that says nothing to people."""
    if event.kind is EventKind.PUBLISHED:
        return None
    who = "/".join(filter(None, (event.role, event.engine_id or event.model)))
    plain = event.kind in _PLAIN or not who
    told = on_one_line(event.detail if plain else f"{event.kind} {event.detail}")
    moment = datetime.fromtimestamp(event.wall_s).strftime("%H:%M:%S")
    return f"{moment} {who}: {told}" if who else f"{moment} {told}"


def _message(line: str) -> str:
    """A line of a log without its time, level and logger."""
    logged = _LOGGED.match(line)
    return line if logged is None else logged[1]
