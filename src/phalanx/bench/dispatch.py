"""`phalanx bench dispatch`: the way through the Engine to worker processes and back, beside others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from phalanx.bench.dispatch_systems import PEERS
from phalanx.bench.dispatch_workload import PARTS, DispatchWorkload
from phalanx.bench.flags import chosen, interpreters, numbers
from phalanx.bench.systems import find_python
from phalanx.errors import ConfigurationError

ALL_PARTS = ",".join(PARTS)


def dispatch(  # noqa: PLR0913 - one parameter a flag
    against: Annotated[
        str, typer.Option(help=f"Peers, by comma: {', '.join(PEERS)}.")
    ] = "queue,pool",
    only: Annotated[str, typer.Option(help="What to measure, by comma.")] = ALL_PARTS,
    quick: Annotated[bool, typer.Option("--quick", help="A tenth of the work.")] = False,
    repeats: Annotated[int | None, typer.Option(help="Rounds.", min=1)] = None,
    workers: Annotated[str, typer.Option(help="Workers of each transport, by comma.")] = "1,4",
    in_flight: Annotated[str, typer.Option(help="Requests in flight, by comma.")] = "1,8,64",
    peer_python: Annotated[
        list[str] | None,
        typer.Option(help="NAME=PATH: the Python interpreter that a peer is installed for."),
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for results.")] = Path("bench-results"),
) -> None:
    """Measure dispatch to replicas: time there and back, scaling, faults, memory."""
    parts = chosen(only, {part: part for part in PARTS}, "--only")
    if not parts:
        raise ConfigurationError(f"nothing to measure: --only is empty; allowed: {ALL_PARTS}")
    given = interpreters(peer_python or [], PEERS)
    peers = [(system, find_python(system, given)) for system in chosen(against, PEERS, "--against")]
    workload = DispatchWorkload.quick() if quick else DispatchWorkload()
    workload = replace(
        workload,
        repeats=repeats or workload.repeats,
        workers=numbers(workers, "--workers"),
        in_flight=numbers(in_flight, "--in-flight"),
    )

    # What follows needs the packages of the extra `bench`, which a command line that only prints
    # its help does not.
    from phalanx.bench.dispatching import measure_dispatch

    measure_dispatch(peers, workload, parts, output)
