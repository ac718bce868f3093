"""An engine out of a server's file, for programs that want the model without the server."""

from __future__ import annotations

from pathlib import Path

from phalanx.cli.serve import load_config
from phalanx.cli.serve_plan import plan
from phalanx.engine.engine import Engine


def build_engine(path: str | Path) -> Engine:
    """The engine that `phalanx serve PATH` would run; close it.

    Raises what the command would print.
    """
    made = plan(*load_config(Path(path), {}), prepare=True)
    return Engine(made.engine, deployment=made.placement.with_ports())
