"""`phalanx bench placement`: how long it takes to plan a job of many devices."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def placement(
    devices: Annotated[str, typer.Option(help="Sizes of clusters, by comma.")] = "10,1000,10000",
    repeats: Annotated[int, typer.Option(help="Rounds.", min=1)] = 5,
    quick: Annotated[bool, typer.Option("--quick", help="One round.")] = False,
    output: Annotated[Path, typer.Option(help="Folder for results.")] = Path("bench-results"),
) -> None:
    """Plan the roles and the trainer of a job in each placement mode, and draw the plan."""
    # What follows needs the packages of the extra `bench`, which a command line that only prints
    # its help does not.
    from phalanx.bench.flags import numbers
    from phalanx.bench.placement_measuring import PlacementWorkload, measure_placement

    workload = PlacementWorkload(numbers(devices, "--devices"), 1 if quick else repeats)
    measure_placement(workload, output)
