"""`docs/roles.md` lists every key of a job's file, every command, and every route of its control
process.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import msgspec
import pytest
import typer

from phalanx.cli.main import app
from phalanx.roles.control_app import ControlApi
from phalanx.roles.events import EventLog
from phalanx.roles.job_sections import (
    ControlSection,
    GatewaySection,
    GroupSection,
    JobSection,
    LauncherSection,
    LogSection,
    ModelSection,
    PlacementSection,
    RoleSection,
)
from phalanx.schema.roles import DeploymentSpec, RoutingSpec
from phalanx.testing.clock import ManualClock
from tests.roles.coordination.case import plain_coordinator

PAGE = (Path(__file__).parents[2] / "docs" / "roles.md").read_text(encoding="utf-8")
ROLE, MODEL = "roles.ROLE", "roles.ROLE.models.MODEL"
SECTIONS = {
    "gateway": GatewaySection,
    "control": ControlSection,
    "launcher": LauncherSection,
    "placement": PlacementSection,
    "log": LogSection,
    f"{ROLE}.routing": RoutingSpec,
    f"{ROLE}.deployment": DeploymentSpec,
    ROLE: RoleSection,
    MODEL: ModelSection,
}
DEFAULTS = {
    f"{path}.{field.name}": field.default
    for path, section in SECTIONS.items()
    for field in (
        msgspec.structs.fields(section)
        if issubclass(section, msgspec.Struct)
        else dataclasses.fields(section)
    )
    if f"{path}.{field.name}" not in {*SECTIONS, f"{ROLE}.models"}
}
WORDED = {
    f"{ROLE}.deployment.placement",
    f"{ROLE}.workload",
    f"{MODEL}.model",
    f"{MODEL}.replicas",
    f"{MODEL}.served_model_name",
}
"""Their defaults are said in words."""


def rows() -> dict[str, str]:
    table = PAGE.partition("## The file")[2].partition("## The control process")[0]
    return dict(re.findall(r"^\| `([\w.]+)` \| ([^|]+) \|", table, re.MULTILINE))


def test_every_key_of_the_file_is_listed_and_no_other():
    sections = {field.name for field in msgspec.structs.fields(JobSection)} - {"roles"}
    assert sections == {path for path in SECTIONS if "." not in path}
    assert rows().keys() == DEFAULTS.keys()


def test_the_keys_of_a_group_are_those_of_a_model_and_are_named():
    keys = {field.name for field in msgspec.structs.fields(GroupSection)}
    (row,) = re.findall(rf"^\| `{MODEL}\.groups`.*$", PAGE, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", row.partition("keys of its own")[2])) == keys


@pytest.mark.parametrize("key", sorted(DEFAULTS.keys() - WORDED))
def test_a_key_is_listed_with_its_default(key):
    listed, default = rows()[key], DEFAULTS[key]
    if isinstance(default, bool):
        assert listed == str(default).lower()
    elif isinstance(default, int | float):
        assert listed == f"{default:g}"
    elif isinstance(default, str):
        assert listed == f"`{default}`"
    else:
        assert listed == "none"


def commands() -> dict[str, object]:
    group = typer.main.get_command(app)
    found = {name: each for name, each in group.commands.items()}
    return {name: each for name, each in found.items() if each.rich_help_panel == "Roles of a job"}


def test_every_command_and_flag_is_shown():
    shown = set(re.findall(r"`phalanx (\w+)", PAGE)) | set(
        re.findall(r"^phalanx (\w+)", PAGE, re.M)
    )
    assert commands().keys() <= shown
    flags = {
        parameter.opts[0]
        for each in commands().values()
        for parameter in each.params
        if parameter.opts[0].startswith("--") and not parameter.hidden
    }
    assert flags - {"--help"} <= set(re.findall(r"(--[a-z]+)", PAGE))


def test_every_route_of_the_control_process_is_listed():
    clock = ManualClock()
    events = EventLog(clock)
    coordinator = plain_coordinator({}, clock, events)
    api = ControlApi(
        {}, coordinator, events, epoch="", describe=lambda: None, stop=lambda now: None
    )
    made = {
        f"{method} {route.path.replace('{role}', 'ROLE').replace('{model}', 'MODEL')}"
        for route in api.app().routes
        for method in route.methods - {"HEAD"}
    }
    table = PAGE.partition("## The control process over HTTP")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `((?:GET|POST) /[^`]+)`", table, re.MULTILINE)) == made
