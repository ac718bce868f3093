"""The demo's tables: step by step, and placement beside placement."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from rich.table import Table

from rl.comparing import Record
from rl.timeline import Timeline

_MIB = 1 << 20
CHANGES = {
    "rollout": "to rollout, which wakes",
    "genrm": "to genrm: rollout drains and sleeps, genrm wakes",
    "teacher": "to teacher: genrm drains and sleeps, teacher wakes",
    "train": "to train: teacher drains and sleeps",
}
"""What is done before a phase can begin, where devices are shared."""


def loss_table(
    seen: Mapping[str, Sequence[Record]], step_s: Mapping[str, Sequence[float]]
) -> Table:
    """A row a step."""
    table = Table(title="step by step", title_justify="left", title_style="bold")
    table.add_column("step", justify="right")
    for placement in seen:
        for what in ("loss", "reward", "took"):
            table.add_column(f"{placement}\n{what}", justify="right")
    for number in range(max((len(each) for each in seen.values()), default=0)):
        cells = [str(number + 1)]
        for placement, steps in seen.items():
            metrics = steps[number].metrics
            took = step_s[placement]
            cells += [
                f"{metrics['reverse_kl']:.4f}",
                f"{metrics['reward']:.2f}",
                f"{took[number]:.1f} s" if number < len(took) else "",
            ]
        table.add_row(*cells)
    return table


def placement_table(
    timelines: Mapping[str, Timeline], step_s: Mapping[str, Sequence[float]]
) -> Table:
    """A column a placement."""
    table = Table(title="split against defer", title_justify="left", title_style="bold")
    table.add_column("")
    for placement in timelines:
        table.add_column(placement, justify="right")
    for name, cells in _rows(timelines, step_s).items():
        table.add_row(name, *cells)
    return table


def placement_markdown(
    timelines: Mapping[str, Timeline], step_s: Mapping[str, Sequence[float]]
) -> str:
    """The same for a page."""
    lines = [["", *timelines], ["---", *("---:" for _ in timelines)]]
    lines += [[name, *cells] for name, cells in _rows(timelines, step_s).items()]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _rows(
    timelines: Mapping[str, Timeline], step_s: Mapping[str, Sequence[float]]
) -> Mapping[str, Sequence[str]]:
    rows: dict[str, list[str]] = defaultdict(list)
    for placement, timeline in timelines.items():
        took = step_s[placement][1:] or step_s[placement]
        rows["devices"].append(f"{timeline.num_devices} of {_mib(timeline.budget_bytes)}")
        rows["peak of each"].append(", ".join(map(_mib, timeline.peaks)))
        rows["a step, after the first"].append(_seconds(took))
        changes = defaultdict(list)
        for phase, seconds in timeline.switches():
            changes[phase].append(seconds)
        for phase, words in CHANGES.items():
            rows[words].append(_seconds(changes[phase]))
    return rows


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / _MIB:.0f} MiB"


def _seconds(values: Sequence[float]) -> str:
    return f"{sum(values) / len(values):.2f} s" if values else ""
