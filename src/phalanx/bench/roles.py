"""`phalanx bench roles`: how long a role takes to fall asleep and to wake, and what memory it holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phalanx.checkpoints import checkpoint_dir


def roles(  # noqa: PLR0913 - one parameter a flag
    model: Annotated[
        str, typer.Option(help="A Hugging Face directory or a known name.")
    ] = "smollm2-135m",
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    threads: Annotated[int, typer.Option(help="Threads that compute.", min=1)] = 2,
    kv_tokens: Annotated[int, typer.Option(help="KV capacity of each engine.", min=1024)] = 8192,
    requests: Annotated[int, typer.Option(help="Requests that run as it is drained.", min=1)] = 8,
    new_tokens: Annotated[int, typer.Option(help="Tokens an answer.", min=2)] = 64,
    repeats: Annotated[int, typer.Option(help="Rounds.", min=1)] = 5,
    quick: Annotated[bool, typer.Option("--quick", help="Two rounds, a quarter of both.")] = False,
    output: Annotated[Path, typer.Option(help="Folder for results.")] = Path("bench-results"),
) -> None:
    """Measure drain, sleep, wake and weight updates of real engines under their manager."""
    # What follows needs the packages of the extra `bench`, which a command line that only prints
    # its help does not.
    from phalanx.bench.roles_job import EngineSetting
    from phalanx.bench.roles_measuring import RolesWorkload, measure_roles

    if quick:
        requests, new_tokens, repeats = max(1, requests // 4), max(2, new_tokens // 4), 2
    setting = EngineSetting(checkpoint_dir(model), dtype, threads, kv_tokens)
    measure_roles(setting, RolesWorkload(requests, new_tokens, repeats), output)
