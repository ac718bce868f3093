"""`phalanx gateway`, also installed as `phalanx-gateway`: one address in front of many servers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from phalanx import log, settings
from phalanx.cli.command_help import HelpfulCommand
from phalanx.errors import ConfigurationError

_LISTEN, _POOL, _LEROBOT = "Where it listens, and to whom", "Servers", "LeRobot"
_REQUESTS, _LOG = "Requests", "Log"
_PAIR = "\x1f"
"""Joins the two values of `--backend` while the command line is parsed."""


class GatewayCommand(HelpfulCommand):
    """Takes `--backend MODEL ENDPOINT`, two values, as often as it is given."""

    def parse_args(self, ctx: object, args: list[str]) -> list[str]:
        return super().parse_args(ctx, joined_backends(args))  # type: ignore[arg-type]


def joined_backends(words: Sequence[str]) -> list[str]:
    """`words` with the two values of each `--backend` as one."""
    joined: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--":
            return [*joined, word, *rest]
        joined.append(word)
        if word == "--backend":
            values = rest[:2]
            if len(values) < 2 or any(value.startswith("--") for value in values):
                given = " ".join(["--backend", *values])
                raise ConfigurationError(
                    f"{given!r} must be --backend MODEL ENDPOINT, for example"
                    " --backend pi05 127.0.0.1:50063"
                )
            joined.append(_PAIR.join(values))
            rest = rest[2:]
    return joined


def gateway(
    backend: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODEL ENDPOINT",
            help="A server of this model, again for each further one. ENDPOINT is HOST:PORT or"
            " [IPv6]:PORT for gRPC, http://HOST:PORT for HTTP.",
            rich_help_panel=_POOL,
        ),
    ] = None,
    state_file: Annotated[
        Path | None,
        typer.Option(
            help="Keep the registered servers here, over a restart.", rich_help_panel=_POOL
        ),
    ] = None,
    follow: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Have the servers of the gateway at this HTTP address.",
            rich_help_panel=_POOL,
        ),
    ] = None,
    roles: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Serve the roles of the job whose control process is at this HTTP address.",
            rich_help_panel=_POOL,
        ),
    ] = None,
    roles_key: Annotated[
        str | None,
        typer.Option(help="Bearer token that the control process asks for.", rich_help_panel=_POOL),
    ] = None,
    probe_interval_s: Annotated[
        float, typer.Option(help="Between two probes of a healthy server.", rich_help_panel=_POOL)
    ] = 5.0,
    probe_timeout_s: Annotated[
        float, typer.Option(help="How long a probe may take.", rich_help_panel=_POOL)
    ] = 2.0,
    lease_s: Annotated[
        float,
        typer.Option(
            help="How long a server that registered itself is trusted without a heartbeat.",
            rich_help_panel=_POOL,
        ),
    ] = 15.0,
    http_health_path: Annotated[
        str, typer.Option(help="What an HTTP server is probed at.", rich_help_panel=_POOL)
    ] = "/health",
    backend_key: Annotated[
        str | None,
        typer.Option(help="Bearer token that gRPC servers ask for.", rich_help_panel=_POOL),
    ] = None,
    grpc: Annotated[
        str,
        typer.Option(
            "--gateway",
            metavar="HOST:PORT",
            help="Address for gRPC; port 0 takes a free one.",
            rich_help_panel=_LISTEN,
        ),
    ] = "127.0.0.1:50111",
    http_host: Annotated[
        str, typer.Option(help="Address for HTTP.", rich_help_panel=_LISTEN)
    ] = "127.0.0.1",
    http_port: Annotated[
        int, typer.Option(help="Port for HTTP; 0 takes a free one.", rich_help_panel=_LISTEN)
    ] = 30000,
    api_key: Annotated[
        str | None,
        typer.Option(
            help="Bearer token to ask of who uses models. Without: the admin key.",
            rich_help_panel=_LISTEN,
        ),
    ] = None,
    admin_key: Annotated[
        str | None,
        typer.Option(
            help="Bearer token to ask of who looks at the pool or changes it. Without: the API key.",
            rich_help_panel=_LISTEN,
        ),
    ] = None,
    key_file: Annotated[
        Path | None,
        typer.Option(
            help="A YAML file with keys, as api_key: KEY, in place of the flags of those names, which"
            " others on this machine can see.",
            rich_help_panel=_LISTEN,
        ),
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(help="Certificate chain (PEM).", rich_help_panel=_LISTEN)
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(help="The certificate's key (PEM).", rich_help_panel=_LISTEN)
    ] = None,
    http_model: Annotated[
        str | None,
        typer.Option(
            help="Model of HTTP requests that name none. Without: the only one.",
            rich_help_panel=_REQUESTS,
        ),
    ] = None,
    robot_model: Annotated[
        str | None,
        typer.Option(
            help="Serve robots' streams (RobotInference) with this model.",
            rich_help_panel=_REQUESTS,
        ),
    ] = None,
    relay: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PREFIX",
            help="Paths that begin so go to HTTP servers; may be repeated. Without: /v1/ and /generate.",
            rich_help_panel=_REQUESTS,
        ),
    ] = None,
    request_timeout_s: Annotated[
        float, typer.Option(help="The longest that a request may take.", rich_help_panel=_REQUESTS)
    ] = 600.0,
    drain_timeout_s: Annotated[
        float,
        typer.Option(
            help="How long running requests have to end at a stop.", rich_help_panel=_REQUESTS
        ),
    ] = 30.0,
    keepalive_s: Annotated[
        float,
        typer.Option(
            help="How long a gRPC server with a request may be silent, pings too, before the"
            " request is given up.",
            rich_help_panel=_REQUESTS,
        ),
    ] = 10.0,
    max_message_mib: Annotated[
        float, typer.Option(help="Largest request and answer.", rich_help_panel=_REQUESTS)
    ] = 100.0,
    threads: Annotated[
        int, typer.Option(help="Threads that decode observations.", rich_help_panel=_REQUESTS)
    ] = 32,
    lerobot: Annotated[
        bool,
        typer.Option(
            "--lerobot",
            help="Serve LeRobot's asynchronous clients, on the gRPC port too.",
            rich_help_panel=_LEROBOT,
        ),
    ] = False,
    lerobot_fps: Annotated[
        float,
        typer.Option(help="Actions a second of their robots.", rich_help_panel=_LEROBOT),
    ] = 30.0,
    lerobot_timeout_s: Annotated[
        float,
        typer.Option(
            help="How long a robot's observation may take before a newer one is sent instead.",
            rich_help_panel=_LEROBOT,
        ),
    ] = 30.0,
    lerobot_port: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PORT[@FPS]",
            help="A further port for one of their robots, with its own rate; may be repeated.",
            rich_help_panel=_LEROBOT,
        ),
    ] = None,
    log_level: Annotated[
        str | None, typer.Option(help="DEBUG, INFO, WARNING or ERROR. [INFO]", rich_help_panel=_LOG)
    ] = None,
    log_json: Annotated[
        bool, typer.Option("--log-json", help="One JSON object a line.", rich_help_panel=_LOG)
    ] = False,
    access_log: Annotated[
        bool, typer.Option("--access-log", help="One line a request.", rich_help_panel=_LOG)
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Validate, print what would run, listen nowhere.")
    ] = False,
) -> None:
    """Put one address in front of many servers, and send each request to the least busy one.

    Servers of one model are probed, may be added and removed at any time (POST and DELETE
    /v1/backends), or register themselves. The page at / shows them. Ctrl-C takes no more requests,
    lets the running ones end, and closes.
    """
    from phalanx.cli.key_file import read_key_file
    from phalanx.cli.listening import check_host
    from phalanx.gateway.config import (
        DEFAULT_RELAYED,
        MIB,
        Backend,
        GatewayConfig,
        LeRobotPort,
    )
    from phalanx.routing.pool_policy import PoolPolicy

    policy = PoolPolicy(
        probe_interval_s=probe_interval_s,
        down_interval_s=min(0.5, probe_interval_s),
        probe_timeout_s=probe_timeout_s,
        lease_s=lease_s,
        heartbeat_s=lease_s / 3,
    )
    keys = read_key_file(key_file)
    config = GatewayConfig(
        grpc_address=grpc,
        http_host=http_host,
        http_port=http_port,
        threads=threads,
        backends=tuple(Backend.parse(*_pair(each)) for each in backend or ()),
        http_model=http_model,
        robot_model=robot_model,
        lerobot=lerobot,
        lerobot_fps=lerobot_fps,
        lerobot_timeout_s=lerobot_timeout_s,
        lerobot_ports=tuple(LeRobotPort.parse(each) for each in lerobot_port or ()),
        api_key=keys.api_key if api_key is None else api_key,
        admin_key=keys.admin_key if admin_key is None else admin_key,
        backend_key=keys.backend_key if backend_key is None else backend_key,
        tls_cert=tls_cert,
        tls_key=tls_key,
        state_file=state_file,
        follow=follow,
        roles=roles,
        roles_key=keys.roles_key if roles_key is None else roles_key,
        request_timeout_s=request_timeout_s,
        drain_timeout_s=drain_timeout_s,
        keepalive_s=keepalive_s,
        max_message_bytes=int(max_message_mib * MIB),
        http_health_path=http_health_path,
        relay_prefixes=tuple(relay) if relay else DEFAULT_RELAYED,
        access_log=access_log,
        pool=policy,
    )
    check_host("--http-host", http_host)
    check_host("--gateway", config.grpc_listener[0])
    level = _level(log_level)
    if check:
        print(config.description)
        return
    log.configure(level, json=log_json)
    from phalanx.gateway.main import run_gateway

    run_gateway(config, on_ready=lambda gateway: print(gateway.announcement, flush=True))


def _pair(joined: str) -> tuple[str, str]:
    model_name, separator, endpoint = joined.partition(_PAIR)
    if not separator:
        raise ConfigurationError(f"--backend={joined}: give two values, --backend MODEL ENDPOINT")
    return model_name, endpoint


def _level(given: str | None) -> str:
    level = (given or settings.log_level() or "INFO").upper()
    if level not in settings.LOG_LEVELS:
        allowed = ", ".join(settings.LOG_LEVELS)
        raise ConfigurationError(f"--log-level {given!r}; allowed: {allowed}")
    return level


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `phalanx gateway` with `arguments` (the process's own by default), and exit."""
    from phalanx.cli.main import main as phalanx

    phalanx(["gateway", *(sys.argv[1:] if arguments is None else arguments)])
