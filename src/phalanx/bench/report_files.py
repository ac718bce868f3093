"""Writes a report: a table for the terminal and as Markdown, a plot, and the raw values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from phalanx.bench.results import Measure, Report, Summary
from phalanx.errors import MissingDependencyError

_FILE_WIDTH = 160
_LABEL_WIDTH = 28


def rows(report: Report) -> tuple[list[str], list[list[str]]]:
    """Header and rows: a column a system, then the first system's ratio to each other one that
    shares a measure with it.
    """
    names = list(report.systems)
    first = names[0]
    others = [name for name in names[1:] if _comparable(report, first, name)]
    header = ["", *names, *(f"{first} / {other}" for other in others)]
    body = []
    for measure in report.measures:
        cells = [_cell(report.summary(measure.key, name)) for name in names]
        ratios = [report.ratio(measure, first, other) for other in others]
        better = ["-" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
        body.append([f"{measure.label} [{measure.unit}]", *cells, *better])
    return header, body


def _comparable(report: Report, first: str, other: str) -> bool:
    return any(report.ratio(measure, first, other) is not None for measure in report.measures)


def print_table(report: Report, console: Console) -> None:
    """A column a system, and the goals that the report has."""
    first, *others = report.systems
    table = Table(
        title=f"{report.name}: median, half the spread between rounds; in brackets {first}'s ratio "
        "to it, above 1 is better",
        box=box.SIMPLE_HEAD,
    )
    table.add_column(min_width=_LABEL_WIDTH)
    for name in report.systems:
        table.add_column(name, justify="right")
    for measure in report.measures:
        cells = [_short(report.summary(measure.key, name)) for name in report.systems]
        for index, other in enumerate(others, 1):
            ratio = report.ratio(measure, first, other)
            if ratio is not None:
                cells[index] += f" ({ratio:.2f})"
        table.add_row(rf"{measure.label} \[{measure.unit}]", *cells)
    console.print(table)
    for goal in report.goals:
        verdict = "[green]met   [/green]" if goal.met else "[red]missed[/red]"
        console.print(f"{verdict} {goal.aim}: {goal.result}", highlight=False, soft_wrap=True)


def report_console() -> Console:
    """For progress and tables; wide where no terminal limits it."""
    console = Console()
    return console if console.is_terminal else Console(width=_FILE_WIDTH)


def write_report(report: Report, folder: Path) -> None:
    """`report.json`, `report.md` and `report.png` in `folder`, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    encoded = msgspec.json.format(msgspec.json.encode(report), indent=1)
    (folder / "report.json").write_bytes(encoded)
    (folder / "report.md").write_text(_markdown(report))
    _plot(report, folder / "report.png")


def deliver(report: Report, folder: Path, console: Console) -> None:
    """Write the files, show the table, and say where the files are."""
    write_report(report, folder)
    print_table(report, console)
    console.print(f"written to {folder}: report.md, report.png, report.json")


def _markdown(report: Report) -> str:
    header, body = rows(report)
    lines = [f"# {report.name}, {report.started}", ""]
    lines += [f"- {name}: {version}" for name, version in report.systems.items()]
    lines += [f"- {key}: {value}" for key, value in report.context.items()]
    lines += ["", "Median (lowest to highest) over the rounds; a ratio above 1 is better.", ""]
    lines += [_line(header), _line(["---"] * len(header)), *map(_line, body)]
    if report.goals:
        lines += ["", _line(["goal", "this run", ""]), _line(["---"] * 3)]
        lines += [
            _line([goal.aim, goal.result, "met" if goal.met else "missed"]) for goal in report.goals
        ]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cell(summary: Summary | None) -> str:
    if summary is None:
        return "-"
    if summary.count == 1:
        return _number(summary.median)
    return f"{_number(summary.median)} ({_number(summary.low)} to {_number(summary.high)})"


def _short(summary: Summary | None) -> str:
    if summary is None:
        return "-"
    if summary.count == 1 or summary.median == 0:
        return _number(summary.median)
    spread = (summary.high - summary.low) / 2 / summary.median
    return f"{_number(summary.median)} ±{spread:.0%}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.4g}"


def _plot(report: Report, path: Path) -> None:
    """One panel a plotted measure, one bar a system, whiskers from the lowest to the highest round."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError(
            "plots need matplotlib; install it with pip install 'phalanx[bench]'"
        ) from error
    shown = [measure for measure in report.measures if measure.plotted]
    columns = max(1, min(4, len(shown)))
    num_rows = max(1, -(-len(shown) // columns))
    figure = Figure(figsize=(3.2 * columns, 2.8 * num_rows), layout="constrained")
    for index, measure in enumerate(shown):
        axes = figure.add_subplot(num_rows, columns, index + 1)
        _bars(report, measure, axes)
    figure.suptitle(f"{report.name}, {report.started}")
    figure.savefig(path, dpi=120)


def _bars(report: Report, measure: Measure, axes: object) -> None:
    from matplotlib.axes import Axes

    assert isinstance(axes, Axes)
    for position, name in enumerate(report.systems):
        summary = report.summary(measure.key, name)
        if summary is None:
            continue
        spread = [[summary.median - summary.low], [summary.high - summary.median]]
        # A system keeps its colour in every panel, also where another has no bar.
        axes.bar(
            position, summary.median, yerr=spread, capsize=3, width=0.7, color=f"C{position % 10}"
        )
        axes.annotate(
            _number(summary.median), (position, summary.median), ha="center", va="bottom", size=7
        )
    axes.set_xticks(range(len(report.systems)), list(report.systems), rotation=20, size=7)
    arrow = "higher is better" if measure.more_is_better else "lower is better"
    axes.set_title(f"{measure.label}\n{measure.unit}, {arrow}", size=8)
    axes.tick_params(axis="y", labelsize=7)
    axes.margins(y=0.15)
