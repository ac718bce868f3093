"""`phalanx bench policy`: pi0.5 on this machine's CPU, beside LeRobot's own on the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phalanx import settings
from phalanx.bench.flags import chosen, interpreters
from phalanx.bench.policy_systems import PEERS
from phalanx.bench.systems import find_python
from phalanx.errors import ConfigurationError

DTYPES = ("float32", "bfloat16")


def policy(  # noqa: PLR0913 - one parameter a flag
    against: Annotated[str, typer.Option(help=f"Peers, by comma: {', '.join(PEERS)}.")] = "",
    dtype: Annotated[str, typer.Option(help=" or ".join(DTYPES) + ".")] = "float32",
    threads: Annotated[int, typer.Option(help="Threads that compute.", min=1)] = 2,
    repeats: Annotated[int | None, typer.Option(help="Rounds. [5; quick 3]", min=1)] = None,
    together: Annotated[
        int, typer.Option(help="Requests that arrive together; 0 leaves them out.", min=0)
    ] = 8,
    quick: Annotated[bool, typer.Option("--quick", help="A model of a tenth of the work.")] = False,
    peer_python: Annotated[
        list[str] | None,
        typer.Option(help="NAME=PATH: the Python interpreter that a peer is installed for."),
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for results.")] = Path("bench-results"),
) -> None:
    """Measure chunks of actions of pi0.5: skipped work, and requests that share forwards."""
    if dtype not in DTYPES:
        raise ConfigurationError(f"--dtype {dtype!r}; allowed: {', '.join(DTYPES)}")
    given = interpreters(peer_python or [], PEERS)
    peers = [(system, find_python(system, given)) for system in chosen(against, PEERS, "--against")]

    # What follows loads torch, which a command line that only prints its help does not.
    from phalanx.bench.policy_geometry import Geometry
    from phalanx.bench.policy_measuring import PolicyWorkload, measure_policies

    repeats = repeats or (3 if quick else 5)
    geometry = Geometry.quick() if quick else Geometry()
    workload = PolicyWorkload(geometry, dtype, threads, repeats, together)
    measure_policies(peers, workload, output, settings.cache_dir())
