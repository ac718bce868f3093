"""A job as a table: its roles, models and replicas, with their states."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

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
_LOGGED = re.compile(r"\S+Z +[A-Z]+ +\S+ (.*)")
_SHORT = {"weights": "weights", "kv_cache": "KV", "cuda_graph": "graphs"}


def job_table(job: Job, wall_s: float) -> RenderableType:
    """The job as it is at `wall_s`."""
    table = Table(box=None, pad_edge=False)
    for name in ("role", "replica", "state", "starts", "weights", "in memory", "address", ""):
        table.add_column(name, overflow="fold", no_wrap=name in ("role", "replica", "state"))
    for status in job.roles:
        for row in _rows(status, wall_s):
            table.add_row(*row)
    return Group(Text(_title(job, wall_s), style="bold"), table)


def _title(job: Job, wall_s: float) -> str:
    gateway = job.gateway_url if job.gateway_up else f"{job.gateway_url} (not there)"
    stage = "" if job.stage is JobStage.RUNNING else f", {job.stage}"
    return f"{job.name}{stage}: {gateway}, up {duration(wall_s - job.started_wall_s)}"


def _rows(status: RoleStatus, wall_s: float) -> Iterator[tuple[str | Text, ...]]:
    document = status.document
    role = f"{document.role} ({document.phase})" if document.phase else document.role
    coming = {replica.model for replica in status.unpublished}
    num_rows = 0
    for name, model in document.models.items():
        if model.router_url is not None:
            where = f"router at {model.router_url}"
            yield "" if num_rows else role, name, _state(model.state), "", "", "", where, ""
            num_rows += 1
        for engine in model.engines:
            yield "" if num_rows else role, *_engine(engine, status)
            num_rows += 1
        if not model.engines and model.router_url is None and name not in coming:
            yield "" if num_rows else role, name, _state(model.state), "", "", "", "", "no replica"
            num_rows += 1
    for replica in status.unpublished:
        since = duration(wall_s - replica.since_wall_s)
        note = f"{since}: {_message(on_one_line(replica.detail))}".removesuffix(": ")
        state = _state(replica.state)
        yield "" if num_rows else role, replica.engine_id, state, "", "", "", "", note
        num_rows += 1


def _engine(engine: InternalEngineEntry, status: RoleStatus) -> tuple[str | Text, ...]:
    held = status.residency.get(engine.engine_id, ())
    if engine.blocked or held is None:
        memory = "unknown"
    else:
        parts = [name for tag, name in _SHORT.items() if tag in held]
        memory = "all" if len(parts) == len(_SHORT) else ", ".join(parts) or "nothing"
    detail = engine.detail if isinstance(engine.detail, str) else ""
    return (
        engine.engine_id,
        _state("blocked" if engine.blocked else engine.state),
        str(engine.generation),
        engine.weight_version or "",
        memory,
        (engine.base_url or "").removeprefix("http://"),
        on_one_line(detail),
    )


def _state(state: str) -> Text:
    return Text(state, style=STYLES.get(state, "bold red" if state == "blocked" else ""))


def event_line(event: RoleEvent) -> str | None:
    """An event on one line; None for one that says nothing to people."""
    if event.kind is EventKind.PUBLISHED:
        return None
    who = "/".join(filter(None, (event.role, event.engine_id or event.model)))
    plain = event.kind in (EventKind.STATE, EventKind.OPERATION) or not who
    told = on_one_line(event.detail if plain else f"{event.kind} {event.detail}")
    moment = datetime.fromtimestamp(event.wall_s).strftime("%H:%M:%S")
    return f"{moment} {who}: {told}" if who else f"{moment} {told}"


def _message(line: str) -> str:
    """A line of a log without its time, level and logger."""
    logged = _LOGGED.match(line)
    return line if logged is None else logged[1]


def on_one_line(text: str) -> str:
    """The first line, and of more, such as the end of a log, the last one too."""
    first, *more = text.splitlines() or [""]
    return f"{first} {more[-1].strip()}" if more else first


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{max(0.0, seconds):.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h"
