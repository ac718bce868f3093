"""The commands that ask a running job: status, drain, sleep, wake, scale, recover, unblock, weights
and down.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.errors import ConfigurationError

if TYPE_CHECKING:
    from phalanx.wire.discovery import InternalDocument

_JOB = "Which job"
_WAIT_FOR_REQUESTS = ("drain", "deactivate")
Name = Annotated[
    str | None,
    typer.Option("--name", help="The job of this name. [the only one]", rich_help_panel=_JOB),
]
Control = Annotated[
    str | None,
    typer.Option(
        metavar="URL", help="The address of its control process instead.", rich_help_panel=_JOB
    ),
]
Key = Annotated[
    str | None,
    typer.Option(help="The key that it asks for, with --control.", rich_help_panel=_JOB),
]
Role = Annotated[str, typer.Argument(metavar="ROLE", help="As in roles.yaml.")]
Model = Annotated[str, typer.Argument(metavar="ROLE/MODEL", help="As in roles.yaml.")]
Replica = Annotated[
    str,
    typer.Argument(
        metavar="ROLE/MODEL/N", help="A role and one of its replicas, as rollout/student/0."
    ),
]


@dataclass(frozen=True)
class JobAddress:
    """Which job is meant: that of a name, that at an address, or the only one."""

    name: str | None
    control: str | None
    key: str | None


def status(
    as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show it anew with each change, until Ctrl-C.")
    ] = False,
    name: Name = None,
    control: Control = None,
    key: Key = None,
) -> None:
    """Show the roles of a running job: models, replicas, states, and what is in memory."""
    from phalanx.cli.control_client import find_job
    from phalanx.cli.job_view import print_job, watch_job

    if watch and as_json:
        raise ConfigurationError(
            "--watch and --json are both given; programs ask again themselves, or wait at"
            " GET /v1/events of its control_url"
        )
    client = find_job(JobAddress(name, control, key))
    if watch:
        watch_job(client)
    else:
        print_job(client.job(), as_json=as_json)


def drain(role: Role, name: Name = None, control: Control = None, key: Key = None) -> None:
    """Take no more requests for a role, and wait until the running ones have ended.

    What still runs after `deployment.drain_timeout_s` is aborted. `phalanx wake` undoes it.
    """
    _ask(role, "drain", {}, JobAddress(name, control, key))


def sleep(role: Role, name: Name = None, control: Control = None, key: Key = None) -> None:
    """Drain a role, and give back all of its memory. Callers get 503 until it is woken."""
    _ask(role, "deactivate", {}, JobAddress(name, control, key))


def wake(
    role: Role,
    tags: Annotated[
        str | None,
        typer.Option(
            metavar="TAG,...",
            help="Take these parts of the memory alone: weights, kv_cache, cuda_graph. The role"
            " serves once it has all of them.",
        ),
    ] = None,
    name: Name = None,
    control: Control = None,
    key: Key = None,
) -> None:
    """Have a role's memory back, and serve."""
    body: dict[str, object] = {} if tags is None else {"tags": _tags(tags)}
    document = _ask(role, "activate", body, JobAddress(name, control, key))
    if not any(model.engines for model in document.models.values()):
        raise typer.Exit(1)


def scale(
    model: Model,
    replicas: Annotated[int, typer.Argument(help="How many it shall have.")],
    name: Name = None,
    control: Control = None,
    key: Key = None,
) -> None:
    """Start further replicas of a model, or drain and stop the last ones."""
    _ask(*_of_model(model, "scale"), {"replicas": replicas}, JobAddress(name, control, key))


def recover(replica: Replica, name: Name = None, control: Control = None, key: Key = None) -> None:
    """Stop a replica by force, as one that is dead or blocked, and start a new one in its place."""
    role, engine_id = _replica(replica)
    _ask(role, "recover", {"engine_id": engine_id}, JobAddress(name, control, key))


