"""`roles.yaml`, the file of `phalanx up`: one pure function reads it into the specs of roles.

Every key that does not exist is refused, with the nearest one that does.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from phalanx.errors import ConfigurationError
from phalanx.roles.external_pool import base_url
from phalanx.roles.file_section import file_section
from phalanx.roles.job_sections import (
    ControlSection,
    GatewaySection,
    GroupSection,
    JobSection,
    LauncherSection,
    LogSection,
    ModelSection,
    RoleSection,
)
from phalanx.roles.placement.planner import check_role_names, plan
from phalanx.roles.placement.section import (
    check_role_mode,
    check_started_asleep,
    group_placement,
    num_replicas,
    placement_request,
    placement_section,
)
from phalanx.roles.sampling_section import check_sampling
from phalanx.schema.file_keys import check_keys
from phalanx.schema.file_paths import resolved
from phalanx.schema.job_placement import PlacementPlan
from phalanx.schema.roles import (
    EngineGroupSpec,
    EngineKind,
    InferenceModelSpec,
    InferenceRoleSpec,
    WorkloadType,
)
from phalanx.schema.yaml_text import parse_yaml

SectionT = TypeVar("SectionT", bound=msgspec.Struct)

_GROUP_DEFAULTS = msgspec.structs.asdict(GroupSection())


@dataclass(frozen=True)
class JobConfig:
    """What `phalanx up` runs: one gateway in front of these roles."""

    gateway: GatewaySection
    control: ControlSection
    launcher: LauncherSection
    log: LogSection
    roles: tuple[InferenceRoleSpec, ...]
    plan: PlacementPlan | None = None
    """Where they run and in which phases; None for a file that says nothing of placement."""


def parse_job(
    text: str,
    source: str,
    directory: Path | None = None,
    overrides: Mapping[str, object] | None = None,
) -> JobConfig:
    """The job in the YAML `text`, with `overrides` by dotted key put over it.

    `source` names it in errors; paths in it start at `directory`. Reads no other file and starts
    nothing. Raises `ConfigurationError`.
    """
    document = parse_yaml(text, source)
    if isinstance(document, dict) and "plugin" in document:
        raise ConfigurationError(
            f"{source} is the file of a server, not of a job; `phalanx serve` serves it"
        )
    if isinstance(document, dict) and document and "roles" not in document:
        check_keys(document, JobSection, source)
    if not isinstance(document, dict) or "roles" not in document:
        raise ConfigurationError(
            f"{source} must hold a mapping with the key roles, and roles by their names in it"
        )
    for key, value in (overrides or {}).items():
        _put(document, key, value, source)
    job = file_section(document, JobSection, source, "")
    roles = tuple(
        _role(name, value, source, directory)
        for name, value in _named(job.roles, source, "roles").items()
    )
    _check_urls(roles, source)
    placement = _plan(job, roles, source)
    return JobConfig(
        _with_paths(job.gateway, ("tls_cert", "tls_key"), directory),
        job.control,
        _with_paths(_launcher(job, source), ("sglang_python", "router_python"), directory),
        _with_paths(job.log, ("directory",), directory),
        roles if placement is None else placement.roles,
        placement,
    )


def _launcher(job: JobSection, source: str) -> LauncherSection:
    given = job.launcher
    value = {} if given is None else {"kind": given} if isinstance(given, str) else given
    return file_section(value, LauncherSection, source, "launcher")


def _plan(
    job: JobSection, roles: tuple[InferenceRoleSpec, ...], source: str
) -> PlacementPlan | None:
    section = placement_section(job.placement, source)
    check_role_mode(section, job.roles, roles, source)
    request = None if section is None else placement_request(section, roles, source)
    try:
        check_role_names(roles)
        made = None if request is None else plan(request)
    except ConfigurationError as error:
        raise ConfigurationError(f"{source}: {error}") from None
    if made is not None:
        check_started_asleep(job.roles, roles, made.roles, source)
    return made


def _check_urls(roles: Sequence[InferenceRoleSpec], source: str) -> None:
    """An engine has one replica's place alone: it is drained and put to sleep for that one."""
    places: dict[str, str] = {}
    for role in roles:
        for model in role.models:
            place = f"roles.{role.role}.models.{model.name}"
            for url in (url for group in model.engine_groups for url in group.urls):
                if url in places:
                    raise ConfigurationError(
                        f"{source}: {place}: {url} is given twice, also in {places[url]}; an engine"
                        " is one replica of one model, so give each url once"
                    )
                places[url] = place


def _put(document: dict[str, Any], dotted: str, value: object, source: str) -> None:
    *sections, last = dotted.split(".")
    for section in sections:
        document = document.setdefault(section, {})
        if not isinstance(document, dict):
            raise ConfigurationError(f"{source}: {section} in {dotted} must hold keys of its own")
    document[last] = value


