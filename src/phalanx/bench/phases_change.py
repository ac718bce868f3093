"""`phalanx bench phases`: what a change of phase costs beside what the engines take for it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def phases(
    roles: Annotated[int, typer.Option(help="Roles of the job, an even number.", min=2)] = 10,
    replicas: Annotated[int, typer.Option(help="Replicas of each.", min=1)] = 1,
    load_ms: Annotated[
        float, typer.Option(help="What an engine takes to give memory back, and to take it.", min=0)
    ] = 50.0,
    changes: Annotated[int, typer.Option(help="Changes a round.", min=1)] = 10,
    repeats: Annotated[int, typer.Option(help="Rounds.", min=1)] = 5,
    quick: Annotated[bool, typer.Option("--quick", help="Two rounds of two changes.")] = False,
    output: Annotated[Path, typer.Option(help="Folder for results.")] = Path("bench-results"),
) -> None:
    """Measure changes of phase: half of the roles go, the other half comes, on the same devices."""
    # What follows needs the packages of the extras `bench` and `serve`, which a command line that
    # only prints its help does not.
    from phalanx.bench.phases_change_measuring import ChangeWorkload, measure_changes
    from phalanx.errors import ConfigurationError

    if roles % 2:
        raise ConfigurationError(
            f"--roles {roles} must be even: half of them make way for the rest"
        )
    if quick:
        changes, repeats = 2, 2
    measure_changes(ChangeWorkload(roles, replicas, load_ms / 1e3, changes, repeats), output)
