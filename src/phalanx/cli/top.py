"""`phalanx top`: the load of a model server's replicas, live."""

from __future__ import annotations

from typing import Annotated

import typer

from phalanx.errors import ConfigurationError

MIN_SECONDS = 0.05


def top(
    url: Annotated[str, typer.Argument(help="Where the server listens.")] = "127.0.0.1:30000",
    interval: Annotated[float, typer.Option(help="Seconds between two looks.")] = 2.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print the load since the start, and end.")
    ] = False,
    api_key: Annotated[str | None, typer.Option(help="The server's bearer token.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for an answer.")] = 5.0,
) -> None:
    """Watch the replicas of a running `phalanx serve`, until Ctrl-C.

    Of each: completed requests a second, failed ones, those in flight; the mean time in the queue
    and in execution; the part of the time with work, and of the GPU's; payload to and from worker
    processes, and its largest request.
    """
    from rich.console import Console

    from phalanx.cli.server_snapshot import base_url
    from phalanx.cli.top_view import TopView

    for name, seconds in (("--interval", interval), ("--timeout", timeout)):
        if not MIN_SECONDS <= seconds < float("inf"):
            raise ConfigurationError(f"{name} {seconds:g} must be at least {MIN_SECONDS:g} s")
    view = TopView(base_url(url), api_key, timeout)
    if once:
        Console().print(view.once())
    else:
        view.watch(Console(), interval)