def _named(value: dict[Any, Any], source: str, path: str) -> dict[str, Any]:
    if not value:
        raise ConfigurationError(f"{source}: {path} is empty; give at least one by its name")
    for name in value:
        if not isinstance(name, str):
            raise ConfigurationError(
                f"{source}: {path}.{name} must be a name; put it in quotation marks"
            )
    return value


def _role(name: str, value: object, source: str, directory: Path | None) -> InferenceRoleSpec:
    path = f"roles.{name}"
    section = file_section(value, RoleSection, source, path)
    with _naming(source, path):
        return InferenceRoleSpec(
            role=name,
            workload=_workload(name, section),
            deployment=section.deployment,
            routing=section.routing,
            models=tuple(
                _model(model, described, source, f"{path}.models.{model}", directory)
                for model, described in _named(section.models, source, f"{path}.models").items()
            ),
            expose_engine_urls=section.expose_engine_urls,
        )


def _workload(name: str, section: RoleSection) -> WorkloadType:
    if section.workload is not None:
        return section.workload
    try:
        return WorkloadType(name)
    except ValueError:
        known = ", ".join(WorkloadType)
        nearest = difflib.get_close_matches(name, list(WorkloadType), n=1)
        hint = f", or did you mean to call the role {nearest[0]}?" if nearest else ""
        raise ConfigurationError(f"workload is missing; it is one of {known}{hint}") from None


def _model(
    name: str, value: object, source: str, path: str, directory: Path | None
) -> InferenceModelSpec:
    section = file_section(value, ModelSection, source, path)
    check_sampling(section.sampling, source, f"{path}.sampling")
    with _naming(source, path):
        groups = _groups(section, source, path)
        started = any(group.engine is not EngineKind.EXTERNAL for group in groups)
        if section.model is None and started:
            raise ConfigurationError(
                "model is missing; give a directory or a known name such as smollm2-135m"
            )
        return InferenceModelSpec(
            name=name,
            model_path="" if section.model is None else _path(section.model, directory),
            engine_groups=groups,
            weight_source=section.weight_source,
            route_mode=section.route_mode,
            sampling_defaults=section.sampling,
            chat_template_kwargs=section.chat_template_kwargs,
            env_vars=_environment(section.env),
            elastic_enabled=section.elastic,
            fault_tolerance_enabled=section.fault_tolerance,
            served_model_name=section.served_model_name,
            router_url=section.router_url,
        )


def _groups(section: ModelSection, source: str, path: str) -> tuple[EngineGroupSpec, ...]:
    """A model's groups: those that it lists, or the one that its own keys describe."""
    if not section.groups:
        return (_group(section),)
    own = msgspec.structs.asdict(section)
    given = [name for name, default in _GROUP_DEFAULTS.items() if own[name] != default]
    if given:
        raise ConfigurationError(
            f"{', '.join(given)} and groups are both given; say it in each of groups, or leave"
            " groups out"
        )
    made = []
    for index, value in enumerate(section.groups):
        place = f"{path}.groups[{index}]"
        described = file_section(value, GroupSection, source, place)
        with _naming(source, place):
            made.append(_group(described))
    return tuple(made)


def _environment(values: dict[str, Any]) -> dict[str, str]:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ConfigurationError(f"env.{name}={value!r} must be text or a number")
    return {name: str(value) for name, value in values.items()}


def _group(section: GroupSection) -> EngineGroupSpec:
    if section.engine is EngineKind.EXTERNAL and not section.urls:
        raise ConfigurationError("engine: external needs urls, one a replica")
    return EngineGroupSpec(
        num_replicas=num_replicas(section),
        engine=section.engine,
        worker_type=section.worker_type,
        ranks_per_replica=section.ranks,
        nodes_per_replica=section.nodes,
        engine_args=section.engine_args,
        urls=tuple(base_url(url) for url in section.urls),
        placement=group_placement(section),
    )


def _with_paths(section: SectionT, names: Sequence[str], directory: Path | None) -> SectionT:
    """`section` with the paths under these names resolved."""
    given = msgspec.structs.asdict(section)
    paths = {name: _path(given[name], directory) for name in names if given[name] is not None}
    return msgspec.structs.replace(section, **paths)


def _path(value: str, directory: Path | None) -> str:
    return value if directory is None else str(resolved(value, directory))


@contextmanager
def _naming(source: str, path: str) -> Iterator[None]:
    """Refusals from here say where in the file it is, those that do not yet."""
    try:
        yield
    except ConfigurationError as error:
        if str(error).startswith(f"{source}: "):
            raise
        raise ConfigurationError(f"{source}: {path}: {error}") from None
