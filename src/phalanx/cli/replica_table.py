"""The load of a server's replicas as a table for a terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from phalanx.cli.replica_rates import Load, Rates

COLUMNS = (
    "replica",
    "done/s",
    "failed",
    "in flight",
    "queue ms",
    "exec ms",
    "busy %",
    "GPU %",
    "MB/s",
    "largest",
)
NOTHING = "-"


def replica_table(title: str, load: Load, absent: str | None = None) -> RenderableType:
    """One row a replica, and one for all; `absent` says why the numbers are old."""
    over = "since its start" if load.interval_s is None else f"over {load.interval_s:.1f} s"
    style = "" if absent is None else "dim"
    table = Table(box=None, pad_edge=False, collapse_padding=True, style=style)
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "replica" else "right", no_wrap=True)
    for one in load.replicas:
        table.add_row(*_cells(one), style=style)
    table.add_row(*_cells(load.total), style=style or "bold")
    lines: list[RenderableType] = [Text(f"{title}, {over}", style="bold"), table]
    if absent is not None:
        lines.append(Text(absent, style="bold red"))
    return Group(*lines)


def _cells(rates: Rates) -> tuple[str, ...]:
    return (
        rates.name,
        f"{rates.completed_per_s:.2f}",
        str(rates.num_failed),
        str(rates.num_in_flight),
        _milliseconds(rates.queue_s),
        _milliseconds(rates.execution_s),
        _percent(rates.busy),
        _percent(rates.utilization),
        f"{rates.payload_bytes_per_s / 1e6:.2f}",
        _size(rates.max_request_bytes),
    )


def _milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return NOTHING
    return f"{seconds * 1000:.2f}" if seconds < 0.01 else f"{seconds * 1000:.1f}"


def _percent(fraction: float | None) -> str:
    return NOTHING if fraction is None else f"{fraction * 100:.1f}"


def _size(num_bytes: int) -> str:
    """In decimal units; nothing where no payload went to another process."""
    if num_bytes == 0:
        return NOTHING
    amount = float(num_bytes)
    for unit in ("B", "kB", "MB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} GB"
