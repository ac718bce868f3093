"""`phalanx bench step`: the step engine's own time, on a model that computes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phalanx.bench.flags import numbers
from phalanx.checkpoints import checkpoint_dir


def step(
    rows: Annotated[str, typer.Option(help="Rows of a batch, by comma.")] = "1,8,32,128",
    steps: Annotated[int, typer.Option(help="Steps a round.", min=1)] = 500,
    repeats: Annotated[int, typer.Option(help="Rounds.", min=1)] = 5,
    model: Annotated[
        str,
        typer.Option(help="Whose decode step the own time is compared with; empty: of none."),
    ] = "smollm2-135m",
    output: Annotated[Path, typer.Option(help="Folder for results.")] = Path("bench-results"),
) -> None:
    """Measure what the step engine and its loop add to a forward, and where that goes."""
    counts = numbers(rows, "--rows")
    checkpoint = Path(checkpoint_dir(model)) if model else None

    # What follows loads torch, which a command line that only prints its help does not.
    from phalanx.bench.step_overhead import measure_steps

    measure_steps(counts, steps, repeats, checkpoint, output)
