"""`phalanx bench cosmos3`: a world model on this machine, beside diffusers' on the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phalanx import settings
from phalanx.bench.cosmos3_systems import PEERS
from phalanx.bench.flags import chosen, interpreters
from phalanx.bench.systems import find_python
from phalanx.errors import ConfigurationError

DTYPES = ("float32", "bfloat16")
KINDS = ("policy", "video")


def cosmos3(  # noqa: PLR0913 - one parameter a flag
    against: Annotated[str, typer.Option(help=f"Peers, by comma: {', '.join(PEERS)}.")] = "",
    only: Annotated[str, typer.Option(help=f"Of {', '.join(KINDS)}, by comma. [both]")] = "",
    dtype: Annotated[str, typer.Option(help=" or ".join(DTYPES) + ".")] = "float32",
    threads: Annotated[int, typer.Option(help="Threads of each process.", min=1)] = 1,
    repeats: Annotated[int | None, typer.Option(help="Rounds. [5; quick 3]", min=1)] = None,
    two_ranks: Annotated[
        bool,
        typer.Option(help="Also two processes, of which each computes one branch of guidance."),
    ] = True,
    quick: Annotated[bool, typer.Option("--quick", help="A model of a tenth of the work.")] = False,
    device: Annotated[
        str,
        typer.Option(
            help="cuda or cuda:N: the published Nano in bfloat16 as a policy there, instead of all "
            "this; takes 30 GB of disk and of the device."
        ),
    ] = "",
    peer_python: Annotated[
        list[str] | None,
        typer.Option(help="NAME=PATH: the Python interpreter that a peer is installed for."),
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for results.")] = Path("bench-results"),
) -> None:
    """Measure requests of Cosmos3: on one process, over two, and beside diffusers."""
    if dtype not in DTYPES:
        raise ConfigurationError(f"--dtype {dtype!r}; allowed: {', '.join(DTYPES)}")
    kinds = chosen(only, {kind: kind for kind in KINDS}, "--only") or list(KINDS)
    given = interpreters(peer_python or [], PEERS)
    peers = [(system, find_python(system, given)) for system in chosen(against, PEERS, "--against")]
    repeats = repeats or (3 if quick else 5)

    # What follows loads torch, which a command line that only prints its help does not.
    from phalanx.bench.cosmos3_cases import CASES
    from phalanx.bench.cosmos3_device import measure_device, on_device
    from phalanx.bench.cosmos3_geometry import Geometry
    from phalanx.bench.cosmos3_measuring import Cosmos3Workload, measure_cosmos3
    from phalanx.device import device_names

    here = device_names()
    if device:
        if not device.startswith("cuda") or not here:
            raise ConfigurationError(
                f"--device {device!r}: give cuda or cuda:N of this machine, which has "
                f"{', '.join(here) or 'no CUDA device'}; without it the CPU is measured"
            )
        if against or only or quick:
            raise ConfigurationError(
                "--device measures one published model by itself; leave out --against, --only and "
                "--quick"
            )
        measure_device(on_device(device, repeats), output, settings.cache_dir())
        return
    geometry = Geometry.quick() if quick else Geometry()
    cases = tuple(case for case in CASES if case.key in kinds)
    workload = Cosmos3Workload(geometry, cases, dtype, threads, repeats, two_ranks)
    measure_cosmos3(peers, workload, output, settings.cache_dir())
    words = "with --device cuda" if here else "skipped, this machine has no CUDA device"
    typer.echo(f"the published Nano on a GPU, in bfloat16: {words}")
