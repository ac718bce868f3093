"""`phalanx bench gateway`: requests through the gateway, beside other proxies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from phalanx.bench.flags import chosen, interpreters
from phalanx.bench.gateway_systems import PEERS, find_programs
from phalanx.bench.gateway_workload import PARTS, GatewayWorkload
from phalanx.errors import ConfigurationError

ALL_PARTS = ",".join(PARTS)


def gateway(
    against: Annotated[str, typer.Option(help=f"Peers, by comma: {', '.join(PEERS)}.")] = "nginx",
    only: Annotated[str, typer.Option(help="What to measure, by comma.")] = ALL_PARTS,
    quick: Annotated[bool, typer.Option("--quick", help="A fifth of the work.")] = False,
    repeats: Annotated[int | None, typer.Option(help="Rounds.", min=1)] = None,
    program: Annotated[
        list[str] | None, typer.Option(help="NAME=PATH: the program of a peer.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for results.")] = Path("bench-results"),
) -> None:
    """Measure the gateway: processor time, added latency and rate of each kind of request."""
    parts = chosen(only, {part: part for part in PARTS}, "--only")
    if not parts:
        raise ConfigurationError(f"nothing to measure: --only is empty; allowed: {ALL_PARTS}")
    peers = chosen(against, PEERS, "--against")
    programs = find_programs(peers, interpreters(program or [], PEERS, "--program"))
    workload = GatewayWorkload.quick() if quick else GatewayWorkload()
    workload = replace(workload, repeats=repeats or workload.repeats)

    # What follows needs the packages of the extra `bench`, which a command line that only prints
    # its help does not.
    from phalanx.bench.gateway_measuring import measure_gateway

    measure_gateway(peers, programs, workload, parts, output)
