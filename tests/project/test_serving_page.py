"""`docs/serving.md` lists every configuration key, flag, environment variable and route."""

from __future__ import annotations

import dataclasses
import re
import urllib.error
import urllib.request
from pathlib import Path

import msgspec
import pytest
import typer

from phalanx import settings
from phalanx.cli.main import app
from phalanx.models.causal_lm import CausalLMArgs
from phalanx.schema.deployment_section import DeploymentSection, ProcessSection
from phalanx.schema.parallel import ParallelConfig
from phalanx.schema.serve_config import EngineSection, LogSection
from phalanx.schema.server_config import ServerConfig

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
KEYS = [
    *((f"server.{f.name}", f.default) for f in msgspec.structs.fields(ServerConfig)),
    *((f"engine.{f.name}", f.default) for f in msgspec.structs.fields(EngineSection)),
    *(
        (f"deployment.{f.name}", f.default)
        for f in msgspec.structs.fields(DeploymentSection)
        if f.name != "process_config"
    ),
    *(
        (f"deployment.process_config.{f.name}", f.default)
        for f in msgspec.structs.fields(ProcessSection)
    ),
    *(
        (f"parallel.{part.name}.{f.name}", f.default)
        for part in dataclasses.fields(ParallelConfig)
        for f in dataclasses.fields(part.default_factory)
    ),
    ("adapter.factory", None),
    ("adapter.args.*", None),
    *((f"log.{f.name}", f.default) for f in msgspec.structs.fields(LogSection)),
    *((f.name, f.default) for f in dataclasses.fields(CausalLMArgs)),
]


@pytest.mark.parametrize(("key", "default"), KEYS, ids=[key for key, _ in KEYS])
def test_a_key_is_listed_with_its_default(key, default):
    row = re.search(rf"^\| `{re.escape(key)}` \|.*$", PAGE, re.MULTILINE)
    assert row is not None, f"{key} is not in docs/serving.md"
    if isinstance(default, bool):
        assert f"| {str(default).lower()} |" in row[0]
    elif isinstance(default, (int, float, str)):
        assert re.search(
            rf"\| `?{re.escape(f'{default:g}' if isinstance(default, float) else str(default))}`? \|",
            row[0],
        )


def test_every_flag_is_shown_and_exists():
    group = typer.main.get_command(app)
    context = group.make_context("phalanx", ["serve", "--check"])
    _, command, _ = group.resolve_command(context, ["serve"])
    flags = {option for parameter in command.params for option in parameter.opts}
    flags = {flag for flag in flags if flag.startswith("--")} - {"--help"}
    shown = set(re.findall(r"`(--[\w-]+)", PAGE))
    assert shown == flags - {"--check"} | (shown & {"--check"})


def test_every_environment_variable_is_listed():
    source = Path(settings.__file__).read_text(encoding="utf-8")
    names = set(re.findall(r'_read\("(\w+)"', source))
    assert names == set(re.findall(r"PHALANX_(\w+)", PAGE))


def shown_routes() -> set[str]:
    table = PAGE.partition("## Routes")[2].partition("## ")[0]
    return set(re.findall(r"`(?:GET |POST )?(/[\w/]+)`", table))


def test_every_route_is_listed():
    source = (ROOT / "src" / "phalanx" / "server" / "app.py").read_text(encoding="utf-8")
    routes = set(re.findall(r'Route\(\s*"(/[\w/]+)"', source))
    assert len(routes) > 15
    assert routes <= shown_routes()


def test_every_listed_route_is_served(serve):
    url = serve("--model", "smollm2-135m", "--dtype", "float32")
    for route in shown_routes() - {"/v1/models/NAME"}:
        try:
            urllib.request.urlopen(f"{url}{route}").close()
        except urllib.error.HTTPError as error:
            with error:
                assert error.code not in (404, 500), route
