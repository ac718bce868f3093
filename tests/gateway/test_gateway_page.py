"""`docs/gateway.md` lists every flag, route and metric of the gateway."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import typer

from phalanx.cli.main import app
from phalanx.gateway.http.router import NoRoute
from phalanx.gateway.roles.role_set import PATHS
from phalanx.routing.roles.registry import RoleRegistry
from tests.gateway.policy_servers import infer, request, run
from tests.gateway.roles.running import Engine, content, listening, model
from tests.gateway.whole import ProbedServer, ask, channel, ready, running

PAGE = (Path(__file__).parents[2] / "docs" / "gateway.md").read_text(encoding="utf-8")


def test_every_flag_is_listed_with_its_default():
    group = typer.main.get_command(app)
    context = group.make_context("phalanx", ["gateway", "--check"])
    _, command, _ = group.resolve_command(context, ["gateway"])
    rows = dict(re.findall(r"^\| `(--[\w-]+)[^`]*` \| ([^|]+) \|", PAGE, re.MULTILINE))
    flags = {parameter.opts[0]: parameter for parameter in command.params}
    assert rows.keys() == flags.keys() - {"--help"}
    for flag, listed in rows.items():
        default = flags[flag].default
        if isinstance(default, bool):
            assert listed == "off"
        elif isinstance(default, int | float):
            assert listed == f"{default:g}"
        elif default:
            assert listed == f"`{default}`"


def test_every_route_is_listed():
    async def scenario():
        async with running(lerobot=True) as gateway:
            router = gateway.router
            gateway.roles.serve("ROLE", RoleRegistry("ROLE", "e", content(model("m", 1))))
            added = {f"{method} {path}" for method, path in router._exact}
            added |= {
                f"{method} {'/'.join(p.upper().strip('{}') if '{' in p else p for p in parts._parts)}"
                for method, parts, _, _ in router._patterns
            }
            added |= {
                f"{method} /ROLE/{path}"
                for method, path in itertools.product(("GET", "POST"), PATHS)
                if not isinstance(router.find(method, f"/ROLE/{path}"), NoRoute)
            }
        return added

    listed = set(re.findall(r"^\| `((?:GET|POST|DELETE) /[^`]*)`", PAGE, re.MULTILINE))
    assert run(scenario()) - {"POST /v1/actions/generations"} == listed
    assert "POST /v1/actions/generations" in PAGE


def test_every_metric_is_listed():
    async def scenario():
        async with running(ProbedServer()) as gateway, channel(gateway) as client:
            await ready(gateway, 1)
            async with listening(Engine()) as ports:
                registry = RoleRegistry("rollout", "e", content(model("m", *ports)))
                gateway.roles.serve("rollout", registry)
                await ask(gateway, "POST", "/rollout/generate", {})
            await (await infer(client, request()))
            await ask(gateway, "GET", "/health")
            text = (await ask(gateway, "GET", "/metrics")).body.decode()
        names = set(re.findall(r"^(\w+?)(?:_bucket|_count|_sum)?(?:\{| )", text, re.MULTILINE))
        return {name for name in names if not name.startswith("#")}

    listed = set(re.findall(r"`(phalanx_gateway_\w+)`", PAGE))
    assert run(scenario()) == listed
