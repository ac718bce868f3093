"""What a job looks like on a terminal."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from phalanx.cli.job_view import role_lines
from phalanx.cli.roles_table import event_line, job_table
from phalanx.cli.up_screen import UpScreen
from phalanx.cli.words import duration
from phalanx.roles.contracts import Tag
from phalanx.roles.control_messages import Job, JobStage, RoleStatus
from phalanx.roles.events import EventKind, RoleEvent
from phalanx.roles.progress import UnpublishedReplica
from phalanx.routing.roles.snapshot import ReplicaState
from phalanx.testing.clock import ManualClock
from phalanx.wire.discovery import InternalDocument, InternalEngineEntry, InternalModelEntry
from phalanx.wire.phases import PhasesDocument


def engine(number: int, state: str = "ready", **fields: object) -> InternalEngineEntry:
    return InternalEngineEntry(
        engine_id=f"student/{number}",
        state=state,
        base_url=f"http://127.0.0.1:3{number}",
        **{"generation": 1, **fields},
    )


def job(*engines: InternalEngineEntry, stage: JobStage = JobStage.RUNNING, **fields: object) -> Job:
    model = InternalModelEntry(state="ready", engines=engines, weight_version="7")
    document = InternalDocument(role="rollout", topology_revision=3, models={"student": model})
    given = {
        "residency": {"student/0": (Tag.KV_CACHE, Tag.WEIGHTS), "student/1": ()},
        "unpublished": (),
        **fields,
    }
    return Job(
        name="mine",
        epoch="e",
        stage=stage,
        pid=1,
        started_wall_s=0.0,
        control_url="http://127.0.0.1:1",
        gateway_url="http://127.0.0.1:30000",
        gateway_up=True,
        log_directory="/logs",
        last_event=0,
        roles=(RoleStatus(document=document, **given),),
    )


def shown(value: object, width: int = 140) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(value)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_a_row_a_replica():
    lines = shown(
        job_table(
            job(
                engine(0, weight_version="7"),
                engine(1, "sleeping", generation=3, detail="put to sleep\nin between\n  at last"),
            ),
            60.0,
        )
    )
    assert lines[0] == "mine: http://127.0.0.1:30000, up 60 s"
    assert lines[2].split() == "rollout student/0 ready 1 7 weights, KV 127.0.0.1:30".split()
    assert lines[3].split() == "student/1 sleeping 3 nothing 127.0.0.1:31".split()
    assert lines[4].strip() == "put to sleep at last"
    assert lines[4].index("put") > lines[3].index("student/1")
    assert len(lines) == 5


@pytest.mark.parametrize("held", [None, ()])
def test_what_nobody_is_certain_of_is_unknown(held):
    blocked = engine(0, blocked=held is not None)
    text = "\n".join(shown(job_table(job(blocked, residency={"student/0": held}), 0.0)))
    assert "unknown" in text
    assert ("blocked" in text) == (held is not None)


def test_replicas_that_start_are_shown_before_they_are_published():
    starting = UnpublishedReplica("student", "student/0", ReplicaState.STARTING, 1, 10.0)
    logged = "2026-01-01T00:00:00.000Z INFO    phalanx.server listening, loading"
    talking = UnpublishedReplica("student", "student/1", ReplicaState.STARTING, 1, 20.0, logged)
    lines = shown(job_table(job(unpublished=(starting, talking), stage=JobStage.STARTING), 40.0))
    assert lines[0] == "mine, starting: http://127.0.0.1:30000, up 40 s"
    assert [line.split() for line in lines[2:]] == [
        ["rollout", "student/0", "starting"],
        ["30", "s"],
        ["student/1", "starting"],
        "20 s: listening, loading".split(),
    ]
    asleep, why = shown(job_table(job(), 40.0))[2:]
    assert asleep.split() == ["rollout", "student", "ready"]
    assert why.strip() == "no replica"


def test_the_phase_of_a_job_is_told_once():
    told = job(engine(0))
    (role,) = told.roles
    document = msgspec.structs.replace(role.document, phase="score")
    told = msgspec.structs.replace(told, roles=(msgspec.structs.replace(role, document=document),))
    assert shown(job_table(told, 0.0))[2].split()[:2] == ["rollout", "(score)"]
    phases = PhasesDocument(number=1, mode="defer", phases=(), phase="score", batch="7")
    lines = shown(job_table(msgspec.structs.replace(told, phases=phases), 0.0))
    assert lines[1].startswith("phase: score of batch 7")
    assert lines[-1].split()[:2] == ["rollout", "student/0"]


def test_a_gateway_that_is_gone_is_said():
    gone = msgspec.structs.replace(job(), gateway_up=False)
    assert "(not there)" in shown(job_table(gone, 0.0))[0]


def event(kind: EventKind, detail: str, **where: str) -> RoleEvent:
    return RoleEvent(1, 0.0, where.pop("role", "rollout"), kind, detail=detail, **where)


def test_an_event_is_a_line():
    moved = event(EventKind.STATE, "dead: killed\nlog", engine_id="student/0")
    assert event_line(moved).endswith(" rollout/student/0: dead: killed log")
    weights = event(EventKind.WEIGHTS, "7", model="student")
    assert event_line(weights).endswith(" rollout/student: weights 7")
    assert event_line(event(EventKind.OPERATION, "stopping", role="")).endswith(" stopping")
    lease = event(EventKind.LEASE, "gave up n0:0")
    assert event_line(lease).endswith(" rollout: gave up n0:0")
    assert event_line(event(EventKind.PUBLISHED, "revision 3")) is None


def test_a_role_after_an_operation_is_a_line_a_model():
    document = job(engine(0), engine(1), engine(2, "dead", detail="gone\nx")).roles[0].document
    assert list(role_lines(document, 2.4)) == [
        "rollout/student: 2 ready, 1 dead, weights 7 (revision 3, 2 s)",
        "  student/2: gone x",
    ]


@pytest.mark.parametrize(
    ("seconds", "words"), [(-1, "0 s"), (119, "119 s"), (600, "10 min"), (9000, "2 h")]
)
def test_durations_are_short(seconds, words):
    assert duration(seconds) == words


def screen(*, terminal: bool) -> tuple[UpScreen, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=terminal)
    return UpScreen(console, ManualClock()), out


def test_without_a_terminal_there_are_lines_only():
    up, out = screen(terminal=False)
    started = event(EventKind.GENERATION, "started", engine_id="student/0")
    up.show(job(stage=JobStage.STARTING), (started,))
    assert up.refresh_s is None
    up.ready(job(engine(0)))
    first, *rest = out.getvalue().splitlines()
    assert first.endswith("rollout/student/0: generation started")
    assert rest == [
        "phalanx: rollout at http://127.0.0.1:30000/rollout: student (1 ready)",
        "phalanx: mine is up; status page http://127.0.0.1:30000/, logs in /logs",
    ]


def test_a_terminal_has_a_table_until_everything_has_started():
    up, out = screen(terminal=True)
    up.show(job(stage=JobStage.STARTING), ())
    assert "student" in out.getvalue()
    up.show(job(engine(0)), ())
    ended = out.getvalue()
    up.show(job(engine(0)), ())
    assert out.getvalue() == ended
