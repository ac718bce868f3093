"""What `phalanx up` would run: all of a file, checked before anything is started."""

from __future__ import annotations

import contextlib
import io
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from phalanx.checkpoints import check_checkpoint
from phalanx.cli.listening import check_host
from phalanx.cli.peer_packages import peer_packages
from phalanx.cli.serve import assignments, serve
from phalanx.cli.words import unreadable
from phalanx.errors import ConfigurationError, InvalidInputError
from phalanx.gateway.config import MIB, GatewayConfig
from phalanx.roles.child_process import Command
from phalanx.roles.config import JobConfig, parse_job
from phalanx.roles.contracts import ReplicaLaunch
from phalanx.roles.engine_command import EnginePrograms, EngineSpan, ListenAddress, engine_command
from phalanx.roles.job_sections import LauncherKind
from phalanx.roles.ray_cluster import check_installed
from phalanx.roles.replica_devices import SimulatedCluster
from phalanx.schema.roles import (
    EngineGroupSpec,
    EngineKind,
    InferenceModelSpec,
    InferenceRoleSpec,
    WorkerType,
)

_ANYWHERE = ListenAddress("127.0.0.1", 1, 2)
_ANY_LEDGER = Path("devices")


def load_job(path: Path, assigned: Sequence[str] = ()) -> JobConfig:
    """The job of a file, with KEY=VALUE pairs put over it. Raises `ConfigurationError`."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(unreadable(path, error)) from None
    return parse_job(text, str(path), path.parent.absolute(), assignments(assigned))


def check_job(job: JobConfig, source: str, *, deeply: bool) -> None:
    """Refuse what could not be started: the gateway's addresses, models that are not there, and
    arguments that an engine does not have; `deeply`, also values that `phalanx serve` refuses.
    """
    with _naming(f"{source}: gateway"):
        _check_gateway(job)
    with _naming(f"{source}: launcher"):
        check_host("host", job.launcher.host)
        if job.launcher.kind is LauncherKind.RAY:
            check_installed()
    check_reach(job, source)
    programs, simulated = engine_programs(job), SimulatedCluster.of(job.plan, _ANY_LEDGER)
    given = job.launcher
    for key, python in (
        ("sglang_python", given.sglang_python),
        ("router_python", given.router_python),
    ):
        if python is not None and shutil.which(python) is None:
            raise ConfigurationError(
                f"{source}: launcher.{key}={python!r} is no program; give an interpreter's path"
            )
    with _naming(source):
        for package in peer_packages(job):
            package.check()
    for role in job.roles:
        for model in role.models:
            with _naming(f"{source}: roles.{role.role}.models.{model.name}"):
                for command in _commands(role, model, programs, simulated, given.kind):
                    if deeply and command.arguments[: len(programs.phalanx)] == programs.phalanx:
                        _check_serve(command.arguments[len(programs.phalanx) :])


def check_reach(job: JobConfig, source: str) -> None:
    """Real devices of several machines are out of the local launcher's reach."""
    if job.plan is None or job.plan.cluster.device_memory_bytes is not None:
        return
    nodes = {bundle.node for group in job.plan.groups for bundle in group.bundles}
    if job.launcher.kind is LauncherKind.LOCAL and len(nodes) > 1:
        raise ConfigurationError(
            f"{source}: launcher: kind=local starts engines on this machine, and the plan has devices of {len(nodes)};"
            " say launcher: ray, one node in placement.nodes, or placement.device_memory_mib for"
            " simulated devices"
        )


def engine_programs(job: JobConfig) -> EnginePrograms:
    python = job.launcher.sglang_python
    return EnginePrograms() if python is None else EnginePrograms.with_sglang(python)


def checkpoints(job: JobConfig) -> Iterator[str]:
    """The names and directories of models that are started here, each once."""
    named = [
        model.model_path
        for role in job.roles
        for model in role.models
        if any(group.engine is EngineKind.PHALANX for group in model.engine_groups)
    ]
    yield from dict.fromkeys(named)