def unblock(
    replica: Replica,
    holds: Annotated[
        str | None,
        typer.Option(
            metavar="TAG,...",
            help="What it holds in memory, on your word; `none` for nothing. For engines that cannot say.",
        ),
    ] = None,
    name: Name = None,
    control: Control = None,
    key: Key = None,
) -> None:
    """Find out what a blocked replica holds in memory, and complete what it was blocked in."""
    role, engine_id = _replica(replica)
    body: dict[str, object] = {"engine_id": engine_id}
    if holds is not None:
        body["holds"] = [] if holds == "none" else _tags(holds)
    _ask(role, "unblock", body, JobAddress(name, control, key))


def weights(
    model: Model,
    path: Annotated[
        str | None,
        typer.Argument(
            help="A checkpoint's directory, or a known name. Without: a trainer has put the weights"
            " into every replica itself."
        ),
    ] = None,
    version: Annotated[
        str, typer.Option(help="What answers call these weights.", show_default=False)
    ] = "",
    name: Name = None,
    control: Control = None,
    key: Key = None,
) -> None:
    """Bring new weights to every replica of a model, while it serves."""
    if not version:
        raise ConfigurationError("give the weights a name with --version, as --version 7")
    address = JobAddress(name, control, key)
    if path is None:
        _ask(*_of_model(model, "weights/confirm"), {"version": version}, address)
    else:
        body = {"path": _checkpoint(path), "version": version}
        _ask(*_of_model(model, "weights"), body, address)


def down(
    now: Annotated[
        bool, typer.Option("--now", help="Do not wait for running requests to end.")
    ] = False,
    name: Name = None,
    control: Control = None,
    key: Key = None,
) -> None:
    """End a job: drain every role, then stop its engines, its gateway and its control process."""
    from phalanx.cli.control_client import find_job
    from phalanx.cli.job_view import follow_to_the_end
    from phalanx.roles.run_file import RunDirectory

    client = find_job(JobAddress(name, control, key))
    job = client.job()
    client.stop(now=now)
    follow_to_the_end(client, job)
    if control is None:
        RunDirectory().wait_for_end(job.name)
    print(f"phalanx: {job.name} is down")


def _ask(
    role: str, operation: str, body: Mapping[str, object], address: JobAddress
) -> InternalDocument:
    """Ask for an operation, wait for its end, and say what the role is then."""
    from phalanx.cli.control_client import find_job
    from phalanx.cli.job_view import role_lines
    from phalanx.cli.operation_progress import goes_on_without_us, waiting_told
    from phalanx.clock import SystemClock

    clock, client = SystemClock(), find_job(address)
    begun_s = clock.monotonic_s()
    waits = operation in _WAIT_FOR_REQUESTS
    if waits and sys.stderr.isatty():
        print(
            f"phalanx: waiting until running requests of {role} have ended; it goes on after Ctrl-C",
            file=sys.stderr,
        )
    with (
        goes_on_without_us(f"role {role!r} goes on with it, see `phalanx status`"),
        waiting_told(client, role) if waits else nullcontext(),
    ):
        document = client.ask(role, operation, body)
    for line in role_lines(document, clock.monotonic_s() - begun_s):
        print(line)
    return document


def _of_model(given: str, operation: str) -> tuple[str, str]:
    """The role, and the operation on its model."""
    role, slash, model = given.partition("/")
    if not (role and slash and model) or "/" in model:
        raise ConfigurationError(f"{given!r} must be ROLE/MODEL, as rollout/student")
    return role, f"models/{model}/{operation}"


def _replica(given: str) -> tuple[str, str]:
    """The role, and the engine's id."""
    role, slash, engine_id = given.partition("/")
    model, _, ordinal = engine_id.rpartition("/")
    if not (role and slash and model and ordinal.isdecimal()) or "/" in model:
        raise ConfigurationError(f"{given!r} must be ROLE/MODEL/N, as rollout/student/0")
    return role, engine_id


def _tags(given: str) -> list[str]:
    """The tags in a list with commas."""
    from phalanx.roles.contracts import Tag

    tags = [tag.strip() for tag in given.split(",")]
    for tag in tags:
        if tag not in list(Tag):
            raise ConfigurationError(f"tag {tag!r} is not known; allowed: {', '.join(Tag)}")
    return tags


def _checkpoint(given: str) -> str:
    """The directory, as an engine with another working directory finds it."""
    from phalanx.cli.checkpoint_progress import prepared_checkpoint

    return str(prepared_checkpoint(given).absolute())
