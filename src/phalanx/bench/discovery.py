"""`phalanx bench discovery`: what one change of a large role costs with many followers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def discovery(
    replicas: Annotated[int, typer.Option(help="Replicas of the role.", min=1)] = 1000,
    followers: Annotated[int, typer.Option(help="Clients that follow it.", min=1)] = 10_000,
    changes: Annotated[int, typer.Option(help="Changes a round.", min=1)] = 3,
    repeats: Annotated[int, typer.Option(help="Rounds.", min=1)] = 3,
    quick: Annotated[bool, typer.Option("--quick", help="A tenth of the followers.")] = False,
    output: Annotated[Path, typer.Option(help="Folder for results.")] = Path("bench-results"),
) -> None:
    """Measure a role's discovery in the gateway, with followers in memory instead of at sockets."""
    # What follows needs the packages of the extras `bench` and `serve`, which a command line that
    # only prints its help does not.
    from phalanx.bench.discovery_measuring import DiscoveryWorkload, measure_discovery

    num_followers = max(1, followers // 10) if quick else followers
    workload = DiscoveryWorkload(replicas, num_followers, changes, repeats)
    measure_discovery(workload, output)