def plan_table(job: JobConfig) -> RenderableType:
    """A row a group of replicas."""
    table = Table(box=None, pad_edge=False)
    for name in ("role", "model", "replicas", "engine", "weights", "of", ""):
        table.add_column(name, overflow="fold", no_wrap=name in ("role", "replicas", "weights"))
    for role in job.roles:
        shown = role.role
        for model in role.models:
            for group in model.engine_groups:
                table.add_row(shown, *_row(role, model, group))
                shown = ""
    return Group(Text(_where(job), style="bold"), table)


def _where(job: JobConfig) -> str:
    gateway = job.gateway
    scheme = "http" if gateway.tls_cert is None else "https"
    port = gateway.http_port or "(a free port)"
    paths = ", ".join(f"/{role.role}" for role in job.roles)
    return f"{paths} at {scheme}://{gateway.http_host}:{port}"


def _row(
    role: InferenceRoleSpec, model: InferenceModelSpec, group: EngineGroupSpec
) -> tuple[str, ...]:
    notes = []
    if role.routing.default_model == model.name:
        notes.append("default")
    for word, names in (("alias", role.routing.aliases), ("key", role.routing.route_keys)):
        notes += [f"{word} {name}" for name, target in names.items() if target == model.name]
    if model.needs_router:
        notes.append(f"router {model.router_url or 'started here'}")
    if not role.expose_engine_urls:
        notes.append("addresses hidden")
    if role.deployment.start_asleep:
        notes.append("starts asleep")
    kind = "" if group.worker_type is WorkerType.REGULAR else f", {group.worker_type}"
    ranks = "" if group.ranks_per_replica == 1 else f" of {group.ranks_per_replica} ranks"
    return (
        model.name,
        f"{group.num_replicas}{ranks}",
        f"{group.engine}{kind}",
        model.weight_source.value,
        " ".join(group.urls) or model.model_path,
        ", ".join(notes),
    )


def _commands(
    role: InferenceRoleSpec,
    model: InferenceModelSpec,
    programs: EnginePrograms,
    simulated: SimulatedCluster | None,
    kind: LauncherKind,
) -> Iterator[Command]:
    for index, group in enumerate(model.engine_groups):
        if group.engine is EngineKind.EXTERNAL:
            continue
        if group.engine is EngineKind.PHALANX:
            check_checkpoint(model.model_path)
        ordinal = sum(earlier.num_replicas for earlier in model.engine_groups[:index])
        launch = ReplicaLaunch(
            role=role.role,
            engine_id=f"{model.name}/{ordinal}",
            generation=0,
            model=model,
            group=group,
            group_index=index,
            ordinal=ordinal,
        )
        yield engine_command(launch, _ANYWHERE, programs, simulated, _span(group, kind))


def _span(group: EngineGroupSpec, kind: LauncherKind) -> EngineSpan | None:
    """The head's part of a replica over several machines of a cluster."""
    if kind is LauncherKind.LOCAL or group.nodes_per_replica == 1:
        return None
    return EngineSpan(group.nodes_per_replica, 0, "127.0.0.1:1", key="")


def _check_serve(flags: tuple[str, ...]) -> None:
    """As `phalanx serve FLAGS --check` would, without what it prints."""
    app = typer.Typer(add_completion=False)
    app.command()(serve)
    command = typer.main.get_command(app)
    # Whatever port it is told there, it will have another one.
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            command.main([*flags, "--check"], prog_name="phalanx serve", standalone_mode=False)
    except typer.BadParameter as error:
        raise ConfigurationError(f"engine_args: {error.format_message()}") from None


def _check_gateway(job: JobConfig) -> None:
    section = job.gateway
    gateway = GatewayConfig(
        grpc_address=section.grpc,
        http_host=section.http_host,
        http_port=section.http_port,
        api_key=section.api_key,
        admin_key=section.admin_key,
        tls_cert=None if section.tls_cert is None else Path(section.tls_cert),
        tls_key=None if section.tls_key is None else Path(section.tls_key),
        request_timeout_s=section.request_timeout_s,
        drain_timeout_s=section.drain_timeout_s,
        max_message_bytes=int(section.max_message_mib * MIB),
    )
    check_host("http_host", section.http_host)
    check_host("grpc", gateway.grpc_listener[0])


@contextlib.contextmanager
def _naming(where: str) -> Iterator[None]:
    """Refusals from here say which part of the file is meant."""
    try:
        yield
    except InvalidInputError as error:
        raise ConfigurationError(f"{where}: {error}") from None
