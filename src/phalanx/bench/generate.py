"""`phalanx bench generate`: a language model on this machine's CPU, ours and others' in turn."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phalanx.bench.flags import chosen, interpreters, numbers
from phalanx.bench.systems import OURS, PEERS, find_python
from phalanx.bench.workload import PARTS, SHARED_PREFIX, Workload
from phalanx.checkpoints import checkpoint_dir
from phalanx.errors import ConfigurationError

_OURS = "phalanx,phalanx-server"
_OURS_SHARING = "phalanx-prefix,phalanx"


def generate(  # noqa: PLR0913 - one parameter a flag
    against: Annotated[str, typer.Option(help=f"Peers, by comma: {', '.join(PEERS)}.")] = "",
    ours: Annotated[
        str | None,
        typer.Option(
            help=f"Our own variants, by comma: {', '.join(OURS)}. [{_OURS}; with the part "
            f"{SHARED_PREFIX} alone {_OURS_SHARING}]"
        ),
    ] = None,
    only: Annotated[
        str, typer.Option(help=f"Parts to run, by comma: {', '.join(PARTS)}.")
    ] = ",".join(PARTS[:-1]),
    model: Annotated[
        str, typer.Option(help="A Hugging Face directory or a known name.")
    ] = "smollm2-135m",
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    threads: Annotated[int, typer.Option(help="Threads that compute.", min=1)] = 2,
    repeats: Annotated[int, typer.Option(help="Rounds.", min=1)] = 3,
    prompts: Annotated[int, typer.Option(help="Requests a phase.", min=1)] = 32,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens a prompt.", min=1)] = 64,
    new_tokens: Annotated[int, typer.Option(help="Tokens an answer.", min=1)] = 64,
    concurrency: Annotated[str, typer.Option(help="Requests in flight, by comma.")] = "1,8,32",
    kv_tokens: Annotated[int, typer.Option(help="KV capacity of each.", min=1024)] = 32768,
    peer_python: Annotated[
        list[str] | None,
        typer.Option(help="NAME=PATH: the Python interpreter that a peer is installed for."),
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder for results.")] = Path("bench-results"),
) -> None:
    """Measure generation, prefill and scoring on a CPU; compare with other engines."""
    parts = tuple(chosen(only, dict(zip(PARTS, PARTS, strict=True)), "--only"))
    if ours is None:
        ours = _OURS_SHARING if parts == (SHARED_PREFIX,) else _OURS
    systems = [*chosen(ours, OURS, "--ours"), *chosen(against, PEERS, "--against")]
    if not systems:
        raise ConfigurationError("nothing to measure: --ours and --against are both empty")
    given = interpreters(peer_python or [], PEERS)
    pythons = {system.name: find_python(system, given) for system in systems}
    in_flight = numbers(concurrency, "--concurrency")
    workload = Workload(prompts, prompt_tokens, new_tokens, in_flight, parts)

    # What follows loads torch, which a command line that only prints its help does not.
    from phalanx.bench.generation import Setting, measure

    setting = Setting(
        checkpoint_dir(model),
        dtype,
        threads,
        kv_tokens,
        workload.max_length,
        workload.most_in_flight,
    )
    measure([(one, pythons[one.name]) for one in systems], setting, workload, repeats, output)
